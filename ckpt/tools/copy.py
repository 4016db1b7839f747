"""Copy checkpoints between stores: verified on the way, resumable, and whole or absent.

    one checkpoint:  data files -> sync -> MANIFEST           a directory that opens by its own path
    a whole root:    data files -> sync -> MANIFESTs -> log -> FORMAT

The last object makes the copy exist, and is created once. Everything before it is the same in every
try, so a run that died is repeated and skips what is there. A checkpoint that needs files of others
(`dedup`) is written anew with all its bytes: see `ckpt.tools.reshard`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ckpt.commit.live import LiveSet, Segments, with_live
from ckpt.commit.locate import live_entries, locate, read_manifest
from ckpt.commit.log import FORMAT_KEY, encode_format, read_format
from ckpt.commit.names import MANIFEST_NAME, attempt_epoch, record_key, segment_key
from ckpt.commit.records import (
    FIRST_LINE,
    LiveEntry,
    Record,
    SegmentRef,
    encode_record,
    record_digest,
    record_problem,
)
from ckpt.convert.targets.files import Meter, Progress
from ckpt.errors import NoCheckpoint
from ckpt.format.checksum import once_more
from ckpt.format.datafile_index import check_seal, index_of
from ckpt.format.manifest import Manifest, MetadataBudget, is_reference
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint
from ckpt.saving.resumable import begin, end, is_another_file
from ckpt.tools.relay import CopyReport, is_there, relay_file, tiles_of
from ckpt.tools.reshard import own_layout, rewrite, written_whole
from storage import KeyNotFoundError, Store
from storage.memory import MemoryStore

# One checkpoint -----------------------------------------------------------------------------


def copy_checkpoint(
    source: Store,
    located: LocatedCheckpoint,
    target: Store,
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy an opened checkpoint into the top of `target`. Raises like `ckpt.copy`."""
    manifest = located.manifest
    meter = Meter(int(manifest.file_nbytes.sum()), progress)
    if any(map(is_reference, manifest.files)):
        # Its own files alone would not open by their path: some bytes lie next to them in the root.
        checkpoint = Checkpoint(source, located)
        header, layout = written_whole(manifest.header), own_layout(manifest)
        made = rewrite(checkpoint, header, layout, target, threads=threads, meter=meter)
        return CopyReport.of_one(source, target.url, made, meter.written)
    data, files = manifest.data, manifest.files
    # MANIFEST is created last, after a sync: an equal one means that the copy is whole.
    if begin(target, others=files, last=MANIFEST_NAME, is_ours=lambda old: old == data) is None:
        _relay_files(source, located.prefix, manifest, target, "", threads=threads, meter=meter)
        end(target, files, [(MANIFEST_NAME, data)])
    return CopyReport.of_one(source, target.url, manifest, meter.written)


def _relay_files(
    source: Store,
    prefix: str,
    manifest: Manifest,
    target: Store,
    target_prefix: str,
    *,
    threads: int,
    meter: Meter,
) -> None:
    """The checkpoint's own data files, one after the other, except those that are there."""
    for file, name in enumerate(manifest.files):
        if is_reference(name):
            continue
        key, nbytes = prefix + name, int(manifest.file_nbytes[file])
        index = index_of(source, key, nbytes)
        # The tiles come from the file itself, so a file that was exchanged as a whole, with its own
        # checksums, would pass: the MANIFEST's seal tells the two apart.
        check_seal(index.seal, manifest.seals.of_file(file), f"{source.url}/{key}")
        target_key = target_prefix + name
        there = is_there(target, target_key, index.header, nbytes)
        if there is None:
            relay = partial(relay_file, tiles=tiles_of(index), threads=threads, add=meter.add)
            once_more(partial(relay, source, key, target, target_key))
            continue
        is_same = np.array_equal(there.checksums, index.checksums)
        if not is_same or there.extra_checksums != index.extra_checksums:
            # The same header with other checksums: one of the two was tampered with.
            raise is_another_file(target, target_key)
        meter.add(nbytes, is_new=False)


# A whole root -------------------------------------------------------------------------------


