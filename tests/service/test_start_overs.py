"""A training that starts over, or ends unsaved, is noticed: one warning that says what to do.

Method: the everyday slips, as small programs; what is logged is read, and counted.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.service.policies import with_last_saves
from storage.memory import MemoryStore


class Log:
    """The warnings of one block."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.WARNING, "ckpt")

    def of(self, text: str) -> list[str]:
        return [one.getMessage() for one in self._caplog.records if text in one.getMessage()]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


class HeldStore(MemoryStore):
    """Writes nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def put_if_absent(self, key: str, data: Any) -> Any:
        assert self.may_write.wait(60)
        return super().put_if_absent(key, data)


def saver_of(url: str | MemoryStore, state: Any = None, **options: Any) -> ckpt.Checkpointer:
    state = {"weight": torch.zeros(4)} if state is None else state
    return ckpt.Checkpointer(state, url, **{"save": ckpt.EverySteps(1), **options})


def trained(url: str, steps: range) -> None:
    with saver_of(url) as saver:
        for step in steps:
            saver.step(step)
    ckpt.forget(url)


def test_loop_that_begins_before_the_restored_step(url: str, log: Log) -> None:
    trained(url, range(1, 21))
    with saver_of(url) as saver:
        report = saver.restore()
        assert report is not None and report.step == 20
        for step in range(1, 4):
            saver.step(step)
    (line,) = log.of("restore() returned step 20, and the loop is at step 1")
    assert "Begin at restore().step + 1" in line
    assert len(log.of("is saved after step 20")) == 1


def test_loop_that_continues_is_not_noticed(url: str, log: Log) -> None:
    trained(url, range(1, 4))
    with saver_of(url, {"weight": torch.zeros(4), "other": {"count": 1}}) as saver:
        pass
    state = {"weight": torch.zeros(4)}
    with saver_of(url, state) as saver:
        report = saver.restore()
        assert report is not None
        for step in range(report.step + 1, 7):
            saver.step(step)
    ckpt.forget(url)
    with saver_of(url, state) as saver:
        saver.restore(step=2)
        saver.step(3)
    assert not log.of("")


def test_stale_counter_in_the_state(url: str, log: Log) -> None:
    state = {"weight": torch.zeros(4), "run": {"step": 0}}
    with saver_of(url, state, save=ckpt.EverySteps(2)) as saver:
        for step in range(1, 7):
            saver.step(step)
    (line,) = log.of("as it had at the beginning")
    assert "['run']['step'] = 0" in line and "saved as step 2" in line


def test_counter_that_is_set_is_not_noticed(url: str, log: Log) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(4), "step": 0, "epochs": 1}
    with saver_of(url, state, save=ckpt.EverySteps(2)) as saver:
        for step in range(6):
            state["step"] = step
            saver.step(step)
    ckpt.forget(url)
    state["step"] = 0
    with saver_of(url, state, save=ckpt.EverySteps(2)) as saver:
        saver.restore()
        for step in range(state["step"] + 1, 9):
            state["step"] = step
            saver.step(step)
    assert not log.of("")


@pytest.mark.parametrize("calls", [3, 300])
def test_step_that_never_advances(calls: int, url: str, log: Log) -> None:
    with saver_of(url, save=ckpt.EverySteps(2)) as saver:
        for _ in range(calls):
            saver.step(0)
    (line,) = log.of("never with another step")
    assert f"step(0) was called {min(calls, 100)} times" in line


def test_step_below_the_newest_of_its_line(url: str, log: Log) -> None:
    for step in (5, 6, 3, 2):
        ckpt.save({"weight": torch.zeros(4)}, url, step=step)
    (line,) = log.of("is saved after")
    assert "step 3 is saved after step 6" in line and "restore(step=...)" in line


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ckpt.EverySteps(10), ckpt.AtExit()),
        (ckpt.KeepLatest(2), ckpt.KeepEvery(10)),
        (ckpt.EverySteps(10) | ckpt.AtExit(), ckpt.OnSignal()),
    ],
)
def test_or_in_the_place_of_a_bar_is_an_error(first: Any, second: Any) -> None:
    with pytest.raises(TypeError, match=r"write \| and &"):
        _ = first or second
    with pytest.raises(TypeError, match=r"write \| and &"):
        _ = first and second


def test_last_saves_stay_beside_a_policy() -> None:
    every = ckpt.EverySteps(100)
    assert with_last_saves(every) == (every | ckpt.OnSignal() | ckpt.OnPreemption() | ckpt.AtExit())
    own = every | ckpt.OnPreemption(grace_seconds=9) | ckpt.OnSignal((10,)) | ckpt.AtExit()
    assert with_last_saves(own) == own
    by_hand = every | ckpt.OnSignal((15,))
    assert with_last_saves(by_hand) == by_hand | ckpt.AtExit()
    assert with_last_saves(ckpt.Never()) == ckpt.Never()


def test_end_of_a_training_is_saved(url: str, log: Log) -> None:
    with saver_of(url, save=ckpt.EverySteps(100)) as saver:
        for step in range(1, 26):
            saver.step(step)
    assert [one.step for one in ckpt.list_steps(url)] == [25]
    assert not log.of("")


def test_end_that_is_not_saved_is_named(url: str, log: Log) -> None:
    with saver_of(url, save=ckpt.EverySteps(10), only=True) as saver:
        for step in range(1, 26):
            saver.step(step)
    (line,) = log.of("the training is over after step 25, and the newest checkpoint is step 20")
    assert "5 calls of step" in line
    assert [one.step for one in ckpt.list_steps(url)] == [10, 20]


def test_end_by_an_error_names_what_is_not_saved(url: str, log: Log) -> None:
    with pytest.raises(ZeroDivisionError), saver_of(url, save=ckpt.EverySteps(10)) as saver:
        for step in range(1, 13):
            saver.step(step)
        _ = 1 / 0
    assert log.of("ends by ZeroDivisionError, and no last save is made after step 12")


def test_end_by_an_error_counts_the_save_in_flight(log: Log) -> None:
    """The save of step 4 is under way when the training fails, and commits while it ends."""
    store = HeldStore()
    with pytest.raises(ZeroDivisionError), saver_of(store, save=ckpt.EverySteps(2)) as saver:
        store.may_write.set()
        for step in range(1, 3):
            saver.step(step)
        saver.wait()
        store.may_write.clear()
        for step in range(3, 6):
            saver.step(step)
        left = saver._agreement.leave
        saver._agreement.leave = lambda: (store.may_write.set(), left())[1]  # type: ignore[func-returns-value]
        _ = 1 / 0
    (line,) = log.of("ends by ZeroDivisionError")
    assert "the newest checkpoint is step 4: what 1 calls of step did is lost" in line


def test_program_that_never_closes_names_what_is_not_saved(url: str) -> None:
    program = (
        "import sys, ckpt, torch\n"
        "saver = ckpt.Checkpointer({'w': torch.zeros(2)}, sys.argv[1], save=ckpt.EverySteps(10))\n"
        "for step in range(1, 13): saver.step(step)\n"
        "saver.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "the program ends without close()" in done.stderr
    assert "newest checkpoint is step 10" in done.stderr
