"""`ckpt watch` shows what a run looks like now, in a terminal of any size, as lines and as JSON.

Frames and lines are values and are compared as such. The command itself runs in processes: one that
writes to a pipe, and one on a pseudo-terminal, whose bytes are read.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.screens.visible import visible
from ckpt.screens.watching import DRAWN, PLAIN, Line, frame_of, happenings, marks_of
from ckpt.telemetry.record import SaveFailure
from ckpt.tools.polling import RunPoller, RunState
from ckpt.tools.report import TrainingRun, busiest_ranks, longest_phases
from storage.memory import MemoryStore
from tests.tools.test_polling import LongRun, telemetry_of_step

EVIL = "\x1b[2J\u202e<b>\n"
GUARD_SECONDS = 120.0  # against hanging


def text_of(lines: Sequence[Line]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def seen(steps: int, *failures: SaveFailure, **telemetry: Any) -> RunState:
    long = LongRun(steps - 1)
    if steps:
        long.save(**telemetry)
    if failures:
        long.job(*failures)
    return RunPoller(MemoryStore(long.bucket)).poll()


def frame(state: RunState, **size: int) -> str:
    return text_of(frame_of(state, 1100.0, **({"width": 120, "height": 50} | size)))


# Frames -----------------------------------------------------------------------------------------


def test_frame_has_numbers_charts_phases_and_saves() -> None:
    shown = frame(seen(9))
    assert "step 9, saved 1 min ago | 3 live of 9 saves, 11.7 KiB" in shown
    assert "median: blocked 10 ms, duration 0.5 s, throughput 7.8 KiB/s" in shown
    assert f"{'saves':11}{DRAWN.retired * 6}{DRAWN.live * 3}" in shown
    # Of retired ones, telemetry is known only by what later ones carry: here by none.
    assert f"{'duration':11}{' ' * 6}{DRAWN.steps[-1] * 3}  last 0.5 s, most 0.5 s" in shown
    assert "step 9 took 0.5 s on 1 rank; longest at work: rank 0 (0.1 ms)" in shown
    rows = [line for line in shown.splitlines() if re.match(r" *\d+  \d{4}-", line)]
    assert [int(row.split()[0]) for row in rows] == list(range(9, 0, -1))
    assert [("live" in row, "retired" in row) for row in rows[2:4]] == [
        (True, False),
        (False, True),
    ]


def test_metrics_are_a_curve_between_their_least_and_most() -> None:
    state = seen(3)
    saves = [
        replace(save, metric=m) for save, m in zip(state.run.saves, (2.0, None, -6.0), strict=True)
    ]
    shown = frame(replace(state, run=replace(state.run, saves=(*saves,))))
    steps = DRAWN.steps
    assert f"{'metric':11}{steps[-1]} {steps[0]}  last -6, most 2" in shown
    assert "metric " not in frame(state)  # of no save


@pytest.mark.parametrize("height", [1, 2, 5, 12, 24])
def test_frame_fits_the_terminal(height: int) -> None:
    lines = frame_of(seen(30), 1100.0, width=40, height=height)
    assert len(lines) == height


def test_charts_show_as_many_saves_as_there_is_room() -> None:
    rows = frame(seen(200), width=60).splitlines()
    (saves,) = (row for row in rows if row.startswith("saves"))
    assert saves.count(DRAWN.retired) + saves.count(DRAWN.live) == 25 + 2  # and their legend


def test_frame_shows_failures_with_their_texts_and_hostile_ones_as_codes() -> None:
    failed = SaveFailure(step=4, time_unix=1003.5, error=f"StorageError: {EVIL}")
    lines = frame_of(seen(5, failed), 1100.0, width=120, height=50)
    shown = text_of(lines)
    assert "the save of step 4 has failed" in shown and visible(EVIL) in shown
    assert "\x1b" not in shown and "\u202e" not in shown and "1 failed save" in shown
    # Before any save has succeeded, too.
    assert "the save of step 4 has failed" in frame(seen(0, failed)) and "node-1" in shown
    state = seen(2)
    away = replace(state, availability="away", problem=EVIL, since_unix=1000.0)
    evil = replace(away, run=replace(away.run, url=EVIL))
    for hostile in (evil, replace(evil, availability="waiting", run=TrainingRun(EVIL))):
        assert "\x1b" not in (shown := frame(hostile)) and visible(EVIL) in shown


def test_frame_says_what_a_place_without_saves_is() -> None:
    nothing = RunState(TrainingRun("runs/7b"), since_unix=1000.0)
    assert frame(nothing) == "runs/7b\nnothing was saved here yet; waiting for the first save"
    begun = replace(nothing, availability="there")
    assert "a job has begun here" in frame(begun)
    away = replace(nothing, availability="away", problem="no route")
    assert "not to be read since 1 min: no route" in frame(away)
    gone = replace(seen(1), run=replace(seen(1).run, saves=()))
    retired = replace(seen(1).run.saves[0], is_live=False)
    gone = replace(gone, run=replace(gone.run, saves=(retired,)))
    assert "none of its checkpoints exists any more" in frame(gone)


def test_terminals_without_these_characters_get_plain_ones() -> None:
    assert marks_of("utf-8") is marks_of(None) is DRAWN
    assert marks_of("ascii") is marks_of("no such") is PLAIN
    plain = text_of(frame_of(seen(3), 1100.0, width=80, height=40, marks=PLAIN))
    assert f"{'saves':11}{PLAIN.live * 3}" in plain
    plain.encode("ascii")


def test_phases_name_the_slowest_ranks() -> None:
    one = telemetry_of_step(1).model_copy(
        update={
            "phases": ["stage", "write", "wait", "commit"],
            "took_us": [[5, 10, 900, 7], [1, 30, 800, 0], [9, 30, 0, 0]],
        }
    )
    assert [(p.phase, round(p.seconds * 1e6), p.rank) for p in longest_phases(one)] == [
        ("stage", 9, 2),
        ("write", 30, 1),
        ("commit", 7, 0),
    ]
    assert [(rank, round(seconds * 1e6)) for rank, seconds in busiest_ranks(one, 2)] == [
        (2, 39),
        (1, 31),
    ]


# Lines ------------------------------------------------------------------------------------------


def test_lines_say_what_has_happened_between_two_looks() -> None:
    long = LongRun(3)
    poller = RunPoller(MemoryStore(long.bucket))
    first = poller.poll()
    (begun,) = happenings(None, first)
    assert (
        begun.text.startswith("memory://") and "3 checkpoints, the newest is step 3" in begun.text
    )
    assert happenings(first, poller.poll()) == []
    long.save()
    long.job(SaveFailure(step=9, time_unix=1003.5, error="no space"))
    second = poller.poll()
    kinds = [(one.kind, one.step) for one in happenings(first, second)]
    assert kinds == [("failed", 9), ("saved", 4), ("measured", 4), ("retired", 1)]
    texts = [one.text for one in happenings(first, second)]
    assert texts[0] == "failed to save step 9: no space"
    assert texts[1] == "saved step 4, 3.9 KiB" and "slowest rank 0 of 1 (write 0.4 s)" in texts[2]


def test_lines_say_that_a_store_is_away_and_back() -> None:
    there = seen(1)
    away = replace(there, availability="away", problem="no route", since_unix=1200.0)
    back = replace(there, since_unix=1260.0)
    assert [one.text for one in happenings(there, away)] == ["cannot be read: no route"]
    assert happenings(away, replace(away, version=9)) == []
    assert [one.text for one in happenings(away, back)] == ["can be read again, after 60 s"]
    waiting = RunState(TrainingRun("x"))
    kinds = [one.kind for one in happenings(None, waiting)]
    assert kinds == ["begun", "waiting"]


# The command ------------------------------------------------------------------------------------


def test_once_prints_a_frame_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    assert main(["watch", url, "--once"]) == 0
    assert "waiting for the first save" in capsys.readouterr().out
    ckpt.save({EVIL: torch.ones(8)}, url, step=3)
    assert main(["watch", url, "--once"]) == 0
    assert "step 3, saved" in capsys.readouterr().out
    assert main(["watch", url, "--once", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [save["step"] for save in shown["saves"]] == [3] and shown["availability"] == "there"


def test_wrong_urls_end_as_with_any_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for more in ([], ["--once"]):
        assert main(["watch", str(tmp_path), *more]) == 1
        assert "notes.txt" in capsys.readouterr().err
        assert main(["watch", "s4://bucket/run", *more]) == 2
        assert "did you mean s3" in capsys.readouterr().err


def command(url: str, *more: str) -> list[str]:
    # Where the tests run in the background of a script, SIGINT is ignored, and children inherit it.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from ckpt.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "watch", url, "--interval", "0.2s", *more]


def environment() -> dict[str, str]:
    """Without what would fix the size of a terminal."""
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**own, "TERM": "xterm-256color", "PYTHONPATH": str(Path(ckpt.__file__).parents[1])}


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_lines_come_through_a_pipe_as_saves_are_made(tmp_path: Path, more: tuple[str]) -> None:
    url = str(tmp_path / "run")
    with subprocess.Popen(
        command(url, *more), stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert "waiting for the first save" in lines[1]
            ckpt.save({"x": torch.ones(8)}, url, step=7)
            while "step 7 took" not in lines[-1] and lines[-1]:
                lines.append(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(GUARD_SECONDS) == 0
        finally:
            process.kill()
    assert any("saved step 7" in line for line in lines)
    if more:
        assert json.loads(lines[-1])["kind"] == "measured"


class Terminal:
    """`ckpt watch` on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.own, theirs = pty.openpty()
        self.resize(30, 100)
        self.process = subprocess.Popen(
            command(url), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=environment(),
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, is_there: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_there(self.shown) and time.monotonic() < deadline:
            if select.select([self.own], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.own, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        assert is_there(self.shown), self.shown[-2000:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)


def test_terminal_is_followed_resized_and_restored(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    terminal = Terminal(url)
    try:
        terminal.read_until(lambda text: "waiting for the first save" in text)
        assert "\x1b[?1049h" in terminal.shown  # a page of its own
        ckpt.save({"x": torch.ones(8)}, url, step=41)
        terminal.read_until(lambda text: "step 41 took" in text)
        terminal.shown = ""
        terminal.resize(5, 24)
        # At this width the second line of the frame is cut.
        terminal.read_until(lambda text: re.search("step 41, saved[^\r\n]{1,9}…", text) is not None)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(lambda text: "\x1b[?1049l" in text and "\x1b[?25h" in text)
        assert terminal.process.wait(GUARD_SECONDS) == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


INTERRUPTED = """
import os, signal, sys, threading
from ckpt.cli import main
from ckpt.screens.following import Following

signal.signal(signal.SIGINT, signal.default_int_handler)
number = int(sys.argv.pop(1))
take, wait = threading.Condition.__enter__, Following.wait
left = [False, 3]

def enter(self):
    result = take(self)
    if left[0] and left[1] and threading.current_thread() is threading.main_thread():
        left[1] -= 1
        if not left[1]:
            os.kill(os.getpid(), number)
    return result

def waiting(self, *given):
    left[0] = True
    return wait(self, *given)

threading.Condition.__enter__, Following.wait = enter, waiting
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signal_that_arrives_while_a_lock_is_taken_ends_the_command(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    # It was raised there, so the lock stayed taken and the thread that looks waited for ever.
    given = [str(number.value), "watch", str(tmp_path / "run"), "--interval", "0.2s"]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *given], timeout=GUARD_SECONDS, env=environment()
    )
    assert ended.returncode == code


def test_terminal_is_restored_on_sigterm(tmp_path: Path) -> None:
    terminal = Terminal(str(tmp_path / "run"))
    try:
        terminal.read_until(lambda text: "waiting for the first save" in text)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until(lambda text: "\x1b[?1049l" in text and "\x1b[?25h" in text)
        assert terminal.process.wait(GUARD_SECONDS) == 143
    finally:
        terminal.close()
