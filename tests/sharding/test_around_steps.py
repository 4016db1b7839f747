"""What trainings do around forward and step: activations on the host, clipping, fused optimizers.

Method: some steps under both classes of both engines on two ranks, where every sum has two terms:
losses, norms and values have the same bits. Counts are those of `tests/streams/test_counts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

from tests.sharding.fully_scenarios import (
    assert_close,
    assert_equal,
    claims,
    loss_of,
    sharded,
    values,
)
from tests.sharding.models import batches, build, full_copies, wrapped

SURFACES = ("flat", "in place")
Clip = Callable[[Any], torch.Tensor]


def made(surface: str, who: str, bare: nn.Sequential) -> Any:
    if surface == "flat":
        return wrapped(who, bare, use_orig_params=True)
    return sharded(who, bare)


def full_values(surface: str, model: Any) -> dict[str, torch.Tensor]:
    return full_copies(model) if surface == "flat" else values(model)


def trained(model: Any, optimizer: Any, clip: Clip | None = None) -> list[float]:
    seen = []
    for _, mine in batches(3):
        loss = loss_of(model, mine)
        loss.backward()
        if clip is not None:
            norm: Any = clip(model)
            seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


def same_as_torchs(
    surface: str, optimizer: Callable[[Any], Any], *, clip: Clip | None = None, wrap: Any = None
) -> dict[str, torch.Tensor]:
    """Train under both engines; returns our values."""
    results = {}
    for who in ("torch", "ours"):
        bare = build("uneven")
        if wrap is not None:
            bare[1] = wrap(bare[1])
        model = made(surface, who, bare)
        seen = trained(model, optimizer(model), clip)
        results[who] = (seen, full_values(surface, model))
    assert results["ours"][0] == results["torch"][0], f"{surface}: {results}"
    assert_equal(results["ours"][1], results["torch"][1], surface)
    return results["ours"][1]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def activations_on_the_host() -> None:
    for surface in SURFACES:
        kept = same_as_torchs(surface, sgd)
        # Copies may lie in memory in another order, and are summed so.
        assert_close(same_as_torchs(surface, sgd, wrap=offload_wrapper), kept, surface)
        with save_on_cpu():
            assert_close(same_as_torchs(surface, sgd), kept, surface)


def fused_optimizers() -> None:
    for surface in SURFACES:
        kinds = [torch.optim.Adam, torch.optim.AdamW]
        if surface == "flat":
            kinds.append(torch.optim.SGD)  # torch has none for DTensors
        for kind in kinds:
            fused, plain = (
                same_as_torchs(surface, lambda m: kind(m.parameters(), lr=0.1, fused=fused))  # noqa: B023
                for fused in (True, False)
            )
            assert_close(fused, plain, f"{surface} {kind}")


def clipping_of_all_gradients_at_once() -> None:
    def by_torch(model: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)

    def in_two_parts(model: Any) -> torch.Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=True)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm, foreach=True)
        return norm

    for clip in (by_torch, in_two_parts):
        same_as_torchs("in place", sgd, clip=clip)
    for order in (2.0, 1.0, float("inf")):
        same_as_torchs("flat", sgd, clip=lambda model: model.clip_grad_norm_(0.1, order))  # noqa: B023


test_on_two_ranks = claims(
    2, [activations_on_the_host, fused_optimizers, clipping_of_all_gradients_at_once]
)
