"""`ckpt follow`: versions of weights for a shell.

Method: the command on real roots, with commands that note what they were given; files are read by
the safetensors package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.cli import main
from ckpt.convert.targets import files
from ckpt.convert.targets.files import write_safetensors


def state(step: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(12.0).reshape(3, 4) + step,
        "b": torch.full((3,), step, dtype=torch.int8),
    }


def note(path: Path) -> str:
    """A shell command that appends what it was given."""
    return f'echo "$CKPT_STEP $CKPT_ATTEMPT $CKPT_FILE" >> {path}'


def test_a_command_runs_for_each_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, notes, into = str(tmp_path / "run"), tmp_path / "notes", tmp_path / "w.safetensors"
    for step in (1, 2):
        report = ckpt.publish(state(step), url, step=step, dtype=None, anchor_larger=1e9).result()
        call = ["follow", url, "--line", "published", "--into", str(into), "--once"]
        assert main([*call, "--exec", note(notes)]) == 0
        assert notes.read_text().splitlines()[-1] == f"{step} {report.attempt} {into}"
        assert f"step {step} ({report.attempt})" in capsys.readouterr().out
        read = load_file(into)
        assert read.keys() == state(step).keys()
        assert all(torch.equal(read[name], one) for name, one in state(step).items())
    assert len(notes.read_text().splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "run", "w.safetensors"]


def test_versions_are_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt.save(state(3), tmp_path, step=3)
    assert main(["follow", str(tmp_path), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert (said["step"], said["nbytes_total"]) == (3, 51)


def test_checkpoints_are_followed_by_patterns(tmp_path: Path) -> None:
    ckpt.save(state(7), tmp_path / "run", step=7)
    into = tmp_path / "part.safetensors"
    call = ["follow", str(tmp_path / "run"), "--once", "--include", "w", "--into", str(into)]
    assert main(call) == 0
    assert load_file(into).keys() == {"w"}


def test_a_command_that_fails_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt.save(state(1), tmp_path, step=1)
    assert main(["follow", str(tmp_path), "--exec", "exit 7"]) == 1
    assert "--exec exit 7 has failed: exit code 7" in capsys.readouterr().err


def test_a_root_without_versions_runs_nothing(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert main(["follow", str(tmp_path / "run"), "--once", "--exec", note(notes)]) == 0
    assert not notes.exists()


def test_a_file_that_was_not_finished_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(str(path), state(1))

    def full(_: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_safetensors(str(path), state(2))
    assert torch.equal(load_file(path)["w"], state(1)["w"])
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_new_file_is_in_its_folder_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure behind the call leaves the new file: its folder is synced behind the name."""
    path, synced = tmp_path / "w.safetensors", []
    write_safetensors(str(path), state(1))
    inode = path.stat().st_ino
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append((os.fstat(file).st_ino, path.stat().st_ino))
        sync(file)

    monkeypatch.setattr(files.os, "fsync", noted)
    write_safetensors(str(path), state(2))
    new = path.stat().st_ino
    assert synced == [(new, inode), (tmp_path.stat().st_ino, new)]
    monkeypatch.chdir(tmp_path)
    write_safetensors("bare.safetensors", state(1))


def test_all_dtypes_and_shapes_are_written(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "bf16": torch.randn(3, 5).bfloat16().t(),
        "bool": torch.tensor([True, False]),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    write_safetensors(str(tmp_path / "f"), tensors)
    read = load_file(tmp_path / "f")
    for name, one in tensors.items():
        assert read[name].shape == one.shape
        assert read[name].dtype is one.dtype
        assert torch.equal(read[name].float(), one.float())
