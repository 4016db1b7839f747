"""Runs a training again and again, uninterrupted, killed at its boundaries, and resumed; compares
the traces, and names what a resumed run lacks.

Each run is the user's command with a folder of its own in its environment, where `ckpt.rehearse.
hooks` finds the plan and leaves the trace. All checkpoints go to a temporary folder. Nothing of a
run is left when this returns: its processes are known by that folder, whatever has started them.

A difference counts where training itself differs: data, losses, parameters, buffers, optimizers,
schedulers, scalers, averages of parameters. Its causes are looked for at the first step that
differs, before that step changes any parameter: what differs there, and is not in the state that
was saved, was forgotten. Plain values and random states count as causes, never as differences: a
script may keep some for its log alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ckpt.errors import InvalidArgument
from ckpt.rehearse.seen import TRAINED, Seen
from ckpt.short import ShortRecord

STEPS_MIN = 6
POLL_SECONDS = 0.05
ENDING_SECONDS = 20.0  # from SIGTERM, or from the end of a rank, to SIGKILL
SLOWER_MAX = 10  # a resumed run may take this many times as long as the first, and a minute
LINES_SHOWN = 40  # of the output of a run that failed; a launcher adds half of them
SHOWN_MAX = 4  # values of one variable

# What a step was like, as `ckpt.rehearse.hooks` writes it; then two values of one name.
Step: TypeAlias = Mapping[str, Any]
Pair: TypeAlias = tuple[Seen, Seen]
Names: TypeAlias = Mapping[str, str]  # with a text for each


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
        if (difference := compare(what, traces, self._first, {})) is None:
            return None
        # Only now: most trainings are deterministic, and a second run would cost as much as the
        # first.
        again = self._uninterrupted("not interrupted, again", self.runs[0].steps)
        if (noise := compare("", again, self._first, {})) is not None:
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


# What differs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Divergence(ShortRecord):
    """Where a run differs from the one that was not interrupted: `run` says what was done to it,
    `restored_step` where it continued. `differs` has the first values that differ, by name, and
    `forgotten` what explains them.
    """

    run: str
    restored_step: int | None
    rank: int
    step: int
    differs: Names
    forgotten: tuple[str, ...] = ()


class Trace:
    """What one rank of one run has done; the last step may not be done."""

    def __init__(self, path: Path) -> None:
        # A rank that was killed while it wrote has left half a line.
        whole = path.read_text(encoding="utf-8").split("\n")[:-1]
        events = [json.loads(line) for line in whole]
        self.restored: Step = next((one for one in events if "restored" in one), {})
        self.restored_step: int | None = self.restored.get("restored")
        self.steps: list[Step] = [one for one in events if "step" in one]
        self.rest: Step = events[-1] if "first" in events[-1] else {}
        self.has_loader = any("batches" in one for one in events)

    def pairs(self, reference: Trace) -> Iterator[tuple[Step, Step]]:
        """Each step with that of `reference`, and the one that was not done."""
        theirs = {one["step"]: one for one in reference.steps}
        yield from ((one, theirs[one["step"]]) for one in self.steps if one["step"] in theirs)
        done = self.steps[-1]["step"] if self.steps else self.restored_step
        later = (one for number, one in theirs.items() if done is None or number > done)
        if "step" not in self.rest and (following := next(later, None)):
            yield self.rest, following


Traces: TypeAlias = Mapping[int, Trace]  # by rank


def compare(run: str, traces: Traces, reference: Traces, ignored: Names) -> Divergence | None:
    """The first step at which a rank differs from `reference`, in more than what is `ignored`. Of
    several ranks, one that explains it: others may differ by what they have received.
    """
    differences = []
    for rank, trace in traces.items():
        for index, (mine, theirs) in enumerate(trace.pairs(reference[rank])):
            parted = {n: text for n, text in _parted(mine, theirs).items() if n not in ignored}
            if parted:
                why = tuple(_forgotten(trace, reference[rank], index, mine, theirs))
                why = why or tuple(_not_restored(_trained(mine, theirs)))
                where = run, trace.restored_step, rank, theirs["step"]
                differences.append(Divergence(*where, parted, why))
                break
    return min(differences, key=lambda one: (one.step, not one.forgotten), default=None)


def compare_other_ranks(run: str, traces: Traces, reference: Traces) -> Divergence | None:
    """What all ranks have in the first step after a resume on another number of ranks: parameters
    and optimizers as a whole, in any layout, and what all ranks of `reference` have alike. Later
    steps differ anyway: sums are rounded in another order, ranks read other data.
    """
    first = {rank: next(trace.pairs(reference[0]), None) for rank, trace in traces.items()}
    if (begun := first[0]) is None:
        return None
    step = begun[1]["step"]
    theirs = [one for each in reference.values() for one in each.steps if one["step"] == step]
    mine = [pair[0] for pair in first.values() if pair]
    whole, other = _whole(mine), _whole(theirs)
    for rank, pair in first.items():
        pairs = {
            name: (one, other)
            for name, (one, other) in (_trained(*pair) if pair else {}).items()
            if one.kind != "buffer" and one.text.split()[:-1] == other.text.split()[:-1]
            if len({each["first"].get(name, [""])[0] for each in theirs}) == 1
        }
        for name in sorted(whole.keys() & other) if rank == 0 and len(mine) == len(first) else ():
            if whole[name] != other[name]:
                texts = (f"values {each[name]:016x}" for each in (whole, other))
                one, before = (Seen(text, "parameter", True) for text in texts)
                pairs.setdefault(name, (one, before))
        if pairs:
            where = run, traces[rank].restored_step, rank, step
            return Divergence(*where, {name: name for name in pairs}, tuple(_not_restored(pairs)))
    return None


def _whole(steps: Sequence[Step]) -> dict[str, int]:
    """The digests of whole tensors, of what all ranks have of them."""
    regions: dict[str, dict[str, int]] = {}
    for step in steps:
        for name, each in step.get("digests", {}).items():
            regions.setdefault(name, {}).update(each)
    # A sum, which is the same however the regions are cut: see `seen.digests`.
    return {name: sum(each.values()) % (1 << 64) for name, each in regions.items()}


def _differing(mine: Step, theirs: Step, when: str) -> dict[str, Pair]:
    a, b = mine.get(when, {}), theirs.get(when, {})
    differing = {n: (Seen(*a[n]), Seen(*b[n])) for n in a if n in b and a[n][0] != b[n][0]}
    # An optimizer that has made no step has no state of its parameters.
    for name in [name for name in b if a and name not in a and b[name][1] == "optimizer"]:
        differing[name] = Seen("none", *b[name][1:]), Seen(*b[name])
    return differing


def _trained(mine: Step, theirs: Step, when: str = "first") -> dict[str, Pair]:
    pairs = _differing(mine, theirs, when)
    return {name: pair for name, pair in pairs.items() if pair[0].kind in TRAINED}


def _parted(mine: Step, theirs: Step) -> dict[str, str]:
    """What of the training differs in this step: a text for each name. Earliest first."""
    parted = {}
    # A loader may have read ahead, or have skipped data: the last batch counts.
    late = zip(mine.get("late_batches", ()), theirs.get("late_batches", ()), strict=False)
    early = [one.get("batches", ())[-1:] for one in (mine, theirs) if "first" in one]
    if (len(early) == 2 and all(early) and early[0] != early[1]) or any(a != b for a, b in late):
        parted["data"] = "the data that it reads"
    losses = zip(mine.get("losses", ()), theirs.get("losses", ()), strict=False)
    for a, b in [(a, b) for a, b in losses if a != b][:1]:
        parted["loss"] = f"loss {a} instead of {b}"
    for when in ("first", "last"):
        parted |= {name: name for name in _trained(mine, theirs, when)}
    return parted


def _forgotten(
    trace: Trace, reference: Trace, index: int, mine: Step, theirs: Step
) -> Iterator[str]:
    """Why these two steps differ, as sentences."""
    position = reference.steps.index(theirs)
    before: Step = reference.steps[position - 1] if position else {}
    yield from _random(trace, reference, mine, theirs, before.get("last_random", {}))
    pairs = _differing(mine, theirs, "first")
    begin = reference.steps[index]
    # A generator that this step does not draw from explains nothing.
    idle = {n for n, one in before.get("last", {}).items() if one == theirs["last"].get(n)}
    # A plain value counts that is what it was at the beginning of the training.
    first = {name: one[0] for name, one in begin.get("first", {}).items()}
    unsaved = {
        name: (one, other)
        for name, (one, other) in pairs.items()
        if not one.is_saved and (one.kind != "random" or name not in idle)
        if one.kind in TRAINED
        or (one.kind not in ("tensor", "text") and one.text == first.get(name))
    }
    yield from _not_restored(unsaved)
    batch = mine.get("batches", ())[-1:]
    same = [one["step"] for one in reference.steps if batch and batch[0] in one.get("batches", ())]
    if same and batch != theirs.get("batches", ())[-1:]:
        yield f"the position in the data: it reads what step {same[0]} has read"


def _random(
    trace: Trace, reference: Trace, mine: Step, theirs: Step, before: Mapping[str, str]
) -> Iterator[str]:
    """Random states that differ, and that the step draws from: it has changed those of `before`."""
    steps = {step["step"]: step for step in reference.steps}
    saved = steps.get(trace.restored_step, {}).get("last_random", {})
    for name, text in mine.get("first_random", {}).items():
        is_used = before.get(name) != theirs["last_random"].get(name)
        if not is_used or text == theirs["first_random"].get(name):
            continue
        if trace.restored.get("restored_random", {}).get(name) != saved.get(name):
            yield f"the random state of {name} is not restored: add ckpt.rng_state() to the state"
        elif "drawn" in mine and "drawn" not in theirs:
            why = "without a restore it did so earlier: give the DataLoader a generator of its own"
            yield f"iter(loader) draws from the random state of {name} after the restore; {why}"
        else:
            yield f"the random state of {name} is drawn from between the restore and this step"


def _not_restored(pairs: Mapping[str, Pair]) -> Iterator[str]:
    """A sentence for each name, or for all of one variable where these are many."""
    groups: dict[str, list[str]] = {}
    for name in pairs:
        groups.setdefault(name.partition(".")[0], []).append(name)
    for variable, names in groups.items():
        more = f", and {len(names) - 1} more of {variable}" if len(names) > SHOWN_MAX else ""
        for name in names[: 1 if more else None]:
            one, other = pairs[name]
            where = "comes back different, though the state has it"
            if one.kind == "gradient":
                where = "is accumulated where the save is made, and not in the state"
            elif not one.is_saved:
                where = "is not in the state"
            yield f"{name} {where}: {one.text} instead of {other.text}{more}"
