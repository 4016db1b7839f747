"""Start under torch's FullyShardedDataParallel and go on under this project's, from one checkpoint.

torchrun --nproc-per-node 2 examples/move_from_torch.py runs/moved
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchEngine

import ckpt
from sharding import FullyShardedDataParallel as OurEngine


def make_state(engine: Any) -> dict[str, Any]:
    """The same model under either engine, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = engine(model, device_id=torch.device("cpu"))
    return {"model": wrapped, "optimizer": torch.optim.AdamW(wrapped.parameters(), lr=1e-2)}


def train(state: dict[str, Any], steps: range) -> list[float]:
    """The loss of every step."""
    losses = []
    for step in steps:
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (state["model"](data) - data).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(url: str) -> None:
    """Five steps under torch, saved; five more under each engine must have equal losses."""
    dist.init_process_group("gloo")
    before = make_state(TorchEngine)
    train(before, range(5))
    ckpt.save(before, url, step=5)
    after = make_state(OurEngine)
    ckpt.load(after, url)
    theirs, ours = train(before, range(5, 10)), train(after, range(5, 10))
    assert ours == theirs, (ours, theirs)
    if dist.get_rank() == 0:
        print(f"five more steps, the same losses under both engines: {ours}")
    dist.barrier()  # a rank that leaves first would break what the others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
