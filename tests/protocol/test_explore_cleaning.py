"""A writer stalls for ever so long between any two of its requests, while somebody cleans up.

Method: a job has saved two checkpoints and writes a third, file by file, MANIFEST, COMMIT. It may
stop before any of these, while a prune, a deletion, a sweep, a compaction of the log, a copy or a
salvage runs to its end; salvages and copies, which write files, stop likewise. Afterwards every
live checkpoint has all of its files, what was acknowledged is in the log, and a new job removes
what is left. For each clean-up a bug is planted that the search has to find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ckpt.commit import live as live_module
from ckpt.commit import writer
from ckpt.commit.appender import Appender, Build
from ckpt.commit.locate import live_entries
from ckpt.commit.log import Log, LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, SEGMENTS_PREFIX, record_key, segment_key
from ckpt.commit.records import LiveEntry, Record, manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import LogWriter, NotRetired
from ckpt.errors import CheckpointError, Fenced, NoCheckpoint, OutcomeUnknown
from ckpt.format.manifest_codec import decode_manifest
from ckpt.saving.save import store_manifest
from ckpt.service.retention import KeepLatest, carry_out, plan_retention
from ckpt.tools import copy
from ckpt.tools.copy import copy_root
from ckpt.tools.salvage import SalvageReport, salvage, write_manifest
from storage.errors import OutcomeUnknownError, StorageError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Store
from storage.wrap import WrappedStore
from tests.protocol.explore import SteppedStore, explore
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_all,
    check_fresh_session,
    files_needed,
)
from tests.protocol.test_explore_readers import saved
from tests.protocol.test_session import NO_PAUSE
from tests.results import Counted

# Minutes on a loaded machine.
pytestmark = pytest.mark.timeout(900)

THIRD = "steps/00000003-"


class Cleaning:
    """A root with two checkpoints of real files, and the files of a third that is to be saved.

    Where it is `damaged`, the first has lost its MANIFEST.
    """

    def __init__(self, *, damaged: bool = False) -> None:
        self.damaged = damaged

    def make(self) -> Store:
        self.bucket, self.history = MemoryBucket(), History()
        self.copies: list[MemoryBucket] = []
        self.third = {key: data for key, data in saved().items() if key.startswith(THIRD)}
        commit = max(key for key in saved() if key.startswith("log/0"))
        store = RecordingStore(MemoryStore(self.bucket), self.history)
        for key, data in saved().items():
            if key not in self.third and key != commit:
                store.put_if_absent(key, data)
        self.entries = Log(store).state().live
        if self.damaged:
            self.lost = self.entries[0].prefix + MANIFEST_NAME
            self.bucket.remove(self.lost)
            changes = self.history.changes
            changes[:] = [change for change in changes if change.key != self.lost]
        return store

    def saves(self, store: Store) -> None:
        """The job of epoch 1 saves its third checkpoint; what certainly failed it deletes."""
        assert isinstance(store, SteppedStore)
        appender = Appender(store, check_first=False, sources=replace(NO_PAUSE, tries_max=2))
        session = Session(appender, root="", epoch=1)
        manifest = decode_manifest(self.third[max(k for k in self.third if MANIFEST_NAME in k)])
        attempt = manifest.header.attempt
        try:
            for name in manifest.files:
                key = f"{THIRD}{attempt}/{name}"
                store.put_if_absent(key, self.third[key])
            store.pause("info")
            commit = store_manifest(store, manifest)
            try:
                session.commit(commit)
            except OutcomeUnknown:
                settled = session.settle()
                assert settled is not None
                if not settled.landed:
                    session.discard(attempt, step=3)
                    return
        except (Fenced, OutcomeUnknown):
            return
        self.history.acknowledged.append(attempt)

    # --- who cleans up ----------------------------------------------------------------------------

    def prunes(self, store: Store) -> None:
        keeper = self._keeper(store)
        candidates = keeper.state().live
        plan = plan_retention(candidates, KeepLatest(1), now_unix=0.0)
        self._quietly(lambda: carry_out(plan, keeper.retire))

    def removes(self, store: Store) -> None:
        """`ckpt rm` of all that is there, one by one; the last one is refused."""
        keeper = self._keeper(store)
        for entry in self.entries:
            self._quietly(partial(keeper.retire, entry.attempt))

    def begins(self, store: Store) -> None:
        """Another job, with all that it does before its first save."""

        def begin() -> None:
            session = Session.claim(store, sources=replace(NO_PAUSE, tries_max=2))
            session.sweep_unfinished()
            session.take_back_lost()
            session.sweep()

        self._quietly(begin)

    def makes_space(self, store: Store) -> None:
        """A command whose RETIRE found the disk full deletes what dead jobs left."""
        self._quietly(self._keeper(store)._sweep_dead)

    def compacts(self, store: Store) -> None:
        """Every record is folded into segments: see `small`."""
        keeper = self._keeper(store)
        self._quietly(lambda: keeper.pin(self.entries[0].attempt))
        self._quietly(lambda: keeper.verified(self.entries[1].attempt))

    def copies_it(self, store: Store) -> None:
        bucket = MemoryBucket()
        copy_root(store, MemoryStore(bucket), threads=1)
        self.copies.append(bucket)

    def salvages(self, store: Store) -> None:
        """`ckpt salvage`: a MANIFEST for each directory without one."""
        assert isinstance(store, SteppedStore)
        store.pause("info")
        keys = {info.key for info in store.list("steps/")}
        for prefix in sorted({key.rpartition("/")[0] for key in keys}):
            if f"{prefix}/{MANIFEST_NAME}" not in keys:
                report = salvage(store, prefix)
                if report.is_complete:
                    write_manifest(store, report)

    def _keeper(self, store: Store) -> Maintenance:
        return Maintenance.open(store, sources=replace(NO_PAUSE, tries_max=2))

    def _quietly(self, fn: Callable[[], Any]) -> None:
        try:
            fn()
        except (Fenced, OutcomeUnknown, NotRetired, NoCheckpoint, OutcomeUnknownError):
            return  # errors that say what happened

    # --- what has to be true ----------------------------------------------------------------------

    def check(self, store: Store) -> list[str]:
        try:
            if self.damaged and Log(store).state().find(self.entries[0].attempt) is not None:
                # As it was, where the salvage was killed.
                self.bucket.add(self.lost, saved()[self.lost])
            problems = check_all(store, self.history, files_of=files_needed)
            for bucket in self.copies:
                problems += self._problems_of_copy(store, MemoryStore(bucket))
            problems = problems or check_fresh_session(store)
            if not problems:
                Session.claim(store, sources=NO_PAUSE).sweep()
                problems = check_all(store, self.history) + self._left(store)
        except (CheckpointError, StorageError) as error:
            return [f"I: {type(error).__name__}: {error}"]
        return problems

    def _problems_of_copy(self, store: Store, target: Store) -> list[str]:
        saved_here = {r.attempt for r in Log(store).history() if r.kind == "COMMIT"}
        copied = {entry.attempt for entry in live_entries(target)}
        strange = [f"I: {name} was copied, nobody has committed it" for name in copied - saved_here]
        return strange + check_all(target, History(), files_of=files_needed)

    def _left(self, store: Store) -> list[str]:
        live = {entry.prefix for entry in Log(store).state().live}
        there = {info.key.rpartition("/")[0] + "/" for info in store.list("steps/")}
        return [f"I: {prefix} is left over" for prefix in sorted(there - live)]


class Copying(Cleaning):
    """A copy that stalls at its target, while another run of it ends, and a job goes on there."""

    def make(self) -> Store:
        self.bucket, self.history = MemoryBucket(), History()
        self.copies = []
        bucket = MemoryBucket()
        for key, data in saved().items():
            bucket.add(key, data)
        self.source = MemoryStore(bucket)
        self.entries = Log(self.source).state().live
        return RecordingStore(MemoryStore(self.bucket), self.history)

    def copies_here(self, store: Store) -> None:
        self._quietly(lambda: copy_root(self.source, store, threads=1))

    def copies_and_goes_on(self, store: Store) -> None:
        self.copies_here(store)
        if store.exists("FORMAT"):
            self.begins(store)
            self.prunes(store)

    def check(self, store: Store) -> list[str]:
        if not store.exists("FORMAT"):
            return []  # both were killed before the copy was whole
        # Who stalled may create a MANIFEST again that was retired there meanwhile, with the bytes
        # that it had: remains, which the next job removes.
        changes = self.history.changes
        again = {
            change.key: position
            for position, change in enumerate(changes)
            if change.op == "create" and change.key.endswith(MANIFEST_NAME)
        }
        changes[:] = [c for position, c in enumerate(changes) if position >= again.get(c.key, 0)]
        return super().check(store)


Act = Callable[[Any, Store], None]

# Who stalls, who cleans up meanwhile, and where.
CASES: dict[str, tuple[type[Cleaning], Act, Act, bool]] = {
    "save, prune": (Cleaning, Cleaning.saves, Cleaning.prunes, False),
    "save, rm": (Cleaning, Cleaning.saves, Cleaning.removes, False),
    "save, another job": (Cleaning, Cleaning.saves, Cleaning.begins, False),
    "save, sweep on a full disk": (Cleaning, Cleaning.saves, Cleaning.makes_space, False),
    "save, compaction": (Cleaning, Cleaning.saves, Cleaning.compacts, False),
    "save, copy": (Cleaning, Cleaning.saves, Cleaning.copies_it, False),
    "save, salvage": (Cleaning, Cleaning.saves, Cleaning.salvages, False),
    "salvage, rm": (Cleaning, Cleaning.salvages, Cleaning.removes, True),
    "salvage, another job": (Cleaning, Cleaning.salvages, Cleaning.begins, True),
    "salvage, save": (Cleaning, Cleaning.salvages, Cleaning.saves, True),
    "salvage, salvage": (Cleaning, Cleaning.salvages, Cleaning.salvages, True),
    "prune, save": (Cleaning, Cleaning.prunes, Cleaning.saves, False),
    "compaction, prune": (Cleaning, Cleaning.compacts, Cleaning.prunes, False),
    "copy, job on the copy": (Copying, Copying.copies_here, Copying.copies_and_goes_on, False),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is folded."""
    saved()  # before, so that what other tests share is as ever
    for name, value in {"RECORD_NBYTES": 500, "LISTED_MIN": 1, "MERGE_RATIO": 2}.items():
        monkeypatch.setattr(live_module, name, value)


