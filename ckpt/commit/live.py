"""The live set of a root, as a value: what a record lists itself, and segments that it names.

A small live set is in the record. A record that would grow beyond `RECORD_NBYTES` has the older
entries folded into a segment first. Segments that are not much larger than what follows them are
merged, so there are few, and an entry is written again a few times only.

A segment is written once, is named by its digest, and is never deleted: a record that was sent late
may name it. FORMAT.md, "Segments".
"""

from __future__ import annotations

import hashlib
import threading
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from ckpt.commit.names import segment_key
from ckpt.commit.records import (
    LiveEntry,
    Record,
    SegmentRef,
    damaged_segment,
    decode_segment,
    encode_record,
    encode_segment,
)
from ckpt.errors import CheckpointError
from ckpt.format.checksum import once_more
from storage.errors import CorruptObjectError, KeyExistsError, KeyNotFoundError, TooLargeError
from storage.store import Store

RECORD_NBYTES = 64 << 10  # of a record, before what it lists is folded into a segment
LISTED_MIN = 16  # newest entries that stay in the record: what most calls look at
MERGE_RATIO = 4  # a segment is merged with what follows when it is at most so many times larger
SEGMENT_COUNT_MAX = 1 << 18  # entries: about 25 MiB
CHANGED_MAX = 64  # entries of segments that may be listed because they were changed
GONE_MAX = 4096  # entries of segments that may be gone before their segments are written anew

Write = Callable[[SegmentRef, bytes], None]


