"""A delta: the elements of a state that differ from the state published before, with new values.

    magic | lengths of the index | index | gaps and values of block after block

Values are absolute, so a delta applies twice without harm, and its blocks in any order. Positions
are in the index space of a region of the tensor, so any layout can apply it. FORMAT.md, section 13,
is the specification.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt
from ckpt.format.checksum import Int64s
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Region, Shape, Span, is_inside
from storage.encoding.blocks import RAW, BadTag, Zstd

MAGIC = b"SHPTDLT1"
BLOCK_NUMEL = 1 << 20  # elements of a block
INDEX_NBYTES_MAX = 1 << 26  # of so many containers as a value can have, more are not needed
_LENGTHS = struct.Struct("<IIB")  # the index: its bytes, its stored bytes, how it is coded
_WIDTHS = (1, 2, 4)
_NONE = np.zeros(0, dtype=np.int64)


class DeltaBlock(NamedTuple):
    """A run of elements of one region of a tensor, and what of it is new.

    Elements are counted in the row-major order of `region`: the block has those from `start` on.
    `positions`, ascending, count from `start`; `values` are their new bits, one after the other.
    `before` and `after` are digests of the block (`ckpt.layout.elements.digest_of`) in the state
    that the delta goes from and in the one it goes to.
    """

    fqn: str
    dtype: str
    shape: Shape
    region: Region
    start: int
    numel: int
    before: int
    after: int
    positions: Int64s = _NONE
    values: bytes = b""


def encode_delta(blocks: Sequence[DeltaBlock]) -> bytes:
    """The blocks of one rank, in this order; those of one region follow each other.

    Raises InvalidUrlError without the package zstandard.
    """
    zstd, rows, streams = Zstd(), [], list[bytes | memoryview]()

    def packed(data: bytes, planes: int) -> tuple[int, int]:
        # Numbers of one kind: no samples are needed.
        coding, stored = zstd.encode(memoryview(data), planes) if data else (RAW, data)
        streams.append(stored)
        return coding, len(stored)

    # A region has many blocks: it is written once for all of them.
    for (fqn, dtype, shape, region), members in groupby(blocks, key=lambda one: one[:4]):
        is_span = isinstance(region, Span)
        own = []
        for _, _, _, _, start, numel, before, after, positions, values in members:
            width, codes = _gap_codes(positions)
            counts = start, numel, len(positions), width, len(codes)
            codings = *packed(codes, 1), *packed(values, len(values) // max(len(positions), 1))
            own.append((*counts, *codings, before, after))
        rows.append((fqn, dtype, shape, tuple(region), is_span, own))
    index = encode_values(rows)
    coding, stored = zstd.encode(memoryview(index))
    return b"".join((MAGIC, _LENGTHS.pack(len(index), len(stored), coding), stored, *streams))


def decode_delta(
    data: bytes | memoryview, tensors: Mapping[str, tuple[str, Shape]]
) -> list[DeltaBlock]:
    """The inverse of `encode_delta`, for what was published: dtypes and shapes by name.

    Raises Corrupt for anything that it cannot have made, before it takes memory for more elements
    than the tensors have.
    """
    try:
        return _decoded(memoryview(data), tensors)
    except (BadTag, struct.error, ValueError, TypeError, KeyError, OverflowError) as error:
        raise Corrupt(f"a delta is not what a writer makes: {error}") from error


def _decoded(data: memoryview, tensors: Mapping[str, tuple[str, Shape]]) -> list[DeltaBlock]:
    zstd, blocks, offset = Zstd(), list[DeltaBlock](), len(MAGIC)
    left = {fqn: math.prod(shape) for fqn, (_, shape) in tensors.items()}
    _check(bytes(data[:offset]) == MAGIC, "no magic")
    nbytes, stored, coding = _LENGTHS.unpack_from(data, offset)
    _check(nbytes <= INDEX_NBYTES_MAX, f"an index of {nbytes} bytes")
    offset += _LENGTHS.size

    def unpacked(coding: int, stored: int, nbytes: int) -> bytes:
        nonlocal offset
        part = data[offset : offset + stored]
        _check(0 <= stored == len(part), "a stream is cut off")
        offset += stored
        if coding == RAW:
            _check(stored == nbytes, "a stream has another length")
            return bytes(part)
        _check(coding in (1, 2, 4, 8), "a coding that is not known")
        return bytes(zstd.decode(coding, part, nbytes))

    for fqn, *of, numbers, is_span, own in decode_values(unpacked(coding, stored, nbytes)):
        dtype, shape = tensors[fqn]
        _check(of == [dtype, shape], f"{fqn}: {of}, published was {dtype} {shape}")
        region: Region = Span(*numbers) if is_span else Box(*numbers)
        _check(set(map(type, numbers if is_span else sum(numbers, ()))) <= {int}, f"{fqn}: where?")
        _check(is_inside(region, shape), f"{fqn}: {region} of {shape}")
        # Before any block is read: no more elements are decoded than the tensor has.
        left[fqn] -= region.numel
        _check(left[fqn] >= 0, f"{fqn}: more than all of it")
        itemsize, end = DTYPES[dtype].itemsize, 0
        for block in own:
            start, numel, count, width, gaps_nbytes, *codings, before, after = block
            where = f"{fqn} from element {start} on"
            _check({*map(type, block)} == {int}, where)
            # Blocks follow each other, so that none applies twice.
            is_next = start == end and 0 < numel <= BLOCK_NUMEL and start + numel <= region.numel
            _check(is_next and 0 <= count <= numel, where)
            end = start + numel
            _check(width in _WIDTHS and gaps_nbytes <= (count + numel) * width, where)
            gaps_coding, gaps_stored, coding, stored = codings
            gaps = unpacked(gaps_coding, gaps_stored, gaps_nbytes)
            codes = np.frombuffer(gaps, dtype=f"<u{width}")
            positions = _positions_of(codes, width)
            _check(len(positions) == count and (not count or positions[-1] < numel), where)
            bits = unpacked(coding, stored, count * itemsize)
            digests = before % (1 << 64), after % (1 << 64)
            _check(digests == (before, after), where)
            place = fqn, dtype, shape, region, start, numel
            blocks.append(DeltaBlock(*place, *digests, positions, bits))
        _check(end == region.numel, f"{fqn}: {region} is not covered")
    _check(offset == len(data), "bytes follow its end")
    return blocks


def _check(is_so: Any, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def _gap_codes(positions: Int64s) -> tuple[int, bytes]:
    """The elements left out before each position, in the width that takes the fewest bytes: the
    largest number stands for as many of them, and another number follows.
    """
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    most = {width: (1 << 8 * width) - 1 for width in _WIDTHS}
    where = np.flatnonzero(gaps >= most[1])  # most often there are few
    large = gaps[where]
    sizes = {one: one * (len(gaps) + int((large // most[one]).sum())) for one in _WIDTHS}
    width = min(sizes, key=lambda one: sizes[one])
    gaps[where] %= most[width]
    codes = gaps.astype(f"<u{width}")
    if len(where):
        codes = np.insert(codes, np.repeat(where, large // most[width]), most[width])
    return width, codes.tobytes()


def _positions_of(codes: npt.NDArray[Any], width: int) -> Int64s:
    is_last = codes != (1 << 8 * width) - 1
    _check(len(codes) == 0 or bool(is_last[-1]), "its last gap has no end")
    positions: Int64s = np.cumsum(codes, dtype=np.int64)
    if not is_last.all():
        positions = positions[is_last]
    positions += np.arange(len(positions))
    return positions
