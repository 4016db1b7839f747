"""Records of the log and segments of its live set: fields, bytes, and what makes them invalid."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgpack

from ckpt.commit.names import attempt_epoch, step_prefix
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat
from ckpt.format.checksum import crc32c

RECORD_MAGIC = b"SHPTLOG1"
RECORD_NBYTES_MAX = 4 * 1024 * 1024  # bounds what a hostile record costs
SEGMENT_NBYTES_MAX = 256 * 1024 * 1024
SEGMENTS_MAX = 1000  # likewise: each of them is a request
STEP_MAX = 10**18 - 1  # what the name of a step directory has room for
EPOCH_MAX = 10**18 - 1  # what the name of an attempt has room for
UNIX_MAX = 1e11  # of a time: about the year 5000
INTEGER_MAX = 2**63 - 1
FIRST_LINE = 0
_OPTIONAL = ("previous", "segments", "gone")  # fields of a record

Kind = Literal["CLAIM", "COMMIT", "RETIRE", "PIN", "UNPIN", "VERIFIED"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """One checkpoint that exists: its manifest, and what retention has to know of it.

    `slot` is the log position of its COMMIT. `references` are attempts whose files it needs.
    `line` names the training that it is a state of: the slot of that line's first commit. None for
    what no training has saved: imports, and copies in another layout.

    `committed_unix` is when it was first committed, in seconds since 1970 by its writer's clock,
    and `nbytes` what its own data files and its MANIFEST take.
    """

    attempt: str
    step: int
    slot: int
    manifest_nbytes: int
    manifest_digest: bytes
    pinned: bool = False
    verified: bool = False
    metric: float | None = None
    references: tuple[str, ...] = ()
    line: int | None = FIRST_LINE
    committed_unix: float = 0.0
    nbytes: int = 0

    @property
    def prefix(self) -> str:
        """The step directory, with the closing slash."""
        return step_prefix(self.step, self.attempt)

    def is_apart_from(self, other: LiveEntry) -> bool:
        """Whether the two share no file."""
        return {self.attempt, *self.references}.isdisjoint((other.attempt, *other.references))


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """What a record says of a segment of its live set: an object of `count` entries, the last of
    which was committed in `last_slot`. See `ckpt.commit.live`.
    """

    digest: bytes
    nbytes: int
    count: int
    last_slot: int


@dataclass(frozen=True, slots=True)
class Record:
    """One log record. `time_unix` is for display only; `live` is ascending in `slot`.

    The live set consists of `live` and the entries of `segments`, but for those that were committed
    in the slots `gone`: they are live no more, or are in `live` as they are now.

    `previous` is the digest of the record in the slot before; None in slot 0.
    """

    kind: Kind
    slot: int
    epoch: int
    write_id: bytes
    time_unix: float
    attempt: str | None
    live: tuple[LiveEntry, ...]
    previous: bytes | None = None
    segments: tuple[SegmentRef, ...] = ()
    gone: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many checkpoints exist after it."""
        return len(self.live) + sum(ref.count for ref in self.segments) - len(self.gone)


