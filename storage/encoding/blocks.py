"""One block of an object, encoded: compressed where that makes it smaller, then tagged.

A tag is the tag of AES-256-GCM, or a crc32c where nothing is encrypted. It covers the block's
place in the object as well, so that blocks cannot be exchanged.
"""

from __future__ import annotations

import importlib
import struct
import threading
from typing import Any

import crc32c
import numpy as np

from storage.encoding.encryption_keys import EncryptionKey
from storage.errors import InvalidUrlError

RAW = 0  # how a block is coded; else the number of its byte planes, which are compressed
PLANES = (1, 2, 4, 8)
SAMPLE_NBYTES = 4096
SAMPLES = 4
WORTH = 0.97  # of its size: less gain is not worth the time of the readers


class BadTag(Exception):
    """What was opened is not what was tagged there. Carries no detail: there is none to trust."""


class CrcTag:
    """The bytes as they are, and behind them a crc32c of `number`, `about` and them."""

    nbytes = 4

    def close(self, number: int, data: bytes | memoryview, about: bytes) -> bytes:
        return b"".join((data, self._sum(number, data, about)))

    def open(self, number: int, stored: bytes | memoryview, about: bytes) -> bytes | memoryview:
        data = memoryview(stored)[:-4]
        if self._sum(number, data, about) != bytes(memoryview(stored)[-4:]):
            raise BadTag
        return data

    def _sum(self, number: int, data: bytes | memoryview, about: bytes) -> bytes:
        # Continued over the data, which need not be copied behind what goes before it.
        before = crc32c.crc32c(struct.pack("<Q", number) + about)
        return struct.pack("<I", crc32c.crc32c(data, before))


class AesTag:
    """AES-256-GCM with a key that this object alone has; the nonce is `number`.

    The key is derived from a random salt, and each number is closed once: no nonce is used twice.
    """

    nbytes = 16

    def __init__(self, secret: EncryptionKey, salt: bytes) -> None:
        aead = needed("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        self._invalid: type[Exception] = needed("cryptography.exceptions", "encryption").InvalidTag
        self._cipher: Any = aead.AESGCM(secret.derived(salt, b"shardpoint 1 object"))

    def close(self, number: int, data: bytes | memoryview, about: bytes) -> bytes:
        tagged: bytes = self._cipher.encrypt(number.to_bytes(12, "big"), data, about)
        return tagged

    def open(self, number: int, stored: bytes | memoryview, about: bytes) -> bytes:
        try:
            data: bytes = self._cipher.decrypt(number.to_bytes(12, "big"), stored, about)
        except self._invalid:
            raise BadTag from None
        return data


BlockTag = CrcTag | AesTag
"""`close` returns the bytes as they are stored, `nbytes` longer, bound to `number` and `about`;
`open` returns what was closed, or raises BadTag. Thread-safe."""


class Zstd:
    """Compression of blocks with zstd, after their bytes were parted into planes.

    Of numbers of n bytes, plane i has byte i of each. Weights have few exponents and many
    mantissas: together in planes the former compress, in turn with the latter they hardly do.
    """

    def __init__(self, level: int = 1) -> None:
        self._zstd = needed("zstandard", "compression")
        self._level = level
        self._own = threading.local()  # a compressor is of one thread, and takes time to make

    def encode(self, data: memoryview, planes: int = 0) -> tuple[int, bytes | memoryview]:
        """The planes, those that samples say if none are given, and the compressed bytes; or RAW
        and the bytes themselves.
        """
        planes = planes or self._best_planes(data)
        if planes != RAW:
            packed = self._compressor.compress(in_planes(data, planes))
            # Samples may be wrong. Raw at worst: `ObjectEncoder.nbytes_max` relies on it.
            if len(packed) < WORTH * data.nbytes:
                return planes, packed
        return RAW, data

    def decode(self, planes: int, packed: bytes | memoryview, nbytes: int) -> bytes | memoryview:
        """The `nbytes` bytes of a block. Raises BadTag when these are not what it holds."""
        try:
            # What the frame says of itself is compared before any memory is taken for it.
            if self._zstd.get_frame_parameters(packed).content_size != nbytes:
                raise BadTag
            data: bytes = self._decompressor.decompress(packed, allow_extra_data=False)
        except self._zstd.ZstdError:
            raise BadTag from None
        return out_of_planes(data, planes)

    def _best_planes(self, data: memoryview) -> int:
        """What a few samples of the block say; RAW where none of them shrinks."""
        sample = data
        if data.nbytes > SAMPLES * SAMPLE_NBYTES:
            # From everywhere in the block, and in whole numbers of any size.
            step = (data.nbytes - SAMPLE_NBYTES) // (SAMPLES - 1) // 8 * 8
            starts = range(0, SAMPLES * step, step)
            sample = memoryview(b"".join(data[start : start + SAMPLE_NBYTES] for start in starts))
        best, least = RAW, WORTH * sample.nbytes
        for planes in PLANES:
            parted = in_planes(sample, planes)
            # Each by itself: in a block, which is so much larger, zstd has a table for each.
            each = -(-sample.nbytes // planes)
            starts = range(0, sample.nbytes, each)
            parts = (parted[start : start + each] for start in starts)
            nbytes = sum(len(self._compressor.compress(part)) for part in parts)
            if nbytes < least:
                best, least = planes, nbytes
        return best

    @property
    def _compressor(self) -> Any:
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._zstd.ZstdCompressor(level=self._level)
        return self._own.compressor

    @property
    def _decompressor(self) -> Any:
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = self._zstd.ZstdDecompressor()
        return self._own.decompressor


def in_planes(data: memoryview, planes: int) -> memoryview:
    """The first bytes of all numbers of `planes` bytes, then the second ones and so on; what is
    left at the end stays as it is. One plane is the data itself.
    """
    if planes == 1:
        return data
    whole = data.nbytes // planes * planes
    target = np.empty(data.nbytes, np.uint8)
    source = np.frombuffer(data, np.uint8)
    for plane in range(planes):
        target[plane * (whole // planes) : (plane + 1) * (whole // planes)] = source[
            plane:whole:planes
        ]
    target[whole:] = source[whole:]
    return target.data


def out_of_planes(data: bytes | memoryview, planes: int) -> bytes | memoryview:
    """What `in_planes` was given."""
    if planes == 1:
        return data
    whole = len(data) // planes * planes
    source = np.frombuffer(data, np.uint8)
    target = np.empty(len(data), np.uint8)
    for plane in range(planes):
        target[plane:whole:planes] = source[
            plane * (whole // planes) : (plane + 1) * (whole // planes)
        ]
    target[whole:] = source[whole:]
    return target.data


def needed(module: str, what: str) -> Any:
    """An optional package. Raises InvalidUrlError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise InvalidUrlError(
            f"{what} needs the package {package}: pip install 'shardpoint[encode]'"
        ) from None
