"""Objects on any filesystem of fsspec, opened by a url or made by the caller."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property
from typing import Any

from storage.errors import (
    AccessDeniedError,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    TransientError,
)
from storage.forks import ForkSafeLock
from storage.ranges import LedgerWriter, PartLedger, copy_to, flat_views
from storage.store import (
    ByteRange,
    ExclusiveCreate,
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    finished_name,
    redacted,
    unfinished_name,
)


def open_generic(url: str, options: dict[str, Any]) -> FsspecStore:
    """The store at `url`, a chain such as `zip://run::s3://bucket/run.zip` included, by fsspec's
    rules. Raises InvalidUrlError.
    """
    import fsspec

    shown = redacted(url)
    try:
        _check_chain(url)
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except InvalidUrlError:
        raise
    except ImportError as error:
        raise InvalidUrlError(f"{shown}: {error}; install that package") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidUrlError(
            f"{shown}: fsspec cannot open it ({type(error).__name__}: {error}); "
            "check the url and the storage options"
        ) from error
    except OSError as error:  # some filesystems connect, or open an archive, when they are made
        raise StorageError(
            f"{shown}: no connection ({type(error).__name__}: {error}); check the url, and "
            "whether what it names is there and answers"
        ) from error
    problem = ""
    if "::" in url:
        problem = f"a url with '::' can only be read; save to {shown.split('::')[-1]}"
    return FsspecStore(filesystem, root, url=shown, why_read_only=problem)


def options_of_filesystem(protocol: str) -> set[str]:
    """The options that fsspec's class for `protocol` takes by name. Raises ImportError where its
    package is not installed, ValueError where there is none.
    """
    import fsspec

    classes = fsspec.get_filesystem_class(protocol).__mro__
    return {name for cls in classes for name in inspect.signature(cls.__init__).parameters}


def _check_chain(url: str) -> None:
    """Raises InvalidUrlError for a chain of which one filesystem would ignore the next."""
    bits = url.split("::")
    for bit in bits[:-1]:
        protocol = bit.partition("://")[0]
        if not {"fo", "target_protocol"} & options_of_filesystem(protocol):
            problem = f"{protocol} reads no other filesystem, so nothing can follow its '::'"
        elif bit in ("dir", "dir://"):
            problem = f"dir:: without a folder changes nothing; write {redacted(bits[-1])}"
        else:
            continue
        raise InvalidUrlError(f"{redacted(url)}: {problem}")


_RACING = 8  # writers that prove whether a filesystem creates exclusively


class FsspecStore(Store):
    """Objects below `root` of `filesystem`, any of fsspec's.

    Where the filesystem creates exclusively (`open(path, "xb")`), which it has to prove before the
    first save, two writers are safe. Elsewhere saves need `unsafe_single_writer=True`.

    An object of `create` is written to a `.tmp-` file next to its place and moved there at the end:
    whole or not at all where `mv` is one step, as on disks, HDFS and SFTP. On object stores `mv`
    is a copy and a delete, of which a reader sees the end only. Whether anything survives a power
    failure is up to the filesystem; fsspec has no sync.
    """

    def __init__(
        self, filesystem: Any, root: str, *, url: str = "", why_read_only: str = ""
    ) -> None:
        self.url = url or redacted(filesystem.unstrip_protocol(root))
        self.filesystem = filesystem
        self._root = root.rstrip("/")
        if "http" in filesystem.protocol:
            why_read_only = "a web server can only be read; save to a store, or to a path"
        self._why_read_only = why_read_only
        self._has_read_a_range = False
        self._copies: dict[str, threading.Lock] = {}
        self._copied: set[str] = set()
        self._keeps_files = any(
            base.__name__ == "CachingFileSystem" for base in type(filesystem).__mro__
        )

    @property
    def place(self) -> str:
        # Filesystems of one protocol may be of several servers: their options tell them apart.
        made = self.filesystem
        options = (type(made), made.storage_args, made.storage_options)
        return f"{self.url} {hashlib.sha256(repr(options).encode()).hexdigest()}"

    @cached_property
    def exclusive_create(self) -> ExclusiveCreate:  # type: ignore[override]
        """CONDITIONAL once the filesystem has proved it: of several writers of one file, open at
        once, exactly one wins, and nothing is visible before. Takes some requests, at first use.
        """
        self._refuse_writing("probe")
        path = self._temp(f"{self._root}/probe")
        with self.translating("probe", "exclusive create"):
            self._make_parent(path)
            try:
                is_proved = self._proves_exclusive(path)
            finally:
                with contextlib.suppress(FileNotFoundError, NotImplementedError):
                    self.filesystem.rm_file(path)
        return ExclusiveCreate.CONDITIONAL if is_proved else ExclusiveCreate.NONE

    def _proves_exclusive(self, path: str) -> bool:
        writers = []
        for number in range(_RACING):
            try:
                writer = self.filesystem.open(path, "xb")
                writer.write(b"%d" % number)
            except (FileExistsError, NotImplementedError, ValueError, TypeError):
                break  # not at all, or a file is there before it is whole
            writers.append(writer)

        def wins(writer: Any) -> bool:
            try:
                writer.close()
            except Exception:  # each filesystem has its own for "exists"; who wins is what counts
                return False
            return True

        is_visible = bool(writers) and self._is_there(path)
        try:
            with ThreadPoolExecutor(_RACING) as pool:  # not a `Pool`: one thread would not race
                won = list(pool.map(wins, writers))
        finally:
            list(map(wins, writers))  # those without a thread, which would write when collected
        if len(writers) < _RACING or is_visible or won.count(True) != 1:
            return False
        return bytes(self.filesystem.cat_file(path)) == b"%d" % won.index(True)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        path = self._path(key)
        with self.translating("read", key):
            if byte_range is None:
                with self._copying(path):
                    data = bytes(self.filesystem.cat_file(path))
                return self._checked_for_ranges(key, path, data)
            if byte_range.nbytes == 0:  # fsspec takes an end of 0 for the end of the file
                data = b""
                if self.filesystem.info(path)["size"] < byte_range.start:
                    raise self._short(key, path, byte_range)
            else:
                data = self._read_range(key, path, byte_range)
        if len(data) > byte_range.nbytes:
            raise self._ignores_ranges(key, byte_range.nbytes, len(data))
        if len(data) != byte_range.nbytes:
            raise self._short(key, path, byte_range)
        return data

    def _read_range(self, key: str, path: str, wanted: ByteRange) -> bytes:
        try:
            with self._copying(path):
                return bytes(self.filesystem.cat_file(path, start=wanted.start, end=wanted.end))
        except (FileNotFoundError, PermissionError, TimeoutError, ConnectionError):
            raise
        except Exception:  # each filesystem has its own for a range that begins behind the end
            if self.filesystem.info(path)["size"] >= wanted.end:
                raise
            raise self._short(key, path, wanted) from None

    @contextlib.contextmanager
    def _copying(self, path: str) -> Iterator[None]:
        """Around a read. The first one of a file makes simplecache copy it: where two threads do so
        at once, others see its whole length with holes.
        """
        if not self._keeps_files or path in self._copied:
            yield
            return
        with self._copies.setdefault(path, ForkSafeLock()):
            yield
            self._copied.add(path)

    def _checked_for_ranges(self, key: str, path: str, data: bytes) -> bytes:
        """`data` of a whole object; the first time, one byte of it is requested as well.

        What is read first is read whole, such as a manifest; ranges go into the live state, and
        then it is too late to learn that a server ignores them.
        """
        if self._keeps_files and len(data) < (nbytes := self._nbytes(path)):
            raise self._short(key, path, ByteRange(0, nbytes))
        if not self._has_read_a_range and len(data) > 2:
            again = bytes(self.filesystem.cat_file(path, start=1, end=2))
            if again != data[1:2]:
                raise self._ignores_ranges(key, 1, len(again))
            self._has_read_a_range = True
        return data

    def _ignores_ranges(self, key: str, nbytes: int, received: int) -> StorageError:
        return StorageError(
            f"read {key} in {self.url}: {nbytes} bytes were requested, {received} came: the server "
            f"ignores byte ranges. Use one that does not, or read through simplecache::{self.url}, "
            "which fetches whole files"
        )

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        views = flat_views(buffers)
        end = start + sum(view.nbytes for view in views)
        copy_to(views, memoryview(self.get(key, ByteRange(start, end))), end - start)

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> FsspecWriter:
        """As promised by Store, but another writer that publishes at the same moment is replaced.

        Parts that come before their turn wait in memory: write them in order.
        """
        self._refuse_writing(f"create {key}")
        return FsspecWriter(self, PartLedger(key, nbytes, part_nbytes))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Where the filesystem creates exclusively, this does. Elsewhere it looks first and writes
        then: unsafe as soon as there is a second writer.
        """
        path = self._path(key)
        self._refuse_writing(f"create {key}")
        is_exclusive = self.exclusive_create is ExclusiveCreate.CONDITIONAL
        with self.translating("create", key):
            if is_exclusive:
                self._make_parent(path)
                self._create_exclusively(key, path, bytes(data))
                return
            self._refuse_existing(key, path)
            temp = self._temp(path)
            self._make_parent(path)
            self.filesystem.pipe_file(temp, bytes(data))
            self._move(temp, path)

    def _create_exclusively(self, key: str, path: str, data: bytes) -> None:
        try:
            with self.filesystem.open(path, "xb") as file:
                file.write(data)
        except FileExistsError as error:
            raise KeyExistsError(f"create {key}: exists already in {self.url}") from error
        except (PermissionError, FileNotFoundError):
            # Nothing was written; after any other error the object may be there.
            raise
        except OSError as error:
            raise OutcomeUnknownError(
                f"create {key} in {self.url}: {type(error).__name__}: {error}; the object may exist"
            ) from error

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        base = check_prefix(prefix).rpartition("/")[0]
        with self.translating("list", prefix):
            files = self._find(base)
        for key in sorted(files):
            name = key.rpartition("/")[2]
            if key > after and key.startswith(prefix) and finished_name(name) is None:
                yield _object_info(key, files[key])

    def info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self.translating("info", key):
            self.filesystem.invalidate_cache(self._parent(path))
            details = self.filesystem.info(path)
        if details["type"] != "file":
            raise KeyNotFoundError(f"info {key} in {self.url}: not a file")
        return _object_info(key, details)

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._refuse_writing(f"delete {key}")
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self.translating("delete", key), missing:
            self.filesystem.rm_file(path)

    def sync(self, keys: Iterable[str]) -> None:
        """fsspec has nothing to wait for."""

    def abort_unfinished(self, prefix: str) -> int:
        base = check_prefix(prefix).rpartition("/")[0]
        self._refuse_writing(f"clean {prefix}")
        removed = 0
        with self.translating("abort", prefix):
            for key in sorted(self._find(base)):
                directory, slash, name = key.rpartition("/")
                meant = finished_name(name)
                if meant is not None and f"{directory}{slash}{meant}".startswith(prefix):
                    self.filesystem.rm_file(f"{self._root}/{key}")
                    removed += 1
        return removed

    def close(self) -> None:
        """Does nothing: fsspec shares its filesystems between their users."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _parent(self, path: str) -> str:
        return path.rpartition("/")[0]

    def _temp(self, path: str) -> str:
        directory, _, name = path.rpartition("/")
        return f"{directory}/{unfinished_name(name, uuid.uuid4().hex[:16])}"

    def _make_parent(self, path: str) -> None:
        self.filesystem.makedirs(self._parent(path), exist_ok=True)

    def _move(self, temp: str, path: str) -> None:
        if any(letter in path for letter in "*?["):
            self.filesystem.cp_file(temp, path)  # `mv` would take the name for a pattern
            self.filesystem.rm_file(temp)
        else:
            self.filesystem.mv(temp, path)

    def _refuse_existing(self, key: str, path: str) -> None:
        if self._is_there(path):
            raise KeyExistsError(f"create {key}: exists already in {self.url}")

    def _is_there(self, path: str) -> bool:
        self.filesystem.invalidate_cache(self._parent(path))
        return bool(self.filesystem.exists(path))

    def _refuse_writing(self, operation: str) -> None:
        if self._why_read_only:
            raise AccessDeniedError(f"{operation} in {self.url}: {self._why_read_only}")

    def _find(self, base: str) -> dict[str, dict[str, Any]]:
        """Everything below `base` by key, unfinished objects included; fresh, not from a cache."""
        top = f"{self._root}/{base}" if base else self._root
        # All of it: fsspec caches each directory by itself, and others write below this one.
        self.filesystem.invalidate_cache()
        try:
            entries = self.filesystem.find(top or "/", detail=True)
        except FileNotFoundError as error:
            if _reason(error) is not error:
                raise
            return {}
        skip = len(self.filesystem._strip_protocol(self._root)) + 1 if self._root else 0
        return {path[skip:].lstrip("/"): entry for path, entry in entries.items()}

    def _nbytes(self, path: str) -> int:
        """The length of a file; 0 where its server says none."""
        return self.filesystem.info(path)["size"] or 0

    def _short(self, key: str, path: str, wanted: ByteRange) -> StorageError:
        where = f"bytes {wanted.start} to {wanted.end}"
        with self.translating("read", key):
            nbytes = self._nbytes(path)
        if nbytes >= wanted.end:
            # simplecache shows what another thread or process is still copying.
            return TransientError(f"read {key} in {self.url}: {where} did not come whole")
        return ShortReadError(f"read {key} in {self.url}: the object ends before {where}")

    @contextlib.contextmanager
    def translating(self, operation: str, key: str) -> Iterator[None]:
        """What the block raises, as an error of this package that names the operation."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise self._translated(error, operation, key) from error

    def _translated(self, error: Exception, operation: str, key: str) -> StorageError:
        error = _reason(error)
        where = f"{operation} {key} in {self.url}: {type(error).__name__}: {error}"
        if bucket := re.match(r"https?://[^/]*\.(amazonaws|googleapis)\.com", self.url):
            scheme = {"amazonaws": "s3", "googleapis": "gs"}[bucket[1]]
            where += f"; a bucket is opened as {scheme}://bucket/prefix"
        if isinstance(error, (FileNotFoundError, IsADirectoryError)) and operation != "create":
            return KeyNotFoundError(where)
        if isinstance(error, PermissionError):
            return AccessDeniedError(where)
        # A creation may have happened: TransientError says that nothing did, and is repeated.
        if isinstance(error, (TimeoutError, ConnectionError)) and operation != "create":
            return TransientError(where)
        return StorageError(where)


