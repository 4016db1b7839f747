"""What one process remembers between calls: its worlds, its stores and its sessions."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist

from ckpt.commit.session import (
    Beside,
    RankedSession,
    RootHold,
    Session,
    SessionRegistry,
    open_session,
)
from ckpt.errors import Forked, RankFailed
from ckpt.saving.background import Background
from ckpt.saving.image import Staging
from ckpt.saving.task import PartMemory
from ckpt.world import job
from ckpt.world.base import SoloWorld, World, collectively
from ckpt.world.torch_world import TorchWorld, current_world
from storage import Store, StoreLike, open_store
from storage.forks import keep_for_ever
from storage.hidden import without_secrets
from storage.location import fixed, is_borrowed_from, url_of
from storage.url import with_its_options

_SessionKey = tuple[str, str, bool]
GroupRef: TypeAlias = "weakref.ref[dist.ProcessGroup]"
EndWorld = Callable[[RankFailed], None]
K = TypeVar("K")
V = TypeVar("V")

ROOTS_MAX = 8  # of which more is kept than who holds them


class OpenRoot(NamedTuple):
    """Where to save: an open store, the session of its root, and what the coordinator remembers of
    the parts of the last save.
    """

    store: Store
    session: RankedSession
    memory: PartMemory


@dataclass
class GroupContext:
    """What this process remembers of one process group: its world, and the roots opened there.

    `everyone` is torch's group of all ranks at that time: another one is another job. Groups are
    held weakly: torch ends a group's threads when nobody holds it, and one that lets go of a tensor
    while the interpreter is taken down would abort the process.
    """

    group: GroupRef | None
    everyone: GroupRef | None
    world: World
    registry: SessionRegistry
    background: Background
    staging: Staging = field(default_factory=Staging)
    stores: OrderedDict[tuple[str, str], Store] = field(default_factory=OrderedDict)
    sessions: OrderedDict[_SessionKey, tuple[RankedSession, PartMemory]] = field(
        default_factory=OrderedDict
    )

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether `group` consists of the ranks of this world, in the same job of torch."""
        if group is None or self.everyone != _everyone():
            return False
        return self.world.global_ranks == tuple(dist.get_process_group_ranks(group))

    def store(self, url: StoreLike, storage_options: Mapping[str, Any] | None) -> Store:
        """Opened once: an open store knows which directories are durable, and keeps connections."""
        url = with_its_options(url)
        key = _store_key(url, storage_options)
        known = self.stores.get(key)
        if known is None or (isinstance(url, Store) and not is_borrowed_from(known, url)):
            known = self.stores[key] = open_store(url, **(storage_options or {}))
        if (oldest := _used(self.stores, key)) is not None:
            oldest.rest()
        return known

    def open_root(
        self,
        url: StoreLike,
        storage_options: Mapping[str, Any] | None,
        unsafe_single_writer: bool,
        call: str,
        *,
        beside: bool = False,
    ) -> OpenRoot:
        """The store at `url`, and its session, claimed now if there is none yet; with `beside` one
        for what is no part of a training, which fences no session. Collective, within the public
        `call`.

        Nothing is in flight when it returns; a failure in the background that was not raised on one
        rank is raised on all.
        """
        store = self.settled_store(url, storage_options, call)
        # Two servers may have buckets of one name; the options tell them apart.
        key = (store.url, _store_key(url, storage_options)[1], unsafe_single_writer)
        claim = partial(open_session, self.world, store, unsafe_single_writer=unsafe_single_writer)
        if beside:
            return OpenRoot(store, claim(Beside()), PartMemory())
        if key not in self.sessions:
            self.sessions[key] = claim(self.registry), PartMemory()
        return self._opened(store, key)

    def known_root(
        self, url: StoreLike, storage_options: Mapping[str, Any] | None, unsafe_single_writer: bool
    ) -> OpenRoot | None:
        """The root if all ranks have opened it before. Waits for no rank."""
        # A caller may make a new object for each call: the session is that of its place.
        url = with_its_options(url)
        is_own = isinstance(url, Store) and not storage_options
        opened = _store_key(url, storage_options)
        store = self.store(url, None) if is_own else self.stores.get(opened)
        if store is None:
            return None
        key = (store.url, opened[1], unsafe_single_writer)
        return self._opened(store, key) if key in self.sessions else None

    def forget(self, store: Store) -> None:
        """Forget the root in `store`. Waits for a save in flight."""
        self.background.wait()
        for key in [key for key in self.sessions if key[0] == store.url]:
            del self.sessions[key]
        # An open store remembers which directories are durable; new ones are not.
        for opened in [opened for opened, one in self.stores.items() if one.url == store.url]:
            del self.stores[opened]

    def settled_store(
        self, url: StoreLike, storage_options: Mapping[str, Any] | None, call: str
    ) -> Store:
        """The open store, once no rank has a save in flight. Collective, within `call`."""
        self.world.begin_call(call)

        def settled() -> Store:
            self.background.settle()
            return self.store(url, storage_options)

        return collectively(self.world, "open", settled)

    def _opened(self, store: Store, key: _SessionKey) -> OpenRoot:
        session, memory = self.sessions[key]
        if (oldest := _used(self.sessions, key)) is not None:
            oldest[1].rest()
        # It may have been claimed through another object, which its owner has closed since.
        if session.session is not None:
            session.session.use_store(store)
        return OpenRoot(store, session, memory)


