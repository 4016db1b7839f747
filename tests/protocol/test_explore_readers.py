"""Every moment at which a checkpoint is deleted while another process reads it.

Method: `explore` makes all interleavings of a reader's requests (log, manifest, data files) with
those of a prune, deletions one by one, and all outcomes of its writes. A checkpoint here has two
data files, and its tensors are full of its step. A reader gets exactly the bytes of one checkpoint,
or an error that says that it was deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.records import Record
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.commit.writer import LogWriter, delete_attempt
from ckpt.errors import LoadInterrupted, NoCheckpoint, OutcomeUnknown
from ckpt.loading.load import LoadOptions, load_state
from ckpt.loading.reader import Reader
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.service.follower import Follower, FollowOptions, followed
from ckpt.world.base import SoloWorld, World
from storage.errors import KeyNotFoundError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Store
from storage.wrap import WrappedStore
from tests.conftest import Scale
from tests.protocol.explore import SteppedStore, explore
from tests.protocol.invariants import History, Load, RecordingStore, check_all, files_needed
from tests.protocol.test_session import NO_PAUSE
from tests.results import Counted
from tests.thread_ranks import run_ranks

# Minutes on a loaded machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAMES, NUMEL = ("t0", "t1"), 4


@cache
def saved() -> dict[str, bytes]:
    """The objects of a root with steps 1 to 3. Two ranks hold one of the two tensors each."""
    bucket, registry = MemoryBucket(), SessionRegistry()

    def run(world: World) -> None:
        store, memory = MemoryStore(bucket), PartMemory()
        for step in (1, 2, 3):
            state = {NAMES[world.rank]: torch.full((NUMEL,), float(step))}
            session = open_session(world, store, registry)
            options = SaveOptions(telemetry=False)
            save_task(state, SaveTask(session, store, memory, step, options))

    run_ranks(2, run)
    store = MemoryStore(bucket)
    return {key: store.get(key) for key in bucket.keys_from("", "")}


class _Stops(WrappedStore):
    """A reader's view: it stops before it reads of a checkpoint, too."""

    def __init__(self, inner: Store) -> None:
        assert isinstance(inner, SteppedStore)
        super().__init__(inner)
        self._pause = inner.pause

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        if key.startswith("steps/"):
            self._pause("read")
        return super().get_bounded(key, nbytes_max)

    def get_into(self, key: str, start: int, buffers: Any) -> None:
        self._pause("read")
        super().get_into(key, start, buffers)


class _Reading:
    """A root, what readers got of it, and the errors that they got instead."""

    def make(self) -> Store:
        self.history = History()
        self.errors: list[Exception] = []
        bucket = MemoryBucket()
        for key, data in saved().items():
            bucket.add(key, data)
        store = RecordingStore(MemoryStore(bucket), self.history)
        live = Log(store).state().live
        self.attempts = {entry.step: entry.attempt for entry in live}
        return store

    def loads(self, step: int | None) -> Callable[[Store], None]:
        """Loads one step, or the latest."""

        def run(store: Store) -> None:
            state = {name: torch.full((NUMEL,), -1.0) for name in NAMES}
            try:
                report = load_state(
                    state, store=_Stops(store), world=SoloWorld(), step=step, options=LoadOptions()
                )
            except (LoadInterrupted, NoCheckpoint) as error:
                self.errors.append(error)
                return
            self._note(report.attempt, state)

        return run

    def follows(self, store: Store) -> None:
        """Keeps up with the root: what it takes over is one checkpoint, and there is one."""
        state = {name: torch.full((NUMEL,), -1.0) for name in NAMES}
        options = FollowOptions(LoadOptions("state"), lease_seconds=0)
        follower = Follower(followed(state), _Stops(store), SoloWorld(), options)
        if (update := follower.poll()) is not None:
            follower.swap()
            self._note(update.attempt, state)

    def opens(self, store: Store) -> None:
        """Opens the first step, and reads its tensors one after the other."""
        try:
            with ckpt.open(_Stops(store), 1) as opened:
                self._note(self.attempts[opened.step], {name: opened[name] for name in NAMES})
        except NoCheckpoint as error:
            self.errors.append(error)

    def _note(self, attempt: str, state: dict[str, torch.Tensor]) -> None:
        values = torch.cat(list(state.values())).tolist()
        read = frozenset(self.attempts.get(int(value), "no attempt") for value in values)
        self.history.loads.append(Load(attempt, read))

    def prunes(self, *which: int) -> Callable[[Store], None]:
        """Retires the n-th of what is live, one after the other, as a command does."""

        def run(store: Store) -> None:
            try:
                keeper = Maintenance.open(store, sources=replace(NO_PAUSE, tries_max=2))
                for number in which:
                    keeper.retire(keeper.state().live[number].attempt)
            except OutcomeUnknown:
                return

        return run

    def check(self, store: Store) -> list[str]:
        problems = check_all(store, self.history, files_of=files_needed)
        is_live = Log(store).state().find(self.attempts[1]) is not None
        for error in self.errors:
            text = f"{type(error).__name__}: {error}"
            if is_live:
                problems.append(f"I7: nothing was deleted, but a reader got {text}")
            if "was retired while" not in text and "has no step 1" not in text:
                problems.append(f"I7: a reader got an error that says nothing of it: {text}")
        if len(self.history.loads) + len(self.errors) != 1:
            problems.append("I7: a reader ended with nothing")
        return problems


