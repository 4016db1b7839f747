"""torchtitan's containers save and load through our manager as its trainer calls it.

Method: a small model with torchtitan's own optimizers and schedulers, and a loader of its kind, in
one process. `tests/wild` runs its whole trainer, on several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt

# To import torchtitan takes many seconds.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]


class Position:
    """A loader as torchtitan's: its position is named by its place among the data-parallel ones."""

    def __init__(self, degree: int = 1) -> None:
        self.dp_world_size, self.read = degree, 0

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": self.read, "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["dp_rank_0"]


class Progress:
    """What the trainer counts."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Job:
    """The parts of a trainer that its manager gets, and a loop."""

    def __init__(self, folder: Path, seed: int, degree: int = 1, **options: Any) -> None:
        titan = pytest.importorskip("torchtitan.components.optimizer", reason="no torchtitan")
        from ckpt.integrations.torchtitan import TorchtitanCheckpoints

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = titan.default_adamw(lr=0.1)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = titan.LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=9
        )
        self.loader, self.progress = Position(degree), Progress()
        self.manager = TorchtitanCheckpoints.Config(enable=True, **options).build(
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            dataloader=self.loader,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, until: int) -> None:
        while self.progress.step < until:
            self.progress.step += 1
            self.loader.read += 1
            self.model(torch.full((3, 4), float(self.progress.step))).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.manager.save(self.progress.step, last_step=self.progress.step == until)
        self.manager.close()

    def tensors(self) -> list[torch.Tensor]:
        state = {**self.model.state_dict(), **self.optimizers.state_dict()}
        return [each.clone() for each in state.values() if isinstance(each, torch.Tensor)]


def steps_in(folder: Path) -> list[int]:
    return [info.step for info in ckpt.list_steps(str(folder / "checkpoint"))]


def test_a_job_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", 1, interval=2)
    assert whole.manager.load() is False
    whole.train(7)
    first = Job(tmp_path / "cut", 1, interval=2, keep_latest_k=2, enable_first_step_checkpoint=True)
    first.train(5)
    assert steps_in(tmp_path / "cut") == [4, 5]
    second = Job(tmp_path / "cut", 2, interval=2)
    assert second.manager.load() is True
    assert (second.progress.step, second.loader.read) == (5, 5)
    second.train(7)
    pairs = zip(second.tensors(), whole.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_step_a_part_or_another_folder_is_loaded(tmp_path: Path) -> None:
    one = Job(tmp_path / "one", 1, interval=2)
    one.train(4)
    back = Job(tmp_path / "one", 2, exclude_from_loading=["optimizer", "dataloader"])
    assert back.manager.load(step=2) is True
    assert (back.progress.step, back.loader.read) == (2, 0)
    back.manager.close()
    fine = Job(tmp_path / "two", 3, initial_load_path=str(tmp_path / "one" / "checkpoint"))
    assert fine.manager.load() is True
    assert fine.progress.step == 0
    assert torch.equal(fine.model[0].weight, one.model[0].weight)
    with pytest.raises(ValueError, match="nothing is called"):
        Job(tmp_path / "one", 2, exclude_from_loading=["optimiser"]).manager.load()
    with pytest.raises(ckpt.NoCheckpoint, match="initial_load_path"):
        Job(tmp_path / "x", 2, initial_load_path=str(tmp_path / "nowhere")).manager.load()


def test_what_the_manager_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"last_save_in_hf=True.*ckpt export"):
        Job(tmp_path, 1, last_save_model_only=True, last_save_in_hf=True)
    Job(tmp_path, 1).train(1)
    with pytest.raises(ckpt.CheckpointError, match=r"degree of 1, this job has 2"):
        Job(tmp_path, 1, degree=2).manager.load()
    only = Job(tmp_path, 1, load_only=True)
    assert only.manager.load() is True
    only.train(2)
    assert steps_in(tmp_path) == [1]


def test_a_job_that_fails_leaves_what_it_has_begun(tmp_path: Path) -> None:
    """As torchtitan closes its trainer: while the error is handled, on this rank alone."""
    job = Job(tmp_path, 1, interval=1)
    job.train(1)
    job = Job(tmp_path, 1, interval=1)
    job.manager.load()
    job.manager.save(2)
    try:
        raise RuntimeError("the loss is gone")
    except RuntimeError:
        job.manager.close()
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("kinds", [1, 2])
def test_its_containers_are_entries_of_a_state(tmp_path: Path, kinds: int) -> None:
    optim = pytest.importorskip("torchtitan.components.optimizer", reason="no torchtitan")
    from torchtitan.components.checkpointer import ModelWrapper

    def made(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        config = optim.default_adamw(lr=0.1)
        config.implementation = "for-loop"
        own = type(config.param_groups[0])(
            pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.2}
        )
        config.param_groups = [own, *config.param_groups][-kinds:]
        optimizers = config.build(model_parts=[model])
        return model, {"model": ModelWrapper(model), "optimizer": optimizers}

    model, state = made(1)
    model(torch.ones(3, 4)).square().mean().backward()
    state["optimizer"].step()
    ckpt.save(state, str(tmp_path), step=1)
    _, other = made(2)
    ckpt.load(other, str(tmp_path))
    for name, part in state.items():
        one, two = part.state_dict(), other[name].state_dict()
        assert one.keys() == two.keys() and len(one) >= 4
        assert all(torch.equal(a, two[k]) for k, a in one.items() if isinstance(a, torch.Tensor))
        assert all(a == two[k] for k, a in one.items() if not isinstance(a, torch.Tensor))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ckpt.load({"model": plain}, str(tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
