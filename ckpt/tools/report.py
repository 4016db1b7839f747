"""`ckpt report`: what the saves of a root cost and how they ended, as one value. Needs no torch.

The log says which checkpoints there were, TELEMETRY of the live ones how their saves went,
and those before them: each carries the totals of the last 200 saves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckpt.commit.lines import latest_last
from ckpt.commit.locate import locate
from ckpt.commit.log import Log
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.dtypes import DTYPES
from ckpt.telemetry.history import read_telemetry
from ckpt.telemetry.record import SaveFailure, SaveTotals, Telemetry
from ckpt.tools.overview import READERS, DiskUsage, Event, disk_usage, history
from storage import Store, StoreLike, open_store

RECORDS_MAX = 5000  # of the log, newest first; each is a request
TELEMETRY_MAX = 100  # newest live checkpoints whose telemetry is read
GAP = 3.0  # times the usual time between saves that is worth a warning
DAY_SECONDS = 86400.0
SEVERITIES = ("bad", "warning", "note")

# `ckpt.layout.kind.Kind` in the plural; the numbers are part of the format.
KINDS = {0: "parameters", 1: "optimizer", 2: "buffers", 3: "other tensors"}


@dataclass(frozen=True, slots=True)
class ReportedSave:
    """One checkpoint that exists or existed. None stands for what is not known of it."""

    step: int
    attempt: str
    committed_unix: float
    is_live: bool
    retired_unix: float | None
    pinned: bool
    verified: bool
    metric: float | None
    nbytes_stored: int | None
    totals: SaveTotals | None


@dataclass(frozen=True, slots=True)
class EntrySize:
    """What an entry of the state takes in the newest checkpoint, by kind of tensor."""

    entry: str
    kind: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to look at. `severity` is "bad", "warning" or "note"."""

    severity: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What is known about a root. `saves` are in the order of their commits, oldest first.

    `slowest` is the slowest of the saves whose phases are known; None when there is none.
    """

    url: str
    made_unix: float
    saves: tuple[ReportedSave, ...]
    failures: tuple[SaveFailure, ...]
    sessions: int
    is_whole_history: bool
    slowest: Telemetry | None
    entries: tuple[EntrySize, ...]
    usage: DiskUsage
    notices: tuple[Notice, ...]

    @property
    def live(self) -> tuple[ReportedSave, ...]:
        """The checkpoints that exist."""
        return tuple(save for save in self.saves if save.is_live)

    @property
    def totals(self) -> tuple[SaveTotals, ...]:
        """Of all saves of which they are known."""
        return tuple(save.totals for save in self.saves if save.totals is not None)


def report_of(
    url: StoreLike,
    *,
    now_unix: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """What is known of the root at `url`, from its log, listings, telemetry and newest manifest.

    No tensor is read. Raises NoCheckpoint when `url` is no root, Corrupt when its log is damaged,
    and the store's errors. Telemetry that is missing or damaged is left out.
    """
    now = time.time() if now_unix is None else now_unix
    events = history(url, count=RECORDS_MAX, storage_options=storage_options)
    usage = disk_usage(url, storage_options=storage_options)
    with closing(open_store(url, **(storage_options or {}))) as store:
        live = latest_last(Log(store).state().live)
        telemetries = _telemetry_of(store, live[-TELEMETRY_MAX:])
        entries, problem = _entries_of(store, live)
    saves = _saves_of(events, live, _totals_of(telemetries), usage)
    failures = _failures_of(telemetries)
    notices = [
        *([Notice("bad", problem)] if problem else []),
        *_notices_of(saves, failures, telemetries, now),
        *_notices_of_space(usage),
    ]
    return Report(
        url=usage.url,
        made_unix=now,
        saves=saves,
        failures=failures,
        sessions=sum(event.kind == "CLAIM" for event in events),
        is_whole_history=len(events) < RECORDS_MAX,
        slowest=max(telemetries, key=lambda one: one.totals.seconds, default=None),
        entries=entries,
        usage=usage,
        notices=tuple(sorted(notices, key=lambda one: SEVERITIES.index(one.severity))),
    )


def _telemetry_of(store: Store, live: Sequence[LiveEntry]) -> list[Telemetry]:
    """Oldest first; of live checkpoints, as the log lists them."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-report") as pool:
        telemetries = list(pool.map(lambda entry: read_telemetry(store, entry.prefix), live))
    # A copy of another directory's object, or a hostile one, must not speak for this save.
    return [
        one
        for one, entry in zip(telemetries, live, strict=True)
        if one is not None and one.totals.attempt == entry.attempt
    ]


def _totals_of(telemetries: Sequence[Telemetry]) -> dict[str, SaveTotals]:
    known: dict[str, SaveTotals] = {}
    # A save's own report counts before what later ones carry of it.
    for one in telemetries:
        known.update({older.attempt: older for older in one.history})
    known.update({one.totals.attempt: one.totals for one in telemetries})
    return known


def _failures_of(telemetries: Sequence[Telemetry]) -> tuple[SaveFailure, ...]:
    """Each once, although every later save carries it."""
    failures = {(f.step, f.time_unix, f.error): f for one in telemetries for f in one.failures}
    return tuple(sorted(failures.values(), key=lambda one: one.time_unix))


def _entries_of(store: Store, live: Sequence[LiveEntry]) -> tuple[tuple[EntrySize, ...], str]:
    """Sizes of the newest checkpoint, and why there are none."""
    if not live:
        return (), ""
    newest = live[-1]
    try:
        located = locate(store, newest.step, attempt=newest.attempt)
        return _sizes_of(decode_manifest(located.data)), ""
    except CheckpointError as error:
        return (), f"the newest checkpoint, step {newest.step}, cannot be opened: {error}"


