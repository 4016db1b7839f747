"""The checker of the cluster in a box: a wrong history is refused by the check meant for it.

Method: a true history of two jobs over a real log, which every check accepts. Each case plants one
lie in it, in what callers were told or in what the log says, and names the check that finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt.commit.session import Session, SessionRegistry
from storage.memory import MemoryStore
from tests.cluster.agent import state_of
from tests.cluster.history import (
    CALL_SECONDS_MAX,
    CHECKS,
    Event,
    Root,
    broken_promises,
    left_behind,
    read_history,
    root_of,
    wrong_bits,
)
from tests.cluster.near_history import NEAR_CHECKS, left_in_tiers
from tests.e2e.job import NO_WAITING, Job

Changed = tuple[list[Event], Root]
OLD, NEW = 0, 1  # two lives: the second is the same job, started again on other hosts


def reported(life: int, rank: int, kind: str, time: float, **facts: Any) -> Event:
    return Event(life, rank, kind, {"time": time, **facts})


class Truth:
    """A store in which two jobs have saved, one after the other, and what their callers saw."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.old, self.new = (self._saved(steps) for steps in ((2, 4), (6, 8)))
        session = Session.claim(self.store, sources=NO_WAITING)
        session.retire(self.old[0])
        session.sweep()
        self.root = root_of(self.store, kept_min=3)
        self.events = self._events()

    def _saved(self, steps: Sequence[int]) -> list[str]:
        job = Job(2, lambda rank: self.store, SessionRegistry())
        return [job.save(partial(self._state, step), step)[0].attempt for step in steps]

    @staticmethod
    def _state(step: int, rank: int) -> dict[str, Any]:
        return state_of(step, rank, 2)

    def _events(self) -> list[Event]:
        events = []
        for life, (attempts, first) in enumerate(((self.old, 0), (self.new, 4))):
            near = {"near": 0, "hosts": ["a", "b"]}
            start = 100.0 * life
            events.append(reported(life, -1, "started", start, ranks=2, ends="harmless", **near))
            for rank in range(2):
                facts = {"step": first, "attempt": self.old[1] if life else "", "origin": "durable"}
                events += [
                    reported(life, rank, "began", start + 1),
                    reported(life, rank, "restored", start + 2, right=True, seconds=0.5, **facts),
                ]
                for number, attempt in enumerate(attempts):
                    step, time = first + 2 * number + 2, start + 10 + 10 * number
                    events += [
                        reported(life, rank, "stepped", time, step=step, seconds=0.1),
                        reported(life, rank, "saved", time + 1, step=step, attempt=attempt),
                    ]
                events += [
                    reported(life, rank, "closed", start + 40, seconds=1.0),
                    reported(life, rank, "ended", start + 41, error=""),
                ]
            seen = {"step": step, "attempt": attempts[-1], "latest": True, "right": True}
            events.append(reported(-1, -1, "seen", start + 50, **seen))
        return sorted(events, key=lambda event: event.time)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def changed(events: Sequence[Event], matches: Callable[[Event], bool], **facts: Any) -> list[Event]:
    """The events with other facts in those that match: at least one."""
    assert any(map(matches, events))
    new = [e._replace(facts={**e.facts, **facts}) if matches(e) else e for e in events]
    return sorted(new, key=lambda event: event.time)


def of(life: int, kind: str, rank: int | None = None) -> Callable[[Event], bool]:
    return lambda e: e.life == life and e.kind == kind and rank in (None, e.rank)


def lost_save(truth: Truth) -> Changed:
    lie = reported(NEW, 0, "saved", 130.0, step=9, attempt="e000002-00000000000000ff")
    return [*truth.events, lie], truth.root


def gone_save(truth: Truth) -> Changed:
    live = {a: step for a, step in truth.root.live.items() if a != truth.new[0]}
    return truth.events, truth.root._replace(live=live)


def retired_too_early(truth: Truth) -> Changed:
    return truth.events, truth.root._replace(kept_min=4)


def dropped_by_a_commit(truth: Truth) -> Changed:
    *before, last = truth.root.records
    forged = replace(last, kind="COMMIT", attempt=truth.new[1])
    return truth.events, truth.root._replace(records=(*before, forged))


def retired_import(truth: Truth) -> Changed:
    def of_no_line(record: Any) -> Any:
        live = (replace(e, line=None) if e.attempt == truth.old[0] else e for e in record.live)
        return replace(record, live=tuple(live))

    return truth.events, truth.root._replace(records=tuple(map(of_no_line, truth.root.records)))


def half_made_listed(truth: Truth) -> Changed:
    lie = reported(-1, -1, "gone", 60.0, step=5, attempt="e000001-00000000000000ff", latest=False)
    return [*truth.events, lie], truth.root


def live_one_gone(truth: Truth) -> Changed:
    lie = reported(-1, -1, "gone", 160.0, step=8, attempt=truth.new[1], latest=False)
    return [*truth.events, lie], truth.root


def damage_seen(truth: Truth) -> Changed:
    return [
        *truth.events,
        reported(-1, -1, "not seen", 160.0, error="Corrupt", text=""),
    ], truth.root


