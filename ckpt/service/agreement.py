"""Ranks agree in the background on something to do at one and the same call of `step`.

A clock or a signal strikes on one rank, at a moment that is another place of the training on each
rank, and nobody may wait for it. Note "promises": whoever has a wish raises a flag, which the
watcher of every rank polls. Each watcher then promises how far its rank will go at most without
knowing the outcome: some calls ahead of where it is. The promises are gathered, and the thing is
done at the latest of them. No rank can have passed that call, because it lies at or after its own
promise, where it would wait; and none does wait as long as the promises are far enough ahead for
the round to end before they are reached. The training's own thread sends and receives nothing.

All decisions are pure functions of what was gathered, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ckpt.errors import RankFailed
from ckpt.world.base import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5  # how often a rank looks whether its neighbour lives
RANKS_POLLING_FAST = 256  # more ranks than this poll less often each
TURNS_TIMED = 16


class Wish(NamedTuple):
    """What one rank brings to a round.

    `turn_max` is its promise: it will not pass that call without knowing the outcome. `signals`
    arrived here, `left_seconds` is how long this job may go on after them. `reasons` are why the
    lead wants a save, `valid_at` how many saves had been begun then. `alarm` asks all ranks to hear
    of failed saves, `closing` says that this rank makes no further call.
    """

    turn_max: int
    signals: tuple[int, ...] = ()
    left_seconds: float = math.inf
    reasons: tuple[str, ...] = ()
    valid_at: int = -1
    alarm: bool = False
    closing: bool = False

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Wish:
        turn_max, signals, left_seconds, reasons, *rest = json.loads(data)
        return Wish(turn_max, tuple(signals), left_seconds, tuple(reasons), *rest)


class Decision(NamedTuple):
    """What all ranks do at call `turn`. `deadline_seconds` is on this rank's own clock."""

    turn: int
    signals: frozenset[int] = frozenset()
    deadline_seconds: float = math.inf
    reasons: tuple[str, ...] = ()
    valid_at: int = -1
    alarm: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.signals or self.reasons or self.alarm)


def decided(wishes: Sequence[Wish], *, now_seconds: float) -> Decision:
    """What follows from the wishes of all ranks: everything that any of them brought, at the latest
    promise. The same on all ranks, but for the clock.
    """
    return Decision(
        turn=max(wish.turn_max for wish in wishes),
        signals=frozenset(number for wish in wishes for number in wish.signals),
        deadline_seconds=now_seconds + min(wish.left_seconds for wish in wishes),
        reasons=tuple(dict.fromkeys(text for wish in wishes for text in wish.reasons)),
        valid_at=max(wish.valid_at for wish in wishes),
        alarm=any(wish.alarm for wish in wishes),
    )


def merged(decisions: Sequence[Decision], turn: int) -> Decision:
    """Several decisions as one of that turn."""
    return Decision(
        turn=turn,
        signals=frozenset(number for one in decisions for number in one.signals),
        deadline_seconds=min((one.deadline_seconds for one in decisions), default=math.inf),
        reasons=tuple(dict.fromkeys(text for one in decisions for text in one.reasons)),
        valid_at=max((one.valid_at for one in decisions), default=-1),
        alarm=any(one.alarm for one in decisions),
    )


class SignalSource(Protocol):
    """Where signals are caught; `ckpt.service.preemption.Signals` is one."""

    def take(self) -> tuple[int, ...]:
        """Signals that arrived since the last call."""

    def left_seconds(self) -> float:
        """How long this process may go on; infinite before it was told to end."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often watchers look, and how far ahead they promise: `ahead_seconds` of steps."""

    poll_seconds: float = POLL_SECONDS
    ahead_seconds: float = 5 * POLL_SECONDS

    @staticmethod
    def of(world: World) -> Pace:
        """Slower in large worlds, so that their requests together stay some thousands a second."""
        poll = POLL_SECONDS * max(1.0, world.size / RANKS_POLLING_FAST)
        return Pace(poll, 5 * poll)


