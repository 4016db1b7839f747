"""Every storage operation of a save fails or kills, one after the other, on 3 ranks.

Method: a dry run counts the operations of a second save. Then, for every n (on a local disk for a
sample of them, all with --soak), the n-th operation is made to fail or to kill (before or after it
took effect, once or for ever, one rank or the whole job). After each, a fresh job must load the
newest checkpoint that anyone was promised, bit for bit, and save again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.commit.locate import live_entries
from ckpt.errors import OutcomeUnknown
from storage import Store, open_store
from storage.testing import FaultPlan, FaultyStore
from tests.conftest import Scale
from tests.e2e.job import Job, assert_is_step, state_at
from tests.results import Counted
from tests.stores import PowerLossStore
from tests.thread_ranks import RanksFailed

pytestmark = pytest.mark.long

SIZE = 3
NewStore = Callable[[], Store]


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> NewStore:
    """A function that makes an empty root each time it is called."""
    numbers = itertools.count()

    def make() -> Store:
        number = next(numbers)
        if request.param == "memory":
            return open_store(f"memory://{request.node.name}-{number}")
        return open_store(str(tmp_path / str(number)))

    return make


def _operations(store: Store) -> list[tuple[str, str]]:
    """The storage operations of a second save by a running job."""
    plan = FaultPlan(0)
    faulty = FaultyStore(store, plan)
    job = Job(SIZE, lambda rank: faulty)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    plan.operations.clear()
    job.save(lambda rank: state_at(2, rank, SIZE), step=2)
    return list(plan.operations)


def _save_under_fault(store: Store, plan: FaultPlan, *, whole_job: bool) -> int:
    """Save step 1 in peace and step 2 under `plan`; returns the newest step that was promised."""
    shared = FaultyStore(store, FaultPlan(0))
    own = [FaultyStore(store, FaultPlan(0)) for _ in range(SIZE)]
    job = Job(SIZE, lambda rank: shared if whole_job else own[rank])
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    for faulty in [shared, *own]:
        faulty.plan = plan
    try:
        job.save(lambda rank: state_at(2, rank, SIZE), step=2)
    except RanksFailed as failed:
        for error in failed.errors.values():
            if isinstance(error, OutcomeUnknown):
                return 1
        # One rank that reported success counts as a promise of all.
        return 2 if failed.results else 1
    return 2


def _check_recovery(store: Store, promised: int, label: str) -> None:
    survivor = Job(SIZE, lambda rank: store)
    newest = live_entries(store)[-1].step
    assert newest >= promised, label
    loaded = [state_at(0, rank, SIZE) for rank in range(SIZE)]
    survivor.load(lambda rank: loaded[rank])
    for rank, state in enumerate(loaded):
        assert_is_step(state, newest, rank, SIZE)
    survivor.save(lambda rank: state_at(3, rank, SIZE), step=3)
    alone = [state_at(0, 0, 1)]
    Job(1, lambda rank: store).load(lambda rank: alone[rank])
    assert_is_step(alone[0], 3, 0, 1)


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("fault", ["fails", "kills-rank", "kills-job"])
def test_nothing_promised_is_lost_and_the_next_save_works(
    new_store: NewStore,
    fault: str,
    forever: bool,
    mode: str,
    scale: Scale,
    rng: random.Random,
    counted: Counted,
) -> None:
    total = len(_operations(new_store()))
    assert total > 20
    in_memory = new_store().url.startswith("memory:")
    # On the disk of the default run, a third of the operations under each fault.
    count = total if in_memory else scale.count(total // 3, total)
    struck = 0
    for nth in sorted(rng.sample(range(1, total + 1), count)):
        kill = fault != "fails"
        plan = FaultPlan(nth, kill=kill, mode=mode, forever=forever)  # type: ignore[arg-type]
        store = new_store()
        promised = _save_under_fault(store, plan, whole_job=fault == "kills-job")
        struck += plan.happened
        what = plan.operations[nth - 1] if plan.happened else "nothing"
        _check_recovery(store, promised, f"operation {nth} of {total}: {what}")
    counted(saves=count, struck=struck)
    assert struck >= count - 3  # ranks race, so a run may end a few operations early


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_power_loss_at_any_operation_takes_nothing_that_was_promised(
    request: pytest.FixtureRequest, mode: str, counted: Counted
) -> None:
    """All ranks die at once, and what was not synced is gone from the disk."""
    name = request.node.name
    total = len(_operations(open_store(f"memory://{name}-dry")))
    lost = 0
    for nth in range(1, total + 1):
        disk = PowerLossStore(open_store(f"memory://{name}-{nth}"))
        plan = FaultPlan(nth, kill=True, mode=mode)  # type: ignore[arg-type]
        promised = _save_under_fault(disk, plan, whole_job=True)
        lost += len(disk.lose_power())
        _check_recovery(disk, promised, f"operation {nth} of {total}")
    counted(power_losses=total, unsynced_objects_gone=lost)
    assert lost, "no operation left anything volatile: the test has lost its teeth"


def test_a_power_loss_right_after_a_save_takes_nothing(request: pytest.FixtureRequest) -> None:
    disk = PowerLossStore(open_store(f"memory://{request.node.name}"))
    for step in (1, 2):
        Job(SIZE, lambda rank: disk).save(
            lambda rank, step=step: state_at(step, rank, SIZE), step=step
        )
        assert disk.lose_power() == ()
        _check_recovery(disk, step, f"after step {step}")
