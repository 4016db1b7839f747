"""For tests: stores that fail, die, count or lose power, and the contract (`storage.contract`)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from storage.contract import StoreContract as StoreContract
from storage.contract import check_store as check_store
from storage.contract import expect as expect
from storage.contract import write_object as write_object
from storage.errors import (
    OutcomeUnknownError,
    StorageError,
)
from storage.store import ByteRange, ObjectInfo, ObjectWriter, Store
from storage.wrap import WrappedStore

T = TypeVar("T")


class Killed(BaseException):
    """The process is dead, as by SIGKILL: no cleanup runs, nothing else happens."""


class FaultPlan:
    """Which operation goes wrong, and how. Thread-safe: the stores of all ranks may share one.

    `number` is that of the operation, from 1; 0 means none, for a dry run that fills `operations`
    with the name and key of each. `kill` raises Killed instead of `error`, and the store that
    raised it is dead. `mode="after"` lets the operation happen before it fails; writes that publish
    then raise OutcomeUnknownError. With `forever`, all operations from that one on go wrong.
    """

    def __init__(
        self,
        number: int,
        *,
        kill: bool = False,
        mode: Literal["before", "after"] = "before",
        forever: bool = False,
        error: type[StorageError] = StorageError,
    ) -> None:
        self.number = number
        self.kill = kill
        self.mode = mode
        self.forever = forever
        self.error = error
        self.operations: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def strikes(self, operation: str, key: str) -> bool:
        with self._lock:
            self.operations.append((operation, key))
            count = len(self.operations)
        return self.number > 0 and (count == self.number or (self.forever and count > self.number))

    @property
    def happened(self) -> bool:
        return 0 < self.number <= len(self.operations)


class FaultyStore(WrappedStore):
    """`inner`, until `plan` strikes. Once killed, it refuses everything with Killed.

    Operations are: get, get_into (direct or not), create, write_part, publish (the end of the block
    of `create`), put_if_absent, list, info, delete, sync, abort_unfinished.
    """

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self.dead = False

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self.perform("get", key, lambda: self.inner.get(key, byte_range))

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.perform("get_into", key, lambda: self.inner.get_into(key, start, buffers))

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.perform("get_into", key, lambda: self.inner.get_direct_into(key, start, buffers))

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> AbstractContextManager[ObjectWriter]:
        context = self.inner.create(
            key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        )
        return _FaultyWriter(self, key, context, part_nbytes)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.perform("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        entries = self.perform("list", prefix, lambda: self.inner.list(prefix, after=after))
        for entry in entries:
            self.check_alive("list", prefix)
            yield entry

    def info(self, key: str) -> ObjectInfo:
        return self.perform("info", key, lambda: self.inner.info(key))

    def delete(self, key: str) -> None:
        self.perform("delete", key, lambda: self.inner.delete(key))

    def sync(self, keys: Iterable[str]) -> None:
        wanted = tuple(keys)
        self.perform("sync", " ".join(wanted), lambda: self.inner.sync(wanted))

    def abort_unfinished(self, prefix: str) -> int:
        return self.perform("abort_unfinished", prefix, lambda: self.inner.abort_unfinished(prefix))

    def perform(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object] = lambda: None,
    ) -> T:
        """Run one operation under the plan; `discard` is the cleanup of one that fails alive."""
        self.check_alive(operation, key)
        if not self.plan.strikes(operation, key):
            return apply()
        if self.plan.mode == "after":
            apply()
        elif not self.plan.kill:
            discard()
        what = f"injected into {operation} {key}, {self.plan.mode} it happened"
        if self.plan.kill:
            self.dead = True
            raise Killed(what)
        if self.plan.mode == "after" and operation in ("put_if_absent", "publish"):
            raise OutcomeUnknownError(what)
        raise self.plan.error(what)

    def check_alive(self, operation: str, key: str) -> None:
        if self.dead:
            raise Killed(f"{operation} {key}: this process was killed before")


class _FaultyWriter(ObjectWriter):
    def __init__(
        self,
        store: FaultyStore,
        key: str,
        context: AbstractContextManager[ObjectWriter],
        part_nbytes: int,
    ) -> None:
        self.part_nbytes = part_nbytes
        self._store = store
        self._key = key
        self._context = context
        self._opened = False

    def __enter__(self) -> _FaultyWriter:
        try:
            self._store.perform("create", self._key, self._open)
        except StorageError:
            if self._opened:  # failed after it happened: a process that lives cleans up
                self._context.__exit__(StorageError, StorageError("injected"), None)
            raise
        return self

    def _open(self) -> None:
        self._writer = self._context.__enter__()
        self._opened = True

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._store.perform(
            "write_part", self._key, lambda: self._writer.write_part(index, buffers)
        )

    def shorten(self, nbytes: int) -> None:
        self._writer.shorten(nbytes)

    def __exit__(self, *raised: Any) -> None:
        if self._store.dead:
            return  # a dead process cleans nothing up
        if raised[0] is not None:
            self._context.__exit__(*raised)
            return
        self._store.perform(
            "publish",
            self._key,
            lambda: self._context.__exit__(None, None, None),
            lambda: self._context.__exit__(StorageError, StorageError("injected"), None),
        )


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
