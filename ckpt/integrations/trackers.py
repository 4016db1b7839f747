"""Saves and restores in trackers of experiments: TensorBoard, Weights & Biases, MLflow,
OpenTelemetry.

    ckpt.Checkpointer(state, url, observers=[TensorBoardSaves(SummaryWriter("runs/tb"))])

Each takes the writer, run, client or meter that the training has already, and imports nothing. Give
it to one rank, as a rule rank 0, unless every rank has a run of its own: the numbers of a save as a
whole are the same on all ranks. A tracker that raises is logged and does not end the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckpt.service.events import (
    NearFailed,
    NearSaved,
    Restored,
    SaveEvent,
    SaveFailed,
    SaveSkipped,
    SaveSucceeded,
)

PREFIX = "ckpt/"


def step_of(event: SaveEvent) -> int | None:
    """The step that an event is about; None for events about ranks."""
    if isinstance(event, SaveSucceeded | NearSaved | Restored):
        return event.report.step
    return event.step if isinstance(event, SaveFailed | SaveSkipped | NearFailed) else None


def scalars_of(event: SaveEvent) -> dict[str, float]:
    """What an event says in numbers, by name; empty for events about ranks.

    - save_seconds: from the begin of a save to its commit, by which the checkpoint lags behind the
      training; save_blocked_seconds: how long training was blocked, on this rank; saved_bytes and
      retries, of all ranks
    - save_failed, save_skipped: 1 for each
    - near_seconds, near_blocked_seconds, near_saved_bytes: as those of a save, of a near one;
      near_failed: 1 for each
    - restore_seconds, restore_read_bytes (of this rank), restore_skipped: damaged ones passed over
    """
    if isinstance(event, SaveSucceeded):
        totals = event.report.totals
        return {
            "save_seconds": event.seconds,
            "save_blocked_seconds": event.blocked_seconds,
            "saved_bytes": float(totals.nbytes),
            "retries": float(totals.retries),
        }
    if isinstance(event, NearSaved):
        return {
            "near_seconds": event.seconds,
            "near_blocked_seconds": event.blocked_seconds,
            "near_saved_bytes": float(event.report.totals.nbytes),
        }
    if isinstance(event, SaveFailed):
        return {"save_failed": 1.0}
    if isinstance(event, NearFailed):
        return {"near_failed": 1.0}
    if isinstance(event, SaveSkipped):
        return {"save_skipped": 1.0}
    if isinstance(event, Restored):
        return {
            "restore_seconds": event.seconds,
            "restore_read_bytes": float(event.report.nbytes_read),
            "restore_skipped": float(len(event.report.skipped)),
        }
    return {}


def failure_text(event: SaveFailed) -> str:
    """A failed save in one line."""
    return f"the save of step {event.step} has failed: {type(event.error).__name__}: {event.error}"


# TensorBoard -----------------------------------------------------------------------------------


class ScalarWriter(Protocol):
    """What is used of `torch.utils.tensorboard.SummaryWriter`, and of tensorboardX's."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Note a number."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> Any:
        """Note a text."""


class TensorBoardSaves:
    """An observer that notes saves and restores as scalars `ckpt/...`, and failures as texts."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def __call__(self, event: SaveEvent) -> None:
        """Note an event of a Checkpointer."""
        step = step_of(event)
        for name, value in scalars_of(event).items():
            self._writer.add_scalar(PREFIX + name, value, step)
        if isinstance(event, SaveFailed):
            self._writer.add_text(f"{PREFIX}failures", failure_text(event), step)


# Weights & Biases ------------------------------------------------------------------------------


class WandbRun(Protocol):
    """What is used of `wandb.Run`, which `wandb.init()` returns."""

    def define_metric(self, name: str, step_metric: str) -> Any:
        """Say what a metric is drawn over."""

    def log(self, data: dict[str, Any]) -> Any:
        """Note numbers."""

    def alert(self, title: str, text: str) -> Any:
        """Send a message to the owner of the run."""


class WandbSaves:
    """An observer that notes saves and restores as `ckpt/...` over `ckpt/step`, with an alert for
    each failed save unless `alerts` is False.

    Not over the run's own steps: those must ascend, and a save is known some steps after it began.
    """

    def __init__(self, run: WandbRun, *, alerts: bool = True) -> None:
        self._run = run
        self._alerts = alerts
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def __call__(self, event: SaveEvent) -> None:
        """Note an event of a Checkpointer."""
        scalars = scalars_of(event)
        if not scalars:
            return
        named: dict[str, Any] = {PREFIX + name: value for name, value in scalars.items()}
        self._run.log({**named, f"{PREFIX}step": step_of(event)})
        if self._alerts and isinstance(event, SaveFailed):
            self._run.alert(title="A save has failed", text=failure_text(event))


# MLflow ----------------------------------------------------------------------------------------


class MlflowClient(Protocol):
    """What is used of `mlflow.MlflowClient`."""

    def log_metric(
        self,
        run_id: str,
        key: str,
        value: float,
        timestamp: int | None = None,
        step: int | None = None,
    ) -> Any:
        """Note a number."""

    def set_tag(self, run_id: str, key: str, value: Any) -> Any:
        """Set a text of the run."""


class MlflowSaves:
    """An observer that notes saves and restores as metrics `ckpt/...` of a run, and the newest
    failure as its tag `ckpt.failure`.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def __call__(self, event: SaveEvent) -> None:
        """Note an event of a Checkpointer."""
        step = step_of(event)
        for name, value in scalars_of(event).items():
            self._client.log_metric(self._run_id, PREFIX + name, value, step=step)
        if isinstance(event, SaveFailed):
            # MLflow takes tags of at most 5,000 characters.
            self._client.set_tag(self._run_id, "ckpt.failure", failure_text(event)[:5000])


