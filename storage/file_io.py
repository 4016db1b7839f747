"""Reading and writing open files: whole vectors of buffers, around the page cache or through it;
and the system calls for it that Python lacks, OSError(ENOSYS) where the system has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import stat
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from storage.errors import AccessDeniedError
from storage.forks import ForkSafeLock
from storage.ranges import address_of, copy_to, drop_front

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYS_CACHESTAT = 451  # on every architecture that torch runs on; since Linux 6.5
_IN_MEMORY = (0x01021994, 0x858458F6)  # the types of tmpfs and of ramfs


def rename_without_replacing(source: str, target: str) -> None:
    """Rename in one step, or raise FileExistsError and change nothing. See renameat2(2)."""
    ends = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target))
    _call("renameat2", *ends, _RENAME_NOREPLACE)


def allocate(fd: int, nbytes: int, *, start: int = 0) -> None:
    """Reserve disk space from `start` on and grow the file to `nbytes`. See fallocate(2).

    Not `os.posix_fallocate`, which writes into every block where the filesystem cannot reserve:
    there this raises OSError(EOPNOTSUPP) and changes nothing.
    """
    _call("fallocate", fd, 0, start, nbytes - start)


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin with these dirty pages now instead of at fsync. See sync_file_range(2)."""
    _call("sync_file_range", fd, start, nbytes, _SYNC_FILE_RANGE_WRITE)


def cached_nbytes(fd: int, start: int, nbytes: int) -> int:
    """How many of these bytes of a file are in the page cache, in whole pages.

    All of them where the kernel does not tell: it has neither cachestat(2) nor, for a file of
    another user, an honest mincore(2). Not preadv2(2) with RWF_NOWAIT, which starts to read what it
    does not find.
    """
    if nbytes <= 0:
        return 0
    with contextlib.suppress(OSError):
        return _cachestat(fd, start, nbytes) * mmap.PAGESIZE
    with contextlib.suppress(OSError, ValueError):
        return _mincore(fd, start, nbytes) * mmap.PAGESIZE
    return nbytes


def _cachestat(fd: int, start: int, nbytes: int) -> int:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "cachestat is not available here")
    answer = (ctypes.c_uint64 * 5)()  # pages in the cache, dirty, under writeback, evicted, ...
    _call("syscall", _SYS_CACHESTAT, fd, (ctypes.c_uint64 * 2)(start, nbytes), answer, 0)
    return int(answer[0])


def _mincore(fd: int, start: int, nbytes: int) -> int:
    before = start % mmap.ALLOCATIONGRANULARITY
    length = before + nbytes
    answer = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start - before) as mapped:
        # The array holds on to the mapping, so it has to be gone before that is closed.
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        _call("mincore", address, length, answer.ctypes.data)
    return int((answer & 1).sum())


_INT, _LONG, _UINT, _INT64 = ctypes.c_int, ctypes.c_long, ctypes.c_uint, ctypes.c_int64
_PATH, _POINTER = ctypes.c_char_p, ctypes.c_void_p
_ARGUMENTS = {
    "renameat2": (_INT, _PATH, _INT, _PATH, _UINT),
    "fallocate": (_INT, _INT, _INT64, _INT64),
    "sync_file_range": (_INT, _INT64, _INT64, _UINT),
    "syscall": (_LONG, _INT, _POINTER, _POINTER, _UINT),
    "mincore": (_POINTER, ctypes.c_size_t, _POINTER),
    "statfs": (_PATH, _POINTER),
}


@functools.cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name} is not available here")
    function.argtypes = _ARGUMENTS[name]
    return function


