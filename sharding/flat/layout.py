"""Where every parameter of a unit lies in its flat parameter, and which part each rank holds.

Arithmetic alone: no memory, no communication, no module.

    shapes and strides of the members, in walk order
      -> offsets in the flat tensor (each member aligned to 16 bytes where members are parameters
         of their own, filler between them)
      -> equal shards, one per rank, the last ones padded with zeros; or, where members may not be
         cut anywhere, one range per rank

All ranges are half-open and count elements. "Flat" is the unsharded tensor, "shard" a rank's part
of it, with its padding.

Layouts of members that may not be cut anywhere pad nothing: each rank holds one range of the flat
tensor, as long as it comes, and parts are gathered into and reduced from where they lie. Members
that may be cut form one run, filled into the ranks up to a common level and cut where each allows
it; whole members lie around that run:

    flat     whole of a | run: a ... b ... c | whole of c | whole of d | whole of e

The level counts what earlier units have given each rank, so that ranks hold equally much of the
model although a unit may have fewer whole members than there are ranks. Ragged shards with a
planner: arXiv 2602.22437; this one pads nothing and keeps no equal shards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ckpt.layout.region import row_major_strides
from sharding.engine.collectives import Comm, Group

Shape = tuple[int, ...]

ALIGNMENT_BYTES = 16
"""Members that are parameters of their own start at multiples of this, so that vector loads of
their views are aligned."""


class Member(NamedTuple):
    """One parameter in the flat tensor: it fills `start` to `stop` in memory order."""

    fqn: str
    shape: Shape
    stride: Shape
    """As memory has it, in elements."""
    granularity: int = 0
    """It may be cut after each so many elements; 0: anywhere."""
    start: int = 0
    """Where the layout has put it."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def is_whole(self) -> bool:
        """Whether it may be cut nowhere."""
        return 0 < self.numel <= self.granularity

    @property
    def is_row_major(self) -> bool:
        """Whether memory order is the logical order of elements."""
        return self.stride == row_major_strides(self.shape)

    def part_shape(self, numel: int) -> Shape:
        """How a rank's part of so many elements is shown: as rows of the member where it is never
        cut inside of one, else 1-D.
        """
        row = math.prod(self.shape[1:])
        if not self.granularity or not row or self.granularity % row:
            return (numel,)
        return (numel // row, *self.shape[1:])


class LocalPart(NamedTuple):
    """What a rank holds of one member: `numel` elements from `in_shard` on in its shard, which are
    those from `in_member` on in the member's memory order.
    """

    in_shard: int
    in_member: int
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """Members, filler and padding of one flat parameter, cut over `shard_count` ranks."""

    members: tuple[Member, ...]
    numel: int
    """Elements of the flat tensor: members and filler, no padding."""
    shard_count: int
    ranges: tuple[tuple[int, int], ...] = ()
    """Which part of the flat tensor each rank holds; empty where all shards are equally long."""

    @property
    def shard_numel(self) -> int:
        """Elements of the longest shard, padding included."""
        if self.ranges:
            return max(stop - start for start, stop in self.ranges)
        return -(-self.numel // self.shard_count)

    def shard_numel_of(self, rank: int) -> int:
        """Elements of the rank's shard, padding included."""
        if self.ranges:
            start, stop = self.ranges[rank]
            return stop - start
        return self.shard_numel

    @property
    def padded_numel(self) -> int:
        """Elements of all shards together."""
        return self.numel if self.ranges else self.shard_numel * self.shard_count

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The rank's part of the flat tensor, without padding; empty past the last element."""
        if self.ranges:
            return self.ranges[rank]
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def local_parts(self, rank: int) -> tuple[LocalPart | None, ...]:
        """What the rank holds of each member; None where it holds nothing of it."""
        first, last = self.shard_range(rank)
        parts: list[LocalPart | None] = []
        for member in self.members:
            start, stop = max(first, member.start), min(last, member.stop)
            if start < stop:
                parts.append(LocalPart(start - first, start - member.start, stop - start))
            else:
                parts.append(None)
        return tuple(parts)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Filler and padding of the padded flat tensor, ascending."""
        gaps = []
        position = 0
        for member in sorted(self.members, key=lambda one: (one.start, one.stop)):
            if position < member.start:
                gaps.append((position, member.start))
            position = member.stop
        if position < self.padded_numel:
            gaps.append((position, self.padded_numel))
        return tuple(gaps)


def plan_flat_layout(
    members: Sequence[Member], *, shard_count: int, align_to: int = 1
) -> FlatLayout:
    """Lay members out in the given order, each from a multiple of `align_to` elements on. They may
    be cut anywhere.

    With `align_to` > 1 filler at the end makes the flat tensor divide by `shard_count` too.
    """
    laid = []
    position = 0
    for member in members:
        start = -(-position // align_to) * align_to
        position = start + member.numel
        laid.append(member._replace(granularity=0, start=start))
    if align_to > 1:
        position = -(-position // shard_count) * shard_count
    return FlatLayout(tuple(laid), position, shard_count)


def alignment(itemsize: int) -> int:
    """`ALIGNMENT_BYTES` in elements of `itemsize` bytes."""
    return max(1, ALIGNMENT_BYTES // itemsize)


def memory_strides(shape: Shape, stride: Shape) -> Shape:
    """The strides to flatten with: the tensor's own where it fills its memory without holes, in
    whatever order of dims; row-major ones otherwise.

    A contiguous tensor keeps even unusual strides of dims of size 1 (1x1 channels-last weights).
    """
    if math.prod(shape) == 0:
        return row_major_strides(shape)
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda dim: (dim[1], dim[0])):
        if size == 1:
            continue
        if step != expected:
            return row_major_strides(shape)
        expected *= size
    return stride


# Bytes that units over a group have given its ranks so far. All ranks make the same units in the
# same order, and so count the same. A deleted model still counts: ranks drop it at different times.
_GIVEN: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


def balanced_layout(
    members: Sequence[Member], comm: Comm, *, align_to: int, dtype: torch.dtype
) -> FlatLayout:
    """The layout over the ranks of `comm` that evens out what earlier ones have given them."""
    given = _GIVEN.setdefault(comm.group, [0] * comm.size)
    counts = [nbytes // dtype.itemsize for nbytes in given]
    layout = plan_ragged_layout(members, given=counts, align_to=align_to)
    for rank in range(comm.size):
        given[rank] += layout.shard_numel_of(rank) * dtype.itemsize
    return layout


def plan_ragged_layout(
    members: Sequence[Member], *, given: Sequence[int], align_to: int
) -> FlatLayout:
    """Lay members out over ranks that have `given` elements each already.

    No rank ends with more than the level to which all elements would fill the ranks, the largest
    whole member and one granularity (or what it had before). Members start at multiples of
    `align_to`.
    """
    sizes = [-(-member.numel // align_to) * align_to for member in members]
    run = [index for index, member in enumerate(members) if not member.is_whole]
    loads = list(given)
    shares = _fill(members, sizes, run, loads, align_to)
    with_run = list(shares)
    # Between the first and the last rank of the run nothing else can lie.
    fits = [rank for rank in range(len(given)) if rank not in with_run[1:-1]]
    whole: dict[int, list[int]] = {rank: [] for rank in fits}
    uncut = [index for index, member in enumerate(members) if member.is_whole]
    # The largest first, each to the rank that has least. Numbers break ties: all ranks must agree.
    for index in sorted(uncut, key=lambda one: (-sizes[one], one)):
        rank = min(fits, key=lambda one: (loads[one], one))
        whole[rank].append(index)
        loads[rank] += sizes[index]

    starts = [0] * len(members)
    ranges = [(0, 0)] * len(given)
    position = 0

    def put(indices: Sequence[int]) -> None:
        nonlocal position
        for index in indices:
            starts[index] = position
            position += sizes[index]

    # One rank's share of the run is followed by what else it has; of several the first's is behind.
    before = with_run[:1] if len(with_run) > 1 else []
    for rank in before:
        put(whole[rank])
    end = position
    put(run)
    for rank, numel in shares.items():
        start = 0 if rank in before else end
        end += numel
        ranges[rank] = (start, end)
    for rank in [*with_run[-1:], *(one for one in whole if one not in shares)]:
        start = ranges[rank][0] if rank in shares else position
        put(whole[rank])
        ranges[rank] = (start, position)
    laid = [one._replace(start=start) for one, start in zip(members, starts, strict=True)]
    return FlatLayout(tuple(laid), position, len(given), tuple(ranges))


def _fill(
    members: Sequence[Member],
    sizes: Sequence[int],
    run: list[int],
    loads: list[int],
    align_to: int,
) -> dict[int, int]:
    """Give the ranks, one after the other, as much of the run as brings them to the level; adds to
    `loads`. Returns how many elements of the run each rank has that has some, in order.
    """
    level = _level(loads, sum(sizes))
    # Without any elements to give, no rank is below the level.
    open_ranks = [rank for rank, load in enumerate(loads) if load < level] or [0]
    shares: dict[int, int] = {}
    rank = open_ranks.pop(0)
    for index in run:
        grain = members[index].granularity or align_to
        left = sizes[index]
        while left:
            room = level - loads[rank]
            # To the nearer of two places where it may be cut.
            here = left if not open_ranks else min(left, (2 * room + grain) // (2 * grain) * grain)
            if here > 0:
                loads[rank] += here
                shares[rank] = shares.get(rank, 0) + here
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
