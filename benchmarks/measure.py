"""What all benchmarks share: interleaved rounds, wall and CPU seconds over all ranks, medians,
ratios.

Ratios are taken round by round and their median is printed: the machine's speed may drift between
rounds, a ratio within one round hardly does.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import run_ranks


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: the slowest rank's wall seconds and all ranks' CPU seconds together."""

    wall_seconds: float
    cpu_seconds: float


def measured(run: Callable[[], object]) -> Sample:
    """Run on all ranks at once. Every rank gets the same sample."""
    if dist.is_initialized():
        dist.barrier()
    cpu = time.process_time()
    wall = time.perf_counter()
    run()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    if dist.is_initialized():
        slowest = spent.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(spent)
        return Sample(float(slowest[0]), float(spent[1]))
    return Sample(float(spent[0]), float(spent[1]))


def interleaved(
    candidates: dict[str, Callable[[], object]],
    *,
    rounds: int,
    between: Callable[[str], None],
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[Sample]]:
    """Every candidate once per round, in turn, after one round that does not count. What `before`
    does for it is not measured.

    Each round begins with another one: what follows a large write or its removal pays for that.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for number in range(rounds + 1):
        order = order[1:] + order[:1]
        for name, run in order:
            before(name)
            sample = measured(run)
            between(name)
            if number:
                samples[name].append(sample)
    return samples


def ratio(
    samples: dict[str, list[Sample]], name: str, peer: str, field: str = "wall_seconds"
) -> float:
    """Median over rounds of `name` / `peer`."""
    pairs = zip(samples[name], samples[peer], strict=True)
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs)


def speed(samples: dict[str, list[Sample]], name: str, peer: str) -> float:
    """How many times as fast as `peer`: median over rounds."""
    return 1 / ratio(samples, name, peer)


def spread(times: Sequence[float]) -> str:
    """The median and the range of `times`."""
    low, high = min(times), max(times)
    return f"{statistics.median(times):.3g} s ({low:.3g} to {high:.3g})"


def wall(samples: dict[str, list[Sample]], name: str) -> str:
    """The wall seconds of `name`: median and range over rounds."""
    return spread([sample.wall_seconds for sample in samples[name]])


def on_two_ranks(
    rank_main: Callable[[float, int, str], None], about: str | None, *, gib: float
) -> None:
    """A benchmark's command line: `rank_main(gib, rounds, directory)` on two ranks.

    `about` is the docstring of its module, `gib` how much state it has unless it is told.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=gib)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        run_ranks(2, rank_main, arguments.gib, arguments.rounds, directory, timeout_seconds=3600)


def row(what: str, measured: str, bar: str) -> str:
    """One line of a report; `python -m benchmarks` collects them into a table."""
    return f"{what}: {measured} (bar {bar})"


def report(title: str, lines: Sequence[str]) -> None:
    """Print a block of results on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}", flush=True)


def clear(directory: Path) -> None:
    """Remove what a run left, on rank 0 alone, and let the disk settle."""
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()
    if dist.is_initialized():
        dist.barrier()


def extra_memory(run: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory exceeds, at its peak, what it is before `run`.

    Linux counts the peak; writing 5 to `clear_refs` sets it back (proc(5)).
    """
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def most_of(value: float) -> float:
    """The largest of all ranks' values, on every rank."""
    largest = torch.tensor([float(value)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest[0])
