"""Retention: what a rule keeps, what no rule may give up, and what happens when it is carried out.

Method: plans are pure, so rules are compared with plain reimplementations over random sets of
checkpoints; then plans are carried out on real roots in memory.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from typing import Literal

import pytest

import ckpt
from ckpt.commit.appender import Sources
from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import attempt_name
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from ckpt.service.retention import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepRule,
    KeepYounger,
    RetentionPlan,
    carry_out,
    plan_retention,
    with_grace,
)
from storage import Store
from storage.memory import MemoryStore
from storage.wrap import WrappedStore

NOW = 1_000_000.0


def entry(slot: int, step: int | None = None, **changes: object) -> LiveEntry:
    known: dict[str, object] = {
        "attempt": attempt_name(1, slot.to_bytes(8, "big")),
        "step": slot * 10 if step is None else step,
        "slot": slot,
        "manifest_nbytes": 1,
        "manifest_digest": b"d",
        "pinned": False,
        "verified": False,
        "metric": None,
        "references": (),
    }
    return LiveEntry(**{**known, **changes})  # type: ignore[arg-type]


def plan(entries: list[LiveEntry], rule: KeepRule, ages: dict[int, float] | None = None):
    known = ages or {}
    candidates = [replace(one, committed_unix=NOW - known.get(one.slot, 0.0)) for one in entries]
    return plan_retention(candidates, rule, now_unix=NOW)


def kept(planned: RetentionPlan) -> list[int]:
    return [verdict.entry.slot for verdict in planned.keep]


def why(planned: RetentionPlan, slot: int) -> tuple[str, ...]:
    return next(v.reasons for v in (*planned.keep, *planned.retire) if v.entry.slot == slot)


TEN = [entry(slot) for slot in range(1, 11)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (KeepAll(), list(range(1, 11))),
        (KeepLatest(1), [10]),
        (KeepLatest(3), [8, 9, 10]),
        (KeepLatest(99), list(range(1, 11))),
        (KeepEvery(40), [1, 4, 8, 10]),
        (KeepEvery(1000), [1, 10]),
        (KeepLatest(2) | KeepEvery(40), [1, 4, 8, 9, 10]),
        (KeepLatest(5) & KeepEvery(40), [8, 10]),
    ],
)
def test_rules_keep(rule: KeepRule, expected: list[int]) -> None:
    assert kept(plan(TEN, rule)) == expected


def test_the_best_by_a_metric_are_kept_in_either_direction() -> None:
    metrics = [0.5, 0.1, None, 0.1, 0.9, 0.3]
    entries = [entry(slot, metric=metric) for slot, metric in enumerate(metrics, 1)]

    def best(count: int, mode: Literal["min", "max"] = "min") -> KeepBest:
        return KeepBest(count, mode, unmeasured="retire")

    assert kept(plan(entries, best(1))) == [4, 6]  # of equals the newer one
    assert kept(plan(entries, best(2))) == [2, 4, 6]
    assert kept(plan(entries, best(1, mode="max"))) == [5, 6]
    assert kept(plan(entries, best(99))) == [1, 2, 4, 5, 6]
    assert why(plan(entries, best(1)), 4) == ("one of the best 1 (min): 0.1",)


def test_what_was_not_measured_is_kept_unless_the_user_says_otherwise() -> None:
    entries = [entry(slot, metric=m) for slot, m in enumerate([0.5, None, 0.1, 0.9], 1)]
    planned = plan(entries, KeepBest(1))
    assert kept(planned) == [2, 3, 4] and why(planned, 2) == ("it has no metric",)
    assert kept(plan(entries, KeepBest(1) | KeepLatest(1))) == [2, 3, 4]
    assert kept(plan(entries, KeepBest(1, unmeasured="retire"))) == [3, 4]


@pytest.mark.parametrize(
    "rule",
    [
        KeepBest(2),
        KeepBest(2, unmeasured="retire"),
        KeepBest(2) | KeepLatest(2),
        KeepBest(2) & KeepLatest(2),
        KeepYounger(1.0),
        KeepYounger(1.0) & KeepLatest(3),
    ],
    ids=repr,
)
def test_rule_that_matches_nothing_retires_nothing(rule: KeepRule) -> None:
    planned = plan(TEN, rule, dict.fromkeys(range(1, 11), 9e9))
    assert kept(planned) == list(range(1, 11)) and not planned.retire
    assert ("metric" in planned.refused) is ("KeepBest" in repr(rule))
    assert planned.describe().splitlines()[-1] == f"refused: {planned.refused}"


def test_rule_that_matches_nothing_beside_one_that_does_is_carried_out() -> None:
    planned = plan(TEN, KeepYounger(1.0) | KeepLatest(2), dict.fromkeys(range(1, 11), 9e9))
    assert kept(planned) == [9, 10] and not planned.refused


def test_what_no_training_saved_is_not_counted_and_stays() -> None:
    entries = [entry(1), entry(2), entry(3, 0, line=None), entry(4), entry(5, 40, line=None)]
    for rule in (KeepLatest(1), KeepEvery(1000) & KeepLatest(4), KeepYounger(1.0) | KeepLatest(1)):
        planned = plan(entries, rule, dict.fromkeys(range(1, 6), 9e9))
        assert kept(planned) in ([3, 4, 5], [1, 3, 4, 5])
        assert why(planned, 4)[-1] == "the latest"
        assert why(planned, 5) == ("no training saved it; `ckpt rm` removes it",)
    alone = [entry(slot, line=None) for slot in (1, 2, 3)]
    assert kept(plan(alone, KeepLatest(1))) == [3]


DAY = 86_400.0
WEEK_OR_LATEST = KeepYounger(7 * DAY) | KeepLatest(1)


def days(*of_slots: float) -> dict[int, float]:
    """Ages of slots 1, 2, ... that were committed on these days, looked at right after the last."""
    return {slot: (of_slots[-1] - day) * DAY for slot, day in enumerate(of_slots, 1)}


def of_days(*of_slots: float, rule: KeepRule = WEEK_OR_LATEST) -> RetentionPlan:
    entries = [entry(slot) for slot in range(1, len(of_slots) + 1)]
    return plan(entries, rule, days(*of_slots))


def test_the_young_are_kept() -> None:
    ages = {1: 230.0, 2: 160.0, 3: 100.0, 4: 99.0, 5: 20.0}
    planned = plan([entry(slot) for slot in range(1, 6)], KeepYounger(100.0), ages)
    assert kept(planned) == [4, 5] and not planned.jumps
    assert why(planned, 4) == ("99 s old",)


@pytest.mark.parametrize("year", [365.0, -365.0])
@pytest.mark.parametrize("good", [(0,), (0, 1), (0, 1, 2, 3), (0, 0.1, 2, 2.5, 6)])
def test_a_save_with_a_wrong_clock_retires_nothing(good: tuple[float, ...], year: float) -> None:
    """By the plan of its own process, and by those of later saves with the right clock."""
    wrong = good[-1] + year
    planned = of_days(*good, wrong)
    assert not planned.retire
    (jump,) = planned.jumps
    steps = f"between steps {10 * len(good)} and {10 * len(good) + 10}"
    assert steps in jump and jump in planned.describe()
    assert f"{365 * DAY:.0f} s {'ahead' if year > 0 else 'back'}" in jump
    assert not of_days(*good, wrong, good[-1] + 0.1).retire


def test_good_steps_age_on_after_a_jump_of_the_clock() -> None:
    """The jump is left out of the ages; the time before and after it counts."""
    assert kept(of_days(0, 1, 2, 365, 367, 369)) == [1, 2, 3, 4, 5, 6]
    assert kept(of_days(0, 1, 2, 365, 367, 369, 371)) == [3, 4, 5, 6, 7]
    assert not of_days(0, 1, 2, 3).jumps


def test_saves_rarer_than_the_rule_are_no_jumps() -> None:
    rule = KeepYounger(DAY) | KeepLatest(2)
    assert kept(of_days(0, 2, 4, 6, rule=rule)) == [3, 4]
    assert not of_days(0, 2, 4, 6, rule=rule).jumps


def test_a_few_seconds_between_hosts_are_no_jump() -> None:
    assert not of_days(0, 1, 1 - 30 / DAY, 2).jumps


def test_two_of_several_share_no_file() -> None:
    """As saves with dedup write them: number 4 was written anew."""
    names = [entry(slot).attempt for slot in range(1, 8)]
    bases = {2: 1, 3: 1, 5: 4, 6: 4, 7: 4}
    entries = [
        entry(slot, references=(names[bases[slot] - 1],) if slot in bases else ())
        for slot in range(1, 8)
    ]
    assert kept(plan(entries, KeepLatest(2))) == [1, 3, 4, 6, 7]
    assert why(plan(entries, KeepLatest(2)), 3) == ("the newest that shares no file with step 70",)
    assert kept(plan(entries, KeepLatest(1))) == [4, 7], "one was asked for"
    assert kept(plan(entries[:5], KeepLatest(2))) == [1, 3, 4, 5]
    assert kept(plan(entries[:4], KeepLatest(2))) == [1, 3, 4]
    assert kept(plan(entries[:3], KeepLatest(2))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "now", "later"),
    [
        (KeepLatest(1), [4, 5, 6, 7, 8], [5, 6, 7, 8, 9]),
        (KeepLatest(2), [3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9]),
        (KeepEvery(30), [1, 3, 4, 5, 6, 7, 8], [1, 3, 5, 6, 7, 8, 9]),
        (KeepYounger(2.5 * DAY), [3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9]),
    ],
    ids=repr,
)
def test_what_a_rule_gives_up_stays_for_a_grace_period(
    rule: KeepRule, now: list[int], later: list[int]
) -> None:
    """A save every day, and a grace of three and a half: by plans of every day in turn."""
    live = [entry(1)]
    for slot in range(2, 10):
        live.append(entry(slot))
        ages = {one.slot: (slot - one.slot) * DAY for one in live}
        live = [verdict.entry for verdict in plan(live, with_grace(rule, 3.5 * DAY), ages).keep]
        if slot == 8:
            assert [one.slot for one in live] == now
    assert [one.slot for one in live] == later
    planned = plan(live, with_grace(rule, 3.5 * DAY), ages)
    assert "`ckpt pin` keeps it" in planned.describe()


def test_a_rule_without_grace_is_itself() -> None:
    assert with_grace(KeepLatest(1), None) == KeepLatest(1)
    for wrong in (0, -1.0, math.inf, math.nan, "1d"):
        with pytest.raises(ValueError, match="retire_after="):
            with_grace(KeepLatest(1), wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="retire_after="):
            ckpt.Checkpointer({}, "memory://grace", retire_after=wrong)  # type: ignore[arg-type]


def test_a_step_that_was_saved_again_counts_by_its_newest_commit() -> None:
    entries = [entry(1, 100), entry(2, 200), entry(3, 100), entry(4, 150)]
    assert kept(plan(entries, KeepEvery(100))) == [2, 3, 4]


def test_keeping_every_k_steps_is_stable_while_the_training_goes_on() -> None:
    live: list[LiveEntry] = []
    for slot in range(1, 60):
        live.append(entry(slot, slot * 7))
        live = [verdict.entry for verdict in plan(live, KeepEvery(50) | KeepLatest(2)).keep]
    steps = [one.step for one in live]
    assert steps[:-2] == [
        next(s for s in range(0, 420, 7) if s >= k and s) for k in range(0, 400, 50)
    ]


@pytest.mark.parametrize("protected", ["latest", "verified", "pinned", "needed", "needed by those"])
def test_no_rule_gives_up_what_is_protected(protected: str) -> None:
    best = KeepBest(1, unmeasured="retire")  # keeps none of them but the third
    names = [one.attempt for one in (entry(s) for s in range(1, 6))]
    changes: dict[str, dict[int, dict[str, object]]] = {
        "latest": {},
        "verified": {2: {"verified": True}, 1: {"verified": True}},
        "pinned": {2: {"pinned": True}},
        "needed": {5: {"references": (names[1],)}},
        "needed by those": {5: {"references": (names[3],)}, 4: {"references": (names[1],)}},
    }
    entries = [
        entry(slot, metric=0.0 if slot == 3 else None, **changes[protected].get(slot, {}))
        for slot in range(1, 6)
    ]
    expected = {
        "latest": [3, 5],
        "verified": [2, 3, 5],
        "pinned": [2, 3, 5],
        "needed": [2, 3, 5],
        "needed by those": [2, 3, 4, 5],
    }
    planned = plan(entries, best)
    assert kept(planned) == expected[protected]
    if protected.startswith("needed"):
        assert why(planned, 2)[0].startswith("needed by step")


def test_nothing_and_one_are_kept() -> None:
    assert plan([], KeepLatest(1)) == RetentionPlan((), ())
    assert kept(plan([entry(1)], KeepYounger(1.0), {1: 9e9})) == [1]


def test_random_plans_keep_every_promise(rng: random.Random) -> None:
    for _ in range(300):
        entries: list[LiveEntry] = []
        for slot in sorted(rng.sample(range(1, 100), rng.randint(1, 15))):
            older = [one.attempt for one in entries]
            changes = {
                "step": rng.randrange(40),
                "pinned": rng.random() < 0.1,
                "verified": rng.random() < 0.2,
                "metric": rng.choice([None, rng.random()]),
                "references": tuple(
                    sorted(rng.sample(older, min(len(older), rng.choice([0, 0, 2]))))
                ),
            }
            entries.append(entry(slot, **changes))
        rule: KeepRule = rng.choice([KeepLatest(2), KeepEvery(10), KeepBest(1), KeepYounger(50.0)])
        if rng.random() < 0.5:
            rule = rule & KeepLatest(4) if rng.random() < 0.5 else rule | KeepEvery(20)
        ages = {one.slot: rng.uniform(0, 100) for one in entries}
        rng.shuffle(entries)
        planned = plan(entries, rule, ages)
        keep = {verdict.entry.attempt for verdict in planned.keep}
        assert keep | {v.entry.attempt for v in planned.retire} == {e.attempt for e in entries}
        ordered = sorted(entries, key=lambda one: one.slot)
        assert ordered[-1].attempt in keep
        assert {e.attempt for e in entries if e.pinned} <= keep
        assert not [e for e in ordered if e.verified] or any(
            e.attempt in keep for e in ordered if e.verified
        )
        assert all(name in keep for v in planned.keep for name in v.entry.references)
        assert all(v.reasons for v in (*planned.keep, *planned.retire))
        # Retiring one after the other never takes what a remaining one needs.
        left = {e.attempt: e for e in entries}
        for verdict in planned.retire:
            del left[verdict.entry.attempt]
            assert all(name in left for e in left.values() for name in e.references)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLatest(0),
        lambda: KeepEvery(-1),
        lambda: KeepBest(1, mode="best"),  # type: ignore[arg-type]
        lambda: KeepBest(0),
        lambda: KeepBest(1, unmeasured="forget"),  # type: ignore[arg-type]
        lambda: KeepYounger(0),
        lambda: KeepYounger(float("nan")),
    ],
)
def test_rules_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()  # type: ignore[operator]


# --- carried out ----------------------------------------------------------------------------------


def root_with(steps: int, clock: list[float]) -> tuple[MemoryStore, Session]:
    store = MemoryStore()
    sources = Sources(clock=lambda: clock[0])
    session = Session.claim(store, sources=sources)
    for step in range(1, steps + 1):
        clock[0] += 10.0
        attempt = session.new_attempt()
        store.put_if_absent(f"steps/{step:08d}-{attempt}/MANIFEST", b"m")
        session.commit(Commit(attempt, step, 1, b"d"))
    return store, session


def test_a_plan_is_carried_out_and_only_then_anything_is_deleted() -> None:
    store, session = root_with(5, [100.0])
    before = [info.key for info in store.list("")]
    candidates = session.state().live
    planned = plan_retention(candidates, KeepLatest(2), now_unix=0.0)
    assert planned.describe().splitlines()[0].startswith("retire step 1 (e000001-")
    assert [info.key for info in store.list("")] == before
    gone, stayed = carry_out(planned, session.retire)
    assert [one.step for one in gone] == [3, 2, 1] and not stayed
    assert [one.step for one in session.state().live] == [4, 5]
    assert len(list(store.list("steps/"))) == 2


def test_what_was_pinned_after_the_plan_was_made_stays() -> None:
    store, session = root_with(4, [100.0])
    candidates = session.state().live
    planned = plan_retention(candidates, KeepLatest(1), now_unix=0.0)
    Maintenance.open(store).pin(candidates[1].attempt)
    gone, stayed = carry_out(planned, session.retire)
    assert [one.step for one in gone] == [3, 1] and "pinned" in stayed[0]


def test_carrying_out_stops_on_request() -> None:
    _, session = root_with(4, [100.0])
    candidates = session.state().live
    planned = plan_retention(candidates, KeepLatest(1), now_unix=0.0)
    answers = iter([False, True])
    gone, _ = carry_out(planned, session.retire, stop=lambda: next(answers))
    assert [one.step for one in gone] == [3]


class _Asked(WrappedStore):
    """Keeps the keys that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        self.keys.append(key)
        return super().get_bounded(key, nbytes_max)


