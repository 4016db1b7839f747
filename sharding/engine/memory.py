"""Memory of gathered parameters: it comes and goes while its address and its tensors stay.

Autograd remembers views of gathered parameters from the forward to the backward, so the memory must
come back at the same storage. Two ways:

- `_Resized`: the storage's memory is freed and allocated again. Works everywhere; on accelerators
  the caching allocator makes it cheap. On CPU every round costs a page fault for each 4 KiB.
- `_Moved` (CPU on Linux): the address range is reserved once. Releasing moves its physical pages
  into a pool, fetching moves pages of the pool to where they are needed, both by `mremap`, which
  changes page tables and copies nothing. The pool keeps few pages, of all units together.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# Page tables move a whole directory (2 MiB) at a time when both ends are aligned to one.
_UNIT = 2 * 1024 * 1024
_ALIGNMENT = 64  # bytes; every tensor starts at a multiple of it
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_MAP_NORESERVE = 0x4000


class GatheredMemory(ABC):
    """Bytes that are there between `fetch` and `release`; what they hold after `fetch` is
    undefined.
    """

    whole: torch.Tensor
    """1-D, uint8, the same object for ever. Not to be read while the memory is not there."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What is taken now."""

    @abstractmethod
    def fetch(self) -> None:
        """Have the memory. Harmless when it is there."""

    @abstractmethod
    def release(self) -> None:
        """Give it away. Harmless when it is not there."""


class _Resized(GatheredMemory):
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._size = nbytes

    @property
    def nbytes(self) -> int:
        return self.whole.untyped_storage().nbytes()

    def fetch(self) -> None:
        storage = self.whole.untyped_storage()
        if not storage.nbytes():  # what is there would be moved
            storage.resize_(self._size)

    def release(self) -> None:
        self.whole.untyped_storage().resize_(0)


class PagePool:
    """Physical pages without a user, by the size of the runs that they come in."""

    def __init__(self, *, kept_max: int = 2) -> None:
        self._full: dict[int, list[int]] = {}  # by size: addresses that have pages
        self._empty: dict[int, list[int]] = {}  # by size: addresses that have none
        self._kept_max = kept_max
        self._ranges: list[tuple[int, int]] = []  # all that it has reserved: address, size
        weakref.finalize(self, _unmap, self._ranges)

    def move_in(self, address: int, size: int) -> None:
        """Give `address` pages of the pool; without any it gets fresh ones when it is written."""
        kept = self._full.get(size)
        if kept:
            source = kept.pop()
            _move(source, address, size)
            # Moving leaves the range reserved: the next pages that come out go there.
            self._empty.setdefault(size, []).append(source)

    def move_out(self, address: int, size: int) -> None:
        """Take the pages of `address`, or free them when enough are kept."""
        kept = self._full.setdefault(size, [])
        if len(kept) >= self._kept_max:
            _libc().madvise(address, size, _MADV_DONTNEED)
            return
        if empty := self._empty.get(size):
            target = empty.pop()
        else:
            target = _reserve(size)
            self._ranges.append((target, size))
        _move(address, target, size)
        kept.append(target)


