"""Near checkpoints: what they cost a training, and how fast they come back.

    python -m benchmarks.near [--gib 1] [--rounds 7] [--blocks 12] [--directory DIR] [--memory DIR]
                              [--parts blocked recovery steps copies parity]

Two ranks of one host, whose tier is below `--memory`, a tmpfs. Five questions:

- blocked: seconds inside calls and hooks of the library per save, from the third save on, in units
  of one `memcpy` of this rank's state into memory that exists. Near saves and background saves to
  the disk take turns on the same state.
- recovery: a new Checkpointer and its `restore`, from the tier, against the same from a durable
  checkpoint that is not in the page cache, torch's DCP, and bare readers of the same bytes.
  Asserted: all bytes come from the own host, and the durable root is asked for none.
- steps: the demo's model, 20 steps with a near save every 5 against 20 without, in turn.
- copies: the same where each rank has a tier of its own, as on two hosts, and a copy of its files
  goes to the other one. Each has a core of its own; their network is this machine's.
- parity: three ranks as on three hosts, in turn with `parity=2` and `replicas=1`: a near save that
  is waited for, and a restore after one host has lost its directory. Asserted: the bytes that are
  kept and sent.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt
from benchmarks.async_save import Training as Model
from benchmarks.async_save import memcpy_seconds
from benchmarks.cold_load import drop_from_cache
from benchmarks.measure import (
    Sample,
    clear,
    interleaved,
    measured,
    most_of,
    ratio,
    report,
    row,
    speed,
    spread,
    wall,
)
from benchmarks.overhead import SAVE_EVERY
from benchmarks.overhead import Training as Demo
from benchmarks.save_load import GIB, Trained, dcp_load, dcp_save, raw_load, raw_save
from ckpt.near.saving import BYTES_COPIED
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import Observation, SavePolicy
from storage.ranges import address_of, aligned_buffer, copy_bytes
from tests.ranks import run_ranks

PARTS = ("blocked", "recovery", "steps", "copies", "parity")
NEAR_EVERY = 5


@dataclass(frozen=True, slots=True)
class InSomeBlocks(SavePolicy):
    """Every `steps` steps, from the first on, in those blocks of `block` steps that are of the kind
    "near": the last save of a block has steps beside it, too.
    """

    steps: int
    block: int

    needs_clock = False

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        in_block = kind_of((observation.step - 1) // self.block) == "near"
        return ("due",) if in_block and observation.step % self.steps == 1 else ()


def kind_of(block: int) -> str:
    """Of neighbouring blocks neither kind is always the later one."""
    return "near" if block % 4 in (0, 3) else "none"


# blocked -----------------------------------------------------------------------------------------


def measure_blocked(gib: float, rounds: int, directory: str, memory: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    training = Model(int(gib * GIB), Path(directory))
    copy = memcpy_seconds(training)
    saved: list[NearSaved] = []
    failed: list[NearFailed] = []

    def observe(event: object) -> None:
        saved.extend([event] if isinstance(event, NearSaved) else [])
        failed.extend([event] if isinstance(event, NearFailed) else [])

    ratios: dict[str, list[float]] = {"near": [], "beside": []}
    near = ckpt.Near(memory, every=ckpt.EverySteps(1))
    number = itertools.count(1)
    with ckpt.Checkpointer(
        training.trained.state,
        str(Path(directory) / "run"),
        save=ckpt.Never(),
        near=near,
        observers=[observe],
    ) as checkpointer:

        def near_save() -> Callable[[], object]:
            with training.clock.running():
                checkpointer.step(next(number))
            return checkpointer.wait

        for kind_round in range(rounds + 2):  # two that do not count: memory, plans
            for name, start in (("near", near_save), ("beside", training.ours)):
                training.step()
                one_copy = copy()
                dist.barrier()
                training.clock.taken()
                wait = start()
                training.step()
                blocked = training.clock.taken()
                wait()
                training.clear()
                if kind_round > 1:
                    ratios[name].append(blocked / one_copy)
    assert len(saved) == rounds + 2 and not failed, (len(saved), failed)
    shown = {name: most_of(statistics.median(each)) for name, each in ratios.items()}
    report(
        f"near saves of {gib:g} GiB of FSDP2 + AdamW, 2 ranks, {rounds} rounds: blocked",
        [
            row("blocked by a near save", f"{shown['near']:.3f} memcpy", "<= 0.05"),
            row("blocked by a background save to disk", f"{shown['beside']:.3f} memcpy", "<= 0.05"),
        ],
    )
    clear(Path(directory))
    clear(Path(memory))


# recovery ----------------------------------------------------------------------------------------


def measure_recovery(gib: float, rounds: int, directory: str, memory: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    trained, base = Trained(int(gib * GIB)), Path(directory)
    tensors = trained.local_tensors()
    raw, raw_near = base / "raw" / str(dist.get_rank()), Path(memory) / f"raw{dist.get_rank()}"
    near = ckpt.Near(memory, every=ckpt.EverySteps(1))
    roots = {"cold": str(base / "durable"), "near": str(base / "near")}
    ckpt.save(trained.state, roots["cold"], step=1)
    with ckpt.Checkpointer(trained.state, roots["near"], save=ckpt.Never(), near=near) as saver:
        saver.step(1)
        saver.wait()
        assert saver.last_near is not None and saver.last_near.step == 1
    dcp_save(trained, base / "dcp")
    raw_save(tensors, raw)
    raw_save(tensors, raw_near)
    drop_from_cache(base)
    kept = [aligned_buffer(tensor.nbytes) for tensor in tensors]
    reports: list[Any] = []
    opened: list[ckpt.Checkpointer] = []

    def restore(root: str, near: ckpt.Near | None) -> None:
        opened.append(ckpt.Checkpointer(trained.state, roots[root], save=ckpt.Never(), near=near))
        reports.append((root, opened[-1].restore()))

    def between(name: str) -> None:
        while opened:  # a training would go on with it; what its end takes is not measured
            opened.pop().close()
        drop_from_cache(base)

    def memcpy() -> None:
        for tensor, buffer in zip(tensors, kept, strict=True):
            copy_bytes(tensor.data_ptr(), address_of(buffer), tensor.nbytes)

    loads: dict[str, Callable[[], object]] = {
        "near": lambda: restore("near", near),
        "memcpy": memcpy,
        "preadv": lambda: raw_load(tensors, raw_near, checked=False),
        "preadv + crc32c": lambda: raw_load(tensors, raw_near, checked=True),
        "cold": lambda: restore("cold", None),
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "cold raw": lambda: raw_load(tensors, raw, checked=False),
    }
    loaded = interleaved(loads, rounds=rounds, between=between)
    for root, one in reports:
        sources = one.nbytes_by_source
        unused = ("durable", "other hosts") if root == "near" else ("own host", "other hosts")
        assert one.origin == ("near" if root == "near" else "durable"), one
        assert not any(sources[name] for name in unused), sources
    nbytes = sum(tensor.nbytes for tensor in tensors)
    read = next(one.nbytes_read for root, one in reports if root == "near")
    assert nbytes <= read <= 1.01 * nbytes, (read, nbytes)
    report(
        f"recovery of {gib:g} GiB of FSDP2 + AdamW, 2 ranks of a host, median of {rounds} rounds",
        [
            row("speed over a cold load", f"{speed(loaded, 'near', 'cold'):.2f}x", ">= 5x"),
            row("speed over DCP's cold load", f"{speed(loaded, 'near', 'dcp'):.2f}x", "none"),
            row(
                "speed over a bare cold read",
                f"{speed(loaded, 'near', 'cold raw'):.2f}x",
                "none",
            ),
            row("speed over memcpy", f"{speed(loaded, 'near', 'memcpy'):.2f}x", ">= 0.7x"),
            row(
                "speed over preadv from the tmpfs",
                f"{speed(loaded, 'near', 'preadv'):.2f}x",
                "none",
            ),
            row(
                "speed over preadv and crc32c there",
                f"{speed(loaded, 'near', 'preadv + crc32c'):.2f}x",
                "none",
            ),
            row(
                "of preadv and crc32c alone: speed over memcpy",
                f"{speed(loaded, 'preadv + crc32c', 'memcpy'):.2f}x",
                "none",
            ),
            row(
                "CPU seconds of memcpy's",
                f"{ratio(loaded, 'near', 'memcpy', 'cpu_seconds'):.2f}x",
                "none",
            ),
        ],
    )
    clear(base)
    clear(Path(memory))


# steps -------------------------------------------------------------------------------------------


def measure_steps(blocks: int, replicas: int, directory: str, memory: str) -> None:
    warnings.filterwarnings("ignore")
    if replicas:  # a core for each host: what one does takes nothing from the other
        cores = sorted(os.sched_getaffinity(0))
        for thread in map(int, os.listdir("/proc/self/task")):  # gloo's too
            os.sched_setaffinity(thread, {cores[dist.get_rank() % len(cores)]})
    training = Demo()
    samples: dict[str, list[Sample]] = {"near": [], "none": []}
    saved: list[NearSaved] = []
    failed: list[NearFailed] = []

    def observe(event: object) -> None:
        saved.extend([event] if isinstance(event, NearSaved) else [])
        failed.extend([event] if isinstance(event, NearFailed) else [])

    tier = Path(memory) / f"host{dist.get_rank() if replicas else 0}"
    near = ckpt.Near(tier, every=InSomeBlocks(NEAR_EVERY, SAVE_EVERY), replicas=replicas)
    with ckpt.Checkpointer(
        training.state,
        str(Path(directory) / "run"),
        save=ckpt.Never(),
        near=near,
        observers=[observe],
    ) as checkpointer:

        def block(kind: str) -> None:
            training.train(SAVE_EVERY, checkpointer)
            if kind == "near":
                checkpointer.wait()

        for number in range(4 + 2 * blocks):  # four that do not count
            kind = kind_of(number)
            sample = measured(lambda kind=kind: block(kind))  # type: ignore[misc]
            if number >= 4:
                samples[kind].append(sample)
    # A block begins behind the last step of the one before.
    expected = [
        step
        for step in range(1, training.step + 1, NEAR_EVERY)
        if kind_of((step - 1) // SAVE_EVERY) == "near"
    ]
    assert [one.report.step for one in saved] == expected and not failed, (saved, failed)
    copied = {one.report.counters.get(BYTES_COPIED, 0) > 0 for one in saved}
    assert copied == {bool(replicas)}, copied
    wall = [
        a.wall_seconds / b.wall_seconds - 1
        for a, b in zip(samples["near"], samples["none"], strict=True)
    ]
    step_ms = 1000 * statistics.median(s.wall_seconds for s in samples["none"]) / SAVE_EVERY
    blocked = [1000 * one.blocked_seconds for one in saved]
    cpu = ratio(samples, "near", "none", "cpu_seconds") - 1
    every = f"a near save every {NEAR_EVERY} steps"
    hosts = "2 hosts with a copy of each other's files" if replicas else "one host"
    report(
        f"the demo's model on 2 ranks of {hosts}, {blocks} blocks of {SAVE_EVERY} steps of "
        f"{step_ms:.0f} ms with near saves, as many without "
        f"({min(wall):+.0%} to {max(wall):+.0%})",
        [
            row(f"steps slower by {every}", f"{statistics.median(wall):+.1%}", "<= +3 %"),
            row(f"CPU seconds of all ranks with {every}", f"{cpu:+.1%}", "none"),
            row("blocked by one of them", f"{statistics.median(blocked):.1f} ms", "none"),
        ],
    )
    clear(Path(memory))


# parity ------------------------------------------------------------------------------------------


def measure_parity(gib: float, rounds: int, directory: str, memory: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    trained, rank, size = Trained(int(gib * GIB)), dist.get_rank(), dist.get_world_size()
    kinds: dict[str, dict[str, int]] = {
        "alone": {},
        "copy": {"replicas": 1},
        "parity": {"parity": size - 1},
    }
    saves: dict[str, list[Sample]] = {name: [] for name in kinds}
    restores: dict[str, list[Sample]] = {name: [] for name in kinds if name != "alone"}
    blocked: dict[str, list[float]] = {name: [] for name in kinds}
    kept: dict[str, float] = {}
    for number in range(rounds + 1):  # the first does not count
        for name, how in kinds.items():
            # A session of this process knows the root that it has begun: each round has its own.
            url, folder = (
                str(Path(directory) / f"{name}{number}"),
                Path(memory) / name / f"host{rank}",
            )
            saved: list[NearSaved] = []

            def observe(event: object, saved: list[NearSaved] = saved) -> None:
                saved.extend([event] if isinstance(event, NearSaved) else [])

            def opened(url: str = url, folder: Path = folder, how: Any = how) -> ckpt.Checkpointer:
                near = ckpt.Near(folder, every=ckpt.EverySteps(1), **how)
                return ckpt.Checkpointer(
                    trained.state, url, save=ckpt.Never(), near=near, observers=[observe], only=True
                )

            with opened() as saver:
                for step in (1, 2, 3):  # from the third on, no memory is fresh but that of copies

                    def save(step: int = step, saver: ckpt.Checkpointer = saver) -> None:
                        saver.step(step)
                        saver.wait()

                    sample = measured(save)
            assert [one.report.step for one in saved] == [1, 2, 3]
            files = sorted(folder.glob("*/steps/00000003-*/*.safetensors"))
            state = sum(
                p.stat().st_size for p in files if p.name == f"rank{rank:05d}-000.safetensors"
            )
            kept[name] = most_of(sum(p.stat().st_size for p in files) / state)
            copied = saved[-1].report.counters.get(BYTES_COPIED, 0)
            assert copied == 0 if name == "alone" else 0.99 < copied / state < 1.01, copied
            dist.barrier()
            if number:
                saves[name].append(sample)
                blocked[name].append(saved[-1].blocked_seconds)
            if name != "alone":
                if rank == 1:
                    shutil.rmtree(folder)  # the host has lost what it had
                again: list[ckpt.Checkpointer] = []
                reports: list[Any] = []

                def restore(
                    again: Any = again, reports: Any = reports, opened: Any = opened
                ) -> None:
                    again.append(opened())
                    reports.append(again[0].restore())

                sample = measured(restore)
                assert reports[0].origin == "near" and reports[0].step == 3, reports
                again[0].close()
                if number:
                    restores[name].append(sample)
            clear(Path(memory) / name)
    share = {name: f"{each:.3f} of a state" for name, each in kept.items()}
    assert kept["copy"] < 2.01 and kept["parity"] < 1.01 + 1 / (size - 1), kept
    report(
        f"near saves of {gib:g} GiB of FSDP2 + AdamW on {size} ranks as {size} hosts, {rounds} "
        "rounds; a copy at another host against parity of all",
        [
            *(row(f"{name}: kept on a host", share[name], "none") for name in kinds),
            *(row(f"{name}: a save", wall(saves, name), "none") for name in kinds),
            *(
                row(
                    f"{name}: CPU seconds of all ranks",
                    spread([one.cpu_seconds for one in saves[name]]),
                    "none",
                )
                for name in kinds
            ),
            *(row(f"{name}: blocked", spread(blocked[name]), "none") for name in kinds),
            *(
                row(f"{name}: a restore without a host", wall(restores, name), "none")
                for name in restores
            ),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    parser.add_argument("--memory", default="/dev/shm", help="a tmpfs")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as directory,
        tempfile.TemporaryDirectory(dir=given.memory) as memory,
    ):
        places = (directory, memory)
        sized = (given.gib, given.rounds, *places)
        if "blocked" in given.parts:
            run_ranks(2, measure_blocked, *sized, timeout_seconds=3600)
        if "recovery" in given.parts:
            run_ranks(2, measure_recovery, *sized, timeout_seconds=3600)
        if "steps" in given.parts:
            run_ranks(2, measure_steps, given.blocks, 0, *places, timeout_seconds=3600)
        if "copies" in given.parts:
            run_ranks(2, measure_steps, given.blocks, 1, *places, timeout_seconds=3600)
        if "parity" in given.parts:
            run_ranks(3, measure_parity, *sized, timeout_seconds=3600)


if __name__ == "__main__":
    main()
