"""Meshes of two to four axes: tensor parallelism over several of them, joined axes, hybrid.

Method: a model whose parameters are DTensors (or not) on a part of the mesh is sharded over the
rest by torch's `fully_shard` and by ours, on the same ranks; meshes, placements and values after
steps must be the same. Checkpoints of each move to other layouts and back, bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
import sharding
from sharding import DataParallelMeshDims
from tests.ranks import run_ranks
from tests.sharding.fully_scenarios import ENGINES, claims
from tests.sharding.test_fully_checkpoints import shared_folder

pytestmark = pytest.mark.ranks


class Layout(NamedTuple):
    """A mesh, which of its axes see different data, and along which dim the others cut weights."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    data: tuple[str, ...]
    cuts: dict[str, int]
    within: DataParallelMeshDims | None = None
    """Set where parameters are DTensors on the whole mesh."""
    joins: bool = False
    """Whether the axes of data are one axis to shard over."""


TWO_AXES = ("dp", "ep", "tp")
LAYOUTS = {
    "two axes cut one dim": Layout((1, 2, 2), TWO_AXES, ("dp",), {"ep": 0, "tp": 0}),
    "two axes cut two dims": Layout((2, 2, 1), TWO_AXES, ("dp",), {"ep": 1, "tp": 0}),
    "hybrid": Layout((1, 2, 1, 2), ("rep", *TWO_AXES), ("rep", "dp"), {"ep": 1, "tp": 0}),
    "dp and cp joined": Layout((2, 1, 2), ("dp", "cp", "tp"), ("dp", "cp"), {"tp": 0}, joins=True),
    "on one mesh": Layout(
        (2, 2, 1), TWO_AXES, ("dp",), {"ep": 1, "tp": 0}, DataParallelMeshDims(shard="dp")
    ),
    "on one mesh, behind": Layout(
        (1, 2, 2),
        ("ep", "dp", "tp"),
        ("dp",),
        {"ep": 0, "tp": 0},
        DataParallelMeshDims(shard="dp"),
    ),
    "on one mesh of four axes": Layout(
        (2, 1, 1, 2),
        ("rep", "dp", "cp", "tp"),
        ("rep", "dp", "cp"),
        {"tp": 0},
        DataParallelMeshDims(shard=("dp", "cp"), replicate="rep"),
    ),
}


class Squares(nn.Module):
    """Adds up squares of its parameters, weighted by the input. Sizes do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(18, 6))
        self.inner = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = [one.to_local() if isinstance(one, DTensor) else one for one in self.parameters()]
        return sum((((one * x) ** 2).sum() for one in local), torch.zeros(()))


def distributed(layout: Layout, mesh: DeviceMesh) -> Squares:
    """The model with weights on the axes that cut them, or on the whole mesh."""
    model = Squares()
    part = mesh
    if layout.within is None:
        part = mesh[tuple(name for name in layout.names if name not in layout.data)]
    for module in (model, model.inner):
        weight = module.weight
        placements = [
            Shard(layout.cuts[name]) if name in layout.cuts else Replicate()
            for name in part.mesh_dim_names or ()
        ]
        module.weight = nn.Parameter(distribute_tensor(weight.detach(), part, placements))
    if layout.within is not None:
        bias = distribute_tensor(model.inner.bias.detach(), part, [Replicate()] * part.ndim)
        model.inner.bias = nn.Parameter(bias)
    return model


def sharded(engine: str, layout: Layout, mesh: DeviceMesh) -> Any:
    model: Any = distributed(layout, mesh)
    options: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": layout.within}
    if layout.within is None:
        data: Any = mesh[layout.data]
        options = {"mesh": data._flatten("_".join(layout.data)) if layout.joins else data}
    ENGINES[engine].fully_shard(model.inner, **options)
    return ENGINES[engine].fully_shard(model, **options)


def trained(engine: str, layout: Layout, mesh: DeviceMesh) -> dict[str, DTensor]:
    model = sharded(engine, layout, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    here = dict(zip(layout.names, mesh.get_coordinate() or (), strict=True))
    for step in range(2):
        seed = sum(here[name] << place for place, name in enumerate(layout.data))
        model(torch.tensor(1.0 + step + seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def mesh_of(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout.shape, mesh_dim_names=layout.names)


def form(tensor: DTensor) -> tuple[Any, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names, mesh.mesh.tolist(), tensor.placements, tensor.shape


def layouts_are_those_of_torch() -> None:
    for name, layout in LAYOUTS.items():
        mesh = mesh_of(layout)
        ours, theirs = (trained(engine, layout, mesh) for engine in ("ours", "torch"))
        assert ours.keys() == theirs.keys()
        for fqn, tensor in ours.items():
            wanted = theirs[fqn]
            assert form(tensor) == form(wanted), f"{name}, {fqn}"
            torch.testing.assert_close(
                tensor.to_local(), wanted.to_local(), msg=lambda m, n=f"{name} {fqn}": f"{n}: {m}"
            )


class Layers(nn.Module):
    """A layer whose weight is cut over several axes, around one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return self.last(torch.tanh(nn.functional.linear(x, weight)))
        mesh = weight.device_mesh
        everywhere = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        out: Any = nn.functional.linear(everywhere, weight)
        return self.last(torch.tanh(out.full_tensor()))


