"""Train with this project's own engine, saving as it goes; go on where an earlier run stopped.

torchrun --nproc-per-node 2 examples/train_sharded.py runs/example [hybrid]

`hybrid` (4 ranks) shards over pairs of ranks and repeats the shards in each pair.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy


def make_model(hybrid: bool) -> FullyShardedDataParallel:
    """Three units: each linear layer, and the root with nothing of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    options: dict[str, Any] = {}
    if hybrid:
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]), use_orig_params=True, **options
    )


def train(url: str, steps: int, hybrid: bool) -> None:
    """Train for `steps` more steps, saving every 10."""
    dist.init_process_group("gloo")
    model = make_model(hybrid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if ckpt.list_steps(url):
        ckpt.load(state, url)
    elif dist.get_rank() == 0:
        print(sharding.explain(model))
    first = state["step"]
    for step in range(first + 1, first + steps + 1):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        if step % 10 == 0:
            report = ckpt.save(state, url, step=step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}, saved as {report.path}")
    dist.barrier()  # a rank that leaves first would break what the others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], steps=20, hybrid="hybrid" in sys.argv[2:])
