"""Two jobs on one root: the older one ends in Fenced, and nothing is mixed, lost or overwritten.

Method: jobs of ranks as threads over one memory store. A rival saves between, or in the middle of,
the saves of the older job: at each of its storage operations. Every checkpoint that is in the log
afterwards must be whole and load bit for bit, and everything that was promised must be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.commit.log import Log
from ckpt.errors import Fenced, OutcomeUnknown
from storage import KeyExistsError, OutcomeUnknownError, Store, open_store
from storage.testing import FaultPlan, FaultyStore
from storage.wrap import WrappedStore
from tests.e2e.job import Job, assert_is_step, state_at
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_epochs,
    check_latest,
    check_live_complete,
    check_written_once,
)
from tests.ranks import run_ranks
from tests.thread_ranks import RanksFailed

SIZE = 2


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def _save(job: Job, step: int) -> None:
    job.save(lambda rank: state_at(step, rank, job.size), step=step)


def _errors(job: Job, step: int) -> set[type[BaseException]]:
    """The classes of what a save raised; it must raise on all ranks."""
    with pytest.raises(RanksFailed) as caught:
        _save(job, step)
    assert len(caught.value.errors) == job.size, caught.value
    return {type(error) for error in caught.value.errors.values()}


def _check_root(store: Store, steps: list[int]) -> None:
    """Exactly these checkpoints, in this order, are live, whole, and load on another world size."""
    assert [entry.step for entry in live_entries(store)] == steps
    assert check_live_complete(store) == []
    assert check_latest(store) == []
    assert check_epochs(store) == []
    for step in sorted(set(steps)):
        state = state_at(0, 0, 1)
        report = Job(1, lambda rank: store).load(lambda rank, state=state: state, step)[0]
        assert report.step == step
        assert_is_step(state, step, 0, 1)


class AtOperation(FaultPlan):
    """Runs `action` when the `nth` operation is about to happen, then lets it happen."""

    def __init__(self, nth: int, action: Callable[[], None]) -> None:
        super().__init__(nth)
        self.action = action

    def strikes(self, operation: str, key: str) -> bool:
        if super().strikes(operation, key):
            self.action()
        return False


def test_the_older_job_ends_in_fenced_and_stays_there(store: Store) -> None:
    older, newer = Job(SIZE, lambda rank: store), Job(SIZE, lambda rank: store)
    _save(older, 1)
    _save(newer, 2)
    for step in (3, 4):
        assert _errors(older, step) == {Fenced}
    _save(newer, 5)
    assert _errors(older, 6) == {Fenced}
    _check_root(store, [1, 2, 5])


def test_a_fenced_job_can_still_load(store: Store) -> None:
    older, newer = Job(SIZE, lambda rank: store), Job(SIZE, lambda rank: store)
    _save(older, 1)
    _save(newer, 2)
    assert _errors(older, 3) == {Fenced}
    states = [state_at(0, rank, SIZE) for rank in range(SIZE)]
    older.load(lambda rank: states[rank])
    for rank, state in enumerate(states):
        assert_is_step(state, 2, rank, SIZE)


def test_a_zombie_that_wakes_up_anywhere_in_its_save_mixes_nothing(
    request: pytest.FixtureRequest,
) -> None:
    """At each storage operation of the older job's second save, the rival runs and saves first."""
    name = request.node.name
    dry = FaultPlan(0)
    faulty = FaultyStore(open_store(f"memory://{name}-dry"), dry)
    job = Job(SIZE, lambda rank: faulty)
    _save(job, 1)
    dry.operations.clear()
    _save(job, 2)
    total = len(dry.operations)
    assert total > 15
    commit = max(
        number
        for number, operation in enumerate(dry.operations, 1)
        if operation[0] == "put_if_absent" and operation[1].startswith("log/")
    )
    assert commit > 10
    for nth in range(1, total + 1):
        history = History()
        store = RecordingStore(open_store(f"memory://{name}-{nth}"), history)
        asleep = FaultyStore(store, FaultPlan(0))
        older = Job(SIZE, lambda rank, asleep=asleep: asleep)
        rival = Job(3, lambda rank, store=store: store)
        _save(older, 1)
        asleep.plan = AtOperation(nth, lambda rival=rival: _save(rival, 9))
        if nth <= commit:
            assert _errors(older, 2) == {Fenced}, dry.operations[nth - 1]
        else:
            # What follows the commit only looks once more at what was written: it stands.
            _save(older, 2)
        assert _errors(older, 3) == {Fenced}
        _save(rival, 10)
        _check_root(store, [1, 9, 10] if nth <= commit else [1, 2, 9, 10])
        assert check_written_once(store, history) == []


def test_rivals_that_take_turns_lose_nothing(store: Store) -> None:
    """Each new job fences the one before; all that succeeded stays."""
    jobs = []
    for step in range(1, 6):
        jobs.append(Job(1 + step % 3, lambda rank: store))
        _save(jobs[-1], step)
    for job in jobs[:-1]:
        assert _errors(job, 77) == {Fenced}
    _check_root(store, [1, 2, 3, 4, 5])


