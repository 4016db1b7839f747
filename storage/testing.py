"""For tests: stores that fail or die, and the contract (`storage.contract`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
            # Between two entries another thread of this process may have died with the store.
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
        # As where the request arrived and its answer was lost.
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
