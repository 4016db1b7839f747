"""What the engine and saves cost on an accelerator, against torch's and the limits of its bus.

    make bench-gpu                      on this machine's accelerator
    make bench-gpu DEVICE=cpu           the same code where there is none, in small
    python -m benchmarks.on_device [--device cuda] [--parts steps saves ...] [--rounds 7]
                                   [--widths 1024 4096] [--gib 4] [--directory DIR] [--json FILE]

One rank; where there are 2 or 4 devices, that many over their own collectives too. Ours and torch's
classes share a process and take turns in every round, and ratios are medians over rounds.

steps: time by the device's events, peak and reserved memory over the shards, and kernels, copies
and host waits as the profiler sees them, of four units of nine members in bf16 mixed precision,
with DDP as a third; wrapper: the same of the wrapper. compiled: the same with compiled units.
saves: what a background save keeps from the training, in units of one copy of the state into
pinned memory, and how fast its copies are. loads: into the device's memory. near: the same for a
near tier, and the recovery from it. dicts: full, sharded and local state dicts. DIR should lie in
memory, or saves and loads measure a disk. FILE gets one line of JSON for each block.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import ckpt
from benchmarks.async_save import Training, Wait
from benchmarks.device_counts import Layers
from benchmarks.measure import interleaved, most_of, report, row, speed
from ckpt.state_dict.api import model_state_dict, optimizer_state_dict
from ckpt.state_dict.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from tests.gpu.__main__ import accelerator_here
from tests.gpu.real import OnDevice
from tests.gpu.setups import SETUPS, run, why_not
from tests.streams.training import Run

GIB = 1 << 30
MIB = 1 << 20
ROWS = 2048  # of a batch
PARTS = ("steps", "wrapper", "ddp", "saves", "loads", "near", "dicts", "compiled")
ENGINES = {
    "torch's fully_shard": ("torch", "fully"),
    "fully_shard": ("ours", "fully"),
    "torch's wrapper": ("torch", "flat"),
    "the wrapper": ("ours", "flat"),
}
PEERS = {"fully_shard": "torch's fully_shard", "the wrapper": "torch's wrapper"}
LOW = (torch.bfloat16, torch.float32, None)


class Block(NamedTuple):
    """What was measured together."""

    title: str
    lines: list[str]


class Asked(NamedTuple):
    """What the command line says."""

    device: str
    widths: tuple[int, ...]
    rounds: int
    gib: float
    directory: str
    parts: tuple[str, ...] = PARTS
    json: str = ""
    alone: bool = False
    """Saves of the peer, which takes long where states are large, are left out."""

    @property
    def module(self) -> Any:
        """torch's module for the device."""
        return torch.get_device_module(self.device)


# --- steps ---------------------------------------------------------------------------------------


