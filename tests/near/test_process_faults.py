"""Near tiers of real processes under faults that kill nobody: full, silent, stopped, old, shared.

Method: gloo ranks whose hosts are folders, one of them a tmpfs that is mounted for it, train under
a Checkpointer with copies at other hosts. A host is full or answers nothing, a process is stopped
by SIGSTOP, old files come back, two jobs share hosts. Training goes on and says so; what comes back
is that of its step, on other numbers of ranks.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import ckpt
from ckpt.errors import Fenced, RankFailed
from ckpt.near import peers
from ckpt.service.events import NearFailed, NearSaved
from ckpt.world.torch_world import TorchWorld
from storage.peers.server import PeerServer
from storage.peers.store import PeerStore
from tests.e2e.job import assert_is_step
from tests.near.test_near_processes import state_of, train
from tests.near.test_replica_processes import COUNTING, PHASES, Answer, Job, folders, job, restored
from tests.near.training import advance
from tests.ranks import run_ranks, stop_here
from tests.results import Counted

pytestmark = pytest.mark.ranks

WAIT_SECONDS = 40.0
ROOM = 64 << 20


class Outcome(NamedTuple):
    """What a rank was told: the steps of near saves that were made, and those that failed."""

    saved: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]


class Trainer:
    """A training with near saves at even steps and a copy of each at another host."""

    def __init__(self, url: str, hosts: Sequence[str]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.state = state_of(0)
        self.events: list[Any] = []
        near = ckpt.Near(hosts[self.rank], every=ckpt.EverySteps(2), replicas=1)
        self.service = ckpt.Checkpointer(
            self.state,
            url,
            save=ckpt.EverySteps(1000),
            near=near,
            observers=[self.events.append],
            only=True,
        )
        report = self.service.restore()
        self.step = 0 if report is None else report.step
        if report is not None:
            assert_is_step(self.state["own"], report.step, self.rank, self.size)

    def train(self, last: int) -> None:
        while self.step < last:
            self.step += 1
            train(self.state["model"], self.state["optim"], self.step)
            advance(self.state["own"], self.step, self.rank, self.size)
            self.service.step(self.step)

    def outcome(self) -> Outcome:
        failed = [(e.step, str(e.error)) for e in self.events if isinstance(e, NearFailed)]
        saved = [e.report.step for e in self.events if isinstance(e, NearSaved)]
        return Outcome(tuple(saved), tuple(failed))


def in_trouble(
    url: str, hosts: Sequence[str], begin: Callable[[int], None], end: Callable[[int], None]
) -> Outcome:
    """Steps 3 to 6 with trouble, which every rank begins and ends with its rank; 7 and 8 after."""
    trainer = Trainer(url, hosts)
    trainer.train(2)
    trainer.service.wait()
    dist.barrier()
    begin(trainer.rank)
    dist.barrier()
    trainer.train(6)
    trainer.service.wait()
    dist.barrier()
    end(trainer.rank)
    dist.barrier()
    trainer.train(8)
    trainer.service.wait()
    trainer.service.close()
    return trainer.outcome()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


# --- a full tmpfs -----------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of `ROOM` bytes."""
    folder = tmp_path / "host1"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def filled(url: str, hosts: Sequence[str]) -> Outcome:
    """Something else on host 1 takes all space there, again and again."""
    ballast, is_over, is_full = Path(hosts[1]) / "ballast", threading.Event(), threading.Event()

    def take() -> None:
        with ballast.open("wb", buffering=0) as file:
            while not is_over.is_set():
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    is_full.set()
        ballast.unlink()

    pool = ThreadPoolExecutor(1)

    def fill(rank: int) -> None:
        if rank == 1:
            pool.submit(take)
            assert is_full.wait(WAIT_SECONDS)

    def free(rank: int) -> None:
        is_over.set()
        pool.shutdown(wait=True)

    return in_trouble(url, hosts, fill, free)


