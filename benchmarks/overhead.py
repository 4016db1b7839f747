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
from benchmarks.measure import Sample, measured, ratio, report, row
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


def blocks(directory: str, count: int) -> tuple[dict[str, list[Sample]], float]:
    """Blocks with a save and without, in turn, and all seconds inside of our calls."""
    warnings.filterwarnings("ignore")
    training = Training()
    samples: dict[str, list[Sample]] = {"saves": [], "none": []}
    inside = 0.0
    with ckpt.Checkpointer(
        training.state, str(Path(directory) / "run"), save=ckpt.Never(), keep=ckpt.KeepLatest(2)
    ) as checkpointer:

        def block(saves: bool) -> float:
            began = time.perf_counter()
            if saves:
                checkpointer.save_now()
            called = time.perf_counter() - began
            training.train(SAVE_EVERY, checkpointer)
            trained = time.perf_counter()
            if saves:
                checkpointer.wait()
            return called + time.perf_counter() - trained

        for number in range(-2, 2 * count):
            kind = "saves" if number % 4 in (0, 3) else "none"  # neither is always the later one
            spent: list[float] = []
            sample = measured(lambda kind=kind, spent=spent: spent.append(block(kind == "saves")))
            if number >= 0:
                samples[kind].append(sample)
                inside += spent[0] * (kind == "saves")
    return samples, inside


def main() -> None:
    parser = argparse.ArgumentParser(description="training with saves against training without")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        results = run_ranks(
            arguments.ranks, blocks, directory, arguments.blocks, timeout_seconds=3600.0
        )
        kept = ckpt.list_steps(str(Path(directory) / "run"))
    samples, inside = results[0]
    assert len(kept) == 2 and all(len(kind) == arguments.blocks for kind in samples.values())
    wall = [
        a.wall_seconds / b.wall_seconds - 1
        for a, b in zip(samples["saves"], samples["none"], strict=True)
    ]
    step_ms = 1000 * statistics.median(s.wall_seconds for s in samples["none"]) / SAVE_EVERY
    total = sum(sample.wall_seconds for sample in samples["saves"])
    every = f"a save every {SAVE_EVERY} steps"
    report(
        f"the demo's model on {arguments.ranks} ranks, {arguments.blocks} blocks of {SAVE_EVERY} "
        f"steps of {step_ms:.0f} ms with a save, as many without ({min(wall):+.0%} to "
        f"{max(wall):+.0%})",
        [
            row(f"training longer by {every}", f"{statistics.median(wall):+.1%}", "<= +3 %"),
            row(
                f"CPU seconds of all ranks with {every}",
                f"{ratio(samples, 'saves', 'none', 'cpu_seconds') - 1:+.1%}",
                "<= +3 %",
            ),
            row("of that time, inside of save_now and wait", f"{inside / total:.2%}", "none"),
        ],
    )


if __name__ == "__main__":
    main()
