"""Signals that request a save, and what to do in the time that is left before the job is killed.

Note "two signals": the first one that ends a job requests a last save; a later one ends the
process at once, as it would have without this library. One order may arrive several times, because
schedulers signal all processes and launchers pass signals on, so a signal that comes shortly after
the first counts as the same order. Handlers that were there before are called too, and put back at
the end. Where another one was put on top meanwhile, ours stays below it, and does what the one
before it does: a process must not become deaf to an order to end.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, NamedTuple

from ckpt.service.policies import OnPreemption, SavePolicy, preemption_of, signals_of

logger = logging.getLogger(__name__)

SAME_ORDER_SECONDS = 2.0  # a launcher passes a signal on within milliseconds; a guess with room


class Preempted(SystemExit):
    """The job was ordered to end and has saved what it could; leaving the program now is clean.

    Raised by `step` on all ranks. A SystemExit, so that a training loop that knows nothing of it
    ends with status 0. `step` is the last step that was done, `saved_step` that of the newest
    checkpoint of this process, -1 when there is none.
    """

    def __init__(self, *, step: int, saved_step: int, code: int = 0) -> None:
        super().__init__(code)
        self.step = step
        self.saved_step = saved_step

    def __str__(self) -> str:
        return (
            f"preempted after step {self.step}; the newest checkpoint is of step {self.saved_step}"
        )


class Signals:
    """Catches the signals of a save policy while installed.

    The handler only notes what arrived; `take`, `must_end` and `left_seconds` report it.
    """

    def __init__(self, policy: SavePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._numbers = sorted(signals_of(policy))
        self._preemption: OnPreemption | None = preemption_of(policy)
        self._clock = clock
        self._arrived: list[int] = []
        self._order: int | None = None
        self._ends_seconds = self._ordered_seconds = math.inf
        self._previous: dict[int, Any] = {}
        self._is_over = False
        self._pid = os.getpid()

    def install(self) -> None:
        """From now on signals are caught. Only Python's main thread can do that; in another one,
        those that other ranks catch still count.
        """
        if self._numbers and threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: signals are left to the other ranks")
            return
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, where nobody else has put another one meanwhile."""
        # First: from here on `_handle` passes signals on to the handler before it.
        self._is_over = True
        for number in self._previous:
            # Equal, not identical: each access makes another bound method.
            ours = signal.getsignal(number) == self._handle
            previous = self._before(number)
            if ours and previous is not None:  # None: installed by other means than Python's
                signal.signal(number, previous)

    def _before(self, number: int) -> Any:
        """The handler that was there before this one and those of others that are over."""
        previous = self._previous.get(number)
        of = getattr(previous, "__self__", None)
        return of._before(number) if isinstance(of, Signals) and of._is_over else previous

    def take(self) -> tuple[int, ...]:
        """Signals that arrived since the last call, in any thread."""
        # No lock: a handler runs between two instructions of the main thread, and would wait for
        # ever for a lock that this thread has there.
        # A signal that arrives meanwhile is appended to the list that is returned here.
        arrived, self._arrived = self._arrived, []
        return tuple(arrived)

    def again(self) -> None:
        """Have an order to end arrive once more: the ranks that heard of it may be gone."""
        if self._order is not None and self._order not in self._arrived:
            self._arrived.append(self._order)

    def left_seconds(self) -> float:
        """Until the scheduler kills this process; infinite before it was ordered to end."""
        return self._ends_seconds - self._clock()

    @property
    def must_end(self) -> bool:
        """Whether this process was ordered to end."""
        return self._ends_seconds < math.inf

    def end_the_job(self, signals: frozenset[int]) -> bool:
        """Whether one of `signals`, which arrived on any rank, orders this job to end."""
        ends = () if self._preemption is None else self._preemption.signals
        return bool(signals) and not signals.isdisjoint(ends)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a worker of a data loader, has inherited this handler: the
            # signal is meant for the child, and has to end it.
            _end_by(number)
            return
        previous = self._before(number)
        # Another handler was put on top and calls ours, which `restore` could not take away.
        if self._is_over:
            if callable(previous):
                previous(number, frame)
            elif previous is signal.SIG_DFL:
                _end_by(number)
            return
        now = self._clock()
        if self._preemption is not None and number in self._preemption.signals:
            if self.must_end:
                if now - self._ordered_seconds >= SAME_ORDER_SECONDS:
                    _end_by(number)
                return
            self._ordered_seconds, self._order = now, number
            self._ends_seconds = now + self._preemption.grace_seconds
        self._arrived.append(number)
        # Python's own handler of SIGINT raises KeyboardInterrupt, and the policy asks for a save.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _end_by(number: int) -> None:
    """Die of this signal now."""
    # By the signal and not by an exit: the parent sees in the status what the child died of.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# --- what to do with the time that is left --------------------------------------------------------

ASSUMED_BYTES_PER_SECOND = 50e6  # of one rank, before any save was measured; a cautious guess
ASSUMED_SECONDS = 1.0  # of a save, whatever its size
SAFETY = 1.5  # a save may take this much longer than the longest of the newest ones
LEAVING_SECONDS = 0.5  # to exit


class StopPlan(NamedTuple):
    """First the save in flight is waited for, for `wait_seconds` at most; then `save` is made."""

    wait_seconds: float
    save: Literal["nothing", "everything", "model first"]
    why: str


def plan_stop(
    *,
    left_seconds: float,
    persist_seconds: float | None,
    in_flight_seconds: float | None,
    state_nbytes: int,
    model_nbytes: int,
    steps_unsaved: int,
) -> StopPlan:
    """How to use the time that is left. Pure.

    `left_seconds` until the job is killed; `persist_seconds` that a save takes, None before one was
    measured; `in_flight_seconds` since the save in flight was begun, None when there is none;
    `state_nbytes` and `model_nbytes` of one rank; `steps_unsaved` since the newest save was begun.

    A save in flight is always finished: it is the surest. If steps were made since it was begun,
    everything is saved once more when that fits, judged by the longest of the newest saves times
    1.5, or before any was measured, by 1 s and 50 MB/s per rank. When it does not fit, the model
    alone comes first, so that the weights are safe, and then everything is begun nevertheless: an
    unfinished attempt harms nothing.
    """
    left = left_seconds - LEAVING_SECONDS
    full = persist_seconds
    if full is None:
        full = ASSUMED_SECONDS + state_nbytes / ASSUMED_BYTES_PER_SECOND
    full *= SAFETY
    if not steps_unsaved and in_flight_seconds is None:
        return StopPlan(0.0, "nothing", "the last step is saved")
    if not steps_unsaved:
        return StopPlan(max(0.0, left), "nothing", "the save in flight has the last step")
    wait = 0.0 if in_flight_seconds is None else max(0.0, full - in_flight_seconds)
    if left <= 0:
        return StopPlan(0.0, "nothing", "no time is left")
    why = f"{left:.1f} s are left, a save takes up to {full:.1f} s"
    if wait + full <= left:
        # What the wait does not need is spent on the save, so it may take as long as both.
        return StopPlan(left - full if wait else 0.0, "everything", why)
    if wait:
        return StopPlan(left, "nothing", f"{why}, and another one is in flight")
    share = model_nbytes / max(1, state_nbytes)
    if 0.0 < share < 1.0:
        return StopPlan(0.0, "model first", f"{why}; the model is {share:.0%} of it")
    return StopPlan(0.0, "everything", f"{why}; an unfinished attempt harms nothing")
