"""Folders of DeepSpeed ZeRO give their float32 weights, and none of their code runs.

Method: folders are made here as DeepSpeed lays them out (`zero_to_fp32.py` is the description), by
several ranks, with padding, two groups, objects of a class that is not to be made, shared names.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.convert.sources.opening import open_source
from ckpt.errors import Corrupt, UnsupportedFormat
from tests.convert.jobs import assert_same


class LossScaler:
    """As DeepSpeed's, it is pickled as an object; making one fails the test."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("an object of a foreign class was made")

    def __getstate__(self) -> dict[str, int]:
        return {"cur_scale": 1}


SHAPES = [
    {"embed.weight": (7, 5), "layer.bias": (3,), "layer.weight": (3, 5)},
    {"norm.weight": (), "head.weight": (11, 5)},
]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return {name: torch.randn(shape) for group in SHAPES for name, shape in group.items()}


def padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.cat([flat, flat.new_zeros(-len(flat) % multiple)])


def moments(name: str) -> dict[str, torch.Tensor]:
    return {fqn: tensor * len(name) + 1 for fqn, tensor in weights().items()}


def partitions(
    stage: int, size: int, rank: int, own: dict[str, torch.Tensor] | None = None, gap: int = 0
) -> list[torch.Tensor]:
    """The flat float32 tensors of one rank, by group."""
    own = weights() if own is None else own
    groups = []
    for group in SHAPES:
        if stage == 3:
            parts = []
            for name in group:
                flat = padded(own[name].flatten(), size)
                parts.append(flat.chunk(size)[rank])
            groups.append(torch.cat(parts))
        else:
            behind = torch.full((max(gap, 0),), 7.0)
            parts = [part for name in group for part in (own[name].flatten(), behind)]
            flat = padded(torch.cat(parts), 2 * size)
            groups.append(flat.chunk(size)[rank].clone())
    return groups


MOMENTS = ("exp_avg", "exp_avg_sq")


