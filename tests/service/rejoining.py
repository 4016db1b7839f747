"""Trainings that lose a rank and go on in the processes that are left, for tests.

A `Trainer` is one process of it: it trains a small model under an engine, dies where it is told to,
and, when another one has died, joins the survivors in a new world and trains on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import RankFailed
from ckpt.process import world_of
from sharding import FullyShardedDataParallel, ModuleWrapPolicy

Engine = Literal["ddp", "fsdp2", "ours"]
ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2", "ours")
NOTICE_SECONDS = 60.0
GROUP_SECONDS = 120.0


def die() -> None:
    """As a machine does that loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_round(world: Any, phase: str, armed: list[bool]) -> None:
    """The next round of that name that this rank enters in `world`, or in any if that is the class
    of worlds, is its last, once `armed`.
    """
    enter = world._in_round

    def deadly(*how: Any) -> Any:
        if armed and how[-1] == phase:
            die()
        return enter(*how)

    world._in_round = deadly


def new_group(path: str, generation: int, survivors: Sequence[int]) -> None:
    """Initialise torch.distributed for the survivors alone, by their ranks of now."""
    rank = survivors.index(dist.get_rank())
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}.{generation}",
        rank=rank,
        world_size=len(survivors),
        timeout=timedelta(seconds=GROUP_SECONDS),
    )


def state_of(engine: Engine) -> dict[str, Any]:
    """A model at its beginning, the same on any number of ranks, under `engine`."""
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    elif engine == "ours":
        policy = ModuleWrapPolicy([nn.Linear])
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "step": 0}


@dataclass
class Trainer:
    """One process. `near` is the folder of its host; `lost` counts the worlds that were left."""

    url: str
    engine: Engine = "ddp"
    near: str = ""
    near_every: int = 2
    replicas: int = 0
    save_every: int = 5
    state: dict[str, Any] = field(default_factory=dict)
    service: ckpt.Checkpointer = field(init=False)
    generation: int = 0
    events: list[Any] = field(default_factory=list)
    _run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.state = state_of(self.engine)
        self.wrap()
        near = None
        if self.near:
            every = ckpt.EverySteps(self.near_every)
            near = ckpt.Near(self.near, every=every, replicas=self.replicas)
        self.service = ckpt.Checkpointer(
            self.state,
            self.url,
            save=ckpt.EverySteps(self.save_every),
            near=near,
            observers=[self.events.append],
            only=True,
        )

    def wrap(self) -> None:
        """What runs the model in the group of now."""
        model = self.state["model"]
        self._run = DistributedDataParallel(model) if self.engine == "ddp" else model

    def train(self, last: int, *, before_step: Callable[[int], object] = lambda step: None) -> None:
        """Train and call `step`, up to step `last`."""
        for step in range(int(self.state["step"]) + 1, last + 1):
            noise = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            self._run(torch.randn(3, 12, generator=noise)).square().mean().backward()
            self.state["optimizer"].step()
            self.state["optimizer"].zero_grad()
            self.state["step"] = step
            before_step(step)
            self.service.step(step)

    def notice(self) -> RankFailed:
        """Wait until the death of a rank is known here, as it is by the next call of `step`."""
        world = world_of()
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline:
            try:
                world.check_neighbour("training")
            except RankFailed as failure:
                return failure
            time.sleep(0.02)
        raise AssertionError("the death was not noticed")

    def rejoin(self, scratch: str, survivors: Sequence[int], **how: Any) -> Any:
        """Join the survivors, by their ranks of now, in a new world."""
        self.generation += 1
        new_group(scratch, self.generation, survivors)
        given = None
        if self.engine != "ddp":
            given = self.state = state_of(self.engine)
        report = self.service.rejoin(state=given, **how)
        self.wrap()
        return report

    def bits(self) -> list[torch.Tensor]:
        """The parameters and moments, whole, on every rank."""
        model, optimizer = self.state["model"], self.state["optimizer"]
        if self.engine == "ours":
            with FullyShardedDataParallel.summon_full_params(model):
                return [p.detach().clone() for p in model.parameters()]
        copies = []
        for parameter in model.parameters():
            moments = [moment for _, moment in sorted(optimizer.state[parameter].items())]
            for tensor in (parameter, *moments):
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                copies.append(whole.detach().clone())
        return copies


def assert_same(bits: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(bits) == len(expected)
    for mine, theirs in zip(bits, expected, strict=True):
        assert torch.equal(mine, theirs)
