"""Clipping by the norm over all parameters, however they are spread over ranks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch

from sharding.engine.collectives import Comm

__all__ = ["clip_sharded"]


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
    if math.isinf(norm_type):
        total = torch.maximum(total, _local_norm(repeated, norm_type, device))
        comm.all_reduce(total, maximum=True).wait()
    else:
        power = total**norm_type
        comm.all_reduce(power).wait()
        power += _local_norm(repeated, norm_type, device) ** norm_type
        total = power ** (1.0 / norm_type)
    # Multiplied always, also by one: a test on the value would make the CPU wait for the device.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [*sharded, *repeated]
    for grad in grads:  # they may be of several dtypes, and with offload on the host
        grad.mul_(scale.to(device=grad.device, dtype=grad.dtype))
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
    for grad in grads:
        # In float32 at least: squares of half precision overflow, and doubles keep theirs.
        wide = torch.promote_types(grad.dtype, torch.float32)
        norm = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=wide)
        norms.append(norm.to(device=device, dtype=torch.float32))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
