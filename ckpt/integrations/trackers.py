"""Saves and restores in trackers of experiments: TensorBoard, Weights & Biases, MLflow,
OpenTelemetry.

    ckpt.Checkpointer(state, url, observers=[TensorBoardSaves(SummaryWriter("runs/tb"))])

Each takes the writer, run, client or meter that the training has already, and imports nothing. Give
it to one rank, as a rule rank 0, unless every rank has a run of its own: the numbers of a save as a
whole are the same on all ranks. A tracker that raises is logged and does not end the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.service import events

PREFIX = "ckpt/"


def step_of(event: events.SaveEvent) -> int | None:
    """The step that an event is about; None for events about ranks."""
    if isinstance(event, events.SaveSucceeded | events.NearSaved | events.Restored):
        return event.report.step
    return None if isinstance(event, events.RankMissed | events.RankHeard) else event.step


def scalars_of(event: events.SaveEvent) -> dict[str, float]:
    """What an event says in numbers, by name; empty for events about ranks.

    - save_seconds: from the begin of a save to its commit, by which the checkpoint lags behind the
      training; save_blocked_seconds: how long training was blocked, on this rank; saved_bytes and
      retries, of all ranks
    - save_failed, save_skipped: 1 for each
    - near_seconds, near_blocked_seconds, near_saved_bytes: as those of a save, of a near one;
      near_failed: 1 for each
    - restore_seconds, restore_read_bytes (of this rank), restore_skipped: damaged ones skipped
    """
    if isinstance(event, events.SaveSucceeded):
        totals = event.report.totals
        return {
            "save_seconds": event.seconds,
            "save_blocked_seconds": event.blocked_seconds,
            "saved_bytes": float(totals.nbytes),
            "retries": float(totals.retries),
        }
    if isinstance(event, events.NearSaved):
        return {
            "near_seconds": event.seconds,
            "near_blocked_seconds": event.blocked_seconds,
            "near_saved_bytes": float(event.report.totals.nbytes),
        }
    if isinstance(event, events.SaveFailed):
        return {"save_failed": 1.0}
    if isinstance(event, events.NearFailed):
        return {"near_failed": 1.0}
    if isinstance(event, events.SaveSkipped):
        return {"save_skipped": 1.0}
    if isinstance(event, events.Restored):
        return {
            "restore_seconds": event.seconds,
            "restore_read_bytes": float(event.report.nbytes_read),
            "restore_skipped": float(len(event.report.skipped)),
        }
    return {}


def failure_text(event: events.SaveFailed) -> str:
    """A failed save in one line."""
    return f"the save of step {event.step} has failed: {type(event.error).__name__}: {event.error}"


# TensorBoard -----------------------------------------------------------------------------------


class _Observer:
    """`note(name, number, step)` is called for each number, `fail(text, step)` for a failure."""

    def __init__(
        self, note: Callable[[str, float, Any], object], fail: Callable[[str, Any], object]
    ) -> None:
        self._note, self._fail = note, fail

    def __call__(self, event: events.SaveEvent) -> None:
        """Note an event of a Checkpointer."""
        step = step_of(event)
        for name, value in scalars_of(event).items():
            self._note(PREFIX + name, value, step)
        if isinstance(event, events.SaveFailed):
            self._fail(failure_text(event), step)


class TensorBoardSaves(_Observer):
    """An observer that notes saves and restores as scalars `ckpt/...`, and failures as texts."""

    def __init__(self, writer: Any) -> None:
        super().__init__(
            lambda name, number, step: writer.add_scalar(name, number, step),
            lambda text, step: writer.add_text(f"{PREFIX}failures", text, step),
        )


# Weights & Biases ------------------------------------------------------------------------------


class WandbSaves:
    """An observer that notes saves and restores as `ckpt/...` over `ckpt/step`, with an alert for
    each failed save unless `alerts` is False.

    Not over the run's own steps: those must ascend, and a save is known some steps after it began.
    """

    def __init__(self, run: Any, *, alerts: bool = True) -> None:
        self._run = run
        self._alerts = alerts
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def __call__(self, event: events.SaveEvent) -> None:
        """Note an event of a Checkpointer."""
        if not (scalars := scalars_of(event)):
            return
        named: dict[str, Any] = {PREFIX + name: value for name, value in scalars.items()}
        self._run.log({**named, f"{PREFIX}step": step_of(event)})
        if self._alerts and isinstance(event, events.SaveFailed):
            self._run.alert(title="A save has failed", text=failure_text(event))


# MLflow ----------------------------------------------------------------------------------------


class MlflowSaves(_Observer):
    """An observer that notes saves and restores as metrics `ckpt/...` of a run, and the newest
    failure as its tag `ckpt.failure`.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        super().__init__(
            lambda name, number, step: client.log_metric(run_id, name, number, step=step),
            # MLflow takes tags of at most 5,000 characters.
            lambda text, _: client.set_tag(run_id, "ckpt.failure", text[:5000]),
        )


# OpenTelemetry ---------------------------------------------------------------------------------


class OpenTelemetrySaves:
    """An observer that counts saves by outcome (`ckpt.saves`) and restores (`ckpt.restores`), their
    bytes (`ckpt.save.io`, `ckpt.restore.io`), requests that were repeated (`ckpt.retries`), and
    measures `ckpt.save.duration`, `ckpt.save.blocked` and `ckpt.restore.duration` in seconds. Near
    saves are `ckpt.near_saves`, `ckpt.near_save.duration` and `ckpt.near_save.blocked`.
    """

    def __init__(self, meter: Any) -> None:
        def counter(name: str, unit: str, about: str) -> Any:
            return meter.create_counter(name, unit=unit, description=about)

        def seconds(name: str, about: str) -> Any:
            return meter.create_histogram(name, unit="s", description=about).record

        saves = counter("ckpt.saves", "{save}", "Saves by how they ended.")
        near = counter("ckpt.near_saves", "{save}", "Near saves by how they ended.")
        restores = counter("ckpt.restores", "{restore}", "Restores that succeeded.")
        self._counters: dict[type[events.SaveEvent], tuple[Any, Any]] = {
            events.SaveSucceeded: (saves, {"outcome": "saved"}),
            events.SaveFailed: (saves, {"outcome": "failed"}),
            events.SaveSkipped: (saves, {"outcome": "skipped"}),
            events.NearSaved: (near, {"outcome": "saved"}),
            events.NearFailed: (near, {"outcome": "failed"}),
            events.Restored: (restores, None),
        }
        written = counter("ckpt.save.io", "By", "Bytes of saves, of all ranks together.")
        read = counter("ckpt.restore.io", "By", "Bytes that this rank has read.")
        retries = counter("ckpt.retries", "{request}", "Requests of saves, repeated.")
        self._scalars = {
            "saved_bytes": written.add,
            "restore_read_bytes": read.add,
            "retries": retries.add,
            "save_seconds": seconds("ckpt.save.duration", "From the begin of a save to commit."),
            "save_blocked_seconds": seconds("ckpt.save.blocked", "How long it blocked training."),
            "restore_seconds": seconds("ckpt.restore.duration", "Duration of a restore."),
            "near_seconds": seconds("ckpt.near_save.duration", "From its begin to its record."),
            "near_blocked_seconds": seconds("ckpt.near_save.blocked", "Training was blocked."),
        }

    def __call__(self, event: events.SaveEvent) -> None:
        """Count an event of a Checkpointer."""
        if type(event) in self._counters:
            counter, attributes = self._counters[type(event)]
            counter.add(1, attributes)
        for name, amount in scalars_of(event).items():
            if name in self._scalars:
                self._scalars[name](amount)
