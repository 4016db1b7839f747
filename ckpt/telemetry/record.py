"""TELEMETRY: how a save went, on every rank, kept next to its MANIFEST. FORMAT.md, "Telemetry".

Nothing depends on it: a checkpoint without it, or with a damaged one, is as good. Decoding trusts
nothing all the same, because reports show its texts. The report of a rank travels with its part, so
that it costs no round. Nothing here can fail a save: when the history is written, the save is
committed.

What a save or a load did, and for how long, is kept by a recorder, which is an argument: the caller
that starts the work creates it, and reads it when the work is over. Nothing is global and nothing
is sent anywhere.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ckpt.commit.names import JOBS_PREFIX, TELEMETRY_NAME, step_prefix
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError, Corrupt
from ckpt.format.manifest import MetadataBudget
from storage import CorruptObjectError, KeyNotFoundError, Store, TooLargeError

TELEMETRY_NBYTES_MAX = 16 * 1024 * 1024  # about 40,000 ranks; bounds what a hostile object costs
RANKS_MAX = 1 << 17  # three rows each
LISTS_MAX = 1000  # next to them; texts may have a bracket, too
HISTORY_MAX = 200  # saves before this one whose totals are carried along
FAILURES_MAX = 50
TEXT_MAX = 500  # characters of a text that is kept
WARNINGS_MAX = 20
JOB_NBYTES_MAX = 256 * 1024  # 50 failures of 500 characters of 4 bytes, and room
JOBS_MAX = 20  # newest of a root; the objects of older ones are deleted
BEAT_SECONDS = 120.0  # between two records of a job to which nothing happens

_JOB_KEY = re.compile(r"jobs/([0-9]{14}-[0-9a-f]{16})-[0-9]{8}", re.ASCII)

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


class JobRecord(_TelemetryModel):
    """A job of a Checkpointer, as its coordinator has noted it last, at `noted_unix`: after `step`,
    with saves of the steps `saving` under way. FORMAT.md, "Jobs".

    `failed` counts all saves that failed, `failures` has the newest. It began with the checkpoint
    `restored`, or without one, and first did `first_step`; lost is what came after that, None where
    nobody says how much. `training_seconds` are those between calls of `step`, `blocked_seconds` in
    them. `commit` is that of the script's git repository, with "-dirty" where files are changed.
    `ending` is "" before the job has ended; "died" is never written, but shown of one that another
    has followed.
    """

    format: Literal["shardpoint job"] = "shardpoint job"
    version: Literal[1] = 1
    begun_unix: Unix
    noted_unix: Unix
    host: Text
    ranks: Count
    software: Text
    commit: Name = ""
    restored: Name = ""
    restored_step: Count | None = None
    restore_seconds: Amount = 0.0
    steps_lost: Count | None = None
    seconds_lost: Amount | None = None
    first_step: Count | None = None
    step: Count = 0
    training_seconds: Amount = 0.0
    blocked_seconds: Amount = 0.0
    saving: Annotated[list[Count], Field(max_length=100)] = []
    saved: Count = 0
    failed: Count = 0
    failures: Annotated[list[SaveFailure], Field(max_length=FAILURES_MAX)] = []
    ending: Literal["", "closed", "preempted", "failed", "rejoined", "died"] = ""
    cause: Text = ""

    def after_failure(self, step: int, error: BaseException) -> JobRecord:
        """With a save that has failed just now."""
        failure = SaveFailure(step=step, time_unix=time.time(), error=as_text(error))
        failures = [*self.failures, failure][-FAILURES_MAX:]
        return self.model_copy(update={"failed": self.failed + 1, "failures": failures})

    def state(self, now_unix: float) -> str:
        """Its `ending`, or "running"; "silent" where it says nothing, because it hangs or died."""
        # Two records are missing: one may be late, as when the store is slow.
        is_silent = now_unix - self.noted_unix > 2.5 * BEAT_SECONDS
        return self.ending or ("silent" if is_silent else "running")


def as_text(error: BaseException) -> str:
    """An error as it is kept."""
    text = f"{type(error).__name__}: {error}"[:TEXT_MAX]
    return text.encode("utf-8", "replace").decode()  # what is no Unicode, JSON cannot have


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

    @model_validator(mode="after")
    def _check_shapes(self) -> Telemetry:
        ranks = len(self.blocked_us)
        columns: tuple[Sequence[list[int]], ...] = (self.started_us, self.took_us, self.nbytes)
        if {len(self.retries), *map(len, columns)} != {ranks}:
            raise ValueError("columns have different numbers of ranks")
        if {*map(len, chain(*columns))} - {len(self.phases)}:
            raise ValueError("rows have different numbers of phases")
        return self


def encode_telemetry(telemetry: Telemetry) -> bytes:
    """JSON in UTF-8. Raises ValueError when it is larger than a reader accepts."""
    data = telemetry.model_dump_json().encode()
    # What no reader would take is not written either: it would only cost space.
    if len(data) > TELEMETRY_NBYTES_MAX:
        raise ValueError(f"{len(data)} bytes of telemetry; at most {TELEMETRY_NBYTES_MAX} are kept")
    return data


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


def job_keys(store: Store) -> list[list[str]]:
    """The keys of the records of each job, the oldest job and record first. One listing."""
    keys: dict[str, list[str]] = {}
    for info in store.list(JOBS_PREFIX):
        if match := _JOB_KEY.fullmatch(info.key):
            keys.setdefault(match[1], []).append(info.key)
    return list(keys.values())


def read_jobs(store: Store, known: Mapping[str, JobRecord]) -> dict[str, JobRecord]:
    """The newest jobs of a root, oldest first, by the keys of their records. Those of `known` are
    not read again; what cannot be read is left out, and logged.
    """
    jobs = dict[str, JobRecord]()
    # The newest record of each: it has all that those before it said.
    for *_, key in job_keys(store)[-JOBS_MAX:]:
        try:
            jobs[key] = known.get(key) or JobRecord.model_validate_json(
                store.get_bounded(key, JOB_NBYTES_MAX)
            )
        except (KeyNotFoundError, CorruptObjectError, TooLargeError, ValidationError) as error:
            logger.warning("%s/%s cannot be read: %s", store.url, key, error)
    return jobs


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

    def __init__(self) -> None:
        self._spans: list[PhaseSpan] = []
        self._counters: dict[str, float] = {}
        self._lock = threading.Lock()
        self.newest = "", 0  # the phase that began last, and what it moves, of one under way

    @contextmanager
    def span(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """The block is `phase`, and moves `nbytes`; it is recorded when it fails, too."""
        # Without the lock: one assignment, which the thread that logs progress reads.
        self.newest = phase, nbytes
        # Two clocks: ranks are laid side by side by the time of day, which may be set meanwhile.
        start_unix, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._spans.append(PhaseSpan(phase, start_unix, seconds, nbytes))

    def count(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`, which starts at zero."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def spans(self) -> tuple[PhaseSpan, ...]:
        """What was recorded so far, in the order in which the phases ended."""
        return tuple(self._spans)

    def counters(self) -> dict[str, float]:
        """All counters by name."""
        return dict(self._counters)


class JsonLines(logging.Formatter):
    """Formats every record as one line of JSON: time, level, logger, message, and the numbers that
    the library logs next to the message.

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


