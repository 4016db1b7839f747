"""Checkpoints that torch's DCP wrote under FSDP1, FSDP2, HSDP, TP and DDP come in and go out whole.

Method: 1 to 4 real ranks train and save by DCP; imports and exports of that are compared bit for
bit with the full state dicts that torch gathered itself at that moment.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import Mismatch
from tests.convert.conftest import Saved
from tests.convert.jobs import (
    assert_same,
    dcp_load_all,
    engines_of,
    fresh,
    full_of,
    load_all,
    optimizer_of,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CASES = [(size, name) for size in (1, 2, 3, 4) for name in engines_of(size)]


@pytest.mark.parametrize(("size", "engine"), CASES)
def test_import_and_load_give_the_state_of_the_training(
    by_torch: dict[tuple[int, str], Saved], tmp_path: Path, size: int, engine: str
) -> None:
    saved = by_torch[size, engine]
    report = ckpt.import_checkpoint(saved.folder, str(tmp_path / "run"), step=2, verify=True)
    assert report.modules == ("model",) and report.verified
    model = fresh()
    optimizer = optimizer_of(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    state = {"model": model, "optim": optimizer, "step": 0, "note": {}}
    ckpt.load(state, str(tmp_path / "run"))
    assert state["step"] == 2 and state["note"] == {"a": [1, 2.5], "b": None}
    assert_same(full_of(model, optimizer), saved.full)
    assert ckpt.verify(str(tmp_path / "run")).ok


@pytest.mark.parametrize(("size", "engine"), CASES)
def test_one_line_from_dcp_to_a_file_for_everybody(
    by_torch: dict[tuple[int, str], Saved], tmp_path: Path, size: int, engine: str
) -> None:
    saved = by_torch[size, engine]
    ckpt.export(saved.folder, str(tmp_path / "model.safetensors"), verify=True)
    assert_same(load_file(tmp_path / "model.safetensors"), saved.full["model"])
    ckpt.export(saved.folder, str(tmp_path / "model.pt"), verify=True)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), saved.full["model"])
    whole = dict(optimizer=True)
    ckpt.export(saved.folder, str(tmp_path / "all.pt"), **whole, verify=True)
    exported = torch.load(tmp_path / "all.pt", weights_only=True)
    assert exported["step"] == 2 and exported["note"] == {"a": [1, 2.5], "b": None}
    assert_same(exported["model"], saved.full["model"])
    assert_same(exported["optim"]["state"], saved.full["optim"]["state"])


def test_an_import_loads_on_any_layout(
    by_torch: dict[tuple[int, str], Saved], tmp_path: Path
) -> None:
    roots, expected = {}, {}
    for size, engine in [(3, "fsdp1"), (4, "hsdp"), (4, "fsdp_tp"), (2, "tp")]:
        roots[f"{size}-{engine}"] = str(tmp_path / f"{size}-{engine}")
        expected[f"{size}-{engine}"] = by_torch[size, engine].full
        ckpt.import_checkpoint(by_torch[size, engine].folder, roots[f"{size}-{engine}"])
    loaded = run_ranks(2, load_all, roots, ["fsdp1", "fsdp2", "tp", "ddp"], timeout_seconds=120)[0]
    assert len(loaded) == 16
    for (saved, _), full in loaded.items():
        assert_same(full, expected[saved])


def test_ours_goes_to_dcp_and_dcp_load_reads_it(
    by_torch: dict[tuple[int, str], Saved], tmp_path: Path
) -> None:
    """The whole way round: torch's DCP, imported, exported as DCP, loaded by torch elsewhere."""
    whole = dict(optimizer=True)
    folders, expected = [], []
    for size, engine in [(3, "fsdp2"), (4, "hsdp1")]:
        root = str(tmp_path / f"{size}-{engine}")
        ckpt.import_checkpoint(by_torch[size, engine].folder, root)
        target = str(tmp_path / f"dcp-{size}-{engine}")
        ckpt.export(root, target, format="dcp", **whole, verify=True)
        folders.append(target)
        expected += [by_torch[size, engine].full] * 2
    loaded = run_ranks(2, dcp_load_all, folders, ["fsdp2", "tp"], timeout_seconds=120)[0]
    for full, wanted in zip(loaded, expected, strict=True):
        assert_same(full, wanted)


class Tied(nn.Module):
    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def load_tied(folder: str) -> list[str]:
    """Load what torch's DCP wrote of tied, equal and other tensors; the errors."""
    errors = []
    for number, tie in enumerate((True, False)):
        torch.manual_seed(number)
        source, target = fully_shard(Tied(tie=tie)), fully_shard(Tied())
        dcp.save(source.state_dict(), checkpoint_id=f"{folder}/{tie}")
        try:
            ckpt.load(target, f"{folder}/{tie}")
        except Mismatch as error:
            errors.append(str(error))
        else:
            held, expected = target.head.weight, source.embed.weight
            assert torch.equal(held.full_tensor(), expected.full_tensor())
    return errors


def test_a_tied_model_takes_both_names_if_they_are_equal(tmp_path: Path) -> None:
    first, *others = run_ranks(3, load_tied, str(tmp_path))
    assert len(first) == 1 and all(one == first for one in others)
    assert "head.weight: is in the checkpoint" in first[0] and "values differ" in first[0]


def start_twice(folder: str) -> list[str]:
    """Where a training's first restore and its second come from; between them it saves."""
    source, origins = fully_shard(Tied()), []
    dcp.save(source.state_dict(), checkpoint_id=f"{folder}/dcp")
    for _ in range(2):
        model = fully_shard(Tied())
        with ckpt.Checkpointer({"model": model}, f"{folder}/run", save=ckpt.EverySteps(1)) as saver:
            report = saver.restore(from_=f"{folder}/dcp")
            assert report is not None
            origins.append(report.origin)
            saver.step(report.step + 1)
        assert torch.equal(model.head.weight.full_tensor(), source.embed.weight.full_tensor())
    return origins


def test_ranks_start_a_training_from_a_dcp_once(tmp_path: Path) -> None:
    assert run_ranks(2, start_twice, str(tmp_path)) == [["elsewhere", "durable"]] * 2
