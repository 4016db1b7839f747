"""Checksum tables: the last tensor of each data file, which holds the checksums of its blocks.

In a manifest these words would be nearly all of it. It has a seal per file instead, and a reader of
blocks of a file reads the file's table first. FORMAT.md, "Checksum tables", is the specification.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt
from ckpt.format.checksum import DIGEST_NBYTES, Digests, digests_from
from ckpt.format.columns import as_int64s, pack_ints, required_field, unpack_ints

_WORDS_MIN = 3  # magic, checksum of the header, checksum of the table

Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]


class Seal(NamedTuple):
    """Length and SHA-256 of one data file's checksum table."""

    nbytes: int
    digest: bytes


def seal_of(table: bytes | memoryview) -> Seal:
    """The seal of a table, given all its bytes."""
    return Seal(len(table), hashlib.sha256(table).digest())


class Seals(NamedTuple):
    """The seals of data files, as columns with an item per file."""

    nbytes: Int64s
    digests: Digests

    @classmethod
    def of(cls, seals: Sequence[Seal]) -> Seals:
        """The seals as columns."""
        nbytes = np.array([seal.nbytes for seal in seals], dtype=np.int64)
        return cls(nbytes, digests_from(b"".join([seal.digest for seal in seals])))

    def of_file(self, file: int) -> Seal:
        """The seal of one file."""
        return Seal(int(self.nbytes[file]), self.digests[file].tobytes())

    def word_counts(self) -> Int64s:
        """The words of each table."""
        return self.nbytes // 4


def fields_of_seals(seals: Seals) -> dict[str, bytes]:
    """The fields of a manifest, or of a part, that hold seals."""
    return {
        "table_nbytes": pack_ints(seals.nbytes),
        "table_digests": seals.digests.tobytes(),
    }


def decode_seals(fields: Mapping[str, memoryview], rooms: Sequence[int] | Int64s) -> Seals:
    """The inverse of `fields_of_seals`; `rooms` are the bytes of each file behind its header.

    Raises Corrupt for a table that is none, or that is longer than its file.
    """
    count = len(rooms)
    nbytes = as_int64s(
        unpack_ints(required_field(fields, "table_nbytes"), count, "table_nbytes"), "table_nbytes"
    )
    data = required_field(fields, "table_digests")
    if len(data) != DIGEST_NBYTES * count:
        raise Corrupt(f"field 'table_digests': {len(data)} bytes for {count} files")
    wrong = (nbytes % 4 != 0) | (nbytes < 4 * _WORDS_MIN) | (nbytes > np.asarray(rooms))
    if wrong.any():
        file = int(np.flatnonzero(wrong)[0])
        raise Corrupt(f"field 'table_nbytes': {int(nbytes[file])} bytes in file number {file}")
    return Seals(nbytes, digests_from(data))
