"""Who may write to a root, and the one way to append to its log.

A session claims a root once and appends under its epoch until a later claim fences it. Maintenance
appends under whatever epoch is current, without claiming, so that pruning never stops a training.

An append has three outcomes: it stands, it does not, or nobody knows yet. Note "pending": a record
that was sent is kept until its slot's occupant is known, and nothing else is appended before that.
Only put_if_absent on the same slot settles it; a read that finds nothing settles nothing, because
the timed-out request may still land.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.errors import CheckpointError, Corrupt, Fenced, NoCheckpoint, OutcomeUnknown, StoreRefused
from ckpt.lines import OwnLine, Restored
from ckpt.log import (
    FORMAT_KEY,
    LOG_PREFIX,
    MANIFEST_NAME,
    STEPS_PREFIX,
    Kind,
    LiveEntry,
    Log,
    LogState,
    Record,
    attempt_epoch,
    attempt_name,
    decode_record,
    encode_format,
    encode_record,
    parse_step_key,
    read_format,
    record_key,
    record_problem,
    step_prefix,
)
from ckpt.world import World
from storage.errors import (
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)
from storage.store import ExclusiveCreate, Store

logger = logging.getLogger(__name__)


class ReferenceRetired(CheckpointError):
    """The new checkpoint needs files of an attempt that was retired meanwhile; it was not
    committed.

    Write those chunks anew, under a new attempt.
    """


class NotRetired(CheckpointError):
    """This checkpoint may not be retired: pinned, needed by another, the last one, or not there."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where randomness, time and waiting come from; tests give their own.

    `random_bytes(n)` must never repeat, `clock()` is seconds since 1970 for display only,
    `pause(seconds)` waits between tries.
    """

    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Limits:
    """How often an append is tried: the same record on the same slot, and lost races for a slot."""

    tries_max: int = 5
    first_pause_seconds: float = 0.2
    races_max: int = 1000


class Settled(NamedTuple):
    """What became of a record whose outcome was unknown."""

    record: Record
    landed: bool


class Commit(NamedTuple):
    """What a save wants to bring to life. Durable data and manifest must be there already.

    With `in_line` it is a state of the training that this session writes; imports are not.
    """

    attempt: str
    step: int
    manifest_nbytes: int
    manifest_digest: bytes
    metric: float | None = None
    references: tuple[str, ...] = ()
    in_line: bool = True

    def entry(self, *, line: int | None) -> LiveEntry:
        """What the log will say of it; the slot is known when the record has one."""
        return LiveEntry(
            attempt=self.attempt,
            step=self.step,
            slot=0,
            manifest_nbytes=self.manifest_nbytes,
            manifest_digest=self.manifest_digest,
            pinned=False,
            verified=False,
            metric=None if self.metric is None else float(self.metric),
            references=tuple(sorted(set(self.references))),
            line=line,
        )


class _Draft(NamedTuple):
    """The part of a record that depends on the live set before it. `entry` comes to life with a
    COMMIT, and learns its slot when the record gets one."""

    kind: Kind
    epoch: int
    attempt: str | None
    live: tuple[LiveEntry, ...]
    entry: LiveEntry | None = None


Build = Callable[[LogState], "_Draft | None"]


class _Appender:
    """Appends to one log. Shared by sessions and maintenance; see the note at the top."""

    def __init__(
        self, store: Store, *, check_first: bool, sources: Sources, limits: Limits
    ) -> None:
        self.log = Log(store)
        self.sources = sources
        self._limits = limits
        self._check_first = check_first
        self._pending: Record | None = None

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def pending(self) -> Record | None:
        return self._pending

    def append(self, build: Build) -> Record | None:
        """Append what `build` makes of the newest state, anew after every lost race for a slot.

        None when `build` has nothing to do. Raises what `build` raises (nothing was sent then),
        OutcomeUnknown when the record may or may not stand: it stays pending.
        """
        self.settle()
        for _ in range(self._limits.races_max):
            state = self.log.state()
            draft = build(state)
            if draft is None:
                return None
            record = self._record(draft, slot=state.slot + 1, previous=self.log.digest_of(state))
            if self._put(record, sent_before=False):
                self.log.saw(record)
                return record
        raise CheckpointError(
            f"{self.store.url}: lost {self._limits.races_max} races for a log slot in a row; "
            "another process is appending without end: stop it, then try again"
        )

    def settle(self) -> Settled | None:
        """Find out what became of a pending record, None when there is none.

        Raises OutcomeUnknown when the store still does not answer.
        """
        record = self._pending
        if record is None:
            return None
        landed = self._put(record, sent_before=True)
        if landed:
            self.log.saw(record)
        return Settled(record, landed)

    def _record(self, draft: _Draft, *, slot: int, previous: bytes | None) -> Record:
        live = draft.live
        if draft.entry is not None:
            live = (*live, replace(draft.entry, slot=slot))
        record = Record(
            kind=draft.kind,
            slot=slot,
            epoch=draft.epoch,
            write_id=self.sources.random_bytes(16),
            time_unix=float(self.sources.clock()),
            attempt=draft.attempt,
            live=live,
            previous=previous,
        )
        problem = record_problem(record, slot=slot)
        if problem is not None:
            raise CheckpointError(f"refusing to append a record that {problem}")
        # A record that cannot be read would be the end of the root: no one could append after it.
        decode_record(encode_record(record), slot=slot, where="a record that is not sent")
        return record

    def _put(self, record: Record, *, sent_before: bool) -> bool:
        """True when `record` stands in its slot, False when another one does; see note
        "pending".
        """
        data = encode_record(record)
        self._pending = record
        cause: StorageError | None = None
        maybe_sent = sent_before
        for attempt in range(self._limits.tries_max):
            if attempt:
                self.sources.pause(self._limits.first_pause_seconds * 2 ** (attempt - 1))
            try:
                self._create(record_key(record.slot), data)
            except KeyExistsError:
                return self._own(record, data)
            except OutcomeUnknownError as error:
                cause, maybe_sent = error, True
            except TransientError as error:
                cause = error
            except StorageError as error:
                # A definite refusal of this try, which says nothing about an earlier one.
                cause = error
                break
            else:
                self._pending = None
                return True
        assert cause is not None
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
            occupant = b""  # too large to be ours; the next look at the log will say so
        self._pending = None
        return occupant == data

    def _unknown(self, record: Record) -> OutcomeUnknown:
        what = record.kind if record.attempt is None else f"{record.kind} of {record.attempt}"
        return OutcomeUnknown(
            f"{self.store.url}/{record_key(record.slot)}: no answer to the {what}: it may stand "
            "now, later or never. Nothing of it was deleted; the next save settles it, or a new "
            "process's"
        )

    def _create(self, key: str, data: bytes) -> None:
        if self._check_first:
            # unsafe_single_writer: this store would overwrite; nobody else writes, says the user.
            try:
                self.store.info(key)
            except KeyNotFoundError:
                pass
            else:
                raise KeyExistsError(f"{self.store.url}/{key} exists")
        self.store.put_if_absent(key, data)


class _Writer:
    """What sessions and maintenance have in common. Every method may be called from any thread."""

    def __init__(self, appender: _Appender, *, root: str) -> None:
        self.root = root
        self._appender = appender
        self._lock = threading.RLock()
        self._retired: set[str] = set()

    @property
    def store(self) -> Store:
        return self._appender.store

    @property
    def log(self) -> Log:
        """The log of the root, to read from."""
        return self._appender.log

    @property
    def unsettled(self) -> Record | None:
        """The record whose outcome is unknown, None when everything is settled."""
        return self._appender.pending

    def settle(self) -> Settled | None:
        """Find out what became of the unsettled record. Raises OutcomeUnknown while nobody
        knows.
        """
        with self._lock:
            settled = self._appender.settle()
            if settled is not None and settled.landed:
                self._remember(settled.record)
            return settled

    def state(self) -> LogState:
        """What exists now."""
        with self._lock:
            state = self._appender.log.state()
            self._epoch_for(state)
            return state

    def retire(self, attempt: str, *, delete: bool = True) -> Record | None:
        """Take a checkpoint out of the live set, then delete its files, MANIFEST first.

        None when it was not live (any more); nothing is deleted then. Raises NotRetired when it is
        pinned, needed by another live checkpoint, or the last one. With `delete=False` the files
        stay until `delete_retired`.
        """
        with self._lock:
            victim = self._appender.log.state().find(attempt)
            record = self._append(lambda state: self._draft_retire(state, attempt))
        if record is not None and victim is not None and delete:
            self.delete_retired(attempt, step=victim.step)
        return record

    def pin(self, attempt: str) -> Record | None:
        """Protect a checkpoint from retirement. None when it is pinned already."""
        return self._mark("PIN", attempt, lambda entry: replace(entry, pinned=True))

    def unpin(self, attempt: str) -> Record | None:
        """Lift the protection. None when it is not pinned."""
        return self._mark("UNPIN", attempt, lambda entry: replace(entry, pinned=False))

    def verified(self, attempt: str) -> Record | None:
        """Note that all bytes of a checkpoint were read and found right. None when noted
        already.
        """
        return self._mark("VERIFIED", attempt, lambda entry: replace(entry, verified=True))

    def delete_retired(self, attempt: str, *, step: int) -> int:
        """Delete the files of an attempt that this writer knows to be retired; returns how many.

        May be repeated after a failure. Raises NotRetired when the attempt is live, needed, or may
        be a save under way: not live, of the current epoch, and not retired by this writer.
        """
        with self._lock:
            self.settle()
            state = self.state()
            _refuse_needed(state, attempt)
            if attempt not in self._retired and attempt_epoch(attempt) >= state.epoch:
                raise NotRetired(f"{attempt} may be a save under way; nothing was deleted")
        # Not under the lock, where a commit would wait for it: what was retired never comes back.
        return _delete_attempt(self.store, step=step, attempt=attempt)

    def _mark(
        self, kind: Kind, attempt: str, change: Callable[[LiveEntry], LiveEntry]
    ) -> Record | None:
        def build(state: LogState) -> _Draft | None:
            entry = state.find(attempt)
            if entry is None:
                raise NoCheckpoint(
                    f"{self.store.url} has no live checkpoint {attempt}; it has "
                    f"{', '.join(e.attempt for e in state.live[-5:]) or 'none'}"
                )
            changed = change(entry)
            if changed == entry:
                return None
            live = tuple(changed if e is entry else e for e in state.live)
            return _Draft(kind, self._epoch_for(state), attempt, live)

        with self._lock:
            return self._append(build)

    def _draft_retire(self, state: LogState, attempt: str) -> _Draft | None:
        entry = state.find(attempt)
        if entry is None:
            return None
        users = [e.attempt for e in state.live if attempt in e.references]
        if entry.pinned:
            raise NotRetired(f"{attempt} (step {entry.step}) is pinned; unpin it first")
        if users:
            raise NotRetired(
                f"{attempt} (step {entry.step}) is needed by {users[0]}; retire that first"
            )
        if len(state.live) == 1:
            raise NotRetired(
                f"{attempt} (step {entry.step}) is the only checkpoint; save another first"
            )
        live = tuple(e for e in state.live if e is not entry)
        return _Draft("RETIRE", self._epoch_for(state), attempt, live)

    def _append(self, build: Build) -> Record | None:
        self.settle()
        record = self._appender.append(build)
        if record is not None:
            self._remember(record)
        return record

    def _remember(self, record: Record) -> None:
        if record.kind == "RETIRE" and record.attempt is not None:
            self._retired.add(record.attempt)

    def _epoch_for(self, state: LogState) -> int:
        """The epoch to write under after `state`. Raises when this writer may not write any
        more.
        """
        raise NotImplementedError


class Maintenance(_Writer):
    """Retires, pins and marks checkpoints from any process, without disturbing a running
    training.
    """

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources | None = None,
        limits: Limits | None = None,
    ) -> Maintenance:
        """Raises NoCheckpoint when there is no root or nothing ever claimed it, StoreRefused like
        `Session.claim`."""
        found = read_format(store)
        check_first = _probe(store, found.root, unsafe_single_writer, limits or Limits())
        appender = _Appender(
            store,
            check_first=check_first,
            sources=sources or Sources(),
            limits=limits or Limits(),
        )
        if appender.log.state().epoch == 0:
            raise NoCheckpoint(f"{store.url} has no checkpoint yet: its log is empty")
        return cls(appender, root=found.root)

    def commit_copy(self, commit: Commit, *, of: str) -> LiveEntry:
        """Bring a copy of a live checkpoint to life, laid out otherwise.

        It is of no line, so no training resumes from it unless it asks for this attempt. `of` is
        the attempt that was copied; the copy's own attempt is of the root's present epoch. Raises
        CheckpointError when `of` was retired or a session has claimed the root since the copy was
        named: that session's sweep may have deleted the copy's files.
        """

        def build(state: LogState) -> _Draft | None:
            if state.find(commit.attempt) is not None:
                return None
            original = state.find(of)
            if original is None:
                raise CheckpointError(
                    f"{self.store.url}: {of} was retired while it was copied, so its copy was not "
                    "committed; begin again with another one, or copy to another place"
                )
            if attempt_epoch(commit.attempt) != state.epoch:
                raise CheckpointError(
                    f"{self.store.url} was claimed by a new session while {of} was copied; begin "
                    "again"
                )
            copied = commit._replace(metric=original.metric, references=())
            entry = copied.entry(line=None)
            return _Draft("COMMIT", state.epoch, commit.attempt, state.live, entry)

        with self._lock:
            record = self._append(build)
            found = (
                self._appender.log.state().find(commit.attempt)
                if record is None
                else record.live[-1]
            )
            assert found is not None, "it is live, or has just come to life"
            return found

    def _epoch_for(self, state: LogState) -> int:
        return state.epoch


class Session(_Writer):
    """The right to save to one root, held by one process for its life. Made by `claim`."""

    def __init__(self, appender: _Appender, *, root: str, epoch: int) -> None:
        super().__init__(appender, root=root)
        self.epoch = epoch
        self._fenced_by: int | None = None
        self._given_up: set[str] = set()
        self._leftovers: dict[str, int] = {}
        self._line = OwnLine()

    @classmethod
    def claim(
        cls,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources | None = None,
        limits: Limits | None = None,
    ) -> Session:
        """Claim a root for this process: older sessions are fenced from here on.

        Creates FORMAT when the root is new. Raises StoreRefused, before anything is appended, when
        the store cannot refuse a second writer (unless `unsafe_single_writer`).
        """
        sources, limits = sources or Sources(), limits or Limits()
        if store.exclusive_create is ExclusiveCreate.NONE and not unsafe_single_writer:
            raise _refused(store, "it can only check and then write, so two writers could both win")
        root = _format_of(store, sources=sources, limits=limits)
        check_first = _probe(store, root, unsafe_single_writer, limits)
        appender = _Appender(store, check_first=check_first, sources=sources, limits=limits)
        record = appender.append(lambda state: _Draft("CLAIM", state.epoch + 1, None, state.live))
        assert record is not None
        return cls(appender, root=root, epoch=record.epoch)

    @property
    def fenced(self) -> bool:
        """Whether a newer session was seen. Never becomes False again."""
        return self._fenced_by is not None

    def use_store(self, store: Store) -> None:
        """Go on through another connection to the same root (the caller has compared root ids)."""
        with self._lock:
            self._appender.log.store = store

    def check_root(self) -> None:
        """Raise StoreRefused when the root was removed, or removed and made anew.

        Our log would go on in a place where nobody finds it, or in the middle of another one.
        """
        try:
            seen = read_format(self.store).root
        except NoCheckpoint:
            seen = "no root"
        if seen != self.root:
            raise StoreRefused(
                f"{self.store.url} shows {seen} where this process began to save to root "
                f"{self.root}: it was removed meanwhile; save to another url, or start this job "
                "anew"
            )

    def restored(self, restored: Restored) -> None:
        """Go on with the line of what was restored; see `ckpt.lines`."""
        with self._lock:
            self._line = OwnLine(restored)

    def new_attempt(self) -> str:
        """A name for one try to save one step, never given before."""
        return attempt_name(self.epoch, self._appender.sources.random_bytes(8))

    def commit(self, commit: Commit) -> LiveEntry:
        """Bring a checkpoint to life: the one write that makes it exist.

        Raises Fenced, ReferenceRetired and storage errors when it certainly was not committed, and
        OutcomeUnknown when nobody knows: see `settle`.
        """

        def build(state: LogState) -> _Draft:
            epoch = self._epoch_for(state)
            gone = [name for name in commit.references if state.find(name) is None]
            if gone:
                raise ReferenceRetired(
                    f"{commit.attempt} needs files of {gone[0]}, which was retired meanwhile; it "
                    "was not committed: save again, writing everything"
                )
            line = self._line.of_next(state) if commit.in_line else None
            return _Draft("COMMIT", epoch, commit.attempt, state.live, commit.entry(line=line))

        with self._lock:
            if commit.attempt in self._given_up or attempt_epoch(commit.attempt) != self.epoch:
                raise CheckpointError(f"{commit.attempt} is not an open attempt of this session")
            record = self._append(build)
            assert record is not None
            return record.live[-1]

    def discard(self, attempt: str, *, step: int) -> int:
        """Delete the files of a failed attempt of this session; it can never be committed
        afterwards.

        Raises OutcomeUnknown while its commit is unsettled, NotRetired when it turns out to be
        live. What could not be deleted is left for the next `sweep`.
        """
        with self._lock:
            if attempt_epoch(attempt) != self.epoch:
                raise CheckpointError(f"{attempt} is not an attempt of this session")
            self._give_up(attempt, step)
            self.settle()
            _refuse_needed(self.state(), attempt)
        return self._delete_leftovers(attempt, step)

    def settle(self) -> Settled | None:
        settled = super().settle()
        if settled is not None and settled.record.kind == "COMMIT" and not settled.landed:
            entry = settled.record.live[-1]
            self._give_up(entry.attempt, entry.step)
        return settled

    def sweep_failed(self) -> list[str]:
        """Delete what failed attempts of this session left behind because the store failed too, or
        because their outcome was unknown. Returns their names.

        Raises OutcomeUnknown while a commit is unsettled, and the store's errors; then the rest is
        left for the next call.
        """
        with self._lock:
            if not self._leftovers:
                return []
            self.settle()
            state = self.state()
            for attempt in [name for name in self._leftovers if state.find(name) is not None]:
                del self._leftovers[attempt]  # its commit was unknown, and landed
            leftovers = dict(self._leftovers)
        for attempt, step in leftovers.items():
            self._delete_leftovers(attempt, step)
        return list(leftovers)

    def _give_up(self, attempt: str, step: int) -> None:
        """From now on this attempt cannot be committed, and its files may go."""
        with self._lock:
            self._given_up.add(attempt)
            self._leftovers[attempt] = step

    def _delete_leftovers(self, attempt: str, step: int) -> int:
        deleted = _delete_attempt(self.store, step=step, attempt=attempt)
        with self._lock:
            self._leftovers.pop(attempt, None)
        return deleted

    def sweep(self) -> list[str]:
        """Delete what attempts of older epochs left behind and no live checkpoint needs.

        They can never become live: any commit of theirs would have to come before our claim.
        Returns their names. Raises Fenced, deleting nothing, when this session was superseded.
        """
        with self._lock:
            self.settle()
            state = self.state()
            needed = {e.attempt for e in state.live}
            needed |= {name for e in state.live for name in e.references}
            orphans = [
                (step, attempt)
                for step, attempt in _attempts_on(self.store)
                if attempt_epoch(attempt) < self.epoch and attempt not in needed
            ]
        for step, attempt in orphans:
            _delete_attempt(self.store, step=step, attempt=attempt)
        return [attempt for _, attempt in orphans]

    def sweep_unfinished(self) -> int:
        """Remove objects that dead writers left half written; returns how many.

        Call it right after `claim`, before the first attempt: it cannot tell whose they are.
        """
        with self._lock:
            self.state()
            return self.store.abort_unfinished(STEPS_PREFIX)

    def _append(self, build: Build) -> Record | None:
        if self._fenced_by is not None:
            raise self._fenced_error(self._fenced_by)
        return super()._append(build)

    def _remember(self, record: Record) -> None:
        super()._remember(record)
        if record.kind == "COMMIT" and (line := record.live[-1].line) is not None:
            self._line = OwnLine(line=line)

    def _epoch_for(self, state: LogState) -> int:
        if self._fenced_by is None and state.epoch > self.epoch:
            self._fenced_by = state.epoch
        if self._fenced_by is not None:
            raise self._fenced_error(self._fenced_by)
        if state.epoch < self.epoch:
            raise Corrupt(
                f"the log of {self.store.url} went back from epoch {self.epoch} to {state.epoch}: "
                "entries were removed; save to a new url, load steps by their own paths"
            )
        return self.epoch

    def _fenced_error(self, by: int) -> Fenced:
        return Fenced(
            f"{self.store.url} was claimed by a newer session (epoch {by}, this process has epoch "
            f"{self.epoch}). This process must not write there again; if it should be the one that "
            "trains, stop the other job and start this one anew"
        )


class SessionRegistry:
    """The sessions of one process: a root is claimed at the first save and never again.

    Whoever holds the registry decides how long "process" is; tests make one for each simulated
    process.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._restored: dict[str, Restored] = {}
        self._lock = threading.Lock()

    def restored(self, url: str, restored: Restored) -> None:
        """This process has loaded from the root at `url` (as its store spells it)."""
        with self._lock:
            self._restored[url] = restored
            for session in self._sessions.values():
                if session.store.url == url:
                    session.restored(restored)

    def session(
        self,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources | None = None,
        limits: Limits | None = None,
    ) -> Session:
        """The session of this root, claimed now if this process has none. Fenced ones stay
        fenced.
        """
        with self._lock:
            try:
                known = self._sessions.get(read_format(store).root)
            except NoCheckpoint:
                known = None
            if known is not None:
                known.use_store(store)
                return known
            session = Session.claim(
                store,
                unsafe_single_writer=unsafe_single_writer,
                sources=sources,
                limits=limits,
            )
            self._sessions[session.root] = session
            if (restored := self._restored.get(store.url)) is not None:
                session.restored(restored)
            _clean_up(session)
            return session


