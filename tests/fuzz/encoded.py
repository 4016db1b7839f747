"""Targets: what lies in an encoded root, which whoever may write there may have made.

Where a root is only compressed, checksums are made right after a mutation. In an encrypted one
nobody without the key can do that: what is read there is what was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import crc32c

from storage.encoding.blocks import CrcTag
from storage.encoding.layout import FOOTER_NBYTES, FORMAT_KEY, MAGIC, Footer
from storage.encoding.store import EncodedStore, EncodingOptions
from storage.errors import KeyNotFoundError, StorageError, TooLargeError
from storage.memory import MemoryStore
from storage.store import ByteRange
from tests.fuzz.target import Target

KEY = bytes(range(32))
PLAIN_FORMAT = b"shardpoint 1 00112233445566778899aabbccddeeff 00000000\n"
BOUND = 4 << 20
_CRC, _ENTRY_NBYTES = CrcTag(), 13
# Objects by their keys: of several parts, of several codings, and without any byte.
WRITTEN = {
    "steps/1/MANIFEST": bytes(range(256)) * 20,
    "x": bytes(3000) + bytes(range(200)),
    "y": b"\0\0\x80?" * 500,
    "empty": b"",
}


def _root(*, is_encrypted: bool) -> dict[str, bytes]:
    """What lies beneath, by key."""
    inner = MemoryStore()
    store = EncodedStore(inner, EncodingOptions(KEY if is_encrypted else None, 1))
    store.put_if_absent(FORMAT_KEY, PLAIN_FORMAT)
    for key, data in WRITTEN.items():
        if key == "x":
            with store.create(key, len(data), part_nbytes=1000) as writer:
                for index, start in enumerate(range(0, len(data), 1000)):
                    writer.write_part(index, [memoryview(data)[start : start + 1000]])
        else:
            store.put_if_absent(key, data)
    return {info.key: inner.get(info.key) for info in inner.list("")}


@cache
def _roots() -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
    return _root(is_encrypted=False), _root(is_encrypted=True)


def _opened(stored: Mapping[str, bytes], key: bytes | None = None) -> EncodedStore:
    inner = MemoryStore()
    for name, data in stored.items():
        inner.put_if_absent(name, data)
    return EncodedStore(inner, EncodingOptions(key))


def _read(store: EncodedStore, key: str) -> bytes:
    """An object in all ways that there are, which agree with each other. Of a root, FORMAT is read
    first, as by whoever opens its log.
    """
    with suppress(KeyNotFoundError):
        store.get(FORMAT_KEY)
    with suppress(TooLargeError, KeyNotFoundError):
        # What says more of itself than a reader takes is not read whole.
        whole = store.get_bounded(key, BOUND)
        assert store.info(key).nbytes == len(whole) <= BOUND
    nbytes = min(store.info(key).nbytes, BOUND)
    read = store.get(key, ByteRange(0, nbytes))
    for start, end in ((0, 1), (nbytes // 2, nbytes), (999, 1001)):
        if 0 <= start < end <= nbytes:
            assert store.get(key, ByteRange(start, end)) == read[start:end]
    return read


def _objects(*, is_encrypted: bool) -> list[bytes]:
    return [_roots()[is_encrypted][key] for key in WRITTEN]


def _sealed_object(data: bytes) -> bytes:
    """With the checksums of its blocks and of its index, as far as these can be found."""
    try:
        footer = Footer.read(data, "x")
    except StorageError:
        return data
    sealed, end = bytearray(data), len(data) - FOOTER_NBYTES
    start = end - footer.index_nbytes
    if not len(MAGIC) <= start <= end - _CRC.nbytes:
        return data
    index = data[start : end - _CRC.nbytes]
    for number in range(min(footer.grid.blocks_count, len(index) // _ENTRY_NBYTES)):
        entry = index[number * _ENTRY_NBYTES :][:_ENTRY_NBYTES]
        offset, nbytes = int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:12], "little")
        if _CRC.nbytes <= nbytes and len(MAGIC) <= offset and offset + nbytes <= start:
            block = bytes(sealed[offset : offset + nbytes - _CRC.nbytes])
            sealed[offset : offset + nbytes] = _CRC.close(number + 1, block, entry[12:])
    sealed[start:end] = _CRC.close(0, index, footer.data)
    return bytes(sealed)


def _read_any(root: Mapping[str, bytes], data: bytes, key: bytes | None) -> None:
    """`data` in the place of each object. Raises the refusal of the last where none takes it."""
    refusals: list[StorageError] = []
    for name, written in WRITTEN.items():
        try:
            read = _read(_opened({FORMAT_KEY: root[FORMAT_KEY], name: data}, key), name)
        except StorageError as error:
            refusals.append(error)
        else:
            assert key is None or read == written
    if len(refusals) == len(WRITTEN):
        raise refusals[-1]


def _read_compressed(data: bytes) -> None:
    with suppress(StorageError):
        # A step's directory that was opened by itself: its objects say what they are.
        _read(_opened({"MANIFEST": data}), "MANIFEST")
    _read_any(_roots()[0], data, None)


def _read_encrypted(data: bytes) -> None:
    _read_any(_roots()[1], data, KEY)


def _formats() -> list[bytes]:
    return [root[FORMAT_KEY] for root in _roots()] + [PLAIN_FORMAT]


def _sealed_format(data: bytes) -> bytes:
    """With the checksum at the end of its first line."""
    line, newline, rest = data.partition(b"\n")
    said, space, _ = line.rpartition(b" ")
    if not data.startswith(b"shardpoint 2 encoded ") or not newline:
        return data
    return said + space + b"%08x" % crc32c.crc32c(said + b"\n" + rest) + newline + rest


def _read_format(data: bytes) -> None:
    compressed, encrypted = _roots()
    try:
        store = _opened({**compressed, FORMAT_KEY: data})
        store.get(FORMAT_KEY)
        store.get("x")
    except StorageError:
        # Whoever has a key takes no FORMAT that was not made with it.
        store = _opened({**encrypted, FORMAT_KEY: data}, KEY)
        assert store.get(FORMAT_KEY) == PLAIN_FORMAT and data == encrypted[FORMAT_KEY]
        assert store.get("x") == WRITTEN["x"]


TARGETS = (
    Target(
        "encoded.compressed",
        _read_compressed,
        lambda: _objects(is_encrypted=False),
        _sealed_object,
        refusals=(StorageError,),
    ),
    Target(
        "encoded.encrypted",
        _read_encrypted,
        lambda: _objects(is_encrypted=True),
        refusals=(StorageError,),
    ),
    Target("encoded.format", _read_format, _formats, _sealed_format, refusals=(StorageError,)),
)
