"""Segments: many live checkpoints in one object, so that records of the log stay small.

A segment is written once, is named by its digest, and is never deleted: a record that was sent late
may name it. FORMAT.md, "Segments".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from ckpt.commit.names import attempt_epoch, attempt_name, segment_key
from ckpt.commit.records import FIRST_LINE, LiveEntry, SegmentRef, entry_problem
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.columns import pack_ints, pack_map, unpack_ints, unpack_map
from storage.errors import CorruptObjectError, KeyNotFoundError, TooLargeError
from storage.store import Store

SEGMENT_MAGIC = b"SHPTLIV1"

_PINNED, _VERIFIED, _METRIC, _NO_LINE = 1, 2, 4, 8
_FLAGS_MAX = 15
_NUMBERS = ("count", "epochs", "uniques", "steps", "slots", "manifest_nbytes")
_REST = ("digest_sizes", "digests", "flags", "metrics", "lines")
_USES = ("reference_counts", "reference_epochs", "reference_uniques")
_FIELDS = (*_NUMBERS, *_REST, *_USES, "committed_unix", "nbytes")


def encode_segment(entries: Sequence[LiveEntry]) -> bytes:
    """The bytes of a segment of `entries`, which are ascending in slot."""
    names = [entry.attempt for entry in entries]
    references = [name for entry in entries for name in entry.references]
    metrics = [entry.metric for entry in entries if entry.metric is not None]
    columns = (
        struct.pack("<Q", len(entries)),
        pack_ints([attempt_epoch(name) for name in names]),
        _uniques(names),
        pack_ints([entry.step for entry in entries]),
        pack_ints([entry.slot for entry in entries]),
        pack_ints([entry.manifest_nbytes for entry in entries]),
        pack_ints([len(entry.manifest_digest) for entry in entries]),
        b"".join(entry.manifest_digest for entry in entries),
        pack_ints([_flags(entry) for entry in entries]),
        np.asarray(metrics, "<f8").tobytes(),
        pack_ints([entry.line or FIRST_LINE for entry in entries]),
        pack_ints([len(entry.references) for entry in entries]),
        pack_ints([attempt_epoch(name) for name in references]),
        _uniques(references),
        np.array([entry.committed_unix for entry in entries], "<f8").tobytes(),
        pack_ints([entry.nbytes for entry in entries]),
    )
    return SEGMENT_MAGIC + pack_map(dict(zip(_FIELDS, columns, strict=True)))


def _uniques(names: Sequence[str]) -> bytes:
    return b"".join(bytes.fromhex(name[-16:]) for name in names)


def _flags(entry: LiveEntry) -> int:
    flags = _PINNED * entry.pinned + _VERIFIED * entry.verified
    return flags + _METRIC * (entry.metric is not None) + _NO_LINE * (entry.line is None)


def decode_segment(data: bytes, *, where: str) -> tuple[LiveEntry, ...]:
    """The entries of a segment that may be hostile. Raises Corrupt, UnsupportedFormat."""
    if not data.startswith(SEGMENT_MAGIC):
        raise _damaged(where, f"no segment starts with {data[:8]!r}")
    try:
        fields = unpack_map(data[len(SEGMENT_MAGIC) :])
        if unknown := set(fields) - set(_FIELDS):
            raise UnsupportedFormat(
                f"{where}: field {min(unknown)[:40]!r} is not known to this version; upgrade "
                "shardpoint"
            )
        return _entries(fields)
    except (Corrupt, KeyError, ValueError, struct.error, OverflowError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from None


def _entries(fields: dict[str, memoryview]) -> tuple[LiveEntry, ...]:
    (count,) = struct.unpack("<Q", fields["count"])
    uniques = bytes(fields["uniques"])
    # Before anything is allocated by it: a constant column takes no bytes for its items.
    if not count or len(uniques) != 8 * count:
        raise Corrupt(f"{len(uniques)} bytes name {count} attempts")

    def ints(name: str, length: int = count) -> list[int]:
        return [int(value) for value in unpack_ints(fields[name], length, name).tolist()]

    slots, flags, sizes, uses = (
        ints(name) for name in ("slots", "flags", "digest_sizes", "reference_counts")
    )
    if any(one >= other for one, other in pairwise(slots)) or max(flags) > _FLAGS_MAX:
        raise Corrupt("slots are not ascending, or flags are out of range")
    names = _names(ints("epochs"), uniques)
    used = bytes(fields["reference_uniques"])
    if sum(uses) * 8 != len(used):
        raise Corrupt(f"{len(used)} bytes name {sum(uses)} references")
    references = _names(ints("reference_epochs", sum(uses)), used)
    digests, ends, until = fields["digests"], list(accumulate(sizes)), list(accumulate(uses))
    if ends[-1] != len(digests):
        raise Corrupt("digests have another length than their entries")
    metrics, times = (_floats(fields[name]) for name in ("metrics", "committed_unix"))
    if len(times) != count or len(metrics) != sum(bool(flag & _METRIC) for flag in flags):
        raise Corrupt(f"{len(times)} times and {len(metrics)} metrics, more or fewer have one")
    metric_of = iter(metrics)
    rows = zip(
        names,
        ints("steps"),
        slots,
        ints("manifest_nbytes"),
        flags,
        ints("lines"),
        [next(metric_of) if flag & _METRIC else None for flag in flags],
        times,
        ints("nbytes"),
        strict=True,
    )
    entries = tuple(
        LiveEntry(
            attempt=name,
            step=step,
            slot=slot,
            manifest_nbytes=nbytes,
            manifest_digest=bytes(digests[ends[i] - sizes[i] : ends[i]]),
            pinned=bool(flag & _PINNED),
            verified=bool(flag & _VERIFIED),
            metric=metric,
            references=tuple(references[until[i] - uses[i] : until[i]]),
            line=None if flag & _NO_LINE else line,
            committed_unix=time,
            nbytes=own,
        )
        for i, (name, step, slot, nbytes, flag, line, metric, time, own) in enumerate(rows)
    )
    for entry in entries:
        if problem := entry_problem(entry):
            raise Corrupt(f"checkpoint {entry.attempt}: {problem}")
    return entries


def _floats(column: memoryview | bytes) -> list[float]:
    return [float(value) for value in np.frombuffer(column, "<f8").tolist()]


def _names(epochs: Sequence[int], uniques: bytes) -> list[str]:
    names = [attempt_name(e, uniques[8 * i : 8 * i + 8]) for i, e in enumerate(epochs)]
    for epoch in set(epochs):
        attempt_epoch(attempt_name(epoch, bytes(8)))  # raises for what no attempt can have
    return names


def _damaged(where: str, problem: str) -> Corrupt:
    return Corrupt(
        f"{where}, a part of the log, is damaged: {problem}. The checkpoints themselves are not "
        "affected: `ckpt mend` on the root makes its log whole"
    )


def segment_of(entries: Sequence[LiveEntry]) -> tuple[SegmentRef, bytes]:
    """A segment of `entries`, which are ascending in slot: what a record says of it, its bytes."""
    data = encode_segment(entries)
    digest = hashlib.sha256(data).digest()
    return SegmentRef(digest, len(data), len(entries), entries[-1].slot), data


def read_segment(store: Store, ref: SegmentRef) -> tuple[LiveEntry, ...]:
    """The entries of a segment. Raises Corrupt where it is missing or damaged."""
    key = segment_key(ref.digest)
    where = f"{store.url}/{key}"
    try:
        data = store.get_bounded(key, ref.nbytes)
    except (CorruptObjectError, KeyNotFoundError, TooLargeError) as error:
        raise _damaged(where, str(error)) from None
    if hashlib.sha256(data).digest() != ref.digest:
        raise _damaged(where, "its digest is not the one in its name")
    entries = decode_segment(data, where=where)
    if len(entries) != ref.count or entries[-1].slot != ref.last_slot:
        raise _damaged(where, f"{len(entries)} checkpoints, the record says {ref.count}")
    return entries
