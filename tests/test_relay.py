"""A training that changes engine and number of ranks goes on with the same numbers; what each
version of Python and torch has to do (`make versions`).

Method: two ranks train and save under one engine; one and three ranks load under another, and have
the same parameters and optimizer states, which are compared as whole tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import sharding
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

ENGINES = ("flat", "orig", "fully")


def build(engine: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if engine == "fully":
        sharding.fully_shard(model[0])
        sharding.fully_shard(model)
    else:
        wraps = sharding.FullyShardedDataParallel
        model[0] = wraps(model[0], use_orig_params=engine == "orig")
        model = wraps(model, use_orig_params=engine == "orig")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, steps: int) -> float:
    total = 0.0
    for number in range(steps):
        batch = torch.linspace(-1, 1, 20).view(4, 5) * (number + 1)  # the same on all ranks
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


def save_two_steps(engine: str, root: str) -> float:
    model, optimizer = build(engine)
    train(model, optimizer, 2)
    ckpt.save({"model": model, "optimizer": optimizer}, root, step=2)
    return train(model, optimizer, 2)


def load_and_go_on(engine: str, root: str) -> float:
    model, optimizer = build(engine)
    ckpt.load({"model": model, "optimizer": optimizer}, root)
    return train(model, optimizer, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_goes_on_under_another_engine(engine: str, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    (wanted, _) = run_ranks(2, save_two_steps, engine, root)
    other = ENGINES[(ENGINES.index(engine) + 1) % len(ENGINES)]
    for ranks in (1, 3):
        for loss in run_ranks(ranks, load_and_go_on, other, root):
            assert loss == pytest.approx(wanted, rel=1e-5)
