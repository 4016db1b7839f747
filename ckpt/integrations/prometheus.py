"""Metrics of saves and restores for Prometheus. Needs the extra `[metrics]`: prometheus-client.

    from prometheus_client import start_http_server

    start_http_server(9400 + rank)
    ckpt.Checkpointer(state, url, observers=[SaveMetrics()])

Every rank counts for itself: sum over ranks for bytes and retries, take the maximum for seconds.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ckpt.service import events
from ckpt.telemetry.record import PhaseSpan, RankReport

BLOCKED = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
LONG = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)


class SaveMetrics:
    """An observer for `Checkpointer(observers=[...])`: one for a registry and process.

    The metrics, with base units in their names:

    - ckpt_saves_total{outcome}: saves that ended as "saved", "failed" or "skipped"
    - ckpt_save_seconds: from begin to commit; ckpt_save_phase_seconds{phase}: of it on this rank
    - ckpt_save_blocked_seconds: how long a save blocked the training, on this rank
    - ckpt_save_written_bytes_total, ckpt_save_staged_bytes_total, ckpt_retries_total: of this rank
    - ckpt_save_warnings_total: such as replicas that differ
    - ckpt_last_saved_step, ckpt_last_saved_timestamp_seconds, ckpt_last_saved_bytes: of the newest
      checkpoint as a whole; `time() - ckpt_last_saved_timestamp_seconds` is what would be lost now
    - ckpt_near_saves_total{outcome}, ckpt_near_blocked_seconds, ckpt_last_near_step: near saves
      that ended as "saved" or "failed", how long each blocked the training here, the newest step
    - ckpt_slowest_rank, ckpt_slowest_rank_seconds: who was at work longest in the newest save
    - ckpt_restores_total, ckpt_restore_seconds, ckpt_restore_phase_seconds{phase},
      ckpt_restore_read_bytes_total, ckpt_restored_step
    - ckpt_ranks_missed: ranks that are silent or behind now, as far as this rank has noticed
    - ckpt_restore_skipped_total: damaged checkpoints that were skipped
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        to = REGISTRY if registry is None else registry

        counter, gauge = partial(Counter, registry=to), partial(Gauge, registry=to)
        long = partial(Histogram, registry=to, buckets=LONG)
        blocked = partial(Histogram, registry=to, buckets=BLOCKED)
        # With all their outcomes from the beginning: a rate over a series that appears with the
        # first failure does not see that one.
        saves = counter("ckpt_saves", "Saves by how they ended.", ("outcome",))
        near = counter("ckpt_near_saves", "Near saves by how they ended.", ("outcome",))
        self._counters: dict[type[events.SaveEvent], Counter] = {
            events.SaveSucceeded: saves.labels("saved"),
            events.SaveFailed: saves.labels("failed"),
            events.SaveSkipped: saves.labels("skipped"),
            events.NearSaved: near.labels("saved"),
            events.NearFailed: near.labels("failed"),
            events.Restored: counter("ckpt_restores", "Restores that succeeded."),
        }
        self._seconds = long("ckpt_save_seconds", "From the begin of a save to commit.")
        self._phases = long("ckpt_save_phase_seconds", "Phases of saves on this rank.", ("phase",))
        self._blocked = blocked(
            "ckpt_save_blocked_seconds", "How long a save blocked the training."
        )
        self._written = counter("ckpt_save_written_bytes", "Bytes that this rank has written.")
        self._staged = counter("ckpt_save_staged_bytes", "Bytes that this rank has copied.")
        self._retries = counter("ckpt_retries", "Requests of saves that were repeated.")
        self._warnings = counter("ckpt_save_warnings", "Warnings of saves.")
        self._step = gauge("ckpt_last_saved_step", "Step of the newest checkpoint.")
        self._time = gauge("ckpt_last_saved_timestamp_seconds", "When it was committed.")
        self._nbytes = gauge("ckpt_last_saved_bytes", "Bytes of it, all ranks together.")
        self._slowest = gauge("ckpt_slowest_rank", "Rank that was at work longest for it.")
        self._slowest_seconds = gauge("ckpt_slowest_rank_seconds", "What took it longest.")
        self._near_blocked = blocked(
            "ckpt_near_blocked_seconds", "How long a near save blocked the training."
        )
        self._near_step = gauge("ckpt_last_near_step", "Step of the newest near checkpoint.")
        self._skipped = counter("ckpt_restore_skipped", "Checkpoints that were skipped.")
        self._restore_seconds = long("ckpt_restore_seconds", "Duration of a restore.")
        self._restore_phases = long(
            "ckpt_restore_phase_seconds", "Phases of restores on this rank.", ("phase",)
        )
        self._read = counter("ckpt_restore_read_bytes", "Bytes that this rank has read.")
        self._missing: set[int] = set()
        self._missed = gauge("ckpt_ranks_missed", "Ranks that are silent or behind.")
        self._restored_step = gauge("ckpt_restored_step", "Step of the newest restore.")

    def __call__(self, event: events.SaveEvent) -> None:
        """Count an event of a Checkpointer."""
        if type(event) in self._counters:
            self._counters[type(event)].inc()
        if isinstance(event, events.SaveSucceeded):
            self._saved(event)
        elif isinstance(event, events.Restored):
            self._restored(event)
        elif isinstance(event, events.NearSaved):
            self._near_blocked.observe(event.blocked_seconds)
            self._near_step.set(event.report.step)
        elif isinstance(event, events.RankMissed | events.RankHeard):
            self._missing.discard(event.concern.rank)
            self._missing |= {event.concern.rank} if isinstance(event, events.RankMissed) else set()
            self._missed.set(len(self._missing))

    def _saved(self, event: events.SaveSucceeded) -> None:
        report, totals = event.report, event.report.totals
        self._seconds.observe(event.seconds)
        self._blocked.observe(event.blocked_seconds)
        _observe(self._phases, report.spans)
        self._written.inc(sum(span.nbytes for span in report.spans if span.phase == "write"))
        self._staged.inc(sum(span.nbytes for span in report.spans if span.phase == "stage"))
        self._retries.inc(report.counters.get("retries", 0))
        self._warnings.inc(len(report.warnings))
        self._step.set(report.step)
        self._time.set(totals.committed_unix)
        self._nbytes.set(totals.nbytes + totals.nbytes_referenced)
        self._slowest.set(totals.slowest_rank)
        self._slowest_seconds.set(totals.slowest_seconds)

    def _restored(self, event: events.Restored) -> None:
        self._restore_seconds.observe(event.seconds)
        _observe(self._restore_phases, event.report.spans)
        self._read.inc(event.report.nbytes_read)
        self._skipped.inc(len(event.report.skipped))
        self._restored_step.set(event.report.step)


def _observe(phases: Histogram, spans: tuple[PhaseSpan, ...]) -> None:
    """One observation for each phase, its spans together."""
    for phase, together in RankReport(spans, 0.0, 0).by_phase().items():
        phases.labels(phase).observe(together.seconds)