def _call(name: str, *arguments: Any) -> None:
    function = _function(name)
    while function(*arguments) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def is_in_memory(path: str) -> bool:
    """Whether `path` lies in a file system that is memory: tmpfs or ramfs. See statfs(2).

    False where the system does not tell.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Its first field, a word, is the type of the file system; the rest is of no use here.
    answer = (ctypes.c_long * 64)()
    try:
        _call("statfs", os.fsencode(path), answer)
    except OSError:
        return False
    return answer[0] & 0xFFFFFFFF in _IN_MEMORY


def private_folder(path: str) -> None:
    """Make a folder that other users of this host can neither read nor change; one that is there
    becomes so.

    Raises AccessDeniedError where it, or the folder that it is in, is a link, belongs to another
    user, or can be changed by others: they could have put something into it, or take its place.
    """
    parent = os.path.dirname(path)
    for place in (parent, path):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            status = os.lstat(place)
        except FileExistsError:
            status = os.lstat(place)
        except OSError:
            return  # a write there gets the error
        # A folder for all, such as /tmp, lets nobody rename what is another's.
        is_shared = place == parent and bool(status.st_mode & stat.S_ISVTX)
        problem = ""
        if not stat.S_ISDIR(status.st_mode):
            problem = "a link" if stat.S_ISLNK(status.st_mode) else "no folder"
        elif status.st_uid != os.geteuid() and not (is_shared and status.st_uid == 0):
            problem = f"the folder of user {status.st_uid}"
        elif status.st_mode & 0o022 and not is_shared:
            problem = f"a folder that others can change (mode {status.st_mode & 0o777:o})"
        if problem:
            raise AccessDeniedError(
                f"{place} is {problem}; name a folder that is this user's alone, or remove it"
            )
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)


# What O_DIRECT requires of addresses, offsets and lengths: the largest usual logical block.
ALIGNMENT_BYTES = 4096
# O_DIRECT writes of this size reached the speed of the disk with one thread (DECISIONS.md S1).
DIRECT_WRITE_BYTES = 16 * 1024 * 1024
# Vectors per preadv/pwritev: IOV_MAX of Linux.
_VECTORS_MAX = 1024
# Smaller writes are left to the kernel, which merges them.
_WRITEBACK_BYTES_MIN = 1024 * 1024

# Of one write through the page cache. The kernel allocates it in pieces as large as the write, and
# large ones are fresh memory, which virtual machines get from their host first: 512 MiB on each of
# 2 ranks took 1.3 s in writes of 8 MiB, 1.0 of 1 MiB, 0.35 of 64 to 512 KiB (DECISIONS.md S30).
_CACHED_WRITE_BYTES = 256 * 1024

_DIRECT_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_DIRECT", 0)
# What filesystems answer that cannot read around the cache, or not with this alignment.
_DIRECT_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}


def read_into(file: OpenFile, start: int, views: Sequence[memoryview]) -> int:
    """Fill `views` from byte `start` on; returns the bytes read, fewer at the file's end."""
    fd = file.fd
    if len(views) == 1:
        got = os.preadv(fd, views, start)
        if got == views[0].nbytes:  # by far the most frequent case
            return got
    else:
        got = 0
    rest = drop_front(list(views), got)
    # The kernel reads at most 2 GiB at a time, and less when a signal comes in between.
    while rest:
        count = os.preadv(fd, rest[:_VECTORS_MAX], start + got)
        if count == 0:
            return got
        got += count
        rest = drop_front(rest, count)
    return got


