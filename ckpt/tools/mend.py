"""Repair a log whose records no longer follow each other, by appending: nothing is changed or
deleted.

Such a log comes from a root that was rolled back, restored in part, or merged from two copies. It
consists of several runs of records. The checkpoints that are live at the end of any run are
collected, free slots are filled, and what the newest record does not list is committed again.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from ckpt.commit.appender import Limits
from ckpt.commit.claim import must_look_first
from ckpt.commit.live import LiveSet, live_of, with_live
from ckpt.commit.locate import file_keys, read_manifest
from ckpt.commit.log import MENDED, Log, broken_log, latest_of, read_format
from ckpt.commit.names import LOG_PREFIX, record_key, record_slot, segment_key
from ckpt.commit.records import (
    Kind,
    LiveEntry,
    Record,
    SegmentRef,
    encode_record,
    record_digest,
    record_problem,
)
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint
from ckpt.format.manifest_codec import decode_manifest
from storage import (
    CorruptObjectError,
    KeyExistsError,
    KeyNotFoundError,
    Store,
    StoreLike,
    open_store,
)

Live = tuple[LiveEntry, ...]
Body = tuple[Kind, int, str | None, Live]  # of a record: kind, epoch, attempt, live

HOLES_MAX = 10_000  # slots to fill: more than that is no accident


@dataclass(frozen=True, slots=True)
class MendReport:
    """What was found and done.

    `breaks` says what is wrong in each slot that does not follow the one before; `filled` are slots
    that were free. `brought_back` are checkpoints that the newest record did not list.
    `lost` are checkpoints whose files are not all there; they are left as they are.
    """

    breaks: Mapping[int, str]
    filled: tuple[int, ...]
    brought_back: tuple[LiveEntry, ...]
    lost: tuple[LiveEntry, ...]
    latest: LiveEntry | None


def mend(
    url: StoreLike, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None
) -> MendReport:
    """Make the log of a root one row again, so that a job can save there again.

    Stop all writers first. Can be repeated; does nothing to a whole log, nor with `dry_run`. A
    process that had saved there is fenced by it. Raises NoCheckpoint when `url` is no root, Corrupt
    for holes beyond number, CheckpointError when another process appends meanwhile.
    """
    with closing(open_store(url, **(storage_options or {}))) as store:
        root = read_format(store).root
        log = _Survey(store)
        wanted, lost = log.divided()
        known = log.live_of(log.newest)
        back = tuple(entry for entry in wanted if entry.attempt not in {e.attempt for e in known})
        latest = _newest_last(wanted)
        is_latest = latest is None or latest.attempt == getattr(latest_of(known), "attempt", None)
        report = MendReport(log.breaks, log.holes, back, lost, latest)
        if dry_run or not (log.holes or back or not is_latest or log.ends_damaged):
            return report
        # Raises StoreRefused where an append could overwrite the record of another writer.
        must_look_first(store, root, False, Limits())
        for slot in log.holes:
            log.put(slot, log.filler(slot))
        _append(log, known, back, latest)
        return report


def _append(
    log: _Survey,
    known: tuple[LiveEntry, ...],
    back: tuple[LiveEntry, ...],
    latest: LiveEntry | None,
) -> None:
    """A claim, the commits of what is brought back, and the latest as the last one."""
    slot = max(log.digests) + 1
    # A new epoch, so that a process that still believes in the old log cannot append after this.
    epoch = log.epoch + 1
    # Readers compare the links of records back to this mark, and no further.
    log.put(slot, ("CLAIM", epoch, None, known), MENDED + secrets.token_bytes(8))
    live = known
    again = _references_first(back, known)
    if latest is not None and again[-1:] != [latest]:
        again.append(latest)
    for entry in again:
        slot += 1
        others = tuple(e for e in live if e.attempt != entry.attempt)
        live = (*others, replace(entry, slot=slot))
        log.put(slot, ("COMMIT", epoch, entry.attempt, live))


def _references_first(entries: Sequence[LiveEntry], known: Sequence[LiveEntry]) -> list[LiveEntry]:
    """The entries such that each comes after those that it needs, by whatever clock they were
    committed; else in the order given. No entry needs itself.
    """
    there = {entry.attempt for entry in known}
    waiting, result = list(entries), []
    while waiting:
        ready = next(e for e in waiting if there.issuperset(e.references))
        waiting.remove(ready)
        there.add(ready.attempt)
        result.append(ready)
    return result


def _newest_last(wanted: list[LiveEntry]) -> LiveEntry | None:
    """What a training is to resume from: `wanted` is in the order of time."""
    candidates = [entry for entry in wanted if entry.line is not None] or wanted
    return candidates[-1] if candidates else None


class _Survey:
    """All records of a log, readable or not, and where one run of them ends."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.records: dict[int, Record] = {}
        self.digests: dict[int, bytes] = {}
        self.breaks: dict[int, str] = {}
        log = Log(store)
        self._segments = log.segments
        slots = [record_slot(info.key) for info in store.list(LOG_PREFIX)]
        for slot in sorted(slot for slot in slots if slot is not None):
            raw = log.raw(slot)
            self.digests[slot] = record_digest(raw)
            try:
                self.records[slot] = log.record(slot)
            except Corrupt as error:
                self.breaks[slot] = str(error)
        if not self.digests:
            raise NoCheckpoint(f"{store.url} has no checkpoint yet: its log is empty")
        count = max(self.digests) + 1
        if count - len(self.digests) > HOLES_MAX:
            raise broken_log(store.url, count - 1, f"{count - len(self.digests)} slots are missing")
        self.holes = tuple(slot for slot in range(count) if slot not in self.digests)
        for slot in range(1, count):
            if slot not in self.breaks and (problem := self._break_at(slot)):
                self.breaks[slot] = problem
        if self.holes[:1] == (0,):
            self.breaks[0] = "missing"

    @property
    def newest(self) -> Record | None:
        """The last record that counts: it can be read, and follows the one before it."""
        counting = [slot for slot in self.records if slot not in self.breaks]
        return self.records[max(counting or self.records)] if self.records else None

    @property
    def ends_damaged(self) -> bool:
        """Whether readers cannot read the newest record."""
        return max(self.digests) not in self.records

    @property
    def epoch(self) -> int:
        """The largest epoch of any record."""
        return max((record.epoch for record in self.records.values()), default=0)

    def _break_at(self, slot: int) -> str:
        if slot not in self.digests:
            return "missing"
        return broken_link(self.records.get(slot - 1), self.records[slot], self.digests)

    def divided(self) -> tuple[list[LiveEntry], tuple[LiveEntry, ...]]:
        """The checkpoints that were live at the end of any run and never retired: those that are
        whole, in the order of their commits, and the others.
        """
        ends = [s for s in self.records if s + 1 not in self.records or s + 1 in self.breaks]
        # Retired in any of the runs: its files may be gone, whatever another run says.
        retired = {r.attempt for r in self.records.values() if r.kind == "RETIRE"}
        entries = {
            entry.attempt: entry
            for slot in sorted(ends)
            for entry in self.live_of(self.records[slot])
            if entry.attempt not in retired
        }
        # A COMMIT may be missing; the first record that knows a checkpoint is never much later.
        times: dict[str, float] = {}
        for _, record in sorted(self.records.items()):
            for entry in record.live:
                times.setdefault(entry.attempt, record.time_unix)
        for slot in sorted(ends):
            for entry in self.live_of(self.records[slot]):
                times.setdefault(entry.attempt, self.records[slot].time_unix)
        whole = {name: entry for name, entry in entries.items() if self._is_whole(entry)}
        # What is left out may be needed by others, which are left out in turn; so is what needs
        # itself, which no writer of this library has made.
        sound: dict[str, LiveEntry] = {}
        count = -1
        while count != len(sound):  # once more than needed, and needed once as a rule
            count = len(sound)
            for name, entry in whole.items():
                if all(needed in sound for needed in entry.references):
                    sound[name] = entry
        in_order = sorted(sound.values(), key=lambda e: (times[e.attempt], e.slot))
        return in_order, tuple(entry for name, entry in entries.items() if name not in sound)

    def _is_whole(self, entry: LiveEntry) -> bool:
        try:
            manifest = decode_manifest(read_manifest(self.store, entry))
            sizes = zip(file_keys(entry.prefix, manifest), manifest.file_nbytes, strict=True)
            return all(self.store.info(key).nbytes == nbytes for key, nbytes in sizes)
        except (CheckpointError, CorruptObjectError, KeyNotFoundError):
            return False

    def filler(self, slot: int) -> Body:
        """A record for a free slot that changes nothing."""
        before = next((self.records[s] for s in range(slot - 1, -1, -1) if s in self.records), None)
        live = self.live_of(before)
        if before is None or not live:
            return "CLAIM", 1 if before is None else before.epoch, None, ()
        last = live[-1]
        # A record that says again what is so already changes nothing.
        kind: Kind = "PIN" if last.pinned else "UNPIN"
        return kind, before.epoch, last.attempt, live

    def live_of(self, record: Record | None) -> Live:
        """What is live after a record, as far as its segments are there."""
        if record is None:
            return ()
        try:
            return live_of(record, self._segments).all
        except Corrupt as error:
            self.breaks.setdefault(record.slot, str(error))
            return record.live

    def _write_segment(self, ref: SegmentRef, data: bytes) -> None:
        with contextlib.suppress(KeyExistsError):
            self.store.put_if_absent(segment_key(ref.digest), data)

    def put(self, slot: int, body: Body, write_id: bytes = b"") -> None:
        """Append a record, durable on return."""
        kind, epoch, attempt, live = body
        write_id = write_id or secrets.token_bytes(16)
        now = time.time()
        # In a free slot too, the digest of whatever bytes are before it, damaged ones included.
        previous = self.digests[slot - 1] if slot else None
        bare = Record(kind, slot, epoch, write_id, now, attempt, (), previous)
        record, _ = with_live(bare, LiveSet(live, segments=self._segments), self._write_segment)
        problem = record_problem(record, slot=slot)
        assert problem is None, f"a record that mends {problem}"
        data = encode_record(record)
        try:
            self.store.put_if_absent(record_key(slot), data)
        except KeyExistsError:
            raise CheckpointError(
                f"{self.store.url}/{record_key(slot)} was written meanwhile: stop what writes "
                "there, then run it again"
            ) from None
        self.records[slot], self.digests[slot] = record, record_digest(data)


def broken_link(before: Record | None, record: Record, digests: Mapping[int, bytes]) -> str:
    """Why `record` does not follow the one in the slot before; "" when it does."""
    if record.previous is not None and record.previous != digests.get(record.slot - 1):
        what = "missing or damaged" if before is None else "not the one that it builds on"
        return f"void, it counts for nothing: the record before it is {what}"
    if before is None:
        return "the record before it is missing or damaged"
    if record.previous is None and before.previous is not None:
        return "it does not say which record it builds on"
    return "the epoch went back" if record.epoch < before.epoch else ""
