"""Lightning's Trainer and Fabric save into our root and come back with the same bits.

Method: the real Trainer with the real ModelCheckpoint, stopped and resumed by a new one; Fabric's
own save and load; our Checkpointer on what Fabric has set up.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt

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
    io.remove_checkpoint("a.ckpt")
    with pytest.raises(ckpt.NoCheckpoint, match=r"newest is 'b\.ckpt'"):
        io.load_checkpoint("a.ckpt")
    io.remove_checkpoint("b.ckpt")
    assert [info.step for info in ckpt.list_steps(io.url)] == [3]


def test_what_needs_pickle_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    io = LightningCheckpoints(str(tmp_path / "run"))
    with pytest.raises(ckpt.InvalidState, match=r"hyper_parameters\.kind"):
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
    with ckpt.Checkpointer(str(tmp_path / "run"), state, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        nn.init.zeros_(model.weight)
        report = checkpointer.restore()
    assert report is not None and report.step == 1
    assert torch.equal(model.weight, weight)
    assert "model.weight" in ckpt.open(str(tmp_path / "run"))
