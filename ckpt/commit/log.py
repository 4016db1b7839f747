"""The log of a root: which checkpoints exist, as a dense row of small records that never change.

Every record carries the live set, whole or as segments and changes to them, so the last one is
enough to know everything. This file has the FORMAT object and the reading of records;
`ckpt.commit.appender` appends.

Absence is no evidence: a log with a hole, or none where there are checkpoints, is damage that
`ckpt mend` repairs, never an older state.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckpt.commit.live import LiveSet, Segments
from ckpt.commit.names import (
    LINES_PREFIX,
    LISTED_MAX,
    LOG_PREFIX,
    MANIFEST_NAME,
    SEGMENTS_PREFIX,
    STEPS_PREFIX,
    StepDirectory,
    attempt_epoch,
    attempts_on,
    line_names,
    record_key,
    record_slot,
)
from ckpt.commit.records import (
    RECORD_NBYTES_MAX,
    LiveEntry,
    Record,
    check_record_sum,
    corrupt_record,
    decode_record,
    encode_record,
    record_digest,
)
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.checksum import crc32c, once_more, raising_corrupt
from storage.errors import CorruptObjectError, KeyNotFoundError, TooLargeError
from storage.store import Store
from storage.threads import Pool

FORMAT_KEY = "FORMAT"
FORMAT_VERSION = 1
DCP_KEY = ".metadata"  # makes a directory a checkpoint of torch.distributed.checkpoint
FORMAT_NBYTES_MAX = 4096  # the file of that name may be anybody's, and of any size
LINKS_MAX = 16  # records whose links a claim compares where requests take long
NEWER_MAX = 16  # step directories newer than the latest that are looked at
MENDED = b"mended\0\0"  # how the write id begins of a record behind which links need not hold
UNDONE = b"undone\0\0"  # how that of a RETIRE begins which takes back what nobody acknowledged

_Asked = TypeVar("_Asked")
_Mine = TypeVar("_Mine")

_FORMAT_LINE = re.compile(rb"shardpoint (1) ([0-9a-f]{32}) ([0-9a-f]{8})\n")
_FORMAT_START = re.compile(rb"shardpoint ([0-9]{1,9})[ \n]")


# --- values ---------------------------------------------------------------------------------------


def broken_log(url: str, problem: str) -> Corrupt:
    """The error for a log that is not whole."""
    return Corrupt(
        f"the log of {url} is broken: {problem}. Records were lost or damaged, or the root was "
        "rolled back, restored or copied under a running job. Stop what writes there, then run "
        f"`ckpt mend {url}`: it brings back every checkpoint that is whole"
    )


@dataclass(frozen=True, slots=True)
class LogState:
    """What the `newest` record says. An empty log has slot -1 and epoch 0.

    `uncommitted` are step directories newer than the latest checkpoint without a COMMIT, as the
    first look found them: a save under way, one that died before its commit, or a checkpoint whose
    COMMIT, the newest record, was lost.
    """

    slot: int
    epoch: int
    entries: LiveSet
    uncommitted: tuple[StepDirectory, ...] = ()
    newest: Record | None = field(default=None, compare=False)

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

    def uncommitted_text(self, url: str) -> str:
        """What to tell somebody who opens the latest checkpoint; "" where there is none newer."""
        if not self.uncommitted:
            return ""
        one = self.uncommitted[-1]
        return (
            f"{url}: step {one.step} ({one.attempt}) has no COMMIT: its save is under way or died, "
            f"or the newest record of the log was lost. If no job is running, `ckpt mend {url}` "
            "brings it back if it is whole; the next job that saves there deletes it"
        )

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


# --- the FORMAT object ----------------------------------------------------------------------------


def encode_format(root: str) -> bytes:
    """The one line of a root's FORMAT object."""
    line = f"shardpoint {FORMAT_VERSION} {root}".encode("ascii")
    data = line + b" %08x\n" % crc32c(line)
    assert _FORMAT_LINE.fullmatch(data), f"not a root id: {root!r}"
    return data


