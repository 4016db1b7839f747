"""The only file of the package that talks to other ranks.

A `Comm` is one process group with the primitives that measure best on its backend. Every wait has
the group's own deadline (`timeout=` of `init_process_group` or `new_group`): a rank that is gone
raises on the others, at once where the backend sees the connection break, else at that deadline.

gloo, 32 MiB of float32, two ranks on two cores, CPU ms per rank in brackets: native all-gather 90
[39], native reduce-scatter 65 [32], all-to-all 14 [6], direct sends and receives 17 [7]. So on gloo
gathers and reduce-scatters are direct sends between all pairs, straight out of and into the
buffers; on 4 ranks the ratio is the same. Other backends use their own primitives.

Order of reduction: `reduce_scatter` on gloo adds the ranks' contributions in the order of their
group ranks, from 0 on, whoever holds the result; with two ranks that is bit for bit what the
native one gives. `all_reduce` and all of NCCL: the backend's own order.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sharding.pool import BufferPool

__all__ = [
    "Comm",
    "Group",
    "Pending",
    "comm_of",
    "default_group",
    "is_group",
    "new_groups",
    "wants_details",
]

Group = dist.ProcessGroup

# Direct sends carry tags from here on, so that they never meet a user's own point-to-point calls.
_FIRST_TAG = 1 << 20


class Pending:
    """A collective under way; `wait` ends it. Waiting twice is harmless."""

    def __init__(self, works: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream will see it)."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


class Comm(ABC):
    """One process group. All buffers are 1-D and contiguous; all ranks call in the same order.

    `tag` names the caller (a unit); calls of different tags may pass each other.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.global_ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))

    @abstractmethod
    def all_gather(self, full: torch.Tensor, *, tag: int) -> Pending:
        """Fill `full` from everyone's segment of it; this rank's own is already in its place."""

    @abstractmethod
    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, pool: BufferPool, tag: int
    ) -> Pending:
        """Sum everyone's `full`; this rank gets its segment in `out`. `full` is spent."""

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> Pending:
        """Sum (or maximum) over all ranks, in place, the same bits everywhere."""
        if self.size == 1:
            return Pending(())
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return Pending([dist.all_reduce(tensor, op=op, group=self.group, async_op=True)])

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Everyone gets the tensor of the group's first rank, in place."""
        source = self.global_ranks[0]
        return Pending([dist.broadcast(tensor, src=source, group=self.group, async_op=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small plain value, in the order of ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


class _Native(Comm):
    """The backend's own primitives."""

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Pending:
        own = full.chunk(self.size)[self.rank]
        work = _all_gather_single()(full, own, group=self.group, async_op=True)
        return Pending([work])

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, pool: BufferPool, tag: int
    ) -> Pending:
        work = _reduce_scatter_single()(out, full, group=self.group, async_op=True)
        return Pending([work])


class _Pairwise(Comm):
    """Direct sends and receives between all pairs of ranks."""

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Pending:
        segments = full.chunk(self.size)
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            works.append(self._receive(segments[source], source, tag))
        for distance in range(1, self.size):
            works.append(self._send(segments[self.rank], (self.rank + distance) % self.size, tag))
        return Pending(works)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, pool: BufferPool, tag: int
    ) -> Pending:
        segments = full.chunk(self.size)
        received = pool.take(out.numel() * (self.size - 1), full.dtype, full.device)
        slots = received.view(self.size - 1, -1)
        parts = {self.rank: segments[self.rank]}
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            parts[source] = slots[distance - 1]
            works.append(self._receive(slots[distance - 1], source, tag))
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            works.append(self._send(segments[target], target, tag))

        def add_up() -> None:
            _sum_in_order([parts[rank] for rank in range(self.size)], out)
            pool.give_back(received)

        return Pending(works, add_up)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        target = self.global_ranks[rank]
        return dist.isend(tensor, target, group=self.group, tag=_FIRST_TAG + tag)

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        source = self.global_ranks[rank]
        return dist.irecv(tensor, source, group=self.group, tag=_FIRST_TAG + tag)


class _Alone(Comm):
    """A group of one: nothing to send."""

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Pending:
        return Pending(())

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, pool: BufferPool, tag: int
    ) -> Pending:
        out.copy_(full)
        return Pending(())


def comm_of(group: Group) -> Comm:
    """The `Comm` for a group, by the backend that serves it."""
    if dist.get_world_size(group) == 1:
        return _Alone(group)
    if dist.get_backend(group) == "gloo":
        return _Pairwise(group)
    return _Native(group)


def default_group() -> Group:
    """The group of all ranks. Raises RuntimeError without `init_process_group`."""
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group: call torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def wants_details() -> bool:
    """Whether the user asked torch to check collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    torch_distributed: Any = dist  # its stubs do not name these two
    return bool(torch_distributed.get_debug_level() == torch_distributed.DebugLevel.DETAIL)


def is_group(value: object) -> bool:
    """Whether the value is a process group."""
    return isinstance(value, Group)


def new_groups(ranks_of_groups: Sequence[Sequence[int]]) -> Group:
    """Create groups that part the world; every rank creates all, and gets the one it is in."""
    own = None
    for ranks in ranks_of_groups:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    assert isinstance(own, Group)
    return own


def _sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


@functools.cache
def _all_gather_single() -> Callable[..., Any]:
    # Renamed in newer versions of torch, which warn about the old name.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@functools.cache
def _reduce_scatter_single() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
