"""Columns as arithmetic progressions: what is regular takes the bytes of its rule.

In a table of chunks most columns count up or repeat over the ranks, tensor after tensor. FORMAT.md,
"Columns", is the specification.
"""

from __future__ import annotations

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
    indexes = np.flatnonzero(_begins(steps))
    lengths = np.diff(indexes, append=len(items))
    own_steps = np.append(steps, np.uint64(0))[indexes]
    own_steps[lengths == 1] = 0
    packed = b"".join(
        [
            bytes([PROGRESSIONS_CODE]),
            len(indexes).to_bytes(8, "little"),
            pack_ints(lengths),
            pack_ints(items[indexes]),
            pack_ints(_zigzag(own_steps)),
        ]
    )
    return packed if len(packed) < len(plain) else plain


def unpack_regular(data: memoryview, count: int, name: str) -> Ints:
    """The inverse of `pack_regular`; of progressions, all `count` items are new memory.

    The caller bounds `count` by bytes that are there. Raises Corrupt.
    """
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
    return _items(lengths.astype(np.int64), firsts.astype(np.uint64), _unzigzag(steps))


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
