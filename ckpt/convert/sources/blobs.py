"""Blobs of `torch.save`, whole files or inside of files: what is in them, and where their tensors'
bytes are. They are zip files whose entries are stored as they are, never compressed.

A blob is opened with one or two small reads, several blobs that lie near each other with one, and
its tensors are never read to find out where they are.

Reading finds where the bytes of each entry lie; it trusts nothing that a length check can refute.
Writing lays a zip file out before its data is there, since only the sizes are needed for that.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from ckpt.convert.sources.budget import FIXED_NBYTES, Account, MemoryBudget
from ckpt.convert.sources.torch_pickle import StorageRef, TensorRef, read_tree
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from storage import ShortReadError, Store
from storage.threads import in_order

ReadBytes = Callable[[int, int], bytes | bytearray]  # (start, stop) of the file
ENTRY_NBYTES = 1000  # of memory, with the place of its data
DIRECTORY_NBYTES_MAX = 1 << 28
TAIL_NBYTES = 1024  # usually with the whole directory
ALIGNMENT = 64  # of the data of each entry, as torch.save aligns it

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")
_32 = 0xFFFFFFFF
_16 = 0xFFFF


class ZipEntry(NamedTuple):
    """An entry of a directory: where its local header is, its bytes in the file, and its crc32. In
    a file that is written, a crc32 that is not known yet is ~ the number of the data that it is of.
    """

    name: str
    header_start: int
    nbytes: int
    crc32: int
    is_stored: bool = True  # neither compressed nor encrypted


def read_directory(
    read: ReadBytes,
    nbytes: int,
    charge: Callable[[int], None],
    on_entry: Callable[[ZipEntry], None] = lambda entry: None,
) -> dict[str, ZipEntry]:
    """The entries of the zip file of `nbytes`, by name.

    `charge` is called with bytes of memory before they are taken, `on_entry` with each entry before
    that is charged. Raises Corrupt when it is no readable zip file, and what `charge` raises.
    """
    tail = read(max(0, nbytes - TAIL_NBYTES), nbytes)
    try:
        start, length, count = _find_directory(read, nbytes, tail)
        # Before it is read: both numbers come from the file.
        if length > DIRECTORY_NBYTES_MAX or start + length > nbytes:
            raise Corrupt(f"its directory has {length} bytes from {start} on, the file {nbytes}")
        charge(length)
        first = nbytes - len(tail)
        if start >= first:
            data = tail[start - first : start - first + length]
        else:
            data = read(start, start + length)
        entries: dict[str, ZipEntry] = {}
        for entry in _entries(data, count):
            if entry.header_start + _LOCAL.size + entry.nbytes > nbytes or entry.name in entries:
                raise Corrupt(f"{entry.name}: outside of the file, or twice in it")
            on_entry(entry)
            charge(ENTRY_NBYTES + 4 * len(entry.name))
            entries[entry.name] = entry
        charge(-length)
        return entries
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise Corrupt(f"no readable zip file: {error}") from error


def data_start(entry: ZipEntry, header: bytes | bytearray) -> int:
    """Where the data of `entry` begins, from (at least) the first 30 bytes of its local header.

    Raises Corrupt when there is none, UnsupportedFormat when the data is compressed or encrypted.
    """
    if not entry.is_stored:
        raise UnsupportedFormat(f"{entry.name}: compressed or encrypted; torch.save does neither")
    try:
        # From the local header: torch pads its extra field, and not that of the directory.
        magic, *_, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    except struct.error as error:
        raise Corrupt(f"{entry.name}: its header is cut off") from error
    if magic != b"PK\x03\x04":
        raise Corrupt(f"{entry.name}: no header where the directory says there is one")
    return entry.header_start + _LOCAL.size + int(name_nbytes) + int(extra_nbytes)


def _find_directory(read: ReadBytes, nbytes: int, tail: bytes | bytearray) -> tuple[int, int, int]:
    """Start, length and number of entries of the directory."""
    # The last one, because data may look like it. torch writes no comment behind it.
    position = tail.rfind(b"PK\x05\x06")
    if position < 0:
        raise Corrupt("it does not end as a zip file does: cut off, or of another format")
    _, _, _, _, count, length, start, _ = _END.unpack_from(tail, position)
    # All ones stand for a number that is in the 64-bit record.
    if _32 not in (length, start) and count != _16:
        return start, length, count
    where = nbytes - len(tail) + position - _END64_LOCATOR.size
    if where < 0:
        raise Corrupt("its end names a directory that is not there")
    magic, _, end64_start, _ = _END64_LOCATOR.unpack(read(where, where + _END64_LOCATOR.size))
    if magic != b"PK\x06\x07" or end64_start + _END64.size > nbytes:
        raise Corrupt("its end names a directory that is not there")
    end64 = _END64.unpack(read(end64_start, end64_start + _END64.size))
    if end64[0] != b"PK\x06\x06":
        raise Corrupt("its end names a directory that is not there")
    return end64[9], end64[8], end64[7]


def _entries(data: bytes | bytearray, count: int) -> Iterator[ZipEntry]:
    position = 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(data, position)
        magic, flags, method, crc32, packed, size = (fields[i] for i in (0, 3, 4, 7, 8, 9))
        name_nbytes, extra_nbytes, comment_nbytes, header_start = (*fields[10:13], fields[16])
        if magic != b"PK\x01\x02":
            raise Corrupt("its directory is damaged")
        position += _ENTRY.size
        name = data[position : position + name_nbytes].decode()
        extra = data[position + name_nbytes : position + name_nbytes + extra_nbytes]
        position += name_nbytes + extra_nbytes + comment_nbytes
        size, packed, header_start = _wide(extra, size, packed, header_start)
        is_stored = method == 0 and packed == size and not flags & 1
        yield ZipEntry(name, header_start, size if is_stored else packed, crc32, is_stored)


def _wide(
    extra: bytes | bytearray, size: int, packed: int, header_start: int
) -> tuple[int, int, int]:
    """Sizes and start, from the zip64 field of `extra` where 32 bits are too few."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            # The field has only those numbers that 32 bits could not hold, in this order.
            words = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            size = next(words, size) if size == _32 else size
            packed = next(words, packed) if packed == _32 else packed
            header_start = next(words, header_start) if header_start == _32 else header_start
        position += 4 + length
    return size, packed, header_start


