"""A store around a store, for those that change a few operations and pass on the rest.

`SpreadStore` is one, for object stores that limit requests per prefix: S3 serves a few thousand
requests a second for each range of keys, and all files of one step share a prefix. A spread root
keeps `steps/DIR/FILE.safetensors` at `spread/HH/steps/DIR/FILE.safetensors`, where HH comes from
the key alone; everything else stays at its place. The number of prefixes is written once, in the
object `SPREAD`. Callers that read and list keys see none of this.
"""

from __future__ import annotations

import contextlib
import heapq
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

from storage.errors import InvalidUrlError, KeyExistsError, KeyNotFoundError, StorageError
from storage.forks import ForkSafeLock
from storage.store import ByteRange, ObjectInfo, Store, check_key, check_prefix

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _of_inner(name: str) -> Any:
    return property(attrgetter(f"inner.{name}"))


def _passed_on(method: F) -> F:
    """The same method of the store within."""
    return cast(F, _of_inner(method.__name__))


def _by_inner_key(method: F) -> F:
    """The same method of the store within, for the object by the key that it has there."""
    name = method.__name__

    @wraps(method, updated=())  # not that it is abstract
    def call(store: WrappedStore, key: str, *args: Any, **named: Any) -> Any:
        return getattr(store.inner, name)(store._inner_key(key), *args, **named)

    return cast(F, call)