def _types_of(hint: Any) -> tuple[type, ...]:
    """The types that a value may have in a record, which has lists for tuples."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    lists = {tuple: list, Literal: str}
    return tuple([lists.get(get_origin(option), option) for option in options])


FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    cls: {name: _types_of(hint) for name, hint in get_type_hints(cls).items()}
    for cls in (LiveEntry, SegmentRef, Record)
}
_ITEMS: dict[str, tuple[type, ...]] = {"references": (str,), "gone": (int,)}
_LABELS = {
    (LiveEntry, "slot"): "slot of a checkpoint",
    (SegmentRef, "digest"): "digest of a segment",
}


def manifest_digest(encoded_manifest: bytes | memoryview) -> bytes:
    """The digest of a manifest as the log keeps it: SHA-256, 32 bytes."""
    return hashlib.sha256(encoded_manifest).digest()


def encode_record(record: Record) -> bytes:
    """The canonical bytes of a record: magic, msgpack map, crc32c of all before (little-endian)."""
    body: dict[str, Any] = {
        "kind": record.kind,
        "slot": record.slot,
        "epoch": record.epoch,
        "write_id": record.write_id,
        "time_unix": record.time_unix,
        "attempt": record.attempt,
        "live": list(map(_map_of, record.live)),
    }
    if record.previous is not None:
        body["previous"] = record.previous
    if record.segments:
        body["segments"] = list(map(_map_of, record.segments))
        body["gone"] = list(record.gone)
    data = RECORD_MAGIC + bytes(msgpack.packb(body, use_bin_type=True))
    data += struct.pack("<I", crc32c(data))
    if len(data) > RECORD_NBYTES_MAX:
        raise CheckpointError(
            f"{len(record.live)} of {record.count} checkpoints need a log record of {len(data)} "
            f"bytes, at most {RECORD_NBYTES_MAX} are allowed: their references take too much; "
            "retire old checkpoints (ckpt prune), or save without dedup"
        )
    return data


def _map_of(item: LiveEntry | SegmentRef) -> dict[str, Any]:
    # Not `asdict`, which copies each value: a writer and a reader make thousands.
    return {name: getattr(item, name) for name in FIELDS[type(item)]}


def record_digest(encoded: bytes) -> bytes:
    """The digest of a record as the record after it keeps it: SHA-256, 32 bytes."""
    return hashlib.sha256(encoded).digest()


def decode_record(data: bytes, *, slot: int, where: str) -> Record:
    """Parse a record that may be hostile. Only the exact bytes that `encode_record` makes pass.

    Raises Corrupt naming the object and the next move, UnsupportedFormat for unknown kinds or
    fields.
    """
    if len(data) > RECORD_NBYTES_MAX:
        corrupt_record(where, f"{len(data)} bytes, at most {RECORD_NBYTES_MAX} are allowed")
    # Before the parser, which then only sees what some writer has made: damage is named as damage.
    check_record_sum(data, where)
    try:
        body = msgpack.unpackb(
            data[len(RECORD_MAGIC) : -4], raw=False, strict_map_key=True, use_list=True
        )
    except Exception as error:  # msgpack raises a dozen classes for bad input
        corrupt_record(where, f"not msgpack ({type(error).__name__})")
    got = _typed(body, Record, where)
    got["live"] = tuple([LiveEntry(**_typed(entry, LiveEntry, where)) for entry in got["live"]])
    segments = got.get("segments", ())
    got["segments"] = tuple([SegmentRef(**_typed(ref, SegmentRef, where)) for ref in segments])
    record = Record(**got)
    if (problem := record_problem(record, slot=slot)) is not None:
        corrupt_record(where, problem)
    # One encoding for a record: the digest in the next one must not depend on who wrote it.
    if encode_record(record) != data:
        corrupt_record(where, "not in canonical form")
    return record


def check_record_sum(data: bytes, where: str) -> None:
    """Raises Corrupt unless some writer has made a record of these bytes."""
    if len(data) < len(RECORD_MAGIC) + 4 or not data.startswith(RECORD_MAGIC):
        corrupt_record(where, f"no record starts with {data[:8]!r}")
    (stored,) = struct.unpack("<I", data[-4:])
    if crc32c(data[:-4]) != stored:
        corrupt_record(where, f"checksum is {crc32c(data[:-4]):08x}, {stored:08x} was written")


def record_problem(record: Record, *, slot: int) -> str | None:
    """What is wrong with a record that claims to stand in `slot`, None when it makes sense.

    Writers check their own records with it before sending, readers what they got.
    """
    if record.slot != slot:
        return f"says slot {record.slot}, expected {slot}"
    if (
        not 1 <= record.epoch <= EPOCH_MAX
        or len(record.write_id) != 16
        or not math.isfinite(record.time_unix)
    ):
        return "epoch, write id or time is out of range"
    if (record.attempt is None) != (record.kind == "CLAIM"):
        return f"attempt of a {record.kind} is {record.attempt!r}"
    if (record.previous is None) != (slot == 0) or len(record.previous or bytes(32)) != 32:
        return "digest of the record before is missing or out of range"
    # One pass over thousands of entries: every append and every look checks them.
    by_name = {entry.attempt: entry.slot for entry in record.live}
    slots = list(by_name.values())
    if len(slots) != len(record.live) or slots != sorted(set(slots)) or slots[-1:] > [slot]:
        return "live set is not ascending and unique"
    if (record.segments or record.gone) and (problem := _segments_problem(record)):
        return problem
    for entry in record.live:
        # What lies in segments is not looked at by a reader of the record alone.
        missing = [] if record.segments else [n for n in entry.references if n not in by_name]
        if attempt_epoch(entry.attempt) > record.epoch:
            problem = f"is of a later epoch than the record's {record.epoch}"
        elif missing:
            problem = f"references {missing[0]}, which is not live"
        else:
            problem = entry_problem(entry)
        if problem is not None:
            return f"checkpoint {entry.attempt}: {problem}"
    return _kind_problem(record)


def _segments_problem(record: Record) -> str | None:
    if len(record.segments) > SEGMENTS_MAX or list(record.gone) != sorted(set(record.gone)):
        return "segments are too many, or their `gone` is not ascending and unique"
    for ref in record.segments:
        if len(ref.digest) != 32 or not 0 < ref.nbytes <= SEGMENT_NBYTES_MAX:
            return "digest or size of a segment is out of range"
        if not 0 < ref.count <= ref.nbytes or ref.last_slot >= record.slot:
            return "a segment has no entries, or later ones than the record"
    if record.gone and not record.segments:
        return "something is gone of segments that are not there"
    return "more is gone than there was" if record.count < len(record.live) else None


def entry_problem(entry: LiveEntry) -> str | None:
    """What is wrong with an entry by itself, None when it makes sense."""
    if entry.step > STEP_MAX or not 1 <= len(entry.manifest_digest) <= 64:
        return "step or manifest digest is out of range"
    if entry.metric is not None and not math.isfinite(entry.metric):
        return "metric is not a finite number"
    # Not `math.isfinite`: commands show it as a date, and no calendar has all of those.
    if not 0 <= entry.committed_unix <= UNIX_MAX:
        return "the time of its commit is out of range"
    if entry.line is not None and entry.line > entry.slot:
        return f"is of line {entry.line}, which begins after its commit"
    if list(entry.references) != sorted(set(entry.references)) or entry.attempt in entry.references:
        return "references are not ascending and unique"
    return None


def _kind_problem(record: Record) -> str | None:
    own = next((entry for entry in record.live if entry.attempt == record.attempt), None)
    at_slot = record.live[-1] if record.live and record.live[-1].slot == record.slot else None
    if record.kind == "COMMIT":
        return None if own and own is at_slot else "the committed attempt is not in its live set"
    if at_slot:
        return f"a {record.kind} cannot bring a checkpoint to life"
    if record.kind == "RETIRE" and own:
        return "the retired attempt is still in its live set"
    # With the change, its entry may have been folded into a segment.
    if record.kind in ("PIN", "UNPIN", "VERIFIED") and not own and not record.segments:
        return f"the attempt of a {record.kind} is not in its live set"
    return None


def _typed(body: Any, cls: type, where: str) -> dict[str, Any]:
    """The map's fields, which must be those of `cls`, of their types, and no more; some of a record
    may lack.
    """
    types = FIELDS[cls]
    if not isinstance(body, dict):
        corrupt_record(where, f"expected a map, got {type(body).__name__}")
    for name in types:
        if name not in body and name not in _OPTIONAL:
            corrupt_record(where, f"field {name!r} is missing")
    for name in body:
        if name not in types:
            # A writer of the next record would drop what it does not know, so it must stop here.
            raise UnsupportedFormat(
                f"{where}: field {str(name)[:40]!r} is not known to this version; upgrade "
                "shardpoint"
            )
    got = {}
    for name, value in body.items():
        allowed, items = types[name], [value]
        if type(value) is list and name in _ITEMS:
            allowed, items = _ITEMS[name], value
        for item in items:
            # Not isinstance: True is an int too, and would be written back as 1.
            if type(item) not in allowed or (type(item) is int and not 0 <= item <= INTEGER_MAX):
                problem = f"{type(item).__name__}, expected {allowed[0].__name__}"
                problem = "not an integer from 0 to 2**63 - 1" if int in allowed else problem
                corrupt_record(where, f"{_LABELS.get((cls, name), name)} is {problem}")
            if name == "kind" and item not in KINDS:  # it comes first: the rest may be unlike ours
                raise UnsupportedFormat(
                    f"{where}: record kind {item[:40]!r} is not known to this version; upgrade "
                    "shardpoint"
                )
            if name in ("attempt", "references") and item is not None:
                try:
                    attempt_epoch(item)
                except ValueError:
                    corrupt_record(where, f"{item[:60]!r} is not an attempt name")
        got[name] = tuple(value) if type(value) is list else value
    return got


def corrupt_record(where: str, problem: str) -> NoReturn:
    """Raise Corrupt for a record that cannot be read: where it lies, and what is wrong."""
    raise Corrupt(
        f"log record {where} is damaged: {problem}. The checkpoints themselves are not affected: "
        "`ckpt mend` on the root makes its log whole"
    )


SEGMENT_MAGIC = b"SHPTLIV1"

_NESTED_MAX = 64  # lists and maps in one: of nested ones a few bytes would become gigabytes


def encode_segment(entries: Sequence[LiveEntry]) -> bytes:
    """The bytes of a segment of `entries`, which are ascending in slot."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in FIELDS[LiveEntry]}
    columns["references"] = list(map(" ".join, columns["references"]))
    return SEGMENT_MAGIC + bytes(msgpack.packb(columns))