# Writing ------------------------------------------------------------------------------------


def local_header(name: str, start: int) -> bytes:
    """What comes before the data of an entry, from byte `start` of a file on, so that the data is
    aligned there.
    """
    text = name.encode()
    # A field of extra bytes has 4 at least.
    padding = -(start + _LOCAL.size + len(text) + 4) % ALIGNMENT
    # Bit 3: crc32 and sizes follow the data. Bit 11: the name is UTF-8. "FB" is torch's padding.
    head = _LOCAL.pack(b"PK\x03\x04", 45, 0x0808, 0, 0, 0, 0, 0, 0, len(text), padding + 4)
    return head + text + struct.pack("<2sH", b"FB", padding) + b"Z" * padding


def descriptor(nbytes: int, crc32: int) -> bytes:
    """What follows the data of an entry."""
    return _DESCRIPTOR64.pack(b"PK\x07\x08", crc32, nbytes, nbytes)


DESCRIPTOR_NBYTES = _DESCRIPTOR64.size


def directory(entries: Sequence[ZipEntry], position: int) -> bytes:
    """The end of the zip file, from `position` in it on."""
    rows = []
    for entry in entries:
        name = entry.name.encode()
        # Always in 64 bits, so that the length does not depend on where the file ends up.
        extra = struct.pack("<2H3Q", 1, 24, entry.nbytes, entry.nbytes, entry.header_start)
        row = _ENTRY.pack(
            b"PK\x01\x02", 45, 45, 0x0808, 0, 0, 0, entry.crc32, _32, _32, len(name), len(extra),
            0, 0, 0, 0, _32,
        )  # fmt: skip
        rows.append(row + name + extra)
    body, count = b"".join(rows), len(entries)
    end64 = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(body), position)
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, position + len(body), 1)
    small = min(count, _16)
    # All ones as the start send every reader to the 64-bit record.
    end = _END.pack(b"PK\x05\x06", 0, 0, small, small, min(len(body), _32), _32, 0)
    return body + end64 + locator + end


# Blobs --------------------------------------------------------------------------------------------

