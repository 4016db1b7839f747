"""Save policies are pure: every decision is a function of an observation, and no time passes here.

Method: tables of observations, combinations over all pairs of answers, and simulated trainings in
which the clock is a number; what the simulated saves really cost is compared with the budget.
"""

from __future__ import annotations

import itertools
import operator
import random
import signal
from typing import Any

import pytest

from ckpt.service.policies import (
    Adaptive,
    AtExit,
    CostMeter,
    EverySeconds,
    EverySteps,
    Never,
    Observation,
    OnPreemption,
    OnSignal,
    SavePolicy,
    by_all,
    by_coordinator,
    preemption_of,
    signals_of,
)
from ckpt.service.retention import KeepLatest


def due(policy: SavePolicy, **seen: object) -> bool:
    known = {"step": 10, "previous_step": 9}
    return bool(policy.reasons(Observation(**{**known, **seen})))  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20])
def test_every_steps_is_due_at_each_multiple_and_nowhere_else(steps: int) -> None:
    policy = EverySteps(steps)
    for step in range(1, 61):
        assert due(policy, step=step, previous_step=step - 1) == (step % steps == 0)


@pytest.mark.parametrize("stride", [2, 3, 5, 11])
def test_every_steps_is_due_once_per_multiple_when_calls_skip_steps(stride: int) -> None:
    policy, times = EverySteps(7), 0
    calls = range(0, 700, stride)
    for before, step in itertools.pairwise(calls):
        times += due(policy, step=step, previous_step=before)
    assert times == (calls[-1] // 7 if stride <= 7 else len(calls) - 1)


def test_every_steps_takes_a_step_back_after_a_restore() -> None:
    assert not due(EverySteps(5), step=3, previous_step=12)


@pytest.mark.parametrize(
    ("policy", "seen", "expected"),
    [
        (EverySeconds(10), {"now_seconds": 9.9}, False),
        (EverySeconds(10), {"now_seconds": 10.0}, True),
        (EverySeconds(10), {"now_seconds": 19.9, "last_save_seconds": 10.0}, False),
        (EverySeconds(10), {"now_seconds": 20.0, "last_save_seconds": 10.0}, True),
        (OnSignal(), {}, False),
        (OnSignal(), {"signals": frozenset({signal.SIGUSR1})}, True),
        (OnSignal(), {"signals": frozenset({signal.SIGTERM})}, False),
        (OnSignal((signal.SIGUSR2,)), {"signals": frozenset({signal.SIGUSR2})}, True),
        (OnPreemption(), {"signals": frozenset({signal.SIGUSR1})}, False),
        (OnPreemption(), {"signals": frozenset({signal.SIGTERM})}, True),
        (AtExit(), {}, False),
        (AtExit(), {"closing": True}, True),
        (Never(), {"closing": True, "now_seconds": 1e9}, False),
    ],
)
def test_single_policies(policy: SavePolicy, seen: dict[str, object], expected: bool) -> None:
    assert due(policy, **seen) == expected


def test_combinations_are_due_as_their_parts_say() -> None:
    """All four answers of two policies, under | and &, nested both ways."""
    for steps, seconds in itertools.product((False, True), repeat=2):
        seen = {"step": 10 if steps else 11, "previous_step": 9 if steps else 10}
        seen["now_seconds"] = 100 if seconds else 1
        a, b, never = EverySteps(10), EverySeconds(50), Never()
        assert due(a | b, **seen) == (steps or seconds)
        assert due(a & b, **seen) == (steps and seconds)
        assert due((a & b) | never, **seen) == (steps and seconds)
        assert due((a | never) & b, **seen) == (steps and seconds)
        assert not due(never & (a | b), **seen)


def test_reasons_name_every_part_that_is_due() -> None:
    seen = Observation(step=10, previous_step=9, now_seconds=60.0)
    assert (EverySteps(5) | EverySeconds(60) | OnSignal()).reasons(seen) == (
        "every 5 steps",
        "every 60 s",
    )
    assert (EverySteps(5) & EverySeconds(60)).reasons(seen) == ("every 5 steps and every 60 s",)


def test_each_alternative_is_decided_where_it_is_known() -> None:
    """Steps and signals by all ranks; clocks, and what needs both, by the coordinator."""
    policy = EverySteps(5) | EverySeconds(60) & EverySteps(2) | OnSignal() | Adaptive() | AtExit()
    assert [type(p) for p in by_all(policy).alternatives()] == [EverySteps, OnSignal, AtExit]
    assert [p.needs_clock for p in by_coordinator(policy).alternatives()] == [True, True]
    assert len(by_coordinator(EverySteps(5)).alternatives()) == 0
    assert not due(by_coordinator(EverySteps(5)), step=5, previous_step=4)


def test_signals_and_preemption_are_found_wherever_they_stand() -> None:
    policy = EverySteps(5) & OnSignal((signal.SIGUSR2,)) | OnPreemption(7.0)
    assert signals_of(policy) == {signal.SIGUSR2, signal.SIGTERM}
    assert preemption_of(policy) == OnPreemption(7.0)
    assert preemption_of(EverySteps(1)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySteps(2.0),  # type: ignore[arg-type]
        lambda: EverySeconds(0),
        lambda: EverySeconds(float("inf")),
        lambda: Adaptive(0.0),
        lambda: Adaptive(1.0),
        lambda: Adaptive(seconds_min=5.0, seconds_max=1.0),
        lambda: OnSignal(()),
        lambda: OnSignal((signal.SIGKILL,)),
        lambda: OnPreemption(grace_seconds=-1.0),
        lambda: EverySteps(5) & OnPreemption(),
        lambda: (EverySteps(5) | AtExit()) & EverySeconds(5),
    ],
)
def test_policies_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"expected|last chance"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("one", [EverySteps(10), KeepLatest(3)])
def test_only_policies_are_combined_with_policies_and_rules_with_rules(one: Any) -> None:
    for combine in (operator.or_, operator.and_):
        with pytest.raises(TypeError, match=r"expected a (policy|rule) on both sides"):
            combine(one, 5)
        with pytest.raises(TypeError, match=r"expected a (policy|rule) on both sides"):
            combine(one, KeepLatest(1) if isinstance(one, EverySteps) else EverySteps(1))
        with pytest.raises(
            TypeError, match=r"^5 [|&] \w+\(.*expected a (policy|rule) on both sides"
        ):
            combine(5, one)