def test_while_a_tmpfs_is_full_training_goes_on_and_says_so(tmp_path: Path, tmpfs: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    for outcome in run_ranks(2, filled, url, hosts):
        assert outcome.saved == (2, 8)
        assert [step for step, _ in outcome.failed] == [4, 6]
        assert all("No space left" in text and hosts[1] in text for _, text in outcome.failed)
    shutil.rmtree(hosts[0])
    answers = run_ranks(3, job, Job(url, folders(tmp_path, 2, 1, 1), 0))
    assert restored(answers) == ("near", 8)


# --- a host that is cut off, or slow ----------------------------------------------------------


def cut_off(url: str, hosts: Sequence[str]) -> Outcome:
    """The server of host 1 takes connections, and answers nothing."""
    peers.PEER_SECONDS = 1.0
    peers.PAUSES_SECONDS = (0.0, 0.0)
    PeerStore.__init__.__kwdefaults__["seconds"] = 0.3
    is_cut, known = [False], PeerServer.is_known

    def silent(server: PeerServer, authorization: str) -> bool:
        until(lambda: not is_cut[0])
        return known(server, authorization)

    PeerServer.is_known = silent  # type: ignore[method-assign]

    def cut(rank: int) -> None:
        is_cut[0] = rank == 1

    return in_trouble(url, hosts, cut, lambda rank: is_cut.__setitem__(0, False))


def test_a_host_that_is_cut_off_is_named_and_takes_copies_once_it_is_back(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    for outcome in run_ranks(2, cut_off, url, hosts):
        assert outcome.saved == (2, 8)
        assert [step for step, _ in outcome.failed] == [4, 6]
        assert all("peer://127.0.0.1:" in text for _, text in outcome.failed)
        assert any("timed out" in text for _, text in outcome.failed)
    shutil.rmtree(hosts[0])
    assert restored(run_ranks(1, job, Job(url, hosts[1:], 0))) == ("near", 8)


def stopped(url: str, hosts: Sequence[str], pids: str) -> Outcome:
    """The process of rank 1 stands still while rank 0 begins a near save and trains on."""
    trainer = Trainer(url, hosts)
    trainer.train(2)
    trainer.service.wait()
    Path(f"{pids}{trainer.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if trainer.rank == 0:
        other = int(Path(f"{pids}1").read_text())
        os.kill(other, signal.SIGSTOP)
        try:
            trainer.train(5)
            assert trainer.outcome() == Outcome((2,), ())
        finally:
            os.kill(other, signal.SIGCONT)
    trainer.train(5)
    trainer.service.wait()
    assert trainer.outcome() == Outcome((2, 4), ())
    trainer.train(6)
    trainer.service.wait()
    trainer.service.close()
    return trainer.outcome()


def test_a_slow_host_holds_up_a_near_save_and_no_step(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    outcomes = run_ranks(2, stopped, url, hosts, str(tmp_path / "pid"))
    assert outcomes == [Outcome((2, 4, 6), ())] * 2
    shutil.rmtree(hosts[1])
    assert restored(run_ranks(3, job, Job(url, hosts[:1] * 3, 0, replicas=0))) == ("near", 6)


# --- old files, zombies, two jobs -------------------------------------------------------------


def test_a_host_that_comes_back_with_old_files_takes_part_again(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    run_ranks(2, job, Job(url, hosts, 4))
    shutil.copytree(hosts[1], tmp_path / "old")
    assert restored(run_ranks(2, job, Job(url, hosts, 4))) == ("near", 4)
    shutil.rmtree(hosts[1])
    shutil.copytree(tmp_path / "old", hosts[1])
    answers = run_ranks(3, job, Job(url, folders(tmp_path, 0, 1, 1), 2))
    assert restored(answers) == ("near", 8) and {one.saved for one in answers} == {(10,)}
    shutil.rmtree(hosts[0])
    assert restored(run_ranks(2, job, Job(url, hosts[1:] * 2, 0, replicas=0))) == ("near", 10)


def zombie(url: str, hosts: Sequence[str], pids: str, phase: str) -> Outcome:
    """Rank 0 stops itself in a round of the near save of step 6, or all are stopped before it."""
    trainer = Trainer(url, hosts)
    trainer.train(4)
    trainer.service.wait()
    Path(f"{pids}{trainer.rank}").write_text(str(os.getpid()))
    if trainer.rank == 0:
        enter, armed = TorchWorld._in_round, [True]

        def stopping(*how: Any) -> Any:
            if armed and how[-1] == phase:
                armed.clear()
                stop_here()
            return enter(*how)

        TorchWorld._in_round = stopping  # type: ignore[method-assign]
    try:
        trainer.train(9)
        trainer.service.wait()
    except (Fenced, RankFailed) as error:
        trainer.events.append(NearFailed(trainer.step, error))
    trainer.service.__exit__(Fenced, Fenced("superseded"), None)
    return trainer.outcome()


def has_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("phase", PHASES)
def test_a_zombie_is_never_acknowledged_and_never_used(
    tmp_path: Path, phase: str, counted: Counted
) -> None:
    url, hosts, pids = str(tmp_path / "run"), folders(tmp_path, 0, 1), str(tmp_path / "pid")
    files = [Path(f"{pids}{rank}") for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(run_ranks, 2, zombie, url, hosts, pids, phase)
        until(lambda: old.done() or all(file.exists() and file.read_text() for file in files))
        first, second = (int(file.read_text()) for file in files)
        try:
            until(lambda: old.done() or has_stopped(first))
            os.kill(second, signal.SIGSTOP)
            answers = run_ranks(3, job, Job(url, folders(tmp_path, 0, 1, 1), 2))
        finally:
            for pid in (first, second):
                os.kill(pid, signal.SIGCONT)
        outcomes: list[Outcome] = old.result()
    origin, step = restored(answers)
    assert origin == "near" and step in ((4, 6) if phase in COUNTING else (4,))
    assert {one.saved for one in answers} == {(step + 2,)}
    for outcome in outcomes:
        # That of step 6 counts where the new job goes on from it.
        assert outcome.saved in ((2, 4), (2, 4, 6)[: step // 2]), outcome
        assert outcome.failed, outcome
    assert any("newer session" in text for one in outcomes for _, text in one.failed), outcomes
    # What it has written after all is not used, and what the new job has is whole on both hosts.
    shutil.rmtree(hosts[0])
    assert restored(run_ranks(2, job, Job(url, hosts[1:] * 2, 0, replicas=0))) == (
        "near",
        step + 2,
    )
    counted(zombies=1)


def test_two_jobs_train_on_the_same_hosts(tmp_path: Path) -> None:
    urls, hosts = [str(tmp_path / "one"), str(tmp_path / "two")], folders(tmp_path, 0, 1)
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(run_ranks, 2, job, Job(url, hosts, steps))
            for url, steps in zip(urls, (6, 8), strict=True)
        ]
        for one, saved in zip(both, ((2, 4, 6), (2, 4, 6, 8)), strict=True):
            answers: list[Answer] = one.result()
            assert [(answer.saved, answer.failed) for answer in answers] == [(saved, ())] * 2
    shutil.rmtree(hosts[1])
    for url, step in zip(urls, (6, 8), strict=True):
        answers = run_ranks(3, job, Job(url, hosts[:1] * 3, 0, replicas=0))
        assert restored(answers) == ("near", step)
