"""Host memory that is no tensor: aligned buffers, and addresses as bytes. Needs no torch."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate


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


def address_of(buffer: memoryview) -> int:
    """Where a writable, non-empty buffer starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def copy_bytes(target_address: int, source_address: int, nbytes: int) -> None:
    """Copy memory with the GIL released, so that a training loop keeps running."""
    ctypes.memmove(target_address, source_address, nbytes)


def scatter_bytes(targets: Iterable[int], source_address: int, sizes: Sequence[int]) -> None:
    """`copy_bytes` of consecutive parts of these sizes to addresses of their own: thousands, so the
    loop is the interpreter's.
    """
    sources = accumulate(sizes, initial=source_address)
    # A deque without room runs the map without a line of Python per call.
    deque(map(ctypes.memmove, targets, sources, sizes), maxlen=0)