def _explore(name: str, budget: int) -> tuple[int, list[str]]:
    cls, stalls, cleans_up, damaged = CASES[name]
    scenario = cls(damaged=damaged)
    actors = {"stalls": partial(stalls, scenario), "cleans up": partial(cleans_up, scenario)}
    return explore(
        scenario.make, lambda: dict(actors), scenario.check, budget=budget, stops_at_files=True
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if "on the copy" in name else ()) for name in CASES],
)
def test_whoever_stalls_anywhere_meets_every_clean_up(name: str, counted: Counted) -> None:
    runs, problems = _explore(name, 1)
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    print(f"{name}: {runs} runs")
    assert runs > 3


# --- planted bugs ---------------------------------------------------------------------------------


def _looks_once(self: Appender, build: Build) -> Record:
    """Bug: who lost a race for a slot appends to the live set that it saw before."""
    seen = self.log.state()
    draft = build(seen)
    assert draft is not None
    while True:
        now, self._known = self.log.state(), self.log.newest
        record = self._record(draft, replace(now, entries=seen.entries))
        if self._put(record, sent_before=False):
            return record


def _any_may_go(state: LogState, entry: LiveEntry) -> str:
    """Bug: nobody asks whether it is the last one."""
    return ""


def _all_epochs(log: Log, state: LogState, *, before_epoch: int) -> list[str]:
    """Bug: files of a save under way are taken for a dead job's."""
    return _delete_orphans(log, state, before_epoch=state.epoch + 1)


