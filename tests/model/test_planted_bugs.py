"""Bugs that are planted in the code that commits, and the schedules that find them.

Method: each bug is one function or number that is exchanged; the search along the actions of a
model (`test_log_model.py`) has to come upon it. With `--soak` all of them, else a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ckpt.commit import session, writer
from ckpt.commit.appender import Appender, Build
from ckpt.commit.log import Log, LogState
from ckpt.commit.names import StepDirectory
from ckpt.commit.records import LiveEntry, Record
from ckpt.commit.session import Session
from tests.model import driving
from tests.model.exploring import Scope, explore, played
from tests.results import Counted

pytestmark = pytest.mark.timeout(3600)

_delete_orphans, _why_not = writer.delete_orphans, writer.why_not_retire


def _forgets_what_is_pending(self: Appender) -> None:
    self._pending = None


def _never_fenced(self: Session, state: LogState) -> int:
    return self.epoch


def _proves_nothing(self: Appender) -> None:
    return


def _believes_its_put(self: Appender, record: Record, data: bytes) -> bool:
    self._pending = None
    self.log.saw(record)
    self._known = record
    return True


def _looks_at_its_own_slot(self: Appender, record: Record, data: bytes) -> bool:
    return self.log.raw(record.slot) == data


def _asks_for_no_manifest(self: Appender, record: Record) -> bool:
    return False


def _sweeps_the_living(log: Log, state: LogState, *, before_epoch: int) -> list[str]:
    return _delete_orphans(log, state, before_epoch=before_epoch + 1)


def _forgets_references(log: Log, state: LogState, *, before_epoch: int) -> list[str]:
    live = tuple(replace(entry, references=()) for entry in state.live)
    bare = replace(state, entries=replace(state.entries, listed=live[-1:]))
    return _delete_orphans(log, bare, before_epoch=before_epoch)


def _any_may_go(state: LogState, entry: LiveEntry) -> str:
    return "" if "pinned" in _why_not(state, entry) else _why_not(state, entry)


def _last_may_go(state: LogState, entry: LiveEntry) -> str:
    return "" if "only" in _why_not(state, entry) else _why_not(state, entry)


def _looks_once(self: Appender, build: Build) -> Record | None:
    """Who lost a race appends what was made for the state before."""
    self.settle()
    state = self.log.state()
    draft = build(state)
    while draft is not None:
        now, self._known = self.log.state(), self.log.newest
        record = self._record(draft, replace(now, entries=state.entries))
        if self._put(record, sent_before=False):
            return record
    return None


def _counts_all(self: Log, record: Record, before: bytes | None) -> None:
    return


def _compares_no_links(self: Log) -> None:
    self.state()


def _nothing_is_lost(
    self: Log, attempts: Sequence[StepDirectory], last: int
) -> list[StepDirectory]:
    return []


def _no_leases(*args: Any, **options: Any) -> dict[str, float]:
    return {}


BOTH = Scope(commands=0, clean_ups=0)
COMMAND = Scope(steps=2, claims=1, commands=2, clean_ups=0, unknown=0, jobs=1)
BACKUP = Scope(commands=0, clean_ups=0, unknown=0, exchanges=1)
LATE = Scope(3, 2, 0, 0, 0, 0, 1, 0, 1, 1)
STALL = Scope(2, 1, 0, 0, 0, 0, 0, 1, 1, 1)
ALONE = Scope(2, 1, 1, 1, 1, 0, 0, 0, 0, 1)

# What is exchanged for what, where that is found, and within how many actions.
BUGS: dict[str, tuple[object, str, object, Scope, int]] = {
    "an unknown outcome is a failure": (Appender, "settle", _forgets_what_is_pending, BOTH, 4),
    "a superseded session writes": (Session, "_epoch_for", _never_fenced, BOTH, 4),
    "what it builds on is not read again": (Appender, "prove", _proves_nothing, BACKUP, 6),
    "a put that was answered stands": (Appender, "_stands", _believes_its_put, STALL, 6),
    "no look for the MANIFEST": (Appender, "_manifest_is_gone", _asks_for_no_manifest, STALL, 6),
    "a sweep takes its own epoch": (session, "delete_orphans", _sweeps_the_living, ALONE, 5),
    "a sweep forgets what is live": (session, "delete_orphans", _forgets_references, Scope(), 5),
    "pins are ignored": (writer, "why_not_retire", _any_may_go, COMMAND, 5),
    "the last one may go": (writer, "why_not_retire", _last_may_go, COMMAND, 5),
    "a lost race is not looked at": (
        Appender,
        "append",
        _looks_once,
        Scope(commands=0, clean_ups=0, unknown=0, stalls=1),
        5,
    ),
    "every record counts": (Log, "_check_link", _counts_all, LATE, 7),
    "leases are ignored": (driving, "leases_of", _no_leases, COMMAND, 5),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUGS)
def test_the_search_finds_it(name: str, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, bug, scope, depth = BUGS[name]
    monkeypatch.setattr(where, attribute, bug)
    report = explore(scope, depth)
    counted(bugs=1, seen=int(bool(report.problems)), actions=report.steps)
    print(f"{name}: {report.steps} actions: {report.problems}")
    assert report.problems


# Deeper than a search goes in seconds.
SCHEDULES: dict[str, tuple[object, str, object, str]] = {
    "only its own slot is read": (
        Appender,
        "_is_in_place",
        _looks_at_its_own_slot,
        "claim A; back_up; save A; save A; stall A; go_on_elsewhere; copy_over; resume A",
    ),
    "a claim compares no links": (
        Log,
        "check_end",
        _compares_no_links,
        "claim A; back_up; save A; save A; claim A; save A; go_on_elsewhere; copy_over; claim B",
    ),
    "a sweep takes what no record tells of": (
        Log,
        "lost_of",
        _nothing_is_lost,
        "claim A; back_up; save A; save A; go_on_elsewhere; copy_over; claim B; save B; claim B; "
        "sweep B",
    ),
    "a sweep takes what may have lost its COMMIT": (
        writer,
        "_in_doubt",
        lambda log, state, written: (),
        "claim A; claim B; save A; sweep B",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_schedule_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, bug, schedule = SCHEDULES[name]
    assert not played(*schedule.split("; "))
    monkeypatch.setattr(where, attribute, bug)
    assert played(*schedule.split("; "))
