"""Stages of a pipeline in one checkpoint: what is saved under one number of stages loads under any.

Method: real gloo ranks that hold different modules, plain or sharded over meshes of their own.
Every rank compares its stage, bit for bit, with the same part of a model that was never cut.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckpt
import sharding
from ckpt.errors import InvalidState, Mismatch
from tests.e2e.stages import LAYERS, Model, differences, fill, optimizer_of, trained
from tests.ranks import run_ranks
from tests.versions import cut_here

pytestmark = pytest.mark.ranks

PP4 = [[0], [1], [2], [3]]
LOOPED = [[0, 2], [1, 3]]  # two stages on each of two ranks
PP2 = [[0, 1], [2, 3]]


def built(layers: list[int], mesh: DeviceMesh | None = None, seed: int = 0) -> dict[str, Any]:
    """A stage with its optimizer, stepped once on values of `seed`; sharded over `mesh`."""
    model = Model(layers)
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        for layer in model.layers.values():
            if "tp" in names:
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel()})
            if "dp" in names:
                fully_shard(layer, mesh=mesh["dp"])
        if "dp" in names:
            fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(model)
    fill(model, seed)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def wrong(state: dict[str, Any], seed: int) -> list[str]:
    return differences(state["model"], state["optim"], seed)


def four_ranks(root: str) -> list[str]:
    """Saves pp4 of plain stages in three ways, loads each; pp2 x fsdp2 and pp2 x tp2 likewise."""
    rank = dist.get_rank()
    odd: list[str] = []
    state = {**built(PP4[rank], seed=1), "n": 7}
    # Twice into one root, so that the second has nothing to tell; then in the background.
    ckpt.save(state, f"{root}/plain", step=1)
    fill(state["model"], 2)
    report = ckpt.save(state, f"{root}/plain", step=2)
    odd += report.warnings
    ckpt.async_save(state, f"{root}/async", step=1).result()
    other = {**built(PP4[3 - rank], seed=5), "n": 0}  # on other ranks than before
    ckpt.load(other, f"{root}/plain", step=1)
    odd += wrong(other, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    sharded = {**built(PP2[rank // 2], mesh["dp"], seed=3), "n": 8}
    ckpt.save(sharded, f"{root}/fsdp", step=1)
    ckpt.load(other, f"{root}/fsdp")
    odd += [f"fsdp {one}" for one in wrong(other, 3)]
    ckpt.load(sharded, f"{root}/plain", step=1)
    odd += [f"into fsdp {one}" for one in wrong(sharded, 1)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    parallel = {**built(PP2[rank // 2], mesh["tp"], seed=4), "n": 9}
    ckpt.save(parallel, f"{root}/tp", step=1)
    ckpt.load(sharded, f"{root}/tp")
    odd += [f"tp into fsdp {one}" for one in wrong(sharded, 4)]
    return odd


def looped(root: str) -> list[str]:
    """Two ranks with two stages each; what they save is loaded by one process, and back."""
    rank = dist.get_rank()
    both = [built([layer], seed=6) for layer in LOOPED[rank]]
    state = {
        "model": ckpt.Stages(*(one["model"] for one in both)),
        "optim": ckpt.Stages(*(one["optim"] for one in both)),
        "n": 3,
    }
    ckpt.save(state, f"{root}/looped", step=1)
    ckpt.load(state, f"{root}/plain", step=1)
    odd = [text for one in both for text in wrong(one, 1)]
    halves = {**built(PP2[rank], seed=9), "n": 0}
    ckpt.load(halves, f"{root}/looped")
    return odd + [f"looped {one}" for one in wrong(halves, 6)]


def test_stages_are_saved_as_one_model_and_load_under_other_numbers_of_stages(
    tmp_path: Path,
) -> None:
    root = str(tmp_path)
    assert run_ranks(4, four_ranks, root, timeout_seconds=180.0) == [[]] * 4
    assert run_ranks(2, looped, root, timeout_seconds=180.0) == [[]] * 2
    for name, seed in (("plain", 1), ("async", 1), ("fsdp", 3), ("tp", 4), ("looped", 6)):
        whole = {**built(list(range(LAYERS)), seed=8), "n": 0}
        step = 1
        ckpt.load(whole, f"{root}/{name}", step=step)
        if name != "async":
            assert wrong(whole, seed) == [], name
        groups = whole["optim"].param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    # One stage takes its own out of the whole, if that is said.
    stage = {**built([2], seed=9), "n": 0}
    with pytest.raises(Mismatch, match=r"layers\.0.*has no place in the state"):
        ckpt.load(stage, f"{root}/plain", step=1)
    ckpt.load(stage, f"{root}/plain", step=1, strict="state")
    assert wrong(stage, 1) == []
    stage["new"] = torch.zeros(2)
    with pytest.raises(Mismatch, match="new: is not in the checkpoint"):
        ckpt.load(stage, f"{root}/plain", step=1, strict="state")
    exported = tmp_path / "whole.safetensors"
    ckpt.export(f"{root}/plain", str(exported), step=1)
    expected = trained(1)[0].state_dict()
    whole_file = load_file(str(exported))
    assert whole_file.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_file.items())


def raised(run: Any) -> str:
    try:
        run()
    except (InvalidState, Mismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes(root: str) -> dict[str, str]:
    rank = dist.get_rank()
    raised_by: dict[str, str] = {}

    def save(name: str, state: Any) -> None:
        raised_by[name] = raised(lambda: ckpt.save(state, f"{root}/{name}", step=1))

    # Two stages claim one name, with different shapes, and then with different bytes.
    save("shapes", {"w": torch.zeros(2 + rank) if rank < 2 else torch.zeros(3)})
    own: dict[str, Any] = {"own": {str(rank): torch.zeros(1)}}
    save("bytes", {**own, **({} if rank == 3 else {"w": torch.full((3,), float(rank == 1))})})
    save("values", {**own, **({} if rank == 3 else {"lr": 0.1 * (rank == 1)})})
    twice = nn.Linear(2, 2)
    fill(twice, 1)
    rate = 0.1 if rank else 0.2
    optimizer = torch.optim.SGD(twice.parameters(), lr=rate)
    save("groups", {"model": twice, "optim": optimizer, **own})
    save("mesh", {**own, "w": one_mesh() if rank < 2 else torch.zeros(4)})
    # Nobody has what a rank asks for; and nobody has a place for what there is.
    ckpt.save({"model": Model(PP4[rank])}, f"{root}/whole", step=1)
    asked = {"model": Model(PP4[rank]), **({"more": torch.zeros(1)} if rank == 2 else {})}
    raised_by["asked"] = raised(lambda: ckpt.load(asked, f"{root}/whole"))
    left = {"model": Model(PP4[min(rank, 2)])}
    raised_by["left"] = raised(lambda: ckpt.load(left, f"{root}/whole"))
    raised_by["after"] = raised(lambda: ckpt.save(own, f"{root}/bytes", step=1))
    return raised_by


def one_mesh() -> torch.Tensor:
    from torch.distributed.tensor import Shard

    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    return cut_here(torch.zeros(4), mesh, [Shard(0)])


def test_contradictions_between_ranks_are_one_error_on_all_that_names_ranks_and_names(
    tmp_path: Path,
) -> None:
    first, *others = run_ranks(4, mistakes, str(tmp_path), timeout_seconds=180.0)
    assert all(one == first for one in others), [first, *others]
    assert (
        "w: the ranks hold different tensors of this name: float32[2] on rank 0"
        in (first["shapes"])
    )
    assert "float32[3] on ranks 1 to 3" in first["shapes"]
    assert "w: the ranks have different values of it" in first["bytes"]
    assert "on 0, 2" in first["bytes"]
    assert "lr: the value differs between ranks" in first["values"], first["values"]
    assert "optim.param_groups" in first["groups"] and "rank" in first["groups"]
    assert "w: the ranks hold different tensors of this name" in first["mesh"]
    assert "rank 2: more: is not in the checkpoint" in first["asked"]
    assert "layers.3.up.weight: is in the checkpoint and has no place" in first["left"]
    assert "layers.2.up.weight" not in first["left"]
    assert first["after"] == "nothing"


def changing(root: str) -> list[str]:
    """What ranks hold changes between saves: told again, also in the background."""
    rank = dist.get_rank()
    state: dict[str, Any] = {**built(PP2[rank], seed=1), "n": 0}
    ckpt.async_save(state, root, step=1).result()
    state["of all"] = torch.ones(3)
    state["values"] = {"of all": rank * 0}
    ckpt.async_save(state, root, step=2).result()
    state["of one"] = {str(rank): torch.full((3,), float(rank))}
    failed = raised(lambda: ckpt.async_save(state, root, step=3).result())
    assert "other ranks hold it now than at the last save" in failed, failed
    ckpt.async_save(state, root, step=4).result()
    del state["of one"]
    if rank:
        del state["of all"]
    ckpt.save(state, root, step=5)
    odd = []
    for step in (1, 2, 4, 5):
        with ckpt.open(root, step=step) as saved:
            names = set(saved.keys())
        expected = {"of all"} if step > 1 else set()
        expected |= {"of one.0", "of one.1"} if step == 4 else set()
        if {name for name in names if name.startswith("of ")} != expected:
            odd.append(f"step {step}: {sorted(names)}")
    return odd


def test_what_ranks_hold_may_change_between_saves(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        assert run_ranks(2, changing, str(tmp_path), timeout_seconds=180.0) == [[]] * 2


def dicts_of(engine: Any, layers: list[int], group: Any) -> dict[str, Any]:
    """The state dicts of a stage under a wrapper over the stage's own ranks, stepped once."""
    model = Model(layers)
    fill(model, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its wrapper is old
        wrapped = engine(
            model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        )
        # Not Adam, whose `lerp` rounds by where in memory an element lies.
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.5)
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = engine.optim_state_dict(wrapped, optimizer)["state"]
        return {**wrapped.state_dict(), **_flat(state)}


