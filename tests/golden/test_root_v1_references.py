"""A root of format version 1 with references, kept for ever: every later version has to load it.

`root_v1_references` was saved once by two ranks, three steps with `dedup`, with
`python -m tests.golden.test_root_v1_references DIRECTORY`. Steps 2 and 3 refer to step 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ckpt
from ckpt.saving.task import SaveOptions
from ckpt.tools.salvage import salvage
from storage import open_store
from tests.e2e.job import Job, Sharded
from tests.salvaged import matches_manifest

ROOT = Path(__file__).parent / "root_v1_references"
RANKS = 2


def _full(step: int) -> dict[str, torch.Tensor]:
    """Two frozen tensors, two that change; arithmetic, as in test_root_v1.py."""
    return {
        "frozen.rows": torch.arange(64, dtype=torch.float32).reshape(16, 4) / 8,
        "frozen.runs": torch.arange(35, dtype=torch.int32).reshape(5, 7),
        "trained.rows": (torch.arange(24).reshape(6, 4) * step).to(torch.bfloat16),
        "trained.runs": torch.arange(21, dtype=torch.float64).reshape(3, 7) - step,
    }


def _state(step: int, rank: int, size: int, *, blank: bool = False) -> dict[str, object]:
    full = _full(step)
    if blank:
        full = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    cut = {
        name: Sharded(tensor, rank, size, dim=None if name.endswith("runs") else 0)
        for name, tensor in full.items()
    }
    return {"cut": cut, "replica": full["frozen.rows"].clone(), "step": 0 if blank else step}


def test_every_step_of_the_golden_root_with_references_loads_on_other_rank_counts() -> None:
    for step in (1, 2, 3):
        for size in (1, 2, 3):
            states = [_state(step, rank, size, blank=True) for rank in range(size)]
            job = Job(size, lambda rank: open_store(str(ROOT)))
            job.load(lambda rank, states=states: states[rank], step=step)
            for rank, state in enumerate(states):
                expected = _state(step, rank, size)
                assert state["step"] == step
                assert torch.equal(state["replica"], expected["replica"])  # type: ignore[arg-type]
                for name, module in expected["cut"].items():  # type: ignore[attr-defined]
                    assert torch.equal(state["cut"][name].local, module.local), name  # type: ignore[index]


def test_the_golden_root_with_references_verifies_and_can_be_salvaged() -> None:
    first, *later = ckpt.list_steps(str(ROOT))
    assert [step.step for step in (first, *later)] == [1, 2, 3]
    assert [step.references for step in later] == [(first.attempt,)] * 2
    store = open_store(str(ROOT))
    for step in (first, *later):
        assert ckpt.verify(str(ROOT), step.step).ok
        directory = f"steps/{step.step:08d}-{step.attempt}"
        assert matches_manifest(store, salvage(store, directory)) is True


def _make(directory: str) -> None:
    job = Job(RANKS, lambda rank: open_store(directory), memories={})
    for step in (1, 2, 3):
        job.save(
            lambda rank, step=step: _state(step, rank, RANKS),
            step=step,
            options=SaveOptions(dedup=True),
        )


if __name__ == "__main__":
    _make(sys.argv[1])
