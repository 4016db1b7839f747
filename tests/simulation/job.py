"""Starts of jobs on one root, as a seed draws them, and what is judged when all of them are over.

Each rank is a `Process` of the scheduler with the real `Checkpointer`, a session registry and a
store of its own. The ranks of a life talk through a `ThreadWorld`.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt.commit.log import Log
from ckpt.commit.session import RankedSession, SessionRegistry, open_session
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, NearSaved, SaveEvent, SaveFailed, SaveSucceeded
from ckpt.service.policies import AtExit, EverySteps, OnPreemption, SavePolicy
from ckpt.service.preemption import Preempted
from ckpt.service.retention import KeepLatest
from ckpt.service.target import Pending
from ckpt.world.base import World
from storage import Store
from storage.memory import MemoryStore
from storage.retry import RetryingStore, RetryPolicy
from tests.cluster.agent import is_step, state_of
from tests.cluster.history import (
    CHECKS,
    Event,
    broken_promises,
    calls_end_in_time,
    left_behind,
    ranks_agree,
    root_of,
    wrong_bits,
)
from tests.cluster.near_history import NEAR_CHECKS
from tests.protocol.invariants import History as Changes
from tests.protocol.invariants import (
    RecordingStore,
    check_all,
    check_references,
    files_needed,
)
from tests.service.chaos import ThreadTarget, UploadingStore
from tests.simulation.network import Network, NetworkStore, weather_of
from tests.simulation.primitives import SimulatedThread
from tests.simulation.scheduler import Process, Scheduler, Task
from tests.thread_ranks import ThreadWorld, _Hub

LIFE_SECONDS_MAX = 3600.0  # simulated; every call has a deadline far below
ROUND_SECONDS_MAX = 30.0
KILLED_AT_MAX = 4000  # points of a process
KILLED_AT_REQUEST_MAX = 150
HOSTS = ("a", "b", "c")


class Start(NamedTuple):
    """One start of the job. `kills` are (rank, point or request of its process, all die with it),
    `freezes` (rank, when, for how many seconds), `preempted` when a rank gets SIGTERM, or none.
    """

    number: int
    size: int
    steps: int
    step_seconds: float
    save_every: int
    keep: int
    dedup: bool
    skips: bool
    together: bool  # whether ranks wait for each other in every step
    retries: bool
    kills: tuple[tuple[int, int, int, bool], ...]
    freezes: tuple[tuple[int, float, float], ...]
    preempted: tuple[int, float, float] | None  # rank, when, grace
    near_every: int  # steps between near saves; 0 for none
    hosts: tuple[str, ...]  # of each rank, where its near tier is
    losses: tuple[str, ...]  # hosts that lose their folders before it
    next_after: float | None  # start the next one so many seconds later; None: when this is over


def starts_of(rng: random.Random) -> list[Start]:
    """The starts of a seed. The last one meets no faults of its own."""
    count = rng.choice((2, 2, 3, 4))
    dedup = rng.random() < 0.4
    starts = [_start(rng, number, dedup) for number in range(count)]
    quiet = {"kills": (), "freezes": (), "preempted": None, "next_after": None}
    starts = [*starts[:-1], starts[-1]._replace(**quiet)]
    if rng.random() < 0.6:
        return starts
    every, is_shared = rng.choice((1, 1, 2)), rng.random() < 0.4
    return [_with_near(rng, start, every, is_shared) for start in starts]


def _with_near(rng: random.Random, start: Start, every: int, is_shared: bool) -> Start:
    """It saves seldom, so that what is near is newer. Rivals on the same hosts are left out."""
    lost = (rng.choice(HOSTS),) if start.number and rng.random() < 0.2 else ()
    hosts = tuple(HOSTS[0] if is_shared else HOSTS[rank] for rank in range(start.size))
    return start._replace(
        near_every=every,
        save_every=start.save_every + 2,
        dedup=False,
        hosts=hosts,
        losses=lost,
        next_after=None,
    )


def _start(rng: random.Random, number: int, dedup: bool) -> Start:
    size = rng.choice((1, 2, 2, 3))
    kills = []
    if rng.random() < 0.6:
        point, request = int(KILLED_AT_MAX ** rng.uniform(0.3, 1.0)), 0
        if rng.random() < 0.5:  # most points are those of threads that look around
            point, request = 0, int(KILLED_AT_REQUEST_MAX ** rng.uniform(0.2, 1.0))
        kills.append((rng.randrange(size), point, request, rng.random() < 0.4))
    freezes = []
    if rng.random() < 0.4:
        seconds = rng.choice((0.5, 10.0, 200.0))
        ranks = range(size) if rng.random() < 0.5 else [rng.randrange(size)]
        begin = rng.uniform(0.0, 6.0)
        freezes += [(rank, begin, seconds) for rank in ranks]
    preempted = None
    if rng.random() < 0.25:
        preempted = (rng.randrange(size), rng.uniform(0.0, 6.0), rng.choice((0.5, 5.0, 30.0)))
    return Start(
        number,
        size,
        rng.choice((0, 3, 6, 10)),
        rng.choice((0.01, 0.2, 1.0)),
        rng.choice((1, 1, 2, 3)),
        rng.choice((1, 2, 5)),  # one that keeps fewer than the one before retires many at once
        dedup,
        rng.random() < 0.3,
        rng.random() < 0.7,
        rng.random() < 0.5,
        tuple(kills),
        tuple(freezes),
        preempted,
        0,
        (),
        (),
        rng.uniform(0.0, 8.0) if rng.random() < 0.4 else None,
    )


class Outcome(NamedTuple):
    """What a simulation gave; `problems` is empty if all is well."""

    problems: list[str]
    counts: Counter[str]


class Target(ThreadTarget):
    """That of a process of its own: it waits between tries, and by the simulated clock. `first` is
    the store in which the model alone is saved when time is short.
    """

    def __init__(self, world: World, store: Store, first: Store, *, dedup: bool = False) -> None:
        super().__init__(world, store, SessionRegistry(), dedup=dedup)
        self._first = first
        self._begun: dict[int, list[Pending | None]] = {}

    def start(self, state: Any, *, step: int, metric: float | None) -> Pending:
        begun = self._begun.setdefault(step, [])
        begun.append(None)  # if it does not even begin
        begun[-1] = super().start(state, step=step, metric=metric)
        return begun[-1]

    def attempt_of(self, step: int, nth: int) -> str:
        """The attempt of the `nth` save of a step, "" where it has none."""
        pending = self._begun[step][nth - 1]
        return "" if pending is None else getattr(pending, "attempt", "")

    def ranked_session(self) -> RankedSession:
        if not self._opened:
            self._opened.append(open_session(self._world, self._store, self._registry))
        return self._opened[0]

    def model_first(self) -> Target:
        return Target(self._world.duplicate(), self._first, self._first, dedup=self._dedup)


class Bucket:
    """The bytes of one root, and all that changed there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.changes = Changes()
        with scheduler.quiet():
            self.bytes = RecordingStore(UploadingStore(MemoryStore()), self.changes)

    def problems(self, unlisted: Collection[str]) -> list[str]:
        """What no root may be, whoever wrote there."""
        problems = check_all(self.bytes, self.changes, files_of=files_needed)
        # What arrives between a list and the deletions by it is deleted after the rest.
        torn = {f"I6: {key} was deleted after other files of its attempt" for key in unlisted}
        problems = [problem for problem in problems if problem not in torn]
        return problems + check_references(self.bytes)


