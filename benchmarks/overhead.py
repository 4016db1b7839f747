"""What saving costs a training: the demo's model, a save every 20 steps against none, in one run.

python -m benchmarks.overhead [--ranks 2] [--blocks 12]

One training runs through blocks of 20 steps that take turns: one kind begins with a save, the other
has none. A block ends when its save is committed, so that nothing of it falls into a block without.
Ratios are taken over pairs of neighbouring blocks, and their median is printed: what a busy machine
does to both cancels out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import ckpt
from benchmarks.measure import most_of, report, row
from examples.demo.data import batch_of, read_corpus
from examples.demo.model import CONTEXT, ByteLM
from tests.ranks import run_ranks

SAVE_EVERY = 20
SEQUENCES = 16


class Training:
    """The demo's training on this rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = ByteLM()
        mesh = init_device_mesh("cpu", (self.size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.corpus = read_corpus()
        self.step = 0
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int, checkpointer: ckpt.Checkpointer) -> None:
        for _ in range(steps):
            self.step += 1
            data = batch_of(self.corpus, self.step, sequences=SEQUENCES, length=CONTEXT + 1)
            mine = data[self.rank :: self.size]
            logits = self.model(mine[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            checkpointer.step(self.step)


def blocks(directory: str, count: int) -> tuple[list[float], list[float], float]:
    """Seconds of blocks with a save and without, and all seconds inside of our calls."""
    warnings.filterwarnings("ignore")
    training = Training()
    told: dict[bool, list[float]] = {True: [], False: []}
    inside = 0.0
    with ckpt.Checkpointer(
        str(Path(directory) / "run"), training.state, save=ckpt.Never(), keep=ckpt.KeepLatest(2)
    ) as checkpointer:
        for number in range(-4, 2 * count):
            # with, without, without, with: so that neither is always the later one
            saves = number % 4 in (0, 3)
            dist.barrier()
            began = time.perf_counter()
            if saves:
                checkpointer.save_now()
            called = time.perf_counter() - began
            training.train(SAVE_EVERY, checkpointer)
            trained = time.perf_counter()
            if saves:
                checkpointer.wait()
            called += time.perf_counter() - trained
            seconds = most_of(time.perf_counter() - began)
            if number >= 0:
                told[saves].append(seconds)
                inside += called * saves
    return told[True], told[False], inside


def main() -> None:
    parser = argparse.ArgumentParser(description="training with saves against training without")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        told = run_ranks(
            arguments.ranks, blocks, directory, arguments.blocks, timeout_seconds=3600.0
        )
        kept = ckpt.list_steps(str(Path(directory) / "run"))
    with_saves, without, inside = told[0]
    assert len(with_saves) == len(without) == arguments.blocks
    assert len(kept) == 2
    ratios = sorted(a / b for a, b in zip(with_saves, without, strict=True))
    overhead = statistics.median(ratios) - 1
    spread = f"{ratios[len(ratios) // 4] - 1:+.1%} to {ratios[-1 - len(ratios) // 4] - 1:+.1%}"
    step_ms = 1000 * statistics.median(without) / SAVE_EVERY
    report(
        f"the demo's model on {arguments.ranks} ranks, {arguments.blocks} blocks of {SAVE_EVERY} "
        f"steps of {step_ms:.0f} ms with a save, and as many without; middle half: {spread}",
        [
            row(f"training with a save every {SAVE_EVERY} steps", f"{overhead:+.1%}", "<= +3 %"),
            f"inside of save_now and wait: {inside / sum(with_saves):.2%} of that time",
        ],
    )


if __name__ == "__main__":
    main()
