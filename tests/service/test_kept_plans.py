"""Plans that are kept from save to save: every change of a state is seen, nothing is kept alive.

Method: a table of changes that a training may make to a state. After each of them the fingerprint
must differ, or what is saved next must be right all the same; after a step of
training, which changes values only, the plan must be used again. Saved tensors are compared with
the live ones each time.
"""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.commit.names import attempt_epoch
from ckpt.format.joint_manifest import JointTable
from ckpt.format.part import JointStructure
from ckpt.process import ROOTS_MAX, open_root
from ckpt.saving import plan as contents
from ckpt.saving import save, task
from ckpt.saving.plan import Source
from storage import open_store
from tests.e2e.job import Job, Sharded
from tests.service.staging import differing, saved_tensors, tensors_now

URL = "memory://kept-plans"
State = dict[str, Any]


def fresh() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {
        "model": model,
        "optim": optimizer,
        "scheduler": scheduler,
        "tensors": [torch.randn(3), torch.randn(2, 2)],
        "step": 0,
    }


def train(state: State) -> None:
    state["model"](torch.randn(8, 4)).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["scheduler"].step()
    state["tensors"][0].add_(1)
    state["step"] += 1


def replace_tensor(state: State) -> None:
    state["tensors"][0] = torch.randn(3)


def another_shape(state: State) -> None:
    state["tensors"][0] = torch.randn(5)


def one_more_tensor(state: State) -> None:
    state["more"] = torch.randn(2)


def renamed_tensor(state: State) -> None:
    state["named"] = state.pop("tensors")


def same_shape_in_place(state: State) -> None:
    state["tensors"][1].t_()


def resized_in_place(state: State) -> None:
    state["tensors"][0].resize_(2)


def other_memory(state: State) -> None:
    state["model"][0].weight.data = torch.randn(6, 4)


def other_dtype(state: State) -> None:
    state["tensors"][0].data = state["tensors"][0].data.view(torch.int32)


def other_buffer(state: State) -> None:
    state["model"][1].running_mean = torch.randn(6)


