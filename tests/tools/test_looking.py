"""log, du, the map, completion and help are right and quick, for people and for programs.

What is printed as JSON is compared with what is on the disk; scripts for shells are run in these
shells where they are installed; the page is looked at by a parser, and by a browser if any is here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.cli.commandline import COMMANDS
from ckpt.cli.completing import SCRIPTS, words_after
from ckpt.cli.showing import Rectangle, map_of, rank_of, rectangles
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import record_key
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.layout.region import Box, Span
from ckpt.screens.terminal import age, size
from storage import open_store


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    for step in (1, 2, 3):
        ckpt.save({"x": torch.ones(step * 1000)}, url, step=step, metric=1.0 / step)
    maintenance = Maintenance.open(open_store(url))
    maintenance.pin(ckpt.list_steps(url)[1].attempt)
    maintenance.retire(ckpt.list_steps(url)[0].attempt)
    return url


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# log -------------------------------------------------------------------------------------------


def test_history_is_newest_first_and_knows_what_was_retired(root: str) -> None:
    events = ckpt.history(root)
    kinds = [(event.kind, event.step, event.live) for event in events]
    assert kinds == [
        ("RETIRE", 1, 2),
        ("PIN", 2, 3),
        ("COMMIT", 3, 3),
        ("COMMIT", 2, 2),
        ("COMMIT", 1, 1),
        ("CLAIM", None, 0),
    ]
    assert [event.slot for event in events] == [5, 4, 3, 2, 1, 0]
    assert events[2].metric == pytest.approx(1 / 3)
    assert ckpt.history(root, count=1) == events[:1], "the step needs the record before"
    assert ckpt.history(root, count=100) == events


def test_log_command(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", root]) == 0
    out = capsys.readouterr().out
    assert "retired" in out and "pinned" in out and "metric 0.5" in out and " ago" in out
    with pytest.raises(SystemExit, match="2"):
        main(["log", root, "-n", "-1"])
    assert "not a number of at least 0" in capsys.readouterr().err
    assert main(["log", root, "-n", "2"]) == 0
    assert "and 4 older records" in capsys.readouterr().out
    events = as_json(capsys, "log", root)["events"]
    assert [event["kind"] for event in events][:2] == ["RETIRE", "PIN"]


def test_removed_record_is_named(root: str) -> None:
    (Path(root) / record_key(2)).unlink()
    with pytest.raises(Corrupt, match=r"slot 2.*ckpt mend"):
        ckpt.history(root)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "in the future"),
        (3, "3 s ago"),
        (150, "2 min ago"),
        (3 * 3600 + 600, "3 h 10 min ago"),
        (50 * 3600, "2 d 2 h ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        ((1 << 30) - 1, "1024.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (7 << 50, "7168.0 TiB"),
    ],
)
def test_sizes_have_the_unit_that_people_say(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# du --------------------------------------------------------------------------------------------


def test_usage_counts_every_byte_once(root: str) -> None:
    """With an unfinished save and a foreign file."""
    left = Path(root) / "steps" / "00000009-e000001-00000000000000aa"
    left.mkdir()
    (left / "rank00000-000.safetensors").write_bytes(b"x" * 777)
    (Path(root) / "notes.txt").write_bytes(b"mine")
    usage = ckpt.disk_usage(root)
    on_disk = sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
    assert usage.nbytes == on_disk and usage.other_nbytes == 4
    assert usage.unfinished_nbytes == 777
    assert [(a.step, a.is_live, a.pinned) for a in usage.attempts] == [
        (2, True, True),
        (3, True, False),
        (9, False, False),
    ]


def test_du_command(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = as_json(capsys, "du", root)
    assert printed["nbytes"] == ckpt.disk_usage(root).nbytes and len(printed["attempts"]) == 2
    assert main(["du", root]) == 0
    assert "FORMAT and log" in capsys.readouterr().out
    directory = ckpt.list_steps(root)[0].url
    assert as_json(capsys, "du", directory)["attempts"][0]["step"] == 2
    with pytest.raises(NoCheckpoint):
        ckpt.disk_usage(str(Path(root).parent / "nothing"))


# The map ---------------------------------------------------------------------------------------


def test_rectangles_cover_the_square() -> None:
    assert rectangles(Box((0, 0), (4, 6)), (4, 6)) == [Rectangle(0, 0, 1, 1)]
    assert rectangles(Span(0, 1), ()) == [Rectangle(0, 0, 1, 1)]
    for region in (Span(5, 17), Box((1, 2), (3, 3)), Span(0, 24), Box((0, 0), (4, 1))):
        area = sum(r.width * r.height for r in rectangles(region, (4, 6)))
        assert area == pytest.approx(region.numel / 24)


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("rank00012-000.safetensors", "12"),
        ("rank00000-003.safetensors", "0"),
        ("../00000001-e000001-00000000000000aa/rank00003-000.safetensors", "3"),
        ("weights.safetensors", "weights.safetensors"),
    ],
)
def test_rank_of_file(file: str, rank: str) -> None:
    assert rank_of(file) == rank


def test_map_counts_the_bytes_of_every_part(plain_root: str) -> None:
    with ckpt.open(plain_root) as ck:
        shard_map = map_of(ck)
        assert {tensor.fqn for tensor in shard_map.tensors} == set(ck.manifest.fqns)
        for tensor in shard_map.tensors:
            assert sum(shard_map.nbytes_by_rank(tensor)) == tensor.nbytes
        sizes = [file.nbytes for file in shard_map.files.values()]
        assert sizes == ck.manifest.file_nbytes.tolist()


class Page(HTMLParser):
    """Tags that are open, and all attributes that could lead to another place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.rects = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action")]
        self.rects += tag == "rect"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.ranks