class AroundCache:
    """Reads around the page cache, and through it where the filesystem refuses that. Thread-safe.

    By way of aligned memory of its own, which is there while any read is under way. Not straight
    into the caller's: a fork in the middle of a direct read into private memory could leave the
    bytes in the child (open(2)), and an anonymous `mmap` of Python is shared.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._readers = 0
        self._lock = ForkSafeLock()

    def read_into(self, file: OpenFile, start: int, views: Sequence[memoryview]) -> int:
        """As the function of this name."""
        nbytes = sum(view.nbytes for view in views)
        first = start // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        # Whole blocks around what is requested; at the end of the file the kernel reads less.
        room = -(-(start - first + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._memory(room) as memory, memoryview(memory)[:room] as window:
            got = max(0, _read_aligned(file, first, window) - (start - first))
            done = copy_to(views, window[start - first :], min(got, nbytes))
        rest = drop_front(list(views), done)
        return done + read_into(file, start + done, rest) if rest else done

    @contextlib.contextmanager
    def _memory(self, nbytes: int) -> Iterator[mmap.mmap]:
        with self._lock:
            self._readers += 1
            memory = self._free.pop() if self._free else None
        try:
            if memory is None or len(memory) < nbytes:
                memory = mmap.mmap(-1, nbytes)  # in whole pages, as O_DIRECT wants it
            yield memory
        finally:
            with self._lock:
                self._readers -= 1
                if memory is not None:
                    self._free.append(memory)
                if not self._readers:
                    self._free.clear()


def _read_aligned(file: OpenFile, start: int, window: memoryview) -> int:
    """The bytes that were read around the page cache, fewer at the file's end or when refused."""
    # A read that ends within a block has met the end: there is nothing aligned to continue from.
    fd = file.direct_fd()
    done = 0
    while fd >= 0 and done < window.nbytes:
        try:
            count = os.preadv(fd, [window[done:]], start + done)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            file.refuses_direct = True
            break
        done += count
        if not count or count % ALIGNMENT_BYTES:
            break
    return done


