"""Regions: parts of a logical tensor in its own index space, and exact arithmetic on them.

A `Box` is a rectangle, a `Span` a run of the row-major order. Every function is pure; integers
only. Also which part each of N ranks holds when only a tensor's shape is known.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """The elements `offset[d] <= i[d] < offset[d] + shape[d]`."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def relative_to(self, outer: Box) -> Box:
        """This box in `outer`'s coordinates. A box relative to itself starts at zero."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)


class Span(NamedTuple):
    """Elements `start` to `stop` of the row-major order; `stop` is one past the last."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Region: TypeAlias = Box | Span


def whole(shape: Shape) -> Box:
    """The region that covers a tensor of `shape`, in its own coordinates."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, in their common coordinates; None when they share no element.

    A box without elements shares nothing. A box and itself share that box.
    """
    offset = []
    shape = []
    for a_start, a_size, b_start, b_size in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        start = a_start if a_start > b_start else b_start
        stop = min(a_start + a_size, b_start + b_size)
        if stop <= start:
            return None
        offset.append(start)
        shape.append(stop - start)
    return Box(tuple(offset), tuple(shape))


def span_of(box: Box, shape: Shape) -> Span | None:
    """`box` as a run of the row-major order of a tensor of `shape`; None when it is not one run.

    The whole tensor is the span from 0 to its number of elements.
    """
    if box.shape == shape:
        return Span(0, math.prod(shape))
    contiguous = True  # the dims right of here are covered entirely
    stride = 1
    start = 0
    # From the fastest dim on: once a dim is not whole, all slower ones must have the size 1.
    for dim in range(len(shape) - 1, -1, -1):
        size = box.shape[dim]
        if not contiguous and size != 1:
            # Without elements it is a run of none, wherever it lies.
            return None if box.numel else Span(0, 0)
        if size != shape[dim]:
            contiguous = False
        start += box.offset[dim] * stride
        stride *= shape[dim]
    return Span(start, start + box.numel)


def boxes_of(region: Region, shape: Shape) -> tuple[Box, ...]:
    """`region` of a tensor of `shape` as disjoint boxes in row-major order, none empty.

    At most 2n-1 boxes for n dims (a partial row, whole rows, a partial row, level by level). Each
    of them is one run of the region's own order. A box is itself.
    """
    if isinstance(region, Box):
        return (region,) if region.numel else ()
    if region.start >= region.stop:
        return ()
    return tuple(Box(offset, size) for offset, size in _split(region.start, region.stop, shape))


def _split(start: int, stop: int, shape: Shape) -> list[tuple[Shape, Shape]]:
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    if first == last and not (head == 0 and tail == row):
        return _prefixed(first, _split(head, tail, shape[1:]))
    parts = []
    # A part of a row at either end is split further; the whole rows between them are one box.
    if head:
        parts += _prefixed(first, _split(head, row, shape[1:]))
        first += 1
    rest = _prefixed(last, _split(0, tail, shape[1:])) if tail != row else []
    middle_stop = last if rest else last + 1
    if middle_stop > first:
        inner = len(shape) - 1
        parts.append(((first,) + (0,) * inner, (middle_stop - first, *shape[1:])))
    return parts + rest


def _prefixed(index: int, parts: list[tuple[Shape, Shape]]) -> list[tuple[Shape, Shape]]:
    return [((index, *offset), (1, *size)) for offset, size in parts]


def is_inside(region: Region, shape: Shape) -> bool:
    """Whether `region` lies within a tensor of `shape`; negative sizes are never inside."""
    if isinstance(region, Span):
        return 0 <= region.start <= region.stop <= math.prod(shape)
    if len(region.offset) != len(shape) or len(region.shape) != len(shape):
        return False
    return all(
        start >= 0 and size >= 0 and start + size <= total
        for start, size, total in zip(region.offset, region.shape, shape, strict=True)
    )


def row_major_strides(shape: Shape) -> Shape:
    """Elements to step over per dim, in a tensor of `shape` without gaps; as torch has them."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


# --- even layouts: questions about ranks that are not there ---------------------------------------

EvenLayout = Literal["fsdp2", "flat", "replicated"]


def even_part(shape: Shape, rank: int, ranks: int, layout: EvenLayout) -> Region | None:
    """What `rank` of `ranks` holds of a tensor of `shape`; None when every rank holds all of it.

    "fsdp2" cuts dim 0 as `fully_shard` does: equal runs of rows, the last ones shorter or empty.
    "flat" cuts the row-major order into equal runs, as flat parameters do on the average; where
    theirs begin depends on how the model was wrapped. Tensors without dims are whole everywhere, as
    everything is with "replicated".
    """
    if layout == "replicated" or not shape:
        return None
    if layout == "flat":
        return chunk_run(math.prod(shape), ranks, rank)
    return chunk_of(shape, ranks, rank)


def chunk_of(shape: Shape, parts: int, part: int) -> Box:
    """What `torch.chunk(parts)` along dim 0 leaves for `part`; without rows when there is no such
    chunk.
    """
    start, stop = chunk_run(shape[0], parts, part)
    return Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))


def chunk_run(count: int, parts: int, part: int) -> Span:
    """Items of `count` in one of `parts`, as `torch.chunk` cuts them."""
    size = -(-count // parts)
    return Span(min(part * size, count), min((part + 1) * size, count))


def wanted_part(shape: Shape, rank: int, ranks: int, layout: EvenLayout) -> Region:
    """As `even_part`, with the whole tensor said as a region."""
    part = even_part(shape, rank, ranks, layout)
    return whole(shape) if part is None else part
