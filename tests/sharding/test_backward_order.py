"""Where a unit's reduction comes in the backward.

The views of a unit hang on one node of the graph, which is the same in every step; of the nodes
that are ready autograd runs the newest first. Method: two ranks, several units; the order is read
from the log of a step, values are compared with the unsharded model's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import sharding
from tests.sharding.fully_scenarios import claims

STEPS = 3
BLOCKS = 4


class Apart(nn.Linear):
    """Weight and bias in operations of their own, so that their backwards are two nodes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mm(self.weight) + self.bias


class Blocks(nn.Module):
    """Layers between a layer at either end; `frozen` ones have a bias to train only."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Apart(8, 8) for _ in range(BLOCKS))
        for block in self.blocks:
            block.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def fully(model: Any) -> Any:
    for block in model.blocks:
        sharding.fully_shard(block)
    return sharding.fully_shard(model)


def flat(model: Any) -> Any:
    wrap = sharding.FullyShardedDataParallel
    model.blocks = nn.ModuleList(wrap(block, use_orig_params=True) for block in model.blocks)
    return wrap(model, use_orig_params=True)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator)


def every_unit_reduces_before_the_units_before_it_go_backward() -> None:
    for wrap in (fully, flat):
        model = wrap(Blocks(frozen=False))
        for number in range(STEPS):
            model(batch(number)).sum().backward()
            unit = model.fsdp_group.unit if wrap is fully else model.fsdp_unit
            last = [(one.what, one.unit) for one in unit.runtime.steps.last]
            for later, earlier in zip(range(BLOCKS, 1, -1), range(BLOCKS - 1, 0, -1), strict=True):
                reduces = last.index(("reduce", later))
                assert reduces < last.index(("backward", earlier)), (wrap, number, last)
            model.zero_grad()


def what_is_frozen_is_there_until_the_backward_of_every_forward_has_read_it() -> None:
    """Forwards run ahead of backwards, as in a pipeline."""
    plain = Blocks(frozen=True)
    model = fully(copy.deepcopy(plain))
    for one in (plain, model):
        waiting = []
        for number in range(5):
            waiting.append(one(batch(number)).sum())
            if number:
                waiting.pop(0).backward()
        waiting.pop().backward()
    for wanted, reduced in zip(plain.parameters(), model.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(reduced.grad.full_tensor(), wanted.grad)


test_on_two_ranks = claims(
    2,
    [
        every_unit_reduces_before_the_units_before_it_go_backward,
        what_is_frozen_is_there_until_the_backward_of_every_forward_has_read_it,
    ],
)
