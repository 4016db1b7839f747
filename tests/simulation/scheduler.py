"""One seeded scheduler for all threads of a simulation: one of them runs, and a seed says which.

Threads are real, but each waits for the baton. Where a simulated primitive is used
(`tests.simulation.primitives`), the running thread may hand the baton to another one. Time is
simulated: it passes only when every thread waits, or when the seed lets a thread stall. A `Process`
is a set of threads that can be killed, as by SIGKILL: they never run again, nothing is cleaned up,
and what they hold stays held. Nothing here depends on addresses, on hashes or on the machine's
clock, so what a seed does is the same in any process.
"""

from __future__ import annotations

import _thread
import hashlib
import heapq
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

POINTS_MAX = 2_000_000  # of one simulation: hundreds of times what one usually takes
TRACE_KEPT = 200
EPOCH_UNIX = 1_800_000_000.0  # the simulated time of day at which everything begins

new_lock = _thread.allocate_lock  # the real ones, whatever is patched later
start_new_thread = _thread.start_new_thread
get_ident = _thread.get_ident


class Stuck(Exception):
    """Nothing can happen any more, or no end is in sight; the text has what every thread does."""


class Process:
    """Threads that live and die together. `name` is for traces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.frozen_until = 0.0
        self.points = 0
        self.requests = 0
        self.dies_at = 0  # the point at which it calls `dies`
        self.dies_at_request = 0  # with that request on its way
        self.dies: Callable[[], None] = lambda: None


class Task:
    """One thread. `is_ready` is false while it waits for something."""

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.is_ready = True
        self.is_over = False
        self.doing = "begins"
        self.ident = 0
        self.waits = 0  # how often it has waited: a timer of an earlier wait does nothing
        self.baton = new_lock()
        self.baton.acquire()
        self.ended: list[Task] = []  # who waits for its end


class Manner:
    """How a seed schedules: some rarely switch, some always, some let threads stall for long."""

    def __init__(self, rng: random.Random) -> None:
        self.switches = rng.choice((0.03, 0.2, 0.6, 1.0))
        self.stalls = rng.choice((0.0, 0.0, 0.001, 0.01))
        self.stall_seconds_max = rng.choice((0.05, 1.0, 20.0))


class Scheduler:
    """Runs `main` and every thread that it starts; see the note at the top of this file."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(f"schedule {seed}")
        self.manner = Manner(self.rng)
        self.now = 0.0
        self.points = 0
        self.trace: deque[str] = deque(maxlen=TRACE_KEPT)
        self.echo: Callable[[str], object] | None = None
        self.has_failed: Exception | None = None
        self._digest = hashlib.sha256()
        self._tasks: list[Task] = []
        self._numbers = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timers_made = 0
        self._quiet = 0
        self.unpointed = 0  # while positive: a timer acts, or a quiet lock is held
        self.current = self._new_task("main", Process("driver"))
        self.main = self.current

    @property
    def digest(self) -> str:
        """Of all that has happened: which thread ran when, and what it did."""
        return self._digest.hexdigest()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Locks that are made here are no points: for what the simulation itself is made of."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @property
    def is_quiet(self) -> bool:
        return self._quiet > 0

    # threads

    def spawn(self, run: Callable[[], object], name: str, process: Process | None = None) -> Task:
        """A thread more, of the process of the one that runs."""
        task = self._new_task(name, process or self.current.process)
        start_new_thread(self._thread_main, (task, run))
        self.point(f"start {task.number}")
        return task

    def join(self, task: Task, seconds: float | None = None) -> bool:
        """Wait for the end of a thread; false after `seconds`."""
        deadline = None if seconds is None else self.now + seconds
        while not task.is_over:
            task.ended.append(self.current)
            if not self.block(f"join {task.number}", deadline) and not task.is_over:
                return False
        return True

    def kill(self, process: Process) -> None:
        """Its threads never run again; one that kills its own stops at once."""
        process.is_dead = True
        self.note(f"kill {process.name}")
        self._tasks = [task for task in self._tasks if task.process is not process]

    def freeze(self, process: Process, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after so many seconds."""
        process.frozen_until = max(process.frozen_until, self.now + seconds)
        self.note(f"freeze {process.name}")
        self.later(seconds, lambda: None)

    def _new_task(self, name: str, process: Process) -> Task:
        task = Task(self._numbers, name, process)
        self._numbers += 1
        self._tasks.append(task)
        return task

    def _thread_main(self, task: Task, run: Callable[[], object]) -> None:
        task.baton.acquire()
        task.ident = get_ident()
        try:
            run()
        except BaseException as error:  # a rank keeps its own errors; what comes here is a bug
            self.has_failed = self.has_failed or Stuck(
                f"{task.name}: {''.join(traceback.format_exception(error))}"
            )
        task.is_over, task.is_ready = True, False
        self._tasks.remove(task)
        for waiting in task.ended:
            self.wake(waiting)
        self.note(f"end {task.number}")
        self._hand_over(None)

    # points

    def point(self, doing: str) -> None:
        """Here the running thread may lose its turn, stall, or die with its process."""
        if self.unpointed:
            return
        task, manner = self.current, self.manner
        self._count(doing)
        self._age(task)
        if manner.stalls and self.rng.random() < manner.stalls:
            self.sleep(self.rng.random() * manner.stall_seconds_max)
        elif self.rng.random() < manner.switches or self._is_halted(task):
            self._hand_over(task)

    def sleep(self, seconds: float) -> None:
        """Wait for so much simulated time."""
        self.block("sleep", self.now + max(0.0, seconds))

    def block(self, doing: str, deadline: float | None) -> bool:
        """Wait until `wake` is called for the running thread; false at the deadline."""
        assert not self.unpointed, f"{doing}: a timer, or the holder of a quiet lock, would wait"
        task = self.current
        self._count(doing)
        task.is_ready = False
        task.waits += 1
        wait = task.waits
        if deadline is not None:

            def expire() -> None:
                if task.waits == wait:
                    task.is_ready = True

            self.later(deadline - self.now, expire)
        self._hand_over(task)
        task.waits += 1
        return deadline is None or self.now < deadline

    def wake(self, task: Task) -> None:
        """`task` may run again; it looks itself whether it can."""
        task.is_ready = not task.is_over

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after so much simulated time, between the turns of threads."""
        self._timers_made += 1
        heapq.heappush(self._timers, (self.now + max(0.0, seconds), self._timers_made, act))

    def note(self, what: str) -> None:
        """A line of the trace."""
        line = f"{self.now:.6f} {self.current.number} {what}"
        self._digest.update(line.encode())
        self.trace.append(f"{line} [{self.current.process.name} {self.current.name}]")
        if self.echo is not None:
            self.echo(self.trace[-1])

    def _age(self, task: Task) -> None:
        """Its process is one point older, which may be the last one."""
        process = task.process
        process.points += 1
        if process.points == process.dies_at and not process.is_dead:
            process.dies()
            if process.is_dead:
                self._hand_over(task)

    def _count(self, doing: str) -> None:
        self.points += 1
        self.current.doing = doing
        self.note(doing)
        if self.points > POINTS_MAX and self.has_failed is None:
            self.has_failed = Stuck(f"no end after {POINTS_MAX} points:\n{self.stacks()}")
            self.wake(self.main)

    # the baton

    def _hand_over(self, task: Task | None) -> None:
        """Give the baton to the one that the seed chooses; returns when it comes back."""
        chosen = self._choose()
        self.current = chosen
        if chosen is not task:
            chosen.baton.release()
            if task is None:
                return
            task.baton.acquire()
        if self.has_failed is not None and self.current is self.main:
            raise self.has_failed

    def _choose(self) -> Task:
        while True:
            if self.has_failed is not None:
                return self.main
            ready = [task for task in self._tasks if task.is_ready and not self._is_halted(task)]
            if ready:
                return ready[self.rng.randrange(len(ready))]
            if not self._timers:
                self.has_failed = Stuck(f"every thread waits for ever:\n{self.stacks()}")
                continue
            self.now, _, act = heapq.heappop(self._timers)
            self._act(act)

    def _act(self, act: Callable[[], None]) -> None:
        """A timer's action, which no thread interrupts."""
        before, self.unpointed = self.unpointed, self.unpointed + 1
        try:
            act()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self.has_failed = self.has_failed or Stuck(f"a timer: {text}")
        assert self.unpointed == before + 1
        self.unpointed = before

    def _is_halted(self, task: Task) -> bool:
        return task.process.is_dead or task.process.frozen_until > self.now

    def stacks(self) -> str:
        """What every living thread does."""
        frames: dict[int, Any] = sys._current_frames()
        lines = []
        for task in self._tasks:
            frame = frames.get(task.ident)
            stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
            lines.append(
                f"--- {task.number} {task.process.name} {task.name}: {task.doing}\n{stack}"
            )
        return "\n".join(lines)