class Segments:
    """The segments of one log that were read. Safe to use from several threads."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._known: dict[bytes, _ReadSegment] = {}
        self._lock = threading.Lock()

    def entries(self, ref: SegmentRef) -> tuple[LiveEntry, ...]:
        """All entries of a segment, ascending in slot. Raises Corrupt."""
        return self._of(ref).entries

    def find(self, ref: SegmentRef, attempt: str) -> LiveEntry | None:
        """The entry of an attempt in a segment."""
        return self._of(ref).by_attempt.get(attempt)

    def users_of(self, ref: SegmentRef, attempt: str) -> list[LiveEntry]:
        """The entries of a segment that refer to an attempt, ascending in slot."""
        return self._of(ref).users.get(attempt, [])

    def _of(self, ref: SegmentRef) -> _ReadSegment:
        with self._lock:
            known = self._known.get(ref.digest)
        # Read without the lock, which others must not wait for: at worst two threads read the same.
        if known is None:
            entries = once_more(lambda: read_segment(self._store(), ref), self._store())
            known = self.add(ref, entries)
        return known

    def add(self, ref: SegmentRef, entries: tuple[LiveEntry, ...]) -> _ReadSegment:
        """Remember a segment that was just read or written."""
        with self._lock:
            return self._known.setdefault(ref.digest, _ReadSegment(entries))

    def keep(self, refs: Sequence[SegmentRef]) -> None:
        """Forget all others."""
        kept = {ref.digest for ref in refs}
        with self._lock:
            self._known = {digest: one for digest, one in self._known.items() if digest in kept}


@dataclass(frozen=True)
class _ReadSegment:
    """What was read of one, and what is asked of it again and again."""

    entries: tuple[LiveEntry, ...]

    @cached_property
    def by_attempt(self) -> dict[str, LiveEntry]:
        return {entry.attempt: entry for entry in self.entries}

    @cached_property
    def users(self) -> dict[str, list[LiveEntry]]:
        users: dict[str, list[LiveEntry]] = {}
        for entry in self.entries:
            for name in entry.references:
                users.setdefault(name, []).append(entry)
        return users


@dataclass(frozen=True)
class LiveSet:
    """Every checkpoint that exists: `listed`, ascending in slot, and the entries of `refs` but for
    those of the slots `gone`. Segments are read when something needs them.
    """

    listed: tuple[LiveEntry, ...] = ()
    refs: tuple[SegmentRef, ...] = ()
    gone: tuple[int, ...] = ()
    segments: Segments | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.listed) + sum(ref.count for ref in self.refs) - len(self.gone)

    @cached_property
    def all(self) -> tuple[LiveEntry, ...]:
        """All entries, ascending in slot."""
        if not self.refs:
            return self.listed
        gone = set(self.gone)
        kept = [e for ref in self.refs for e in self._entries(ref) if e.slot not in gone]
        return tuple(sorted([*kept, *self.listed], key=_slot))

    def newest_first(self) -> Iterator[LiveEntry]:
        """All entries, the newest commit first; segments are read once the listed ones are used
        up.
        """
        if not self.refs:
            yield from reversed(self.listed)
            return
        # Entries that were changed are listed out of order: those of older slots come with the
        # segments.
        last = max([ref.last_slot for ref in self.refs])
        newer = [entry for entry in reversed(self.listed) if entry.slot > last]
        yield from newer
        yield from reversed(self.all[: len(self.all) - len(newer)])

    def find(self, attempt: str) -> LiveEntry | None:
        """The entry of an attempt."""
        for entry in reversed(self.listed):
            if entry.attempt == attempt:
                return entry
        for ref in reversed(self.refs):
            assert self.segments is not None
            if (there := self.segments.find(ref, attempt)) is not None:
                return None if there.slot in self.gone else there
        return None

    def users_of(self, attempt: str, *, after: int = -1) -> list[LiveEntry]:
        """The entries that refer to an attempt, ascending in slot. All of them lie behind the slot
        `after`, where the caller knows one: older segments are not read then.
        """
        users = [entry for entry in self.listed if attempt in entry.references]
        for ref in self.refs:
            if ref.last_slot > after:
                assert self.segments is not None
                there = self.segments.users_of(ref, attempt)
                users += [entry for entry in there if entry.slot not in self.gone]
        return sorted(users, key=_slot)

    def put(self, entry: LiveEntry) -> LiveSet:
        """With this entry, which may be one of a live attempt as it is now."""
        listed = [other for other in self.listed if other.attempt != entry.attempt]
        gone = self.gone
        # Commits bring new slots; only what is changed later can lie in a segment.
        if self.refs and len(listed) == len(self.listed):
            held = [ref for ref in self.refs if entry.slot <= ref.last_slot]
            if any(one.slot == entry.slot for ref in held for one in self._entries(ref)):
                gone = tuple(sorted({*gone, entry.slot}))
        insort(listed, entry, key=_slot)
        return replace(self, listed=tuple(listed), gone=gone)

    def drop(self, entry: LiveEntry) -> LiveSet:
        """Without this entry."""
        listed = tuple(other for other in self.listed if other.attempt != entry.attempt)
        if len(listed) < len(self.listed):
            return replace(self, listed=listed)
        # Segments never change: the record names the slots that are gone.
        return replace(self, gone=tuple(sorted({*self.gone, entry.slot})))

    def folded(self, write: Write) -> LiveSet:
        """The same live set with few listed entries. New segments are written before it returns."""
        kept = list(self.listed[-LISTED_MIN:])
        run = list(self.listed[: len(self.listed) - len(kept)])
        gone, refs = set(self.gone), list(self.refs)
        if len(gone) > GONE_MAX or sum(entry.slot in gone for entry in run) > CHANGED_MAX:
            refs = [new for ref in refs for new in self._anew(ref, gone, run, write)]
        while refs and refs[-1].count <= MERGE_RATIO * len(run):
            if refs[-1].count + len(run) > SEGMENT_COUNT_MAX:
                break
            run += self._taken_out(refs.pop(), gone)
        # What was changed stays listed while the segment that has it as it was stays.
        kept += [entry for entry in run if entry.slot in gone]
        run = [entry for entry in run if entry.slot not in gone]
        if run:
            refs.append(self._written(run, write))
        kept.sort(key=_slot)
        return LiveSet(tuple(kept), tuple(refs), tuple(sorted(gone)), self.segments)

    def _entries(self, ref: SegmentRef) -> tuple[LiveEntry, ...]:
        assert self.segments is not None, "a live set with segments knows where they are"
        return self.segments.entries(ref)

    def _taken_out(self, ref: SegmentRef, gone: set[int]) -> list[LiveEntry]:
        """What is live of a segment that will be named no more; its slots leave `gone`."""
        entries = self._entries(ref)
        kept = [entry for entry in entries if entry.slot not in gone]
        gone.difference_update(entry.slot for entry in entries)
        return kept

    def _anew(
        self, ref: SegmentRef, gone: set[int], run: list[LiveEntry], write: Write
    ) -> list[SegmentRef]:
        """A segment as it is now: without retired entries, with what `run` changed."""
        slots = {entry.slot for entry in self._entries(ref)}
        if not slots & gone:
            return [ref]
        changed = [entry for entry in run if entry.slot in slots]
        run[:] = [entry for entry in run if entry.slot not in slots]
        entries = self._taken_out(ref, gone) + changed
        return [self._written(entries, write)] if entries else []

    def _written(self, entries: list[LiveEntry], write: Write) -> SegmentRef:
        entries.sort(key=_slot)
        ref, data = segment_of(entries)
        write(ref, data)
        if self.segments is not None:
            self.segments.add(ref, tuple(entries))
        return ref


_slot = attrgetter("slot")


def write_segment(store: Store, ref: SegmentRef, data: bytes) -> None:
    """Put a segment into its store, unless it is there: it is named by its bytes."""
    with suppress(KeyExistsError):
        store.put_if_absent(segment_key(ref.digest), data)


def with_live(record: Record, live: LiveSet, write: Write) -> tuple[Record, LiveSet]:
    """`record` with this live set, and the live set as the record has it: folded if it was large.

    Raises CheckpointError where even that is too large for a record.
    """
    full = replace(record, live=live.listed, segments=live.refs, gone=live.gone)
    try:
        nbytes = len(encode_record(full))
    except CheckpointError:
        # Too large for any record: folded it may fit, else encoding it again raises this.
        nbytes = RECORD_NBYTES + 1
    if nbytes > RECORD_NBYTES and (len(live.listed) > LISTED_MIN or len(live.gone) > GONE_MAX):
        live = live.folded(write)
        full = replace(record, live=live.listed, segments=live.refs, gone=live.gone)
    return full, live


def segment_of(entries: Sequence[LiveEntry]) -> tuple[SegmentRef, bytes]:
    """A segment of `entries`, which are ascending in slot: what a record says of it, its bytes."""
    data = encode_segment(entries)
    digest = hashlib.sha256(data).digest()
    return SegmentRef(digest, len(data), len(entries), entries[-1].slot), data


def read_segment(store: Store, ref: SegmentRef) -> tuple[LiveEntry, ...]:
    """The entries of a segment. Raises Corrupt where it is missing or damaged."""
    key = segment_key(ref.digest)
    where = f"{store.url}/{key}"
    try:
        data = store.get_bounded(key, ref.nbytes)
    except (CorruptObjectError, KeyNotFoundError, TooLargeError) as error:
        raise damaged_segment(where, str(error)) from None
    if hashlib.sha256(data).digest() != ref.digest:
        raise damaged_segment(where, "its digest is not the one in its name")
    entries = decode_segment(data, where=where)
    if len(entries) != ref.count or entries[-1].slot != ref.last_slot:
        raise damaged_segment(where, f"{len(entries)} checkpoints, the record says {ref.count}")
    return entries
