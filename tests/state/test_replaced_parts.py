"""Parts of a state that a load replaces as a whole, whatever size they have: what a module's
`get_extra_state()` returns, and what `torch.optim.Optimizer.state_dict()` does.

Each is saved and loaded as itself, within a module's object or within its state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import InvalidState, Mismatch
from ckpt.service.policies import EverySteps
from tests.ranks import run_ranks


class Calibrated(nn.Module):
    """As Transformer Engine's modules: the extra state is a tensor of bytes, of any length."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def run_of(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.uint8)


EXTRAS: dict[str, Callable[[int], Any]] = {
    "tensor": run_of,
    "dict": lambda size: {"scale": run_of(size), "names": ["a"] * size},
    "list": lambda size: [run_of(1)] * size,
}
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "dict": lambda module: module.state_dict(),
}


@pytest.mark.parametrize("into", FORMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", EXTRAS)
def test_extra_state_changes_its_size(kind: str, form: str, into: str, tmp_path: Path) -> None:
    """A tensor could not be saved by its module, and another size was refused in a dict."""
    make = EXTRAS[kind]
    source, target = Calibrated(make(7)), Calibrated(make(3))
    ckpt.save({"m": FORMS[form](source)}, str(tmp_path), step=1)
    state = {"m": FORMS[into](target)}
    ckpt.load(state, str(tmp_path))
    if into == "dict":
        target.load_state_dict(state["m"])
    assert repr(target.extra) == repr(source.extra)
    assert torch.equal(target.layer.weight, source.layer.weight)


def test_a_tensor_of_extra_state_is_exported(tmp_path: Path) -> None:
    source = Calibrated(run_of(7))
    ckpt.save({"model": source}, str(tmp_path / "run"), step=1)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.pt"), verify=True)
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(out["_extra_state"], run_of(7))


def trained(rate: float, steps: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("saved_steps", [0, 2], ids=["of_fresh", "of_stepped"])
def test_the_state_dict_of_an_optimizer_loads(saved_steps: int, steps: int, tmp_path: Path) -> None:
    """A fresh one had no place for what a stepped one had saved."""
    source, target = trained(0.1, saved_steps), trained(0.5, steps, seed=1)
    ckpt.save(state_of(*source), str(tmp_path), step=1)
    state = state_of(*target)
    report = ckpt.load(state, str(tmp_path))
    assert "optimizer.load_state_dict" in report.warnings[0]
    target[1].load_state_dict(state["optimizer"])
    for each in (source, target):
        train(*each, 3)
    assert torch.equal(source[0].weight, target[0].weight)
    assert repr(source[1].state_dict()) == repr(target[1].state_dict())


def test_a_load_fills_an_optimizers_tensors_in_place(tmp_path: Path) -> None:
    source, target = trained(0.1, 2), trained(0.5, 1, seed=1)
    ckpt.save(state_of(*source), str(tmp_path), step=1)
    live = target[1].state[target[0].weight]["exp_avg"]
    ckpt.load(state_of(*target), str(tmp_path))
    assert torch.equal(live, source[1].state[source[0].weight]["exp_avg"])


def test_a_checkpointer_refuses_an_optimizers_state_dict(tmp_path: Path) -> None:
    """It saved the same dict for ever: of a fresh optimizer one without any state."""
    state = state_of(*trained(0.1, 0))
    with pytest.raises(InvalidState, match=r"optimizer: .* pass the optimizer itself"):
        ckpt.Checkpointer(state, str(tmp_path), save=EverySteps(1))


def _on_ranks(root: str) -> None:
    source, target = trained(0.1, 2), trained(0.5, 0, seed=1)
    ckpt.save(state_of(*source), root, step=1)
    state = state_of(*target)
    ckpt.load(state, root)
    assert repr(state["optimizer"]) == repr(source[1].state_dict())


def _on_sharded_ranks(root: str) -> None:
    def sharded(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, steps)
        return model, optimizer

    ckpt.save(state_of(*sharded(1)), root, step=1)
    with pytest.raises(Mismatch, match=r"optimizer: .* put the optimizer itself into the state"):
        ckpt.load(state_of(*sharded(0)), root)
    ckpt.load(state_of(*sharded(2)), root)


@pytest.mark.ranks
def test_a_fresh_state_dict_of_sharded_state_is_refused(tmp_path: Path) -> None:
    """What it got was whole tensors beside sharded parameters."""
    run_ranks(2, _on_sharded_ranks, str(tmp_path))


@pytest.mark.ranks
def test_ranks_load_the_state_dict_of_an_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _on_ranks, str(tmp_path))
