"""crc32c, the checksum of blocks. The only user of the package of that name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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


def block_count(nbytes: int, block_bytes: int) -> int:
    """Blocks of a chunk of `nbytes`: the last one may be shorter; none for an empty chunk."""
    return -(-nbytes // block_bytes)


def block_checksums(data: memoryview | bytes, block_bytes: int) -> npt.NDArray[np.uint32]:
    """The crc32c of every block of a chunk, counted from the chunk's start."""
    view = memoryview(data).cast("B")
    starts = range(0, view.nbytes, block_bytes)
    sums = [int(_crc32c.crc32c(view[start : start + block_bytes])) for start in starts]
    return np.array(sums, dtype=np.uint32)
