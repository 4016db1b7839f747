"""The real near tiers, driven along the actions of their model, and compared with it after each."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt.commit.log import Log, read_format
from ckpt.commit.session import SessionRegistry
from ckpt.errors import CheckpointError, Fenced, NoCheckpoint
from ckpt.near.tier import Tier
from ckpt.near.value import Near
from ckpt.service.events import NearFailed, SaveEvent
from ckpt.service.policies import EverySteps
from ckpt.service.restore import restore_latest
from ckpt.service.tiers import Tiers
from ckpt.service.training import Training
from storage.memory import MemoryStore
from tests.model.near_model import NOTHING, Action, Root, after, possible
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import ThreadWorld, _Hub

NEVER = EverySteps(1 << 40)


class _Running:
    """A job of one rank."""

    def __init__(self, store: MemoryStore, host: Path) -> None:
        world = ThreadWorld(_Hub(1, {}, 60.0), 0)
        self.target = ThreadTarget(world, store, SessionRegistry())
        self.state: dict[str, Any] = {"w": torch.zeros(64), "step": 0, "number": 0}
        self.failed: Exception | None = None
        observers = (self._observe,)
        self.training = Training(self.target, self.state, self.target.world(), observers)
        self.near = Tiers([Near(host / "near", every=EverySteps(1))], NEVER, self.training, {})

    def start(self) -> str:
        report = restore_latest(self.state, self.target, self.training.world, tiers=self.near)
        if report is None:
            return " ".join(map(str, NOTHING))
        self.training.progress.resume(report.step)
        return f"{report.origin} {self._described()}"

    def _described(self) -> str:
        step, number = self.state["step"], self.state["number"]
        whole = torch.equal(self.state["w"], torch.full((64,), float(number)))
        return f"{step} {number}" if whole else "a mixture"

    def save_near(self, number: int) -> None:
        self._become(self.state["step"] + 1, number)
        self.training.progress.advance(self.state["step"])
        self.near.stepped()
        self.near.collect(wait=True)
        if self.failed is not None:
            raise self.failed

    def save(self, number: int) -> None:
        self._become(self.state["step"], number)
        self.target.start(self.state, step=self.state["step"], metric=None).result()

    def go_back(self, store: MemoryStore) -> None:
        oldest = Log(store).state().live[0]
        report = restore_latest(
            self.state,
            self.target,
            self.training.world,
            step=oldest.step,
            attempt=oldest.attempt,
            tiers=self.near,
        )
        assert report is not None
        self.training.progress.resume(report.step)

    def _become(self, step: int, number: int) -> None:
        self.state["w"].fill_(float(number))
        self.state.update(step=step, number=number)

    def _observe(self, event: SaveEvent) -> None:
        if isinstance(event, NearFailed):
            self.failed = event.error

    def end(self) -> None:
        with contextlib.suppress(CheckpointError):
            self.near.close()


class Driven:
    """One world of the product, below a folder."""

    def __init__(self, top: Path) -> None:
        self.host = top / "host"
        self.store = MemoryStore()
        self.jobs: dict[str, _Running] = {}

    def apply(self, action: Action, saved: int) -> str:
        """What the job is told. `saved` states were made before."""
        name = action.job
        if action.name == "lose":
            self.close()
            shutil.rmtree(self.host)
            return "done"
        if action.name == "start":
            if name in self.jobs:
                self.jobs.pop(name).end()
            job = self.jobs[name] = _Running(self.store, self.host)
            return job.start()
        try:
            match action.name:
                case "near":
                    self.jobs[name].save_near(saved + 1)
                case "durable":
                    self.jobs[name].save(saved + 1)
                case _:
                    self.jobs[name].go_back(self.store)
        except Fenced:
            return "Fenced"
        return "done"

    def differences(self, root: Root) -> list[str]:
        """How the log and the tier are not those of the model."""
        problems = []
        if root.slots:
            state = Log(self.store).state()
            if (state.epoch, state.slot + 1) != (root.epoch, root.slots):
                problems.append(f"log {(state.epoch, state.slot + 1)}, the model {root}")
            records = Tier(self.host / "near", read_format(self.store)).records()
            newest = {r.head.epoch: r.head for r in reversed(records)}
            here = {e: (h.step, h.after_slot) for e, h in newest.items()}
            there = {e: (n.state.step, n.after_slot) for e, n in root.near}
            if here.get(root.epoch) != there.get(root.epoch):
                problems.append(f"near states {here}, the model {there}")
        return problems

    def close(self) -> None:
        for job in self.jobs.values():
            job.end()
        self.jobs = {}


class Report(NamedTuple):
    worlds: int
    actions: int
    problems: list[str]


def played(schedule: Sequence[Action], top: Path) -> list[str]:
    """What is wrong after these actions, all of them made anew."""
    root, driven = Root(), Driven(top)
    problems: list[str] = []
    try:
        for action in schedule:
            saved = root.saved
            root, expected = after(root, action)
            try:
                reported = driven.apply(action, saved)
            except NoCheckpoint as error:
                reported = f"NoCheckpoint: {error}"
            problems = [] if reported == expected else [f"told {reported}, the model {expected}"]
            problems += driven.differences(root)
            if problems:
                return [*problems, "; ".join(map(str, schedule))]
    finally:
        driven.close()
        shutil.rmtree(top, ignore_errors=True)
    return problems


def explore(top: Path, depth: int) -> Report:
    """All schedules of up to `depth` actions; worlds that the model cannot tell apart are gone on
    from once. A schedule is played from its beginning: a tier is files that processes map.
    """
    level: list[tuple[Root, tuple[Action, ...]]] = [(Root(), ())]
    seen, count = {Root()}, 0
    for _ in range(depth):
        following = []
        for root, path in level:
            for action in possible(root):
                count += 1
                schedule = (*path, action)
                if problems := played(schedule, top / "world"):
                    return Report(len(seen), count, problems)
                then, _ = after(root, action)
                if then not in seen:
                    seen.add(then)
                    following.append((then, schedule))
        level = following
    return Report(len(seen), count, [])