def wrong_byte_restored(truth: Truth) -> Changed:
    return changed(truth.events, of(NEW, "restored", 1), right=False), truth.root


def wrong_byte_seen(truth: Truth) -> Changed:
    return changed(truth.events, lambda e: e.kind == "seen", right=False), truth.root


def older_restored(truth: Truth) -> Changed:
    return changed(truth.events, of(NEW, "restored"), step=2, attempt=truth.old[0]), truth.root


def nothing_restored(truth: Truth) -> Changed:
    return changed(truth.events, of(NEW, "restored"), step=0, attempt=""), truth.root


def older_near_restored(truth: Truth) -> Changed:
    facts = {"step": 3, "attempt": "e000001-00000000000000aa", "origin": "near"}
    return changed(truth.events, of(NEW, "restored"), **facts), truth.root


def older_seen(truth: Truth) -> Changed:
    facts = {"step": 4, "attempt": truth.old[1], "latest": True, "right": True}
    return [*truth.events, reported(-1, -1, "seen", 170.0, **facts)], truth.root


def fenced_commit(truth: Truth) -> Changed:
    """The old job's second commit stands behind the new one's."""
    records = list(truth.root.records)
    late = next(r for r in records if r.kind == "COMMIT" and r.attempt == truth.old[1])
    slot = records[-1].slot + 1
    return truth.events, truth.root._replace(records=(*records, replace(late, slot=slot)))


def fenced_acknowledged(truth: Truth) -> Changed:
    outcome = reported(OLD, 0, "failed", 15.0, step=3, error="Fenced")
    return sorted([*truth.events, outcome], key=lambda e: e.time), truth.root


def slow_call(truth: Truth) -> Changed:
    return changed(truth.events, of(NEW, "closed"), seconds=CALL_SECONDS_MAX + 1), truth.root


def endless_rank(truth: Truth) -> Changed:
    return [*truth.events, reported(NEW, -1, "late", 300.0, ranks=[1])], truth.root


def foreign_error(truth: Truth) -> Changed:
    """In a life that may end as it likes."""
    events = changed(truth.events, of(NEW, "started"), ends="any")
    return changed(events, of(NEW, "ended"), error="KeyError"), truth.root


def ranks_differ_on_a_save(truth: Truth) -> Changed:
    lie = reported(NEW, 1, "failed", 111.0, step=6, error="TransientError")
    return [*truth.events, lie], truth.root


def ranks_differ_on_an_unknown(truth: Truth) -> Changed:
    lie = reported(NEW, 1, "failed", 111.0, step=6, error="OutcomeUnknown")
    return [*truth.events, lie], truth.root


def failed_save_exists(truth: Truth) -> Changed:
    """All ranks are told that the save has failed, and its commit stands."""
    save = [e for e in truth.events if e.kind == "saved" and e.attempt == truth.new[0]]
    failed = [e._replace(kind="failed", facts={**e.facts, "error": "RankFailed"}) for e in save]
    return [e for e in truth.events if e not in save] + failed, truth.root


def ranks_differ_on_an_attempt(truth: Truth) -> Changed:
    first = next(e for e in truth.events if of(NEW, "saved", 1)(e))
    return changed(truth.events, lambda e: e is first, attempt=truth.old[1]), truth.root


def ranks_differ_on_a_restore(truth: Truth) -> Changed:
    facts = {"step": 8, "attempt": truth.new[1]}
    return changed(truth.events, of(NEW, "restored", 1), **facts), truth.root


def training_stopped(truth: Truth) -> Changed:
    return changed(truth.events, of(NEW, "ended", 1), error="RankFailed"), truth.root


def rank_vanished(truth: Truth) -> Changed:
    return [e for e in truth.events if not of(NEW, "ended", 1)(e)], truth.root


def not_only_fenced(truth: Truth) -> Changed:
    events = changed(truth.events, of(NEW, "started"), ends="fenced")
    return changed(events, of(NEW, "ended", 1), error="TransientError"), truth.root


def near_saved(truth: Truth, life: int, step: int, attempt: str, time: float) -> list[Event]:
    """A near save that both ranks of a life were told of, begun a second before."""
    events = [
        reported(life, rank, kind, time, step=step, attempt=attempt, seconds=1.0)
        for rank in range(2)
        for kind in ("stepped", "near saved")
    ]
    return sorted([*truth.events, *events], key=lambda e: e.time)


def near_state_lost(truth: Truth) -> Changed:
    return near_saved(truth, OLD, 5, "e000001-00000000000000aa", 35.0), truth.root


def near_state_of_a_fenced_job(truth: Truth) -> Changed:
    """A third life restores a near state of the first, though the second has saved."""
    facts = {"step": 9, "attempt": "e000001-00000000000000aa", "origin": "near"}
    third = [
        reported(2, -1, "started", 200.0, ranks=1, ends="any", near=0, hosts=["a", "b"]),
        reported(2, 0, "began", 201.0),
        reported(2, 0, "restored", 202.0, right=True, seconds=0.1, **facts),
    ]
    return [*truth.events, *third], truth.root