class Engine:
    """One engine's model and what can be measured of its steps."""

    def __init__(
        self, who: str, surface: str, asked: Asked, width: int, *, compiled: bool = False
    ) -> None:
        where = torch.device(asked.device, None if asked.device == "cpu" else current(asked))
        model = OnDevice(who, surface, where=where)
        torch.manual_seed(0)
        with where:  # the host would take long to draw gigabytes
            net: Any = Layers(width)
        for block in net.blocks if compiled else ():
            block.compile()
        self.asked = asked
        self.model = (
            nn.parallel.DistributedDataParallel(net)
            if surface == "ddp"
            else Run.wrap(model, net, mesh=(dist.get_world_size(),), low=LOW)
        )
        self.autocast = surface == "ddp" and torch.autocast(asked.device, torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        # Small where a CPU computes.
        self.rows = torch.randn(ROWS if width >= 512 else 16, width).to(where)

    def step(self) -> None:
        """One step, as far as the host."""
        if self.autocast:
            with self.autocast:
                loss = self.model(self.rows).sum()
        else:
            loss = self.model(self.rows).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole_step(self) -> None:
        """One step, until the device has done it."""
        self.step()
        self.asked.module.synchronize()

    def seconds(self, steps: int = 5) -> float:
        """Of one step, by the device's events where it has some: mean of a few in a row."""
        module = self.asked.module
        if self.asked.device == "cpu":
            started = time.perf_counter()
            self.step()
            return time.perf_counter() - started
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            self.step()
        end.record()
        module.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / steps

    def peaks(self) -> tuple[int, int]:
        """What steps take over what lay there before, as tensors and as the allocator's memory."""
        module = self.asked.module
        self.whole_step()
        gc.collect()
        module.empty_cache()
        module.reset_peak_memory_stats()
        before = int(module.memory_allocated())
        for _ in range(3):
            self.whole_step()
        return (
            int(module.max_memory_allocated()) - before,
            int(module.max_memory_reserved()) - before,
        )

    def counted(self) -> Counter[str]:
        """Of one step: what the device was given and for what the host waited; operators too."""
        own = ProfilerActivity.__members__.get(self.asked.device.upper(), ProfilerActivity.CPU)
        with profile(activities=list({ProfilerActivity.CPU, own})) as profiler:
            self.whole_step()
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


def measure_steps(asked: Asked, part: str) -> Iterator[Block]:
    for width in asked.widths[:1] if part == "compiled" else asked.widths:
        if part == "ddp":
            yield against_ddp(width, asked)
        else:
            name = "the wrapper" if part == "wrapper" else "fully_shard"
            yield measured_pair(name, PEERS[name], width, asked, compiled=part == "compiled")
        free(asked)


def free(asked: Asked) -> None:
    gc.collect()
    if hasattr(asked.module, "empty_cache"):
        asked.module.empty_cache()


def measured_pair(name: str, peer: str, width: int, asked: Asked, *, compiled: bool) -> Block:
    counts_memory = hasattr(asked.module, "max_memory_allocated")
    engines: dict[str, Engine] = {}
    peaks: dict[str, tuple[int, int]] = {}
    for one in (peer, name):
        free(asked)
        engines[one] = Engine(*ENGINES[one], asked, width, compiled=compiled)
        if counts_memory:
            peaks[one] = engines[one].peaks()
    times = in_turn({one: engine.seconds for one, engine in engines.items()}, asked.rounds)
    counts = {one: engine.counted() for one, engine in engines.items()}
    lines = [row("time of a step, of torch's", ratios_text(times[name], times[peer]), "<= 1.0")]
    for what in sorted(counts[name] | counts[peer]):
        lines.append(row(what, str(counts[name][what]), f"<= {counts[peer][what]}"))
    if not counts[name]["kernels"]:
        lines.append(f"kernels: not measured, the profiler sees none of {asked.device}")
    if counts_memory:
        for number, what in enumerate(("peak", "reserved")):
            mine, other = (peaks[one][number] / MIB for one in (name, peer))
            lines.append(row(f"{what} MiB over shards", f"{mine:.0f}", f"<= 0.9 of {other:.0f}"))
    else:
        lines.append(f"peak memory: not measured, torch counts none for {asked.device}")
    seconds = statistics.median(times[name])
    how = "compiled, " if compiled else ""
    return Block(f"{name}, {how}width {width}: {1e3 * seconds:.2f} ms a step", lines)


def against_ddp(width: int, asked: Asked) -> Block:
    engines = {
        "DDP": Engine("torch", "ddp", asked, width),
        "fully_shard": Engine("ours", "fully", asked, width),
    }
    times = in_turn({one: engine.seconds for one, engine in engines.items()}, asked.rounds)
    text = ratios_text(times["fully_shard"], times["DDP"])
    return Block(
        f"fully_shard beside DDP under autocast, width {width}",
        [row("time of a step, of DDP's", text, "none")],
    )


def in_turn(candidates: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for number in range(rounds + 1):
        order = order[1:] + order[:1]
        for name in order:
            taken = candidates[name]()
            if number:
                seconds[name].append(taken)
    return seconds


def ratios_text(mine: Sequence[float], other: Sequence[float]) -> str:
    """Median and range of ratios over rounds."""
    ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


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
    starts: dict[str, Callable[[], Wait]] = {
        "ours": training.ours,
        "DCP, a stager kept": partial(training.dcp, stager=training.stager),
        "DCP, its default": training.dcp,
    }
    if asked.alone:
        starts = {"ours": training.ours}
    blocked: dict[str, list[float]] = {name: [] for name in starts}
    milliseconds: list[float] = []
    of_bus: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in starts}
    during: dict[str, list[float]] = {name: [] for name in starts}
    lines = []
    step = timed(training.step, asked)
    for number in range(asked.rounds + 2):  # two that do not count: buffers, plans, stagers
        for name, start in list(starts.items()):
            alone = step()
            one_copy = bus.out()
            training.clock.taken()
            started = time.perf_counter()
            try:
                wait = start()
            except Exception as error:  # a peer of this torch that does not work is not measured
                if name == "ours":
                    raise
                lines.append(f"blocked, {name}: not measured, {type(error).__name__}: {error}")
                del starts[name], blocked[name], whole[name], during[name]
                continue
            first = step()
            spent = training.clock.taken()
            during_save = (step() + first) / (2 * alone)
            done: Any = wait()
            seconds = time.perf_counter() - started
            training.clear()
            if number > 1:
                blocked[name].append(spent / one_copy)
                whole[name].append(seconds)
                during[name].append(during_save)
            if number > 1 and name == "ours":
                milliseconds.append(1e3 * spent)
                staged = [span for span in done.spans if span.phase == "stage" and span.nbytes]
                bytes_per_second = sum(s.nbytes for s in staged) / sum(s.seconds for s in staged)
                of_bus.append(bytes_per_second / (bus.nbytes / one_copy))
    bars = {"ours": "<= 0.02 + 5 ms"}
    lines += [
        row(
            f"blocked, {name}",
            f"{most_of(statistics.median(values)):.3f} copies",
            bars.get(name, "none"),
        )
        for name, values in blocked.items()
    ]
    lines.append(row("blocked, ours, ms", f"{statistics.median(milliseconds):.1f}", "5 + 0.02"))
    for name in (one for one in whole if one != "ours"):
        lines.append(row(f"whole save, of {name}", ratios_text(whole["ours"], whole[name]), "1"))
    lines += [
        row(
            f"two steps with a save, {name}",
            f"{statistics.median(values):.2f} of two alone",
            "none",
        )
        for name, values in during.items()
    ]
    lines.append(row("speed of its copies, of the bus", f"{statistics.median(of_bus):.2f}", "1"))
    gib_per_second = bus.nbytes / GIB / bus.out()
    title = f"background saves, {asked.gib:g} GiB; the bus {gib_per_second:.2f} GiB/s out"
    return Block(title, lines)


def measure_loads(training: Training, bus: Bus, asked: Asked) -> Block:
    ours, theirs = (str(Path(asked.directory) / name) for name in ("loads", "dcp-loads"))
    state = training.trained.state
    started = time.perf_counter()
    ckpt.save(state, ours, step=1)
    saved = time.perf_counter() - started
    model, optimizer = get_state_dict(training.trained.model, training.trained.optimizer)
    started = time.perf_counter()
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=theirs)
    dcp_saved = time.perf_counter() - started

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
        row("speed of a load, of the bus", f"{speed(samples, 'ours', 'bus'):.2f}", "0.9"),
        row("first blocking save, of DCP's first", f"{saved / dcp_saved:.2f}", "<= 1"),
    ]
    return Block(f"loads, {asked.gib:g} GiB, read from {asked.directory}", lines)


