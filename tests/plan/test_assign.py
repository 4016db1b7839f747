"""Who writes what, checked as pure arithmetic: random and exhaustive small cases, no processes."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from ckpt.layout.assign import (
    COMPARED_NBYTES_MAX,
    MIB,
    Assignment,
    Item,
    assign,
    part_of,
    share_evenly,
)
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Span, boxes_of, whole


def _random_items(random_: random.Random) -> list[Item]:
    sizes = (5_000, 9 * MIB, 100 * MIB)
    return [
        Item(random_.randint(0, random_.choice(sizes)), MIB) for _ in range(random_.randint(1, 60))
    ]


def test_every_byte_goes_to_exactly_one_bin_and_cuts_are_at_units() -> None:
    random_ = random.Random(1)
    for _ in range(300):
        items = _random_items(random_)
        taken = defaultdict(list)
        for bin_ in share_evenly(items, random_.randint(1, 9)):
            for index, start, stop in bin_:
                taken[index].append((start, stop))
        for index, item in enumerate(items):
            position = 0
            for start, stop in sorted(taken[index]):
                assert start == position
                assert stop == item.nbytes or stop % MIB == 0
                position = stop
            assert position == item.nbytes


def test_the_fullest_bin_is_within_five_percent_from_64_mib_a_bin() -> None:
    random_ = random.Random(2)
    measured = 0
    for _ in range(500):
        items = _random_items(random_)
        count = random_.randint(2, 9)
        mean = sum(item.nbytes for item in items) / count
        if mean < 64 * MIB:
            continue
        measured += 1
        fullest = max(
            sum(stop - start for _, start, stop in bin_) for bin_ in share_evenly(items, count)
        )
        assert fullest <= 1.05 * mean
    assert measured > 50


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_four_equal_tensors_are_cut_when_the_bins_do_not_divide_them(count: int) -> None:
    bins = share_evenly([Item(64 * MIB, MIB)] * 4, count)
    loads = [sum(stop - start for _, start, stop in bin_) for bin_ in bins]
    assert max(loads) - min(loads) <= 2 * MIB


def test_what_belongs_into_the_first_bin_leaves_less_room_there() -> None:
    for first_nbytes in (0, 10 * MIB, 200 * MIB):
        bins = share_evenly([Item(first_nbytes, 0, True), *[Item(64 * MIB, MIB)] * 3], 3)
        loads = [sum(stop - start for _, start, stop in bin_) for bin_ in bins]
        assert bins[0][0] == (0, 0, first_nbytes)
        assert sum(loads) == first_nbytes + 3 * 64 * MIB
        assert max(loads) <= max(first_nbytes, sum(loads) / 3 + 2 * MIB)


def test_what_cannot_be_cut_stays_whole() -> None:
    bins = share_evenly([Item(100 * MIB, 0), Item(40 * MIB, MIB), Item(10, 0)], 3)
    assert [(0, 0, 100 * MIB)] in bins


def _pieces(rank: int, fqn: str, shape: tuple[int, ...], region: Region, holders: range) -> Holding:
    size = region.numel
    local = (
        torch.empty(0).new_zeros(size) if isinstance(region, Span) else torch.zeros(region.shape)
    )
    piece = Piece(fqn, shape, torch.float32, region, whole(tuple(local.shape)), tuple(holders))
    assert rank in holders
    return Holding(local, (piece,), Kind.PARAMETER, True)


def _elements_written(assignments: list[Assignment]) -> dict[str, list[Box]]:
    boxes = defaultdict(list)
    for assignment in assignments:
        for share in assignment.shares:
            boxes[share.piece.fqn] += boxes_of(share.region, share.piece.global_shape)
    return boxes


def test_hybrid_shards_are_shared_between_replicas_without_talking() -> None:
    """Two shards, each on two ranks, one of them strided: every element is written once."""
    shape = (1024, 4096)
    regions = [Box((0, 0), (1024, 2048)), Box((0, 2048), (1024, 2048))]
    assignments = []
    for rank in range(4):
        shard = rank % 2
        holders = range(shard, 4, 2)
        held = [
            _pieces(rank, "columns", shape, regions[shard], holders),
            _pieces(rank, "flat", (1 << 22,), Span(shard << 21, (shard + 1) << 21), holders),
        ]
        assignments.append(assign(held, rank))
    for fqn, total in (("columns", 1024 * 4096), ("flat", 1 << 22)):
        boxes = _elements_written(assignments)[fqn]
        assert sum(box.numel for box in boxes) == total
        assert len(set(boxes)) == len(boxes)
    loads = [sum(s.stop - s.start for s in a.shares) for a in assignments]
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_unsynchronized_replicas_are_written_by_one_and_compared_by_all() -> None:
    local = torch.zeros(5)
    piece = Piece("bn.mean", (5,), torch.float32, Box((0,), (5,)), Box((0,), (5,)), (0, 1, 2))
    holding = Holding(local, (piece,), Kind.BUFFER, False)
    assignments = [assign([holding], rank) for rank in range(3)]
    assert [len(a.compared) for a in assignments] == [1, 1, 1]
    assert sum(len(a.shares) for a in assignments) == 1


def _buffer(fqn: str, numel: int, *, synchronized: bool = False) -> Holding:
    box = Box((0,), (numel,))
    piece = Piece(fqn, (numel,), torch.float32, box, box, (1, 2, 5))
    return Holding(torch.zeros(numel), (piece,), Kind.BUFFER, synchronized)


def _names_by_rank(holdings: list[Holding]) -> dict[int, set[str]]:
    return {rank: {s.piece.fqn for s in assign(holdings, rank).shares} for rank in (1, 2, 5)}


def test_buffers_that_may_differ_come_from_the_lowest_holder_and_count_as_its_share() -> None:
    statistics = [
        _buffer(f"norm.{index}.{name}", MIB // 16)
        for index in range(3)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    equal = [_buffer(f"equal.{index}", MIB // 16, synchronized=True) for index in range(16)]
    by_rank = _names_by_rank([*statistics, *equal])
    assert by_rank[1] == {holding.pieces[0].fqn for holding in statistics}
    assert len(by_rank[2]) == len(by_rank[5]) == 8


def test_small_tensors_that_all_ranks_have_share_few_files() -> None:
    """Each rank of a load needs all of them: spread over 723 ranks they are as many requests."""
    counters = [Item(4, 0)] * 723
    bins = share_evenly([Item(64 * MIB, MIB), *counters], 1024)
    assert sum(any(stop == 4 for _, _, stop in parts) for parts in bins) == 1
    norms = share_evenly([Item(16 << 10, 0)] * 256, 8)  # 4 MiB
    assert [sum(stop for _, _, stop in parts) for parts in norms if parts] == [MIB] * 4


def test_only_buffers_that_may_differ_stay_together() -> None:
    """Optimizer state of one module that no engine keeps equal is divided, each tensor whole."""
    moments = [_buffer(f"layer.{n}", MIB // 4)._replace(kind=Kind.OPTIMIZER) for n in range(3)]
    assert sorted(map(len, _names_by_rank(moments).values())) == [1, 1, 1]


def test_buffers_of_several_modules_are_not_counted_together() -> None:
    """Each module's are small enough to stay together, all of them are not."""
    small = [_buffer(f"norm.{n}.{name}", MIB // 10) for n in range(6) for name in ("mean", "var")]
    names = {holding.pieces[0].fqn for holding in small}
    assert _names_by_rank(small) == {1: names, 2: set(), 5: set()}


def test_large_buffers_of_one_module_are_divided() -> None:
    large = [_buffer(f"cache.{index}", MIB // 4) for index in range(3)]
    assert sorted(map(len, _names_by_rank(large).values())) == [1, 1, 1]


def test_small_pieces_on_which_ranks_must_agree_are_compared_even_where_one_rank_stores_them() -> (
    None
):
    def held(numel: int, *, holders: tuple[int, ...], must_agree: bool) -> Holding:
        box = Box((0,), (numel,))
        piece = Piece("moment", (numel,), torch.float32, box, box, holders)
        kind = Kind.OPTIMIZER
        return Holding(torch.zeros(numel), (piece,), kind, True, None, must_agree)

    most = COMPARED_NBYTES_MAX // 4
    for holders in ((0,), (0, 1)):
        for numel, must_agree in ((most, True), (most + 1, True), (most, False), (0, True)):
            holding = held(numel, holders=holders, must_agree=must_agree)
            compared = [(holding, holding.pieces[0])] if (numel, must_agree) == (most, True) else []
            assert assign([holding], 0).compared == compared


def test_pieces_without_elements_are_written_by_nobody() -> None:
    piece = Piece("empty", (0, 4), torch.float32, Box((0, 0), (0, 4)), Box((0, 0), (0, 4)), (0, 1))
    holding = Holding(torch.zeros(0, 4), (piece,), Kind.PARAMETER, True)
    assert assign([holding], 0) == Assignment([], [])


@pytest.mark.parametrize(
    ("region", "start", "stop", "part"),
    [
        (
            Box((2, 1), (4, 3)),
            3,
            9,
            Box((3, 1), (2, 3)),
        ),  # columns of (8, 5): at rows
        (Box((2, 1), (4, 3)), 0, 3, Box((2, 1), (1, 3))),
        (Box((2, 1), (4, 3)), 9, 12, Box((5, 1), (1, 3))),
        (Box((2, 1), (4, 3)), 0, 12, Box((2, 1), (4, 3))),
        (Box((2, 0), (4, 5)), 1, 7, Span(11, 17)),  # rows of (8, 5): one run, cut anywhere
        (Box((2, 0), (4, 5)), 0, 20, Box((2, 0), (4, 5))),
        (Span(7, 30), 2, 23, Span(9, 30)),
        (Span(7, 30), 0, 5, Span(7, 12)),
        (Span(7, 30), 0, 23, Span(7, 30)),
    ],
)
def test_a_part_of_a_piece_is_where_its_elements_are(
    region: Region, start: int, stop: int, part: Region
) -> None:
    local = whole((region.numel,))
    piece = Piece("t", (8, 5), torch.float32, region, local, (0, 1))
    assert part_of(piece, start, stop) == part


@pytest.mark.parametrize(
    ("shape", "box", "parts"),
    [
        # Rows of 4 KiB, as many of them as fill whole MiB: 3, 2 and 3 of the 8 MiB.
        ((2048, 3, 1024), Box((0, 1, 0), (2048, 1, 1024)), [768, 512, 768]),
        # Rows of 768 KiB, one by one.
        ((6, 2, 192 << 10), Box((0, 1, 0), (6, 1, 192 << 10)), [3, 3]),
    ],
)
def test_boxes_are_shared_at_their_rows(shape: tuple[int, ...], box: Box, parts: list[int]) -> None:
    """A column in the middle is no single run, and only whole rows of it are boxes."""
    count = len(parts)
    assignments = [
        assign([_pieces(rank, "t", shape, box, range(count))], rank) for rank in range(count)
    ]
    shares = [share for one in assignments for share in one.shares]
    row = box.shape[2]
    start = 0
    for share, rows in zip(shares, parts, strict=True):
        assert share.region == Box((start, 1, 0), (rows, 1, row))
        assert (share.start, share.stop) == (start * row, (start + rows) * row)
        start += rows


def test_boxes_that_are_one_run_are_shared_anywhere() -> None:
    shape = (1, 2 << 20)
    assignments = [
        assign([_pieces(rank, "t", shape, whole(shape), range(2))], rank) for rank in range(2)
    ]
    regions = [share.region for one in assignments for share in one.shares]
    assert regions == [Span(0, 1 << 20), Span(1 << 20, 2 << 20)]
