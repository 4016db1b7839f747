"""Near checkpoints with copies, of real processes: hosts are lost, and the newest state is not.

Method: gloo ranks whose hosts are folders train a model under a Checkpointer with copies at other
hosts, and kill themselves; folders of hosts are removed; fresh ranks, in another number and on
other hosts, restore. What comes back is compared with a training that was never interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import RankFailed
from ckpt.service.events import NearFailed, NearSaved
from ckpt.world.torch_world import TorchWorld
from tests.e2e.job import assert_is_step
from tests.near.test_near_processes import state_of, train, trained
from tests.near.test_near_training import flip_a_byte
from tests.near.training import advance
from tests.ranks import RanksFailed, run_ranks
from tests.results import Counted
from tests.service.rejoining import die_in_round

pytestmark = pytest.mark.ranks

# Rounds of a near save in their order.
PHASES = (
    "agree on begin",
    "near attempt",
    "agree on near write",
    "agree on near copies",
    "near files",
    "near record",
    "agree on near record",
)
COUNTING = ("near record", "agree on near record")  # in which a record may be there by then


class Job(NamedTuple):
    """One start of a job: `hosts[rank]` is the folder of a rank's host."""

    url: str
    hosts: Sequence[str]
    steps: int
    dies: bool = False
    replicas: int = 1
    parity: int = 0
    phase: str = ""
    victims: Sequence[int] = ()


class Answer(NamedTuple):
    """What a rank has restored, and which of its near saves were made and failed."""

    origin: str
    step: int
    nbytes_of_others: int
    saved: tuple[int, ...]
    failed: tuple[int, ...]


