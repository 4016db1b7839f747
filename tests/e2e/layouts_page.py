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

What a layout of ranks saves, every other one loads, bit for bit: after the load, every rank has
exactly its part of the tensors, of AdamW's moments and counts, and of the options of its groups.
`python -m tests.e2e.layouts_page` tries every pair and writes this page; a pair that differs would
be listed. `make test` tries some of the pairs, drawn by chance, `make soak` all of them.

## 12 layouts of 8 ranks

`pp` are pipeline stages, `ddp` replicas, `fsdp` shards, `hsdp` replicas of shards, `tp` tensor
parallel ranks, `cp` context parallel ranks, which hold replicas, `ep` ranks with experts of their
own, out of stacks that the other shards cut along another dim. The model has 8 layers, each with a
weight of 13 x 10, a bias of 7, a stack of experts of 8 x 3 x 5 and a plain tensor, and a plain
tensor that the first and the last stage tie: few cuts are even. Ranks are threads and the store is
memory; torch's own engines over real processes are in `tests/e2e/test_stages.py`,
`test_unlike_ranks.py`, `test_pipelining.py` and `test_matrix.py`.

"""

STACKS = """
## Stacked experts, and one tensor for each

Four ranks; 2 layers of 4 experts, each with tensors of 3 x 5, of 3 and of one element, loaded by
the rule `experts.{}` to `experts` or back (see [pipeline stages and experts](howto/pipeline.md)).
A run of elements ends in the middle of an expert.

"""


class Pairs(NamedTuple):
    """Layouts that save, layouts that load, and what came of a pair of them."""

    saved: Sequence[str]
    loaded: Sequence[str]
    verdict: Callable[[str, str], str]

    def text(self) -> str:
        """As Markdown: how many pairs are equal, and what came of each other one."""
        tried = {(one, two): self.verdict(one, two) for one in self.saved for two in self.loaded}
        differing = {pair: text for pair, text in tried.items() if text != EQUAL}
        rows = "".join(f"- {one} -> {two}: {text}\n" for (one, two), text in differing.items())
        head = f"**{len(tried) - len(differing)} of {len(tried)} pairs are equal.**"
        lists = f"Saved by {'; '.join(self.saved)}."
        if self.loaded != self.saved:
            lists += f"\nLoaded by {'; '.join(self.loaded)}."
        return f"{head}\n{lists}\n" + (f"\n{rows}" if rows else "")


def page(of_layouts: Callable[[str, str], str], of_stacks: Callable[[str, str], str]) -> str:
    """The whole page; the functions say what came of a pair."""
    stacked = [name for name, layout in stacks.LAYOUTS.items() if layout.is_stacked]
    sliced = [name for name, layout in stacks.LAYOUTS.items() if not layout.is_stacked]
    layouts = list(pairs.LAYOUTS)
    tables = [
        Pairs(layouts, layouts, of_layouts),
        Pairs(stacked, sliced, of_stacks),
        Pairs(sliced, stacked, of_stacks),
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
