"""Chunks of many ranks as rules: what a regular layout cuts from a tensor is one line of a table.

A rule stands for `count` chunks of one tensor that are alike, and whose first elements, files,
ranks and boxes are arithmetic progressions. Rules of neighbouring ranks are joined wherever
the progressions match, so that a table does not grow with the ranks; what is irregular has a rule
for each chunk. Which rules describe the chunks matters for space alone: what is made of them is the
same. Whether chunks cover a tensor, every element once, is proved here: exactly, at a
bounded cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ckpt.format.columns import Ints
from ckpt.format.datafile import region_start
from ckpt.format.manifest import BoxTable, ChunkTable, Int64s, int64s, starts_of
from ckpt.layout.region import Box, Region, Shape, boxes_of, intersect, is_inside, span_of, whole

Bools = npt.NDArray[np.bool_]


class Of(IntEnum):
    """The lines of a table of rules; a column is a rule.

    `GAP` are the bytes between a chunk and the one before in its file, as a manifest has them.
    `PLACE` is where it starts behind the header of a file of another attempt, else 0.
    """

    TENSOR = 0
    KIND = 1
    NUMEL = 2
    GAP = 3
    PLACE = 4
    START = 5  # row-major index of the first element
    FILE = 6  # among the ranks' own files, or among those of other attempts
    RANK = 7
    BOX = 8  # -1 for a span
    START_STEP = 9
    FILE_STEP = 10
    RANK_STEP = 11
    BOX_STEP = 12
    COUNT = 13


SHARED, BOXED = 1, 2  # bits of `KIND`: in a file of another attempt; a box
_ALIKE, _FIRSTS, _STEPS = slice(0, 5), slice(5, 9), slice(9, 13)
Rules = Int64s  # [len(Of), rules]


def single_rules(columns: Sequence[Ints]) -> Rules:
    """A rule for each chunk, of the columns `TENSOR` to `BOX`."""
    chunks = len(columns[0])
    table = np.zeros((len(Of), chunks), dtype=np.int64)
    for line, column in enumerate(columns):
        table[line] = column
    table[Of.COUNT] = 1
    return table


def lasts_of(rules: Rules) -> Int64s:
    """What each progression of each rule ends with: lines from `START` to `BOX`."""
    ends: Int64s = rules[_FIRSTS] + rules[_STEPS] * (rules[Of.COUNT] - 1)
    return ends


def expanded(rules: Rules, chosen: Bools) -> Rules:
    """With a rule for each chunk in place of the `chosen` ones."""
    counts = np.where(chosen, rules[Of.COUNT], 1)
    if not len(counts) or int(counts.max()) == 1:
        return rules
    own = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    result = rules[:, own]
    result[_FIRSTS] += result[_STEPS] * index
    alone = chosen[own]
    result[_STEPS, alone] = 0
    result[Of.COUNT, alone] = 1
    return result


def renamed(rules: Rules, line: Of, kind: int, names: Int64s) -> Rules:
    """With other numbers for files or boxes, `names[number]`, in rules of a `kind` (a bit).

    A progression that is none under the new numbers is taken apart.
    """
    if not len(names):
        return rules
    # A progression keeps its step while its numbers are shifted alike; `changes` grows where the
    # shift does not stay the same.
    shifts = names - np.arange(len(names))
    changes = np.append(0, np.cumsum(shifts[1:] != shifts[:-1]))
    chosen = (rules[Of.KIND] & kind) != 0
    ends = np.stack([rules[line], lasts_of(rules)[line - Of.START]])
    low, high = changes[np.where(chosen, ends, 0)]
    rules = expanded(rules, low != high).copy()
    chosen = (rules[Of.KIND] & kind) != 0
    rules[line, chosen] = names[rules[line, chosen]]
    return rules


def joined_rules(tables: Sequence[Rules]) -> Rules:
    """All chunks of some tables, by tensor and first element, in as few rules as can be found.

    Of chunks with the same first element, which overlap, those of the first table come first.
    """
    rules = in_order(np.concatenate(tables, axis=1))
    # A pass can make neighbours that the next one joins.
    while True:
        shorter = _coalesced(rules)
        if shorter.shape[1] == rules.shape[1]:
            return rules
        rules = shorter


def in_order(rules: Rules) -> Rules:
    """The rules by tensor and first element, so that chunks are in the order of a manifest."""
    rules = _sorted(rules)
    ends = lasts_of(rules)[0]
    crossing = (
        (rules[Of.TENSOR, 1:] == rules[Of.TENSOR, :-1])
        & (rules[Of.COUNT, :-1] > 1)
        & (ends[:-1] >= rules[Of.START, 1:])
    )
    if not crossing.any():
        return rules
    # Ranks take turns in a tensor: between two chunks of one rule lie those of another.
    tensors = np.unique(rules[Of.TENSOR, :-1][crossing])
    return _sorted(expanded(rules, np.isin(rules[Of.TENSOR], tensors)))


def _sorted(rules: Rules) -> Rules:
    tensor, start = np.diff(rules[Of.TENSOR]), np.diff(rules[Of.START])
    if np.all((tensor > 0) | ((tensor == 0) & (start >= 0))):
        return rules
    return rules[:, np.lexsort((rules[Of.START], rules[Of.TENSOR]))]


def _coalesced(rules: Rules) -> Rules:
    """Neighbours, joined where one continues the other."""
    if rules.shape[1] < 2:
        return rules
    steps = rules[_FIRSTS, 1:] - lasts_of(rules)[:, :-1]
    has_step = rules[Of.COUNT] > 1
    link = (
        np.all(rules[_ALIKE, 1:] == rules[_ALIKE, :-1], axis=0)
        & (steps[0] > 0)
        & (~has_step[:-1] | np.all(steps == rules[_STEPS, :-1], axis=0))
        & (~has_step[1:] | np.all(steps == rules[_STEPS, 1:], axis=0))
    )
    # A single chunk has no step of its own: it goes with its right neighbour unless the steps on
    # both sides are the same.
    turns = ~has_step[1:-1] & link[1:] & np.any(steps[:, 1:] != steps[:, :-1], axis=0)
    link[:-1] &= ~turns
    begins = np.flatnonzero(np.append(True, ~link))
    result = rules[:, begins]
    result[Of.COUNT] = np.add.reduceat(rules[Of.COUNT], begins)
    grown = np.flatnonzero(np.append(link, False)[begins])
    result[_STEPS, grown] = steps[:, begins[grown]]
    return result


def chunk_total(rules: Rules) -> int:
    """How many chunks the rules stand for."""
    return int(rules[Of.COUNT].sum())


def sums_by_file(rules: Rules, values: Int64s, files: int) -> Int64s:
    """Per file the sum of `values` over its chunks; they are the same for all chunks of a rule."""
    step = rules[Of.FILE_STEP]
    regular = (step == 0) | (step == 1)
    if not regular.all():
        apart = expanded(np.concatenate([rules, values[None]]), ~regular)
        rules, values = apart[:-1], apart[-1]
        step = rules[Of.FILE_STEP]
    # A value that begins at one file and ends behind another is two changes of a running sum.
    first, count = rules[Of.FILE], rules[Of.COUNT]
    values = np.where(step == 0, count, 1) * values
    places = np.concatenate([first, first + np.where(step == 0, 1, count)])
    order = np.argsort(places, kind="stable")
    sums = starts_of(np.concatenate([values, -values])[order])
    return sums[np.searchsorted(places[order], np.arange(files), side="right")]


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
    # Volumes first: they find most mistakes, and all that follows relies on them.
    covered = sum(box.numel for box in boxes)
    numel = math.prod(shape)
    if covered < numel:
        return f"regions have {covered} of {numel} elements"
    if covered > numel:
        return f"regions overlap: {covered} elements for a tensor of {numel}"
    if numel == 0 or _is_grid(boxes, shape):
        return None
    return _cut_problem(boxes, whole(shape))


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
        # Before memory is used for the cells: crafted offsets could make a huge grid.
        if total > len(boxes):
            return False
        cells = cells * len(starts) + column
    return total == len(boxes) and bool(np.all(np.bincount(cells, minlength=total) == 1))


def _cut_problem(boxes: list[Box], room: Box) -> str | None:
    """Cut a room in two along the face of a box, until every part is one box."""
    visits_left = VISITS_PER_BOX_MAX * len(boxes)
    # A list instead of recursion: crafted boxes could go deeper than Python allows.
    todo = [(boxes, room)]
    while todo:
        boxes, room = todo.pop()
        visits_left -= len(boxes)
        if visits_left < 0:
            return "regions are too irregular to be checked: store fewer or simpler regions"
        volume = sum(box.numel for box in boxes)
        if volume != room.numel:
            what = "overlap" if volume > room.numel else "leave a gap"
            return f"regions {what} within {room}"
        if len(boxes) > 1:  # one is inside of the room and as large: it is the room
            for half in _halves(room, *_face(boxes, room)):
                todo.append(([part for box in boxes if (part := intersect(box, half))], half))
    return None


def _face(boxes: Sequence[Box], room: Box) -> tuple[int, int]:
    """The dim and the index to cut at: the face that cuts the fewest boxes; of several, the one
    that divides the boxes most evenly.
    """
    best: tuple[int, int, int, int] | None = None
    for dim in range(len(room.shape)):
        starts = np.array([box.offset[dim] for box in boxes], dtype=np.int64)
        stops = starts + np.array([box.shape[dim] for box in boxes], dtype=np.int64)
        faces = np.unique(np.concatenate((starts, stops)))
        low, high = room.offset[dim], room.offset[dim] + room.shape[dim]
        faces = faces[(faces > low) & (faces < high)]
        if not len(faces):
            continue
        before = np.searchsorted(np.sort(starts), faces, side="left")  # boxes that start before it
        cuts = before - np.searchsorted(np.sort(stops), faces, side="right")  # and do not end there
        balance = np.abs(2 * before - len(starts))
        chosen = int(np.lexsort((balance, cuts))[0])
        candidate = (int(cuts[chosen]), int(balance[chosen]), dim, int(faces[chosen]))
        if best is None or candidate < best:
            best = candidate
    # Without an inner face every box would be the whole room, and two or more of them would have a
    # multiple of its volume; the caller has ruled that out.
    assert best is not None
    return best[2], best[3]


def _halves(room: Box, dim: int, face: int) -> tuple[Box, Box]:
    cut = face - room.offset[dim]
    low_shape = (*room.shape[:dim], cut, *room.shape[dim + 1 :])
    high_offset = (*room.offset[:dim], face, *room.offset[dim + 1 :])
    high_shape = (*room.shape[:dim], room.shape[dim] - cut, *room.shape[dim + 1 :])
    return Box(room.offset, low_shape), Box(high_offset, high_shape)


def check_cover(
    chunks: ChunkTable, fqns: Sequence[str], shapes: Sequence[Shape], numels: Int64s
) -> list[str]:
    """One problem per tensor that its chunks do not cover exactly; empty when all is well.

    Chunks of a tensor are in the table's order. Spans are checked in one pass over all tensors,
    boxes by patterns: tensors of one shape cut in one way are checked once.
    """
    boxed = np.zeros(len(fqns), dtype=bool)
    if len(chunks.boxes):
        filled = np.flatnonzero(np.diff(chunks.first))
        boxed[filled] = np.logical_or.reduceat(chunks.box >= 0, chunks.first[filled])
    bad = _badly_spanned(chunks.first, chunks.span_start, chunks.numel, numels)

    def key_of(part: slice) -> bytes:
        starts = np.where(chunks.box[part] < 0, chunks.span_start[part], -1)
        columns = [chunks.box[part], starts, chunks.numel[part]]
        return b"".join([np.ascontiguousarray(column).tobytes() for column in columns])

    return _problems(
        (fqns, shapes), chunks.first, (bad, boxed), key_of, lambda part: (chunks, part)
    )


def check_rules(
    rules: Rules, boxes: BoxTable, fqns: Sequence[str], shapes: Sequence[Shape], numels: Int64s
) -> list[str]:
    """`check_cover` of chunks that are given as rules, in the order of a table.

    A rule of spans is checked as a whole. Of tensors with boxes, or with a problem, the chunks are
    listed; those of one shape and the same rules once.
    """
    tensor, starts = rules[Of.TENSOR], rules[Of.START]
    first = np.searchsorted(tensor, np.arange(len(fqns) + 1))
    boxed = np.zeros(len(fqns), dtype=bool)
    boxed[tensor[(rules[Of.KIND] & BOXED) != 0]] = True
    bad = _badly_spanned(first, starts, lasts_of(rules)[0] + rules[Of.NUMEL] - starts, numels)
    # Within a rule, spans have to follow each other.
    bad[tensor[(rules[Of.COUNT] > 1) & (rules[Of.START_STEP] != rules[Of.NUMEL])]] = True
    lines = [Of.KIND, Of.NUMEL, Of.START, Of.BOX, Of.START_STEP, Of.BOX_STEP, Of.COUNT]

    def listed(part: slice) -> tuple[ChunkTable, slice]:
        """The chunks of one tensor, without their places in files and blocks."""
        own = rules[:, part]
        chunks = expanded(own, np.ones(own.shape[1], dtype=bool))
        table = ChunkTable(
            first=starts_of([chunks.shape[1]]),
            file=chunks[Of.FILE],
            byte_start=int64s([]),
            span_start=np.where(chunks[Of.BOX] < 0, chunks[Of.START], -1),
            numel=chunks[Of.NUMEL],
            box=chunks[Of.BOX],
            boxes=boxes,
            first_block=int64s([]),
        )
        return table, slice(0, len(table))

    return _problems(
        (fqns, shapes), first, (bad, boxed), lambda part: rules[lines, part].tobytes(), listed
    )


def _problems(
    tensors: tuple[Sequence[str], Sequence[Shape]],
    first: Ints,
    which: tuple[Bools, Bools],
    key_of: Callable[[slice], bytes],
    listed: Callable[[slice], tuple[ChunkTable, slice]],
) -> list[str]:
    """Of tensors by name and shape, whose chunks are `first[t]` to `first[t + 1]` of a table, what
    is wrong with those that are bad as spans, then with those that have boxes: equal keys are the
    same chunks.
    """
    (fqns, shapes), (bad, boxed) = tensors, which
    problems: list[str] = []
    seen: dict[tuple[Shape, bytes], str | None] = {}
    for t in (*np.flatnonzero(bad & ~boxed).tolist(), *np.flatnonzero(boxed).tolist()):
        part, shape = slice(int(first[t]), int(first[t + 1])), shapes[t]
        problem: str | None
        if not boxed[t]:
            problem = _span_problem(*listed(part), shape)
        elif (key := (shape, key_of(part))) in seen:
            problem = seen[key]
        else:
            problem = seen[key] = _boxed_problem(*listed(part), shape)
        if problem:
            problems.append(f"{fqns[t]}: {problem}")
    return problems


def _badly_spanned(first: Ints, starts: Ints, lengths: Ints, numels: Int64s) -> Bools:
    """Per tensor, whether its spans, which are `first[t]` to `first[t + 1]`, are anything but one
    gapless run from 0 to its end.
    """
    is_filled = np.diff(first) > 0
    bad: Bools = ~is_filled & (numels > 0)
    if not len(starts):
        return bad
    heads, tails = first[:-1][is_filled], first[1:][is_filled] - 1
    ends = starts[tails].astype(np.int64) + lengths[tails].astype(np.int64)
    bad[is_filled] |= starts[heads] != 0
    bad[is_filled] |= ends != numels[is_filled]
    step = 1 << 14
    # In pieces: temporaries for millions of chunks would take more than their table.
    for start in range(0, len(starts) - 1, step):
        stop = min(start + step, len(starts) - 1)
        ends = starts[start:stop].astype(np.int64) + lengths[start:stop].astype(np.int64)
        broken = np.flatnonzero(starts[start + 1 : stop + 1] != ends) + start + 1
        tensor = np.searchsorted(first, broken, side="right") - 1
        bad[tensor[first[tensor] != broken]] = True
    return bad


def _span_problem(chunks: ChunkTable, part: slice, shape: Shape) -> str:
    expected = 0
    for index in range(part.start, part.stop):
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
        # One form for one region: readers find a chunk by comparing regions.
        if isinstance(region, Box) and span_of(region, shape) is not None:
            return f"{region} is one run of the tensor and must be a span"
        start = region_start(region, shape)
        if start <= previous:
            return f"{region} is not in row-major order, or starts where another region does"
        previous = start
    return cover_problem(regions, shape)