def make(
    folder: Path,
    stage: int,
    size: int,
    *,
    has_moments: bool = False,
    odd_rank: int | None = None,
    gap: int = 0,
) -> None:
    tag = folder / "global_step12"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step12")
    shapes = [{n: torch.Size(s) for n, s in group.items()} for group in SHAPES]
    model: dict[str, Any] = {
        "module": {n: t.half() for n, t in weights().items()} | {"mask": torch.tensor([1, 0])},
        "buffer_names": ["mask"],
        "param_shapes": shapes,
        "shared_params": {"tied.weight": "embed.weight"},
        "global_steps": 12,
        "lr_scheduler": {"last_epoch": 12} if has_moments else LossScaler(),
        "ds_version": "0.16.0",
    }
    for rank in range(size):
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {
            "zero_stage": stage,
            "partition_count": size,
            "loss_scaler": LossScaler(),
            key: partitions(stage, size, rank, gap=gap),
        }
        if gap:
            state["param_alignment_paddings"] = [[gap] * len(group) for group in SHAPES]
        if has_moments:
            flats = {m: partitions(stage, size, rank, moments(m), gap) for m in MOMENTS}
            if rank == odd_rank:
                flats["exp_avg"][1] = flats["exp_avg"][1][:-1].clone()
            state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = {
                "state": {
                    number: {m: flats[m][number] for m in MOMENTS} | {"step": torch.tensor(12.0)}
                    for number in range(len(SHAPES))
                },
                "param_groups": [
                    {"lr": 0.1 * (number + 1), "betas": (0.9, 0.99), "params": [number]}
                    for number in range(len(SHAPES))
                ],
            }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        prefix = "bf16_" if stage == 1 else ""
        file = tag / f"{prefix}{name}_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}}, file)
        if stage == 3:
            torch.save(model, tag / f"{name}_model_states.pt")
    if stage != 3:
        torch.save(model, tag / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_of_all_stages(tmp_path: Path, stage: int, size: int) -> None:
    make(tmp_path / "ds", stage, size)
    expected = {**weights(), "mask": torch.tensor([1, 0])}
    target = tmp_path / "m.safetensors"
    ckpt.export(str(tmp_path / "ds"), str(target), keep_tied=True, verify=True)
    assert_same(load_file(target), {**expected, "tied.weight": expected["embed.weight"]})
    ckpt.import_checkpoint(
        str(tmp_path / "ds" / "global_step12"), str(tmp_path / "run"), rename=["=model"]
    )
    with ckpt.open(str(tmp_path / "run")) as opened:
        assert_same({name: opened[f"model.{name}"] for name in expected}, expected)
        assert dict(opened.aliases) == {"model.tied.weight": "model.embed.weight"}
        assert opened.values == {"model.global_steps": 12}


class Net(torch.nn.Module):
    """A model with parameters of these names."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in weights().items():
            path, _, last = name.rpartition(".")
            if path not in dict(self.named_children()):
                self.add_module(path, torch.nn.Module())
            self.get_submodule(path).register_parameter(last, torch.nn.Parameter(tensor * 0))


@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 3), (3, 1), (3, 3)])
def test_moments_of_all_stages(tmp_path: Path, stage: int, size: int) -> None:
    """Only weights came, and a training began with empty moments."""
    make(tmp_path / "ds", stage, size, has_moments=True)
    rename = ["=model", "model.optimizer=optimizer", "model.lr_scheduler=lr_scheduler"]
    report = ckpt.import_checkpoint(
        str(tmp_path / "ds"), str(tmp_path / "run"), rename=rename, verify=True
    )
    assert report.left_out == () and report.modules == ("model",)
    model = Net()
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in group]} for group in SHAPES]
    optimizer = torch.optim.AdamW(groups)
    state = {"model": model, "optimizer": optimizer}
    ckpt.load(state, str(tmp_path / "run"), strict=False)
    for name, param in named.items():
        own = optimizer.state[param]
        assert own["step"] == 12
        assert all(torch.equal(own[m], moments(m)[name]) for m in MOMENTS)
        assert torch.equal(param, weights()[name])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with ckpt.open(str(tmp_path / "run")) as opened:
        assert opened.values["lr_scheduler"] == {"last_epoch": 12}


def test_gaps_behind_parameters_are_left_out(tmp_path: Path) -> None:
    """As `param_alignment_paddings` of DeepSpeed 0.19 says."""
    make(tmp_path / "ds", 2, 2, has_moments=True, gap=3)
    with ckpt.open(str(tmp_path / "ds")) as checkpoint:
        for name, tensor in weights().items():
            assert torch.equal(checkpoint[name], tensor)
            for key in MOMENTS:
                assert torch.equal(checkpoint[f"optimizer.state.{name}.{key}"], moments(key)[name])
    with pytest.raises(Corrupt, match="2 groups of parameters"):
        make(tmp_path / "odd", 2, 2, gap=-1)
        open_source(str(tmp_path / "odd"))


def test_an_optimizer_of_another_form_is_left_out(tmp_path: Path) -> None:
    make(tmp_path / "ds", 2, 2, has_moments=True, odd_rank=1)
    report = ckpt.import_checkpoint(str(tmp_path / "ds"), str(tmp_path / "run"), verify=True)
    assert report.tensors == tuple(sorted([*weights(), "mask"]))
    assert len(report.left_out) == 2 and "optimizer.param_groups" not in report.values


def test_what_is_missing_is_reported(tmp_path: Path) -> None:
    make(tmp_path / "ds", 2, 3)
    tag = tmp_path / "ds" / "global_step12"
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(Corrupt, match=r"ranks \[0, 2\]"):
        open_source(str(tmp_path / "ds"))
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(Corrupt, match="regions have"):
        open_source(str(tmp_path / "ds"))


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "ds", 2, 2)
    tag = tmp_path / "ds" / "global_step12"
    (tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedFormat, match="tensor parallelism"):
        open_source(str(tmp_path / "ds"))


def test_the_tests_own_folders_have_every_element() -> None:
    for stage in (2, 3):
        total = sum(len(flat) for rank in range(3) for flat in partitions(stage, 3, rank))
        assert total >= sum(math.prod(tensor.shape) for tensor in weights().values())


UNIVERSAL = Path(__file__).parents[1] / "corpus/deepspeed_universal_zero3/checkpoint"


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    return Path(shutil.copytree(UNIVERSAL, tmp_path / "universal"))


@pytest.mark.parametrize(
    "file",
    [
        "zero/1.bias/exp_avg.pt",
        "zero/2.weight/fp32.pt",
        "zero/0.weight/fp32.pt",
        "zero/optimizer_state.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ],
)
def test_a_universal_folder_without_a_file_is_corrupt(universal: Path, file: str) -> None:
    (universal / file).unlink()
    with pytest.raises(Corrupt, match=file.rpartition("_mp_")[2].rpartition("/")[2]):
        ckpt.open(str(universal))


def test_a_universal_folder_of_several_stages_is_refused(universal: Path, tmp_path: Path) -> None:
    """Only the first stage's names are known: the others' parameters were left out in silence."""
    shutil.copytree(universal / "zero/0.weight", universal / "zero/9.weight")
    with pytest.raises(UnsupportedFormat, match=r"zero/9\.weight/fp32\.pt and 0 others"):
        ckpt.export(str(universal), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_universal_file_of_another_shape_does_not_load(universal: Path) -> None:
    torch.save(torch.zeros(34), universal / "zero/0.weight/fp32.pt")
    with pytest.raises(ckpt.errors.Mismatch, match=r"0\.weight"):
        ckpt.load(torch.nn.Sequential(torch.nn.Linear(5, 7)), str(universal), strict="state")


def test_a_universal_file_that_is_no_tensor_is_refused(universal: Path) -> None:
    torch.save({"param": [1, 2]}, universal / "zero/0.bias/exp_avg.pt")
    with pytest.raises(UnsupportedFormat, match=r"0\.bias/exp_avg\.pt"):
        ckpt.open(str(universal))


def test_of_two_universal_folders_one_is_to_be_named(universal: Path) -> None:
    for tag in ("a", "b"):
        shutil.copytree(UNIVERSAL, universal / tag)
    shutil.rmtree(universal / "zero")
    with pytest.raises(UnsupportedFormat, match="2 universal checkpoints"):
        ckpt.open(str(universal))
    with ckpt.open(str(universal / "b")) as checkpoint:
        assert checkpoint["optimizer.state.0.weight.step"].item() == 3