class Simulation:
    """All starts of one seed, one after the other or at the same time."""

    def __init__(self, scheduler: Scheduler, seed: str, folder: Path) -> None:
        self.folder = folder  # of the hosts' near tiers
        rng = random.Random(f"job {seed}")
        self.scheduler = scheduler
        self.starts = starts_of(rng)
        self.network = Network(scheduler, weather_of(rng), seed)
        self.root, self.first = Bucket(scheduler), Bucket(scheduler)
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> Outcome:
        """Everything, and the judgement."""
        lives = []
        for start in self.starts:
            for host in start.losses:
                shutil.rmtree(self.folder / host, ignore_errors=True)
                self.events.append(
                    Event(-1, -1, "lost host", {"host": host, "time": self.scheduler.now})
                )
                self.counts["hosts lost"] += 1
            life = Life(self, start)
            life.begin()
            lives.append(life)
            if start.next_after is None:
                life.wait()
            else:
                self.scheduler.sleep(start.next_after)
        for life in lives:
            life.wait()
        # What was sent and has not arrived yet arrives now.
        self.scheduler.sleep(LIFE_SECONDS_MAX)
        problems = self._judge()
        self.counts += self.network.counts
        self.counts["points"] = self.scheduler.points
        return Outcome(problems, self.counts)

    def note(self, life: int, rank: int, kind: str, **facts: Any) -> None:
        """A line of what callers were notified of."""
        self.scheduler.note(f"{kind} {facts}")
        self.events.append(Event(life, rank, kind, {**facts, "time": self.scheduler.now}))
        self.counts[f"{kind} {facts['error']}" if "error" in facts else kind] += 1

    def _without_lost_hosts(self) -> list[Event]:
        """What happened, but for jobs that end because nothing is durable yet and a host is not
        there, or its folder: documents say that they do.
        """
        lost = bool(self.counts["hosts lost"])
        hosts: set[str] = set()
        allowed = set[int]()
        for start in self.starts:
            hosts |= set(start.hosts)
            if lost or hosts - set(start.hosts):
                allowed.add(start.number)
        return [
            event
            for event in self.events
            if event.life not in allowed
            or event.facts.get("error") != "NoCheckpoint"
            or "There is no durable checkpoint yet" not in event.facts["text"]
        ]

    def _judge(self) -> list[str]:
        store = self.root.bytes
        acknowledged = [e.facts["attempt"] for e in self.events if e.kind == "saved"]
        self.root.changes.acknowledged += acknowledged
        problems = []
        if any(self.first.bytes.list("log/")):
            problems += self.first.problems(self.network.unlisted)
            self.counts["models first"] += len(Log(self.first.bytes).state().live)
        if not any(store.list("log/")):
            return ["acknowledged, and there is no log"] if acknowledged else problems
        root = root_of(store, min(start.keep for start in self.starts))
        # Threads stall here for as long as a seed says; `Life.wait` looks whether calls end.
        others = [check for check in CHECKS if check not in (ranks_agree, calls_end_in_time)]
        problems += broken_promises(self._without_lost_hosts(), root, others)
        # A step may be saved again in one life: its first outcome on all ranks, then its second.
        nth = [
            event._replace(facts={**event.facts, "step": (event.facts["step"], event.facts["nth"])})
            if "nth" in event.facts
            else event
            for event in self.events
        ]
        problems += broken_promises(nth, root, [ranks_agree])
        problems += broken_promises(self.events, root, NEAR_CHECKS)
        return (
            problems
            + wrong_bits(store)
            + self.root.problems(self.network.unlisted)
            + left_behind(store)
        )


