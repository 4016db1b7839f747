"""The command line does what the functions do, and says what went wrong in one line.

Exit codes: 0 fine, 1 a problem, 2 a wrong command line.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.cli import main
from ckpt.commit.maintenance import Maintenance
from ckpt.screens import terminal
from ckpt.screens.folding import folded
from ckpt.screens.terminal import size
from storage import open_store
from tests.servers import free_port
from tests.tools.conftest import data_files, sliced_net, stepped


@pytest.fixture
def root(plain_root: str, tmp_path: Path) -> str:
    shutil.copytree(plain_root, tmp_path / "run")
    return str(tmp_path / "run")


def test_ls_lists_steps(plain_root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", plain_root]) == 0
    out = capsys.readouterr().out
    assert "2 checkpoints" in out and "latest" in out
    assert main(["ls", plain_root, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["schema"], listed["version"]) == ("ckpt.ls", 1)
    assert [entry["step"] for entry in listed["checkpoints"]] == [5, 10]


def test_ls_has_times_of_the_log_and_sizes_of_the_files(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy with other tools gives the files other times; listings are not asked for them."""
    for path in Path(root).rglob("*"):
        os.utime(path, (86400.0, 86400.0))
    assert main(["ls", root, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    saved = [event for event in reversed(ckpt.history(root)) if event.kind == "COMMIT"]
    assert [one["committed_unix"] for one in listed] == [event.time_unix for event in saved]
    for one in listed:
        files = list(Path(one["url"]).iterdir())
        own = sum(path.stat().st_size for path in files if path.name != "TELEMETRY")
        assert one["nbytes"] == own > 0
    assert main(["ls", root]) == 0
    out = capsys.readouterr().out
    assert "1970" not in out and size(listed[0]["nbytes"]) in out


def test_a_steps_directory_is_listed_and_opened_by_its_own_path(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = ckpt.list_steps(root)[0]
    assert main(["ls", entry.url, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (listed["step"], listed["attempt"], listed["line"]) == (5, entry.attempt, None)
    assert listed["committed_unix"] is None and listed["nbytes"] > 0
    for arguments in (["ls"], ["show"], ["du"], ["verify"]):
        assert main([*arguments, entry.url]) == 0
        assert "5" in capsys.readouterr().out
    assert main(["export", entry.url, str(tmp_path / "x.safetensors")]) == 0
    capsys.readouterr()
    # What needs the log says where it is.
    for arguments in (["log"], ["prune", "--keep-last", "1"]):
        assert main([arguments[0], entry.url, *arguments[1:]]) == 1
        assert f"of one checkpoint, which `ckpt show` and `ckpt.load` open; its root is {root}" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize("command", ["show", "ls", "log", "du"])
def test_a_reader_that_has_seen_enough_is_no_failure(
    command: str, plain_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ckpt show | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([command, plain_root]) == 0


def test_a_server_that_does_not_answer_is_not_taken_for_an_empty_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("aiohttp")
    assert main(["ls", f"http://127.0.0.1:{free_port()}/run"]) == 1
    error = capsys.readouterr().err
    assert "Cannot connect" in error and "does not exist" not in error


def test_show_tells_names_shapes_and_writers(
    sliced_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", sliced_root]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("model.1.weight"))
    assert "33 x 48" in row and "float32" in row and "0, 1, 2 (3 parts)" in row
    assert main(["show", sliced_root, "model.2.*", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["tensors"]) == {"model.2.weight", "model.2.bias"}
    parts = shown["tensors"]["model.2.weight"]["parts"]
    assert sum(part["nbytes"] for part in parts) == 700 * 1002 * 2
    assert shown["world_size"] == 3


def test_progress_in_a_log_is_a_line_every_30_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.progress_bar("verify") as progress:
        for done in range(0, 101):
            now[0] = 100.0 + done
            progress(done << 20, 100 << 20)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        f"verify: {done} % of 100.0 MiB, 1.0 MiB/s" for done in (30, 60, 90)
    ]
    with terminal.progress_bar("verify", shown=False) as nothing:
        assert nothing is None


def test_show_folds_what_blocks_repeat() -> None:
    rows = [("h.0.w", "4"), ("h.0.b", "4"), ("h.1.w", "4"), ("h.1.b", "4"), ("h.2.w", "8")]
    assert folded(rows) == [("h.*.w (2)", "4"), ("h.*.b (2)", "4"), ("h.2.w", "8")]
    assert folded([("h1.w", ""), ("h2.w", ""), ("7", "")]) == [
        ("h1.w", ""),
        ("h2.w", ""),
        ("7", ""),
    ]
    assert folded([("a.0", "x"), ("a.10", "x")]) == [("a.* (2)", "x")]


def test_show_of_names_that_are_not_there_fails(
    plain_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", plain_root, "nope.*"]) == 1
    captured = capsys.readouterr()
    assert "no name matches 'nope.*'" in captured.err and not captured.out


def test_verify_tells_by_its_exit_code(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", root, "--mark"]) == 0
    assert [info.verified for info in ckpt.list_steps(root)] == [False, True]
    path = data_files(root)[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", root]) == 1
    assert f"{path.name}: block" in capsys.readouterr().out
    assert main(["verify", root, "--step", "5"]) == 0
    capsys.readouterr()
    assert main(["verify", root, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"][0]["fqn"]


def test_export_writes_what_the_function_writes(
    sliced_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "m.safetensors"
    arguments = ["--dtype", "float16", "--rename", r"re:^(\d)\.=layer\1.", "--exclude", "*bias"]
    assert main(["export", sliced_root, str(target), *arguments]) == 0
    assert str(target) in capsys.readouterr().out
    tensors = load_file(target)
    assert set(tensors) == {"layer0.weight", "layer1.weight", "layer2.weight"}
    assert torch.equal(tensors["layer0.weight"], sliced_net()[0].weight.half())
    assert main(["export", sliced_root, str(target)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_export_says_which_tied_names_are_left_out(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", plain_root, str(tmp_path / "m.safetensors"), "--step", "5"]) == 0
    assert "tied: head.weight is embed.weight" in capsys.readouterr().out
    assert torch.equal(load_file(tmp_path / "m.safetensors")["big"], stepped(5).big)


def test_import_and_export_go_round(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, root = str(tmp_path / "m.safetensors"), str(tmp_path / "run")
    assert main(["export", plain_root, file, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"]
    assert main(["import", file, root, "--step", "3", "--rename", "=model", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "step 3: " in out and "every tensor read back and equal" in out
    with ckpt.open(root) as ck:
        assert torch.equal(ck["model.big"], stepped(10).big)
    assert main(["import", file, root, "--step", "4", "--skip", "big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == ["big"]
    assert main(["import", str(tmp_path / "none.pt"), root]) == 1
    assert "is not there" in capsys.readouterr().err


def test_salvage_rebuilds_the_manifest_to_the_byte(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = data_files(root)[-1].parent / "MANIFEST"
    before = manifest.read_bytes()
    manifest.unlink()
    assert main(["verify", root]) == 1
    assert "ckpt mend" in capsys.readouterr().err
    assert main(["salvage", root, "--dry-run"]) == 0
    assert not manifest.exists()
    assert main(["salvage", root]) == 0
    assert manifest.read_bytes() == before
    assert main(["verify", root]) == 0


def test_salvage_of_a_copy_whatever_its_name(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Of one checkpoint's directory, by its path and from beside it."""
    copy = tmp_path / "best so far"
    shutil.copytree(data_files(plain_root)[-1].parent, copy)
    before = (copy / "MANIFEST").read_bytes()
    for url in (str(copy), f"{copy}/", copy.name):
        (copy / "MANIFEST").unlink()
        monkeypatch.chdir(tmp_path)
        assert main(["salvage", url]) == 0, capsys.readouterr()
        assert (copy / "MANIFEST").read_bytes() == before
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["salvage", str(empty)]) == 1
    assert "no step directories" in capsys.readouterr().err


def test_salvage_of_an_incomplete_directory_writes_nothing(
    sliced_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sliced_root, tmp_path / "run")
    files = data_files(str(tmp_path / "run"))
    (files[0].parent / "MANIFEST").unlink()
    files[1].unlink()
    assert main(["salvage", str(files[0].parent)]) == 1
    out = capsys.readouterr().out
    assert f"missing: {files[1].name}" in out
    assert not (files[0].parent / "MANIFEST").exists()


def test_prune_keeps_the_newest(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", root, "--keep-last", "1", "--dry-run"]) == 0
    assert "retire step 5" in capsys.readouterr().out
    assert len(ckpt.list_steps(root)) == 2
    assert main(["prune", root, "--keep-last", "1", "--yes"]) == 0
    assert [info.step for info in ckpt.list_steps(root)] == [10]
    assert {path.parent.name[:8] for path in data_files(root)} == {"00000010"}
    assert main(["prune", root, "--keep-last", "1", "--yes"]) == 0


def test_prune_keeps_pinned(root: str) -> None:
    store = open_store(root)
    Maintenance.open(store).pin(ckpt.list_steps(root)[0].attempt)
    assert main(["prune", root, "--keep-last", "1", "--yes"]) == 0
    assert [info.step for info in ckpt.list_steps(root)] == [5, 10]


def test_prune_keeps_what_any_rule_keeps(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for step, metric in ((1, 0.5), (10, 0.9), (13, 0.7), (20, 0.8), (25, 0.6)):
        ckpt.save({"x": torch.ones(1)}, root, step=step, metric=metric)
    arguments = ["--keep-every", "10", "--keep-best", "1:max", "--keep-younger", "0.001s"]
    assert main(["prune", root, *arguments, "--yes"]) == 0
    assert [info.step for info in ckpt.list_steps(root)] == [1, 10, 20, 25]


class Terminal(io.StringIO):
    """What a person types, and reads."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, answer: str) -> Terminal:
    """A terminal at which somebody answers."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def steps_of(root: str) -> list[int]:
    return [info.step for info in ckpt.list_steps(root)]


@pytest.mark.parametrize("command", [["prune", "--keep-last", "1"], ["rm", "--step", "5"]])
def test_nothing_is_deleted_before_somebody_has_agreed(
    command: list[str],
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [command[0], root, *command[1:]]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "step 5" in out and "--yes" in err and steps_of(root) == [5, 10]
    for answer, code in (("\n", 3), ("n\n", 3), ("", 3), ("what\n", 3), ("y\n", 0)):
        assert steps_of(root) == [5, 10]
        screen = typed(monkeypatch, answer)
        assert main(words) == code
        assert "[y/N]" in screen.getvalue() and "step 5" in capsys.readouterr().out
    assert steps_of(root) == [10]


def test_prune_that_would_match_nothing_is_refused(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rule in (["--keep-best", "1"], ["--keep-younger", "0.001s"]):
        for more in (["--yes"], ["--dry-run"]):
            assert main(["prune", root, *rule, *more]) == 1
            assert "nothing was deleted" in capsys.readouterr().err and steps_of(root) == [5, 10]


def test_prune_by_metric_keeps_what_was_not_measured(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for step, metric in ((1, 0.5), (2, None), (3, 0.9), (4, 0.7)):
        ckpt.save({"x": torch.ones(1)}, root, step=step, metric=metric)
    assert main(["prune", root, "--keep-best", "1", "--yes"]) == 0
    assert steps_of(root) == [1, 2, 4]
    assert main(["prune", root, "--keep-best", "1", "--retire-unmeasured", "--yes"]) == 0
    assert steps_of(root) == [1, 4]


def test_prune_leaves_imports_and_rm_removes_them(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    assert main(["import", str(tmp_path / "x.safetensors"), root, "--step", "10"]) == 0
    assert main(["prune", root, "--keep-last", "1", "--yes"]) == 0
    imported, own = ckpt.list_steps(root)
    assert (imported.step, imported.line, own.step, own.line) == (10, None, 10, 0)
    capsys.readouterr()
    assert main(["rm", root, "--step", "10", "--yes"]) == 1
    err = capsys.readouterr().err
    assert f"{own.attempt} (line 0)" in err and f"{imported.attempt} (no line)" in err
    assert main(["rm", root, "--step", "10", "--attempt", own.attempt, "--yes"]) == 1
    assert "only checkpoint that a training has saved here" in capsys.readouterr().err
    assert main(["rm", root, "--step", "10", "--attempt", imported.attempt, "--yes"]) == 0
    assert len(ckpt.list_steps(root)) == 1
    assert not list(Path(root, "steps").glob(f"*{imported.attempt}"))


def test_rm_says_why_it_refuses_and_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "run")
    frozen = torch.randn(300_000)
    for step in (1, 2):
        ckpt.save({"x": frozen, "n": step}, root, step=step, dedup=True)
    assert main(["rm", root, "--step", "3", "--yes"]) == 1
    assert "has no step 3" in capsys.readouterr().err
    assert main(["rm", root, "--step", "1", "--yes"]) == 1
    assert "is needed by" in capsys.readouterr().err
    assert main(["rm", root, "--step", "2", "--dry-run"]) == 0
    assert "a training resumes from step 1 then" in capsys.readouterr().out
    assert main(["rm", root, "--step", "2", "--json", "--yes"]) == 0
    assert main(["rm", root, "--step", "1", "--yes"]) == 1
    assert "is the only checkpoint" in capsys.readouterr().err
    assert steps_of(root) == [1] and ckpt.verify(root).ok


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "s4://bucket/run"], 2, "unknown protocol"),
        (["ls", "/nowhere/at/all"], 1, "no shardpoint checkpoint"),
        (["verify", "memory://empty-and-unknown"], 1, "no shardpoint checkpoint"),
        (["export", "/nowhere", "model.bin"], 1, "no checkpoint of a known format"),
        (["export", "/nowhere", "model.zip"], 1, "model.safetensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_reported_in_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("ckpt: error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["lss", "x"],
        ["prune", "x"],
        ["prune", "x", "--keep-last", "0"],
        ["prune", "x", "--keep-best", "2:most"],
        ["prune", "x", "--keep-younger", "7"],
        ["prune", "x", "--keep-last", "1", "--retire-unmeasured"],
        ["rm", "x"],
        ["rm", "x", "--step", "latest"],
        ["export", "x", "y.safetensors", "--shard-bytes-max", "big"],
        ["export", "x", "y.safetensors", "--rename", "re:(=a"],
        ["ls", "x", "-o", "endpoint"],
    ],
    ids=" ".join,
)
def test_wrong_command_lines_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: ckpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "examples:"), (["--help"], "examples:"), (["--version"], f"ckpt {ckpt.__version__}")],
    ids=" ".join,
)
def test_an_empty_command_line_shows_help(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0 and said in capsys.readouterr().out


def test_names_of_the_package_are_those_for_users() -> None:
    shown = [name for name in dir(ckpt) if not name.startswith("__")]
    parts = {"errors", "integrations", "operate", "reports", "state_dict"}
    assert shown == sorted({*ckpt.__all__, *parts})


def test_command_runs_as_a_process_and_help_has_examples() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "examples:" in done.stdout and "salvage" in done.stdout
