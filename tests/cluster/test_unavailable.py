"""Where no cluster can be made, its tests are skipped, and the reason says why.

Method: no root, no `ip`, an `ip` that is refused; then the tests themselves, in a process whose
`ip` is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.network import unavailable

ROOT = Path(__file__).resolve().parents[2]


def test_without_root_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "network namespaces need root"


def test_without_ip_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert unavailable() == "network namespaces need `ip`, of iproute2"


def test_where_namespaces_are_refused_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert unavailable() == "network namespaces are not allowed: Operation not permitted"


def test_the_tests_are_skipped_with_this_reason(tmp_path: Path) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text("import os\nos.geteuid = lambda: 0\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    python_path = f"{tmp_path}:{ROOT}"
    words = [sys.executable, "-m", "pytest", "--cluster", "-rs", "-q", "-p", "no:cacheprovider"]
    words += ["--basetemp", str(tmp_path / "own"), "tests/cluster/test_cluster.py"]
    done = subprocess.run(
        [*words, "tests/cluster/test_torchrun.py"],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "network namespaces are not allowed: Operation not permitted" in done.stdout
    assert "6 skipped" in done.stdout and "passed" not in done.stdout
