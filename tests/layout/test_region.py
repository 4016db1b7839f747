"""Region arithmetic against sets of element numbers, for every box and span of small tensors.

numpy numbers the elements of a tensor; a region is right when it selects the right numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from ckpt.layout.region import (
    Box,
    Region,
    Shape,
    Span,
    boxes_of,
    intersect,
    is_inside,
    row_major_strides,
    span_of,
    whole,
)

SHAPES: list[Shape] = [(), (1,), (4,), (3, 2), (2, 1, 3), (2, 3, 2), (2, 2, 2, 2), (0,), (2, 0, 3)]


def numbers(region: Region, shape: Shape) -> list[int]:
    """Row-major numbers of the elements of `region`, in its own order."""
    if isinstance(region, Span):
        return list(range(region.start, region.stop))
    grid = np.arange(math.prod(shape)).reshape(shape)
    index = tuple(slice(a, a + n) for a, n in zip(region.offset, region.shape, strict=True))
    return [int(number) for number in np.atleast_1d(grid[index]).reshape(-1)]


def boxes_in(shape: Shape) -> Iterator[Box]:
    """Every box of a tensor of `shape`, those without elements included."""
    per_dim = [
        [(start, size) for start in range(total + 1) for size in range(total - start + 1)]
        for total in shape
    ]
    for dims in itertools.product(*per_dim):
        yield Box(tuple(start for start, _ in dims), tuple(size for _, size in dims))


def spans_in(shape: Shape) -> Iterator[Span]:
    total = math.prod(shape)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            yield Span(start, stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_span_of_a_box_is_its_run_or_nothing(shape: Shape) -> None:
    """A box is one run exactly when its numbers are consecutive; empty boxes are empty runs."""
    for box in boxes_in(shape):
        span = span_of(box, shape)
        expected = numbers(box, shape)
        if not expected:
            assert span is not None and span.numel == 0
        elif expected == list(range(expected[0], expected[0] + len(expected))):
            assert span == Span(expected[0], expected[-1] + 1), box
        else:
            assert span is None, box
    assert span_of(whole(shape), shape) == Span(0, math.prod(shape))


@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (2, 1, 3), (2, 0, 3)], ids=str)
def test_intersection_has_the_common_elements(shape: Shape) -> None:
    """All pairs of boxes."""
    everything = [(box, set(numbers(box, shape))) for box in boxes_in(shape)]
    for (a, in_a), (b, in_b) in itertools.product(everything, repeat=2):
        common = intersect(a, b)
        if common is None:
            assert not in_a & in_b
        else:
            assert set(numbers(common, shape)) == in_a & in_b and in_a & in_b
            assert is_inside(common.relative_to(a), a.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_a_span_are_its_elements_in_order(shape: Shape) -> None:
    """At most 2n-1 boxes, each of them a run, none empty, concatenated in the span's order."""
    for span in spans_in(shape):
        boxes = boxes_of(span, shape)
        assert [n for box in boxes for n in numbers(box, shape)] == numbers(span, shape), span
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert all(box.numel and span_of(box, shape) is not None for box in boxes)
    for box in boxes_in(shape):
        assert boxes_of(box, shape) == ((box,) if box.numel else ())


def test_inside_means_every_element_exists() -> None:
    """Regions read from files may be anything."""
    assert is_inside(Box((1, 0), (2, 2)), (3, 2))
    assert not is_inside(Box((2, 0), (2, 2)), (3, 2))
    assert not is_inside(Box((-1, 0), (1, 1)), (3, 2))
    assert not is_inside(Box((0, 0), (-1, 1)), (3, 2))
    assert not is_inside(Box((0,), (1,)), (3, 2))
    assert not is_inside(Box((0,), (1, 1)), (3, 2))
    assert not is_inside(Box((0, 0), (1,)), (3, 2))
    assert is_inside(Span(0, 6), (3, 2)) and is_inside(Span(6, 6), (3, 2))
    assert not is_inside(Span(0, 7), (3, 2))
    assert not is_inside(Span(2, 1), (3, 2)) and not is_inside(Span(-1, 1), (3, 2))


@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s], ids=str)
def test_strides_number_the_elements(shape: Shape) -> None:
    """numpy's strides in elements; dims of size one are free in numpy, ours are canonical."""
    strides = row_major_strides(shape)
    for index in itertools.product(*map(range, shape)):
        number = sum(i * stride for i, stride in zip(index, strides, strict=True))
        assert number == (np.ravel_multi_index(index, shape) if shape else 0)


def test_a_box_relative_to_itself_starts_at_zero() -> None:
    """Offsets are counted from the outer box."""
    box = Box((3, 1), (2, 2))
    assert box.relative_to(box) == Box((0, 0), (2, 2))
    assert box.relative_to(Box((1, 1), (9, 9))) == Box((2, 0), (2, 2))
