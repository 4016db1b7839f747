"""Clipping by the norm over all parameters, however they are spread over ranks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch

from sharding.engine.collectives import Comm
from sharding.engine.torch_seam import foreach_mul_by, foreach_norm

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
        foreach_mul_by(alike, scale.to(device=alike[0].device, dtype=alike[0].dtype))
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
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad.detach())
    return list(kinds.values())
