"""Blocks that several ranks need: which rank reads each of them, and in which round it is sent.

Pure arithmetic on the block line: all blocks of all chunks of a manifest, numbered in order. Every
rank computes the same answer from the same needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class SharedRun(NamedTuple):
    """Blocks `start` to `stop` of the block line, read by `reader` and sent to `others`."""

    start: int
    stop: int
    reader: int
    others: tuple[int, ...]
    round: int


class Sharing(NamedTuple):
    """`shared` in block order; `private` are this rank's remaining runs, as an (n, 2) array."""

    private: Ints
    shared: list[SharedRun]
    rounds: int


class ShareLimits(NamedTuple):
    """One run is at most `run_nbytes_max` long, or one block. In one round no rank reads or
    receives more than `round_nbytes_max` bytes of shared blocks.

    Runs below `repeated_nbytes_max`, like the step counters of an optimizer, are read by every rank
    that needs them, if that adds at most one part in `repeated_part` to all bytes: a round of
    all-to-all costs more than reading them.
    """

    run_nbytes_max: int = 4 << 20
    round_nbytes_max: int = 16 << 20
    repeated_nbytes_max: int = 64 << 10
    repeated_part: int = 100


def share_blocks(needs: Sequence[Ints], line: Ints, rank: int, limits: ShareLimits) -> Sharing:
    """Divide the blocks that more than one rank needs among the ranks that need them.

    `needs[r]` are rank r's runs, ascending and disjoint, as an (n, 2) array; `line[b]` is the
    number of bytes before block b, with one more entry at the end. Ranks that share nothing keep
    all they need.
    """
    segments, members = _worth_sharing(*_shared_segments(needs), needs, line, limits)
    private = _without(needs[rank], segments)
    shared: list[SharedRun] = []
    loads = [0] * len(needs)
    clocks = [(0, 0)] * len(needs)  # per rank: the round it is filling, and the bytes in it
    rounds = 0
    for (start, stop), needers in zip(segments.tolist(), members, strict=True):
        for low, high in _cut(start, stop, line, limits.run_nbytes_max):
            nbytes = int(line[high] - line[low])
            # The rank with the fewest bytes so far; by number on a tie, because every rank must
            # come to the same answer.
            reader = min(needers, key=lambda r: (loads[r], r))
            loads[reader] += nbytes
            round_number = _round_for(needers, nbytes, clocks, limits.round_nbytes_max)
            rounds = max(rounds, round_number + 1)
            others = tuple(r for r in needers if r != reader)
            shared.append(SharedRun(low, high, reader, others, round_number))
    return Sharing(private, shared, rounds)


def _shared_segments(needs: Sequence[Ints]) -> tuple[Ints, list[tuple[int, ...]]]:
    """The maximal runs that one and the same set of two or more ranks needs, and these sets."""
    points = np.unique(np.concatenate([need.reshape(-1) for need in needs]))
    change = np.zeros(len(points), dtype=np.int64)
    for need in needs:
        # A sweep over all ends of runs: the sum so far is how many ranks need the blocks that
        # follow.
        change[np.searchsorted(points, need[:, 0])] += 1
        change[np.searchsorted(points, need[:, 1])] -= 1
    wanted_twice = np.flatnonzero(np.cumsum(change) >= 2)
    set_of_point = np.full(len(points), -1, dtype=np.int64)
    set_of_point[wanted_twice] = np.arange(len(wanted_twice))
    sets: list[list[int]] = [[] for _ in range(len(wanted_twice))]
    for rank, need in enumerate(needs):
        set_numbers = set_of_point[
            expanded(np.searchsorted(points, need[:, 0]), np.searchsorted(points, need[:, 1]))
        ]
        for shared in set_numbers[set_numbers >= 0].tolist():
            sets[shared].append(rank)
    segments = np.stack([points[wanted_twice], points[wanted_twice + 1]], axis=1)
    return segments, [tuple(ranks) for ranks in sets]


def _worth_sharing(
    segments: Ints,
    members: list[tuple[int, ...]],
    needs: Sequence[Ints],
    line: Ints,
    limits: ShareLimits,
) -> tuple[Ints, list[tuple[int, ...]]]:
    """Without the short segments, if reading them repeatedly is next to nothing."""
    nbytes = line[segments[:, 1]] - line[segments[:, 0]]
    is_short = nbytes < limits.repeated_nbytes_max
    if not is_short.any():
        return segments, members
    counts = np.array([len(ranks) for ranks in members])
    repeated = int((nbytes * (counts - 1))[is_short].sum())
    unique = sum(int((line[need[:, 1]] - line[need[:, 0]]).sum()) for need in needs)
    unique -= int((nbytes * (counts - 1)).sum())
    if repeated * limits.repeated_part > unique:
        return segments, members
    kept = np.flatnonzero(~is_short)
    return segments[kept], [members[index] for index in kept.tolist()]


def expanded(first: npt.NDArray[np.integer], last: npt.NDArray[np.integer]) -> Ints:
    """All integers of the ranges `first[i]` to `last[i]`, one range after the other."""
    sizes = last - first
    skipped = np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers: npt.NDArray[np.intp] = np.arange(int(sizes.sum())) - skipped + np.repeat(first, sizes)
    return numbers


def _without(need: Ints, segments: Ints) -> Ints:
    """The runs of `need` outside of `segments`; segments lie wholly inside or outside of a run."""
    if len(segments) == 0 or len(need) == 0:
        return need
    kept: list[tuple[int, int]] = []
    starts = segments[:, 0]
    for start, stop in need.tolist():
        position = start
        for index in range(int(np.searchsorted(starts, start)), len(segments)):
            low, high = int(segments[index, 0]), int(segments[index, 1])
            if low >= stop:
                break
            if position < low:
                kept.append((position, low))
            position = high
        if position < stop:
            kept.append((position, stop))
    return np.array(kept, dtype=np.int64).reshape(-1, 2)


def _cut(start: int, stop: int, line: Ints, nbytes_max: int) -> list[tuple[int, int]]:
    cuts = []
    while start < stop:
        end = int(np.searchsorted(line, line[start] + nbytes_max, side="right")) - 1
        end = min(max(end, start + 1), stop)
        cuts.append((start, end))
        start = end
    return cuts


def _round_for(
    ranks: Sequence[int], nbytes: int, clocks: list[tuple[int, int]], nbytes_max: int
) -> int:
    """The first round in which all of `ranks` have room; notes the bytes there."""
    # Never an earlier round than one of them has reached: each rank sends and receives its runs in
    # order.
    round_number = max(clocks[rank][0] for rank in ranks)
    if any(
        clocks[rank][0] == round_number and clocks[rank][1] + nbytes > nbytes_max for rank in ranks
    ):
        round_number += 1
    for rank in ranks:
        current, filled = clocks[rank]
        clocks[rank] = (round_number, filled + nbytes if current == round_number else nbytes)
    return round_number
