"""`for step in checkpointer.steps(n)`: restores, counts, saves what is due and the last step.

Method: trainings of one process over stores in memory, and of ranks that are threads.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import InvalidArgument
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.preemption import Preempted


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def saved(url: str) -> list[int]:
    return [one.step for one in ckpt.list_steps(url)]


def train(url: str, last: int, *, until: int = sys.maxsize, **how: Any) -> tuple[list[int], float]:
    """The steps that were made, and what the state is then: the number of the newest step."""
    state, made = {"x": torch.zeros(())}, []
    with Checkpointer(state, url, **{"save": ckpt.EverySteps(4), "only": True, **how}) as saver:
        for step in saver.steps(last):
            if step == until:
                break
            state["x"] += 1
            made.append(step)
    return made, state["x"].item()


def test_a_loop_goes_on_where_the_one_before_has_ended(url: str) -> None:
    assert train(url, 6) == ([1, 2, 3, 4, 5, 6], 6.0)
    assert saved(url) == [4, 6]
    assert train(url, 6) == ([], 6.0)
    assert train(url, 5) == ([], 6.0)
    assert train(url, 13, until=10) == ([7, 8, 9], 9.0)  # step 9 was done, and nothing saves it
    assert saved(url) == [4, 6, 8]
    assert train(url, 10) == ([9, 10], 10.0)
    assert saved(url) == [4, 6, 8, 10]


def test_a_loop_that_is_left_saves_what_is_done_at_exit(url: str) -> None:
    assert train(url, 9, until=7, only=False) == ([1, 2, 3, 4, 5, 6], 6.0)
    assert saved(url) == [4, 6]


def test_a_loop_left_after_its_work_is_warned_of(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the loop knows whether the step is done; a resume makes it again."""
    state = {"x": torch.zeros(())}
    with Checkpointer(state, url, save=ckpt.EverySteps(4)) as saver:
        for step in saver.steps(9):
            state["x"] += 1
            if step == 7:
                break
    (line,) = [one for one in caplog.messages if "left step 7 without calling step(7)" in one]
    assert "is saved as step 6, and a resume" in line and saved(url) == [4, 6]


def test_a_loop_left_with_nothing_to_save_is_silent(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(url, 9, until=7, save=ckpt.EverySteps(3), only=False)
    with Checkpointer({"x": torch.zeros(())}, url, save=ckpt.EverySteps(4)) as saver:
        for step in saver.steps(9):
            saver.step(step)
            if step == 8:
                break
    assert not [one for one in caplog.messages if "the loop left" in one]


def test_it_counts_on_from_what_was_restored_by_hand(url: str) -> None:
    train(url, 8)
    state = {"x": torch.zeros(())}
    with Checkpointer(state, url, save=ckpt.EverySteps(4)) as saver:
        saver.restore(step=4)
        assert [step for step in saver.steps(6)] == [5, 6]
        assert [step for step in saver.steps(7)] == [7]  # and nothing is restored again
        assert state["x"] == 4


def test_the_loop_may_call_step_itself_with_a_metric(url: str) -> None:
    state = {"x": torch.zeros(())}
    best = ckpt.KeepBest(1, mode="max")
    with Checkpointer(state, url, save=ckpt.EverySteps(1), keep=best) as saver:
        for step in saver.steps(5):
            assert saver.step(step, metric=-abs(step - 3.0))
    assert 3 in saved(url)


@pytest.mark.parametrize("back", [2, 5, 6])
def test_a_loop_that_goes_back_goes_on_from_there(url: str, back: int) -> None:
    state, made = {"x": torch.zeros(())}, []
    with Checkpointer(state, url, save=ckpt.EverySteps(1)) as saver:
        for step in saver.steps(8):
            if step == 7 and 7 not in made:
                made.append(step)
                saver.wait()
                saver.restore(step=back)
                continue
            state["x"] += 1
            made.append(step)
    assert made == [*range(1, 8), *range(back + 1, 9)] and state["x"] == 8


def test_an_order_to_end_ends_the_loop_after_a_save(url: str) -> None:
    state = {"x": torch.zeros(())}
    with (
        pytest.raises(Preempted, match="after step 3; the newest checkpoint is of step 3"),
        Checkpointer(state, url, save=ckpt.Never() | ckpt.OnPreemption()) as saver,
    ):
        for step in saver.steps(9):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert saved(url) == [3]


@pytest.mark.parametrize("last", [-1, 2.5, "9", True])
def test_what_is_no_number_of_steps_is_refused(url: str, last: Any) -> None:
    with Checkpointer({"x": torch.zeros(())}, url) as saver, pytest.raises(InvalidArgument):
        next(saver.steps(last))
