"""A training that a cluster may preempt and start again, until all of its steps are done.

torchrun --nproc-per-node 2 examples/clusters/train.py runs/cluster --steps 200

The Slurm, Kubernetes, SkyPilot and Ray files in this folder run it; docs/howto/clusters.md explains
them. It needs no flag to resume. Its exit status says what to do next: 0 when all steps are done,
143 (the status of a process that SIGTERM ended) when it was preempted and has to be started again.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt

PREEMPTED = 143  # Kubernetes and Slurm would take 0 for the end of the training


class Progress:
    """How far the training is."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(url: str, steps: int, every: int, grace_seconds: float, step_seconds: float) -> None:
    """Train up to step `steps`. Needs a process group. Raises ckpt.Preempted, on all ranks, after
    SIGTERM on any of them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = Progress()
    with ckpt.Checkpointer(
        {"model": model, "optimizer": optimizer, "progress": progress},
        url,
        save=ckpt.EverySteps(every)
        | ckpt.OnSignal()
        | ckpt.OnPreemption(grace_seconds=grace_seconds)
        | ckpt.AtExit(),
        keep=ckpt.KeepLatest(3),
    ) as checkpointer:
        resumed = checkpointer.restore()
        say(f"resumed from step {resumed.step}" if resumed else "begins at step 0")
        for step in range(progress.step + 1, steps + 1):
            data = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(step_seconds)
            progress.step = step
            checkpointer.step(step)
    say(f"done after step {steps}")


def say(text: str) -> None:
    """One line for the job's log, from one rank."""
    if dist.get_rank() == 0:
        print(f"{text}, {dist.get_world_size()} ranks", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("url", help="where the checkpoints are: a path or s3://bucket/prefix")
    made.add_argument("--steps", type=int, default=1000, help="of the whole training")
    made.add_argument("--every", type=int, default=50, help="steps between saves")
    made.add_argument("--grace-seconds", type=float, default=25, help="from SIGTERM to SIGKILL")
    made.add_argument("--step-seconds", type=float, default=0, help="makes each step longer")
    return made


def main() -> int:
    arguments = parser().parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    try:
        train(**vars(arguments))
    except ckpt.Preempted as preempted:
        say(str(preempted))
        return PREEMPTED
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
