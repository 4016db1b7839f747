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
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckpt.errors import InvalidArgument
from ckpt.rehearse.judging import Difference, Trace, compare, compare_other_ranks, notes_of
from ckpt.short import ShortRecord

STEPS_MIN = 6
POLL_SECONDS = 0.05
ENDING_SECONDS = 20.0  # for a launcher to notice that its ranks have ended
GRACE_SECONDS = 20.0  # from SIGTERM to SIGKILL
SLOWER_MAX = 10  # a resumed run may take so many times what the first one took, and a minute
LINES_SHOWN = 15  # of the output of a run that failed

Ended = Literal["killed", "finished", "failed", "timed out"]


@dataclass(frozen=True, slots=True, repr=False)
class Run(ShortRecord):
    """One run of the command: what was done to it, on how many ranks, from which step it continued
    (None: from the beginning), how many steps it made, and how it ended.
    """

    what: str
    ranks: int
    restored_step: int | None
    steps: int
    ended: Ended
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class RehearsalReport(ShortRecord):
    """What a rehearsal has shown: its runs, and where the last one differs, if it does. `notes`
    are values that start over without an effect.
    """

    runs: tuple[Run, ...]
    difference: Difference | None
    notes: tuple[str, ...]


def rehearse(
    command: Sequence[str],
    *,
    steps: int,
    boundaries: Sequence[str],
    other_ranks: int | None,
    timeout_seconds: float,
) -> RehearsalReport:
    """See `ckpt.operate.rehearse`."""
    with tempfile.TemporaryDirectory(prefix="ckpt-rehearse-") as folder, _interrupted_by_sigterm():
        one = _Rehearsal(list(command), Path(folder), timeout_seconds)
        difference = one.rehearse(steps, boundaries, other_ranks)
        return RehearsalReport(tuple(one.runs), difference, tuple(dict.fromkeys(one.notes)))


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """With which CI ends a job: it cleans up as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread can set handlers
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Rehearsal:
    def __init__(self, command: list[str], folder: Path, timeout_seconds: float) -> None:
        self._command, self._folder = command, folder
        self._timeout_seconds = timeout_seconds
        self.runs: list[Run] = []
        self.notes: list[str] = []

    def rehearse(
        self, steps: int, boundaries: Sequence[str], other_ranks: int | None
    ) -> Difference | None:
        """All runs, until one differs."""
        self._first = self._uninterrupted("not interrupted", steps)
        limit = 60 + SLOWER_MAX * self.runs[0].seconds
        self._timeout_seconds = min(self._timeout_seconds, limit)
        numbers = [one["step"] for one in self._first[0].steps]
        # Odd ones and even ones: what accumulates over two steps has to be saved, too.
        first, second, third = numbers[len(numbers) // 4 - 1 :: 2][:3]
        for boundary in boundaries:
            is_late = not boundary.endswith("save")
            if boundary == "in the data loader" and not self._first[0].has_loader:
                self.notes.append("no DataLoader, in which it could be killed")
                continue
            kill = boundary, third if is_late else second
            saves = [second] if is_late else [first, second]
            if one := self._judged(f"killed {boundary}", saves=saves, kill=kill, last=numbers[-1]):
                return one
        if one := self._judged("resumed", count=3, last=numbers[-1]):
            return one
        words = "\0".join(self._command)
        ranks = re.search(r"(?<=--nproc.per.node[=\0])\d+", words)
        if ranks and other_ranks != 0:
            number = other_ranks or int(ranks[0]) - 1 or 2
            words = f"{words[: ranks.start()]}{number}{words[ranks.end() :]}"
            self._command = words.split("\0")
            if one := self._judged(f"resumed on {number} ranks", count=3, last=numbers[-1]):
                return one
        elif other_ranks:
            raise InvalidArgument(f"{other_ranks=}: the command has no --nproc-per-node to change")
        if all(run.restored_step is None for run in self.runs):
            raise InvalidArgument(
                "no run has restored a checkpoint: call `restore` or `steps` of the Checkpointer, "
                "or `restored` of ckpt.watch_resume"
            )
        return None

    def _uninterrupted(self, what: str, count: int) -> Mapping[int, Trace]:
        run, traces, output = self._run(what, count=count, root=str(self._folder / "unused"))
        made = len(traces[0].steps) if traces else 0
        if run.ended != "finished" or made < STEPS_MIN:
            raise InvalidArgument(
                f"{' '.join(self._command)}: {run.ended} after {made} steps where nothing was done "
                f"to it; expected {STEPS_MIN} steps of a ckpt.Checkpointer or a ckpt.watch_resume"
                f"{output}"
            )
        return traces

    def _judged(self, what: str, **plan: Any) -> Difference | None:
        """A run, and where it differs from the first one."""
        run, traces, output = self._run(what, **plan)
        if run.ended in ("failed", "timed out") or 0 not in traces:
            differs = {"end": f"it {run.ended}{output}"}
            return Difference(what, run.restored_step, 0, run.steps, differs)
        if len(traces) != len(self._first):
            return compare_other_ranks(what, traces[0], self._first[0])
        difference = compare(what, traces, self._first, {})
        if difference is None:
            self.notes += notes_of(traces[0], self._first[0])
            return None
        again = self._uninterrupted("not interrupted, again", self.runs[0].steps)
        noise = compare("", again, self._first, {})
        if noise is None:
            return difference
        if difference := compare(what, traces, self._first, noise.differs):
            return difference
        raise InvalidArgument(
            f"two runs that were not interrupted differ in step {noise.step}: "
            f"{', '.join(noise.differs.values())}. Seed all random generators, and use "
            "deterministic kernels and data"
        )

    def _run(self, what: str, **plan: Any) -> tuple[Run, Mapping[int, Trace], str]:
        print(f"{what} ...", file=sys.stderr, flush=True)
        folder = self._folder / str(len(self.runs))
        folder.mkdir()
        root = str(self._folder / "root")
        plan = {"saves": [], "kill": None, "count": sys.maxsize, "last": None, "root": root} | plan
        (folder / "plan").write_text(json.dumps(plan))
        # Kernels that compute the same again; what torch leaves in temporary folders goes as well.
        kernels = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
        own = {"CKPT_REHEARSAL": str(folder), "TMPDIR": str(self._folder)}
        environment = {**kernels, **os.environ, **own}
        began = time.monotonic()
        with open(folder / "output", "wb") as output:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            try:
                process = subprocess.Popen(self._command, env=environment, **streams)
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
        run = Run(what, len(traces), restored, made, ended, time.monotonic() - began)
        self.runs.append(run)
        lines = (folder / "output").read_text(errors="replace").splitlines()
        return run, traces, "".join(f"\n    {line}" for line in lines[-LINES_SHOWN:])


def _ended(process: subprocess.Popen[bytes], folder: Path, until: float) -> Ended:
    """Wait until a run ends, or has come to where its plan ends it."""
    code, has = None, {""}
    while code is None and "killed" not in has and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        code = process.poll()
        seen = {one.name.partition("-")[0] for one in folder.iterdir()}
        if "end" in seen - has:
            until = min(until, time.monotonic() + ENDING_SECONDS)
        if "signalled" in seen - has:
            until = min(until, time.monotonic() + GRACE_SECONDS)
        has = seen
    if has & {"killed", "signalled"}:
        return "killed"
    if "end" in has or code == 0:
        return "finished"
    return "timed out" if code is None else "failed"


def _kill_all(folder: Path) -> None:
    """Kill every process of this run, until none is left."""
    mark = f"CKPT_REHEARSAL={folder}".encode()
    alive = True
    while alive:
        alive = False
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is of another user
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    alive = True
                    os.kill(int(process.name), signal.SIGKILL)