def _clean_up(session: Session) -> None:
    """Remove what dead jobs left, so that their disk space is there for the first save."""
    try:
        session.sweep_unfinished()
        session.sweep()
    except StorageError as error:
        # Only space is at stake; a save that needs it will say so.
        logger.warning("%s: leftovers of dead jobs stay for now: %s", session.store.url, error)


@dataclass(frozen=True)
class RankedSession:
    """One session as all ranks of a world see it. Only the lead (rank 0) has `session` and
    writes.
    """

    world: World
    root: str
    epoch: int
    session: Session | None

    def new_attempt(self) -> str:
        """Collective: a name for the next attempt, the same on every rank."""
        mine = None if self.session is None else self.session.new_attempt().encode()
        return self.world.share("attempt", mine).decode()

    def settle(self) -> None:
        """Collective, at the start of a save: settle an unknown outcome of before.

        Raises OutcomeUnknown on all ranks, and StoreRefused when the root is no longer there.
        """
        error: BaseException | None = None
        try:
            if self.session is not None:
                self.session.settle()
                self.session.check_root()
        except Exception as caught:
            error = caught
        self.world.agree("settle", error)


def open_session(
    world: World,
    store: Store,
    registry: SessionRegistry,
    *,
    unsafe_single_writer: bool = False,
    sources: Sources | None = None,
) -> RankedSession:
    """Collective: the lead claims (or finds) the session, the others compare the root they see.

    Raises the same error on all ranks; StoreRefused names the ranks that see another root or none.
    """
    session: Session | None = None
    error: BaseException | None = None
    payload: bytes | None = None
    if world.rank == 0:
        try:
            session = registry.session(
                store, unsafe_single_writer=unsafe_single_writer, sources=sources
            )
            payload = json.dumps({"root": session.root, "epoch": session.epoch}).encode()
        except Exception as caught:
            error, payload = caught, b"{}"
    shared = json.loads(world.share("session", payload))
    if world.rank != 0 and shared:
        try:
            _compare_root(store, shared["root"])
        except Exception as caught:
            error = caught
    world.agree("claim", error)
    return RankedSession(world, shared["root"], shared["epoch"], session)