def _reason(error: Exception) -> Exception:
    """What is behind a "not found": fsspec's HTTP says so, too, of a server that does not answer or
    answers that it cannot now.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    status = getattr(cause, "status", None)  # of the answer, as aiohttp has it
    # Not of 401 and 403: object stores answer with them for what is not there.
    if isinstance(status, int) and (status == 429 or status >= 500):
        return ConnectionError(f"{cause}")
    not_there = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return cause if isinstance(cause, OSError) and not isinstance(cause, not_there) else error


class FsspecWriter(LedgerWriter):
    """A temporary file, written from its beginning to its end, and moved into place."""

    def __init__(self, store: FsspecStore, ledger: PartLedger) -> None:
        super().__init__(ledger)
        self._store = store
        self._path = store._path(ledger.key)
        self._temp = store._temp(self._path)
        self._waiting: dict[int, bytes] = {}
        self._next_index = 0
        self._lock = threading.Lock()

    def __enter__(self) -> FsspecWriter:
        store = self._store
        with store.translating("create", self._ledger.key):
            # Before gigabytes are written in vain.
            store._refuse_existing(self._ledger.key, self._path)
            store._make_parent(self._path)
            self._file = store.filesystem.open(self._temp, "wb")
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        # Copied: the caller may change its buffers when this returns, and a part may have to wait.
        data = b"".join(flat_views(buffers))
        with self._store.translating("create", self._ledger.key), self._lock:
            self._waiting[index] = data
            while self._next_index in self._waiting:
                self._file.write(self._waiting[self._next_index])
                del self._waiting[self._next_index]
                self._next_index += 1

    def _publish(self) -> None:
        store = self._store
        with store.translating("create", self._ledger.key):
            self._file.close()
            # Once more: since `__enter__` looked, minutes may have passed.
            store._refuse_existing(self._ledger.key, self._path)
            store._move(self._temp, self._path)

    def _discard(self) -> None:
        # Closing may publish the temporary file, cut short: harmless under its name, then removed.
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._store.filesystem.rm_file(self._temp)


def _object_info(key: str, details: dict[str, Any]) -> ObjectInfo:
    """Filesystems name the modification time in many ways; 0.0 where there is none."""
    # Of disks, s3fs, adlfs, gcsfs, and of those that know the creation only.
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = details.get(name)
        if isinstance(value, (int, float)):
            return ObjectInfo(key, details["size"], float(value))
        if isinstance(value, datetime):
            return ObjectInfo(key, details["size"], float(value.timestamp()))
    return ObjectInfo(key, details["size"], 0.0)
