"""Code written for dcp.save and dcp.load uses our storage by one argument more.

Method: torch's own functions save and load through DcpWriter and DcpReader on real ranks; what they
saved is looked at with our tools, and what our tools saved is loaded by them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt
from ckpt.integrations.dcp import DcpReader, DcpWriter
from tests.convert.jobs import ENGINES, assert_same, fresh, full_of, optimizer_of, train
from tests.ranks import run_ranks

# Said by DCP of every save and load of a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = fresh()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return model, optimizer


def save_by_dcp(root: str, step: int = 1, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    model, optimizer = trained()
    model_dict, optim = get_state_dict(model, optimizer)
    state = {
        "model": model_dict,
        "optim": optim,
        "step": 7,
        "words": ["a", {"b": 1}],
        **(extra or {}),
    }
    dcp.save(state, storage_writer=DcpWriter(root, step=step, user={"by": "dcp"}))
    return full_of(model, optimizer)


def test_dcp_save_makes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    full = save_by_dcp(root, step=3)
    assert [info.step for info in ckpt.list_steps(root)] == [3]
    assert ckpt.verify(root).ok
    model = fresh()
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer, "step": 0, "words": ["", {"b": 0}]}
    ckpt.load(state, root)
    assert state["step"] == 7
    assert_same(full_of(model, optimizer), full)
    ckpt.export(root, str(tmp_path / "m.pt"), verify=True)
    assert_same(torch.load(tmp_path / "m.pt", weights_only=True), full["model"])


@pytest.mark.parametrize("saved_by", ["dcp", "ckpt"])
def test_dcp_load_reads_checkpoints_of_ours(tmp_path: Path, saved_by: str) -> None:
    root = str(tmp_path / "run")
    model, optimizer = trained()
    full = full_of(model, optimizer)
    if saved_by == "dcp":
        save_by_dcp(root)
    else:
        state = {"model": model, "optim": optimizer, "step": 7, "words": ["a", {"b": 1}]}
        ckpt.save(state, root, step=1)
    model = fresh()
    optimizer = optimizer_of(model)
    model_dict, optim = get_state_dict(model, optimizer)
    wanted = {"model": model_dict, "optim": optim, "step": 0, "words": ["", {"b": 0}]}
    dcp.load(wanted, storage_reader=DcpReader(root))
    assert wanted["step"] == 7 and wanted["words"] == ["a", {"b": 1}]
    set_state_dict(model, optimizer, model_state_dict=model_dict, optim_state_dict=wanted["optim"])
    assert_same(full_of(model, optimizer), full)


class Own:
    """What only code could make again."""


def test_an_object_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_by_dcp(root, step=1)
    with pytest.raises(CheckpointException, match=r"thing\.deep: a .*\.Own cannot be stored"):
        save_by_dcp(root, step=2, extra={"thing": {"deep": Own()}})
    assert [info.step for info in ckpt.list_steps(root)] == [1]
    save_by_dcp(root, step=2)
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2


def save_and_load(root: str, saved: str, loaded: str) -> list[dict[str, Any]]:
    """Trained and saved on one engine, loaded on another; full states before and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = ENGINES[saved]()
        train(model, optimizer)
        model_dict, optim = get_state_dict(model, optimizer)
        state = {"model": model_dict, "optim": optim, "step": 2}
        dcp.save(state, storage_writer=DcpWriter(root, step=1))
        before = full_of(model, optimizer)
        model, optimizer = ENGINES[loaded]()
        model_dict, optim = get_state_dict(model, optimizer)
        state = {"model": model_dict, "optim": optim, "step": 0}
        dcp.load(state, storage_reader=DcpReader(root))
        set_state_dict(
            model, optimizer, model_state_dict=model_dict, optim_state_dict=state["optim"]
        )
        assert state["step"] == 2
        ckpt.load({"model": model, "optim": optimizer, "step": 0}, root)
        return [before, full_of(model, optimizer)]


def own_value_per_rank(root: str) -> Any:
    """Keys that only one rank has, as data loaders make them."""
    rank = torch.distributed.get_rank()
    state = {"w": torch.ones(3), "loader": {f"rank{rank}": {"at": rank * 10}}}
    dcp.save(state, storage_writer=DcpWriter(root, step=1))
    wanted = {"w": torch.zeros(3), "loader": {f"rank{rank}": {"at": -1}}}
    dcp.load(wanted, storage_reader=DcpReader(root))
    return wanted["loader"]


@pytest.mark.ranks
@pytest.mark.parametrize(("saved", "loaded"), [("fsdp2", "tp"), ("fsdp1", "fsdp2")])
def test_ranks_save_and_load_through_us(tmp_path: Path, saved: str, loaded: str) -> None:
    before, after = run_ranks(2, save_and_load, str(tmp_path / "run"), saved, loaded)[0]
    assert_same(after, before)
    assert ckpt.verify(str(tmp_path / "run")).ok


@pytest.mark.ranks
def test_values_that_one_rank_has_come_back_to_it(tmp_path: Path) -> None:
    own_values = run_ranks(3, own_value_per_rank, str(tmp_path / "run"))
    assert own_values == [{f"rank{rank}": {"at": rank * 10}} for rank in range(3)]