def measure_near(training: Training, bus: Bus, asked: Asked) -> Block:
    root, tier = (str(Path(asked.directory) / name) for name in ("near-root", "near-tier"))
    state = training.trained.state
    blocked: list[float] = []
    options: dict[str, Any] = {
        "save": ckpt.Never(),
        "near": ckpt.Near(tier, every=ckpt.EverySteps(1)),
    }
    with ckpt.Checkpointer(state, root, **options) as checkpointer:
        checkpointer.save_now()
        for number in range(asked.rounds + 2):
            training.step()
            one_copy = bus.out()
            training.clock.taken()
            with training.clock.running():
                checkpointer.step(number + 1)
            training.step()
            spent = training.clock.taken()
            checkpointer.wait()
            if number > 1:
                blocked.append(spent / one_copy)
    back = bus.back()
    started = time.perf_counter()
    with ckpt.Checkpointer(state, root, **options) as checkpointer:
        restored = checkpointer.restore()
        asked.module.synchronize()
        seconds = time.perf_counter() - started
    assert restored is not None and restored.step == asked.rounds + 2, restored
    return Block(
        f"near tier, {asked.gib:g} GiB",
        [
            row("blocked", f"{statistics.median(blocked):.3f} copies", "0.02 + 5 ms"),
            row("speed of a recovery, of the bus", f"{back / seconds:.2f}", "0.7"),
        ],
    )


