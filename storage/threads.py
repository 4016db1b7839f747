"""Work on many items by threads: with a bound that is given or found, and one rule for errors.

What fails first is raised. What has not begun by then never begins, and what has is waited for: no
thread uses anything any more when the caller continues.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# A step is right when the throughput follows it by a quarter: twice as many requests must move a
# quarter more.
FOLLOWING = 0.25
CLIMB = 2.0  # until more did not help for the first time
STEP = 1.5
QUIET_ROUNDS = 4  # between such steps, twice as many after each that did not help
QUIET_ROUNDS_MAX = 16


def in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    name: str,
    ahead: int = 0,
) -> Generator[Result, None, None]:
    """`work(item)` of each item, in the order of the items, by up to `threads` threads of a `name`.

    Items are taken as they are needed: `ahead` of them, by default as many as there are threads,
    are under way before the first result is waited for. A failure is raised in its turn.
    """
    waiting: deque[Future[Result]] = deque()
    with _pool(threads, name) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= (ahead or threads):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class RequestWindow:
    """How many requests are in flight, between `least` and `most`, `first` to begin with: as many
    as move more bytes per second than fewer do.

    Far stores need many at once to fill the network: the bytes on their way are its bandwidth times
    the time to the first byte, 62 MB for 50 ms at 10 Gb/s. Near ones gain nothing by more than a
    few, which only fill queues and memory. Neither is known beforehand, so it is tried.

    Hill climbing: a round is as many answers as the window is wide, and a step is kept when the
    throughput follows it.

    Throughput is the bytes of a round over the time that its requests took, times the width: what
    is between rounds does not count. Knows no clock; used by one thread.
    """

    def __init__(self, least: int, most: int, first: int = 0) -> None:
        self.most = max(most, least)
        self.width = min(max(first, least), self.most)
        self._least = least
        self._kept = self.width  # the width to which a step goes back
        self._throughput = 0.0  # at that width, in the last round there
        self._is_climbing = True
        self._quiet = 0  # rounds until the next step
        self._patience = QUIET_ROUNDS
        self._next_up = True
        self._round = 0
        self._answers, self._nbytes, self._seconds = 0, 0, 0.0

    @property
    def round(self) -> int:
        """Which round a request belongs to that is sent now: what is measured of one width."""
        return self._round

    def answered(self, round: int, in_flight: int, nbytes: int, seconds: float) -> None:
        """`nbytes` came, `seconds` after their request was sent in `round`; `in_flight` were under
        way with it.
        """
        # Where the caller has no more to send, fewer share the network than the window has.
        if round != self._round or in_flight < self.width:
            return
        self._answers += 1
        self._nbytes += nbytes
        self._seconds += seconds
        if self._answers == self.width:
            self._decide(self.width * self._nbytes / max(self._seconds, 1e-9))

    def refused(self, round: int) -> None:
        """The store had to repeat a request that was sent in `round`: it has too many."""
        if round != self._round:  # what was sent before the window became narrower
            return
        self._is_climbing, self._quiet, self._next_up = False, QUIET_ROUNDS, True
        self._patience = QUIET_ROUNDS
        self._kept = max(self._least, self.width // 2)
        # Anew also at the same width: what was sent before the refusal measures nothing.
        self._begin(self._kept, anew=True)

    def _decide(self, throughput: float) -> None:
        if self.width == self._kept:
            self._throughput = throughput
        elif self._follows(throughput):
            self._kept, self._throughput = self.width, throughput
            self._quiet, self._patience = 0, QUIET_ROUNDS  # more of the same may be right, too
            self._next_up = not self._next_up
        else:
            self._is_climbing, self._quiet = False, self._patience
            self._patience = min(2 * self._patience, QUIET_ROUNDS_MAX)
        # Nothing is above: the next step tries fewer.
        if self._kept == self.most and self._is_climbing:
            self._is_climbing, self._quiet, self._next_up = False, QUIET_ROUNDS, False
        self._begin(self._kept if self._quiet else self._stepped())
        self._quiet = max(self._quiet - 1, 0)

    def _follows(self, throughput: float) -> bool:
        """Whether the step to the width that this was measured at was right."""
        step = self.width / self._kept - 1
        return throughput >= self._throughput * (1 + FOLLOWING * step)

    def _stepped(self) -> int:
        """The width to be tried next: up and down in turn, once the first climb is over."""
        up = self._is_climbing or self._next_up
        self._next_up = not up
        if up:
            return min(math.ceil(self._kept * (CLIMB if self._is_climbing else STEP)), self.most)
        return max(int(self._kept / STEP), self._least)

    def _begin(self, width: int, *, anew: bool = False) -> None:
        if anew or width != self.width:
            self._round += 1  # what is under way was sent at another width
        self.width = width
        self._answers, self._nbytes, self._seconds = 0, 0, 0.0


class _Begun(NamedTuple):
    round: int
    started: float
    repeated: int


def as_done(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    name: str,
    window: RequestWindow | None = None,
    nbytes_of: Callable[[Result], int] = lambda result: 1,
    repeated: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """`work(item)` of each item as it is done, by up to `threads` threads of a `name`; without
    threads by the caller's.

    An item is taken when all threads are busy, and waits for the first that is free: one that
    stalls holds no other. A failure is raised when the next item has to wait. With a `window`, as
    many are under way as it has, by the `nbytes_of` results; `repeated` is how many requests the
    store had to repeat so far.
    """
    if not threads:
        yield from map(work, items)
        return
    window = window or RequestWindow(threads, threads)
    running: dict[Future[Result], _Begun] = {}

    def finished() -> Iterator[Result]:
        in_flight = len(running)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            began, result = running.pop(future), future.result()
            if repeated() > began.repeated:
                window.refused(began.round)
            else:
                seconds = clock() - began.started
                window.answered(began.round, in_flight, nbytes_of(result), seconds)
            yield result

    with _pool(window.most, name) as pool:
        for item in items:
            # What is done fills its place until all are taken: a step of the window is judged by
            # answers that shared the network with as many as it has.
            while len(running) >= window.width:
                yield from finished()
            running[pool.submit(work, item)] = _Begun(window.round, clock(), repeated())
        while running:
            yield from finished()


class Pool(ThreadPoolExecutor):
    """A pool that needs no thread: where none can be started, `submit` does the work itself.

    Python 3.12.0 to 3.12.2 start no thread once the main one has ended, and a save in the
    background may still run then.
    """

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """As of any pool. The work may use other pools."""
        future = super().submit(fn, *args, **kwargs)
        if not self._threads:  # else they take what is in the queue
            with suppress(Empty):
                self._work_queue.get_nowait().run()
        return future

    def _adjust_thread_count(self) -> None:
        # No work is done here: `submit` holds a lock that all pools of the process share.
        with suppress(RuntimeError):
            super()._adjust_thread_count()


@contextmanager
def _pool(threads: int, name: str) -> Iterator[Pool]:
    pool = Pool(threads, name)  # starts no thread that it does not need
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
