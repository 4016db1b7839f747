"""Whole jobs under a seeded scheduler: restarts, rivals, deaths, stalls, requests that get lost.

A seed draws 2 to 4 starts of one job on one root, of 1 to 3 ranks each, one after the other or at
the same time, with the real `Checkpointer` on every rank. It draws what befalls processes and
requests, and which thread runs at every point. Judged are what callers were notified of
(`tests.cluster.history`), the promises of the protocol (`tests.protocol.invariants`), and that
every call ends. A failure names the command that replays it. Bugs that are planted (`bugs`) are
found within some seeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Scale
from tests.results import Counted
from tests.simulation.bugs import BUGS
from tests.simulation.primitives import SimulatedLock
from tests.simulation.scheduler import Process, Scheduler, Stuck

ROOT = Path(__file__).resolve().parents[2]
PARTS = 20
SEEDS = 10_000
SEEDS_OF_BUGS = 250


def _run(*seeds: str) -> list[dict[str, Any]]:
    """What each seed gave, in a process of its own that forks a child for each."""
    command = [sys.executable, "-m", "tests.simulation", *seeds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_jobs_keep_their_promises_under_a_seeded_scheduler(
    scale: Scale, seed: int, counted: Counted, part: int
) -> None:
    first = seed % 10**8 * 1000
    outcomes = _run(f"{first}-{first + scale.count(8, SEEDS // PARTS) - 1}")
    for outcome in outcomes:
        counted(seeds=1, **{name.replace(" ", "_"): n for name, n in outcome["counts"].items()})
    failed = [
        f"python -m tests.simulation {outcome['seed']}: {outcome['problems']}"
        for outcome in outcomes
        if outcome["problems"]
    ]
    assert not failed, "\n".join(failed)
    assert counted["saved"] and counted["restored"]
    # The digest is that of all that happened: which thread ran when, and what it did.
    assert len({outcome["digest"] for outcome in outcomes}) == len(outcomes)
    longest = max(outcomes, key=lambda outcome: outcome["counts"]["points"])
    alone = _run(longest["seed"])[0]
    assert alone == longest, "a seed is not the same alone and after others"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found_within_some_seeds(counted: Counted, name: str) -> None:
    outcomes = _run(f"0-{SEEDS_OF_BUGS - 1}", "--until-seen", "--bug", name)
    seen = bool(outcomes[-1]["problems"])
    counted(bugs=1, seen=int(seen), seeds=len(outcomes))
    print(f"{name}: {len(outcomes)} seeds: {outcomes[-1]['problems']}")
    assert seen, f"{name}: not seen within {len(outcomes)} seeds"


def _lost_updates(seed: int, *, is_locked: bool) -> tuple[int, str]:
    """Two threads add to a number, 20 times each; what is missing, and the digest."""
    scheduler = Scheduler(str(seed))
    lock = SimulatedLock(scheduler)
    number = 0

    def add() -> None:
        nonlocal number
        for _ in range(20):
            if is_locked:
                lock.acquire()
            value = number
            scheduler.point("between")
            number = value + 1
            if is_locked:
                lock.release()

    tasks = [scheduler.spawn(add, f"adder {index}") for index in range(2)]
    for task in tasks:
        assert scheduler.join(task)
    return 40 - number, scheduler.digest


def test_the_scheduler_shows_races_and_repeats_them() -> None:
    lost = [_lost_updates(seed, is_locked=False) for seed in range(20)]
    assert any(missing for missing, _ in lost)
    assert lost == [_lost_updates(seed, is_locked=False) for seed in range(20)]
    assert not any(_lost_updates(seed, is_locked=True)[0] for seed in range(20))


def test_threads_that_wait_for_each_other_are_reported() -> None:
    def deadlock(seed: int) -> str:
        scheduler = Scheduler(str(seed))
        locks = [SimulatedLock(scheduler) for _ in range(2)]

        def take(first: int) -> None:
            with locks[first], locks[1 - first]:
                pass

        tasks = [scheduler.spawn(lambda n=n: take(n), f"taker {n}") for n in range(2)]  # type: ignore[misc]
        try:
            for task in tasks:
                scheduler.join(task)
        except Stuck as stuck:
            return str(stuck)
        return ""

    texts = [deadlock(seed) for seed in range(20)]
    assert any("taker 0: wait" in text and "taker 1: wait" in text for text in texts)


def test_a_killed_process_does_nothing_more_and_keeps_what_it_holds() -> None:
    scheduler = Scheduler("kill")
    lock, done = SimulatedLock(scheduler), []
    process = Process("victim")
    process.dies_at = 5
    process.dies = lambda: scheduler.kill(process)

    def hold() -> None:
        with lock:
            for number in range(10):
                scheduler.point("works")
                done.append(number)

    scheduler.spawn(hold, "victim", process)
    scheduler.sleep(1.0)
    assert process.is_dead
    assert 0 < len(done) < 10
    assert not lock.acquire(timeout=60.0)
    assert scheduler.now >= 61.0
