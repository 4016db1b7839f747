"""The crc32c of bytes that follow each other, from the crc32c of each: no byte is read again.

A checksum is a remainder modulo a polynomial over GF(2); bytes behind it multiply it by a power of
x. Powers are found by squaring (the method of zlib's `crc32_combine`, Mark Adler).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected: bit 31 is x^0
ONE = 1 << 31
X_TO_THE_8 = 1 << 23

Table = tuple[tuple[int, ...], ...]


def joined_crc32c(checksums: Sequence[int], sizes: Sequence[int]) -> int:
    """The crc32c of parts one behind the other, from theirs and their lengths in bytes.

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


@lru_cache(maxsize=256)
def _table(nbytes: int) -> Table:
    """What `nbytes` more bytes make of a checksum, told for each of its four bytes."""
    factor = _power(nbytes)
    bits = [_times(factor, 1 << bit) for bit in range(32)]
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


def _power(nbytes: int) -> int:
    """x to the power of 8 * nbytes."""
    result, square = ONE, X_TO_THE_8
    while nbytes:
        if nbytes & 1:
            result = _times(result, square)
        square = _times(square, square)
        nbytes >>= 1
    return result


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
