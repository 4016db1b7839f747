"""This process in its job: the rendezvous store that all ranks share, its card there, its heart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckpt.errors import CheckpointError
from ckpt.world.board import ProcessBoard
from ckpt.world.heart import Heart
from ckpt.world.link import WORLD_NBYTES
from ckpt.world.liveness import ENDED_UNCALLED, Card, address_of, hosts_of
from ckpt.world.missing import Missing, card_key
from ckpt.world.place import (
    CERTIFICATE_VARIABLE,
    PORTS_VARIABLE,
    TOKEN_VARIABLE,
    Place,
    address_of_interface,
)
from ckpt.world.rounds import STORE_SECONDS
from storage.forks import keep_for_ever
from storage.hidden import HiddenText


class Process:
    """What this process is in its job: its rank in torch.distributed, the rendezvous store that
    all share, the heart that carries its messages, what tells this job from others, and where it
    posts what its worlds have to report.
    """

    def __init__(self, rank: int, store: Any, heart: Heart, job: str = "") -> None:
        self.rank = rank
        self.store = store
        self.heart = heart
        self.job = job
        self.missing = Missing(heart, lambda: self.store)
        self.board = ProcessBoard(store, rank)


def place_of_environment() -> Place:
    """Where ranks listen for each other: on the first interface of GLOO_SOCKET_IFNAME, as gloo
    does, and at a port of SHARDPOINT_PORTS, such as `29600-29699`; encrypted with the key in
    SHARDPOINT_CERTIFICATE. Raises CheckpointError for anything else.
    """
    name, ports = (os.environ.get(key, "") for key in ("GLOO_SOCKET_IFNAME", PORTS_VARIABLE))
    low, _, high = ports.partition("-")
    if ports and not (low.isdigit() and (high or low).isdigit()):
        raise CheckpointError(f"{PORTS_VARIABLE}={ports!r}: expected a range such as 29600-29699")
    numbers = range(int(low), int(high or low) + 1) if ports else range(1)
    if ports and not (numbers and numbers[0] and numbers[-1] < 1 << 16):
        raise CheckpointError(f"{PORTS_VARIABLE}={ports!r}: ports are 1 to 65535, ascending")
    address = address_of_interface(name.partition(",")[0]) if name else ""
    return Place(address, numbers, os.environ.get(CERTIFICATE_VARIABLE, ""))


def part_of(store: Any, name: str) -> Any:
    """The part of a rendezvous store whose keys lie below `name`."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every torch

    return PrefixStore(name, store)


def token_of_environment() -> str:
    """What those who serve publications and those who follow them have in common; "" for none."""
    return HiddenText(os.environ.get(TOKEN_VARIABLE, ""))


def own_prefix(process: Process, ranks: tuple[int, ...], rank: int) -> tuple[Any, bytes]:
    """A part of the store that no other world uses, and a key of that world.

    Each rank counts the worlds it made over these ranks, in the store itself; the counts agree
    because all ranks make them in the same order.
    """
    group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    home = part_of(process.store, f"shardpoint/{group}")
    number = home.add(f"worlds/{rank}", 1)
    key = hashlib.sha256(f"{process.job} {group} {number}".encode()).digest()[:WORLD_NBYTES]
    return part_of(home, f"{number}"), key


def _own_part(store: Any, number: int) -> Any:
    """A part of the store for the initialisation of torch of that number: another one with the same
    store must not find what this one leaves there.
    """
    return part_of(store, f"shardpoint/{number}")


class ThisProcess:
    """This process in its job, with a heart of its own for each initialisation of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: Process | None = None  # in the newest job, if it has joined any
        self._group: Callable[[], object] = lambda: None
        # Of the newest initialisation, and its number in the store.
        self._numbered: tuple[Callable[[], object], int] = (lambda: None), 0
        # Called, in any thread, after `destroy_process_group`: whether nothing is under way there.
        self.on_left: list[Callable[[], bool]] = []

    def in_job(self) -> Process:
        """This process in the job that torch.distributed is initialised for."""
        group = dist.group.WORLD
        # By identity: the group may have been destroyed, and torch initialised for another job.
        with self._lock:
            if self.process is None or self.process.heart.is_stopped or self._group() is not group:
                self.process, self._group = self._taken(self.process), weakref.ref(group)
            return self.process

    def number(self, store: Any, rank: int) -> int:
        """How many initialisations with this store the rank has used the library in, this one
        included. Ranks that use it in the same ones count alike.
        """
        of, number = self._numbered
        if dist.group.WORLD is None or of() is not dist.group.WORLD:
            number = store.add(f"shardpoint/joins/{rank}", 1)
            world = dist.group.WORLD
            self._numbered = (weakref.ref(world) if world is not None else lambda: None), number
        return number

    def forked(self) -> None:
        """In a forked child: another thread may have held the lock."""
        keep_for_ever(self.process)
        self._lock, self.process = threading.Lock(), None

    def _taken(self, before: Process | None) -> Process:
        # There is no public way to the store that all ranks share already.
        base: Any = dist.distributed_c10d._get_default_store()
        hosts = hosts_of(base)
        # An own connection, so that nothing waits behind the user's requests, nor they behind
        # these. Where it cannot be had (older torch) the store is shared.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            base = base.clone()
        rank = dist.get_rank()
        try:
            base = _own_part(base, self.number(base, rank))
            job = base.compare_set("shardpoint/job", "", secrets.token_hex(16)).decode()
        except dist.DistError:
            raise  # the store is away
        except (RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"rank {rank} cannot find the other ranks: the rendezvous store of this job has no "
                "`compare_set`. Fake process groups cannot save or load; otherwise initialise "
                "torch.distributed with a TCPStore or a FileStore, as its `init_method` does"
            ) from error
        # torch frees it when it is left.
        group: Callable[[], object] = weakref.ref(dist.group.WORLD)

        def has_left() -> bool:
            world = dist.group.WORLD
            is_left = world is None or world is not group()
            return is_left and all([forget() for forget in self.on_left])

        if before is not None:
            before.heart.retire()
        # A rank that cannot join leaves word: its parent would look for it until a deadline.
        try:
            place = place_of_environment()
            heart = Heart(rank, (place.address,) if place.address else hosts, place, has_left)
        except CheckpointError as error:
            base.set(card_key(rank), Card.of_absent(rank, f"cannot join: {error}").encode())
            raise
        base.set(card_key(rank), heart.card.encode())
        return Process(rank, base, heart, job)


this_process = ThisProcess()
os.register_at_fork(after_in_child=this_process.forked)


def leave_uncalled() -> None:
    """Leave a card that says that this process ends, for ranks that wait for it, unless it has
    joined a job. Waits some seconds at most.
    """

    def leave() -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # A store that is gone is no news; torch would print so.
        if dist.is_initialized():
            rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
            with contextlib.suppress(AttributeError):  # a FileStore has no address
                socket.create_connection(address_of(store), timeout=1.0).close()
        else:
            # The group was destroyed, and its store forgotten.
            rank = int(os.environ["RANK"])
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=1.0).close()
            store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            store = part_of(part_of(store, "default_pg"), "0/")  # as torch names its own
        card = Card.of_absent(rank, ENDED_UNCALLED)
        part = _own_part(store, this_process.number(store, rank))
        part.compare_set(card_key(rank), "", card.encode().decode())

    c10d: Any = dist.distributed_c10d
    is_known = dist.is_initialized() or getattr(c10d, "_default_pg_init_method", "") == "env://"
    if is_known and this_process.process is None:
        Heart.aside(leave, STORE_SECONDS)
