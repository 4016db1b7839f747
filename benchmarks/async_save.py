"""Saves in the background on 2 ranks, FSDP2 + AdamW, against torch's DCP: what they cost training.

    python -m benchmarks.async_save [--gib 1] [--rounds 7] [--steps 4] [--directory DIR]
                                    [--parts memory first blocked cpu slow-down]

Five questions, each answered with ours and DCP interleaved in one run on the same state:

- blocked: seconds inside calls and hooks of the library per save, from the second save on, in units
  of one `memcpy` of this rank's state into memory that exists. DCP's time includes its
  `get_state_dict`; its stager, where one is kept, is made once and reused.
- slow-down: how much longer training steps take while a save is persisted, in units of a save's
  best peer; with no save in between as the zero.
- CPU seconds of a whole save on all ranks, the copy included, with nothing else running.
- first: CPU seconds and page faults of the call that begins the first save of a Checkpointer, and
  of the same without the memory that is made ahead, in units of that copy.
- memory: what the first save adds to the resident memory, against `host_bytes_max`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckpt
from benchmarks.measure import clear, extra_memory, most_of, report, row, spread
from benchmarks.save_load import GIB, WIDTH, Trained
from ckpt.process import this_process
from ckpt.saving.step_gate import steps as hooked_steps
from storage.ranges import address_of, aligned_buffer, copy_bytes
from tests.ranks import run_ranks

Wait = Callable[[], object]
PARTS = ("memory", "first", "blocked", "cpu", "slow-down")


class Clock:
    """Seconds that training spends inside the library: in calls, and between two hooks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = 0.0
        # Hooks run in the order in which they were registered: ours lies between these two.
        register_optimizer_step_pre_hook(self._enter)
        hooked_steps.watch()
        register_optimizer_step_pre_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._before = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._before

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def taken(self) -> float:
        """The seconds since the last call of this."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Training:
    """A model that takes long enough to step, and everything that can save it."""

    def __init__(self, nbytes: int, directory: Path, device: str = "cpu") -> None:
        self.trained = Trained(nbytes, device)
        self.directory = directory
        self.clock = Clock()
        self.number = itertools.count()
        pinned = device != "cpu"
        self.stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        # torch 2.11 closes this after each save, and the stager cannot be used again.
        self.stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        self.batch = torch.randn(4, WIDTH, device=device)
        # DCP makes collectives in its thread: on the training's own group they would mix.
        self.group = dist.new_group()

    def step(self) -> None:
        self.trained.model(self.batch).square().mean().backward()
        self.trained.optimizer.step()
        self.trained.optimizer.zero_grad()

    def ours(self) -> Wait:
        with self.clock.running():
            pending = ckpt.async_save(
                self.trained.state, str(self.directory / "ours"), step=next(self.number)
            )
        return pending.result

    def dcp(self, *, stager: DefaultStager | None = None, in_process: bool = False) -> Wait:
        kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        with self.clock.running():
            model, optimizer = get_state_dict(self.trained.model, self.trained.optimizer)
            answer: Any = dcp.async_save(
                {"model": model, "optim": optimizer},
                storage_writer=dcp.FileSystemWriter(self.directory / f"dcp{next(self.number)}"),
                process_group=None if in_process else self.group,
                async_stager=stager,
                async_checkpointer_type=kind,
            )
        return answer.result

    def clear(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for place in (*self.directory.glob("dcp*"), self.directory / "ours" / "steps"):
                clear_one(place)
            os.sync()
        dist.barrier()


def clear_one(place: Path) -> None:
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def memcpy_seconds(training: Training) -> Callable[[], float]:
    """One copy of this rank's state into memory that exists, both ranks at once."""
    tensors = training.trained.local_tensors()
    buffers = [aligned_buffer(tensor.nbytes) for tensor in tensors]

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        for tensor, buffer in zip(tensors, buffers, strict=True):
            copy_bytes(address_of(buffer), tensor.data_ptr(), tensor.nbytes)
        return time.perf_counter() - started

    run()
    return run


def measure_blocked(training: Training, rounds: int) -> list[str]:
    copy = memcpy_seconds(training)
    candidates: dict[str, Callable[[], Wait]] = {
        "ours": training.ours,
        "DCP, its default": training.dcp,
        "DCP, a stager kept": lambda: training.dcp(stager=training.stager),
    }
    ratios: dict[str, list[float]] = {name: [] for name in candidates}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 2):  # two that do not count: buffers, plans, stagers
        for name, start in candidates.items():
            training.step()
            one_copy = copy()
            dist.barrier()
            training.clock.taken()
            wait = start()
            training.step()
            blocked = training.clock.taken()
            wait()
            training.clear()
            if number > 1:
                ratios[name].append(blocked / one_copy)
                times[name].append(blocked)
    bars = {"ours": "<= 0.05", "DCP, its default": "5 to 10", "DCP, a stager kept": "1.5 to 2"}
    return [
        row(
            f"blocked, {name}",
            f"{most_of(statistics.median(measured)):.3f} memcpy, {spread(times[name])}",
            bars[name],
        )
        for name, measured in ratios.items()
    ]


