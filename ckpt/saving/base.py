"""What a session keeps of the newest checkpoint, for saves that refer to it (`dedup=True`).

The coordinator reads the log and decides which attempts may be referred to; every rank then divides
its own chunks (`ckpt.saving.dedup`). After a save, each rank keeps its own part, so that the next
save reads nothing back. A new process has no part yet: its coordinator reads the manifest once and
broadcasts it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from ckpt.commit.locate import file_key, read_manifest
from ckpt.commit.log import LogState
from ckpt.commit.names import step_prefix
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import Session
from ckpt.errors import CheckpointError
from ckpt.format.checksum import block_checksums, digest_of
from ckpt.format.damage import is_outage
from ckpt.format.datafile import StoredChunk
from ckpt.format.manifest import SINCE_FULL, Header, Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.metadata_budget import unlimited
from ckpt.format.part import Part
from ckpt.format.stored_index import StoredSums, stored_sums
from ckpt.layout.buffers import bytes_at
from ckpt.layout.memory import is_plain_memory
from ckpt.saving.dedup import (
    Checksums,
    Division,
    Known,
    divide,
    known_of_files,
    known_of_part,
    nbytes_held,
    references_allowed,
)
from ckpt.saving.write import Source, Staging, copy_elements
from storage import Store

logger = logging.getLogger(__name__)

MIB = 1 << 20
HASHED_NBYTES = 8 * MIB  # of memory that needs a copy to be hashed


class Base(NamedTuple):
    """What a save may refer to, the same on all ranks: the attempts whose files it may name, and
    the newest checkpoint's manifest; empty where the ranks know that checkpoint as their own.

    `since_full` says, on the coordinator, how many saves refer to others since one did not.
    """

    allowed: tuple[str, ...]
    manifest: bytes
    since_full: int = 0

    def encode(self) -> bytes:
        """As bytes for the other ranks."""
        return json.dumps(self.allowed).encode() + b"\n" + self.manifest


NOTHING = Base((), b"")


def decode_base(data: bytes) -> Base:
    """The inverse of `Base.encode`."""
    allowed, _, manifest = data.partition(b"\n")
    return Base(tuple(json.loads(allowed)), manifest)


class Holdings(NamedTuple):
    """Bytes of a checkpoint's chunks by the attempt that wrote them, its own included, and bytes of
    its own data files.
    """

    held: Mapping[str, int]
    own_nbytes: int


@dataclass
class Previous:
    """The newest checkpoint of one session that was saved with digests, as one rank knows it.

    `held` and `nbytes` are filled on the coordinator only: bytes of that checkpoint by the attempt
    that wrote them, and bytes of whole attempts. Saves in the background are hashed in `staging`.
    """

    attempt: str = ""
    since_full: int = 0
    known: Known = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    staging: Staging = field(default_factory=Staging)

    def offer(self, session: Session, *, block_nbytes: int, full_every: int | timedelta) -> Base:
        """On the coordinator: what the next save may refer to. Nothing at every save number
        `full_every`, or where files would be older than that, or all live checkpoints of the
        training share one: damage to one file must not end many. Raises Fenced and the store's
        errors.
        """
        state = session.state()
        if state.latest is None:
            return NOTHING
        data, held, since_full = b"", self.held, self.since_full
        if state.latest.attempt != self.attempt:
            manifest, data = _read(session.store, state.latest)
            if manifest is None or not _can_be_base(manifest, state.latest, block_nbytes):
                return NOTHING
            held, since_full = nbytes_held(manifest), _since_full(manifest.header)
        since_full = since_full + 1 if state.latest.references else 1
        if isinstance(full_every, timedelta):
            is_due = not 0.0 <= _age_seconds(state) < full_every.total_seconds()
        else:
            is_due = since_full >= full_every
        if is_due or _all_share_files(state):
            return NOTHING
        live = {entry.attempt for entry in state.live}
        self.nbytes = {name: nbytes for name, nbytes in self.nbytes.items() if name in live}
        allowed = references_allowed(
            held, state.live, lambda entry: self._nbytes_of(session.store, entry)
        )
        return Base(tuple(sorted(allowed)), data if allowed else b"", since_full)

    def known_of(self, base: Base, chunks: Sequence[StoredChunk], store: Store) -> Known:
        """Where the bytes of `chunks` are stored, as far as this rank knows.

        Ranks may know different checkpoints, and one rank an older one. That does no harm: only
        files of allowed attempts are referred to, those are live, and bytes are compared.
        """
        if not base.manifest:
            return self.known
        manifest = decode_manifest(base.manifest, unlimited())
        # This rank reads what the files say that have its own chunks, and no others.
        return known_of_files(manifest, chunks, lambda file: _sums_of(store, manifest, file))

    def remember(self, header: Header, part: Part, holdings: Holdings | None) -> None:
        """Keep a checkpoint that was committed: `part` is this rank's; only the coordinator passes
        what the checkpoint holds.
        """
        self.attempt, self.known = header.attempt, known_of_part(part, header)
        self.since_full = _since_full(header)
        if holdings is not None:
            self.held = holdings.held
            self.nbytes[header.attempt] = holdings.own_nbytes

    def _nbytes_of(self, store: Store, entry: LiveEntry) -> int:
        if entry.attempt not in self.nbytes:
            sizes = [i.nbytes for i in store.list(entry.prefix) if i.key.endswith(".safetensors")]
            self.nbytes[entry.attempt] = sum(sizes)
        return self.nbytes[entry.attempt]


def _age_seconds(state: LogState) -> float:
    """Since the first commit among those whose files the newest checkpoint needs; below 0 where a
    clock was ahead.
    """
    assert state.latest is not None
    needed = (state.latest.attempt, *state.latest.references)
    times = [entry.committed_unix for entry in state.live if entry.attempt in needed]
    return time.time() - min(times)


def _all_share_files(state: LogState) -> bool:
    """Whether the newest checkpoint shares a file with each older one of its training, and not all
    of these are there for its sake: several are kept, and one damaged file would end them all.
    """
    latest = state.latest
    assert latest is not None
    line = [entry for entry in state.live if entry.line == latest.line]
    is_kept = any(entry.attempt not in (latest.attempt, *latest.references) for entry in line)
    return is_kept and not any(map(latest.is_apart_from, line))


def _since_full(header: Header) -> int:
    note = header.user.get(SINCE_FULL, "")
    return int(note) if note.isdecimal() and len(note) < 10 else 0


def _read(store: Store, entry: LiveEntry) -> tuple[Manifest | None, bytes]:
    try:
        data = read_manifest(store, entry)
        return decode_manifest(data), data
    except CheckpointError as error:
        if is_outage(error):
            raise
        # A load of that checkpoint raises this error; this save can do without it.
        logger.warning(
            "this save writes everything, because the previous checkpoint cannot be read: %s", error
        )
        return None, b""


def _sums_of(store: Store, manifest: Manifest, file: int) -> StoredSums | None:
    """What a data file of the previous checkpoint says of its chunks. None without digests, and
    where it is not as its manifest says: a load raises that error.
    """
    prefix = step_prefix(manifest.header.step, manifest.header.attempt)
    key = file_key(prefix, manifest.files[file])
    try:
        return stored_sums(store, key, manifest, file)
    except CheckpointError as error:
        if is_outage(error):
            raise
        logger.warning(
            "this save writes again what is in %s, because that cannot be read: %s", key, error
        )
        return None


def _can_be_base(manifest: Manifest, entry: LiveEntry, block_nbytes: int) -> bool:
    """Whether the next checkpoint may refer to its files: it was saved with digests, in blocks of
    this size.

    Its root is not compared: a copied root has a new name, but its checkpoints keep the old one.
    """
    header = manifest.header
    is_named_right = (header.step, header.attempt) == (entry.step, entry.attempt)
    return is_named_right and header.block_bytes == block_nbytes and SINCE_FULL in header.user


class Referred(NamedTuple):
    """The sources to be written, with the digest of each, and what stands for the others."""

    sources: Sequence[Source]
    digests: tuple[bytes, ...]
    division: Division


def refer(
    sources: Sequence[Source], base: Base, previous: Previous, *, header: Header, store: Store
) -> Referred:
    """Hash all sources, and leave out those whose bytes are stored already; `header` is that of the
    save.

    Every byte is hashed at every save. The bytes must not change until the files are written.
    """
    chunks = [source.chunk for source in sources]
    digests = [digest_of(_bytes_of(source, HASHED_NBYTES)) for source in sources]

    known = previous.known_of(base, chunks, store) if base.allowed else {}
    division = divide(
        chunks,
        digests,
        lambda index: _checksums(sources[index], header.block_bytes),
        known=known,
        allowed=base.allowed,
    )
    return Referred(
        [sources[index] for index in division.written],
        tuple([digests[index] for index in division.written]),
        division,
    )


def _checksums(source: Source, block_nbytes: int) -> Checksums:
    whole_blocks = max(HASHED_NBYTES // block_nbytes, 1) * block_nbytes
    pieces = _bytes_of(source, whole_blocks)
    return np.concatenate([block_checksums(piece, block_nbytes) for piece in pieces])


def _bytes_of(source: Source, nbytes_max: int) -> Iterator[memoryview]:
    """The source's bytes in order: where they are, or in copies of up to `nbytes_max`."""
    nbytes = source.chunk.nbytes
    if source.address or is_plain_memory(source.view):
        start = source.start * source.view.dtype.itemsize
        yield bytes_at(source.address or source.view.data_ptr() + start, nbytes)
        return
    scratch = memoryview(bytearray(min(nbytes, nbytes_max)))
    for start in range(0, nbytes, nbytes_max):
        piece = scratch[: min(nbytes - start, nbytes_max)]
        copy_elements(source, start, piece)
        yield piece
