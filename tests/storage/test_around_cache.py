"""Reads around the page cache: the same bytes, none of them left in memory, wherever they are.

Method: ranges drawn with any offset, length and buffers; filesystems that refuse, by planted
errors; what is in the cache afterwards, as the kernel counts it. Reads that come in pieces.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage import ByteRange, KeyNotFoundError, ShortReadError, StorageError, file_io
from storage.file_io import cached_nbytes
from storage.local import LocalStore
from storage.testing import write_object

MiB = 1 << 20
pytestmark = pytest.mark.syncs  # what is not on the disk stays in the cache
NBYTES = 2 * MiB + 1234  # the last block is not whole


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(str(tmp_path))
    yield store
    store.close()


def _written(store: LocalStore) -> bytes:
    data = random.Random(1).randbytes(NBYTES)
    write_object(store, "a", data, part_nbytes=MiB)
    store.sync(["a"])  # pages that are not on the disk cannot be dropped
    return data


def _cached(store: LocalStore, byte_range: ByteRange) -> int:
    fd = os.open(store._path("a"), os.O_RDONLY)
    try:
        return cached_nbytes(fd, byte_range.start, byte_range.nbytes)
    finally:
        os.close(fd)


def _dropped(store: LocalStore) -> None:
    """Take the object out of the cache, or skip the test where it cannot be anywhere else."""
    fd = os.open(store._path("a"), os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(os.open(store._path("a"), os.O_RDONLY | os.O_DIRECT))
        if cached_nbytes(fd, 0, NBYTES):
            pytest.skip("this filesystem keeps its files in memory")
    except OSError as error:
        pytest.skip(f"this filesystem has no direct reads: {error}")
    finally:
        os.close(fd)


def _drawn_views(random_: random.Random, target: bytearray) -> list[memoryview]:
    views, position = [], 0
    while position < len(target):
        count = random_.choice([1, 7, 4096, 10_000, len(target)])
        views.append(memoryview(target)[position : position + count])
        position += count
    return views


@pytest.mark.parametrize("refused_by", ["nobody", "open", "preadv"])
def test_any_range_into_any_buffers_is_the_same_bytes(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    data = _written(store)
    refusals = _refuse(monkeypatch, refused_by)
    random_ = random.Random(2)
    for _ in range(60):
        start = random_.choice([0, 1, 4095, 4096, 8192, NBYTES - 5000, random_.randrange(NBYTES)])
        nbytes = min(NBYTES - start, random_.choice([1, 4096, 5000, MiB, NBYTES]))
        target = bytearray(nbytes)
        store.get_direct_into("a", start, _drawn_views(random_, target))
        assert target == data[start : start + nbytes]
    # Asked once for a file, and not again for every read.
    assert len(refusals) == (refused_by != "nobody")


def _refuse(monkeypatch: pytest.MonkeyPatch, refused_by: str) -> list[int]:
    """EINVAL from now on for `open` with O_DIRECT, or for reads of what was opened so."""
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()
    refusals: list[int] = []

    def refuse() -> OSError:
        refusals.append(1)
        return OSError(errno.EINVAL, "planted")

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT and refused_by == "open":
            raise refuse()
        fd = real_open(path, flags, *rest)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def preadv(fd: int, *rest: Any) -> int:
        if fd in direct and refused_by == "preadv":
            raise refuse()
        return real_preadv(fd, *rest)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", preadv)
    return refusals


def test_a_direct_read_that_comes_in_pieces_is_continued(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, real = _written(store), os.preadv
    reads: list[int] = []

    def in_pieces(fd: int, views: Any, start: int) -> int:
        reads.append(start)
        return real(fd, [views[0][: 64 << 10]], start)

    monkeypatch.setattr(os, "preadv", in_pieces)
    target = bytearray(MiB)
    store.get_direct_into("a", 4096, [memoryview(target)])
    assert target == data[4096 : 4096 + MiB]
    assert len(reads) == 16


def test_errors_are_those_of_other_reads(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _written(store)
    for start in (NBYTES - 10, NBYTES, NBYTES + 5000):
        with pytest.raises(ShortReadError):
            store.get_direct_into("a", start, [memoryview(bytearray(11))])
    with pytest.raises(KeyNotFoundError):
        store.is_cold("b", ByteRange(0, 10))
    os.truncate(store._path("a"), MiB)  # behind the back of the store, which has it open
    with pytest.raises(ShortReadError):
        store.get_direct_into("a", 0, [memoryview(bytearray(NBYTES))])

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="the disk is broken"):
        store.get_direct_into("a", 0, [memoryview(bytearray(8192))])


def test_a_file_on_the_disk_is_cold_and_a_read_around_the_cache_leaves_it_so(
    store: LocalStore,
) -> None:
    data = _written(store)
    whole, first = ByteRange(0, NBYTES), ByteRange(0, MiB)
    _dropped(store)
    assert store.is_cold("a", whole) and store.is_cold("a", first)
    target = bytearray(NBYTES)
    store.get_direct_into("a", 0, [memoryview(target)])
    assert target == data
    assert _cached(store, whole) == 0
    store.get_into("a", 0, [memoryview(target)])
    assert not store.is_cold("a", whole)


def test_what_was_written_through_the_cache_is_not_cold(store: LocalStore) -> None:
    data = random.Random(1).randbytes(NBYTES)
    with store.create("a", NBYTES, part_nbytes=NBYTES, durable=False) as writer:
        writer.write_part(0, [memoryview(data)])  # in memory, not on the disk yet
    assert not store.is_cold("a", ByteRange(0, NBYTES))
    assert not store.is_cold("a", ByteRange(5, 5))
    target = bytearray(NBYTES)
    store.get_direct_into("a", 0, [memoryview(target)])
    assert target == data


@pytest.mark.parametrize("cached_pages", [0, 127, 129, 256])
def test_a_range_is_cold_when_most_of_it_is_not_in_memory(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, cached_pages: int
) -> None:
    _written(store)
    monkeypatch.setattr(file_io, "_cachestat", lambda *_: cached_pages)
    assert store.is_cold("a", ByteRange(0, MiB)) == (cached_pages < 128)


def test_without_cachestat_the_pages_are_counted_and_without_both_nothing_is_cold(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "planted")

    _written(store)
    ranges = [ByteRange(0, NBYTES), ByteRange(5000, 5001), ByteRange(4095, 4097)]
    monkeypatch.setattr(file_io, "_cachestat", refused)
    expected = [513 * 4096, 4096, 8192]
    assert [_cached(store, one) for one in ranges] == expected
    _dropped(store)
    assert [_cached(store, one) for one in ranges] == [0, 0, 0]
    monkeypatch.setattr(file_io, "_mincore", refused)
    assert [_cached(store, one) for one in ranges] == [one.nbytes for one in ranges]


def test_memory_is_there_while_something_is_read_and_is_shared_with_a_forked_child(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three reads meet in the kernel; then one by one. Each has memory of its own, in turn."""
    _written(store)
    real, addresses, together = os.preadv, set(), threading.Barrier(3)
    meet = True

    def meeting(fd: int, views: Any, start: int) -> int:
        if meet:
            together.wait(60)
        address = ctypes.addressof(ctypes.c_char.from_buffer(views[0]))
        assert address % 4096 == 0
        assert b"s" in _mapping(address)
        addresses.add(address)
        return real(fd, views, start)

    monkeypatch.setattr(os, "preadv", meeting)

    def read(index: int) -> None:
        store.get_direct_into("a", index * 8192, [memoryview(bytearray(8192))])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
    assert len(addresses) == 3
    assert not store._around_cache._free
    meet = False
    read(0)
    assert not store._around_cache._free


def _mapping(address: int) -> bytes:
    """The permissions of a mapping of this process: `rw-s` where children see the same bytes."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        first, last = (int(one, 16) for one in line.split(b" ")[0].split(b"-"))
        if first <= address < last:
            return line.split(b" ")[1]
    raise AssertionError("not mapped")


def test_closing_a_file_closes_both_descriptors(store: LocalStore) -> None:
    _written(store)
    before = len(os.listdir("/proc/self/fd"))
    store.get_direct_into("a", 0, [memoryview(bytearray(mmap.PAGESIZE))])
    assert len(os.listdir("/proc/self/fd")) in (before + 1, before + 2)  # 1 where refused
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
