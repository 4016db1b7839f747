"""The public functions save and load, and what a process remembers between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from ckpt.loading import LoadOptions, LoadReport, load_state
from ckpt.memory import gc_paused
from ckpt.read import ReadPath
from ckpt.saving import PartMemory, SaveOptions, SaveReport, save_state
from ckpt.session import RankedSession, SessionRegistry, open_session
from ckpt.world import World, collectively, current_world
from ckpt.write import Staging, WritePath
from storage import Store, open_store

MIB = 1 << 20
REMOTE_REQUESTS = 4  # in flight at once per rank
DIRECT_NBYTES_MIN = 16 * MIB  # smaller files go through the page cache unless asked otherwise

Io = Literal["auto", "buffered", "direct"]


def save(
    state: Any,
    url: str,
    *,
    step: int,
    process_group: dist.ProcessGroup | None = None,
    replicas: Literal["warn", "strict"] = "warn",
    io: Io = "auto",
    unsafe_single_writer: bool = False,
    user: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Save `state` as the checkpoint of `step` below `url`; returns when it is durable.

    `state` is any nesting of dicts and lists with modules, optimizers, schedulers, objects with
    `state_dict()`, tensors and values. Collective over `process_group` (default: all ranks), or
    without torch.distributed on this process alone. Nothing that exists is overwritten.

    Replicas of buffers that differ between ranks are warned of, or refused (`replicas="strict"`).
    `user` are notes to keep with the checkpoint. A store that cannot refuse a second writer is used
    only with `unsafe_single_writer=True`. `io="buffered"` writes local files through the page
    cache, `"direct"` around it, and `"auto"` around it from 16 MiB on.

    Raises the same error on every rank, and the previous checkpoint is still the latest then:
    InvalidState, StoreRefused, Fenced, RankFailed, or the store's error on one rank; OutcomeUnknown
    when the commit got no answer.
    """
    with gc_paused():
        seat = _process.seat(process_group)
        store = collectively(seat.world, "open", lambda: seat.store(url, storage_options))
        session, memory = seat.session(store, unsafe_single_writer=unsafe_single_writer)
        if replicas not in ("warn", "strict"):
            raise ValueError(f"replicas={replicas!r}; expected 'warn' or 'strict'")
        path = _write_path(io, store, seat.staging)
        options = SaveOptions(replicas, path, dict(user or {}))
        return save_state(
            state, session=session, store=store, step=step, options=options, memory=memory
        )


def load(
    state: Any,
    url: str,
    *,
    step: int | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    skip: Callable[[str], bool] | Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load the checkpoint of `step`, or the latest, into `state`, in place and bit for bit.

    `url` is a root or one step's directory. The state may be sharded in any other way than the one
    that was saved. `strict=False` tolerates missing and unexpected names; shapes and dtypes never
    differ. `rename` gives the checkpoint's name for a name of the state, `skip` leaves names out.

    Raises the same error on every rank: NoCheckpoint, Mismatch (with every problem), Corrupt,
    UnsupportedFormat with the state unchanged; LoadInterrupted when it is half-loaded.
    """
    with gc_paused():
        seat = _process.seat(process_group)
        store = collectively(seat.world, "open", lambda: seat.store(url, storage_options))
        options = LoadOptions(strict, rename, skip, _read_path(store))
        return load_state(state, store=store, world=seat.world, step=step, options=options)


def _write_path(io: Io, store: Store, staging: Staging) -> WritePath:
    """Object stores get larger parts, several at once; files are written around the page cache.

    See DECISIONS.md for the numbers.
    """
    if io not in ("auto", "buffered", "direct"):
        raise ValueError(f"io={io!r}; expected 'auto', 'buffered' or 'direct'")
    if store.part_nbytes_min > 1:
        return WritePath(part_nbytes=16 * MIB, writers=REMOTE_REQUESTS)
    if io == "buffered":
        return WritePath(staging=staging)
    # One part is checksummed while the one before it is on its way to the disk.
    least = DIRECT_NBYTES_MIN if io == "auto" else 0
    return WritePath(direct=True, writers=1, direct_nbytes_min=least, staging=staging)


def _read_path(store: Store) -> ReadPath:
    if store.part_nbytes_min > 1:
        return ReadPath(readers=REMOTE_REQUESTS)
    return ReadPath(request_nbytes_max=2 * MIB)  # checked while it is still in the CPU's cache


@dataclass
class _Seat:
    """This process's place in one process group: its world, and the sessions opened there."""

    group: dist.ProcessGroup | None
    world: World
    registry: SessionRegistry
    staging: Staging = field(default_factory=Staging)
    stores: dict[tuple[str, str], Store] = field(default_factory=dict)
    sessions: dict[tuple[str, bool], tuple[RankedSession, PartMemory]] = field(default_factory=dict)

    def store(self, url: str, storage_options: Mapping[str, Any] | None) -> Store:
        """Opened once: an open store knows which directories are durable, and keeps connections."""
        key = (url, repr(sorted((storage_options or {}).items())))
        if key not in self.stores:
            self.stores[key] = open_store(url, **(storage_options or {}))
        return self.stores[key]

    def session(
        self, store: Store, *, unsafe_single_writer: bool
    ) -> tuple[RankedSession, PartMemory]:
        known = self.sessions.get((store.url, unsafe_single_writer))
        if known is not None and known[0].session is not None:
            known[0].session.use_store(store)
        if known is None:
            opened = open_session(
                self.world, store, self.registry, unsafe_single_writer=unsafe_single_writer
            )
            known = self.sessions[store.url, unsafe_single_writer] = (opened, PartMemory())
        return known


def world_of(process_group: dist.ProcessGroup | None = None) -> World:
    """The world of a group, of all ranks, or of this process alone; the same one at every call.

    Collective over the group when it is asked for the first time.
    """
    return _process.seat(process_group).world


class _Process:
    """What lives as long as this process: it claims a root once, and keeps the world of a group."""

    def __init__(self) -> None:
        self._registry = SessionRegistry()
        self._seats: list[_Seat] = []
        self._lock = threading.Lock()

    def seat(self, group: dist.ProcessGroup | None) -> _Seat:
        """The place in `group`, made at its first use; that is collective over the group."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        with self._lock:
            for seat in self._seats:
                if seat.group is group:
                    return seat
            seat = _Seat(group, current_world(group), self._registry)
            self._seats.append(seat)
            return seat


_process = _Process()
