"""The checksum of bytes that follow each other, from the checksum of each: no byte is read again.

A checksum is a remainder modulo a polynomial over GF(2); bytes after it multiply it by a power of
x. Powers are found by squaring (the method of zlib's `crc32_combine`, Mark Adler).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    factor = _power(nbytes, CRC32C)
    bits = [_times(factor, 1 << bit, CRC32C) for bit in range(32)]
    return tuple(
        tuple(_of_byte(bits[8 * place : 8 * place + 8], byte) for byte in range(256))
        for place in range(4)
    )


def _of_byte(bits: Sequence[int], byte: int) -> int:
    result = 0
    for bit in range(8):
        if byte >> bit & 1:
            result ^= bits[bit]
    return result


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
