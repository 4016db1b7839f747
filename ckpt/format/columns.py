"""Columns of integers and strings as compact bytes, in a flat msgpack map. FORMAT.md, "Columns".

The reader takes only the subset of msgpack that the format uses (one map of short strings to
binaries): nothing nested can be smuggled in, and columns stay views of the input, not copies.

In a table of chunks most columns count up or repeat over the ranks, tensor after tensor: what is
regular is stored as arithmetic progressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    first_byte, count, position = view[0] if len(view) else 0, -1, 1
    if 0x80 <= first_byte <= 0x8F:
        count = first_byte & 0x0F
    elif first_byte == 0xDE and len(view) >= 3:
        count, position = int.from_bytes(view[1:3], "big"), 3
    if not 0 <= count <= _FIELDS_MAX:
        raise Corrupt("not a msgpack map of at most 256 fields")
    fields: dict[str, memoryview] = {}
    for _ in range(count):
        name, position = _short_string(view, position)
        if name in fields:
            raise Corrupt(f"field {name!r} appears twice")
        fields[name], position = _binary(view, position, name)
    if position != len(view):
        raise Corrupt(f"{len(view) - position} bytes after the last field")
    return fields


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

    A constant column is a view with stride zero. Raises Corrupt when the length is wrong.
    """
    if not len(data) or data[0] & ~(CONSTANT | 3):
        raise Corrupt(f"field {name!r}: unknown column code")
    dtype = _WIDTHS[data[0] & 3]
    is_constant = bool(data[0] & CONSTANT)
    # Where nothing else bounds the count, nine bytes could stand for any number of items.
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
    encoded = list(map(str.encode, strings))
    return b"".join(encoded), pack_ints(list(map(len, encoded)))


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


def ints_in(
    fields: Mapping[str, memoryview],
    name: str,
    count: int,
    *,
    constant: bool = True,
    limit: int | None = None,
) -> Ints:
    """`unpack_ints` of field `name`; with a `limit`, indexes of a table with so many rows."""
    ids = unpack_ints(required_field(fields, name), count, name, constant=constant)
    return ids if limit is None else checked_indexes(ids, name, limit)


def checked_indexes(ids: Ints, name: str, limit: int) -> Ints:
    """`ids`, indexes of a table with `limit` rows. Raises Corrupt naming one that is too large."""
    if len(ids) and int(ids.max()) >= limit:
        raise Corrupt(f"field {name!r}: index {int(ids.max())}, there are {limit}")
    return ids


PROGRESSIONS_CODE = 0x20
_HEAD_NBYTES = 9
_UInt64s = npt.NDArray[np.uint64]


def pack_regular(values: Ints) -> bytes:
    """`values`, none negative, as progressions or as a plain column, whichever is shorter."""
    plain = pack_ints(values)
    # Two items are always a progression, and a longer one than the plain column.
    if len(values) < 3 or plain[0] & CONSTANT:
        return plain
    items = np.asarray(values).astype(np.uint64)
    steps = items[1:] - items[:-1]  # modulo 2^64
    packed = _packed(items, steps, np.arange(len(items) + 1))
    return packed if len(packed) < len(plain) else plain


class Progressions(NamedTuple):
    """A column as progressions of any lengths, one after the other; numbers modulo 2^64."""

    lengths: npt.NDArray[np.int64]
    firsts: _UInt64s
    steps: _UInt64s

    @classmethod
    def of(cls, lengths: Ints, firsts: Ints, steps: Ints) -> Progressions:
        """Of columns of any integer type; those without items are left out."""
        kept = np.flatnonzero(lengths)
        return cls(
            lengths[kept].astype(np.int64),
            firsts[kept].astype(np.uint64),
            steps[kept].astype(np.uint64),
        )

    def items(self) -> Ints:
        """All items."""
        return _items(*self) if len(self.lengths) else np.zeros(0, dtype=np.uint8)

    def take(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The items of these numbers."""
        run, place = self._placed(numbers)
        return (self.firsts[run] + self.steps[run] * place).view(np.int64)

    def sums(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each number, up to the number of all, the sum of the items before it."""
        run, place = self._placed(numbers)
        before = np.cumsum(_series(self.firsts, self.steps, self.lengths.view(np.uint64)))
        sums = np.append(np.uint64(0), before)[run] + _series(
            self.firsts[run], self.steps[run], place
        )
        return sums.view(np.int64)

    def places(self, items: Iterable[int], most: int) -> npt.NDArray[np.int64] | None:
        """The numbers of all items that are one of `items`, ascending; None for over `most`."""
        stops = np.cumsum(self.lengths)
        starts = stops - self.lengths
        firsts, steps = self.firsts.view(np.int64), self.steps.view(np.int64)
        chosen, count = [starts[:0]], 0
        for item in items:
            place, rest = np.divmod(item - firsts, np.where(steps == 0, 1, steps))
            is_one = (steps != 0) & (rest == 0) & (place >= 0) & (place < self.lengths)
            chosen.append((starts + place)[is_one])
            alike = (steps == 0) & (firsts == item)
            count += len(chosen[-1]) + int(self.lengths[alike].sum())
            if count > most:
                return None
            chosen += map(np.arange, starts[alike].tolist(), stops[alike].tolist())
        return np.sort(np.concatenate(chosen))

    def _placed(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], _UInt64s]:
        """For each number its progression and its place there; the last has no end."""
        stops = np.cumsum(self.lengths)
        run = np.searchsorted(stops[:-1], numbers, side="right")
        return run, (numbers - stops[run] + self.lengths[run]).view(np.uint64)


