"""Resharding geometry against numpy index sets: every pair of regions of small shapes."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from ckpt.layout.region import Box, Region, Shape, Span
from ckpt.layout.reshard import Copy, Patch, Run, clip_patch, copies, touched

SHAPES: list[Shape] = [(), (4,), (2, 3), (3, 3), (2, 2, 3), (3, 1, 2)]


def _regions(shape: Shape) -> list[Region]:
    numel = math.prod(shape)
    spans: list[Region] = [Span(a, b) for a in range(numel) for b in range(a + 1, numel + 1)]
    per_dim = [[(o, n) for o in range(s) for n in range(1, s - o + 1)] for s in shape]
    boxes = [
        Box(tuple(o for o, _ in c), tuple(n for _, n in c)) for c in itertools.product(*per_dim)
    ]
    return spans + boxes


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def _elements(region: Region, shape: Shape) -> np.ndarray[Any, Any]:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if isinstance(region, Span):
        return numbers.ravel()[region.start : region.stop]
    return numbers[_slices(region)].ravel()


def _apply(copy: Copy, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    if isinstance(copy, Run):
        target[copy.target : copy.target + copy.numel] = source[
            copy.source : copy.source + copy.numel
        ]
        return
    stored = source[copy.source_base :][: math.prod(copy.source_shape)].reshape(copy.source_shape)
    wanted = target[copy.target_base :][: math.prod(copy.target_shape)].reshape(copy.target_shape)
    wanted[_slices(copy.target_box)] = stored[_slices(copy.source_box)]


def _pairs(shape: Shape) -> list[tuple[Region, Region]]:
    pairs = list(itertools.product(_regions(shape), repeat=2))
    return pairs if len(pairs) <= 4000 else random.Random(3).sample(pairs, 4000)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_move_exactly_the_common_elements(shape: Shape) -> None:
    for stored, wanted in _pairs(shape):
        source, expected = _elements(stored, shape), _elements(wanted, shape)
        target = np.full(len(expected), -1)
        for copy in copies(stored, wanted, shape):
            _apply(copy, source, target)
        assert (target == np.where(np.isin(expected, source), expected, -1)).all()


@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 3), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("unit", [1, 2, 3, 5])
def test_touched_units_are_exactly_those_with_a_wanted_element(shape: Shape, unit: int) -> None:
    for stored, wanted in _pairs(shape):
        for patch in copies(stored, wanted, shape):
            if not isinstance(patch, Patch):
                continue
            numbers = np.arange(math.prod(patch.source_shape)).reshape(patch.source_shape)
            elements = numbers[_slices(patch.source_box)].ravel() + patch.source_base
            runs = touched(patch, unit)
            units = [unit_index for first, last in runs for unit_index in range(first, last)]
            assert units == sorted(set((elements // unit).tolist()))
            assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("unit", [1, 2, 3, 5])
def test_a_patch_delivered_run_by_run_equals_the_whole_patch(unit: int) -> None:
    shape = (2, 2, 3)
    for stored, wanted in _pairs(shape):
        source = _elements(stored, shape)
        for patch in copies(stored, wanted, shape):
            if not isinstance(patch, Patch):
                continue
            at_once, by_runs = np.full((2, math.prod(shape)), -1)
            _apply(patch, source, at_once)
            for first, last in touched(patch, unit):
                for part in clip_patch(patch, first * unit, last * unit):
                    _apply(part, source, by_runs)
            assert (at_once == by_runs).all()
