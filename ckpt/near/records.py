"""One record of the near log: which files of which ranks are one state of a training.

A near checkpoint exists when its record does. FORMAT.md, "Near tiers", is the specification.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ckpt.commit.names import attempt_epoch, step_prefix
from ckpt.commit.records import INTEGER_MAX, STEP_MAX
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.checksum import DIGEST_NBYTES, Seal, crc32c
from ckpt.format.columns import as_int64s, ints_in, pack_ints, pack_map, required_field, unpack_map
from ckpt.format.object_parts import data_file_name

NEAR_MAGIC = b"SHPTNEAR"
NEAR_VERSION = 1
NEAR_NBYTES_MAX = 64 << 20  # of a record: about a million files


@dataclass(frozen=True, slots=True)
class NearFile:
    """A data file of a near checkpoint: file number `index` of `rank`."""

    rank: int
    index: int
    nbytes: int
    seal: Seal

    @property
    def name(self) -> str:
        """Its name in the directory of the attempt."""
        return data_file_name(self.rank, self.index)


@dataclass(frozen=True, slots=True)
class NearHead:
    """What a record says besides its files.

    `root` and `epoch` are those of the durable root, at the time: a record of another root, or of
    an epoch before the root's newest, never counts. `number` orders the records of an epoch.
    `after_slot` is the newest slot of the durable log when this line of the training began; what
    was committed after it counts as newer only with a higher step. `anchor` is the durable attempt
    that the training continues, "" for none, and `is_new_line` says that it went back to that one
    on purpose.
    """

    root: str
    epoch: int
    number: int
    step: int
    attempt: str
    world_size: int
    after_slot: int
    anchor: str
    is_new_line: bool
    time_unix: float

    def is_before(self, slot: int, step: int) -> bool:
        """Whether a durable checkpoint of this step, committed in this slot, is the newer one."""
        return slot > self.after_slot and step > self.step


@dataclass(frozen=True, slots=True)
class NearRecord:
    """One near checkpoint; `files` are those of all ranks, ascending in rank and number."""

    head: NearHead
    files: tuple[NearFile, ...]

    @property
    def prefix(self) -> str:
        """The directory of its files in a tier, with the closing slash."""
        return step_prefix(self.head.step, self.head.attempt)

    @property
    def order(self) -> tuple[int, int]:
        """Of two records of a root, the higher one is the newer."""
        return self.head.epoch, self.head.number


def encode_near_record(record: NearRecord) -> bytes:
    """The canonical bytes of a record. Raises ValueError for one that makes no sense."""
    if problem := _problem(record):
        raise ValueError(f"near record: {problem}")
    files = record.files
    fields = {
        "head": _json({"version": NEAR_VERSION, **asdict(record.head)}),
        "count": struct.pack("<Q", len(files)),
        "ranks": pack_ints([file.rank for file in files]),
        "indexes": pack_ints([file.index for file in files]),
        "nbytes": pack_ints([file.nbytes for file in files]),
        "table_nbytes": pack_ints([file.seal.nbytes for file in files]),
        "table_digests": b"".join([file.seal.digest for file in files]),
    }
    data = NEAR_MAGIC + pack_map(fields)
    return data + struct.pack("<I", crc32c(data))


# What parsers raise for bytes that only look like a record.
_UNREADABLE = (KeyError, ValueError, TypeError, OverflowError, RecursionError, struct.error)


def decode_near_record(data: bytes, where: str) -> NearRecord:
    """The record in `data`, which may be anything: only what `encode_near_record` makes passes.

    Raises Corrupt, or UnsupportedFormat for that of a newer version, both with `where` it lies.
    """
    head_nbytes = len(NEAR_MAGIC)
    if not head_nbytes + 4 < len(data) <= NEAR_NBYTES_MAX or not data.startswith(NEAR_MAGIC):
        raise Corrupt(f"{where}: {len(data)} bytes are no near record")
    if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
        raise Corrupt(f"{where}: the near record does not match its checksum")
    try:
        record = _decoded(unpack_map(memoryview(data)[head_nbytes:-4]), where)
        is_same = encode_near_record(record) == data
    except _UNREADABLE as error:
        raise Corrupt(f"{where}: the near record is not readable: {error!s:.200}") from error
    if not is_same:
        raise Corrupt(f"{where}: the near record is not in canonical form")
    return record


def _decoded(fields: Mapping[str, memoryview], where: str) -> NearRecord:
    head = json.loads(bytes(required_field(fields, "head")))
    version = head.pop("version")
    if type(version) is int and version > NEAR_VERSION:
        raise UnsupportedFormat(f"{where}: near record of version {version}; upgrade shardpoint")
    (count,) = struct.unpack("<Q", required_field(fields, "count"))
    digests = bytes(required_field(fields, "table_digests"))
    # The one column that is never constant bounds the others, which may be.
    if len(digests) != DIGEST_NBYTES * count:
        raise Corrupt(f"{where}: {len(digests)} bytes of digests for {count} files")
    columns = [
        as_int64s(ints_in(fields, name, count), name).tolist()
        for name in ("ranks", "indexes", "nbytes", "table_nbytes")
    ]
    files = tuple(
        NearFile(rank, index, nbytes, Seal(table, digests[start : start + DIGEST_NBYTES]))
        for start, (rank, index, nbytes, table) in zip(
            range(0, len(digests), DIGEST_NBYTES), zip(*columns, strict=True), strict=True
        )
    )
    return NearRecord(NearHead(**head), files)


def _problem(record: NearRecord) -> str:
    """What is wrong with a record, "" when it makes sense."""
    head, files = record.head, record.files
    texts = (head.root, head.attempt, head.anchor)
    numbers = (head.epoch, head.number, head.step, head.world_size, head.after_slot)
    if not all(type(text) is str for text in texts) or type(head.is_new_line) is not bool:
        return "a name is no text"
    if not all(type(number) is int and 0 <= number <= INTEGER_MAX for number in numbers):
        return "a number is none from 0 to 2**63 - 1"
    if type(head.time_unix) is not float or not math.isfinite(head.time_unix):
        return "time_unix is no finite number"
    # An attempt of an older epoch was restored by the session that wrote this record.
    if head.step > STEP_MAX or not 1 <= attempt_epoch(head.attempt) <= head.epoch:
        return f"step {head.step} or attempt {head.attempt} is out of range"
    if head.anchor:
        attempt_epoch(head.anchor)
    return _problem_of_files(files, head.world_size)


def _problem_of_files(files: Sequence[NearFile], world_size: int) -> str:
    places = [(file.rank, file.index) for file in files]
    # Every rank has a file, and those of a rank are numbered from 0 on.
    first = [rank for rank, index in places if index == 0]
    follows = all(a[0] == b[0] and a[1] + 1 == b[1] for a, b in pairwise(places) if b[1] != 0)
    if places != sorted(set(places)) or not follows or first != [*range(len(first))]:
        return "its files are not in order, or some are left out"
    if len(first) != world_size:
        return f"it has files of {len(first)} ranks, and {world_size} saved"
    for file in files:
        if len(file.seal.digest) != DIGEST_NBYTES or not 0 < file.seal.nbytes <= file.nbytes:
            return f"{file.name}: its sizes or its seal are out of range"
    return ""


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8")
