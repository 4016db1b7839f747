"""Deltas: bytes of positions and new values, exactly as they were, and nothing else is accepted.

Method: every set of positions of a small block, widths of gaps at their ends, two regions of two
types; then each truncation and flipped bit of one delta, which is refused or means the same place.
"""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import Corrupt
from ckpt.format.codec import encode_values
from ckpt.format.delta import BLOCK_NUMEL, DeltaBlock, decode_delta, encode_delta
from ckpt.layout.region import Box, Span
from tests.format.test_golden import dump

FORMAT_MD = Path(__file__).parents[2] / "FORMAT.md"


def block(positions: list[int], numel: int, *, itemsize: int = 2, start: int = 0) -> DeltaBlock:
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[itemsize]
    values = bytes(range(256)) * (len(positions) * itemsize // 256 + 1)
    where = np.array(positions, dtype=np.int64)
    place = "w", dtype, (start + numel,), Span(0, start + numel), start, numel
    return DeltaBlock(*place, 7, (1 << 64) - 1, where, values[: len(positions) * itemsize])


def of(*blocks: DeltaBlock) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one.fqn: (one.dtype, one.shape) for one in blocks}


def same(one: DeltaBlock, other: DeltaBlock) -> bool:
    return one[:8] == other[:8] and np.array_equal(one[8], other[8]) and one[9] == other[9]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_set_of_positions_comes_back(itemsize: int) -> None:
    for numel in range(1, 9):
        for mask in range(1 << numel):
            positions = [place for place in range(numel) if mask >> place & 1]
            one = block(positions, numel, itemsize=itemsize)
            (back,) = decode_delta(encode_delta([one]), of(one))
            assert same(one, back), (numel, positions)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 510, 65534, 65535, 65536, 300_000])
def test_gaps_of_every_width_come_back(gap: int) -> None:
    for count in (1, 2, 3):
        positions = [gap + place * (gap + 1) for place in range(count)]
        one = block(positions, BLOCK_NUMEL)
        (back,) = decode_delta(encode_delta([one]), of(one))
        assert same(one, back)


def test_blocks_of_a_region_follow_each_other_and_cover_it() -> None:
    rest = 5
    shape = (BLOCK_NUMEL + rest,)
    place = "w", "int8", shape, Span(0, shape[0])
    first = DeltaBlock(*place, 0, BLOCK_NUMEL, 1, 1)
    last = DeltaBlock(*place, BLOCK_NUMEL, rest, 2, 3, np.array([4]), b"x")
    other = DeltaBlock(
        "v", "bool", (4, 4), Box((0, 2), (4, 2)), 0, 8, 0, 0, np.array([0, 7]), b"\1\1"
    )
    back = decode_delta(encode_delta([first, last, other]), of(first, other))
    assert all(map(same, back, [first, last, other])) and len(back) == 3
    for wrong in ([first, other], [last, other], [first, last, last]):
        with pytest.raises(Corrupt):
            decode_delta(encode_delta(wrong), of(first, other))
    assert decode_delta(encode_delta([]), {}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float99"},
        {"shape": (3,)},
        {"numel": 0},
        {"positions": np.array([9])},
        {"values": b"abc"},
        {"before": -1},
        {"after": 1 << 64},
        {"region": Span(-1, 4)},
    ],
)
def test_a_block_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Corrupt):
        one = block([3], 5)
        decode_delta(encode_delta([one._replace(**wrong)]), of(one))  # type: ignore[arg-type]


def test_cut_and_flipped_bytes_are_refused_or_harmless() -> None:
    """A data file has checksums; here only memory and places are protected."""
    one = block([1, 3, 4], 40)
    data = encode_delta([one])
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            decode_delta(data[:length], of(one))
    with pytest.raises(Corrupt):
        decode_delta(data + b"\0", of(one))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            blocks = decode_delta(bytes(changed), of(one))
        except Corrupt:
            continue
        assert all(0 <= p < b.numel for b in blocks for p in b.positions)


def test_a_crafted_delta_takes_no_more_memory_than_its_tensors() -> None:
    """A megabyte of elements for a few bytes: again and again, or of tensors that are not there."""
    full = block([], BLOCK_NUMEL, itemsize=8)._replace(values=bytes(8 * BLOCK_NUMEL))
    full = full._replace(positions=np.arange(BLOCK_NUMEL))
    where = [Box((0,), (BLOCK_NUMEL,)), Span(0, BLOCK_NUMEL)]
    many = [full._replace(region=where[n % 2]) for n in range(20)]
    wide = [full._replace(shape=(1 << 40,), region=Span(n, n + BLOCK_NUMEL)) for n in range(20)]
    other = [full._replace(fqn=str(n)) for n in range(20)]
    for crafted in (many, wide, other):
        data = encode_delta(crafted)
        assert len(data) < 20_000
        tracemalloc.start()
        with pytest.raises(Corrupt):
            decode_delta(data, of(full))
        assert tracemalloc.get_traced_memory()[1] < 40 << 20, "more than one of them at a time"
        tracemalloc.stop()


@pytest.mark.parametrize("nth", range(11))
def test_numbers_of_a_delta_are_integers(nth: int) -> None:
    numbers: list[object] = [0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    numbers[nth] = float(str(numbers[nth]))
    assert decode_delta(crafted_of((0,), [0, 5, 0, 1, *[0] * 7]), {"w": ("uint8", (5,))})
    for offset, own in (((0,), numbers), ((0.0,), [0, 5, 0, 1, *[0] * 7])):
        with pytest.raises(Corrupt):
            decode_delta(crafted_of(offset, own), {"w": ("uint8", (5,))})


def crafted_of(offset: tuple[object, ...], numbers: list[object]) -> bytes:
    index = encode_values([("w", "uint8", (5,), (offset, (5,)), False, [tuple(numbers)])])
    return b"SHPTDLT1" + struct.pack("<IIB", len(index), len(index), 0) + index


def test_the_delta_of_the_specification_is_what_is_written() -> None:
    shown = re.search(r"<!-- example:delta -->\n+```\n(.*?)\n```", FORMAT_MD.read_text(), re.DOTALL)
    values = bytes.fromhex("803f 8a3f 0040")
    place = "w", "bfloat16", (2, 3), Span(0, 6), 0, 6
    one = DeltaBlock(*place, 0x0123456789ABCDEF, 0xFEDCBA9876543210, np.array([0, 1, 5]), values)
    assert shown is not None and shown[1] == dump(encode_delta([one]))
