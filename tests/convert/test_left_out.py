"""An import of a folder says which of its files it did not take.

Method: folders as Accelerate, transformers and DCP leave them, with an optimizer, a scheduler and
settings beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt
from ckpt.cli import main
from ckpt.convert.import_ import import_checkpoint

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
    dcp.save(dict(WEIGHTS), checkpoint_id=folder, no_dist=True)


def accelerate_folder(folder: Path) -> None:
    dcp.save({"model": dict(WEIGHTS)}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


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
