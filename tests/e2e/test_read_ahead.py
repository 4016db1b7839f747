"""Blocks that several ranks need are read once, ahead of their turn, within the byte budget.

Method: a reader that only counts stands behind ReadAhead; replicas on ranks as threads over a
counting store show that whole loads read every byte once, whatever the budget.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from ckpt.loading.read_ahead import ReadAhead
from ckpt.loading.shared_reads import SharedRun, ShareLimits
from storage import open_store
from storage.testing import CountingStore
from tests.e2e.job import Job
from tests.e2e.test_counts import SHAPE, Replicated, _state, _tensor

MIB = 1 << 20


class CountingReader:
    """Knows what was begun; a run of `n` blocks has n bytes."""

    def __init__(self) -> None:
        self.begun: list[SharedRun] = []
        self.lock = threading.Lock()

    def run_nbytes(self, run: SharedRun) -> int:
        return run.stop - run.start

    def read_run(self, run: SharedRun) -> memoryview:
        with self.lock:
            self.begun.append(run)
        return memoryview(bytes([run.round]) * self.run_nbytes(run))


def _runs(rounds: int, nbytes: int) -> list[SharedRun]:
    return [
        SharedRun(index * nbytes, (index + 1) * nbytes, 0, (1,), index) for index in range(rounds)
    ]


@pytest.mark.parametrize("budget", [0, 25, 100, 10_000])
def test_never_more_is_read_ahead_than_the_budget_allows(budget: int) -> None:
    """At any time: at most what was given back, plus the budget, plus the one that is requested."""
    reader: Any = CountingReader()
    runs = _runs(40, 10)
    path = ReadPath(readers=3, read_ahead_nbytes_max=budget)
    with ReadAhead(reader, runs, path) as ahead:
        for number, run in enumerate(runs):
            data = ahead.take([run])
            assert bytes(data[run]) == bytes([run.round]) * 10
            assert len(reader.begun) * 10 <= number * 10 + max(budget, 10)
            ahead.give_back([run])
    assert sorted(reader.begun) == runs


def test_a_failure_is_raised_where_the_run_is_asked_for() -> None:
    class Failing(CountingReader):
        def read_run(self, run: SharedRun) -> memoryview:
            if run.round == 3:
                raise ZeroDivisionError
            return super().read_run(run)

    reader: Any = Failing()
    runs = _runs(10, 10)
    with ReadAhead(reader, runs, ReadPath(readers=2)) as ahead:
        for run in runs[:3]:
            ahead.take([run])
        with pytest.raises(ZeroDivisionError):
            ahead.take([runs[3]])


@pytest.mark.parametrize("budget", [0, 3 * MIB, 64 * MIB])
def test_replicas_are_read_once_and_exchanged_with_any_budget(
    request: pytest.FixtureRequest, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    give_back = ReadAhead.give_back

    def noted(self: ReadAhead, runs: list[SharedRun]) -> None:
        given_back.extend(run.stop - run.start for run in runs)
        give_back(self, runs)

    monkeypatch.setattr(ReadAhead, "give_back", noted)
    store = CountingStore(open_store(f"memory://{request.node.name}"))
    everyone = (0, 1, 2)
    Job(2, lambda rank: store).save(_state(2, 0), step=1)
    store.reset()
    states = [{f"t{i}": Replicated(_tensor(i) * 0, everyone) for i in range(3)} for _ in everyone]
    options = LoadOptions(
        path=ReadPath(request_nbytes_max=MIB, readers=4, read_ahead_nbytes_max=budget),
        sharing=ShareLimits(run_nbytes_max=MIB, round_nbytes_max=4 * MIB),
    )
    Job(3, lambda rank: store).load(lambda rank: states[rank], options=options)
    assert store.stats.bytes_read <= 1.05 * 3 * SHAPE[0] * SHAPE[1] * 4
    for state in states:
        assert all(torch.equal(state[f"t{i}"].local, _tensor(i)) for i in range(3))
    assert sum(given_back) * MIB >= 3 * SHAPE[0] * SHAPE[1] * 4  # else reading ahead would stop
