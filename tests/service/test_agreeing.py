"""All ranks do what was agreed at one and the same call of `step`, whichever proposed it and when.

Method: ranks are threads that make calls at their own, random pace, held together or not; what is
decided, and at which call, must be the same on all. Nothing is timed but by the watchers.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import RankFailed
from ckpt.service.agreement import Decision, Pace, Proposal, StepAgreement, decided, merged
from ckpt.world.base import SoloWorld, World
from tests.conftest import Scale
from tests.thread_ranks import RanksFailed, run_ranks

QUICK = Pace(poll_seconds=0.002, ahead_seconds=0.004)


class Arrivals:
    """Signals that a test sends by hand."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.left = math.inf

    def take(self) -> tuple[int, ...]:
        arrived, self.waiting = self.waiting, []
        return tuple(arrived)

    def left_seconds(self) -> float:
        return self.left


def test_a_proposal_travels_as_it_is() -> None:
    proposal = Proposal(7, (15, 10), 2.5, ("every 5 s",), 3, True, False)
    assert Proposal.decode(proposal.encode()) == proposal
    assert Proposal.decode(Proposal(1).encode()) == Proposal(1)


def test_the_latest_promise_decides_and_everything_that_was_brought_is_in() -> None:
    proposals = [
        Proposal(5, signals=(15,), left_seconds=4.0),
        Proposal(9, reasons=("a", "b"), valid_at=2),
        Proposal(7, signals=(10, 15), left_seconds=3.0, alarm=True),
    ]
    assert decided(proposals, now_seconds=100.0) == Decision(
        9, frozenset({10, 15}), 103.0, ("a", "b"), 2, True
    )
    assert decided([Proposal(3), Proposal(4)], now_seconds=0.0).is_empty


def test_decisions_of_one_call_are_done_together() -> None:
    both = merged([Decision(4, frozenset({15}), 9.0), Decision(4, reasons=("a",), valid_at=1)], 4)
    assert both == Decision(4, frozenset({15}), 9.0, ("a",), 1)
    assert merged([], 1).is_empty


def test_alone_a_proposal_is_done_at_the_next_call() -> None:
    arrivals = Arrivals()
    agreement = StepAgreement(SoloWorld(), arrivals, clock=lambda: 50.0)
    assert agreement.turn() is None
    arrivals.waiting.append(15)
    arrivals.left = 3.0
    assert agreement.turn() == Decision(2, frozenset({15}), 53.0)
    agreement.propose(reasons=("x",), valid_at=0)
    assert agreement.close() == Decision(3, deadline_seconds=53.0, reasons=("x",), valid_at=0)


Script = Callable[[StepAgreement, Arrivals, int, int], None]


def _decisions(
    size: int, turns: int, script: Script, *, seed: int = 0, kill: dict[int, int] | None = None
) -> list[list[tuple[int, Any]]]:
    """What every rank decided, by call; call `turns + 1` is the close."""

    def rank(world: World) -> list[tuple[int, Any]]:
        rng = random.Random(seed * 100 + world.rank)
        arrivals = Arrivals()
        agreement = StepAgreement(world.duplicate(), arrivals, pace=QUICK)
        pause = threading.Event()
        decisions: list[tuple[int, Any]] = []
        try:
            for turn in range(1, turns + 1):
                script(agreement, arrivals, world.rank, turn)
                decision = agreement.turn()
                if decision is not None:
                    decisions.append((turn, _same_everywhere(decision)))
                if rng.random() < 0.3:
                    pause.wait(rng.choice([0.0, 0.001, 0.005]))
                if turn % 10 == 0:
                    world.gather("collective of the training", b"")
            decision = agreement.close()
            if decision is not None:
                decisions.append((turns + 1, _same_everywhere(decision)))
            return decisions
        finally:
            agreement.leave()

    return run_ranks(size, rank, kill=kill, deadline_seconds=20.0)


def _same_everywhere(decision: Decision) -> tuple[Any, ...]:
    return decision.turn, decision.signals, decision.reasons, decision.valid_at, decision.alarm


@pytest.mark.parametrize("asker", [0, 1, 2])
def test_one_ranks_signal_reaches_all_at_the_same_call(asker: int) -> None:
    def script(agreement: StepAgreement, arrivals: Arrivals, rank: int, turn: int) -> None:
        if rank == asker and turn == 7:
            arrivals.waiting.append(15)

    decisions = _decisions(3, 300, script)
    assert decisions[0] == decisions[1] == decisions[2]
    ((turn, decision),) = decisions[0]
    assert turn >= 7 and decision[1] == {15}


def test_random_proposals_of_all_ranks_reach_all_at_the_same_calls(scale: Scale, seed: int) -> None:
    for number in range(scale.count(6, 200)):
        rng = random.Random(seed + number)
        size, turns = rng.choice([2, 3, 5]), rng.randint(1, 120)
        signals = {(rng.randrange(size), rng.randint(1, turns)) for _ in range(rng.randint(0, 5))}
        asks = {rng.randint(1, turns) for _ in range(rng.randint(0, 4))}

        def script(
            agreement: StepAgreement,
            arrivals: Arrivals,
            rank: int,
            turn: int,
            signals: set[tuple[int, int]] = signals,
            asks: set[int] = asks,
        ) -> None:
            if (rank, turn) in signals:
                arrivals.waiting.append(10 + rank)
            if rank == 0 and turn in asks:
                agreement.propose(reasons=(f"asked at {turn}",))

        decisions = _decisions(size, turns, script, seed=seed + number)
        assert all(one == decisions[0] for one in decisions), (seed, number)
        heard = [decision for _, decision in decisions[0]]
        assert {n for d in heard for n in d[1]} == {10 + rank for rank, _ in signals}
        assert {text for d in heard for text in d[2]} == {f"asked at {turn}" for turn in asks}


def test_nobody_waits_when_steps_are_longer_than_a_round() -> None:
    waited: list[float] = []

    def rank(world: World) -> None:
        arrivals = Arrivals()
        agreement = StepAgreement(world.duplicate(), arrivals, pace=Pace(0.002, 0.5))
        pause = threading.Event()
        for turn in range(1, 80):
            if turn == 10 and world.rank == 1:
                arrivals.waiting.append(10)
            agreement.turn()
            pause.wait(0.01)  # a step
        agreement.close()
        waited.append(agreement.waited_seconds)

    run_ranks(3, rank)
    assert max(waited) < 0.5


def test_a_rank_that_dies_between_calls_is_named_at_the_next_one() -> None:
    def rank(world: World) -> None:
        agreement = StepAgreement(world.duplicate(), Arrivals(), pace=QUICK)
        pause = threading.Event()
        try:
            world.gather("begin", b"")
            if world.rank == 2:
                world.gather("dies here", b"")
            for _ in range(1000):
                agreement.turn()
                pause.wait(0.005)
        finally:
            agreement.leave()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, rank, kill={2: 2})
    for survivor in (0, 1):
        error = failed.value.errors[survivor]
        assert isinstance(error, RankFailed) and error.rank == 2
        assert str(error) == "rank 2 has died in phase 'training'"


def test_a_rank_that_never_closes_is_named_by_those_that_do() -> None:
    def rank(world: World) -> None:
        agreement = StepAgreement(world.duplicate(), Arrivals(), pace=QUICK)
        try:
            agreement.turn()
            if world.rank == 1:
                raise ZeroDivisionError
            agreement.close()
        finally:
            agreement.leave()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank)
    error = failed.value.errors[0]
    assert isinstance(error, RankFailed) and error.rank == 1
    assert isinstance(failed.value.errors[1], ZeroDivisionError)