def pack_progressions(column: Progressions) -> bytes:
    """What `pack_regular` gives for the items, which need not be there for it.

    No progression wraps around: items lie between its first and its last.
    """
    count = int(column.lengths.sum())
    lasts = column.firsts + column.steps * (column.lengths - 1).astype(np.uint64)
    if count < 3:
        return pack_ints(column.items())
    if np.all(lasts == lasts[0]) and np.all(column.firsts == lasts[0]):
        return pack_ints(np.repeat(lasts[:1], 2))
    highest = max(int(lasts.max()), int(column.firsts.max()))
    plain_nbytes = 1 + count * next(width for width in (1, 2, 4, 8) if highest < 1 << 8 * width)
    # Where progressions begin shows in the first three items of each: further ones continue.
    kept = np.minimum(column.lengths, 3)
    own = np.repeat(np.arange(len(kept)), kept)
    place = np.arange(len(own)) - np.repeat(np.cumsum(kept) - kept, kept)
    items = column.firsts[own] + column.steps[own] * place.astype(np.uint64)
    to_next = np.append(column.firsts[1:] - lasts[:-1], np.uint64(0))
    steps = np.where(place[1:] > 0, column.steps[own[1:]], to_next[own[1:] - 1])
    index = (np.cumsum(column.lengths) - column.lengths)[own] + place
    packed = _packed(items, steps, np.append(index, count))
    return packed if len(packed) < plain_nbytes else pack_ints(column.items())


def _packed(items: _UInt64s, steps: _UInt64s, index: npt.NDArray[np.intp]) -> bytes:
    """Progressions, each as long as it can be, of items at these indexes, the last the number of
    all; `steps` lead to each but the first. Items that are left out continue like the one before.
    """
    # An item continues where its step is that of the item before. The second of a progression
    # always does, so of items in a row that do not, every second one begins one.
    number = np.arange(len(steps) + 1)
    breaks = np.zeros(len(number), dtype=bool)
    breaks[2:] = steps[1:] != steps[:-1]
    since = number - np.maximum.accumulate(np.where(breaks, 0, number))
    breaks &= since % 2 == 1
    breaks[0] = True
    begins = np.flatnonzero(breaks)
    lengths = np.diff(index[begins], append=index[-1])
    own_steps = np.append(steps, np.uint64(0))[begins]
    own_steps[lengths == 1] = 0
    columns = lengths, items[begins], _zigzag(own_steps)
    head = bytes([PROGRESSIONS_CODE]) + len(begins).to_bytes(8, "little")
    return head + b"".join(map(pack_ints, columns))


def unpack_regular(data: memoryview, count: int, name: str) -> Ints:
    """The inverse of `pack_regular`; of progressions, all `count` items are new memory.

    The caller bounds `count`. Raises Corrupt.
    """
    column = unpack_rules(data, count, name)
    return column.items() if isinstance(column, Progressions) else column


def unpack_rules(data: memoryview, count: int, name: str) -> Ints | Progressions:
    """The inverse of `pack_regular`; progressions stay what they are. Raises Corrupt."""
    if not len(data) or data[0] != PROGRESSIONS_CODE:
        return unpack_ints(data, count, name)
    number = int.from_bytes(data[1:_HEAD_NBYTES], "little")
    if len(data) < _HEAD_NBYTES or not 1 <= number <= count:
        raise Corrupt(f"field {name!r}: {number} progressions for {count} items")
    rest = data[_HEAD_NBYTES:]
    columns = []
    for _ in range(3):
        if not len(rest) or rest[0] & ~(CONSTANT | 3):
            raise Corrupt(f"field {name!r}: unknown column code in a progression")
        # A column says its own length: by its width, and by whether one item stands for all.
        size = 1 + ((1 if rest[0] & CONSTANT else number) << (rest[0] & 3))
        columns.append(unpack_ints(rest[:size], number, name))
        rest = rest[size:]
    lengths, firsts, steps = columns
    # Each is compared before they are added up: a hostile sum could wrap around.
    if len(rest) or int(lengths.min()) == 0 or int(lengths.max()) > count:
        raise Corrupt(f"field {name!r}: progressions of wrong lengths")
    total = int(lengths.sum(dtype=np.int64))
    if total != count:
        raise Corrupt(f"field {name!r}: progressions have {total} items, expected {count}")
    return Progressions(lengths.astype(np.int64), firsts.astype(np.uint64), _unzigzag(steps))