class Life:
    """One start: its processes, what befalls them, and the end of all of them."""

    def __init__(self, simulation: Simulation, start: Start) -> None:
        self.simulation = simulation
        self.scheduler = simulation.scheduler
        self.start = start
        with self.scheduler.quiet():
            self.hub = _Hub(start.size, {}, ROUND_SECONDS_MAX)
        number = start.number
        self.processes = [Process(f"life{number}-rank{rank}") for rank in range(start.size)]
        self.ranks = [Rank(self, rank) for rank in range(start.size)]
        self._tasks: list[Task] = []
        self._rng = random.Random(f"life {number} {simulation.starts}")

    def begin(self) -> None:
        """Start the processes, and what will befall them."""
        if self.start.near_every:
            facts = {"near": 0, "hosts": self.start.hosts, "ranks": self.start.size, "ends": "any"}
            number, now = self.start.number, self.scheduler.now
            event = Event(number, -1, "started", {**facts, "time": now})
            self.simulation.events.append(event)
        for rank, point, request, everyone in self.start.kills:
            self.processes[rank].dies_at = point
            self.processes[rank].dies_at_request = request
            self.processes[rank].dies = lambda rank=rank, all_=everyone: self._kill(rank, all_)
        for rank, process in enumerate(self.processes):
            thread = SimulatedThread(target=self.ranks[rank].main, name=process.name)
            thread.process = process
            thread.start()
            assert thread.task is not None
            self._tasks.append(thread.task)
        for rank, begin, seconds in self.start.freezes:
            process = self.processes[rank]
            self.scheduler.later(begin, lambda p=process, s=seconds: self.scheduler.freeze(p, s))
        if self.start.preempted is not None:
            rank, begin, _ = self.start.preempted
            self.scheduler.later(begin, self.ranks[rank].preempt)

    def wait(self) -> None:
        """Until every rank is dead or through. When one has failed, its launcher kills the rest."""
        until = self.scheduler.now + LIFE_SECONDS_MAX
        for rank, task in enumerate(self._tasks):
            while not task.is_over and not self.processes[rank].is_dead:
                self.scheduler.join(task, 10.0)
                if self.scheduler.now > until:
                    text = f"rank {rank} of life {self.start.number} does not end"
                    self.simulation.events.append(
                        Event(
                            self.start.number,
                            rank,
                            "ended",
                            {"error": text, "time": self.scheduler.now},
                        )
                    )
                    self.scheduler.note(self.scheduler.stacks())
                    self._kill(rank, True)
        for process in self.processes:
            if not process.is_dead:
                self.scheduler.kill(process)  # it has ended: its idle threads end with it

    def _kill(self, rank: int, everyone: bool) -> None:
        dying = range(self.start.size) if everyone else [rank]
        for one in dying:
            if self.processes[one].is_dead:
                continue
            self.simulation.counts["killed"] += 1
            self.scheduler.kill(self.processes[one])
            # Others notice later.
            seconds = self._rng.choice((0.001, 0.5, 5.0))
            self.scheduler.later(seconds, lambda one=one: self.hub.leave(one, "has died"))


