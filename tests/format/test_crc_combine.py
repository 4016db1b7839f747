"""Checksums of parts joined: as if all bytes had been read in one go."""

from __future__ import annotations

import random
import zlib

import pytest

from ckpt.format.checksum import crc32c, joined_crc32, joined_crc32c


@pytest.mark.parametrize(
    "sizes", [[], [0], [5], [1, 1], [0, 7, 0], [3, 250, 4096, 1], [70_000, 1 << 16, 2]]
)
def test_joined_checksums_are_those_of_all_bytes(sizes: list[int], rng: random.Random) -> None:
    parts = [rng.randbytes(size) for size in sizes]
    assert joined_crc32c([crc32c(part) for part in parts], sizes) == crc32c(b"".join(parts))
    whole = 0
    for part in parts:
        whole = joined_crc32(whole, zlib.crc32(part), len(part))
    assert whole == zlib.crc32(b"".join(parts))
