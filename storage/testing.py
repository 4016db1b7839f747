"""For tests: the contract that every back-end keeps, and stores that fail or die.

To test a back-end, inherit from `StoreContract` in a test module and add a fixture `store`, or call
`check_store` where there is no pytest.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

from storage.errors import (
    InvalidKeyError,
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    TooLargeError,
)
from storage.store import ByteRange, ExclusiveCreate, ObjectInfo, ObjectWriter, Store
from storage.wrap import WrappedStore

T = TypeVar("T")


# Stores that fail --------------------------------------------------------------------------------


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
        self, key: str, nbytes: int, *, part_nbytes: int, **how: bool
    ) -> AbstractContextManager[ObjectWriter]:
        context = self.inner.create(key, nbytes, part_nbytes=part_nbytes, **how)
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


# The contract ------------------------------------------------------------------------------------


class expect:
    """The block must raise `error`. Not pytest's, so that this module needs no pytest."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            raise AssertionError(f"expected {self._error.__name__}, nothing was raised")
        return issubclass(kind, self._error)


def write_object(
    store: Store, key: str, data: bytes, *, part_nbytes: int, direct: bool = False
) -> None:
    """`data` through `create`, part by part, each from one buffer."""
    with store.create(key, len(data), part_nbytes=part_nbytes, direct=direct) as writer:
        for index, start in enumerate(range(0, len(data), part_nbytes)):
            writer.write_part(index, [memoryview(data)[start : start + part_nbytes]])


