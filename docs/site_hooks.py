"""Hooks of mkdocs. A line that is only a link to a file shows that file on the page: on a code host
the line is a link, which a line for mkdocs alone would not be. Hits of the search say their page,
"The engine - Limits", "ckpt.Checkpointer.close", and the text of an error can be searched for.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"^\[([\w./]+)\]\((?:\.\./)+\1\)$", re.M)
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page, with the files in the place of their links."""
    return LINE.sub(lambda line: shown(ROOT / line[1]), markdown)


def shown(file: Path) -> str:
    """A document as it is, a program as a block of code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text.replace("](docs/", "](")  # it is shown from there
    return f"```{LANGUAGES[file.suffix]}\n{text}```"


SEARCHES = "index.search(query)"


def on_post_build(config: Any, **_: Any) -> None:
    """Give the entries of the search titles that can be understood alone, and take words only: lunr
    takes "model.weight: ..." for a search in a field of that name, and finds nothing.
    """
    worker = Path(config["site_dir"], "search", "worker.js")
    script = worker.read_text(encoding="utf-8")
    if SEARCHES not in script:
        raise ValueError(f"{worker} searches in another way now: no {SEARCHES}")
    words_only = SEARCHES.replace("query", 'query.replace(/[:~^*+-]/g, " ")')
    worker.write_text(script.replace(SEARCHES, words_only), encoding="utf-8")
    path = Path(config["site_dir"], "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    pages = {one["location"]: one["title"] for one in index["docs"] if "#" not in one["location"]}
    for one in index["docs"]:
        page, _, anchor = one["location"].partition("#")
        if anchor and page.startswith("api/") and "." in anchor:
            one["title"] = anchor
        elif one["title"] != pages[page]:
            one["title"] = f"{one['title']} - {pages[page]}"
    path.write_text(json.dumps(index), encoding="utf-8")
