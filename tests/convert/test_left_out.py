"""An import of a folder says which of its files it did not take; an export, what it did not write.

Method: folders as Accelerate, transformers and DCP leave them, with an optimizer, a scheduler and
settings beside the weights; states whose weights no entry called "model" holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt
from ckpt.cli import main
from ckpt.convert.sources.opening import open_source
from ckpt.errors import CheckpointError
from ckpt.operate import import_checkpoint
from tests.versions import ALONE

WEIGHTS = {"a": torch.ones(2), "b": torch.zeros(3)}
BESIDE = ("config.json", "optimizer.bin", "random_states_0.pkl", "scheduler.bin")


def beside_the_weights(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, folder / "optimizer.bin")
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    (folder / "config.json").write_text("{}")


def safetensors_folder(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")


def indexed_folder(folder: Path) -> None:
    save_file({"a": WEIGHTS["a"]}, folder / "one.safetensors")
    save_file({"b": WEIGHTS["b"]}, folder / "two.safetensors")
    held = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(held))


def torch_folder(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "pytorch_model.bin")


def dcp_folder(folder: Path) -> None:
    dcp.save(dict(WEIGHTS), checkpoint_id=folder, **ALONE)


def accelerate_folder(folder: Path) -> None:
    dcp.save({"model": dict(WEIGHTS)}, checkpoint_id=folder / "pytorch_model_fsdp_0", **ALONE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "fill", [safetensors_folder, indexed_folder, torch_folder, dcp_folder, accelerate_folder]
)
def test_import_of_a_folder_says_what_it_left_out(fill: object, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    beside_the_weights(folder)
    fill(folder)  # type: ignore[operator]
    report = import_checkpoint(str(folder), str(tmp_path / "run"))
    # Beside DCP's directories of Accelerate, names are those of a whole training.
    taken = ("scheduler.bin",) if fill is accelerate_folder else ()
    assert report.left_out == tuple(name for name in BESIDE if name not in taken)
    assert len(report.tensors) == 2 and ckpt.verify(str(tmp_path / "run")).ok


def test_command_prints_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    beside_the_weights(folder)
    safetensors_folder(folder)
    root = str(tmp_path / "run")
    assert main(["import", str(folder), root]) == 0
    out = capsys.readouterr().out
    for name in BESIDE:
        assert f"left out: {name}\n" in out
    assert "imported by its own path" in out
    assert main(["import", str(folder), root, "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == list(BESIDE)
    # A file that is named by itself leaves nothing out.
    other = str(tmp_path / "optimizer")
    assert main(["import", str(folder / "scheduler.bin"), other]) == 0
    assert "left out" not in capsys.readouterr().out


def several() -> dict[str, Any]:
    """States whose weights are in several places, and where they are."""
    net = {"w": torch.randn(3, 4), "b": torch.zeros(3)}
    other = {"w": torch.randn(5), "b": torch.zeros(5)}
    return {
        "ema": ({"unet": net, "unet_ema": other, "global_step": torch.tensor(7)}, ["unet"]),
        "parts": ({"encoder": net, "decoder": other, "scale": torch.ones(8)}, ["encoder", ""]),
        "nested": ({"backbone": {"layer": net}, "norm": torch.ones(4)}, ["backbone.layer", ""]),
        "called": ({"net": net, "model": other}, ["model", "net"]),
        "trained": (
            {
                "gen": {"g": torch.ones(3)},
                "disc": other,
                "opt": {
                    "state": {"g": {"m": torch.ones(3)}},
                    "param_groups": [{"lr": 0.1, "params": ["g"]}],
                },
            },
            ["gen", "disc"],
        ),
        "listed": ({"weights": [torch.ones(4), torch.ones(4)], "step": torch.tensor(3)}, []),
    }


def stored(state: dict[str, Any], form: str, folder: Path) -> str:
    """`state` as a file of torch, a DCP directory, or a root into which one of them came."""
    if form == "dcp":
        dcp.save(state, checkpoint_id=folder / "in", **ALONE)
        return str(folder / "in")
    torch.save(state, folder / "in.pt")
    if form == "root":
        ckpt.import_checkpoint(str(folder / "in.pt"), str(folder / "run"))
        return str(folder / "run")
    return str(folder / "in.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("form", ["pt", "dcp", "root"])
@pytest.mark.parametrize("name", [name for name in several() if name != "listed"])
def test_weights_are_not_left_out_in_silence(name: str, form: str, tmp_path: Path) -> None:
    state, entries = several()[name]
    url = stored(state, form, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        ckpt.export(url, str(tmp_path / "out.safetensors"))
    assert all(repr(entry) in str(caught.value) for entry in entries), caught.value
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", list(several()))
def test_export_writes_or_lists_every_name(name: str, tmp_path: Path) -> None:
    url = stored(several()[name][0], "pt", tmp_path)
    source = open_source(url)
    try:
        names = {*source.contents.tensors, *source.contents.values}
        floats = {fqn for fqn, t in source.contents.tensors.items() if t.dtype == "float32"}
    finally:
        source.close()
    for entry in {fqn.partition(".")[0] for fqn in floats if "." in fqn}:
        report = ckpt.export(url, str(tmp_path / f"{entry}.pt"), entry=entry, exclude=["b"])
        written = {f"{entry}.{tensor}" for tensor in report.tensors}
        assert written | set(report.left_out) == names and not written & set(report.left_out)
    whole = ckpt.export(url, str(tmp_path / "whole.safetensors"), entry="")
    assert {fqn for fqn in floats if not fqn.startswith("opt")} <= set(whole.tensors)
    assert set(whole.left_out) == names - set(whole.tensors)


def test_one_model_that_has_no_usual_name(tmp_path: Path) -> None:
    state = {"unet": dict(WEIGHTS), "step": torch.tensor(1), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "in.pt")
    report = ckpt.export(str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors"))
    assert report.tensors == ("a", "b") and report.left_out == ("rng", "step")


def test_a_nested_model_is_written_whole(tmp_path: Path) -> None:
    state = {
        "model": {"encoder": dict(WEIGHTS), "norm": torch.ones(3)},
        "epoch": 2,
        "ema": {"a": torch.ones(2)},
    }
    torch.save(state, tmp_path / "in.pt")
    report = ckpt.export(str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors"))
    assert report.tensors == ("encoder.a", "encoder.b", "norm")
    assert report.left_out == ("ema.a", "epoch")


def test_a_model_whose_tensors_others_share_is_written(tmp_path: Path) -> None:
    torch.save({"best": {"a": WEIGHTS["a"]}, "model": WEIGHTS}, tmp_path / "in.pt")
    report = ckpt.export(str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors"))
    assert report.tensors == ("a", "b") and report.left_out == ()


def test_export_command_prints_what_it_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    ckpt.save(state, str(tmp_path / "run"), step=3)
    main(["export", str(tmp_path / "run"), str(tmp_path / "out.safetensors")])
    printed = capsys.readouterr().out
    assert "not written: optimizer (7 names)" in printed and "not written: step" in printed
