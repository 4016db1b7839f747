"""TELEMETRY: how a save went, on every rank, kept beside its MANIFEST. FORMAT.md, "Telemetry".

Nothing depends on it: a checkpoint without it, or with a damaged one, is as good. Decoding trusts
nothing all the same, because reports show its texts.

What a save or a load did, and for how long, is kept by a recorder, which is an argument: the caller
that starts the work creates it, and reads it when the work is over. Nothing is global and nothing
is sent anywhere.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ckpt.errors import Corrupt

TELEMETRY_NBYTES_MAX = 16 * 1024 * 1024  # about 40,000 ranks; bounds what a hostile object costs
RANKS_MAX = 1 << 17  # three rows each
LISTS_MAX = 1000  # beside them; texts may have a bracket, too
HISTORY_MAX = 200  # saves before this one whose totals are carried along
FAILURES_MAX = 50
TEXT_MAX = 500  # characters of a text that is kept
WARNINGS_MAX = 20

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Unix = Annotated[FiniteFloat, Field(ge=0, le=1e11)]  # seconds; later ones are no dates
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Name = Annotated[str, Field(max_length=64)]


class _TelemetryModel(BaseModel):
    """Unknown fields are ignored: newer writers may write more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class SaveTotals(_TelemetryModel):
    """One save as a whole. Seconds are of the coordinator's clock, from its beginning to its
    commit.

    `blocked_seconds` is how long training was blocked on the rank where that was longest.
    `staged_nbytes` and `retries` are sums over all ranks. The slowest rank is the one that was at
    work longest, waits left out; `slowest_phase` is what took it longest.
    """

    step: Count
    attempt: Name
    committed_unix: Unix
    seconds: Amount
    blocked_seconds: Amount
    nbytes: Count
    nbytes_referenced: Count
    staged_nbytes: Count
    retries: Count
    ranks: Count
    slowest_rank: Count
    slowest_phase: Name
    slowest_seconds: Amount
    warnings: Count = 0

    @property
    def nbytes_per_second(self) -> float:
        """What the save wrote, by its seconds from its beginning to its commit."""
        return self.nbytes / max(self.seconds, 1e-6)

    def ended(self, now_unix: float) -> SaveTotals:
        """The same save, committed at another time. Cannot fail."""
        begun = self.committed_unix - self.seconds
        seconds = max(0.0, now_unix - begun)
        # Without validation: the checkpoint exists, and nothing may fail its save any more.
        return self.model_copy(update={"committed_unix": now_unix, "seconds": seconds})


class SaveFailure(_TelemetryModel):
    """A save that failed, as the coordinator saw it."""

    step: Count
    time_unix: Unix
    error: Text


class Telemetry(_TelemetryModel):
    """A save in full. Rows are ranks, columns are phases; times are microseconds.

    `started_us` counts from `begun_unix`, on each rank's own clock; 0 where a rank did not pass
    through a phase, and then `took_us` is 0 too. `history` are older saves, oldest first.
    """

    format: Literal["shardpoint telemetry"] = "shardpoint telemetry"
    version: Literal[1] = 1
    totals: SaveTotals
    begun_unix: Unix
    phases: Annotated[list[Name], Field(max_length=64)]
    started_us: list[list[Count]]
    took_us: list[list[Count]]
    nbytes: list[list[Count]]
    blocked_us: list[Count]
    retries: list[Count]
    warnings: Annotated[list[Text], Field(max_length=WARNINGS_MAX)] = []
    history: Annotated[list[SaveTotals], Field(max_length=HISTORY_MAX)] = []
    failures: Annotated[list[SaveFailure], Field(max_length=FAILURES_MAX)] = []

    @model_validator(mode="after")
    def _check_shapes(self) -> Telemetry:
        ranks = len(self.blocked_us)
        columns: tuple[Sequence[list[int]], ...] = (self.started_us, self.took_us, self.nbytes)
        if len(self.retries) != ranks or any(len(rows) != ranks for rows in columns):
            raise ValueError("columns have different numbers of ranks")
        if any(len(row) != len(self.phases) for rows in columns for row in rows):
            raise ValueError("rows have different numbers of phases")
        return self

    def without_rows(self) -> Telemetry:
        """The same without what each rank did."""
        none: dict[str, list[Any]] = {name: [] for name in ("started_us", "took_us", "nbytes")}
        return self.model_copy(update={**none, "blocked_us": [], "retries": []})


def encode_telemetry(telemetry: Telemetry) -> bytes:
    """JSON in UTF-8. Raises ValueError when it is larger than a reader accepts."""
    data = telemetry.model_dump_json().encode()
    if len(data) > TELEMETRY_NBYTES_MAX:
        raise ValueError(f"{len(data)} bytes of telemetry; at most {TELEMETRY_NBYTES_MAX} are kept")
    return data


def telemetry_memory(data: bytes) -> int:
    """Bytes of memory that decoding takes at most."""
    return 2 * len(data) + 80 * data.count(b"[") + 40 * data.count(b",")


def decode_telemetry(data: bytes) -> Telemetry:
    """The inverse of `encode_telemetry`. Raises Corrupt for everything else."""
    if len(data) > TELEMETRY_NBYTES_MAX:
        raise Corrupt(f"telemetry of {len(data)} bytes; at most {TELEMETRY_NBYTES_MAX} are read")
    # Rows of no items are three bytes, and lists of 64 in memory.
    if data.count(b"[") > 3 * RANKS_MAX + LISTS_MAX:
        raise Corrupt(f"telemetry of more than {RANKS_MAX} ranks")
    try:
        return Telemetry.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the object"
        raise Corrupt(f"telemetry: {where}: {first['msg']}") from None


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
