"""The tree of a world: which rank passes messages on to which others, by arithmetic alone."""

from __future__ import annotations

import itertools
from typing import NamedTuple

CHILDREN_MAX = 32


class Family(NamedTuple):
    """The place of one rank in the tree: its parent, none for rank 0, and the ranks below it.

    `blocks` are one range of ranks per child, in rank order; the first of a range is the child.
    """

    parent: int | None
    blocks: tuple[range, ...]

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks right below this one, ascending."""
        return tuple(block.start for block in self.blocks)


def family(rank: int, size: int) -> Family:
    """The place of `rank` among `size`. Depth is at most 1 + log32(size), rounded up.

    Below every rank are consecutive ones, so what a subtree gathers is in rank order, and ranks of
    one machine, which torchrun numbers one after the other, are mostly neighbours in the tree.
    """
    parent, block = None, range(size)
    while True:
        below = _cut(block)
        if block.start == rank:
            return Family(parent, below)
        parent = block.start
        block = next(one for one in below if rank in one)


def _cut(block: range) -> tuple[range, ...]:
    """The ranks below the first of a block, in at most CHILDREN_MAX ranges of nearly one length."""
    if len(block) == 1:
        return ()
    # Nearly one length each: no child passes on much more than another.
    count = min(CHILDREN_MAX, len(block) - 1)
    edges = [block.start + 1 + (len(block) - 1) * i // count for i in range(count + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(edges))
