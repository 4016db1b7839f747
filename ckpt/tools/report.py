"""`ckpt report`: what the saves of a root cost and how they ended, as one value. Needs no torch.

The log says which checkpoints there were, TELEMETRY of the live ones how their saves went,
and those before them: each carries the totals of the last 200 saves. `ckpt watch` and `ckpt serve`
look at a run again and again (`ckpt.tools.polling`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, pairwise
from typing import Any, NamedTuple

from ckpt.commit.locate import latest_last, locate
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MetadataBudget
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.dtypes import DTYPES
from ckpt.short import ShortRecord
from ckpt.telemetry.record import (
    WORK,
    JobRecord,
    SaveFailure,
    SaveTotals,
    Telemetry,
    read_jobs,
    read_telemetry,
)
from ckpt.tools.near_tiers import TierView, WorkAtRisk, newest_status_of, tier_views, work_at_risk
from ckpt.tools.overview import READERS, DiskUsage, Event, history_of, usage_of
from storage import Store, StoreLike, open_store
from storage.hidden import hides_secrets
from storage.threads import in_order

RECORDS_MAX = 5000  # of the log, newest first; each is a request
TELEMETRY_MAX = 100  # newest live checkpoints whose telemetry is read

# `ckpt.layout.kind.Kind` in the plural; the numbers are part of the format.
KINDS = {0: "parameters", 1: "optimizer", 2: "buffers", 3: "other tensors"}


@dataclass(frozen=True, slots=True)
class EntrySize:
    """What an entry of the state takes in the newest checkpoint, by kind of tensor."""

    entry: str
    kind: str
    tensors: int
    nbytes: int


def durable_risk(views: Sequence[TierView], newest: ReportedSave | None) -> WorkAtRisk | None:
    """The work since the newest durable checkpoint, as far as hosts say how far the training is."""
    status = newest_status_of(views)
    if status is None or newest is None:
        return None
    seconds = 0.0 if newest.totals is None else newest.totals.seconds
    return status.since(newest.step, newest.committed_unix - seconds)


@dataclass(frozen=True, slots=True)
class NearReport:
    """What hosts say of a training: how far it is, its newest near checkpoint, what a failure would
    cost now from a near and from a durable one (None: not known), and their tiers.
    """

    tiers: tuple[TierView, ...] = ()
    reached_step: int | None = None
    reached_unix: float | None = None
    near_step: int | None = None
    at_risk_near: WorkAtRisk | None = None
    at_risk_durable: WorkAtRisk | None = None


def near_report(views: Sequence[TierView], newest: ReportedSave | None) -> NearReport:
    """The same in numbers; `newest` is the newest durable checkpoint."""
    near, status = work_at_risk(views), newest_status_of(views)
    if status is None:
        return NearReport(tuple(views))
    return NearReport(
        tuple(views),
        status.step,
        status.time_unix,
        None if near is None else status.near_step,
        near,
        durable_risk(views, newest),
    )


class Goodput(NamedTuple):
    """Where the time of a run went, in seconds, from the beginning of its first job to what the
    newest record says.

    `steps` is training that counts, `redone` training that deaths have lost, `saving` the calls of
    `step`, `restoring` those of `restore`; `other` is the rest of jobs, such as their start, and
    `down` the time between them.
    """

    steps: float
    redone: float
    saving: float
    restoring: float
    other: float
    down: float

    @classmethod
    def of(cls, jobs: Sequence[JobRecord]) -> Goodput:
        """Of jobs in the order of time, with what each has lost of the one before."""
        steps = sum(job.training_seconds for job in jobs)
        saving = sum(job.blocked_seconds for job in jobs)
        restoring = sum(job.restore_seconds for job in jobs)
        alive = sum(max(job.noted_unix - job.begun_unix, 0.0) for job in jobs)
        down = sum(max(job.begun_unix - past.noted_unix, 0.0) for past, job in pairwise(jobs))
        # From the last job back: one that went back to before the job before it began has lost the
        # work of that one, too.
        redone, until = 0.0, math.inf  # the moment whose state was restored: what is later is lost
        for past, job in reversed([*pairwise(jobs)]):
            until = min(until, past.noted_unix - (job.seconds_lost or 0.0))
            lost = max(past.noted_unix - max(until, past.begun_unix), 0.0)
            redone += min(lost, past.training_seconds)
        other = max(alive - steps - saving - restoring, 0.0)
        return cls(steps - redone, redone, saving, restoring, other, down)


@dataclass(frozen=True, slots=True)
class PerDay:
    """What a run saves in a day, and what that and its checkpoints cost; None: not known."""

    nbytes: float | None = None
    cost: float | None = None


class OfSaves:
    """What follows from the saves of a root."""

    __slots__ = ()
    saves: tuple[ReportedSave, ...]
    jobs: tuple[JobRecord, ...]

    @property
    def failures(self) -> tuple[SaveFailure, ...]:
        """Saves that have failed, in the order of time: the newest of each job."""
        failures = (failure for job in self.jobs for failure in job.failures)
        return tuple(sorted(failures, key=lambda one: one.time_unix))

    @property
    def failed_saves(self) -> int:
        """How many have failed."""
        return sum(job.failed for job in self.jobs)

    @property
    def goodput(self) -> Goodput | None:
        """Where the time of its jobs went; None where no job has noted it."""
        return Goodput.of(self.jobs) if self.jobs else None

    @property
    def live(self) -> tuple[ReportedSave, ...]:
        """The checkpoints that exist."""
        return tuple(save for save in self.saves if save.is_live)

    @property
    def totals(self) -> tuple[SaveTotals, ...]:
        """Of all saves of which they are known."""
        return tuple(save.totals for save in self.saves if save.totals is not None)


@dataclass(frozen=True, slots=True, repr=False)
class Report(OfSaves, ShortRecord):
    """What is known about a root. `saves` are in the order of their commits, oldest first.

    `slowest` is the slowest of the saves whose phases are known; None when there is none. `near`
    is what the directories say that were looked at.
    """

    url: str
    made_unix: float
    saves: tuple[ReportedSave, ...]
    sessions: int
    is_whole_history: bool
    slowest: Telemetry | None
    entries: tuple[EntrySize, ...]
    usage: DiskUsage
    notices: tuple[Notice, ...]
    near: NearReport = field(default_factory=NearReport)
    jobs: tuple[JobRecord, ...] = ()
    per_day: PerDay = PerDay()


@hides_secrets
def report_of(
    url: StoreLike,
    *,
    now_unix: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    near: Sequence[str] = (),
    metadata_bytes_max: int | None = None,
) -> Report:
    """What is known of the root at `url`, from its log, listings, telemetry and newest manifest,
    and of its near checkpoints in the directories `near` of hosts.

    No tensor is read. Raises NoCheckpoint when `url` is no root, Corrupt when its log is damaged,
    and the store's errors. Telemetry that is missing or damaged is left out, and what would take
    more than `metadata_bytes_max` bytes of memory (None: 1 GiB) or 10 seconds of a CPU a GiB.
    """
    now = time.time() if now_unix is None else now_unix
    budget = MetadataBudget(metadata_bytes_max)
    with closing(open_store(url, **(storage_options or {}))) as store:
        events = history_of(store, RECORDS_MAX)
        usage = usage_of(store)
        live = latest_last(Log(store).state().live)
        few = live[: -TELEMETRY_MAX - 1 : -1]  # the newest first
        look = partial(telemetry_of, store, budget=budget)
        read = [*in_order(look, few, threads=READERS, name="ckpt-report")]
        telemetries = [one for one in reversed(read) if one is not None]
        # Read without its rows, because those of all take too much; now the slowest in full.
        known = [(one.totals.seconds, n) for n, one in enumerate(read) if one is not None]
        slowest = telemetry_of(store, few[max(known)[1]]) if known else None
        entries, problem = _entries_of(store, live, budget)
        views = tier_views(near, read_format(store)) if near else []
        jobs = [*read_jobs(store, {}).values()]
    measured = Measurements().with_telemetry(telemetries)
    run = run_of(usage.url, events[::-1], live, measured, jobs)
    notices = [Notice("bad", problem)] if problem else []
    notices += run.notices(now)
    if usage.unfinished_nbytes:
        mib = usage.unfinished_nbytes / (1 << 20)
        text = f"{mib:.1f} MiB are of saves under way or never finished; the next job that saves"
        notices.append(Notice("note", f"{text} here removes those of dead jobs"))
    sizes = {attempt.attempt: attempt.nbytes for attempt in usage.attempts}
    saves = tuple(
        replace(save, nbytes_stored=sizes.get(save.attempt)) if save.is_live else save
        for save in run.saves
    )
    return Report(
        url=run.url,
        made_unix=now,
        saves=saves,
        sessions=run.sessions,
        is_whole_history=run.is_whole_history,
        slowest=slowest,
        entries=entries,
        usage=usage,
        notices=tuple(sorted(notices, key=lambda one: SEVERITIES.index(one.severity))),
        near=near_report(views, run.live[-1] if run.live else None),
        jobs=run.jobs,
    )


def _entries_of(
    store: Store, live: Sequence[LiveEntry], budget: MetadataBudget
) -> tuple[tuple[EntrySize, ...], str]:
    """Sizes of the newest checkpoint, and why there are none."""
    if not live:
        return (), ""
    newest = live[-1]
    try:
        located = locate(store, newest.step, attempt=newest.attempt)
        manifest = decode_manifest(located.data, budget, ruled=True)
    except CheckpointError as error:
        return (), f"the newest checkpoint, step {newest.step}, cannot be opened: {error}"
    # From shapes, not chunks: the sizes of an entry are the same however it is sharded.
    sizes: dict[tuple[str, str], list[int]] = {}
    columns = zip(manifest.fqns, manifest.dtypes, manifest.shapes, manifest.kinds, strict=True)
    for fqn, dtype, shape, kind in columns:
        size = sizes.setdefault((fqn.split(".")[0], KINDS.get(int(kind), "other")), [0, 0])
        size[0] += 1
        size[1] += math.prod(shape) * DTYPES[dtype].itemsize
    entries = [EntrySize(*key, *size) for key, size in sizes.items()]
    return tuple(sorted(entries, key=lambda one: (-one.nbytes, one.entry, one.kind))), ""


# A run --------------------------------------------------------------------------------------------

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
    saves before them, by attempt.
    """

    full: tuple[Telemetry, ...] = ()
    totals: Mapping[str, SaveTotals] = field(default_factory=dict)

    def with_telemetry(self, telemetries: Iterable[Telemetry]) -> Measurements:
        """With these, which are newer than what there is, oldest first."""
        new = tuple(telemetries)
        totals = dict(self.totals)
        # A save's own report counts before what later ones carry of it.
        for one in new:
            for older in one.history:
                totals.setdefault(older.attempt, older)
        totals.update({one.totals.attempt: one.totals for one in new})
        return Measurements((*self.full, *new), totals)


