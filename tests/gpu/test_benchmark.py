"""`make bench-gpu` runs: with the CPU as the device, in small, and on a device's kind of profile.

Method: one rank measures everything once; figures are not looked at. What only a device has (its
events in a profile, its statistics of memory) is given as values.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from tests.versions import TORCH

if TORCH < (2, 7):
    pytest.skip("DCP of this torch has no stager to compare with", allow_module_level=True)

import benchmarks.on_device as benchmark
from benchmarks.on_device import PARTS, Asked, Block, Engine, counted, rank_main
from tests.gpu.setups import SETUPS, run


@pytest.mark.ranks
def test_all_of_it_runs_with_the_cpu_as_the_device(tmp_path: Path) -> None:
    parts = tuple(part for part in PARTS if part != "compiled")  # torch's compiler takes a minute
    rows = tmp_path / "rows.json"
    asked = Asked("cpu", (8,), 1, 0.02, str(tmp_path), parts, str(rows))
    (blocks,) = run(SETUPS["one"]("cpu"), rank_main, asked, timeout_seconds=170, forced=False)
    assert [json.loads(line)["title"] for line in rows.read_text().splitlines()] == [
        block.title for block in blocks
    ]
    assert not any("FAILED" in block.title for block in blocks), blocks
    lines = [line for block in blocks for line in block.lines]
    for what in (
        *("time of a step, of torch's", "operators", "time of a step, of DDP's", "blocked, ours"),
        *("its copies, of the bus", "a recovery, of the bus", "sharded, of torch's time"),
        *("blocked, DCP, a stager kept", "two steps with a save, ours"),
    ):
        assert any(what in line and "(bar " in line for line in lines), (what, lines)
    assert sum("speed of a load" in line for line in lines) == 2
    assert "peak memory: not measured, torch counts none for cpu" in lines
    assert "kernels: not measured, the profiler sees none of cpu" in lines


def event(name: str, *, on: DeviceType = DeviceType.CPU, named_range: bool = False) -> Any:
    return SimpleNamespace(name=name, device_type=on, is_user_annotation=named_range)


def test_a_profile_is_counted_by_kind() -> None:
    events = [
        event("aten::copy_"),
        event("cudaStreamSynchronize"),
        event("cudaEventSynchronize"),
        event("cudaDeviceSynchronize"),
        event("cudaStreamWaitEvent"),
        event("Memcpy DtoD (Device -> Device)", on=DeviceType.CUDA),
        event("Memset (Device)", on=DeviceType.CUDA),
        event("ncclDevKernel_AllGather_RING_LL", on=DeviceType.CUDA),
        event("FSDP::all_gather", on=DeviceType.CUDA, named_range=True),
    ]
    wanted = {"operators": 1, "host waits": 2, "copies and fills by the bus": 2, "kernels": 1}
    assert counted(events) == Counter(wanted)


def test_peaks_of_steps_are_counted_from_what_lay_there() -> None:
    said: list[str] = []
    module = SimpleNamespace(
        empty_cache=lambda: said.append("emptied"),
        reset_peak_memory_stats=lambda: said.append("reset"),
        memory_allocated=lambda: 1000,
        max_memory_allocated=lambda: 1700,
        max_memory_reserved=lambda: 1900,
    )
    engine: Any = object.__new__(Engine)
    engine.asked = SimpleNamespace(module=module)
    engine.whole_step = lambda: said.append("step")
    assert engine.peaks() == (700, 900)
    assert said == ["step", "emptied", "reset", "step", "step", "step"]


def test_without_a_device_a_plain_sentence_and_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "accelerator_here", lambda: "")
    monkeypatch.setattr(sys, "argv", ["on_device"])
    assert benchmark.main() == 0
    assert "no accelerator that torch can use: nothing was measured" in capsys.readouterr().out


def test_what_is_left_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "run", lambda *given, **how: [[Block("saves: FAILED", [])]])
    monkeypatch.setattr(sys, "argv", ["on_device", "--device", "cpu"])
    assert benchmark.main() == 1
    said = capsys.readouterr().out
    assert "several devices: not measured, needs 2 devices; there is 1" in said
    assert "The CPU stands in for a device" in said
