"""Survivors of a lost rank go on from near checkpoints, in their own processes.

Method: four gloo processes, two for each folder that stands for a host, train under a Checkpointer
with a near tier. One kills itself between two near saves or in a round of one, or both of a host
do. The others rejoin.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.service.restore import RestoreReport
from ckpt.world.torch_world import TorchWorld
from tests.conftest import Scale
from tests.ranks import run_ranks
from tests.results import Counted
from tests.service.rejoining import ENGINES, Engine, Trainer, assert_same, die, die_in_round

pytestmark = pytest.mark.ranks

# Rounds of a near save in their order, and a moment between two of them.
PHASES = (
    "training",
    "agree on begin",
    "near attempt",
    "agree on near write",
    "near files",
    "near record",
    "agree on near record",
)
LAST = 13


def losing(
    url: str, scratch: str, engine: Engine, phase: str, victims: Sequence[int]
) -> tuple[RestoreReport, list[torch.Tensor], list[torch.Tensor]]:
    """Near saves at even steps, durable ones at 5 and 10. The victims die in the near save of step
    8, or between it and that of step 10. Returns the report, the state that was restored, and the
    one that was trained from it.
    """
    me = dist.get_rank()
    trainer = Trainer(url, engine, near=f"{url}-host{me // 2}")
    trainer.service.restore()
    armed: list[bool] = []
    if me in victims and phase != "training":
        die_in_round(TorchWorld, phase, armed)
    trainer.train(7)
    trainer.service.wait()
    armed.append(True)
    trainer.train(8)
    if me in victims:
        if phase == "training":
            trainer.service.wait()
            die()
        trainer.service.wait()
        raise AssertionError(f"survived phase {phase!r}")
    assert trainer.notice().rank in victims
    left = [rank for rank in range(4) if rank not in victims]
    report = trainer.rejoin(scratch, left)
    assert trainer.state["step"] == report.step
    restored = trainer.bits()
    trainer.train(LAST)
    trainer.service.wait()
    last = trainer.service.last_near
    assert last is not None and last.step == 12
    bits = trainer.bits()
    trainer.service.close()
    return report, restored, bits


def reference(url: str, engine: Engine, step: int) -> list[list[torch.Tensor]]:
    """What as many ranks train without any loss: to `step` on four, or from there on three."""
    trainer = Trainer(f"{url}-reference", engine, save_every=1000)
    if dist.get_world_size() == 4:
        trainer.train(step)
        trainer.service.save_now()
    else:
        trainer.service.restore()
        trainer.train(LAST)
    bits = trainer.bits()
    trainer.service.close()
    return [bits]


def test_survivors_train_on_from_the_newest_near_state(
    tmp_path: Path, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    every = [(e, p, v) for e in ENGINES for p in PHASES for v in range(4)]
    chosen = every if scale.soak else [rng.choice(every)]
    for number, (engine, phase, victim) in enumerate(chosen):
        url, case = str(tmp_path / f"run{number}"), f"{engine}, rank {victim}, {phase}"
        how = (url, f"{url}-group", engine, phase, [victim])
        answers = run_ranks(4, losing, *how, allow_dead=[victim])
        results = [one for one in answers if one is not None]
        ((origin, step),) = {(report.origin, report.step) for report, _, _ in results}
        # That of step 8 counts where the record of all files had got around before the death.
        steps = {"training": (8,), "near record": (6, 8), "agree on near record": (6, 8)}
        assert origin == "near" and step in steps.get(phase, (6,)), (case, origin, step)
        for size, index in ((4, 1), (3, 2)):
            (expected,) = run_ranks(size, reference, url, engine, step)[0]
            for result in results:
                assert_same(result[index], expected)
        counted(losses=1, survivors=len(results))


def test_without_the_files_of_a_lost_host_the_durable_state_is_taken(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(
        4, losing, url, f"{url}-group", "fsdp2", "training", [2, 3], allow_dead=[2, 3]
    )
    for report, _, _ in answers[:2]:
        assert (report.origin, report.step, report.steps_lost) == ("durable", 5, 3)
        assert "no host has the near files of 2 of 4 ranks: 2, 3" in report.skipped[0].reason


def losing_a_host(url: str, scratch: str) -> tuple[str, int, int, int]:
    """The last rank dies, and nothing is left of its host. The others have copies of its files."""
    me = dist.get_rank()
    folder = f"{url}-host{(0, 0, 1, 2)[me]}"
    trainer = Trainer(url, "fsdp2", near=folder, save_every=1000, replicas=1)
    trainer.train(8)
    trainer.service.wait()
    if me == 3:
        shutil.rmtree(folder)
        die()
    assert trainer.notice().rank == 3
    report = trainer.rejoin(scratch, [0, 1, 2])
    trainer.train(11)
    trainer.service.wait()
    last = trainer.service.last_near
    assert last is not None and not trainer.service.near_failures
    trainer.service.close()
    return report.origin, report.step, report.nbytes_of_other_hosts, last.step


def test_survivors_go_on_from_copies_of_a_lost_host(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(4, losing_a_host, url, f"{url}-group", allow_dead=[3])
    assert {(answer[0], answer[1], answer[3]) for answer in answers[:3]} == {("near", 8, 10)}
    assert not list((tmp_path / "run").glob("steps/*"))


def losing_twice(url: str, scratch: str) -> list[tuple[str, int]]:
    """Rank 3 dies, then rank 0 while the others restore, then the two that are left train on."""
    me = dist.get_rank()
    trainer = Trainer(url, "fsdp2", near=f"{url}-host{me % 2}", save_every=1000)
    trainer.train(6)
    trainer.service.wait()
    if me == 3:
        die()
    assert trainer.notice().rank == 3
    if me == 0:
        die_in_round(TorchWorld, "near manifest", [True])
    with pytest.raises(ckpt.errors.RankFailed):
        trainer.rejoin(scratch, [0, 1, 2])
    reports = [trainer.rejoin(scratch, [1, 2])]
    trainer.train(9)
    trainer.service.wait()
    # The state of this world counts from now on, for one more that begins anew.
    reports.append(trainer.rejoin(scratch, [0, 1]))
    trainer.service.close()
    return [(report.origin, report.step) for report in reports]


def test_a_second_loss_in_the_middle_of_it_costs_no_near_state(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = run_ranks(4, losing_twice, url, f"{url}-group", allow_dead=[0, 3])
    assert answers[1] == answers[2] == [("near", 6), ("near", 8)]
    assert not list((tmp_path / "run").glob("steps/*"))
