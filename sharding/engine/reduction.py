"""Gradients of a unit, from the backward of its views to the sharded gradient of the optimizer.

    gradients of the members -> where they lie, or packed into one buffer: in the reduce dtype,
      divided beforehand
      -> comm hook; or reduce-scatter in the shard group, all-reduce in the replicate group
      -> divided afterwards -> added to the gradient of the shard

The sum is divided by the number of data-parallel ranks in two steps, so that neither the sum nor
the parts leave the range of a low-precision dtype.

`clip_sharded` clips gradients by the norm over all parameters, however these are spread.

On an accelerator what is reduced is packed by compute, in its own memory, and read by another
stream. It is kept here until the reduction is ended; from then on compute waits for that stream
before it uses the memory again. So there are never more such buffers than reductions under way.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sharding.engine.collectives import Comm, PendingCollective, RankParts
from sharding.engine.memory import BufferPool
from sharding.engine.store import Gradients, Outgoing, OutgoingForm, ParameterStore
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import foreach_mul, foreach_norm


@dataclass(frozen=True)
class CommHook:
    """A user's own reduction; it divides too. `casts`: it needs no cast from the engine."""

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
    """Of the collectives; None for the store's `reduces_in`."""
    factors: tuple[float, float]
    """What to divide by before and after summing."""
    keep_dtype: bool = False
    fills_unused: bool = False
    """Whether parameters without a gradient take part, with zeros."""
    hook: CommHook | None = None
    summed_hook: Callable[[torch.Tensor], object] | None = None
    """Called with the reduced gradients, in place, before they are added to those of the shards."""
    hook_stream: Any = None
    """Where it is called, and all that follows is done; None for the stream of all-reduces."""
    hook_sees_averages: bool = False
    """Whether sums are divided before it is called, rather than after."""
    all_reduces: bool = True
    """Whether sums go to the replicate group now; else they are kept and added to later ones."""


Started = tuple[PendingCollective, Callable[[], None]]
"""A collective under way, and what remains to be done once it has been waited for."""


class _ReductionInFlight(NamedTuple):
    """A reduction under way, and the memory that it reads."""

    started: Started
    outgoing: Outgoing
    shard: Comm | None
    """Through which it was taken from the pool; None where it was not."""
    taken_on: object
    """The stream that this memory is of."""
    keeps: int | None
    """The tag of the store, where the sum will wait for the replicate group."""