HEAD_NBYTES = 2048  # usually with the whole pickle of a tensor
WHOLE_NBYTES_MAX = 16 << 10  # blobs up to this size are read in one piece
BATCH_NBYTES = 4 << 20
READERS = 4
PICKLE_NBYTES_MAX = 1 << 30
SAME_NBYTES_MAX = 1024  # of pickles that are remembered: those of tensors recur byte for byte
SAME_MEMORY_NBYTES_MAX = 1 << 20


class Blob(NamedTuple):
    """Bytes `start` to `stop` of a file, a whole file of torch.save in themselves."""

    file: str
    start: int
    stop: int


class Opened(NamedTuple):
    """What a blob holds: a tree with `TensorRef`s, and where in the file each storage begins.

    The tree was charged to `account`, everything else to `directory`; a caller closes the one that
    it does not keep.
    """

    tree: Any
    storages: dict[str, tuple[int, int]]  # key -> first byte in the file, nbytes
    account: Account
    directory: Account

    def close(self) -> None:
        """Nothing of it is kept."""
        self.account.close()
        self.directory.close()

    def start_of(self, tensor: TensorRef) -> int:
        """The byte of the file where the tensor's first element is.

        Raises Corrupt when the storage is shorter than the tensor needs it.
        """
        storage: StorageRef = tensor.storage
        start, nbytes = self.storages.get(storage.key, (0, -1))
        if nbytes < storage.nbytes:
            raise Corrupt(f"storage {storage.key[:50]} has {nbytes} bytes, not {storage.nbytes}")
        return start + tensor.offset * DTYPES[tensor.dtype].itemsize


def open_blobs(
    store: Store, blobs: Sequence[Blob], budget: MemoryBudget
) -> Iterator[tuple[Blob, Opened]]:
    """Every blob with its content, in the order of files.

    Raises Corrupt or UnsupportedFormat naming file and bytes, and the store's errors.
    """

    def look(batch: list[Blob]) -> list[tuple[Blob, Opened]]:
        peeks = _Peeks(store, batch[0].file, batch)
        return [(blob, _opened(peeks, blob, budget, False)) for blob in batch]

    # By file and start, so that neighbours share a request.
    batches = _batches(sorted(set(blobs)))
    for opened in in_order(look, batches, threads=READERS, name="ckpt-open", ahead=2 * READERS):
        yield from opened


def open_blob(
    store: Store, blob: Blob, budget: MemoryBudget, *, is_outermost: bool = False
) -> Opened:
    """One blob. Raises like `open_blobs`.

    With `is_outermost`, the bytes of its tensors were not counted in `budget` before, and are now.
    """
    return _opened(_Peeks(store, blob.file, [blob]), blob, budget, is_outermost)