def _sizes_of(manifest: Manifest) -> tuple[EntrySize, ...]:
    sizes: dict[tuple[str, str], list[int]] = {}
    columns = zip(manifest.fqns, manifest.dtypes, manifest.shapes, manifest.kinds, strict=True)
    for fqn, dtype, shape, kind in columns:
        size = sizes.setdefault((fqn.split(".")[0], KINDS.get(int(kind), "other")), [0, 0])
        size[0] += 1
        size[1] += math.prod(shape) * DTYPES[dtype].itemsize
    entries = [EntrySize(*key, *size) for key, size in sizes.items()]
    return tuple(sorted(entries, key=lambda one: (-one.nbytes, one.entry, one.kind)))


def _saves_of(
    events: Sequence[Event],
    live: Sequence[LiveEntry],
    totals: Mapping[str, SaveTotals],
    usage: DiskUsage,
) -> tuple[ReportedSave, ...]:
    entries = {entry.attempt: entry for entry in live}
    stored = {attempt.attempt: attempt.nbytes for attempt in usage.attempts}
    retired = {e.attempt: e.time_unix for e in events if e.kind == "RETIRE" and e.attempt}
    saves = []
    for event in reversed(events):
        if event.kind != "COMMIT" or event.attempt is None or event.step is None:
            continue
        entry = entries.get(event.attempt)
        saves.append(
            ReportedSave(
                step=event.step,
                attempt=event.attempt,
                committed_unix=event.time_unix,
                is_live=entry is not None,
                retired_unix=retired.get(event.attempt),
                pinned=entry is not None and entry.pinned,
                verified=entry is not None and entry.verified,
                metric=event.metric,
                nbytes_stored=stored.get(event.attempt) if entry is not None else None,
                totals=totals.get(event.attempt),
            )
        )
    return tuple(saves)


def _notices_of(
    saves: Sequence[ReportedSave],
    failures: Sequence[SaveFailure],
    telemetries: Sequence[Telemetry],
    now_unix: float,
) -> list[Notice]:
    live = [save for save in saves if save.is_live]
    notices = [
        Notice("bad", f"the save of step {one.step} has failed {_when(one.time_unix)}: {one.error}")
        for one in failures[-10:]
    ]
    if len(failures) > 10:
        notices.append(Notice("bad", f"{len(failures) - 10} earlier saves have failed as well"))
    for text, steps in _warnings_of(telemetries).items():
        notices.append(Notice("warning", f"{text} ({_steps_text(steps)})"))
    notices += _notices_of_gaps(saves, now_unix)
    if not live:
        notices.append(Notice("bad", "there is no checkpoint to resume from"))
    elif not any(save.verified for save in live):
        notices.append(
            Notice("warning", "no live checkpoint was verified; `ckpt verify --mark` reads one")
        )
    repeated = [one.totals for one in telemetries if one.totals.retries]
    if repeated:
        count = sum(one.retries for one in repeated)
        steps = [one.step for one in repeated]
        notices.append(Notice("note", f"{count} requests were repeated ({_steps_text(steps)})"))
    unknown = sum(save.totals is None for save in saves)
    if unknown:
        notices.append(
            Notice(
                "note",
                f"how they went is not known of {unknown} of {len(saves)} saves: they were made "
                "without telemetry, or what carried it is retired",
            )
        )
    return notices


def _warnings_of(telemetries: Sequence[Telemetry]) -> dict[str, list[int]]:
    """The steps of every warning."""
    steps: dict[str, list[int]] = {}
    for one in telemetries:
        for text in one.warnings:
            steps.setdefault(text, []).append(one.totals.step)
    return steps


def _notices_of_gaps(saves: Sequence[ReportedSave], now_unix: float) -> list[Notice]:
    between = [(b.committed_unix - a.committed_unix, a, b) for a, b in pairwise(saves)]
    if len(between) < 3:
        return []  # too few to say what is usual
    usual = statistics.median(seconds for seconds, _, _ in between)
    if usual <= 0:
        return []  # clocks that went back, or that disagree
    gaps = sorted((gap for gap in between if gap[0] > GAP * usual), key=lambda gap: -gap[0])
    notices = [
        Notice(
            "warning",
            f"{duration(seconds)} without a save between steps {a.step} and {b.step}; usual are "
            f"{duration(usual)}",
        )
        for seconds, a, b in gaps[:5]
    ]
    since = now_unix - saves[-1].committed_unix
    if since > GAP * usual:
        text = f"no save for {duration(since)}; usual are {duration(usual)}"
        notices.append(Notice("note", f"{text}; has the training ended?"))
    return notices


def _notices_of_space(usage: DiskUsage) -> list[Notice]:
    if not usage.unfinished_nbytes:
        return []
    mib = usage.unfinished_nbytes / (1 << 20)
    return [
        Notice(
            "note",
            f"{mib:.1f} MiB are of saves under way or never finished; the next job that saves here "
            "removes those of dead jobs",
        )
    ]


def _steps_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[-5:]))
    more = f"{len(steps) - 5} earlier ones and " if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {more}{shown}"


def _when(unix: float) -> str:
    return time.strftime("on %Y-%m-%d at %H:%M:%S", time.localtime(unix))


def duration(seconds: float) -> str:
    """`0.4 s`, `12 min`, `3.5 h`, `2.1 d`."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (2 * DAY_SECONDS, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / DAY_SECONDS:.3g} d"
