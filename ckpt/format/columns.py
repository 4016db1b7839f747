"""Columns of integers and strings as compact bytes, in a flat msgpack map. FORMAT.md, "Columns".

The reader takes only the subset of msgpack that the format uses (one map of short strings to
binaries):
nothing nested can be smuggled in, and columns stay views of the input instead of copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgpack
import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt

Ints = npt.NDArray[np.integer]

CONSTANT = 0x10
_WIDTHS = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))
_FIELDS_MAX = 256


def pack_map(fields: Mapping[str, bytes]) -> bytes:
    """`fields` as a msgpack map of str to bin, in the order given."""
    return bytes(msgpack.packb(dict(fields), use_bin_type=True))


def unpack_map(data: bytes | memoryview) -> dict[str, memoryview]:
    """The fields of `pack_map`, as views of `data`.

    Raises Corrupt for any other msgpack, duplicate names and superfluous bytes.
    """
    view = memoryview(data).cast("B")
    count, position = _map_header(view)
    fields: dict[str, memoryview] = {}
    for _ in range(count):
        name, position = _short_string(view, position)
        if name in fields:
            raise Corrupt(f"field {name!r} appears twice")
        fields[name], position = _binary(view, position, name)
    if position != len(view):
        raise Corrupt(f"{len(view) - position} bytes after the last field")
    return fields


def _map_header(view: memoryview) -> tuple[int, int]:
    first_byte = view[0] if len(view) else 0
    if 0x80 <= first_byte <= 0x8F:
        return first_byte & 0x0F, 1
    if first_byte == 0xDE and len(view) >= 3:
        count = int.from_bytes(view[1:3], "big")
        if count <= _FIELDS_MAX:
            return count, 3
    raise Corrupt("not a msgpack map of at most 256 fields")


def _short_string(view: memoryview, position: int) -> tuple[str, int]:
    first_byte = view[position] if position < len(view) else 0
    if 0xA0 <= first_byte <= 0xBF:
        start, size = position + 1, first_byte & 0x1F
    elif first_byte == 0xD9 and position + 1 < len(view):
        start, size = position + 2, view[position + 1]
    else:
        raise Corrupt(f"no field name at byte {position}")
    raw = bytes(view[start : start + size])
    if len(raw) != size or not raw.isascii():
        raise Corrupt(f"field name at byte {position} is cut short or not ASCII")
    return raw.decode("ascii"), start + size


def _binary(view: memoryview, position: int, name: str) -> tuple[memoryview, int]:
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(view[position] if position < len(view) else 0)
    if width is None or position + 1 + width > len(view):
        raise Corrupt(f"field {name!r}: no binary at byte {position}")
    start = position + 1 + width
    size = int.from_bytes(view[position + 1 : start], "big")
    if start + size > len(view):
        raise Corrupt(f"field {name!r}: {size} bytes announced, {len(view) - start} are left")
    return view[start : start + size], start + size


def pack_ints(values: Ints | Sequence[int], *, constant: bool = True) -> bytes:
    """Unsigned integers in the narrowest width that fits; a constant column as one value.

    `constant=False` for columns that a reader has no other bound for the length of.
    """
    array = np.asarray(values)
    if not len(array):
        return b"\0"
    low, high = int(array.min()), int(array.max())
    if low < 0:
        raise ValueError(f"{low} in a column of unsigned integers")
    code = 0 if high < 1 << 8 else 1 if high < 1 << 16 else 2 if high < 1 << 32 else 3
    if constant and low == high:
        return bytes([code | CONSTANT]) + high.to_bytes(1 << code, "little")
    return bytes([code]) + array.astype(_WIDTHS[code]).tobytes()


def unpack_ints(data: memoryview, count: int, name: str, *, constant: bool = True) -> Ints:
    """`count` unsigned integers as a read-only view of `data`; nothing is allocated.

    A constant column is a view with stride zero. Raises Corrupt when the length is not the
    expected.
    """
    if not len(data) or data[0] & ~(CONSTANT | 3):
        raise Corrupt(f"field {name!r}: unknown column code")
    dtype = _WIDTHS[data[0] & 3]
    is_constant = bool(data[0] & CONSTANT)
    if is_constant and (not constant or not count):
        raise Corrupt(f"field {name!r}: must not be a constant column")
    expected = 1 if is_constant else count
    if len(data) != 1 + expected * dtype.itemsize:
        raise Corrupt(
            f"field {name!r}: {len(data)} bytes for {expected} values of {dtype.itemsize} bytes"
        )
    array: Ints = np.frombuffer(data, dtype=dtype, offset=1)
    return np.broadcast_to(array, (count,)) if is_constant else array


def pack_strings(strings: Iterable[str]) -> tuple[bytes, bytes]:
    """The strings one after the other as UTF-8, and the column of their lengths in bytes."""
    encoded = [text.encode("utf-8") for text in strings]
    return b"".join(encoded), pack_ints([len(text) for text in encoded])


def unpack_strings(data: memoryview, sizes: Ints, name: str) -> tuple[str, ...]:
    """The inverse of `pack_strings`. Raises Corrupt when the sizes are not those of `data`."""
    # Sizes are summed only once their bound is known: a hostile sum could wrap around.
    if len(sizes) and int(sizes.max()) > len(data):
        raise Corrupt(f"field {name!r}: a string of {int(sizes.max())} bytes in {len(data)}")
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(data):
        raise Corrupt(
            f"field {name!r}: strings take {ends[-1] if ends else 0} bytes of {len(data)}"
        )
    raw = bytes(data)
    if raw.isascii():  # then bytes are characters, and one call decodes them all
        text = raw.decode("ascii")
        return tuple([text[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    try:
        return tuple([raw[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)])
    except UnicodeDecodeError as error:
        raise Corrupt(f"field {name!r}: not UTF-8: {error}") from error


def required_field(fields: Mapping[str, memoryview], name: str) -> memoryview:
    """The bytes of field `name`. Raises Corrupt when the map lacks it."""
    if name not in fields:
        raise Corrupt(f"field {name!r} is missing")
    return fields[name]


def as_int64s(values: Ints, name: str) -> npt.NDArray[np.int64]:
    """`values` as int64. Raises Corrupt from 2^62 on, so that sums of two cannot overflow."""
    if len(values) and int(values.max()) >= 1 << 62:
        raise Corrupt(f"field {name!r}: {int(values.max())} is beyond 2^62")
    return values.astype(np.int64)


def unpack_indexes(fields: Mapping[str, memoryview], name: str, count: int, limit: int) -> Ints:
    """`count` indexes of a table with `limit` rows. Raises Corrupt naming one that is too large."""
    return checked_indexes(unpack_ints(required_field(fields, name), count, name), name, limit)


def checked_indexes(ids: Ints, name: str, limit: int) -> Ints:
    """`ids`, indexes of a table with `limit` rows. Raises Corrupt naming one that is too large."""
    if len(ids) and int(ids.max()) >= limit:
        raise Corrupt(f"field {name!r}: index {int(ids.max())}, there are {limit}")
    return ids
