"""When the units of one model did what: a log of one step, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Noted(NamedTuple):
    """Something that a unit did, `at_seconds` after the root's forward had started.

    `what` is "gather", "gathered", "forward", "forward end", "backward", "backward end", "free",
    "reduce" or, with the number of the root, "end".
    """

    what: str
    unit: int
    at_seconds: float


Entry = tuple[str, int, float]
"""What a unit did, its number, and `time.perf_counter()`."""


class StepLog:
    """What units did in the last forward that a backward followed: when, by the host's clock."""

    note: Callable[[Entry], None]
    """A unit does something."""

    def __init__(self) -> None:
        self._last: tuple[list[Entry], float] = ([], 0.0)
        self.begin()

    def begin(self) -> None:
        """The root's forward starts."""
        self._now: list[Entry] = []
        self.note = self._now.append
        self._start = time.perf_counter()

    def end(self) -> None:
        """The backward has ended."""
        self.note(("end", 0, time.perf_counter()))
        self._last = self._now, self._start
        self.begin()

    @property
    def last(self) -> tuple[Noted, ...]:
        """The last step; empty before the first has ended."""
        entries, start = self._last
        return tuple(Noted(what, unit, seconds - start) for what, unit, seconds in entries)
