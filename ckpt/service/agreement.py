"""Ranks agree in the background on something to do at one and the same call of `step`.

A clock or a signal fires on one rank while the other ranks are elsewhere in the training, and no
rank may wait for another. Note "promises": a rank with a proposal raises a flag, which the watcher
of every rank sees. Each watcher then promises a call, some calls ahead of where its rank is, that
the rank will not pass without knowing the outcome. The promises are gathered, and the proposal is
carried out at the latest of them. No rank can have passed that call, because each would have waited
at its own promise, which is no later. No rank does wait when the promises are so far ahead that the
round ends before they are reached. The training's own thread sends and receives nothing.

All decisions are pure functions of what was gathered, which is the same on all ranks. A turn is the
number of a call of `step`.
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
from typing import NamedTuple

from ckpt.errors import RankFailed
from ckpt.service.preemption import Signals
from ckpt.world.agreement import ranks_in_words
from ckpt.world.base import World
from ckpt.world.rounds import CALL_SECONDS

logger = logging.getLogger(__name__)

# How late a flag is seen at most. A look sends nothing, so it may be this frequent.
POLL_SECONDS = 0.1
CHECK_SECONDS = 0.5  # how often a rank checks whether its neighbour lives
# The pace of a training changes, as after its warm-up: only the newest calls predict the next.
TURNS_TIMED = 16


class Proposal(NamedTuple):
    """What one rank contributes to a round.

    `turn_max` is its promise: it will not pass that call without knowing the outcome. `signals`
    arrived here, `left_seconds` is how long this job may run after them. `reasons` are why the
    coordinator wants a save, `valid_at` how many saves had been begun then. `alarm` requests that
    all ranks raise failed saves, `closing` means that this rank makes no further call.
    """

    turn_max: int
    signals: tuple[int, ...] = ()
    left_seconds: float = math.inf
    reasons: tuple[str, ...] = ()
    valid_at: int = -1
    alarm: bool = False
    closing: bool = False

    def encode(self) -> bytes:
        # `left_seconds` may be infinite, which JSON has no word for: Python writes Infinity, and
        # reads it.
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Proposal:
        turn_max, signals, left_seconds, reasons, *rest = json.loads(data)
        return Proposal(turn_max, tuple(signals), left_seconds, tuple(reasons), *rest)


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


NOTHING, _NO_PROPOSAL = Decision(0), Proposal(0)


def decided(proposals: Sequence[Proposal], *, now_seconds: float) -> Decision:
    """What follows from the proposals of all ranks: everything that any of them proposed, at the
    latest promise. The same on all ranks, but for the clock.
    """
    decisions = [
        # `one[3:6]` are reasons, valid_at and alarm, which a Decision has in the same order.
        Decision(one.turn_max, frozenset(one.signals), now_seconds + one.left_seconds, *one[3:6])
        for one in proposals
    ]
    # The latest promise: each rank waits at its own, so none has passed this call yet.
    return merged(decisions, max(one.turn for one in decisions))


def merged(decisions: Sequence[Decision], turn: int) -> Decision:
    """Several decisions as one of that turn."""
    return Decision(
        turn=turn,
        signals=frozenset(number for one in decisions for number in one.signals),
        # A job ends with its first rank, so the shortest grace period holds for all.
        deadline_seconds=min((one.deadline_seconds for one in decisions), default=math.inf),
        reasons=tuple(dict.fromkeys(text for one in decisions for text in one.reasons)),
        valid_at=max((one.valid_at for one in decisions), default=-1),
        alarm=any(one.alarm for one in decisions),
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """How often watchers look for flags, which sends nothing, and how far ahead they promise:
    `ahead_seconds` of steps.
    """

    poll_seconds: float = POLL_SECONDS
    ahead_seconds: float = 5 * POLL_SECONDS


class StepAgreement:
    """One rank's part in the agreements; see note "promises". It closes `world` in the end.

    The training's thread calls `turn` and `close` on all ranks, in the same order; any thread of
    any rank calls `propose`. A world of one needs no watcher and decides at once.
    """

    def __init__(
        self,
        world: World,
        signals: Signals,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_seconds = 0.0  # in `turn`, all calls together
        self._world = world
        self._is_alone = world.size == 1
        self._signals = signals
        self._pace = pace or Pace()
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turn = 0
        self._turns_seconds: deque[float] = deque(maxlen=TURNS_TIMED)  # when the newest were made
        self._proposal = _NO_PROPOSAL
        # Infinite while no round is under way: `turn` then waits for nothing.
        self._promise = math.inf
        self._decisions: list[Decision] = []
        self._failure: BaseException | None = None
        self._leaving = self._has_left = False
        self._closed = False
        self._open_ranks: list[int] = []  # as of the newest round
        self._number = 0
        self._checked_seconds = -math.inf
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-agree")
        if not self._is_alone:
            self._pool.submit(self._watch)

    def propose(
        self, *, reasons: Sequence[str] = (), valid_at: int = -1, alarm: bool = False
    ) -> None:
        """Propose something; a later `turn` of all ranks returns it as part of its decision."""
        with self._changed:
            self._proposal = self._proposal._replace(
                reasons=tuple(dict.fromkeys((*self._proposal.reasons, *reasons))),
                valid_at=max(self._proposal.valid_at, valid_at),
                alarm=self._proposal.alarm or alarm,
            )
            self._changed.notify_all()

    def fail(self, failure: RankFailed) -> None:
        """Make the next call of this rank raise `failure`, which names the missing rank."""
        with self._changed:
            # The first one names the rank that was lost; later ones may only follow from it.
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._world.end(failure)

    def turn(self) -> Decision | None:
        """The next call. Returns what all ranks do at it, None for nothing.

        Raises RankFailed when a rank was found dead, naming it.
        """
        with self._lock:
            self._turn += 1
            if self._is_alone:
                self._decide_alone()
            else:
                began = self._clock()
                self._turns_seconds.append(began)
                if self._turn >= self._promise:
                    # No timeout: rounds have deadlines, and the watcher notes how they end.
                    self._changed.wait_for(
                        lambda: self._turn < self._promise or self._failure is not None
                    )
                    self.waited_seconds += self._clock() - began
            if self._failure is not None:
                self._raise_failure()
            if not self._decisions:
                return None
            due = [one for one in self._decisions if one.turn <= self._turn]
            # This rank has waited at a promise that is no later than the agreed turn.
            assert all(one.turn == self._turn for one in due), "a decision came after its turn"
            self._decisions = [one for one in self._decisions if one.turn > self._turn]
            return merged(due, self._turn) if due else None

    def close(self) -> Decision | None:
        """The last call, on all ranks. Returns what they agreed on and have not done yet.

        Waits until all ranks are here. Raises RankFailed when one never will be.
        """
        with self._changed:
            self._turn += 1
            if self._is_alone:
                self._decide_alone()
            else:
                self._proposal = self._proposal._replace(closing=True)
                self._changed.notify_all()
                # The others may still train, so a long wait is no error; in silence it would look
                # like a hang.
                self._changed.wait_for(self._is_settled, timeout=CALL_SECONDS)
                if self._open_ranks and not self._is_settled():
                    others = ranks_in_words(self._open_ranks)
                    text = "rank %d has waited for %g s in Checkpointer.close, "
                    text += "which %s did not call"
                    logger.warning(text, self._world.rank, CALL_SECONDS, others)
                self._changed.wait_for(self._is_settled)
            self._raise_failure()
            left = merged(self._decisions, self._turn)
            self._decisions = []
        self.leave()
        return None if left.is_empty else left

    def _is_settled(self) -> bool:
        return self._closed or self._failure is not None

    def rest(self) -> None:
        """Hold no more rounds: all ranks know that they end, and may leave one after the other."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Stop watching, without the other ranks: after a failure. May be repeated."""
        self.rest()
        with self._changed:
            is_first, self._has_left = not self._has_left, True
        if is_first:
            # Ends the waits of a round under way, here and on other ranks.
            self._world.abandon()
            self._world.close()
        # Without waiting: this also follows a failure, and a round may take a moment to end.
        self._pool.shutdown(wait=False)

    def _raise_failure(self) -> None:
        failure = self._failure
        if isinstance(failure, RankFailed):
            # A new one for each call: an error that is raised again collects all its tracebacks.
            raise RankFailed(str(failure), rank=failure.rank, phase=failure.phase) from failure
        if failure is not None:
            raise failure

    def _decide_alone(self) -> None:
        self._take_signals()
        # By identity: whatever was proposed since has made another one.
        if self._proposal is _NO_PROPOSAL:
            return
        proposal = self._proposal._replace(
            turn_max=self._turn, left_seconds=self._signals.left_seconds()
        )
        self._proposal = _NO_PROPOSAL
        decision = decided([proposal], now_seconds=self._clock())
        if not decision.is_empty:
            self._decisions.append(decision)

    def _take_signals(self) -> None:
        if arrived := self._signals.take():
            numbers = tuple(sorted({*self._proposal.signals, *arrived}))
            self._proposal = self._proposal._replace(signals=numbers)

    # the watcher

    def _watch(self) -> None:
        """Poll once, then submit the next poll, until all ranks are closing or one is gone.

        A task for each poll and not one loop: an interpreter that ends waits for tasks to finish
        and takes no new ones, so even a program that never calls `close` ends.
        """
        try:
            with self._changed:
                if not self._closed and not self._leaving:
                    # A proposal that comes in meanwhile ends the pause.
                    self._changed.wait(self._pace.poll_seconds)
                if self._closed or self._leaving:
                    return
                self._take_signals()
                mine = self._proposal
            # Numbered: the flag of a round that is over begins no other one.
            if mine.signals or mine.reasons or mine.alarm or mine.closing:
                self._world.raise_flag(f"proposal {self._number}")
            if self._world.flag_is_up(f"proposal {self._number}"):
                self._hold_round(self._number)
                self._number += 1
            # Only between rounds: a round notices by itself that a rank is gone.
            elif self._clock() - self._checked_seconds >= CHECK_SECONDS:
                self._world.check_neighbour("training")
                self._checked_seconds = self._clock()
            with contextlib.suppress(RuntimeError):  # the pool takes no tasks: the interpreter ends
                self._pool.submit(self._watch)
        except BaseException as failure:
            # Of any kind: without a watcher, `turn` would wait at its promise for ever.
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
            # Where this rank leaves, its round was ended on purpose.
            if not self._leaving:
                logger.error("the ranks cannot agree on anything any more: %s", failure)

    def _hold_round(self, number: int) -> None:
        with self._changed:
            self._take_signals()
            mine = self._proposal._replace(
                # A rank that closes makes no further call: the one that it is in is all it can
                # promise.
                turn_max=self._turn + (0 if self._proposal.closing else self._calls_ahead()),
                left_seconds=self._signals.left_seconds(),
            )
            # What is sent now is done; only closing stays true for the rounds that follow.
            self._proposal = Proposal(0, closing=mine.closing)
            # Set before the round: from here on `turn` does not pass the promise without waiting.
            self._promise = mine.turn_max
        gathered = self._world.gather(f"proposals {number}", mine.encode())
        proposals = [Proposal.decode(data) for data in gathered]
        decision = decided(proposals, now_seconds=self._clock())
        with self._changed:
            if not decision.is_empty:
                self._decisions.append(decision)
            self._promise = math.inf
            self._open_ranks = [rank for rank, one in enumerate(proposals) if not one.closing]
            self._closed = not self._open_ranks
            self._changed.notify_all()

    def _calls_ahead(self) -> int:
        """As many as the training makes in `ahead_seconds`, by the newest calls."""
        if len(self._turns_seconds) < 2:
            return 1
        # All of them may fall into one tick of the clock.
        spent = max(self._turns_seconds[-1] - self._turns_seconds[0], 1e-6)
        return math.ceil(self._pace.ahead_seconds * (len(self._turns_seconds) - 1) / spent)
