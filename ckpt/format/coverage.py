"""Whether regions cover a tensor exactly: every element once. Pure, exact, of bounded cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt.layout.region import Box, Region, Shape, boxes_of, intersect, is_inside, whole

# Grids of any size are checked in one pass. Anything else is cut recursively, which visits a
# box once per
# level (17 for 100,000 boxes) and more often where cuts go through boxes. Only crafted regions
# reach this.
VISITS_PER_BOX_MAX = 64


def cover_problem(regions: Sequence[Region], shape: Shape) -> str | None:
    """What is wrong with `regions` as a partition of a tensor of `shape`; None when nothing is."""
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
            dim, at = _face(boxes, room)
            low, high = _halves(room, dim, at)
            todo.append(([part for box in boxes if (part := intersect(box, low))], low))
            todo.append(([part for box in boxes if (part := intersect(box, high))], high))
        return None


def _face(boxes: Sequence[Box], room: Box) -> tuple[int, int]:
    """The dim and place to cut at: where fewest boxes are cut, then nearest to the middle of the
    faces.
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
    # Boxes of the room's volume, more than one, without an inner face: they are all the room
    # itself,
    # and their volumes would be a multiple of it.
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


def _halves(room: Box, dim: int, at: int) -> tuple[Box, Box]:
    cut = at - room.offset[dim]
    low_shape = (*room.shape[:dim], cut, *room.shape[dim + 1 :])
    high_offset = (*room.offset[:dim], at, *room.offset[dim + 1 :])
    high_shape = (*room.shape[:dim], room.shape[dim] - cut, *room.shape[dim + 1 :])
    return Box(room.offset, low_shape), Box(high_offset, high_shape)
