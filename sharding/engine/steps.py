"""When the units of one model did what: a log of one step, by the host's clock."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Noted", "StepLog"]


class Noted(NamedTuple):
    """Something that a unit did, `at_seconds` after the root's forward had started.

    `what` is "gather", "gathered", "forward", "forward end", "backward", "backward end", "free",
    "reduce" or, with the number of the root, "end".
    """

    what: str
    unit: int
    at_seconds: float


class StepLog:
    """What units did in the last forward that a backward followed: when, by the host's clock."""

    def __init__(self) -> None:
        self.last: tuple[Noted, ...] = ()
        self._now: list[Noted] = []
        self._start = 0.0

    def begin(self) -> None:
        """The root's forward starts."""
        self._now = []
        self._start = time.perf_counter()

    def note(self, what: str, unit: int) -> None:
        """The unit of this number does something."""
        self._now.append(Noted(what, unit, time.perf_counter() - self._start))

    def end(self) -> None:
        """The backward has ended."""
        end = Noted("end", 0, time.perf_counter() - self._start)
        self.last = (*self._now, end)
        self._now = []
