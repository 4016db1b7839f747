"""Every schedule and every fault of small cases keeps the promises of the commit protocol.

Method: sessions, a second job and maintenance run for real against a memory store; `explore` makes
all interleavings of their log operations with all outcomes of their writes, within a budget of
switches and faults. Planted bugs show that the search finds what it is there for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.commit import live
from ckpt.commit.appender import Appender, Sources
from ckpt.commit.log import LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, record_key, step_prefix
from ckpt.commit.records import manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit, LogWriter, NotRetired
from ckpt.errors import CheckpointError, Fenced, OutcomeUnknown
from storage.memory import MemoryStore
from storage.store import Store
from tests.conftest import Scale
from tests.protocol.explore import SENT_TWICE, explore
from tests.protocol.invariants import History, RecordingStore, check_all, check_fresh_session
from tests.results import Counted

# Minutes on a loaded machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Scenario:
    """A root with two checkpoints, one history for a run, and the actors that work on it."""

    def __init__(self) -> None:
        self.history = History()
        self._drawn = 0

    def make(self) -> Store:
        self.history = History()
        self._drawn = 0
        store = RecordingStore(MemoryStore(), self.history)
        session = Session.claim(store, sources=self.sources())
        for step in (1, 2):
            save(session, store, step, self.history)
        return store

    def sources(self, tries_max: int = 5) -> Sources:
        def draw(nbytes: int) -> bytes:
            self._drawn += 1
            return self._drawn.to_bytes(nbytes, "big")

        return Sources(draw, lambda: 0.0, lambda seconds: None, tries_max=tries_max)

    def job(self, *steps: int) -> Callable[[Store], None]:
        """Claims, saves these steps, deletes what certainly failed, and sweeps."""

        def run(store: Store) -> None:
            try:
                session = Session.claim(store, sources=self.sources(2))
                for step in steps:
                    save(session, store, step, self.history)
                session.sweep()
            except (Fenced, OutcomeUnknown):
                return

        return run

    def cleans_up(self, store: Store) -> None:
        """A second job and a command remove all that anybody ever removes."""
        try:
            session = Session.claim(store, sources=self.sources(2))
            session.sweep_unfinished()
            session.take_back_lost()
            session.sweep()
            save(session, store, 7, self.history)
            failed = session.new_attempt()
            store.put_if_absent(step_prefix(9, failed) + MANIFEST_NAME, b"failed")
            session.give_up(failed, step=9)
            session.sweep_failed()
            session.retire(session.state().live[0].attempt)
            keeper = Maintenance.open(store, sources=self.sources(2))
            keeper.retire(keeper.state().live[0].attempt)
            session.sweep()
        except (Fenced, OutcomeUnknown, NotRetired):
            return

    def prune(self, store: Store) -> None:
        """Retires the oldest checkpoint, as a command in another process does."""
        try:
            keeper = Maintenance.open(store, sources=self.sources(2))
            keeper.retire(keeper.state().live[0].attempt)
        except (OutcomeUnknown, NotRetired):
            return

    def check(self, store: Store) -> list[str]:
        problems = check_all(store, self.history)
        return problems or check_fresh_session(store)


def save(session: Session, store: Store, step: int, history: History) -> None:
    """What a save does with the log; a certain failure deletes its files."""
    attempt, manifest = session.new_attempt(), b"manifest of step %d" % step
    store.put_if_absent(step_prefix(step, attempt) + MANIFEST_NAME, manifest)
    commit = Commit(attempt, step, len(manifest), manifest_digest(manifest))
    try:
        session.commit(commit)
    except OutcomeUnknown:
        settled = session.settle()
        if settled is not None and not settled.landed:
            session.discard(attempt, step=step)
            return
    history.acknowledged.append(attempt)


CASES: dict[str, Callable[[Scenario], dict[str, Callable[[Store], None]]]] = {
    "two jobs": lambda s: {"a": s.job(3), "b": s.job(4)},
    "one job and prune": lambda s: {"a": s.job(3, 4), "p": s.prune},
    "two jobs and prune": lambda s: {"a": s.job(3), "b": s.job(4), "p": s.prune},
}


@pytest.mark.parametrize("case", CASES)
def test_every_schedule_and_fault_keeps_the_promises(
    case: str, scale: Scale, counted: Counted
) -> None:
    scenario = Scenario()
    runs, problems = explore(
        scenario.make,
        lambda: CASES[case](scenario),
        scenario.check,
        budget=scale.count(1, 2) if len(CASES[case](scenario)) > 2 else scale.count(2, 3),
    )
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 50


@pytest.mark.parametrize("case", ["two jobs", "a job and every clean-up"])
def test_a_write_that_the_store_sends_twice_keeps_the_promises(
    case: str, scale: Scale, counted: Counted
) -> None:
    """One of the two is answered; the other may arrive whenever it likes."""
    scenario = Scenario()
    second = scenario.job(4) if case == "two jobs" else scenario.cleans_up
    runs, problems = explore(
        scenario.make,
        lambda: {"a": scenario.job(3), "b": second},
        scenario.check,
        budget=scale.count(1, 2),
        put_faults=[SENT_TWICE],
    )
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 10


@pytest.mark.parametrize("is_folded", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_writer_that_stalls_between_look_and_put_meets_every_clean_up(
    is_folded: bool, scale: Scale, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it stalls: its slot is still taken, so it learns that it was fenced.

    Where it stalls there is nothing of it yet but files; folded live sets are no exception.
    """
    if is_folded:
        for name, value in {"RECORD_NBYTES": 500, "LISTED_MIN": 1, "MERGE_RATIO": 2}.items():
            monkeypatch.setattr(live, name, value)
    scenario = Scenario()
    runs, problems = explore(
        scenario.make,
        lambda: {"a": scenario.job(3), "b": scenario.cleans_up},
        scenario.check,
        budget=scale.count(1, 3),
    )
    counted(schedules=runs)
    assert not problems, f"run {runs}: " + "\n".join(problems)
    assert runs > 20


def _compact(self: Session) -> list[str]:
    """Bug: records that the newest one stands for are deleted."""
    for slot in range(self.log.state().slot):
        self.store.delete(record_key(slot))
    return _sweep(self)


_sweep = Session.sweep


def test_search_finds_a_fence_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "sweep", _compact)
    scenario = Scenario()

    def check(store: Store) -> list[str]:
        try:
            return scenario.check(store)
        except CheckpointError as error:
            return [f"I: {error}"]

    actors = {"a": scenario.job(3), "b": scenario.cleans_up}
    assert explore(scenario.make, lambda: actors, check, budget=1)[1]


def _forget_pending(self: Appender) -> None:
    """Bug: an unknown outcome is taken for a failure."""
    self._pending = None


def _any_epoch(self: LogWriter, state: LogState) -> int:
    """Bug: a session that was superseded keeps writing under its own epoch."""
    return self.epoch if isinstance(self, Session) else state.epoch


@pytest.mark.parametrize(
    ("cls", "name", "bug", "promise"),
    [
        (Appender, "settle", _forget_pending, "I"),
        (Session, "_epoch_for", _any_epoch, "I"),
    ],
)
def test_search_finds_planted_bug(
    cls: type, name: str, bug: object, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, bug)
    scenario = Scenario()

    def check(store: Store) -> list[str]:
        try:
            return scenario.check(store)
        except CheckpointError as error:
            return [f"I: {error}"]

    _, problems = explore(scenario.make, lambda: CASES["two jobs"](scenario), check, budget=2)
    assert problems and problems[0].startswith(promise), problems
