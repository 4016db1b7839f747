"""The same small training under every way of holding parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.layout.models import Awkward, awkward, image

Params = Iterable[nn.Parameter]
MakeOptimizer = Callable[[Params], torch.optim.Optimizer]


def _fsdp1(module: Awkward, use_orig_params: bool) -> nn.Module:
    def unit(part: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            part, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )

    module.add_module("conv", unit(module.conv))
    module.add_module("body", unit(module.body))
    return unit(module)


def _fsdp2(module: Awkward) -> nn.Module:
    fully_shard(module.body)
    fully_shard(module)
    return module


def _hsdp(module: Awkward) -> nn.Module:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module.body, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _ddp(module: Awkward) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _bare(module: Awkward) -> nn.Module:
    return module


ENGINES: dict[str, Callable[[Awkward], nn.Module]] = {
    "bare": _bare,
    "bare_plain": _bare,
    "ddp": _ddp,
    "fsdp1_flat": partial(_fsdp1, use_orig_params=False),
    "fsdp1_orig": partial(_fsdp1, use_orig_params=True),
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
}

PLAIN_STRIDES = ("fsdp2", "hsdp", "bare_plain")  # fully_shard takes no channels-last parameters

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.002),
    "momentum": partial(torch.optim.SGD, lr=0.002, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
}


def model(engine: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The awkward model, of the same weights on all ranks, held as `engine` does."""
    return ENGINES[engine](awkward(seed, channels_last=engine not in PLAIN_STRIDES).to(dtype))


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None
) -> list[float]:
    """Train on the same data on all ranks, so that the mean of gradients is the gradient."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(image(step).to(next(module.parameters()).dtype)).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


class State:
    """A model, its optimizer and scheduler, as a user would put them into a state."""

    def __init__(
        self,
        engine: str,
        optimizer: str = "adamw",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model(engine, seed, dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.tree: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "step": 0,
        }

    def train(self, steps: range) -> list[float]:
        self.tree["step"] = steps.stop
        return train(self.model, self.optimizer, steps, self.scheduler)