def measure_dicts(training: Training, asked: Asked) -> Block:
    model, optimizer = training.trained.model, training.trained.optimizer
    full, sharded = StateDictType.FULL, StateDictType.SHARDED
    live = {one.untyped_storage().data_ptr() for one in training.trained.local_tensors()}

    def own(value: Any) -> Any:
        """Without live memory, which torch's dicts are where nothing is gathered; ours never."""
        if isinstance(value, dict):
            return {key: own(one) for key, one in value.items()}
        local = value.to_local() if isinstance(value, DTensor) else value
        is_live = isinstance(local, torch.Tensor) and local.untyped_storage().data_ptr() in live
        return value.clone() if is_live else value

    def theirs(**options: bool) -> Callable[[], float]:
        chosen = StateDictOptions(**options)
        return timed(
            lambda: (
                own(get_model_state_dict(model, options=chosen)),
                own(get_optimizer_state_dict(model, optimizer, options=chosen)),
            ),
            asked,
        )

    pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "full, on the device": (
            timed(
                lambda: (
                    model_state_dict(model, full),
                    optimizer_state_dict(
                        model, optimizer, full, FullOptimStateDictConfig(offload_to_cpu=False)
                    ),
                ),
                asked,
            ),
            theirs(full_state_dict=True),
        ),
        "full, on the host": (
            timed(
                lambda: (
                    model_state_dict(model, full, FullStateDictConfig(offload_to_cpu=True)),
                    optimizer_state_dict(model, optimizer, full),
                ),
                asked,
            ),
            theirs(full_state_dict=True, cpu_offload=True),
        ),
        "sharded": (
            timed(
                lambda: (
                    model_state_dict(model, sharded),
                    optimizer_state_dict(
                        model, optimizer, sharded, ShardedOptimStateDictConfig(offload_to_cpu=False)
                    ),
                ),
                asked,
            ),
            theirs(),
        ),
        "local, of the wrapper": (local_dict("ours", asked), local_dict("torch", asked)),
    }
    lines = []
    for name, (mine, other) in pairs.items():
        times = in_turn({"ours": mine, "torch": other}, asked.rounds)
        free(asked)
        seconds = statistics.median(times["ours"])
        text = f"{ratios_text(times['ours'], times['torch'])}, {seconds:.3f} s"
        lines.append(row(f"{name}, of torch's time and its copy of live memory", text, "<= 1"))
    return Block(f"state dicts of fully_shard, {asked.gib:g} GiB", lines)


def local_dict(who: str, asked: Asked) -> Callable[[], float]:
    model: Any = Engine(who, "flat", asked, asked.widths[0]).model
    model.set_state_dict_type(model, torch_fsdp.StateDictType.LOCAL_STATE_DICT)
    return timed(model.state_dict, asked)


def timed(make: Callable[[], object], asked: Asked) -> Callable[[], float]:
    def run_once() -> float:
        asked.module.synchronize()
        started = time.perf_counter()
        made = make()
        asked.module.synchronize()
        taken = time.perf_counter() - started
        del made
        return taken

    return run_once


def rank_main(asked: Asked) -> list[Block]:
    """One rank: the parts that were asked for, in their order. A part that fails is a block that
    says so, and the others run.
    """
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGTERM, chain=True)  # ended from outside, it shows where it was
    print(f"  {torch.__version__}, {asked.parts}", flush=True)
    training: Any = None
    bus: Any = None
    blocks: list[Block] = []
    for part in asked.parts:
        try:
            if part in ("steps", "wrapper", "ddp", "compiled"):
                made: Iterable[Block] = measure_steps(asked, part)
            else:
                if training is None:
                    training = Training(int(asked.gib * GIB), Path(asked.directory), asked.device)
                    bus = Bus(training, asked)
                made = iter([measure(part, training, bus, asked)])
            for block in made:
                blocks.append(block)
                report(block.title, block.lines)
                if asked.json and dist.get_rank() == 0:
                    with open(asked.json, "a") as file:
                        print(json.dumps(block._asdict()), file=file)
        except Exception:
            if dist.get_world_size() > 1:
                raise  # the other ranks would wait
            blocks.append(Block(f"{part}: FAILED", [traceback.format_exc(limit=-8)]))
            report(*blocks[-1])
        free(asked)
    return blocks


def measure(part: str, training: Training, bus: Bus, asked: Asked) -> Block:
    if part == "dicts":
        return measure_dicts(training, asked)
    measures = {"saves": measure_saves, "loads": measure_loads, "near": measure_near}
    return measures[part](training, bus, asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=accelerator_here())
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--widths", type=int, nargs="+", help="1024 2896 8192; on the CPU 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=float, help="of the state that is saved; 4, on the CPU 0.05")
    parser.add_argument("--directory", default=None)
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--alone", action="store_true", help="saves without the peer's")
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
    failed = False
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
                tuple(given.widths or ((64,) if small else (1024, 2896, 8192))),
                given.rounds,
                given.gib or (0.05 if small else 4.0),
                directory,
                tuple(given.parts),
                given.json,
                given.alone,
            )
            blocks, *_ = run(setup, rank_main, asked, timeout_seconds=3600, forced=False)
        failed = failed or any("FAILED" in block.title for block in blocks)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
