"""System calls that Python's os module lacks. OSError(ENOSYS) where the system has none."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


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


def allocate(fd: int, nbytes: int) -> None:
    """Reserve disk space and grow the file to `nbytes`. See fallocate(2).

    Not `os.posix_fallocate`, which writes into every block where the filesystem cannot reserve:
    there this raises OSError(EOPNOTSUPP) and changes nothing.
    """
    _call("fallocate", ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin with these dirty pages now instead of at fsync. See sync_file_range(2)."""
    _call(
        "sync_file_range",
        ctypes.c_int(fd),
        ctypes.c_int64(start),
        ctypes.c_int64(nbytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    )


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