def decode_format(data: bytes, *, where: str) -> str:
    """The identity of a root, 32 hex digits, from its FORMAT object. Raises UnsupportedFormat for a
    newer version, Corrupt for a damaged one.
    """
    # The version first: what a newer one has after its number is not known here, and is no damage.
    start = _FORMAT_START.match(data)
    if start is not None and int(start[1]) > FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{where} says format version {int(start[1])}, this library reads up to "
            f"{FORMAT_VERSION}; upgrade shardpoint"
        )
    if (match := _FORMAT_LINE.fullmatch(data)) is None:
        raise Corrupt(
            f"{where} is not a shardpoint FORMAT line (got {data[:60]!r}); if this is no "
            "checkpoint root, choose another url; if it was damaged, move it away, then run "
            "`ckpt mend` on the root, which writes it again"
        )
    line = data[: match.end(2)]
    if crc32c(line) != int(match[3], 16):
        raise Corrupt(
            f"{where}: checksum {match[3].decode()} does not match its line (expected "
            f"{crc32c(line):08x}); move it away, then run `ckpt mend` on the root, which writes it "
            "again"
        )
    return match[2].decode()


def read_format(store: Store) -> str:
    """The identity of the root. Raises Corrupt where FORMAT alone is missing, and NoCheckpoint
    where there is no root, with a guess at what the caller may have meant.
    """
    # The usual case costs one request; what else is there is looked at only where FORMAT is not.
    with contextlib.suppress(KeyNotFoundError):
        return _format_of(store)
    # One page: the url may be a bucket with millions of objects of somebody else.
    keys = [info.key for info in itertools.islice(store.list(""), LISTED_MAX)]
    if FORMAT_KEY in keys:
        # Another job has made the root since the first look.
        with contextlib.suppress(KeyNotFoundError):
            return _format_of(store)
    if keys and has_remains(store):
        raise Corrupt(
            f"{store.url} has a log or checkpoints, but no {FORMAT_KEY} object. If it was removed, "
            f"`ckpt mend {store.url}` writes it again; if a copy was interrupted, repeat that"
        )
    raise _no_checkpoint(store, keys)


def has_remains(store: Store) -> bool:
    """Whether there is a record or a step directory of ours, so that there is or was a root."""
    first = next(iter(store.list(LOG_PREFIX)), None)
    # Records sort before segments, so the first key tells.
    is_log = first is not None and first.key.startswith(f"{LOG_PREFIX}0")
    return is_log or next(attempts_on(store), None) is not None


def _format_of(store: Store) -> str:
    def read() -> str:
        with raising_corrupt():
            data = store.get_bounded(FORMAT_KEY, FORMAT_NBYTES_MAX)
        return decode_format(data, where=f"{store.url}/{FORMAT_KEY}")

    try:
        return once_more(read, store)
    except TooLargeError as error:
        raise Corrupt(
            f"{error}: a FORMAT object has one line; this is not a shardpoint root, choose another "
            "url"
        ) from None


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
        first = f"{store.url.rstrip('/')}/{below[0]}"
        # Of several, nothing here says which is the newest.
        several = f"; below it are several that have, such as {first}: open one of them"
        message += f"; did you mean {first} ?" if len(below) == 1 else several
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


def at_once(asked: Callable[[], _Asked], mine: Callable[[], _Mine]) -> tuple[_Asked, _Mine]:
    """Both results; `mine` is called in this thread. Its error comes before that of `asked`."""
    with Pool(1) as pool:
        other = pool.submit(asked)
        result = mine()
    return other.result(), result


