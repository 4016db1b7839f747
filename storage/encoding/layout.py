"""What an encoded object looks like, how it is written, and how a root says that it is encoded.

magic | tagged blocks, in the order in which they were written | tagged index | footer

Threads that write encode the blocks, which are packed as they come (`EncodedWriter`). The length is
known only at the end. So the object is begun with the largest length that it can have, and
shortened before its last part is written.

What a root says is the header line before FORMAT's own content (`encode_root`). It is readable
without a key, and readers that know nothing of it refuse it as a newer format.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import crc32c

from storage.encoding.blocks import RAW, AesTag, BadTag, BlockTag, CrcTag, Zstd
from storage.encoding.encryption_keys import SALT_NBYTES, EncryptionKey
from storage.errors import CorruptObjectError
from storage.forks import ForkSafeLock
from storage.ranges import PartLedger, as_bytes_view, drop_front, flat_views, take_front
from storage.store import ByteRange, ObjectWriter

MAGIC = b"SHPTENC1"
END = b"SHPTEND1"
BLOCK_NBYTES = 1 << 20  # and never more: what decoding one block may cost
CIPHERS = ("none", "aes-256-gcm")
COMPRESSIONS = ("none", "zstd")
_FOOTER = struct.Struct("<BBHIQQI8s16s32s8s")
_ENTRY = struct.Struct("<QIB")  # where a block is stored, its bytes with the tag, how it is coded
_INDEX_NUMBER = 0  # blocks have theirs and one more
FOOTER_NBYTES = _FOOTER.size
NO_ROOT = bytes(16)  # of an object that was written where there is no root


class Grid(NamedTuple):
    """How `nbytes` are cut: into parts, as they are written, and each part into blocks."""

    nbytes: int
    part_nbytes: int
    block_nbytes: int

    @property
    def _per_part(self) -> int:
        return -(-self.part_nbytes // self.block_nbytes)

    @property
    def blocks_count(self) -> int:
        """How many blocks there are."""
        whole, rest = divmod(self.nbytes, self.part_nbytes)
        return whole * self._per_part - (-rest // self.block_nbytes)

    def block(self, number: int) -> ByteRange:
        """The bytes of the object that block `number` holds."""
        part, within = divmod(number, self._per_part)
        start = part * self.part_nbytes + within * self.block_nbytes
        end = min(start + self.block_nbytes, (part + 1) * self.part_nbytes, self.nbytes)
        return ByteRange(start, end)

    def blocks_of_part(self, index: int) -> range:
        """The numbers of the blocks of part `index`."""
        first = index * self._per_part
        return range(first, min(first + self._per_part, self.blocks_count))

    def blocks_within(self, start: int, end: int) -> range:
        """The numbers of the blocks that hold bytes `start` to `end`, at least one of them."""
        return range(self._number(start), self._number(end - 1) + 1)

    def _number(self, position: int) -> int:
        part, within = divmod(position, self.part_nbytes)
        return part * self._per_part + within // self.block_nbytes


class BlockPlace(NamedTuple):
    """Where a block lies in the stored object, and how it is coded."""

    start: int
    nbytes: int
    coding: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Codec(NamedTuple):
    """How the objects of a root are encoded."""

    secret: EncryptionKey | None
    zstd: Zstd | None
    root: bytes = NO_ROOT  # its id


class ObjectEncoder:
    """Encodes the blocks of one object, from any threads, and makes what stands behind them."""

    def __init__(self, codec: Codec, key: str, grid: Grid) -> None:
        self.grid = grid
        self._name = key.encode()
        self._codec = codec
        # A key of its own for each object: numbers of blocks are nonces, and all objects have the
        # same ones.
        self._salt = bytes(SALT_NBYTES) if codec.secret is None else os.urandom(SALT_NBYTES)
        self._tag: BlockTag = CrcTag() if codec.secret is None else AesTag(codec.secret, self._salt)

    @property
    def nbytes_max(self) -> int:
        """What the object takes at most: exactly this, where nothing is compressed."""
        tagged = self.grid.nbytes + self.grid.blocks_count * self._tag.nbytes
        return len(MAGIC) + tagged + self._index_nbytes + FOOTER_NBYTES

    @property
    def _index_nbytes(self) -> int:
        return self.grid.blocks_count * _ENTRY.size + len(self._name) + self._tag.nbytes

    def block(self, number: int, data: memoryview) -> tuple[int, bytes]:
        """How block `number` is coded, and its bytes as they are stored."""
        coding: int = RAW
        packed: bytes | memoryview = data
        if self._codec.zstd is not None:
            coding, packed = self._codec.zstd.encode(data)
        return coding, self._tag.close(number + 1, packed, bytes([coding]))

    def end(self, entries: Sequence[BlockPlace]) -> bytes:
        """What follows the last block; `entries` in the order of the blocks' numbers."""
        secret, zstd, root = self._codec
        footer = _FOOTER.pack(
            CIPHERS.index("none" if secret is None else "aes-256-gcm"),
            COMPRESSIONS.index("none" if zstd is None else "zstd"),
            0,
            self.grid.block_nbytes,
            self.grid.nbytes,
            self.grid.part_nbytes,
            self._index_nbytes,
            bytes(8) if secret is None else bytes.fromhex(secret.id),
            root,
            self._salt,
            END,
        )
        # The name is in it, and the tag covers it: an object under another key is refused.
        index = b"".join(_ENTRY.pack(*entry) for entry in entries) + self._name
        return self._tag.close(_INDEX_NUMBER, index, footer) + footer


