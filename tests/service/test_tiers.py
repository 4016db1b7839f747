"""A Checkpointer and a tier that is not of ours: any value that keeps the protocol will do.

Method: a tier that keeps copies of the state in a dict of this process, every two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.locate import ResumePoint
from ckpt.errors import RankFailed
from ckpt.loading.load import LoadReport
from ckpt.saving.staging import LentCopy
from ckpt.service.policies import Observation, SavePolicy
from ckpt.service.restore import Restorable, TierRestorable
from ckpt.service.tiers import RecordNumbers, TierSaves, TierValue
from ckpt.service.training import Training
from ckpt.state.types import Loaded
from storage import Store


@dataclass(frozen=True)
class Copy(TierRestorable):
    """One state. It is newer than what was committed with a lower step."""

    state: dict[str, Any] = field(compare=False, default_factory=dict)

    def is_before(self, slot: int, step: int) -> bool:
        return step > self.step

    def load(self, state: Any, options: Mapping[str, Any]) -> LoadReport | str:
        if self.problem:
            return self.problem
        state["w"].copy_(self.state["w"])
        state["step"] = self.step
        return LoadReport(self.step, self.attempt, Loaded((), (), (), ()), 0)


class Memory(TierValue):
    path = "/nowhere"

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.calls: list[str] = []

    def saves(self, *how: Any) -> TierSaves:
        return MemorySaves(self, *how)


class MemorySaves(TierSaves):
    def __init__(
        self,
        tier: Memory,
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
        numbers: RecordNumbers,
    ) -> None:
        self._tier, self._training, self._numbers = tier, training, numbers

    def stepped(self, *, lends: bool) -> Sequence[LentCopy]:
        progress = self._training.progress
        if ckpt.EverySteps(2).reasons(Observation(progress.step, progress.previous_step)):
            name, number = f"copy-{progress.step}", self._numbers.take()
            state = deepcopy(self._training.state)
            known = (progress.step, name, 1.0, ResumePoint("", False), number, "")
            self._tier.copies.insert(0, Copy(*known, state))
        return ()

    def collect(self, *, wait: bool, timeout_seconds: float = 0.0) -> None:
        return

    def candidates(self, store: Store, root: str, epoch: int) -> Sequence[TierRestorable]:
        self.reached = (9.0, 7)
        return self._tier.copies

    def restored(self, chosen: Restorable, own: TierRestorable | None, number: int) -> None:
        self._tier.calls.append(f"restored {chosen.step}, own {own and own.step}")

    def leave(self, failure: RankFailed) -> None:
        return

    def close(self) -> None:
        self._tier.calls.append("closed")


def test_a_tier_of_another_kind_saves_and_is_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(8), "step": 0}
    tier = Memory()
    save = ckpt.EverySteps(4)
    with ckpt.Checkpointer(state, tmp_path, save=save, near=tier, only=True) as checkpointer:
        assert checkpointer.restore() is None
        for step in range(1, 8):
            state["w"] += 1
            state["step"] = step
            checkpointer.step(step)
    assert [one.step for one in tier.copies] == [6, 4, 2]
    state["w"].zero_()
    with ckpt.Checkpointer(state, tmp_path, save=save, near=[tier], only=True) as checkpointer:
        report = checkpointer.restore()
        assert report is not None and (report.step, report.origin) == (6, "near")
        assert (report.reached_step, report.seconds_lost) == (7, 8.0)
    assert torch.equal(state["w"], torch.full((8,), 6.0)) and state["step"] == 6
    assert tier.calls == ["closed", "restored 6, own 6", "closed"]


def test_a_tier_that_has_lost_its_state_is_passed_over(tmp_path: Path) -> None:
    state, tier = {"w": torch.ones(8), "step": 4}, Memory()
    ckpt.save(state, tmp_path, step=4)
    tier.copies = [Copy(6, "copy-6", 1.0, ResumePoint("", False), 1, "its host is gone")]
    with ckpt.Checkpointer(state, tmp_path, save=ckpt.Never(), near=tier) as checkpointer:
        report = checkpointer.restore()
    assert report is not None and (report.step, report.origin) == (4, "durable")
    assert [(one.step, one.reason) for one in report.skipped] == [(6, "its host is gone")]
    assert tier.calls == ["restored 4, own None", "closed"]


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected ckpt\.Near"):
        ckpt.Checkpointer({"step": 0}, tmp_path, near="/dev/shm/run")  # type: ignore[arg-type]
