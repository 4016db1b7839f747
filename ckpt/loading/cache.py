"""A local copy of what loads have read, for the next load on this machine.

One sparse file per data file, with every block at its offset in that file. Nothing records which
blocks are present or correct: the reader checks them against the manifest, fetches those that do
not match, and writes them back. So a cache may be shared, damaged, truncated or from another run:
bytes that match are used, all others are read from the store again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from storage.forks import ForkSafeLock

_log = logging.getLogger(__name__)

_OURS = re.compile(r"blocks-[0-9a-f]{40}")  # nothing else in the directory is ever touched
_RECOUNT_NBYTES = 256 << 20  # other processes fill the same directory; look again so often
_VECTORS_MAX = 512  # of one system call; Linux takes 1024


class BlockCache:
    """Bytes of data files below `directory`, at most about `nbytes_max` of them on the disk.

    When it is full, the least recently used files are deleted, but none that this object used: what
    does not fit beside those is not kept. Ranks and processes may share a directory. Disk failures
    are logged once and make the cache useless, never wrong.
    """

    def __init__(self, directory: str | os.PathLike[str], nbytes_max: int | None = None) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._nbytes_max = nbytes_max
        self._used: set[str] = set()
        self._filled_nbytes = 0
        self._uncounted_nbytes = _RECOUNT_NBYTES
        self._is_broken = False
        self._lock = ForkSafeLock()

    def fill(self, root: str, key: str, start: int, buffers: Sequence[memoryview]) -> bool:
        """Fill `buffers` with the bytes of a data file from `start` on; the caller must check them.

        `root` is the identity of the checkpoint's root. False when the cache does not have them;
        then the buffers hold undefined bytes.
        """
        path = self._path(root, key)
        try:
            # Others may write to the directory: a link is not followed, and a pipe does not make us
            # wait.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or _starts_in_hole(fd, start):
                return False
            self._note_use(path)
            return _read_all(fd, start, buffers)
        except OSError:
            return False
        finally:
            os.close(fd)

    def keep(self, root: str, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Keep the bytes of a data file from `start` on. Disk errors are logged and not raised."""
        path = self._path(root, key)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        try:
            with self._lock:
                self._used.add(path.name)
                if self._is_broken or not self._make_room(nbytes):
                    return
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
            try:
                _write_all(fd, start, buffers)
            finally:
                os.close(fd)
        except OSError as error:
            with self._lock:
                if not self._is_broken:
                    _log.warning("the cache %s cannot be written: %s", self._directory, error)
                self._is_broken = True

    def _path(self, root: str, key: str) -> Path:
        name = hashlib.sha256(f"{root}/{key}".encode()).hexdigest()[:40]
        return self._directory / f"blocks-{name}"

    def _note_use(self, path: Path) -> None:
        with self._lock:
            if path.name not in self._used:
                self._used.add(path.name)
                os.utime(path)  # files are deleted in the order of this time

    def _make_room(self, nbytes: int) -> bool:
        if self._nbytes_max is None:
            return True
        self._uncounted_nbytes += nbytes
        if self._uncounted_nbytes >= _RECOUNT_NBYTES:
            self._uncounted_nbytes = 0
            # By blocks on the disk and not by length, since the files have holes.
            self._filled_nbytes = sum(entry.st_blocks * 512 for _, entry in self._files())
        if self._filled_nbytes + nbytes > self._nbytes_max:
            self._drop_unused(self._filled_nbytes + nbytes - self._nbytes_max)
        if self._filled_nbytes + nbytes > self._nbytes_max:
            return False
        self._filled_nbytes += nbytes
        return True

    def _drop_unused(self, nbytes: int) -> None:
        for path, entry in sorted(self._files(), key=lambda file: file[1].st_mtime_ns):
            if nbytes <= 0:
                return
            if path.name in self._used:
                continue
            path.unlink(missing_ok=True)
            self._filled_nbytes -= entry.st_blocks * 512
            nbytes -= entry.st_blocks * 512

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    files.append((path, path.lstat()))
        return files


def _starts_in_hole(fd: int, start: int) -> bool:
    """Whether the file has certainly no data at `start`, so that reading it is useless."""
    seek_data = getattr(os, "SEEK_DATA", None)  # Linux
    if seek_data is None:
        return False
    try:
        return os.lseek(fd, start, seek_data) > start
    except OSError:
        return True  # nothing from `start` to the end of the file


def _read_all(fd: int, start: int, buffers: Sequence[memoryview]) -> bool:
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        got = os.preadv(fd, left[:_VECTORS_MAX], start)
        if not got:
            return False
        start += got
        left = _rest(left, got)
    return True


def _write_all(fd: int, start: int, buffers: Sequence[memoryview]) -> None:
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        written = os.pwritev(fd, left[:_VECTORS_MAX], start)
        start += written
        left = _rest(left, written)


def _rest(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= buffer.nbytes
    return []