def near_save_of_a_fenced_job(truth: Truth) -> Changed:
    """The first life is told of one that begins after the second has a record on its hosts."""
    events = near_saved(truth, NEW, 7, "e000002-00000000000000aa", 125.0)
    zombie = Truth.__new__(Truth)
    zombie.events = events
    return near_saved(zombie, OLD, 5, "e000001-00000000000000bb", 139.0), truth.root


LIES: dict[Callable[[Truth], Changed], str] = {
    lost_save: "acknowledged_exist",
    gone_save: "acknowledged_exist",
    failed_save_exists: "failed_do_not_exist",
    retired_too_early: "retired_by_rule",
    dropped_by_a_commit: "retired_by_rule",
    retired_import: "retired_by_rule",
    half_made_listed: "only_whole_ones_are_listed",
    live_one_gone: "only_whole_ones_are_listed",
    damage_seen: "only_whole_ones_are_listed",
    wrong_byte_restored: "no_wrong_byte",
    wrong_byte_seen: "no_wrong_byte",
    older_restored: "latest_never_goes_back",
    nothing_restored: "latest_never_goes_back",
    older_near_restored: "latest_never_goes_back",
    older_seen: "latest_never_goes_back",
    fenced_commit: "fenced_are_silent",
    fenced_acknowledged: "fenced_are_silent",
    slow_call: "calls_end_in_time",
    endless_rank: "calls_end_in_time",
    foreign_error: "errors_are_documented",
    ranks_differ_on_a_save: "ranks_agree",
    ranks_differ_on_an_unknown: "ranks_agree",
    ranks_differ_on_an_attempt: "ranks_agree",
    ranks_differ_on_a_restore: "ranks_agree",
    training_stopped: "training_goes_on",
    rank_vanished: "training_goes_on",
    not_only_fenced: "training_goes_on",
    near_state_lost: "near_survives",
    near_state_of_a_fenced_job: "near_of_newest_epoch",
    near_save_of_a_fenced_job: "near_fenced_are_silent",
}
ALL = (*CHECKS, *NEAR_CHECKS)


def test_the_truth_is_accepted(truth: Truth) -> None:
    assert broken_promises(truth.events, truth.root, ALL) == []


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_planted_lie_is_found_by_its_check(truth: Truth, lie: Callable[[Truth], Changed]) -> None:
    events, root = lie(truth)
    named = {problem.partition(":")[0] for problem in broken_promises(events, root, ALL)}
    assert LIES[lie] in named


def test_every_check_has_a_lie_of_its_own() -> None:
    assert {*LIES.values()} == {check.__name__ for check in ALL}


def test_a_near_state_may_be_lost_with_more_hosts_than_it_has_copies(truth: Truth) -> None:
    events, root = near_state_lost(truth)
    gone = [*events, reported(-1, -1, "lost host", 60.0, host="a")]
    assert broken_promises(gone, root, ALL) == []
    copied = changed(gone, lambda e: e.kind == "started", near=1)
    assert broken_promises(copied, root, ALL) != []
    both = [*copied, reported(-1, -1, "lost host", 61.0, host="b")]
    assert broken_promises(both, root, ALL) == []


def test_a_rank_may_report_that_it_has_not_learned_the_outcome(truth: Truth) -> None:
    own = next(e for e in truth.events if of(NEW, "saved", 1)(e))
    open_ = own._replace(kind="failed", facts={**own.facts, "error": "RankFailedInCommit"})
    events = [open_ if e is own else e for e in truth.events]
    assert broken_promises(events, truth.root, ALL) == []


def test_wrong_bits_in_a_root_are_found() -> None:
    root = Truth()
    assert wrong_bits(root.store) == []
    job = Job(2, lambda rank: root.store, SessionRegistry())
    job.save(lambda rank: {**state_of(9, rank, 2), "step": 10}, 10)
    (problem,) = wrong_bits(root.store)
    assert problem.startswith("step 10 ")


def test_what_a_sweep_leaves_is_found() -> None:
    root = Truth()
    assert left_behind(root.store) == []
    root.store.put_if_absent("steps/strange", b"x")
    assert left_behind(root.store) == ["steps/strange"]


def test_what_tiers_keep_too_long_is_found(tmp_path: Path) -> None:
    steps = tmp_path / "near" / "root" / "steps"
    for number in range(1, 5):
        problems = left_in_tiers({"a": tmp_path}) if number > 1 else []
        assert not problems
        folder = steps / f"{number:08d}-e000001-{number:016x}"
        folder.mkdir(parents=True)
        (folder / "rank00000-000.safetensors").write_bytes(b"x")
    (problem,) = left_in_tiers({"a": tmp_path})
    assert problem.startswith("a: 4 states in its tier")


def test_a_line_under_way_is_no_event_yet(tmp_path: Path) -> None:
    line = '{"life": 0, "rank": 1, "event": "began", "time": 2.0}\n'
    (tmp_path / "life0-rank1.history").write_text(line + line[:20])
    assert [event.kind for event in read_history(tmp_path)] == ["began"]
