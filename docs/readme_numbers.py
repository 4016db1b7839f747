"""Fills the numbers of README.md from the tables of docs/performance.md, their only source.

    python docs/readme_numbers.py            rewrites README.md; tests/test_house.py compares

A number of the README is a line here: the row of a table, by its first cells, and the text around
the cells of that row: {1} is the second cell.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "docs/performance.md"


class Line(NamedTuple):
    """`row` is how the row begins, as it is written below the heading `section`."""

    section: str
    row: str
    text: str


SAVES, TOOLS = "Saves and loads", "Tools"

# Filled between `<!-- NAME -->` and `<!-- /NAME -->` of README.md.
BLOCKS = {
    "three numbers": (
        Line(
            SAVES,
            "training blocked by a background save",
            "- A background save of 0.25 GiB stops training for **{1}**. {2}.",
        ),
        Line(
            SAVES,
            "save 4,000 tensors",
            "- Saving 4,000 tensors of 1 KiB takes **{1}**. {2}.",
        ),
        Line(
            SAVES,
            "load 4,000 tensors",
            "- Loading them takes **{1}**. {2}.",
        ),
        Line(
            TOOLS,
            "`dcp_to_torch_save`",
            "- `ckpt export` of 3 GiB saved by DCP is **{1}** as fast as {0}; memory {3}.",
        ),
    ),
}


def filled(readme: str, performance: str) -> str:
    """`readme` with its numbers from `performance`. Raises ValueError for a row or a place that is
    not there.
    """
    for name, lines in BLOCKS.items():
        text = "\n".join(_line(line, performance) for line in lines)
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if len(re.findall(pattern, readme, re.S)) != 1:
            raise ValueError(f"README.md has no place <!-- {name} --> ... <!-- /{name} -->")
        block = f"\n{text}\n\n"
        readme = re.sub(
            pattern, lambda match, block=block: match[1] + block + match[2], readme, flags=re.S
        )
    return readme


def _line(line: Line, performance: str) -> str:
    section = performance.partition(f"\n## {line.section}\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith(f"| {line.row}")]
    if len(rows) != 1:
        raise ValueError(
            f"{SOURCE}: {len(rows)} rows below {line.section!r} begin with {line.row!r}; "
            f"{Path(__file__).name} must name one"
        )
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    return line.text.format(*cells)


def main() -> int:
    """Rewrite README.md; with --check, say only whether it would change."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    new = filled(readme, (ROOT / SOURCE).read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        return int(new != readme)
    (ROOT / "README.md").write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
