"""Train on whatever hosts there are: when one comes or goes, all go on from the newest near state.

On each host (FOLDER is in its memory or on its disk, STORE is shared by all):

torchrun --nnodes=1:2 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d \
    --rdzv-endpoint HOST:PORT examples/train_elastic.py FOLDER STORE 1000
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt


def train(folder: str, url: str, steps: int, step_seconds: float) -> None:
    """Train up to `steps` steps, in any number of lives. torchrun starts each of them."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    replicated = DistributedDataParallel(model)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    near = ckpt.Near(folder, every=ckpt.EverySteps(2))
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(500), near=near) as checkpointer:
        report = checkpointer.restore()
        origin = "nothing" if report is None else f"{report.origin} step {report.step}"
        rank, size = dist.get_rank(), dist.get_world_size()
        print(f"process {os.getpid()}, rank {rank} of {size}: from {origin}", flush=True)
        for step in range(int(str(state["step"])) + 1, steps + 1):
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            replicated(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            checkpointer.step(step)
            time.sleep(step_seconds)
            print(f"step {step} of {size}", flush=True)
    dist.barrier()  # a rank that leaves first would break what the others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), seconds)
