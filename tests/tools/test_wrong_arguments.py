"""Goal: what no command line would take, Python does not take either, and one sentence says so.

Method: each function on a small root, with an argument of the wrong kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import operate
from ckpt.cli import main
from ckpt.errors import InvalidArgument


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    for step in (0, 1):
        state = {"model": {"a": torch.full((4,), float(step)), "b": torch.zeros(4)}}
        ckpt.save(state, url, step=step)
    return url


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("diff", {"threads": 0}, "threads=0: expected an int of at least 1"),
        ("diff", {"step_a": "x"}, "step_a='x': expected an int of at least 0"),
        ("diff", {"stacks": "a=b"}, "stacks= is a str: expected a mapping"),
        ("verify", {"threads": None}, "threads=None: expected an int of at least 1"),
        ("verify", {"storage_options": ["key"]}, "storage_options= is a list: expected a mapping"),
        ("report", {"metadata_bytes_max": "1GB"}, "metadata_bytes_max='1GB': expected an int of"),
        ("log", {"count": -1}, "count=-1: expected an int of at least 0"),
        ("plan_ranks", {"layout": "rows"}, "layout='rows': expected one of 'fsdp2', 'flat'"),
        ("prune", {"keep_last": 1, "retire_after": "1d"}, "retire_after='1d': expected a number"),
        ("prune", {"keep_last": 0}, "keep_last=0: expected an int of at least 1"),
        ("cost", {"every_seconds": "10m"}, "every_seconds='10m': expected a number above 0"),
        ("cost", {"every_seconds": "600"}, "every_seconds='600': expected a number above 0"),
        ("cost", {"every_seconds": True}, "every_seconds=True: expected a number above 0"),
        ("cost", {"params": 7e9}, "params=7000000000.0: expected an int of at least 1"),
        ("cost", {"gib_month": -5}, "gib_month=-5: expected a number of at least 0"),
        ("diff", {"include": 5}, "include=5: expected a list of texts"),
    ],
)
def test_a_wrong_argument_is_named(
    name: str, wrong: Mapping[str, Any], text: str, root: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        getattr(operate, name)(root, **wrong)
    assert text in str(raised.value)


def test_an_unknown_format_is_named(root: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="format='foo': expected one of 'safetensors'"):
        operate.export(root, tmp_path / "m.pt", format="foo")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="threads=0"):
        operate.copy(root, tmp_path / "copy", threads=0)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lss", "runs"], "; did you mean 'ls'?"),
        (["export", "runs", "out", "--format", "hff"], "; did you mean 'hf'?"),
        (["zzz"], "'completion')"),  # near to none
    ],
)
def test_a_wrong_choice_names_the_nearest(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    # Python 3.12 and newer show the choices without quotes.
    assert capsys.readouterr().err.rstrip().replace("'", "").endswith(text.replace("'", ""))


def test_one_pattern_is_a_list_of_one(root: str, tmp_path: Path) -> None:
    assert [one.fqn for one in operate.diff(root, include="model.a").changed] == ["model.a"]
    assert operate.diff(root, exclude="model.*").same == 0
    report = operate.export(root, tmp_path / "m.safetensors", entry="model", include="b*")
    assert list(report.tensors) == ["b"]


def test_numbers_of_numpy_and_paths_are_taken(root: str, tmp_path: Path) -> None:
    age, one = np.float32(3600), np.int64(1)
    report = operate.prune(root, keep_last=one, retire_after=age, keep_younger=age, dry_run=True)
    assert not report.deleted
    assert operate.cost(params=np.int64(1000), ranks=one, every_seconds=age).model.params == 1000
    assert operate.diff(root, threads=np.uint8(1), exclude=None).changed  # type: ignore[arg-type]
    for near in (tmp_path, [tmp_path]):
        with pytest.raises(ckpt.NoCheckpoint, match=f"none of {tmp_path} is a near directory"):
            operate.rescue(near, root)  # type: ignore[arg-type]


def test_patterns_of_diff_are_those_of_export(root: str) -> None:
    assert [one.fqn for one in operate.diff(root, include=["re:a$"]).changed] == ["model.a"]
    with pytest.raises(InvalidArgument, match=r"pattern 're:\(': missing \)"):
        operate.diff(root, include=["re:("])


def test_a_url_without_a_root_is_no_root_of_no_steps(tmp_path: Path) -> None:
    with pytest.raises(ckpt.NoCheckpoint, match="check the url"):
        operate.diff(tmp_path / "rnu")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["m.pt", "--entry", "model", "--dtype", "float31"],
            "--dtype 'float31' is not a floating-point type",
        ),
        (["m.pt", "--config", "base"], 'pass --format "hf" and a folder'),
        (["m.pt", "--preset", "lora"], "--preset 'lora': there is only 'peft'"),
        (["m.pt", "--optimizer", "--rename", "a=b"], "--rename with --optimizer: the optimizer"),
    ],
)
def test_the_command_line_names_its_own_flags(
    words: list[str], text: str, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["export", root, str(tmp_path / words[0]), *words[1:]]) == 2
    assert text in capsys.readouterr().err


def _exit_code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: ckpt.save({}, "run", step=1, endpoint_url="x"),  # type: ignore[call-arg]
            "save() has no argument 'endpoint_url'; an option of the store goes into "
            "storage_options={'endpoint_url': ...}",
        ),
        (
            lambda: ckpt.load({}, "run", stric=True),  # type: ignore[call-arg]
            "load() has no argument 'stric'; did you mean strict?",
        ),
        (
            lambda: ckpt.Checkpointer({}, "run", keeps=3),  # type: ignore[call-arg]
            "Checkpointer() has no argument 'keeps'; did you mean keep?",
        ),
        (
            lambda: ckpt.export("run", "x.pt", dtyp="bfloat16"),
            "export() has no argument 'dtyp'; did you mean dtype?",
        ),
    ],
)
def test_an_unknown_argument_names_the_nearest(call: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == text


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "ls"])
    assert ended.value.code == 0 and "usage: ckpt ls" in capsys.readouterr().out
