"""diff names exactly what differs, by the right amounts, and reads only where checksums differ.

Checkpoints are made of small states, one is changed in a known way, and the report is compared with
what plain torch arithmetic says of the two tensors.
"""

from __future__ import annotations

import fnmatch
import json
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.format.checksum import crc32c, joined_crc32c
from ckpt.layout.protocol import Box, Owned, Piece, View
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import find_checkpoint
from ckpt.tools.diff import DiffOptions, diff_checkpoints
from storage import open_store
from tests.ranks import run_ranks
from tests.stores import CountingStore
from tests.tools.conftest import save_sliced, sliced_net

MIB = 1 << 20


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "w": torch.randn(700, 1001),
        "half": torch.randn(33).to(torch.bfloat16),
        "count": torch.arange(10),
        "mask": torch.tensor([True, False]),
        "wave": torch.randn(4, dtype=torch.complex64),
        "tiny": torch.randn(6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "epoch": 4,
        "note": "first",
    }


def saved(folder: Path, name: str, value: dict[str, Any], step: int = 1) -> str:
    ckpt.save(value, str(folder / name), step=step)
    return str(folder / name)


def test_joined_checksums_are_those_of_the_joined_bytes(rng: random.Random) -> None:
    for _ in range(20):
        parts = [rng.randbytes(rng.choice([0, 1, 5, 4096, 100_000])) for _ in range(4)]
        joined = joined_crc32c([crc32c(part) for part in parts], [len(part) for part in parts])
        assert joined == crc32c(b"".join(parts))


