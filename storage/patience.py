"""How long what fails is tried again: a bound that may change while somebody waits."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0  # between lines about one wait


class Patience:
    """How long what fails is tried again, and whether anything is, for all that share a policy.

    Any thread may change it at any time: a pause that is too long by then ends at once. A wait is
    logged at once, and every `LOG_SECONDS` while it lasts.
    """

    def __init__(self) -> None:
        self.usual_seconds = 0.0  # the policy's own bound
        self._changed = threading.Condition()
        self._seconds: float | None = None
        self._waiting = 0
        self._began = 0.0
        self._logged = -math.inf
        self._is_logged = False  # whether a line tells of this wait
        self._telling = threading.Lock()
        self._on_wait: Callable[[bool], object] | None = None
        self._is_told = False  # what `_on_wait` was told last

    @property
    def seconds(self) -> float:
        """How long something may go on failing, as of now."""
        bound = self._seconds
        return self.usual_seconds if bound is None else bound

    def set(self, seconds: float | None, on_wait: Callable[[bool], object] | None = None) -> None:
        """Give up what has failed for `seconds`; None stands for the policy's own bound.

        `on_wait(True)` is called when something begins to be repeated, and `on_wait(False)` when
        nothing is any more, from any thread; it must not raise.
        """
        with self._changed:
            self._seconds = seconds
            self._changed.notify_all()
        with self._telling:
            if self._is_told and self._on_wait is not None:
                self._on_wait(False)
            self._on_wait, self._is_told = on_wait, False
        self._tell()

    def shorten(self, seconds: float) -> None:
        """Give up sooner than what was set, never later."""
        with self._changed:
            if self._seconds is not None:
                self._seconds = min(self._seconds, seconds)
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until the bound changes."""
        with self._changed:
            self._changed.wait(seconds)

    def begin(self, now: float) -> None:
        """Something has failed and will be repeated."""
        with self._changed:
            self._waiting += 1
            if self._waiting == 1:
                self._began, self._is_logged = now, False
        self._tell()

    def note(self, error: object, limit: float, now: float) -> None:
        """It has failed, for the first time or again."""
        with self._changed:
            if now - self._logged < LOG_SECONDS:
                return
            self._logged, self._is_logged = now, True
            waited = now - self._began
        logger.warning("%s; tried again since %.0f s, for %g s at most", error, waited, limit)

    def end(self, now: float, *, is_answered: bool) -> None:
        """It was answered, or given up."""
        with self._changed:
            self._waiting -= 1
            is_over = is_answered and not self._waiting and self._is_logged
            waited = now - self._began
        if is_over:
            logger.warning("the store answers again, after %.1f s", waited)
        self._tell()

    def _tell(self) -> None:
        with self._telling:  # in turn, so that what is told last is what is so
            waits = self._waiting > 0
            if waits != self._is_told and self._on_wait is not None:
                self._is_told = waits
                self._on_wait(waits)
