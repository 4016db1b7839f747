"""Optimizer dicts go from wrapped models to bare ones and back: torch's own loading is the judge.

All layers have one shape, so that a moment under the wrong id is loaded without a complaint; only
values show it. Wrappings, groups and their order are drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sharding import FullyShardedDataParallel, OptimStateKeyType
from tests.ranks import run_ranks
from tests.sharding.test_state_dicts import assert_same, quiet

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel
WIDTH = 4
DRAWS = 12


class Node(nn.Module):
    """A layer of its own before, or after, those below."""

    def __init__(self, inner: list[nn.Module], *, first: bool) -> None:
        super().__init__()
        if first:
            self.own = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(inner)
        if not first:
            self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.own, *self.inner):
            x = torch.tanh(module(x))
        return x


def tree(draw: random.Random, depth: int) -> Node:
    count = draw.randint(1, 2) if depth else 0
    return Node([tree(draw, depth - 1) for _ in range(count)], first=draw.random() < 0.5)


def wrap(model: nn.Module, draw: random.Random, orig: bool) -> nn.Module:
    for name, child in model.named_children():
        for index, below in enumerate(child) if isinstance(child, nn.ModuleList) else ():
            child[index] = wrap(below, draw, orig)
        if name == "own" and draw.random() < 0.3:
            model.own = made(child, orig)
    return made(model, orig) if draw.random() < 0.6 else model


def made(module: nn.Module, orig: bool) -> nn.Module:
    return Ours(module, device_id=torch.device("cpu"), use_orig_params=orig)


def adam(groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": g, "lr": 0.1 * index} for index, g in enumerate(groups, 1)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[param] for name, param in model.named_parameters()}


def members(model: nn.Module, groups: list[list[nn.Parameter]]) -> Iterator[list[str]]:
    """The bare names of each group, whatever is flat, from the dict of a fresh optimizer."""
    full_dict = quiet(Ours.full_optim_state_dict, model, adam(groups), rank0_only=False)
    for group in full_dict["param_groups"]:
        yield group["params"]


def both_ways(seed: int) -> None:
    draw, again = random.Random(seed), random.Random(seed)
    torch.manual_seed(seed)
    orig = bool(seed % 2)
    wrapped = made(wrap(tree(draw, 2), draw, orig), orig)
    bare: Any = tree(again, 2)
    groups = parted(list(wrapped.parameters()), draw)
    optimizer = adam(groups)
    named = dict(bare.named_parameters())
    parts = [[n for n in named if n in part] for part in map(set, members(wrapped, groups))]
    order = draw.sample(range(len(parts)), len(parts))
    bare_optimizer = torch.optim.Adam(
        [{"params": [named[n] for n in parts[index]], "lr": 0.1 * (index + 1)} for index in order]
    )
    step(wrapped, optimizer, seed)
    full = quiet(Ours.full_optim_state_dict, wrapped, optimizer, rank0_only=False)
    ids = quiet(
        Ours.rekey_optim_state_dict, full, OptimStateKeyType.PARAM_ID, bare, optim=bare_optimizer
    )
    assert all(group["params"] == sorted(group["params"]) for group in ids["param_groups"])
    bare_optimizer.load_state_dict(ids)
    assert_same(by_name(bare, bare_optimizer), full["state"], f"{seed}: to the bare model")
    assert [group["lr"] for group in bare_optimizer.param_groups] == [
        0.1 * (index + 1) for index in order
    ]

    step(bare, bare_optimizer, seed + 1)
    names = Ours.rekey_optim_state_dict(
        bare_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, bare, optim=bare_optimizer
    )
    optimizer.load_state_dict(
        quiet(Ours.shard_full_optim_state_dict, names, wrapped, optim=optimizer)
    )
    full = quiet(Ours.full_optim_state_dict, wrapped, optimizer, rank0_only=False)
    assert_same(full["state"], by_name(bare, bare_optimizer), f"{seed}: from the bare model")
    assert [group["lr"] for group in optimizer.param_groups] == [
        0.1 * index for index in range(1, len(groups) + 1)
    ]


def parted(params: list[nn.Parameter], draw: random.Random) -> list[list[nn.Parameter]]:
    """One to three groups, each in an order of its own."""
    params = draw.sample(params, len(params))
    count = min(draw.randint(1, 3), len(params))
    return [params[index::count] for index in range(count)]


def draws() -> None:
    for seed in range(DRAWS):
        both_ways(seed)


def test_moments_keep_their_parameter_under_random_wrappings() -> None:
    run_ranks(2, draws)
