"""DTensors and tensor parallel models on real ranks, compared with what torch gathers.

Every rank's pieces are put together; each element must be held by exactly the ranks its piece
names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from ckpt.layout.modules import Ranks, UnsupportedTensor, describe_module, describe_tensor
from ckpt.layout.tensor import local_tensor
from tests.layout.rebuilding import assembled, held, put, rebuilt, world
from tests.ranks import run_ranks
from tests.versions import needs_uneven_strided_shards


class Mlp(nn.Module):
    """`hidden` rows in the first weight, as many columns in the second."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 6, bias=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return y


def _mlp(seed: int, hidden: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(hidden)


def _parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


CASES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((4,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Replicate(), Shard(1))),
    ((2, 2), (Shard(1), Replicate())),
    ((2, 2), (Shard(0), Shard(1))),
]


def _check_distributed() -> None:
    for mesh_shape, placements in CASES:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in ((7, 3), (8, 4), (1, 5), (3, 3), (0, 4), (5, 2)):
            full = torch.arange(float(shape[0] * shape[1])).view(shape)
            tensor = distribute_tensor(full, mesh, placements)
            owned = describe_tensor("t", tensor, world())
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, held(owned))
            assert torch.equal(assembled(gathered)["t"], full), (mesh_shape, placements, shape)
            assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.ranks
def test_distributed_tensors_are_put_together_again() -> None:
    """Seven layouts on four ranks, six shapes each: even, uneven, smaller than the mesh, empty."""
    run_ranks(4, _check_distributed)


def _check_tensor_parallel(hidden: int, with_fsdp: bool, dim: int | None) -> None:
    names = ("dp", "tp") if with_fsdp else ("tp",)
    shape = (2, 2) if with_fsdp else (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = _mlp(1, hidden)
    _parallel(module, mesh["tp"])
    if with_fsdp:
        placement = None if dim is None else (lambda param: Shard(dim if param.ndim > dim else 0))
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=placement)
    with torch.no_grad():
        module.eval()(torch.ones(2, 4))
    expected = _mlp(1, hidden).state_dict()
    layout = describe_module(module, world())
    assert not layout.problems, layout.problems
    for owned in layout.params:  # nobody keeps the norm equal over tensor parallel ranks
        assert owned.synchronized is not owned.views[0].pieces[0].fqn.startswith("norm.")
    read = rebuilt(layout)
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    wanted = _mlp(2, hidden).state_dict()
    layout.reshard()
    for owned in layout.params:
        put(owned, wanted)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(module(x), _mlp(2, hidden).eval()(x), atol=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("hidden", [8, 6])
def test_tensor_parallel(hidden: int) -> None:
    """Two ranks; the norm is a plain parameter that all hold."""
    run_ranks(2, _check_tensor_parallel, hidden, False, None)


@pytest.mark.ranks
@needs_uneven_strided_shards
@pytest.mark.parametrize(
    ("hidden", "dim"), [(8, None), (6, None), (10, None), (8, 1), (2, None), (14, None)]
)
def test_fsdp2_over_tensor_parallel(hidden: int, dim: int | None) -> None:
    """2 x 2 ranks; FSDP2 cuts dim 0, which is uneven over four for most of the sizes, or dim 1."""
    run_ranks(4, _check_tensor_parallel, hidden, True, dim)


def _check_more_fsdp(rows: int) -> list[int]:
    """FSDP on four, tensor parallel on two: the two orders of cuts differ for these sizes."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(3, rows, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(rows * 3.0).view(rows, 3))
    full = module.weight.detach().clone()
    parallelize_module(module, mesh["tp"], ColwiseParallel())
    fully_shard(module, mesh=mesh["dp"])
    read = rebuilt(describe_module(module, world()))
    assert torch.equal(read["weight"], full)
    return list(local_tensor(module.weight).shape)


@pytest.mark.ranks
@needs_uneven_strided_shards
@pytest.mark.parametrize("rows", [9, 10, 18])
def test_uneven_fsdp2_over_uneven_tensor_parallel(rows: int) -> None:
    """Eight ranks, sizes for which the definition of strided shards says something else."""
    shapes = run_ranks(8, _check_more_fsdp, rows)
    assert sum(shape[0] for shape in shapes) == rows


def _check_worlds() -> tuple[tuple[int, ...], ...]:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    full = torch.arange(8.0)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    me = dist.get_rank()
    all_four = describe_tensor("t", tensor, world())
    if me < 2:
        return (all_four.views[0].pieces[0].holders,)
    part = describe_tensor("t", tensor, Ranks({2: 1, 3: 0}[me], (3, 2)))
    return all_four.views[0].pieces[0].holders, part.views[0].pieces[0].holders


@pytest.mark.ranks
def test_holders_are_ranks_of_the_world() -> None:
    """A world of two of the four ranks, in another order: holders are its indices."""
    answers = run_ranks(4, _check_worlds)
    assert answers == [((0, 2),), ((1, 3),), ((0, 2), (1,)), ((1, 3), (0,))]


def _check_outside() -> tuple[int, int]:
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    owned = describe_tensor("t", tensor, world())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held(owned))
    assert torch.equal(assembled(gathered)["t"], torch.arange(6.0))
    return dist.get_rank(), sum(piece.region.numel for piece in owned.views[0].pieces)


@pytest.mark.ranks
def test_ranks_outside_a_mesh_know_the_tensor_and_hold_nothing() -> None:
    """A mesh of two in a world of three."""
    assert run_ranks(3, _check_outside) == [(0, 3), (1, 3), (2, 0)]


def _check_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    problems = []
    rows = 3 + 3 * dist.get_rank()
    shape, stride = torch.Size((9, 2)), (2, 1)
    for tensor in (
        DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]),
        DTensor.from_local(torch.ones(rows, 2), mesh, [Shard(0)], shape=shape, stride=stride),
    ):
        with pytest.raises(UnsupportedTensor) as caught:
            describe_tensor("layer.weight", tensor, world())
        problems.append(caught.value.problem)
    return problems


@pytest.mark.ranks
def test_what_placements_do_not_tell_is_refused_by_name() -> None:
    """A pending sum, and rows that are spread otherwise than the placements say."""
    for partial, uneven in run_ranks(2, _check_refusals):
        assert partial.startswith("layer.weight: ") and "redistribute" in partial
        assert uneven.startswith("layer.weight: ") and "(9, 2)" in uneven
