"""Trainings that publish: restarts, ways back, other numbers of ranks, failures.

Method: a Checkpointer with `publish=`, alone and on real ranks; a follower on its root has, after
each publication, the bits of the training's state at that step.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import InvalidArgument
from ckpt.service import publisher
from ckpt.service.publisher import Publication
from storage import TransientError
from tests.ranks import run_ranks


class Training:
    """A model whose state at each step is known, and a Checkpointer that publishes it."""

    def __init__(self, url: Any, *, sharded: bool = False, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(16, 6)
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        state = {"model": self.model, "optimizer": self.optimizer}
        how = {"save": ckpt.EverySteps(2), "publish": ckpt.EverySteps(1), **how}
        self.saver = ckpt.Checkpointer(state, url, only=True, **how)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            torch.manual_seed(step)
            self.model(torch.randn(4, 16)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.saver.step(step)

    def bits(self) -> dict[str, torch.Tensor]:
        whole = {
            name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
            for name, tensor in self.model.state_dict().items()
        }
        return {name: tensor.detach().bfloat16() for name, tensor in whole.items()}


def follow(url: Any) -> tuple[nn.Module, ckpt.Follower]:
    model = nn.Linear(16, 6).bfloat16()
    return model, ckpt.follow(model, url, line="published")


def take(follower: ckpt.Follower, model: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    update = follower.poll()
    assert update is not None
    follower.swap()
    return update.step, {name: one.clone() for name, one in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_training_publishes_next_to_its_saves(tmp_path: Any) -> None:
    training = Training(tmp_path)
    model, follower = follow(tmp_path)
    with follower, training.saver as saver:
        for step in (1, 2, 3):
            training.steps(step, step)
            saver.wait()
            assert take(follower, model)[0] == step
            assert same(dict(model.state_dict()), training.bits())
        assert follower.step == 3
        assert saver.near_failures == ()
        assert saver.last_near is None
    assert [one.step for one in ckpt.list_steps(tmp_path)] == [2]


def test_a_way_back_and_a_restart_are_followed(tmp_path: Any) -> None:
    first = Training(tmp_path)
    model, follower = follow(tmp_path)
    with follower:
        with first.saver as saver:
            first.steps(1, 5)
            saver.wait()
            assert same(take(follower, model)[1], first.bits())
            report = saver.restore(2)  # as after a spike of the loss
            assert report is not None and report.step == 2
            first.steps(3, 3)
            saver.wait()
            assert (follower.step, take(follower, model)[0]) == (5, 3)
            assert same(dict(model.state_dict()), first.bits())
        second = Training(tmp_path)
        with second.saver as saver:
            report = saver.restore()
            assert report is not None
            second.steps(report.step + 1, report.step + 1)
            saver.wait()
            step, bits = take(follower, model)
            assert step == report.step + 1
            assert same(bits, second.bits())


def test_a_save_does_not_wait_for_a_publication(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, finish = threading.Event(), Publication.finish

    def slow(self: Publication, *how: Any) -> Any:
        assert go_on.wait(60)
        return finish(self, *how)

    monkeypatch.setattr(Publication, "finish", slow)
    training = Training(tmp_path, publish={"every": ckpt.EverySteps(2)})
    with training.saver as saver:
        training.steps(1, 2)
        saver._saves.collect(wait=True)
        assert [one.step for one in ckpt.list_steps(tmp_path)] == [2]
        go_on.set()
        saver.wait()
        assert saver.near_failures == ()


def test_what_is_published_and_how_can_be_said(tmp_path: Any) -> None:
    extra = {"weights": torch.arange(6.0)}
    how = {"every": ckpt.EverySteps(2), "state": extra, "dtype": None}
    training = Training(tmp_path, publish=how)
    with training.saver:
        training.steps(1, 2)
    with ckpt.follow("weights", tmp_path, line="published") as follower:
        follower.poll()
        follower.swap()
        assert torch.equal(follower.tensors["weights"], extra["weights"])


@pytest.mark.parametrize(
    ("publish", "error"),
    [
        (ckpt.EverySeconds(5), TypeError),
        ({"state": 1}, TypeError),
        ({"every": ckpt.EverySteps(1), "colour": 1}, TypeError),
        ({"every": ckpt.EverySteps(1), "step": 1}, TypeError),
        ({"every": ckpt.EverySteps(1), "dtype": torch.int8}, InvalidArgument),
        ({"every": ckpt.EverySteps(1), "line": "x"}, TypeError),
        ({"every": ckpt.EverySteps(1), "anchor_every": 0}, ValueError),
        (True, TypeError),
    ],
)
def test_a_wrong_publish_is_refused_at_once(tmp_path: Any, publish: Any, error: Any) -> None:
    with pytest.raises(error, match=r"publish|dtype|anchor"):
        Training(tmp_path, publish=publish)


def test_a_failed_publication_is_logged_and_made_up_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    model, follower = follow(tmp_path)
    with follower, training.saver as saver:
        training.steps(1, 1)
        saver.wait()
        take(follower, model)

        def fail(*_: Any, **__: Any) -> Any:
            raise TransientError("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(publisher.Publication, "finish", fail)
            training.steps(2, 2)
            saver.wait()
        assert [one.step for one in saver.near_failures] == [2]
        assert "the publication of step 2 has failed: the store is away" in caplog.text
        training.steps(3, 3)
        saver.wait()
        assert take(follower, model)[0] == 3
        assert same(dict(model.state_dict()), training.bits())
    assert saver.failures == ()


def trains(url: str, steps: int) -> dict[str, torch.Tensor]:
    training = Training(url, sharded=True)
    with training.saver as saver:
        report = saver.restore()
        first = 1 if report is None else report.step + 1
        training.steps(first, first + steps - 1)
    return training.bits()


@pytest.mark.ranks
def test_another_number_of_ranks_continues_the_publications(tmp_path: Any) -> None:
    model, follower = follow(tmp_path)
    with follower:
        for size, steps, newest in ((2, 3, 3), (3, 2, 4), (1, 1, 5)):
            bits = run_ranks(size, trains, str(tmp_path), steps)
            assert take(follower, model)[0] == newest
            assert same(dict(model.state_dict()), bits[0])
