"""Pipelines of `torch.distributed.pipelining`, trained, killed and resumed under other schedules.

Method: real gloo ranks. GPipe over two stages trains with a Checkpointer that saves in the
background at every step and keeps two, records the losses of two more steps, and is killed. What
resumes (interleaved 1F1B with two stages on each rank, 1F1B over four ranks, one process without a
pipeline) has to have the same losses, bit for bit: the arithmetic of each microbatch is the same.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import ckpt
from ckpt.errors import InvalidState, NoCheckpoint
from tests.conftest import Scale
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

LAYERS = 4
WIDTH = 6
MICROBATCHES = 4
SAVED = 4  # steps before the kill
MORE = 2  # steps after it


class Layers(nn.Module):
    """Some of the layers, under the names of the whole model."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            layer = nn.Linear(WIDTH, WIDTH)
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / 2)
                layer.bias.zero_()
            self.layers[str(number)] = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = (2 * MICROBATCHES, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Pipeline:
    """The stages of this rank, with an optimizer for each, and a schedule."""

    def __init__(self, schedule: Any, count: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        each = LAYERS // count
        self.stages = [
            PipelineStage(
                Layers(range(number * each, (number + 1) * each)),
                number,
                count,
                torch.device("cpu"),
            )
            for number in range(rank, count, size)
        ]
        self.optimizers = [
            torch.optim.AdamW(stage.submod.parameters(), lr=0.05) for stage in self.stages
        ]
        one_or_all = self.stages if count > size else self.stages[0]
        self.schedule = schedule(one_or_all, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self.state: dict[str, Any] = {
            "model": ckpt.Stages(*self.stages),
            "optim": ckpt.Stages(*self.optimizers),
            "n": 0,
        }

    def step(self, step: int) -> list[float]:
        """The losses of all microbatches, where the last stage is; nothing elsewhere."""
        inputs, target = batch_of(step)
        losses: list[torch.Tensor] = []
        args = (inputs,) if self.stages[0].is_first else ()
        is_last = self.stages[-1].is_last
        self.schedule.step(*args, **({"target": target, "losses": losses} if is_last else {}))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.state["n"] = step
        return [loss.item() for loss in losses]


def killed(root: str) -> None:
    """Trains, saves, records what comes after the last save, and dies without a word."""
    pipeline = Pipeline(ScheduleGPipe, 2)
    checkpointer = ckpt.Checkpointer(
        pipeline.state, f"{root}/run", save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(2), only=True
    )
    checkpointer.restore()
    for step in range(1, SAVED + 1):
        pipeline.step(step)
        checkpointer.step(step)
        checkpointer.wait()
    # A stage that the other rank forgets is missed before anything is written.
    own = pipeline.state if dist.get_rank() else {"n": 1}
    with pytest.raises(InvalidState, match=r"model: of 2 stages 0 is on no rank \(1 on rank 1\)"):
        ckpt.save(own, f"{root}/missing", step=1)
    losses = [pipeline.step(step) for step in range(SAVED + 1, SAVED + MORE + 1)]
    if losses[0]:
        Path(root, "losses").write_text(json.dumps(losses))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(root: str, schedule: Any, count: int) -> tuple[list[list[float]], int]:
    """The losses after a restore, and the step of what was restored."""
    pipeline = Pipeline(schedule, count)
    with ckpt.Checkpointer(pipeline.state, f"{root}/run", save=ckpt.Never()) as checkpointer:
        assert checkpointer.restore() is not None
        step = pipeline.state["n"]
        losses = [pipeline.step(n) for n in range(step + 1, step + MORE + 1)]
    return losses, step


def alone(root: str) -> list[list[float]]:
    """The losses of the whole model in one process, microbatch by microbatch."""
    model = Layers(range(LAYERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optim": optimizer, "n": 0}
    ckpt.load(state, f"{root}/run")
    losses = []
    for step in range(SAVED + 1, SAVED + MORE + 1):
        inputs, target = batch_of(step)
        own = []
        for x, y in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            own.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(own)
    return losses


def test_a_killed_pipeline_resumes_under_other_schedules_with_the_same_losses(
    tmp_path: Path, scale: Scale
) -> None:
    root = str(tmp_path)
    run_ranks(2, killed, root, allow_dead=range(2), timeout_seconds=180.0)
    losses = json.loads((tmp_path / "losses").read_text())
    assert len(losses) == MORE and len(losses[0]) == MICROBATCHES
    interleaved = run_ranks(
        2, resumed, root, ScheduleInterleaved1F1B, LAYERS, timeout_seconds=180.0
    )
    assert interleaved == [([[]] * MORE, SAVED), (losses, SAVED)]
    assert alone(root) == losses
    with ckpt.open(f"{root}/run", step=SAVED - 1) as kept:
        assert set(kept.keys()) >= {f"model.layers.{n}.weight" for n in range(LAYERS)}
    with pytest.raises(NoCheckpoint):
        ckpt.open(f"{root}/run", step=SAVED - 2)
    if scale.soak:
        four = run_ranks(4, resumed, root, Schedule1F1B, LAYERS, timeout_seconds=180.0)
        assert four == [([[]] * MORE, SAVED)] * 3 + [(losses, SAVED)]
