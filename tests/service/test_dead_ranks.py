"""A rank that is killed in any phase is named by all others within seconds, and nothing is lost.

Method: three processes train under a Checkpointer that saves in the background all the time. One
kills itself with SIGKILL when it enters a round of a save, or of a restore, or between two steps.
The survivors measure how long `step` went on before it raised. Afterwards the same root has a whole
checkpoint to go on from, and another job saves there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import RankFailed
from ckpt.process import world_of
from tests.conftest import Scale
from tests.ranks import run_ranks
from tests.results import Counted

pytestmark = pytest.mark.ranks

STEP_OF_DEATH = 40
# Rounds of a save in the background, in their order, and the places outside of saves.
PHASES = (
    "training",
    "restore",
    "agree on begin",
    "agree on settle",
    "attempt",
    "agree on write",
    "parts",
    "agree on commit",
    "report",
    "close",
)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_round(phase: str, armed: list[bool]) -> None:
    """The next round of that name that this rank enters, once `armed`, is its last."""
    world: Any = world_of()
    enter = world._in_round

    def deadly(name: str) -> Any:
        if armed and name == phase:
            _die()
        return enter(name)

    world._in_round = deadly


def _train(url: str, phase: str, victim: int) -> tuple[int, str, list[str]]:
    rank = dist.get_rank()
    armed: list[bool] = []
    if rank == victim:
        _die_in_round("manifest" if phase == "restore" else phase, armed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer = ckpt.Checkpointer(
        state, url, save=ckpt.EverySteps(5), keep=ckpt.KeepLatest(3), only=True
    )
    try:
        if phase == "restore":
            armed.append(True)
        checkpointer.restore()
        for step in range(int(state["step"]) + 1, 10_000):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            checkpointer.step(step)
            time.sleep(0.005)  # the rest of a step
            if step == STEP_OF_DEATH:
                armed.append(True)
                if phase == "training" and rank == victim:
                    _die()
                if phase == "close":
                    if rank == victim:
                        _die()
                    checkpointer.close()
    except RankFailed as error:
        texts = [str(failure.error) for failure in checkpointer.failures]
        return error.rank, str(error), texts
    finally:
        left = RankFailed("the test ends", rank=victim, phase=phase)
        checkpointer.__exit__(RankFailed, left, None)
    raise AssertionError(f"rank {rank} noticed nothing")


def _go_on(url: str) -> int:
    state = {"model": nn.Linear(64, 64), "step": 0}
    with ckpt.Checkpointer(state, url, save=ckpt.AtExit(), only=True) as checkpointer:
        report = ckpt.load(state, url)
        assert state["step"] == report.step
        state["step"] = report.step + 1
        checkpointer.step(report.step + 1)
    return report.step


def test_a_killed_rank_is_named_in_every_phase(
    tmp_path: Path, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    every = [(phase, victim) for phase in PHASES for victim in (0, 1, 2)]
    chosen = every if scale.soak else [*rng.sample(every, 3), ("agree on write", 1)]
    for number, (phase, victim) in enumerate(chosen):
        url = str(tmp_path / f"root-{number}")
        if phase == "restore":
            ckpt.save({"model": nn.Linear(64, 64), "optimizer": {}, "step": 1}, url, step=1)
        results = run_ranks(3, _train, url, phase, victim, allow_dead=[victim])
        counted(deaths=1)
        for rank, heard in enumerate(results):
            if rank == victim:
                continue
            named, text, failures = heard
            counted(survivors_that_named_the_rank=int(named == victim))
            assert named == victim and f"rank {victim} has died" in text, (phase, heard)
            is_committed = phase == "agree on commit" and rank == 0  # which rank 0 knows
            if phase not in ("training", "restore", "close", "report") and not is_committed:
                # The save that it died in has failed on all survivors, and says where.
                assert any(f"rank {victim} has died in phase '" in f for f in failures), heard
        if phase != "restore":
            assert ckpt.verify(url).ok
            assert _go_on(url) >= STEP_OF_DEATH - 10
