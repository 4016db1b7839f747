"""How fast copies are sent: as fast as goes without slower steps, and fast enough for the period.

A rule on numbers, which knows neither clocks nor networks: who uses it says what time it is.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

MIB = 1 << 20
RATE_MAX = 64 * 1024 * MIB  # bytes per second: no bound
RATE_MIN = 8 * MIB
SLOWER = 1.05  # a step that takes this much longer than one without copies has suffered
DOWN, UP = 0.7, 1.1  # so the rate settles where about one step in five suffers
SHARE_MAX = 0.8  # of the time between two near saves that copies may take
SECONDS_MAX = 250.0  # of that time: slower ones would be given up
QUIET_STEPS = 20  # the newest, of which the median is compared with
QUIET_STEPS_MIN = 3


class CopyPace:
    """The rate of one rank's copies, in bytes per second.

    It falls when steps take longer while copies are sent, and rises while they do not; never so far
    that the copies of one near save would take more than `SHARE_MAX` of the time until the next.
    """

    def __init__(self) -> None:
        self.rate = float(RATE_MAX)
        self._floor = float(RATE_MIN)
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS)
        self._free_seconds = 0.0
        self._sent = 0
        self._lock = threading.Lock()

    def saved(self, nbytes: int, seconds: float) -> None:
        """A near save has sent `nbytes`; the next one began `seconds` after it."""
        with self._lock:
            self._floor = max(RATE_MIN, nbytes / max(SHARE_MAX * min(seconds, SECONDS_MAX), 1e-3))
            self.rate = max(self.rate, self._floor)

    def stepped(self, seconds: float) -> None:
        """The training has done a step in `seconds`, saves that it waited for left out."""
        with self._lock:
            sent, self._sent = self._sent, 0
            if not sent:
                self._quiet.append(seconds)
                return
            if len(self._quiet) < QUIET_STEPS_MIN:
                return
            if seconds > SLOWER * median(self._quiet):
                # From what it really was: without a bound, a rate says nothing.
                self.rate = max(self._floor, DOWN * min(self.rate, sent / seconds))
            else:
                self.rate = min(float(RATE_MAX), UP * self.rate)

    def wait_seconds(self, nbytes: int, now: float) -> float:
        """How long to wait before `nbytes` are sent, at the time `now`; they count as sent then."""
        with self._lock:
            begin = max(self._free_seconds, now)
            self._free_seconds = begin + nbytes / self.rate
            self._sent += nbytes
            return begin - now
