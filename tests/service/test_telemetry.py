"""Spans and counters: what a recorder keeps, and which phases saves and loads report."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import ckpt
from ckpt.telemetry import record
from ckpt.telemetry.record import PhaseSpan, Recorder


def test_a_recorder_keeps_spans_and_counters_of_failed_phases_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    clocks = SimpleNamespace(time=lambda: 100.0, perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(record, "time", clocks)
    recorder = Recorder()
    with recorder.span("stage", 5):
        recorder.count("retries")
    with pytest.raises(ValueError, match="planted"), recorder.span("write"):
        recorder.count("retries", 2)
        raise ValueError("planted")
    assert recorder.spans() == (
        PhaseSpan("stage", 100.0, 1.0, 5),
        PhaseSpan("write", 100.0, 1.0, 0),
    )
    assert recorder.counters() == {"retries": 3}


def test_saves_and_loads_tell_their_phases() -> None:
    state = {"t": torch.arange(1000)}
    url = "memory://telemetry"
    saved = ckpt.save(state, url, step=1)
    phases = {"attempt", "flatten", "write", "wait", "parts", "manifest", "commit"}
    assert {span.phase for span in saved.spans} == phases
    pending = ckpt.async_save(state, url, step=2)
    report = pending.result()
    assert {span.phase for span in report.spans} == phases | {"stage"}
    assert report.counters["blocking_bytes"] == 8000
    assert pending.blocked_seconds > 0
    loaded = ckpt.load(state, url)
    assert [span.phase for span in loaded.spans] == ["manifest", "bind", "plan", "read", "finish"]
    assert loaded.counters["read_bytes"] == 8000
