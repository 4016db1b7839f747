"""Requests go by file and offset, as few as there can be, and read over no more than they may.

Method: drawn blocks in drawn files, beside a reference that looks at one block after the other.
Then loads of other numbers of ranks over a counting store.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import NeededBlocks, ReadPath, file_starts, requests, without
from storage import open_store
from tests.counting import python_calls
from tests.e2e.job import Job, Sharded
from tests.stores import CountingStore


def _drawn(seed: int) -> tuple[NeededBlocks, list[int]]:
    """Some blocks of some files, with what lies between them left out."""
    random_ = random.Random(seed)
    starts, stops, sizes = [], [], []
    line = 0
    for _ in range(random_.randint(1, 4)):
        place = random_.randint(0, 20)
        for _ in range(random_.randint(0, 12)):
            nbytes = random_.randint(1, 30)
            if random_.random() < 0.7:
                starts.append(line + place)
                stops.append(line + place + nbytes)
            place += nbytes + random_.choice([0, 0, 0, random_.randint(0, 12)])
        sizes.append(place + random_.randint(0, 5))
        line += sizes[-1]
    columns = np.array(starts, np.int64), np.array(stops, np.int64)
    return NeededBlocks(*columns, columns[0] * 0, columns[0] * 0), sizes


def _one_by_one(
    blocks: NeededBlocks, files: list[int], nbytes_max: int, gap_max: int
) -> list[tuple[int, int]]:
    """The reference: a block goes to the read before it when it may."""
    reads: list[tuple[int, int]] = []
    for start, stop in zip(blocks.start.tolist(), blocks.stop.tolist(), strict=True):
        if reads:
            first, last = reads[-1]
            same_file = not any(first < edge <= start for edge in files)
            if same_file and start - last <= gap_max and stop - first <= nbytes_max:
                reads[-1] = (first, stop)
                continue
        reads.append((start, stop))
    return reads


def test_requests_are_as_few_as_those_of_the_reference_and_pass_over_little() -> None:
    for seed in range(500):
        blocks, sizes = _drawn(seed)
        random_ = random.Random(-seed)
        nbytes_max, gap_max = random_.randint(1, 120), random_.choice([0, 5, 20])
        files = file_starts(sizes)
        rows_of_reads = requests(blocks, files, nbytes_max, gap_max)
        assert [row for rows in rows_of_reads for row in rows] == list(range(len(blocks.start)))
        reads = [(int(blocks.start[r[0]]), int(blocks.stop[r[-1]])) for r in rows_of_reads]
        assert reads == _one_by_one(blocks, files[1:].tolist(), nbytes_max, gap_max)
        needed = int((blocks.stop - blocks.start).sum())
        alone = len(requests(blocks, files, nbytes_max, 0))
        passed = sum(stop - start for start, stop in reads) - needed
        assert passed <= gap_max * max(len(blocks.start) - len(rows_of_reads), 0)
        assert len(rows_of_reads) <= alone


def test_what_is_left_of_runs() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        edges = sorted(random_.sample(range(60), 2 * random_.randint(0, 8)))
        runs = np.array(edges, dtype=np.int64).reshape(-1, 2)
        places = [p for a, b in runs.tolist() for p in range(a, b)]
        taken = [p for p in places if random_.random() < 0.4]
        cut = np.array([(p, p + 1) for p in taken], dtype=np.int64).reshape(-1, 2)
        left = [p for a, b in without(runs, cut).tolist() for p in range(a, b)]
        assert left == sorted(set(places) - set(taken))


NAMES = 30


def _state(rank: int, size: int, scale: float = 1.0) -> dict[str, Sharded]:
    generator = torch.Generator().manual_seed(1)
    full = [torch.randn(64, 96, generator=generator) * scale for _ in range(NAMES)]
    return {f"t{index:02d}": Sharded(one, rank, size) for index, one in enumerate(full)}


@pytest.mark.parametrize(("saved", "loaded", "requests_"), [(8, 2, 8), (8, 8, 8), (2, 8, 2)])
def test_a_file_is_requested_once_however_many_tensors_lie_in_it(
    request: pytest.FixtureRequest, saved: int, loaded: int, requests_: int
) -> None:
    store = CountingStore(open_store(f"memory://{request.node.name}"))
    Job(saved, lambda rank: store).save(lambda rank: _state(rank, saved), step=1)
    store.reset()
    states = [_state(rank, loaded, 0.0) for rank in range(loaded)]
    Job(loaded, lambda rank: store).load(states.__getitem__)
    assert store.stats.requests["get_into"] == requests_
    assert store.stats.bytes_read <= 1.05 * NAMES * 64 * 96 * 4
    for rank, state in enumerate(states):
        expected = _state(rank, loaded)
        assert all(torch.equal(state[name].local, expected[name].local) for name in state)


@pytest.mark.parametrize(("gap", "requests_"), [(64 << 10, 1), (0, 11)])
def test_small_gaps_are_read_over_and_do_not_count_as_read(
    request: pytest.FixtureRequest, gap: int, requests_: int
) -> None:
    """Every second of 20 tensors of 20 KiB: of 200 KiB that are needed, 180 KiB lie between. One
    more lies in front of the checksums, which are read as well.
    """
    store = CountingStore(open_store(f"memory://{request.node.name}"))
    state = {f"t{i:02d}": torch.full((20 << 8,), float(i)) for i in range(20)}
    job = Job(1, lambda rank: store)
    job.save(lambda rank: state, step=1)
    store.reset()
    wanted = {name: torch.zeros_like(state[name]) for name in sorted(state)[::2]}
    how = LoadOptions(strict=False, path=ReadPath(gap_nbytes_max=gap))
    (report,) = job.load(lambda rank: wanted, options=how)
    assert store.stats.requests["get_into"] == requests_
    assert report.nbytes_read == 200 << 10
    values, table = 3, 4 * (3 + 20 + 1)
    assert report.counters["passed_bytes"] == ((200 << 10) + values + table if gap else 0)
    assert all(torch.equal(wanted[name], state[name]) for name in wanted)


def test_a_request_costs_few_calls_besides_its_bytes(tmp_path: Path) -> None:
    """After megabytes have gone through the CPU's cache each call costs several times as much."""
    calls = []
    for count in (2, 10):
        state = {f"layer{index}": torch.zeros(1 << 20) for index in range(count)}  # a request each
        url = str(tmp_path / str(count))
        ckpt.save(state, url, step=0, io="buffered")
        ckpt.load(state, url, io="buffered")
        calls.append(python_calls(partial(ckpt.load, state, url, io="buffered")))
    assert (calls[1] - calls[0]) / 8 <= 155
