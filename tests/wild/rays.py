"""Ray Train: what a training function reports is a reference to a checkpoint of ours.

Ray's local mode, in which a training function runs in the processes that are there and `report` and
`get_checkpoint` are Ray's own. Nothing of a cluster is started.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from tests.wild.handing_on import Outcome, Stretch, Trainer, Writer, stretches
from tests.wild.models import floats_of

NOTE = "shardpoint.json"


def run_ray(stretch: Stretch, writer: Writer, folder: str) -> Outcome:
    """One training under Ray's TorchTrainer, from what the newest reported checkpoint refers to."""
    os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_USAGE_STATS_ENABLED="0")
    from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, report
    from ray.train.torch import TorchTrainer

    reported = Path(f"{folder}-reported")

    def train(config: dict[str, Any]) -> Outcome:
        torch.manual_seed(1 if writer == "nothing" else stretch.last_step)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        if stretch.layout == "fully_shard":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step, losses = 0, []
        if config["from"] is not None:
            report({}, checkpoint=Checkpoint(config["from"]))  # where a cluster's restart has one
            step = restore(model, optimizer, get_checkpoint())
        while step < stretch.last_step:
            step += 1
            loss = (model(floats_of(step, 6)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if writer != "nothing":
                place = reported / str(step)
                save(model, optimizer, step, writer, folder, place)
                report({"loss": losses[-1]}, checkpoint=Checkpoint(str(place)))
        return Outcome(losses, tensors_of(model, optimizer) if stretch.size == 1 else {})

    places = sorted(reported.glob("*"), key=lambda place: int(place.name))
    trainer = TorchTrainer(
        train,
        train_loop_config={"from": str(places[-1]) if places else None},
        scaling_config=ScalingConfig(num_workers=0),  # local mode
        run_config=RunConfig(storage_path=f"{folder}-ray", name="tried"),
    )
    outcome: Outcome = trainer.fit().return_value
    return outcome


def save(
    model: nn.Module, optimizer: Any, step: int, writer: Writer, folder: str, place: Path
) -> None:
    """With ours the directory that is reported has a note; DCP writes into it."""
    if writer == "ours":
        saved = ckpt.save({"model": model, "optimizer": optimizer}, folder, step=step)
        note = {"url": folder, "step": step, "attempt": saved.attempt}
        if not dist.is_initialized() or dist.get_rank() == 0:
            place.mkdir(parents=True)
            (place / NOTE).write_text(json.dumps(note), encoding="utf-8")
        return
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=str(place))


def restore(model: nn.Module, optimizer: Any, checkpoint: Any) -> int:
    note = Path(checkpoint.path) / NOTE
    if note.exists():
        saved = json.loads(note.read_text(encoding="utf-8"))
        state = {"model": model, "optimizer": optimizer}
        ckpt.load(state, saved["url"], step=saved["step"], attempt=saved["attempt"])
        return int(saved["step"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    theirs = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(theirs, checkpoint_id=checkpoint.path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(theirs["step"])


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    for name, param in model.named_parameters():
        tensors.update({f"{name}.{key}": each for key, each in optimizer.state[param].items()})
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.clone()
        for name, each in tensors.items()
    }


RAY = (
    Trainer(
        "ray.train.report",
        "ray",
        "plain@1, FSDP2@2, FSDP2@4, plain@1",
        stretches(("plain", 1), ("fully_shard", 2), ("fully_shard", 4), ("plain", 1)),
        run_ray,
        "Ray's local mode; no cluster was started",
    ),
)