CASES: dict[str, Callable[[_Reading], dict[str, Callable[[Store], None]]]] = {
    "a load of a step": lambda s: {"r": s.loads(1), "p": s.prunes(0)},
    "a load of the latest": lambda s: {"r": s.loads(None), "p": s.prunes(-1, -1)},
    "a follower": lambda s: {"r": s.follows, "p": s.prunes(-1, -1)},
    "an open checkpoint": lambda s: {"r": s.opens, "p": s.prunes(0)},
}


def _explore(case: str, budget: int) -> tuple[int, int, list[str]]:
    """Runs, those of them in which a reader got an error, and violations."""
    scenario, failed = _Reading(), []

    def check(store: Store) -> list[str]:
        failed.extend(scenario.errors)
        return scenario.check(store)

    runs, problems = explore(scenario.make, lambda: CASES[case](scenario), check, budget=budget)
    return runs, len(failed), problems


@pytest.mark.parametrize("case", CASES)
def test_a_deletion_at_any_moment_leaves_readers_whole_bytes_or_an_error_that_says_so(
    case: str, scale: Scale, counted: Counted
) -> None:
    # A follower looks at the log as a load does; two moments at once take twice as long there.
    runs, failed, problems = _explore(case, scale.count(1 if case == "a follower" else 2, 3))
    counted(schedules=runs, readers_told_that_the_step_was_retired=failed)
    print(f"{case}: {dict(counted)}")
    assert not problems, f"run {runs}: " + "\n".join(problems)
    # The latest is looked for anew; who reads one step has to be told.
    assert runs >= 30 and bool(failed) == (case not in ("a load of the latest", "a follower"))


def _skip_what_is_gone(self: Reader, *request: Any) -> None:
    """Bug: what cannot be read any more is left out."""
    with contextlib.suppress(KeyNotFoundError):
        _read(self, *request)


def _delete_first(self: LogWriter, attempt: str) -> Record | None:
    """Bug: files are deleted before the log says that they are gone."""
    entry = self.state().find(attempt)
    assert entry is not None
    delete_attempt(self.store, step=entry.step, attempt=attempt)
    return _retire(self, attempt)


_read, _retire = Reader._read_and_deliver, LogWriter._append_retire


@pytest.mark.parametrize(
    ("cls", "name", "bug"),
    [
        (Reader, "_read_and_deliver", _skip_what_is_gone),
        (LogWriter, "_append_retire", _delete_first),
    ],
)
def test_search_finds_planted_bug(
    cls: type, name: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, bug)
    assert _explore("a load of a step", 2)[2]
