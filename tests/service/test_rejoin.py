"""A rank is lost, and the other processes go on in a new world with the newest whole state.

Method: four gloo processes train under a Checkpointer. One kills itself between two saves, in a
round of a save, or in a round of a restore. The others make a group of their own and call `rejoin`.
What they have trained some steps later is compared, bit for bit, with what as many fresh processes
train from the same checkpoint.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.commit.session import Session
from ckpt.errors import CheckpointError, Fenced, NoCheckpoint, RankFailed
from ckpt.process import world_of
from ckpt.saving.background import Background
from ckpt.service import parts
from ckpt.service.restore import RestoreReport
from ckpt.world.torch_world import TorchWorld
from storage.local import LocalStore
from tests.conftest import Scale
from tests.ranks import run_ranks
from tests.results import Counted
from tests.service.rejoining import (
    ENGINES,
    Engine,
    Trainer,
    assert_same,
    die,
    die_in_round,
    new_group,
    state_of,
)

pytestmark = pytest.mark.ranks

# Where the victim dies: between saves, or in a round of a save in the background.
PHASES = (
    "training",
    "agree on begin",
    "attempt",
    "agree on write",
    "parts",
    "agree on commit",
    "report",
)
LAST = 14


def survivors_of(victim: int, size: int = 4) -> list[int]:
    """The ranks that are left."""
    return [rank for rank in range(size) if rank != victim]


def lose_a_rank(trainer: Trainer, phase: str, victim: int) -> RankFailed:
    """Train to step 12; the victim dies at step 10, in the save of it, or after step 12."""
    armed: list[bool] = []
    if dist.get_rank() == victim and phase != "training":
        die_in_round(world_of(), phase, armed)
    trainer.train(9)
    trainer.service.wait()  # the one of step 5
    armed.append(True)
    trainer.train(10)
    if dist.get_rank() == victim:
        if phase == "training":
            die()
        trainer.service.wait()
        raise AssertionError(f"survived phase {phase!r}")
    return trainer.notice()


def losing(
    url: str, scratch: str, engine: Engine, phase: str, victim: int
) -> tuple[RestoreReport, list[torch.Tensor], list[int]]:
    trainer = Trainer(url, engine)
    trainer.service.restore()
    failure = lose_a_rank(trainer, phase, victim)
    assert failure.rank == victim, failure
    report = trainer.rejoin(scratch, survivors_of(victim))
    assert trainer.state["step"] == report.step
    trainer.train(LAST)
    bits = trainer.bits()
    trainer.service.close()
    steps = [one.step for one in trainer.service.failures]
    return report, bits, steps


def from_checkpoint(url: str, engine: Engine, attempt: str) -> list[torch.Tensor]:
    """What fresh processes train from there."""
    trainer = Trainer(f"{url}-reference", engine)
    ckpt.load(trainer.state, url, attempt=attempt)
    trainer.train(LAST)
    bits = trainer.bits()
    trainer.service.close()
    return bits


def test_survivors_train_on_from_the_newest_checkpoint(
    tmp_path: Path, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    every = [(e, p, v) for e in ENGINES for p in PHASES for v in range(4)]
    chosen = every if scale.soak else [rng.choice(every)]
    for number, (engine, phase, victim) in enumerate(chosen):
        url = str(tmp_path / f"run{number}")
        case = f"{engine}, rank {victim}, {phase}"
        answers = run_ranks(
            4, losing, url, f"{url}-group", engine, phase, victim, allow_dead=[victim]
        )
        results = [one for one in answers if one is not None]
        (step,) = {report.step for report, _, _ in results}
        # Between saves that of step 10 is whole, and in its last round it is committed.
        assert step in ((10,) if phase == "report" else (5, 10)), case
        assert {r.origin for r, _, _ in results} == {"durable"}
        if step == 5:
            # The save that was given up is among the failures of every rank.
            assert all(failed == [10] for _, _, failed in results), (case, results)
        reference = run_ranks(3, from_checkpoint, url, engine, results[0][0].attempt)
        for _, bits, _ in results:
            assert_same(bits, reference[0])
        assert ckpt.verify(url).ok, case
        counted(losses=1, survivors=len(results))


def losing_two(url: str, scratch: str) -> tuple[list[int], list[int], int]:
    trainer = Trainer(url, "fsdp2")
    trainer.service.restore()
    me = dist.get_rank()
    trainer.train(6)
    trainer.service.wait()
    if me == 0:
        die()
    named = [trainer.notice().rank]
    steps = [trainer.rejoin(scratch, [1, 2, 3]).step]
    trainer.train(10)
    trainer.service.wait()
    if me == 2:
        die()
    named.append(trainer.notice().rank)
    steps.append(trainer.rejoin(scratch, [0, 2]).step)
    trainer.train(15)
    trainer.service.close()
    assert trainer.service.last_saved is not None
    return named, steps, trainer.service.last_saved.step


def test_a_second_loss_and_the_loss_of_the_coordinator(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(4, losing_two, url, f"{url}-group", allow_dead=[0, 2])
    # By their ranks in the world of then: rank 2 of four was rank 1 of three.
    assert [answers[1], answers[3]] == [([0, 1], [5, 10], 15)] * 2
    assert ckpt.verify(url).ok


# --- one that dies, or is late, in the middle of it -----------------------------------------------


def dying_in_restore(url: str, scratch: str, phase: str) -> list[int]:
    """Rank 1 dies while all restore, and another one while the others rejoin."""
    trainer = Trainer(url)
    me = dist.get_rank()
    if me == 1:
        die_in_round(TorchWorld, phase, [True])
    with pytest.raises(RankFailed) as failed:
        trainer.service.restore()
    named = [failed.value.rank]
    trainer.generation += 1
    new_group(scratch, trainer.generation, [0, 2, 3])
    if me == 3:
        die_in_round(TorchWorld, phase, [True])
    with pytest.raises(RankFailed) as failed:
        trainer.service.rejoin()
    named.append(failed.value.rank)
    with pytest.raises(CheckpointError, match="in no world, because `rejoin` has failed"):
        trainer.service.step(6)
    assert trainer.rejoin(scratch, [0, 1]).step == 5
    trainer.train(7)
    trainer.service.close()
    return named


def test_deaths_in_restores_are_left_behind(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(2, saved, url)
    answers = run_ranks(4, dying_in_restore, url, f"{url}-group", "manifest", allow_dead=[1, 3])
    assert [answers[0], answers[2]] == [[1, 2]] * 2


def saved(url: str) -> None:
    trainer = Trainer(url)
    trainer.train(5)
    trainer.service.close()


def missing_one(url: str, scratch: str, missing: int) -> tuple[int, str]:
    trainer = Trainer(url)
    trainer.train(5)
    trainer.service.wait()
    me = dist.get_rank()
    new_group(scratch, 1, [0, 1, 2])
    if me == missing:
        # Alive, and of the group; the others try without it, and then say that they are done.
        dist.barrier()
        return -1, ""
    with pytest.raises(RankFailed) as failed:
        trainer.service.rejoin(meet_seconds_max=1.0)
    trainer.service.close()
    dist.barrier()
    return failed.value.rank, str(failed.value)


@pytest.mark.parametrize("missing", [0, 2])
def test_who_does_not_come_is_named(tmp_path: Path, missing: int) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(3, missing_one, url, f"{url}-group", missing)
    for named, text in answers[:missing] + answers[missing + 1 :]:
        assert named == missing and "rejoin" in text, text


# --- what is left behind --------------------------------------------------------------------------


def leaving_one(url: str, scratch: str, go: str) -> tuple[str, int]:
    """Rank 0, which commits, hangs in the commit of step 10 until the others go on without it."""
    trainer = Trainer(url)
    trainer.train(9)
    trainer.service.wait()
    me = dist.get_rank()
    if me != 0:
        trainer.train(10)
        until(Path(f"{go}0").exists)
        report = trainer.rejoin(scratch, [1, 2])
        # Before the new world has saved anything.
        Path(f"{go}{me}").touch()
        until(Path(f"{go}over").exists)
        trainer.train(12)
        trainer.service.save_now().result()
        trainer.service.close()
        return report.origin, report.step
    commit = Session.commit

    def late(session: Session, what: Any) -> Any:
        Path(f"{go}0").touch()
        until(lambda: all(Path(f"{go}{rank}").exists() for rank in (1, 2)))
        return commit(session, what)

    Session.commit = late  # type: ignore[method-assign]
    trainer.train(10)
    with pytest.raises((Fenced, RankFailed)):
        trainer.service.wait()
    Path(f"{go}over").touch()
    (failure,) = trainer.service.failures
    trainer.service.__exit__(RankFailed, failure.error, None)
    return type(failure.error).__name__, failure.step


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_what_the_old_world_still_writes_is_fenced(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    # None must die: the ranks end one after the other.
    go = str(tmp_path / "go")
    answers = run_ranks(3, leaving_one, url, f"{url}-group", go, allow_dead=[0])
    assert answers == [("Fenced", 10), ("durable", 5), ("durable", 5)]
    steps = {one.step: one.attempt[:7] for one in ckpt.list_steps(url)}
    assert steps == {5: "e000001", 10: "e000002", 12: "e000002"}
    assert ckpt.verify(url).ok


# --- nothing lost, nothing saved ------------------------------------------------------------------


def losing_nothing(url: str) -> tuple[int, float, int]:
    trainer = Trainer(url)
    trainer.train(7)
    trainer.service.save_now()
    # All begin anew in the group that they have, with a save under way and a state that is off.
    with torch.no_grad():
        for parameter in trainer.state["model"].parameters():
            parameter.fill_(7.0)
    report = trainer.service.rejoin()
    assert report is not None
    highest = max(float(p.abs().max()) for p in trainer.state["model"].parameters())
    trainer.train(11)
    trainer.service.close()
    return report.step, highest, len(trainer.service.failures)


def test_a_world_that_lost_nobody_can_begin_anew(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(2, losing_nothing, url)
    for step, highest, failures in answers:
        assert (step, failures) in ((5, 1), (7, 0)) and highest < 7.0
    assert ckpt.verify(url).ok


def staying_outside(url: str) -> int:
    trainer = Trainer(url)
    trainer.train(5)
    trainer.service.wait()
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(CheckpointError, match="this process is not in the process group"):
            trainer.service.rejoin(first)
    trainer.train(10)
    trainer.service.close()
    return trainer.state["step"]


def leaving_a_silent_store(url: str) -> tuple[int, list[tuple[int, str]]]:
    """The disk of rank 1 does not answer before all have rejoined."""
    trainer = Trainer(url)
    trainer.train(7)
    trainer.service.wait()
    answers = threading.Event()
    create = LocalStore.create

    def silent(store: LocalStore, key: str, nbytes: int, **how: Any) -> Any:
        if "rank00001" in key:
            answers.wait(60.0)
        return create(store, key, nbytes, **how)

    LocalStore.create = silent  # type: ignore[method-assign]
    Background.give_up.__defaults__ = (0.5,)
    parts.LEFT_SECONDS_MAX = 0.5
    trainer.service.save_now()
    report = trainer.service.rejoin()
    assert report is not None
    failed = [(one.step, type(one.error).__name__) for one in trainer.service.failures]
    answers.set()
    trainer.train(11)
    trainer.service.close()
    return report.step, failed


def test_saves_of_the_world_before_are_given_up(tmp_path: Path) -> None:
    """Who waits for a rank in one learns at once that it has failed, and no optimizer is held."""
    url = str(tmp_path / "run")
    first, second = run_ranks(2, leaving_a_silent_store, url)
    assert first == (5, [(7, "RankFailed")]) and second[0] == 5
    assert [one.step for one in ckpt.list_steps(url)] == [5, 10]


def test_a_process_outside_of_the_group_stays_in_its_world(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert run_ranks(2, staying_outside, url) == [10, 10]
    assert [one.step for one in ckpt.list_steps(url)] == [5, 10]


def losing_before_a_save(url: str, scratch: str) -> tuple[str, bool, int]:
    trainer = Trainer(url, save_every=1000)
    trainer.train(3)
    if dist.get_rank() == 1:
        die()
    trainer.notice()
    trainer.generation += 1
    new_group(scratch, trainer.generation, [0, 2])
    with pytest.raises(NoCheckpoint, match=r"pass rejoin\(state=\)") as failed:
        trainer.service.rejoin()
    trainer.generation += 1
    new_group(scratch, trainer.generation, [0, 1])
    trainer.state = state_of("ddp")
    report = trainer.service.rejoin(state=trainer.state)
    trainer.wrap()
    trainer.train(4)
    trainer.service.save_now().result()
    trainer.service.close()
    return type(failed.value).__name__, report is None, trainer.state["step"]


def test_without_a_checkpoint_a_new_state_is_needed(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(3, losing_before_a_save, url, f"{url}-group", allow_dead=[1])
    assert [answers[0], answers[2]] == [("NoCheckpoint", True, 4)] * 2
    assert [one.step for one in ckpt.list_steps(url)] == [4]


def test_what_cannot_rejoin_is_refused_before_anything_is_left(tmp_path: Path) -> None:
    state = {"step": 1}
    with ckpt.Checkpointer(state, str(tmp_path / "run"), save=ckpt.EverySteps(1)) as service:
        service.step(1)
        service.wait()
        with pytest.raises(ValueError, match="meet_seconds_max=0"):
            service.rejoin(meet_seconds_max=0)
        with pytest.raises(CheckpointError, match=r"torch.distributed is not initialised"):
            service.rejoin(object())  # type: ignore[arg-type]
        state["step"] = 9
        report = service.rejoin()
        assert report is not None and report.step == 1 and state["step"] == 1
        service.step(2)
    with pytest.raises(CheckpointError, match="is closed"):
        service.rejoin()
