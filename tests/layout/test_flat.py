"""Members of flat parameters, cut anywhere, are put together again; pure arithmetic, no processes.

A flat buffer of element numbers is made as an engine makes it, cut into the shards of some ranks,
and put together again from what the views of each rank say.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ckpt.layout.flat import FlatMember, Inside, flat_views, member_as_param, memory_order
from ckpt.layout.piece import Owned
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.region import Box, Shape, row_major_strides, whole
from tests.layout.rebuilding import assembled, held, taken

SHAPES: list[Shape] = [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3), (1, 4, 1), (2, 2, 2, 3), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_memory_order_is_that_of_the_strides(shape: Shape) -> None:
    """Read in this order, elements come as they lie; what is row-major stays so."""
    numbers = torch.arange(math.prod(shape))
    for dims in itertools.permutations(range(len(shape))):
        laid_out = numbers.view([shape[dim] for dim in dims])
        tensor = laid_out.permute([dims.index(dim) for dim in range(len(shape))])
        assert tuple(tensor.shape) == shape
        order = memory_order("t", shape, tensor.stride())
        assert torch.equal(tensor.permute(order).reshape(-1), numbers)
        ascending = tuple(range(len(shape)))
        assert (order == ascending) == tensor.is_contiguous(), (dims, order)


def test_strides_of_dims_of_one_and_of_nothing_do_not_count() -> None:
    assert memory_order("t", (2, 1, 3), (3, 99, 1)) == (0, 1, 2)
    assert memory_order("t", (3, 1, 2), (1, 99, 3)) == (1, 2, 0)
    assert memory_order("t", (0, 3), (77, 5)) == (0, 1)
    assert memory_order("t", (3, 0), (1, 3)) == (0, 1)


@pytest.mark.parametrize("strides", [(4, 1), (6, 2), (3, 0), (1, 1), (1, 4)], ids=str)
def test_strides_that_leave_gaps_or_overlap_are_refused_by_name(strides: Shape) -> None:
    with pytest.raises(UnsupportedTensor, match=r"layer\.weight: .*contiguous\(\)"):
        memory_order("layer.weight", (2, 3), strides)


# Of each: its shape, its order in memory, and of what it is a part.
MEMBERS: list[tuple[str, Shape, Shape, Inside | None]] = [
    ("a", (3, 2), (0, 1), None),
    ("b", (2, 3, 2), (0, 2, 1), None),  # channels last
    ("c", (5,), (0,), None),
    ("d", (), (), None),
    ("e", (3, 4), (1, 0), None),
    ("f", (2, 3), (0, 1), Inside((4, 3), (1, 0), ())),
    ("g", (2, 3), (1, 0), Inside((2, 5), (0, 2), ())),
    ("h", (0, 3), (0, 1), None),
    ("i", (4,), (0,), None),
]


def _full(name: str) -> torch.Tensor:
    shape, inside = next((s, i) for fqn, s, _, i in MEMBERS if fqn == name)
    shape = shape if inside is None else inside.global_shape
    return torch.arange(math.prod(shape)).view(shape) + 1000 * ord(name)


def _inner(name: str) -> torch.Tensor:
    """What of the whole tensor the member is."""
    shape, inside = next((s, i) for fqn, s, _, i in MEMBERS if fqn == name)
    offset = (0,) * len(shape) if inside is None else inside.offset
    return taken(_full(name), Box(offset, shape)).view(shape)


def _shard(start: int, stop: int) -> tuple[torch.Tensor, list[FlatMember]]:
    """Elements of the flat parameter, and the members that a rank is told to have of it."""
    members, parts = [], []
    position = 0
    for fqn, shape, order, inside in MEMBERS:
        parts.append(_inner(fqn).permute(order).reshape(-1))
        numel = math.prod(shape)
        low, high = max(start, position), min(stop, position + numel)
        here = (low - position, high - low, low - start) if low < high else (0, 0, 0)
        members.append(FlatMember(fqn, shape, order, *here, (0,), inside))
        position += numel
    return torch.cat(parts)[start:stop], members


TOTAL = sum(math.prod(shape) for _, shape, _, _ in MEMBERS)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, TOTAL])
@pytest.mark.parametrize("by_member", [False, True])
def test_members_are_put_together_again_from_shards(size: int, *, by_member: bool) -> None:
    """Of shards of any size: every element once, with its value; names in order on every rank."""
    counted = {name: torch.zeros(_full(name).shape, dtype=torch.int64) for name, *_ in MEMBERS}
    for start in range(0, TOTAL, size):
        local, members = _shard(start, start + size)
        if by_member:
            each = [member_as_param(local, local, m, (0,), whole_here=False) for m in members]
            assert [one.local.numel() for one in each] == [m.numel for m in members]
        else:
            each = [Owned(local, local, flat_views(members, local.dtype, base=0), True)]
        fqns = [fqn for one in each for fqn in one.fqns]
        assert fqns == [fqn for fqn, *_ in MEMBERS]
        assert all(one.synchronized for one in each)
        for piece, elements in (item for one in each for item in held(one)):
            assert piece.global_shape == _full(piece.fqn).shape
            assert torch.equal(elements, taken(_full(piece.fqn), piece.region)), piece
            taken_before = taken(counted[piece.fqn], piece.region)
            assert not taken_before.any()
            _mark(counted[piece.fqn], piece.region)
    for name, shape, _, inside in MEMBERS:
        offset = (0,) * len(shape) if inside is None else inside.offset
        assert taken(counted[name], Box(offset, shape)).all()
        assert int(counted[name].sum()) == math.prod(shape), name


def _mark(counted: torch.Tensor, region: object) -> None:
    numbers = torch.arange(counted.numel()).view(counted.shape)
    counted.view(-1)[taken(numbers, region)] += 1  # type: ignore[arg-type]


def test_neighbours_in_plain_order_share_one_view() -> None:
    """Thousands of members must not be thousands of views; others come between in their order."""
    local, members = _shard(0, TOTAL)
    views = flat_views(members, local.dtype, base=0)
    assert ["".join(piece.fqn for piece in view.pieces) for view in views] == [
        "a", "b", "cd", "e", "f", "g", "hi",
    ]  # fmt: skip
    assert flat_views([], local.dtype, base=0) == ()


@pytest.mark.parametrize("name", ["a", "b", "d", "e", "f", "g"])
def test_members_that_are_not_sharded_have_their_shape(name: str) -> None:
    """So do the states of optimizers, with the strides in which the member lies."""
    local, members = _shard(0, TOTAL)
    member = next(member for member in members if member.fqn == name)
    owned = member_as_param(local, local, member, None, whole_here=True)
    assert torch.equal(owned.local, _inner(name)) and owned.synchronized
    strides = row_major_strides(tuple(member.shape[dim] for dim in member.order))
    assert owned.local.permute(member.order).stride() == strides
    ((piece, elements),) = held(owned)
    assert piece.local_region == whole(member.shape)
    assert torch.equal(elements, taken(_full(name), piece.region))
    if member.inside is None:
        assert torch.equal(assembled([[(piece, elements)]])[name], _full(name))