def decode_segment(data: bytes, *, where: str) -> tuple[LiveEntry, ...]:
    """The entries of a segment that may be hostile. Raises Corrupt, UnsupportedFormat."""
    if not data.startswith(SEGMENT_MAGIC):
        raise damaged_segment(where, f"no segment starts with {data[:8]!r}")
    left = _NESTED_MAX

    def counted(nested: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("more lists than fields")
        return nested

    try:
        body = data[len(SEGMENT_MAGIC) :]
        columns = msgpack.unpackb(body, list_hook=counted, object_hook=counted)
        if unknown := columns.keys() - FIELDS[LiveEntry].keys():
            raise UnsupportedFormat(
                f"{where}: field {min(unknown)[:40]!r} is not known to this version; upgrade "
                "shardpoint"
            )
        return _entries(columns)
    except UnsupportedFormat:
        raise
    except Exception as error:  # msgpack raises a dozen classes for bad input
        raise damaged_segment(where, f"{type(error).__name__}: {error}") from None


def _entries(columns: dict[str, list[Any]]) -> tuple[LiveEntry, ...]:
    for name, types in FIELDS[LiveEntry].items():
        column = columns[name]
        if {*map(type, column)} - {str if one is list else one for one in types}:
            raise Corrupt(f"{name} of a checkpoint is of another type")
        # By column: a segment has up to a quarter of a million entries.
        numbers = [value for value in column if int in types and value is not None]
        if numbers and not 0 <= min(numbers) <= max(numbers) <= INTEGER_MAX:
            raise Corrupt(f"{name} is not from 0 to 2**63 - 1")
    slots = columns["slot"]
    if not slots or any(one >= other for one, other in pairwise(slots)):
        raise Corrupt("slots are not ascending")
    columns["references"] = [tuple(names.split()) for names in columns["references"]]
    rows = zip(*(columns[name] for name in FIELDS[LiveEntry]), strict=True)
    entries = tuple([LiveEntry(*row) for row in rows])
    for entry in entries:
        for name in (entry.attempt, *entry.references):
            attempt_epoch(name)  # raises for what is no attempt
        if problem := entry_problem(entry):
            raise Corrupt(f"checkpoint {entry.attempt}: {problem}")
    return entries


def damaged_segment(where: str, problem: str) -> Corrupt:
    """The error for a segment that cannot be read."""
    return Corrupt(
        f"{where}, a part of the log, is damaged: {problem}. The checkpoints themselves are not "
        "affected: `ckpt mend` on the root makes its log whole"
    )