class WrappedStore(Store):
    """Passes everything on to `inner`. Closing it closes `inner`.

    A subclass that keeps objects under other keys in `inner` overrides `_inner_key`, and what
    returns keys: `list`, `info` and `abort_unfinished`.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.part_nbytes_min = inner.part_nbytes_min
        self.is_disk = inner.is_disk

    url = _of_inner("url")
    place = _of_inner("place")
    reports_news = _of_inner("reports_news")
    exclusive_create = _of_inner("exclusive_create")
    retries = _of_inner("retries")
    known_encoding = _of_inner("known_encoding")
    patience = _of_inner("patience")

    refresh = _passed_on(Store.refresh)
    doubt = _passed_on(Store.doubt)
    encrypting = _passed_on(Store.encrypting)
    learn_encoding = _passed_on(Store.learn_encoding)
    begin_root = _passed_on(Store.begin_root)
    list = _passed_on(Store.list)
    why_not_delete = _passed_on(Store.why_not_delete)
    abort_unfinished = _passed_on(Store.abort_unfinished)
    rest = _passed_on(Store.rest)
    close = _passed_on(Store.close)

    get = _by_inner_key(Store.get)
    get_into = _by_inner_key(Store.get_into)
    get_direct_into = _by_inner_key(Store.get_direct_into)
    is_cold = _by_inner_key(Store.is_cold)
    create = _by_inner_key(Store.create)
    begin_joint = _by_inner_key(Store.begin_joint)
    joint = _by_inner_key(Store.joint)
    end_joint = _by_inner_key(Store.end_joint)
    abort_joint = _by_inner_key(Store.abort_joint)
    put_if_absent = _by_inner_key(Store.put_if_absent)
    info = _by_inner_key(Store.info)
    delete = _by_inner_key(Store.delete)

    def sync(self, keys: Iterable[str]) -> None:
        self.inner.sync([self._inner_key(key) for key in keys])

    def _inner_key(self, key: str) -> str:
        """The key in `inner` of the object `key`."""
        return key


SPREAD_KEY = "SPREAD"
SPREAD_PREFIX = "spread/"
COUNT_MAX = 256
_RECORD = re.compile(rb"shardpoint spread ([1-9][0-9]{0,2})\n")


def is_data_file(key: str) -> bool:
    """Whether `key` is one of the large files of a checkpoint, which make the load."""
    return key.startswith("steps/") and key.endswith(".safetensors")


class SpreadStore(WrappedStore):
    """`inner`, with the keys that `is_spread` chooses spread over `count` prefixes.

    `count=None` takes the number that the root records, 1 without a record. Any other number is for
    a new root: the first `create` records it, and raises InvalidUrlError where the root has data
    files already or another number. Objects are found at both places, so that a process that looked
    before the record was made does no harm.
    """

    def __init__(
        self,
        inner: Store,
        count: int | None = None,
        *,
        is_spread: Callable[[str], bool] = is_data_file,
    ) -> None:
        super().__init__(inner)
        if count is not None and not 1 <= count <= COUNT_MAX:
            raise InvalidUrlError(f"{inner.url}: spread={count!r}; expected 1 to {COUNT_MAX}")
        self._wanted = count
        self._is_spread = is_spread
        self._recorded = 0  # 0: no record was seen so far
        self._settled = False  # whether `create` may rely on it
        self._lock = ForkSafeLock()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._find(key, lambda place: self.inner.get(place, byte_range))

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        return self._find(key, lambda place: self.inner.get_bounded(place, nbytes_max))

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._find(key, lambda place: self.inner.get_into(place, start, buffers))

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._find(key, lambda place: self.inner.get_direct_into(place, start, buffers))

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        return self._find(key, lambda place: self.inner.is_cold(place, byte_range))

    def info(self, key: str) -> ObjectInfo:
        return self._find(key, self.inner.info)._replace(key=key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Merged from all prefixes, by one listing each, unless `prefix` rules data files out."""
        check_prefix(prefix)
        listings = [self._plain(prefix, after)]
        if self._may_hold_spread(prefix):
            count = self._recorded or self._look()
            listings += [self._spread(number, prefix, after) for number in range(count)]
        last = ""
        for entry in heapq.merge(*listings, key=lambda entry: entry.key):
            if entry.key != last:  # the same object at both places counts once
                yield entry
            last = entry.key

    def delete(self, key: str) -> None:
        # At both places: which one it has depends on whether its writer saw the record.
        if self._is_spread(check_key(key)) and (count := self._recorded or self._look()):
            self.inner.delete(_spread_key(key, count))
        self.inner.delete(key)

    def abort_unfinished(self, prefix: str) -> int:
        aborted = self.inner.abort_unfinished(prefix)
        if self._may_hold_spread(prefix):
            for number in range(self._recorded or self._look()):
                aborted += self.inner.abort_unfinished(f"{_spread_prefix(number)}{prefix}")
        return aborted

    def _find(self, key: str, use: Callable[[str], T]) -> T:
        """`use` of the place where `key` is. A root without a record costs no request more."""
        if not self._is_spread(check_key(key)):
            return use(key)
        if self._recorded:
            try:
                return use(_spread_key(key, self._recorded))
            except KeyNotFoundError:
                return use(key)
        try:
            return use(key)
        except KeyNotFoundError:
            if not self._look():
                raise
            return use(_spread_key(key, self._recorded))

    def _inner_key(self, key: str) -> str:
        """Where `key` is to be written."""
        if not self._is_spread(check_key(key)):
            return key
        # Under the lock: the first files of a save are created by several threads at once.
        with self._lock:
            if not self._settled:
                self._settle()
                self._settled = True
        return _spread_key(key, self._recorded) if self._recorded else key

    def _settle(self) -> None:
        if self._look() or self._wanted in (None, 1):
            if self._wanted is not None and self._wanted != max(self._recorded, 1):
                raise self._refused(f"the root spreads over {max(self._recorded, 1)}")
            return
        if any(True for entry in self.inner.list("steps/") if self._is_spread(entry.key)):
            raise self._refused("the root has data files that are not spread")
        with contextlib.suppress(KeyExistsError):  # another rank, or our own lost answer
            self.inner.put_if_absent(SPREAD_KEY, b"shardpoint spread %d\n" % (self._wanted or 1))
        # Read back: with writers that disagree, the record that came first holds for all.
        if self._look() != self._wanted:
            raise self._refused(f"the root spreads over {self._recorded}")

    def _refused(self, why: str) -> InvalidUrlError:
        return InvalidUrlError(
            f"{self.url}: spread={self._wanted} was requested, but {why} prefixes; leave the "
            "option out, or begin a new root"
        )

    def _look(self) -> int:
        """The recorded number, 0 when there is none (yet)."""
        try:
            data = self.inner.get(SPREAD_KEY)
        except KeyNotFoundError:
            return 0
        match = _RECORD.fullmatch(data)
        if match is None or int(match[1]) > COUNT_MAX:
            raise StorageError(
                f"{self.url}/{SPREAD_KEY} is not a record of this library ({data[:40]!r}); "
                "restore it, or remove it if no data file is below spread/"
            )
        self._recorded = int(match[1])
        return self._recorded

    def _may_hold_spread(self, prefix: str) -> bool:
        return "steps/".startswith(prefix[:6]) or self._is_spread is not is_data_file

    def _plain(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        for entry in self.inner.list(prefix, after=after):
            if entry.key != SPREAD_KEY and not entry.key.startswith(SPREAD_PREFIX):
                yield entry

    def _spread(self, number: int, prefix: str, after: str) -> Iterator[ObjectInfo]:
        place = _spread_prefix(number)
        for entry in self.inner.list(place + prefix, after=place + after if after else ""):
            yield entry._replace(key=entry.key.removeprefix(place))


def _spread_prefix(number: int) -> str:
    return f"{SPREAD_PREFIX}{number:02x}/"


def _spread_key(key: str, count: int) -> str:
    return _spread_prefix(zlib.crc32(key.encode()) % count) + key