@dataclass(frozen=True, slots=True)
class TrainingRun(OfSaves):
    """The saves of a root in the order of their commits, oldest first, and what is known of them.

    `is_whole_history` says that every record of the log was read. `sessions` counts the jobs that
    wrote, of the records that were read.
    """

    url: str
    saves: tuple[ReportedSave, ...] = ()
    sessions: int = 0
    is_whole_history: bool = True
    measured: Measurements = Measurements()
    jobs: tuple[JobRecord, ...] = ()

    def notices(self, now_unix: float) -> list[Notice]:
        """What to look at, the worst first."""
        saves, failures, notices = self.saves, self.failures, list[Notice]()
        for one in failures[:-11:-1]:
            when = time.strftime("%Y-%m-%d at %H:%M:%S", time.localtime(one.time_unix))
            text = f"the save of step {one.step} has failed on {when}: {one.error}"
            notices.append(Notice("bad", text))
        if len(failures) > 10:
            notices.append(Notice("bad", f"{len(failures) - 10} earlier saves have failed as well"))
        warnings: dict[str, list[int]] = {}
        for telemetry in self.measured.full:
            for text in telemetry.warnings:
                warnings.setdefault(text, []).append(telemetry.totals.step)
        for text, steps in warnings.items():
            notices.append(Notice("warning", f"{text} ({_steps_text(steps)})"))
        notices += _notices_of_gaps(saves, now_unix)
        if not self.live:
            notices.append(Notice("bad", "there is no checkpoint to resume from"))
        elif not any(save.verified for save in self.live):
            text = "no live checkpoint was verified; `ckpt verify --mark` reads one"
            notices.append(Notice("warning", text))
        if repeated := [one.totals for one in self.measured.full if one.totals.retries]:
            count = sum(totals.retries for totals in repeated)
            text = f"{count} requests were repeated ({_steps_text([t.step for t in repeated])})"
            notices.append(Notice("note", text))
        if unknown := sum(save.totals is None for save in saves):
            text = f"nothing is known of how {unknown} of {len(saves)} saves went: they had no "
            text += "telemetry, or the checkpoints that carried it are retired"
            notices.append(Notice("note", text))
        return sorted(notices, key=lambda one: SEVERITIES.index(one.severity))


