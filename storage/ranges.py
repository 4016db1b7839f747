"""Byte ranges, parts and buffers of host memory: arithmetic, aligned memory, addresses, copies."""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import add
from typing import TypeVar

import numpy as np

from storage.store import ByteRange, ObjectWriter, check_key


def part_count(nbytes: int, part_nbytes: int) -> int:
    """How many parts an object has. An empty object has none."""
    return -(-nbytes // part_nbytes)


def part_range(nbytes: int, part_nbytes: int, index: int) -> ByteRange:
    """Where part `index` lies in the object."""
    start = index * part_nbytes
    return ByteRange(start, min(start + part_nbytes, nbytes))


def as_bytes_view(buffer: memoryview) -> memoryview:
    """The same memory as a flat view of bytes. Raises ValueError when it is not contiguous."""
    if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    if not buffer.c_contiguous:
        raise ValueError("a buffer must be contiguous memory")
    if not buffer.nbytes:  # cast refuses shapes that hold a zero
        return memoryview(b"")
    return buffer.cast("B")


def flat_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers as flat byte views, empty ones left out."""
    return [as_bytes_view(buffer) for buffer in buffers if buffer.nbytes]


def take_front(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of `views`."""
    pieces = []
    for view in views:
        if not nbytes:
            break
        pieces.append(view[:nbytes])
        nbytes -= pieces[-1].nbytes
    return pieces


def drop_front(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `views` after their first `nbytes` bytes."""
    for i, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= view.nbytes
    return []


def copy_to(views: Sequence[memoryview], source: memoryview, nbytes: int) -> int:
    """Copy the first `nbytes` of `source` to the front of `views`; returns `nbytes`."""
    address = address_of(source) if nbytes else 0
    left = nbytes
    for view in views:
        count = min(view.nbytes, left)
        if count:
            # Without the GIL, which an assignment to a slice would hold.
            ctypes.memmove(address_of(view), address, count)
        address += count
        left -= count
    return nbytes


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed writable memory that starts at a page boundary. Freed with its last view."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def touch(buffer: memoryview) -> None:
    """Have the system put memory behind all of `buffer`, which zeroes it. Without the GIL."""
    if len(buffer):
        ctypes.memset(address_of(buffer), 0, len(buffer))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """`nbytes` of this process's memory from `address` on."""
    if nbytes == 0:
        # Tensors without elements have the address 0.
        return memoryview(bytearray())
    # Views of ctypes arrays have a format of their own that can neither be indexed nor assigned.
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Where the first byte of a view that is not empty lies in memory."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    # In an eighth of the time, and of writable memory alone.
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_bytes(target_address: int, source_address: int, nbytes: int) -> None:
    """Copy memory with the GIL released, so that a training loop keeps running."""
    ctypes.memmove(target_address, source_address, nbytes)


def gathered(addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
    """A copy of memory of these sizes at addresses of their own, one after the other: of thousands
    in a fifth of the time that a copy of each takes.
    """
    places: dict[int, Callable[[int], ctypes.Array[ctypes.c_char]]] = {}
    for size in set(sizes):
        places[size] = (ctypes.c_char * size).from_address
    return b"".join([places[size](one) for one, size in zip(addresses, sizes, strict=True)])


def scatter_bytes(targets: Sequence[int], source: memoryview, sizes: Sequence[int]) -> None:
    """Copy consecutive parts of `source` of these sizes to addresses of their own: thousands, in
    half the time that `copy_bytes` takes, which gives up the GIL for each.
    """
    low, start = min(targets), 0
    # What lies between them is not looked at: a slice takes less than a view of its own.
    memory = bytes_at(low, max(map(add, targets, sizes)) - low)
    for target, nbytes in zip(targets, sizes, strict=True):
        memory[target - low : target - low + nbytes] = source[start : start + nbytes]
        start += nbytes


class PartLedger:
    """Keeps an ObjectWriter's promise: every part has its exact size and is written once.

    Thread-safe. What it raises are mistakes of the caller, hence ValueError.
    """

    def __init__(self, key: str, nbytes: int, part_nbytes: int) -> None:
        if nbytes < 0 or part_nbytes <= 0:
            raise ValueError(f"{key}: nbytes={nbytes} and part_nbytes={part_nbytes} make no object")
        self.key = check_key(key)
        self.nbytes = nbytes
        self.part_nbytes = part_nbytes
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def claim(self, index: int, buffers: Sequence[memoryview]) -> ByteRange:
        """Take part `index` for writing; returns where it goes. `release` it when that failed."""
        if not 0 <= index < part_count(self.nbytes, self.part_nbytes):
            raise ValueError(
                f"{self.key}: part {index} of an object of "
                f"{part_count(self.nbytes, self.part_nbytes)} parts"
            )
        where = part_range(self.nbytes, self.part_nbytes, index)
        given = sum(buffer.nbytes for buffer in buffers)
        if given != where.nbytes:
            raise ValueError(f"{self.key}: part {index} has {where.nbytes} bytes, got {given}")
        with self._lock:
            if index in self._taken:
                raise ValueError(f"{self.key}: part {index} was written before")
            self._taken.add(index)
        return where

    def release(self, index: int) -> None:
        with self._lock:
            self._taken.discard(index)

    def shorten(self, nbytes: int) -> None:
        """The object has `nbytes` from now on: see `ObjectWriter.shorten`."""
        with self._lock:
            ends = [part_range(self.nbytes, self.part_nbytes, index).end for index in self._taken]
            if not 1 <= nbytes <= self.nbytes or max(ends, default=0) > nbytes:
                raise ValueError(
                    f"{self.key}: {self.nbytes} bytes cannot become {nbytes}, "
                    f"{max(ends, default=0)} are written"
                )
            self.nbytes = nbytes

    def check_complete(self) -> None:
        """Raises ValueError when a part is missing: the object must not be published then."""
        missing = part_count(self.nbytes, self.part_nbytes) - len(self._taken)
        if missing:
            raise ValueError(f"{self.key}: {missing} parts were never written; not published")


W = TypeVar("W", bound="LedgerWriter")


class LedgerWriter(ObjectWriter):
    """An object under construction whose parts a ledger keeps: published at the end of the block
    when it is complete, else discarded.
    """

    def __init__(self, ledger: PartLedger) -> None:
        self.part_nbytes = ledger.part_nbytes
        self._ledger = ledger

    def shorten(self, nbytes: int) -> None:
        self._ledger.shorten(nbytes)

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with ExitStack() as failed:
            failed.callback(self._discard)
            if kind is None:
                self._ledger.check_complete()
                self._publish()
                failed.pop_all()

    @abstractmethod
    def _publish(self) -> None:
        """All parts are written: make the object visible. `_discard` follows a failure."""

    def _discard(self) -> None:
        """Remove what was written. Raises nothing: what went wrong before must not be hidden."""
