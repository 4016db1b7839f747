"""Folders of verl and SkyRL, a file of torch.save for each rank, load on any layout.

Method: FSDP2 and HSDP on 2 and 4 ranks write their sharded state dicts as verl's checkpoint manager
does, next to the whole tensors that they are of, which are the judge.
"""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard

import ckpt
from ckpt.cli import main
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.source import Chunk
from ckpt.convert.sources.torch_pickle import UnreadableTensor
from ckpt.convert.sources.tree import Leaf, TreeData, with_members
from ckpt.errors import Corrupt, Mismatch, UnsupportedFormat
from ckpt.layout.region import Span
from tests.ranks import run_ranks, share_all

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
    share_all()
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


# FSDP1's own forms ----------------------------------------------------------------------------


def _write_fsdp1(kind: str, folder: str, original: bool, units: bool) -> None:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    model: Any = training()[0]
    whole = {name: one.detach().clone() for name, one in model.state_dict().items()}
    if units:
        model[0] = FSDP(model[0], device_id=cpu, use_orig_params=original)
    model = FSDP(model, device_id=cpu, use_orig_params=original)
    model.zero_grad()  # those of the forms that it had
    with FSDP.state_dict_type(model, StateDictType[kind]):
        torch.save({"net": model.state_dict()}, f"{folder}/rank{rank}.pt")
    if rank == 0:
        torch.save(whole, f"{folder}/../whole.pth")


@pytest.mark.ranks
@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [1, 2, 4])  # of 4, some have no part
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("kind", ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.filterwarnings("ignore:.*FSDP:FutureWarning", "ignore:.*NO_SHARD:UserWarning")
def test_flat_and_sharded_files_of_fsdp1_load(
    tmp_path: Path, kind: str, units: bool, original: bool, ranks: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_ranks(ranks, _write_fsdp1, kind, str(folder), original, units)
    whole = torch.load(tmp_path / "whole.pth")
    model, _ = fresh()
    # Where there is one rank, FSDP1 cuts nothing: its file has all.
    ckpt.load({"model": model}, folder if ranks > 1 else folder / "rank0.pt", strict="state")
    for name, one in model.state_dict().items():
        assert torch.equal(one, whole[name]), name


def flat_tree(numels: dict[str, int], cuts: list[int]) -> tuple[dict[str, Any], TreeData]:
    """Flat parameters of as many float32, cut at `cuts`: the n-th part lies in file n, at 100."""
    data, tree = TreeData({}, MemoryBudget()), dict[str, Any]()
    for key, numel in numels.items():
        edges = [0, *(cut for cut in cuts if cut < numel), numel]
        chunks = [
            Chunk(Span(low, high), f"{key}{number}", 100)
            for number, (low, high) in enumerate(pairwise(edges))
        ]
        data.add(key, "float32", (numel,), chunks)
        tree[key] = Leaf(key)
    return tree, data


@pytest.mark.parametrize("cuts", [[], [1], [5], [13, 14], [2, 4, 6, 8, 10, 30]])
def test_members_of_flat_parameters_lie_where_fsdp1_laid_them(cuts: list[int]) -> None:
    shapes = {"a.w": (3, 4), "a.b": (3,), "b.w": (2, 5), "b.e": (0, 2), "c": ()}
    tree, data = flat_tree({"a._flat_param": 15, "_flat_param": 11}, cuts)
    made = with_members({"net": tree}, data, shapes)["net"]
    assert made.keys() == shapes.keys()
    starts = {"a.w": 0, "a.b": 12, "b.w": 0, "b.e": 10, "c": 10}
    for name, shape in shapes.items():
        dtype, size, chunks = data.tensors[made[name].key]
        assert (dtype, size) == ("float32", shape)
        low = 0
        for region, file, offset, _ in chunks:
            number = int(file.rpartition("m")[2])
            part = next(one.region for one in data.tensors[file[:-1]].chunks if one.file == file)
            assert region.start == low and number < len(cuts) + 1
            assert (offset - 100) // 4 + part.start == starts[name] + low
            assert offset + 4 * region.numel <= 100 + 4 * part.numel
            low = region.stop
        assert low == math.prod(shape)


@pytest.mark.parametrize("name", ["logs_rank_0.tar", "rng-rank1.pt", "out.rank_0.bin"])
@pytest.mark.parametrize("data", [b"", b"of no torch.save"])
def test_other_files_of_ranks_are_no_state(tmp_path: Path, name: str, data: bytes) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / name).write_bytes(data)
    ckpt.load(other, tmp_path)
    assert torch.equal(model.weight, other.weight)


def test_what_each_rank_has_in_another_shape_is_no_tensor(tmp_path: Path) -> None:
    """A moment of the optimizer's own state dict under FSDP1, say: it is a part, and nothing says
    of what.
    """
    for rank in range(2):
        state = {"same": torch.ones(2), "own": torch.ones(2 + rank)}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint.keys()) == ["model.same"]