def _compare_root(store: Store, expected: str) -> None:
    try:
        seen = read_format(store).root
    except NoCheckpoint:
        seen = "no root"
    if seen != expected:
        raise StoreRefused(
            f"{store.url} shows {seen} where rank 0 sees root {expected}: ranks look at different "
            "storage (a local path on several machines?); use a url that all ranks share"
        )


def _format_of(store: Store, *, sources: Sources, limits: Limits) -> str:
    """The root id, after creating FORMAT if this is the first session of the root."""
    try:
        return read_format(store).root
    except NoCheckpoint:
        if next(iter(store.list(LOG_PREFIX)), None) is not None:
            raise Corrupt(
                f"{store.url} has a log but no {FORMAT_KEY} object: it was removed or the copy is "
                "incomplete; save to a new url, load steps by their own paths"
            ) from None
    _create_format(store, encode_format(sources.random_bytes(16).hex()), sources, limits)
    return read_format(store).root


def _create_format(store: Store, data: bytes, sources: Sources, limits: Limits) -> None:
    """FORMAT exists on return, ours or another writer's."""
    for attempt in range(limits.tries_max):
        try:
            store.put_if_absent(FORMAT_KEY, data)
            return
        except KeyExistsError:
            return
        except (OutcomeUnknownError, TransientError):
            if attempt + 1 == limits.tries_max:
                raise
            sources.pause(limits.first_pause_seconds * 2**attempt)


