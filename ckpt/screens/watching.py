"""`ckpt watch`: follows a run in the terminal. It needs no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ckpt.errors import CheckpointError
from ckpt.screens.following import (
    STEP_SECONDS,
    Ending,
    Following,
    Versions,
    ended_by_signals,
    versions_of,
)
from ckpt.screens.terminal import as_json, date, screen_width, show_json
from ckpt.screens.visible import below
from ckpt.screens.watch_frame import Line, frame_of, happenings, marks_of
from ckpt.tools.cost import Prices, per_day
from ckpt.tools.polling import RunPoller, RunState
from ckpt.tools.report import near_report
from storage import StoreLike

Draw = Callable[[int, int], list[Line]]


class _DrawnFrame:
    """What `draw` makes of the size that the terminal has when it is shown."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(_text, self._draw(options.max_width, options.height or console.height))


@contextmanager
def full_screen(draw: Draw) -> Iterator[Callable[[], None]]:
    """A page of the terminal's own until the block ends, however it ends; yields what draws it
    anew.
    """
    console = Console(file=below(sys.stdout))
    with Live(
        _DrawnFrame(draw),
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        yield live.refresh


def _text(line: Line) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for words, style in line:
        text.append(words, style)
    return text


TICK_SECONDS = 1.0  # between frames: ages grow, and the terminal may have another size
ONCE_HEIGHT = 60  # lines of the frame of --once


def watch(
    url: StoreLike,
    near: Sequence[str],
    interval: float,
    storage_options: Mapping[str, Any] | None,
    *,
    as_json: bool,
    prices: Prices,
) -> None:
    """`ckpt watch`, until it is left."""
    # Ctrl-C is how one leaves it.
    with (
        contextlib.suppress(KeyboardInterrupt),
        ended_by_signals() as ending,
        Following(
            [url], storage_options or {}, interval_seconds=interval, near=near, ending=ending
        ) as following,
    ):
        if as_json or not sys.stdout.isatty():
            _print_lines(following, ending, as_json=as_json)
        else:
            _draw(following, ending, prices)


def watch_once(
    url: StoreLike,
    near: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    *,
    as_json: bool,
    prices: Prices,
) -> None:
    """`ckpt watch --once`."""
    poller = RunPoller(url, storage_options=storage_options, near=near)
    try:
        state = poller.poll()
    finally:
        poller.close()
    # Who watches waits for a store that is away; a script that looks once has to learn of it.
    if state.availability == "away":
        raise CheckpointError(state.problem)
    if as_json:
        show_json({"schema": "ckpt.watch", "version": 1, **_state_json(state, prices)})
        return
    width, marks = screen_width(), marks_of(sys.stdout.encoding)
    how: Any = {"width": min(width, 120), "height": ONCE_HEIGHT, "marks": marks}
    lines = frame_of(state, time.time(), prices=prices, **how)
    # Below the stream that shows codes: rich writes some on purpose, and texts were made visible.
    console = Console(file=below(sys.stdout), width=width)
    for line in lines:
        console.print(_text(line))


def _wait(following: Following, ending: Ending, seen: Versions) -> None:
    """Until something is of another version than in `seen`, or for a tick."""
    # In short steps: a signal leaves a mark only, and somebody has to look at it.
    deadline = time.monotonic() + TICK_SECONDS
    ending.check()
    while versions_of(following.wait(seen, STEP_SECONDS)) == seen and time.monotonic() < deadline:
        ending.check()


def _draw(following: Following, ending: Ending, prices: Prices) -> None:
    marks = marks_of(sys.stdout.encoding)
    # Lines of the log would be written across the page, which says the same.
    for name in ("ckpt", "storage"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    with full_screen(
        lambda width, height: frame_of(
            following.states[0],
            time.time(),
            width=width,
            height=height,
            marks=marks,
            prices=prices,
        )
    ) as refresh:
        while True:
            seen = versions_of(following.states)
            refresh()
            _wait(following, ending, seen)


def _print_lines(following: Following, ending: Ending, *, as_json: bool) -> None:
    before: RunState | None = None
    while True:
        (state,) = following.states
        for happening in happenings(before, state):
            line = f"{date(happening.time_unix)}  {happening.text}"
            own = json.dumps(happening._asdict(), allow_nan=False) if as_json else line
            print(own, flush=True)
        before = state
        _wait(following, ending, (state.version,))


def _state_json(state: RunState, prices: Prices) -> dict[str, Any]:
    return {
        "url": state.run.url,
        "availability": state.availability,
        "problem": state.problem,
        "sessions": state.run.sessions,
        "is_whole_history": state.run.is_whole_history,
        "saves": as_json(state.run.saves),
        "failed_saves": state.run.failed_saves,
        "failures": as_json(state.run.failures),
        "jobs": [{"state": job.state(time.time()), **as_json(job)} for job in state.run.jobs],
        "goodput": state.run.goodput and state.run.goodput._asdict(),
        "per_day": as_json(per_day(state.run, prices)),
        "near": as_json(near_report(state.near, state.run.live[-1] if state.run.live else None)),
        "notices": as_json(state.run.notices(time.time())),
    }
