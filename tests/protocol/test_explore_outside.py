"""Every moment at which somebody else copies a root, restores a backup of it, or links its files.

Method: jobs run for real while the explorer lets others act on the objects between any two of their
requests. What was acknowledged before a backup was restored is lost with the restored backup; what
is acknowledged afterwards is there, or the job gets a typed error. Deletions are not part of it:
whoever restores a backup while a prune deletes has to look at what is there.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.commit.appender import Appender
from ckpt.commit.records import Record
from ckpt.commit.session import Session, SessionRegistry, open_session
from ckpt.errors import CheckpointError, Corrupt, Fenced, OutcomeUnknown
from ckpt.world.base import SoloWorld
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Store
from tests.conftest import Scale
from tests.protocol import explore as explorer
from tests.protocol.explore import explore
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_all,
    check_epochs,
    check_fresh_session,
)
from tests.protocol.test_explore import Scenario, save
from tests.protocol.test_session import NO_PAUSE
from tests.results import Counted

# Minutes on a loaded machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def _objects(bucket: MemoryBucket) -> dict[str, bytes]:
    return {key: bytes(bucket.find(key)[0]) for key in bucket.keys_from("", "")}  # type: ignore[index]


class _Outside(Scenario):
    """A root whose objects are copied, or exchanged for an older copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[str] = []

    def make(self) -> Store:
        self._begin()
        store = RecordingStore(MemoryStore(self.bucket), self.history)
        session = Session.claim(store, sources=self.sources())
        for step in (1, 2):
            save(session, store, step, self.history)
        return store

    def _begin(self) -> None:
        self.bucket = MemoryBucket()
        self.backup: dict[str, bytes] | None = None
        self.then: History | None = None
        self.copy: Store | None = None
        self.is_over = False
        self.is_killed = False
        self.is_left = False
        self.registry = SessionRegistry()
        self.history = History()
        self._drawn = 0

    def saves(self, *steps: int) -> Callable[[Store], None]:
        """A job that saves in one place and then in the copy of it, if there is one by then."""

        def run(store: Store) -> None:
            try:
                self._save(store, self.history, steps)
                if self.copy is not None and self.then is not None:
                    self._save(self.copy, self.then, (9,))
            except CheckpointError as error:
                # It could not take its commit back, and says so.
                self.is_left = "the next job that saves there retires it" in str(error)
                return
            except explorer.Killed:
                self.is_killed = True
                raise

        return run

    def _save(self, store: Store, history: History, steps: tuple[int, ...]) -> None:
        session = self.registry.session(store, sources=self.sources(2))
        for step in steps:
            save(session, store, step, history)

    def backs_up(self) -> dict[str, Callable[[], None]]:
        """A backup of everything, and later its return."""
        if self.backup is None:
            return {"backed up": self._back_up}
        return {} if self.is_over else {"restored": self._restore}

    def copies(self) -> dict[str, Callable[[], None]]:
        return {} if self.backup is not None else {"copied": self._copy}

    def _back_up(self) -> None:
        self.backup = _objects(self.bucket)
        self.then = copy.deepcopy(self.history)

    def _restore(self) -> None:
        assert self.backup is not None and self.then is not None
        for key in self.bucket.keys_from("", ""):
            self.bucket.remove(key)
        for key, data in self.backup.items():
            self.bucket.add(key, data)
        self.history.changes[:] = self.then.changes
        self.history.acknowledged[:] = self.then.acknowledged
        self.is_over = True

    def _copy(self) -> None:
        self._back_up()
        assert self.backup is not None and self.then is not None
        bucket = MemoryBucket()
        for key, data in self.backup.items():
            bucket.add(key, data)
        self.copy = RecordingStore(MemoryStore(bucket, name="copy"), self.then)

    def check(self, store: Store) -> list[str]:
        try:
            problems = check_all(store, self.history)
            if self.is_over and all(self._is_of_nobody(text) for text in problems):
                open_session(SoloWorld(), store, SessionRegistry(), sources=self.sources())
                problems = check_all(store, self.history)
            problems = problems or check_fresh_session(store)
            if not problems and self.copy is not None and self.then is not None:
                problems = check_all(self.copy, self.then) or check_fresh_session(self.copy)
        except Corrupt as error:
            # A record of the former log stands in the restored one: everybody is asked to mend it,
            # and nothing was deleted.
            gone = self.history.acknowledged if "ckpt mend" in str(error) else ["mended"]
            return [f"I2: {name} is gone: {error}" for name in gone if name not in self._there()]
        except CheckpointError as error:
            return [f"I9: {error}"]
        return problems

    def _there(self) -> set[str]:
        return {key[15:39] for key in self.bucket.keys_from("steps/", "") if "MANIFEST" in key}

    def _is_of_nobody(self, violation: str) -> bool:
        """A commit without files whose process was killed right behind it, got no answer when it
        took it back, or had given up when it arrived: only the next job can take it back.

        Until then readers of this one checkpoint get an error.
        """
        acknowledged = any(attempt in violation for attempt in self.history.acknowledged)
        is_alone = self.is_killed or self.is_left or bool(self.arrived)
        return violation.startswith("I1:") and not acknowledged and is_alone


