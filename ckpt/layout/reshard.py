"""From stored regions to wanted regions: which elements go where. Pure geometry, no bytes.

Two regions of one logical tensor meet in pairs of runs: a run is consecutive in the order of the
chunk, or a box of it. A pair that is consecutive on both sides is a `Run`; any other is a `Patch`.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ckpt.layout.region import Box, Region, Shape, Span, boxes_of, intersect, span_of


class Run(NamedTuple):
    """`numel` elements from `source` on, in the chunk's order, go to `target` on, in the piece's
    order.
    """

    source: int
    target: int
    numel: int


class Patch(NamedTuple):
    """A box of the chunk goes to a box of the piece.

    The chunk's elements from `source_base` on form a row-major array of `source_shape`;
    `source_box` is in its coordinates. The piece's elements from `target_base` on form one of
    `target_shape`; `target_box` has the same shape as `source_box`.
    """

    source_base: int
    source_shape: Shape
    source_box: Box
    target_base: int
    target_shape: Shape
    target_box: Box


Copy: TypeAlias = Run | Patch


def copies(stored: Region, wanted: Region, shape: Shape) -> list[Copy]:
    """What to copy from a chunk that holds `stored` into a piece of `wanted`, of a tensor of
    `shape`.

    Elements are numbered in the row-major order of each region. Equal regions give one run over
    everything; disjoint ones give nothing.
    """
    stored_span = stored if isinstance(stored, Span) else span_of(stored, shape)
    wanted_span = wanted if isinstance(wanted, Span) else span_of(wanted, shape)
    if stored_span is not None and wanted_span is not None:
        start = max(stored_span.start, wanted_span.start)
        stop = min(stored_span.stop, wanted_span.stop)
        if start >= stop:
            return []
        return [Run(start - stored_span.start, start - wanted_span.start, stop - start)]
    # Equal boxes are one run even where the tensor's order has several: both sides have the box's
    # own.
    if stored == wanted:
        return [Run(0, 0, stored.numel)]
    return _box_copies(stored, wanted, shape)


def _box_copies(stored: Region, wanted: Region, shape: Shape) -> list[Copy]:
    copies: list[Copy] = []
    wanted_boxes = _numbered(wanted, shape)
    for source_base, source in _numbered(stored, shape):
        for target_base, target in wanted_boxes:
            common = intersect(source, target)
            if common is None:
                continue
            here, there = common.relative_to(source), common.relative_to(target)
            from_span, to_span = span_of(here, source.shape), span_of(there, target.shape)
            if from_span is not None and to_span is not None:
                start, to = source_base + from_span.start, target_base + to_span.start
                copies.append(Run(start, to, common.numel))
            else:
                copies.append(
                    Patch(source_base, source.shape, here, target_base, target.shape, there)
                )
    return copies


def _numbered(region: Region, shape: Shape) -> list[tuple[int, Box]]:
    boxes = boxes_of(region, shape)
    return list(zip(accumulate((box.numel for box in boxes), initial=0), boxes, strict=False))


def clip_patch(patch: Patch, start: int, stop: int) -> list[Patch]:
    """The part of `patch` whose chunk elements lie in `start` to `stop`; all of it if everything
    does.
    """
    size = math.prod(patch.source_shape)
    low = max(start - patch.source_base, 0)
    high = min(stop - patch.source_base, size)
    if low >= high:
        return []
    if low == 0 and high == size:
        return [patch]
    clipped: list[Patch] = []
    for box in boxes_of(Span(low, high), patch.source_shape):
        common = intersect(box, patch.source_box)
        if common is not None:
            # Where it begins within the patch is the same on both sides.
            moved = common.relative_to(Box(patch.source_box.offset, common.shape))
            offset = tuple(
                a + b for a, b in zip(moved.offset, patch.target_box.offset, strict=True)
            )
            clipped.append(patch._replace(source_box=common, target_box=Box(offset, common.shape)))
    return clipped


def touched(patch: Patch, unit: int) -> list[tuple[int, int]]:
    """The runs of whole units of `unit` elements, counted from the chunk's start, that hold the
    patch.

    Ascending, disjoint and not adjacent; each as (first unit, one past the last unit).
    """
    runs: list[tuple[int, int]] = []
    for start, stop in _rows(patch, unit):
        first, last = start // unit, (stop - 1) // unit + 1
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs


def _rows(patch: Patch, unit: int) -> list[tuple[int, int]]:
    """Chunk elements from the first to the last of each row of the patch, ascending.

    Dims whose steps are smaller than a unit are not separated: every unit in between is touched
    anyway.
    """
    rows = [patch.source_base]
    step = math.prod(patch.source_shape)
    for dim, (offset, extent) in enumerate(
        zip(patch.source_box.offset, patch.source_box.shape, strict=True)
    ):
        step //= patch.source_shape[dim]
        if step * max(extent - 1, 1) < unit:
            # Fewer elements than a unit lie between neighbours here: take first to last as one row.
            return _merged_rows(rows, patch, dim, step)
        rows = [row + (offset + index) * step for row in rows for index in range(extent)]
    return [(row, row + 1) for row in rows]


def _merged_rows(rows: list[int], patch: Patch, dim: int, step: int) -> list[tuple[int, int]]:
    low = high = 0
    for inner in range(dim, len(patch.source_shape)):
        low += patch.source_box.offset[inner] * step
        high += (patch.source_box.offset[inner] + patch.source_box.shape[inner] - 1) * step
        if inner + 1 < len(patch.source_shape):
            step //= patch.source_shape[inner + 1]
    return [(row + low, row + high + 1) for row in rows]