def pack_tree(value: Any) -> bytes:
    """Nested lists of numbers, texts, bytes and columns of int64, for the other ranks of a save."""

    def column(values: npt.NDArray[np.int64]) -> msgpack.ExtType:
        packed = pack_regular(_zigzag(values.view(np.uint64)))
        return msgpack.ExtType(0, len(values).to_bytes(8, "little") + packed)

    return bytes(msgpack.packb(value, default=column))


def unpack_tree(data: bytes | memoryview, items_max: int) -> Any:
    """The inverse of `pack_tree`, with tuples for lists; all columns together have at most
    `items_max` items. Raises Corrupt, and ValueError for what is no tree.
    """
    left = items_max

    def column(code: int, packed: bytes) -> npt.NDArray[np.int64]:
        nonlocal left
        count = int.from_bytes(packed[:8], "little")
        # Before the column is made: few bytes may stand for billions of items.
        left -= count
        if left < 0:
            raise Corrupt(f"columns of more than {items_max} items")
        return _unzigzag(unpack_regular(memoryview(packed)[8:], count, "column")).view(np.int64)

    return msgpack.unpackb(data, ext_hook=column, use_list=False)


def is_below(column: Ints | Progressions, limit: int) -> bool:
    """Whether all items are below `limit`, at most 2^32."""
    if not isinstance(column, Progressions):
        return not len(column) or int(column.max()) < limit
    steps = column.steps.view(np.int64)
    # Small steps first: only then can no last item wrap around.
    longer = steps[column.lengths > 1]
    if np.any(column.firsts >= limit) or np.any((longer >= limit) | (longer <= -limit)):
        return False
    lasts = column.firsts.astype(np.int64) + steps * (column.lengths - 1)
    return bool(np.all((lasts >= 0) & (lasts < limit)))


def distinct_by_part(
    column: Ints | Progressions, counts: Iterable[int]
) -> Iterator[tuple[int, list[int]]]:
    """Of parts of a column that follow each other, with so many items each: how many, and their
    values, each once and ascending. Progressions are not taken apart.
    """
    runs = _runs_of(column)
    first = step = left = 0
    for count in counts:
        if count == 1:  # most often
            if not left:
                left, first, step = next(runs)
            yield 1, [first]
            first, left = first + step, left - 1
            continue
        values: set[int] = set()
        missing = count
        while missing:
            if not left:
                left, first, step = next(runs)
            taken = min(missing, left)
            stop = first + step * taken
            values.update(range(first, stop, step) if step else (first,))
            first, left, missing = stop, left - taken, missing - taken
        yield count, sorted(values)


def _runs_of(column: Ints | Progressions) -> Iterator[tuple[int, int, int]]:
    """Lengths, first items and steps."""
    if isinstance(column, Progressions):
        steps = column.steps.view(np.int64)
        yield from zip(column.lengths.tolist(), column.firsts.tolist(), steps.tolist(), strict=True)
    elif len(column) and column.strides == (0,):
        yield len(column), int(column[0]), 0
    else:
        for start in range(0, len(column), 1 << 14):
            yield from ((1, item, 0) for item in column[start : start + (1 << 14)].tolist())


def _series(firsts: _UInt64s, steps: _UInt64s, counts: _UInt64s) -> _UInt64s:
    """The sums of the first items of progressions."""
    pairs = counts * np.maximum(counts, np.uint64(1)) - counts  # counts * (counts - 1), and 0 for 0
    return firsts * counts + steps * (pairs // np.uint64(2))


def _items(lengths: npt.NDArray[np.int64], firsts: _UInt64s, steps: _UInt64s) -> Ints:
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    items = np.repeat(steps, lengths)
    items *= np.arange(len(items), dtype=np.uint64)
    items += np.repeat(firsts - steps * starts, lengths)
    largest = int(items.max())
    # Narrowed: the caller keeps one for each of millions of chunks.
    for dtype in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(dtype).max:
            return items.astype(dtype)
    return items


def _zigzag(steps: _UInt64s) -> _UInt64s:
    """Steps modulo 2^64 as small numbers where they are near 0: 0, -1, 1, -2, 2."""
    return (steps << np.uint64(1)) ^ (np.uint64(0) - (steps >> np.uint64(63)))


def _unzigzag(packed: Ints) -> _UInt64s:
    numbers = packed.astype(np.uint64)
    return (numbers >> np.uint64(1)) ^ (np.uint64(0) - (numbers & np.uint64(1)))