def copy_root(
    source: Store,
    target: Store,
    *,
    threads: int = 4,
    progress: Progress | None = None,
    budget: MetadataBudget | None = None,
) -> CopyReport:
    """Copy all checkpoints of a root into the new root `target`. Raises like `ckpt.copy`."""
    budget = budget or MetadataBudget()
    if not (live := live_entries(source)):
        raise NoCheckpoint(f"{source.url} has no checkpoint yet: there is nothing to copy")
    copied = [(entry, _manifest_of(source, entry, budget)) for entry in live]
    root = _new_root(read_format(source), live)
    # An encoded target binds every object to the root's id, and FORMAT, which tells it, comes last.
    target.begin_root(root)
    records, segments = _records(root, copied)
    nbytes = sum(manifest.own_nbytes for _, manifest in copied)
    meter = Meter(nbytes, progress)
    # References lead to step directories that are copied too, under the names that they have.
    every = ((entry, name) for entry, manifest in copied for name in manifest.files)
    files = [entry.prefix + name for entry, name in every if not is_reference(name)]
    log = [*segments, *((record_key(record.slot), encode_record(record)) for record in records)]
    last = encode_format(root)
    others = (*files, *(entry.prefix + MANIFEST_NAME for entry in live), *(key for key, _ in log))
    if begin(target, others=others, last=FORMAT_KEY, is_ours=lambda old: old == last) is None:
        for entry, manifest in copied:
            prefix = entry.prefix
            _relay_files(source, prefix, manifest, target, prefix, threads=threads, meter=meter)
        manifests = ((entry.prefix + MANIFEST_NAME, manifest.data) for entry, manifest in copied)
        end(target, files, chain(manifests, log, [(FORMAT_KEY, last)]))
    steps = tuple(entry.step for entry in live)
    return CopyReport(source.url, target.url, steps, len(files), nbytes, meter.written)


def _manifest_of(source: Store, entry: LiveEntry, budget: MetadataBudget) -> Manifest:
    try:
        data = read_manifest(source, entry)
    except KeyNotFoundError:
        # Only now the log is read again, which says why.
        data = locate(source, attempt=entry.attempt).data
    return decode_manifest(data, budget)


def _new_root(root: str, live: Sequence[LiveEntry]) -> str:
    """The identity of the copy: another one than the source's, and the same in every try."""
    # Near directories name the root they belong to: those of the source must not serve the copy,
    # which goes its own way from here on.
    digest = hashlib.sha256(f"copy of {root}".encode())
    for entry in live:
        digest.update(entry.attempt.encode() + entry.manifest_digest)
    return digest.hexdigest()[:32]


def _records(
    root: str, copied: Sequence[tuple[LiveEntry, Manifest]]
) -> tuple[list[Record], list[tuple[str, bytes]]]:
    """A log of these checkpoints and of nothing else, under their own epochs: its records, and the
    segments that they name, by key.
    """
    records: list[Record] = []
    segments: dict[str, bytes] = {}
    # All that is asked of it was written here.
    live = LiveSet(segments=Segments(MemoryStore))
    # A line is named by the slot of its first commit, which is another one here.
    lines: dict[int | None, int | None] = {None: None, FIRST_LINE: FIRST_LINE}

    def append(
        live: LiveSet, kind: Any, epoch: int, attempt: str | None, time_unix: float
    ) -> LiveSet:
        slot = len(records)
        # Not random: every try has to make the same bytes, or it would refuse its own records.
        write_id = hashlib.sha256(f"{root} {slot}".encode()).digest()[:16]
        previous = record_digest(encode_record(records[-1])) if records else None
        bare = Record(kind, slot, epoch, write_id, time_unix, attempt, (), previous)
        record, live = with_live(bare, live, write)
        problem = record_problem(record, slot=slot)
        assert problem is None, f"a record of a copy {problem}"
        records.append(record)
        return live

    def write(ref: SegmentRef, data: bytes) -> None:
        segments[segment_key(ref.digest)] = data

    epoch = 0
    for entry, manifest in copied:
        created_unix = float(manifest.header.created_unix)
        # No checkpoint may be of a later epoch than its record.
        if epoch < attempt_epoch(entry.attempt):
            epoch = attempt_epoch(entry.attempt)
            live = append(live, "CLAIM", epoch, None, created_unix)
        slot = len(records)
        nbytes = manifest.own_nbytes + entry.manifest_nbytes
        line = lines.setdefault(entry.line, slot)
        live = live.put(replace(entry, slot=slot, line=line, nbytes=nbytes))
        live = append(live, "COMMIT", epoch, entry.attempt, created_unix)
    return records, list(segments.items())
