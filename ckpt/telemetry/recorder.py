"""What a save or a load did, and for how long: spans by phase and counters, kept by a recorder.

A recorder is an argument. The caller that starts the work creates it, and reads it when the work is
over. Nothing is global and nothing is sent anywhere.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class PhaseSpan(NamedTuple):
    """One phase on this rank. `start_unix` is seconds since 1970, `nbytes` what the phase moved."""

    phase: str
    start_unix: float
    seconds: float
    nbytes: int


def stopwatch() -> Callable[[], float]:
    """Returns a function that returns the seconds since this call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


class Recorder:
    """Collects the spans and counters of one save or load; any thread may add to it.

    Phases of a save are "attempt", "flatten", "stage", "write", "parts", "manifest" and "commit";
    of a load "manifest", "bind", "plan", "read" and "finish". "digest" is of saves with `dedup`;
    "wait" is from this rank's last write to that of the last rank. Counters carry their unit in
    their name.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._timer = timer
        self._spans: list[PhaseSpan] = []
        self._counters: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """The block is `phase`, and moves `nbytes`; it is recorded when it fails, too."""
        # Two clocks: ranks are laid side by side by the time of day, which may be set meanwhile.
        start_unix = self._clock()
        start = self._timer()
        try:
            yield
        finally:
            span = PhaseSpan(phase, start_unix, self._timer() - start, nbytes)
            with self._lock:
                self._spans.append(span)

    def count(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`, which starts at zero."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def spans(self) -> tuple[PhaseSpan, ...]:
        """What was recorded so far, in the order in which the phases ended."""
        with self._lock:
            return tuple(self._spans)

    def counters(self) -> dict[str, float]:
        """All counters by name."""
        with self._lock:
            return dict(self._counters)


class JsonLines(logging.Formatter):
    """Formats every record as one line of JSON: time, level, logger, message, and the numbers that
    the library logs beside the message.

        handler.setFormatter(ckpt.telemetry.JsonLines())
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time_unix": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "ckpt", None)
        if isinstance(fields, Mapping):
            line |= {name: value for name, value in fields.items() if name not in line}
        return json.dumps(line, default=str)
