"""Chunks of many ranks as rules: what a regular layout cuts from a tensor is one line of a table.

A rule stands for `count` chunks of one tensor that are alike, and whose first elements, files,
ranks and boxes are arithmetic progressions. Rules of neighbouring ranks are joined wherever the
progressions go on, so that a table does not grow with the ranks; what is irregular has a rule for
each chunk. Which rules describe the chunks is no one's concern but for space: whatever is made of
them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ckpt.format.manifest import BoxTable, ChunkTable, Int64s, int64s, starts_of

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


def single_rules(columns: Sequence[npt.NDArray[np.integer]]) -> Rules:
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
    """Neighbours joined where one goes on like the other."""
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


def chunk_table(rules: Rules, boxes: BoxTable) -> ChunkTable:
    """The chunks of one tensor, listed, without their places in files and blocks."""
    chunks = expanded(rules, np.ones(rules.shape[1], dtype=bool))
    return ChunkTable(
        first=starts_of([chunks.shape[1]]),
        file=chunks[Of.FILE],
        byte_start=int64s([]),
        span_start=np.where(chunks[Of.BOX] < 0, chunks[Of.START], -1),
        numel=chunks[Of.NUMEL],
        box=chunks[Of.BOX],
        boxes=boxes,
        first_block=int64s([]),
    )


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
