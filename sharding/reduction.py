"""Gradients of a unit, from the backward of its views to the sharded gradient of the optimizer.

    gradients of the members -> one padded buffer in the reduce dtype, divided beforehand
      -> comm hook; or reduce-scatter in the shard group, all-reduce in the replicate group
      -> divided afterwards -> added to the gradient of the shard

The sum is divided by the number of data-parallel ranks in two steps, so that neither the sum nor
the parts leave the range of a low-precision dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sharding.collectives import Comm, Pending
from sharding.flat_param import FlatParam
from sharding.pool import BufferPool
from sharding.streams import Streams

__all__ = ["CommHook", "Reduction", "Reductions", "divide_factors"]


@dataclass(frozen=True)
class CommHook:
    """A user's own reduction; it divides too. `casts` says that it needs no cast from us."""

    state: Any
    hook: Callable[..., Any]
    casts: bool


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a unit are reduced."""

    shard: Comm | None
    """None where parameters are not sharded."""
    replicate: Comm | None
    dtype: torch.dtype | None
    """Of the collectives; None for the dtype of the shard."""
    keep_dtype: bool
    hook: CommHook | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """What to divide by before and after summing."""
        size = 1
        for comm in (self.shard, self.replicate):
            size *= 1 if comm is None else comm.size
        return divide_factors(size)

    def with_hook(self, hook: CommHook) -> Reduction:
        """The same, through a comm hook."""
        return replace(self, hook=hook)


class Reductions:
    """The reductions under way, oldest first. All of a model's units share one."""

    def __init__(self, pool: BufferPool, streams: Streams, *, in_flight_max: int = 2) -> None:
        self._pool = pool
        self._streams = streams
        self._in_flight_max = in_flight_max
        self._ends: list[Callable[[], None]] = []

    def start(
        self, store: FlatParam, reduction: Reduction, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Start to reduce; the gradient is there after `finish`."""
        while len(self._ends) >= self._in_flight_max:
            self._ends.pop(0)()
        if reduction.hook is not None:
            self._ends.append(self._start_hook(store, reduction, reduction.hook, grads))
        elif reduction.shard is not None:
            self._ends.append(self._start_sharded(store, reduction, grads))
        else:
            self._ends.append(self._start_replicated(store, reduction, grads))

    def finish(self) -> None:
        """Wait for all of them."""
        while self._ends:
            self._ends.pop(0)()
        self._streams.compute_waits_for_reductions()

    def drop(self) -> None:
        """Forget what a failed backward has left."""
        self._ends.clear()

    def _start_sharded(
        self, store: FlatParam, reduction: Reduction, grads: Sequence[torch.Tensor | None]
    ) -> Callable[[], None]:
        assert reduction.shard is not None
        before, after = reduction.factors
        dtype = reduction.dtype or store.dtype
        full = self._pool.take(store.layout.padded_numel, dtype, store.options.device)
        store.write_gradients(grads, full, scale=1.0 / before)
        self._streams.reductions_wait_for_compute()
        with self._streams.reducing():
            out = torch.empty(store.layout.shard_numel, dtype=dtype, device=full.device)
            pending = reduction.shard.reduce_scatter(
                full, out, pool=self._pool, tag=2 * store.tag + 1
            )

        def end() -> None:
            with self._streams.reducing():
                pending.wait()
                self._pool.give_back(full)
                if reduction.replicate is not None:
                    reduction.replicate.all_reduce(out).wait()
                if after != 1.0:
                    out.div_(after)
                store.add_gradient(out, keep_dtype=reduction.keep_dtype)

        return end

    def _start_replicated(
        self, store: FlatParam, reduction: Reduction, grads: Sequence[torch.Tensor | None]
    ) -> Callable[[], None]:
        before, after = reduction.factors
        out = torch.empty(
            store.layout.padded_numel,
            dtype=reduction.dtype or store.dtype,
            device=store.options.device,
        )
        store.write_gradients(grads, out, scale=1.0 / before)
        self._streams.reductions_wait_for_compute()
        with self._streams.reducing():
            comm = reduction.replicate
            pending = Pending(()) if comm is None else comm.all_reduce(out)

        def end() -> None:
            with self._streams.reducing():
                pending.wait()
                if after != 1.0:
                    out.div_(after)
                store.add_gradient(out, keep_dtype=reduction.keep_dtype)

        return end

    def _start_hook(
        self,
        store: FlatParam,
        reduction: Reduction,
        hook: CommHook,
        grads: Sequence[torch.Tensor | None],
    ) -> Callable[[], None]:
        dtype = (store.compute_dtype if hook.casts else reduction.dtype) or store.dtype
        full = torch.empty(store.layout.padded_numel, dtype=dtype, device=store.options.device)
        store.write_gradients(grads, full, scale=1.0)
        self._streams.reductions_wait_for_compute()
        with self._streams.reducing():
            if reduction.shard is None:
                hook.hook(hook.state, full)
                out = full
            else:
                out = torch.zeros(store.layout.shard_numel, dtype=dtype, device=full.device)
                hook.hook(hook.state, full, out)

        def end() -> None:
            store.add_gradient(out, keep_dtype=reduction.keep_dtype)

        return end


def divide_factors(size: int) -> tuple[float, float]:
    """What to divide gradients of `size` ranks by before and after their sum: about the root of
    `size` each, the first a power of two. 1 gives 1 and 1, 4 gives 2 and 2, 6 gives 4 and 1.5.
    """
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before), size / before