def other_module(state: State) -> None:
    state["model"][2] = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(state["model"].parameters(), lr=0.05)
    state["optim"] = optimizer
    state["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def loaded_optimizer(state: State) -> None:
    state["optim"].load_state_dict(state["optim"].state_dict())


def one_more_group(state: State) -> None:
    extra = nn.Linear(2, 2)
    state["model"].append(extra)
    state["optim"].add_param_group({"params": list(extra.parameters()), "lr": 0.5})


def tied_weights(state: State) -> None:
    state["model"].append(nn.Linear(6, 2))
    state["model"][3].weight = state["model"][2].weight
    state["model"].append(nn.Linear(2, 6))
    del state["model"][3:]


def tensor_learning_rate(state: State) -> None:
    state["optim"].param_groups[0]["lr"] = torch.tensor(0.25)


def other_values(state: State) -> None:
    state["notes"] = {"a": [1, 2]}


CHANGES: tuple[Callable[[State], None], ...] = (
    replace_tensor,
    another_shape,
    one_more_tensor,
    renamed_tensor,
    same_shape_in_place,
    resized_in_place,
    other_memory,
    other_dtype,
    other_buffer,
    other_module,
    loaded_optimizer,
    one_more_group,
    tied_weights,
    tensor_learning_rate,
    other_values,
)


@pytest.mark.parametrize("save", ["save", "async_save"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_state_is_saved_right(change: Callable[[State], None], save: str) -> None:
    url = f"{URL}-{change.__name__}-{save}"
    state = fresh()

    def saved_right(step: int) -> None:
        expected = tensors_now(state)
        pending = getattr(ckpt, save)(state, url, step=step)
        if save == "async_save":
            pending.result()
        assert differing(saved_tensors(url, step), expected) == []

    for step in range(2):
        train(state)
        saved_right(step)
    change(state)
    saved_right(2)
    if "tensors" in state and change is not another_shape:
        train(state)
    saved_right(3)


def test_steps_of_training_use_the_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor learning rate included, which every save looks at anew."""
    state = fresh()
    tensor_learning_rate(state)
    train(state)
    calls: list[Any] = []

    def counted(where: Any) -> None:
        structure_of = where.structure_of
        monkeypatch.setattr(
            where, "structure_of", lambda *given: calls.append(where) or structure_of(*given)
        )

    counted(contents)  # of the state
    counted(task)  # of this rank's part of the manifest
    for step in range(4):
        expected = tensors_now(state)
        ckpt.save(state, f"{URL}-again", step=step)
        assert differing(saved_tensors(f"{URL}-again", step), expected) == []
        with ckpt.open(f"{URL}-again", step) as checkpoint:
            assert checkpoint.values["step"] == state["step"]
        train(state)
    assert calls == [contents, task]


def test_a_process_alone_merges_again_only_what_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rules of chunks and their proof are kept while values change, and are anew with
    another type, a tensor more, and an alias more.
    """
    merged: list[int] = []

    def noted(structure: JointStructure) -> JointTable:
        merged.append(1)
        return JointTable(structure)

    monkeypatch.setattr("ckpt.saving.task.JointTable", noted)
    url = f"{URL}-alone"
    state: State = {"a": torch.randn(3), "b": torch.randn(4)}
    for step in range(9):
        if step == 2:
            state["b"] = torch.arange(4, dtype=torch.int32)  # as many bytes at the same place
        if step == 3:
            state["c"] = torch.randn(2)
        if step == 5:
            state["d"] = state["c"]
        if step == 7:
            with monkeypatch.context() as patch, pytest.raises(OSError, match="planted"):
                patch.setattr(save, "_create_manifest", _fail)
                ckpt.save(state, url, step=100)
        state["a"].add_(1)
        expected = tensors_now(state)
        ckpt.save(state, url, step=step)
        saved = saved_tensors(url, step)
        assert ("d" in saved) == (step >= 5)
        saved.pop("d", None)  # a name of "c", and no tensor of its own
        assert differing(saved, expected) == []
    # The failed save had the structure of the ones before it.
    assert len(merged) == 4


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("planted")


def test_a_state_that_is_gone_is_not_kept_alive() -> None:
    state = fresh()
    train(state)
    ckpt.async_save(state, f"{URL}-gone", step=0).result()
    plans = open_root(f"{URL}-gone").memory.plans
    assert not plans.is_empty
    watched = [weakref.ref(state["model"][0].weight), weakref.ref(state["optim"])]
    state.clear()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 2
    assert plans.is_empty


def test_tensors_that_are_gone_are_not_kept_alive() -> None:
    """Without a module: a plan goes with the first of its tensors."""
    state = {f"t{index}": torch.zeros(4) for index in range(3)}
    ckpt.save(state, f"{URL}-bare", step=0)
    plans = open_root(f"{URL}-bare").memory.plans
    assert not plans.is_empty
    del state["t1"]
    assert plans.is_empty


def test_the_same_tensors_cut_in_another_way_are_planned_anew() -> None:
    """Names, shapes and dtypes are as before; who has which part is not."""
    store = open_store(f"{URL}-cuts")
    job = Job(2, lambda rank: store, memories={})
    weight = torch.arange(48.0).reshape(6, 8)
    for step, dim in enumerate((0, 1, 0)):
        value = weight + step
        job.save(lambda rank, dim=dim, value=value: {"w": Sharded(value, rank, 2, dim=dim)}, step)
    for step in range(3):
        target = torch.zeros(6, 8)
        job = Job(1, lambda rank: store)
        job.load(lambda rank, target=target: {"w": {"tensor": target}}, step)
        assert torch.equal(target, weight + step)


def test_the_same_bytes_are_written_with_a_kept_plan() -> None:
    """A structure that is worked out anew gives the same files, headers of attempts aside."""
    state = fresh()
    train(state)
    reports = [ckpt.save(state, f"{URL}-bytes", step=step) for step in (0, 1)]
    assert reports[0].nbytes == reports[1].nbytes
    for step in (0, 1):
        assert ckpt.verify(f"{URL}-bytes", step).ok


def _opened_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("call", ["save", "load"])
def test_roots_that_are_used_no_more_take_little(tmp_path: Path, call: str) -> None:
    """As people save who come from DCP: each checkpoint has a url of its own."""
    state = {f"t{i}": torch.ones(3) for i in range(50)}
    ckpt.save(state, tmp_path / "first", step=0)
    files = _opened_files()
    for step in range(3 * ROOTS_MAX):
        root = tmp_path / str(step)
        if call == "save":
            ckpt.save(state, root, step=step)
        else:
            shutil.copytree(tmp_path / "first", root)
            ckpt.load(state, root)
    assert _opened_files() <= files + 2 * ROOTS_MAX
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is Source]
    assert len(kept) <= ROOTS_MAX * len(state)
    # The first ones are known still: nobody claims anew, and the next save is of the same job.
    ckpt.save(state, tmp_path / "first", step=1)
    epochs = [attempt_epoch(entry.attempt) for entry in ckpt.list_steps(tmp_path / "first")]
    assert epochs == [1, 1]
