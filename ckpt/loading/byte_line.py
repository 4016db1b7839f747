"""The byte line: all data files of a checkpoint, one after the other, in the order of the manifest.

A place on it says file and offset in one number that all ranks share. What a rank needs are runs of
whole blocks; blocks that follow each other in a file follow each other here, whatever their tensors
are called, so a few runs describe thousands of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class NeededBlocks(NamedTuple):
    """Blocks that one rank needs, ascending on the byte line; columns of one length.

    Block i is bytes `start[i]` to `stop[i]` of the line, and block `number[i]` of chunk `chunk[i]`.
    """

    start: Ints
    stop: Ints
    chunk: Ints
    number: Ints

    def runs(self) -> Ints:
        """The blocks as ascending disjoint runs of the line, an (n, 2) array."""
        return joined(np.stack([self.start, self.stop], axis=1))

    def only(self, rows: Ints) -> NeededBlocks:
        """Those of some rows."""
        return NeededBlocks(self.start[rows], self.stop[rows], self.chunk[rows], self.number[rows])

    def within(self, runs: Ints) -> Ints:
        """The rows of the blocks that have bytes in `runs`, which are ascending and disjoint."""
        first = np.searchsorted(self.stop, runs[:, 0], side="right")
        last = np.searchsorted(self.start, runs[:, 1], side="left")
        # Two runs may meet in one block.
        first[1:] = np.maximum(first[1:], last[:-1])
        return expanded(first, last)


def file_starts(file_nbytes: Sequence[int] | npt.NDArray[np.integer]) -> Ints:
    """Where each file starts on the byte line, and at the end the length of the line."""
    ends = np.cumsum(np.asarray(file_nbytes, dtype=np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])


def joined(runs: Ints) -> Ints:
    """Ascending disjoint runs, those that touch made one."""
    if len(runs) == 0:
        return runs
    is_first = np.append(True, runs[1:, 0] != runs[:-1, 1])
    is_last = np.append(is_first[1:], True)
    return np.stack([runs[is_first, 0], runs[is_last, 1]], axis=1)


def united(runs: Ints, gap_max: int = 0) -> Ints:
    """Runs in any order, some of which may overlap, as ascending disjoint ones; what lies between
    two of them is taken in, if it is at most `gap_max` bytes.
    """
    if len(runs) == 0:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    stops = np.maximum.accumulate(runs[:, 1])
    first = np.flatnonzero(np.append(True, runs[1:, 0] > stops[:-1] + gap_max))
    last = np.append(first[1:], len(runs)) - 1
    return np.stack([runs[first, 0], stops[last]], axis=1)


def pieces_of(runs: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """`runs`, cut at the edges of the intervals from `starts[i]` to `stops[i]`: what lies in them,
    as ascending runs, and for each of these the number of its interval. All ascending and disjoint.

    Runs that are intervals come back as they are.
    """
    first = np.searchsorted(stops, runs[:, 0], side="right")
    last = np.maximum(np.searchsorted(starts, runs[:, 1], side="left"), first)
    row = expanded(first, last)
    run = runs[np.repeat(np.arange(len(runs)), last - first)]
    low, high = np.maximum(run[:, 0], starts[row]), np.minimum(run[:, 1], stops[row])
    return np.stack([low, high], axis=1), row


def expanded(first: npt.NDArray[np.integer], last: npt.NDArray[np.integer]) -> Ints:
    """All integers of the ranges `first[i]` to `last[i]`, one range after the other."""
    sizes = last - first
    skipped = np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers: npt.NDArray[np.intp] = np.arange(int(sizes.sum())) - skipped + np.repeat(first, sizes)
    return numbers


def length(runs: Ints) -> int:
    """The bytes of `runs`."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def without(runs: Ints, taken: Ints) -> Ints:
    """What is left of `runs` without `taken`; both ascending and disjoint, `taken` inside `runs`.

    Nothing taken leaves `runs` as they are.
    """
    if len(taken) == 0:
        return runs
    # Between the ends of both, in order, what is left begins where neither has begun to be taken.
    edges = np.concatenate([runs.reshape(-1), taken.reshape(-1)])
    edges.sort(kind="stable")
    pairs = edges.reshape(-1, 2)
    return joined(pairs[pairs[:, 0] < pairs[:, 1]])


def requests(blocks: NeededBlocks, files: Ints, nbytes_max: int, gap_max: int) -> list[range]:
    """The rows of `blocks` that one read fetches, read by read: as few reads as there can be.

    A read lies in one file, passes over gaps of at most `gap_max` bytes, and is at most
    `nbytes_max` long, or one block. `files` is `file_starts` of the line.
    """
    start, stop = blocks.start, blocks.stop
    file = np.searchsorted(files, start, side="right")
    is_cut = (start[1:] - stop[:-1] > gap_max) | (file[1:] != file[:-1])
    edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(start)]
    reads: list[range] = []
    for first, end in pairwise(edges):
        while first < end:
            last = int(np.searchsorted(stop, start[first] + nbytes_max, side="right"))
            last = min(max(last, first + 1), end)
            reads.append(range(first, last))
            first = last
    return reads
