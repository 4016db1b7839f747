"""A training to leave running: it saves in the background, keeps the best, ends cleanly on SIGTERM,
and continues where it was, on any number of ranks.

torchrun --nproc-per-node 2 examples/train_service.py runs/service
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt


def train(url: str, steps: int) -> None:
    """Train for `steps` more steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Random states are each rank's own: on more ranks than saved, some get the same one.
    rng = ckpt.rng_state(on_reshard=lambda states, rank, size: states[rank % len(states)])
    state = {"model": model, "optimizer": optimizer, "rng": rng}
    with ckpt.Checkpointer(
        state,
        url,
        save=ckpt.EverySteps(10) | ckpt.OnPreemption(grace_seconds=25) | ckpt.AtExit(),
        keep=ckpt.KeepLatest(2) | ckpt.KeepBest(1, mode="min"),
    ) as checkpointer:
        resumed = checkpointer.restore()  # the newest that is whole; None when there is none yet
        for step in checkpointer.steps(steps + (resumed.step if resumed else 0)):
            data = torch.randn(8, 64)
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(step, metric=float(loss.detach()))
    if dist.get_rank() == 0:
        print(f"resumed: {resumed.step if resumed else 'no'}, saved: {checkpointer.last_saved}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], steps=25)