def test_policies_are_values() -> None:
    assert EverySteps(5) | OnSignal() == EverySteps(5) | OnSignal()
    assert len({EverySteps(5), EverySteps(5), Adaptive(), Adaptive()}) == 2


# --- adaptive -------------------------------------------------------------------------------------


class Training:
    """A simulated training: steps take `step_seconds`, and longer beside a save."""

    def __init__(self, policy: Adaptive, rng: random.Random) -> None:
        self.policy, self.rng, self.meter = policy, rng, CostMeter()
        self.now = self.last_save = self.extra = 0.0
        self.saves: list[float] = []

    def run(self, seconds: float, *, step: float, blocked: float, slower: float, persist: float):
        """`slower` is how much longer a step is, as a share, while a save is under way."""
        until, over, number = self.now + seconds, 0.0, 0
        while self.now < until:
            number += 1
            beside = self.now < over
            took = step * self.rng.uniform(0.9, 1.1) * (1 + slower * beside)
            self.extra += took - took / (1 + slower * beside)
            self.now += took
            self.meter.step(took, saving=beside)
            if beside and self.now >= over:
                self.meter.saved(blocked_seconds=blocked, persist_seconds=persist)
            seen = Observation(
                step=number,
                previous_step=number - 1,
                now_seconds=self.now,
                last_save_seconds=self.last_save,
                cost_seconds=self.meter.cost_seconds,
                persist_seconds=self.meter.persist_seconds,
            )
            if self.now >= over and self.policy.reasons(seen):
                self.last_save = self.now
                self.saves.append(self.now)
                self.now += blocked
                self.extra += blocked
                over = self.now + persist