def measure_slow_down(training: Training, rounds: int, steps: int) -> list[str]:
    candidates: dict[str, Callable[[], Wait]] = {
        "no save": lambda: lambda: None,
        "ours": training.ours,
        "DCP thread": lambda: training.dcp(stager=training.stager),
        "DCP process": lambda: training.dcp(in_process=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, start in candidates.items():
            training.step()
            dist.barrier()
            started = time.perf_counter()
            wait = start()
            for _ in range(steps):
                training.step()
            spent = time.perf_counter() - started
            wait()
            training.clear()
            if number:
                seconds[name].append(spent)
    base = seconds.pop("no save")
    extra = {
        name: most_of(statistics.median((a - b) / b for a, b in zip(measured, base, strict=True)))
        for name, measured in seconds.items()
    }
    peer = min(extra["DCP thread"], extra["DCP process"])
    rows = [
        row(f"slow-down of {steps} steps, {name}", f"{100 * value:.1f} %", "none")
        for name, value in extra.items()
    ]
    better = f"{extra['ours'] / peer:.2f}x" if peer > 0 else "no peer is slower than no save"
    return [*rows, row("slow-down, ours of DCP's better mode", better, "<= 1x")]


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU seconds of this process and its children that `run` takes, over all ranks."""
    dist.barrier()
    before = _cpu_now()
    run()
    spent = torch.tensor([_cpu_now() - before])
    dist.all_reduce(spent)
    return float(spent)


def _cpu_now() -> float:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure_cpu(training: Training, rounds: int) -> list[str]:
    candidates: dict[str, Callable[[], Wait]] = {
        "ours": training.ours,
        "dcp": lambda: training.dcp(stager=training.stager),
    }
    ratios = []
    for number in range(rounds + 1):
        spent = {}
        for name, start in candidates.items():
            spent[name] = cpu_seconds(lambda start=start: start()())  # type: ignore[misc]
            training.clear()
        if number:
            ratios.append(spent["ours"] / spent["dcp"])
    shown = f"{statistics.median(ratios):.2f}x"
    return [row("CPU seconds of DCP's with a stager kept", shown, "<= 0.5x")]


def measure_memory(gib: float, directory: str) -> None:
    """In fresh processes: the first save allocates its buffers."""
    warnings.filterwarnings("ignore")
    trained = Trained(int(gib * GIB))
    rows = []
    for run, budget in enumerate((64 << 20, 256 << 20)):
        url = str(Path(directory) / f"memory{budget}")
        ckpt.save({"x": torch.zeros(1)}, url, step=0)  # what any first save loads and makes
        extra = extra_memory(
            lambda url=url, budget=budget: ckpt.async_save(  # type: ignore[misc]
                trained.state, url, step=1, host_bytes_max=budget
            ).result()
        )
        # Buffers of the smaller budget are there already when the larger one is used.
        kept = 0 if run == 0 else 64 << 20
        shown = f"{(most_of(extra) + kept) / budget:.2f}x"
        rows.append(row(f"memory of host_bytes_max={budget >> 20} MiB", shown, "<= 1.05x"))
    report(f"memory of a save in the background, {gib:g} GiB on 2 ranks", rows)
    clear(Path(directory))


def measure_first(gib: float, rounds: int, directory: str) -> None:
    """The memory of each save is dropped before the next one, as if that were the first."""
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # the same weights are saved on purpose
    training = Training(int(gib * GIB), Path(directory))
    staging = this_process.of_group(None).staging
    copy = memcpy_seconds(training)
    spent: dict[str, list[tuple[float, float]]] = {"ahead": [], "not ahead": []}
    for number in range(rounds + 1):
        for name, measured in spent.items():
            before = time.thread_time()
            copy()
            seconds = time.thread_time() - before
            staging.keep(0)
            first = _first_save(training, made_ahead=name == "ahead")
            if number:
                measured.append((first[0] / seconds, first[1]))
            training.clear()
    rows = []
    for name, measured in spent.items():
        seconds, faults = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append(row(f"CPU seconds, {name}", f"{most_of(seconds):.2f} memcpy", "<= 1.5 memcpy"))
        rows.append(row(f"page faults, {name}", f"{most_of(faults):.0f}", "none"))
    report(f"call of a first save, {gib:g} GiB on 2 ranks, median of {rounds} rounds", rows)


def _first_save(training: Training, *, made_ahead: bool) -> tuple[float, float]:
    """CPU seconds and page faults of the thread that trains in the call that begins a save."""
    url = str(training.directory / "ours")
    policy = ckpt.EverySteps(2) if made_ahead else ckpt.AtExit()
    with ckpt.Checkpointer(training.trained.state, url, save=policy, snapshot="now") as saver:
        step = 2 * next(training.number) + 1
        saver.step(step)
        this_process.of_group(None).background._preparation.is_over.wait()
        dist.barrier()
        seconds = time.thread_time()
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        if made_ahead:
            saver.step(step + 1)
        else:
            saver.save_now()
        seconds = time.thread_time() - seconds
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    return seconds, faults


def rank_main(gib: float, rounds: int, steps: int, parts: list[str], directory: str) -> None:
    warnings.filterwarnings("ignore")
    # DCP's process mode starts a process of its own, which finds the others by these.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    training = Training(int(gib * GIB), Path(directory))
    title = f"saves in the background, {gib:g} GiB of FSDP2 + AdamW, 2 ranks, {rounds} rounds"
    if "blocked" in parts:
        report(f"{title}: blocked", measure_blocked(training, rounds))
    if "cpu" in parts:
        report(f"{title}: CPU", measure_cpu(training, rounds))
    if "slow-down" in parts:
        report(f"{title}: slow-down", measure_slow_down(training, rounds, steps))
    clear(Path(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="while a save is persisted")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    given = parser.parse_args()
    if "memory" in given.parts:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            run_ranks(2, measure_memory, given.gib, directory, timeout_seconds=3600)
    if "first" in given.parts:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            run_ranks(2, measure_first, given.gib, given.rounds, directory, timeout_seconds=3600)
    if not {"memory", "first"}.issuperset(given.parts):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            arguments = (given.gib, given.rounds, given.steps, given.parts, directory)
            run_ranks(2, rank_main, *arguments, timeout_seconds=3600)


if __name__ == "__main__":
    main()
