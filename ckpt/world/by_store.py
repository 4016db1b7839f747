"""Messages by way of the rendezvous store, where ranks cannot connect to each other.

A rank that cannot reach its parent calls it through the store: what either side sends is a row of
keys, which the other reads and deletes, as the store says when one comes. It is slow, and all of it
passes the store's host. Heartbeats stand for what the kernel tells of a connection: a side that is
silent for `SILENT_SECONDS` has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from ckpt.world.base import MiB

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
BEAT_SECONDS = 10.0
SILENT_SECONDS = 30.0
FLAG = "by the store"  # of a world: some rank of it could not connect
Begin: TypeAlias = Callable[[Callable[[], object]], object]  # in a thread that nobody waits for
_BEAT, _DATA, _END = b"beat", b"data", b"end!"


def call(begin: Begin, store: Any, parent: int, why: Exception) -> socket.socket:
    """A connection to the process of a rank of torch.distributed, which takes `Calls`. Raises
    OSError when it does not within `CALL_SECONDS`.
    """
    try:
        number = store.add(f"{_calls(parent)}/count", 1)
        name = f"{_calls(parent)}/{number}"
        store.set(name, b"")
        # A client that waits holds up all other threads that use it.
        taken = store.clone()
        taken.wait([f"{name}/taken"], timedelta(seconds=CALL_SECONDS))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        text = f"{why}; nor by the rendezvous store ({type(error).__name__}: {error})"
        raise type(why)(text) if isinstance(why, OSError) else OSError(text) from error
    logger.warning(
        "this process cannot connect to that of rank %d (%s): they talk by the rendezvous store, "
        "which is slow. Let ranks connect to each other, as at ports of SHARDPOINT_PORTS",
        parent,
        why,
    )
    return _socket(begin, store, name, "up", "down")


class Calls:
    """Calls of ranks that want to connect to this one, in order."""

    def __init__(self, begin: Begin, rank: int) -> None:
        self._begin = begin
        self._rank = rank
        self._number = 1

    def next(self, store: Any) -> socket.socket | None:
        """The connection of the next call; None where there is none now."""
        name = f"{_calls(self._rank)}/{self._number}"
        if not store.check([name]):
            return None
        store.delete_key(name)
        self._number += 1
        # Before the answer: what the caller sends at once must find its reader.
        sock = _socket(self._begin, store, name, "down", "up")
        store.set(f"{name}/taken", b"")
        return sock


def _calls(rank: int) -> str:
    return f"shardpoint/calls/{rank}"


def _wait(store: Any, key: str, limit: timedelta) -> bytes:
    """What comes under a key, which is deleted. Raises RuntimeError where nothing comes."""
    store.wait([key], limit)
    data: bytes = store.get(key)
    store.delete_key(key)
    return data


def _socket(begin: Begin, store: Any, name: str, mine: str, theirs: str) -> socket.socket:
    """One end of a connection whose bytes go through the store, under `name`."""
    # A pair of sockets, so that the heart serves it like any other connection. A client for each
    # direction: the one that receives waits nearly always.
    end, inner = socket.socketpair()
    incoming, outgoing = store.clone(), store.clone()
    inner.settimeout(BEAT_SECONDS)

    def send() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            for number in itertools.count():
                kind, data = _BEAT, b""
                with contextlib.suppress(TimeoutError):
                    data = inner.recv(MiB)
                    kind = _DATA if data else _END
                outgoing.set(f"{name}/{mine}/{number}", kind + data)
                if kind == _END:
                    return

    def receive() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            for number in itertools.count():
                data = _wait(
                    incoming, f"{name}/{theirs}/{number}", timedelta(seconds=SILENT_SECONDS)
                )
                if data.startswith(_END):
                    break
                inner.sendall(data[len(_DATA) :])
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_RDWR)

    begin(send)
    begin(receive)
    return end


class StoreGroup:
    """Sends and receives tensors as a gloo group does, through a part of the store."""

    def __init__(self, store: Any, rank: int, timeout: timedelta) -> None:
        self._incoming, self._outgoing = store.clone(), store.clone()
        self._rank = rank
        self._timeout = timeout
        self._numbers: dict[tuple[int, ...], Iterator[int]] = {}
        self._lock = threading.Lock()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Send to `peer`, at once. Raises RuntimeError when the store has ended."""
        for one in tensors:
            for part in torch.split(one.view(-1), MiB):
                self._outgoing.set(self._key(self._rank, peer, tag), part.numpy().tobytes())
        return SimpleNamespace(wait=lambda: None)  # as a `dist.Work`

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Receive from `peer`, once somebody waits for it."""
        parts = [part for one in tensors for part in torch.split(one.view(-1), MiB)]
        keys = [self._key(peer, self._rank, tag) for _ in parts]

        def fill() -> None:
            for part, key in zip(parts, keys, strict=True):
                data = bytearray(_wait(self._incoming, key, self._timeout))
                part.copy_(torch.frombuffer(data, dtype=torch.uint8))

        return SimpleNamespace(wait=fill)

    def _key(self, *way: int) -> str:
        """Of the next message on the way from a rank to another, with a tag."""
        with self._lock:
            number = next(self._numbers.setdefault(way, itertools.count()))
        return "/".join(map(str, (*way, number)))
