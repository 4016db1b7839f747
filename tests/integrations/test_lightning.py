"""Lightning's Trainer and Fabric save into our root and come back with the same bits.

Method: the real Trainer with the real ModelCheckpoint, stopped and resumed by a new one; Fabric's
own save and load; our Checkpointer on what Fabric has set up; our strategies on two ranks and on
one (`tests/wild` hands a training on among all of them).
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.ranks import run_ranks

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from ckpt.integrations.lightning import LightningCheckpoints, unwrapped  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Small(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A batch norm, a scheduler, and an end at a chosen step."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.stop_at = stop_at

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.stop_at:
            raise RuntimeError("the machine is gone")
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


def data() -> Any:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def trainer_of(folder: Path, *plugins: Any, saves: bool = True) -> Any:
    every = ModelCheckpoint(
        every_n_train_steps=4, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=saves,
        callbacks=[every] if saves else [],
        plugins=list(plugins),
        default_root_dir=str(folder),
    )


def test_a_stopped_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Small()
    trainer_of(tmp_path, saves=False).fit(whole, data())
    url = str(tmp_path / "run")
    checkpoints = LightningCheckpoints(url)
    assert checkpoints.latest() is None
    with pytest.raises(RuntimeError, match="machine is gone"):
        trainer_of(tmp_path / "first", checkpoints).fit(Small(stop_at=14), data())
    checkpoints.teardown()
    assert {info.step for info in ckpt.list_steps(url)} == {8, 12}
    again = LightningCheckpoints(url)
    resumed, trainer = Small(), trainer_of(tmp_path / "second", again)
    trainer.fit(resumed, data(), ckpt_path=again.latest())
    assert trainer.global_step == 18
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state_dict().items())


def test_a_path_is_the_name_of_one_checkpoint(tmp_path: Path) -> None:
    """Saved twice it is the second; removed it is gone; one stays."""
    io = LightningCheckpoints(str(tmp_path / "run"), replicas="strict")
    for step in (1, 2, 3):
        content = {"global_step": step, "state_dict": {"w": torch.full((3,), float(step))}}
        io.save_checkpoint({**content, "where": tmp_path}, "a.ckpt" if step < 3 else "b.ckpt")
    loaded = io.load_checkpoint("a.ckpt", map_location="cpu")
    assert loaded["global_step"] == 2
    assert loaded["where"] == str(tmp_path)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((3,), 2.0))
    assert [info.step for info in ckpt.list_steps(io.url)] == [2, 3]
    assert LightningCheckpoints(io.url).latest() == "b.ckpt"
    shared = LightningCheckpoints(str(tmp_path / "shared"), dedup=True)
    for name in ("a.ckpt", "b.ckpt"):
        shared.save_checkpoint({"global_step": 1, "state_dict": {"w": torch.ones(99)}}, name)
    shared.teardown()
    assert LightningCheckpoints(shared.url).latest() == "b.ckpt"
    io.remove_checkpoint("a.ckpt")
    with pytest.raises(ckpt.NoCheckpoint, match=r"newest is 'b\.ckpt'"):
        io.load_checkpoint("a.ckpt")
    io.remove_checkpoint("b.ckpt")
    assert [info.step for info in ckpt.list_steps(io.url)] == [3]


def test_what_needs_pickle_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    io = LightningCheckpoints(str(tmp_path / "run"))
    with pytest.raises(ckpt.errors.InvalidState, match=r"hyper_parameters\.kind"):
        io.save_checkpoint({"hyper_parameters": {"kind": nn.Linear}}, "a.ckpt")
        io.teardown()
    assert io.latest() is None


def fabric_parts(*plugins: Any) -> tuple[Any, Any, Any]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=list(plugins))
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    return fabric, model, optimizer


def test_arguments_that_the_plugin_gives_itself_are_refused(tmp_path: Path) -> None:
    """What is saved by one group would be looked for by another, or in another store."""
    from ckpt.integrations.lightning import SavingDDPStrategy

    plugin = LightningCheckpoints(str(tmp_path / "run"), process_group=None)
    with pytest.raises(TypeError, match="process_group"):
        plugin.save_checkpoint({"state_dict": {"a": torch.zeros(2)}}, "a.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        SavingDDPStrategy(str(tmp_path / "run"), saving={"storage_options": {"anon": True}})
    assert not list(tmp_path.iterdir())


def test_fabric_saves_and_loads_through_the_plugin(tmp_path: Path) -> None:
    fabric, model, optimizer = fabric_parts(LightningCheckpoints(str(tmp_path / "run")))
    weight = model.weight.clone()
    fabric.save("x", {"model": model, "optim": optimizer, "step": 3})
    nn.init.zeros_(model.weight)
    state = {"model": model, "optim": optimizer, "step": 0}
    fabric.load("x", state)
    assert torch.equal(model.weight, weight)
    assert state["step"] == 3


def test_the_checkpointer_serves_what_fabric_has_set_up(tmp_path: Path) -> None:
    _, model, optimizer = fabric_parts()
    state = unwrapped({"model": model, "optim": optimizer})
    weight = model.weight.clone()
    with ckpt.Checkpointer(state, str(tmp_path / "run"), save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        nn.init.zeros_(model.weight)
        report = checkpointer.restore()
    assert report is not None and report.step == 1
    assert torch.equal(model.weight, weight)
    assert "model.weight" in ckpt.open(str(tmp_path / "run"))


def sharded_trainer(url: str, size: int, *, max_steps: int) -> Any:
    """On a rank of `size`: a Trainer under a strategy of ours that keeps one checkpoint."""
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from ckpt.integrations.lightning import SavingDDPStrategy

    rank = str(torch.distributed.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0", TORCHELASTIC_RUN_ID="x", MASTER_ADDR="localhost", MASTER_PORT="29500",
    )  # fmt: skip
    return lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=SavingDDPStrategy(url),
        plugins=[TorchElasticEnvironment()],
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=1, dirpath=f"{url}-files")],
    )


class Validated(Small):
    def validation_step(self, batch: Any, index: int) -> None:
        return None


def _look_late() -> None:
    """This rank looks for what is to be removed when the first one may have retired it."""
    from ckpt.integrations import lightning as ours

    look = ours._ShardedCheckpoints.find

    def late(self: Any, path: str) -> Any:
        time.sleep(0.5)
        return look(self, path)

    ours._ShardedCheckpoints.find = late  # type: ignore[method-assign]


def save_with_a_strategy(url: str) -> tuple[list[int], str | None, bool, list[str]]:
    warnings.simplefilter("ignore")
    if torch.distributed.get_rank() == 1:
        _look_late()
    trainer = sharded_trainer(url, 2, max_steps=4)
    module = Validated()
    trainer.fit(module, data())
    with pytest.raises(TypeError, match="to the strategy"):
        trainer.save_checkpoint("x.ckpt", storage_options={})
    torch.distributed.barrier()  # the first rank retires
    kept = [info.step for info in ckpt.list_steps(url)]
    latest = trainer.strategy.latest()
    other = Validated()
    sharded_trainer(url, 2, max_steps=4).validate(other, data(), ckpt_path=latest)
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    is_same = all(torch.equal(*pair) for pair in pairs)
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    trainer.strategy.teardown()
    return kept, latest, is_same, sorted(ckpt.open(url))


def resume_with_a_strategy(url: str, path: str) -> int:
    warnings.simplefilter("ignore")
    trainer = sharded_trainer(url, 1, max_steps=6)
    trainer.fit(Validated(), data(), ckpt_path=path)
    return int(trainer.global_step)


@pytest.mark.ranks
def test_a_strategy_saves_and_restores_on_all_ranks(tmp_path: Path) -> None:
    """ModelCheckpoint keeps one; other runs validate it, and train on from it on one rank."""
    url = str(tmp_path / "run")
    for kept, latest, is_same, names in run_ranks(
        2, save_with_a_strategy, url, timeout_seconds=240.0
    ):
        assert kept == [4] and is_same
        assert latest is not None and latest.endswith("step=4.ckpt")
        assert "model.net.0.weight" in names
        assert not any(name.startswith("optimizer_0") for name in names)
    assert latest
    assert run_ranks(1, resume_with_a_strategy, url, latest, timeout_seconds=240.0) == [6]
