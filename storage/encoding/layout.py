"""What an encoded object looks like: its blocks, the index behind them, the footer at its end.

magic | tagged blocks, in the order in which they were written | tagged index | footer
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from storage.encoding.blocks import RAW, AesTag, BadTag, BlockTag, CrcTag, Zstd
from storage.encoding.encryption_keys import SALT_NBYTES, EncryptionKey
from storage.errors import CorruptObjectError
from storage.ranges import as_bytes_view
from storage.store import ByteRange

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
