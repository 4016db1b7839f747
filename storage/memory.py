"""Objects in this process's memory, for tests, notebooks and examples; and a writer that collects
one there, for stores that take it whole.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from storage.errors import KeyExistsError, KeyNotFoundError
from storage.forks import ForkSafeLock
from storage.ranges import LedgerWriter, PartLedger, copy_to, flat_views
from storage.store import (
    ByteRange,
    ExclusiveCreate,
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    short_read,
)


class MemoryBucket:
    """The objects that several MemoryStores share. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes | bytearray, float]] = {}
        self._sorted_keys: list[str] | None = []
        self._lock = ForkSafeLock()

    def find(self, key: str) -> tuple[bytes | bytearray, float] | None:
        return self._objects.get(key)  # objects never change: no lock is needed

    def add(self, key: str, data: bytes | bytearray) -> bool:
        """False, and nothing changed, when `key` exists already."""
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (data, time.time())
            if self._sorted_keys and self._sorted_keys[-1] < key:
                self._sorted_keys.append(key)  # a log grows at its end: no sorting again
            else:
                self._sorted_keys = None
            return True

    def remove(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(key, None) is not None:
                self._sorted_keys = None

    def keys_from(self, prefix: str, after: str) -> list[str]:
        """The keys at this moment, ascending."""
        with self._lock:
            # Sorted once for many listings: tests look at a log again and again.
            if self._sorted_keys is None:
                self._sorted_keys = sorted(self._objects)
            keys = self._sorted_keys
            first = max(bisect_left(keys, prefix), bisect_right(keys, after))
            stop = first
            while stop < len(keys) and keys[stop].startswith(prefix):
                stop += 1
            return keys[first:stop]


class MemoryStore(Store):
    """A store that lives as long as its bucket. Two stores over one bucket see the same objects."""

    exclusive_create = ExclusiveCreate.ATOMIC

    def __init__(self, bucket: MemoryBucket | None = None, *, name: str = "unnamed") -> None:
        self._bucket = bucket if bucket is not None else MemoryBucket()
        self.url = f"memory://{name}"

    @property
    def place(self) -> str:
        return f"memory {id(self._bucket)}"

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        data, _ = self._find(key, "read")
        if byte_range is None:
            return bytes(data)
        self._check_length(key, len(data), byte_range)
        return bytes(memoryview(data)[byte_range.start : byte_range.end])

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        data, _ = self._find(key, "read")
        views = flat_views(buffers)
        wanted = ByteRange(start, start + sum(view.nbytes for view in views))
        self._check_length(key, len(data), wanted)
        copy_to(views, memoryview(data)[start:], wanted.nbytes)

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> BufferedWriter:
        return BufferedWriter(key, nbytes, part_nbytes=part_nbytes, publish=self._publish)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._publish(check_key(key), bytes(data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for key in self._bucket.keys_from(check_prefix(prefix), after):
            stored = self._bucket.find(key)
            if stored is not None:
                yield ObjectInfo(key, len(stored[0]), stored[1])

    def info(self, key: str) -> ObjectInfo:
        data, modified_unix = self._find(key, "info")
        return ObjectInfo(key, len(data), modified_unix)

    def delete(self, key: str) -> None:
        self._bucket.remove(check_key(key))

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing of this store survives a power failure; there is nothing to wait for."""

    def abort_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        return 0

    def close(self) -> None:
        """The bucket stays: other stores may share it."""

    def _find(self, key: str, operation: str) -> tuple[bytes | bytearray, float]:
        stored = self._bucket.find(check_key(key))
        if stored is None:
            raise KeyNotFoundError(f"{operation} {key}: no such object in {self.url}")
        return stored

    def _check_length(self, key: str, nbytes: int, wanted: ByteRange) -> None:
        if wanted.start < 0 or wanted.end < wanted.start:
            raise ValueError(f"{key}: {wanted} is not a range")
        if wanted.end > nbytes:
            raise short_read(self.url, key, wanted, nbytes)

    def _publish(self, key: str, data: bytes | bytearray) -> None:
        if not self._bucket.add(key, data):
            raise KeyExistsError(f"create {key}: exists already in {self.url}")


class BufferedWriter(LedgerWriter):
    """Calls `publish(key, data)` at the end of its `with` block, if that ends without an exception.

    What `Store.create` returns where the medium takes an object in one piece. Keeps the promises of
    ObjectWriter: it refuses parts of a wrong size or twice, and objects with a part missing
    (ValueError). Needs the memory of the whole object, in bytes `nbytes`.
    """

    def __init__(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        publish: Callable[[str, bytearray], object],
    ) -> None:
        super().__init__(PartLedger(key, nbytes, part_nbytes))
        self._take = publish
        self._data = bytearray(nbytes)

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        # No lock: parts are apart, and each is claimed once.
        position = self._ledger.claim(index, buffers).start
        target = memoryview(self._data)
        for view in flat_views(buffers):
            target[position : position + view.nbytes] = view
            position += view.nbytes

    def shorten(self, nbytes: int) -> None:
        super().shorten(nbytes)
        del self._data[nbytes:]

    def _publish(self) -> None:
        self._take(self._ledger.key, self._data)
