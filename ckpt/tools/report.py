"""`ckpt report`: what the saves of a root cost and how they ended, as one value. Needs no torch.

The log says which checkpoints there were, TELEMETRY of the live ones how their saves went,
and those before them: each carries the totals of the last 200 saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.commit.lines import latest_last
from ckpt.commit.locate import locate
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.layout.dtypes import DTYPES
from ckpt.short import ShortRecord
from ckpt.telemetry.record import SaveFailure, SaveTotals, Telemetry
from ckpt.tools.near_tiers import NearReport, near_report, tier_views
from ckpt.tools.overview import READERS, DiskUsage, history, usage_of
from ckpt.tools.run import (
    SEVERITIES,
    Measurements,
    Notice,
    ReportedSave,
    TrainingRun,
    run_of,
    telemetry_of,
)
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


@dataclass(frozen=True, slots=True, repr=False)
class Report(ShortRecord):
    """What is known about a root. `saves` are in the order of their commits, oldest first.

    `slowest` is the slowest of the saves whose phases are known; None when there is none. `near`
    is what the directories say that were looked at.
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
    near: NearReport = field(default_factory=NearReport)

    @property
    def live(self) -> tuple[ReportedSave, ...]:
        """The checkpoints that exist."""
        return tuple(save for save in self.saves if save.is_live)

    @property
    def totals(self) -> tuple[SaveTotals, ...]:
        """Of all saves of which they are known."""
        return tuple(save.totals for save in self.saves if save.totals is not None)


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
    events = history(url, count=RECORDS_MAX, storage_options=storage_options)
    with closing(open_store(url, **(storage_options or {}))) as store:
        usage = usage_of(store)
        live = latest_last(Log(store).state().live)
        few = live[: -TELEMETRY_MAX - 1 : -1]  # the newest first
        look = partial(telemetry_of, store, budget=budget)
        read = [*in_order(look, few, threads=READERS, name="ckpt-report")]
        telemetries = [one for one in reversed(read) if one is not None]
        slowest = _slowest_of(store, few, read)
        entries, problem = _entries_of(store, live, budget)
        views = tier_views(near, read_format(store).root) if near else []
    run = run_of(
        usage.url,
        events[::-1],
        live,
        Measurements().with_telemetry(telemetries),
        is_whole_history=len(events) < RECORDS_MAX,
    )
    notices = [
        *([Notice("bad", problem)] if problem else []),
        *run.notices(now),
        *_notices_of_space(usage),
    ]
    saves = _with_sizes(run, usage)
    return Report(
        url=run.url,
        made_unix=now,
        saves=saves,
        failures=run.measured.failures,
        sessions=run.sessions,
        is_whole_history=run.is_whole_history,
        slowest=slowest,
        entries=entries,
        usage=usage,
        notices=tuple(sorted(notices, key=lambda one: SEVERITIES.index(one.severity))),
        near=near_report(views, run.live[-1] if run.live else None),
    )


def _with_sizes(run: TrainingRun, usage: DiskUsage) -> tuple[ReportedSave, ...]:
    """The saves of a run, with what a listing says of those that are live."""
    stored = {attempt.attempt: attempt.nbytes for attempt in usage.attempts}
    return tuple(
        replace(save, nbytes_stored=stored.get(save.attempt)) if save.is_live else save
        for save in run.saves
    )


def _slowest_of(
    store: Store, entries: Sequence[LiveEntry], read: Sequence[Telemetry | None]
) -> Telemetry | None:
    """The slowest save in full, which was read without its rows: those of all take too much."""
    known = [(one.totals.seconds, number) for number, one in enumerate(read) if one is not None]
    return telemetry_of(store, entries[max(known)[1]]) if known else None


def _entries_of(
    store: Store, live: Sequence[LiveEntry], budget: MetadataBudget
) -> tuple[tuple[EntrySize, ...], str]:
    """Sizes of the newest checkpoint, and why there are none."""
    if not live:
        return (), ""
    newest = live[-1]
    try:
        located = locate(store, newest.step, attempt=newest.attempt)
        return _sizes_of(decode_manifest(located.data, budget, ruled=True)), ""
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
