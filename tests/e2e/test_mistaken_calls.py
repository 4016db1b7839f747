"""Calls that are wrong in a way that is easy to make end in one clear sentence, and write nothing.

Method: each call is made on a root that is there or on none, and the directory is looked at after.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from tests.versions import ALONE

Call = Callable[[Any, str], Any]

SWAPPED: tuple[Call, ...] = (
    lambda state, url: ckpt.save(url, state, step=1),
    lambda state, url: ckpt.async_save(Path(url), state, step=1),
    lambda state, url: ckpt.load(url, state),
    lambda state, url: ckpt.Checkpointer(url, state),
    lambda state, url: ckpt.follow(url, state),
)


def entries(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("call", SWAPPED)
def test_a_url_in_the_place_of_the_state(call: Call, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"\(.*\): got .* for the state .*the other way round"):
        call({"x": 1}, str(tmp_path / "run"))
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "said"), [({"save": 10}, "EverySteps"), ({"keep": 3}, "KeepLatest")]
)
def test_a_number_in_the_place_of_a_policy(wrong: Any, said: str, tmp_path: Path) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(TypeError, match=rf"{name}={value}; expected a .*{said}\("):
        ckpt.Checkpointer({"x": 1}, str(tmp_path / "run"), **wrong)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("step", ["1", 1.0, True])
def test_a_step_that_is_no_int(step: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ckpt.save({"x": 1}, url, step=1)
    with pytest.raises(ValueError, match=f"step={step!r}: expected an int"):
        ckpt.load({"x": 1}, url, step=step)
    with pytest.raises(ValueError, match=f"step={step!r}: expected an int"):
        ckpt.open(url, step)


def test_a_directory_of_dcp_loads_and_is_never_saved_into(tmp_path: Path) -> None:
    url = str(tmp_path / "dcp")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weight": torch.ones(2)}, checkpoint_id=url, **ALONE)
    before = entries(tmp_path)
    state = {"weight": torch.zeros(2)}
    ckpt.load(state, url)
    assert torch.equal(state["weight"], torch.ones(2))
    with pytest.raises(ckpt.NoCheckpoint, match="`ckpt import`"):
        ckpt.list_steps(url)
    with pytest.raises(ckpt.errors.StoreRefused, match="`ckpt import`"):
        ckpt.save({"weight": torch.zeros(2)}, url, step=1)
    assert entries(tmp_path) == before
