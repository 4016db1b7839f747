"""`fully_shard(dp_mesh_dims=)`: parameters that are DTensors on one mesh for everything.

Ours against torch's on the same ranks: the sharded DTensors, losses, and parameters after steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
import sharding
from sharding import DataParallelMeshDims
from sharding.engine.torch_seam import torch_replicate
from tests.ranks import run_ranks
from tests.state.test_dicts_against_torch import differences

pytestmark = pytest.mark.ranks

DIMS = {
    "shard": (("dp", "tp"), (2, 2), DataParallelMeshDims(shard="dp")),
    "hybrid": (("rep", "dp"), (2, 2), DataParallelMeshDims(shard="dp", replicate="rep")),
    "repeated": (("rep", "tp"), (2, 2), DataParallelMeshDims(replicate="rep")),
    "repeated twice": (("a", "b", "tp"), (2, 1, 2), DataParallelMeshDims(replicate=("a", "b"))),
    "joined": (("a", "b", "tp"), (2, 1, 2), DataParallelMeshDims(shard=("a", "b"))),
}


def distributed(mesh: DeviceMesh) -> nn.Module:
    """Two layers on the whole mesh; along "tp" the first is cut in its columns, the second rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    names = mesh.mesh_dim_names or ()
    for index, dim in ((0, 0), (2, 1)):
        layer: Any = model[index]
        for name, param in list(layer.named_parameters()):
            cut = dim if name == "weight" or index == 0 else None
            placements = [
                Shard(cut) if axis == "tp" and cut is not None else Replicate() for axis in names
            ]
            shared = distribute_tensor(param.detach(), mesh, placements)
            setattr(layer, name, nn.Parameter(shared))
    return model


def trained(
    engine: Any, mesh: DeviceMesh, chosen: DataParallelMeshDims
) -> tuple[dict[str, Any], list[float]]:
    names = mesh.mesh_dim_names or ()
    model = distributed(mesh)
    engine(model[2], mesh=mesh, dp_mesh_dims=chosen)
    engine(model, mesh=mesh, dp_mesh_dims=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = (*chosen.shard_names, *chosen.replicate_names)
    placements = [Shard(0) if name in data else Replicate() for name in names]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        batch = distribute_tensor(torch.randn(8, 6), mesh, placements)
        loss: Any = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item())
    return dict(model.state_dict()), losses


def _both(dims: str) -> list[str]:
    names, shape, chosen = DIMS[dims]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    problems = []
    functions = [(sharding.fully_shard, torch_fully_shard)]
    if not chosen.shard_names and torch_replicate is not None:
        functions.append((sharding.replicate, torch_replicate))
    for function, torchs in functions:
        ours, theirs = trained(function, mesh, chosen), trained(torchs, mesh, chosen)
        problems += differences(ours[0], theirs[0])
        if ours[1] != theirs[1]:
            problems.append(f"losses {ours[1]}, torch {theirs[1]}")
    return problems


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dims", DIMS)
def test_training_over_named_axes_is_that_of_torch(dims: str) -> None:
    for rank, problems in enumerate(run_ranks(4, _both, dims)):
        assert not problems, (rank, problems)


def _saved(url: str) -> list[str]:
    """Ours trains and saves, torch's loads; both repeat their parameters."""
    names, shape, chosen = DIMS["repeated"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = distributed(mesh)
    sharding.fully_shard(model, mesh=mesh, dp_mesh_dims=chosen, reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()  # type: ignore[operator]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    ckpt.save({"model": model}, url, step=1)
    other = distributed(mesh)
    torch_fully_shard(other, mesh=mesh, dp_mesh_dims=chosen)
    ckpt.load({"model": other}, url)
    sharded_over = sharding.explain(model)
    assert "repeated on 2 ranks" in str(sharded_over), sharded_over
    return differences(dict(model.state_dict()), dict(other.state_dict()))


def test_repeated_parameters_are_saved_once_and_load_into_torchs(tmp_path: Path) -> None:
    for problems in run_ranks(4, _saved, tmp_path.as_uri()):
        assert not problems, problems


def _refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    texts = []
    for args in (
        {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="cp")},
        {"mesh": mesh, "dp_mesh_dims": dims},
        {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard=())},
        {"mesh": mesh, "dp_mesh_dims": dims, "reshard_after_forward": 2},
    ):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            sharding.fully_shard(nn.Linear(2, 2), **args)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_is_refused_with_the_name() -> None:
    for texts in run_ranks(2, _refused):
        expected = ("cp", "weight: with dp_mesh_dims", "names no axis", "reshard_after_forward")
        assert all(part in text for part, text in zip(expected, texts, strict=True)), texts