def test_ages_are_in_the_newest_record() -> None:
    inner, _ = root_with(3, [100.0])
    store = _Asked(inner)
    log = Log(store)
    state = log.state()
    store.keys.clear()
    candidates = state.live
    assert [one.committed_unix for one in candidates] == [110.0, 120.0, 130.0]
    assert not store.keys


def test_a_training_keeps_what_its_rule_keeps() -> None:
    state = {"x": 0}
    url = "memory://retention-of-a-training"
    keep = ckpt.KeepLatest(2) | ckpt.KeepEvery(10) | ckpt.KeepBest(1, mode="max")
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1), keep=keep) as checkpointer:
        for step in range(1, 26):
            state["x"] = step
            checkpointer.step(step, metric=-abs(step - 17))
        checkpointer.wait()
    assert [info.step for info in ckpt.list_steps(url)] == [1, 10, 17, 20, 24, 25]


def test_a_training_without_metrics_loses_nothing_and_hears_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {"x": 0}
    url = "memory://retention-without-metrics"
    keep = ckpt.KeepBest(1)
    with (
        caplog.at_level(logging.WARNING),
        ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1), keep=keep) as checkpointer,
    ):
        for step in range(1, 5):
            checkpointer.step(step)
            checkpointer.wait()
        planned = checkpointer.retention_plan()
        assert planned is not None and "has a metric" in planned.refused
    assert [info.step for info in ckpt.list_steps(url)] == [1, 2, 3, 4]
    texts = [record.getMessage() for record in caplog.records if "metric" in record.getMessage()]
    assert len(texts) == 1 and "no checkpoint is retired for now" in texts[0]
