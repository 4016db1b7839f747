"""A root that is read from hosts that serve it, and served to others: a tree of followers.

    store of a training <- RelayStore, served <- RelayStore of a follower, served <- ...

A `RelayStore` knows the names of all objects of one root, as its parent has last said, and keeps
what was read up to a bound, so that each byte comes from the parent once. Readers verify bytes as
those of any store.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from secrets import token_hex
from threading import Condition
from typing import Any, NamedTuple, TypeVar

from storage.errors import (
    AccessDeniedError,
    InvalidUrlError,
    KeyNotFoundError,
    StorageError,
    TooLargeError,
)
from storage.http import HttpStore, client_tls
from storage.peers.store import MIB, ObjectBlock, PeerStore, info_of
from storage.retry import RetryPolicy
from storage.store import (
    ByteRange,
    ExclusiveCreate,
    ObjectInfo,
    Store,
    check_bound,
    is_key,
    redacted,
)

BLOCK_NBYTES = 8 * MIB
DIRECTORY_NBYTES_MAX = 64 * MIB  # of a step that is read by one request
NEWS_NBYTES_MAX = 64 * MIB  # of one answer: the names of 500,000 objects
SMALL_NBYTES = 128 << 10  # of an object that comes with the news of its name
SMALL_NBYTES_MAX = MIB  # of all of them
CACHE_NBYTES_MAX = 1024 * MIB
PARENT_SECONDS = 5.0  # that requests to a parent are repeated where there is another
PAUSE_SECONDS = 20.0  # before a parent that failed comes first again
LOOK_SECONDS = 0.1  # between looks at a directory, or `STORE_SECONDS` at another store
STORE_SECONDS = 1.0
LIST_SECONDS = 10.0  # between its listings: for what comes and goes without a record
FRESH_SECONDS = 5.0  # for which a record that is missing is not asked for again
BEHIND_SECONDS = 30.0  # for which a parent with an older log than is known here says nothing
GONE_MAX = 10_000  # names that are remembered as removed
RECORDS = "log/"
_SLOT = re.compile(r"log/([0-9]{20})")
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]@/]+):([0-9]{1,5})")
_ANSWERS = (KeyNotFoundError, TooLargeError)  # of a parent that has not failed
T = TypeVar("T")


class News(NamedTuple):
    """What has changed since a state, or all there is; and small objects of it."""

    state: str
    is_all: bool
    added: Sequence[ObjectInfo]
    removed: Sequence[str]
    parts: Sequence[ObjectBlock] = ()


class _Parent:
    """Where a relay reads, a store; `until` a time others come first, because it has failed."""

    def __init__(self, store: Store) -> None:
        self.store, self.is_near = store, store.is_disk  # near: reading it again costs nothing
        self.state, self.until = "", 0.0


class _PeerParent(_Parent):
    """A host that serves the root."""

    def __init__(self, peer: PeerStore, root: str) -> None:
        super().__init__(peer)
        self._peer, self._root = peer, root

    def news(self, since: str, seconds: float) -> News:
        """What is new, as soon as something is; no longer than `seconds`, and at once if 0."""
        fields = {"root": self._root, "since": since, "wait": f"{int(seconds * 1000)}"}
        news, parts = self._peer.parts("/news", _news_of, NEWS_NBYTES_MAX, fields, seconds)
        return news._replace(parts=parts)

    def parts(self, prefix: str, start: int, stop: int) -> Sequence[ObjectBlock]:
        """A block of an object, or all of a directory, which has `stop` bytes."""
        fields = {"root": self._root, "prefix": prefix, "start": f"{start}", "stop": f"{stop}"}
        return self._peer.parts("/files", len, stop - start + MIB, fields)[1]


class _StoreParent(_Parent):
    """The root's own store, which is asked whether its log has another record."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._next, self._listed = "", 0.0

    def news(self, since: str, seconds: float) -> News:
        """As of a host that serves it."""
        end = time.monotonic() + min(seconds, STORE_SECONDS)  # so that a relay is soon closed
        while True:
            now = time.monotonic()
            is_old = not since or now - self._listed > LIST_SECONDS
            if is_old or self.store.exists(self._next):
                # A stray file may have a name that no reader takes.
                infos = [one for one in self.store.list("") if is_key(one.key)]
                self._next = f"{RECORDS}{_newest(one.key for one in infos) + 1:020d}"
                self._listed = now
                return News("listed", True, infos, ())
            if now >= end:
                return News("listed", False, (), ())
            time.sleep(min(LOOK_SECONDS if self.is_near else STORE_SECONDS, end - now))

    def parts(self, prefix: str, start: int, stop: int) -> Sequence[ObjectBlock]:
        """As of a host that serves it."""
        is_directory, get = prefix.endswith("/"), self.store.get
        spans = spans_of(self.store.list(prefix)) if is_directory else [(prefix, start, stop)]
        return [ObjectBlock(key, low, get(key, ByteRange(low, high))) for key, low, high in spans]


