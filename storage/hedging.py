"""Hedged requests: a straggler is sent a second time, and the first answer counts.

One connection that swallows everything would hold a whole training until it times out. When the
second request is sent follows from how long others of its kind and size took. Their number is
bounded by a share of all requests, as in Dean and Barroso, "The Tail at Scale" (CACM 2013),
https://research.google/pubs/the-tail-at-scale/. Amazon recommends the same for S3:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html

Only for requests that may arrive twice: reads, parts of an upload, and conditional writes whose
sender finds out whose object is there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from storage.errors import SlowDownError, TransientError
from storage.forks import ForkSafeLock
from storage.store import LOG_SECONDS, Patience

T = TypeVar("T")

COMPLETE = "complete"
"""The kind of a request that has a server join what it has: it moves no bytes itself."""

logger = logging.getLogger(__name__)


class NoAnswerError(TransientError):
    """Nothing was answered within the deadline; what was sent may arrive all the same."""


class RequestKind(NamedTuple):
    """What makes requests comparable: what they do, and the size class of their `nbytes`."""

    name: str
    nbytes: int = 0

    @property
    def group(self) -> tuple[str, int]:
        """The same for sizes up to the same power of two; below 64 KiB latency is what counts."""
        # Coarse: a group with few requests knows no quantile, and hedges as if blind.
        return self.name, max(self.nbytes - 1, 0xFFFF).bit_length()


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """When a request is sent again, how often that may happen, and when it is given up.

    A second request goes out after `multiple` times the `quantile` of the last `samples_max`
    durations of its kind, not before `floor_seconds`; after `unknown_seconds` where fewer than
    `samples_min` are known. Every answer earns `share` of a second request, up to `saved_max` of
    them. An answer that says "slow down" costs `slow_down_cost`: where a sixth of all answers say
    so, none is earned. Without having been earned, one at a time is sent again that is stuck: it
    has waited for `stuck_multiple` times the quantile, and for `stuck_seconds`; or it is slower
    than its kind, by `overtaken_multiple`, and `overtaken_min` of them were sent after it and are
    answered: its connection is slow, not the server.
    After a second request that failed the next one waits for `failed_seconds`, then twice as long
    each time.

    A request is given up `deadline_seconds` after it was sent, plus the time that its bytes take at
    `slowest_bytes_per_second`: 1,024 ranks with 4 requests each behind 10 Gb/s have ten times that.
    Completing an upload moves no bytes, and may take S3 minutes: `complete_seconds`.
    """

    multiple: float = 3.0
    quantile: float = 0.95
    floor_seconds: float = 0.5
    unknown_seconds: float = 10.0
    samples_min: int = 4
    samples_max: int = 128
    share: float = 0.05
    saved_max: float = 4.0
    slow_down_cost: float = 0.25
    stuck_multiple: float = 10.0
    stuck_seconds: float = 5.0
    overtaken_min: int = 4
    overtaken_multiple: float = 1.5
    failed_seconds: float = 0.2
    failed_seconds_max: float = 10.0
    deadline_seconds: float = 60.0
    slowest_bytes_per_second: float = 32 << 10
    complete_seconds: float = 600.0
    late_seconds: float = 10.0  # a line of the log says that a request waits
    tick_seconds: float = 0.1  # between looks: what others did meanwhile changes what is long


class HedgeRule:
    """Decides from the durations of earlier requests. Knows no clock; one thread at a time."""

    def __init__(self, limits: HedgeLimits) -> None:
        self._limits = limits
        self._seconds: dict[tuple[str, int], deque[float]] = {}
        self._saved = limits.saved_max / 2  # a few for the first requests of a process

    def delay(self, kind: RequestKind) -> float:
        """Seconds after which a request of that kind is to be sent again."""
        limits = self._limits
        return self._after(kind, limits.multiple, limits.floor_seconds, limits.unknown_seconds)

    def stuck(self, kind: RequestKind, overtaken: int = 0) -> float:
        """Seconds after which no server that works leaves a request of that kind, when `overtaken`
        others were sent after it and answered.
        """
        limits = self._limits
        if overtaken >= limits.overtaken_min:
            unknown = limits.unknown_seconds
            return self._after(kind, limits.overtaken_multiple, limits.floor_seconds, unknown)
        unknown = max(2 * limits.unknown_seconds, limits.stuck_seconds)
        return self._after(kind, limits.stuck_multiple, limits.stuck_seconds, unknown)

    def _after(self, kind: RequestKind, multiple: float, least: float, unknown: float) -> float:
        typical = self.typical(kind)
        return unknown if typical is None else max(multiple * typical, least)

    def typical(self, kind: RequestKind) -> float | None:
        """The quantile of the durations of its kind in seconds; None where too few are known."""
        known = self._seconds.get(kind.group, ())
        if len(known) < self._limits.samples_min:
            return None
        return sorted(known)[math.ceil(self._limits.quantile * len(known)) - 1]

    def late(self, kind: RequestKind) -> float:
        """Seconds after which a line of the log says that a request waits longer than others."""
        typical = self.typical(kind)
        if typical is None:  # nobody knows what is long, but half of its time is over
            return self.deadline(kind) / 2
        return max(self._limits.late_seconds, self._limits.overtaken_multiple * typical)

    def deadline(self, kind: RequestKind) -> float:
        """Seconds after which a request of that kind is given up."""
        limits = self._limits
        if kind.name == COMPLETE:
            return limits.complete_seconds
        return limits.deadline_seconds + kind.nbytes / limits.slowest_bytes_per_second

    def answered(self, kind: RequestKind, seconds: float) -> None:
        """A request was answered after `seconds`."""
        # The newest only: what a link or a server does changes within minutes.
        known = self._seconds.setdefault(kind.group, deque(maxlen=self._limits.samples_max))
        known.append(seconds)
        self._saved = min(self._saved + self._limits.share, self._limits.saved_max)

    def refused(self) -> None:
        """The server said that it has too many requests."""
        # Second requests make that worse for all who wait.
        self._saved = max(self._saved - self._limits.slow_down_cost, 0.0)

    def take(self) -> bool:
        """Whether a second request may be sent now; it is counted as sent."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


