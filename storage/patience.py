"""How long failed requests are repeated: a bound that may change while a caller waits."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from storage.forks import ForkSafeLock

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0  # between lines about one wait


class Patience:
    """How long failed requests are repeated, and whether any is being repeated, for all users of
    one retry policy.

    Any thread may change the bound at any time; a pause that exceeds the new one ends at once. A
    wait is logged when it begins, and every `LOG_SECONDS` while it lasts.
    """

    def __init__(self) -> None:
        self.usual_seconds = 0.0  # the policy's own bound
        self.who = ""  # whose requests these are, for lines of the log: "rank 3"
        self._changed = threading.Condition(ForkSafeLock())  # type: ignore[arg-type]
        self._seconds: float | None = None
        self._waiting = 0
        self._began = 0.0
        self._logged = -math.inf
        self._is_logged = False  # whether a line was logged for this wait
        self._reporting = ForkSafeLock()
        self._on_wait: Callable[[bool], object] | None = None
        self._reported = False  # what `_on_wait` was called with last

    @property
    def seconds(self) -> float:
        """The bound as it is now, in seconds."""
        bound = self._seconds
        return self.usual_seconds if bound is None else bound

    def set(self, seconds: float | None, on_wait: Callable[[bool], object] | None = None) -> None:
        """Give up requests that have failed for `seconds`; None stands for the policy's own bound.

        `on_wait(True)` is called when the first request begins to be repeated, `on_wait(False)`
        when the last one has ended, from any thread; it must not raise.
        """
        with self._changed:
            self._seconds = seconds
            self._changed.notify_all()
        with self._reporting:
            if self._reported and self._on_wait is not None:
                self._on_wait(False)
            self._on_wait, self._reported = on_wait, False
        self._report()

    def shorten(self, seconds: float) -> None:
        """Lower the bound that was set; never raise it."""
        with self._changed:
            if self._seconds is not None:
                self._seconds = min(self._seconds, seconds)
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until the bound changes."""
        with self._changed:
            self._changed.wait(seconds)

    def begin(self, now: float) -> None:
        """A request has failed and will be repeated."""
        with self._changed:
            self._waiting += 1
            if self._waiting == 1:
                self._began, self._is_logged = now, False
        self._report()

    def note(self, error: object, limit: float, now: float) -> None:
        """A request has failed, for the first time or again."""
        with self._changed:
            if now - self._logged < LOG_SECONDS:
                return
            self._logged, self._is_logged = now, True
            waited = now - self._began
        whose = f"{self.who}: " if self.who else ""
        logger.warning(
            "%s%s; tried again since %.0f s, for %g s at most", whose, error, waited, limit
        )

    def end(self, now: float, *, is_answered: bool) -> None:
        """A repeated request was answered, or given up."""
        with self._changed:
            self._waiting -= 1
            is_over = is_answered and not self._waiting and self._is_logged
            waited = now - self._began
        if is_over:
            logger.warning("the store answers again, after %.1f s", waited)
        self._report()

    def _report(self) -> None:
        with self._reporting:  # one at a time, so that the last call has the newest value
            waits = self._waiting > 0
            if waits != self._reported and self._on_wait is not None:
                self._reported = waits
                self._on_wait(waits)
