"""The arithmetic of cuts gives what torch's own placements cut, without any process.

A tensor of element numbers is cut by torch placement after placement, as `distribute_tensor` does
it on one rank; the numbers that are left must be those of our boxes, in the same local order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckpt.layout.dtensor import Cut, boxes_kept, cuts_of, outermost_last, runs_kept
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.region import Shape, Span
from tests.layout.rebuilding import taken
from tests.versions import TORCH, needs_uneven_strided_shards

S0, S1, R = Shard(0), Shard(1), Replicate()
STRIDED = _StridedShard(0, split_factor=2)


def _torch_keeps(
    numbers: torch.Tensor, placements: list[Placement], mesh: Shape, coordinate: Shape
) -> torch.Tensor:
    for placement, count, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(numbers, count, with_padding=False, contiguous=False)
            numbers = parts[index]
    return numbers


def _we_keep(
    numbers: torch.Tensor, placements: list[Placement], mesh: Shape, coordinate: Shape
) -> torch.Tensor:
    shape = tuple(numbers.shape)
    local_shape, boxes = boxes_kept(shape, cuts_of(placements, mesh, coordinate))
    local = torch.full(local_shape, -1)
    for region, local_region in boxes:
        taken_here = taken(numbers, region).view(region.shape)
        index = zip(local_region.offset, local_region.shape, strict=True)
        local[tuple(slice(a, a + n) for a, n in index)] = taken_here
    return local


def _is_even(shape: Shape, placements: list[Placement], mesh: Shape) -> bool:
    parts = [1] * len(shape)
    for placement, count in zip(placements, mesh, strict=True):
        if not placement.is_replicate():
            parts[placement.dim] *= count * getattr(placement, "split_factor", 1)
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))


@pytest.mark.parametrize(
    ("placements", "mesh"),
    [
        ([S0], (4,)),
        ([S1], (3,)),
        ([R], (3,)),
        ([S0, S0], (2, 3)),
        ([S0, S1], (2, 2)),
        ([S1, R, S0], (2, 2, 3)),
        ([R, S0], (2, 4)),
        ([STRIDED, S0], (2, 2)),
        ([STRIDED, S0], (4, 2)),
        ([STRIDED, S1], (3, 2)),
        ([R, STRIDED, S0], (2, 3, 2)),
        ([_StridedShard(1, split_factor=3), S1], (2, 3)),
        ([STRIDED], (4,)),
    ],
    ids=str,
)
def test_cuts_are_those_of_torch(placements: list[Placement], mesh: Shape) -> None:
    """All coordinates, all sizes from 0 to 13 by 1 to 7, uneven and empty ones among them."""
    even_only = TORCH < (2, 7) and any(isinstance(p, _StridedShard) for p in placements)
    for rows, columns in itertools.product(range(14), range(1, 8)):
        if even_only and not _is_even((rows, columns), placements, mesh):
            continue
        numbers = torch.arange(rows * columns).view(rows, columns)
        for coordinate in itertools.product(*map(range, mesh)):
            theirs = _torch_keeps(numbers, placements, mesh, coordinate)
            ours = _we_keep(numbers, placements, mesh, coordinate)
            assert ours.numel() == theirs.numel(), (rows, columns, coordinate)
            assert torch.equal(ours.flatten(), theirs.flatten()), (rows, columns, coordinate)


def _chunk(numbers: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """As FSDP2 cuts: of too few rows the last parts have none."""
    chunks = torch.chunk(numbers, parts)
    return chunks[part] if part < len(chunks) else numbers[:0]


@needs_uneven_strided_shards
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (4, 2), (3, 2), (2, 3)])
def test_fsdp2_cuts_what_tensor_parallel_has_left(fsdp: int, tp: int) -> None:
    """The tensor parallel shard is chunked by FSDP2; its placements only say so in even cases."""
    differs = False
    for rows in range(20):
        numbers = torch.arange(rows)
        for coordinate in itertools.product(range(fsdp), range(tp)):
            placements = [_StridedShard(0, split_factor=tp), S0]
            cuts = cuts_of(placements, (fsdp, tp), coordinate)
            _, boxes = boxes_kept((rows,), outermost_last(cuts))
            ours = torch.cat([taken(numbers, region) for region, _ in boxes])
            theirs = _chunk(_chunk(numbers, tp, coordinate[1]), fsdp, coordinate[0])
            assert torch.equal(ours, theirs)
            by_definition = _torch_keeps(numbers, placements, (fsdp, tp), coordinate)
            even = rows % (fsdp * tp) == 0
            assert not even or torch.equal(ours, by_definition)
            differs |= not torch.equal(ours, by_definition)
    assert differs or fsdp == 2, "the two orders should differ for some uneven size"


def test_runs_are_joined_and_in_local_order() -> None:
    """A strided shard of neighbours is one run; of others several, in the order of local memory."""
    assert runs_kept(8, []) == [Span(0, 8)]
    assert runs_kept(8, [Cut(0, 2, 0, 2)]) == [Span(0, 2), Span(4, 6)]
    assert runs_kept(8, [Cut(0, 1, 0, 4)]) == [Span(0, 8)]
    assert runs_kept(3, [Cut(0, 4, 3)]) == []
    assert boxes_kept((), [])[0] == ()


def test_nothing_left_is_one_empty_box() -> None:
    """The tensor must stay known on a rank that holds none of its elements."""
    local_shape, boxes = boxes_kept((3, 5), [Cut(0, 4, 3)])
    assert local_shape == (0, 5)
    ((region, local_region),) = boxes
    assert region.numel == local_region.numel == 0


def test_pending_sums_are_refused() -> None:
    """A partial placement has no value yet."""
    with pytest.raises(UnsupportedTensor, match=r"still pending.*redistribute"):
        cuts_of([Partial()], (2,), (0,))
