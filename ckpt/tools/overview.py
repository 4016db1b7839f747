"""What a root holds and what happened to it, from its log and listings alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from ckpt.commit.locate import entry_by_path, latest_last, live_entries, state_of
from ckpt.commit.log import FORMAT_KEY, UNDONE, Log, read_format
from ckpt.commit.names import (
    JOBS_PREFIX,
    LOG_PREFIX,
    MANIFEST_NAME,
    RESERVE_KEY,
    parse_step_key,
    plain_int,
    step_prefix,
)
from ckpt.commit.records import LiveEntry, Record, encode_record, record_digest
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.contents import StepInfo, open_contents
from ckpt.short import ShortRecord
from ckpt.tools.mend import broken_link
from storage import KeyNotFoundError, ObjectInfo, Store, StoreLike, open_store
from storage.hidden import hides_secrets
from storage.threads import in_order

READERS = 8  # records or reports that are read at the same time


@dataclass(frozen=True, slots=True)
class Event:
    """One record of a root's log. `time_unix` is the writer's clock, for display only.

    `kind` is CLAIM, COMMIT, RETIRE, PIN, UNPIN or VERIFIED. `attempt` and `step` name
    the checkpoint, None for a CLAIM; `step` is also None where the log does not have it.
    `epoch` is that of the session: every CLAIM begins a new one. `live` counts the checkpoints
    after it. `line` is that of the checkpoint, None where it has none or `step` is None.
    `problem` says why the record does not follow the one before it, as in a log that was mended, ""
    where all is well. `is_undone`: a RETIRE of what nobody acknowledged. `nbytes` is what the own
    files of the checkpoint take, None where the log does not say.
    """

    slot: int
    kind: str
    time_unix: float
    epoch: int
    attempt: str | None
    step: int | None
    metric: float | None
    live: int
    line: int | None = None
    problem: str = ""
    is_undone: bool = False
    nbytes: int | None = None


@hides_secrets
def history(
    url: StoreLike,
    *,
    count: SupportsIndex | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Event, ...]:
    """What happened to a root, newest first: the last `count` records of its log, or all.

    One request per record. Raises NoCheckpoint when `url` is no root, Corrupt when a record is
    damaged or missing, and the store's errors.
    """
    with closing(open_store(url, **(storage_options or {}))) as store:
        return history_of(store, plain_int(count))


def history_of(store: Store, count: int | None) -> tuple[Event, ...]:
    """As `history`, of a store that is open."""
    read_format(store)
    log = Log(store)
    newest = log.state().slot
    first = 0 if count is None else max(0, newest - count + 1)
    # The record before the first has the step of what the first may have retired.
    slots = range(max(0, first - 1), newest + 1)
    records = [*in_order(log.record, slots, threads=READERS, name="ckpt-log")]
    events = events_of(log, records)
    return tuple(event for event in reversed(events) if event.slot >= first)


@dataclass(frozen=True, slots=True, repr=False)
class LogReport(ShortRecord):
    """The newest records of a root's log, newest first. `problem` says why no job may append."""

    url: str
    events: tuple[Event, ...]
    problem: str


def log_report(store: Store, count: int | None) -> LogReport:
    """The last `count` records, or all. See `ckpt.operate.log`."""
    events, problem = history_of(store, count), ""
    try:
        Log(store).check_end()
    except Corrupt as error:
        problem = str(error)
    return LogReport(store.url, events, problem)


@dataclass(frozen=True, slots=True, repr=False)
class RootListing(ShortRecord):
    """The checkpoints at `url`, the latest last. `uncommitted` says what newer save the log lacks.

    `begun_unix` is None for a root. Of one step's directory, of which no log says more, it is when
    the save began.
    """

    url: str
    checkpoints: tuple[StepInfo, ...]
    begun_unix: float | None = None
    uncommitted: str = ""


def listing(store: Store) -> RootListing:
    """What `ckpt ls` shows. Raises NoCheckpoint when the store is neither a root nor a step's."""
    try:
        state = state_of(store)
        live = latest_last(state.live)
    except NoCheckpoint as no_root:
        one = StepInfo.of(entry_by_path(store, no_root), store.url)
        own = replace(one, url=store.url, committed_unix=None)
        return RootListing(store.url, (own,), begun_unix=one.committed_unix)
    infos = tuple(StepInfo.of(entry, store.url) for entry in live)
    return RootListing(store.url, infos, uncommitted=state.uncommitted_text(store.url))


def listing_of_other(url: StoreLike, storage_options: Mapping[str, Any] | None) -> RootListing:
    """What `ckpt ls` shows of a checkpoint of another library. Raises NoCheckpoint without one."""
    with open_contents(url, None, storage_options) as contents:
        header, place, nbytes = contents.manifest.header, contents.url, contents.manifest.own_nbytes
    one = StepInfo(header.step, header.attempt, place, False, False, None, line=None, nbytes=nbytes)
    return RootListing(place, (one,))


