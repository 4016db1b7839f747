"""Runs of wanted bytes, against sets of bytes counted one by one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ckpt.layout.region import Box
from ckpt.layout.reshard import Patch
from ckpt.loading.exchange import Group, ShareLimits, share
from ckpt.loading.plan import NeededBlocks, element_runs, length, pieces_of, united

Ints = np.ndarray


def _bytes(runs: Ints) -> list[int]:
    return [place for start, stop in runs.tolist() for place in range(start, stop)]


def _runs(random_: random.Random, stop: int) -> Ints:
    edges = sorted(random_.sample(range(stop), 2 * random_.randint(1, 8)))
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize("seed", range(50))
def test_runs_are_united_and_short_gaps_filled(seed: int) -> None:
    random_ = random.Random(seed)
    starts = [random_.randint(0, 60) for _ in range(random_.randint(0, 12))]
    runs = np.array([(s, s + random_.randint(1, 9)) for s in starts], dtype=np.int64)
    runs = runs.reshape(-1, 2)
    gap_max = random_.choice([0, 0, 3])
    made = united(runs, gap_max)
    places = set(_bytes(runs))
    ends = sorted(places)
    for low, high in itertools.pairwise(ends):
        if high - low - 1 <= gap_max:
            places.update(range(low, high))
    assert _bytes(made) == sorted(places)
    assert all(made[1:, 0] > made[:-1, 1] + gap_max)


@pytest.mark.parametrize("seed", range(50))
def test_runs_are_cut_at_the_edges_of_intervals(seed: int) -> None:
    random_ = random.Random(seed)
    runs, intervals = _runs(random_, 80), _runs(random_, 80)
    pieces, number = pieces_of(runs, intervals[:, 0], intervals[:, 1])
    assert _bytes(pieces) == sorted(set(_bytes(runs)) & set(_bytes(intervals)))
    for (start, stop), row in zip(pieces.tolist(), number.tolist(), strict=True):
        assert intervals[row, 0] <= start < stop <= intervals[row, 1]


@pytest.mark.parametrize("seed", range(100))
def test_a_patch_takes_these_elements(seed: int) -> None:
    random_ = random.Random(seed)
    shape = tuple(random_.randint(1, 5) for _ in range(random_.randint(1, 4)))
    offset = tuple(random_.randint(0, n - 1) for n in shape)
    inside = tuple(random_.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
    box = Box(offset, inside)
    numbers = 7 + np.arange(np.prod(shape)).reshape(shape)
    wanted = numbers[tuple(slice(o, o + n) for o, n in zip(offset, inside, strict=True))]
    made = element_runs(Patch(7, shape, box, 0, inside, Box((0,) * len(shape), inside)))
    assert _bytes(made) == sorted(wanted.reshape(-1).tolist())
    if inside == shape:
        assert len(made) == 1


@pytest.mark.parametrize("seed", range(50))
def test_what_ranks_share_of_blocks_is_divided_by_blocks_and_nothing_twice(seed: int) -> None:
    """Two ranks want the same bytes of some blocks, and each of them others besides."""
    random_ = random.Random(seed)
    edges = np.cumsum([0, *(random_.randint(5, 15) for _ in range(30))])
    drawn = _runs(random_, int(edges[-1])), _runs(random_, int(edges[-1]))
    common = sorted(set(_bytes(drawn[0])) & set(_bytes(drawn[1])))
    shared = united(np.array([(p, p + 1) for p in common], dtype=np.int64).reshape(-1, 2))
    group = [Group(np.array([0, 1]), shared)] if len(shared) else []
    made = []
    for rank, needs in enumerate(drawn):
        rows = sorted(set(pieces_of(needs, edges[:-1], edges[1:])[1].tolist()))
        number = np.array(rows, dtype=np.int64)
        blocks = NeededBlocks(edges[number], edges[number + 1], number, number * 0)
        sharing = share(blocks, group, rank, ShareLimits(40, 10, 100), needs)
        runs = [run.runs for run in sharing.moves]
        assert sorted(_bytes(np.concatenate([sharing.private, *runs]))) == _bytes(needs)
        for run in sharing.moves:
            touched = pieces_of(run.runs, edges[:-1], edges[1:])[1]
            assert run.nbytes == length(run.runs)
            assert run.nbytes <= 40 or len(set(touched.tolist())) == 1
        of_blocks = [set(pieces_of(one, edges[:-1], edges[1:])[1].tolist()) for one in runs]
        assert sum(map(len, of_blocks)) == len(set().union(*of_blocks))
        made.append(sharing.moves)
    assert [run.runs.tolist() for run in made[0]] == [run.runs.tolist() for run in made[1]]
    for here, there in zip(*made, strict=True):
        assert {here.source, there.source} in ({None, 0}, {None, 1})
