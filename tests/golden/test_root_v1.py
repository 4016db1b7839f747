"""A whole root of format version 1, kept for ever: every later version has to load it.

`root_v1` was saved once by three ranks, two steps, with `python -m tests.golden.test_root_v1
DIRECTORY`. Its tensors are arithmetic, so what they must be needs no second file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.state.types import PerRank
from storage import open_store
from tests.e2e.job import Job, Sharded, StoreOf

ROOT = Path(__file__).parent / "root_v1"
RANKS = 3


def _full(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(35, dtype=torch.float32).reshape(7, 5) / 8 + step,
        "columns": (torch.arange(24).reshape(4, 6) * step).to(torch.bfloat16),
        "runs": torch.arange(21, dtype=torch.float64).reshape(3, 7) - step,
        "flags": torch.arange(9) % (step + 1) == 0,
        "complex": torch.complex(torch.arange(4.0), torch.arange(4.0) * step).to(torch.complex128),
        "scalar": torch.tensor(step, dtype=torch.int32),
        "empty": torch.zeros(0, 3),
    }


def _state(step: int, rank: int, size: int, *, blank: bool = False) -> dict[str, Any]:
    full = _full(step)
    if blank:
        full = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    sharded: dict[str, nn.Module] = {
        "rows": Sharded(full.pop("rows"), rank, size, dim=0),
        "columns": Sharded(full.pop("columns"), rank, size, dim=1),
        "runs": Sharded(full.pop("runs"), rank, size, dim=None),
    }
    value = {"epoch": 0 if blank else step, "names": ["a", ("b", None)], "nan": 2.5}
    position = PerRank(-1 if blank else rank + 10 * step, on_reshard=lambda v, rank, size: v[rank])
    return {"sharded": sharded, "plain": full, "value": value, "position": position}


def blank_state(rank: int, size: int) -> dict[str, Any]:
    """What a load fills."""
    return _state(1, rank, size, blank=True)


def assert_is(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    expected = _state(step, rank, size)
    for name, module in expected["sharded"].items():
        assert torch.equal(state["sharded"][name].local, module.local), name
    for name, tensor in expected["plain"].items():
        assert state["plain"][name].dtype == tensor.dtype
        assert torch.equal(state["plain"][name], tensor), name
    assert state["value"] == expected["value"]


def test_every_step_of_the_golden_root_loads_on_other_rank_counts() -> None:
    for step in (1, 2):
        for size in (1, 2, 3):
            states = [_state(step, rank, size, blank=True) for rank in range(size)]
            job = Job(size, lambda rank: open_store(str(ROOT)))
            reports = job.load(lambda rank, states=states: states[rank], step=step)
            assert [report.step for report in reports] == [step] * size
            for rank, state in enumerate(states):
                assert_is(state, step, rank, size)


def test_the_golden_root_opens_and_verifies_without_a_state() -> None:
    assert [entry.step for entry in ckpt.list_steps(str(ROOT))] == [1, 2]
    with ckpt.open(str(ROOT)) as opened:
        assert torch.equal(opened["sharded.runs.tensor"], _full(2)["runs"])
        assert torch.equal(opened["plain.complex"], _full(2)["complex"])


def make(store_of: StoreOf, steps: int) -> None:
    """Save the first `steps` steps by all ranks."""
    job = Job(RANKS, store_of)
    for step in range(1, steps + 1):
        job.save(lambda rank, step=step: _state(step, rank, RANKS), step=step)


if __name__ == "__main__":
    make(lambda rank: open_store(sys.argv[1]), 2)
