"""`ckpt.load` and `ckpt.open` take what other libraries have written, and read what they need.

Method: the same training, written by torch.save, DCP, safetensors, and as folders of the field; the
state that was written is the judge.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

import ckpt
from ckpt.cli import main
from ckpt.convert.foreign import deduced
from ckpt.errors import CheckpointError, Corrupt, Mismatch, NoCheckpoint
from storage.errors import InvalidUrlError
from tests.ranks import run_ranks, share_all

MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = ("a.w", "a.b", "c.w")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3)
    for _ in range(3):
        net(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def fresh() -> dict[str, Any]:
    net = model()
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=7.0)}


def same(one: dict[str, Any], net: nn.Module, optimizer: Any = None) -> None:
    for name, tensor in net.state_dict().items():
        assert torch.equal(one["model"].state_dict()[name], tensor), name
    if optimizer is not None:
        ours, theirs = one["optimizer"].state_dict(), optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        for number, state in theirs["state"].items():
            assert all(torch.equal(state[key], ours["state"][number][key]) for key in state)


def by_torch_save(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, folder / "whole.pt")
    return str(folder / "whole.pt")


def by_dcp(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    weights, of_optimizer = get_state_dict(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": of_optimizer}, checkpoint_id=folder / "dcp")
    return str(folder / "dcp")


def weights_alone(folder: Path, net: nn.Module, _: object) -> str:
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    return str(folder / "pytorch_model.bin")


def by_safetensors(folder: Path, net: nn.Module, _: object) -> str:
    save_file(dict(net.state_dict()), folder / "model.safetensors")
    return str(folder / "model.safetensors")


def model_folder(folder: Path, net: nn.Module, _: object) -> str:
    """Two files and an index, by names that wrappers and a path have changed."""
    place = folder / "hf"
    place.mkdir()
    names = {}
    for number, name in enumerate(net.state_dict()):
        file = f"model-{number % 2}.safetensors"
        names[f"net._orig_mod.{name}"] = file
    for file in set(names.values()):
        mine = [name for name, where in names.items() if where == file]
        tensors = {name: net.state_dict()[name.removeprefix("net._orig_mod.")] for name in mine}
        save_file(tensors, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return str(place)


def accelerate_folder(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    place = folder / "state"
    place.mkdir()
    save_file(dict(net.state_dict()), place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.bin")
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    torch.save(schedule.state_dict(), place / "scheduler.bin")
    optimizer.param_groups[0]["lr"] = 0.1
    del optimizer.param_groups[0]["initial_lr"]
    return str(place)


WHOLE = (by_torch_save, by_dcp, accelerate_folder)
WEIGHTS = (weights_alone, by_safetensors, model_folder)
Write = Callable[[Path, nn.Module, torch.optim.Optimizer], str]


@pytest.mark.parametrize("write", WHOLE)
def test_a_training_of_another_library_goes_on(write: Write, tmp_path: Path) -> None:
    net, optimizer = trained()
    state = fresh()
    report = ckpt.load(state, write(tmp_path, net, optimizer), strict="state")
    same(state, net, optimizer)
    assert report.nbytes_read <= 1.05 * 3 * sum(one.nbytes for one in net.parameters()) + 64
    # Nothing was restored of a root: the first save begins one as always.
    ckpt.save(state, tmp_path / "run", step=1)


@pytest.mark.parametrize("write", WEIGHTS)
def test_weights_of_another_library_load(write: Write, tmp_path: Path) -> None:
    net, optimizer = trained()
    state = {"model": model()}
    url = write(tmp_path, net, optimizer)
    ckpt.load(state, url)
    same(state, net)
    with pytest.raises(Mismatch, match=r"optimizer"):
        ckpt.load(fresh(), url)


@pytest.mark.parametrize("write", (*WHOLE, *WEIGHTS))
def test_any_checkpoint_opens(write: Write, tmp_path: Path) -> None:
    net, optimizer = trained()
    with ckpt.open(write(tmp_path, net, optimizer)) as checkpoint:
        name = next(name for name in checkpoint if name.endswith("0.weight"))
        weight = net.state_dict()["0.weight"]
        assert torch.equal(checkpoint[name], weight)
        assert torch.equal(checkpoint.read(name, (slice(1, 3), slice(2, 6, 2))), weight[1:3, 2:6:2])


def test_an_optimizer_without_state_goes_on(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    state = fresh()
    ckpt.load(state, by_torch_save(tmp_path, net, optimizer), strict="state")
    same(state, net, optimizer)
    assert not state["optimizer"].state


def _loads(url: str, folder: str) -> tuple[int, float]:
    share_all()
    torch.manual_seed(1)
    big = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    for layer in (*big, big):
        fully_shard(layer)
    report = ckpt.load({"model": big}, url)
    whole = get_model_state_dict(big)
    total = sum(one.full_tensor().double().sum().item() for one in whole.values())
    return report.nbytes_read, total


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_their_part(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    big = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    url = by_safetensors(tmp_path, big, None)
    answers = run_ranks(ranks, _loads, url, str(tmp_path))
    total = sum(one.double().sum().item() for one in big.parameters())
    assert all(abs(answer - total) < 1e-9 for _, answer in answers)
    needed = sum(one.nbytes for one in big.parameters())
    assert sum(read for read, _ in answers) <= 1.05 * needed


@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
@pytest.mark.parametrize("write", WEIGHTS)
def test_large_tensors_load_by_every_way_to_read(write: Write, io: Any, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2048, 2600, bias=False))
    loaded = nn.Sequential(nn.Linear(2048, 2600, bias=False))
    ckpt.load({"model": loaded}, write(tmp_path, net, torch.optim.SGD(net.parameters())), io=io)
    assert torch.equal(loaded[0].weight, net[0].weight)


def _goes_on_sharded(url: str) -> list[torch.Tensor]:
    """Everything that was loaded, in full."""
    state = fresh()
    for layer in (*state["model"], state["model"]):
        fully_shard(layer)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=7.0)
    ckpt.load(state, url, strict="state")
    weights, of_optimizer = get_state_dict(state["model"], state["optimizer"])
    assert of_optimizer["param_groups"][0]["lr"] == 0.1
    moments = [of_optimizer["state"][name][key] for name in weights for key in MOMENTS]
    return [one.full_tensor() for one in (*weights.values(), *moments)]


@pytest.mark.ranks
@pytest.mark.parametrize("write", WHOLE)
def test_a_training_goes_on_sharded(write: Write, tmp_path: Path) -> None:
    net, optimizer = trained()
    url = write(tmp_path, net, optimizer)
    states = [optimizer.state[param] for param in net.parameters()]
    expected = [*net.state_dict().values(), *(one[key] for one in states for key in MOMENTS)]
    for loaded in run_ranks(2, _goes_on_sharded, url):
        assert all(map(torch.equal, loaded, expected))


def _of_fsdp1(folder: str) -> tuple[dict[str, Any], str]:
    """What FSDP1 gathers, and the file of it: each tensor is marked by an attribute."""
    net, _ = trained()
    options = FullStateDictConfig(rank0_only=False)
    wrapped = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    full = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(wrapped, full, options):
        weights = wrapped.state_dict()
        of_optimizer = FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
    assert all(vars(one) for one in weights.values())
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save({"model": weights, "optimizer": of_optimizer, "args": Path("x")}, file)
    plain = {name: one.detach().clone() for name, one in weights.items()}
    moments = {name: state["exp_avg"] for name, state in of_optimizer["state"].items()}
    return {**plain, **{f"{name}.exp_avg": one for name, one in moments.items()}}, file


@pytest.mark.ranks
def test_a_full_state_of_fsdp1_loads(tmp_path: Path) -> None:
    for expected, file in run_ranks(2, _of_fsdp1, str(tmp_path)):
        state = fresh()
        ckpt.load(state, file, strict="state")
        params = dict(state["model"].named_parameters())
        assert all(torch.equal(param, expected[name]) for name, param in params.items())
        for name, param in params.items():
            moment = state["optimizer"].state[param]["exp_avg"]
            assert torch.equal(moment, expected[f"{name}.exp_avg"])


def test_a_tensor_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    net = model()
    odd = net.state_dict()
    odd["0.weight"] = odd["0.weight"].to_sparse()
    torch.save(odd, tmp_path / "odd.pt")
    with pytest.raises(Mismatch, match=r"0\.weight: it is sparse"):
        ckpt.load({"model": net}, tmp_path / "odd.pt")
    with ckpt.open(tmp_path / "odd.pt") as checkpoint:
        assert "0.weight" not in checkpoint and torch.equal(checkpoint["0.bias"], odd["0.bias"])


def _sees_another(folder: str) -> str:
    net = model()
    url = f"{folder}/{dist.get_rank()}.safetensors"
    save_file({f"x{dist.get_rank()}": torch.ones(2), **net.state_dict()}, url)
    with pytest.raises(Mismatch) as caught:
        ckpt.load({"model": net}, url, strict="state")
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_see_other_files_are_named(tmp_path: Path) -> None:
    texts = run_ranks(2, _sees_another, str(tmp_path))
    assert len(set(texts)) == 1 and "rank 1 sees other tensors" in texts[0]


def test_what_is_damaged_leaves_the_state(tmp_path: Path) -> None:
    net, optimizer = trained()
    state = fresh()
    before = copy.deepcopy(state["model"].state_dict())
    path = Path(by_safetensors(tmp_path, net, optimizer))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(Corrupt):
        ckpt.load({"model": state["model"]}, str(path))
    assert all(torch.equal(before[name], one) for name, one in state["model"].state_dict().items())


@pytest.mark.parametrize("lost", ["FORMAT", "log", "MANIFEST", "FORMAT log MANIFEST"])
def test_what_is_left_of_ours_is_never_taken_for_anothers(lost: str, tmp_path: Path) -> None:
    """It would load what nothing verifies, and perhaps a part of it."""
    net = model()
    root = tmp_path / "run"
    ckpt.save(net.state_dict(), root, step=1)
    (step,) = (root / "steps").iterdir()
    for name in lost.split():
        place = step / name if name == "MANIFEST" else root / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    places = [root, *([step] if "MANIFEST" in lost else [])]
    for url in map(str, (*places, *([next(step.glob("*.safetensors"))] if places[1:] else []))):
        for call in (partial(ckpt.load, net.state_dict()), ckpt.open):
            with pytest.raises(CheckpointError) as caught:
                call(url)
            assert not isinstance(caught.value, Mismatch)


@pytest.mark.parametrize("place", ["log/1", "steps/1000", "spread/out"])
def test_folders_of_others_may_be_called_as_ours(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(place).mkdir(parents=True)
    net = model()
    save_file(dict(net.state_dict()), f"{place}/model.safetensors")
    save_file(dict(net.state_dict()), "model.safetensors")
    for url in (f"{place}/model.safetensors", place, "."):
        with ckpt.open(url) as checkpoint:
            assert torch.equal(checkpoint["0.weight"], net[0].weight), url


def test_what_is_nothing_is_said_as_before(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    net, optimizer = trained()
    for call in (lambda url: ckpt.load({"model": net}, url), ckpt.open):
        with pytest.raises(NoCheckpoint, match="no FORMAT object"):
            call(str(tmp_path))
        with pytest.raises(InvalidUrlError, match=r"notes\.txt is a file"):
            call(str(tmp_path / "notes.txt"))
    with pytest.raises(NoCheckpoint):
        ckpt.load({"model": net}, by_dcp(tmp_path, net, optimizer), step=4)


@pytest.mark.parametrize("write", (*WHOLE, *WEIGHTS))
def test_commands_take_any_checkpoint(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer = trained()
    url = write(tmp_path, net, optimizer)
    assert main(["show", url]) == 0
    assert "0.weight" in capsys.readouterr().out
    assert main(["ls", url]) == 0
    with ckpt.open(url) as checkpoint:
        assert checkpoint.manifest.header.attempt in (listed := capsys.readouterr().out)
    assert f"{url}: 1 checkpoint" in listed
    assert main(["verify", url]) == 0
    assert "all bytes can be read; nothing has checksums here" in capsys.readouterr().out
    report = ckpt.verify(url)
    assert (
        report.ok and not report.blocks and report.nbytes >= sum(p.nbytes for p in net.parameters())
    )
    with pytest.raises(CheckpointError):
        ckpt.verify(url, step=4)
    # Nothing has changed since it was written, and then one element of one tensor.
    model_alone = write in (*WEIGHTS, accelerate_folder)
    state = net.state_dict() if model_alone else {"model": net, "optimizer": optimizer}
    rename = ["net._orig_mod="] if write is model_folder else []
    ckpt.save(state, tmp_path / "run", step=1)
    options = {"rename": rename, "include": ["*weight", "*bias"]}
    report = ckpt.diff(url, tmp_path / "run", **options)
    assert not report.changed and report.same >= 3 and not report.only_a and not report.only_b
    with torch.no_grad():
        net[0].weight[1, 2] += 1
    ckpt.save(state, tmp_path / "run", step=2)
    (change,) = ckpt.diff(url, tmp_path / "run", **options).changed
    assert change.fqn.endswith("0.weight") and change.amount is not None
    assert change.amount.changed == 1


# --- names ----------------------------------------------------------------------------------------


def renamed(names: tuple[str, ...], stored: list[str]) -> list[str] | None:
    rename = deduced([(name,) for name in names], stored)
    return None if rename is None else [rename(name) for name in names]


@pytest.mark.parametrize("old", ["", "model", "state.model"])
@pytest.mark.parametrize("new", ["", "net", "model", "model.net", "module", "_orig_mod"])
def test_a_path_in_front_is_deduced(old: str, new: str) -> None:
    live = tuple(f"{old}.{name}" if old else name for name in NAMES)
    stored = [f"{new}.{name}" if new else name for name in NAMES]
    assert renamed(live, stored) == (None if old == new else stored)
    more = [*stored, "optimizer.a.w", "other"]
    assert renamed(live, more) == (None if old == new else stored)


def test_parts_of_wrappers_are_deduced() -> None:
    stored = ["a._orig_mod.w", "a._fsdp_wrapped_module.b", "module.c._checkpoint_wrapped_module.w"]
    assert renamed(NAMES, stored) == stored


@pytest.mark.parametrize(
    "stored",
    [
        ["a.w", "a.b"],  # one is missing
        ["x.a.w", "x.a.b", "y.c.w"],  # below two paths
        [f"{path}.{name}" for path in ("live", "ema") for name in NAMES],  # two would do
        [],
    ],
)
def test_what_is_not_sure_is_not_deduced(stored: list[str]) -> None:
    assert renamed(tuple(f"model.{name}" for name in NAMES), stored) is None


def test_one_name_of_a_tied_tensor_is_enough() -> None:
    names = [("m.embed.w", "m.head.w"), ("m.a.w",)]
    for kept in ("embed.w", "head.w"):
        rename = deduced(names, [kept, "a.w"])
        assert rename is not None
        assert [rename(name) for name in ("m.embed.w", "m.head.w", "m.a.w")] == [kept, kept, "a.w"]


def test_empty_bytes_are_read_by_torch(tmp_path: Path) -> None:
    values = {"a": [b"", b"x"], "b": b""}
    ckpt.save({"model": model(), "values": values}, tmp_path / "run", step=1)
    ckpt.export(tmp_path / "run", str(tmp_path / "x.pt"), format="torch", optimizer=True)
    assert torch.load(tmp_path / "x.pt", weights_only=True)["values"] == values


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_known_types_come_back_as_what_they_were(tmp_path: Path, protocol: int) -> None:
    """They were refused as somebody's code."""
    inner = argparse.Namespace(lr=0.5, dims=(1, 2), kind=torch.float16)
    values = {
        "args": argparse.Namespace(name="a", inner=inner),
        "simple": types.SimpleNamespace(layers=[1, {"a": None}]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scalars": [np.float64(0.1), np.int32(-7), np.bool_(True), np.float16(2), np.uint8(255)],
    }
    state = {"model": {"w": torch.ones(2)}, "values": values}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    live: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "values": dict.fromkeys(values)}
    ckpt.load(live, tmp_path / "a.pt")
    assert live["values"] == values
    assert type(live["values"]["args"].inner) is argparse.Namespace
    with ckpt.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.values["values"]["scalars"] == [0.1, -7, True, 2.0, 255]
