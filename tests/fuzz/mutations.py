"""Random changes of bytes that readers are known to stumble over; the same for one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

# Edges of integers, and what opens, closes or repeats in the formats that are read.
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1)
_WORDS = (b"", b"\0" * 8, b"\xff" * 8, b"[" * 40, b'{"a":', b"-1", b"1e999", b"NaN", b"\x80\x04")


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` after one to four changes; pieces of `others` may be put into it."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(changed, others, rng)
    return bytes(changed)


def _change(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice((0, 1, 2, 4, 8, 32)))
    match rng.randrange(8):
        case 0 if start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        case 1 if start < len(data):
            data[start] = (data[start] + rng.choice((1, -1))) % 256
        case 2:
            del data[start:stop]
        case 3:
            del data[start:]
        case 4:
            data[start:stop] = data[start:stop] * rng.choice((2, 3, 50))
        case 5:
            order = rng.choice(("little", "big"))
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(_EXTREMES) % (1 << 8 * width)
            data[start : start + width] = value.to_bytes(width, order)  # type: ignore[arg-type]
        case 6:
            data[start:stop] = rng.choice(_WORDS)
        case _:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            data[start:stop] = other[begin : begin + rng.choice((1, 4, 16, 64))]