@dataclass
class HedgeTally:
    """What happened so far: requests that may be hedged, second ones, those of them that won, and
    those that were sent because they were stuck, without having been earned.
    """

    requests: int = 0
    hedges: int = 0
    won: int = 0
    unearned: int = 0


class Hedger:
    """Races requests of one store on its event loop. All its coroutines run on the same loop."""

    def __init__(
        self,
        patience: Patience,
        limits: HedgeLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = HedgeTally()
        self._patience = patience
        self._limits = limits or HedgeLimits()
        self._rule = HedgeRule(self._limits)
        self._clock = clock
        self._logged = -math.inf
        self._lock = ForkSafeLock()  # of all that follows, of the rule and of the tally
        self._stuck: list[_Running[Any]] = []  # the one request that was sent again unearned
        self._firsts: dict[tuple[str, int], list[_Running[Any]]] = {}  # unanswered ones, by group
        self._carried: set[_Carried[Any]] = set()  # that have no race yet
        self._is_looking = False
        self._loop: asyncio.AbstractEventLoop | None = None  # that looks at them

    async def run(
        self,
        kind: RequestKind,
        what: str,
        send: Callable[[], Awaitable[T]],
        again: Callable[[], Awaitable[T]],
    ) -> T:
        """The first answer to `send()`, or to `again()` after it; the other call is cancelled.

        `what` names request and object in messages. Raises what the first call raised, when the
        second one fails too, and NoAnswerError after the deadline.
        """
        first: asyncio.Future[T] = asyncio.ensure_future(send())
        one = _Running(first, self._clock())
        self._begin(kind, one)
        return await self._race(kind, what, one, again, first.cancel)

    def carry(
        self,
        kind: RequestKind,
        what: str,
        send: Callable[[], T],
        again: Callable[[], Awaitable[T]],
        drop: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
    ) -> T:
        """`run` for a first request that this thread sends; `drop()` makes it end at once.

        `loop` has nothing to do with a request that is answered within `floor_seconds`.
        """
        one = _Carried[T](self._clock())
        one.begin = partial(self._race, kind, what, one, again, drop)
        self._begin(kind, one)
        with self._lock:
            if self._loop is not loop:  # in a forked child: what its parent carries is not its own
                self._loop, self._is_looking = loop, False
                self._carried.clear()
            self._carried.add(one)
            looks, self._is_looking = self._is_looking, True
        # One look for all that are carried: a timer for each would wake the loop for every read.
        if not looks:
            loop.call_soon_threadsafe(self._look, loop)
        try:
            one.answer.set_result(send())
        except Exception as error:
            if one.is_dropped:  # and nobody looks at what came of it
                one.answer.cancel()
            else:
                one.answer.set_exception(error)
        except BaseException:
            one.answer.cancel()
            raise
        finally:
            # Under the lock of `_look`: from here on there is a race, or there never will be.
            with self._lock:
                self._carried.discard(one)
                race = one.race
            if race is None:
                self._end(kind, one)
        if race is not None:
            return race.result()
        self._is_answer(kind, one, one.answer)
        return one.answer.result()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Every tick, while there are any: begin the races of carried requests that are late."""
        late = self._clock() - self._limits.floor_seconds
        with self._lock:
            for one in [one for one in self._carried if one.started <= late]:
                self._carried.discard(one)
                one.future = asyncio.wrap_future(one.answer, loop=loop)
                one.race = asyncio.run_coroutine_threadsafe(one.begin(), loop)
            self._is_looking = bool(self._carried)
            if self._is_looking:
                loop.call_later(self._limits.tick_seconds, self._look, loop)

    async def _race(
        self,
        kind: RequestKind,
        what: str,
        first: _Running[T],
        again: Callable[[], Awaitable[T]],
        drop: Callable[[], object],
    ) -> T:
        running = [first]
        try:
            while True:
                waiting = [one.future for one in running if not one.future.done()]
                if waiting:
                    await asyncio.wait(
                        waiting,
                        timeout=self._limits.tick_seconds,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                for one in running:
                    if one.future.done() and not one.is_seen:
                        one.is_seen = True
                        if self._is_answer(kind, one, one.future):
                            self.tally.won += one is not first
                            return one.future.result()
                # All have failed: the first error is the caller's, whatever the copies met.
                if all(one.is_seen for one in running):
                    return first.future.result()
                waited = self._clock() - first.started
                with self._lock:
                    if waited >= self._rule.deadline(kind):
                        sent = len(running)
                        raise NoAnswerError(
                            f"{what}: no answer within {waited:.0f} s (sent {sent} times)"
                        )
                    self._report(kind, what, waited, len(running))
                    sends = self._may_send(kind, running)
                    self.tally.hedges += sends
                if sends:
                    running.append(_Running(asyncio.ensure_future(again()), self._clock()))
        finally:
            self._end(kind, first)
            if not first.future.done():
                first.is_dropped = True
                drop()
            for one in running[1:]:
                one.future.cancel()

    def _begin(self, kind: RequestKind, first: _Running[Any]) -> None:
        with self._lock:
            self.tally.requests += 1
            self._firsts.setdefault(kind.group, []).append(first)

    def _end(self, kind: RequestKind, first: _Running[Any]) -> None:
        with self._lock:
            self._firsts[kind.group].remove(first)
            if first in self._stuck:
                self._stuck.clear()

    def _may_send(self, kind: RequestKind, running: Sequence[_Running[T]]) -> bool:
        """Whether one more request is sent: all but one have failed, and that one is late."""
        now = self._clock()
        left = [one for one in running if not one.is_seen]
        if len(left) > 1 or now - running[-1].started < self._pause(len(running) - 1):
            return False
        waited, first = now - left[0].started, running[0]
        if waited >= self._rule.delay(kind) and self._rule.take():
            return True
        # A server that is slow for all, because it has too much to do, gets one more at a time.
        stuck = self._rule.stuck(kind, left[0].overtaken)
        if waited < stuck or (self._stuck and first not in self._stuck):
            return False
        self._stuck[:] = [first]
        self.tally.unearned += 1
        return True

    def _pause(self, failed: int) -> float:
        """Seconds between second requests, after so many that failed."""
        limits = self._limits
        longer = limits.failed_seconds * 2.0 ** min(failed - 1, 64)
        return min(longer, limits.failed_seconds_max) if failed else 0.0

    def _is_answer(self, kind: RequestKind, one: _Running[Any], future: Any) -> bool:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            # A refusal is no measure: it may come at once where an answer takes long.
            if error is None and not future.cancelled():
                self._rule.answered(kind, self._clock() - one.started)
                for other in self._firsts[kind.group]:
                    other.overtaken += other.started < one.started
                return True
            if isinstance(error, SlowDownError):
                self._rule.refused()
            return False

    def _report(self, kind: RequestKind, what: str, waited: float, sent: int) -> None:
        now = self._clock()
        if waited < self._rule.late(kind) or now - self._logged < LOG_SECONDS:
            return
        self._logged = now
        typical = self._rule.typical(kind)
        logger.warning(
            "%s%s: no answer for %.0f s%s; %s, given up after %.0f s",
            f"{self._patience.who}: " if self._patience.who else "",
            what,
            waited,
            "" if typical is None else f", others like it take {typical:.2g} s",
            "sent again" if sent > 1 else "sent once",
            self._rule.deadline(kind),
        )


@dataclass(eq=False)
class _Running(Generic[T]):
    future: asyncio.Future[T]
    started: float
    is_seen: bool = False
    is_dropped: bool = False
    overtaken: int = 0  # others of its kind that were sent later and are answered


class _Carried(_Running[T]):
    """A request that another thread sends. `future` is set, and `race` begun, when it is late."""

    begin: Callable[[], Coroutine[Any, Any, T]]

    def __init__(self, started: float) -> None:
        self.answer = Future[T]()
        self.race: Future[T] | None = None
        self.started = started
