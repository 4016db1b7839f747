"""Reductions in low precision as communication hooks; they work on every device.

model.register_comm_hook(LowPrecisionState(), bf16_compress_hook)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sharding.engine.collectives import Group, RankParts, comm_of, default_group
from sharding.engine.memory import BufferPool
from sharding.engine.reduction import CommHook, divide_factors

# Hooks reduce one gradient at a time; units count from zero.
_TAG = 1 << 16


class LowPrecisionState:
    """Over which ranks the hooks of this file reduce: all by default."""

    def __init__(self, process_group: Group | None = None) -> None:
        self.comm = comm_of(default_group() if process_group is None else process_group)
        self.pool = BufferPool()


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in float16: the mean, in the dtype of `grad`, goes to `output`, else in place."""
    _reduce_in(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in bfloat16; else as `fp16_compress_hook`."""
    _reduce_in(torch.bfloat16, state, grad, output)


def hook_of(state: object, hook: Callable[..., Any]) -> CommHook:
    """A user's hook as the engine calls it; hooks that compress get gradients as they are computed.

    torch's own compressing hooks need a device with streams: those of this file run instead, over
    the group of torch's state.
    """
    own = {"fp16_compress_hook": fp16_compress_hook, "bf16_compress_hook": bf16_compress_hook}
    if hook in own.values():
        return CommHook(state, hook, casts=True)
    # By name: torch has them in a private package.
    name = getattr(hook, "__name__", "")
    if name in own and hook.__module__.startswith("torch.distributed."):
        group = getattr(state, "process_group", None)
        return CommHook(LowPrecisionState(group), own[name], casts=True)
    return CommHook(state, hook, casts=False)


def _reduce_in(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    # Divided in two steps, so that neither the parts nor the sum leave float16's range.
    before, after = divide_factors(state.comm.size)
    low = grad.to(dtype, copy=True).div_(before)
    if output is None:
        state.comm.all_reduce(low).wait()
        grad.copy_(low.div_(after))
        return
    part = torch.empty(output.numel(), dtype=dtype, device=grad.device)
    members = [RankParts(low, output.numel())]
    state.comm.reduce_scatter(members, [part], pool=state.pool, tag=_TAG).wait()
    output.copy_(part.div_(after))