class Reductions:
    """The reductions under way, oldest first. All of a model's units share one."""

    def __init__(self, pool: BufferPool, streams: Streams) -> None:
        self.in_flight_max = streams.reductions_ahead_max
        self._pool = pool
        self.streams = streams
        self._in_flight: list[_ReductionInFlight] = []
        self._repeated: list[tuple[Sequence[torch.Tensor], object]] = []
        """Sums that the stream of all-reduces uses, in memory of that of reductions, and the mark
        behind the use.
        """
        self._kept: dict[int, dict[int, torch.Tensor]] = {}
        """Sums that wait for the replicate group, by unit and member."""

    def start(self, store: ParameterStore, reduction: Reduction, grads: Gradients | None) -> None:
        """Start to reduce; the gradient is there after `finish`. None: of no member."""
        # Each reduction under way holds the unsharded gradients of a unit: this bounds memory.
        while len(self._in_flight) >= self.in_flight_max:
            self._end_oldest()
        self._drop_repeated(keep=1)
        casts = reduction.hook is not None and reduction.hook.casts
        dtype = store.compute_dtype if casts else reduction.dtype
        if dtype is None:
            dtype = store.reduces_in(grads, fills=reduction.fills_unused)
            # Gradients may come in any dtype, and sums of earlier ones lose nothing.
            for kept in self._kept.get(store.tag, {}).values():
                dtype = torch.promote_types(dtype, kept.dtype)
        shard = reduction.shard if reduction.hook is None else None
        form = OutgoingForm(
            dtype,
            scale=1.0 if reduction.hook is not None else 1.0 / reduction.factors[0],
            fills=reduction.fills_unused,
            # Otherwise the buffer becomes the gradient, or is the hook's own.
            pool=None if shard is None or _is_alone(reduction) else self._pool,
            comm=shard,
        )
        outgoing = store.outgoing_gradients(grads, form)
        if not outgoing.members:
            return
        self.streams.reductions_wait_for_compute()
        taken_on = self.streams.current()
        with self.streams.reducing():
            if shard is not None:
                started = self._start_sharded(store, reduction, shard, outgoing)
            else:
                started = self._start_whole(store, reduction, outgoing)
        lent = shard if form.pool is not None else None
        waits = reduction.replicate is not None and not reduction.all_reduces
        keeps = store.tag if waits else None
        self._in_flight.append(_ReductionInFlight(started, outgoing, lent, taken_on, keeps))

    def finish(self) -> None:
        """Wait for all of them."""
        while self._in_flight:
            self._end_oldest()
        self.streams.compute_waits_for_reductions()
        self._drop_repeated(keep=0)

    def has_kept(self, store: ParameterStore) -> bool:
        """Whether sums of the store's gradients wait for the replicate group."""
        tag = store.tag
        return bool(self._kept.get(tag)) or any(one.keeps == tag for one in self._in_flight)

    def drop(self) -> None:
        """Forget what a failed backward has left, once its messages have come and gone: later ones
        would take their places.
        """
        # Emptied first: a wait may raise, and must not be tried again by the next forward.
        dropped, self._in_flight = self._in_flight, []
        self._kept.clear()
        with self.streams.reducing():
            for one in dropped:
                one.started[0].wait()
        for one in dropped:
            self.streams.reductions_have_read(one.taken_on)
        self._drop_repeated(keep=0)

    def _end_oldest(self) -> None:
        oldest = self._in_flight.pop(0)
        with self.streams.reducing():
            pending, end = oldest.started
            pending.wait()
            end()
        self.streams.reductions_have_read(oldest.taken_on)
        if oldest.shard is not None:
            for buffer in oldest.outgoing.scratch:
                oldest.shard.give_back(buffer, self._pool)

    def _drop_repeated(self, *, keep: int) -> None:
        """Let go of sums that the stream of all-reduces has used, but for the newest."""
        while len(self._repeated) > keep:
            _, mark = self._repeated.pop(0)
            self.streams.reductions_wait_for(mark)

    def _start_sharded(
        self, store: ParameterStore, reduction: Reduction, shard: Comm, outgoing: Outgoing
    ) -> Started:
        members = outgoing.members
        first = members[0].whole
        # One tensor behind all parts, so that summing over replicas and dividing are one call each.
        # New memory: it becomes the gradient.
        total = sum(outgoing.own_numels)
        is_own = _is_alone(reduction) and len(outgoing.scratch) == len(members) == 1
        out = first if is_own else shard.buffer(total, first.dtype, first.device, None)
        outs = torch.split(out, list(outgoing.own_numels))
        targets = outs
        if len(members) < len(outs):  # the last is several, packed
            apart = len(members) - 1
            targets = (*outs[:apart], out[sum(outgoing.own_numels[:apart]) :])
        pending = (
            PendingCollective(())
            if is_own
            else shard.reduce_scatter(members, targets, pool=self._pool, tag=2 * store.tag + 1)
        )

        def end_shard() -> None:
            """From the sum over the shard group, all of it or by members, to the gradient."""
            self._end_sum(reduction, out)
            store.add_gradients(outgoing, outs, keep_dtype=reduction.keep_dtype)
            self.reduce_kept(store, reduction)

        def end() -> None:
            if reduction.replicate is None and reduction.summed_hook is None:
                end_shard()
                return
            used = [out]
            with self.streams.repeating(reduction.hook_stream):
                # Sums of earlier backwards that did not go to the replicate group go with these.
                kept = self._kept.setdefault(store.tag, {})
                for number, part in zip(outgoing.member_indices, outs, strict=True):
                    before = kept.pop(number, None)
                    if before is not None:
                        part.add_(before)
                        used.append(before)
                if reduction.all_reduces or reduction.replicate is None:
                    end_shard()
                else:
                    kept.update(zip(outgoing.member_indices, outs, strict=True))
                self._repeated.append((used, self.streams.mark()))

        return pending, end

    def reduce_kept(self, store: ParameterStore, reduction: Reduction) -> None:
        """Sum over the replicate group what waits for that, of members without new gradients."""
        kept = self._kept.pop(store.tag, {}) if reduction.all_reduces else {}
        if not kept:
            return
        # The gradients that they are added to may have been changed by compute since.
        self.streams.reductions_wait_for_compute()
        with self.streams.repeating():
            indices = tuple(sorted(kept))
            for number in indices:
                self._end_sum(reduction, kept[number])
            sums = [kept[number] for number in indices]
            store.add_gradients(Outgoing((), indices), sums, keep_dtype=reduction.keep_dtype)
            self._repeated.append((sums, self.streams.mark()))

    def _end_sum(self, reduction: Reduction, out: torch.Tensor) -> None:
        """Sum over the replicate group, divide, and call the hook, in place."""
        if reduction.replicate is not None:
            reduction.replicate.all_reduce(out).wait()
        hook = reduction.summed_hook
        if hook is not None and not reduction.hook_sees_averages:
            hook(out)
        if reduction.factors[1] != 1.0:
            out.div_(reduction.factors[1])
        if hook is not None and reduction.hook_sees_averages:
            hook(out)

    def _start_whole(
        self, store: ParameterStore, reduction: Reduction, outgoing: Outgoing
    ) -> Started:
        """By the user's hook, or over the replicate group alone."""
        (member,) = outgoing.members
        out, hook, shard = member.whole, reduction.hook, reduction.shard
        pending = PendingCollective(())
        if hook is None and reduction.replicate is not None:
            pending = reduction.replicate.all_reduce(out)
        elif hook is not None and shard is None:
            hook.hook(hook.state, out)
        elif hook is not None and shard is not None:
            full = _equal_parts(member, shard.size) if member.ranges else out
            # As long as the longest part: a hook reduces by equal parts.
            padded = torch.zeros(member.part_numel, dtype=full.dtype, device=full.device)
            hook.hook(hook.state, full, padded)
            out = padded[: outgoing.own_numels[0]]

        def end() -> None:
            if hook is None and reduction.factors[1] != 1.0:
                out.div_(reduction.factors[1])
            store.add_gradients(outgoing, [out], keep_dtype=reduction.keep_dtype)

        return pending, end


