"""What the engine and saves cost on an accelerator, against torch's and the limits of its bus.

    make bench-gpu                      on this machine's accelerator
    make bench-gpu DEVICE=cpu           the same code where there is none, in small
    python -m benchmarks.on_device [--device cuda] [--width 4096] [--rounds 7] [--gib 4]
                                   [--directory DIR]

One rank, with the paths of many forced; where there are 2 or 4 devices, that many over their own
collectives too. Ours and torch's classes share a process and take turns in every round, and ratios
are medians over rounds.

step: seconds, peak memory over what lay there before, and kernels, copies and host waits as the
profiler sees them, of four units of nine members. blocked: what a background save keeps from the
training, in units of one copy of the state into pinned memory. bus: how fast the copies of a save
and a load are against such a copy, which is as fast as the bus. DIR should lie in memory, or
the load measures a disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.autograd import DeviceType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.profiler import ProfilerActivity, profile

import ckpt
from benchmarks.async_save import Training, Wait
from benchmarks.device_counts import Layers
from benchmarks.measure import interleaved, most_of, ratio, report, row, speed
from tests.gpu.__main__ import accelerator_here
from tests.gpu.real import OnDevice
from tests.gpu.setups import SETUPS, run, why_not
from tests.streams.training import Run

GIB = 1 << 30
ENGINES = {
    "torch's fully_shard": ("torch", "fully"),
    "fully_shard": ("ours", "fully"),
    "torch's wrapper": ("torch", "flat"),
    "the wrapper": ("ours", "flat"),
}
PEERS = {"fully_shard": "torch's fully_shard", "the wrapper": "torch's wrapper"}


class Block(NamedTuple):
    """What was measured together."""

    title: str
    lines: list[str]


class Asked(NamedTuple):
    """What the command line says."""

    device: str
    width: int
    rounds: int
    gib: float
    directory: str

    @property
    def module(self) -> Any:
        """torch's module for the device."""
        return torch.get_device_module(self.device)


# --- steps ---------------------------------------------------------------------------------------