def shards_of(shard: Any, layers: list[int], mesh: DeviceMesh) -> dict[str, Any]:
    """The state dict of a stage under `fully_shard`, as local tensors, before and after a load of
    its own.
    """
    model = Model(layers)
    fill(model, 3)
    shard(model, mesh=mesh)
    before = {name: local_of(tensor).clone() for name, tensor in model.state_dict().items()}
    given = {name: tensor * 1 for name, tensor in model.state_dict().items()}
    fill(model, 4)
    model.load_state_dict(given)
    after = {f"{name} again": local_of(tensor) for name, tensor in model.state_dict().items()}
    return {**before, **after}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": one for name, of in state.items() for key, one in of.items()}


def methods_per_stage() -> list[str]:
    """What differs between our engine's methods and torch's on stages over ranks of their own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    layers = [[0], [1, 2, 3]][rank // 2]  # stages of different size make different rounds
    pairs = [
        (
            dicts_of(sharding.FullyShardedDataParallel, layers, mesh.get_group()),
            dicts_of(TorchFSDP, layers, mesh.get_group()),
        ),
        (shards_of(sharding.fully_shard, layers, mesh), shards_of(fully_shard, layers, mesh)),
    ]
    return [
        f"pair {number}: {name}"
        for number, (ours, theirs) in enumerate(pairs)
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def test_state_dict_methods_work_per_stage_as_torch_s_do() -> None:
    assert run_ranks(4, methods_per_stage, timeout_seconds=180.0) == [[]] * 4
