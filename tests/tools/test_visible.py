"""Hostile names, values and notes reach no terminal and no page as they are, by any command."""

from __future__ import annotations

import io
import json
import logging
import re
import unicodedata
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.screens.visible import VisibleStream, visible

# Repaints a terminal, turns directions, hides, ends lines, is no character at all.
HOSTILE = "a\x1b]0;t\x07\x1b[2J\u202e\u2066\x9b31m\x7f\u200b\u2028\ue000\rz"
COMMANDS = re.compile(r"^    ([a-z]+)( |$)", re.MULTILINE)


def bad(text: str, keep: str = "\n\t") -> set[str]:
    kinds = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return {one for one in text if unicodedata.category(one) in kinds and one not in keep}


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two roots of two steps each, and files; everything in them that can have a name has one."""
    for name, factor in (("a", 1.0), ("b", 2.0)):
        for step in (1, 2):
            state = {
                "m": {HOSTILE: torch.ones(3) * factor * step, f"{HOSTILE}2": torch.ones(step)},
                "v": {HOSTILE: HOSTILE, "n": [HOSTILE, step * factor]},
            }
            ckpt.save(
                state, str(tmp_path / name), step=step, user={HOSTILE: HOSTILE}, telemetry=True
            )
    torch.save({"m": {HOSTILE: torch.ones(2)}, HOSTILE: print}, tmp_path / "bad.pt")
    torch.save({"w": torch.ones(2), HOSTILE: torch.ones(2)}, tmp_path / "fine.pt")
    return tmp_path / "a", tmp_path / "b"


def test_no_command_prints_what_steers_a_terminal(
    roots: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # some commands write where they are
    a, b = map(str, roots)
    step = str(next((roots[0] / "steps").glob("00000001-*")))
    page, other = str(tmp_path / "p.html"), str(tmp_path / "r.html")
    calls = [
        ["ls", a], ["log", a], ["du", a], ["show", a], ["show", a, "--map"],
        ["show", a, "--map", "--output", page], ["report", a, "--output", other], ["report", a],
        ["diff", a, b], ["diff", a, a, "--step", "1", "--other-step", "2"],
        ["plan", a, "--ranks", "2"], ["plan", a, "--like", str(tmp_path / "fine.pt")],
        ["verify", a], ["cp", a, str(tmp_path / "copy")],
        ["reshard", a, str(tmp_path / "two"), "--ranks", "2"],
        ["export", a, str(tmp_path / "out.pt")], ["export", a, str(tmp_path / "o.safetensors")],
        ["import", str(tmp_path / "bad.pt"), str(tmp_path / "in")],
        ["import", str(tmp_path / "fine.pt"), str(tmp_path / "in"), "--step", "1"],
        ["pin", a, "1"], ["unpin", a, "1"],
        ["salvage", step], ["mend", a], ["show", a, HOSTILE], ["show", a + HOSTILE],
        ["verify", a + HOSTILE], ["prune", a, "--keep-last", "1", "--yes"], ["rm", b, "1", "--yes"],
        ["completion", "bash"], ["cost", a], ["watch", a, "--once"], ["follow", a, "--once"],
        ["rescue", str(tmp_path / HOSTILE), str(tmp_path / "rescued")], ["rehearse", HOSTILE],
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["--help"])
    known = {name for name, _ in COMMANDS.findall(capsys.readouterr().out)}
    # `serve` prints an address and stays; tests/tools/test_serving.py looks at its pages.
    assert known == {call[0] for call in calls} | {"serve"}
    for call in calls:
        for more in ([], ["--json"]):
            if call[0] == "completion" and more:
                continue
            if call[0] in ("cp", "reshard", "export", "import") and more:
                call = [*call[:2], f"{call[2]}-json", *call[3:]]
            try:
                code = main([*call, *more])
            except SystemExit as ended:
                code = int(ended.code or 0)
            printed = capsys.readouterr()
            where = f"{call} {more}: {(printed.out + printed.err)!r:.300}"
            assert not bad(printed.out) and not bad(printed.err), where
            if more and code in (0, 1, 3) and printed.out:
                json.loads(printed.out)
    for path in (page, other):
        text = Path(path).read_text()
        assert not bad(text), path
    assert "\\x1b" in Path(page).read_text()
    assert main(["show", str(roots[0]), "--json"]) == 0
    assert any(HOSTILE in name for name in json.loads(capsys.readouterr().out)["tensors"])


def test_log_lines_and_unexpected_errors_are_shown_too(
    roots: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hostile(store: object) -> None:
        print(HOSTILE)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": HOSTILE}))
        raise ckpt.CheckpointError(HOSTILE)

    monkeypatch.setattr("ckpt.tools.overview.listing", hostile)
    assert main(["ls", str(roots[0])]) == 1
    captured = capsys.readouterr()
    assert "\\x1b[2J" in captured.out and captured.err.count("\\x1b[2J") == 2
    assert not bad(captured.out + captured.err)


def test_what_has_a_shape_stays() -> None:
    assert visible("weights/é 模型 😀 \u00a0x") == "weights/é 模型 😀 \u00a0x"
    assert visible("a\nb\x1b\ud800\U000e0001", keep="\n") == "a\nb\\x1b\\ud800\\U000e0001"


def test_a_stream_outlives_the_one_below() -> None:
    below = io.StringIO()
    stream = VisibleStream(below)
    below.close()
    stream.flush()
    stream.close()