def _front(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """At most the first `nbytes` of `views`, in as many vectors as one call takes."""
    front: list[memoryview] = []
    for view in views[:_VECTORS_MAX]:
        front.append(view[:nbytes])
        nbytes -= front[-1].nbytes
        if not nbytes:
            break
    return front


class BufferedFile:
    """Writes through the page cache. Owns the descriptor. Thread-safe until `finish`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, views: list[memoryview], start: int) -> None:
        end = start
        while views:
            count = os.pwritev(self._fd, _front(views, _CACHED_WRITE_BYTES), end)
            end += count
            views = drop_front(views, count)
        if end - start >= _WRITEBACK_BYTES_MIN:
            # The disk works while the next part is prepared: a third less time in all. It is a
            # hint; a filesystem without it loses nothing, and errors come back from fsync.
            with contextlib.suppress(OSError):
                start_writeback(self._fd, start, end - start)

    def finish(self, nbytes: int, *, durable: bool) -> None:
        # Before the name: a name without its bytes would be a torn object after a power failure.
        if durable:
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # a writer that was abandoned, as by a killed rank in tests


class DirectFile:
    """Writes around the page cache, and through it where the filesystem refuses that.

    Owns the descriptor. Thread-safe until `finish`. Parts must start at multiples of 4096.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._buffered = BufferedFile(fd)
        self._fd = fd
        self._staging: list[mmap.mmap] = []
        padded = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        try:
            # Without it every write would have to grow the file, which serialises them.
            allocate(fd, padded)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                self.close()
                raise
        self._direct = self._set_direct(True)

    def write(self, views: list[memoryview], start: int) -> None:
        if not self._direct:
            self._buffered.write(views, start)
        elif len(views) == 1 and address_of(views[0]) % ALIGNMENT_BYTES == 0:
            body_nbytes = views[0].nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            self._write_aligned(views[0][:body_nbytes], start)
            self._write_copied([views[0][body_nbytes:]], start + body_nbytes)
        else:
            self._write_copied(views, start)

    def finish(self, nbytes: int, *, durable: bool) -> None:
        # The space was allocated, and the end was written, in whole blocks.
        os.ftruncate(self._fd, nbytes)
        self._buffered.finish(nbytes, durable=durable)
        self.close()

    def close(self) -> None:
        self._buffered.close()
        self._staging.clear()

    def _write_aligned(self, view: memoryview, start: int) -> None:
        done = 0
        refused = False
        while done < view.nbytes:
            piece = view[done : done + DIRECT_WRITE_BYTES]
            try:
                done += os.pwrite(self._fd, piece, start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                # Some filesystems accept the flag and refuse the write: once more, through the
                # cache, and so for all parts that follow.
                refused = True
                self._direct = self._set_direct(False)
            if done % ALIGNMENT_BYTES and self._direct:
                # A disk that is nearly full accepts part of a write; the next write returns the
                # error.
                done -= done % ALIGNMENT_BYTES

    def _write_copied(self, views: list[memoryview], start: int) -> None:
        """Through aligned memory of our own; the end is padded with zeros to a whole block."""
        total = sum(view.nbytes for view in views)
        if not total:
            return
        stage = self._take_staging(min(total, DIRECT_WRITE_BYTES))
        filled = 0
        with memoryview(stage) as target:
            for view in views:
                done = 0
                while done < view.nbytes:
                    count = min(view.nbytes - done, target.nbytes - filled)
                    target[filled : filled + count] = view[done : done + count]
                    done += count
                    filled += count
                    if filled == target.nbytes:
                        self._write_aligned(target, start)
                        start += filled
                        filled = 0
            if filled:
                padded = -(-filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                target[filled:padded] = bytes(padded - filled)
                self._write_aligned(target[:padded], start)
        self._staging.append(stage)

    def _take_staging(self, nbytes: int) -> mmap.mmap:
        with contextlib.suppress(IndexError):  # empty, or another thread took the last one
            while True:
                candidate = self._staging.pop()
                if len(candidate) >= nbytes:
                    return candidate
        return mmap.mmap(-1, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)

    def _set_direct(self, wanted: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted


class OpenFile:
    """An open file in use by some threads; closed when it is retired and the last one leaves."""

    def __init__(self, owner: OpenFiles, path: str) -> None:
        self._direct_fd = -1
        # O_NONBLOCK: opening a named pipe that somebody left in the directory must not wait.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        self.nbytes = status.st_size
        self.users = 1
        self.refuses_direct = not hasattr(os, "O_DIRECT")
        self._path = path
        self._opening = ForkSafeLock()
        self.retired = False
        self._owner = owner

    def is_deleted(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0

    def direct_fd(self) -> int:
        """A descriptor for reads around the page cache, -1 where these are refused."""
        with self._opening:
            if self._direct_fd < 0 and not self.refuses_direct:
                try:
                    self._direct_fd = os.open(self._path, _DIRECT_FLAGS)
                except OSError:
                    # Whatever the reason: `fd` is open, and gives the bytes or the right error.
                    self.refuses_direct = True
            return -1 if self.refuses_direct else self._direct_fd

    def close(self) -> None:
        fds, self.fd, self._direct_fd = (self.fd, self._direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.release(self)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close()


class OpenFiles:
    """Keeps the files that were read last open, because many reads of one file follow each other.

    Right only for files that never change. One that was deleted is noticed, and given up as soon as
    another is opened: its space would stay taken as long as it is open. Thread-safe.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = ForkSafeLock()

    def uncached(self, path: str) -> OpenFile:
        """For one read of a whole file: opened now, closed at the end of the `with` block."""
        file = OpenFile(self, path)
        file.retired = True
        return file

    def acquire(self, path: str) -> OpenFile:
        """To be used in a `with` block, which gives it back."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                file.users += 1
                self._files.move_to_end(path)
        if file is not None:
            if not file.is_deleted():
                return file
            self.forget(path)
            self.release(file)
        self.give_up_deleted()
        # Outside of the lock: an open on a network file system may take seconds.
        file = OpenFile(self, path)
        with self._lock:
            self._retire(path)  # another thread may have opened it at the same time
            self._files[path] = file
            while len(self._files) > self._count_max:
                self._retire(next(iter(self._files)))
        return file

    def release(self, file: OpenFile) -> None:
        with self._lock:
            file.users -= 1
            unused = file.retired and file.users == 0
        if unused:
            file.close()

    def forget(self, path: str) -> None:
        with self._lock:
            self._retire(path)

    def give_up_deleted(self) -> None:
        """Close the files that somebody has deleted and that nobody reads."""
        with self._lock:
            for path, file in tuple(self._files.items()):
                if file.users == 0 and file.is_deleted():
                    self._retire(path)

    def close(self) -> None:
        with self._lock:
            for path in tuple(self._files):
                self._retire(path)

    def _retire(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is None:
            return
        file.retired = True
        if file.users == 0:
            file.close()
