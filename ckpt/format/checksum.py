"""crc32c, the checksum of blocks. The only user of the package of that name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import crc32c as _crc32c
import numpy as np
import numpy.typing as npt


def crc32c(data: memoryview | bytes, value: int = 0) -> int:
    """crc32c (Castagnoli, reflected, as in RFC 3720) of `data`; `value` continues an earlier one.

    `data` is contiguous memory of any item type. Releases the GIL for large data.
    """
    return int(_crc32c.crc32c(data, value))


def crc32c_of_each(data: memoryview, sizes: Sequence[int]) -> list[int]:
    """The crc32c of the consecutive parts of `data` that have these sizes."""
    ends = accumulate(sizes)
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
