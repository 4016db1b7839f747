"""The checksums of a checkpoint's blocks, from the tables in its data files.

A manifest has a seal per file. The table itself, a few bytes per block at the end of the file, is
read once, before or with the first blocks of that file, and checked.

A cache is one sparse file per data file, with every block at its offset in that file. Nothing
records which blocks are present or correct: the reader checks them against their checksums, fetches
those that do not match, and writes them back. So a cache may be shared, damaged, truncated or from
another run: bytes that match are used, all others are read from the store again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import compress, count, pairwise
from operator import ne
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.commit.locate import file_keys
from ckpt.errors import Corrupt
from ckpt.format.checksum import Uint32s, crc32c_of_each, once_more, seal_of
from ckpt.format.columns import Ints
from ckpt.format.datafile_index import DataFileIndex, check_seal, read_data_file_index, read_into
from ckpt.format.manifest import Int64s, Manifest, is_reference
from storage import Store
from storage.forks import ForkSafeLock
from storage.ranges import drop_front, flat_views


class TableRange(NamedTuple):
    """Where the checksum table of data file number `file` lies: at its end."""

    file: int
    start: int
    stop: int


class _FileSums(NamedTuple):
    """The checksums of the blocks in one file, and the chunks that the manifest has of it with the
    first of theirs; `chunks` ascend.
    """

    checksums: Uint32s
    chunks: Ints
    first: Int64s


class _Reading(NamedTuple):
    """A thread of `process` reads them. In a forked child nothing comes from it."""

    process: int
    future: Future[_FileSums]


class BlockSums:
    """The checksums that the blocks of one checkpoint must have. Safe to use from several threads.

    `keys` and `cache_keys` are those of the data files, in the store and in a cache.

    Methods that may read raise Corrupt, naming the file, when a table is not the one that the
    manifest has the seal of, and the store's errors. What `cache` has is not read from the store.
    """

    def __init__(
        self, store: Store, directory: str, manifest: Manifest, cache: BlockCache | None = None
    ) -> None:
        self.store = store
        self.directory = directory
        self.manifest = manifest
        self.keys = file_keys(directory, manifest)
        # By its own name and not by its path, so that a copy of a checkpoint shares its cache.
        own = f"{manifest.header.step:08d}-{manifest.header.attempt}/"
        self.cache_keys = file_keys(own, manifest)
        self._cache = cache
        self._chunks: dict[int, Ints] = {}  # by file, ascending as their bytes
        self._sums: dict[int, _FileSums | _Reading] = {}
        self._lock = ForkSafeLock()

    def of_blocks(self, chunks: Ints, numbers: Ints) -> Uint32s:
        """The checksums of blocks: `numbers[i]` of chunk `chunks[i]`."""
        files = self.manifest.chunks.file[chunks]
        sums = np.empty(len(chunks), dtype=np.uint32)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            here = self._of_file(file)
            first = here.first[np.searchsorted(here.chunks, chunks[rows])]
            sums[rows] = here.checksums[first + numbers[rows]]
        return sums

    def of_chunks(self, chunks: range) -> Uint32s:
        """The checksums of all blocks of chunks that follow each other in the manifest."""
        first = self.manifest.chunks.first_block
        counts = np.diff(first[chunks.start : chunks.stop + 1]).astype(np.int64)
        ends = np.cumsum(counts)
        numbers = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        return self.of_blocks(np.repeat(np.arange(chunks.start, chunks.stop), counts), numbers)

    def check(
        self,
        data: memoryview,
        sizes: Ints,
        chunks: Ints,
        numbers: Ints,
        known: Uint32s | None = None,
    ) -> None:
        """Raise Corrupt unless `data` are these blocks, one after the other, of these sizes.

        `known` are their checksums, if the caller has them already.
        """
        # Compared as lists: the first wrong row is looked for only where they differ.
        sums = self.of_blocks(chunks, numbers) if known is None else known
        expected, actual = sums.tolist(), crc32c_of_each(data, sizes.tolist())
        if actual != expected:
            row = next(compress(count(), map(ne, actual, expected)))
            chunk, number, manifest = int(chunks[row]), int(numbers[row]), self.manifest
            fqn = manifest.fqns[manifest.tensor_of(chunk)]
            name = self.keys[int(manifest.chunks.file[chunk])]
            start = int(manifest.chunks.byte_start[chunk]) + number * manifest.header.block_bytes
            raise Corrupt(
                f"{name}: block {number} of {fqn!r} (bytes {start} to {start + int(sizes[row])}) "
                "does not match its checksum; the stored bytes were changed. Load an older step, "
                "or restore this file from a copy."
            )

    def read(self, file: int) -> None:
        """Read the table of a file, unless that was done."""
        self._of_file(file)

    def describe(self, file: int, index: DataFileIndex) -> None:
        """The index of a file as it was read by the caller. Raises Corrupt."""
        self.expect(np.array([file]))
        self._sums[file] = self._described(file, index)

    def read_all(self, threads: int) -> None:
        """Read the tables of all files, several at once."""
        files = range(len(self.manifest.files))
        self.expect(np.arange(len(files)))
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-sums") as pool:
            for _ in pool.map(self._of_file, files):
                pass

    def expect(self, files: Ints) -> None:
        """Blocks of these files will be asked for: find their chunks now, in one pass."""
        with self._lock:
            new = np.array([file for file in files.tolist() if file not in self._chunks], dtype=int)
            if not len(new):
                return
            chunks = self.manifest.chunks
            is_new = np.zeros(len(self.manifest.files), dtype=bool)
            is_new[new] = True
            here = np.flatnonzero(is_new[chunks.file])
            here = here[np.lexsort((chunks.byte_start[here], chunks.file[here]))]
            counts = np.bincount(chunks.file[here], minlength=len(is_new))
            edges = [0, *np.cumsum(counts[np.sort(new)]).tolist()]
            for file, (start, stop) in zip(np.sort(new).tolist(), pairwise(edges), strict=True):
                self._chunks[file] = here[start:stop]

    def table_of(self, file: int) -> TableRange:
        """The bytes of a file that hold its table; for a file of another attempt, whose header has
        to be read too, the end of them.
        """
        stop = int(self.manifest.file_nbytes[file])
        return TableRange(file, stop - int(self.manifest.seals.nbytes[file]), stop)

    def may_join(self, file: int) -> bool:
        """Whether a request for blocks of this file can fetch its table, too, and nothing has."""
        return file not in self._sums and not is_reference(self.manifest.files[file])

    def take(self, file: int, table: memoryview) -> None:
        """The table of a file as it was read with blocks of the file. Raises Corrupt."""
        self._check(file, table)
        self.expect(np.array([file]))
        self._sums[file] = self._own(file, table)

    def _of_file(self, file: int) -> _FileSums:
        with self._lock:
            known = self._sums.get(file)
            if isinstance(known, _FileSums):
                return known
            is_mine = known is None or known.process != os.getpid()
            if known is None or is_mine:
                known = self._sums[file] = _Reading(os.getpid(), Future())
        # Outside of the lock: other threads wait for the future, and threads of other files do not
        # wait.
        if is_mine:
            try:
                sums = self._sums[file] = self._read(file)
                known.future.set_result(sums)
            except BaseException as error:
                with self._lock:
                    del self._sums[file]  # a store that failed once may answer the next time
                known.future.set_exception(error)
        return known.future.result()

    def _read(self, file: int) -> _FileSums:
        self.expect(np.array([file]))
        manifest, place = self.manifest, self.table_of(file)
        table = self._room(file, place.stop - place.start)
        parts = [(place.start, table)]
        # A file of another attempt has other chunks besides: its header says which.
        is_ours = not is_reference(manifest.files[file])
        if not is_ours:
            parts.insert(0, (0, self._room(file, int(manifest.file_data_start[file]))))

        def checked() -> _FileSums:
            if is_ours:
                self._check(file, table)
                return self._own(file, table)
            return self._described(file, self._index(file, parts[0][1], table))

        cache, root, key = self._cache, manifest.header.root, self.cache_keys[file]
        if cache is not None and all(cache.fill(root, key, start, [data]) for start, data in parts):
            # As with blocks: what does not match is read from the store.
            with contextlib.suppress(Corrupt):
                return checked()

        def read() -> _FileSums:
            for start, data in parts:
                read_into(self.store, self.keys[file], start, [data])
            return checked()

        sums = once_more(read, self.store)
        if cache is not None:
            for start, data in parts:
                cache.keep(root, key, start, [data])
        return sums

    def _room(self, file: int, nbytes: int) -> memoryview:
        self.manifest.budget.charge(nbytes, f"what {self._where(file)} says of its blocks")
        try:
            return memoryview(bytearray(nbytes))
        except (MemoryError, OverflowError):
            text = f"{self._where(file)}: MANIFEST says that {nbytes} bytes describe it"
            raise Corrupt(text) from None

    def _own(self, file: int, table: memoryview) -> _FileSums:
        """The checksums in a checked table: the manifest has all chunks of the file."""
        chunks = self._chunks[file]
        first = self.manifest.chunks.first_block
        counts = first[chunks + 1] - first[chunks]
        total = int(counts.sum())
        words = np.frombuffer(table, dtype="<u4")
        # In front of them are words about header and reserved tensors, behind them one.
        if len(words) < total + 3:
            raise Corrupt(
                f"{self._where(file)}: {len(words)} words of checksums for {total} blocks of "
                "MANIFEST"
            )
        return _sorted(words[len(words) - 1 - total : -1], chunks, np.cumsum(counts) - counts)

    def _index(self, file: int, header: memoryview, table: memoryview) -> DataFileIndex:
        nbytes = int(self.manifest.file_nbytes[file])

        def read(start: int, stop: int) -> bytes:
            if stop <= len(header):
                return bytes(header[start:stop])
            return bytes(table) if start == nbytes - len(table) and stop == nbytes else b""

        return read_data_file_index(read, nbytes, name=self._where(file))

    def _described(self, file: int, index: DataFileIndex) -> _FileSums:
        """The checksums of a file with this index. Raises Corrupt unless it is the manifest's."""
        check_seal(index.seal, self.manifest.seals.of_file(file), self._where(file))
        chunks = self._chunks[file]
        starts = self.manifest.chunks.byte_start[chunks]
        places = np.searchsorted(index.offsets, starts)
        first = self.manifest.chunks.first_block
        counts = first[chunks + 1] - first[chunks]
        inside = np.minimum(places, len(index.offsets) - 1)
        # A reader trusts neither: the header came from the file, the places from the manifest.
        if (
            (len(chunks) and not len(index.offsets))
            or index.block_bytes != self.manifest.header.block_bytes
            or np.any(index.offsets[inside] != starts)
            or np.any(np.diff(index.first_block)[inside] != counts)
        ):
            raise Corrupt(f"{self._where(file)}: its chunks are not those of MANIFEST")
        return _sorted(index.checksums, chunks, index.first_block[inside])

    def _check(self, file: int, table: memoryview) -> None:
        check_seal(seal_of(table), self.manifest.seals.of_file(file), self._where(file))

    def _where(self, file: int) -> str:
        return f"{self.store.url.rstrip('/')}/{self.keys[file]}"


