"""Folders of Accelerate and of Trainers are imported with their optimizers and schedulers.

Method: trainings are saved by Accelerate itself, and by hand in the forms of others; what is loaded
from the import is compared with what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.errors import InvalidState
from tests.versions import ALONE


class Training:
    """A model with buffers, an optimizer with two groups, and a scheduler."""

    def __init__(self, steps: int, lr: float = 0.5) -> None:
        torch.manual_seed(steps)
        self.model: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        weights, rest = [], []
        for name, param in self.model.named_parameters():
            (weights if name.endswith("0.weight") else rest).append(param)
        groups = [{"params": rest, "weight_decay": 0.0}, {"params": weights}]
        self.optimizer: Any = torch.optim.AdamW(groups, lr=lr)
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.steps = steps

    # In the optimizer's order, which is not the model's.
    names = ("0.bias", "1.weight", "1.bias", "0.weight")

    def train(self) -> Training:
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def dicts(self) -> list[Any]:
        return [part.state_dict() for part in (self.model, self.optimizer, self.scheduler)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_loads(root: Path, training: Training) -> None:
    other = Training(0)
    ckpt.load(other.state, root)
    assert same(other.dicts(), training.dicts())


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="the extra `huggingface` is missing")
    yield accelerate.Accelerator(cpu=True)
    for name in ("AcceleratorState", "PartialState", "GradientState"):
        getattr(accelerate.state, name)._reset_state()


@pytest.mark.filterwarnings("ignore")  # Accelerate's own
@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate_brings_its_optimizer_and_scheduler(
    accelerator: Any, safe: bool, tmp_path: Path
) -> None:
    training = Training(3)
    parts = accelerator.prepare(training.model, training.optimizer, training.scheduler)
    training.model, training.optimizer, training.scheduler = parts
    training.train()
    folder = tmp_path / "in"
    accelerator.save_state(str(folder), safe_serialization=safe)
    report = ckpt.import_checkpoint(
        folder, tmp_path / "run", parameter_names=training.names, verify=True
    )
    assert report.modules == ("model",) and report.left_out == ("random_states_0.pkl",)
    assert_loads(tmp_path / "run", training)
    # Nobody says which parameter is which: the weights alone, by their own names.
    report = ckpt.import_checkpoint(folder, tmp_path / "weights")
    assert report.left_out == ("optimizer.bin", "random_states_0.pkl", "scheduler.bin")
    assert set(report.tensors) == set(training.model.state_dict())


def saved_by_hand(folder: Path, training: Training, suffix: str = "bin") -> None:
    folder.mkdir(exist_ok=True)
    save_file(training.model.state_dict(), folder / "model.safetensors")
    torch.save(training.optimizer.state_dict(), folder / f"optimizer.{suffix}")
    torch.save(training.scheduler.state_dict(), folder / f"scheduler.{suffix}")
    (folder / "config.json").write_text("{}")


def test_one_of_a_trainer_too_and_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(2).train()
    folder, names = tmp_path / "in", tmp_path / "names.txt"
    saved_by_hand(folder, training, "pt")
    names.write_text("\n".join(training.names) + "\n")
    asked = ["import", str(folder), str(tmp_path / "run")]
    assert main([*asked, "--step", "1", "--parameter-names", str(names)]) == 0
    said = capsys.readouterr().out
    assert "left out: config.json\n" in said and "optimizer.pt" not in said
    assert_loads(tmp_path / "run", training)
    assert main([*asked, "--step", "2"]) == 0
    assert "--parameter-names brings" in capsys.readouterr().out


def test_several_models_and_optimizers_have_an_entry_each(tmp_path: Path) -> None:
    first, second = Training(1).train(), Training(2).train()
    folder = tmp_path / "in"
    saved_by_hand(folder, first)
    save_file(second.model.state_dict(), folder / "model_1.safetensors")
    torch.save(second.optimizer.state_dict(), folder / "optimizer_1.bin")
    ckpt.import_checkpoint(folder, tmp_path / "run", parameter_names=first.names)
    parts = Training(0), Training(0)
    state = {
        "model": parts[0].model,
        "optimizer": parts[0].optimizer,
        "model_1": parts[1].model,
        "optimizer_1": parts[1].optimizer,
    }
    ckpt.load(state, tmp_path / "run")
    assert same(parts[0].dicts()[:2], first.dicts()[:2])
    assert same(parts[1].dicts()[:2], second.dicts()[:2])
    report = ckpt.import_checkpoint(folder, tmp_path / "models")
    assert report.modules == ("model", "model_1") and len(report.left_out) == 4


def test_names_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    training = Training(1).train()
    saved_by_hand(tmp_path / "in", training)
    with pytest.raises(InvalidState, match=r"optimizer\.param_groups: it numbers its 4 parameters"):
        ckpt.import_checkpoint(tmp_path / "in", tmp_path / "run", parameter_names=["a", "b"])
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_sharded_folders_of_accelerate_bring_the_scheduler(tmp_path: Path) -> None:
    training = Training(2).train()
    folder = tmp_path / "in"
    weights = {"model": training.model.state_dict()}
    dcp.save(weights, checkpoint_id=folder / "pytorch_model_fsdp_0", **ALONE)
    torch.save(training.scheduler.state_dict(), folder / "scheduler.bin")
    # What holds somebody's code is no value, and the rest does not need it.
    torch.save({"functions": [Training]}, folder / "scheduler_1.bin")
    report = ckpt.import_checkpoint(folder, tmp_path / "run")
    assert report.left_out == ("scheduler_1.bin",) and "scheduler" in report.values
    other = Training(0)
    ckpt.load({"model": other.model, "scheduler": other.scheduler}, tmp_path / "run")
    assert same(other.dicts()[::2], training.dicts()[::2])


def test_a_file_of_lightning_brings_its_optimizers_and_schedulers(tmp_path: Path) -> None:
    """As its Trainer lays them out: lists of dicts, beside counters of its loops."""
    training = Training(2).train()
    weights, optimizer, scheduler = training.dicts()
    kept = {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights,
        "optimizer_states": [optimizer],
        "lr_schedulers": [scheduler],
        "loops": {"fit_loop": {"state_dict": {}}},
    }
    torch.save(kept, tmp_path / "last.ckpt")
    source, root = tmp_path / "last.ckpt", tmp_path / "run"
    ckpt.import_checkpoint(source, root, parameter_names=training.names)
    other = Training(0)
    state: dict[str, Any] = {
        "state_dict": other.model,
        "optimizer_states": [other.optimizer],
        "lr_schedulers": [],
        "epoch": 0,
    }
    ckpt.load(state, root)
    other.scheduler.load_state_dict(state["lr_schedulers"][0])  # no tensors: they are one value
    assert state["epoch"] == 1 and same(other.dicts(), training.dicts())
