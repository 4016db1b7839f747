"""How many requests a load has in flight: as many as move more bytes per second than fewer do.

Far stores need many at once to fill the network: the bytes on their way are its bandwidth times the
time to the first byte, 62 MB for 50 ms at 10 Gb/s. Near ones gain nothing by more than a few, which
only fill queues and memory. Neither is known beforehand, so it is tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

# A step is right when the bytes per second follow a quarter of it: twice as many requests must move
# a quarter more.
FOLLOWING = 0.25
CLIMB = 2.0  # until more did not help for the first time
STEP = 1.5  # to see whether that has changed
QUIET_ROUNDS = 4  # between such steps


class RequestWindow:
    """How many requests may be in flight, between `least` and `most`, `first` to begin with.

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
        self._kept = max(self._least, self.width // 2)
        self._begin(self._kept, anew=True)

    def _decide(self, throughput: float) -> None:
        if self.width == self._kept:
            self._throughput = throughput
        elif self._follows(throughput):
            self._kept, self._throughput = self.width, throughput
            self._quiet = 0  # more of the same may be right, too
            self._next_up = not self._next_up
        else:
            self._is_climbing, self._quiet = False, QUIET_ROUNDS
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


class Read(NamedTuple):
    """A request that is yet to be sent: what sends it, and how many bytes it brings."""

    run: Callable[[], None]
    nbytes: int


class _Begun(NamedTuple):
    round: int
    nbytes: int
    started: float
    repeated: int


def run_within(
    window: RequestWindow,
    reads: Sequence[Read],
    *,
    repeated: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run `reads` in threads, in their order, as many at once as `window` has it.

    `repeated` is how many requests the store had to repeat so far. Raises the first error, when all
    threads are done; what was not begun then is left out.
    """
    running: dict[Future[None], _Begun] = {}
    left = iter(reads)
    with ThreadPoolExecutor(window.most) as pool:  # starts no thread that it does not need
        following = next(left, None)
        while running or following is not None:
            while following is not None and len(running) < window.width:
                began = _Begun(window.round, following.nbytes, clock(), repeated())
                running[pool.submit(following.run)] = began
                following = next(left, None)
            in_flight = len(running)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                began = running.pop(future)
                future.result()
                if repeated() > began.repeated:
                    window.refused(began.round)
                else:
                    seconds = clock() - began.started
                    window.answered(began.round, in_flight, began.nbytes, seconds)