def test_page_holds_everything_and_names_are_escaped(
    sliced_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = str(tmp_path / "run")
    ckpt.save({"<b>&x": torch.ones(4)}, evil, step=1)
    for url, name, rects in ((sliced_root, "model.1.weight", 3), (evil, "<b>&x", 1)):
        output = tmp_path / "map.html"
        assert main(["show", url, "--map", "--output", str(output)]) == 0
        assert "open it in a browser" in capsys.readouterr().out
        page = Page()
        page.feed(output.read_text(encoding="utf-8"))
        assert not page.open and not page.links and "http" not in output.read_text()
        assert name in page.text and page.rects >= rects


@pytest.mark.ranks
def test_map_in_the_terminal_shows_who_has_what(
    sliced_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", sliced_root, "model.?.weight", "--map"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("model.1.weight"))
    assert row.rstrip().endswith("|▒▒▒▒▒▒|")
    assert "rank00002-000.safetensors" in out


def test_page_that_cannot_be_written_is_reported(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", plain_root, "--map", "--output", str(tmp_path / "no" / "x.html")]) == 1
    assert "--output names a local file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["show", plain_root, "--output", "x.html"])
    assert "--output is for --map" in capsys.readouterr().err


def test_json_is_the_answer_with_a_map_too(
    plain_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", plain_root, "--json"]) == 0
    plain = capsys.readouterr().out
    assert main(["show", plain_root, "--json", "--map"]) == 0
    assert capsys.readouterr().out == plain and json.loads(plain)["schema"] == "ckpt.show"


@pytest.mark.server
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_browser_draws_the_page(plain_root: str, tmp_path: Path) -> None:
    page, picture = tmp_path / "map.html", tmp_path / "map.png"
    assert main(["show", plain_root, "--map", "--output", str(page)]) == 0
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    assert picture.stat().st_size > 10_000


# Completion and help ---------------------------------------------------------------------------


def completions(line: str) -> list[str]:
    """What bash would offer for the last word of `line`, asked as its script asks."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ours = f"ckpt() {{ '{sys.executable}' -m ckpt \"$@\"; }}"
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _ckpt"
    done = subprocess.run(
        ["bash", "-c", f'{SCRIPTS["bash"]}\n{ours}\n{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])},
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckpt sh", ["show"]),
        ("ckpt re", ["report", "rehearse", "reshard", "rescue"]),
        ("ckpt show run --ma", ["--map"]),
        ("ckpt reshard run to --layout f", ["fsdp2", "flat"]),
        ("ckpt completion ", ["bash", "zsh", "fish"]),
        ("ckpt diff a b --sort ", ["name", "amount"]),
    ],
)
def test_bash_completes(line: str, expected: list[str]) -> None:
    assert completions(line) == expected


def test_every_command_and_option_is_completed() -> None:
    names = words_after([""])
    assert {"ls", "cp", "diff", "plan", "reshard", "import"} <= set(names)
    for command in COMMANDS:
        assert command.name in names
        offered = words_after([command.name, "-"])
        for option in command.options:
            assert set(option.names) <= set(offered), command.name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid_in_their_shells(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    subprocess.run([shell, "-n", str(script)], check=True, capture_output=True, timeout=30)


def test_every_command_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command.name, "--help"])
        assert stopped.value.code == 0
        assert f"ckpt {command.name}" in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["completion", "bash"], ["cp", "--help"], ["lss"]], ids=" ".join
)
def test_help_and_completion_import_nothing_slow(arguments: list[str]) -> None:
    """A claim on time that a machine can check: neither torch nor numpy nor rich is imported."""
    code = (
        "import sys\nfrom ckpt.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "slow = {'torch', 'numpy', 'rich', 'pydantic', 'msgpack'} & set(sys.modules)\n"
        "print(sorted(slow), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


# What a command may have in memory, of what `ls` has, interpreter and libraries included: that is
# 57 MB here, the others up to 61, and torch alone would be 500.
OF_WHAT_LS_HAS = 1.15


@pytest.fixture
def to_look_at(root: str) -> str:
    """A root with all that `show` has words for: optimizer state, values, a composite; and a step
    directory that lost its manifest.
    """
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8)).sum().backward()
    optimizer.step()
    state = {"model": layer, "optim": optimizer, "mask": torch.eye(4).to_sparse(), "epoch": 4}
    ckpt.save({"x": torch.ones(10)}, root, step=4)
    (lost,) = Path(root).glob("steps/00000004-*/MANIFEST")
    ckpt.save(state, root, step=5)
    lost.unlink()
    return root


@pytest.mark.parametrize(
    "commands",
    [
        ["ls", "log", "du", "report", "watch --once", "cost", "rm --step 4 --dry-run"],
        ["show", "show --json", "show --map", "show --metadata-bytes-max 1GB"],
        ["verify"],
        ["prune --keep-last 1 --dry-run"],
        ["salvage --step 4 --dry-run", "salvage", "mend --dry-run"],
    ],
    ids=lambda commands: commands[0].partition(" ")[0],
)
def test_commands_that_move_no_tensor_import_no_torch(
    to_look_at: str, commands: list[str], tmp_path: Path
) -> None:
    """In interpreters that have just started. Memory is counted: no machine can vouch for time."""
    yardstick = peak_without_torch(["ls"], to_look_at, tmp_path)
    peak = peak_without_torch(commands, to_look_at, tmp_path)
    assert peak < OF_WHAT_LS_HAS * yardstick


def peak_without_torch(commands: list[str], root: str, folder: Path) -> int:
    """The KiB that a process has had which ran these commands; it must not have imported torch."""
    code = "import sys\nfrom ckpt.cli import main\n"
    for command in commands:
        name, *rest = command.split()
        code += f"assert main({[name, root, *rest]!r}) == 0\n"
    # Not by getrusage, whose peak a new program takes over from the process that started it.
    code += "status = dict(line.split(':') for line in open('/proc/self/status'))\n"
    code += "print('torch' in sys.modules, *status['VmHWM'].split(), file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,  # `report` writes its page there
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    has_torch, peak, unit = done.stderr.split()[-3:]
    assert (has_torch, unit) == ("False", "kB")
    return int(peak)


def test_every_command_that_tells_something_speaks_json(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"completion", "serve"}
    for command in COMMANDS:
        flags = {name for option in command.options for name in option.names}
        assert ("--json" in flags) is (command.name not in silent), command.name
    for name in ("ls", "log", "du", "show", "verify", "plan"):
        assert as_json(capsys, name, root)
    assert as_json(capsys, "prune", root, "--keep-last", "1", "--dry-run")["deleted"] == []
    assert as_json(capsys, "salvage", root)["reports"] == []
