"""One session as all ranks of a world see it, and the sessions of one process."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from dataclasses import dataclass

from ckpt.commit.appender import Limits, Sources
from ckpt.commit.lines import Beginning, ResumePoint
from ckpt.commit.log import read_format
from ckpt.commit.names import LINES_PREFIX
from ckpt.commit.session import Session
from ckpt.commit.writer import keep_reserve
from ckpt.errors import NoCheckpoint, OutcomeUnknown, StoreRefused
from ckpt.world.base import World, collectively, from_coordinator
from storage.errors import StorageError
from storage.store import Store

logger = logging.getLogger(__name__)


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
        self,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources | None = None,
        limits: Limits | None = None,
    ) -> Session:
        """The session of this place, claimed now if this process has none. A fenced one
        stays fenced. Raises LogDiverged when this process built on another log than is there.
        """
        with self._lock:
            known = self._sessions.get(store.place)
            if known is not None:
                known.use_store(store)
                known.check_root()
                return known
            restored = self._restored.get(store.place)
            session = Session.claim(
                store,
                unsafe_single_writer=unsafe_single_writer,
                sources=sources,
                limits=limits,
                beginning="quiet" if restored is not None else self._beginning(store.place),
            )
            # Kept before anything else can fail: the CLAIM stands, and a second one would fence
            # ourselves.
            self._sessions[store.place] = session
            if restored is not None:
                session.restored(restored)
            try:
                # What dead jobs left goes, so that its disk space is there for the first save.
                session.take_back_lost()
                session.sweep_unfinished()
                session.sweep()
            except (StorageError, OutcomeUnknown) as error:
                # Only space is at stake; a save that needs it fails with an error of its own.
                url = session.store.url
                logger.warning("%s: leftovers of dead jobs stay for now: %s", url, error)
            keep_reserve(session.store)
            return session

    def forget(self, store: Store) -> None:
        """Forget the session of this place: the next one is claimed as by a new job."""
        with self._lock:
            self._sessions.pop(store.place, None)
            self._restored.pop(store.place, None)
            ref = self._holds.get(store.place)
            if ref is not None and (hold := ref()) is not None:
                hold.begin_anew = True  # it goes on with the state that it has


class Beside(SessionRegistry):
    """Sessions beside the one that holds a root, for what is no part of a training: nobody is
    fenced, and a later save of this process claims the root all the same.
    """

    def session(
        self,
        store: Store,
        *,
        unsafe_single_writer: bool = False,
        sources: Sources | None = None,
        limits: Limits | None = None,
    ) -> Session:
        """A new one. Raises like `Session.beside`."""
        return Session.beside(
            store, unsafe_single_writer=unsafe_single_writer, sources=sources, limits=limits
        )


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

    def new_attempt(self) -> str:
        """A name for the next attempt, the same on every rank. Collective."""
        mine = None if self.session is None else self.session.new_attempt().encode()
        return self.world.broadcast("attempt", mine).decode()

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
    sources: Sources | None = None,
) -> RankedSession:
    """The coordinator claims (or finds) the session, the others compare the root they see.
    Collective.

    Raises the same error on all ranks; StoreRefused names the ranks that see another root or none.
    """
    opened: list[Session] = []

    def claimed() -> bytes:
        opened.append(
            registry.session(store, unsafe_single_writer=unsafe_single_writer, sources=sources)
        )
        return json.dumps([opened[0].root, opened[0].epoch]).encode()

    root, epoch = json.loads(from_coordinator(world, "claim", claimed))

    def compare() -> None:
        try:
            seen = root if world.rank == 0 else read_format(store).root
        except NoCheckpoint:
            seen = "no root"
        if seen != root:
            raise StoreRefused(
                f"{store.url} shows {seen} where rank 0 sees root {root}: ranks look at different "
                "storage (a local path on several machines?); use a url that all ranks share"
            )

    collectively(world, "claim", compare)
    return RankedSession(world, root, epoch, opened[0] if opened else None)
