"""One rank of the training. Started by the demo; torchrun could start it as well.

Whatever the number of ranks, a step trains on the same sequences: each rank takes its share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import ckpt
from ckpt.process import store_of
from examples.demo.data import batch_of, read_corpus
from examples.demo.model import CONTEXT, ByteLM
from storage import Store

SEQUENCES = 16
KEEP = ckpt.KeepLatest(2) | ckpt.KeepEvery(60)


class Progress:
    """How far the training is; part of the state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    """Train from the latest checkpoint, or from the beginning, to `--steps`."""
    arguments = _arguments()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting_point = os.environ.get("INIT_METHOD", "env://")
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size)

    torch.manual_seed(0)
    model = ByteLM()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.steps)
    progress = Progress()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "progress": progress}
    options: dict[str, Any] = {"storage_options": json.loads(arguments.storage_options)}

    if arguments.straggle_at:
        store = store_of(
            arguments.url, storage_options=options["storage_options"], call="Checkpointer"
        )
        if rank == world_size - 1:
            never_store(store, arguments.straggle_at)
    every = arguments.save_every
    policy = ckpt.EverySteps(every) | ckpt.OnPreemption() if every else ckpt.Never()
    if arguments.hosts:
        near_every = ckpt.EverySteps(arguments.near_every)
        options["near"] = ckpt.Near(arguments.hosts[rank], every=near_every, replicas=1)
    corpus = read_corpus()
    with (
        ckpt.Checkpointer(state, arguments.url, save=policy, keep=KEEP, **options) as checkpointer,
        open(arguments.losses, "w", encoding="utf-8") as losses,
    ):
        if arguments.resume:
            report = checkpointer.restore(arguments.resume_step)
            if arguments.hosts and report is not None:
                note_restore(report, f"{arguments.losses}.restored-{rank}")
        for step in range(progress.step + 1, (arguments.until or arguments.steps) + 1):
            data = batch_of(corpus, step, sequences=SEQUENCES, length=CONTEXT + 1)[rank::world_size]
            logits = model(data[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total = loss.detach() / world_size
            dist.all_reduce(total)
            if rank == 0:
                losses.write(json.dumps({"step": step, "loss": total.item()}) + "\n")
                losses.flush()
            progress.step = step
            checkpointer.step(step, metric=total.item())


def note_restore(report: ckpt.reports.RestoreReport, file: str) -> None:
    """Write down where a state came from, for the demo."""
    sources = dict(report.nbytes_by_source)
    facts = {"step": report.step, "origin": report.origin, "nbytes": sources}
    Path(file).write_text(json.dumps(facts), encoding="utf-8")


def never_store(store: Store, step: int) -> None:
    """From now on this rank never stores its part of `step`: the demo has to kill a save that is
    under way, and this one never ends.
    """
    create = store.create

    def create_unless(key: str, nbytes: int, **how: Any) -> Any:
        while key.startswith(f"steps/{step:08d}-"):
            time.sleep(1)
        return create(key, nbytes, **how)

    store.create = create_unless  # type: ignore[method-assign]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="where checkpoints go")
    parser.add_argument("--storage-options", default="{}", help="JSON")
    parser.add_argument("--losses", required=True, help="file for the losses, one JSON per line")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--until", type=int, default=0, help="end after this one of the steps")
    parser.add_argument("--save-every", type=int, default=0, help="0 saves nothing")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-step", type=int, help="default: the latest")
    parser.add_argument("--straggle-at", type=int, help="the last rank hangs in this save")
    parser.add_argument("--hosts", nargs="*", default=[], help="of each rank: its host's folder")
    parser.add_argument("--near-every", type=int, default=5, help="near saves, to the folders")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    finally:
        dist.destroy_process_group()
