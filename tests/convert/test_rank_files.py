"""Folders of verl and SkyRL, a file of torch.save for each rank, load on any layout.

Method: FSDP2 and HSDP on 2 and 4 ranks write their sharded state dicts as verl's checkpoint manager
does, next to the whole tensors that they are of, which are the judge.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.cli import main
from ckpt.errors import Corrupt, UnsupportedFormat
from tests.ranks import run_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def training(mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3, bias=False), nn.BatchNorm1d(3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(12.0).view(2, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _write(folder: str, replicas: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape, names = ((size,), ("fsdp",)) if replicas == 1 else ((2, size // 2), ("ddp", "fsdp"))
    model, optimizer = training(init_device_mesh("cpu", shape, mesh_dim_names=names))
    end = f"world_size_{size}_rank_{rank}.pt"
    torch.save(model.state_dict(), f"{folder}/model_{end}")
    torch.save(optimizer.state_dict(), f"{folder}/optim_{end}")
    torch.save({"lr_scheduler": {"last_epoch": 1}}, f"{folder}/extra_state_{end}")
    weights, of_optimizer = get_state_dict(model, optimizer)
    whole = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in weights.items()
    }
    for name, state in of_optimizer["state"].items():
        whole |= {f"{name}.{key}": state[key].full_tensor() for key in MOMENTS}
    if rank == 0:
        torch.save(whole, f"{folder}/../whole.pt")


@pytest.fixture(params=[(2, 1), (4, 1), (4, 2)], ids=["2", "4", "2x2"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    ranks, replicas = request.param
    folder = tmp_path / "actor"
    folder.mkdir()
    run_ranks(ranks, _write, str(folder), replicas)
    return folder


def expect(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    whole = torch.load(folder / "../whole.pt")
    weights, of_optimizer = get_state_dict(model, optimizer)
    for name, one in weights.items():
        full = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert torch.equal(full, whole[name]), name
    for name, state in of_optimizer["state"].items():
        for key in MOMENTS:
            one = state[key]
            full = one.full_tensor() if hasattr(one, "full_tensor") else one
            assert torch.equal(full, whole[f"{name}.{key}"]), (name, key)


def fresh(mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = training(mesh)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model, torch.optim.AdamW(model.parameters(), lr=7.0)


def _load_sharded(folder: str) -> int:
    model, optimizer = fresh(init_device_mesh("cpu", (dist.get_world_size(),)))
    report = ckpt.load({"model": model, "optimizer": optimizer}, folder)
    expect(model, optimizer, Path(folder))
    return report.nbytes_read


@pytest.mark.ranks
def test_a_folder_of_rank_files_loads_whole_and_resharded(written: Path) -> None:
    model, optimizer = fresh()
    report = ckpt.load({"model": model, "optimizer": optimizer}, written)
    expect(model, optimizer, written)
    assert optimizer.param_groups[0]["lr"] == 0.1
    states = [one for state in optimizer.state.values() for one in state.values()]
    needed = sum(one.nbytes for one in (*model.state_dict().values(), *states))
    assert report.nbytes_read <= 1.05 * needed + 64 * 16  # a pad of each tensor
    assert sum(run_ranks(3, _load_sharded, str(written))) <= 1.05 * needed + 64 * 16


@pytest.mark.ranks
def test_commands_take_a_folder_of_rank_files(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = fresh()
    ckpt.load({"model": model}, written, strict="state")
    for command in ("show", "plan"):
        assert main([command, str(written)]) == 0
    assert "model.0.weight" in capsys.readouterr().out
    assert not ckpt.diff(written, written).changed


@pytest.mark.ranks
def test_lacking_and_odd_rank_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    run_ranks(2, _write, str(folder), 1)
    model, _ = fresh()
    with ckpt.open(folder / "model_world_size_2_rank_1.pt") as checkpoint:
        assert "0.weight" not in checkpoint  # one rank's part is no tensor
    first, second = (folder / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    shutil.copy(first, tmp_path / "kept.pt")
    shutil.copy(second, first)
    with pytest.raises(Corrupt):
        ckpt.load({"model": model}, folder)
    first.unlink()
    with pytest.raises(Corrupt, match=r"no model file of ranks \[0\]"):
        ckpt.load({"model": model}, folder)
    shutil.copy(tmp_path / "kept.pt", folder / "model_world_size_3_rank_0.pt")
    with pytest.raises(UnsupportedFormat, match=r"files of worlds of \[2, 3\] ranks"):
        ckpt.load({"model": model}, folder)


ITEMS = Path(__file__).parents[1] / "corpus/torch_checkpointing/checkpoint"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_item_without_a_ranks_file_is_corrupt(tmp_path: Path, rank: int) -> None:
    folder = shutil.copytree(ITEMS, tmp_path / "items")
    (folder / f"model_{rank}.pt").unlink()
    with pytest.raises(Corrupt, match=rf"no model file of ranks \[{rank}\]"):
        ckpt.open(str(folder))


def test_items_without_their_last_rank_are_corrupt(tmp_path: Path) -> None:
    folder = shutil.copytree(ITEMS, tmp_path / "items")
    for file in folder.glob("*_1.pt"):
        file.unlink()
    with pytest.raises(Corrupt, match="model"):
        ckpt.open(str(folder))
