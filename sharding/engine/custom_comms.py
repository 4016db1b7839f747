"""Collectives of the user's own in the place of a backend's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sharding.engine.collectives import Comm, Members, PendingCollective, Tensors
from sharding.engine.pool import BufferPool

__all__ = ["CustomComm", "CustomReduction", "with_gather", "with_reduction"]


class CustomComm(Comm):
    """A group whose gathers or reductions are the user's own.

    As torch has them: `custom.allocate(shape, dtype=, device=)` makes the buffers, and
    `custom(output_tensor=, input_tensor=, group=, async_op=True)` fills the output and returns what
    can be waited for, or None when it is done; a reduction gets `op=` too. A rank alone does not
    call it.
    """

    def __init__(self, base: Comm, custom: Any) -> None:
        super().__init__(base.group)
        self._base = base
        self._custom = custom

    def apart(self, nbytes: Sequence[int], *, even: bool, device: torch.device) -> list[int]:
        return []  # buffers are to be the user's

    def buffer(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool | None
    ) -> torch.Tensor:
        buffer: torch.Tensor = self._custom.allocate((numel,), dtype=dtype, device=device)
        return buffer

    def give_back(self, buffer: torch.Tensor, pool: BufferPool) -> None:
        pass

    def all_gather(
        self, members: Members, own: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        return self._base.all_gather(members, own, pool=pool, tag=tag)

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        return self._base.reduce_scatter(members, outs, pool=pool, tag=tag)


class _CustomGather(CustomComm):
    def all_gather(
        self, members: Members, own: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        (member,), (part,) = members, own
        work = self._custom(
            output_tensor=member.whole, input_tensor=part, group=self.group, async_op=True
        )
        return PendingCollective([work])


class CustomReduction(CustomComm):
    """Reduces by the user's own collective. `op` is what it is called with."""

    def __init__(self, base: Comm, custom: Any) -> None:
        super().__init__(base, custom)
        self.op: Any = dist.ReduceOp.SUM

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        (member,), (out,) = members, outs
        work = self._custom(
            output_tensor=out,
            input_tensor=member.whole,
            group=self.group,
            op=self.op,
            async_op=True,
        )
        return PendingCollective([work])


def with_gather(comm: Comm, custom: Any) -> Comm:
    """The same ranks, gathering by the user's own collective; see `CustomComm`."""
    return comm if comm.size == 1 else _CustomGather(comm, custom)


def with_reduction(comm: Comm, custom: Any) -> Comm:
    """The same ranks, reducing by the user's own collective; see `CustomComm`."""
    return comm if comm.size == 1 else CustomReduction(comm, custom)
