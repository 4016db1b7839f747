"""What Python's standard library waits with, replaced by what the scheduler knows.

`install` comes before anything else is imported: modules keep functions such as `time.monotonic` as
default values. Outside of a simulation everything works as before. Inside of one, every lock is a
`SimulatedLock`; conditions, events, semaphores, futures and pools are the library's own, made of
such locks.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import thread as pools
from itertools import count
from typing import Any

from tests.simulation.scheduler import EPOCH_UNIX, Process, Scheduler, Task, get_ident

running: list[Scheduler] = []  # the one of this process, while it runs
_numbers = count()
_real_lock, _real_rlock = threading.Lock, threading.RLock
_real_monotonic, _real_time, _real_sleep = time.monotonic, time.time, time.sleep
_real_perf_counter, _real_urandom = time.perf_counter, os.urandom


class SimulatedLock:
    """A lock that is a point when it is taken, unless it was made in `Scheduler.quiet`."""

    def __init__(self, scheduler: Scheduler, *, is_quiet: bool = False) -> None:
        self._scheduler = scheduler
        self._is_quiet = is_quiet or scheduler.is_quiet
        self._is_held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if not self._is_quiet and blocking:
            scheduler.point("acquire")
        if blocking and self._is_held:
            deadline = None if timeout < 0 else scheduler.now + timeout
            while self._is_held:
                self._waiting.append(scheduler.current)
                if not scheduler.block("wait", deadline) and self._is_held:
                    self._waiting.remove(scheduler.current)
                    return False
        if self._is_held:
            return False
        self._is_held = True
        scheduler.unpointed += self._is_quiet
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._scheduler.unpointed -= self._is_quiet
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock:
    """As `threading.RLock`; owned by the thread that the scheduler runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        # A condition that is made by the holder of a quiet lock belongs to the simulation, too.
        self._lock = SimulatedLock(scheduler, is_quiet=scheduler.unpointed > 0)
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is self._scheduler.current:
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = self._scheduler.current, 1
        return True

    def release(self) -> None:
        if self._owner is not self._scheduler.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # what threading.Condition asks of a lock of this kind

    def _is_owned(self) -> bool:
        return self._owner is self._scheduler.current

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        self._lock.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self._lock.acquire()
        self._owner, self._depth = self._scheduler.current, depth


class LockOfEachProcess:
    """A lock of a module: each simulated process has its own, as real processes have."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._locks: dict[str, SimulatedLock] = {}

    def __enter__(self) -> bool:
        return self._own().acquire()

    def __exit__(self, *_: object) -> None:
        self._own().release()

    def _own(self) -> SimulatedLock:
        name = self._scheduler.current.process.name
        if name not in self._locks:
            self._locks[name] = SimulatedLock(self._scheduler)
        return self._locks[name]


class SimulatedThread(threading.Thread):
    """A thread of the simulation if one runs, else an ordinary one."""

    process: Process | None = None  # None: that of the thread which starts it
    task: Task | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.hash_number = next(_numbers)  # pools iterate sets of their threads, see `install`
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self.hash_number

    def start(self) -> None:
        if not running:
            super().start()
            return
        if self.task is not None:
            raise RuntimeError("threads can only be started once")
        self.task = running[0].spawn(self._run_simulated, self.name, self.process)

    def _run_simulated(self) -> None:
        # Without this, `current_thread` would make something up and keep it for the next thread
        # that happens to get the same number from the operating system.
        known: dict[int, Any] = vars(threading)["_active"]
        known[get_ident()] = self
        try:
            self.run()
        finally:
            known.pop(get_ident(), None)

    def is_alive(self) -> bool:
        return super().is_alive() if self.task is None else not self.task.is_over

    def join(self, timeout: float | None = None) -> None:
        if self.task is None:
            super().join(timeout)
        elif running:
            running[0].join(self.task, timeout)


def _lock() -> Any:
    return SimulatedLock(running[0]) if running else _real_lock()


def _rlock() -> Any:
    return SimulatedRLock(running[0]) if running else _real_rlock()


def _monotonic() -> float:
    return running[0].now if running else _real_monotonic()


def _perf_counter() -> float:
    return running[0].now if running else _real_perf_counter()


def _time() -> float:
    return EPOCH_UNIX + running[0].now if running else _real_time()


def _sleep(seconds: float) -> None:
    if running:
        running[0].sleep(seconds)
    else:
        _real_sleep(seconds)


def _urandom(nbytes: int) -> bytes:
    return running[0].rng.randbytes(nbytes) if running else _real_urandom(nbytes)


def install() -> None:
    """Replace them, once, for the rest of this process."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (threading, "Lock", _lock),
        (threading, "_allocate_lock", _lock),
        (threading, "RLock", _rlock),
        (threading, "Thread", SimulatedThread),
        (time, "monotonic", _monotonic),
        (time, "perf_counter", _perf_counter),
        (time, "time", _time),
        (time, "sleep", _sleep),
        (os, "urandom", _urandom),
        (random, "_urandom", _urandom),  # of SystemRandom, which `secrets` uses
        (queue, "SimpleQueue", vars(queue)["_PySimpleQueue"]),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)
    # Sets of futures are iterated in the order of their hashes, which would be addresses.
    made: Callable[..., None] = Future.__init__

    def numbered(self: Any) -> None:
        made(self)
        self.hash_number = next(_numbers)

    setattr(Future, "__init__", numbered)  # noqa: B010
    setattr(Future, "__hash__", lambda self: self.hash_number)  # noqa: B010


def begin(scheduler: Scheduler) -> None:
    """From here on, this process is the simulation of `scheduler`."""
    running.append(scheduler)
    setattr(pools, "_global_shutdown_lock", LockOfEachProcess(scheduler))  # noqa: B010


def end() -> None:
    """Everything works as before again."""
    running.clear()
    setattr(pools, "_global_shutdown_lock", _real_lock())  # noqa: B010
