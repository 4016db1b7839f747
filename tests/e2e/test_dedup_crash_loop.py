"""Every storage operation of a save with dedup fails or kills: nothing that is promised is lost,
and nothing that a live checkpoint refers to is ever deleted.

Method: as test_crash_loop.py, on the training of lora.py: step 1 in peace, step 2 (which refers to
step 1) with the n-th operation failing or killing, for every n. Then a fresh job loads the newest
promised step bit for bit, saves with dedup on top of whatever is there, and everything that was
written and deleted meanwhile is checked against the promises of the protocol.
"""

from __future__ import annotations

import itertools
import random

import pytest

from ckpt.commit.locate import live_entries
from ckpt.commit.maintenance import Maintenance
from ckpt.errors import OutcomeUnknown
from storage import Store, open_store
from storage.testing import FaultPlan, FaultyStore
from tests.conftest import Scale
from tests.e2e.job import Job
from tests.e2e.lora import DEDUP, assert_is_lora, lora_at
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_all,
    check_references,
    files_needed,
)
from tests.results import Counted
from tests.stores import PowerLossStore
from tests.thread_ranks import RanksFailed

SIZE = 2


def _job(store: Store) -> Job:
    return Job(SIZE, lambda rank: store, memories={})


def _save(job: Job, step: int) -> None:
    job.save(lambda rank: lora_at(step, rank, SIZE), step=step, options=DEDUP)


def _operations(store: Store) -> int:
    plan = FaultPlan(0)
    job = _job(FaultyStore(store, plan))
    _save(job, 1)
    plan.operations.clear()
    _save(job, 2)
    return len(plan.operations)


def _save_under_fault(store: Store, plan: FaultPlan, *, whole_job: bool) -> int:
    """Step 1 in peace, step 2 under `plan`; returns the newest step that was promised."""
    shared = FaultyStore(store, FaultPlan(0))
    own = [FaultyStore(store, FaultPlan(0)) for _ in range(SIZE)]
    job = Job(SIZE, lambda rank: shared if whole_job else own[rank], memories={})
    _save(job, 1)
    for faulty in [shared, *own]:
        faulty.plan = plan
    try:
        _save(job, 2)
    except RanksFailed as failed:
        unknown = any(isinstance(error, OutcomeUnknown) for error in failed.errors.values())
        return 2 if failed.results and not unknown else 1
    return 2


def _check_recovery(store: Store, history: History, promised: int, label: str) -> None:
    newest = live_entries(store)[-1].step
    assert newest >= promised, label
    loaded = [lora_at(0, rank, SIZE) for rank in range(SIZE)]
    job = _job(store)
    job.load(lambda rank: loaded[rank])
    for rank, state in enumerate(loaded):
        assert_is_lora(state, newest, rank, SIZE)
    _save(job, 3)
    last = live_entries(store)[-1]
    assert last.step == 3 and last.references == (live_entries(store)[0].attempt,), label
    pruning = Maintenance.open(store)
    for entry in live_entries(store)[1:-1]:
        pruning.retire(entry.attempt)
    assert check_all(store, history, files_of=files_needed) == [], label
    assert check_references(store) == [], label
    alone = lora_at(0)
    Job(1, lambda rank: store).load(lambda rank: alone)
    assert_is_lora(alone, 3)


def test_nothing_promised_or_referred_to_is_lost(
    request: pytest.FixtureRequest, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    name = request.node.name
    total = _operations(open_store(f"memory://{name}-dry"))
    assert total > 15
    faults = ("fails", "kills-rank", "kills-job")
    cases = list(itertools.product(range(1, total + 1), faults, (False, True), ("before", "after")))
    chosen = rng.sample(cases, scale.count(20, len(cases)))
    struck = 0
    for number, (nth, fault, forever, mode) in enumerate(chosen):
        history = History()
        store = RecordingStore(open_store(f"memory://{name}-{number}"), history)
        plan = FaultPlan(nth, kill=fault != "fails", mode=mode, forever=forever)  # type: ignore[arg-type]
        promised = _save_under_fault(store, plan, whole_job=fault == "kills-job")
        struck += plan.happened
        what = plan.operations[nth - 1] if plan.happened else "nothing"
        label = f"operation {nth} of {total} {fault} {mode}, for ever: {forever}: {what}"
        _check_recovery(store, history, promised, label)
    counted(saves=len(chosen), struck=struck)
    assert struck >= 0.9 * len(chosen)  # ranks race, so a run may end a few operations early


def test_a_power_loss_takes_nothing_that_was_promised_or_referred_to(
    request: pytest.FixtureRequest, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    name = request.node.name
    total = _operations(open_store(f"memory://{name}-dry"))
    cases = list(itertools.product(range(1, total + 1), ("before", "after")))
    lost = 0
    for nth, mode in rng.sample(cases, scale.count(8, len(cases))):
        counted(power_losses=1)
        disk = PowerLossStore(open_store(f"memory://{name}-{nth}-{mode}"))
        plan = FaultPlan(nth, kill=True, mode=mode)  # type: ignore[arg-type]
        promised = _save_under_fault(disk, plan, whole_job=True)
        lost += len(disk.lose_power())
        newest = live_entries(disk)[-1].step
        assert newest >= promised
        state = lora_at(0)
        Job(1, lambda rank, disk=disk: disk).load(lambda rank, state=state: state)
        assert_is_lora(state, newest)
        _save(_job(disk), 3)
        assert check_references(disk) == []
        assert disk.lose_power() == ()
    counted(unsynced_objects_gone=lost)
    assert lost, "no operation left anything volatile: the test has lost its teeth"
