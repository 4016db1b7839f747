"""What commands show with: tables, a progress bar, sizes, times, with `rich`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ckpt.errors import CheckpointError
from ckpt.screens.visible import below, visible

WIDTH_WITHOUT_TERMINAL = 200  # columns; rich would take 80 and fold most rows
GAP = 2  # columns between those of a table
LINES_WRITTEN = 256  # at once
ROWS_MEASURED = 10_000  # of a table, to find out how wide its columns are
MINUTE, HOUR, DAY = 60, 3600, 86400
LOGGED_SECONDS = 30.0  # between lines of progress in a log


class _Console(Console):
    """A console that lets who called it know that nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """`ckpt.cli` ends the command then, as a success; rich would exit with 1."""
        raise  # the error that this is called for


@contextmanager
def progress_bar(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Progress in bytes on stderr: a bar on a terminal, a line every 30 s in a log; None where
    it is not `shown`.
    """
    console = _Console(file=below(sys.stderr))
    if not shown:
        yield None
        return
    # A bar in the log of a job would be thousands of lines, one for each time it is drawn.
    if not console.is_terminal:
        yield _logged(what)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _logged(what: str) -> Callable[[int, int], None]:
    """A line every LOGGED_SECONDS: `export: 45 % of 12.1 GiB, 410.0 MiB/s`."""
    began = said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LOGGED_SECONDS:
            said = now
            share, rate = 100 * done / max(total, 1), rate_text(done / (now - began))
            print(f"{what}: {share:.0f} % of {size(total)}, {rate}", file=sys.stderr, flush=True)

    return progress


def show_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print rows under titles; the columns in `right` are numbers and stand to the right.

    Texts are what people copy: folded in a narrow terminal, never cut.
    """
    rows = iter(rows)
    cells = [[visible(cell) for cell in row] for row in islice(rows, ROWS_MEASURED)]
    # Below the stream that shows codes: rich writes some on purpose, for bold titles.
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    console = _Console(width=width, file=below(sys.stdout))
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    many = next(rows, None)
    if many is not None or sum(widths) + GAP * len(widths) <= console.width:
        # rich takes half a millisecond for a row: a minute for the checkpoints of a large root.
        aligned = [(width, title in right) for width, title in zip(widths, titles, strict=True)]
        console.print(Text(_padded(titles, aligned).rstrip(), style="bold"))
        # Of a million rows the first ones say how wide columns are, and none is kept.
        others = () if many is None else chain([many], rows)
        lines = _lines(map(tuple, chain(cells, others)), aligned)
        while text := "".join(islice(lines, LINES_WRITTEN)):
            below(sys.stdout).write(text)
        return
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _lines(rows: Iterable[Sequence[str]], aligned: Sequence[tuple[int, bool]]) -> Iterator[str]:
    """The rows as lines. What follows the first cell is mostly one of a few, and made once."""
    ends: dict[Sequence[str], str] = {}
    width, is_right = aligned[0]
    for row in rows:
        rest = row[1:]
        end = ends.get(rest)
        if end is None:
            end = _padded(["", *rest], [(0, False), *aligned[1:]]).rstrip() + "\n"
            if len(ends) < ROWS_MEASURED:
                ends[rest] = end
        name = row[0]
        if not is_right and end != "\n" and name.isascii() and name.isprintable():
            yield name.ljust(width) + end
        else:
            yield (_padded(row[:1], aligned[:1]) + end).rstrip() + "\n"


def _padded(cells: Sequence[str], aligned: Sequence[tuple[int, bool]]) -> str:
    """One row; each cell has a width, in columns of a terminal, and may stand to the right."""
    padded = []
    for cell, (width, is_right) in zip(cells, aligned, strict=True):
        text = visible(cell)
        # rich's own measure takes longer than all else of a row.
        wide = 0 if text.isascii() else cell_len(text) - len(text)
        padded.append(text.rjust(width - wide) if is_right else text.ljust(width - wide))
    return (" " * GAP).join(padded)


def asked(question: str, *, yes: bool) -> bool:
    """Ask on the terminal before something is deleted; with `yes`, the answer was given before.

    Raises CheckpointError where there is no terminal to ask on: a script has to pass --yes.
    """
    if yes:
        return True
    # A script would wait for ever for an answer, or delete by an empty one.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CheckpointError(
            "nothing was deleted: there is no terminal to ask on; pass --yes to delete what is "
            "listed, or --dry-run to look only"
        )
    # Not on stdout, which may be a file, or JSON for a program.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def screen_width() -> int:
    """Columns of the terminal, or `WIDTH_WITHOUT_TERMINAL`."""
    return _Console(file=below(sys.stdout)).width if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL


def show_names(title: str, names: Sequence[str], count_max: int, *, more: str = "") -> None:
    """Print a line for each of the first `count_max` names, and how many `more` there are."""
    for name in names[:count_max]:
        print(f"{title}: {name}")
    if len(names) > count_max:
        print(f"... and {len(names) - count_max} more{more}; --json lists all")


def write_page(path: str, pieces: Iterable[str]) -> None:
    """Write a page to the new or old local file `path`. Raises CheckpointError when it cannot."""
    try:
        with open(path, "w", encoding="utf-8") as page:
            page.writelines(pieces)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; --output names a local file"
        ) from error


def show_json(value: Any, last: str = "", entries: Iterable[tuple[str, str]] | None = None) -> None:
    """Print `value` for programs; the numbers that JSON lacks become null.

    `entries` are those of its dict `last`, each as JSON in a line; only one of them is in memory.
    """
    text = _json(value, 2)
    if entries is None:
        print(text)
        return
    # JSON has escaped what is not to be seen: going through it once more would cost seconds.
    out = below(sys.stdout)
    out.write(f"{text.removesuffix('}').rstrip()},\n  {_json(last)}: {{")
    between = ""
    for name, entry in entries:
        out.write(f"{between}\n    {_plain(json.dumps(name))}: {entry}")
        between = ","
    out.write("\n  }\n}\n")


def _json(value: Any, indent: int | None = None) -> str:
    return _plain(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _plain(text: str) -> str:
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets through


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    # Python would write NaN and Infinity, which no other parser takes.
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return None
    return value


def as_json(value: Any) -> Any:
    """A value of a report for JSON: records by their fields and short properties."""
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        kind: Any = type(value)
        fields, properties = _names_of(kind)
        known = {name: as_json(getattr(value, name)) for name in fields}
        made = {name: getattr(value, name) for name in properties}
        # Longer ones, such as `Report.live`, say again what fields say.
        return known | {n: v for n, v in made.items() if isinstance(v, int | float | str | None)}
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


@cache
def _names_of(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a record, and its properties."""
    fields = getattr(kind, "__dataclass_fields__", None) or kind._fields
    members = inspect.getmembers(kind)
    return tuple(fields), tuple(name for name, one in members if isinstance(one, property))


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(nbytes: int) -> str:
    """Bytes as people say them: `512 B`, `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**power:.1f} {' KMGT'[power]}iB"


def seconds_text(seconds: float) -> str:
    """A duration as people say it: `0.3 ms`, `45 ms`, `1.25 s`, `132 s`."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def rate_text(nbytes_per_second: float) -> str:
    """`1.5 GiB/s`."""
    return f"{size(int(nbytes_per_second))}/s"


def date(unix: float | None) -> str:
    """Local time, or nothing where the time is unknown."""
    return "" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def age(seconds: float) -> str:
    """How long ago, in one or two units: `40 s ago`, `3 h 10 min ago`; clocks may disagree."""
    if seconds < 0:
        return "in the future"
    if seconds < MINUTE:
        return f"{seconds:.0f} s ago"
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f} min ago"
    if seconds < DAY:
        return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:.0f} min ago"
    return f"{seconds // DAY:.0f} d {seconds % DAY // HOUR:.0f} h ago"


def shape_text(shape: Sequence[int]) -> str:
    """`33 x 48`, or `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def short(text: str, length_max: int = 100) -> str:
    """`text`, cut with dots where it is longer."""
    return text if len(text) <= length_max else f"{text[: length_max - 3]}..."
