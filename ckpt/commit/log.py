"""The log of a root: which checkpoints exist, as a dense row of small records that never change.

Every record carries the live set, whole or as segments and changes to them, so the last one is
enough to know everything. This file
has the FORMAT object and the reading of records; `ckpt.commit.appender` appends.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.commit.live import LiveSet, Segments, live_of
from ckpt.commit.names import (
    LINES_PREFIX,
    LOG_PREFIX,
    MANIFEST_NAME,
    SEGMENTS_PREFIX,
    STEPS_PREFIX,
    line_names,
    record_key,
    record_slot,
    segment_key,
)
from ckpt.commit.records import (
    RECORD_NBYTES_MAX,
    LiveEntry,
    Record,
    corrupt_record,
    decode_record,
    encode_record,
    record_digest,
)
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.checksum import crc32c
from ckpt.format.damage import raising_corrupt
from storage.errors import CorruptObjectError, KeyNotFoundError, TooLargeError
from storage.store import Store

FORMAT_KEY = "FORMAT"
FORMAT_VERSION = 1
DCP_KEY = ".metadata"  # makes a directory a checkpoint of torch.distributed.checkpoint
FORMAT_NBYTES_MAX = 4096
LISTED_MAX = 1000  # a page of S3
LINKS_MAX = 16  # records whose links a claim compares where requests take long
BEHIND_MAX = 16  # records behind a hole that a claim looks at: more than that is no accident
# Late records in a row that are noticed, each at a request more. A writer acknowledges nothing that
# a new reader would take for one of them.
RUN_MAX = 3
RUN_NEW_MAX = 2  # by who sees a log for the first time
LOST_LOOKS = 16  # checkpoints of a void record that are looked for
MENDED = b"mended\0\0"  # how the write id begins of a record behind which links need not hold
UNDONE = b"undone\0\0"  # how that of a RETIRE begins which takes back what nobody acknowledged

_FORMAT_LINE = re.compile(rb"shardpoint (1) ([0-9a-f]{32}) ([0-9a-f]{8})\n")
_FORMAT_START = re.compile(rb"shardpoint ([0-9]{1,9})[ \n]")


# --- values ---------------------------------------------------------------------------------------


def broken_log(url: str, slot: int, problem: str) -> Corrupt:
    """The error for a log that is no row of records that build on each other."""
    return Corrupt(
        f"the log of {url} is broken at slot {slot}: {problem}. It was rolled back, restored or "
        f"copied under a running job. `ckpt log {url}` shows it, and `ckpt mend {url}` makes it "
        "whole: no checkpoint is lost by that"
    )


@dataclass(frozen=True, slots=True)
class LogState:
    """What the newest record says that is not void. An empty log has slot -1 and epoch 0.

    `slot` is the last one that is taken; the last `void` records up to there count for nothing.
    """

    slot: int
    epoch: int
    entries: LiveSet
    void: int = 0

    @property
    def live(self) -> tuple[LiveEntry, ...]:
        """Every checkpoint that exists, ascending in slot. May need requests: see `LiveSet`."""
        return self.entries.all

    @property
    def latest(self) -> LiveEntry | None:
        """What a training resumes from: see `latest_of`."""
        of_a_line = (entry for entry in self.newest_first() if entry.line is not None)
        return next(of_a_line, None) or next(self.newest_first(), None)

    def newest_first(self) -> Iterator[LiveEntry]:
        """Every checkpoint that exists, the newest commit first."""
        return self.entries.newest_first()

    def find(self, attempt: str) -> LiveEntry | None:
        """The live entry of that attempt."""
        return self.entries.find(attempt)


def latest_of(live: Sequence[LiveEntry]) -> LiveEntry | None:
    """The newest commit of a training's line; where there is no line, the newest commit.

    `live` is ascending in `slot`. None when it is empty.
    """
    of_a_line = (entry for entry in reversed(live) if entry.line is not None)
    return next(of_a_line, live[-1] if live else None)


EMPTY_STATE = LogState(slot=-1, epoch=0, entries=LiveSet())


@dataclass(frozen=True, slots=True)
class RootFormat:
    """What the FORMAT object says: the format's version and the root's identity (32 hex digits)."""

    version: int
    root: str


# --- the FORMAT object ----------------------------------------------------------------------------


def encode_format(root: str) -> bytes:
    """The one line of a root's FORMAT object."""
    line = f"shardpoint {FORMAT_VERSION} {root}".encode("ascii")
    data = line + b" %08x\n" % crc32c(line)
    assert _FORMAT_LINE.fullmatch(data), f"not a root id: {root!r}"
    return data