def test_the_same_step_twice_gets_two_homes_and_the_newer_is_loaded(store: Store) -> None:
    history = History()
    recording = RecordingStore(store, history)
    job = Job(SIZE, lambda rank: recording)
    first = job.save(lambda rank: state_at(1, rank, SIZE), step=5)[0]
    second = job.save(lambda rank: state_at(2, rank, SIZE), step=5)[0]
    assert first.path != second.path
    assert check_written_once(store, history) == []
    for step, path in ((2, None), (1, first.path)):
        state = state_at(0, 0, 1)
        place = store if path is None else open_store(path)
        Job(1, lambda rank, place=place: place).load(lambda rank, state=state: state)
        assert_is_step(state, step, 0, 1)


def test_no_object_of_a_checkpoint_can_be_written_again(store: Store) -> None:
    _save(Job(SIZE, lambda rank: store), 1)
    for info in list(store.list("")):
        before = store.get(info.key)
        with pytest.raises(KeyExistsError):
            store.put_if_absent(info.key, b"mine")
        with (
            pytest.raises(KeyExistsError),
            store.create(info.key, 4, part_nbytes=4) as writer,
        ):
            writer.write_part(0, [memoryview(b"mine")])
        assert store.get(info.key) == before


class LostReply(WrappedStore):
    """The next `count` conditional puts below log/ happen, and their replies are lost."""

    def __init__(self, inner: Store, count: int = 0) -> None:
        super().__init__(inner)
        self.count = count
        self.lost = 0

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not key.startswith("log/") or self.count == 0:
            self.inner.put_if_absent(key, data)
            return
        self.count -= 1
        self.lost += 1
        with contextlib.suppress(KeyExistsError):  # its reply is lost as well
            self.inner.put_if_absent(key, data)
        raise OutcomeUnknownError(f"{key}: no reply")


def test_a_lost_reply_to_the_commit_is_no_failure_and_no_second_commit(store: Store) -> None:
    losing = LostReply(store)
    job = Job(SIZE, lambda rank: losing)
    _save(job, 1)
    losing.count = 3
    _save(job, 2)
    assert losing.lost == 3
    kinds = [record.kind for record in Log(store).history()]
    assert sorted(kinds) == ["CLAIM", "COMMIT", "COMMIT"]
    _check_root(store, [1, 2])


def test_a_commit_without_any_reply_is_unknown_and_the_next_save_settles_it(store: Store) -> None:
    losing = LostReply(store)
    job = Job(SIZE, lambda rank: losing)
    _save(job, 1)
    losing.count = 10**6
    for _ in range(2):  # still no reply: nothing is deleted, nothing else is begun
        assert _errors(job, 2) == {OutcomeUnknown}
    losing.count = 0
    _save(job, 3)
    _check_root(store, [1, 2, 3])


def test_a_successor_settles_what_its_predecessor_could_not(store: Store) -> None:
    losing = LostReply(store)
    older = Job(SIZE, lambda rank: losing)
    _save(older, 1)
    losing.count = 10**6
    assert _errors(older, 2) == {OutcomeUnknown}
    newer = Job(SIZE, lambda rank: store)
    _save(newer, 3)
    losing.count = 0
    assert _errors(older, 4) == {Fenced}
    _check_root(store, [1, 2, 3])


# --- real processes -------------------------------------------------------------------------------


def _two_jobs(root: str) -> list[str]:
    """Ranks 0 and 1 are the older job, 2 and 3 its rival; they take turns at one root."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, outcomes = rank // 2, []
    turns = [(0, 1), (1, 2), (0, 3), (1, 4), (0, 5)]
    for job, step in turns:
        dist.barrier()
        if job != mine:
            continue
        try:
            state = {"t": torch.full((1000,), float(step)), "step": step}
            ckpt.save(state, root, step=step, process_group=groups[mine])
            outcomes.append("saved")
        except Fenced as error:
            outcomes.append(f"Fenced: {error}")
    dist.barrier()
    state = {"t": torch.zeros(1000), "step": 0}
    ckpt.load(state, root, process_group=groups[mine])
    assert state["step"] == 4
    assert torch.equal(state["t"], torch.full((1000,), 4.0))
    return outcomes


@pytest.mark.ranks
def test_of_two_jobs_of_real_processes_the_older_is_fenced(tmp_path: Path) -> None:
    outcomes: list[Any] = run_ranks(4, _two_jobs, str(tmp_path / "run"))
    for older in outcomes[:2]:
        assert older[0] == "saved"
        assert all("claimed by a newer session" in text for text in older[1:])
        assert len(older) == 3
    assert outcomes[0] == outcomes[1]
    assert outcomes[2:] == [["saved", "saved"]] * 2
    assert [info.step for info in ckpt.list_steps(str(tmp_path / "run"))] == [1, 2, 4]
