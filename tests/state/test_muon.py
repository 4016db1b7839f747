"""Muon, whose state is shaped like its two-dimensional parameters, moves like all others.

Method: an unsharded model moves to another one by full dicts, and FSDP2 on 2 ranks saves; the state
that an unsharded model loads from there is the same, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.state_dict import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    model(batch).square().mean().backward()
    optimizer.step()


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.01)


def test_muon_goes_out_and_in_unsharded() -> None:
    model, again = _model(0), _model(1)
    optimizer, other = _muon(model), _muon(again)
    _step(model, optimizer, 0)
    load_model_state_dict(again, model_state_dict(model))
    load_optimizer_state_dict(again, other, optimizer_state_dict(model, optimizer))
    for seed in (1, 2):
        _step(model, optimizer, seed)
        _step(again, other, seed)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def _shard_and_save(root: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model = _model(0)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = _muon(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
    ckpt.save({"model": model, "optim": optimizer}, root, step=1)
    return model_state_dict(model), optimizer_state_dict(model, optimizer)


@pytest.mark.ranks
def test_muon_of_fsdp2_is_loaded_by_an_unsharded_one(tmp_path: Path) -> None:
    full, optim = run_ranks(2, _shard_and_save, str(tmp_path))[0]
    model = _model(3)
    optimizer = _muon(model)
    ckpt.load({"model": model, "optim": optimizer}, str(tmp_path))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), full[name])
        expected = optim["state"][name]["momentum_buffer"]
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], expected)
    _step(model, optimizer, 5)
