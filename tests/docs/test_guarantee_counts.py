"""The counts of docs/guarantee_tests.md are those of the runs that are kept; the runs write them.

Method: the page against docs/full_runs.jsonl; small runs of pytest on a test file, which pass,
fail or skip, in one process and in two; tables of made-up lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.guarantee_counts import KEPT, PAGE, filled, lines_of, merged

ROOT = Path(__file__).resolve().parents[2]
PLACE = "<!-- full runs -->\n<!-- /full runs -->"
LONG = """
import pytest

@pytest.mark.parametrize("part", [1, 2])
def test_counts(counted, part, scale):
    counted(saves=scale.count(1, 10) * part, lost_saves=0)

def test_fails(counted):
    counted(saves=3)
    assert False

def test_is_left_out(counted):
    pytest.skip("no server")

def test_counts_nothing():
    pass
"""


def test_the_page_has_the_counts_of_the_runs_that_are_kept() -> None:
    page, kept = PAGE.read_text(encoding="utf-8"), lines_of(KEPT)
    assert filled(page, kept) == page, "run: python docs/guarantee_counts.py"
    for line in kept:
        path, _, name = line["test"].partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in source, f"{KEPT.name}: {name} is gone"


def _run(folder: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Run the tests of LONG below this tree's conftest.py; the output, and the results."""
    results = folder / "results.jsonl"
    (folder / "test_long.py").write_text(LONG)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir"]
    command += [str(folder), "-p", "tests.conftest", "-p", "no:cacheprovider", "-s"]
    command += [*options, str(folder / "test_long.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, list(map(dict, lines_of(results))) if results.exists() else []


def test_a_run_appends_what_its_tests_counted(tmp_path: Path) -> None:
    options = ["--soak", "--results", str(tmp_path / "results.jsonl"), "-n", "2"]
    printed, lines = _run(tmp_path, *options)
    seen = {line["test"].partition("::")[2]: (line["passed"], line["counts"]) for line in lines}
    assert seen == {
        "test_counts[1]": (True, {"saves": 10, "lost saves": 0}),
        "test_counts[2]": (True, {"saves": 20, "lost saves": 0}),
        "test_fails": (False, {"saves": 3}),
    }
    (run,) = {tuple(str(line[name]) for name in ("command", "seed", "commit")) for line in lines}
    # The seed that is printed is the one of all processes, new in each full run.
    assert run[0] == "make soak" and f"seed {run[1]}," in printed and run[1] != "20261120"


def test_nothing_is_written_where_nobody_asks(tmp_path: Path) -> None:
    assert _run(tmp_path, "--soak")[1] == []


def _line(test: str, counts: dict[str, int], **other: Any) -> dict[str, Any]:
    run = {"command": "make soak", "seed": 5, "date": "2026-01-02", "commit": "abc", "cores": 2}
    return {"test": test, "passed": True, "counts": counts, **run, **other}


def test_of_each_test_the_last_run_is_shown_with_all_its_cases() -> None:
    lines = [
        _line("a.py::test_x_loses_nothing[1]", {"saves": 900}, commit="old", date="2026-01-01"),
        _line("a.py::test_x_loses_nothing[1]", {"saves": 1000, "lost": 0}),
        _line("a.py::test_x_loses_nothing[2]", {"saves": 234, "lost": 0}),
        _line("a.py::test_x_loses_nothing[2]", {"saves": 235, "lost": 0}),  # once more
    ]
    shown = filled(PLACE, lines)
    row = "| x loses nothing (`a.py`) | 2 cases, 1,235 saves, 0 lost | `make soak`, 2026-01-02, "
    assert row + "abc, 5, 2 cores | 2 of 2 |\n" in shown
    assert shown.count("a.py") == 1 and filled(shown, lines) == shown


def test_a_run_that_failed_is_shown_as_such() -> None:
    lines = [_line("a.py::test_x", {"saves": 1}), _line("a.py::test_x", {}, passed=False, seed=6)]
    assert "| **failed** |" in filled(PLACE, lines) and "| 1 of 2 |" in filled(PLACE, lines)
    with pytest.raises(ValueError, match="no place"):
        filled("", lines)


def test_only_full_runs_are_kept_and_each_once(tmp_path: Path) -> None:
    full, everyday = _line("a", {"n": 1}), _line("a", {"n": 1}, command="make test")
    assert merged([full], [full, everyday, {**full, "seed": 6}]) == [full, {**full, "seed": 6}]
    path = tmp_path / "lines"
    path.write_text(json.dumps(full) + "\n")
    assert lines_of(path) == [full]
