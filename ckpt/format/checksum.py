"""crc32c, the checksum of blocks, and BLAKE3, the strong digest of chunks, 32 bytes.

The only user of the packages of these names. The checksum of bytes that follow each other comes
from the checksum of each, and no byte is read again (`joined_crc32c`): a checksum is a remainder
modulo a polynomial over GF(2); bytes after it multiply it by a power of x. Powers are found by
squaring (the method of zlib's `crc32_combine`, Mark Adler).

The last tensor of each data file is a table of the checksums of its blocks. In a manifest these
words would be nearly all of it; it has a seal per file instead, and a reader of blocks of a file
reads the file's table first. FORMAT.md, "Checksum tables", is the specification. What is read is
damage only where it does not match twice (`once_more`).
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import xor
from typing import NamedTuple, TypeVar

import crc32c as _crc32c
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckpt.errors import Corrupt
from ckpt.format.columns import as_int64s, ints_in, required_field
from storage import Store
from storage.errors import CorruptObjectError, KeyNotFoundError, StorageError


def crc32c(data: memoryview | bytes, value: int = 0) -> int:
    """crc32c (Castagnoli, reflected, as in RFC 3720) of `data`; `value` continues an earlier one.

    `data` is contiguous memory of any item type. Releases the GIL for large data.
    """
    return int(_crc32c.crc32c(data, value))


def crc32c_of_each(data: memoryview, sizes: Sequence[int]) -> list[int]:
    """The crc32c of the consecutive parts of `data` that have these sizes."""
    ends = accumulate(sizes)
    # Called without the wrapper above: there is a call for each block.
    checksum = _crc32c.crc32c
    return [checksum(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


class BlockChecksums:
    """The crc32c of every block of consecutive chunks, from their bytes in runs of any length.

    `ends` are the ends of all blocks, ascending, counted from the first byte of the first chunk.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._checksums: list[int] = []
        self._position = 0
        self._begun = 0  # the crc32c of what has passed of the next block

    def add(self, data: memoryview) -> None:
        """The next bytes. A block may begin in one run and end in a later one."""
        begin, stop = self._position, self._position + len(data)
        first = len(self._checksums)
        # The blocks that end in this run; the first may have begun in an earlier one.
        last = bisect_right(self._ends, stop, first)
        if first < last:
            end = self._ends[first]
            self._checksums.append(crc32c(data[: end - begin], self._begun))
            if last - first > 1:
                sizes = [b - a for a, b in pairwise(self._ends[first:last])]
                self._checksums += crc32c_of_each(data[end - begin :], sizes)
                end = self._ends[last - 1]
            begin, self._begun = end, 0
        if begin < stop:
            self._begun = crc32c(data[begin - self._position :], self._begun)
        self._position = stop

    def result(self) -> npt.NDArray[np.uint32]:
        """One per block. Raises ValueError unless exactly all bytes have passed."""
        expected = self._ends[-1] if self._ends else 0
        if self._position != expected:
            raise ValueError(f"{self._position} bytes of chunks have passed, expected {expected}")
        return np.array(self._checksums, dtype="<u4")


