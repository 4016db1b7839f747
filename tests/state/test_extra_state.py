"""What an optimizer's class adds to its state dict is saved and comes back: a schedule, a counter.

Such optimizers resumed without it, and nothing said so: saves read the state where it lies, and
never called `state_dict()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState, Mismatch
from tests.ranks import run_ranks


class Counting(torch.optim.SGD):
    """As SPAM is written: what its steps depend on is in an attribute, and in its state dict."""

    def __init__(self, params: Any, extra: Any = None) -> None:
        super().__init__(params, lr=0.5, momentum=0.5)
        self.steps, self.extra, self.asked = 0, extra, 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {**super().state_dict(), "steps": self.steps, "extra": self.extra}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.steps, self.extra = state["steps"], state["extra"]


class Around(torch.optim.SGD):
    """A wrapper whose state dict has a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def training(kind: Any = Counting, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, kind(model.parameters(), **options)


def stepped(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_what_a_class_adds_comes_back_and_the_rest_stays_as_it_is(tmp_path: Path) -> None:
    model, optimizer = training(extra={"mean": torch.ones(3), "names": ["a"]})
    stepped(model, optimizer, 3)
    ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=3)

    other, target = training()
    group = target.param_groups[0]
    ckpt.load({"model": other, "optimizer": target}, str(tmp_path))
    assert target.steps == 3 and target.extra["names"] == ["a"]
    assert torch.equal(target.extra["mean"], torch.ones(3))
    # The class's own load made new groups and an empty state; a scheduler has the old ones.
    assert target.param_groups[0] is group
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        bufs = [opt.state[p]["momentum_buffer"] for opt, p in ((optimizer, mine), (target, theirs))]
        assert torch.equal(*bufs)


def test_a_save_and_a_load_ask_for_it_once(tmp_path: Path) -> None:
    """Classes build it of all their state, and some copy that."""
    model, optimizer = training()
    stepped(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    for step in (1, 2):
        ckpt.save(state, str(tmp_path), step=step)
        assert optimizer.asked == step
    ckpt.load(state, str(tmp_path))
    assert optimizer.asked == 3


def test_a_checkpoint_without_it_says_so(tmp_path: Path) -> None:
    model, plain = training(torch.optim.SGD, lr=0.5, momentum=0.5)
    ckpt.save({"model": model, "optimizer": plain}, str(tmp_path), step=1)
    other, target = training()
    state = {"model": other, "optimizer": target}
    with pytest.raises(Mismatch, match=r"optimizer\.extra_state"):
        ckpt.load(state, str(tmp_path))
    assert "optimizer.extra_state" in ckpt.load(state, str(tmp_path), strict=False).loaded.missing


def test_a_state_dict_of_another_form_is_refused(tmp_path: Path) -> None:
    model, optimizer = training(Around, lr=0.5)
    with pytest.raises(InvalidState, match=r"optimizer: Around.*has another form.*it wraps"):
        ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=1)


def sharded(root: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = Counting(model.parameters(), torch.tensor(2.0))
    stepped(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(state, root, step=2)
    optimizer.steps, optimizer.extra = 0, None
    ckpt.load(state, root)
    assert optimizer.steps == 2 and optimizer.extra.item() == 2.0
    optimizer.extra = [torch.ones(2)]
    with pytest.raises(InvalidState, match=r"optimizer\.extra_state\.extra\.0: .*are sharded"):
        ckpt.save(state, root, step=3)


@pytest.mark.ranks
def test_tensors_among_it_are_refused_beside_shards(tmp_path: Path) -> None:
    run_ranks(2, sharded, str(tmp_path), timeout_seconds=120)


class Hooked(torch.optim.SGD):
    """As heavyball is written: the class registers hooks, and leaves caches out of its groups."""

    def __init__(self, params: Any, schedule: bytes = b"\x80\x04N.", strips: bool = False) -> None:
        super().__init__(params, lr=0.5, momentum=0.5)
        self.steps, self.schedule, self.restored = 0, schedule, 0
        self.register_state_dict_post_hook(Hooked._strip if strips else Hooked._add)
        self.register_load_state_dict_pre_hook(Hooked._take)
        self.register_load_state_dict_post_hook(Hooked._count)

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["_cache"], group["seen"] = object(), self.steps
        super().step(closure)
        for state in self.state.values():
            state["views"] = {"initialized": {0, 2}}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("_cache", None)
        return state

    def _add(self, state: dict[str, Any]) -> None:
        state["hooked"] = {"steps": self.steps, "schedule": self.schedule}

    def _strip(self, state: dict[str, Any]) -> None:
        state["state"][0] = {}

    def _take(self, state: dict[str, Any]) -> None:
        self.steps, self.schedule = state["hooked"]["steps"], state["hooked"]["schedule"]

    @staticmethod
    def _count(optimizer: Any, *_: Any) -> None:
        optimizer.restored += 1


def test_hooks_of_a_class_are_asked_and_given_back(tmp_path: Path) -> None:
    model, optimizer = training(Hooked)
    stepped(model, optimizer, 3)
    ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=3)
    with ckpt.open(str(tmp_path)) as checkpoint:
        (group,) = checkpoint.values["optimizer.param_groups"]
        assert group["seen"] == 3 and "_cache" not in group

    other, target = training(Hooked)
    stepped(other, target, 1)
    cache = target.param_groups[0]["_cache"]
    ckpt.load({"model": other, "optimizer": target}, str(tmp_path))
    assert target.steps == 3 and target.restored == 1
    assert target.param_groups[0]["seen"] == 3 and target.param_groups[0]["_cache"] is cache
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert target.state[theirs]["views"] == {"initialized": {0, 2}}
        bufs = [opt.state[p]["momentum_buffer"] for opt, p in ((optimizer, mine), (target, theirs))]
        assert torch.equal(*bufs)


@pytest.mark.parametrize(
    "pickle",
    [b"\x80\x04K\x01.", b"I1\n.", b"\x80\x04K\x01.!", [b"\x80\x04K\x01."]],
    ids=["new", "old", "with more behind it", "in a list"],
)
def test_a_pickle_that_a_class_would_run_is_refused(tmp_path: Path, pickle: Any) -> None:
    model, optimizer = training(Hooked, schedule=pickle)
    stepped(model, optimizer, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=1)
    other, target = training(Hooked)
    with pytest.raises(
        Mismatch, match=r"extra_state\.hooked\.schedule.*: may be a pickle, .*would run"
    ):
        ckpt.load({"model": other, "optimizer": target}, str(tmp_path))
    assert target.schedule == b"\x80\x04N." and not target.state
    skipped = ckpt.load(
        {"model": other, "optimizer": target}, str(tmp_path), skip="optimizer.extra_state"
    )
    assert "optimizer.extra_state" not in skipped.loaded.values and target.restored == 0


def test_bytes_that_are_no_pickle_come_back(tmp_path: Path) -> None:
    model, optimizer = training(Hooked, schedule=b"raw and \x80\x04K\x01.")
    stepped(model, optimizer, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=1)
    other, target = training(Hooked, schedule=b"other")
    ckpt.load({"model": other, "optimizer": target}, str(tmp_path))
    assert target.schedule == optimizer.schedule


def test_hooks_that_change_state_are_refused(tmp_path: Path) -> None:
    model, optimizer = training(Hooked, strips=True)
    stepped(model, optimizer, 1)
    with pytest.raises(InvalidState, match=r"hooks of Hooked on state_dict change the state"):
        ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=1)


def test_a_hook_of_somebody_else_stays_refused(tmp_path: Path) -> None:
    model, optimizer = training(Hooked)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: None)
    with pytest.raises(InvalidState, match=r"the hook .*lambda.* cannot be honoured"):
        ckpt.save({"model": model, "optimizer": optimizer}, str(tmp_path), step=1)
