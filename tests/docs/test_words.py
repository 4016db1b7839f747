"""Documents stay short, and what refers to a decision finds it.

Method: the files are read as text.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ckpt", "sharding", "storage")
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
ENTRY = re.compile(r"^\*\*([A-Z]\d+) [^*]+\.\*\*", re.M)
REPLACED = re.compile(r"^\| (X\d+) \| superseded by ([A-Z]\d+) \|", re.M)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def decisions() -> list[str]:
    """The numbers of all entries that hold."""
    return ENTRY.findall(text_of("DECISIONS.md"))


def test_decisions_are_indexed_and_have_a_state() -> None:
    text = text_of("DECISIONS.md")
    index = text.partition("## Index")[2].partition("\n## ")[0]
    listed = re.findall(r"(?:[|,]) ([A-Z]\d+) ", index)
    assert len(set(decisions())) == len(re.findall(r"^\*\*", text, re.M)) > 100
    assert [number for number in listed if not number.startswith("X")] == decisions()
    replaced = dict(REPLACED.findall(text))
    assert replaced and set(replaced.values()) <= set(decisions())


def test_references_name_decisions_that_are_there() -> None:
    named = [
        (path.relative_to(ROOT).as_posix(), number)
        for folder in ("ckpt", "storage", "sharding", "docs", "tests")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
        for number in re.findall(r"DECISIONS\.md ([A-Z]\d+)", path.read_text(encoding="utf-8"))
    ]
    assert named
    assert not [where for where in named if where[1] not in decisions()]


def test_each_promise_has_its_row_of_tests() -> None:
    promises = re.findall(r"^- \*\*(.+?)\*\*", text_of("docs/guarantees.md"), re.M | re.S)
    page = text_of("docs/guarantee_tests.md").partition("\n## Stores")[0]
    rows = re.findall(r"^\| ([^|]+?\.) \| (.*) \|$", page, re.M)
    assert [" ".join(promise.split()) for promise in promises] == [promise for promise, _ in rows]
    assert all("tests/" in tests for _, tests in rows)


def test_every_error_has_a_section_with_a_text_of_the_code() -> None:
    from docs.troubles import PAGE, TROUBLES, classes, page, texts_of_the_code

    assert page() == PAGE.read_text(encoding="utf-8"), "run: python docs/troubles.py"
    assert TROUBLES.keys() == {error.__name__ for error in classes()}
    texts = texts_of_the_code()
    assert not [name for name, one in TROUBLES.items() if one.text not in texts]


# Words of a page at most, as `wc -w` counts them: what is true now, rounded up; the aim where it
# is lower. A page that is not listed may have GUIDE_MAX.
GUIDE_MAX = 1000
WORDS_MAX = {
    "README.md": 900,
    "CHANGELOG.md": 1200,
    "DECISIONS.md": 5200,
    "ARCHITECTURE.md": 3700,
    "FORMAT.md": 9800,
    "docs/cli.md": 2250,  # made from the parser
    "docs/compatibility.md": 700,  # made by tests.wild
    "docs/engine.md": 1000,
    "docs/engine_differences.md": 1100,
    "docs/guarantee_tests.md": 2300,
    "docs/guarantees.md": 1200,
    "docs/limits.md": 800,
    "docs/performance.md": 1300,
    "docs/troubleshooting.md": 1500,  # made from the errors
}
ALL_WORDS_MAX = 50_000


def pages() -> dict[str, int]:
    """The words of each page, the diary in docs/history left out."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "history"}
    return {name: len(text_of(name).split()) for name in sorted(names)}


def test_pages_keep_their_budget_of_words() -> None:
    words = pages()
    over = {name: count for name, count in words.items() if count > WORDS_MAX.get(name, GUIDE_MAX)}
    assert not over
    assert sum(words.values()) <= ALL_WORDS_MAX
    assert WORDS_MAX.keys() <= words.keys()


def navigation() -> dict[str, str]:
    """The name of each page in the navigation, by its file."""
    nav = text_of("mkdocs.yml").partition("\nnav:\n")[2]
    titles = re.findall(r'^ +- "?(.+?)"?: ([\w/]+\.md)$', nav, re.M)
    return {file: title for title, file in titles}


def heading(file: str) -> str:
    """The heading of a page of the site, also of one that shows a file of the top folder."""
    text = text_of(f"docs/{file}")
    shown = re.fullmatch(r"\[([\w./]+)\]\(.*\)\s*", text)
    return re.findall(r"^# (.+)$", text_of(shown[1]) if shown else text, re.M)[0]


def test_a_page_has_one_name_in_navigation_and_heading() -> None:
    names = navigation()
    assert names.keys() == {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "history"
    }
    differing = {file: (name, heading(file)) for file, name in names.items() if name != "Home"}
    assert not {file: both for file, both in differing.items() if both[0] != both[1]}


def test_the_home_page_links_pages_by_their_names() -> None:
    names = navigation()
    table = [line for line in text_of("docs/index.md").splitlines() if line.startswith("|")]
    links = re.findall(r"\[([^\]]+)\]\(([\w/]+\.md)\)", "\n".join(table))
    assert len(links) > 15
    assert not [(text, file) for text, file in links if names[file] != text]


# What gives a translation away, see the guides for how it is said instead.
TRANSLATED = re.compile(
    r"\b(whoever|beside|told|passed over|goes on|go on|as they lie|its like|nothing but"
    r"|is there already|what is gone|say their|say --)\b",
    re.I,
)


def test_documents_speak_plain_english() -> None:
    """Verbatim tables of names and results, and lines of code, are left out."""
    lines = [
        (name, line.strip())
        for name in pages()
        if name not in ("docs/guarantee_tests.md", "docs/compatibility.md", "docs/cli.md")
        for line in re.sub(r"```.*?```", "", text_of(name), flags=re.S).splitlines()
    ]
    assert not [(name, line) for name, line in lines if TRANSLATED.search(line)]


def texts_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages, by line; names in backticks or of attributes left out."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXTS:
            yield token.start[0], re.sub(r"`[^`\n]*`|\{[^{}]*\}|[\w.]+=", "", token.string)


def translated(path: str, source: str) -> list[str]:
    """Phrases of a file that give a translation away. A word alone is a name, not a sentence."""
    return [
        f"{path}:{line}: {hit[0]}"
        for line, text in texts_of_code(source)
        for hit in TRANSLATED.finditer(text)
        if " " in text
    ]


def test_docstrings_comments_and_messages_speak_plain_english() -> None:
    files = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(files) > 300
    problems = [
        problem
        for path in files
        for problem in translated(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_planted_phrases_are_found() -> None:
    source = '''
def f(beside):
    """What lies beside it; `beside` is a name."""
    raise ValueError(f"{beside} is there already")  # whoever
'''
    assert translated("x.py", source) == [
        "x.py:3: beside",
        "x.py:4: is there already",
        "x.py:4: whoever",
    ]
