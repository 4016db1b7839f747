"""Whether regions cover a tensor exactly: every element once. Pure, exact, of bounded cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt.format.chunk_rules import BOXED, Of, Rules, chunk_table, lasts_of
from ckpt.format.datafile import region_start
from ckpt.format.manifest import BoxTable, ChunkTable, Int64s
from ckpt.layout.region import Box, Region, Shape, boxes_of, intersect, is_inside, span_of, whole

# Grids of any size are checked in one pass. Anything else is cut recursively, which visits a box
# once per level (17 for 100,000 boxes) and more often where cuts go through boxes. Only crafted
# regions reach the limit.
VISITS_PER_BOX_MAX = 64


def cover_problem(regions: Sequence[Region], shape: Shape) -> str | None:
    """Why `regions` are not a partition of a tensor of `shape`; None when they are."""
    for region in regions:
        if not is_inside(region, shape):
            return f"{region} is not inside of shape {shape}"
    boxes = [box for region in regions for box in boxes_of(region, shape)]
    covered = sum(box.numel for box in boxes)
    numel = math.prod(shape)
    if covered < numel:
        return f"regions have {covered} of {numel} elements"
    if covered > numel:
        return f"regions overlap: {covered} elements for a tensor of {numel}"
    if numel == 0 or _is_grid(boxes, shape):
        return None
    return _Cutter(VISITS_PER_BOX_MAX * len(boxes)).problem(boxes, whole(shape))


def _is_grid(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes are all cells of a grid, each once (their volumes are known to add up)."""
    if not shape:
        return len(boxes) == 1
    offsets = np.array([box.offset for box in boxes], dtype=np.int64)
    sizes = np.array([box.shape for box in boxes], dtype=np.int64)
    cells = np.zeros(len(boxes), dtype=np.int64)
    total = 1
    for dim in range(len(shape)):
        starts = np.unique(offsets[:, dim])
        stops = np.append(starts[1:], shape[dim])
        column = np.searchsorted(starts, offsets[:, dim])
        if starts[0] != 0 or not np.array_equal(sizes[:, dim], (stops - starts)[column]):
            return False
        total *= len(starts)
        if total > len(boxes):
            return False
        cells = cells * len(starts) + column
    return total == len(boxes) and bool(np.all(np.bincount(cells, minlength=total) == 1))


class _Cutter:
    """Cuts a room in two along the face of a box, until every part is one box."""

    def __init__(self, visits_max: int) -> None:
        self.visits_left = visits_max

    def problem(self, boxes: list[Box], room: Box) -> str | None:
        todo = [(boxes, room)]
        while todo:
            boxes, room = todo.pop()
            self.visits_left -= len(boxes)
            if self.visits_left < 0:
                return "regions are too irregular to be checked: store fewer or simpler regions"
            volume = sum(box.numel for box in boxes)
            if volume != room.numel:
                what = "overlap" if volume > room.numel else "leave a gap"
                return f"regions {what} within {room}"
            if len(boxes) == 1:
                continue  # inside of the room and as large: it is the room
            dim, face = _face(boxes, room)
            low, high = _halves(room, dim, face)
            todo.append(([part for box in boxes if (part := intersect(box, low))], low))
            todo.append(([part for box in boxes if (part := intersect(box, high))], high))
        return None


def _face(boxes: Sequence[Box], room: Box) -> tuple[int, int]:
    """The dim and the index to cut at: the face that cuts the fewest boxes; of several, the one
    that divides the boxes most evenly.
    """
    best: tuple[float, int, int, int] | None = None
    for dim in range(len(room.shape)):
        starts = np.array([box.offset[dim] for box in boxes], dtype=np.int64)
        stops = starts + np.array([box.shape[dim] for box in boxes], dtype=np.int64)
        faces = np.unique(np.concatenate((starts, stops)))
        low, high = room.offset[dim], room.offset[dim] + room.shape[dim]
        faces = faces[(faces > low) & (faces < high)]
        if not len(faces):
            continue
        best_here = _best_face(faces, np.sort(starts), np.sort(stops))
        candidate = (best_here[0], best_here[1], dim, best_here[2])
        if best is None or candidate < best:
            best = candidate
    # Without an inner face every box would be the whole room, and two or more of them would have a
    # multiple of its volume; the caller has ruled that out.
    assert best is not None
    return best[2], best[3]