class _Restored(_Outside):
    """A job has saved step 3 but for its COMMIT, and a backup comes back. Then another job goes on
    with that while the old one is still there.
    """

    def __init__(self, backup_of: str) -> None:
        super().__init__()
        self.backup_of = backup_of

    def make(self) -> Store:
        self._begin()
        first = RecordingStore(MemoryStore(self.bucket), self.history)
        session = self.registry.session(first, sources=self.sources(2))
        save(session, first, 1, self.history)
        self._back_up()
        if self.backup_of == "another log":
            self._go_another_way()
        save(session, first, 2, self.history)
        if self.backup_of == "the same log":
            self._back_up()
        return first

    def _go_another_way(self) -> None:
        """The backup has a record in the slot of step 2, another one."""
        assert self.backup is not None and self.then is not None
        bucket = MemoryBucket()
        for key, data in self.backup.items():
            bucket.add(key, data)
        Session.claim(RecordingStore(MemoryStore(bucket), self.then), sources=self.sources())
        self.backup = _objects(bucket)

    def outside(self) -> dict[str, Callable[[], None]]:
        return {} if self.is_over else {"restored": self._restore}

    def goes_on(self, store: Store) -> None:
        """The job that is started once the backup is there."""
        assert isinstance(store, explorer.SteppedStore)
        store.pause("info")
        if not self.is_over:
            return
        try:
            session = open_session(
                SoloWorld(), store, SessionRegistry(), sources=self.sources()
            ).session
            assert session is not None
            for step in (11, 12):
                save(session, store, step, self.history)
        except (Fenced, OutcomeUnknown):
            return


def _explore(
    scenario: _Outside, actions: Callable[[], dict[str, Callable[[], None]]], budget: int
) -> tuple[int, list[str]]:
    return explore(
        scenario.make,
        lambda: {"a": scenario.saves(3)},
        scenario.check,
        budget=budget,
        outside=actions,
        arrived=scenario.arrived,
    )


@pytest.mark.parametrize(("name", "budget"), [("backs_up", 2), ("copies", 1)])
def test_no_moment_of_a_copy_or_a_rollback_breaks_a_promise(
    name: str, budget: int, scale: Scale, counted: Counted
) -> None:
    scenario = _Outside()
    runs, problems = _explore(scenario, getattr(scenario, name), scale.count(budget, budget + 1))
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backup_of", ["the same log", "a shorter log", "another log"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_backup_restored_between_look_and_commit_leaves_no_checkpoint_that_nobody_acknowledged(
    backup_of: str, goes_on: bool, scale: Scale, counted: Counted
) -> None:
    scenario = _Restored(backup_of)

    def actors() -> dict[str, Callable[[Store], None]]:
        second = {"b": scenario.goes_on} if goes_on else {}
        return {"a": scenario.saves(3), **second}

    runs, problems = explore(
        scenario.make,
        actors,
        scenario.check,
        budget=scale.count(2, 3),
        outside=scenario.outside,
        arrived=scenario.arrived,
    )
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 10