def decode_format(data: bytes, *, where: str) -> RootFormat:
    """Parse a FORMAT object. Raises UnsupportedFormat for a newer version, Corrupt for a damaged
    one.
    """
    # The version first: what a newer one has after its number is not known here, and is no damage.
    start = _FORMAT_START.match(data)
    if start is not None and int(start[1]) > FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{where} says format version {int(start[1])}, this library reads up to "
            f"{FORMAT_VERSION}; upgrade shardpoint"
        )
    match = _FORMAT_LINE.fullmatch(data)
    if match is None:
        raise Corrupt(
            f"{where} is not a shardpoint FORMAT line (got {data[:60]!r}); if this is no "
            "checkpoint root, choose another url; if it was damaged, load by a step directory's "
            "own path, <url>/steps/<step>-<attempt>"
        )
    line = data[: match.end(2)]
    if crc32c(line) != int(match[3], 16):
        raise Corrupt(
            f"{where}: checksum {match[3].decode()} does not match its line (expected "
            f"{crc32c(line):08x}); load by a step directory's own path, "
            "<url>/steps/<step>-<attempt>"
        )
    return RootFormat(version=int(match[1]), root=match[2].decode())


def read_format(store: Store) -> RootFormat:
    """The identity of the root. Raises NoCheckpoint when there is no FORMAT object, with a guess at
    what the caller may have meant."""
    with contextlib.suppress(KeyNotFoundError):
        return _format_of(store)
    # One page: the url may be a bucket with millions of objects of somebody else.
    keys = [info.key for info in itertools.islice(store.list(""), LISTED_MAX)]
    if FORMAT_KEY in keys:
        # Another job has made the root since the first look.
        with contextlib.suppress(KeyNotFoundError):
            return _format_of(store)
    raise _no_checkpoint(store, keys)


def _format_of(store: Store) -> RootFormat:
    try:
        with raising_corrupt():
            data = store.get_bounded(FORMAT_KEY, FORMAT_NBYTES_MAX)
    except TooLargeError as error:
        raise Corrupt(
            f"{error}: a FORMAT object has one line; this is not a shardpoint root, choose another "
            "url"
        ) from None
    return decode_format(data, where=f"{store.url}/{FORMAT_KEY}")


def _no_checkpoint(store: Store, keys: Sequence[str]) -> NoCheckpoint:
    """Say that there is no root here, and what is here instead."""
    below = sorted({key[: -len("/FORMAT")] for key in keys if key.endswith("/FORMAT")})
    message = f"{store.url} has no shardpoint checkpoint: no {FORMAT_KEY} object"
    if names := line_names(store) if any(key.startswith(LINES_PREFIX) for key in keys) else []:
        message += (
            f"; it holds the named lines {', '.join(names)}: pass line={names[0]!r}, or open "
            f"{store.url.rstrip('/')}/{LINES_PREFIX}{names[0]}"
        )
    elif below:
        message += f"; did you mean {store.url.rstrip('/')}/{below[0]} ?"
    elif any(key.startswith((LOG_PREFIX, STEPS_PREFIX)) for key in keys):
        message += (
            f", though there is a {LOG_PREFIX} or {STEPS_PREFIX} folder: the copy is incomplete or "
            "FORMAT was removed; load by a step directory's own path, <url>/steps/<step>-<attempt>"
        )
    elif MANIFEST_NAME in keys:
        root, steps, _ = store.url.rstrip("/").rpartition("/steps/")
        message += "; it is the directory of one checkpoint, which `ckpt show` and `ckpt.load` open"
        message += f"; its root is {root}" if steps else ""
    elif DCP_KEY in keys:
        message += (
            "; it is a checkpoint of torch.distributed.checkpoint: use `ckpt import` to convert it"
        )
    elif keys:
        message += f"; it holds other things (such as {keys[0]!r}): check the url"
    else:
        message += "; it is empty or does not exist: check the url, or save something there first"
    return NoCheckpoint(message)


# --- reading --------------------------------------------------------------------------------------


def begins_row(record: Record) -> bool:
    """Whether a record counts whatever the ones before it are: its writer has examined them, or
    knew of no digests (version 0.1).
    """
    return record.previous is None or record.write_id.startswith(MENDED)


def is_follower(record: Record, before: bytes | None) -> bool:
    """Whether `record` builds on the bytes in the slot before it (None: that is free)."""
    # Version 0.1 kept no digest, and nothing else tells.
    if record.previous is None:
        return True
    return before is not None and record_digest(before) == record.previous


