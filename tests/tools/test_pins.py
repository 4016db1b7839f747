"""Pins keep a checkpoint through every rule and `ckpt rm`, until they are lifted.

Method: pinned by the command and by the function, next to a training that saves; then every rule,
`prune`, `rm` and the Checkpointer's own retention run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.service.retention import KeepRule


def _state(step: int) -> dict[str, Any]:
    return {"x": torch.full((4,), float(step)), "step": step}


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    for step in (1, 2, 3):
        ckpt.save(_state(step), url, step=step, metric=-step)
    return url


def _steps(url: str) -> list[int]:
    return [info.step for info in ckpt.list_steps(url)]


def test_a_pin_is_shown_and_lifted(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pin", root, "--step", "1"]) == 0
    attempt = ckpt.list_steps(root)[0].attempt
    assert capsys.readouterr().out == f"pinned step 1 ({attempt})\n"
    assert main(["ls", root]) == 0
    assert "pinned" in next(
        line for line in capsys.readouterr().out.splitlines() if attempt in line
    )
    assert [info.pinned for info in ckpt.list_steps(root)] == [True, False, False]
    assert ckpt.pin(root, 1).attempt == attempt, "pinned already"
    assert main(["unpin", root, "--step", "1", "--json"]) == 0
    answer = {"schema": "ckpt.unpin", "version": 1, "step": 1, "attempt": attempt, "pinned": False}
    assert json.loads(capsys.readouterr().out) == answer
    assert not any(info.pinned for info in ckpt.list_steps(root))
    assert ckpt.unpin(root, 1).attempt == attempt


@pytest.mark.parametrize(
    "rule", ["--keep-last 1", "--keep-every 1000", "--keep-best 1:min", "--keep-younger 1h"]
)
def test_prune_and_rm_leave_what_is_pinned(root: str, rule: str) -> None:
    ckpt.pin(root, 1)
    assert main(["prune", root, *rule.split(), "--yes"]) == 0
    assert 1 in _steps(root)
    assert main(["rm", root, "--step", "1", "--yes"]) == 1
    ckpt.unpin(root, 1)
    assert main(["rm", root, "--step", "1", "--yes"]) == 0
    assert 1 not in _steps(root)


@pytest.mark.parametrize(
    "rule", [ckpt.KeepLatest(1), ckpt.KeepEvery(1000), ckpt.KeepBest(1, unmeasured="retire")]
)
def test_a_pin_set_while_a_training_runs_holds(tmp_path: Path, rule: KeepRule) -> None:
    url, state = str(tmp_path / "run"), _state(0)
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1), keep=rule) as saver:
        for step in range(5, 12):
            saver.step(step, metric=-step)
            saver.wait()
            if step == 7:
                ckpt.pin(url, 7)
    assert 7 in _steps(url) and 8 not in _steps(url)
    ckpt.load(state, url, step=7)


def test_what_is_not_there_or_not_one_is_refused(root: str) -> None:
    with pytest.raises(NoCheckpoint, match=r"no step 9; the root has steps \[1, 2, 3\]"):
        ckpt.pin(root, 9)
    ckpt.save(_state(1), root, step=1)
    with pytest.raises(CheckpointError, match="2 checkpoints of step 1; choose one"):
        ckpt.pin(root, 1)
    attempt = ckpt.list_steps(root)[0].attempt
    assert ckpt.pin(root, 1, attempt=attempt).attempt == attempt
    with pytest.raises(NoCheckpoint):
        ckpt.pin(root + "-not-there", 1)


def test_what_waits_loads_and_is_brought_back_by_a_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour of grace, which ends by a clock that is set on; then the pinned one is left."""
    url, state = str(tmp_path / "run"), _state(0)
    with ckpt.Checkpointer(
        state, url, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(1), retire_after=3600.0
    ) as saver:
        for step in (1, 2, 3):
            state.update(_state(step))
            saver.step(step)
            saver.wait()
        assert _steps(url) == [1, 2, 3]
        plan = saver.retention_plan()
        assert plan is not None and not plan.retire
        assert main(["prune", url, "--keep-last", "1", "--retire-after", "1h", "--yes"]) == 0
        assert "0 checkpoints deleted, 3 kept" in capsys.readouterr().out
        assert main(["pin", url, "--step", "2"]) == 0
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3700)
        saver.step(4)
        saver.wait()
        monkeypatch.undo()
    assert _steps(url) == [2, 4]
    ckpt.load(state, url, step=2)
    assert state["step"] == 2
