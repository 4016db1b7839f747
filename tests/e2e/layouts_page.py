"""Tries every pair of layouts and writes what came of it into docs/layouts.md.

python -m tests.e2e.layouts_page
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tests.e2e.test_pairs_of_layouts as pairs
import tests.e2e.test_stacks as stacks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
EQUAL = "="

HEAD = """\
# Layouts that load into each other

What a layout of ranks saves, every other one loads, bit for bit. This page is written by
`python -m tests.e2e.layouts_page`, which tries every pair, and not by hand; `make test` tries
some of the pairs at each run, drawn by chance, and `make soak` all of them.

`=` says that every rank had, after the load, exactly its part of the tensors, of AdamW's moments
and counts, and of the options of its groups. Anything else would stand there in words.

## 12 layouts of 8 ranks

A row is what saved, a column what loaded. `pp` are pipeline stages, `ddp` replicas, `fsdp`
shards, `hsdp` replicas of shards, `tp` tensor parallel ranks, `cp` context parallel ranks, which
hold replicas, `ep` ranks that have experts of their own, out of stacks that the rest of the
shards cut along another dim. A model of 8 layers, each with a weight of 13 x 10, a bias of 7, a
stack of experts of 8 x 3 x 5 and a plain tensor, and one plain tensor that the first and the last
stage tie: few cuts are even. Each rank says which slices it holds, as engines do; what is plain,
it does not. Ranks are threads and the store is memory, so this is about layouts alone: torch's
own engines over real processes are in `tests/e2e/test_stages.py`, `test_unlike_ranks.py`,
`test_pipelining.py` and `test_matrix.py`.

"""

STACKS = """
## Stacked experts, and one tensor for each

Four ranks; 2 layers of 4 experts, each with tensors of 3 x 5, of 3 and of one element. What one
row has as stacks the columns have as a tensor for each expert, and the other way round, loaded by
the rule `experts.{}` to `experts` or back (see [pipeline stages and experts](howto/pipeline.md)).
A run of elements ends in the middle of an expert.

"""


class Table(NamedTuple):
    """Rows and columns of a table, and what came of a pair of them."""

    rows: Sequence[str]
    columns: Sequence[str]
    verdict: Callable[[str, str], str]

    def text(self) -> str:
        """As Markdown."""
        lines = [
            f"| saved by | {' | '.join(self.columns)} |",
            f"| --- |{' --- |' * len(self.columns)}",
        ]
        for row in self.rows:
            cells = [self.verdict(row, column) for column in self.columns]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        return "\n".join([*lines, ""])


def page(of_layouts: Callable[[str, str], str], of_stacks: Callable[[str, str], str]) -> str:
    """The whole page; the functions say what came of a pair."""
    stacked = [name for name, layout in stacks.LAYOUTS.items() if layout.is_stacked]
    sliced = [name for name, layout in stacks.LAYOUTS.items() if not layout.is_stacked]
    layouts = list(pairs.LAYOUTS)
    tables = [
        Table(layouts, layouts, of_layouts),
        Table(stacked, sliced, of_stacks),
        Table(sliced, stacked, of_stacks),
    ]
    texts = [table.text() for table in tables]
    return f"{HEAD}{texts[0]}{STACKS}{texts[1]}\n{texts[2]}"


def tried(pair: Callable[[str, str], None]) -> Callable[[str, str], str]:
    """What comes of a pair, in a cell of a table."""

    def verdict(source: str, target: str) -> str:
        try:
            pair(source, target)
        except Exception as error:
            print(f"{source} -> {target}: {error}", file=sys.stderr)
            return (str(error).splitlines() or [type(error).__name__])[0].replace("|", "/")
        return EQUAL

    return verdict


def main() -> None:
    """Try all pairs and write the page."""
    text = page(
        tried(pairs.test_what_a_layout_saved_every_layout_loads),
        tried(stacks.test_stacks_and_slices_load_into_each_other),
    )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