def block_count(nbytes: int, block_bytes: int) -> int:
    """Blocks of a chunk of `nbytes`: the last one may be shorter; none for an empty chunk."""
    return -(-nbytes // block_bytes)


def block_checksums(data: memoryview | bytes, block_bytes: int) -> npt.NDArray[np.uint32]:
    """The crc32c of every block of a chunk, counted from the chunk's start."""
    view = memoryview(data).cast("B")
    starts = range(0, view.nbytes, block_bytes)
    sums = [int(_crc32c.crc32c(view[start : start + block_bytes])) for start in starts]
    return np.array(sums, dtype=np.uint32)


# Reflected: bit 31 is x^0.
CRC32C = 0x82F63B78  # Castagnoli
CRC32 = 0xEDB88320  # zlib's, zip's
ONE = 1 << 31
X_TO_THE_8 = 1 << 23

Table = tuple[tuple[int, ...], ...]


def joined_crc32c(checksums: Sequence[int], sizes: Sequence[int]) -> int:
    """The crc32c of consecutive parts, from theirs and their lengths in bytes.

    Of one part it is that part's; of none it is 0.
    """
    crc = 0
    for checksum, nbytes in zip(checksums, sizes, strict=True):
        low, second, third, high = _table(nbytes)
        # Multiplying by a power of x is linear, so the four bytes are looked up one by one.
        crc = (
            low[crc & 255]
            ^ second[crc >> 8 & 255]
            ^ third[crc >> 16 & 255]
            ^ high[crc >> 24]
            ^ checksum
        )
    return crc


def joined_crc32(first: int, second: int, second_nbytes: int) -> int:
    """The crc32 of a run of bytes and the run after it, from the crc32 of each."""
    return _times(_power(second_nbytes, CRC32), first, CRC32) ^ second


@lru_cache(maxsize=256)
def _table(nbytes: int) -> Table:
    """The effect of `nbytes` more bytes on a checksum, as a table for each of its four bytes."""
    # Few lengths occur, that of a block above all: each has its table once.
    factor = _power(nbytes, CRC32C)
    bits = [_times(factor, 1 << bit, CRC32C) for bit in range(32)]
    return tuple(
        tuple(
            reduce(xor, (bits[8 * place + bit] for bit in range(8) if byte >> bit & 1), 0)
            for byte in range(256)
        )
        for place in range(4)
    )


def _power(nbytes: int, polynomial: int) -> int:
    """x to the power of 8 * nbytes."""
    result, square = ONE, X_TO_THE_8
    while nbytes:
        if nbytes & 1:
            result = _times(result, square, polynomial)
        square = _times(square, square, polynomial)
        nbytes >>= 1
    return result


def _times(a: int, b: int, polynomial: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (polynomial if b & 1 else 0)
    return product


DIGEST_NBYTES = 32
Digests = npt.NDArray[np.uint8]  # one row of DIGEST_NBYTES per chunk


def digest_of(parts: Iterable[memoryview | bytes]) -> bytes:
    """The BLAKE3 digest, 32 bytes, of the parts one after the other.

    One thread, which leaves the other cores to the training. Releases the GIL for large parts.
    """
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def digests_from(data: bytes | memoryview) -> Digests:
    """Digests one after the other as rows, a view of `data`. Its length is a multiple of 32."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, DIGEST_NBYTES)


def no_digests() -> Digests:
    """The column of a checkpoint without digests: no rows."""
    return digests_from(b"")


_WORDS_MIN = 3  # magic, checksum of the header, checksum of the table

Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]


class Seal(NamedTuple):
    """Length and SHA-256 of one data file's checksum table."""

    nbytes: int
    digest: bytes


def seal_of(table: bytes | memoryview) -> Seal:
    """The seal of a table, given all its bytes."""
    # Not a crc32c: one digest stands for all blocks of a file (DECISIONS.md S13).
    return Seal(len(table), hashlib.sha256(table).digest())


class Seals(NamedTuple):
    """The seals of data files, as columns with an item per file."""

    nbytes: Int64s
    digests: Digests

    @classmethod
    def of(cls, seals: Sequence[Seal]) -> Seals:
        """The seals as columns."""
        nbytes, digests = zip(*seals, strict=True) if seals else ((), ())
        return cls(np.array(nbytes, dtype=np.int64), digests_from(b"".join(digests)))

    def of_file(self, file: int) -> Seal:
        """The seal of one file."""
        return Seal(int(self.nbytes[file]), self.digests[file].tobytes())


def decode_seals(fields: Mapping[str, memoryview], rooms: Sequence[int] | Int64s) -> Seals:
    """The seals in fields of a manifest; `rooms` are the bytes of each file behind its header.

    Raises Corrupt for a table that is none, or that is longer than its file.
    """
    count = len(rooms)
    nbytes = as_int64s(ints_in(fields, "table_nbytes", count), "table_nbytes")
    data = required_field(fields, "table_digests")
    if len(data) != DIGEST_NBYTES * count:
        raise Corrupt(f"field 'table_digests': {len(data)} bytes for {count} files")
    seals = Seals(nbytes, digests_from(data))
    check_seals(seals, rooms)
    return seals


def check_seals(seals: Seals, rooms: Sequence[int] | Int64s) -> None:
    """Raises Corrupt for a table that is none, or that is longer than its file has room."""
    nbytes = seals.nbytes
    wrong = (nbytes % 4 != 0) | (nbytes < 4 * _WORDS_MIN) | (nbytes > np.asarray(rooms))
    if wrong.any():
        file = int(np.flatnonzero(wrong)[0])
        raise Corrupt(f"field 'table_nbytes': {int(nbytes[file])} bytes in file number {file}")


logger = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def raising_corrupt() -> Iterator[None]:
    """A damaged object of an encoded root is raised as Corrupt, which other ranks get as it is."""
    try:
        yield
    except CorruptObjectError as error:
        raise Corrupt(str(error)) from error


def is_outage(error: Exception) -> bool:
    """Whether a store has failed, rather than what lies in it."""
    # An object that is missing or damaged is an answer of the store.
    is_damage = isinstance(error, (KeyNotFoundError, CorruptObjectError))
    return isinstance(error, StorageError) and not is_damage


def once_more(read: Callable[[], T], store: Store | None = None) -> T:
    """`read()`, which reads and checks, once more if it raises Corrupt: only twice is it damage.

    Bytes can change on their way from a store, where only this check sees it; and in hosts that
    pass them on, of which `store` then reads another.
    """
    try:
        return read()
    except Corrupt as error:
        if store is not None:
            store.doubt()
        result = read()
        logger.warning("requested once more, the bytes are right: %s", error)
        return result