class StoreContract:
    """What every store promises, as tests. Inherit, and provide a fixture `store` that is empty."""

    part_nbytes = 4096  # as small as the back-end allows
    create_refuses_existing = True  # some servers cannot, for objects of several parts
    lists_nbytes = True  # encoded ones list what objects take in the storage

    def sample(self, nbytes: int) -> bytes:
        return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]

    def test_get_returns_what_was_put(self, store: Store) -> None:
        store.put_if_absent("a/b", b"hello")
        assert store.get("a/b") == b"hello"
        assert store.info("a/b")[:2] == ("a/b", 5)

    def test_get_returns_exactly_the_range(self, store: Store) -> None:
        store.put_if_absent("a", b"0123456789")
        for start, end in ((0, 1), (3, 7), (9, 10), (0, 10)):
            assert store.get("a", ByteRange(start, end)) == b"0123456789"[start:end]
        assert store.get("a", ByteRange(4, 4)) == b""

    def test_get_bounded_reads_nothing_of_a_larger_object(self, store: Store) -> None:
        store.put_if_absent("a", b"0123456789")
        store.put_if_absent("empty", b"")
        assert store.get_bounded("a", 10) == store.get_bounded("a", 1000) == b"0123456789"
        assert store.get_bounded("empty", 0) == b""
        for nbytes_max in (0, 9):
            with expect(TooLargeError):
                store.get_bounded("a", nbytes_max)
        with expect(KeyNotFoundError):
            store.get_bounded("no/such", 10)

    def test_get_into_fills_many_buffers_of_any_format(self, store: Store) -> None:
        """More buffers than one system call takes, empty ones and doubles among them."""
        data = self.sample(5000)
        store.put_if_absent("a", data)
        # Linux takes 1,024 buffers in one readv; a load may fill more rows of a shard.
        assert store.is_cold("a", ByteRange(7, 3071)) in (False, True)
        for get_into in (store.get_into, store.get_direct_into):
            target, doubles = bytearray(3000), array.array("d", [0.0] * 8)
            buffers = [memoryview(target)[i : i + 2] for i in range(0, 3000, 2)]
            views = [*buffers, memoryview(b"")[:0], memoryview(doubles)]
            get_into("a", 7, views)
            assert bytes(target) + doubles.tobytes() == data[7:3071]

    def test_reading_past_the_end_is_a_short_read(self, store: Store) -> None:
        store.put_if_absent("a", b"0123456789")
        for start, end in ((5, 11), (10, 11), (50, 60)):
            with expect(ShortReadError):
                store.get("a", ByteRange(start, end))
            with expect(ShortReadError):
                store.get_into("a", start, [memoryview(bytearray(end - start))])

    def test_a_missing_object_is_named(self, store: Store) -> None:
        for read in (
            lambda: store.get("no/such"),
            lambda: store.get("no/such", ByteRange(0, 4)),
            lambda: store.get_into("no/such", 0, [memoryview(bytearray(4))]),
            lambda: store.info("no/such"),
        ):
            try:
                read()
            except KeyNotFoundError as error:
                assert "no/such" in str(error)
            else:
                raise AssertionError("expected KeyNotFoundError")

    def test_put_if_absent_never_replaces(self, store: Store) -> None:
        store.put_if_absent("a", b"first")
        with expect(KeyExistsError):
            store.put_if_absent("a", b"second")
        assert store.get("a") == b"first"

    def test_exactly_one_of_32_racing_writers_wins(self, store: Store) -> None:
        # Commits rest on it: two jobs that both believe to have written a record lose a checkpoint.
        if store.exclusive_create is ExclusiveCreate.NONE:
            return

        def put(i: int) -> bool:
            try:
                store.put_if_absent("log/1", b"writer %d" % i)
            except KeyExistsError:
                return False
            return True

        with ThreadPoolExecutor(32) as pool:
            won = list(pool.map(put, range(32)))
        assert won.count(True) == 1
        assert store.get("log/1") == b"writer %d" % won.index(True)

    def test_empty_objects_exist(self, store: Store) -> None:
        store.put_if_absent("a", b"")
        with store.create("b", 0, part_nbytes=self.part_nbytes):
            pass
        assert store.get("a") == store.get("b") == b""
        assert [entry.key for entry in store.list("")] == ["a", "b"]
        for key in ("a", "b"):
            assert store.info(key)[:2] == (key, 0)

    def test_parts_may_come_in_any_order_from_any_buffers(self, store: Store) -> None:
        data = self.sample(self.part_nbytes * 2 + 10)
        view = memoryview(data)
        with store.create("a", len(data), part_nbytes=self.part_nbytes) as writer:
            assert writer.part_nbytes == self.part_nbytes
            writer.write_part(2, [view[2 * self.part_nbytes :]])
            second = view[self.part_nbytes : 2 * self.part_nbytes]
            writer.write_part(1, [second[:1], second[1:1], second[1:1000], second[1000:]])
            writer.write_part(0, [view[: self.part_nbytes]])
        assert store.get("a") == data

    def test_parts_may_come_from_many_threads(self, store: Store) -> None:
        data = self.sample(self.part_nbytes * 4 + 1)
        view, size = memoryview(data), self.part_nbytes
        with (
            store.create("a", len(data), part_nbytes=size) as writer,
            ThreadPoolExecutor(5) as pool,
        ):
            for done in [
                pool.submit(writer.write_part, i, [view[i * size : (i + 1) * size]])
                for i in range(5)
            ]:
                done.result()
        assert store.get("a") == data

    def test_buffers_may_change_when_a_part_was_written(self, store: Store) -> None:
        """One buffer for all parts, filled anew at once."""
        size = self.part_nbytes
        buffer = bytearray(size)
        with store.create("a", 3 * size + 9, part_nbytes=size) as writer:
            for index in range(4):
                buffer[:] = bytes([65 + index]) * size
                part = memoryview(buffer)[: size if index < 3 else 9]
                writer.write_part(index, [part[: size // 2], part[size // 2 :]])
            buffer[:] = bytes(size)
        assert store.get("a") == b"A" * size + b"B" * size + b"C" * size + b"D" * 9

    def test_the_direct_hint_changes_nothing_in_the_object(self, store: Store) -> None:
        data = self.sample(self.part_nbytes * 2 + 10)
        write_object(store, "a", data, part_nbytes=self.part_nbytes, direct=True)
        assert store.get("a") == data

    def test_an_object_under_construction_is_invisible(self, store: Store) -> None:
        data = memoryview(self.sample(self.part_nbytes + 5))
        # All parts are there, and still nothing is to be seen: the end of the block publishes.
        with store.create("dir/a", len(data), part_nbytes=self.part_nbytes) as writer:
            writer.write_part(0, [data[: self.part_nbytes]])
            writer.write_part(1, [data[self.part_nbytes :]])
            assert list(store.list("")) == []
            with expect(KeyNotFoundError):
                store.get("dir/a")
        assert [entry.key for entry in store.list("")] == ["dir/a"]

    def test_a_failed_block_publishes_nothing(self, store: Store) -> None:
        """All parts are written and the block raises: no object, and the key is free again."""
        data = self.sample(self.part_nbytes + 5)
        with (
            expect(ZeroDivisionError),
            store.create("a", len(data), part_nbytes=self.part_nbytes) as writer,
        ):
            writer.write_part(0, [memoryview(data)[: self.part_nbytes]])
            writer.write_part(1, [memoryview(data)[self.part_nbytes :]])
            raise ZeroDivisionError
        assert list(store.list("")) == []
        write_object(store, "a", data, part_nbytes=self.part_nbytes)
        assert store.get("a") == data

    def test_a_missing_part_publishes_nothing(self, store: Store) -> None:
        size = self.part_nbytes
        with expect(ValueError), store.create("a", size + 5, part_nbytes=size) as writer:
            writer.write_part(1, [memoryview(b"12345")])
        assert list(store.list("")) == []

    def test_parts_of_a_wrong_size_or_twice_are_refused(self, store: Store) -> None:
        size = self.part_nbytes
        with store.create("a", size + 5, part_nbytes=size) as writer:
            for index, nbytes in ((0, size - 1), (1, size), (1, 4), (2, 5), (-1, size)):
                with expect(ValueError):
                    writer.write_part(index, [memoryview(bytes(nbytes))])
            writer.write_part(0, [memoryview(bytes(size))])
            writer.write_part(1, [memoryview(bytes(5))])
            with expect(ValueError):
                writer.write_part(1, [memoryview(bytes(5))])

    def test_an_object_may_turn_out_shorter(self, store: Store) -> None:
        """By some bytes, by a part, to one part; not to less than is written, nor to nothing."""
        size = self.part_nbytes
        data = self.sample(3 * size)
        for nbytes in (2 * size + 9, 2 * size, 7):
            key = f"a{nbytes}"
            with store.create(key, 3 * size, part_nbytes=size) as writer:
                if nbytes > size:
                    writer.write_part(0, [memoryview(data)[:size]])
                for wrong in (0, size - 1 if nbytes > size else -1, 3 * size + 1):
                    with expect(ValueError):
                        writer.shorten(wrong)
                writer.shorten(nbytes)
                for start in range(size if nbytes > size else 0, nbytes, size):
                    part = memoryview(data)[start : min(start + size, nbytes)]
                    writer.write_part(start // size, [part])
            assert store.get(key) == data[:nbytes]

    def test_create_never_replaces(self, store: Store) -> None:
        store.put_if_absent("a", b"first")
        # Of one part and of several: object stores have two ways to create an object.
        sizes = [5, self.part_nbytes + 5] if self.create_refuses_existing else [5]
        for nbytes in sizes:
            with expect(KeyExistsError):
                write_object(store, "a", bytes(nbytes), part_nbytes=self.part_nbytes)
        assert store.get("a") == b"first"

    def test_list_is_in_key_order(self, store: Store) -> None:
        """A `/` sorts between `.` and `0`, so a directory's place is not that of its name."""
        keys = ["a.txt", "a0", "a/b.c", "a/b/c", "a/ä", "b", "a/b0"]
        for key in keys:
            store.put_if_absent(key, b"x")
        assert [entry.key for entry in store.list("")] == sorted(keys)

    def test_list_takes_any_prefix_and_starts_after_a_key(self, store: Store) -> None:
        # Prefixes may end within a name, where a disk has no directory of that name.
        keys = [f"log/{slot:04d}" for slot in range(25)] + ["logs/1", "lo", "steps/1/data"]
        for key in keys:
            store.put_if_absent(key, b"x")
        keys.sort()
        for prefix in ("", "lo", "log/", "log/00", "log/001", "steps/", "steps/1", "no/such/"):
            for after in ("", "a", "log/", "log/0010", "log/9", "steps/1/data", "z"):
                expected = [key for key in keys if key.startswith(prefix) and key > after]
                assert [entry.key for entry in store.list(prefix, after=after)] == expected

    def test_list_is_fresh(self, store: Store) -> None:
        # Many filesystems of fsspec cache listings, and other processes write to the same root.
        store.put_if_absent("d/a", b"x")
        assert [entry.key for entry in store.list("d/")] == ["d/a"]
        store.put_if_absent("d/b", b"xy")
        assert [entry.key for entry in store.list("d/")] == ["d/a", "d/b"]
        if self.lists_nbytes:
            assert [entry.nbytes for entry in store.list("d/")] == [1, 2]
        store.delete("d/a")
        assert [entry.key for entry in store.list("d/")] == ["d/b"]

    def test_delete_may_be_repeated(self, store: Store) -> None:
        store.put_if_absent("a/b/c", b"x")
        target = memoryview(bytearray(1))
        # Read before: what a store keeps open must not outlive the object.
        store.get_into("a/b/c", 0, [target])
        store.delete("a/b/c")
        store.delete("a/b/c")
        store.delete("never/was")
        with expect(KeyNotFoundError):
            store.get_into("a/b/c", 0, [target])
        assert list(store.list("")) == []

    def test_keys_may_hold_spaces_and_any_script(self, store: Store) -> None:
        key = "a b/über+100%/層 #?&=.txt"
        store.put_if_absent(key, b"x")
        write_object(store, key + "2", b"hello", part_nbytes=self.part_nbytes)
        assert store.get(key) == b"x"
        assert [entry.key for entry in store.list("a b/ü")] == [key, key + "2"]
        assert store.info(key).nbytes == 1
        store.delete(key)
        assert [entry.key for entry in store.list("a b")] == [key + "2"]

    def test_keys_that_could_escape_are_refused_by_every_operation(self, store: Store) -> None:
        bad = ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "a\0b", "a\nb"]
        for key in [*bad, ".tmp-x", "a/.tmp-0/b", "\ud800", "x" * 5000, "a/" + "x" * 300]:
            for use in (
                lambda key=key: store.get(key),
                lambda key=key: store.get_into(key, 0, []),
                lambda key=key: store.info(key),
                lambda key=key: store.put_if_absent(key, b""),
                lambda key=key: store.delete(key),
                lambda key=key: write_object(store, key, b"x", part_nbytes=self.part_nbytes),
            ):
                with expect(InvalidKeyError):
                    use()
        for prefix in ("/", "../", "a/../b", "..", "a/.."):
            with expect(InvalidKeyError):
                list(store.list(prefix))
            with expect(InvalidKeyError):
                store.abort_unfinished(prefix)

    def test_sync_returns_for_what_was_created_without_durability(self, store: Store) -> None:
        size = self.part_nbytes
        for key in ("d/e/a", "d/e/b"):
            with store.create(key, 3, part_nbytes=size, durable=False) as writer:
                writer.write_part(0, [memoryview(b"abc")])
        store.sync(["d/e/a", "d/e/b"])
        assert store.get("d/e/b") == b"abc"

    def test_abort_unfinished_removes_what_died_and_nothing_else(self, store: Store) -> None:
        """Two writers are left as a killed process leaves them; only the one below is removed."""
        size = self.part_nbytes
        write_object(store, "steps/1/done", b"x" * (size + 5), part_nbytes=size)
        # Entered and never left: as a process that was killed, which runs no `__exit__`.
        for key in ("steps/1/died", "steps/2/lives"):
            writer = store.create(key, size + 5, part_nbytes=size).__enter__()
            writer.write_part(0, [memoryview(bytes(size))])
        first = store.abort_unfinished("steps/1/")
        assert first in (0, 1)
        assert store.abort_unfinished("steps/1/") == 0
        assert store.abort_unfinished("steps/") == first
        assert [entry.key for entry in store.list("")] == ["steps/1/done"]
        assert store.get("steps/1/done") == b"x" * (size + 5)


def check_store(make: Callable[[], Store], contract: type[StoreContract] = StoreContract) -> int:
    """Hold every store that `make` returns, each empty and new, against one test of the contract.

    Returns how many tests there are. Raises AssertionError at the first that fails, with the name
    of the test; closes the stores.
    """
    names = sorted(name for name in dir(contract) if name.startswith("test_"))
    for name in names:
        # A new one for each: what one test leaves, such as an upload, would fail another.
        store = make()
        try:
            getattr(contract(), name)(store)
        except Exception as error:
            raise AssertionError(f"{store.url} breaks the contract: {name}: {error!r}") from error
        finally:
            store.close()
    return len(names)