def _used(known: OrderedDict[K, V], key: K) -> V | None:
    """Note that `key` is used now; the value that is no longer among the last ones, if any.

    A training that saves each checkpoint to a url of its own would keep memory, threads and open
    files for each of them.
    """
    with suppress(KeyError):  # forgotten by another thread meanwhile
        known.move_to_end(key)
    values = list(known.values())
    return values[-ROOTS_MAX - 1] if len(values) > ROOTS_MAX else None


def _store_key(url: StoreLike, storage_options: Mapping[str, Any] | None) -> tuple[str, str]:
    # A digest: options may hold secrets, and what remembers stores may be shown.
    shown = repr(sorted(without_secrets(storage_options).items()))
    options = hashlib.sha256(shown.encode("utf-8", "backslashreplace")).hexdigest()
    url = with_its_options(url)
    if isinstance(url, Store):
        # Its url is for messages: two stores in memory may well have the same one.
        return url.url, f"Store {url.place} {options}"
    return url_of(fixed(url)), options


def _everyone() -> GroupRef | None:
    """torch's group of all ranks, None where there is none."""
    everyone = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if everyone is None else weakref.ref(everyone)


def world_of(process_group: dist.ProcessGroup | None = None) -> World:
    """The world of a group, of all ranks, or of this process alone; the same one at every call.

    Collective over the group at its first call. Returns when no save is in flight in that world,
    whose rounds would mix with those of the caller.
    """
    context = this_process.of_group(process_group)
    context.background.wait()
    return context.world


def failure_of(process_group: dist.ProcessGroup | None = None) -> RankFailed | None:
    """Why the world of a group has ended; None while it is usable, or unused. Not collective."""
    context = this_process.known(process_group)
    return None if context is None else context.world.failure


def leaving(process_group: dist.ProcessGroup | None = None) -> EndWorld:
    """A function that ends this process's part in the world that the group has now: see
    `ProcessMemory.leave`. A thread that joins another world meanwhile is not affected.
    """
    return partial(this_process.leave, this_process.of_group(process_group))


def world_of_members(members: tuple[int, ...]) -> World:
    """The world of some of all ranks, ascending, this one among them; the same one at every call.

    Collective over these ranks at its first call. No save is in flight there: see `world_of`.
    """
    if len(members) == 1:
        return SoloWorld(members[0])
    context = this_process.of_members(members)
    context.background.wait()
    return context.world


def open_root(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
    beside: bool = False,
) -> OpenRoot:
    """The root at `url` as saves of this process use it, claimed now if it was not yet; `beside` a
    training that holds it and is not fenced, such as for an import. Collective.

    Raises like `save`.
    """
    context, call = this_process.of_group(process_group), "an import" if beside else "Checkpointer"
    root = url, storage_options, unsafe_single_writer
    # From the second call on, no rank waits for another, but each for its save in flight, whose
    # rounds would mix with the caller's.
    known = None if beside else context.known_root(*root)
    if known is not None:
        context.background.wait()
    return known or context.open_root(*root, call, beside=beside)


