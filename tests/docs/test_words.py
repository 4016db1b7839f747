"""Documents stay short, and what refers to a decision finds it.

Method: the files are read as text.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^\*\*([A-Z]\d+) [^*]+\*\*\s\((holds|superseded by [A-Z]\d+)\)", re.M)
REPLACED = re.compile(r"^\| (X\d+) \| superseded by ([A-Z]\d+) \|", re.M)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def decisions() -> list[str]:
    """The numbers of all entries that hold."""
    return [number for number, _ in ENTRY.findall(text_of("DECISIONS.md"))]


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
