"""Everyday slips get an error that names the slip and the next move.

Method: each call is made, and its text compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main

SLIPS: list[tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = [
    (lambda state: ckpt.load(state, "run", rename=["a=b"]), TypeError, "expected a mapping, as"),
    (
        lambda state: ckpt.save(state, "run", step=2, process_group="gloo"),
        TypeError,
        "process_group='gloo'; expected a group",
    ),
    (
        lambda state: ckpt.save(state, "run", step=2, process_group=-100),  # type: ignore[arg-type]
        TypeError,
        "to its members (-100 to others, which do not make this call)",
    ),
    (
        lambda state: ckpt.save(state, "run", step=2, storage_options="secret"),
        TypeError,
        "storage_options is a str; expected a mapping of names",
    ),
    (lambda _: ckpt.save_async, AttributeError, "did you mean ckpt.async_save?"),
    (lambda _: ckpt.Checkpointr, AttributeError, "did you mean ckpt.Checkpointer?"),
    (
        lambda state: ckpt.load(state, "https://none.invalid.amazonaws.com/run"),
        ckpt.CheckpointError,
        "a bucket is opened as s3://bucket/prefix",
    ),
    (lambda state: ckpt.load(state, "foo://b/run"), ckpt.CheckpointError, "'foo'; write a path"),
]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    ckpt.save(state, "run", step=1)
    return state


@pytest.mark.parametrize(("slip", "error", "text"), SLIPS, ids=lambda value: str(value)[:20])
def test_a_slip_is_named(
    state: dict[str, Any],
    slip: Callable[[dict[str, Any]], object],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error) as caught:
        slip(state)
    assert text in str(caught.value) and "secret" not in str(caught.value)


def test_a_lost_data_file_says_what_to_do(state: dict[str, Any], tmp_path: Path) -> None:
    (file,) = tmp_path.rglob("rank*.safetensors")
    file.unlink()
    with pytest.raises(
        ckpt.errors.LoadInterrupted, match=r"Load an older checkpoint .*ckpt verify"
    ):
        ckpt.load(state, "run")


def test_a_relative_path_is_of_the_current_directory(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    ckpt.save(state, "run", step=2)
    for place, step in (("run", 1), ("other/run", 2)):
        assert [one.step for one in ckpt.list_steps(tmp_path / place)] == [step]


def test_an_unknown_flag_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["show", "run", "--stp", "2"])
    printed = capsys.readouterr().err
    assert end.value.code == 2 and "usage: ckpt show" in printed and "--stp 2" in printed
