"""What one process remembers between calls: its worlds, its stores and its sessions."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from ckpt.commit.lines import Restored
from ckpt.commit.ranked import Beside, RankedSession, SessionRegistry, open_session
from ckpt.commit.session import Session
from ckpt.errors import Forked
from ckpt.saving.background import Background
from ckpt.saving.task import PartMemory
from ckpt.saving.write import Staging
from ckpt.world.base import World, collectively
from ckpt.world.torch_world import current_world
from ckpt.world.torch_world import world_of_members as new_world_of_members
from storage import Store, StoreLike, open_store
from storage.location import is_borrowed_from, url_of


class Place(NamedTuple):
    """Where to save: an open store, the session of its root, what the lead knows of the parts."""

    store: Store
    session: RankedSession
    memory: PartMemory


@dataclass
class Seat:
    """This process's place in one process group: its world, and the sessions opened there."""

    group: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    world: World
    registry: SessionRegistry
    background: Background
    staging: Staging = field(default_factory=Staging)
    stores: dict[tuple[str, str], Store] = field(default_factory=dict)
    sessions: dict[tuple[str, str, bool], tuple[RankedSession, PartMemory]] = field(
        default_factory=dict
    )

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether `group` has the ranks of this world, of the processes that it was made among."""
        if group is None or self.everyone is not dist.group.WORLD:
            return False
        return self.world.global_ranks == tuple(dist.get_process_group_ranks(group))

    def store(self, url: StoreLike, storage_options: Mapping[str, Any] | None) -> Store:
        """Opened once: an open store knows which directories are durable, and keeps connections."""
        key = _store_key(url, storage_options)
        known = self.stores.get(key)
        if known is None or (isinstance(url, Store) and not is_borrowed_from(known, url)):
            known = self.stores[key] = open_store(url, **(storage_options or {}))
        return known

    def place(
        self, url: StoreLike, storage_options: Mapping[str, Any] | None, unsafe_single_writer: bool
    ) -> Place:
        """Collective: the store at `url`, and its session, claimed now if there is none yet.

        Nothing is in flight then; a failure in the background that one rank has not heard of is
        raised on all.
        """

        def settled() -> Store:
            self.background.settle()
            return self.store(url, storage_options)

        store = collectively(self.world, "open", settled)
        # Two servers may have buckets of one name; the options tell them apart.
        key = (store.url, _store_key(url, storage_options)[1], unsafe_single_writer)
        if key not in self.sessions:
            opened = open_session(
                self.world, store, self.registry, unsafe_single_writer=unsafe_single_writer
            )
            self.sessions[key] = (opened, PartMemory())
        return self._place(store, *self.sessions[key])

    def place_beside(
        self, url: StoreLike, storage_options: Mapping[str, Any] | None, unsafe_single_writer: bool
    ) -> Place:
        """Collective: like `place`, for what is no part of a training; nobody is fenced."""

        def settled() -> Store:
            self.background.settle()
            return self.store(url, storage_options)

        store = collectively(self.world, "open", settled)
        opened = open_session(
            self.world, store, Beside(), unsafe_single_writer=unsafe_single_writer
        )
        return Place(store, opened, PartMemory())

    def known_place(
        self, url: StoreLike, storage_options: Mapping[str, Any] | None, unsafe_single_writer: bool
    ) -> Place | None:
        """The place if all ranks have been there, without waiting for any."""
        opened = _store_key(url, storage_options)
        # A caller may make a new object for each call: the session is that of its place.
        is_own = isinstance(url, Store) and not storage_options
        store = self.store(url, None) if is_own else self.stores.get(opened)
        if store is None or (store.url, opened[1], unsafe_single_writer) not in self.sessions:
            return None
        return self._place(store, *self.sessions[store.url, opened[1], unsafe_single_writer])

    def forget(self, store: Store) -> None:
        """Nothing is known of this place any more; waits for a save in flight."""
        self.background.wait()
        self.sessions = {key: known for key, known in self.sessions.items() if key[0] != store.url}
        # An open store remembers which directories are durable; new ones are not.
        self.stores = {key: known for key, known in self.stores.items() if known.url != store.url}

    def _place(self, store: Store, session: RankedSession, memory: PartMemory) -> Place:
        if session.session is not None:
            session.session.use_store(store)
        return Place(store, session, memory)


def _store_key(url: StoreLike, storage_options: Mapping[str, Any] | None) -> tuple[str, str]:
    options = repr(sorted((storage_options or {}).items()))
    if isinstance(url, Store):
        # Its url is for messages: two stores in memory may well have the same one.
        return url.url, f"Store {url.place} {options}"
    return url_of(url), options


def world_of(process_group: dist.ProcessGroup | None = None) -> World:
    """The world of a group, of all ranks, or of this process alone; the same one at every call.

    Collective over the group when it is asked for the first time.
    """
    return this_process.seat(process_group).world


def world_of_members(members: tuple[int, ...]) -> World:
    """The world of some of all ranks, ascending, this one among them; the same one at every call.

    Collective over these ranks when it is asked for the first time.
    """
    if len(members) == 1:
        return new_world_of_members(members)
    return this_process.seat_among(members).world


def place_of(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Place:
    """Where saves of this process to a url go, claimed now if it was not yet. Collective.

    Raises like `save`.
    """
    return this_process.seat(process_group).place(url, storage_options, unsafe_single_writer)


def place_beside(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Place:
    """Where checkpoints go that are no part of a training, such as imports. A training that holds
    the root is not fenced. Collective; raises like `save`.
    """
    seat = this_process.seat(process_group)
    return seat.place_beside(url, storage_options, unsafe_single_writer)


def claimed(
    url: StoreLike,
    *,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Session:
    """The session of a url, claimed now if this process has none: for this process alone, where
    somebody else's protocol tells the other ranks. Raises like `save`.
    """
    store = open_store(url, **(storage_options or {}))
    return this_process.claim(store, unsafe_single_writer=unsafe_single_writer)


def store_of(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """The open store of a url, which all saves and loads of this process use. Collective."""
    seat = this_process.seat(process_group)
    seat.background.wait()
    return collectively(seat.world, "open", lambda: seat.store(url, storage_options))


def session_of(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Session | None:
    """The session of a url on the lead, once it was saved to; else None. Asks nobody."""
    seat = this_process.seat(process_group)
    place = seat.known_place(url, storage_options, unsafe_single_writer)
    return None if place is None else place.session.session


class ProcessMemory:
    """What lives as long as this process: it claims a root once, and keeps the world of a group."""

    def __init__(self) -> None:
        self._registry = SessionRegistry()
        self._seats: list[Seat] = []
        self._lock = threading.Lock()
        self._inherited: object = None

    def forked(self) -> None:
        """In a forked child: it remembers nothing, for sessions, worlds and saves under way are its
        parent's. Locks are new: a thread that is not here may have held them.
        """
        self.__init__()  # type: ignore[misc]
        if dist.is_available() and dist.is_initialized():
            self._inherited = dist.group.WORLD

    def claim(self, store: Store, *, unsafe_single_writer: bool) -> Session:
        """The session of a root in this process."""
        return self._registry.session(store, unsafe_single_writer=unsafe_single_writer)

    def restored(self, store: Store, attempt: str, *, on_purpose: bool) -> None:
        """What this process saves to that root goes on from there; see `ckpt.commit.lines`."""
        self._registry.restored(store, Restored(attempt, on_purpose))

    def forget(self, store: Store) -> None:
        """The next save to this place claims it."""
        with self._lock:
            seats = list(self._seats)
        for seat in seats:
            seat.forget(store)
        self._registry.forget(store)

    def seat(self, group: dist.ProcessGroup | None) -> Seat:
        """The place in `group`, made at its first use; that is collective over the group."""
        if dist.is_available() and dist.is_initialized():
            if self._inherited is not None and dist.group.WORLD is self._inherited:
                raise Forked(
                    "this process was forked from a rank of torch.distributed and is not a member "
                    "of its process group, so it cannot save or load in it: do that in the rank "
                    "itself, call destroy_process_group() here first, or spawn the process"
                )
            group = dist.group.WORLD if group is None else group
        with self._lock:
            for seat in self._seats:
                if seat.group is group and (group is not None or seat.everyone is None):
                    return seat
            for seat in self._seats:  # of the same ranks, made before anybody named their group
                if seat.group is None and seat.is_of(group):
                    seat.group = group
                    return seat
            return self._new_seat(group, current_world(group))

    def seat_among(self, members: tuple[int, ...]) -> Seat:
        """The place among `members` of all ranks, that of a group of just these if there is one."""
        everyone = dist.group.WORLD
        if members == tuple(dist.get_process_group_ranks(everyone)):
            return self.seat(everyone)
        with self._lock:
            for seat in self._seats:
                if seat.everyone is everyone and seat.world.global_ranks == members:
                    return seat
            return self._new_seat(None, new_world_of_members(members))

    def _new_seat(self, group: dist.ProcessGroup | None, world: World) -> Seat:
        everyone = dist.group.WORLD if group is not None or world.size > 1 else None
        seat = Seat(group, everyone, world, self._registry, Background(world))
        self._seats.append(seat)
        return seat


this_process = ProcessMemory()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=this_process.forked)
