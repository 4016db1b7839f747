"""What ranks hold of distributed tensors, rank by rank in one process: torch's fake group sends
nothing, and describing a tensor needs nothing sent.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ckpt.layout.dtensor import describe_dtensor, repeated_over_wider_meshes
from ckpt.layout.modules import describe_module
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Held, Ranks, UnsupportedTensor, whole_tensor
from ckpt.layout.region import Box, Shape, Span, chunk_of
from ckpt.layout.sharded_tensor import (
    chunk_placements,
    describe_sharded_tensor,
    is_sharded_tensor,
    make_dtensor,
    make_sharded_tensor,
)
from ckpt.layout.tensor import same_layout
from tests.layout.rebuilding import assembled, held
from tests.streams.groups import world
from tests.versions import cut_here

S0, S1, R = Shard(0), Shard(1), Replicate()


def _ranks() -> Ranks:
    return Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (5, 3), (4, 2, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_chunks_are_those_of_torch(shape: Shape, parts: int) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    theirs = numbers.chunk(parts)
    for part in range(parts):
        box = chunk_of(shape, parts, part)
        assert len(box.offset) == len(box.shape) == len(shape) and not any(box.offset[1:])
        assert box.shape[1:] == shape[1:]
        rows = numbers[box.offset[0] : box.offset[0] + box.shape[0]]
        if part < len(theirs):
            assert torch.equal(rows, theirs[part])
        else:
            assert (box.offset[0], box.shape[0]) == (shape[0], 0)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [S0]),
        ((3,), [R]),
        ((2, 3), [S0, S1]),
        ((2, 3), [R, S0]),
        ((2, 3), [S1, R]),
        ((2, 2), [S0, S0]),
        ((2, 2), [R, R]),
    ],
    ids=str,
)
def test_dtensors_are_put_together_from_what_each_rank_describes(
    mesh_shape: Shape, placements: list[Placement]
) -> None:
    """torch cuts the local tensors; all elements, all holders and all owners are checked."""
    shapes = ((7, 3), (8, 4), (1, 5), (0, 4))
    size = torch.Size(mesh_shape).numel()
    gathered: dict[Shape, list[list[object]]] = {shape: [] for shape in shapes}
    for rank in range(size):
        with world(size, rank):
            mesh = init_device_mesh("cpu", mesh_shape)
            for shape in shapes:
                full = torch.arange(torch.Size(shape).numel()).view(shape)
                tensor = cut_here(full, mesh, placements)
                owned = describe_dtensor("t", tensor, _ranks())
                assert owned.owners == tuple(range(size)) and not owned.is_whole
                assert owned.template is tensor
                gathered[shape].append(held(owned))  # type: ignore[arg-type]
    for shape, by_rank in gathered.items():
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        assert torch.equal(assembled(by_rank)["t"], full), shape  # type: ignore[arg-type]


def test_a_rank_outside_of_the_mesh_has_an_empty_piece() -> None:
    """torch gives it a local tensor of one dim, whatever the tensor has."""
    with world(4, 3):
        mesh = DeviceMesh("cpu", [0, 2], _init_backend=False)
        local = torch.empty(0)
        tensor = DTensor.from_local(
            local, mesh, [S0], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        owned = describe_dtensor("t", tensor, _ranks())
    ((piece, elements),) = held(owned)
    assert piece.global_shape == (4, 2) and piece.region == Box((0, 0), (0, 0))
    assert elements.numel() == 0
    assert piece.holders == (3,) and owned.owners == (0, 2)


def test_an_empty_part_has_as_many_dims_as_its_local_tensor() -> None:
    """torch may say one dim of size 0 where a rank of the mesh has nothing."""
    with world(2, 1):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [S0], run_check=False, shape=torch.Size((1, 5)), stride=(5, 1)
        )
        ((piece, _),) = held(describe_dtensor("t", tensor, _ranks()))
    assert piece.local_region == Box((0,), (0,)) and piece.region == Box((0, 0), (0, 5))


def test_a_local_tensor_that_placements_do_not_explain_is_refused() -> None:
    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(3, 2), mesh, [S0], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        with pytest.raises(UnsupportedTensor, match=r"^w: its local tensor has shape \(3, 2\)"):
            describe_dtensor("w", tensor, _ranks())


def test_tensors_without_memory_are_refused_by_name() -> None:
    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        meta = torch.zeros(2, 2, device="meta")
        tensor = DTensor.from_local(meta, mesh, [S0], run_check=False)
        with pytest.raises(UnsupportedTensor, match=r"^w: is on the meta device"):
            describe_dtensor("w", tensor, _ranks())


def _described(fqn: str, mesh: DeviceMesh, placements: list[Placement]) -> Owned:
    full = torch.zeros(4, 4)
    return describe_dtensor(fqn, cut_here(full, mesh, placements), _ranks())


def test_replicas_that_their_own_mesh_hides_are_known_by_the_other_tensors() -> None:
    """Rank 4 of a mesh of 2 x 3: its row is 3, 4, 5 and its column 1, 4."""
    with world(6, 4):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        wide = _described("wide", mesh, [S0, S1])
        cut = _described("cut", mesh["dp"], [S0])
        repeated = _described("repeated", mesh["dp"], [R])
        plain = whole_tensor("plain", torch.zeros(2), (4,), Held(None, True))
        alone = [cut, repeated, plain]
        assert list(map(id, repeated_over_wider_meshes(alone, _ranks()))) == list(map(id, alone))
        got = repeated_over_wider_meshes([wide, *alone], _ranks())
    assert got[0] is wide and got[3] is plain
    assert [one.views[0].pieces[0].holders for one in got[1:3]] == [(3, 4, 5), (0, 1, 2, 3, 4, 5)]
    assert not got[1].synchronized and not got[2].synchronized
    assert got[1].views[0].pieces[0].region == cut.views[0].pieces[0].region


def test_meshes_without_names_do_not_say_what_they_lack() -> None:
    with world(6, 4):
        wide = init_device_mesh("cpu", (2, 3))
        narrow = init_device_mesh("cpu", (6,))
        owned = [_described("wide", wide, [S0, S1]), _described("narrow", narrow, [S0])]
        assert repeated_over_wider_meshes(owned, _ranks()) == owned
        named = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        owned += [_described("named", named, [S0, S1]), _described("sub", named["tp"], [S0])]
        got = repeated_over_wider_meshes(owned, _ranks())
        assert got[:3] == owned[:3]
        assert got[3].views[0].pieces[0].holders == (1, 4)


def test_the_widest_of_several_meshes_counts() -> None:
    """By its number of axes, whatever they are called."""
    with world(4, 3):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "z"))
        pair = init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "z"))
        meshes: list[tuple[DeviceMesh, list[Placement]]]
        meshes = [(mesh, [S0, R, S1]), (pair, [R, S0]), (mesh["z"], [S0])]
        owned = [_described(str(n), on, cuts) for n, (on, cuts) in enumerate(meshes)]
        got = repeated_over_wider_meshes(owned, _ranks())
        assert got[:2] == owned[:2] and got[2].views[0].pieces[0].holders == (1, 3)


def _sharded(rows: list[int], shape: Shape, like: torch.Tensor) -> object:
    """A ShardedTensor of a world whose ranks have that many rows each."""
    boxes, start = [], 0
    for rank, count in enumerate(rows):
        if count:
            box = Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
            boxes.append((rank, box))
        start += count
    mine = [like[b.offset[0] :][: b.shape[0]] for rank, b in boxes if rank == dist.get_rank()]
    return make_sharded_tensor(mine, boxes, shape, like, None)


@pytest.mark.parametrize("rows", [[3, 1], [4, 0], [0, 4]])
def test_sharded_tensors_are_put_together_from_what_each_rank_describes(rows: list[int]) -> None:
    full = torch.arange(8.0).view(4, 2)
    gathered = []
    for rank in range(2):
        with world(2, rank):
            value = _sharded(rows, (4, 2), full)
            assert is_sharded_tensor(value)
            (owned,) = describe_sharded_tensor("t", value, _ranks(), (4, 2))
            assert owned.owners == (0, 1) and owned.synchronized
            gathered.append(held(owned))
    assert torch.equal(assembled(gathered)["t"], full)


@pytest.mark.parametrize("rows", [[5, 3], [8, 0], [0, 8]])
def test_flat_sharded_tensors_stand_for_the_live_one(rows: list[int]) -> None:
    full = torch.arange(8.0)
    gathered = []
    for rank in range(2):
        with world(2, rank):
            (owned,) = describe_sharded_tensor("t", _sharded(rows, (8,), full), _ranks(), (4, 2))
            ((piece, elements),) = held(owned)
            assert isinstance(piece.region, Span) and isinstance(piece.local_region, Span)
            assert piece.global_shape == (4, 2)
            assert owned.local.numel() == rows[rank]
            gathered.append([(piece, elements)])
    assert torch.equal(assembled(gathered)["t"], full.view(4, 2))


@pytest.mark.parametrize(
    ("size", "live"), [((8,), (8,)), ((8,), None), ((8,), (3, 2)), ((8, 1), (4, 2)), ((8, 1), None)]
)
def test_other_sharded_tensors_stand_for_themselves(size: Shape, live: Shape | None) -> None:
    """Flat ones are of another shape than the live one, of one dim and of as many elements."""
    for rank, rows in ((0, [5, 3]), (0, [0, 8])):
        with world(2, rank):
            value = _sharded(rows, size, torch.zeros(size))
            (owned,) = describe_sharded_tensor("t", value, _ranks(), live)
            (piece,) = owned.views[0].pieces
            assert piece.global_shape == size
            if rows[rank]:
                box = Box((0,) * len(size), (5, *size[1:]))
                assert (piece.region, piece.local_region) == (box, box)


def test_owners_of_a_sharded_tensor_are_the_ranks_of_its_group() -> None:
    with world(3):
        group = dist.new_group([0, 2])
        boxes = [(0, Box((0,), (3,)))]
        value = make_sharded_tensor([torch.zeros(3)], boxes, (3,), torch.zeros(3), group)
        (owned,) = describe_sharded_tensor("t", value, _ranks(), None)
        assert owned.owners == (0, 2)


def test_only_sharded_tensors_are_taken_for_such() -> None:
    class HasShards:
        def local_shards(self) -> list[object]:
            return []

    assert not is_sharded_tensor(HasShards()) and not is_sharded_tensor(torch.zeros(1))
    assert not is_sharded_tensor(nn.Linear(1, 1))


def test_dtensors_are_made_as_their_chunks_say() -> None:
    full = torch.arange(15).view(5, 3)
    gathered = []
    for rank in range(6):
        with world(6, rank):
            mesh = init_device_mesh("cpu", (2, 3))
            box = chunk_of((5, 3), 3, rank % 3)
            local = full[box.offset[0] :][: box.shape[0]].clone()
            made = make_dtensor(local, mesh, chunk_placements(mesh), (5, 3))
            assert made.shape == full.shape and made.stride() == full.stride()
            gathered.append(held(describe_dtensor("t", made, _ranks())))
    assert torch.equal(assembled(gathered)["t"], full)


def test_optimizers_meet_the_replicas_that_the_module_shows() -> None:
    """What all tensors of the module show of one is looked up by the parameter too."""
    with world(6, 4):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        for name, on, placements in (("wide", mesh, [S0, S1]), ("narrow", mesh["dp"], [S0])):
            tensor = cut_here(torch.zeros(4, 4), on, placements)
            module.register_parameter(name, nn.Parameter(tensor))
        layout = describe_module(module, _ranks())
        narrow = layout.owned_by_param[id(module.narrow)]
    assert narrow is layout.params[1] and narrow.views[0].pieces[0].holders == (3, 4, 5)


def test_layouts_are_the_same_by_shape_mesh_and_placements() -> None:
    with world(6):
        mesh, other = init_device_mesh("cpu", (2, 3)), init_device_mesh("cpu", (3, 2))

        def made(on: DeviceMesh, placements: list[Placement], rows: int = 6) -> torch.Tensor:
            return cut_here(torch.zeros(rows, 6), on, placements)

        one = made(mesh, [S0, S1])
        assert same_layout(one, made(mesh, [S0, S1]))
        assert not same_layout(one, made(mesh, [S1, S0]))
        assert not same_layout(one, made(other, [S0, S1]))
        assert not same_layout(one, made(mesh, [S0, S1], rows=12))
        assert not same_layout(one, torch.zeros(6, 6)) and not same_layout(torch.zeros(6, 6), one)
    assert not same_layout(torch.zeros(2), torch.zeros(2))
