"""Blocks that several ranks need: which of them reads each, and who passes it on to whom.

Pure arithmetic on the byte line. Ranks that need the same runs form a group, and all of a group
know all of its runs, so each of them works out alone what the others do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from ckpt.loading.byte_line import (
    Ints,
    NeededBlocks,
    joined,
    length,
    pieces_of,
    united,
    without,
)

MIB = 1 << 20


class Group(NamedTuple):
    """Runs of the byte line, ascending and disjoint, that exactly `ranks` need; these ascend."""

    ranks: Ints
    runs: Ints


class SharedRun(NamedTuple):
    """Blocks from `start` to `stop` of the byte line, as one rank of those that need them sees it.

    They come from the rank `source`, None where this one reads them, and go on to `targets`. Of
    blocks that are not wanted whole, `parts` are the bytes that are; without any, it is all.
    """

    start: int
    stop: int
    source: int | None
    targets: tuple[int, ...]
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return length(self.runs()) if self.parts else self.stop - self.start

    def runs(self) -> Ints:
        """What travels, as ascending runs of the byte line."""
        return np.array(self.parts or [(self.start, self.stop)], dtype=np.int64)


class Sharing(NamedTuple):
    """What one rank reads alone, as an (n, 2) array of runs, and what it has in common with others,
    in the order of the line.
    """

    private: Ints
    shared: list[SharedRun]


class ShareLimits(NamedTuple):
    """One run is at most `run_nbytes_max` long, or one block; where a group has less than that for
    each of its ranks, runs are shorter, down to `run_nbytes_min`. A rank has at most
    `window_nbytes_max` bytes of runs under way.

    Runs below `repeated_nbytes_max`, like the step counters of an optimizer, are read by every rank
    that needs them, if that adds at most one part in `repeated_part` to all bytes: passing them on
    costs more than reading them.
    """

    run_nbytes_max: int = 4 * MIB
    run_nbytes_min: int = MIB
    window_nbytes_max: int = 16 * MIB
    repeated_nbytes_max: int = 64 << 10
    repeated_part: int = 100


class Weight(NamedTuple):
    """Bytes that a rank counts so that the sums over all ranks count every byte once: of all that
    is needed, of what reading short runs repeatedly adds, and of long runs that are shared.
    """

    unique: int
    repeated: int
    long: int

    def is_little(self, limits: ShareLimits) -> bool:
        """Of the sums: whether reading short runs repeatedly is next to nothing."""
        return self.repeated * limits.repeated_part <= self.unique


def weigh(needs: Ints, groups: Sequence[Group], rank: int, limits: ShareLimits) -> Weight:
    """The part of the sums that `rank` counts: what it alone needs, and what it needs as the first
    of a group.
    """
    unique = length(needs) - sum(length(group.runs) for group in groups)
    repeated = long = 0
    for group in groups:
        if group.ranks[0] == rank:
            nbytes = group.runs[:, 1] - group.runs[:, 0]
            short = int(nbytes[nbytes < limits.repeated_nbytes_max].sum())
            unique += int(nbytes.sum())
            long += int(nbytes.sum()) - short
            repeated += short * (len(group.ranks) - 1)
    return Weight(unique, repeated, long)


def share(
    blocks: NeededBlocks,
    groups: Sequence[Group],
    rank: int,
    limits: ShareLimits,
    needs: Ints | None = None,
) -> Sharing:
    """Divide what the groups of `rank` need among their ranks; `rank` reads all else alone.

    `blocks` are all that this rank needs some of, `needs` what it needs, all of them without it;
    `groups` are all of its groups. A block is not divided within a group.
    """
    shared = [run for group in groups for run in _divided(group, blocks, rank, limits)]
    shared.sort()
    taken = [np.empty((0, 2), dtype=np.int64), *(run.runs() for run in shared)]
    needs = blocks.runs() if needs is None else needs
    return Sharing(without(needs, united(np.concatenate(taken))), shared)


def long_only(groups: Sequence[Group], limits: ShareLimits) -> list[Group]:
    """The groups without their short runs, which every rank then reads by itself."""
    kept = []
    for ranks, runs in groups:
        is_long = runs[:, 1] - runs[:, 0] >= limits.repeated_nbytes_max
        if is_long.any():
            kept.append(Group(ranks, runs[is_long]))
    return kept


def _divided(
    group: Group, blocks: NeededBlocks, rank: int, limits: ShareLimits
) -> Iterator[SharedRun]:
    ranks = group.ranks.tolist()
    count, here = len(ranks), ranks.index(rank)
    nbytes_max = max(length(group.runs) // count, limits.run_nbytes_min)
    nbytes_max = min(nbytes_max, limits.run_nbytes_max)
    # The rank with the fewest bytes so far reads. Groups of one run each begin with different
    # ranks, so that not all of them fall to the lowest.
    turn = int(group.runs[0, 0]) // MIB
    loads = [(0, (index - turn) % count, index) for index in range(count)]
    heapify(loads)
    for runs in _cut(group.runs, blocks, nbytes_max):
        load, order, reader = loads[0]
        heapreplace(loads, (load + length(runs), order, reader))
        source, targets = relay(here, reader, count)
        yield SharedRun(
            int(runs[0, 0]),
            int(runs[-1, 1]),
            None if source is None else ranks[source],
            tuple([ranks[target] for target in targets]),
            tuple(map(tuple, runs.tolist())) if len(runs) > 1 else (),
        )


def relay(here: int, reader: int, count: int) -> tuple[int | None, list[int]]:
    """From which of `count` members the one at `here` gets what `reader` reads, and to which it
    goes on: a binomial tree, turned so that `reader` is its root.

    Neighbours are powers of two apart, so whoever reads, a member has at most 2 log2(count) of
    them, and over all readers each passes on as much as it gets.
    """
    position = (here - reader) % count
    reach = position & -position if position else 1 << (count - 1).bit_length()
    steps = []
    while reach > 1:
        reach //= 2
        if position + reach < count:
            steps.append(reach)
    source = (reader + (position & (position - 1))) % count if position else None
    return source, [(here + step) % count for step in steps]


def _cut(runs: Ints, blocks: NeededBlocks, nbytes_max: int) -> Iterator[Ints]:
    """`runs` in parts of at most `nbytes_max` bytes, or of one block; each has all of the blocks
    that it has bytes of, and these follow each other.
    """
    pieces, row = pieces_of(runs, blocks.start, blocks.stop)
    edges = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
    rows, edges = row[edges], np.append(edges, len(row))
    follows = blocks.start[rows[1:]] == blocks.stop[rows[:-1]]
    first = nbytes = 0
    sizes = np.diff(np.append(0, ends)[edges]).tolist()
    for number, size in enumerate(sizes):
        if number > first and (nbytes + size > nbytes_max or not follows[number - 1]):
            yield joined(pieces[edges[first] : edges[number]])
            first, nbytes = number, 0
        nbytes += size
    if sizes:
        yield joined(pieces[edges[first] :])