class RelayStore(HttpStore):
    """The root that `parents` have: the first that answers is read. Nothing can be written.

    A parent is a `PeerStore`, which serves it under the name `root`, or the root's own store.
    At most `cache_nbytes_max` of what was read are kept in memory.
    """

    exclusive_create = ExclusiveCreate.NONE
    reports_news = True

    def __init__(
        self, parents: Sequence[Store], root: str, *, cache_nbytes_max: int = CACHE_NBYTES_MAX
    ) -> None:
        self.root = root
        self._parents = [
            _PeerParent(one, root) if isinstance(one, PeerStore) else _StoreParent(one)
            for one in parents
        ]
        self._active: _Parent = self._parents[0]
        is_peer = isinstance(self._active, _PeerParent)
        self.url = f"{parents[0].url}/{root}".rstrip("/") if is_peer else parents[0].url
        self._name = token_hex(8)
        self._number = 0  # of changes of the index
        self._changed_at: dict[str, int] = {}  # the number of the change; removed names, too
        self._since = 0  # the oldest number of which all is known that was removed
        self._index: Mapping[str, ObjectInfo] = {}
        self._keys: list[str] = []
        self._heard = 0.0  # when a parent last said what is there; 0: never
        self._changed = Condition()
        self._asks = ""  # what a thread does now that asks for all: "waits" or "looks"
        self._answers = 0  # that were taken over
        self._is_closed = False
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._cached_nbytes, self._cache_nbytes_max = 0, cache_nbytes_max
        self._under_way: dict[tuple[str, int], Future[Sequence[ObjectBlock]]] = {}

    # what is there

    def refresh(self, seconds: float = 0.0, seen: int = -1) -> int:
        end, answers = time.monotonic() + seconds, self._answers
        while True:
            with self._changed:
                if self._is_closed:
                    raise StorageError(f"{self.url} is closed")
                left = max(end - time.monotonic(), 0.0)
                is_new = self._number != seen if seconds else self._answers > answers
                if self._heard and (is_new or (seconds and not left)):
                    return self._number
                # Only a directory answers at no cost; others are asked by one thread at a time.
                is_free = self._active.is_near and bool(self._heard) and not seconds
                if self._asks and not is_free:
                    if self._heard and not seconds and self._asks == "waits":
                        return self._number  # that thread hears the news first
                    self._changed.wait(left or STORE_SECONDS)
                    continue
                if not is_free:
                    self._asks = "waits" if seconds else "looks"
            is_heard = False
            try:
                is_heard = self._ask(left)
            finally:
                with self._changed:
                    self._answers += is_heard
                    # A look at a directory has set nothing, and must not clear what another thread
                    # has.
                    self._asks = self._asks if is_free else ""
                    self._changed.notify_all()
            if not seconds or self._number != seen:
                return self._number
            # A parent that is behind, or answers at once, must not be asked in a tight loop.
            time.sleep(min(LOOK_SECONDS if is_heard else STORE_SECONDS, left))

    def news(self, since: str) -> News:
        """What is new here since a state; all of it where that is not known."""
        with self._changed:
            number = self.number_of(since)
            # What was removed before that is forgotten, so a difference would leave it in place.
            is_all = number < self._since
            new = [key for key, nth in self._changed_at.items() if is_all or nth > number]
            added = [self._index[key] for key in new if key in self._index]
            removed = [key for key in new if key not in self._index and not is_all]
            return News(f"{self._name}.{self._number}", is_all, added, removed)

    def number_of(self, state: str) -> int:
        """What `refresh` gave for a state of `news`; -1 where that is not known."""
        name, _, number = state.partition(".")
        return int(number) if name == self._name and number.isdigit() else -1

    def small_of(self, news: News) -> Iterator[ObjectBlock]:
        """The small objects among what is new, the newest first."""
        left = SMALL_NBYTES_MAX
        # The newest are wanted first, and not all may fit.
        for key, nbytes, _ in sorted(news.added, key=lambda one: one.modified_unix, reverse=True):
            is_of_root = key.startswith((RECORDS, "steps/", "FORMAT"))
            if is_of_root and 0 < nbytes <= min(SMALL_NBYTES, left):
                with suppress(StorageError):
                    yield ObjectBlock(key, 0, self.get(key))
                    left -= nbytes

    def _ask(self, seconds: float) -> bool:
        """Ask for news, and take them over; whether a parent has any to give."""

        def ask(parent: _PeerParent | _StoreParent) -> bool:
            since = parent.state if parent is self._active else ""
            # Without a state it answers at once; a parent that does not is soon left for the next.
            return self._take(parent, since, parent.news(since, seconds if since else 0.0))

        return self._of_parents("what is new", ask)

    def _take(self, parent: _Parent, since: str, news: News) -> bool:
        with self._changed:
            if since != (parent.state if parent is self._active else ""):
                return True  # another answer was faster
            now = time.monotonic()
            index = dict(self._index)
            if news.is_all or news.added or news.removed:
                index = {} if news.is_all else index
                for key in news.removed:
                    index.pop(key, None)
                index |= {one.key: one for one in news.added}
                is_behind = _newest(index) < _newest(self._index)
                if is_behind and now - self._heard < BEHIND_SECONDS:
                    # So that it is asked for all of it next time.
                    parent.state = ""
                    return False
            self._active, parent.state, self._heard = parent, news.state, now
            keys = {*index, *self._index}
            if new := {key for key in keys if self._index.get(key) != index.get(key)}:
                self._number += 1
                self._index, self._keys = index, sorted(index)
                self._changed_at |= dict.fromkeys(new, self._number)
                if len(self._changed_at) > len(index) + GONE_MAX:
                    # Names of removed objects would pile up. A follower with an older state gets
                    # the whole list.
                    self._changed_at = {key: self._changed_at[key] for key in index}
                    self._since = self._number
                for name in [name for name in self._blocks if name[0] in new]:
                    self._cached_nbytes -= len(self._blocks.pop(name))
        self._keep(news.parts)
        return True

    def doubt(self) -> None:
        with self._changed:
            self._blocks.clear()
            self._cached_nbytes = 0
        # The other parents come first for a while: this one may serve damaged bytes.
        self._active.until = time.monotonic() + PAUSE_SECONDS

    # objects

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        nbytes = self.info(key).nbytes
        check_bound(self.url, key, nbytes, nbytes_max)
        return b"".join(self._pieces(key, 0, nbytes))

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        count = 0
        for view in views:
            done = 0
            for piece in self._pieces(key, start + count, start + count + view.nbytes):
                view[done : done + len(piece)] = piece
                done += len(piece)
            count += done
        return count

    def info(self, key: str) -> ObjectInfo:
        # Without the lock: an index is replaced as a whole, never changed.
        is_fresh = time.monotonic() - self._heard < FRESH_SECONDS
        if key not in self._index and not (key.startswith(RECORDS) and self._heard and is_fresh):
            self.refresh()
        try:
            return self._index[key]
        except KeyError:
            raise KeyNotFoundError(f"{key} in {self.url}: no such object") from None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if not self._heard:
            self.refresh()
        with self._changed:
            # Both under the lock, so that they are of one state.
            index, keys = self._index, self._keys
        first = max(bisect_left(keys, prefix), bisect_right(keys, after) if after else 0)
        for number in range(first, len(keys)):
            if not keys[number].startswith(prefix):
                return
            yield index[keys[number]]

    def _pieces(self, key: str, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes of an object, fewer where it ends before."""
        stop = min(stop, self.info(key).nbytes)
        while start < stop:
            first = start - start % BLOCK_NBYTES
            end = min(first + BLOCK_NBYTES, stop)
            yield memoryview(self._block(key, first))[start - first : end - first]
            start = end

    def _block(self, key: str, start: int) -> bytes:
        with self._changed:
            if block := self._blocks.get((key, start)):
                self._blocks.move_to_end((key, start))
                return block
        end = min(start + BLOCK_NBYTES, self.info(key).nbytes)
        what, stop = (key, start), end
        # The files of a step are read together: those of a small one come with a single request.
        directory = f"{key.rpartition('/')[0]}/"
        if directory.startswith("steps/") and not self._active.is_near:
            nbytes = sum(one.nbytes for one in self.list(directory))
            if nbytes <= min(DIRECTORY_NBYTES_MAX, self._cache_nbytes_max):
                what, stop = (directory, 0), nbytes
        try:
            parts = self._once(what, stop)
        except TooLargeError:  # more has come to the directory than is known here
            parts = self._once((key, start), end)
        for part in parts:
            if (part.key, part.start) == (key, start):
                return part.data
        raise KeyNotFoundError(f"{key} in {self.url}: its directory is being deleted")

    def _once(self, what: tuple[str, int], stop: int) -> Sequence[ObjectBlock]:
        """What the parents give, for all threads that want it now."""
        with self._changed:
            known = self._under_way.get(what)
            future = self._under_way.setdefault(what, Future())
        if known is not None:
            return known.result()
        try:
            parts = self._of_parents(what[0], lambda parent: parent.parts(*what, stop))
            future.set_result(self._keep(parts))
        except BaseException as error:
            # Of any kind: other threads wait for this future.
            future.set_exception(error)
        finally:
            with self._changed:
                del self._under_way[what]
        return future.result()

    def _keep(self, parts: Sequence[ObjectBlock]) -> Sequence[ObjectBlock]:
        """Those that are blocks of known objects. They are cached; the least recently used go."""
        blocks = []
        with self._changed:
            for part in parts:
                info = self._index.get(part.key)
                end = min(part.start + BLOCK_NBYTES, 0 if info is None else info.nbytes)
                # Of another length, it is of an object that has changed meanwhile, or of none.
                if part.start % BLOCK_NBYTES or part.start + len(part.data) != end:
                    continue
                blocks.append(part)
                if not self._active.is_near:
                    before = self._blocks.pop((part.key, part.start), b"")
                    self._cached_nbytes += len(part.data) - len(before)
                    self._blocks[part.key, part.start] = part.data
            while self._cached_nbytes > self._cache_nbytes_max:
                self._cached_nbytes -= len(self._blocks.popitem(last=False)[1])
        return blocks

    def _of_parents(self, what: str, use: Callable[[_PeerParent | _StoreParent], T]) -> T:
        """What the first parent gives that answers. Raises KeyNotFoundError where one does, and
        none has it; or TooLargeError.
        """
        failures, now = list[StorageError](), time.monotonic()
        # Sorting is stable: parents that have not failed stay in the order of the caller.
        for parent in sorted(self._parents, key=lambda parent: max(parent.until, now)):
            try:
                return use(parent)
            except StorageError as error:
                if self._is_closed:
                    raise
                failures.append(error)
                if not isinstance(error, _ANSWERS):
                    parent.until = time.monotonic() + PAUSE_SECONDS
        for failure in failures:
            if isinstance(failure, _ANSWERS) or len(failures) == 1:
                raise failure
        reasons = "".join(f"\n  - {failure}" for failure in failures)
        raise StorageError(f"{what}: none of {len(failures)} hosts answered{reasons}")

    # the rest

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AccessDeniedError(f"{self.url} can only be read: write to the training's store")

    put_if_absent = create = delete = abort_unfinished = sync = _refuse

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for parent in self._parents:
            parent.store.close()


def spans_of(infos: Iterator[ObjectInfo]) -> list[tuple[str, int, int]]:
    """The blocks of objects."""
    return [
        (one.key, start, min(start + BLOCK_NBYTES, one.nbytes))
        for one in infos
        for start in range(0, one.nbytes, BLOCK_NBYTES)
    ]


def _newest(keys: Any) -> int:
    """The newest record of a log among keys."""
    return max((int(m[1]) for key in keys if (m := _SLOT.fullmatch(key))), default=-1)


def _news_of(head: Any) -> News:
    added = [info_of(row) for row in head["added"]]
    return News(str(head["state"]), head["all"] is True, added, list(map(str, head["removed"])))


def open_peer(
    url: str,
    *,
    others: Sequence[Store] = (),
    token: str = "",
    certificate: str = "",
    cache_bytes_max: int = CACHE_NBYTES_MAX,
) -> RelayStore:
    """The root at `peer://HOST:PORT,HOST:PORT/ROOT`, which is what `others` have, too.

    Every request shows `token`; `certificate` is a PEM file with that of the hosts. (`fallback` and
    `fallback_options` in storage options, of which `others` are made, are the url of the training's
    root, and its options.) Raises InvalidUrlError.
    """
    hosts, _, root = url.partition("://")[2].partition("/")
    matches = [match for one in hosts.split(",") if (match := _HOST.fullmatch(one))]
    # Fewer matches than hosts: one of them is no HOST:PORT.
    if len(matches) <= hosts.count(","):
        raise InvalidUrlError(
            f"{redacted(url)}: expected peer://HOST:PORT, or several with commas between, and /ROOT"
        )
    # It becomes a header of HTTP.
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidUrlError(
            f"{redacted(url)} needs the token of those who serve it: pass token= in "
            "storage_options, or set SHARDPOINT_TOKEN for ckpt.follow"
        )
    tls = client_tls(certificate) if certificate else None
    parents = list(others)
    for match in reversed(matches):
        # The last is waited for as stores are: a training may start again.
        policy = RetryPolicy(deadline_seconds=PARENT_SECONDS) if parents else RetryPolicy()
        host, port = match[1].strip("[]"), int(match[2])
        parents.insert(0, PeerStore(host, port, token, tls=tls, policy=policy))
    return RelayStore(parents, root.strip("/"), cache_nbytes_max=cache_bytes_max)