def run_of(
    url: str,
    events: Sequence[Event],
    live: Sequence[LiveEntry],
    measured: Measurements,
    jobs: Sequence[JobRecord],
) -> TrainingRun:
    """The run that these events, oldest first, the live checkpoints and the jobs tell of."""
    saves = _saves_of(events, live, measured.totals)
    return TrainingRun(
        url=url,
        saves=saves,
        sessions=sum(event.kind == "CLAIM" for event in events),
        is_whole_history=not events or events[0].slot == 0,
        measured=measured,
        jobs=_jobs_of(jobs, saves),
    )


def _jobs_of(jobs: Sequence[JobRecord], saves: Sequence[ReportedSave]) -> tuple[JobRecord, ...]:
    """With what follows from the next job, which has the root alone, and from the one before."""
    committed = {save.attempt: save.committed_unix for save in saves}
    seen = [*jobs[:1]]
    for before, job in pairwise(jobs):
        # A job that ends writes how; one that is killed cannot, and another one has begun.
        if not before.ending:
            seen[-1] = seen[-1].model_copy(update={"ending": "died"})
        begun, attempt = job.restored_step, job.restored
        if begun is None and job.first_step is not None:
            # Without `restore`: it was loaded by hand, or starts over.
            begun = job.first_step - 1
            earlier = [one for one in saves if one.committed_unix < job.begun_unix]
            usable = [(one.step, one.attempt) for one in earlier if one.step <= begun]
            attempt = max(usable, default=(0, ""))[1]
            committed[""] = jobs[0].begun_unix
        lost = max(before.step - (begun or 0), 0)
        if begun is not None and lost >= (job.steps_lost or 0):
            since = committed.get(attempt, before.noted_unix) if lost else before.noted_unix
            seconds = max(before.noted_unix - since, job.seconds_lost or 0.0)
            job = job.model_copy(update={"steps_lost": lost, "seconds_lost": seconds})
        seen.append(job)
    return tuple(seen)


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
    # Reversed, so that the first commit counts: `ckpt mend` commits once more what it brings back.
    committed = {e.attempt: e for e in reversed(events) if e.kind == "COMMIT" and e.attempt}
    # The commits of some are older than the events, or a mended log brought them back.
    slots = {a: entry.slot for a, entry in entries.items()} | {
        attempt: event.slot for attempt, event in committed.items()
    }
    saves = []
    for attempt in sorted(slots, key=slots.__getitem__):
        entry, event = entries.get(attempt), committed.get(attempt)
        known = entry or event
        is_void = event is not None and event.problem and attempt not in retired
        if known is None or known.step is None or (entry is None and is_void):
            continue
        time_unix = event.time_unix if event else entry.committed_unix if entry else 0.0
        saves.append(
            ReportedSave(
                step=known.step,
                attempt=attempt,
                committed_unix=time_unix,
                is_live=entry is not None,
                retired_unix=None if entry else retired.get(attempt),
                pinned=entry is not None and entry.pinned,
                verified=entry is not None and entry.verified,
                metric=known.metric,
                nbytes_stored=known.nbytes,
                totals=totals.get(attempt),
            )
        )
    return tuple(saves)


