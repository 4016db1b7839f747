"""The kit: bounded parts that cost each other nothing, and what it says where it cannot run.

Method: the runner's steps with commands of a few lines instead of tests and benchmarks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.gpu.kit import build, run
from tests.gpu.kit.run import Part, Results, carried_out, parts, unpacked


def carry_out(part: Part, seconds: float, folder: Path) -> tuple[str, float, str, list[object]]:
    (folder / "source").mkdir(exist_ok=True)
    return carried_out(part, seconds, {**os.environ}, folder, folder)


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HERE", tmp_path)


def test_a_part_out_of_time_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "pid"
    text = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '60']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); print('so far', flush=True); time.sleep(60)"
    )
    before = time.monotonic()
    outcome, _, log, _ = carry_out(Part("slow", 1, script(text)), 2.0, tmp_path)
    assert (outcome, log) == ("out of time", "so far\n")
    assert time.monotonic() - before < 30
    stat = Path(f"/proc/{child.read_text()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_failed_part_keeps_its_rows_and_the_others(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    block = {"title": "steps", "lines": ["time: 0.9 (bar <= 1)"]}
    text = f"open({str(rows)!r}, 'w').write({json.dumps(block)!r}); print('FAILED x'); exit(3)"
    results = Results(tmp_path, {"device": "none"})
    killed = f"import os; open({str(rows)!r}, 'w').write({json.dumps(block)!r}); os.kill(0, 9)"
    good = "print('ERROR:2026-11-26 a library of torch says this'); print('[gw0] PASSED a')"
    for name, code in (("bad", text), ("killed", killed), ("good", good)):
        part = Part(name, 1, script(code))
        results.add(part, *carry_out(part, 30.0, tmp_path))
        so_far = json.loads((tmp_path / "results.json").read_text())["parts"]
        assert so_far[-1]["name"] == name, "what is known is on disk after each part"
    results.add(Part("none", 1, (), "it is not installed"), "left out", 0.0, "no", [])
    written = json.loads((tmp_path / "results.json").read_text())
    outcomes = [one["outcome"] for one in written["parts"]]
    assert outcomes == ["exit 3", "exit -9", "passed", "left out"]
    assert written["parts"][1]["blocks"] == [block] and written["parts"][2]["tests"] == {
        "passed": 1
    }
    assert written["parts"][0]["blocks"] == [block]
    table = (tmp_path / "table.txt").read_text()
    assert "    time: 0.9 (bar <= 1)" in table and "good: passed" in table
    assert "1 passed" in table and "    failed: x" in table


def test_wheels_of_another_python_are_named(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "a-1-cp39-cp39-any.whl", "w"):
        pass
    assert "has wheels for cp39, and this interpreter is cp3" in unpacked(tmp_path / "site")
    own = f"cp3{sys.version_info.minor}"
    with zipfile.ZipFile(tmp_path / "wheels" / f"b-1-{own}-{own}-any.whl", "w") as file:
        file.writestr("b.py", "x = 1")
    assert not unpacked(tmp_path / "site") and (tmp_path / "site" / "b.py").exists()


def test_what_needs_cuda_is_left_out_without_it(tmp_path: Path) -> None:
    planned = parts("cpu", True, "/tmp", tmp_path / "rows.json")
    without = {one.name for one in planned if "is not CUDA" in one.needs}
    assert without == {
        "torch's CUDA sanitizer",
        "compute-sanitizer memcheck",
        "compute-sanitizer racecheck",
    }


def test_parts_come_in_their_order_and_fill_the_time(tmp_path: Path) -> None:
    """Tests, steps, saves and loads, dicts, sanitizers, states of other libraries."""
    for device in ("cpu", "cuda"):
        planned = parts(device, device == "cpu", "/tmp", tmp_path / "rows.json")
        names = [one.name for one in planned]
        wanted = (
            "scenarios, one rank",
            "scenarios, ranks that share it",
            "steps",
            "compiled",
            "ddp",
        )
        wanted += ("saves", "large saves", "loads near", "dicts", "compute-sanitizer memcheck")
        wanted += ("torch's CUDA sanitizer", "torchao states", "bitsandbytes states")
        assert [name for name in names if name in wanted] == list(wanted)
        left = 420.0
        for number, part in enumerate(planned):  # each takes all that it may
            waiting = sum(one.share for one in planned[number:])
            left -= left * part.share / waiting
        assert abs(left) < 1e-6


def test_nothing_is_compiled_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    planned = parts("cpu", True, "/tmp", tmp_path / "rows.json")
    (compiled,) = (one for one in planned if one.name == "compiled")
    assert "no compiler" in compiled.needs


def test_the_kit_has_all_dependencies_but_what_comes_with_torch() -> None:
    names = {name.partition(">")[0] for name in build.needed()}
    assert {"fsspec", "s3fs", "msgpack", "pydantic", "pytest"} <= names
    assert not names & {"torch", "numpy"}


def test_a_collective_that_hangs_is_tried_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COLLECTIVE_SECONDS", 1.0)
    hangs = "import os, time; time.sleep(0 if 'NCCL_SOCKET_IFNAME' in os.environ else 60)"
    monkeypatch.setattr(run, "COLLECTIVE", hangs)
    environment = dict(os.environ)
    assert run.collectives("cuda", environment, time.monotonic() + 60) == "over loopback"
    assert environment["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(run, "COLLECTIVE", "exit(1)")
    assert run.collectives("cuda", dict(os.environ), time.monotonic() + 60) == "none works"


def test_failures_are_written_when_they_happen(tmp_path: Path) -> None:
    failures = tmp_path / "failures.txt"
    nodeid = "tests/gpu/test_kit.py::test_fails_where_it_is_asked_to"
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--failures", str(failures), nodeid)
    environment = {**os.environ, "FAIL_HERE": "1"}
    root = Path(__file__).parents[2]
    ended = subprocess.run((sys.executable, *command), env=environment, cwd=root, check=False)
    assert ended.returncode == 1
    assert failures.read_text().startswith(f"FAILED {nodeid}\n")


def test_fails_where_it_is_asked_to() -> None:
    assert "FAIL_HERE" not in os.environ
