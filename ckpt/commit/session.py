"""A session: a process that claimed a root, and commits under its epoch until a later claim
fences it.

What a session shares with maintenance is in `ckpt.commit.writer`, how one record is appended in
`ckpt.commit.appender`. All ranks of a world see one session, and a process may have several.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

from ckpt.commit.appender import REAL, Appender, Build, RecordDraft, Settled, Sources, diverged
from ckpt.commit.locate import Beginning, OwnLine, ResumePoint, check_beginning
from ckpt.commit.log import LogState, read_format
from ckpt.commit.names import LINES_PREFIX, MANIFEST_NAME, STEPS_PREFIX, attempt_epoch, attempt_name
from ckpt.commit.records import LiveEntry, Record
from ckpt.commit.writer import (
    Commit,
    LogWriter,
    delete_attempt,
    delete_orphans,
    keep_reserve,
    must_look_first,
    refuse_needed,
    root_id,
    unsafe_store,
)
from ckpt.errors import (
    CheckpointError,
    Fenced,
    LogDiverged,
    NoCheckpoint,
    OutcomeUnknown,
    StoreRefused,
)
from ckpt.world.base import World, collectively, from_coordinator
from storage.errors import StorageError
from storage.store import ExclusiveCreate, Store

logger = logging.getLogger(__name__)


class ReferenceRetired(CheckpointError):
    """The new checkpoint needs files of an attempt that was retired meanwhile; it was not
    committed.

    Write those chunks anew, under a new attempt.
    """


class Session(LogWriter):
    """The right to save to one root, held by one process for its life. Created by `claim`."""

    def __init__(self, appender: Appender, *, root: str, epoch: int) -> None:
        super().__init__(appender, root=root)
        self.epoch = epoch
        # Once fenced, always: a log that is rolled back must not make this writer valid again.
        self._fenced_by: int | None = None
        # Attempts that can never be committed, and of those with files left their steps.
        self._given_up: set[str] = set()
        self._leftovers: dict[str, int] = {}
        self._line = OwnLine()
        self._newest_own = ""
        self._has_noticed = False

    @classmethod
    def claim(
        cls,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources = REAL,
        beginning: Beginning = "quiet",
    ) -> Session:
        """Claim a root for this process: older sessions are fenced from here on.

        Creates FORMAT when the root is new. Raises StoreRefused, before anything is appended, when
        the store cannot refuse a second writer (unless `unsafe_single_writer`), and where
        `beginning` says so of a root of another training.
        """

        def build(state: LogState) -> RecordDraft:
            # Before the claim, which would fence the training that saves there.
            check_beginning(store, state, beginning)
            return RecordDraft("CLAIM", state.epoch + 1)

        appender, root = _opened(store, unsafe_single_writer, sources, beginning)
        record = appender.append(build)
        assert record is not None
        return cls(appender, root=root, epoch=record.epoch)

    @classmethod
    def beside(
        cls, store: Store, *, unsafe_single_writer: bool = False, sources: Sources = REAL
    ) -> Session:
        """Write under the epoch of the session that holds the root, which is not fenced and may
        continue to save.

        For what is no part of a training. It is fenced when a new job claims the root. A root
        without checkpoints is claimed. Raises like `claim`.
        """
        appender, root = _opened(store, unsafe_single_writer, sources)
        state = appender.log.state()
        # Without a checkpoint there is no training to fence, and a claim lets what a killed import
        # left be swept.
        if len(state.entries):
            return cls(appender, root=root, epoch=state.epoch)
        return cls.claim(store, unsafe_single_writer=unsafe_single_writer, sources=sources)

    def use_store(self, store: Store) -> None:
        """Continue through another connection to the same root (the caller compared root ids)."""
        with self._lock:
            self._appender.log.store = store

    def check_root(self) -> None:
        """Raise LogDiverged when the root was removed, made anew, rolled back or exchanged.

        Records would be appended where no reader finds them, or in the middle of another log.
        """
        if (seen := _root_in(self.store)) != self.root:
            raise LogDiverged(
                f"{self.store.url} shows {seen} where this process began to save to root "
                f"{self.root}: it was removed meanwhile. To start again there, call "
                f"ckpt.forget({self.store.url!r}) on all ranks and save again; or save to another "
                "url"
            )
        with self._lock:
            self._appender.prove()

    def check_room(self) -> None:
        """Raise CheckpointError when the log may not take the next commit. Asks nobody."""
        with self._lock:
            self._appender.check_room()

    def restored(self, restored: ResumePoint) -> None:
        """Continue the line of what was restored; see `ckpt.commit.locate`."""
        with self._lock:
            self._line = OwnLine(restored)

    @property
    def resume_point(self) -> ResumePoint | None:
        """What the training continues: the checkpoint that was restored since its last commit, else
        that commit. None before the first of either. Asks nobody.
        """
        with self._lock:
            if self._line.restored is not None or not self._newest_own:
                return self._line.restored
            return ResumePoint(self._newest_own, on_purpose=False)

    def line(self, state: LogState) -> int | None:
        """The line that the training is in: that of its resume point; None before there is one."""
        resumed = self.resume_point
        entry = None if resumed is None else state.find(resumed.attempt)
        return None if entry is None else entry.line

    def new_attempt(self) -> str:
        """A name for one try to save one step, never given before."""
        return attempt_name(self.epoch, self._appender.sources.random_bytes(8))

    def commit(self, commit: Commit) -> LiveEntry:
        """Commit a checkpoint: the one write that makes it exist.

        Raises Fenced, ReferenceRetired and storage errors when it certainly was not committed, and
        OutcomeUnknown when the outcome is unknown: see `settle`.
        """

        def build(state: LogState) -> RecordDraft:
            epoch = self._epoch_for(state)
            # Checked on the state that this record will follow: a RETIRE may land after any earlier
            # look.
            for name in commit.references:
                if state.find(name) is None:
                    raise ReferenceRetired(
                        f"{commit.attempt} needs files of {name}, which was retired meanwhile; it "
                        "was not committed: save again, writing everything"
                    )
            line = self._line.of_next(state) if commit.in_line else None
            self._notice_start_over(state, commit.step, line)
            return RecordDraft("COMMIT", epoch, commit.entry(line=line))

        with self._lock:
            # The files of an attempt that was given up may be deleted at any moment.
            if commit.attempt in self._given_up or attempt_epoch(commit.attempt) != self.epoch:
                raise CheckpointError(f"{commit.attempt} is not an open attempt of this session")
            record = self._append(build)
            # `build` always gives a draft.
            assert record is not None
            return record.live[-1]

    def _notice_start_over(self, state: LogState, step: int, line: int | None) -> None:
        """Warn once of a step below the newest of its own line."""
        # Of what the record itself lists: segments are worth no request here.
        newest = next((e.step for e in reversed(state.entries.listed) if e.line == line), -1)
        if line is None or step >= newest or self._has_noticed:
            return
        self._has_noticed = True
        logger.warning(
            "%s: step %d is saved after step %d of the same training, and restore() takes it from "
            "now on: did the training start over? Begin at restore().step + 1; to go back on "
            "purpose, restore(step=...)",
            self.store.url,
            step,
            newest,
        )

    def discard(self, attempt: str, *, step: int) -> int:
        """Delete the files of a failed attempt of this session; it can never be committed
        afterwards.

        Raises OutcomeUnknown while its commit is unsettled, NotRetired when it turns out to be
        live. What could not be deleted is left for the next `sweep`.
        """
        with self._lock:
            if attempt_epoch(attempt) != self.epoch:
                raise CheckpointError(f"{attempt} is not an attempt of this session")
            # First of all: from here on no other thread can commit what is about to be deleted.
            self.give_up(attempt, step=step)
            self.settle()
            refuse_needed(self.state(), attempt)
        return self._delete_leftovers(attempt, step)

    def settle(self) -> Settled | None:
        settled = super().settle()
        if settled is not None and settled.record.kind == "COMMIT" and not settled.landed:
            entry = settled.record.live[-1]
            self.give_up(entry.attempt, step=entry.step)
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
        # Not under the lock: a commit would wait for thousands of deletions.
        for attempt, step in leftovers.items():
            self._delete_leftovers(attempt, step)
        return list(leftovers)

    def give_up(self, attempt: str, *, step: int) -> None:
        """From now on this attempt cannot be committed, and `sweep_failed` may delete its files."""
        with self._lock:
            self._given_up.add(attempt)
            self._leftovers[attempt] = step

    def _delete_leftovers(self, attempt: str, step: int) -> int:
        deleted = delete_attempt(self.store, step=step, attempt=attempt)
        with self._lock:
            self._leftovers.pop(attempt, None)
        return deleted

    def take_back_lost(self) -> LiveEntry | None:
        """Retire the newest commit where nothing at all is left of it; returns it.

        A backup that is restored right before a COMMIT leaves such a record, and its writer was
        killed before it could take it back. Nobody has acknowledged it.
        """
        with self._lock:
            self.settle()
            newest = next(self.state().newest_first(), None)
            if newest is None or self.store.exists(newest.prefix + MANIFEST_NAME):
                return None
            # Data files without a MANIFEST are damage, which `ckpt salvage` repairs.
            if next(iter(self.store.list(newest.prefix)), None) is not None:
                return None
            record = self._appender.take_back(newest.attempt)
        if record is None:
            return None
        text = "%s: nothing is left of step %d (%s), the newest commit: a backup was restored "
        text += "right before it, or its directory was removed. It is retired now"
        logger.warning(text, self.store.url, newest.step, newest.attempt)
        return newest

    def sweep_dead_jobs(self) -> None:
        """Remove what dead jobs left, so that its disk space is there for the first save. What a
        store does not do is logged, and stays.
        """
        try:
            self.take_back_lost()
            self.sweep_unfinished()
            self.sweep()
        except (StorageError, OutcomeUnknown) as error:
            # Only space is at stake; a save that needs it fails with an error of its own.
            logger.warning("%s: leftovers of dead jobs stay for now: %s", self.store.url, error)

    def sweep(self) -> list[str]:
        """Delete what attempts of older epochs left behind and no live checkpoint needs.

        They can never become live: any commit of theirs would have to come before our claim.
        Returns their names. Raises Fenced, deleting nothing, when this session was superseded.
        """
        with self._lock:
            self.settle()
            state = self._checked_state()
        return delete_orphans(self.log, state, before_epoch=self.epoch)

    def sweep_unfinished(self) -> int:
        """Remove objects that dead writers left half written; returns how many.

        Call it right after `claim`, before the first attempt: nothing says whose they are.
        """
        with self._lock:
            # Raises Fenced: half-written objects may be those of the session that superseded this
            # one.
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
            self._newest_own = record.live[-1].attempt

    def _epoch_for(self, state: LogState) -> int:
        if self._fenced_by is None and state.epoch > self.epoch:
            self._fenced_by = state.epoch
        if self._fenced_by is not None:
            raise self._fenced_error(self._fenced_by)
        # Epochs only grow, so our own CLAIM is gone from this log.
        if state.epoch < self.epoch:
            raise diverged(self.store.url, state.slot)
        return self.epoch

    def _fenced_error(self, by: int) -> Fenced:
        return Fenced(
            f"{self.store.url} was claimed by a newer session (epoch {by}, this process has epoch "
            f"{self.epoch}). This process must not write there again; if it should be the one that "
            "trains, stop the other job and restart this one"
        )


def _opened(
    store: Store, unsafe_single_writer: bool, sources: Sources, beginning: Beginning = "quiet"
) -> tuple[Appender, str]:
    """What appends to the log of a root, and the root's identity; FORMAT is there on return."""
    if store.exclusive_create is ExclusiveCreate.NONE and not unsafe_single_writer:
        raise unsafe_store(store, "it can only check and then write, so two writers could both win")
    root = root_id(store, sources=sources, beginning=beginning)
    check_first = must_look_first(store, root, unsafe_single_writer, sources)
    appender = Appender(store, check_first=check_first, sources=sources)
    appender.log.check_end()
    return appender, root