def _probe(store: Store, root: str, unsafe_single_writer: bool, limits: Limits) -> bool:
    """Whether appends must look before they write; raises StoreRefused when that is not allowed.

    A server may accept the conditional header and overwrite all the same (rclone does). Creating
    FORMAT again must be refused; if it is not, it was overwritten with the same bytes: no harm.
    """
    if store.exclusive_create is ExclusiveCreate.ATOMIC:
        return False
    problem = "it can only check and then write, so two writers could both win"
    if store.exclusive_create is ExclusiveCreate.CONDITIONAL:
        if _refuses_existing(store, encode_format(root), limits):
            return False
        problem = "it overwrote an object that it was asked to create only if absent"
    if not unsafe_single_writer:
        raise _refused(store, problem)
    return True


def _refuses_existing(store: Store, data: bytes, limits: Limits) -> bool:
    for attempt in range(limits.tries_max):
        try:
            store.put_if_absent(FORMAT_KEY, data)
            return False
        except KeyExistsError:
            return True
        except (OutcomeUnknownError, TransientError):
            if attempt + 1 == limits.tries_max:
                raise
    raise AssertionError("tries_max is at least 1")


def _refused(store: Store, problem: str) -> StoreRefused:
    return StoreRefused(
        f"{store.url} cannot commit safely: {problem}. Use a store with conditional writes, or "
        "pass unsafe_single_writer=True when you make sure that only one job ever writes there"
    )