class Council:
    """One rank's part in the agreements; see note "promises". It closes `world` in the end.

    `turn` and `close` are called by the training's thread on all ranks, in the same order; `ask`
    by any thread of any rank. A world of one needs no watcher and decides at once.
    """

    def __init__(
        self,
        world: World,
        signals: SignalSource,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_seconds = 0.0  # in `turn`, all calls together
        self._world = world
        self._signals = signals
        self._pace = pace or Pace.of(world)
        self._clock = clock
        self._changed = threading.Condition()
        self._turn = 0
        self._turns_seconds: deque[float] = deque(maxlen=TURNS_TIMED)  # when the newest were made
        self._wish = Wish(0)
        self._promise = math.inf
        self._decisions: list[Decision] = []
        self._failure: BaseException | None = None
        self._leaving = self._has_left = False
        self._closed = False
        self._number = 0
        self._looked_seconds = -math.inf
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-agree")
        if world.size > 1:
            self._pool.submit(self._watch)

    def ask(self, *, reasons: Sequence[str] = (), valid_at: int = -1, alarm: bool = False) -> None:
        """Bring a wish of this rank; what comes of it is told by a later `turn` of all ranks."""
        with self._changed:
            self._wish = self._wish._replace(
                reasons=tuple(dict.fromkeys((*self._wish.reasons, *reasons))),
                valid_at=max(self._wish.valid_at, valid_at),
                alarm=self._wish.alarm or alarm,
            )
            self._changed.notify_all()

    def fail(self, failure: RankFailed) -> None:
        """Have the next call of this rank raise `failure`, which names who is missing."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._world.end(failure)

    def turn(self) -> Decision | None:
        """The next call: what all ranks do at it, None for nothing.

        Raises RankFailed when a rank was found dead, naming it.
        """
        with self._changed:
            self._turn += 1
            self._turns_seconds.append(self._clock())
            if self._world.size == 1:
                self._decide_alone()
            elif self._turn >= self._promise:
                self._wait_for_outcome()
            self._raise_failure()
            due = [one for one in self._decisions if one.turn <= self._turn]
            assert all(one.turn == self._turn for one in due), "a decision came after its turn"
            self._decisions = [one for one in self._decisions if one.turn > self._turn]
            return merged(due, self._turn) if due else None

    def close(self) -> Decision | None:
        """The last call, on all ranks: what they agreed on and have not done yet.

        Waits until all ranks have come here. Raises RankFailed when one never will.
        """
        with self._changed:
            self._turn += 1
            if self._world.size == 1:
                self._decide_alone()
            else:
                self._wish = self._wish._replace(closing=True)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._failure is not None)
            self._raise_failure()
            left = merged(self._decisions, self._turn)
            self._decisions = []
        self.leave()
        return None if left.is_empty else left

    def rest(self) -> None:
        """No more agreements: all ranks know that they end, and may leave one after the other."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Stop watching, without the other ranks: after a failure. May be repeated."""
        self.rest()
        with self._changed:
            is_first, self._has_left = not self._has_left, True
        if is_first:
            # Whoever waits in a round, here or on other ranks, need not wait any longer.
            self._world.abandon()
            self._world.close()
        self._pool.shutdown(wait=False)

    def _wait_for_outcome(self) -> None:
        began = self._clock()
        self._changed.wait_for(lambda: self._turn < self._promise or self._failure is not None)
        self.waited_seconds += self._clock() - began

    def _raise_failure(self) -> None:
        failure = self._failure
        if isinstance(failure, RankFailed):
            raise RankFailed(str(failure), rank=failure.rank, phase=failure.phase) from failure
        if failure is not None:
            raise failure

    def _decide_alone(self) -> None:
        self._hear_signals()
        wish = self._wish._replace(turn_max=self._turn, left_seconds=self._signals.left_seconds())
        self._wish = Wish(0)
        decision = decided([wish], now_seconds=self._clock())
        if not decision.is_empty:
            self._decisions.append(decision)

    def _hear_signals(self) -> None:
        arrived = self._signals.take()
        if arrived:
            numbers = tuple(sorted({*self._wish.signals, *arrived}))
            self._wish = self._wish._replace(signals=numbers)

    # the watcher

    def _watch(self) -> None:
        """Look once, then have this done again, until all ranks are closing or one is gone.

        A task for each look and not one loop: an interpreter that ends waits for tasks to finish
        and takes no new ones, so a program that never closes us ends all the same.
        """
        try:
            if self._is_over():
                return
            if self._has_wish():
                self._world.raise_flag(f"wish {self._number}")
            if self._world.flag_is_up(f"wish {self._number}"):
                self._hold_round(self._number)
                self._number += 1
            elif self._clock() - self._looked_seconds >= LOOK_SECONDS:
                self._world.look("training")
                self._looked_seconds = self._clock()
            with contextlib.suppress(RuntimeError):  # no new tasks: the interpreter ends
                self._pool.submit(self._watch)
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
            if not self._leaving:
                logger.error("the ranks can agree on nothing any more: %s", failure)

    def _is_over(self) -> bool:
        """After a pause, unless a wish came in meanwhile."""
        with self._changed:
            if not self._closed and not self._leaving:
                self._changed.wait(self._pace.poll_seconds)
            return self._closed or self._leaving

    def _has_wish(self) -> bool:
        with self._changed:
            self._hear_signals()
            wish = self._wish
            return bool(wish.signals or wish.reasons or wish.alarm or wish.closing)

    def _hold_round(self, number: int) -> None:
        with self._changed:
            self._hear_signals()
            mine = self._wish._replace(
                turn_max=self._turn + (0 if self._wish.closing else self._calls_ahead()),
                left_seconds=self._signals.left_seconds(),
            )
            self._wish = Wish(0, closing=mine.closing)
            self._promise = mine.turn_max
        gathered = self._world.gather(f"wishes {number}", mine.encode())
        wishes = [Wish.decode(data) for data in gathered]
        decision = decided(wishes, now_seconds=self._clock())
        with self._changed:
            if not decision.is_empty:
                self._decisions.append(decision)
            self._promise = math.inf
            self._closed = all(wish.closing for wish in wishes)
            self._changed.notify_all()

    def _calls_ahead(self) -> int:
        """As many as the training makes in `ahead_seconds`, by the newest calls."""
        if len(self._turns_seconds) < 2:
            return 1
        spent = max(self._turns_seconds[-1] - self._turns_seconds[0], 1e-6)
        return math.ceil(self._pace.ahead_seconds * (len(self._turns_seconds) - 1) / spent)