class Footer(NamedTuple):
    """The end of an object, as it says it; to be believed once the index was opened with it."""

    cipher: str
    compression: str
    grid: Grid
    index_nbytes: int
    key_id: str  # "" without a cipher
    root: bytes
    salt: bytes
    data: bytes

    @classmethod
    def read(cls, tail: bytes | memoryview, where: str) -> Footer:
        """The footer at the end of `tail`. Raises CorruptObjectError when there is none."""
        data = bytes(memoryview(tail)[-FOOTER_NBYTES:])
        if len(data) < FOOTER_NBYTES or not data.endswith(END):
            raise CorruptObjectError(
                f"{where} is not encoded, although its root is: it was cut, or put there by "
                "something else than this library"
            )
        cipher, compression, rest, block, nbytes, part, index_nbytes, key_id, root, salt, _ = (
            _FOOTER.unpack(data)
        )
        if cipher > 1 or compression > 1 or rest or not 0 < block <= BLOCK_NBYTES or not part:
            raise damaged(where, "its footer is not one of this format")
        return cls(
            CIPHERS[cipher],
            COMPRESSIONS[compression],
            Grid(nbytes, part, block),
            index_nbytes,
            key_id.hex() if cipher else "",
            root,
            salt,
            data,
        )


class ObjectIndex:
    """One encoded object: where its blocks are, and how they are opened."""

    def __init__(
        self,
        footer: Footer,
        tagged: bytes | memoryview,
        secret: EncryptionKey | None,
        where: str,
    ) -> None:
        """`tagged` is the index as stored. Raises CorruptObjectError unless it is whole."""
        self.grid = footer.grid
        self._where = where
        self._tag: BlockTag = CrcTag() if secret is None else AesTag(secret, footer.salt)
        self._zstd = Zstd() if footer.compression == "zstd" else None
        try:
            index = bytes(self._tag.open(_INDEX_NUMBER, tagged, footer.data))
        except BadTag:
            raise damaged(where, "its index does not match its tag") from None
        self._entries = index[: self.grid.blocks_count * _ENTRY.size]
        # What the object was written as: the key below its root.
        self.name = index[len(self._entries) :].decode("utf-8", "replace")
        if len(self._entries) < self.grid.blocks_count * _ENTRY.size:
            raise damaged(where, "its index has fewer blocks than the object")

    def entry(self, number: int) -> BlockPlace:
        """Where block `number` is stored."""
        entry = BlockPlace(*_ENTRY.unpack_from(self._entries, number * _ENTRY.size))
        # Where nothing is encrypted, anybody can make an index that matches its tag.
        if entry.start < len(MAGIC) or entry.nbytes > BLOCK_NBYTES + self._tag.nbytes:
            raise damaged(self._where, f"its index has {entry} for block {number}")
        return entry

    def decode(self, number: int, stored: memoryview) -> bytes | memoryview:
        """The bytes of block `number`. Raises CorruptObjectError when they are not those that were
        written; never takes more memory than a block.
        """
        coding, nbytes = self.entry(number).coding, self.grid.block(number).nbytes
        try:
            data = self._tag.open(number + 1, stored, bytes([coding]))
            if coding != RAW:
                if self._zstd is None or coding not in (1, 2, 4, 8):
                    raise BadTag
                data = self._zstd.decode(coding, data, nbytes)
        except BadTag:
            raise damaged(self._where, f"block {number} does not match its tag") from None
        if len(data) != nbytes:
            raise damaged(self._where, f"block {number} has {len(data)} bytes, not {nbytes}")
        return data


