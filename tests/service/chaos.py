"""Helpers for chaos tests: a training under a Checkpointer whose storage fails, whose ranks die.

Ranks are threads (`tests.thread_ranks`), the saves are those of `ckpt.async_save` below its public
function, each rank has a store of its own over shared bytes. A `Life` is one start of the job: it
restores, saves at every step, and ends when it is through, or when a rank or the job is killed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ckpt.commit.locate import ResumePoint
from ckpt.commit.session import RankedSession, Session, SessionRegistry, open_session
from ckpt.errors import CheckpointError, RankFailed
from ckpt.loading.load import LoadOptions, LoadReport, load_state
from ckpt.saving.background import Background
from ckpt.saving.staging import LentCopy, Snapshot, Staging, stage
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.service.alarm import Alarm
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.inflight import Saved
from ckpt.service.policies import AtExit, EverySteps
from ckpt.service.retention import KeepRule
from ckpt.service.target import Pending, Target
from ckpt.state.types import Stacks
from ckpt.world.base import World
from storage import StorageError, Store, TransientError
from storage.errors import OutcomeUnknownError
from storage.store import ObjectWriter
from storage.testing import FaultPlan, FaultyStore, Killed
from storage.wrap import WrappedStore
from tests.e2e.job import NO_WAITING, Sharded, assert_is_step, state_at
from tests.thread_ranks import RankKilled, RanksFailed, run_ranks

T = TypeVar("T")

KINDS = ("error500", "slow_down", "timeout", "reset", "lost_reply")
PUBLISHING = ("put_if_absent", "publish")


class Faults:
    """Which operations fail, and when whoever runs them dies. Shared by the stores of one job.

    `kills` maps the number of an operation to the ranks that die there. Thread-safe.
    """

    def __init__(self, rate: float, seed: int, kills: dict[int, tuple[int, ...]]) -> None:
        self.rate = rate
        self.counts: dict[str, int] = {}
        self._kills = kills
        self._rng = random.Random(seed)
        self._number = 0
        self._lock = threading.Lock()

    def draw(self, operation: str) -> tuple[str, tuple[int, ...]]:
        """What happens to the next operation, "" for nothing, and which ranks die before it."""
        with self._lock:
            self._number += 1
            dying = self._kills.get(self._number, ())
            # The back-ends repeat a publication themselves; what gets through is rarer.
            rate = self.rate * (0.5 if operation == "publish" else 1.0)
            kind = self._rng.choice(KINDS) if self._rng.random() < rate else ""
            if kind:
                self.counts[kind] = self.counts.get(kind, 0) + 1
            return kind, dying


class FlakyStore(FaultyStore):
    """What one rank has of a store: it fails as `faults` say, and refuses all once it is dead."""

    def __init__(self, inner: Store, faults: Faults, kill: Callable[[tuple[int, ...]], None]):
        super().__init__(inner, FaultPlan(0))
        self._faults = faults
        self._kill = kill

    def perform(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object] = lambda: None,
    ) -> T:
        self.check_alive(operation, key)
        kind, dying = self._faults.draw(operation)
        self._kill(dying)
        self.check_alive(operation, key)
        if not kind:
            return apply()
        unknown = operation in PUBLISHING and kind not in ("slow_down", "reset")
        if kind == "lost_reply":
            apply()
        elif operation == "publish":
            discard()
        what = f"{kind} injected into {operation} {key}"
        raise OutcomeUnknownError(what) if unknown else TransientError(what)


class UploadingStore(WrappedStore):
    """Knows which objects are under construction, as S3 knows its uploads: those of dead writers
    stay until they are aborted, and an aborted one cannot be completed.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.uploads: dict[object, str] = {}
        self._lock = threading.Lock()

    def create(self, key: str, nbytes: int, **options: Any) -> AbstractContextManager[ObjectWriter]:
        return self._uploading(key, nbytes, options)

    @contextmanager
    def _uploading(self, key: str, nbytes: int, options: dict[str, Any]) -> Iterator[ObjectWriter]:
        upload = object()
        with self._lock:
            self.uploads[upload] = key
        try:
            with self.inner.create(key, nbytes, **options) as writer:
                yield writer
                with self._lock:
                    if upload not in self.uploads:
                        raise StorageError(f"complete {key}: the upload was aborted")
        finally:
            with self._lock:
                self.uploads.pop(upload, None)

    def abort_unfinished(self, prefix: str) -> int:
        with self._lock:
            unfinished = [upload for upload, key in self.uploads.items() if key.startswith(prefix)]
            for upload in unfinished:
                del self.uploads[upload]
        return len(unfinished)


