"""The one way to append to a log.

An append has three outcomes: the record stands, it does not, or that is not known yet. Note
"pending": a record that was sent is kept until its slot's occupant is known, and nothing else is
appended before that. Only put_if_absent on the same slot settles it; a read that finds nothing
settles nothing, because the timed-out request may still land.

A store that is away comes back after a second (a connection that broke), half a minute (a switch, a
fail-over) or ten minutes (an incident). A save in the background costs a training nothing while it
waits, so it waits for long; only a newer save that has to wait for it makes it hurry. A blocking
save holds up the training and a person or script behind it, so it waits for less.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ckpt.commit.live import LiveSet, with_live, write_segment
from ckpt.commit.log import UNDONE, Log, LogState, broken_log
from ckpt.commit.names import MANIFEST_NAME, plain_int, record_key, segment_key
from ckpt.commit.records import (
    RECORD_NBYTES_MAX,
    Kind,
    LiveEntry,
    Record,
    decode_record,
    encode_record,
    record_digest,
    record_problem,
)
from ckpt.errors import CheckpointError, Corrupt, LogDiverged, OutcomeUnknown
from ckpt.world.base import World
from storage import Store
from storage.errors import (
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)

# For how long requests are repeated by default: nobody waits for a background save.
BACKGROUND_SECONDS = 600.0
BLOCKING_SECONDS = 120.0
PAUSE_SECONDS_MAX = 10.0
HURRIED_SECONDS = 10.0  # throttling and broken connections end by then, outages do not


def checked_seconds(seconds: float) -> float:
    """`seconds`, if requests can be repeated for so long. Raises ValueError."""
    if not (isinstance(plain_int(seconds), int | float) and 0.0 <= seconds < math.inf):
        raise ValueError(f"retry_seconds_max={seconds!r}: expected a number of at least 0")
    return float(seconds)


@contextmanager
def patience_for(store: Store, world: World, seconds: float) -> Iterator[None]:
    """Requests to `store` that fail are repeated for up to `seconds` each meanwhile, and the other
    ranks know that this one waits.
    """
    if (patience := store.patience) is None:
        yield
        return
    patience.who = f"rank {world.rank}" if world.size > 1 else ""
    patience.set(seconds, world.report_storage_wait)
    try:
        yield
    finally:
        patience.set(None)


ROOM_NBYTES = RECORD_NBYTES_MAX - (1 << 20)  # of the newest record, for a save to begin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where randomness, time and waiting come from, and how often an append is tried: the same
    record on the same slot, and lost races for a slot. Tests pass their own.

    `random_bytes(n)` must never repeat, `clock()` is seconds since 1970 for display only,
    `pause(seconds)` waits between tries. Where the store repeats requests for some time, that time
    bounds the tries, not their number.
    """

    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    tries_max: int = 5
    first_pause_seconds: float = 0.2
    races_max: int = 1000

    def tries(self, store: Store) -> Iterator[int]:
        """Numbers of tries, with pauses between, for what the store itself must not repeat: a write
        whose answer was lost.

        As long as `store` repeats what fails; `tries_max` where it repeats nothing.
        """
        patience = store.patience
        began, waited, is_waiting = time.monotonic(), 0.0, False
        try:
            for number in itertools.count():
                if number:
                    # Bounded because a float overflows at 1024, which hours of tries reach.
                    factor = 2.0 ** min(number - 1, 64)
                    seconds = min(self.first_pause_seconds * factor, PAUSE_SECONDS_MAX)
                    # The pauses count by themselves as well: a caller's `pause` need not take real
                    # time.
                    waited = max(time.monotonic() - began, waited + seconds)
                    if number >= self.tries_max if patience is None else waited >= patience.seconds:
                        return
                    if patience is not None:
                        if not is_waiting:
                            is_waiting = True
                            patience.begin(time.monotonic())
                        text = f"{store.url}: no answer to a write of the log"
                        patience.note(text, patience.seconds, time.monotonic())
                    self.pause(seconds)
                yield number
        finally:
            if patience is not None and is_waiting:
                patience.end(time.monotonic(), is_answered=False)