def test_equal_checkpoints_are_identical_and_nothing_is_read(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", state()), saved(tmp_path, "b", state())
    report = ckpt.diff(a, b)
    assert report.identical and report.same == 8 and report.nbytes_read == 0


def test_every_kind_of_change_is_reported(tmp_path: Path) -> None:
    other = state()
    other["w"][3, 5] += 0.5
    other["half"][:] = 0
    other["count"][2] = -7
    other["mask"][0] = False
    other["wave"][1] += 3 + 4j
    other["scalar"] = torch.tensor(2.5, dtype=torch.float32)
    other["tiny"] = torch.zeros(7).to(torch.float8_e4m3fn)
    del other["none"]
    other["more"] = torch.zeros(2)
    other["epoch"] = 5
    del other["note"]
    a, b = saved(tmp_path, "a", state()), saved(tmp_path, "b", other)
    report = ckpt.diff(a, b)
    before = state()
    changes = {change.fqn: change for change in report.changed}
    assert set(changes) == {"w", "half", "count", "mask", "wave", "scalar", "tiny"}
    assert changes["w"].amount is not None and changes["w"].amount.changed == 1
    assert changes["w"].amount.max_abs == pytest.approx(0.5, abs=1e-6)
    assert changes["w"].amount.compared == MIB // 4, "one block of four bytes per element"
    half = before["half"].double()
    assert changes["half"].amount is not None
    assert changes["half"].amount.norm == pytest.approx(float(half.norm()))
    assert changes["half"].amount.relative_norm == pytest.approx(1.0)
    assert changes["half"].amount.max_rel == 1.0
    assert changes["count"].amount is not None and changes["count"].amount.max_abs == 9
    assert changes["mask"].amount is not None and changes["mask"].amount.changed == 1
    assert changes["wave"].amount is not None
    assert changes["wave"].amount.max_abs == pytest.approx(5, rel=1e-5)
    assert changes["scalar"].what == "dtype" and changes["scalar"].amount is not None
    assert changes["scalar"].amount.changed == 0
    assert changes["tiny"].what == "shape" and changes["tiny"].amount is None
    assert (report.only_a, report.only_b, report.same) == (("none",), ("more",), 0)
    assert [(value.fqn, value.a, value.b) for value in report.values] == [
        ("epoch", 4, 5),
        ("note", "first", None),
    ]
    assert not report.identical


def test_what_is_not_finite_is_counted_and_spoils_no_number(tmp_path: Path) -> None:
    one = {"x": torch.tensor([1.0, math.nan, math.inf, 4.0, math.nan])}
    two = {"x": torch.tensor([1.5, math.nan, 3.0, math.nan, math.nan])}
    report = ckpt.diff(saved(tmp_path, "a", one), saved(tmp_path, "b", two))
    (change,) = report.changed
    assert change.amount is not None
    assert (change.amount.changed, change.amount.not_finite) == (3, 2)
    assert change.amount.max_abs == change.amount.norm == 0.5


def test_only_blocks_that_differ_are_read(tmp_path: Path) -> None:
    """16 blocks, two of which differ: four blocks are read, two of each side, and the checksums."""
    torch.manual_seed(0)
    one = {"x": torch.randn(4 * MIB)}
    two = {"x": one["x"].clone()}
    two["x"][5], two["x"][-1] = 9, 9
    opened = []
    for name, value in (("a", one), ("b", two)):
        store = CountingStore(open_store(saved(tmp_path, name, value)))
        opened.append((store, Checkpoint(store, find_checkpoint(store))))
    before = sum(store.stats.bytes_read for store, _ in opened)
    report = diff_checkpoints(opened[0][1], opened[1][1], DiffOptions())
    tables = sum(int(one.manifest.seals.nbytes.sum()) for _, one in opened)
    assert sum(store.stats.bytes_read for store, _ in opened) - before == 4 * MIB + tables
    assert report.nbytes_read == 4 * MIB
    assert report.changed[0].amount is not None and report.changed[0].amount.changed == 2


@pytest.mark.ranks
def test_other_layouts_of_the_same_bytes_are_the_same(sliced_root: str, tmp_path: Path) -> None:
    """Rows, which are spans, are compared by checksums alone; columns have to be read."""
    alone = saved(tmp_path, "alone", {"model": sliced_net()})
    report = ckpt.diff(sliced_root, alone)
    assert report.identical and report.same == 5
    rows_only = dict(include=["model.0.*"])
    assert ckpt.diff(sliced_root, alone, **rows_only).nbytes_read == 0
    changed = sliced_net()
    with torch.no_grad():
        changed[1].weight[30, 47] += 1
    report = ckpt.diff(sliced_root, saved(tmp_path, "changed", {"model": changed}))
    assert [(c.fqn, c.amount.changed if c.amount else -1) for c in report.changed] == [
        ("model.1.weight", 1)
    ]


@pytest.mark.ranks
def test_two_sharded_checkpoints_of_one_layout_are_compared_by_checksums(
    sliced_root: str, tmp_path: Path
) -> None:
    run_ranks(3, save_sliced, str(tmp_path / "again"))
    report = ckpt.diff(sliced_root, str(tmp_path / "again"))
    assert report.identical and report.nbytes_read == 0


class Halves(nn.Module):
    """A weight in two boxes, cut in the middle of `dim`; each holds 0, 1, 2, ... up to 31."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = torch.arange(32.0).view([2 if one == dim else 4 for one in range(3)])
        self.dim, self.weight = dim, nn.Parameter(torch.cat([half, half], dim))

    def __ckpt_pieces__(self) -> Iterator[Owned]:
        weight, pieces = self.weight, []
        for start in (0, 2):
            offset = tuple(start if one == self.dim else 0 for one in range(3))
            box = Box(offset, tuple(2 if one == self.dim else 4 for one in range(3)))
            pieces.append(Piece("weight", (4, 4, 4), weight.dtype, box, box, (0,)))
        view = View(tuple(pieces))
        yield Owned(weight, weight.detach(), (view,), synchronized=True, owners=())


def test_boxes_of_the_same_bytes_in_other_places_differ(tmp_path: Path) -> None:
    """Their checksums are equal, one by one."""
    a, b = (saved(tmp_path, f"{dim}", {"model": Halves(dim)}) for dim in (1, 2))
    again = saved(tmp_path, "again", {"model": Halves(1)})
    assert (same := ckpt.diff(a, again)).identical and same.nbytes_read == 0
    with ckpt.open(a) as one, ckpt.open(b) as other:
        places = one["model.weight"] != other["model.weight"]
    (change,) = ckpt.diff(a, b).changed
    assert change.amount is not None and change.amount.changed == int(places.sum()) > 0


def test_names_can_be_renamed_and_chosen(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"old": {"x": torch.ones(2), "y": torch.ones(2)}})
    b = saved(tmp_path, "b", {"new": {"x": torch.ones(2), "y": torch.zeros(2)}})
    assert ckpt.diff(a, b).only_a == ("old.x", "old.y")
    renamed = dict(rename={"old.x": "new.x", "old.y": "new.y"}, exclude=["*.y"])
    assert ckpt.diff(a, b, **renamed).identical
    with pytest.raises(ValueError, match="one name"):
        ckpt.diff(a, b, rename=lambda name: "same")


def test_quick_reads_nothing(tmp_path: Path) -> None:
    other = state()
    other["w"][0, 0] += 1
    a, b = saved(tmp_path, "a", state()), saved(tmp_path, "b", other)
    report = ckpt.diff(a, b, quick=True)
    assert [(c.fqn, c.amount) for c in report.changed] == [("w", None)]
    assert report.nbytes_read == 0


def test_command_tells_by_its_exit_code(
    plain_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", plain_root, plain_root]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["diff", plain_root]) == 3
    out = capsys.readouterr().out
    assert "a: step 5" in out and "b: step 10" in out and "value epoch: 5 -> 10" in out
    assert main(["diff", plain_root, "--step-b", "5", "--json", "--sort", "amount"]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert not printed["identical"] and printed["step_b"] == 5
    big = next(change for change in printed["changed"] if change["fqn"] == "model.big")
    assert big["amount"]["changed"] > 0 and big["amount"]["relative_norm"] > 0


def blocks(seed: int, step: int) -> dict[str, object]:
    """A model of 30 blocks with what AdamW keeps, and values."""
    torch.manual_seed(seed)
    layers = [nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.LayerNorm(8)}) for _ in range(31)]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "run": {"step": step, "name": "a"}}


def test_a_diff_of_a_deep_model_fits_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved(tmp_path, "a", blocks(1, 1)), saved(tmp_path, "b", blocks(2, 2))
    report = ckpt.diff(a, b)
    assert main(["diff", a, b]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40 < len(report.changed)
    (weights,) = [line for line in lines if line.startswith("model.*.up.weight (31)")]
    parts = [one.amount for one in report.changed if fnmatch.fnmatch(one.fqn, "model.*.up.weight")]
    norm = math.sqrt(sum(one.norm**2 for one in parts))
    assert f"{31 * 32} (100 %)" in weights and f"{norm:.3g}" in weights.split()
    (moments,) = [line for line in lines if line.startswith("optimizer.state.*.exp_avg ")]
    assert "(124)" in moments  # of every parameter
    assert "value optimizer.param_groups[0].lr: 0.1 -> 0.05" in lines
    assert main(["diff", a, b, "--unfold"]) == 3
    assert capsys.readouterr().out.count(".exp_avg ") == 124


def test_only_what_differs_inside_of_a_value_is_shown(tmp_path: Path) -> None:
    old = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "more": [1, 2], "d": {"x": True}}
    new = {"groups": [{"betas": (0.9, 0.95), "lr": 0.1}], "more": [1], "d": {"x": 1, "y": 0}}
    a, b = saved(tmp_path, "a", {"v": old}), saved(tmp_path, "b", {"v": new})
    changes = {one.fqn: one for one in ckpt.diff(a, b).values}
    assert {name: (one.a, one.b) for name, one in changes.items()} == {
        "v.groups[0].betas": ((0.9, 0.99), (0.9, 0.95)),
        "v.more": ([1, 2], [1]),
        "v.d.x": (True, 1),
        "v.d.y": (None, 0),
    }
    assert not changes["v.d.y"].has_a


def test_the_order_of_keys_in_values_is_no_difference(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"v": [{"lr": 0.1, "eps": 1e-8}]})
    b = saved(tmp_path, "b", {"v": [{"eps": 1e-8, "lr": 0.1}]})
    assert ckpt.diff(a, b).identical


def test_one_checkpoint_has_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path, "a", {"x": torch.ones(1)})
    assert main(["diff", root]) == 1
    assert "ckpt diff A B" in capsys.readouterr().err
    assert main(["diff", root, str(tmp_path / "nowhere")]) == 1
    assert "no shardpoint checkpoint" in capsys.readouterr().err


def test_an_error_of_progress_leaves_no_thread_that_reads(tmp_path: Path) -> None:
    changed = {**state(), "w": torch.randn(700, 1001)}

    def fails(done: int, total: int) -> None:
        raise ValueError("no progress")

    a, b = saved(tmp_path, "a", state()), saved(tmp_path, "b", changed)
    with pytest.raises(ValueError, match="no progress") as caught:
        ckpt.diff(a, b, progress=fails)
    names = [thread.name for thread in threading.enumerate()]
    assert caught.tb and not [name for name in names if name.startswith("ckpt-diff")]
