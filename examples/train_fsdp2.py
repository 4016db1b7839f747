"""Train a model sharded with FSDP2, saving as it goes, and go on where an earlier run stopped.

torchrun --nproc-per-node 4 examples/train_fsdp2.py runs/example
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt


def make_state() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
    """A sharded model, its optimizer, and the state of the training: modules and optimizers as they
    are, with whatever values belong to them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, {"model": model, "optimizer": optimizer, "step": 0}


def train(url: str, steps: int) -> None:
    """Train for `steps` more steps, saving every 10."""
    dist.init_process_group("gloo")
    model, optimizer, state = make_state()
    if ckpt.list_steps(url):
        report = ckpt.load(state, url)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: resumed from step {report.step}")
    first = int(str(state["step"]))
    for step in range(first + 1, first + steps + 1):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        if step % 10 == 0:
            report = ckpt.save(state, url, step=step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}, saved as {report.path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], steps=20)