logger = logging.getLogger(__name__)

# In the order in which a save passes through them, which is that of the columns of reports.
PHASES = ("attempt", "flatten", "stage", "digest", "write", "wait", "parts", "manifest", "commit")
WORK = ("flatten", "stage", "digest", "write")  # where a slow rank keeps the others waiting
MIB = 1024 * 1024


class RankReport(NamedTuple):
    """What one rank reports of a save to the coordinator: its spans, the seconds that its training
    stood still, and how many requests to the store it had to repeat.
    """

    spans: tuple[PhaseSpan, ...]
    blocked_seconds: float
    retries: int

    def encode(self) -> bytes:
        """A few hundred bytes of msgpack: the coordinator decodes one of each rank."""
        return bytes(msgpack.packb(self))

    @classmethod
    def decode(cls, data: bytes) -> RankReport:
        """The inverse of `encode`."""
        spans, blocked_seconds, retries = msgpack.unpackb(data, use_list=False)
        return cls(tuple(map(PhaseSpan._make, spans)), blocked_seconds, retries)

    def by_phase(self) -> dict[str, PhaseSpan]:
        """All times that this rank was in a phase as one, from the first on."""
        phases: dict[str, PhaseSpan] = {}
        for span in self.spans:
            phase, start, seconds, nbytes = span
            if (before := phases.get(phase)) is not None:
                start = min(start, before.start_unix)
                seconds, nbytes = seconds + before.seconds, nbytes + before.nbytes
                span = PhaseSpan(phase, start, seconds, nbytes)
            phases[phase] = span
        return phases

    def begun_unix(self, otherwise: float) -> float:
        """When this rank began."""
        return min(map(attrgetter("start_unix"), self.spans), default=otherwise)


def totals_of(
    reports: Sequence[RankReport],
    step: int,
    attempt: str,
    *,
    nbytes: int,
    now_unix: float,
    nbytes_referenced: int = 0,
    warnings: int = 0,
) -> SaveTotals:
    """A save that was just committed as a whole, from the reports of all ranks, in rank order."""
    staged_nbytes, slowest, most = 0, 0, [-1.0]
    blocked_seconds, retries = 0.0, 0
    for rank, one in enumerate(reports):
        blocked_seconds, retries = max(blocked_seconds, one.blocked_seconds), retries + one.retries
        phases = one.by_phase()
        staged_nbytes += phases["stage"].nbytes if "stage" in phases else 0
        work = [phases[name].seconds if name in phases else 0.0 for name in WORK]
        # By work, because those who wait for the slowest take as long as it does.
        if sum(work) > sum(most):
            slowest, most = rank, work
    return SaveTotals(
        step=step,
        attempt=attempt,
        committed_unix=now_unix,
        seconds=max(0.0, now_unix - reports[0].begun_unix(now_unix)),
        blocked_seconds=blocked_seconds,
        nbytes=nbytes,
        nbytes_referenced=nbytes_referenced,
        staged_nbytes=staged_nbytes,
        retries=retries,
        ranks=len(reports),
        slowest_rank=slowest,
        slowest_phase=WORK[most.index(max(most))],
        slowest_seconds=max(most),
        warnings=warnings,
    )


