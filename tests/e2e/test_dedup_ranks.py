"""Adapters on a frozen model, under torch's FSDP2 on two real ranks: what a save writes.

Method: gloo processes fine-tune low-rank adapters beside frozen linear layers with AdamW and save
after each step, in the foreground and in the background in turn; the bytes in each directory are
measured, and every step is loaded by other numbers of ranks and compared with what training had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, RANK, LAYERS = 1024, 4, 4


class Adapted(nn.Module):
    """A frozen linear layer, and a trainable update of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return adapted.tanh()


def _build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-3)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def _train(root: str, steps: int) -> list[dict[str, torch.Tensor]]:
    model, optimizer = _build(1)
    trained = []
    for step in range(1, steps + 1):
        _step(model, optimizer, step)
        state = {"model": model, "optimizer": optimizer, "step": step}
        if step % 2:
            report = ckpt.save(state, root, step=step, dedup=True)
        else:
            report = ckpt.async_save(state, root, step=step, dedup=True).result()
        assert (report.nbytes_referenced > 0) == (step > 1)
        trained.append(_whole(model))
    return trained


def _resume(root: str, step: int) -> dict[str, torch.Tensor]:
    model, optimizer = _build(2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    ckpt.load(state, root, step=step)
    assert state["step"] == step
    return _whole(model)


def _resume_and_save(root: str, step: int) -> None:
    """The first save of a new process: the previous manifest is read once and handed around."""
    model, optimizer = _build(2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    ckpt.load(state, root)
    _step(model, optimizer, step)
    ckpt.save({**state, "step": step}, root, step=step, dedup=True)


def test_adapters_on_a_frozen_model_write_at_most_6_percent(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    trained = run_ranks(2, _train, root, 3)[0]
    for step in (4, 5):
        run_ranks(2, _resume_and_save, root, step)
    frozen = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    adapters = LAYERS * 2 * WIDTH * RANK * 4 * 3  # weights and two moments
    written = {
        entry.step: sum(path.stat().st_size for path in Path(entry.url.split("//")[-1]).iterdir())
        for entry in ckpt.list_steps(root)
    }
    assert min(written[1], written[4]) > frozen + adapters
    for step in (2, 3, 5):
        assert adapters < written[step] <= 0.06 * (frozen + adapters), written
    for size, step in ((1, 2), (2, 3), (3, 1)):
        loaded = run_ranks(size, _resume, root, step)[0]
        assert loaded.keys() == trained[step - 1].keys()
        assert all(torch.equal(loaded[name], trained[step - 1][name]) for name in loaded)
    assert ckpt.verify(root).ok