class NoSums(BlockSums):
    """Of files that another library has written: nothing says what their blocks should be."""

    def of_blocks(self, chunks: Ints, numbers: Ints) -> Uint32s:
        return np.zeros(len(chunks), dtype=np.uint32)

    def check(self, data: memoryview, *about: object, known: Uint32s | None = None) -> None:
        """Bytes are taken as they are."""

    def read(self, file: int) -> None:
        """There is no table."""

    def read_all(self, threads: int) -> None:
        """There are no tables."""

    def may_join(self, file: int) -> bool:
        return False


def sums_of(
    store: Store, directory: str, manifest: Manifest, cache: BlockCache | None = None
) -> BlockSums:
    """The checksums of the blocks of `manifest`, or none where another library wrote the files."""
    kind = BlockSums if manifest.is_sealed else NoSums
    return kind(store, directory, manifest, cache)


def _sorted(checksums: Uint32s, chunks: Ints, first: npt.NDArray[np.integer]) -> _FileSums:
    order = np.argsort(chunks)
    return _FileSums(checksums, chunks[order], first[order].astype(np.int64))


_log = logging.getLogger(__name__)

_OURS = re.compile(r"blocks-[0-9a-f]{40}")  # nothing else in the directory is ever touched
_RECOUNT_NBYTES = 256 << 20  # other processes fill the same directory; look again so often
_VECTORS_MAX = 512  # of one system call; Linux takes 1024


