"""`make test-gpu` says what it runs and what it does not, with and without what it needs.

Method: the plan of passes is a value; whatever they would run is not run here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.gpu.__main__ as runner
from tests.gpu.kit.run import OTHERS
from tests.gpu.test_scenarios import cases


def test_the_sanitizers_run_where_they_are_installed_and_what_is_left_out_is_named() -> None:
    everything, torchs, bytes_ = runner.passes("cuda", ["-x"], "/opt/compute-sanitizer")
    assert everything.command[-4:] == (*runner.FILES, "-x")
    assert torchs.environment == {"TORCH_CUDA_SANITIZER": "1"}
    assert bytes_.command[0] == "/opt/compute-sanitizer"
    assert not any(one.skipped for one in (everything, torchs, bytes_))
    *_, missing = runner.passes("cuda", [], None)
    assert missing.skipped == "it is not installed" and not missing.command
    _, *others = runner.passes("xpu", [], "/opt/compute-sanitizer")
    assert [one.skipped for one in others] == ["xpu is not CUDA"] * 2


def test_files_with_tests_marked_gpu_are_listed() -> None:
    tests = Path(__file__).parents[1]
    uses = re.compile(r"^def test_[^>]*\b(device|accelerator): str", re.MULTILINE)
    files = {
        str(path.relative_to(tests.parent))
        for path in tests.rglob("test_*.py")
        if path.parent.name != "gpu" and uses.search(path.read_text())
    }
    assert {"tests/gpu", *files} == set(runner.FILES)
    assert files == set(OTHERS)


def test_what_runs_under_the_sanitizers_is_there() -> None:
    ids = [str(case.id) for case in cases()]
    chosen = runner.SANITIZED.split(" or ")
    assert all(any(text in one for one in ids) for text in chosen)
    assert sum(any(text in one for text in chosen) for one in ids) >= 8


def test_without_a_device_a_plain_sentence_and_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def collecting(command: tuple[str, ...], **how: Any) -> subprocess.CompletedProcess[str]:
        assert "--collect-only" in command
        return subprocess.CompletedProcess(command, 0, "217/3000 tests collected (2783 deselected)")

    monkeypatch.setattr(runner, "accelerator_here", lambda: "")
    monkeypatch.setattr(subprocess, "run", collecting)
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert runner.main() == 0
    said = capsys.readouterr().out
    assert "no accelerator that torch can use: none of the tests marked gpu is run" in said
    assert "There are 217 of them." in said


def test_the_worst_outcome_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(command: tuple[str, ...], **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", failing)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--device", "cpu"])
    assert runner.main() == 1
    said = capsys.readouterr().out
    assert "all tests marked gpu: exit 1" in said
    assert "compute-sanitizer: not run: cpu is not CUDA" in said
    assert "'several': not run: needs 2 devices; there is 1" in said
