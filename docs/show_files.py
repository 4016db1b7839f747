"""A hook of mkdocs: a line that is nothing but a link to a file shows that file on the page.

On a code host the line is a link, which a line for mkdocs alone would not be.
"""

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
