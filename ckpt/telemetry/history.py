"""How saves went: the coordinator logs one line for each, and writes one small object beside the
MANIFEST.

The report of a rank travels with its part, so that it costs no round. Nothing here can fail a save:
when the history is written, the save is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack

from ckpt.commit.names import TELEMETRY_NAME, step_prefix
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.telemetry.record import (
    FAILURES_MAX,
    HISTORY_MAX,
    TELEMETRY_NBYTES_MAX,
    TEXT_MAX,
    WARNINGS_MAX,
    PhaseSpan,
    SaveFailure,
    SaveTotals,
    Telemetry,
    decode_telemetry,
    encode_telemetry,
    telemetry_memory,
)
from storage import KeyNotFoundError, Store

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

    def seconds_in(self, phase: str) -> float:
        """How long this rank was in a phase, all times together."""
        return sum(span.seconds for span in self.spans if span.phase == phase)

    @property
    def work_seconds(self) -> float:
        """How long this rank worked on its share, waits left out."""
        return sum(self.seconds_in(phase) for phase in WORK)


class CommittedSave(NamedTuple):
    """A save that the coordinator has just committed."""

    step: int
    attempt: str
    nbytes: int
    nbytes_referenced: int
    warnings: Sequence[str]


def totals_of(
    committed: CommittedSave, reports: Sequence[RankReport], *, now_unix: float
) -> SaveTotals:
    """The save as a whole, from the reports of all ranks, in rank order."""
    # By work, because those who wait for the slowest take as long as it does.
    slowest = max(range(len(reports)), key=lambda rank: reports[rank].work_seconds)
    phase = max(WORK, key=reports[slowest].seconds_in)
    return SaveTotals(
        step=committed.step,
        attempt=committed.attempt,
        committed_unix=now_unix,
        seconds=max(0.0, now_unix - _begun_unix(reports[0], now_unix)),
        blocked_seconds=max(0.0, *(one.blocked_seconds for one in reports)),
        nbytes=committed.nbytes,
        nbytes_referenced=committed.nbytes_referenced,
        staged_nbytes=sum(s.nbytes for one in reports for s in one.spans if s.phase == "stage"),
        retries=sum(one.retries for one in reports),
        ranks=len(reports),
        slowest_rank=slowest,
        slowest_phase=phase,
        slowest_seconds=reports[slowest].seconds_in(phase),
        warnings=len(committed.warnings),
    )


def _begun_unix(one: RankReport, otherwise: float) -> float:
    return min((span.start_unix for span in one.spans), default=otherwise)


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
        self._failures: list[SaveFailure] = []
        self._is_recalled = False

    def failed(self, step: int, error: BaseException) -> None:
        """Note a save that failed; it is kept with the next one that succeeds."""
        # The step itself may be why it failed; readers would refuse a record with such a step.
        if type(step) is not int or not 0 <= step < 2**63:
            return
        text = f"{type(error).__name__}: {error}"[:TEXT_MAX]
        failure = SaveFailure(step=step, time_unix=time.time(), error=text)
        self._failures = [*self._failures, failure][-FAILURES_MAX:]

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
            self._failures = [*before.failures, *self._failures][-FAILURES_MAX:]

    def describe(
        self, totals: SaveTotals, reports: Sequence[RankReport], warnings: Sequence[str]
    ) -> Telemetry:
        """One save in full, with what is known of those before it."""
        begun = _begun_unix(reports[0], totals.committed_unix)
        seen = {span.phase for one in reports for span in one.spans}
        phases = [phase for phase in PHASES if phase in seen]
        rows = [_row(one, phases, begun) for one in reports]
        return Telemetry(
            totals=totals,
            begun_unix=begun,
            phases=phases,
            started_us=[[cell[0] for cell in row] for row in rows],
            took_us=[[cell[1] for cell in row] for row in rows],
            nbytes=[[cell[2] for cell in row] for row in rows],
            blocked_us=[_us(one.blocked_seconds) for one in reports],
            retries=[one.retries for one in reports],
            warnings=[text[:TEXT_MAX] for text in warnings[:WARNINGS_MAX]],
            history=[one for one in self._totals if one.attempt != totals.attempt][-HISTORY_MAX:],
            failures=self._failures,
        )


def _row(one: RankReport, phases: Sequence[str], begun_unix: float) -> list[tuple[int, int, int]]:
    cells = []
    for phase in phases:
        spans = [span for span in one.spans if span.phase == phase]
        start = min((span.start_unix for span in spans), default=begun_unix)
        nbytes = sum(span.nbytes for span in spans)
        cells.append((_us(start - begun_unix), _us(one.seconds_in(phase)), nbytes))
    return cells


def _us(seconds: float) -> int:
    """Clocks of ranks differ: what seems to lie before the beginning counts from there."""
    return max(0, round(seconds * 1e6))


def write_telemetry(store: Store, telemetry: Telemetry) -> None:
    """Keep it beside the MANIFEST. A failure is logged: nothing but the report misses it."""
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
    """What lies beside the MANIFEST below `prefix`; None when nothing does, or nothing that can be
    read: that is logged. With a `budget`, of which it takes, the rows of ranks are left out.
    """
    key = prefix + TELEMETRY_NAME
    try:
        data = store.get_bounded(key, TELEMETRY_NBYTES_MAX)
        if budget is None:
            return decode_telemetry(data)
        with budget.using(telemetry_memory(data), key):
            return decode_telemetry(data).without_rows()
    except KeyNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        logger.warning("%s/%s cannot be read: %s", store.url, key, error)
        return None