def job(how: Job) -> Answer:
    """Restore and check what came back, train more, and perhaps die right after."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = state_of(0)
    events: list[Any] = []
    near = ckpt.Near(
        how.hosts[rank],
        every=ckpt.EverySteps(2),
        replicas=how.replicas,
        parity=how.parity,
    )
    armed: list[bool] = []
    if rank in how.victims:
        die_in_round(TorchWorld, how.phase, armed)
    with ckpt.Checkpointer(
        state, how.url, save=ckpt.EverySteps(1000), near=near, observers=[events.append], only=True
    ) as service:
        report = service.restore()
        first = 1
        if report is not None:
            first = report.step + 1
            assert_is_step(state["own"], report.step, rank, size)
            model, _ = trained(report.step)
            for mine, theirs in zip(state["model"].parameters(), model.parameters(), strict=True):
                assert torch.equal(mine, theirs)
        for step in range(first, first + how.steps):
            if how.victims and step == first + how.steps - 1:
                service.wait()  # the near save of this step is the one that is cut off
                armed.append(True)
            train(state["model"], state["optim"], step)
            advance(state["own"], step, rank, size)
            service.step(step)
        if how.victims:
            with contextlib.suppress(RankFailed):
                service.wait()
        if how.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        service.wait()
        restored = (
            (report.origin, report.step, report.nbytes_of_other_hosts) if report else ("", 0, 0)
        )
        saved = tuple(e.report.step for e in events if isinstance(e, NearSaved))
        return Answer(*restored, saved, tuple(e.step for e in events if isinstance(e, NearFailed)))


def folders(tmp_path: Path, *numbers: int) -> list[str]:
    return [str(tmp_path / f"host{number}") for number in numbers]


def restored(answers: Sequence[Answer]) -> tuple[str, int]:
    ((origin, step),) = {(answer.origin, answer.step) for answer in answers}
    return origin, step


def test_parity_rebuilds_a_lost_host(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 0, 1, 2)
    how = {"replicas": 0, "parity": 2}
    run_ranks(4, job, Job(url, hosts, 7, dies=True, **how), allow_dead=range(4))
    shutil.rmtree(hosts[0])
    answers = run_ranks(3, job, Job(url, folders(tmp_path, 1, 2, 3), 4, **how))
    origin, step = restored(answers)
    assert origin == "near" and step in (4, 6)
    for answer in answers:
        assert answer.saved == (step + 2, step + 4) and not answer.failed
    shutil.rmtree(tmp_path / "host3")
    assert restored(run_ranks(2, job, Job(url, folders(tmp_path, 2, 1), 0))) == ("near", step + 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("phase", PHASES)
def test_a_host_that_dies_while_parity_is_made_is_rebuilt(tmp_path: Path, phase: str) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1, 2)
    how = {"replicas": 0, "parity": 2}
    dying = Job(url, hosts, 4, dies=True, phase=phase, victims=[1], **how)
    run_ranks(3, job, dying, allow_dead=range(3))
    shutil.rmtree(hosts[1])
    origin, step = restored(run_ranks(3, job, Job(url, hosts, 0, **how)))
    assert origin == "near" and step in ((2, 4) if phase in COUNTING else (2,))


def test_a_host_that_is_lost_costs_no_near_checkpoint(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 0, 1, 1)
    run_ranks(4, job, Job(url, hosts, 7, dies=True), allow_dead=range(4))
    shutil.rmtree(hosts[2])
    # On the host that is left and a new one; the save of step 6 may have been cut off.
    answers = run_ranks(3, job, Job(url, folders(tmp_path, 0, 2, 2), 4))
    origin, step = restored(answers)
    assert origin == "near" and step in (4, 6)
    assert answers[0].nbytes_of_others == 0 and answers[1].nbytes_of_others > 0
    for answer in answers:
        assert answer.saved == (step + 2, step + 4) and not answer.failed
    assert not list((tmp_path / "run").glob("steps/*"))
    # The new host has its copies by now: the old one can go as well.
    shutil.rmtree(hosts[0])
    assert restored(run_ranks(2, job, Job(url, folders(tmp_path, 2, 3), 0))) == ("near", step + 4)


def test_two_hosts_are_lost_with_two_replicas_and_a_copy_is_damaged(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1, 2)
    how = Job(url, hosts, 5, replicas=2)
    for answer in run_ranks(3, job, how):
        assert answer.saved == (2, 4) and not answer.failed
    # A bit flips in the copy that the restore prefers: that of the reading rank's own host.
    (newest,) = Path(hosts[1]).glob("*/steps/00000004*/rank00001*")
    flip_a_byte(newest)
    shutil.rmtree(hosts[0])
    assert restored(run_ranks(2, job, Job(url, hosts[1:], 0, replicas=0))) == ("near", 4)
    shutil.rmtree(hosts[2])
    # Of rank 1 only the damaged copy is left, and there is no older state any more.
    with pytest.raises(RanksFailed, match="does not match its checksum"):
        run_ranks(1, job, Job(url, hosts[1:2], 0, replicas=0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victims", [(0,), (0, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("phase", PHASES)
def test_whoever_dies_in_a_near_save_and_takes_its_host_along(
    tmp_path: Path, phase: str, victims: tuple[int, ...], counted: Counted
) -> None:
    """The coordinator alone, or all ranks of a host: in every round of a near save. Then nothing is
    left of the host, and a world of another size goes on.
    """
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 0, 1, 1)
    how = Job(url, hosts, 6, dies=True, phase=phase, victims=victims)
    run_ranks(4, job, how, allow_dead=range(4))
    lost, left = (hosts[0], 1) if 0 in victims else (hosts[2], 0)
    shutil.rmtree(lost)
    answers = run_ranks(2, job, Job(url, folders(tmp_path, left, 2), 2))
    origin, step = restored(answers)
    allowed = (4, 6) if phase in COUNTING else (4,)
    assert origin == "near" and step in allowed, (origin, step)
    assert all(answer.saved == (step + 2,) and not answer.failed for answer in answers)
    assert not list((tmp_path / "run").glob("steps/*"))
    counted(losses=1)