class Rank:
    """One process of a life."""

    def __init__(self, life: Life, rank: int) -> None:
        self._life = life
        self._rank = rank
        self._saver: Checkpointer | None = None
        self._target: Target | None = None
        self._reported: Counter[int] = Counter()

    def main(self) -> None:
        """Train as the start says; what the caller is notified of becomes events."""
        world = ThreadWorld(self._life.hub, self._rank)
        self._note("began")
        try:
            self._train(world)
            self._note("ended", error="")
        except Preempted:
            self._note("ended", error="")
            self._life.simulation.counts["preempted"] += 1
        except Exception as error:  # whatever it is, the judgement looks at it
            self._note("ended", error=type(error).__name__, text=self._without_folder(error))
        finally:
            self._life.hub.leave(self._rank)

    def preempt(self) -> None:
        """SIGTERM arrives."""
        with suppress(AttributeError):  # before it is handled, or in a process that is dead
            self._saver._signals._handle(signal.SIGTERM, None)  # type: ignore[union-attr]

    def _train(self, world: World) -> None:
        start, scheduler = self._life.start, self._life.scheduler
        simulation = self._life.simulation
        store, first = (self._store(root) for root in (simulation.root, simulation.first))
        self._target = target = Target(world, store, first, dedup=start.dedup)
        between = world.duplicate()
        state = state_of(0, self._rank, start.size)
        policy: SavePolicy = EverySteps(start.save_every)
        if not start.near_every:  # what is near stays newer than what is durable
            policy = policy | AtExit()
        if start.preempted is not None:
            policy = policy | OnPreemption(grace_seconds=start.preempted[2])
        with Checkpointer(
            state,
            target,
            save=policy,
            keep=KeepLatest(start.keep),
            when_busy="skip" if start.skips else "wait",
            observers=[self._observe],
            near=self._near(),
            only=True,
        ) as saver:
            self._saver = saver
            report = saver.restore()
            begun = 0 if report is None else report.step
            right = is_step(state, begun, self._rank, start.size)
            attempt, origin = ("", "") if report is None else (report.attempt, report.origin)
            self._note("restored", step=begun, right=right, attempt=attempt, origin=origin)
            simulation.counts["near restored"] += origin == "near"
            for step in range(begun + 1, begun + 1 + start.steps):
                scheduler.sleep(start.step_seconds)
                if start.together:
                    between.gather("gradients", b"")
                _advance(state, step, self._rank, start.size)
                before = scheduler.now
                try:
                    saver.step(step)
                finally:
                    self._note("stepped", step=step, seconds=scheduler.now - before)

    def _without_folder(self, error: Exception) -> str:
        return str(error).replace(str(self._life.simulation.folder), "")  # another in each run

    def _near(self) -> Near | None:
        start = self._life.start
        if not start.near_every:
            return None
        path = self._life.simulation.folder / start.hosts[self._rank]
        return Near(path, every=EverySteps(start.near_every))

    def _store(self, bucket: Bucket) -> Store:
        process = self._life.processes[self._rank]
        store = NetworkStore(bucket.bytes, self._life.simulation.network, process)
        return RetryingStore(store, RetryPolicy()) if self._life.start.retries else store

    def _observe(self, event: SaveEvent) -> None:
        if isinstance(event, SaveSucceeded):
            step = event.report.step
            self._note("saved", step=step, nth=self._nth(step), attempt=event.report.attempt)
        elif isinstance(event, NearSaved):
            self._note("near saved", step=event.report.step, attempt=event.report.attempt)
        elif isinstance(event, NearFailed):
            name = type(event.error).__name__
            self._note("near failed", step=event.step, error=name)
        elif isinstance(event, SaveFailed):
            step, nth, name = event.step, self._nth(event.step), type(event.error).__name__
            assert self._target is not None, "a save has ended"
            attempt = self._target.attempt_of(step, nth)
            self._note("failed", step=step, nth=nth, attempt=attempt, error=name)

    def _nth(self, step: int) -> int:
        """How often the outcome of the step was reported by now: it may be saved again."""
        self._reported[step] += 1
        return self._reported[step]

    def _note(self, kind: str, **facts: Any) -> None:
        number = self._life.start.number
        self._life.simulation.note(number, self._rank, kind, **facts)


def _advance(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    newer = state_of(step, rank, size)
    with torch.no_grad():
        state["rows"].local.copy_(newer["rows"].local)
        state["replica"].copy_(newer["replica"])
    state["step"] = step
