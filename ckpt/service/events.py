"""Events that a Checkpointer notifies its observers of: how saves and restores end.

    def alert(event):
        if isinstance(event, SaveFailed):
            page_somebody(event.step, event.error)

    ckpt.Checkpointer(state, url, observers=[alert, SaveMetrics()])

Every rank notifies its own observers, in the thread that trains. `RankMissed` and `RankHeard` come
from another thread, at any time, because the thread that trains may be waiting for that rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpt.saving.task import SaveReport
from ckpt.service.restore import RestoreReport
from ckpt.telemetry.record import MIB, RankReport
from ckpt.world.attendance import Concern

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveSucceeded:
    """A checkpoint exists. `seconds` from its beginning to its commit; `blocked_seconds` is how
    long training was blocked by it on this rank.
    """

    report: SaveReport
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save failed."""

    step: int
    error: Exception


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """A save was dropped, or not begun, because another one was in flight."""

    step: int


@dataclass(frozen=True, slots=True)
class NearSaved:
    """A near checkpoint exists on the hosts; `seconds` and `blocked_seconds` as of SaveSucceeded.
    The wait for the near save before it, where that was still under way, is in `blocked_seconds`.

    Reported when this rank calls `step` after it.
    """

    report: SaveReport
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True, slots=True)
class NearFailed:
    """A near save failed: a tier is full, for one. Training and durable saves continue;
    the near checkpoint before it still counts.
    """

    step: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Restored:
    """The state was filled from a checkpoint; `seconds` is how long that took."""

    report: RestoreReport
    seconds: float


@dataclass(frozen=True, slots=True)
class RankMissed:
    """A rank is silent, or has made no step for far longer than the others; see `concern`."""

    concern: Concern


@dataclass(frozen=True, slots=True)
class RankHeard:
    """What `RankMissed` reported is over: the rank answers, or makes steps, again."""

    concern: Concern


SaveEvent: TypeAlias = (
    SaveSucceeded
    | SaveFailed
    | SaveSkipped
    | NearSaved
    | NearFailed
    | Restored
    | RankMissed
    | RankHeard
)
Observer: TypeAlias = Callable[[SaveEvent], object]


def notify(observers: Sequence[Observer], event: SaveEvent) -> None:
    """Call every observer. What one raises is logged: it must not end a training."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer of saves has failed on %s", type(event).__name__)


def log_restored(report: RestoreReport, seconds: float) -> None:
    """One line for people, with the same as `record.ckpt` for programs."""
    by_phase = RankReport(report.spans, 0.0, 0).by_phase()
    phases = {phase: span.seconds for phase, span in by_phase.items()}
    # On a coarse clock a small state is restored in no time.
    rate = report.nbytes_read / seconds / MIB if seconds else 0.0
    fields = {
        "event": "restored",
        "step": report.step,
        "attempt": report.attempt,
        "seconds": seconds,
        "nbytes_read": report.nbytes_read,
        "mib_per_second": rate,
        "skipped": len(report.skipped),
        "phase_seconds": phases,
    }
    logger.info(
        "restored step %d (%s) in %.2f s: %.1f MiB read here at %.1f MiB/s (%s)",
        report.step,
        report.attempt,
        seconds,
        report.nbytes_read / MIB,
        rate,
        ", ".join(f"{phase} {spent:.2f} s" for phase, spent in phases.items()),
        extra={"ckpt": fields},
    )