class BlockCache:
    """Bytes of data files below `directory`, at most about `nbytes_max` of them on the disk.

    When it is full, the least recently used files are deleted, but none that this object used: what
    does not fit besides those is not kept. Ranks and processes may share a directory. Disk failures
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

    def expect(self, root: str, keys: Iterable[str]) -> None:
        """What is read next: none of these data files makes room for another one of them."""
        for key in keys:
            with contextlib.suppress(OSError):  # of those that it does not have
                self._note_use(self._path(root, key))

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
            left = flat_views(buffers)
            while left:
                got = os.preadv(fd, left[:_VECTORS_MAX], start)
                if not got:
                    return False
                start += got
                left = drop_front(left, got)
            return True
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
            # For this user alone: the directory may be shared, the checkpoint may be private.
            fd = os.open(path, flags, 0o600)
            try:
                left = flat_views(buffers)
                while left:
                    written = os.pwritev(fd, left[:_VECTORS_MAX], start)
                    start += written
                    left = drop_front(left, written)
            finally:
                os.close(fd)
        except OSError as error:
            with self._lock:
                if not self._is_broken:
                    _log.warning("the cache %s cannot be written: %s", self._directory, error)
                self._is_broken = True

    def _path(self, root: str, key: str) -> Path:
        # A key has slashes, and with the root it may be longer than a file's name may be.
        name = hashlib.sha256(f"{root}/{key}".encode()).hexdigest()[:40]
        return self._directory / f"blocks-{name}"

    def _note_use(self, path: Path) -> None:
        with self._lock:
            # Once per file and object: a load asks thousands of times.
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
            for path, entry in sorted(self._files(), key=lambda file: file[1].st_mtime_ns):
                if self._filled_nbytes + nbytes <= self._nbytes_max:
                    break
                if path.name not in self._used:
                    path.unlink(missing_ok=True)
                    self._filled_nbytes -= entry.st_blocks * 512
        if self._filled_nbytes + nbytes > self._nbytes_max:
            return False
        self._filled_nbytes += nbytes
        return True

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    files.append((path, path.lstat()))
        return files


def _starts_in_hole(fd: int, start: int) -> bool:
    """Whether the file has certainly no data at `start`, so that reading it is useless."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) > start
    except OSError:
        return True  # nothing from `start` to the end of the file
