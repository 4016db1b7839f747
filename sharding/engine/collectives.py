"""The only file of the package that talks to other ranks.

A `Comm` is one process group with the primitives that measure best on its backend. Every wait has
the group's own deadline (`timeout=` of `init_process_group` or `new_group`): a rank that is gone
raises on the others, at once where the backend sees the connection break, else at that deadline.

gloo, 32 MiB of float32, two ranks on two cores, CPU ms per rank in brackets: native all-gather 90
[39], native reduce-scatter 65 [32], all-to-all 14 [6], direct sends and receives 17 [7]. So on gloo
gathers and reduce-scatters of the CPU's tensors are direct sends between all pairs, straight out of
and into the buffers; on 4 ranks the ratio is the same. Everything else uses the backend's own
primitives; gloo has none for parts of several lengths, which it gets one by one.

Order of reduction: `reduce_scatter` on gloo adds the ranks' contributions in the order of their
group ranks, from 0 on, on every holder of the result; with two ranks that is bit for bit what the
native one gives. `all_reduce` and all of NCCL: the backend's own order.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sharding.engine.memory import BufferPool
from sharding.engine.torch_seam import GroupMemory, SymmetricMemory, broadcast_coalesced, shown_as

Group = dist.ProcessGroup

# Direct sends carry tags from here on, so that they never meet a user's own point-to-point calls.
_FIRST_TAG = 1 << 20
# Smaller parts travel together: below this a message costs more than a copy (a guess).
_DIRECT_BYTES_MIN = 1 << 16


class PendingCollective:
    """A collective under way; `wait` ends it, and empties `works`. Waiting twice is harmless."""

    def __init__(
        self, works: list[Any] | tuple[()], then: Callable[[], None] | None = None
    ) -> None:
        self._works = works
        self.then = then
        """What is left to be done when it has ended."""

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream will see it)."""
        works, self._works = self._works, ()
        try:
            for work in works:
                if work is not None:
                    work.wait()
        finally:
            # `_UNDER_WAY` has the same list: the next call of the tag must not wait for these.
            if works:
                works.clear()
        then, self.then = self.then, None
        if then is not None:
            then()


