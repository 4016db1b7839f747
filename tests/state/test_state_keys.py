"""Keys of an optimizer's state come back as they were, names and whole numbers.

Method: an optimizer that keeps state under numbers, as heavyball does, saved and loaded, converted
to a full state dict and back, and exported; judged by torch's own `state_dict`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState
from ckpt.format.joint_manifest import or_per_rank
from tests.convert.jobs import assert_same


class Numbered(torch.optim.SGD):
    """Keeps a tensor like the parameter, a nested state, a number and a scalar under numbers."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state[0] = {"moment": torch.randn_like(param), "count": [1, torch.randn(2)]}
                state[1] = torch.randn_like(param)
                state[-2] = 7
                state[3] = torch.tensor(2.5)
                state["0"] = torch.randn_like(param)


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = Numbered(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("is_new", [True, False])
def test_numbers_stay_numbers_in_a_load(is_new: bool, tmp_path: Path) -> None:
    state = trained(1)
    ckpt.save(state, tmp_path, step=1)
    other = trained(2)
    if is_new:
        other["optim"] = Numbered(other["model"].parameters(), lr=0.1, momentum=0.9)
    ckpt.load(other, tmp_path)
    assert_same(other["optim"].state_dict(), state["optim"].state_dict())


def test_numbers_stay_numbers_in_state_dicts_and_exports(tmp_path: Path) -> None:
    state = trained(1)
    full = ckpt.state_dict.optimizer_state_dict(state["model"], state["optim"])
    own = state["optim"].state_dict()["state"]
    assert_same(full["state"], {"weight": own[0], "bias": own[1]})
    other = trained(2)
    ckpt.state_dict.load_optimizer_state_dict(other["model"], other["optim"], full)
    assert_same(other["optim"].state_dict(), state["optim"].state_dict())
    ckpt.save(state, tmp_path / "root", step=1)
    ckpt.export(tmp_path / "root", tmp_path / "state.pt", optimizer=True)
    exported = torch.load(tmp_path / "state.pt", weights_only=True)["optim"]["state"]
    assert_same(exported, {"weight": own[0], "bias": own[1]})


@pytest.mark.parametrize("key", [(1, 2), None, 1.5, b"m", "7~index", "m~index"])
def test_other_keys_are_refused_by_name(key: Any, tmp_path: Path) -> None:
    state = trained(1)
    state["optim"].state[state["model"].weight][key] = torch.ones(3)
    with pytest.raises(InvalidState, match=r"optim\.state\.weight: has state under "):
        ckpt.save(state, tmp_path, step=1)


def test_a_declaration_names_the_key_and_so_does_the_advice(tmp_path: Path) -> None:
    assert "{0: PerRank(" in or_per_rank("optim.state.inner.weight.0~index")
    assert "{-2: PerRank(" in or_per_rank("optim.state.inner.weight.-2~index~int")
    assert '{"0": PerRank(' in or_per_rank("optim.state.0", ())
    assert '{"m": PerRank(' in or_per_rank("optim.state.inner.weight.m.0~rank1")
    assert "{0: PerRank(" in or_per_rank("optim.state.w.0~index.m", ["optim.state.w.0~index"])
    state = trained(1)
    state["optim"].state[state["model"].weight][4] = torch.ones(5)
    ckpt.save(state, tmp_path / "plain", step=1)
    ckpt.state_dict.declare_optimizer_state(state["optim"], {4: ckpt.PerRank(None, print)})
    ckpt.save(state, tmp_path / "own", step=1)
    with ckpt.open(tmp_path / "plain") as plain, ckpt.open(tmp_path / "own") as own:
        assert "optim.state.weight.4~index" in {*plain.keys()} - {*own.keys()}
