"""Objects as files below a directory, through os-level calls.

What holds: a key names exactly the file `root/key`, and no key can name anything outside of `root`.
Symbolic links that somebody placed below `root` are followed, for reading and writing: placing
links there takes the rights to the data anyway, and caches of models are made of such links.

An object is written aside under a name that is never a key, and published by `link`, which does not
replace anything. A writer that dies before that leaves a `.tmp-` file at most, which
`abort_unfinished` removes.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from storage.errors import (
    AccessDeniedError,
    InvalidKeyError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)
from storage.file_io import (
    ALIGNMENT_BYTES,
    AroundCache,
    BufferedFile,
    DirectFile,
    OpenFiles,
    cached_nbytes,
    read_into,
    rename_without_replacing,
)
from storage.page_cache import CACHED_NBYTES_MIN, make_room
from storage.ranges import LedgerWriter, PartLedger, flat_views, part_count
from storage.store import (
    ByteRange,
    ExclusiveCreate,
    JointWriter,
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    finished_name,
    short_read,
    unfinished_name,
)

_LINK_UNSUPPORTED = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}
_MISSING = (FileNotFoundError, NotADirectoryError)
# The answer of a file server, or its file handle, was lost: the request may have been carried out.
_UNANSWERED = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EINTR}


class LocalStore(Store):
    """The files below the directory `root`, which the first write creates.

    `exclusive_create` becomes NONE, and nothing can be written any more, once the filesystem turns
    out to have neither `link` nor `renameat2(RENAME_NOREPLACE)`.
    """

    is_disk = True

    def __init__(self, root: str, *, open_files_max: int = 32) -> None:
        # POSIX lets abspath keep two leading slashes, and no parent of a path ever equals such a
        # root.
        self._root = "/" + os.path.abspath(root).lstrip("/")
        self.url = self._root
        self.exclusive_create = ExclusiveCreate.ATOMIC
        self._open_files = OpenFiles(open_files_max)
        self._around_cache = AroundCache()
        self._latest: dict[str, int] = {}  # files in the page cache, and their sizes
        # Directories whose own entry in their parent is known to survive a power failure.
        self._entry_durable: set[str] = set()
        self._made_above_root: set[str] = set()

    @property
    def place(self) -> str:
        return os.path.realpath(self._root)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if byte_range is not None:
            target = bytearray(byte_range.nbytes)
            self._read(key, byte_range.start, [memoryview(target)])
            return bytes(target)
        # Whole objects are read once: only files that are read in ranges stay open.
        try:
            with self._open_files.uncached(self._path(key)) as file:
                target = bytearray(file.nbytes)
                read_into(file, 0, [memoryview(target)] if target else [])
                return bytes(target)
        except OSError as error:
            raise self._translated(error, "read", key) from error

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._read(key, start, flat_views(buffers))

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._read(key, start, flat_views(buffers), direct=True)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        start, nbytes = byte_range.start, byte_range.nbytes
        try:
            with self._open_files.acquire(self._path(key)) as file:
                return cached_nbytes(file.fd, start, nbytes) * 2 < nbytes
        except OSError as error:
            raise self._translated(error, "read", key) from error

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> LocalWriter:
        ledger = PartLedger(key, nbytes, part_nbytes)
        # O_DIRECT takes no other offsets, and a part begins where the one before it ends.
        aligned = part_nbytes % ALIGNMENT_BYTES == 0 or part_nbytes >= nbytes
        direct = direct and aligned and nbytes > 0
        if not direct and nbytes >= CACHED_NBYTES_MIN:
            make_room(self._latest, self._path(key), nbytes)
        return LocalWriter(self, ledger, durable=durable, direct=direct)

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        final = self._path(key)
        with self._translating("create", key):
            if os.path.lexists(final):
                raise KeyExistsError(f"create {key}: exists already in {self.url}")
            temp, fd = self._open_unfinished(final)
            try:
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)
        return os.path.basename(temp)

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> LocalJointWriter:
        return LocalJointWriter(self, PartLedger(key, nbytes, part_nbytes), token)

    def end_joint(
        self, key: str, nbytes: int, *, part_nbytes: int, token: str, receipts: Mapping[int, str]
    ) -> None:
        if missing := part_count(nbytes, part_nbytes) - len(receipts):
            raise ValueError(f"{key}: {missing} parts were never written; not published")
        final = self._path(key)
        # The bytes are durable: every writer has synced the file after its own parts.
        with self._translating("create", key):
            self._publish(os.path.join(os.path.dirname(final), token), final)
            self._sync_directories([os.path.dirname(final)])

    def abort_joint(self, key: str, token: str) -> None:
        _remove_quietly(os.path.join(os.path.dirname(self._path(key)), token))

    def put_if_absent(self, key: str, data: bytes) -> None:
        final = self._path(key)
        taken: FileExistsError | None = None
        attempted = published = False
        try:
            temp, fd = self._open_unfinished(final)
            try:
                file = BufferedFile(fd)
                file.write([memoryview(data)] if data else [], 0)
                file.finish(len(data), durable=True)
                attempted = True
                self._publish(temp, final)
                published = True
            except FileExistsError as error:
                taken = error
            finally:
                if not published:
                    _remove_quietly(temp)
            # Also where the object was there already: a caller that repeats a write of unknown
            # outcome takes that for success, so it has to survive a power failure, too.
            self._sync_directories([os.path.dirname(final)])
        except OSError as error:
            if published or taken is not None:
                raise OutcomeUnknownError(
                    f"create {key} in {self.url}: it is there, but whether it survives a power "
                    f"failure is unknown, because its directory could not be synced: {error}"
                ) from error
            if attempted and error.errno in _UNANSWERED:
                raise OutcomeUnknownError(f"create {key} in {self.url}: {error}") from error
            raise self._translated(error, "create", key) from error
        if taken is not None:
            raise KeyExistsError(f"create {key}: exists already in {self.url}") from taken

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        base = check_prefix(prefix).rpartition("/")[0]
        with self._translating("list", prefix):
            yield from self._walk(base + "/" if base else "", prefix, after, ())

    def info(self, key: str) -> ObjectInfo:
        try:
            status = os.stat(self._path(key))
        except OSError as error:
            raise self._translated(error, "info", key) from error
        if not stat.S_ISREG(status.st_mode):
            raise KeyNotFoundError(f"info {key}: not a file, in {self.url}")
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._open_files.forget(path)
        if problem := self.why_not_delete(key):
            raise AccessDeniedError(f"delete {key} in {self.url}: {problem}")
        try:
            with self._translating("delete", key):
                os.unlink(path)
        except KeyNotFoundError:
            return
        # An object store has no empty directories. The ones at the top stay: all writers share
        # them, and a writer remembers which it has synced.
        directory = os.path.dirname(path)
        for _ in range(key.count("/") - 1):
            self._entry_durable.discard(directory)
            try:
                os.rmdir(directory)
            except OSError:
                return
            directory = os.path.dirname(directory)

    def why_not_delete(self, prefix: str) -> str:
        # What a link leads to, below the directories at the top, may be another's.
        parts = prefix.split("/")[:-1]
        for count in range(2, len(parts) + 1):
            path = "/".join(parts[:count])
            if os.path.islink(f"{self._root}/{path}"):
                return (
                    f"{path} is a symbolic link, and nothing is deleted through links; remove it, "
                    "and what it leads to, by hand"
                )
        return ""

    def sync(self, keys: Iterable[str]) -> None:
        directories: dict[str, None] = {}
        for key in keys:
            path = self._path(key)
            with self._translating("sync", key):
                _sync_path(path, os.O_RDONLY)
            directories[os.path.dirname(path)] = None
        # After the files, and once for all files of a directory.
        with self._translating("sync", "directories of what was written"):
            self._sync_directories(directories)

    def abort_unfinished(self, prefix: str) -> int:
        base = check_prefix(prefix).rpartition("/")[0]
        if self.why_not_delete(prefix):
            return 0
        top = os.path.join(self._root, base) if base else self._root
        removed = 0
        for directory, _, names in os.walk(top):
            within = os.path.relpath(directory, self._root)
            for name in names:
                meant = finished_name(name)
                if meant is None:
                    continue
                key = meant if within == "." else f"{within}/{meant}"
                if key.startswith(prefix):
                    with suppress(KeyNotFoundError), self._translating("abort", key):
                        os.unlink(os.path.join(directory, name))
                        removed += 1
        return removed

    def rest(self) -> None:
        self._open_files.close()

    close = rest

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _read(
        self, key: str, start: int, views: Sequence[memoryview], *, direct: bool = False
    ) -> None:
        end = start + sum(view.nbytes for view in views)
        try:
            with self._open_files.acquire(self._path(key)) as file:
                read = self._around_cache.read_into if direct else read_into
                if start < 0 or end > file.nbytes or read(file, start, views) < end - start:
                    raise short_read(self.url, key, ByteRange(start, end), file.nbytes)
        except OSError as error:
            raise self._translated(error, "read", key) from error

    def _walk(
        self, within: str, prefix: str, after: str, parents: tuple[tuple[int, int], ...]
    ) -> Iterator[ObjectInfo]:
        """What the directory `within` ("" or "a/b/") holds, in key order, lazily."""
        try:
            with os.scandir(f"{self._root}/{within}") as entries:
                here = _identity(f"{self._root}/{within}")
                # A directory sorts by its name with the slash, as the keys in it do.
                names = sorted((f"{e.name}/" if e.is_dir() else e.name, e) for e in entries)
        except _MISSING:
            return
        if here in parents:
            return  # a symbolic link to a directory that we are in
        for name, entry in names:
            key = within + name
            if finished_name(entry.name) is not None or not _is_text(name):
                continue
            if name.endswith("/"):
                passed = key < after and not after.startswith(key)
                if not passed and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from self._walk(key, prefix, after, (*parents, here))
            elif key > after and key.startswith(prefix):
                try:
                    status = entry.stat()
                except _MISSING:
                    continue  # deleted since the directory was read, or a dangling link
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    def _open_unfinished(self, final: str) -> tuple[str, int]:
        """A new file to be published as `final`: its path, and a descriptor open for writing."""
        # A training reads once and writes for weeks: what it has read would keep its space.
        self._open_files.give_up_deleted()
        directory, name = os.path.split(final)
        temp = os.path.join(directory, unfinished_name(name, uuid.uuid4().hex[:16]))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for tries_left in (3, 2, 1, 0):
            try:
                return temp, os.open(temp, flags, 0o666)
            except FileNotFoundError:
                # No directory yet, or another process removed it because it was empty.
                if not tries_left:
                    raise
                self._make_directory(directory)
        raise AssertionError("unreachable")

    def _make_directory(self, directory: str) -> None:
        missing = []
        while not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        for path in reversed(missing):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", path) from None
            if self._root.startswith(path + "/"):
                self._made_above_root.add(path)

    def _publish(self, temp: str, final: str) -> None:
        """Give `temp` its final name. FileExistsError when that is taken; `temp` stays then."""
        ours = _identity(temp)
        # Not a rename, which would replace what another writer has published.
        try:
            os.link(temp, final)
        except FileExistsError:
            # NFS repeats a request whose reply was lost, and answers the second one. The name is
            # ours when it is a name of our file. The number of links would not show it: a backup
            # that makes hard links (cp -al) gives `temp` others. Where a file system has no lasting
            # identities, our own object counts as another's; the caller recognises it by its bytes.
            if not _is_file(final, ours):
                raise
        except OSError as error:
            if error.errno not in _LINK_UNSUPPORTED:
                raise
            self._publish_by_rename(temp, final)
            return
        _remove_quietly(temp)  # it is published; a name that stays is an unfinished object's

    def _publish_by_rename(self, temp: str, final: str) -> None:
        try:
            rename_without_replacing(temp, final)
        except OSError as error:  # that the name is taken, too
            if error.errno not in _LINK_UNSUPPORTED:
                raise
            self.exclusive_create = ExclusiveCreate.NONE
            raise StorageError(
                f"create in {self.url}: this filesystem has neither link nor a rename that does "
                "not replace, so two writers could overwrite each other; use another filesystem"
            ) from error

    def _sync_directories(self, directories: Iterable[str]) -> None:
        for directory in directories:
            # From the top, so that a directory counts as durable only when all above it are.
            for step in reversed(self._lineage(directory)):
                if step not in self._entry_durable:
                    self._sync_entry(step)
                    self._entry_durable.add(step)
            _sync_path(directory, os.O_RDONLY | os.O_DIRECTORY)

    def _lineage(self, directory: str) -> Sequence[str]:
        """`directory` and those above it, to the root, or to the topmost one that we have made."""
        lineage = [directory]
        while directory != self._root:
            directory = os.path.dirname(directory)
            lineage.append(directory)
        while (directory := os.path.dirname(directory)) in self._made_above_root:
            lineage.append(directory)
        return lineage

    def _sync_entry(self, directory: str) -> None:
        parent = os.path.dirname(directory)
        try:
            _sync_path(parent, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            # The parent of the root may be closed to us; then we have not made the root either.
            if directory != self._root:
                raise

    @contextmanager
    def _translating(self, operation: str, key: str) -> Iterator[None]:
        """What the block raises, as an error of this package that names the operation. Reads, which
        are many, do without its six calls.
        """
        try:
            yield
        except OSError as error:
            raise self._translated(error, operation, key) from error

    def _translated(self, error: OSError, operation: str, key: str) -> StorageError:
        where = f"{operation} {key} in {self.url}"
        code = error.errno
        if code == errno.EEXIST and operation == "create":
            return KeyExistsError(f"create {key}: exists already in {self.url}")
        # While one creates, a directory is missing: that is no missing object.
        if code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and operation != "create":
            return KeyNotFoundError(f"{where}: no such object")
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            return AccessDeniedError(
                f"{where}: {error.strerror}; give this user the right to, or use another place"
            )
        if code == errno.ENOTDIR:
            return StorageError(
                f"{where}: {error.strerror}: a part of this path is a file; use another place"
            )
        if code in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(f"{where}: {error.strerror}; free space or use another place")
        if code == errno.EFBIG:
            return NoSpaceError(f"{where}: larger than the limit for files here (see ulimit -f)")
        if code == errno.ENAMETOOLONG:
            return InvalidKeyError(f"{where}: the path is too long for this filesystem")
        if code in (errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY):
            return TransientError(f"{where}: {error.strerror}")
        return StorageError(f"{where}: {error.strerror or error}")


class LocalWriter(LedgerWriter):
    """A file under construction. A process that dies leaves a `.tmp-` file at most."""

    def __init__(
        self, store: LocalStore, ledger: PartLedger, *, durable: bool, direct: bool
    ) -> None:
        super().__init__(ledger)
        self._store = store
        self._durable = durable
        self._direct = direct
        self._final = store._path(ledger.key)
        self._temp = ""
        self._file: BufferedFile | DirectFile = BufferedFile(-1)

    def __enter__(self) -> LocalWriter:
        store = self._store
        try:
            # Not a promise, which only publishing can give, but it saves writing in vain.
            if os.path.lexists(self._final):
                raise KeyExistsError(f"create {self._ledger.key}: exists already in {store.url}")
            self._temp, fd = store._open_unfinished(self._final)
            if self._direct:
                self._file = DirectFile(fd, self._ledger.nbytes)
            else:
                self._file = BufferedFile(fd)
        except OSError as error:
            self._discard()
            raise store._translated(error, "create", self._ledger.key) from error
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        where = self._ledger.claim(index, buffers)
        try:
            self._file.write(flat_views(buffers), where.start)
        except OSError as error:
            self._ledger.release(index)  # a caller may repeat the part
            raise self._store._translated(error, "create", self._ledger.key) from error

    def _publish(self) -> None:
        store = self._store
        # The bytes reach the disk before the name does, and the name before this returns.
        with store._translating("create", self._ledger.key):
            self._file.finish(self._ledger.nbytes, durable=self._durable)
            store._publish(self._temp, self._final)
            self._temp = ""
            if self._durable:
                store._sync_directories([os.path.dirname(self._final)])

    def _discard(self) -> None:
        self._file.close()
        if self._temp:
            _remove_quietly(self._temp)
            self._temp = ""


class LocalJointWriter(JointWriter):
    """Writes parts of a file that another process of this machine, or of another one with the same
    file system, has begun.
    """

    def __init__(self, store: LocalStore, ledger: PartLedger, token: str) -> None:
        self.receipts = {}
        self._store = store
        self._ledger = ledger
        path = os.path.join(os.path.dirname(store._path(ledger.key)), token)
        with store._translating("write", ledger.key):
            self._file = BufferedFile(os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        where = self._ledger.claim(index, buffers)
        try:
            self._file.write(flat_views(buffers), where.start)
        except OSError as error:
            self._ledger.release(index)
            raise self._store._translated(error, "write", self._ledger.key) from error
        self.receipts[index] = ""

    def close(self) -> None:
        try:
            with self._store._translating("write", self._ledger.key):
                if self.receipts:
                    self._file.finish(self._ledger.nbytes, durable=True)
        finally:
            self._file.close()


def _sync_path(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_quietly(path: str) -> None:
    """Clean up after a failure whose cause must not be hidden by a second one."""
    with suppress(OSError):
        os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_file(path: str, identity: tuple[int, int]) -> bool:
    """Whether `path` itself, not what it may link to, is that file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == identity


def _is_text(name: str) -> bool:
    """False for file names that are not UTF-8: they are no keys."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