def step_all(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrappers_over_several_axes_train_and_are_saved_as_the_unsharded_model() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    plain = Layers()
    step_all(plain, batches)
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    root, step = shared_folder(), 0
    for shape, cuts in (((1, 2, 2), (0, 0)), ((1, 2, 2), (1, 0)), ((2, 2, 1), (0, 1))):
        for orig in (False, True):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=TWO_AXES)
            bare = Layers()
            placements = [Shard(cut) for cut in cuts]
            weight = distribute_tensor(bare.weight.detach(), mesh["ep", "tp"], placements)
            bare.weight = nn.Parameter(weight)
            model: Any = sharding.FullyShardedDataParallel(
                bare, device_mesh=mesh["dp"], use_orig_params=orig
            )
            row = (mesh.get_coordinate() or [0])[0]
            step_all(model, [batch.chunk(shape[0])[row] for batch in batches])
            where = f"{shape} {cuts} {orig}"
            assert_state(model.state_dict(), wanted, where)
            with sharding.FullyShardedDataParallel.summon_full_params(model, writeback=False):
                shown: Any = model.module.weight
                assert shown.placements == tuple(placements), where
                torch.testing.assert_close(shown.full_tensor(), wanted["weight"])
            if orig:
                ckpt.save({"model": model}, root, step=(step := step + 1))
                alone = Layers()
                ckpt.load({"model": alone}, root)
                assert_state(dict(alone.state_dict()), wanted, where)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)


def assert_state(state: Any, wanted: dict[str, torch.Tensor], where: str) -> None:
    assert state.keys() == wanted.keys(), where
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{where} {n}: {m}")


test_on_four_ranks = claims(
    4,
    [
        layouts_are_those_of_torch,
        wrappers_over_several_axes_train_and_are_saved_as_the_unsharded_model,
    ],
)


# Checkpoints -------------------------------------------------------------------------------------


def doubled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def is_loaded(model: nn.Module) -> list[str]:
    """Which parameters are not twice what they were built with."""
    wanted = dict(Squares().named_parameters())
    wrong = []
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param.detach()
        if not torch.equal(whole, 2 * wanted[name]):
            wrong.append(name)
    return wrong


def _move(root: str) -> list[str]:
    """Save under each layout; load that under one axis of all ranks, and what one rank saved."""
    problems = []
    whole = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        mesh = mesh_of(layout)
        model = sharded("ours", layout, mesh)
        doubled(model)
        ckpt.save({"model": model}, f"{root}/{number}", step=1)
        other = sharding.fully_shard(Squares(), mesh=whole)
        ckpt.load({"model": other}, f"{root}/{number}")
        problems += [f"{name} to one axis: {fqn}" for fqn in is_loaded(other)]
        model = sharded("ours", layout, mesh)
        ckpt.load({"model": model}, f"{root}/alone")
        problems += [f"one rank to {name}: {fqn}" for fqn in is_loaded(model)]
    return problems


def _alone(root: str, loads: bool) -> list[str]:
    problems = []
    model = sharding.fully_shard(Squares(), mesh=init_device_mesh("cpu", (1,)))
    if not loads:
        doubled(model)
        ckpt.save({"model": model}, f"{root}/alone", step=1)
        return []
    for number, name in enumerate(LAYOUTS):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        ckpt.load({"model": model}, f"{root}/{number}")
        problems += [f"{name} to one rank: {fqn}" for fqn in is_loaded(model)]
    return problems


def test_checkpoints_move_between_layouts_bit_for_bit(tmp_path: Path) -> None:
    root = tmp_path.as_uri()
    run_ranks(1, _alone, root, False)
    for problems in run_ranks(4, _move, root, timeout_seconds=240.0):
        assert not problems, problems
    (problems,) = run_ranks(1, _alone, root, True)
    assert not problems, problems
