"""A trained state under each engine, changed on one rank, for tests of what ranks have differently.

Runs on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.world.torch_world import TorchWorld
from sharding import FullyShardedDataParallel, fully_shard

CPU = torch.device("cpu")
Change = Callable[[torch.optim.Optimizer], None]


def by_rows(module: nn.Module, shard: Callable[..., Any]) -> nn.Module:
    shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "ddp": DistributedDataParallel,
    "fully": lambda module: by_rows(module, fully_shard),
    "their_fully": lambda module: by_rows(module, their_fully_shard),
    "flat": lambda module: FullyShardedDataParallel(module, device_id=CPU),
    "orig": lambda module: FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True),
    "their_flat": lambda module: Theirs(module, device_id=CPU),
    "their_orig": lambda module: Theirs(module, device_id=CPU, use_orig_params=True),
}


def trained(engine: str, *, fused: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def first_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the first parameter of which this rank has state; the last rank shares it with another."""
    states = [optimizer.state.get(param) for param in optimizer.param_groups[0]["params"]]
    return next(state for state in states if state)


@contextmanager
def on_the_last(state: dict[str, Any], change: Change) -> Iterator[None]:
    """The optimizer's state, changed in place on the last rank for the time of the block."""
    optimizer = state["optim"]
    is_here = dist.get_rank() == dist.get_world_size() - 1
    contents = [content for held in optimizer.state.values() for content in held.values()]
    contents += [inside for content in contents if isinstance(content, list) for inside in content]
    tensors = [content for content in contents if isinstance(content, torch.Tensor)]
    kept = [tensor.detach().clone() for tensor in tensors]
    if is_here:
        change(optimizer)
    try:
        yield
    finally:
        for tensor, was in zip(tensors, kept, strict=True):
            if not torch.equal(tensor, was):
                tensor.detach().copy_(was)


def one_more(optimizer: torch.optim.Optimizer) -> None:
    first_state(optimizer)["step"].add_(1)


class Own(torch.optim.SGD):
    """Has a number, a count without dims and small tensors for each parameter."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param].update(calls=1, count=torch.tensor(1))
            if type(param) is nn.Parameter and param.grad is not None:
                self.state[param].update(
                    factors=torch.ones(3),
                    nested=[torch.ones(2), None],
                    moment=torch.ones_like(param),
                )


def more_of(name: str) -> Change:
    def change(optimizer: torch.optim.Optimizer) -> None:
        state = first_state(optimizer)
        content = state[name][0] if name == "nested" else state[name]
        if isinstance(content, torch.Tensor):
            content.detach().add_(1)
        else:
            state[name] = content + 1

    return change


def trained_by_own(engine: str) -> dict[str, Any]:
    """One weight after a step of `Own`."""
    model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4, bias=False)))
    optimizer = Own(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def refusal(call: Callable[[], Any]) -> list[str]:
    """The problems that end the call in InvalidState, the same on all ranks."""
    with pytest.raises(ckpt.errors.InvalidState) as caught:
        call()
    same_on_all_ranks(caught.value)
    return list(caught.value.problems)


def same_on_all_ranks(error: Exception) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(error))
    assert set(everyone) == {str(error)}, "one error on all ranks"


def noted_rounds(*names: str) -> list[str]:
    """The phases of the collectives of these names, as this process calls them from now on."""
    rounds: list[str] = []
    for name in names:
        real = getattr(TorchWorld, name)

        def noted(self: Any, phase: str, *args: Any, real: Any = real) -> Any:
            rounds.append(phase)
            return real(self, phase, *args)

        setattr(TorchWorld, name, noted)
    return rounds
