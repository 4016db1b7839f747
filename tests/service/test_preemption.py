"""A job that gets a signal to end saves its last step and exits with 0, on whichever rank and when.

Method: plans for the time that is left are pure and tabled. Real processes train without end; at a
random moment a random part of the ranks gets SIGTERM, and after the grace time SIGKILL, as by a
scheduler. Each job continues from the checkpoint of the one before.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.service import preemption
from ckpt.service.policies import Never
from ckpt.service.preemption import LEAVING_SECONDS, SAFETY, Signals, plan_stop
from tests.conftest import Scale
from tests.ranks import RanksFailed, _fork_server, run_ranks
from tests.results import Counted
from tests.service.preempted import GRACE_SECONDS, SAVE_EVERY, train

MB = 1_000_000
LATE_SECONDS = 0.8 * GRACE_SECONDS  # by then a rank of two should have ended


# --- plans ----------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    known = {
        "left_seconds": 30.0,
        "persist_seconds": 2.0,
        "in_flight_seconds": None,
        "state_nbytes": 300 * MB,
        "model_nbytes": 100 * MB,
        "steps_unsaved": 7,
    }
    return {**known, **changes}


@pytest.mark.parametrize(
    ("given", "save", "wait_seconds"),
    [
        # Time enough for everything, with and without a save in flight before it.
        (facts(), "everything", 0.0),
        (facts(in_flight_seconds=1.0), "everything", 30.0 - LEAVING_SECONDS - 2.0 * SAFETY),
        # What is in flight, or done, has the last step.
        (facts(in_flight_seconds=1.0, steps_unsaved=0), "nothing", 30.0 - LEAVING_SECONDS),
        (facts(steps_unsaved=0), "nothing", 0.0),
        # Too short for both: the save in flight is the surest.
        (facts(in_flight_seconds=0.0, left_seconds=6.0), "nothing", 6.0 - LEAVING_SECONDS),
        (facts(in_flight_seconds=2.9, left_seconds=4.0), "everything", 0.5),
        # Too short for everything: the model first.
        (facts(left_seconds=3.4), "model first", 0.0),
        (facts(left_seconds=3.5), "everything", 0.0),
        (facts(persist_seconds=60.0), "model first", 0.0),
        # Nothing measured: 1 s and 50 MB/s, times the same safety.
        (facts(persist_seconds=None, left_seconds=11.1), "everything", 0.0),
        (facts(persist_seconds=None, left_seconds=10.9), "model first", 0.0),
        # A state that is only a model, or has none: there is no smaller part to begin with.
        (facts(persist_seconds=60.0, model_nbytes=300 * MB), "everything", 0.0),
        (facts(persist_seconds=60.0, model_nbytes=0), "everything", 0.0),
        (facts(left_seconds=0.2), "nothing", 0.0),
        (facts(left_seconds=-3.0, in_flight_seconds=1.0, steps_unsaved=0), "nothing", 0.0),
    ],
)
def test_time_that_is_left_is_planned(
    given: dict[str, Any], save: str, wait_seconds: float
) -> None:
    plan = plan_stop(**given)
    assert (plan.save, plan.wait_seconds) == (save, pytest.approx(wait_seconds)), plan.why


def test_a_plan_never_waits_longer_than_is_left() -> None:
    for left in (0.0, 0.6, 1.0, 3.0, 9.0):
        for persist in (None, 0.1, 1.0, 30.0):
            for age in (None, 0.0, 0.5, 40.0):
                for unsaved in (0, 3):
                    plan = plan_stop(
                        **facts(
                            left_seconds=left,
                            persist_seconds=persist,
                            in_flight_seconds=age,
                            steps_unsaved=unsaved,
                        )
                    )
                    assert 0.0 <= plan.wait_seconds <= left


# --- handlers -------------------------------------------------------------------------------------


@contextmanager
def handler(number: int, handle: Callable[[int, Any], object]) -> Iterator[None]:
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_previous_handlers_are_called_too_and_put_back() -> None:
    heard: list[int] = []

    def before(number: int, frame: object) -> None:
        heard.append(number)

    with handler(signal.SIGUSR1, before), handler(signal.SIGTERM, before):
        signals = Signals(ckpt.OnSignal() | ckpt.OnPreemption(grace_seconds=9.0))
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.take() == (signal.SIGUSR1,) and signals.take() == ()
        assert not signals.must_end
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.take() == (signal.SIGTERM,) and 8.0 < signals.left_seconds() <= 9.0
        assert heard == [signal.SIGUSR1, signal.SIGTERM]
        signals.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_came_later_is_left_alone() -> None:
    with handler(signal.SIGUSR1, signal.SIG_IGN):
        signals = Signals(ckpt.OnSignal())
        signals.install()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signals.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_sigusr1_saves_now_and_the_training_goes_on() -> None:
    state = {"model": nn.Linear(2, 2)}
    url = "memory://sigusr1"
    with ckpt.Checkpointer(state, url, save=ckpt.OnSignal(), only=True) as checkpointer:
        for step in range(1, 6):
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.step(step) == (step == 3)
    assert [info.step for info in ckpt.list_steps(url)] == [3]


def test_a_policy_without_signals_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ckpt.Checkpointer({"a": torch.ones(1)}, "memory://no-signals", save=Never()):
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_alone_saves_the_last_step_and_leaves_by_status_0() -> None:
    state = {"model": nn.Linear(2, 2), "step": 0}
    url = "memory://sigterm-alone"
    with (
        pytest.raises(ckpt.Preempted) as caught,
        ckpt.Checkpointer(state, url, save=ckpt.OnPreemption(60.0)) as checkpointer,
    ):
        for step in range(1, 100):
            state["step"] = step
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step(step)
    assert (caught.value.step, caught.value.saved_step, caught.value.code) == (7, 7, 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with ckpt.open(url) as saved:
        assert saved.values["step"] == 7


def _over_each_other(order: tuple[int, ...]) -> tuple[list[bool], Any]:
    """Three Checkpointers that end in this order, and a signal after each end: whether it came to
    the one that was there before them all, and the handler that is left.
    """
    came: list[int] = []
    first = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    heard = []
    try:
        all_three = []
        for index in range(3):
            url = f"memory://over-{index}"
            policy = ckpt.OnSignal()
            one = ckpt.Checkpointer({"a": torch.ones(1)}, url, save=policy)
            one.__enter__()
            all_three.append(one)
        for index in order:
            all_three[index].close()
            came.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            heard.append(came == [signal.SIGUSR1])
        return heard, signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, first)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_checkpointers_that_end_in_any_order_leave_the_handler_that_was_there(
    order: tuple[int, ...],
) -> None:
    assert _over_each_other(order) == ([True] * 3, True)


def test_a_process_is_not_deaf_to_an_order_to_end_after_checkpointers_that_overlapped() -> None:
    policy = ckpt.OnPreemption(60.0)
    for order in ((0, 1), (1, 0)):
        before = signal.getsignal(signal.SIGTERM)
        both = [
            ckpt.Checkpointer({"a": torch.ones(1)}, f"memory://deaf-{index}", save=policy)
            for index in range(2)
        ]
        for one in both:
            one.__enter__()
        for index in order:
            both[index].close()
        assert signal.getsignal(signal.SIGTERM) is before


def test_an_order_to_end_that_arrives_twice_is_one() -> None:
    """A scheduler signals all processes, and a launcher passes on what it gets."""
    signals = Signals(ckpt.OnPreemption(5.0), clock=lambda: 100.0)
    with handler(signal.SIGTERM, lambda number, frame: None):
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.take() == (signal.SIGTERM,) and signals.left_seconds() == 5.0
        signals.restore()


def test_the_model_comes_first_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything would take longer than is left, by the assumed time; the latest checkpoint stays
    one that has everything.
    """
    monkeypatch.setattr(preemption, "ASSUMED_SECONDS", 60.0)
    model = nn.Linear(8, 8)
    state = {"net": model, "rest": torch.ones(1000)}
    url = "memory://model-first"
    with (
        pytest.raises(ckpt.Preempted),
        ckpt.Checkpointer(state, url, save=ckpt.OnPreemption(60.0)) as checkpointer,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step(1)  # nothing was measured: 60 s and half of it more are too long for 60 s
        checkpointer.step(2)
    with ckpt.open(f"{url}/model-first") as first, ckpt.open(url) as whole:
        assert set(first.keys()) == {"net.weight", "net.bias"}
        assert torch.equal(first["net.weight"], model.weight.detach())
        assert "rest" in whole and first.step == whole.step


def _second_signal() -> None:
    preemption.SAME_ORDER_SECONDS = 0.0
    with ckpt.Checkpointer({"a": torch.ones(1)}, "memory://second", save=ckpt.OnPreemption(60.0)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@pytest.mark.ranks
def test_a_second_signal_ends_the_process_at_once() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, _second_signal, group=False, timeout_seconds=30)
    assert failed.value.silent == (0,)


def _child_of_a_checkpointed_process() -> int:
    with ckpt.Checkpointer({"a": torch.ones(1)}, "memory://fork", save=ckpt.OnPreemption(60.0)):
        up, tell = os.pipe()
        child = os.fork()
        if not child:
            os.write(tell, b"x")  # Python drops what arrives before a child is set up
            until = time.monotonic() + 60
            while time.monotonic() < until:
                time.sleep(0.01)  # no longer: what arrives just before a sleep is handled after it
            os._exit(0)
        os.read(up, 1)
        os.kill(child, signal.SIGTERM)
        return os.waitpid(child, 0)[1]


@pytest.mark.ranks
def test_a_forked_worker_still_ends_by_sigterm() -> None:
    """As data loaders end their workers; the handler is inherited by a fork."""
    (status,) = run_ranks(1, _child_of_a_checkpointed_process, group=False, timeout_seconds=30)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


# --- whole jobs -----------------------------------------------------------------------------------


def _rank(url: str, meeting_point: str, rank: int, size: int, progress: Connection) -> None:
    train(url, meeting_point, rank, size, progress.send)


class Job:
    """Processes that train until a signal ends them. Their exits are real ones."""

    def __init__(self, root: Path, size: int, meeting_point: Path) -> None:
        context = _fork_server()
        self.size = size
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (str(root), str(meeting_point), rank, size, theirs)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, timeout_seconds: float = 60.0) -> list[str]:
        """The next word of each rank."""
        words = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(timeout_seconds), f"rank {rank} says nothing"
            words.append(pipe.recv())
        return words

    def end_by_grace(self, ranks: list[int]) -> list[int | None]:
        """SIGTERM to these, SIGKILL to all that are there after the grace time; exit codes."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR2)
                process.join(0.5)
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]


@pytest.mark.ranks
def test_sigterm_at_any_time_ends_a_job_cleanly_with_its_last_step_saved(
    tmp_path: Path, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    """A disk that stalls for seconds may cost a job its last step; then it has the one before."""
    root = tmp_path / "root"
    count, whole = scale.count(4, 100), 0
    for number in range(count):
        size = rng.choice([1, 2, 3])
        ranks = sorted(rng.sample(range(size), rng.randint(1, size)))
        job = Job(root, size, tmp_path / f"meet-{number}")
        assert job.hear() == ["ready"] * size
        time.sleep(rng.uniform(0.0, 0.6))  # the random moment
        codes = job.end_by_grace(ranks)
        assert codes == [0] * size, (number, size, ranks, codes)
        words = job.hear()
        assert len(set(words)) == 1, words
        step, saved_step = map(int, words[0].split())
        whole += step == saved_step
        # A save that was in flight at the end of the grace time may still have been committed.
        assert step >= ckpt.list_steps(str(root))[-1].step >= saved_step >= step - 2 * SAVE_EVERY
        assert ckpt.verify(str(root)).ok
    counted(jobs_ended_with_0=count, with_the_very_last_step_saved=whole)
    print(dict(counted))
    assert whole >= 0.9 * count - 1


@pytest.mark.ranks
def test_an_interpreter_that_is_preempted_exits_with_0(tmp_path: Path) -> None:
    """From the command line on, without any help of the test's process pool."""
    command = [sys.executable, "-m", "tests.service.preempted"]
    arguments = [str(tmp_path / "root"), str(tmp_path / "meet")]
    processes = [
        subprocess.Popen([*command, *arguments, str(rank), "2"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        processes[1].send_signal(signal.SIGTERM)
        try:
            processes[1].wait(LATE_SECONDS)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGUSR2)  # it writes what its threads are doing
        printed = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1] and len(set(printed[0].split())) == 1


def _forgets_to_close(url: str, meeting_point: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=size)
    state = {"x": torch.ones(3)}
    checkpointer = ckpt.Checkpointer(state, url, save=ckpt.EverySteps(2) | ckpt.OnPreemption())
    for step in range(1, 6):
        checkpointer.step(step)


@pytest.mark.ranks
def test_a_program_that_forgets_to_close_ends_and_its_saves_are_made(tmp_path: Path) -> None:
    context = _fork_server()
    arguments = (str(tmp_path / "root"), (tmp_path / "meet").as_uri())
    ranks = [
        context.Process(target=_forgets_to_close, args=(*arguments, rank, 2)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [info.step for info in ckpt.list_steps(str(tmp_path / "root"))] == [2, 4]