def _batches(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Blobs of one file, as many as are opened with about `BATCH_NBYTES` of reads."""
    batch: list[Blob] = []
    nbytes = 0
    for blob in blobs:
        if batch and (blob.file != batch[0].file or nbytes > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(blob)
        nbytes += sum(stop - start for start, stop in _ends(blob))
    if batch:
        yield batch


class _Peeks:
    """Reads a file. The heads and tails of its blobs are read ahead, in few requests."""

    def __init__(self, store: Store, file: str, blobs: Sequence[Blob]) -> None:
        self.store = store
        self.file = file
        self.known = [(start, self._get(start, stop)) for start, stop in _ranges(blobs)]

    def read(self, start: int, stop: int) -> bytes | bytearray:
        """Bytes `start` to `stop` of the file."""
        number = bisect_right(self.known, start, key=itemgetter(0)) - 1
        if number >= 0:
            first, data = self.known[number]
            if stop <= first + len(data):
                return data[start - first : stop - first]
        return self._get(start, stop)

    def _get(self, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        try:
            self.store.get_into(self.file, start, [memoryview(data)] if data else [])
        except ShortReadError as error:
            raise Corrupt(f"{self.store.url}/{self.file}: it is cut off") from error
        return data


def _ends(blob: Blob) -> list[tuple[int, int]]:
    """What is read ahead of a blob: all of it, or its head and its tail."""
    start, stop = blob.start, blob.stop
    if stop - start <= WHOLE_NBYTES_MAX:
        return [(start, stop)]
    return [(start, start + HEAD_NBYTES), (stop - TAIL_NBYTES, stop)]


def _ranges(blobs: Sequence[Blob]) -> list[tuple[int, int]]:
    """The ends of blobs as byte ranges; ranges that meet are joined."""
    ranges: list[tuple[int, int]] = []
    for start, stop in chain.from_iterable(map(_ends, blobs)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return ranges


def _opened(peeks: _Peeks, blob: Blob, budget: MemoryBudget, is_outermost: bool) -> Opened:
    try:
        return _content(peeks.read, blob, budget, is_outermost)
    except (Corrupt, UnsupportedFormat) as error:
        where = f"{peeks.store.url}/{blob.file}, bytes {blob.start} to {blob.stop}"
        raise type(error)(f"{where}: {error}") from error


@lru_cache(maxsize=512)
def _tensor_of(data: bytes) -> TensorRef | None:
    """The tensor that a pickle is; None when it is anything else, which might be changed, or has to
    be charged to a budget.
    """
    # Of its own: a result that many blobs share cannot be charged to one of them.
    budget = MemoryBudget(FIXED_NBYTES + SAME_MEMORY_NBYTES_MAX)
    try:
        tree = read_tree(data, Account(budget))
    except UnsupportedFormat:
        return None
    return tree if isinstance(tree, TensorRef) else None


def _content(read: ReadBytes, blob: Blob, budget: MemoryBudget, is_outermost: bool) -> Opened:
    account, directory = Account(budget), Account(budget)
    nbytes, allowed = blob.stop - blob.start, 0

    def note_storage(entry: ZipEntry) -> None:
        nonlocal allowed
        # Now and not when all entries are known: the room for them is what their tensors allow.
        if is_outermost and entry.is_stored and "/data/" in entry.name:
            more = min(entry.nbytes, nbytes - allowed)
            budget.allow(more)
            allowed += more

    entries = read_directory(
        lambda start, stop: read(blob.start + start, blob.start + stop),
        nbytes,
        directory.charge,
        note_storage,
    )
    pickle = next((name for name in entries if name.endswith("/data.pkl")), None)
    if pickle is None:
        raise UnsupportedFormat("a zip file that torch.save did not write: it has no data.pkl")
    folder = pickle.removesuffix("data.pkl")
    # TorchScript keeps constants in a pickle of their own; torch.save has none.
    if f"{folder}constants.pkl" in entries:
        raise UnsupportedFormat("a TorchScript archive; save the module's state dict instead")
    data = f"{folder}data/"
    if is_outermost:
        budget.allow(_tensor_nbytes(entries, data, nbytes) - allowed)

    def start_of(entry: ZipEntry) -> int:
        header = blob.start + entry.header_start
        start = blob.start + data_start(entry, read(header, header + 30))
        if start + entry.nbytes > blob.stop:
            raise Corrupt(f"{entry.name}: it lies outside of the file")
        return start

    # Files of older versions of torch lack it.
    order = entries.get(f"{folder}byteorder")
    if order is not None:
        start = start_of(order)
        if read(start, start + min(order.nbytes, 16)) != b"little":
            raise UnsupportedFormat("it was written on a big-endian machine")
    program = entries[pickle]
    if program.nbytes > PICKLE_NBYTES_MAX:
        raise UnsupportedFormat(f"{pickle} has {program.nbytes} bytes")
    start = start_of(program)
    account.charge(program.nbytes)
    text = read(start, start + program.nbytes)
    # The same object for equal pickles of a tensor.
    tree: Any = _tensor_of(bytes(text)) if len(text) <= SAME_NBYTES_MAX else None
    tree = read_tree(text, account) if tree is None else tree
    account.release(program.nbytes)
    storages = {
        name.removeprefix(data): (start_of(entry), entry.nbytes)
        for name, entry in entries.items()
        if name.startswith(data)
    }
    return Opened(tree, storages, account, directory)


def _tensor_nbytes(entries: Mapping[str, ZipEntry], folder: str, blob_nbytes: int) -> int:
    """Bytes of storages that are in the blob. Entries may lie over each other: what they say counts
    up to the length of the blob without its pickle.
    """
    inside = [entry for name, entry in entries.items() if name.startswith(folder)]
    stored = sum(entry.nbytes for entry in inside if entry.is_stored)
    others = sum(entry.nbytes for entry in entries.values()) - sum(one.nbytes for one in inside)
    return max(0, min(stored, blob_nbytes - others))
