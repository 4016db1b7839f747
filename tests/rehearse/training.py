"""A training that resumes bit for bit, and forgets what it is asked to forget.

python tests/rehearse/training.py ROOT [what it forgets ...]
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt
from ckpt.state.rng import RandomStates


class Net(nn.Module):
    """Learns to give back what it gets, with everything that has a state."""

    queue: torch.Tensor

    def __init__(self, *, has_queue: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        self.register_buffer("queue", torch.zeros(4, 8), persistent=has_queue)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Keeps the newest batches, and mixes them in."""
        mixed = self.queue.mean()
        self.queue.copy_(torch.cat([self.queue[1:], batch.mean(0, keepdim=True)]))
        out: torch.Tensor = self.body(batch) + mixed
        return out


class Curriculum:
    """How hard the next batch is."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        """Its only number."""
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set it."""
        self.batches = state["batches"]


class Gradients:
    """Those that are accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Zeros where there is none."""
        return {
            name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
            for name, one in self._parameters.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set them."""
        for name, one in self._parameters.items():
            one.grad = state[name].clone()


class Random:
    """The random states without some, or those of the first rank for all."""

    def __init__(self, forgotten: set[str]) -> None:
        self._forgotten = forgotten

    def state_dict(self) -> dict[str, Any]:
        """What is saved of them."""
        states = [RandomStates().state_dict()]
        if "ranks" in self._forgotten:
            dist.broadcast_object_list(states, src=0)
        return {name: one for name, one in states[0].items() if name not in self._forgotten}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set those."""
        RandomStates().load_state_dict({**RandomStates().state_dict(), **state})


class Noise:
    """A generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Its state."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set it."""
        self.generator.set_state(state["generator"])


def main(root: str, forgotten: set[str]) -> None:
    """Train until somebody ends it."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank = 0
    if size > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(has_queue="queue" not in forgotten)
    model: nn.Module = DistributedDataParallel(net) if size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    averaged = AveragedModel(net)
    shadow = {name: one.detach().clone() for name, one in net.named_parameters()}
    data = TensorDataset(torch.randn(16, 8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=rank)
    own = None if "loader" in forgotten else torch.Generator()
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=own)
    progress = {"epoch": 0, "batch": 0}
    curriculum, noise = Curriculum(), Noise()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "averaged": averaged,
        "shadow": shadow,
        "curriculum": curriculum,
        "noise": noise,
        "gradients": Gradients(net),
        "progress": progress,
        "random": ckpt.PerRank(Random(forgotten), lambda states, rank, size: states[0]),
    }
    if "buffers" in forgotten:
        state["model"] = {**dict(net.named_parameters()), "queue": net.queue}
    for name in forgotten & state.keys():
        del state[name]
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    step = 0
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1000)) as saver:
        report = saver.restore()
        step = 0 if report is None else report.step
        if "epoch" in forgotten:
            progress["epoch"] = 0
        for epoch in range(progress["epoch"], 100):
            sampler.set_epoch(epoch)
            for index, (batch,) in enumerate(loader):
                if index < progress["batch"] and "position" not in forgotten:
                    continue
                hard = 0.01 * curriculum.batches + 0.01 * random.random()
                drawn = torch.randn(8, generator=noise.generator)
                other = torch.from_numpy(np.random.standard_normal(8)).float()
                loss = (model(batch + hard * drawn + 0.01 * other) - batch).square().mean()
                scaler.scale(loss).backward()
                if size > 1 or curriculum.batches % 2:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    scheduler.step()
                curriculum.batches += 1
                for buffer in net.buffers() if size > 1 else ():
                    dist.broadcast(buffer, 0)  # the average is that of all ranks
                averaged.update_parameters(net)
                for name, one in net.named_parameters():
                    shadow[name].lerp_(one.detach(), 0.1)
                step += 1
                progress["epoch"], progress["batch"] = epoch, index + 1
                saver.step(step)
            progress["batch"] = 0


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
