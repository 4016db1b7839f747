"""Stores for tests: one that counts, and one that loses power.

What only our own tests need; those that others test their stores with are in `storage.testing`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from storage.store import ByteRange, ObjectInfo, ObjectWriter, Store
from storage.wrap import WrappedStore


@dataclass(frozen=True)
class StoreStats:
    """Requests and bytes by operation, named as in FaultyStore. A `write_part` is a request."""

    requests: Mapping[str, int]
    nbytes: Mapping[str, int]

    @property
    def requests_total(self) -> int:
        return sum(self.requests.values())

    @property
    def bytes_read(self) -> int:
        return self.nbytes.get("get", 0) + self.nbytes.get("get_into", 0)

    @property
    def bytes_written(self) -> int:
        return self.nbytes.get("write_part", 0) + self.nbytes.get("put_if_absent", 0)


class CountingStore(WrappedStore):
    """Counts what succeeded and what failed alike. Thread-safe."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._requests: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def stats(self) -> StoreStats:
        """The counts at this moment."""
        with self._lock:
            return StoreStats(dict(self._requests), dict(self._nbytes))

    def reset(self) -> None:
        with self._lock:
            self._requests.clear()
            self._nbytes.clear()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.count("get", 0)
        data = self.inner.get(key, byte_range)
        self.count("get", len(data), requests=0)
        return data

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.count("get_into", sum(buffer.nbytes for buffer in buffers))
        self.inner.get_into(key, start, buffers)

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.count("get_into", sum(buffer.nbytes for buffer in buffers))
        self.inner.get_direct_into(key, start, buffers)

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> AbstractContextManager[ObjectWriter]:
        self.count("create", 0)
        context = self.inner.create(
            key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        )
        return _CountingWriter(self, context, part_nbytes)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.count("put_if_absent", len(data))
        self.inner.put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.count("list", 0)
        return self.inner.list(prefix, after=after)

    def info(self, key: str) -> ObjectInfo:
        self.count("info", 0)
        return self.inner.info(key)

    def delete(self, key: str) -> None:
        self.count("delete", 0)
        self.inner.delete(key)

    def sync(self, keys: Iterable[str]) -> None:
        self.count("sync", 0)
        self.inner.sync(keys)

    def abort_unfinished(self, prefix: str) -> int:
        self.count("abort_unfinished", 0)
        return self.inner.abort_unfinished(prefix)

    def count(self, operation: str, nbytes: int, *, requests: int = 1) -> None:
        with self._lock:
            self._requests[operation] += requests
            self._nbytes[operation] += nbytes


class _CountingWriter(ObjectWriter):
    def __init__(
        self,
        store: CountingStore,
        context: AbstractContextManager[ObjectWriter],
        part_nbytes: int,
    ) -> None:
        self.part_nbytes = part_nbytes
        self._store = store
        self._context = context

    def __enter__(self) -> _CountingWriter:
        self._writer = self._context.__enter__()
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._store.count("write_part", sum(buffer.nbytes for buffer in buffers))
        self._writer.write_part(index, buffers)

    def shorten(self, nbytes: int) -> None:
        self._writer.shorten(nbytes)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._context.__exit__(*raised)


class PowerLossStore(WrappedStore):
    """Forgets at `lose_power()` what was neither created durably nor synced, as a disk would.

    One per machine of a test: all ranks on it share the object. Thread-safe.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._volatile: set[str] = set()

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> AbstractContextManager[ObjectWriter]:
        if not durable:
            self._volatile.add(key)
        return self.inner.create(
            key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        )

    def sync(self, keys: Iterable[str]) -> None:
        wanted = tuple(keys)
        self.inner.sync(wanted)
        self._volatile.difference_update(wanted)

    def lose_power(self) -> tuple[str, ...]:
        """The keys that are lost now."""
        lost = tuple(sorted(self._volatile))
        for key in lost:
            self.inner.delete(key)
        self._volatile.clear()
        return lost
