"""What a run looks like now: the saves of a root and their outcomes, as one value. Needs no torch.

Pure: from records of the log and the telemetry that was read. `ckpt report` makes its page of it,
`ckpt watch` and `ckpt serve` look at it again and again (`ckpt.tools.polling`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ckpt.commit.records import LiveEntry
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.telemetry.record import WORK, SaveFailure, SaveTotals, Telemetry, read_telemetry
from ckpt.tools.overview import Event
from storage import Store

GAP = 3.0  # times the usual time between saves that is worth a warning
DAY_SECONDS = 86400.0
SEVERITIES = ("bad", "warning", "note")


@dataclass(frozen=True, slots=True)
class ReportedSave:
    """One checkpoint that exists or existed. None stands for what is not known of it.

    `nbytes_stored` is what its own files take, or took.
    """

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
class Notice:
    """Something to look at. `severity` is "bad", "warning" or "note"."""

    severity: str
    text: str


@dataclass(frozen=True, slots=True)
class Measurements:
    """What telemetry says: in full of the saves `full`, oldest first; the totals of those and of
    saves before them, by attempt; failures in the order of time, each once.
    """

    full: tuple[Telemetry, ...] = ()
    totals: Mapping[str, SaveTotals] = field(default_factory=dict)
    failures: tuple[SaveFailure, ...] = ()

    def with_telemetry(self, telemetries: Iterable[Telemetry]) -> Measurements:
        """With these, which are newer than what there is, oldest first."""
        new = tuple(telemetries)
        totals = dict(self.totals)
        # A save's own report counts before what later ones carry of it.
        for one in new:
            for older in one.history:
                totals.setdefault(older.attempt, older)
        totals.update({one.totals.attempt: one.totals for one in new})
        failures = {(f.step, f.time_unix, f.error): f for f in self.failures}
        failures |= {(f.step, f.time_unix, f.error): f for one in new for f in one.failures}
        ordered = tuple(sorted(failures.values(), key=lambda one: one.time_unix))
        return Measurements((*self.full, *new), totals, ordered)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The saves of a root in the order of their commits, oldest first, and what is known of them.

    `is_whole_history` says that every record of the log was read. `sessions` counts the jobs that
    wrote, of the records that were read.
    """

    url: str
    saves: tuple[ReportedSave, ...] = ()
    sessions: int = 0
    is_whole_history: bool = True
    measured: Measurements = Measurements()

    @property
    def live(self) -> tuple[ReportedSave, ...]:
        """The checkpoints that exist."""
        return tuple(save for save in self.saves if save.is_live)

    @property
    def totals(self) -> tuple[SaveTotals, ...]:
        """Of all saves of which they are known."""
        return tuple(save.totals for save in self.saves if save.totals is not None)

    def notices(self, now_unix: float) -> list[Notice]:
        """What to look at, the worst first."""
        measured = self.measured
        notices = _notices_of(self.saves, measured.failures, measured.full, now_unix)
        return sorted(notices, key=lambda one: SEVERITIES.index(one.severity))


def run_of(
    url: str,
    events: Sequence[Event],
    live: Sequence[LiveEntry],
    measured: Measurements,
    *,
    is_whole_history: bool,
) -> TrainingRun:
    """The run that these events, oldest first, and the live checkpoints tell of."""
    return TrainingRun(
        url=url,
        saves=_saves_of(events, live, measured.totals),
        sessions=sum(event.kind == "CLAIM" for event in events),
        is_whole_history=is_whole_history,
        measured=measured,
    )


def telemetry_of(
    store: Store, entry: LiveEntry, budget: MetadataBudget | None = None
) -> Telemetry | None:
    """How the save of a live checkpoint went; None where nothing that is known to be its own says
    so. With a `budget`, what its ranks did is left out.
    """
    telemetry = read_telemetry(store, entry.prefix, budget)
    # A copy of another directory's object, or a hostile one, must not speak for this save.
    if telemetry is None or telemetry.totals.attempt != entry.attempt:
        return None
    return telemetry


def _saves_of(
    events: Sequence[Event], live: Sequence[LiveEntry], totals: Mapping[str, SaveTotals]
) -> tuple[ReportedSave, ...]:
    entries = {entry.attempt: entry for entry in live}
    retired = {e.attempt: e.time_unix for e in events if e.kind == "RETIRE" and e.attempt}
    committed = {e.attempt: e for e in reversed(events) if e.kind == "COMMIT" and e.attempt}
    # Their commits are older than the events, or a mended log brought them back.
    saves = [
        (entry.slot, _save_of_entry(entry, totals.get(entry.attempt)))
        for entry in live
        if entry.attempt not in committed
    ]
    for attempt, event in committed.items():
        is_void = event.problem and attempt not in retired
        if event.step is None or (is_void and attempt not in entries):
            continue
        entry = entries.get(attempt)
        if entry is not None:
            saves.append((event.slot, _save_of_entry(entry, totals.get(attempt), event)))
            continue
        saves.append(
            (
                event.slot,
                ReportedSave(
                    step=event.step,
                    attempt=attempt,
                    committed_unix=event.time_unix,
                    is_live=False,
                    retired_unix=retired.get(attempt),
                    pinned=False,
                    verified=False,
                    metric=event.metric,
                    nbytes_stored=event.nbytes,
                    totals=totals.get(attempt),
                ),
            )
        )
    return tuple(save for _, save in sorted(saves, key=lambda pair: pair[0]))


def _save_of_entry(
    entry: LiveEntry, totals: SaveTotals | None, event: Event | None = None
) -> ReportedSave:
    committed = entry.committed_unix if event is None else event.time_unix
    return ReportedSave(
        step=entry.step,
        attempt=entry.attempt,
        committed_unix=committed,
        is_live=True,
        retired_unix=None,
        pinned=entry.pinned,
        verified=entry.verified,
        metric=entry.metric,
        nbytes_stored=entry.nbytes,
        totals=totals,
    )


# Notices -----------------------------------------------------------------------------------------


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
            f"{duration(seconds)} without a save between steps {a.step} and {b.step}; the usual "
            f"interval is {duration(usual)}",
        )
        for seconds, a, b in gaps[:5]
    ]
    since = now_unix - saves[-1].committed_unix
    if since > GAP * usual:
        text = f"no save for {duration(since)}; the usual interval is {duration(usual)}"
        notices.append(Notice("note", f"{text}; has the training ended?"))
    return notices


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


# One save -----------------------------------------------------------------------------------------


class SlowestIn(NamedTuple):
    """A phase of a save, and the rank that it took longest."""

    phase: str
    seconds: float
    rank: int


def longest_phases(telemetry: Telemetry) -> list[SlowestIn]:
    """The phases of a save in the order in which it passes through them, without waits."""
    phases = []
    for column, phase in enumerate(telemetry.phases):
        if phase != "wait" and telemetry.took_us:
            took = [row[column] for row in telemetry.took_us]
            rank = max(range(len(took)), key=took.__getitem__)
            phases.append(SlowestIn(phase, took[rank] / 1e6, rank))
    return phases


def busiest_ranks(telemetry: Telemetry, count: int) -> list[tuple[int, float]]:
    """The `count` ranks that were at work longest, waits left out, and for how many seconds."""
    is_work = [phase in WORK for phase in telemetry.phases]
    work = [
        sum(took for took, counts in zip(row, is_work, strict=True) if counts) / 1e6
        for row in telemetry.took_us
    ]
    return sorted(enumerate(work), key=lambda pair: (-pair[1], pair[0]))[:count]