def _root_in(store: Store) -> str:
    with suppress(NoCheckpoint):
        return read_format(store)
    return "no root"


@dataclass(eq=False)
class RootHold:
    """A root that one training of this process has to itself."""

    begin_anew: bool
    is_held: bool = True

    def end(self) -> None:
        """Others may have it. May be repeated."""
        self.is_held = False


class SessionRegistry:
    """The sessions of one process: a root is claimed at the first save and never again.

    A session belongs to a place: a copy of its root elsewhere has a session of its own. Tests
    create a registry for each process that they simulate.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._restored: dict[str, ResumePoint] = {}
        self._holds: dict[str, weakref.ref[RootHold]] = {}
        self._lock = threading.Lock()

    def hold(self, store: Store, *, begin_anew: bool) -> RootHold:
        """Keep a root for one training of this process, until `RootHold.end`. Raises StoreRefused
        where another one has it, or has a named line of it, or the root above.
        """
        with self._lock:
            held = [place for place, ref in self._holds.items() if (one := ref()) and one.is_held]
            for place in held:
                if store.place in (place, _above(place)) or place == _above(store.place):
                    raise StoreRefused(
                        f"{store.url}: a Checkpointer of this process saves to {place} already. "
                        "Close that one first, or give each a name: Checkpointer(line='generator') "
                        "and Checkpointer(line='critic')"
                    )
            hold = RootHold(begin_anew)
            # Weak: a Checkpointer that was dropped without `close` must not hold the root for ever.
            self._holds[store.place] = weakref.ref(hold)
            return hold

    def _beginning(self, place: str) -> Beginning:
        """What a save may do that has restored nothing; bare saves are only warned of."""
        ref = self._holds.get(place)
        hold = None if ref is None else ref()
        if hold is None or not hold.is_held:
            return "warn"
        return "anew" if hold.begin_anew else "refuse"

    def restored(self, store: Store, restored: ResumePoint) -> None:
        """This process has loaded from the root that `store` holds."""
        with self._lock:
            self._restored[store.place] = restored
            if (session := self._sessions.get(store.place)) is not None:
                session.restored(restored)

    def session(
        self, store: Store, *, unsafe_single_writer: bool = False, sources: Sources = REAL
    ) -> Session:
        """The session of this place, claimed now if this process has none. A fenced one
        stays fenced. Raises LogDiverged when this process built on another log than is there.
        """
        with self._lock:
            if (known := self._sessions.get(store.place)) is not None:
                # The caller may have closed the store through which it was claimed.
                known.use_store(store)
                known.check_root()
                return known
            restored = self._restored.get(store.place)
            session = Session.claim(
                store,
                unsafe_single_writer=unsafe_single_writer,
                sources=sources,
                beginning="quiet" if restored is not None else self._beginning(store.place),
            )
            # Kept before anything else can fail: the CLAIM stands, and a second one would fence
            # ourselves.
            self._sessions[store.place] = session
            if restored is not None:
                session.restored(restored)
            # Before the first claim of a root nobody wrote there.
            if session.epoch > 1:
                session.sweep_dead_jobs()
            keep_reserve(session.store)
            return session

    def forget(self, store: Store) -> None:
        """Forget the session of this place: the next one is claimed as by a new job."""
        with self._lock:
            self._sessions.pop(store.place, None)
            self._restored.pop(store.place, None)
            ref = self._holds.get(store.place)
            if ref is not None and (hold := ref()) is not None:
                hold.begin_anew = True  # it continues with the state that it has


class Beside(SessionRegistry):
    """Sessions besides the one that holds a root, for what is no part of a training: nobody is
    fenced, and a later save of this process claims the root all the same.
    """

    def session(
        self, store: Store, *, unsafe_single_writer: bool = False, sources: Sources = REAL
    ) -> Session:
        """A new one. Raises like `Session.beside`."""
        return Session.beside(store, unsafe_single_writer=unsafe_single_writer, sources=sources)


def _above(place: str) -> str:
    """The place of the root that a named line is below; "" for any other."""
    root, _, name = place.rpartition(f"/{LINES_PREFIX}")
    return "" if "/" in name else root


@dataclass(frozen=True)
class RankedSession:
    """One session as all ranks of a world see it. Only the coordinator has `session` and writes."""

    world: World
    root: str
    epoch: int
    session: Session | None

    def settle(self) -> None:
        """Settle an unknown outcome, at the start of a save. Collective.

        Raises OutcomeUnknown on all ranks, and StoreRefused when the root is no longer there.
        """
        failure: BaseException | None = None
        try:
            if self.session is not None:
                # Caught and not raised: the other ranks wait for this one in `agree`.
                self.session.settle()
                self.session.check_root()
                self.session.check_room()
                try:
                    # What saves of this process left that were interrupted, or could not clean up.
                    self.session.sweep_failed()
                except StorageError as error:
                    # Only space is at stake; a save that needs it fails with an error of its own.
                    url = self.session.store.url
                    logger.warning("%s: files of failed saves stay for now: %s", url, error)
        except Exception as caught:
            failure = caught
        self.world.agree("settle", failure)


def open_session(
    world: World,
    store: Store,
    registry: SessionRegistry,
    *,
    unsafe_single_writer: bool = False,
    sources: Sources = REAL,
) -> RankedSession:
    """The coordinator claims (or finds) the session, the others compare the root they see.
    Collective.

    Raises the same error on all ranks; StoreRefused names the ranks that see another root or none.
    """
    # The session stays here; the other ranks get what identifies it.
    opened: list[Session] = []

    def claimed() -> bytes:
        opened.append(
            registry.session(store, unsafe_single_writer=unsafe_single_writer, sources=sources)
        )
        return json.dumps([opened[0].root, opened[0].epoch]).encode()

    root, epoch = json.loads(from_coordinator(world, "claim", claimed))

    def compare() -> None:
        seen = root if world.rank == 0 else _root_in(store)
        if seen != root:
            raise StoreRefused(
                f"{store.url} shows {seen} where rank 0 sees root {root}: ranks look at different "
                "storage (a local path on several machines?); use a url that all ranks share"
            )

    collectively(world, "claim", compare)
    return RankedSession(world, root, epoch, opened[0] if opened else None)