class Log:
    """Reads the log of one root. Remembers the newest record it saw, so that looking again is one
    request. Safe to use from several threads: a stale memory costs requests, nothing else.

    A log that is not one row of records, as far as a look goes, is refused: see `broken_log`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.segments = Segments(lambda: self.store)
        self._end: LogState | None = None

    def state(self, meanwhile: Callable[[LogState], None] | None = None) -> LogState:
        """What exists now. At most 50 requests for a million records, one or two when warm.

        The first look lists the last thousand slots, and what is in `steps/` from the latest
        checkpoint on; `meanwhile` is called with what the newest record says while the store lists
        the latter. Raises Corrupt where records are missing or do not follow each other.
        """
        end = self._end
        if end is None:
            end = self._first_look(meanwhile)
            self._remember(end)
        elif (last := self._last_slot(end.slot)) != end.slot:
            end = self._read_end(last)
            self._remember(end)
        return end

    @property
    def newest(self) -> Record | None:
        """The newest record of those seen so far; asks nobody."""
        return None if self._end is None else self._end.newest

    def holds(self, record: Record) -> bool:
        """Whether `record` stands in its slot now, byte for byte."""
        try:
            return self.raw(record.slot) == encode_record(record)
        except (KeyNotFoundError, Corrupt):
            return False

    def check_end(self) -> None:
        """Raise Corrupt when the newest records do not build on each other, back to where the log
        was mended, or where one of the last slots is free: before a writer appends or deletes, and
        so hides what another log says.
        """
        if self._end is not None:  # else the first look does it
            self._page(max(-1, self._end.slot - LISTED_MAX))
        self.state()
        # Reading them is the check.
        for _ in self.last_records():
            pass

    def last_records(self) -> Iterator[Record]:
        """The newest records, the newest first: few where requests take long. Raises Corrupt where
        they do not build on each other.
        """
        record = self.newest
        count = LISTED_MAX if self.store.part_nbytes_min == 1 else LINKS_MAX
        while record is not None:
            yield record
            is_last = not count or begins_chain(record)
            record, count = None if is_last else self._before(record), count - 1

    def record(self, slot: int) -> Record:
        """One record. Raises Corrupt when it is damaged, or the slot is free."""
        try:
            return self._decoded(slot, self.raw(slot))
        except KeyNotFoundError:
            raise self._broken(slot, "it is missing") from None

    def raw(self, slot: int) -> bytes:
        """The bytes in a slot, whatever they are; no more than a record may have. Requested once
        more where they do not match their checksum.
        """
        key, answers = record_key(slot), list[bytes]()

        def read() -> None:
            answers.clear()
            try:
                answers.append(self.store.get_bounded(key, RECORD_NBYTES_MAX))
            except (CorruptObjectError, TooLargeError) as error:
                corrupt_record(f"{self.store.url}/{key}", str(error))
            check_record_sum(answers[0], key)

        try:
            once_more(read, self.store)
        except Corrupt:
            # Bytes that match no checksum still take the slot: a writer has to see them.
            if not answers:
                raise
        return answers[0]

    def raw_if_there(self, slot: int) -> bytes | None:
        """As `raw`; None when the slot is free."""
        try:
            return self.raw(slot)
        except KeyNotFoundError:
            return None

    def history(self) -> Iterator[Record]:
        """All records, from the first on: as many requests as records. Raises Corrupt at a hole."""
        yield from map(self.record, range(self.state().slot + 1))

    def saw(self, record: Record) -> None:
        """Remember a record that is known to stand in the log, as an appender does with its own."""
        self._remember(self._end_at(record))

    def live_of(self, record: Record) -> LiveSet:
        """The live set after a record."""
        return LiveSet(record.live, record.segments, record.gone, self.segments)

    def _end_at(self, newest: Record) -> LogState:
        return LogState(newest.slot, newest.epoch, self.live_of(newest), newest=newest)

    def _remember(self, end: LogState) -> None:
        # Never backwards: another thread may have seen a newer record meanwhile.
        if self._end is None or end.slot > self._end.slot:
            self._end = end
            self.segments.keep(end.newest.segments if end.newest is not None else ())

    def _decoded(self, slot: int, data: bytes) -> Record:
        return decode_record(data, slot=slot, where=f"{self.store.url}/{record_key(slot)}")

    def _broken(self, slot: int, problem: str) -> Corrupt:
        return broken_log(self.store.url, f"slot {slot}: {problem}")

    # The end of a log ---------------------------------------------------------------------------

    def _first_look(self, meanwhile: Callable[[LogState], None] | None) -> LogState:
        """The end of a log that nothing is known of, compared with what is in `steps/`."""
        listed = self._last_listed()
        if self.store.part_nbytes_min == 1:
            end = self._read_end(listed)
        else:
            # The listing may be older than the newest record, which mostly it shows.
            last, end = at_once(lambda: self._last_slot(listed), lambda: self._read_end(listed))
            if last != listed:
                end = self._read_end(last)
        if meanwhile is None:
            newer_attempts = self._newer_on_store(end)
        else:
            state, early = end, meanwhile
            newer_attempts, _ = at_once(lambda: self._newer_on_store(state), lambda: early(state))
        if not newer_attempts:
            return end
        # A commit, or a retirement, may have come between the two looks.
        if (last := self._last_slot(end.slot)) != end.slot:
            end = self._read_end(last)
        return replace(end, uncommitted=self._uncommitted(newer_attempts, end))

    def _newer_on_store(self, state: LogState) -> list[StepDirectory]:
        """Attempts from the latest checkpoint's step on that are not live."""
        latest = state.latest
        after = "" if latest is None else f"{STEPS_PREFIX}{latest.step:08d}-"
        there = itertools.islice(attempts_on(self.store, after=after), NEWER_MAX)
        return [one for one in there if state.find(one.attempt) is None]

    def _uncommitted(
        self, candidates: Sequence[StepDirectory], state: LogState
    ) -> tuple[StepDirectory, ...]:
        """Those of `candidates` that have no COMMIT. Raises Corrupt where they prove that records
        are lost: a session commits one save, or knows that it has failed, before the next.
        """
        # Of an older epoch: a job that has been superseded leaves as many, and commits none.
        unlisted = [
            one
            for one in candidates
            if state.find(one.attempt) is None and attempt_epoch(one.attempt) >= state.epoch
        ]
        if not unlisted:
            return ()
        epochs = Counter(attempt_epoch(one.attempt) for one in unlisted)
        if max(epochs) > state.epoch:
            problem = f"its newest record is of epoch {state.epoch}, a checkpoint of {max(epochs)}"
            if state.slot < 0:
                problem = f"it is empty, and {STEPS_PREFIX} has checkpoints"
        elif lost := self.lost_of([one for one in unlisted if one.is_written], state.slot):
            problem = f"{len(lost)} checkpoints newer than its latest have no COMMIT"
            unlisted = lost
        else:
            return tuple(unlisted)
        one = unlisted[-1]
        raise broken_log(self.store.url, f"{problem}, such as step {one.step} ({one.attempt})")

    def lost_of(self, attempts: Sequence[StepDirectory], last: int) -> list[StepDirectory]:
        """Those of `attempts`, which have a MANIFEST and are not live, whose records were lost.

        A session commits a save, or deletes it, before it begins the next. So of one epoch a second
        one is no remain, unless the records up to slot `last` have its RETIRE, or were mended since
        it was saved. They are read, back to that epoch, only where there are several.
        """
        left = _several_of_an_epoch({one.attempt: one for one in attempts})
        slot = last
        while left and slot >= 0:
            record = self.record(slot)
            if record.epoch < min(map(attempt_epoch, left)):
                break
            left.pop(record.attempt or "", None)
            if record.write_id.startswith(MENDED):  # what was whole then is live since
                left = {a: one for a, one in left.items() if attempt_epoch(a) >= record.epoch}
            left, slot = _several_of_an_epoch(left), slot - 1
        return list(left.values())

    def _last_listed(self) -> int:
        """The last slot, by listings: one of a small log, and of a large one as many as it takes to
        find the last page. Raises Corrupt where a slot of a page is free.
        """
        # On a disk a listing reads all names, and looking for one costs nothing.
        is_disk = self.store.part_nbytes_min == 1
        page, is_last = self._page(max(-1, self._last_slot(-1) - LISTED_MAX) if is_disk else -1)
        stride, high = LISTED_MAX, -1
        while not is_disk and not is_last and high != page[-1]:
            low = page[-1]
            if high < 0:
                middle, stride = low + stride, 4 * stride
            else:
                middle = low if high - low <= LISTED_MAX else (low + high) // 2
            behind, ends = self._page(middle)
            if behind:
                page, is_last = behind, ends
            else:
                high = middle
        return page[-1] if page else -1

    def _page(self, after: int) -> tuple[list[int], bool]:
        """The slots behind `after` that one listing shows, and whether there are no others."""
        count = None if self.store.part_nbytes_min == 1 else LISTED_MAX
        listing = self.store.list(LOG_PREFIX, after=record_key(after) if after >= 0 else "")
        keys = [info.key for info in itertools.islice(listing, count)]
        slots = [slot for key in keys if (slot := record_slot(key)) is not None]
        expected = after + 1
        for slot in slots:
            while expected < slot:
                # Looked for, because a listing may be stale.
                if not self.store.exists(record_key(expected)):
                    raise self._broken(expected, f"it is missing, and slot {slot} is there")
                expected += 1
            expected = slot + 1
        is_last = count is None or len(keys) < count or keys[-1].startswith(SEGMENTS_PREFIX)
        return slots, is_last

    def _read_end(self, slot: int) -> LogState:
        """The newest record, which stands in `slot`. Raises Corrupt unless it builds on the one
        before.
        """
        if slot < 0:
            return EMPTY_STATE
        if slot == 0 or self.store.part_nbytes_min == 1:
            record = self.record(slot)
            before = self.raw_if_there(slot - 1) if slot else None
        else:
            # Where requests take long, both are asked for at once.
            before, record = at_once(lambda: self.raw_if_there(slot - 1), lambda: self.record(slot))
        self._check_link(record, before)
        return self._end_at(record)

    def _before(self, record: Record) -> Record:
        """The record that another one builds on. Raises Corrupt where another stands there."""
        before = self.raw_if_there(record.slot - 1)
        self._check_link(record, before)
        assert before is not None
        return self._decoded(record.slot - 1, before)

    def _check_link(self, record: Record, before: bytes | None) -> None:
        if record.slot and before is None:
            raise self._broken(record.slot - 1, f"it is missing, and slot {record.slot} is there")
        if before is not None and record_digest(before) != record.previous:
            raise self._broken(record.slot, "it builds on another record than is before it")

    def _last_slot(self, known: int) -> int:
        """The last occupied slot at or after `known`, which is occupied (or -1: none known).

        Slots are dense, so: gallop until a free slot, then bisect. Each step is one request.
        """
        low, stride = known, 1
        while self.store.exists(record_key(low + stride)):
            low += stride
            # Mostly there is one new record or none, so look at the next one before taking off.
            stride = 1 if low == known + 1 else stride * 4
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            is_taken = self.store.exists(record_key(middle))
            low, high = (middle, high) if is_taken else (low, middle)
        return low


def _several_of_an_epoch(attempts: dict[str, StepDirectory]) -> dict[str, StepDirectory]:
    counts = Counter(map(attempt_epoch, attempts))
    return {name: one for name, one in attempts.items() if counts[attempt_epoch(name)] > 1}


def begins_chain(record: Record) -> bool:
    """Whether the records before it need not be one row: there are none, or it mended the log."""
    return record.slot == 0 or record.write_id.startswith(MENDED)
