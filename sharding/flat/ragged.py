"""Layouts of flat parameters whose members may not be cut anywhere.

Each rank holds one range of the flat tensor, as long as it comes: nothing is padded, and parts are
gathered into and reduced from where they lie. Members that may be cut form one run, filled into the
ranks up to a common level and cut where each allows it; whole members lie around that run:

    flat     whole of a | run: a ... b ... c | whole of c | whole of d | whole of e

The level counts what earlier units have given each rank, so that ranks hold equally much of the
model although a unit may have fewer whole members than there are ranks. Ragged shards with a
planner: arXiv 2602.22437; this one pads nothing and keeps no equal shards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sharding.engine.collectives import Comm, Group
from sharding.flat.layout import FlatLayout, Member, MemberSpec

__all__ = ["balanced_layout", "plan_ragged_layout"]

# Bytes that units over a group have given its ranks so far. All ranks make the same units in the
# same order, and so count the same; a model that is gone still counts, for ranks drop it at
# different times.
_GIVEN: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


def balanced_layout(
    specs: Sequence[MemberSpec], comm: Comm, *, align_to: int, dtype: torch.dtype
) -> FlatLayout:
    """The layout over the ranks of `comm` that evens out what earlier ones have given them."""
    given = _GIVEN.setdefault(comm.group, [0] * comm.size)
    counts = [nbytes // dtype.itemsize for nbytes in given]
    layout = plan_ragged_layout(specs, given=counts, align_to=align_to)
    for rank in range(comm.size):
        given[rank] += layout.shard_numel_of(rank) * dtype.itemsize
    return layout


def plan_ragged_layout(
    specs: Sequence[MemberSpec], *, given: Sequence[int], align_to: int
) -> FlatLayout:
    """Lay members out over ranks that have `given` elements each already.

    No rank ends with more than the level to which all elements would fill the ranks, the largest
    whole member and one granularity (or what it had before). Members start at multiples of
    `align_to`.
    """
    sizes = [_up(math.prod(spec.shape), align_to) for spec in specs]
    cuttable = [index for index, spec in enumerate(specs) if not spec.is_whole]
    loads = list(given)
    shares = _fill(specs, sizes, cuttable, loads, align_to)
    # Between the first and the last rank of the run nothing else can lie.
    fits = [rank for rank in range(len(given)) if rank not in shares.ranks[1:-1]]
    whole: dict[int, list[int]] = {rank: [] for rank in fits}
    uncut = [index for index, spec in enumerate(specs) if spec.is_whole]
    for index in sorted(uncut, key=lambda one: (-sizes[one], one)):
        rank = min(fits, key=lambda one: (loads[one], one))
        whole[rank].append(index)
        loads[rank] += sizes[index]
    return _laid_out(specs, sizes, shares, whole, len(given))


class _Shares(NamedTuple):
    """Which ranks have which parts of the run."""

    members: list[int]
    """Those of the run, in order."""
    ranks: list[int]
    """Who has some of it, in order."""
    numels: list[int]
    """How many elements of the run each of those has."""


def _fill(
    specs: Sequence[MemberSpec],
    sizes: Sequence[int],
    cuttable: list[int],
    loads: list[int],
    align_to: int,
) -> _Shares:
    """Give the ranks, one after the other, as much of the run as brings them to the level; adds to
    `loads`.
    """
    level = _level(loads, sum(sizes))
    open_ranks = [rank for rank, load in enumerate(loads) if load < level] or [0]
    shares = _Shares(cuttable, [], [])
    rank = open_ranks.pop(0)

    def give(numel: int) -> None:
        loads[rank] += numel
        if shares.ranks[-1:] == [rank]:
            shares.numels[-1] += numel
        else:
            shares.ranks.append(rank)
            shares.numels.append(numel)

    for index in cuttable:
        grain = specs[index].granularity or align_to
        left = sizes[index]
        while left:
            room = level - loads[rank]
            # To the nearer of two places where it may be cut.
            here = left if not open_ranks else min(left, (2 * room + grain) // (2 * grain) * grain)
            if here > 0:
                give(here)
                left -= here
            if left:
                rank = open_ranks.pop(0)
    return shares


def _level(loads: Sequence[int], added: int) -> int:
    """How high ranks stand when `added` elements fill up those that have least."""
    ascending = sorted(loads)
    total = added
    for count, load in enumerate(ascending, start=1):
        total += load
        level = -(-total // count)
        if count == len(ascending) or level <= ascending[count]:
            return level
    raise AssertionError("there is no rank")


def _laid_out(
    specs: Sequence[MemberSpec],
    sizes: Sequence[int],
    shares: _Shares,
    whole: dict[int, list[int]],
    rank_count: int,
) -> FlatLayout:
    starts = [0] * len(specs)
    ranges = [(0, 0)] * rank_count
    position = 0

    def put(indices: Sequence[int]) -> None:
        nonlocal position
        for index in indices:
            starts[index] = position
            position += sizes[index]

    # One rank's share of the run is followed by what else it has; of several the first's is behind.
    before = shares.ranks[:1] if len(shares.ranks) > 1 else []
    for rank in before:
        put(whole[rank])
    run = position
    put(shares.members)
    for rank, numel in zip(shares.ranks, shares.numels, strict=True):
        start = 0 if rank in before else run
        run += numel
        ranges[rank] = (start, run)
    for rank in [*shares.ranks[-1:], *(one for one in whole if one not in shares.ranks)]:
        start = ranges[rank][0] if rank in shares.ranks else position
        put(whole[rank])
        ranges[rank] = (start, position)
    members = tuple(
        Member(spec.fqn, spec.shape, spec.stride, start, start + math.prod(spec.shape), grain)
        for spec, start, grain in zip(specs, starts, (s.granularity for s in specs), strict=True)
    )
    return FlatLayout(members, position, rank_count, tuple(ranges))


def _up(numel: int, to: int) -> int:
    return -(-numel // to) * to