def _is_alone(reduction: Reduction) -> bool:
    """Whether this rank's gradient is the sum, and no stream but that of reductions uses it: it
    lies in memory of compute, which waits for that stream alone.
    """
    no_more = reduction.replicate is None and reduction.summed_hook is None
    return no_more and reduction.shard is not None and reduction.shard.size == 1


def _equal_parts(member: RankParts, ranks: int) -> torch.Tensor:
    """The member with zeros behind each rank's part, up to the longest: what hooks can reduce."""
    rows = member.whole.new_zeros(ranks, member.part_numel)
    for rank, row in enumerate(rows):
        part = member.of(rank)
        row[: part.numel()].copy_(part)
    return rows.view(-1)


def divide_factors(size: float) -> tuple[float, float]:
    """What to divide gradients of `size` ranks by before and after their sum: about the root of
    `size` each, the first a power of two. 1 gives 1 and 1, 4 gives 2 and 2, 6 gives 4 and 1.5.
    Also for another number to divide by: 2.5 gives 1 and 2.5.
    """
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before), size / before


def clip_sharded(
    sharded: Sequence[torch.Tensor],
    repeated: Sequence[torch.Tensor],
    *,
    max_norm: float,
    norm_type: float,
    comm: Comm,
    device: torch.device,
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; returns that norm.

    `sharded` are this rank's parts, `repeated` gradients that all ranks of the group hold alike and
    that count once. Collective. The norm is computed in float32 and returned in the dtype that the
    local gradients promote to.
    """
    total = _local_norm(sharded, norm_type, device)
    # What all ranks hold alike is added after the sum over ranks: it counts once.
    if math.isinf(norm_type):
        if repeated:
            total = torch.maximum(total, _local_norm(repeated, norm_type, device))
        comm.all_reduce(total, maximum=True).wait()
    else:
        power = total**norm_type
        comm.all_reduce(power).wait()
        if repeated:
            power += _local_norm(repeated, norm_type, device) ** norm_type
        total = power ** (1.0 / norm_type)
    # Multiplied always, also by one: a test on the value would make the CPU wait for the device.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [*sharded, *repeated]
    for alike in _by_kind(grads):
        foreach_mul(alike, scale.to(device=alike[0].device, dtype=alike[0].dtype))
    if not grads:
        warnings.warn(
            "clip_grad_norm_: this rank has no gradients; the norm is returned in float32",
            stacklevel=3,
        )
        return total
    return total.to(functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))


def _local_norm(
    grads: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    # A new tensor each time: it is reduced in place.
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = []
    for alike in _by_kind(grads):
        of_each = torch.stack(foreach_norm(alike, norm_type))
        norms.append(of_each.to(device=device, dtype=torch.float32))
    joined = norms[0] if len(norms) == 1 else torch.cat(norms)
    total: torch.Tensor = torch.linalg.vector_norm(joined, norm_type)
    return total


def _by_kind(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradients of each dtype in each memory: with offload some are on the host."""
    # torch's foreach kernels are one kernel only over tensors that are alike in both.
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad.detach())
    return list(kinds.values())
