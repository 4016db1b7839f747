"""The terminal of `ckpt watch`: frames that follow its size, or one frame on a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ckpt.cli.visible import below
from ckpt.cli.watch_frame import Line

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


def show_lines(lines: Iterable[Line], *, width: int) -> None:
    """Print a frame once; styles where stdout is a terminal."""
    console = Console(file=below(sys.stdout), width=width)
    for line in lines:
        console.print(_text(line))


def _text(line: Line) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for words, style in line:
        text.append(words, style)
    return text
