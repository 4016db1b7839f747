"""Flat layouts: every element has one place and one holder.

Method: all small combinations of sizes, alignments and shard counts, checked against the plain
definition (lay out, split like `torch.chunk`, look at every element); the examples of the
specification by hand.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ckpt.layout.region import row_major_strides
from sharding.flat.layout import (
    FlatLayout,
    Member,
    alignment,
    memory_strides,
    plan_flat_layout,
)


def padding(layout: FlatLayout, rank: int) -> int:
    start, stop = layout.shard_range(rank)
    return layout.shard_numel_of(rank) - (stop - start)


def layout_of(sizes: tuple[int, ...], shard_count: int, align_to: int) -> FlatLayout:
    specs = [Member(f"p{i}", (size,), (1,)) for i, size in enumerate(sizes)]
    return plan_flat_layout(specs, shard_count=shard_count, align_to=align_to)


@pytest.mark.parametrize("align_to", [1, 2, 4, 8])
@pytest.mark.parametrize("shard_count", [1, 2, 3, 4, 5])
def test_every_element_has_one_place_and_one_holder(shard_count: int, align_to: int) -> None:
    for count in (1, 2, 3):
        for sizes in itertools.product((0, 1, 3, 4, 5, 8), repeat=count):
            check(layout_of(sizes, shard_count, align_to), sizes, align_to)


def check(layout: FlatLayout, sizes: tuple[int, ...], align_to: int) -> None:
    owner = ["filler"] * layout.padded_numel
    for member, size in zip(layout.members, sizes, strict=True):
        assert member.start % align_to == 0 and member.numel == size
        for index in range(member.start, member.stop):
            assert owner[index] == "filler"
            owner[index] = member.fqn
    gaps = [index for start, stop in layout.gaps for index in range(start, stop)]
    assert gaps == [index for index, name in enumerate(owner) if name == "filler"]
    if align_to > 1:
        assert layout.padded_numel == layout.numel
    chunks = torch.arange(layout.numel).chunk(layout.shard_count) if layout.numel else ()
    seen = []
    for rank in range(layout.shard_count):
        start, stop = layout.shard_range(rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected
        assert padding(layout, rank) == layout.shard_numel - len(expected)
        for member, part in zip(layout.members, layout.local_parts(rank), strict=True):
            inside = range(max(start, member.start), min(stop, member.stop))
            if part is None:
                assert len(inside) == 0
                continue
            assert part.numel == len(inside) > 0
            assert start + part.in_shard == member.start + part.in_member == inside[0]
            seen += list(inside)
    assert sorted(seen) == [index for index, name in enumerate(owner) if name != "filler"]


def test_example_35_7_21_3_on_two_ranks() -> None:
    layout = layout_of((35, 7, 21, 3), 2, alignment(4))
    assert [member.start for member in layout.members] == [0, 36, 44, 68]
    assert (layout.numel, layout.shard_numel) == (72, 36)


def test_low_precision_aligns_to_eight_elements() -> None:
    layout = layout_of((3, 3), 2, alignment(2))
    assert [member.start for member in layout.members] == [0, 8]


def test_five_elements_on_four_ranks() -> None:
    layout = layout_of((5,), 4, 1)
    assert [layout.shard_range(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [padding(layout, rank) for rank in range(4)] == [0, 0, 1, 2]


def test_strides_of_dense_tensors_are_kept_and_others_replaced() -> None:
    conv = torch.empty(4, 3, 5, 2).to(memory_format=torch.channels_last)
    assert memory_strides(tuple(conv.shape), conv.stride()) == conv.stride()
    narrow = torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last)
    assert memory_strides(tuple(narrow.shape), narrow.stride()) == narrow.stride()
    turned = torch.empty(3, 4).t()
    assert memory_strides((4, 3), turned.stride()) == (1, 4)
    for holey in (torch.empty(4, 6)[:, ::2], torch.empty(3, 1).expand(3, 4), torch.empty(5, 9)[1:]):
        shape = tuple(holey.shape)
        dense = memory_strides(shape, holey.stride())
        assert dense == (holey.stride() if holey.is_contiguous() else row_major_strides(shape))
    assert memory_strides((0, 3), (3, 1)) == row_major_strides((0, 3))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 3, 4), (1, 3, 1)])
def test_row_major_is_what_torch_makes(shape: tuple[int, ...]) -> None:
    assert row_major_strides(shape) == torch.empty(shape).stride()
