"""The engine on a device: one rank with the sharded paths forced, so that streams and events run.

Method: the same bodies on the CPU, where they say that the forced paths are right.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding.fsdp
from sharding import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from tests.ranks import run_ranks
from tests.sharding.models import full_copies

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 8))


def train(model: nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def start(device: str) -> None:
    """A group of one rank on the device's backend, in which nothing is clamped to NO_SHARD."""
    if device != "cpu":
        dist.destroy_process_group()
        torch.get_device_module(device).set_device(0)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    wrapper: Any = sharding.fsdp
    assert callable(wrapper.clamped)  # a new name there would force nothing
    wrapper.clamped = lambda strategy, groups: strategy


def forced(device: str) -> None:
    start(device)
    wanted = train(build().to(device), device)
    prefetches = (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
    for strategy, orig, prefetch, offload in itertools.product(
        ("FULL_SHARD", "SHARD_GRAD_OP"), (False, True), prefetches, (False, True)
    ):
        model = Ours(
            build(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
            use_orig_params=orig,
            backward_prefetch=prefetch,
            forward_prefetch=orig,
            cpu_offload=CPUOffload(offload),
            device_id=torch.device(device, 0) if device != "cpu" else torch.device("cpu"),
        )
        assert model.fsdp_unit.settings.is_sharded
        losses = train(model, device)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))
        for unit in Ours.fsdp_modules(model):
            store = unit.fsdp_unit.store
            assert store is None or store.gathered_nbytes == 0
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = Ours(build().to(device), mixed_precision=low, use_orig_params=True)
    torch.testing.assert_close(
        torch.tensor(train(model, device)), torch.tensor(wanted), rtol=0.05, atol=0.01
    )


def test_one_rank_with_the_sharded_paths_forced_trains_as_the_bare_model(device: str) -> None:
    run_ranks(1, forced, device, timeout_seconds=120)


class WithGradient(nn.Module):
    """Parameters with gradients, a buffer, and a part that is to be left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        for param in self.parameters():
            param.grad = torch.full_like(param, 2.0)


def moved(device: str) -> None:
    start(device)
    target = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
    bare = WithGradient()
    wanted = bare.layer.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Ours(bare, device_id=target, ignored_modules=[bare.kept])
    assert model.fsdp_unit.store.flat.device == target
    assert bare.scale.device == target
    assert bare.kept.weight.device == bare.kept.weight.grad.device == torch.device("cpu")
    assert torch.equal(full_copies(model)["layer.weight"].cpu(), wanted)


def test_states_on_the_host_move_to_the_device_and_ignored_ones_stay(device: str) -> None:
    run_ranks(1, moved, device)