# Notices -----------------------------------------------------------------------------------------


def _notices_of_gaps(saves: Sequence[ReportedSave], now_unix: float) -> list[Notice]:
    between = [(b.committed_unix - a.committed_unix, a, b) for a, b in pairwise(saves)]
    if len(between) < 3:
        return []  # too few to say what is usual
    usual = statistics.median(seconds for seconds, _, _ in between)
    if usual <= 0:
        return []  # clocks that went back, or that disagree
    gaps = sorted((gap for gap in between if gap[0] > GAP * usual), key=lambda gap: -gap[0])
    notices, than = [], f"the usual interval is {duration(usual)}"
    for seconds, a, b in gaps[:5]:
        where = f"without a save between steps {a.step} and {b.step}"
        notices.append(Notice("warning", f"{duration(seconds)} {where}; {than}"))
    since = now_unix - saves[-1].committed_unix
    if since > GAP * usual:
        text = f"no save for {duration(since)}; {than}; has the training ended?"
        notices.append(Notice("note", text))
    return notices


def _steps_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[-5:]))
    more = f"{len(steps) - 5} earlier ones and " if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {more}{shown}"


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
    work = [sum(compress(row, is_work)) / 1e6 for row in telemetry.took_us]
    return sorted(enumerate(work), key=lambda pair: (-pair[1], pair[0]))[:count]