# Sends and receives under way, by group and tag. They live on when nobody waits for them, as for an
# early gather of a model that is gone: gloo reads nothing more from a rank whose message finds no
# receive. The next call of a tag ends them.
_UNDER_WAY: weakref.WeakKeyDictionary[Group, dict[int, list[Any]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class RankParts:
    """A tensor that is spread over a group: rank r's part are the `part_numel` elements from
    r * part_numel on. The last parts may be shorter or empty.

    With `ranges` rank r's part is from ranges[r][0] to ranges[r][1]; the longest has `part_numel`.
    """

    whole: torch.Tensor
    """1-D and contiguous."""
    part_numel: int
    ranges: tuple[tuple[int, int], ...] = ()

    def of(self, rank: int) -> torch.Tensor:
        """That rank's part."""
        return self._cut[rank] if rank < len(self._cut) else self.whole[:0]

    @functools.cached_property
    def _cut(self) -> tuple[torch.Tensor, ...]:
        if self.ranges:
            return tuple(self.whole[start:stop] for start, stop in self.ranges)
        if not self.part_numel:
            return ()
        return tuple(torch.split(self.whole, self.part_numel))


Members = Sequence[RankParts]
"""What one call gathers or reduces together."""
Tensors = Sequence[torch.Tensor]


CommMemory = GroupMemory | SymmetricMemory
"""Memory that collectives of a backend move faster than any other."""


class Comm(ABC):
    """One process group. All buffers are contiguous; all ranks call in the same order, with members
    of the same sizes.

    `tag` names the caller (a unit); calls of different tags may pass each other.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        # Of what only acts as a group nothing is known but its own numbers.
        is_torchs = isinstance(group, Group)
        ranks = dist.get_process_group_ranks(group) if is_torchs else range(self.size)
        self.global_ranks: tuple[int, ...] = tuple(ranks)

    def apart(self, nbytes: Sequence[int], *, even: bool, device: torch.device) -> list[int]:
        """Which members, by number, are gathered or reduced as they are; all others have to be
        packed into one before (`sharding.dtensor.gathering`). `nbytes`: of the first rank's part of
        each. `even`: all parts of a member are equally long. `device`: where the members are.
        """
        return list(range(len(nbytes)))

    def buffer(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool | None
    ) -> torch.Tensor:
        """Memory to send from or to receive into: of the pool, to be given back by `give_back`, or
        new without one.
        """
        if pool is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return pool.take(numel, dtype, device)

    def give_back(self, buffer: torch.Tensor, pool: BufferPool) -> None:
        """Return what `buffer` has taken from the pool. It must not be used any more."""
        pool.give_back(buffer)

    @abstractmethod
    def all_gather(self, members: Members, own: Tensors, *, tag: int) -> PendingCollective:
        """Fill all members from everyone's parts. `own`: this rank's, as long as those of the
        members, of any dtype and in any memory; in their places already or not.
        """

    @abstractmethod
    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        """Sum everyone's members; this rank gets its part of each in `outs`, which are as long as
        those parts. All have one dtype. Members must stay as they are until the wait, and may be
        spent then.
        """

    def _put_in_place(self, members: Members, own: Tensors) -> None:
        for member, part in zip(members, own, strict=True):
            place = member.of(self.rank)
            # Packed parts were written into their row: they are in place.
            if place.data_ptr() != part.data_ptr():
                place.copy_(part, non_blocking=True)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> PendingCollective:
        """Sum (or maximum) over all ranks, in place, the same bits everywhere."""
        if self.size == 1:
            return PendingCollective(())
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return PendingCollective([dist.all_reduce(tensor, op=op, group=self.group, async_op=True)])

    def broadcast(self, tensors: Tensors) -> None:
        """Everyone gets the tensors of the group's first rank, in place."""
        broadcast_coalesced(self.group, tensors)

    def in_memory(self, memory: CommMemory) -> Comm:
        """The same ranks, by the backend's own primitives between buffers of that memory."""
        return _Native(self.group, memory)

    def meet(self) -> None:
        """Return when all ranks have come here."""
        dist.barrier(group=self.group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small plain value, in the order of ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


class _Native(Comm):
    """The backend's own primitives, on one member: what comes as several members is to be packed
    into one first, for each collective costs a start of its own. `memory`: what all are packed in.
    """

    def __init__(self, group: Group, memory: CommMemory | None = None) -> None:
        super().__init__(group)
        self._memory = memory

    def apart(self, nbytes: Sequence[int], *, even: bool, device: torch.device) -> list[int]:
        return [0] if len(nbytes) == 1 and even and self._memory is None else []

    def buffer(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool | None
    ) -> torch.Tensor:
        if self._memory is None:
            return super().buffer(numel, dtype, device, pool)
        return self._memory.allocate(numel, dtype, device)

    def give_back(self, buffer: torch.Tensor, pool: BufferPool) -> None:
        if self._memory is None:
            super().give_back(buffer, pool)

    def all_gather(self, members: Members, own: Tensors, *, tag: int) -> PendingCollective:
        if not members:
            return PendingCollective(())
        (member,), (part,) = members, own
        # The cast writes to where the part belongs, so the gather is one in place.
        if part.dtype != member.whole.dtype or part.device != member.whole.device:
            part = member.of(self.rank).copy_(part, non_blocking=True)
        if member.ranges and _has_gloo(self.group, part.device):
            self._put_in_place(members, [part])
            return PendingCollective(self._one_by_one(dist.broadcast, member))
        if member.ranges:
            work = dist.all_gather(self._parts(member), part, group=self.group, async_op=True)
            return PendingCollective([work])
        if self._memory is not None:
            self._memory.register(member.whole, self.group)  # `part` is a part of it
        work = _all_gather_single(member.whole, part, group=self.group, async_op=True)
        return PendingCollective([work])

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        if not members:
            return PendingCollective(())
        (member,), (out,) = members, outs
        if member.ranges and _has_gloo(self.group, out.device):
            works = self._one_by_one(dist.reduce, member)

            def take() -> None:
                out.copy_(member.of(self.rank))

            return PendingCollective(works, take)
        if member.ranges:
            work = dist.reduce_scatter(out, self._parts(member), group=self.group, async_op=True)
            return PendingCollective([work])
        if self._memory is not None:
            self._memory.register(member.whole, self.group)
            self._memory.register(out, self.group)
        work = _reduce_scatter_single(out, member.whole, group=self.group, async_op=True)
        return PendingCollective([work])

    def _parts(self, member: RankParts) -> list[torch.Tensor]:
        return [member.of(rank) for rank in range(self.size)]

    def _one_by_one(self, collective: Callable[..., Any], member: RankParts) -> list[Any]:
        """A collective for each rank's part, which that rank sends or gets."""
        parts = zip(self._parts(member), self.global_ranks, strict=True)
        return [
            collective(part, rank, group=self.group, async_op=True)
            for part, rank in parts
            if part.numel()
        ]


class _Pairwise(_Native):
    """Direct sends and receives between all pairs of ranks, from memory to memory without a copy.
    Small members are to travel together. What is not in the CPU's memory goes the backend's way.
    """

    # It has no memory of a backend's: a step asks for buffers often, and `_Native` would ask first.
    buffer = Comm.buffer
    give_back = Comm.give_back

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._under_way = _UNDER_WAY.setdefault(group, {})
        # Counted from one's own rank: in each step all ranks send to different ones.
        steps = range(1, self.size)
        self._sources = tuple((self.rank - step) % self.size for step in steps)
        self._targets = tuple((self.rank + step) % self.size for step in steps)

    def apart(self, nbytes: Sequence[int], *, even: bool, device: torch.device) -> list[int]:
        if device.type != "cpu":
            return super().apart(nbytes, even=even, device=device)
        large = [number for number, of_one in enumerate(nbytes) if of_one >= _DIRECT_BYTES_MIN]
        # Packing one small member alone would copy it and save no message.
        return large if len(large) < len(nbytes) - 1 else list(range(len(nbytes)))

    def all_gather(self, members: Members, own: Tensors, *, tag: int) -> PendingCollective:
        if members and members[0].whole.device.type != "cpu":
            return super().all_gather(members, own, tag=tag)
        if left := self._under_way.get(tag):
            PendingCollective(left).wait()
        works = self._under_way[tag] = []
        self._put_in_place(members, own)
        with shown_as("_allgather_base_"):
            # Receives first: a message that finds none holds up its connection, see `_UNDER_WAY`.
            for source in self._sources:
                for member in members:
                    works.append(self._message(dist.irecv, member.of(source), source, tag))
            for target in self._targets:
                for member in members:
                    works.append(self._message(dist.isend, member.of(self.rank), target, tag))
        return PendingCollective(works)

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        if not members:
            return PendingCollective(())
        first = members[0].whole
        if first.device.type != "cpu":
            return super().reduce_scatter(members, outs, pool=pool, tag=tag)
        if left := self._under_way.get(tag):
            PendingCollective(left).wait()
        works = self._under_way[tag] = []
        sizes = list(map(torch.Tensor.numel, outs))
        received = pool.take(sum(sizes) * (self.size - 1), first.dtype, first.device)
        slots: dict[int, Sequence[torch.Tensor]] = {}
        with shown_as("_reduce_scatter_base_"):
            for source, row in zip(self._sources, received.view(self.size - 1, -1), strict=True):
                slots[source] = row.split(sizes)
                for slot in slots[source]:
                    works.append(self._message(dist.irecv, slot, source, tag))
            for target in self._targets:
                for member in members:
                    works.append(self._message(dist.isend, member.of(target), target, tag))

        def add_up() -> None:
            for index, (member, out) in enumerate(zip(members, outs, strict=True)):
                parts = []
                for rank in range(self.size):
                    parts.append(member.of(rank) if rank == self.rank else slots[rank][index])
                torch.add(parts[0], parts[1], out=out)  # by rank: all would get the same bits
                for part in parts[2:]:
                    out.add_(part)
            pool.give_back(received)

        return PendingCollective(works, add_up)

    def _message(self, call: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Send the tensor to a rank, or receive it from there."""
        # Both ends know the lengths: an empty part is neither sent nor waited for.
        if not tensor.numel():
            return None
        if tensor.dtype.itemsize == 1:  # gloo has no floats of 8 bits
            tensor = tensor.view(torch.uint8)
        return call(tensor, self.global_ranks[rank], group=self.group, tag=_FIRST_TAG + tag)


class _Alone(Comm):
    """A group of one: nothing to send."""

    def all_gather(self, members: Members, own: Tensors, *, tag: int) -> PendingCollective:
        self._put_in_place(members, own)
        return PendingCollective(())

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        for member, out in zip(members, outs, strict=True):
            out.copy_(member.of(0))
        return PendingCollective(())

    def in_memory(self, memory: CommMemory) -> Comm:
        return self


def comm_of(group: Group) -> Comm:
    """The `Comm` for a group, by the backend that serves it."""
    if group.size() == 1:
        return _Alone(group)
    if _has_gloo(group, torch.device("cpu")):
        return _Pairwise(group)
    return _Native(group)


def _has_gloo(group: Any, device: torch.device) -> bool:
    """Whether gloo moves the group's tensors of a device; not where it only acts as a group."""
    return isinstance(group, Group) and f"{device.type}:gloo" in dist.get_backend_config(
        group
    ).split(",")


class _GroupOfOne:
    """Acts as a process group of this rank alone, so that none has to be created."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def alone() -> Comm:
    """This rank by itself: what is to be sharded over it stays whole."""
    group: Any = _GroupOfOne()
    return _Alone(group)


def default_group() -> Group:
    """The group of all ranks. Raises RuntimeError without `init_process_group`."""
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group: call torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def all_global_ranks() -> tuple[int, ...]:
    """The ranks of the default group. Raises RuntimeError without `init_process_group`."""
    return tuple(dist.get_process_group_ranks(default_group()))


def separate_comm(comm: Comm) -> Comm:
    """A new group of the same ranks. Collective over these. One rank alone needs none."""
    if comm.size == 1:
        return comm
    ranks = list(comm.global_ranks)
    # Only these ranks come here; without this, torch would wait for the whole world.
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, Group)
    return comm_of(group)


def wants_details() -> bool:
    """Whether the user asked torch to check collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    torch_distributed: Any = dist  # its stubs do not name these two
    return bool(torch_distributed.get_debug_level() == torch_distributed.DebugLevel.DETAIL)


def is_group(value: object) -> bool:
    """Whether the value does what a process group does: it has a rank and a size."""
    return all(callable(getattr(value, name, None)) for name in ("rank", "size"))


def new_groups(ranks_of_groups: Sequence[Sequence[int]]) -> Group:
    """Create groups that part the world; every rank creates all, and gets the one it is in."""
    own = None
    # torch wants every rank to make every group, in one order, also those that it is not in.
    for ranks in ranks_of_groups:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    assert isinstance(own, Group)
    return own


# Renamed in newer versions of torch, which warn about the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