@pytest.mark.parametrize("budget", [0.01, 0.03, 0.1])
@pytest.mark.parametrize(
    ("step", "blocked", "slower", "persist"),
    [(0.1, 0.2, 0.0, 3.0), (0.1, 0.0, 0.5, 3.0), (1.0, 2.0, 0.3, 20.0), (0.01, 0.1, 0.1, 1.0)],
)
def test_adaptive_keeps_its_budget_and_uses_it(
    budget: float, step: float, blocked: float, slower: float, persist: float, rng: random.Random
) -> None:
    """Real cost of the simulated saves over hours; at least half the budget is used."""
    training = Training(Adaptive(budget, seconds_min=1.0), rng)
    training.run(4000 * step, step=step, blocked=blocked, slower=slower, persist=persist)
    training.extra, began = 0.0, training.now
    training.run(40_000 * step, step=step, blocked=blocked, slower=slower, persist=persist)
    overhead = training.extra / (training.now - began - training.extra)
    cost = blocked + slower * persist / (1 + slower)
    bound = min(budget, cost / persist)  # saves follow each other at most without a gap
    assert 0.5 * bound < overhead < 1.15 * budget, overhead


def test_adaptive_follows_costs_that_change(rng: random.Random) -> None:
    training = Training(Adaptive(0.03, seconds_min=1.0), rng)
    training.run(600, step=0.1, blocked=0.1, slower=0.0, persist=1.0)
    often = len(training.saves)
    training.run(600, step=0.1, blocked=1.0, slower=0.0, persist=5.0)
    rare = len(training.saves) - often
    assert often > 5 * rare > 0


def test_adaptive_is_due_once_unmeasured_and_never_beside_another_save() -> None:
    policy = Adaptive(0.5, seconds_min=5.0, seconds_max=100.0)
    assert not due(policy, now_seconds=4.9)
    assert due(policy, now_seconds=5.0)
    measured = {"cost_seconds": 0.1, "persist_seconds": 30.0}
    assert not due(policy, now_seconds=29.9, **measured)
    assert due(policy, now_seconds=30.0, **measured)
    assert due(policy, now_seconds=100.0, cost_seconds=1e6, persist_seconds=1.0)
    assert policy.interval_seconds(0.0, 0.0) == 5.0


# --- costs ----------------------------------------------------------------------------------------


def test_the_cost_of_a_save_is_what_it_blocks_and_what_steps_take_longer_beside_it() -> None:
    meter = CostMeter()
    assert meter.cost_seconds is meter.persist_seconds is meter.step_seconds is None
    for _ in range(9):
        meter.step(1.0, saving=False)
    meter.step(50.0, saving=False)  # an evaluation: the median does not mind
    for seconds in (1.5, 1.2, 0.9):
        meter.step(seconds, saving=True)
    meter.saved(blocked_seconds=0.25, persist_seconds=3.0)
    assert meter.step_seconds == 1.0
    assert meter.cost_seconds == pytest.approx(0.25 + 0.6)
    assert meter.persist_seconds == 3.0


def test_costs_are_never_negative_and_the_worst_of_the_newest_counts() -> None:
    meter = CostMeter(saves_kept=2)
    meter.step(1.0, saving=False)
    meter.step(0.5, saving=True)
    meter.saved(blocked_seconds=0.0, persist_seconds=1.0)
    assert meter.cost_seconds == 0.0
    for blocked in (3.0, 1.0, 2.0):
        meter.saved(blocked_seconds=blocked, persist_seconds=blocked)
    assert meter.cost_seconds == meter.persist_seconds == 2.0
