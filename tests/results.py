"""What long tests counted, as lines of a file: docs/guarantee_tests.md quotes them.

    def test_saves_lose_nothing(counted: Counted) -> None:
        ...
        counted(saves=begun, acknowledged=len(acknowledged), lost=len(lost))

`make soak` and `make test-cluster` name the file (`--results`); without it nothing is written. A
line has the test, its outcome and counts, and of the run: the command, the date, the commit, the
seed that repeats it and the cores of the machine. `docs/guarantee_counts.py` reads them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Counted(Counter[str]):
    """Counts of one test. Names are what a reader is shown: `full_disks=2` is "2 full disks"."""

    def __call__(self, **counts: int) -> None:
        """Add to the counts. A count of 0 is shown, too."""
        for name, count in counts.items():
            self[name.replace("_", " ")] += count


class Run(NamedTuple):
    """One run of pytest."""

    command: str  # make test, make soak or make test-cluster
    seed: int
    date: str
    commit: str  # with a + where tracked files differed from it
    cores: int


def this_run(command: str, seed: int) -> Run:
    """The run of this process, which has just begun."""
    return Run(command, seed, date.today().isoformat(), _commit(), os.cpu_count() or 1)


def append(path: Path, test: str, passed: bool, counts: Counted, run: Run) -> None:
    """One line more. Several processes may append to one file."""
    line = {"test": test, "passed": passed, "counts": counts, **run._asdict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # one write: lines of others stay whole
        file.write(json.dumps(line).encode() + b"\n")


def _commit() -> str:
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + "+" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