def events_of(log: Log, records: Sequence[Record]) -> list[Event]:
    """What consecutive records of a log say, in their order. The first one may lack its step: of
    what a RETIRE retires, the record before it says more.
    """
    # A RETIRE no longer lists what it retires: step and metric are those that a record before had.
    # Segments are read only where none of these records has listed it.
    known: dict[str, LiveEntry] = {}
    events = []
    before: Record | None = None
    for record in records:
        if record.kind == "RETIRE" and before is not None and record.attempt not in known:
            with suppress(Corrupt):  # the segments of the one before tell, or nothing does
                retired = log.live_of(before).find(record.attempt or "")
                known.update({} if retired is None else {retired.attempt: retired})
        known.update({entry.attempt: entry for entry in record.live})
        problem = ""
        if before is not None:
            digests = {before.slot: record_digest(encode_record(before))}
            problem = broken_link(before, record, digests)
        entry = known.get(record.attempt or "")
        events.append(
            Event(
                slot=record.slot,
                kind=record.kind,
                time_unix=record.time_unix,
                epoch=record.epoch,
                attempt=record.attempt,
                step=entry.step if entry else None,
                metric=entry.metric if entry else None,
                live=record.count,
                line=entry.line if entry else None,
                problem=problem,
                is_undone=record.write_id.startswith(UNDONE),
                nbytes=entry.nbytes if entry else None,
            )
        )
        before = record
    return events


@dataclass(frozen=True, slots=True)
class AttemptUsage:
    """What one step directory takes. `is_live` says that the log lists it as a checkpoint.

    `referenced_by` are live checkpoints that need files of it besides its own.
    """

    step: int
    attempt: str
    nbytes: int
    objects: int
    modified_unix: float
    is_live: bool
    pinned: bool
    referenced_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class DiskUsage(ShortRecord):
    """What a root takes, in bytes and objects.

    `attempts` are live checkpoints and remains of unfinished or retired ones, in the order of steps
    and names. `other_nbytes` are objects that this library did not write.
    """

    url: str
    attempts: tuple[AttemptUsage, ...]
    log_nbytes: int
    log_objects: int
    other_nbytes: int
    other_objects: int

    @property
    def nbytes(self) -> int:
        """Everything below the root."""
        return sum(a.nbytes for a in self.attempts) + self.log_nbytes + self.other_nbytes

    @property
    def live_nbytes(self) -> int:
        """Bytes of checkpoints that exist."""
        return sum(a.nbytes for a in self.attempts if a.is_live)

    @property
    def unfinished_nbytes(self) -> int:
        """Bytes of saves that did not finish, are under way, or were retired and not deleted."""
        return sum(a.nbytes for a in self.attempts if not a.is_live)


def usage_of(store: Store) -> DiskUsage:
    """What every checkpoint of a root takes. See `ckpt.disk_usage`."""
    try:
        # Before the listing: the other way round, a checkpoint that is committed between the two
        # could be live with a part of its files.
        live = live_entries(store)
    except NoCheckpoint as no_root:
        # One step's directory by itself: its manifest says of which step.
        try:
            header = decode_manifest(store.get(MANIFEST_NAME), ruled=True).header
        except KeyNotFoundError:
            raise no_root from None
        own = _attempt_usage(header.step, header.attempt, list(store.list("")))
        return DiskUsage(store.url, (own,), 0, 0, 0, 0)
    entries = {entry.attempt: entry for entry in live}
    users: dict[str, list[str]] = {}
    for entry in live:
        for name in entry.references:
            users.setdefault(name, []).append(entry.attempt)
    objects_of: dict[tuple[int, str], list[ObjectInfo]] = {}
    log, other = [0, 0], [0, 0]
    for info in store.list(""):
        if (parsed := parse_step_key(info.key)) is not None:
            objects_of.setdefault(parsed[:2], []).append(info)
            continue
        is_log = info.key in (FORMAT_KEY, RESERVE_KEY)
        is_log = is_log or info.key.startswith((LOG_PREFIX, JOBS_PREFIX))
        group = log if is_log else other
        group[0] += info.nbytes
        group[1] += 1
    attempts = []
    for (step, attempt), objects in sorted(objects_of.items()):
        known, usage = entries.get(attempt), _attempt_usage(step, attempt, objects)
        # A directory of another step with this attempt's name is not the one that the log means.
        is_live = known is not None and known.prefix == step_prefix(step, attempt)
        is_pinned, needed_by = known is not None and known.pinned, tuple(users.get(attempt, ()))
        usage = replace(usage, is_live=is_live, pinned=is_pinned, referenced_by=needed_by)
        attempts.append(usage)
    return DiskUsage(store.url, tuple(attempts), log[0], log[1], other[0], other[1])


def _attempt_usage(step: int, attempt: str, objects: Sequence[ObjectInfo]) -> AttemptUsage:
    """Of one directory by itself."""
    nbytes, newest = sum(one.nbytes for one in objects), max(one.modified_unix for one in objects)
    return AttemptUsage(step, attempt, nbytes, len(objects), newest, True, False, ())