class ThreadTarget(Target):
    """The saves and loads of one rank that is a thread, below the public functions."""

    def __init__(
        self, world: World, store: Store, registry: SessionRegistry, *, dedup: bool = False
    ) -> None:
        self.url = store.url
        self._dedup = dedup
        self._world = world
        self._store = store
        self._registry = registry
        self._background = Background(world)
        self._memory = PartMemory()
        self._staging = Staging()
        self._snapshot: Snapshot | LentCopy = "step"
        self._opened: list[RankedSession] = []

    def world(self) -> World:
        return self._world.duplicate()

    def store(self) -> Store:
        return self._store

    def using(self, copy: LentCopy) -> Target:
        other = shallow_copy(self)
        other._snapshot = copy
        return other

    def start(self, state: Any, *, step: int, metric: float | None) -> Pending:
        self._background.settle()
        session = self.ranked_session()
        options = SaveOptions(metric=metric, dedup=self._dedup, telemetry=True)
        task = SaveTask(session, self._store, self._memory, step, options)
        return self._background.start(
            task, lambda: stage(state, task, self._staging, self._snapshot)
        )

    def load(
        self, state: Any, *, step: int, attempt: str, stacks: Stacks | None = None
    ) -> LoadReport:
        self._background.wait()
        return load_state(
            state,
            store=self._store,
            world=self._world,
            step=step,
            attempt=attempt,
            options=LoadOptions(stacks=stacks or {}),
        )

    def resumed(self, attempt: str, *, on_purpose: bool = False) -> None:
        self._registry.restored(self._store, ResumePoint(attempt, on_purpose))

    def ranked_session(self) -> RankedSession:
        if not self._opened:
            session = open_session(self._world, self._store, self._registry, sources=NO_WAITING)
            self._opened.append(session)
        return self._opened[0]

    def session(self) -> Session | None:
        return self._opened[0].session if self._opened else None

    def failure(self) -> RankFailed | None:
        return self._world.failure

    def model_first(self) -> Target:
        raise NotImplementedError("these tests give time enough")


class Acknowledged(NamedTuple):
    """What a life has acknowledged: checkpoints that exist, and from where it began."""

    saved: dict[str, int]  # step by attempt
    restored: int | None


@dataclass
class Life:
    """One start of the job. `stores[rank]` is what each rank uses."""

    size: int
    stores: list[Store]
    steps: int
    keep: KeepRule
    registry: SessionRegistry = field(default_factory=SessionRegistry)
    saved: dict[str, int] = field(default_factory=dict)
    restored: list[int] = field(default_factory=list)
    failures: int = 0
    deadline_seconds: float = 30.0
    dedup: bool = False

    def run(self) -> str:
        """Train; how it ended: "done", "killed" or "failed". Raises what no fault explains."""
        try:
            run_ranks(self.size, self._train, deadline_seconds=self.deadline_seconds)
        except RanksFailed as failed:
            deaths = [e for e in failed.errors.values() if isinstance(e, Killed | RankKilled)]
            others = [e for e in failed.errors.values() if not isinstance(e, Killed | RankKilled)]
            strange = [e for e in others if not isinstance(e, CheckpointError | StorageError)]
            if strange:
                raise strange[0] from failed
            return "killed" if deaths else "failed"
        return "done"

    def _train(self, world: World) -> None:
        target = ThreadTarget(world, self.stores[world.rank], self.registry, dedup=self.dedup)
        state = partly_frozen_at(0, world.rank, self.size)
        quiet = Alarm(after=1 << 30)
        policy = EverySteps(1) | AtExit()
        with Checkpointer(
            state, target, save=policy, keep=self.keep, alarm=quiet, only=True
        ) as service:
            report = service.restore()
            first = 1
            if report is not None:
                assert_is_partly_frozen(state, report.step, world.rank, self.size)
                self.restored.append(report.step)
                first = report.step + 1
            try:
                for step in range(first, first + self.steps):
                    _advance(state, step, world.rank, self.size)
                    service.step(step, metric=1.0 / step)
                    self._note(service.last_saved)
            finally:
                self._note(service.last_saved)
                self.failures += len(service.failures) if world.rank == 0 else 0
        self._note(service.last_saved)

    def _note(self, saved: Saved | None) -> None:
        if saved is not None:
            self.saved[saved.attempt] = saved.step


def partly_frozen_at(step: int, rank: int, size: int, *, blank: bool = False) -> dict[str, Any]:
    """The state of a rank at `step`, beside weights that never change."""
    frozen = torch.arange(8000.0).reshape(80, 100)
    state = state_at(step, rank, size)
    state["frozen"] = Sharded(torch.zeros_like(frozen) if blank else frozen, rank, size)
    return state


def assert_is_partly_frozen(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    """Every tensor and value of `state` is bit for bit that of `step`."""
    assert_is_step(state, step, rank, size)
    expected = partly_frozen_at(step, rank, size)["frozen"]
    assert torch.equal(state["frozen"].local, expected.local)


def _advance(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    """In place, as a training does."""
    newer = state_at(step, rank, size)
    for name in ("rows", "runs"):
        state[name].local.data.copy_(newer[name].local.data)
    state["replica"].copy_(newer["replica"])
    state["step"] = step