# OpenTelemetry ---------------------------------------------------------------------------------


class AddingInstrument(Protocol):
    """What is used of a counter of `opentelemetry.metrics`."""

    def add(self, amount: float, attributes: Mapping[str, str] | None = None) -> Any:
        """Count."""


class RecordingInstrument(Protocol):
    """What is used of a histogram of `opentelemetry.metrics`."""

    def record(self, amount: float, attributes: Mapping[str, str] | None = None) -> Any:
        """Measure."""


class MeterLike(Protocol):
    """What is used of `opentelemetry.metrics.Meter`, which `get_meter(name)` returns."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> AddingInstrument:
        """A number that only grows."""

    def create_histogram(
        self, name: str, unit: str = "", description: str = ""
    ) -> RecordingInstrument:
        """A distribution."""


class OpenTelemetrySaves:
    """An observer that counts saves by outcome (`ckpt.saves`) and restores (`ckpt.restores`), their
    bytes (`ckpt.save.io`, `ckpt.restore.io`), requests that were repeated (`ckpt.retries`), and
    measures `ckpt.save.duration`, `ckpt.save.blocked` and `ckpt.restore.duration` in seconds. Near
    saves are `ckpt.near_saves`, `ckpt.near_save.duration` and `ckpt.near_save.blocked`.
    """

    def __init__(self, meter: MeterLike) -> None:
        def counter(name: str, unit: str, about: str) -> AddingInstrument:
            return meter.create_counter(name, unit=unit, description=about)

        def histogram(name: str, about: str) -> RecordingInstrument:
            return meter.create_histogram(name, unit="s", description=about)

        self._saves = counter("ckpt.saves", "{save}", "Saves by how they ended.")
        self._restores = counter("ckpt.restores", "{restore}", "Restores that succeeded.")
        self._written = counter("ckpt.save.io", "By", "Bytes of saves, of all ranks together.")
        self._read = counter("ckpt.restore.io", "By", "Bytes that this rank has read.")
        self._retries = counter("ckpt.retries", "{request}", "Requests of saves, repeated.")
        self._seconds = histogram("ckpt.save.duration", "From the begin of a save to commit.")
        self._blocked = histogram("ckpt.save.blocked", "How long it blocked the training.")
        self._restoring = histogram("ckpt.restore.duration", "Duration of a restore.")
        self._near = counter("ckpt.near_saves", "{save}", "Near saves by how they ended.")
        self._near_seconds = histogram("ckpt.near_save.duration", "From its begin to its record.")
        self._near_blocked = histogram("ckpt.near_save.blocked", "How long it blocked training.")

    def __call__(self, event: SaveEvent) -> None:
        """Count an event of a Checkpointer."""
        scalars = scalars_of(event)
        if isinstance(event, SaveSucceeded):
            self._saves.add(1, {"outcome": "saved"})
            self._written.add(scalars["saved_bytes"])
            self._retries.add(scalars["retries"])
            self._seconds.record(scalars["save_seconds"])
            self._blocked.record(scalars["save_blocked_seconds"])
        elif isinstance(event, SaveFailed):
            self._saves.add(1, {"outcome": "failed"})
        elif isinstance(event, SaveSkipped):
            self._saves.add(1, {"outcome": "skipped"})
        elif isinstance(event, NearSaved):
            self._near.add(1, {"outcome": "saved"})
            self._near_seconds.record(scalars["near_seconds"])
            self._near_blocked.record(scalars["near_blocked_seconds"])
        elif isinstance(event, NearFailed):
            self._near.add(1, {"outcome": "failed"})
        elif isinstance(event, Restored):
            self._restores.add(1)
            self._read.add(scalars["restore_read_bytes"])
            self._restoring.record(scalars["restore_seconds"])
