"""Commands that look at a root without opening a checkpoint: ls, log, du. They need no torch."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import Any

from ckpt.cli.commandline import OK, PROBLEM
from ckpt.cli.rescuing import ls_near
from ckpt.cli.screen import age, counted, date, fields_json, show_json, show_table, size
from ckpt.commit.lines import latest_last
from ckpt.commit.locate import entry_by_path, state_of
from ckpt.commit.log import Log
from ckpt.commit.records import LiveEntry
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.tools.overview import AttemptUsage, Event, disk_usage, history
from storage import open_store

WHAT_HAPPENED = {
    "CLAIM": "a session began to write",
    "COMMIT": "saved",
    "RETIRE": "retired",
    "PIN": "pinned",
    "UNPIN": "unpinned",
    "VERIFIED": "verified, every byte",
}


# ls --------------------------------------------------------------------------------------------


def ls(arguments: argparse.Namespace) -> int:
    """`ckpt ls`."""
    if arguments.near:
        return ls_near(arguments)
    with closing(open_store(arguments.url, **dict(arguments.option))) as store:
        try:
            state = state_of(store)
            live = latest_last(state.live)
        except NoCheckpoint as no_root:
            return _ls_directory(entry_by_path(store, no_root), store.url, as_json=arguments.json)
    if text := state.uncommitted_text(store.url):
        print(text, file=sys.stderr)
    if arguments.json:
        show_json([_entry_json(entry, entry.committed_unix) for entry in live])
        return OK
    print(f"{store.url}: {counted(len(live), 'checkpoint')}")
    shown = []
    for entry in live:
        notes = [] if entry.line is not None else ["no training's own; loads by its attempt"]
        notes += [word for word in ("pinned", "verified") if getattr(entry, word)]
        notes += ["latest"] if entry is live[-1] else []
        notes += [f"metric {entry.metric:g}"] if entry.metric is not None else []
        notes += _needs(entry)
        committed, line = date(entry.committed_unix), _line_cell(entry.line)
        nbytes = size(entry.nbytes)
        shown.append((f"{entry.step}", committed, nbytes, line, entry.attempt, ", ".join(notes)))
    show_table(
        ("step", "committed", "size", "line", "attempt", "notes"),
        shown,
        right=("step", "size", "line"),
    )
    return OK


def _ls_directory(entry: LiveEntry, url: str, *, as_json: bool) -> int:
    """The one checkpoint of a step's directory, of which no log says more."""
    if as_json:
        known = {"directory": "", "begun_unix": entry.committed_unix}
        show_json([{**_entry_json(entry, None), **known}])
        return OK
    print(f"{url}: the directory of 1 checkpoint")
    row = (f"{entry.step}", date(entry.committed_unix), size(entry.nbytes), entry.attempt)
    titles = ("step", "begun", "size", "attempt", "notes")
    show_table(titles, [(*row, ", ".join(_needs(entry)))], right=("step", "size"))
    return OK


def _needs(entry: LiveEntry) -> list[str]:
    return [f"needs files of {counted(len(entry.references), 'other')}"] * bool(entry.references)


def _line_cell(line: int | None) -> str:
    return "none" if line is None else f"{line}"


def _entry_json(entry: LiveEntry, unix: float | None) -> dict[str, Any]:
    return {
        "step": entry.step,
        "attempt": entry.attempt,
        "directory": entry.prefix.rstrip("/"),
        "committed_unix": unix,
        "nbytes": entry.nbytes,
        "pinned": entry.pinned,
        "verified": entry.verified,
        "metric": entry.metric,
        "references": list(entry.references),
        "line": entry.line,
    }


# log -------------------------------------------------------------------------------------------


def log(arguments: argparse.Namespace) -> int:
    """`ckpt log`."""
    count = arguments.count if arguments.count > 0 else None
    events = history(arguments.url, count=count, storage_options=dict(arguments.option))
    # All records are shown first: with a broken log, they are what one looks for.
    if arguments.json:
        show_json([fields_json(event) for event in events])
        return OK if _ends_well(arguments) else PROBLEM
    now = time.time()
    show_table(
        ("slot", "when", "", "what", "step", "line", "session", "attempt", "kept"),
        [_event_row(event, now) for event in events],
        right=("slot", "step", "line", "kept"),
    )
    if events and events[-1].slot > 0:
        print(f"... and {events[-1].slot} older records; `ckpt log -n 0` shows all")
    return OK if _ends_well(arguments) else PROBLEM


def _ends_well(arguments: argparse.Namespace) -> bool:
    """Whether a job may append to the log; says why not."""
    with closing(open_store(arguments.url, **dict(arguments.option))) as store:
        try:
            Log(store).check_end()
        except Corrupt as error:
            print(error, file=sys.stderr)
            return False
    return True


def _event_row(event: Event, now: float) -> tuple[str, ...]:
    what = WHAT_HAPPENED.get(event.kind, event.kind.lower())
    if event.kind == "COMMIT" and event.metric is not None:
        what += f", metric {event.metric:g}"
    what += ": nobody had acknowledged it" if event.is_undone else ""
    what += f" (!) {event.problem}" if event.problem else ""
    return (
        f"{event.slot}",
        date(event.time_unix),
        age(now - event.time_unix),
        what,
        "" if event.step is None else f"{event.step}",
        "" if event.step is None else _line_cell(event.line),
        f"e{event.epoch}",
        event.attempt or "",
        f"{event.live}",
    )


# du --------------------------------------------------------------------------------------------


def du(arguments: argparse.Namespace) -> int:
    """`ckpt du`."""
    usage = disk_usage(arguments.url, storage_options=dict(arguments.option))
    if arguments.json:
        show_json(
            {
                "url": usage.url,
                "nbytes": usage.nbytes,
                "live_nbytes": usage.live_nbytes,
                "unfinished_nbytes": usage.unfinished_nbytes,
                "log_nbytes": usage.log_nbytes,
                "other_nbytes": usage.other_nbytes,
                "attempts": [fields_json(attempt) for attempt in usage.attempts],
            }
        )
        return OK
    print(usage.url)
    rows = [_usage_row(attempt) for attempt in usage.attempts]
    rows.append(("", size(usage.log_nbytes), f"{usage.log_objects}", "", "FORMAT and log"))
    if usage.other_objects:
        rows.append(("", size(usage.other_nbytes), f"{usage.other_objects}", "", "other objects"))
    show_table(
        ("step", "size", "objects", "attempt", "notes"), rows, right=("step", "size", "objects")
    )
    print(f"all: {size(usage.nbytes)}; checkpoints that exist: {size(usage.live_nbytes)}")
    if usage.unfinished_nbytes:
        print(
            f"{size(usage.unfinished_nbytes)} are of saves under way or never finished; the next "
            "job that saves here removes those of dead jobs"
        )
    return OK


def _usage_row(attempt: AttemptUsage) -> tuple[str, ...]:
    notes = [] if attempt.is_live else ["not a checkpoint: a save under way, or remains of one"]
    notes += ["pinned"] if attempt.pinned else []
    if attempt.referenced_by:
        notes.append(f"{len(attempt.referenced_by)} other checkpoints need files of it")
    return (
        f"{attempt.step}",
        size(attempt.nbytes),
        f"{attempt.objects}",
        attempt.attempt,
        ", ".join(notes),
    )