def _never_fenced(self: LogWriter, state: LogState) -> int:
    """Bug: a session that was superseded commits all the same."""
    return self.epoch if isinstance(self, Session) else state.epoch


def _without_old_segments(self: Appender, build: Build) -> Record | None:
    """Bug: segments that the newest record does not name are deleted."""
    record = _append(self, build)
    if record is not None:
        named = {segment_key(ref.digest) for ref in record.segments}
        for info in list(self.store.list(SEGMENTS_PREFIX)):
            if info.key not in named:
                _behind_the_recorder(self.store).delete(info.key)
    return record


def _without_old_slots(self: Appender, build: Build) -> Record | None:
    """Bug: a slot whose record the newest one stands for is deleted, and with it the fence."""
    record = _append(self, build)
    if record is not None and record.slot > 2:
        _behind_the_recorder(self.store).delete(record_key(record.slot - 2))
    return record


def _behind_the_recorder(store: Store) -> Store:
    """The store below: what counts is what the deletion does, and not that it was seen."""
    while isinstance(store, WrappedStore):
        store = store.inner
    return store


def _lists_directories(source: Store) -> tuple[LiveEntry, ...]:
    """Bug: a copy takes every directory with a MANIFEST for a checkpoint."""
    live = live_entries(source)
    keys = [info.key for info in source.list("steps/") if info.key.endswith(MANIFEST_NAME)]
    data = [source.get(key) for key in keys]
    headers = [decode_manifest(each).header for each in data]
    known = {entry.attempt for entry in live}
    more = [
        replace(
            live[-1],
            attempt=header.attempt,
            step=header.step,
            slot=live[-1].slot + 1,
            manifest_nbytes=len(each),
            manifest_digest=manifest_digest(each),
        )
        for header, each in zip(headers, data, strict=True)
        if header.attempt not in known
    ]
    return (*live, *more)


def _over_what_is_there(store: Store, report: SalvageReport) -> bytes:
    """Bug: salvage puts its MANIFEST in the place of one that came meanwhile."""
    store.delete(f"{report.prefix}/{MANIFEST_NAME}")
    return _write_manifest(store, report)


_append, _delete_orphans, _write_manifest = Appender.append, writer.delete_orphans, write_manifest


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "where", "bug"),
    [
        ("save, prune", (Appender, "append"), _looks_once),
        ("prune, save", (Appender, "append"), _looks_once),
        ("save, rm", (writer, "why_not_retire"), _any_may_go),
        ("save, another job", (Session, "_epoch_for"), _never_fenced),
        ("save, sweep on a full disk", (writer, "delete_orphans"), _all_epochs),
        ("save, compaction", (Appender, "append"), _without_old_segments),
        ("save, compaction", (Appender, "append"), _without_old_slots),
        ("compaction, prune", (Appender, "append"), _looks_once),
        ("save, copy", (copy, "live_entries"), _lists_directories),
        ("salvage, salvage", (sys.modules[__name__], "write_manifest"), _over_what_is_there),
    ],
)
def test_search_finds_planted_bug(
    name: str, where: tuple[object, str], bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where[0], where[1], bug)
    runs, problems = _explore(name, 1)
    print(f"{name}: found in run {runs}: {problems}")
    assert problems
