"""A training of which little changes: frozen weights, and adapters with their optimizer state.

Of the bytes, 95 % are frozen. Every element of every tensor says of which step it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ckpt.saving.task import SaveOptions
from tests.e2e.job import Sharded

DEDUP = SaveOptions(dedup=True)
ADAPTERS = ("adapter.a", "adapter.b", "moment.a", "moment.b")


def full_at(step: int, rows: int = 20) -> dict[str, torch.Tensor]:
    """All tensors at `step`, whole; frozen ones are the same at every step."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"frozen.{index}": torch.randn(4 * rows, 19, generator=generator).bfloat16()
        for index in range(20)
    }
    for name in ADAPTERS:
        tensors[name] = torch.randn(rows // 2, 19, generator=generator) + step
    return tensors


def lora_at(step: int, rank: int = 0, size: int = 1, rows: int = 20) -> dict[str, Any]:
    """What a rank has at `step`: rows of most tensors, runs of some, replicas of one."""
    full = full_at(step, rows)
    replica = full.pop("frozen.0")
    state: dict[str, Any] = {
        name: Sharded(tensor, rank, size, dim=None if index % 3 == 0 else 0)
        for index, (name, tensor) in enumerate(full.items())
    }
    return {"weights": state, "replica": replica, "step": step, "lr": 0.1 / step if step else 0.0}


def assert_is_lora(state: dict[str, Any], step: int, rank: int = 0, size: int = 1) -> None:
    """Every tensor and value of `state` is bit for bit that of `step`."""
    rows = state["replica"].shape[0] // 4
    expected = lora_at(step, rank, size, rows)
    assert state["step"] == step and state["lr"] == expected["lr"]
    assert torch.equal(state["replica"], expected["replica"])
    for name, module in expected["weights"].items():
        assert torch.equal(state["weights"][name].local, module.local), name


def nbytes_at(rows: int = 20) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in full_at(0, rows).values())