@pytest.mark.parametrize("backup_of", ["the same log", "a shorter log"])
def test_a_copy_of_a_write_that_arrives_in_a_restored_backup_is_not_acknowledged(
    backup_of: str,
) -> None:
    """The store sends what takes long a second time: the first may come after the second."""
    scenario = _Restored(backup_of)
    runs, problems = explore(
        scenario.make,
        lambda: {"a": scenario.saves(3)},
        scenario.check,
        budget=2,
        outside=scenario.outside,
        arrived=scenario.arrived,
        put_faults=[explorer.SENT_TWICE],
    )
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 10


def _never_gone(self: Appender, record: Record) -> bool:
    """Bug: nobody looks whether the restored root has what was committed."""
    return False


def test_search_finds_a_commit_that_nobody_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Appender, "_manifest_is_gone", _never_gone)
    scenario = _Outside()
    assert _explore(scenario, scenario.backs_up, 2)[1]


class _Linked:
    """Two jobs claim a root on a disk, and once somebody makes a link to every file there."""

    def __init__(self, parent: Path) -> None:
        self.parent, self.numbers = parent, itertools.count()

    def make(self) -> Store:
        self.root = self.parent / f"root{next(self.numbers)}"
        self.is_over = False
        self.epochs: list[int] = []
        store = LocalStore(str(self.root))
        Session.claim(store)
        return store

    def claims(self) -> Callable[[Store], None]:
        def run(store: Store) -> None:
            try:
                self.epochs.append(
                    Session.claim(store, sources=replace(NO_PAUSE, tries_max=2)).epoch
                )
            except OutcomeUnknown:
                return

        return run

    def outside(self) -> dict[str, Callable[[], None]]:
        return {} if self.is_over else {"linked": self._link}

    def _link(self) -> None:
        backup = self.parent / f"backup of {self.root.name}"
        backup.mkdir()
        for path in (path for path in self.root.rglob("*") if path.is_file()):
            os.link(path, backup / path.name)
        self.is_over = True

    def check(self, store: Store) -> list[str]:
        try:
            problems = check_epochs(store)
        except CheckpointError as error:
            return [f"I5: {error}"]
        if len(set(self.epochs)) < len(self.epochs):
            problems.append(f"I4: two jobs won one slot: their epochs are {self.epochs}")
        return problems


def _explore_links(
    scenario: _Linked, monkeypatch: pytest.MonkeyPatch, budget: int
) -> tuple[int, list[str]]:
    """Jobs stop just before they give their file its name, and just after."""
    real, stopping = LocalStore._publish, explorer.SteppedStore.put_if_absent
    acting: dict[int, explorer.SteppedStore] = {}

    def put_if_absent(self: explorer.SteppedStore, key: str, data: bytes) -> None:
        acting[threading.get_ident()] = self
        try:
            stopping(self, key, data)
        finally:
            del acting[threading.get_ident()]

    def publish(self: LocalStore, temp: str, final: str) -> None:
        stepped = acting.get(threading.get_ident())
        if stepped is not None:
            stepped.pause("link")
        real(self, temp, final)

    monkeypatch.setattr(explorer.SteppedStore, "put_if_absent", put_if_absent)
    monkeypatch.setattr(LocalStore, "_publish", publish)
    return explore(
        scenario.make,
        lambda: {"a": scenario.claims(), "b": scenario.claims()},
        scenario.check,
        budget=budget,
        outside=scenario.outside,
    )


def test_hard_links_of_others_let_no_two_writers_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, problems = _explore_links(_Linked(tmp_path), monkeypatch, 2)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 50


def test_search_finds_a_winner_by_the_count_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_count(path: str, identity: object) -> bool:
        return any(os.stat(each).st_nlink > 1 for each in Path(path).parent.glob(".tmp-*"))

    monkeypatch.setattr("storage.local._is_file", by_count)
    assert _explore_links(_Linked(tmp_path), monkeypatch, 2)[1]