REAL = Sources()


class Settled(NamedTuple):
    """The outcome of a record that got no answer."""

    record: Record
    landed: bool


class RecordDraft(NamedTuple):
    """The part of a record that depends on the state before it: what becomes of the live set.

    `entry` is what a COMMIT adds, whose slot and time are set when the record is made, what a
    RETIRE removes, or what a mark changes. The record's write id begins with `mark`.
    """

    kind: Kind
    epoch: int
    entry: LiveEntry | None = None
    mark: bytes = b""

    def live_after(self, state: LogState, time_unix: float) -> LiveSet:
        """The live set after the record of this time that follows `state`."""
        if self.entry is None:
            return state.entries
        if self.kind == "RETIRE":
            return state.entries.drop(self.entry)
        entry = self.entry
        if self.kind == "COMMIT":
            entry = replace(entry, slot=state.slot + 1, committed_unix=time_unix)
        return state.entries.put(entry)


Build = Callable[[LogState], "RecordDraft | None"]


def diverged(url: str, slot: int) -> LogDiverged:
    """The error for a record in `slot` that is not the one that this process knows."""
    return LogDiverged(
        f"{url}/{record_key(slot)} is not what this process saw or wrote there, or not on the "
        "record that was before it: the root was rolled back, restored from a backup, or replaced "
        "by a copy. Nothing is acknowledged. To continue with what is there, as a new job does, "
        f"call ckpt.forget({url!r}) on all ranks and save again; or save to another url. "
        f"`ckpt log {url}` shows what is there"
    )