class _Moved(GatheredMemory):
    def __init__(self, nbytes: int, pool: PagePool) -> None:
        self._size = -(-nbytes // _UNIT) * _UNIT
        self._address = _reserve(self._size)
        self._pool = pool
        memory = (ctypes.c_char * self._size).from_address(self._address)
        # Tensors keep this object alive, and with it the address range, also after we are gone.
        weakref.finalize(memory, _libc().munmap, self._address, self._size)
        self.whole = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        self._is_there = False
        self.fetch()

    @property
    def nbytes(self) -> int:
        return self._size if self._is_there else 0

    def fetch(self) -> None:
        if not self._is_there:
            self._pool.move_in(self._address, self._size)
            self._is_there = True

    def release(self) -> None:
        if self._is_there:
            self._pool.move_out(self._address, self._size)
            self._is_there = False


def gathered_memory(nbytes: int, device: torch.device, pool: PagePool) -> GatheredMemory:
    """Memory of that size, there already, by the way that is best on the device."""
    # Small ones are served from the heap, without system calls.
    if device.type == "cpu" and nbytes >= _UNIT and _can_move():
        return _Moved(nbytes, pool)
    return _Resized(nbytes, device)


class TensorSize(NamedTuple):
    """How many elements of which dtype a 1-D tensor has."""

    numel: int
    dtype: torch.dtype
    alone: bool = False
    """Whether it has a storage of its own, from whose start it goes."""


class TensorMemory:
    """1-D tensors in gathered memory, side by side but for those that are to be alone; the same
    objects as long as their sizes stay.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: object = None
        """The stream that the memory was taken on, and which it goes back to; None on CPU."""
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.generation = 0
        """Another number when the tensors are new ones."""
        self._sizes: tuple[TensorSize, ...] = ()
        self.storages: tuple[GatheredMemory, ...] = ()
        """What the tensors lie in."""
        self._alone: dict[int, GatheredMemory] = {}  # by identity of a tensor that is alone
        self._device = device

    @property
    def nbytes(self) -> int:
        """What is taken now."""
        return sum(memory.nbytes for memory in self.storages)

    def alone(self, tensor: torch.Tensor) -> GatheredMemory:
        """What a tensor lies in that is to be alone."""
        return self._alone[id(tensor)]

    def fetch(self, sizes: Sequence[TensorSize], pages: PagePool) -> tuple[torch.Tensor, ...]:
        """Have the memory; returns the tensors, which are new ones if the sizes have changed."""
        if self.tensors and tuple(sizes) == self._sizes:
            for memory in self.storages:
                memory.fetch()
            return self.tensors
        starts: list[int] = []
        together = 0
        for numel, dtype, alone in sizes:
            starts.append(0 if alone else -(-together // _ALIGNMENT) * _ALIGNMENT)
            together = together if alone else starts[-1] + numel * dtype.itemsize
        shared = gathered_memory(together, self._device, pages)
        memories = [shared]
        tensors = []
        self._alone = {}
        for start, (numel, dtype, alone) in zip(starts, sizes, strict=True):
            nbytes = numel * dtype.itemsize
            if alone:
                memories.append(gathered_memory(nbytes, self._device, pages))
            whole = memories[-1].whole if alone else shared.whole
            tensors.append(whole[start : start + nbytes].view(dtype))
            if alone:
                self._alone[id(tensors[-1])] = memories[-1]
        self.tensors, self.storages = tuple(tensors), tuple(memories)
        self._sizes = tuple(sizes)
        self.generation += 1
        return self.tensors

    def release(self) -> None:
        """Give the memory away. Harmless when it is not there."""
        for memory in self.storages:
            memory.release()

    def forget(self) -> None:
        """Make tensors anew at the next `fetch`."""
        self.tensors, self._sizes, self.storages = (), (), ()


# --- system calls --------------------------------------------------------------------------------


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _reserve(size: int) -> int:
    """An aligned address range without pages; reading it gives zeros."""
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = libc.mmap(None, size + _UNIT, protection, flags, -1, 0)
    _check(mapped)
    start = -(-mapped // _UNIT) * _UNIT
    if start > mapped:
        libc.munmap(mapped, start - mapped)
    tail = mapped + _UNIT - start
    if tail:
        libc.munmap(start + size, tail)
    libc.madvise(start, size, _MADV_HUGEPAGE)  # a hint: it may be refused
    return int(start)


def _unmap(ranges: Sequence[tuple[int, int]]) -> None:
    for address, size in ranges:
        _libc().munmap(address, size)


def _move(source: int, target: int, size: int) -> None:
    """Move the pages of one range to another, which loses its own; the first stays reserved."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    _check(_libc().mremap(source, size, size, flags, target))


def _check(address: int | None) -> None:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise MemoryError(f"no memory for gathered parameters: {os.strerror(code)}")


@functools.cache
def _can_move() -> bool:
    """Whether this system moves pages (Linux 5.7 and later)."""
    if not sys.platform.startswith("linux"):
        return False
    # Tried, not read from the kernel's version: a sandbox may refuse what its kernel could do.
    source, target = _reserve(_UNIT), _reserve(_UNIT)
    release: Callable[[int, int], int] = _libc().munmap
    try:
        ctypes.memset(source, 7, 1)
        _move(source, target, _UNIT)
        return ctypes.string_at(target, 1) == b"\x07" and ctypes.string_at(source, 1) == b"\x00"
    except MemoryError:
        return False
    finally:
        release(source, _UNIT)
        release(target, _UNIT)


class BufferPool:
    """Scratch memory, 1-D buffers, that is used again instead of being faulted in anew each step.

    Fresh memory costs a page fault for every 4 KiB on CPU, which on small steps is a good part of
    the time that a collective takes. Only buffers that no other object refers to come from here.
    On devices with a caching allocator of their own nothing is kept.
    """

    def __init__(self, *, kept_max: int = 4) -> None:
        self._free: list[torch.Tensor] = []
        self._kept_max = kept_max

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of exactly that many elements; what is in it is undefined."""
        nbytes = numel * dtype.itemsize
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        best, size = -1, 0
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes and (best < 0 or buffer.numel() < size):
                best, size = index, buffer.numel()
        if best < 0:
            return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype)
        return self._free.pop(best)[:nbytes].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `take`. It must not be used any more."""
        if buffer.device.type != "cpu":
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        self._free.append(whole)
        if len(self._free) > self._kept_max:
            # The smallest goes: it has the fewest pages to fault in again.
            self._free.sort(key=torch.Tensor.numel)
            del self._free[0]
