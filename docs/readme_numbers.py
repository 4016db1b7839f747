"""Fills the numbers of README.md from the tables of docs/performance.md, their only source.

    python docs/readme_numbers.py            rewrites README.md; tests/test_house.py compares

A number of the README is a line here: the row of a table, by its first cells, and the text around
the cells of that row. {1} is the second cell, {n1} the first number in it.
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


SAVES, TOOLS, ENGINE = "Saves and loads", "Tools", "The engine"
BLOCKED = "time that training is blocked by a background save"

# Filled between `<!-- NAME -->` and `<!-- /NAME -->` of README.md.
BLOCKS = {
    "three numbers": (
        Line(
            SAVES,
            BLOCKED,
            "- A background save holds up the training for **{n2}** of the time that one copy of "
            "the state in memory takes (FSDP2, AdamW, 2 ranks).",
        ),
        Line(
            SAVES,
            "saving 4,000 tensors of 1 KiB",
            "- 4,000 tensors of 1 KiB are saved **{n2} times** as fast as with torch's DCP.",
        ),
        Line(
            SAVES,
            "save and load of 128 MiB at moto, with 10 % `SlowDown`",
            "- A save to an S3 server that refuses every tenth request and swallows a connection "
            "takes **{n2}** times as long as an undisturbed one.",
        ),
    ),
    "how fast": (
        *(
            Line(SAVES, row, "| {0} | {1} | {2} |")
            for row in (
                BLOCKED,
                "CPU seconds of a background save",
                "slow-down of steps while a save is persisted",
                "saving 1 GiB of FSDP2 and AdamW",
                "saving 4,000 tensors of 1 KiB",
                "loading them",
                "upload of 512 MiB to S3",
                "download, speed",
                "bytes written per save, 95 % frozen",
            )
        ),
        Line(
            ENGINE,
            "`FullyShardedDataParallel` | torch's",
            "| a step of the engine, {0} | {1} | time {2}, CPU seconds {3}, peak memory {4} |",
        ),
        Line(
            ENGINE,
            "`fully_shard` | torch's",
            "| a step of the engine, {0} | {1} | time {2}, CPU seconds {3}, peak memory {4} |",
        ),
        Line(
            TOOLS,
            "`dcp_to_torch_save`",
            "| `ckpt export` of a DCP checkpoint of 3 GiB to one file | {0} | {1} as fast, CPU "
            "seconds {2} fewer, memory {3} |",
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
        head = "| what | against | ratio |\n| --- | --- | --- |\n" if text[0] == "|" else ""
        block = f"\n{head}{text}\n\n"
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
    numbers = {}
    for index, cell in enumerate(cells):
        number = re.search(r"\d+(?:\.\d+)?", cell)
        numbers[f"n{index}"] = number[0] if number else ""
    return line.text.format(*cells, **numbers)


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
