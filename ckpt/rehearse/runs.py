"""Runs a training again and again: uninterrupted, killed at its boundaries, and resumed.

Each run is the user's command with a folder of its own in its environment, where `ckpt.rehearse.
hooks` finds the plan and leaves the trace. All checkpoints go to a temporary folder. Nothing of a
run is left when this returns: its processes are known by that folder, whatever has started them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import InvalidArgument
from ckpt.rehearse.judging import Divergence, Trace, Traces, compare, compare_other_ranks
from ckpt.short import ShortRecord

STEPS_MIN = 6
POLL_SECONDS = 0.05
ENDING_SECONDS = 20.0  # from SIGTERM, or from the end of a rank, to SIGKILL
SLOWER_MAX = 10  # a resumed run may take this many times as long as the first, and a minute
LINES_SHOWN = 40  # of the output of a run that failed; a launcher adds half of them


@dataclass(frozen=True, slots=True, repr=False)
class RehearsedRun(ShortRecord):
    """One run of the command: what was done to it, on how many ranks, from which step it continued
    (None: from the beginning), how many steps it made, and how it ended: "killed", "finished",
    "failed" or "timed out".
    """

    what: str
    ranks: int
    restored_step: int | None
    steps: int
    ended: str
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class RehearsalReport(ShortRecord):
    """What a rehearsal has shown: its runs, and where the last one differs, if it does."""

    runs: tuple[RehearsedRun, ...]
    difference: Divergence | None


class Rehearsal:
    """The runs of `command`, in a temporary `folder`, with `short` for the same. See
    `ckpt.operate.rehearse`.
    """

    def __init__(
        self, command: Sequence[str], folder: str, short: str, timeout_seconds: float
    ) -> None:
        self._command, self._folder, self._short = list(command), Path(folder), short
        self._timeout_seconds = timeout_seconds
        self.runs: list[RehearsedRun] = []

    def rehearse(
        self, steps: int, boundaries: Sequence[str], other_ranks: int | None
    ) -> Divergence | None:
        """All runs, until one differs."""
        words = "\0".join(self._command)
        ranks = re.search(r"(?<=--nproc.per.node[=\0])\d+", words)
        self._digests = ranks is not None and other_ranks != 0
        self._first = self._uninterrupted("not interrupted", steps)
        limit = 60 + SLOWER_MAX * self.runs[0].seconds
        self._timeout_seconds = min(self._timeout_seconds, limit)
        numbers = [one["step"] for one in self._first[0].steps]
        # Odd steps and even ones, to find what accumulates over two steps.
        first, second, third = numbers[len(numbers) // 4 - 1 :: 2][:3]
        plans: dict[str, Any] = {}
        for one in boundaries:
            late = {"saves": [second], "kill": (one, third)}
            plan = {"saves": [first, second], "kill": (one, second)} if "save" in one else late
            if one != "in the data loader" or self._first[0].has_loader:
                plans[f"killed {one}"] = plan
        plans["resumed"] = {"count": 3}
        for what, plan in plans.items():
            if difference := self._judged(what, last=numbers[-1], **plan):
                return difference
        if all(run.restored_step is None for run in self.runs):
            raise InvalidArgument(
                "no run has restored a checkpoint: call `restore` or `steps` of the Checkpointer, "
                "or `restored` of ckpt.watch_resume"
            )
        if ranks is None and other_ranks:
            raise InvalidArgument(f"{other_ranks=}: the command has no --nproc-per-node to change")
        if ranks is None or other_ranks == 0:
            return None
        number = other_ranks or int(ranks[0]) - 1 or 2
        self._command = f"{words[: ranks.start()]}{number}{words[ranks.end() :]}".split("\0")
        return self._judged(f"resumed on {number} ranks", count=3, last=numbers[-1])

    def _uninterrupted(self, what: str, count: int) -> Traces:
        run, traces, output = self._run(what, count=count, root=str(self._folder / "unused"))
        if run.ended != "finished" or run.steps < STEPS_MIN:
            raise InvalidArgument(
                f"{' '.join(self._command)}: {run.ended} after {run.steps} steps where nothing was "
                f"done to it; expected {STEPS_MIN} of a ckpt.Checkpointer or a ckpt.watch_resume"
                f"{output}"
            )
        return traces

    def _judged(self, what: str, **plan: Any) -> Divergence | None:
        """A run, and where it differs from the first one."""
        run, traces, output = self._run(what, **plan)
        if run.ended in ("failed", "timed out") or 0 not in traces:
            differs = {"end": f"it {run.ended}{output}"}
            return Divergence(what, run.restored_step, 0, run.steps, differs)
        if len(traces) != len(self._first):
            return compare_other_ranks(what, traces, self._first)
        difference = compare(what, traces, self._first, {})
        if difference is None:
            return None
        # Only now: most trainings are deterministic, and a second run would cost as much as the
        # first.
        again = self._uninterrupted("not interrupted, again", self.runs[0].steps)
        noise = compare("", again, self._first, {})
        if noise is not None:
            difference = compare(what, traces, self._first, noise.differs)
        if noise is None or difference is not None:
            return difference
        raise InvalidArgument(
            f"two runs that were not interrupted differ in step {noise.step}: "
            f"{', '.join([*noise.differs.values()][:3])}. Seed all random generators, and use "
            "deterministic kernels and data"
        )

    def _run(self, what: str, **plan: Any) -> tuple[RehearsedRun, Traces, str]:
        print(f"{what} ...", file=sys.stderr, flush=True)
        folder = self._folder / str(len(self.runs))
        folder.mkdir()
        root = str(self._folder / "root")
        plan = {"saves": [], "kill": None, "count": sys.maxsize, "last": None, "root": root} | plan
        plan["digests"] = self._digests
        (folder / "plan").write_text(json.dumps(plan))
        # Deterministic kernels; torch's temporary folders are removed as well.
        kernels = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
        own = {"CKPT_REHEARSAL": str(folder), "TMPDIR": self._short}
        began = time.monotonic()
        with open(folder / "output", "wb") as output:
            how: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            try:
                how["env"] = {**kernels, **os.environ, **own}
                process = subprocess.Popen(self._command, **how)
            except OSError as error:
                raise InvalidArgument(f"{self._command[0]}: {error.strerror}") from error
            try:
                ended = _ended(process, folder, began + self._timeout_seconds)
            finally:
                _kill_all(folder)
                process.wait()
        paths = {int(one.name.removeprefix("trace-")): one for one in folder.glob("trace-*")}
        traces = {rank: Trace(path) for rank, path in sorted(paths.items())}
        restored, made = (traces[0].restored_step, len(traces[0].steps)) if traces else (None, 0)
        seconds = time.monotonic() - began
        self.runs.append(RehearsedRun(what, len(traces), restored, made, ended, seconds))
        lines = (folder / "output").read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        return self.runs[-1], traces, "".join(f"\n    {line}" for line in lines)


def _ended(process: subprocess.Popen[bytes], folder: Path, until: float) -> str:
    """Wait until a run ends, by itself or by its plan."""
    code, has = None, {""}
    while code is None and "killed" not in has and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        code = process.poll()
        before, has = has, {one.name.partition("-")[0] for one in folder.iterdir()}
        if {"end", "signalled"} & has - before:
            until = min(until, time.monotonic() + ENDING_SECONDS)
    if has & {"killed", "signalled"}:
        return "killed"
    if "end" in has or code == 0:
        return "finished"
    return "timed out" if code is None else "failed"


def _kill_all(folder: Path) -> None:
    """Kill every process of this run, until none is left."""
    # By the environment: launchers start ranks in sessions of their own, which no group has.
    mark, alive = f"CKPT_REHEARSAL={folder}".encode(), True
    # Again and again: a process may have started another one while it was killed.
    while alive:
        alive = False
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is of another user
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    alive = True
                    os.kill(int(process.name), signal.SIGKILL)
