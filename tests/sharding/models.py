"""Models, and the two engines under one interface, for tests that run the same body over both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Either(nn.Module):
    """Runs its two layers in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.second, self.first) if self.turned else (self.first, self.second):
            x = layer(x)
        return x


class Reentrant(nn.Module):
    """Runs what is inside under reentrant activation checkpointing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def block(first: int, hidden: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, last))


def even() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), block(8, 8, 8), nn.Linear(8, 4))


def uneven() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 7), block(7, 5, 3), nn.Linear(3, 1))


def tied() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Tied(), nn.Linear(WIDTH, 3))


def frozen() -> nn.Sequential:
    """All of the inner unit is frozen, so that units need not mix."""
    model = uneven()
    model[1].requires_grad_(False)
    return model


def partly_frozen() -> nn.Sequential:
    """One member of a unit is frozen; needs original parameters."""
    model = uneven()
    model[1][0].weight.requires_grad_(False)
    return model


def convolution() -> nn.Sequential:
    """Weights that lie channels last in memory, and buffers."""
    inner = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    return nn.Sequential(
        nn.Unflatten(1, (2, 3, 1)), inner.to(memory_format=torch.channels_last), nn.Flatten(1)
    )


def recomputed() -> nn.Sequential:
    model = uneven()
    model[1] = checkpoint_wrapper(model[1], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    return model


def reentrant() -> nn.Sequential:
    model = uneven()
    model[1] = Reentrant(model[1])
    return model


def nested() -> nn.Sequential:
    """`wrapped` makes three levels of it."""
    return nn.Sequential(
        nn.Linear(WIDTH, 7), nn.Sequential(block(7, 5, 3), nn.Linear(3, 3)), nn.Linear(3, 1)
    )


def batch_norm() -> nn.Sequential:
    """Buffers that differ between ranks: each sees its own batch."""
    inner = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return nn.Sequential(nn.Linear(WIDTH, 7), inner, nn.Linear(3, 1))


BUILDERS: dict[str, Callable[[], nn.Sequential]] = {
    "even": even,
    "uneven": uneven,
    "tied": tied,
    "frozen": frozen,
    "partly_frozen": partly_frozen,
    "convolution": convolution,
    "recomputed": recomputed,
    "reentrant": reentrant,
    "nested": nested,
    "batch_norm": batch_norm,
}


def build(name: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return BUILDERS[name]()


def engine(name: str) -> Any:
    """The class of that engine, "torch" or "ours", without the warnings that both are old."""
    if name == "ours":
        from sharding import FullyShardedDataParallel

        return FullyShardedDataParallel
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchEngine

    def wrap(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return TorchEngine(module, *args, device_id=torch.device("cpu"), **kwargs)

    wrap.summon_full_params = TorchEngine.summon_full_params  # type: ignore[attr-defined]
    return wrap


def wrapped(name: str, model: nn.Sequential, *, which: str = "1", **kwargs: Any) -> Any:
    """The model as a root unit around it and an inner one around its child `which`; where that is a
    tree of its own, with another inside.
    """
    wrap = engine(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        inner = getattr(model, which)
        if isinstance(inner, nn.Sequential) and isinstance(inner[0], nn.Sequential):
            inner[0] = wrap(inner[0], **kwargs)
        setattr(model, which, wrap(getattr(model, which), **kwargs))
        return wrap(model, **kwargs)


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(steps: int, size: int = 4, seed: int = 1) -> Iterator[Batch]:
    """The whole batch of each step, and this rank's part of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        whole = torch.randn(size * world, WIDTH, generator=generator)
        yield whole, whole[size * rank : size * (rank + 1)]


@contextmanager
def full(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The full parameters by bare name."""
    summon = type(model).summon_full_params
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with summon(model, writeback=False):
            yield {clean(key): value for key, value in model.named_parameters()}


def clean(name: str) -> str:
    drop = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "inner")
    return ".".join(part for part in name.split(".") if part not in drop)


def full_copies(model: Any) -> dict[str, torch.Tensor]:
    with full(model) as params:
        return {name: param.detach().clone() for name, param in params.items()}