class Engine:
    """One engine's model and what can be measured of its steps."""

    def __init__(self, who: str, surface: str, asked: Asked) -> None:
        where = torch.device(asked.device, None if asked.device == "cpu" else current(asked))
        model = OnDevice(who, surface, where=where)
        self.asked = asked
        self.model = Run.wrap(model, model.net(Layers, asked.width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.rows = torch.randn(256, asked.width).to(where)

    def step(self) -> None:
        """One step, until the device has done it."""
        self.model(self.rows).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.asked.module.synchronize()

    def peak_bytes(self) -> int:
        """What a step takes beside what lay there before."""
        module = self.asked.module
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        self.step()
        return int(module.max_memory_allocated() - before)

    def counted(self) -> Counter[str]:
        """Of one step: what the device was given and for what the host waited; operators too."""
        own = ProfilerActivity.__members__.get(self.asked.device.upper(), ProfilerActivity.CPU)
        with profile(activities=list({ProfilerActivity.CPU, own})) as profiler:
            self.step()
        return counted(profiler.events())


def current(asked: Asked) -> int:
    return int(asked.module.current_device())


def counted(events: Iterable[Any]) -> Counter[str]:
    """What a profile has, by kind. Waits for the whole device are not counted: the measurement
    itself waits so, and no engine does.
    """
    counts: Counter[str] = Counter()
    for event in events:
        name = event.name.lower()
        if event.is_user_annotation:  # ranges that engines name, on the device's side too
            continue
        if event.device_type == DeviceType.CPU:
            counts["operators"] += name.startswith("aten::")
            counts["host waits"] += "synchronize" in name and "device" not in name
        elif "memcpy" in name or "memset" in name:
            counts["copies and fills by the bus"] += 1
        else:
            counts["kernels"] += 1
    return +counts


def measure_steps(asked: Asked) -> Iterator[Block]:
    engines = {name: Engine(*key, asked) for name, key in ENGINES.items()}
    steps: dict[str, Callable[[], object]] = {name: one.step for name, one in engines.items()}
    samples = interleaved(steps, rounds=asked.rounds, between=lambda name: None)
    counts = {name: one.counted() for name, one in engines.items()}
    counts_memory = hasattr(asked.module, "max_memory_allocated")
    if not counts_memory:
        yield Block("steps", [f"peak memory: not measured, torch counts none for {asked.device}"])
    if not any(one["kernels"] for one in counts.values()):
        yield Block("steps", [f"kernels: not measured, the profiler sees none of {asked.device}"])
    for name, peer in PEERS.items():
        lines = [row("time of a step, of torch's", f"{ratio(samples, name, peer):.2f}", "<= 0.9")]
        for what in sorted(counts[name] | counts[peer]):
            lines.append(row(what, str(counts[name][what]), f"<= {counts[peer][what]}"))
        if counts_memory:
            peaks = [most_of(engines[one].peak_bytes()) / (1 << 20) for one in (name, peer)]
            lines.append(row("peak MiB over shards", f"{peaks[0]:.0f}", f"<= {peaks[1]:.0f}"))
        seconds = statistics.median(one.wall_seconds for one in samples[name])
        yield Block(f"{name}, width {asked.width}: {1e3 * seconds:.2f} ms a step", lines)


# --- saves and loads -----------------------------------------------------------------------------


class Bus:
    """One copy of the state between the device and pinned memory: as fast as the bus is."""

    def __init__(self, training: Training, asked: Asked) -> None:
        self.tensors = training.trained.local_tensors()
        pinned = asked.device != "cpu"
        self.buffers = [
            torch.empty(one.shape, dtype=one.dtype, pin_memory=pinned) for one in self.tensors
        ]
        self.nbytes = sum(one.nbytes for one in self.tensors)
        self._module = asked.module

    def out(self) -> float:
        """Seconds of a copy to the host."""
        return self._copied(self.buffers, self.tensors)

    def back(self) -> float:
        """Seconds of a copy to the device, of the same values."""
        return self._copied(self.tensors, self.buffers)

    def _copied(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
        self._module.synchronize()
        started = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        self._module.synchronize()
        return time.perf_counter() - started


def measure_saves(training: Training, bus: Bus, asked: Asked) -> Block:
    blocked: dict[str, list[float]] = {"ours": [], "DCP, a stager kept": []}
    of_bus: list[float] = []
    starts: dict[str, Callable[[], Wait]] = {
        "ours": training.ours,
        "DCP, a stager kept": partial(training.dcp, stager=training.stager),
    }
    for number in range(asked.rounds + 2):  # two that do not count: buffers, plans, stagers
        for name, start in starts.items():
            training.step()
            one_copy = bus.out()
            training.clock.taken()
            wait = start()
            training.step()
            spent = training.clock.taken()
            done: Any = wait()
            training.clear()
            if number > 1:
                blocked[name].append(spent / one_copy)
            if number > 1 and name == "ours":
                staged = [span for span in done.spans if span.phase == "stage" and span.nbytes]
                bytes_per_second = sum(s.nbytes for s in staged) / sum(s.seconds for s in staged)
                of_bus.append(bytes_per_second / (bus.nbytes / one_copy))
    bars = {"ours": "<= 0.05", "DCP, a stager kept": "1.5 to 2"}
    lines = [
        row(f"blocked, {name}", f"{most_of(statistics.median(values)):.3f} copies", bars[name])
        for name, values in blocked.items()
    ]
    lines.append(row("speed of its copies, of the bus", f"{statistics.median(of_bus):.2f}", "1"))
    gib_per_second = bus.nbytes / GIB / bus.out()
    title = f"background saves, {asked.gib:g} GiB; the bus {gib_per_second:.2f} GiB/s out"
    return Block(title, lines)


def measure_loads(training: Training, bus: Bus, asked: Asked) -> Block:
    ours, theirs = (str(Path(asked.directory) / name) for name in ("loads", "dcp-loads"))
    state = training.trained.state
    ckpt.save(state, ours, step=1)
    model, optimizer = get_state_dict(training.trained.model, training.trained.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=theirs)

    def load_dcp() -> None:
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=theirs)
        asked.module.synchronize()

    def load_ours() -> None:
        ckpt.load(state, ours)
        asked.module.synchronize()

    candidates = {"ours": load_ours, "dcp": load_dcp, "bus": bus.back}
    samples = interleaved(candidates, rounds=asked.rounds, between=lambda name: None)
    lines = [
        row("speed of a load, of DCP's", f"{speed(samples, 'ours', 'dcp'):.2f}", ">= 1"),
        row("speed of a load, of the bus", f"{speed(samples, 'ours', 'bus'):.2f}", "<= 1"),
    ]
    return Block(f"loads, {asked.gib:g} GiB, read from {asked.directory}", lines)


def rank_main(asked: Asked) -> list[Block]:
    """One rank: all of it."""
    warnings.simplefilter("ignore")
    steps = list(measure_steps(asked))
    training = Training(int(asked.gib * GIB), Path(asked.directory), asked.device)
    bus = Bus(training, asked)
    return [*steps, measure_saves(training, bus, asked), measure_loads(training, bus, asked)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=accelerator_here())
    parser.add_argument("--width", type=int, help="of the model; 4096, on the CPU 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=float, help="of the state that is saved; 4, on the CPU 0.05")
    parser.add_argument("--directory", default=None)
    given = parser.parse_args()
    if not given.device:
        print(
            "This machine has no accelerator that torch can use: nothing was measured. "
            "`make bench-gpu DEVICE=cpu` runs the same code on the CPU, in small."
        )
        return 0
    small = given.device == "cpu"
    if small:
        print("The CPU stands in for a device: this shows that the benchmark runs, no more.")
    for kind in ("one", "several"):
        setup = SETUPS[kind](given.device)
        why = why_not(setup)
        if why:
            print(f"\nseveral devices: not measured, {why}")
            continue
        print(f"\n== {setup.ranks} on {given.device}", flush=True)
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            asked = Asked(
                given.device,
                given.width or (64 if small else 4096),
                given.rounds,
                given.gib or (0.05 if small else 4.0),
                directory,
            )
            blocks, *_ = run(setup, rank_main, asked, timeout_seconds=3600)
        for block in blocks:
            report(block.title, block.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