# --- deletion -------------------------------------------------------------------------------------


def _refuse_needed(state: LogState, attempt: str) -> None:
    if state.find(attempt) is not None or any(attempt in e.references for e in state.live):
        raise NotRetired(f"{attempt} is live or needed by a live checkpoint; nothing was deleted")


def _delete_attempt(store: Store, *, step: int, attempt: str, parallel_max: int = 8) -> int:
    """Delete what we wrote below a step directory and nothing else; returns how many objects.

    MANIFEST goes first: a crash in between leaves unreferenced files, never a torn checkpoint.
    """
    prefix = step_prefix(step, attempt)
    keys = [info.key for info in store.list(prefix)]
    keys = [key for key in keys if parse_step_key(key) is not None]
    manifest = prefix + MANIFEST_NAME
    if manifest in keys:
        store.delete(manifest)
    rest = [key for key in keys if key != manifest]
    if len(rest) < 4:
        for key in rest:
            store.delete(key)
    else:
        with ThreadPoolExecutor(parallel_max, thread_name_prefix="ckpt-delete") as pool:
            _all_results(pool.submit(store.delete, key).result for key in rest)
    store.abort_unfinished(prefix)
    return len(keys)


def _all_results(results: Iterable[Callable[[], None]]) -> None:
    """Wait for every one, then raise the first failure."""
    errors: list[Exception] = []
    for result in list(results):
        try:
            result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _attempts_on(store: Store) -> Iterator[tuple[int, str]]:
    """Every (step, attempt) that has an object of ours, at one listing request for each
    directory.
    """
    cursor = ""
    while True:
        found = next(iter(store.list(STEPS_PREFIX, after=cursor)), None)
        if found is None:
            return
        parsed = parse_step_key(found.key)
        directory = re.match(r"steps/[^/]+/", found.key)
        if parsed is None or directory is None:
            cursor = found.key
            continue
        step, attempt, _ = parsed
        yield step, attempt
        # "0" is the character after "/": this key is greater than all keys in the directory.
        cursor = step_prefix(step, attempt)[:-1] + "0"