def test_files_that_name_no_world_lie_next_to_those_that_do(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    torch.save({"seed": 1}, tmp_path / "rng_rank_0.pt")
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint.keys()) == ["model.weight"]


def test_a_parameter_in_no_unit_of_fsdp1_stays(tmp_path: Path) -> None:
    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    flat = torch.cat([one.detach().flatten() for one in first[0].parameters()])
    rest = {f"1.{name}": one for name, one in first[1].state_dict().items()}
    torch.save({"0._flat_param": flat, **rest}, tmp_path / "m.pt")
    ckpt.load(second, tmp_path / "m.pt")
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("numel", "cuts", "starts"),
    [
        (11, [], [0, 3, 10]),  # as they are
        (13, [], [0, 4, 12]),  # each from a multiple of 16 bytes on
        (14, [7], [0, 4, 12]),  # and for two ranks
        (17, [], [0, 8, 16]),  # of half as many bits
        (12, [], None),
        (15, [5, 10], [0, 4, 12]),
        (18, [2, 4, 6, 8, 10, 12, 14, 16], None),  # of 9 ranks, 13 and 17 end there
        (20, [5, 10, 15], [0, 8, 16]),
        (24, [8, 16], None),
        (26, [13], None),
    ],
)
def test_members_are_aligned_in_one_way_or_refused(
    numel: int, cuts: list[int], starts: list[int] | None
) -> None:
    tree, data = flat_tree({"_flat_param": numel}, cuts)
    made = with_members(tree, data, {"a": (3,), "b": (7,), "c": (1,)})
    if starts is None:
        assert isinstance(made["_flat_param"], UnreadableTensor)
        assert "have 11 elements" in made["_flat_param"].reason
        return
    firsts = [data.tensors[made[name].key].chunks[0] for name in "abc"]
    assert all(chunk.region.start == 0 for chunk in firsts)
    offsets = [(chunk.start - 100) // 4 + ([0, *cuts][int(chunk.file[-1])]) for chunk in firsts]
    assert offsets == starts


LOCAL = Path(__file__).parents[1] / "corpus/fsdp1_local/checkpoint"


def test_flat_parameters_of_another_model_are_refused() -> None:
    other = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4, bias=False))
    with pytest.raises(Mismatch, match=r"of shape \(35,\), and the 3 parameters .* 42 elements"):
        ckpt.load({"model": other}, LOCAL)


def test_flat_parameters_stand_for_themselves_without_a_model(tmp_path: Path) -> None:
    with ckpt.open(LOCAL) as checkpoint:
        assert checkpoint["model._flat_param"].shape == (35,)
        assert checkpoint["model.0._flat_param"].shape == (42,)
    original = LOCAL.parents[1] / "fsdp1_local_original/checkpoint"
    with ckpt.open(original) as checkpoint:
        assert "model.0.weight" not in checkpoint  # what the first rank has of it
    with ckpt.open(LOCAL / "rank_0.pt") as checkpoint:
        assert "model._flat_param" not in checkpoint  # one rank's part is no tensor


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_file_of_a_rank_of_fsdp1_is_corrupt(tmp_path: Path, rank: int) -> None:
    folder = shutil.copytree(LOCAL, tmp_path / "run")
    (folder / f"rank_{rank}.pt").unlink()
    with pytest.raises(Corrupt):
        ckpt.open(folder)
