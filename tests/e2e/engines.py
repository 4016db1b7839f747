"""One small model under every engine, for tests that save under one and load under another.

The model has a channels-last convolution, BatchNorm, uneven and tied-free linear layers. Every
engine is built from the same seed; `Setup` names the engine, the optimizer and what a rank needs to
know.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Engine = Literal["fsdp2", "hsdp", "tp", "fsdp+tp", "fsdp1-flat", "fsdp1-orig", "ddp", "plain"]
ENGINES_BY_SIZE: dict[int, tuple[Engine, ...]] = {
    1: ("plain", "fsdp2", "ddp"),
    2: ("fsdp2", "tp", "fsdp1-flat", "fsdp1-orig", "ddp"),
    3: ("fsdp2", "fsdp1-flat", "fsdp1-orig", "ddp"),
    4: ("fsdp2", "hsdp", "fsdp+tp", "fsdp1-flat", "fsdp1-orig", "ddp"),
}


class Net(nn.Module):
    """Images of 3 x 6 x 6 to 7 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Linear(128, 10), nn.Tanh(), nn.Linear(10, 6))
        self.head = nn.Linear(6, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.conv(images))).flatten(1)
        logits: torch.Tensor = self.head(torch.tanh(self.body(features)))
        return logits


class Training(NamedTuple):
    """A model under an engine, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensor_parallel: int = 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def step(self, seed: int) -> float:
        """One step on a batch that depends on the seed and the data rank; returns the loss."""
        rank = dist.get_rank() // self.tensor_parallel if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        images = torch.randn(4, 3, 6, 6, generator=generator)
        self.optimizer.zero_grad()
        loss = self.model(images).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def build(engine: Engine, optimizer: str, seed: int = 0) -> Training:
    """The model under `engine` on all ranks of the default group."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _wrap(engine, Net())
    tensor_parallel = 2 if engine in ("tp", "fsdp+tp") else 1
    if optimizer == "adamw":
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return Training(model, adamw, tensor_parallel)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(model, sgd, tensor_parallel)


def _wrap(engine: Engine, net: Net) -> nn.Module:
    cpu = torch.device("cpu")
    if engine == "plain":
        return net
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine in ("fsdp1-flat", "fsdp1-orig"):
        return FullyShardedDataParallel(
            net,
            device_id=cpu,
            auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
            use_orig_params=engine == "fsdp1-orig",
        )
    size = dist.get_world_size()
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    elif engine == "tp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    elif engine == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    if engine in ("tp", "fsdp+tp"):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net.body, mesh["tp"], plan)
    if engine == "tp":
        return net
    net.to(memory_format=torch.contiguous_format)  # fully_shard refuses channels-last
    data_mesh = mesh["dp"] if engine == "fsdp+tp" else mesh
    fully_shard(net.body, mesh=data_mesh)
    fully_shard(net, mesh=data_mesh)
    return net


def full_model(training: Training) -> dict[str, torch.Tensor]:
    """The whole model as torch itself gathers it, without our code: the reference."""
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gathered = get_model_state_dict(training.model, options=options)
    return {name: tensor.clone() for name, tensor in gathered.items()}