def damaged(where: str, what: str) -> CorruptObjectError:
    """The error for bytes that are not those that were written."""
    return CorruptObjectError(
        f"{where}: {what}: it was changed, or damaged. Load an older step, or restore this object "
        "from a copy"
    )


def encode_object(codec: Codec, key: str, data: bytes) -> bytes:
    """A whole object of one part."""
    encoder = ObjectEncoder(codec, key, Grid(len(data), max(len(data), 1), BLOCK_NBYTES))
    view, stored, entries = as_bytes_view(memoryview(data)), [MAGIC], []
    start = len(MAGIC)
    for number in range(encoder.grid.blocks_count):
        block = encoder.grid.block(number)
        coding, tagged = encoder.block(number, view[block.start : block.end])
        entries.append(BlockPlace(start, len(tagged), coding))
        stored.append(tagged)
        start += len(tagged)
    return b"".join((*stored, encoder.end(entries)))


FORMAT_KEY = "FORMAT"
FORMAT_NBYTES_MAX = 4096
_START = b"shardpoint 2 encoded "
_LINE = re.compile(
    rb"(shardpoint 2 encoded ([a-z0-9-]+) ([a-z0-9-]+) ([0-9a-f]{16}|-)) ([0-9a-f]{32}|-)"
)


_ROOT = re.compile(rb"shardpoint [0-9]+ ([0-9a-f]{32}) [0-9a-f]{8}\n")


class RootEncoding(NamedTuple):
    """What the FORMAT object of an encoded root says; `key_id` is "" without a cipher."""

    cipher: str
    compression: str
    key_id: str


def encode_root(secret: EncryptionKey | None, compression: str, data: bytes) -> bytes:
    """The FORMAT object of an encoded root, of which `data` is the FORMAT of a plain one."""
    cipher, key_id = ("none", "-") if secret is None else ("aes-256-gcm", secret.id)
    line = _START + f"{cipher} {compression} {key_id}".encode()
    line += b" " + (b"-" if secret is None else _check(secret, line, data))
    return line + b" %08x\n" % crc32c.crc32c(line + b"\n" + data) + data


def decode_root(stored: bytes, where: str) -> tuple[RootEncoding, bytes] | None:
    """How a root is encoded, and its FORMAT without the line that says so; None where it is not, or
    in a way that only newer versions know. Raises CorruptObjectError for a damaged line.
    """
    if not stored.startswith(_START):
        return None
    line, _, data = stored.partition(b"\n")
    said, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % crc32c.crc32c(said + b"\n" + data):
        raise damaged(where, "its checksum does not match")
    match = _LINE.fullmatch(said)
    if match is None:
        return None
    cipher, compression, key_id = (match[group].decode() for group in (2, 3, 4))
    if cipher not in CIPHERS or compression not in COMPRESSIONS:
        return None
    return RootEncoding(cipher, compression, "" if cipher == "none" else key_id), data


def root_of(data: bytes) -> bytes:
    """The root's id, of the FORMAT of a plain root; zeros where that has none."""
    match = _ROOT.fullmatch(data)
    return NO_ROOT if match is None else bytes.fromhex(match[1].decode())


def check_root(secret: EncryptionKey, stored: bytes, where: str) -> None:
    """Raises CorruptObjectError unless FORMAT was made with `key`."""
    line, _, data = stored.partition(b"\n")
    said, _, _ = line.rpartition(b" ")
    match = _LINE.fullmatch(said)
    # In constant time: an answer that comes sooner would tell how much of a guess is right.
    if match is None or not hmac.compare_digest(match[5], _check(secret, match[1], data)):
        raise damaged(where, "it was not made with this key")