def _best_face(
    faces: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    before = np.searchsorted(starts, faces, side="left")  # boxes that start before the face
    ended = np.searchsorted(stops, faces, side="right")  # boxes that end at or before it
    cuts = before - ended
    balance = np.abs(2 * before - len(starts))
    chosen = int(np.lexsort((balance, cuts))[0])
    return int(cuts[chosen]), int(balance[chosen]), int(faces[chosen])


def _halves(room: Box, dim: int, face: int) -> tuple[Box, Box]:
    cut = face - room.offset[dim]
    low_shape = (*room.shape[:dim], cut, *room.shape[dim + 1 :])
    high_offset = (*room.offset[:dim], face, *room.offset[dim + 1 :])
    high_shape = (*room.shape[:dim], room.shape[dim] - cut, *room.shape[dim + 1 :])
    return Box(room.offset, low_shape), Box(high_offset, high_shape)


def check_cover(
    chunks: ChunkTable,
    fqns: Sequence[str],
    shapes: Sequence[Shape],
    numels: Int64s,
) -> list[str]:
    """One problem per tensor that its chunks do not cover exactly; empty when all is well.

    Chunks of a tensor are in the table's order. Spans are checked in one pass over all tensors,
    boxes by
    patterns: tensors of one shape cut in one way are checked once.
    """
    boxed = np.zeros(len(fqns), dtype=bool)
    if len(chunks.boxes):
        filled = np.flatnonzero(np.diff(chunks.first))
        boxed[filled] = np.logical_or.reduceat(chunks.box >= 0, chunks.first[filled])
    bad = _badly_spanned(chunks, numels) & ~boxed
    problems = [
        f"{fqns[t]}: {_span_problem(chunks, t, shapes[t])}" for t in np.flatnonzero(bad).tolist()
    ]
    seen: dict[tuple[Shape, bytes, bytes], str | None] = {}
    for t in np.flatnonzero(boxed).tolist():
        part = slice(int(chunks.first[t]), int(chunks.first[t + 1]))
        key = (
            shapes[t],
            np.ascontiguousarray(chunks.box[part]).tobytes(),
            np.where(chunks.box[part] < 0, chunks.span_start[part], -1).tobytes()
            + np.ascontiguousarray(chunks.numel[part]).tobytes(),
        )
        if key not in seen:
            seen[key] = _boxed_problem(chunks, part, shapes[t])
        if problem := seen[key]:
            problems.append(f"{fqns[t]}: {problem}")
    return problems


def check_rules(
    rules: Rules,
    boxes: BoxTable,
    fqns: Sequence[str],
    shapes: Sequence[Shape],
    numels: Int64s,
) -> list[str]:
    """`check_cover` of chunks that are given as rules, in the order of a table.

    A rule of spans is checked as a whole. Of tensors with boxes, or with a problem, the chunks are
    listed; those of one shape and the same rules once.
    """
    tensor = rules[Of.TENSOR]
    first = np.searchsorted(tensor, np.arange(len(fqns) + 1))
    boxed = np.zeros(len(fqns), dtype=bool)
    boxed[tensor[(rules[Of.KIND] & BOXED) != 0]] = True
    bad = _badly_ruled(rules, first, numels) & ~boxed

    def listed(number: int) -> ChunkTable:
        return chunk_table(rules[:, first[number] : first[number + 1]], boxes)

    problems = [
        f"{fqns[t]}: {_span_problem(listed(t), 0, shapes[t])}" for t in np.flatnonzero(bad).tolist()
    ]
    seen: dict[tuple[Shape, bytes], str | None] = {}
    lines = [Of.KIND, Of.NUMEL, Of.START, Of.BOX, Of.START_STEP, Of.BOX_STEP, Of.COUNT]
    for t in np.flatnonzero(boxed).tolist():
        key = (shapes[t], rules[lines, first[t] : first[t + 1]].tobytes())
        if key not in seen:
            chunks = listed(t)
            seen[key] = _boxed_problem(chunks, slice(0, len(chunks)), shapes[t])
        if problem := seen[key]:
            problems.append(f"{fqns[t]}: {problem}")
    return problems


def _badly_ruled(
    rules: Rules, first: npt.NDArray[np.intp], numels: Int64s
) -> npt.NDArray[np.bool_]:
    """`_badly_spanned` of rules; those of tensor t are `first[t]` to `first[t + 1]`."""
    tensor, starts = rules[Of.TENSOR], rules[Of.START]
    ends = lasts_of(rules)[0] + rules[Of.NUMEL]
    filled = np.flatnonzero(np.diff(first))
    bad: npt.NDArray[np.bool_] = numels > 0
    bad[filled] = (starts[first[filled]] != 0) | (ends[first[filled + 1] - 1] != numels[filled])
    bad[tensor[(rules[Of.COUNT] > 1) & (rules[Of.START_STEP] != rules[Of.NUMEL])]] = True
    bad[tensor[1:][(tensor[1:] == tensor[:-1]) & (starts[1:] != ends[:-1])]] = True
    return bad


def _badly_spanned(chunks: ChunkTable, numels: Int64s) -> npt.NDArray[np.bool_]:
    """Per tensor, whether its chunks as spans are anything but one gapless run from 0 to its
    end.
    """
    first, last = chunks.first[:-1], chunks.first[1:] - 1
    is_empty = first > last
    bad: npt.NDArray[np.bool_] = is_empty & (numels > 0)
    if not len(chunks):
        return bad
    starts = chunks.span_start
    heads = first[~is_empty]
    bad[~is_empty] |= starts[heads] != 0
    step = 1 << 14
    for start in range(0, len(chunks) - 1, step):
        stop = min(start + step, len(chunks) - 1)
        ends = starts[start:stop].astype(np.int64) + chunks.numel[start:stop].astype(np.int64)
        broken = np.flatnonzero(starts[start + 1 : stop + 1] != ends) + start + 1
        tensor = np.searchsorted(chunks.first, broken, side="right") - 1
        bad[tensor[chunks.first[tensor] != broken]] = True
    tail = last[~is_empty]
    bad[~is_empty] |= (
        starts[tail].astype(np.int64) + chunks.numel[tail].astype(np.int64) != numels[~is_empty]
    )
    return bad


def _span_problem(chunks: ChunkTable, tensor: int, shape: Shape) -> str:
    expected = 0
    for index in range(int(chunks.first[tensor]), int(chunks.first[tensor + 1])):
        start = int(chunks.span_start[index])
        stop = start + int(chunks.numel[index])
        if start != expected:
            what = "overlap" if start < expected else "are missing"
            return f"elements {min(expected, start)} to {max(expected, start)} {what}"
        expected = stop
    numel = math.prod(shape)
    what = "are missing" if expected < numel else "do not exist"
    return f"elements {min(expected, numel)} to {max(expected, numel)} {what}"


def _boxed_problem(chunks: ChunkTable, part: slice, shape: Shape) -> str | None:
    indexes = range(part.start, part.stop)
    regions = [chunks.region(index) for index in indexes]
    previous = -1
    for index, region in zip(indexes, regions, strict=True):
        if not is_inside(region, shape):
            return f"{region} is not inside of shape {shape}"
        if int(chunks.numel[index]) != region.numel:
            return f"{region} is said to have {int(chunks.numel[index])} elements"
        if isinstance(region, Box) and span_of(region, shape) is not None:
            return f"{region} is one run of the tensor and must be a span"
        start = region_start(region, shape)
        if start <= previous:
            return f"{region} is not in row-major order, or starts where another region does"
        previous = start
    return cover_problem(regions, shape)