def claimed(
    url: StoreLike,
    *,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Session:
    """The session of a url, claimed now if this process has none. For this process alone, where
    another library's protocol informs the other ranks. Raises like `save`.
    """
    store = open_store(url, **(storage_options or {}))
    return this_process.registry.session(store, unsafe_single_writer=unsafe_single_writer)


def store_of(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    call: str,
) -> Store:
    """The open store of a url, which all saves and loads of this process use. Collective, within
    the public `call`.
    """
    context = this_process.of_group(process_group)
    context.background.wait()
    context.world.begin_call(call)
    return collectively(context.world, "open", lambda: context.store(url, storage_options))


def hold(
    url: StoreLike,
    *,
    begin_anew: bool,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RootHold:
    """Keep the root at `url` for one training of this process; see `SessionRegistry.hold`.
    Collective.
    """
    context = this_process.of_group(process_group)
    context.background.wait()
    context.world.begin_call("Checkpointer()")
    return collectively(
        context.world,
        "open",
        lambda: context.registry.hold(context.store(url, storage_options), begin_anew=begin_anew),
    )


def session_of(
    url: StoreLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> Session | None:
    """The session of a url on the coordinator, once it was saved to; else None. Not collective."""
    context = this_process.known(process_group)
    if context is None:
        return None
    root = context.known_root(url, storage_options, unsafe_single_writer)
    return None if root is None else root.session.session


class ProcessMemory:
    """What lives as long as this process: roots are claimed once, and a group has one world."""

    def __init__(self) -> None:
        # One for all groups: a second claim of a root by this process would fence the first.
        self.registry = SessionRegistry()
        self._contexts: list[GroupContext] = []
        self._lock = threading.Lock()
        self._inherited: GroupRef | None = None

    def forked(self) -> None:
        """Called in a forked child, which starts with nothing: sessions, worlds and saves under way
        are its parent's. Locks are new, because threads that do not exist here may hold the old.
        """
        groups = [one.group and one.group() for one in self._contexts]
        keep_for_ever((dict(vars(self)), groups, dist.group.WORLD if _everyone() else None))
        self.__init__()  # type: ignore[misc]
        self._inherited = _everyone()

    def forget(self, store: Store) -> None:
        """Forget the root in `store`: the next save claims it."""
        with self._lock:
            contexts = list(self._contexts)
        # Without the lock: a context waits for its save in flight, which may take minutes.
        for context in contexts:
            context.forget(store)
        self.registry.forget(store)

    def leave(self, context: GroupContext, failure: RankFailed) -> None:
        """End the world of `context` with `failure`, and what is under way there, so that nothing
        of it is committed; the next save to its roots claims them anew. May be repeated.
        """
        with self._lock:
            self._contexts = [one for one in self._contexts if one is not context]
        # First the end, which no commit passes; then the saves, which wait in rounds of this world.
        context.world.end(failure)
        context.background.give_up()
        context.world.close()
        # The next world claims anew: its claim fences what other ranks may still do in the old one.
        for store in context.stores.values():
            self.registry.forget(store)
        context.stores.clear()
        context.sessions.clear()

    def of_group(self, group: dist.ProcessGroup | None) -> GroupContext:
        """The context of `group`, created at its first use; that is collective over the group."""
        if isinstance(group, (str, int, list, tuple)):
            raise TypeError(
                f"process_group={group!r}; expected a group, as dist.new_group() returns to its "
                "members (-100 to others, which do not make this call), or None for all ranks"
            )
        if (everyone := _everyone()) is not None:
            # A child that has called `destroy_process_group` and joined a job of its own may.
            if everyone == self._inherited:
                raise Forked(
                    "this process was forked from a rank of torch.distributed and is not a member "
                    "of its process group, so it cannot save or load in it: do that in the rank "
                    "itself, call destroy_process_group() here first, or spawn the process"
                )
            group = dist.group.WORLD if group is None else group
        with self._lock:
            return self._known(group) or self._new_context(group, lambda: current_world(group))

    def known(self, group: dist.ProcessGroup | None) -> GroupContext | None:
        """The context of `group` if there is one. Not collective."""
        with self._lock:
            return self._known(dist.group.WORLD if group is None and _everyone() else group)

    def _known(self, group: dist.ProcessGroup | None) -> GroupContext | None:
        known = None if group is None else weakref.ref(group)
        for context in self._contexts:
            if context.group == known and (group is not None or context.everyone is None):
                return context
        # Of the same ranks, created by `of_members` before there was a group of them.
        for context in self._contexts:
            if context.group is None and context.is_of(group):
                context.group = known
                return context
        return None

    def of_members(self, members: tuple[int, ...]) -> GroupContext:
        """The context of `members`; that of a group of exactly these ranks if there is one."""
        everyone = dist.group.WORLD
        # Two worlds of the same ranks would each run rounds of their own and claim roots twice.
        if members == tuple(dist.get_process_group_ranks(everyone)):
            return self.of_group(everyone)
        with self._lock:
            for context in self._contexts:
                if context.everyone == _everyone() and context.world.global_ranks == members:
                    return context
            return self._new_context(None, lambda: TorchWorld(members=members))

    def release_jobs(self) -> bool:
        """Release the worlds of jobs that this process has left; False where a save needs one, or
        it cannot be done at once.
        """
        # Called while torch leaves a group: waiting for a call that makes a context there would be
        # a deadlock.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not any(context.background.is_needed() for context in self._of_this_job())
        finally:
            self._lock.release()

    def _of_this_job(self) -> list[GroupContext]:
        # Those of another are of no use, but for saves that run.
        everyone = _everyone()
        kept = [
            context
            for context in self._contexts
            if context.everyone in (None, everyone) or context.background.is_needed()
        ]
        for context in self._contexts:
            if context not in kept:
                context.world.release()
        return kept

    def _new_context(
        self, group: dist.ProcessGroup | None, make: Callable[[], World]
    ) -> GroupContext:
        everyone = _everyone()
        self._contexts = self._of_this_job()  # first: then their port is free for the new world
        world = make()
        everyone = everyone if group is not None or world.size > 1 else None
        known = None if group is None else weakref.ref(group)
        context = GroupContext(known, everyone, world, self.registry, Background(world))
        self._contexts.append(context)
        return context


this_process = ProcessMemory()
job.this_process.on_left.append(this_process.release_jobs)
os.register_at_fork(after_in_child=this_process.forked)