def _check(secret: EncryptionKey, line: bytes, data: bytes) -> bytes:
    check_key = secret.derived(b"", b"shardpoint 1 FORMAT")
    return hmac.digest(check_key, line + b"\n" + data, hashlib.sha256)[:16].hex().encode()


Part = tuple[int, list[memoryview]]


class EncodedWriter(ObjectWriter):
    """Encodes what is written and passes it on in parts of the store beneath.

    Its memory is, for each thread that writes, one part encoded and one that is being sent.
    """

    def __init__(
        self,
        key: str,
        encoder: ObjectEncoder,
        begin: Callable[[], AbstractContextManager[ObjectWriter]],
        stored_part_nbytes: int,
    ) -> None:
        grid = encoder.grid
        self.part_nbytes = grid.part_nbytes
        self._ledger = PartLedger(key, grid.nbytes, grid.part_nbytes)
        self._encoder = encoder
        self._begin = begin
        self._stored_part_nbytes = stored_part_nbytes
        self._announced_nbytes = encoder.nbytes_max
        self._entries: list[BlockPlace | None] = [None] * grid.blocks_count
        self._waiting = [memoryview(MAGIC)]  # less than one part of the store
        self._nbytes = len(MAGIC)  # of all so far, those that were sent included
        self._index = 0  # of the part that is sent next
        self._lock = ForkSafeLock()

    def __enter__(self) -> EncodedWriter:
        self._context = self._begin()
        self._writer = self._context.__enter__()
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        # Never given back: a number is tagged once, whatever becomes of the bytes.
        where = self._ledger.claim(index, buffers)
        views = flat_views(buffers)
        encoded: list[tuple[int, int, bytes]] = []
        # Encoding takes the time and needs no lock; packing, which has an order, does.
        for number in self._encoder.grid.blocks_of_part(index):
            block = self._encoder.grid.block(number)
            data = _joined(views, block.start - where.start, block.nbytes)
            encoded.append((number, *self._encoder.block(number, data)))
        with self._lock:
            for number, coding, tagged in encoded:
                self._entries[number] = BlockPlace(self._nbytes, len(tagged), coding)
                self._append(tagged)
            parts = list(self._whole_parts(keep=0))
        # Sent without the lock: other threads encode and pack meanwhile.
        for part in parts:
            self._writer.write_part(*part)

    def shorten(self, nbytes: int) -> None:
        self._ledger.shorten(nbytes)
        self._encoder.grid = self._encoder.grid._replace(nbytes=nbytes)
        del self._entries[self._encoder.grid.blocks_count :]

    def __exit__(self, *raised: Any) -> bool | None:
        if raised[0] is None:
            try:
                self._finish()
            except BaseException as error:
                self._context.__exit__(type(error), error, error.__traceback__)
                raise
        return self._context.__exit__(*raised)

    def _finish(self) -> None:
        self._ledger.check_complete()
        self._append(self._encoder.end([entry for entry in self._entries if entry is not None]))
        if self._nbytes < self._announced_nbytes:
            self._writer.shorten(self._nbytes)
        # Something is kept: the last part must not be empty.
        for part in self._whole_parts(keep=1):
            self._writer.write_part(*part)
        self._writer.write_part(self._index, self._waiting)

    def _append(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._nbytes += len(data)

    def _whole_parts(self, *, keep: int) -> Iterator[Part]:
        """Parts of the store that are full, taken from what waits; `keep` bytes stay at least."""
        size = self._stored_part_nbytes
        waiting = self._nbytes - self._index * size
        while waiting >= size + keep:
            yield self._index, take_front(self._waiting, size)
            self._waiting = drop_front(self._waiting, size)
            self._index += 1
            waiting -= size


def _joined(views: list[memoryview], start: int, nbytes: int) -> memoryview:
    """Bytes `start` to `start + nbytes` of all views together: copied only where that is needed."""
    pieces = take_front(drop_front(views, start), nbytes)
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
