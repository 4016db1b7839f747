"""System calls that Python's os module lacks. OSError(ENOSYS) where the system has none."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
from typing import Any

import numpy as np

from storage.errors import AccessDeniedError

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYS_CACHESTAT = 451  # on every architecture that torch runs on; since Linux 6.5
_IN_MEMORY = (0x01021994, 0x858458F6)  # the types of tmpfs and of ramfs


def rename_without_replacing(source: str, target: str) -> None:
    """Rename in one step, or raise FileExistsError and change nothing. See renameat2(2)."""
    _call(
        "renameat2",
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(source)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )


def allocate(fd: int, nbytes: int, *, start: int = 0) -> None:
    """Reserve disk space from `start` on and grow the file to `nbytes`. See fallocate(2).

    Not `os.posix_fallocate`, which writes into every block where the filesystem cannot reserve:
    there this raises OSError(EOPNOTSUPP) and changes nothing.
    """
    length = ctypes.c_int64(nbytes - start)
    _call("fallocate", ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(start), length)


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin with these dirty pages now instead of at fsync. See sync_file_range(2)."""
    _call(
        "sync_file_range",
        ctypes.c_int(fd),
        ctypes.c_int64(start),
        ctypes.c_int64(nbytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    )


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
    _call(
        "syscall",
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_int(fd),
        (ctypes.c_uint64 * 2)(start, nbytes),
        answer,
        ctypes.c_uint(0),
    )
    return int(answer[0])


def _mincore(fd: int, start: int, nbytes: int) -> int:
    before = start % mmap.ALLOCATIONGRANULARITY
    length = before + nbytes
    answer = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start - before) as mapped:
        # The array holds on to the mapping, so it has to be gone before that is closed.
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        _call("mincore", ctypes.c_void_p(address), ctypes.c_size_t(length), answer.ctypes)
    return int((answer & 1).sum())


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name} is not available here")
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
        _call("statfs", ctypes.c_char_p(os.fsencode(path)), answer)
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
            return  # who writes there is told
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