class Appender:
    """Appends to one log. Shared by sessions and maintenance; see the note at the top."""

    def __init__(self, store: Store, *, check_first: bool, sources: Sources = REAL) -> None:
        self.log = Log(store)
        self.sources = sources
        self._check_first = check_first
        self._pending: Record | None = None
        # The record that this process has built on last: what proves that the log is still the
        # same.
        self._known: Record | None = None
        self._diverged_at: int | None = None

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def pending(self) -> Record | None:
        return self._pending

    def append(self, build: Build) -> Record | None:
        """Append what `build` returns for the newest state, called anew after every lost race for a
        slot.

        None when `build` has nothing to do. Raises what `build` raises (nothing was sent then),
        OutcomeUnknown when the record may stand or not: it stays pending.
        """
        self.settle()
        for _ in range(self.sources.races_max):
            state = self.log.state()
            # After the read and not before it: a log that is exchanged in between would pass
            # unseen.
            self.prove()
            self._known = self.log.newest
            if self._known is not None and self._known.slot != state.slot:
                continue  # another thread has read a newer record meanwhile
            if (draft := build(state)) is None:
                return None
            record = self._record(draft, state)
            if self._put(record, sent_before=False):
                return record
        raise CheckpointError(
            f"{self.store.url}: lost {self.sources.races_max} races for a log slot in a row; "
            "another process is appending without end: stop it, then try again"
        )

    def prove(self) -> None:
        """Raise LogDiverged unless the last record that this process built on still stands, and
        Corrupt where the first one of the log is missing: new readers would see neither.

        What `Log` remembers is no proof: it follows any log that is there. A process that has
        appended to another log once stays refused, because its next record would follow that one.
        """
        if self._diverged_at is not None:
            raise diverged(self.store.url, self._diverged_at)
        if self._known is None:
            return
        if not self.log.holds(self._known):
            raise diverged(self.store.url, self._known.slot)
        if self._known.slot and not self.store.exists(record_key(0)):
            raise broken_log(self.store.url, "slot 0: it is missing")

    def check_room(self) -> None:
        """Raise CheckpointError when the next records might be larger than a record may be.

        Before a save writes its data, so that it does not learn this afterwards.
        """
        newest = self.log.newest
        if newest is None or (nbytes := len(encode_record(newest))) <= ROOM_NBYTES:
            return
        raise CheckpointError(
            f"{self.store.url}: the newest record of the log has {nbytes} bytes, and one may have "
            f"{RECORD_NBYTES_MAX}: segments of the live set could not be written for long (see the "
            f"warnings), or {newest.count} checkpoints have very many references. Nothing was "
            "written; make the store writable, or retire old checkpoints (ckpt prune)"
        )

    def settle(self) -> Settled | None:
        """Find out the outcome of a pending record. None when there is none.

        Raises OutcomeUnknown when the store still does not answer, and LogDiverged when a COMMIT
        would make, or has made, a checkpoint whose MANIFEST is gone.
        """
        if (record := self._pending) is None:
            return None
        try:
            # All others that delete the MANIFEST have seen a record in that slot; in this order,
            # a slot that was taken before the deletion is seen taken. The record stays pending.
            is_lost = self._manifest_is_gone(record)
            is_lost = is_lost and not self.store.exists(record_key(record.slot))
        except StorageError as error:
            raise self._unknown(record) from error
        if is_lost:
            raise self._without_manifest(record)
        return Settled(record, self._put(record, sent_before=True))

    def take_back(self, attempt: str) -> Record | None:
        """Retire a commit that nobody acknowledged, because its MANIFEST is not there.

        None when it is not live, or another checkpoint needs it. Raises like `append`.
        """

        def build(state: LogState) -> RecordDraft | None:
            entry = state.find(attempt)
            # A checkpoint that refers to it would lose its files.
            if entry is None or state.entries.users_of(attempt, after=entry.slot):
                return None
            return RecordDraft("RETIRE", state.epoch, entry, mark=UNDONE)

        return self.append(build)

    def _record(self, draft: RecordDraft, state: LogState) -> Record:
        slot, newest = state.slot + 1, self._known
        bare = Record(
            kind=draft.kind,
            slot=slot,
            epoch=draft.epoch,
            write_id=draft.mark + self.sources.random_bytes(16 - len(draft.mark)),
            time_unix=float(self.sources.clock()),
            attempt=None if draft.entry is None else draft.entry.attempt,
            live=(),
            previous=None if newest is None else record_digest(encode_record(newest)),
        )
        live = draft.live_after(state, bare.time_unix)
        # Segments before the record that names them: a crash in between leaves an unnamed object.
        try:
            record, _ = with_live(bare, live, partial(write_segment, self.store))
        except StorageError as error:
            # A record takes more than it should; one that is too large is refused when encoded.
            logger.warning("%s: the live set is folded later: %s", self.store.url, error)
            record = replace(bare, live=live.listed, segments=live.refs, gone=live.gone)
        if (problem := record_problem(record, slot=slot)) is not None:
            raise CheckpointError(f"refusing to append a record that {problem}")
        # A record that cannot be read would end the root: no process could append after it.
        decode_record(encode_record(record), slot=slot, where="a record that is not sent")
        return record

    def _put(self, record: Record, *, sent_before: bool) -> bool:
        """True when `record` stands in its slot, False when another one does; see note
        "pending".
        """
        data = encode_record(record)
        # Noted before the first byte is sent: a Ctrl-C in the request leaves a record that may
        # stand.
        self._pending = record
        cause: StorageError | None = None
        maybe_sent = sent_before
        for _ in self.sources.tries(self.store):
            try:
                key = record_key(record.slot)
                # unsafe_single_writer: this store would overwrite, and the user promises that no
                # other process writes.
                if self._check_first and self.store.exists(key):
                    raise KeyExistsError(f"{self.store.url}/{key} exists")
                self.store.put_if_absent(key, data)
            except KeyExistsError:
                return self._own(record, data)
            except OutcomeUnknownError as error:
                cause, maybe_sent = error, True
            # This try stored nothing. It does not clear `maybe_sent`: an earlier one may have.
            except TransientError as error:
                cause = error
            except StorageError as error:
                # A definite refusal of this try, which says nothing about an earlier one.
                cause = error
                break
            else:
                if self._stands(record, data):
                    return True
                # As after no answer: it may have been lost, or may come later.
                cause = OutcomeUnknownError(f"{key} was created and is not there")
                maybe_sent = True
        assert cause is not None
        # No try can have reached the store, so there is nothing to settle.
        if not maybe_sent:
            self._pending = None
            raise cause
        raise self._unknown(record) from cause

    def _own(self, record: Record, data: bytes) -> bool:
        """Whether the taken slot holds our own record: a lost reply is not a failure."""
        try:
            occupant = self.log.raw(record.slot)
        except StorageError as error:
            raise self._unknown(record) from error
        except Corrupt:
            occupant = b""  # too large to be ours; the next read of the log raises it
        if occupant == data:
            # The earlier request that landed may have landed in a root that was exchanged since.
            if self._stands(record, data):
                return True
            raise self._unknown(record)
        self._pending = None
        return False

    def _stands(self, record: Record, data: bytes) -> bool:
        """Whether `record` stands, and so do the one that it builds on and the MANIFEST of a
        COMMIT. False where its slot is free, and all else is as it was.

        Looked for after the append: if the root was exchanged before that, one of the three is gone
        or has other bytes. Raises LogDiverged then.
        """
        lacks_manifest = False
        try:
            is_there = self._is_in_place(record, data)
            if is_there and self._manifest_is_gone(record):
                # What was retired meanwhile was committed all the same. If the root was exchanged
                # in or since the first look, the record is not in its place now, or was brought
                # there by an earlier request of this process that got no answer: it is live then.
                is_there = self._is_in_place(record, data)
                lacks_manifest = self.log.state().find(record.live[-1].attempt) is not None
            elif (
                not is_there
                and not self.store.exists(record_key(record.slot))
                and self._fits(record)
                and not self._manifest_is_gone(record)
            ):
                # The log is as it was: stores have acknowledged what they did not store.
                return False
        except (KeyNotFoundError, Corrupt):
            is_there = False
        except StorageError as error:
            raise self._unknown(record) from error
        self._pending = None
        if not is_there:
            self._diverged_at = record.slot
            raise diverged(self.store.url, record.slot)
        if lacks_manifest:
            try:
                self.take_back(record.live[-1].attempt)
            except CheckpointError as error:
                more = f"Its COMMIT stands in slot {record.slot}; the next job that saves there "
                more += "retires it"
                raise self._without_manifest(record, more) from error
            raise self._without_manifest(record)
        self.log.saw(record)
        self._known = record
        return True

    def _is_in_place(self, record: Record, data: bytes) -> bool:
        """Whether `record` is in its slot, its new segments are there, and below it the record that
        it was made for.

        Its own slot is read last: of an older backup of the same log it is what lacks.
        """
        if not self._fits(record):
            return False
        known = () if self._known is None else self._known.segments
        for ref in record.segments:
            if ref not in known and not self.store.exists(segment_key(ref.digest)):
                return False
        return self.log.raw_if_there(record.slot) == data

    def _fits(self, record: Record) -> bool:
        """Whether the record that `record` builds on stands."""
        return not record.slot or record_digest(self.log.raw(record.slot - 1)) == record.previous

    def _manifest_is_gone(self, record: Record) -> bool:
        if record.kind != "COMMIT":
            return False
        return not self.store.exists(record.live[-1].prefix + MANIFEST_NAME)

    def _without_manifest(self, record: Record, more: str = "") -> LogDiverged:
        url = self.store.url
        return LogDiverged(
            f"{url}/{record.live[-1].prefix}{MANIFEST_NAME}, which this process wrote, is gone: "
            "the root was rolled back, restored from a backup, or replaced by a copy. Nothing is "
            f"acknowledged. To continue with what is there, call ckpt.forget({url!r}) on all "
            f"ranks and save again; or save to another url{'. ' * bool(more)}{more}"
        )

    def _unknown(self, record: Record) -> OutcomeUnknown:
        what = f"{record.kind} of {record.attempt}" if record.attempt else record.kind
        return OutcomeUnknown(
            f"{self.store.url}/{record_key(record.slot)}: no answer to the {what}: it may stand "
            "now, later or never. Nothing of it was deleted; the next save settles it, or a new "
            "process's"
        )
