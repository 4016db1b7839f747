"""Columns as arithmetic progressions: what is regular takes the bytes of its rule.

In a table of chunks most columns count up or repeat over the ranks, tensor after tensor. FORMAT.md,
"Columns", is the specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt
from ckpt.format.columns import CONSTANT, Ints, pack_ints, unpack_ints

PROGRESSIONS_CODE = 0x20
_HEAD_NBYTES = 9
_UInt64s = npt.NDArray[np.uint64]


def pack_regular(values: Ints) -> bytes:
    """`values`, none negative, as progressions or as a plain column, whichever is shorter."""
    plain = pack_ints(values)
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


def pack_progressions(column: Progressions) -> bytes:
    """What `pack_regular` gives for the items, which need not be there for it.

    No progression wraps around: items lie between its first and its last.
    """
    count = int(column.lengths.sum())
    lasts = column.firsts + column.steps * (column.lengths - 1).astype(np.uint64)
    if count < 3 or (np.all(lasts == lasts[0]) and np.all(column.firsts == lasts[0])):
        few = column.items() if count < 3 else lasts[:1]
        return pack_ints(few) if count < 3 else pack_ints(np.repeat(few, 2))
    highest = max(int(lasts.max()), int(column.firsts.max()))
    plain_nbytes = 1 + count * next(width for width in (1, 2, 4, 8) if highest < 1 << 8 * width)
    # Where progressions begin shows in the first three items of each: further ones go on.
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
    all; `steps` lead to each but the first. Items that are left out go on like the one before.
    """
    begins = np.flatnonzero(_begins(steps))
    lengths = np.diff(index[begins], append=index[-1])
    own_steps = np.append(steps, np.uint64(0))[begins]
    own_steps[lengths == 1] = 0
    return b"".join(
        [
            bytes([PROGRESSIONS_CODE]),
            len(begins).to_bytes(8, "little"),
            pack_ints(lengths),
            pack_ints(items[begins]),
            pack_ints(_zigzag(own_steps)),
        ]
    )


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


def is_below(column: Ints | Progressions, limit: int) -> bool:
    """Whether all items are below `limit`, which is less than 2^32."""
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


def _begins(steps: _UInt64s) -> npt.NDArray[np.bool_]:
    """Per item, whether a progression begins there, when each is as long as it can be.

    An item goes on where its step is that of the item before. The second of a progression always
    does, so of items in a row that do not, every second one begins one.
    """
    index = np.arange(len(steps) + 1)
    breaks = np.zeros(len(steps) + 1, dtype=bool)
    breaks[2:] = steps[1:] != steps[:-1]
    since = index - np.maximum.accumulate(np.where(breaks, 0, index))
    begins: npt.NDArray[np.bool_] = breaks & (since % 2 == 1)
    begins[0] = True
    return begins


def _items(lengths: npt.NDArray[np.int64], firsts: _UInt64s, steps: _UInt64s) -> Ints:
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    items = np.repeat(steps, lengths)
    items *= np.arange(len(items), dtype=np.uint64)
    items += np.repeat(firsts - steps * starts, lengths)
    largest = int(items.max())
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