@dataclass(frozen=True, slots=True)
class _LogEnd:
    """The last slot of a log that is taken, and the newest record that counts, if any does."""

    slot: int
    newest: Record | None
    state: LogState = EMPTY_STATE


class Log:
    """Reads the log of one root. Remembers the newest record it saw, so that looking again is one
    request. Safe to use from several threads: a stale memory costs requests, nothing else.

    A record that does not follow the one in the slot before is void: it was sent while the root was
    exchanged, its writer found that out and reported an error. It counts for nothing, and so does
    what stands behind a free slot, and what builds on a void record without saying so.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.segments = Segments(lambda: self.store)
        self._end: _LogEnd | None = None

    def state(self) -> LogState:
        """What exists now. At most 50 requests for a million records, one or two when warm."""
        end = self._end
        if end is None:
            end = self._first_look()
            self._remember(end)
        elif (last := self._last_slot(end.slot)) != end.slot:
            unproved = last - end.slot + end.state.void
            end = self._read_end(last, links=min(RUN_MAX, unproved))
            self._remember(end)
        return end.state

    @property
    def newest(self) -> Record | None:
        """The newest record that counts of those seen so far; asks nobody."""
        return None if self._end is None else self._end.newest

    def holds(self, record: Record) -> bool:
        """Whether `record` stands in its slot now, byte for byte."""
        try:
            return self.raw(record.slot) == encode_record(record)
        except (KeyNotFoundError, Corrupt):
            return False

    def check_end(self) -> None:
        """Raise Corrupt when the end of the log is not one row of records that build on each other.

        Looks at the last thousand slots, and at everything behind the last one: who appends before
        a hole would hide what is behind it. Void records are passed over where nothing is lost by
        that: see `check_void`.
        """
        state = self.state()
        first = max(0, state.slot + 1 - LISTED_MAX)
        expected = first
        after = record_key(first - 1) if first else ""
        behind: list[int] = []
        for info in self.store.list(LOG_PREFIX, after=after):
            if info.key.startswith(SEGMENTS_PREFIX):
                break
            slot = record_slot(info.key)
            if slot is None:
                continue
            if slot != expected and (expected <= state.slot or len(behind) == BEHIND_MAX):
                problem = f"it is missing, and slot {slot} is there"
                raise broken_log(self.store.url, expected, problem)
            if slot == expected:
                expected += 1
            else:
                behind.append(slot)
        for slot in behind:
            problem = f"it is missing, and slot {slot} is there"
            self._refuse_loss(self.record(slot), state, expected, problem)
        self.check_void(state)
        if (newest := self.newest) is not None:
            self._check_links(newest, LISTED_MAX if self.store.part_nbytes_min == 1 else LINKS_MAX)

    def check_void(self, state: LogState) -> None:
        """Raise Corrupt when a void record at the end tells of a checkpoint that is whole here.

        It would be deleted as a remain. Such a log is not of a backup that was restored, but two
        logs in one.
        """
        for slot in range(state.slot - state.void + 1, state.slot + 1):
            problem = "it does not follow the record before it"
            self._refuse_loss(self.record(slot), state, slot, problem)

    def _refuse_loss(self, record: Record, state: LogState, slot: int, problem: str) -> None:
        # The newest are enough: who merges two logs has what the other one saved last.
        listed = record.live[-LOST_LOOKS:]
        unknown = [entry for entry in listed if state.find(entry.attempt) is None]
        for entry in reversed(unknown):
            if not self.store.exists(entry.prefix + MANIFEST_NAME):
                continue
            if entry.slot == record.slot or not self._was_retired(entry):
                problem += f", with step {entry.step} ({entry.attempt}), which is here, too"
                raise broken_log(self.store.url, slot, problem)

    def _was_retired(self, entry: LiveEntry) -> bool:
        """Whether this log has the commit of `entry`, which is not live: its files will go."""
        try:
            return self.record(entry.slot).attempt == entry.attempt
        except (KeyNotFoundError, Corrupt):
            return False

    def _check_links(self, record: Record, count: int) -> None:
        """Compare what the last `count` records keep of the one before, back to where the log was
        mended.
        """
        for _ in range(count):
            if begins_row(record):
                return
            data = self.raw(record.slot - 1)
            if record_digest(data) != record.previous:
                problem = "it builds on another record than is before it"
                raise broken_log(self.store.url, record.slot, problem)
            slot = record.slot - 1
            record = decode_record(data, slot=slot, where=f"{self.store.url}/{record_key(slot)}")

    def digest_of(self, state: LogState) -> bytes | None:
        """What the record after `state`, which `state()` has returned last, keeps of the newest
        one. None while the log is empty.
        """
        newest = self.newest
        if newest is None or newest.slot != state.slot:
            return None if state.slot < 0 else record_digest(self.raw(state.slot))
        return record_digest(encode_record(newest))

    def record(self, slot: int) -> Record:
        """One record. Raises Corrupt when it is damaged, KeyNotFoundError when the slot is free."""
        key = record_key(slot)
        return decode_record(self.raw(slot), slot=slot, where=f"{self.store.url}/{key}")

    def raw(self, slot: int) -> bytes:
        """The bytes in a slot, whatever they are; no more than a record may have."""
        key = record_key(slot)
        try:
            return self.store.get_bounded(key, RECORD_NBYTES_MAX)
        except (CorruptObjectError, TooLargeError) as error:
            corrupt_record(f"{self.store.url}/{key}", str(error))

    def history(self) -> Iterator[Record]:
        """All records that count, from the first on: as many requests as records. Raises Corrupt at
        a hole.
        """
        last = self.state().slot
        before: bytes | None = None
        is_row = True
        for slot in range(last + 1):
            try:
                data = self.raw(slot)
            except KeyNotFoundError:
                corrupt_record(f"{self.store.url}/{record_key(slot)}", "it was removed")
            record = self._decoded(slot, data)
            is_row = is_follower(record, before) and (is_row or begins_row(record))
            if is_row and self.has_new_segments(record, before):
                yield record
            before = data

    def saw(self, record: Record) -> None:
        """Remember a record that is known to stand in the log, as an appender does with its own."""
        self._remember(self._end_at(record.slot, record))

    def committed_unix(self, entry: LiveEntry) -> float | None:
        """When a checkpoint was committed, in seconds by its writer's clock. One request where its
        entry does not say; None where its COMMIT cannot be read any more.
        """
        if entry.committed_unix is not None:
            return entry.committed_unix
        try:
            record = self.record(entry.slot)
        except (KeyNotFoundError, Corrupt):
            return None
        # Another record stands there where a hole was filled.
        return record.time_unix if record.attempt == entry.attempt else None

    def live_of(self, record: Record) -> LiveSet:
        """The live set after a record."""
        return live_of(record, self.segments)

    def _end_at(self, slot: int, newest: Record) -> _LogEnd:
        void = slot - newest.slot
        return _LogEnd(slot, newest, LogState(slot, newest.epoch, self.live_of(newest), void=void))

    def _remember(self, end: _LogEnd) -> None:
        # Never backwards: another thread may have seen a newer record meanwhile.
        if self._end is None or end.slot > self._end.slot:
            self._end = end
            self.segments.keep(end.newest.segments if end.newest is not None else ())

    def _decoded(self, slot: int, data: bytes) -> Record:
        return decode_record(data, slot=slot, where=f"{self.store.url}/{record_key(slot)}")

    def _first_look(self) -> _LogEnd:
        """The end of a log that nothing is known of."""
        if self.store.part_nbytes_min == 1:
            return self._read_end(self._last_slot(-1), links=RUN_NEW_MAX)
        listed = self._last_listed()
        if not 0 <= listed < LISTED_MAX - 1:  # none, or a page of many
            return self._read_end(self._last_of_many(listed))
        # Mostly the listed record is the newest: it is read while that is being found out.
        with ThreadPoolExecutor(1) as pool:
            newer = pool.submit(self._last_slot, listed)
            read = None
            # Where a newer one stands behind it, a damaged record may still be passed over.
            with contextlib.suppress(KeyNotFoundError, Corrupt):
                read = self._with_the_one_before(listed)
            last = newer.result()
        return self._read_end(last, read if last == listed else None)

    def _read_end(
        self, last: int, read: tuple[Record, bytes | None] | None = None, *, links: int = 1
    ) -> _LogEnd:
        """The newest record that counts, looking back from the occupied slot `last`; `read` is that
        one with the one before it, where it was read already.

        It and up to `links - 1` records below it have to follow the ones before them: of several
        late records in a row, only the first does not.
        """
        slot, left = last, links
        newest: Record | None = None
        before: bytes | None = None
        while slot >= 0:
            try:
                record, before = read or self._with_the_one_before(slot, before)
            except Corrupt:
                if newest is None:
                    raise
                break  # damage below the newest record does not hide that
            read = None
            if newest is not None and record.previous is None:
                break  # version 0.1 kept no digest, and nothing else tells
            # Segments that a record below the newest lacks are damage, and named when needed.
            is_whole = newest is not None or self.has_new_segments(record, before)
            if is_follower(record, before) and is_whole:
                newest, left = newest or record, left - 1
                if not left or before is None or begins_row(record):
                    break
            else:
                if newest is not None and self._is_damaged(slot - 1, before):
                    break
                newest, left = None, links
            if before is None and slot:
                # A free slot ends the log, and what is before the first one is dense.
                last = slot = self._bisect(-1, slot - 1)
            else:
                slot -= 1
        return _LogEnd(-1, None) if newest is None else self._end_at(last, newest)

    def is_void(self, slot: int, data: bytes) -> bool:
        """Whether the record of these bytes does not follow the one before it, damage apart."""
        record, before = self._with_the_one_before(slot, data)
        return not is_follower(record, before) and not self._is_damaged(slot - 1, before)

    def _is_damaged(self, slot: int, data: bytes | None) -> bool:
        try:
            return data is not None and not self._decoded(slot, data)
        except Corrupt:
            return True

    def _with_the_one_before(
        self, slot: int, data: bytes | None = None
    ) -> tuple[Record, bytes | None]:
        """A record, and the bytes in the slot before it: None where that is free, or where nothing
        depends on it. `data` are the record's bytes, where they were read already.
        """
        if slot == 0 or data is not None or self.store.part_nbytes_min == 1:
            record = self.record(slot) if data is None else self._decoded(slot, data)
            if slot == 0:
                return record, None
            # Asked for anew although it may be remembered: the log may have been exchanged since.
            return record, None if record.previous is None else self._raw_if_there(slot - 1)
        # Where requests take long, both are asked for at once.
        with ThreadPoolExecutor(1) as pool:
            before = pool.submit(self._raw_if_there, slot - 1)
            return self.record(slot), before.result()

    def has_new_segments(self, record: Record, before: bytes | None) -> bool:
        """Whether the segments are there that the record before did not name. A backup that was
        restored before the record was sent has taken them.
        """
        new = set(record.segments)
        if new and before is not None:
            with contextlib.suppress(Corrupt):  # all of them are looked for then
                new -= set(self._decoded(record.slot - 1, before).segments)
        return all(self.store.exists(segment_key(ref.digest)) for ref in new)

    def _raw_if_there(self, slot: int) -> bytes | None:
        try:
            return self.raw(slot)
        except KeyNotFoundError:
            return None

    def _last_listed(self, after: int = -1) -> int:
        """The last of the slots behind `after` that follow each other, of one page of a listing: it
        stands for a dozen requests. Others may follow, so nothing rests on its being fresh.
        """
        last = after
        start = record_key(after) if after >= 0 else ""
        for info in itertools.islice(self.store.list(LOG_PREFIX, after=start), LISTED_MAX):
            if info.key != record_key(last + 1):
                break
            last += 1
        return last

    def _last_of_many(self, listed: int) -> int:
        """The last slot behind the first page, by another page of the last ones: a free slot among
        them is seen, and requests are saved.
        """
        low, high = self._gallop(listed)
        low = self._bisect(low, high, apart=LISTED_MAX - BEHIND_MAX)
        return self._last_slot(self._last_listed(max(-1, low - BEHIND_MAX - 1)))

    def _last_slot(self, known: int) -> int:
        """The last occupied slot at or after `known`, which is occupied (or -1: none known).

        Slots are dense, so: gallop until a free slot, then bisect. Each step is one request.
        """
        return self._bisect(*self._gallop(known))

    def _gallop(self, known: int) -> tuple[int, int]:
        """An occupied slot at or after `known` (or -1), and a free one behind it."""
        low, stride = known, 1
        while self.store.exists(record_key(low + stride)):
            low += stride
            # Mostly there is one new record or none, so look at the next one before taking off.
            stride = 1 if low == known + 1 else stride * 4
        return low, low + stride

    def _bisect(self, low: int, high: int, *, apart: int = 1) -> int:
        """A slot that is occupied (or -1) as `low` is, with a free one at most `apart` behind it
        as the free `high` is.
        """
        while high - low > apart:
            middle = (low + high) // 2
            is_taken = self.store.exists(record_key(middle))
            low, high = (middle, high) if is_taken else (low, middle)
        return low