def log_saved(totals: SaveTotals, path: str) -> None:
    """One line for people, with the same as `record.ckpt` for programs."""
    fields = totals.model_dump(exclude={"warnings"})
    fields |= {"event": "saved", "path": path, "mib_per_second": totals.nbytes_per_second / MIB}
    logger.info(
        "saved step %d in %.2f s: training blocked %.1f ms, %.1f MiB at %.1f MiB/s, "
        "%d retries, slowest rank %d (%s %.2f s): %s",
        totals.step,
        totals.seconds,
        1000 * totals.blocked_seconds,
        totals.nbytes / MIB,
        totals.nbytes_per_second / MIB,
        totals.retries,
        totals.slowest_rank,
        totals.slowest_phase,
        totals.slowest_seconds,
        path,
        extra={"ckpt": fields},
    )


class SaveHistory:
    """The saves of a root, those of earlier processes too, as the coordinator knows them. For one
    session.
    """

    def __init__(self) -> None:
        self._totals: list[SaveTotals] = []
        self._is_recalled = False

    def saved(self, totals: SaveTotals) -> None:
        """Note a save, for those after it."""
        self._totals = [*self._totals, totals][-HISTORY_MAX:]

    def recall(self, store: Store, live_of: Callable[[], Sequence[LiveEntry]]) -> None:
        """Once: take over the history that the newest of the live checkpoints carries."""
        if self._is_recalled:
            return
        live = live_of()
        # Not before: when the log could not be read, the next save tries again.
        self._is_recalled = True
        if not live:
            return
        before = read_telemetry(store, live[-1].prefix)
        if before is not None:
            self._totals = [*before.history, before.totals, *self._totals][-HISTORY_MAX:]

    def describe(
        self, totals: SaveTotals, reports: Sequence[RankReport], warnings: Sequence[str]
    ) -> Telemetry:
        """One save in full, with what is known of those before it."""
        begun = reports[0].begun_unix(totals.committed_unix)
        of_ranks = [one.by_phase() for one in reports]
        seen = set[str]().union(*of_ranks)
        phases = [phase for phase in PHASES if phase in seen]
        # A phase that a rank did not pass through begins at zero and takes nothing.
        none = PhaseSpan("", begun, 0.0, 0)
        rows = [[one.get(phase, none) for phase in phases] for one in of_ranks]
        return Telemetry(
            totals=totals,
            begun_unix=begun,
            phases=phases,
            started_us=[[_us(span.start_unix - begun) for span in row] for row in rows],
            took_us=[[_us(span.seconds) for span in row] for row in rows],
            nbytes=[[span.nbytes for span in row] for row in rows],
            blocked_us=[_us(report.blocked_seconds) for report in reports],
            retries=[one.retries for one in reports],
            warnings=[text[:TEXT_MAX] for text in warnings[:WARNINGS_MAX]],
            history=[one for one in self._totals if one.attempt != totals.attempt][-HISTORY_MAX:],
        )


def _us(seconds: float) -> int:
    """Clocks of ranks differ: what seems to lie before the beginning counts from there."""
    return max(0, round(seconds * 1e6))


def write_telemetry(store: Store, telemetry: Telemetry) -> None:
    """Keep it next to the MANIFEST. A failure is logged: only the report misses it."""
    totals = telemetry.totals
    key = step_prefix(totals.step, totals.attempt) + TELEMETRY_NAME
    try:
        data = encode_telemetry(telemetry)
        # Not durable: no checkpoint needs it, and the training would pay for the sync.
        with store.create(key, len(data), part_nbytes=len(data), durable=False) as writer:
            writer.write_part(0, [memoryview(data)])
    except (CheckpointError, OSError, ValueError) as error:
        logger.warning("step %d is saved, but its telemetry is not: %s", totals.step, error)


def read_telemetry(
    store: Store, prefix: str, budget: MetadataBudget | None = None
) -> Telemetry | None:
    """What lies next to the MANIFEST below `prefix`; None when nothing does, or nothing that can be
    read: that is logged. With a `budget`, of which it takes, the rows of ranks are left out.
    """
    key = prefix + TELEMETRY_NAME
    try:
        data = store.get_bounded(key, TELEMETRY_NBYTES_MAX)
        if budget is None:
            return decode_telemetry(data)
        most = 2 * len(data) + 80 * data.count(b"[") + 40 * data.count(b",")  # what decoding takes
        with budget.using(most, key):
            rows = ("started_us", "took_us", "nbytes", "blocked_us", "retries")
            return decode_telemetry(data).model_copy(update={name: [] for name in rows})
    except KeyNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        logger.warning("%s/%s cannot be read: %s", store.url, key, error)
        return None
