"""Whether regions cover a tensor: exact against a brute-force count, and never quadratic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ckpt.format import chunk_rules
from ckpt.format.chunk_rules import check_cover, cover_problem
from ckpt.format.manifest import BoxTable, ChunkTable
from ckpt.layout.region import Box, Region, Shape, Span, boxes_of


def covers(regions: list[Region], shape: Shape) -> bool:
    """By counting every element."""
    counts = np.zeros(shape, dtype=int)
    for region in regions:
        for box in boxes_of(region, shape):
            where = zip(box.offset, box.shape, strict=True)
            counts[tuple(slice(start, start + size) for start, size in where)] += 1
    return bool(np.all(counts == 1))


def random_partition(rng: random.Random, box: Box, depth: int) -> list[Box]:
    cuttable = [dim for dim, size in enumerate(box.shape) if size > 1]
    if depth == 0 or not cuttable or rng.random() < 0.15:
        return [box]
    dim = rng.choice(cuttable)
    low, high = chunk_rules._halves(box, dim, box.offset[dim] + rng.randrange(1, box.shape[dim]))
    return random_partition(rng, low, depth - 1) + random_partition(rng, high, depth - 1)


@pytest.mark.parametrize("seed", range(60))
def test_partitions_are_accepted_and_damaged_ones_refused(seed: int) -> None:
    """Random cuts of random shapes; then one box moved, grown, doubled or dropped: as a count
    says.
    """
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
    boxes = random_partition(rng, Box((0,) * len(shape), shape), 5)
    rng.shuffle(boxes)
    regions: list[Region] = list(boxes)
    assert cover_problem(regions, shape) is None and covers(regions, shape)
    for _ in range(10):
        damaged = list(boxes)
        index = rng.randrange(len(damaged))
        box = damaged[index]
        dim = rng.randrange(len(shape))
        offset = list(box.offset)
        offset[dim] = rng.randrange(0, shape[dim] - box.shape[dim] + 1)
        damaged[index] = Box(tuple(offset), box.shape)
        if rng.random() < 0.3:
            other = rng.randrange(len(damaged))
            damaged[other] = damaged[index]
        assert (cover_problem(list(damaged), shape) is None) == covers(list(damaged), shape)


def test_overlap_with_a_gap_of_the_same_size_is_found() -> None:
    """Volumes add up, and yet one cell is there twice and another is not."""
    boxes: list[Region] = [Box((0, 0), (1, 2)), Box((0, 1), (1, 1)), Box((1, 0), (1, 1))]
    assert cover_problem(boxes, (2, 2)) is not None


def test_a_grid_with_one_cell_twice_is_found() -> None:
    cells: list[Region] = [Box(offset, (1, 1)) for offset in ((0, 0), (0, 0), (0, 1), (1, 1))]
    assert cover_problem(cells, (2, 2)) is not None


def test_a_grid_is_checked_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No budget for cutting: only the check of grids can accept it."""
    monkeypatch.setattr(chunk_rules, "VISITS_PER_BOX_MAX", 0)
    cells: list[Region] = [
        Box((2 * x, 3 * y, z), (2, 3, 2 - z // 2))
        for z in (0, 2)
        for x in range(2)
        for y in range(3)
    ]
    assert cover_problem(cells, (4, 9, 3)) is None
    assert cover_problem([*cells[1:], cells[0]], (4, 9, 3)) is None


@pytest.mark.parametrize("mirrored", [False, True])
def test_what_is_wrong_is_said_with_where_it_is(mirrored: bool) -> None:
    """Columns 0 to 2 twice in one row, and a gap of the same size in the other."""
    low, high = (1, 0) if mirrored else (0, 1)
    boxes: list[Region] = [Box((low, 0), (1, 4)), Box((low, 1), (1, 2)), Box((high, 0), (1, 2))]
    row = (1, 0)
    what = "overlap" if low == 1 else "leave a gap"
    assert cover_problem(boxes, (2, 4)) == f"regions {what} within {Box(row, (1, 4))}"


def test_regions_outside_of_the_tensor_are_named() -> None:
    outside = Box((1, 0), (2, 2))
    assert cover_problem([outside], (2, 2)) == f"{outside} is not inside of shape (2, 2)"
    assert cover_problem([Span(0, 2)], (3,)) == "regions have 2 of 3 elements"
    twice = "regions overlap: 4 elements for a tensor of 3"
    assert cover_problem([Span(0, 2), Span(1, 3)], (3,)) == twice


def test_pinwheel_which_no_straight_cut_separates_is_accepted() -> None:
    wheel: list[Region] = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert cover_problem(wheel, (3, 3)) is None


def test_spans_and_boxes_mix() -> None:
    regions: list[Region] = [Span(0, 5), Box((1, 1), (3, 3)), Box((2, 0), (2, 1))]
    assert cover_problem(regions, (4, 4)) is None
    assert cover_problem([*regions, Span(5, 6)], (4, 4)) is not None


def test_many_regions_are_checked_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 irregular strips: comparing all pairs would be 5,000 visits per box."""
    monkeypatch.setattr(chunk_rules, "VISITS_PER_BOX_MAX", 16)
    rng = random.Random(1)
    strips: list[Region] = []
    for row in range(5_000):
        cut = rng.randrange(1, 1000)
        strips += [Box((row, 0), (1, cut)), Box((row, cut), (1, 1000 - cut))]
    assert cover_problem(strips, (5_000, 1000)) is None


def test_a_cost_beyond_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_rules, "VISITS_PER_BOX_MAX", 1)
    strips: list[Region] = [Box((0, 0), (1, 2)), Box((0, 2), (1, 1)), Box((1, 0), (1, 1))]
    strips.append(Box((1, 1), (1, 2)))
    assert "irregular" in str(cover_problem(strips, (2, 3)))


def test_no_elements_and_no_dims() -> None:
    assert cover_problem([], (0, 3)) is None
    assert cover_problem([Box((), ())], ()) is None
    assert cover_problem([], ()) is not None


Spans = Sequence[tuple[int, int]]


def _table(tensors: Sequence[Spans]) -> ChunkTable:
    """The chunks of tensors that are stored as these spans."""
    spans = [span for tensor in tensors for span in tensor]
    numbers = np.arange(len(spans) + 1)
    return ChunkTable(
        first=np.cumsum([0, *(len(tensor) for tensor in tensors)]),
        file=numbers[:-1] * 0,
        byte_start=numbers[:-1],
        span_start=np.array([start for start, _ in spans], dtype=np.int64),
        numel=np.array([stop - start for start, stop in spans], dtype=np.int64),
        box=numbers[:-1] * 0 - 1,
        boxes=BoxTable.of([]),
        first_block=numbers,
    )


@pytest.mark.parametrize("numel", range(4))
def test_every_set_of_spans_between_whole_tensors(numel: int) -> None:
    """All ways to store a tensor in up to three spans; its neighbours are whole."""
    possible = [(start, stop) for start in range(5) for stop in range(start + 1, 5)]
    neighbour: Spans = [(0, 1), (1, 3)]
    for count in range(4):
        for spans in itertools.combinations(possible, count):
            tensors = [neighbour, spans, neighbour]
            problems = check_cover(
                _table(tensors), ["a", "b", "c"], [(3,), (numel,), (3,)], np.array([3, numel, 3])
            )
            elements = [index for start, stop in spans for index in range(start, stop)]
            expected = [] if elements == list(range(numel)) else ["b"]
            assert [problem.partition(":")[0] for problem in problems] == expected, spans
