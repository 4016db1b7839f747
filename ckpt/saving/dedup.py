"""What a session keeps of the newest checkpoint, for saves that refer to it (`dedup=True`).

The coordinator reads the log and decides which attempts may be referred to; every rank then divides
its own chunks. After a save, each rank keeps its own part, so that the next save reads nothing
back. A new process has no part yet: its coordinator reads the manifest once and broadcasts it.

    chunks with digests x chunks of the previous checkpoint -> chunks to write, files to refer to

A chunk is recognised by tensor, dtype, shape, kind and region, and by the BLAKE3 digest and the
block checksums of its bytes; version counters and flags of parameters are not trusted. A reference
names the attempt that wrote the bytes, never one that refers to them itself, so a reader follows
one reference at most.

Note "growth": what a live checkpoint refers to is live, and so is what that one refers to.
Training that changes a little of everything would keep every checkpoint alive for ever. So a save
gives up references, the cheapest to write anew first, until the attempts that it keeps alive are
few and hold no more than a fixed multiple of its own bytes: see `references_allowed`.
"""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import numpy as np

from ckpt.commit.locate import file_key, read_manifest
from ckpt.commit.log import LogState
from ckpt.commit.names import step_prefix
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import Session
from ckpt.errors import CheckpointError
from ckpt.format.checksum import Seal, Uint32s, block_checksums, digest_of, digests_from, is_outage
from ckpt.format.datafile import BLOCK_BYTES, StoredChunk
from ckpt.format.datafile_index import StoredSums, stored_sums
from ckpt.format.manifest import (
    SINCE_FULL,
    Header,
    Manifest,
    int64s,
    parse_reference,
    reference_to,
    starts_of,
    unlimited,
)
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.object_parts import FileRange
from ckpt.format.part import FileColumns, Part
from ckpt.layout.memory import is_plain_memory
from ckpt.layout.region import Span, span_of
from ckpt.saving.image import Staging
from ckpt.saving.plan import Source, copy_elements
from storage import Store
from storage.ranges import bytes_at

ATTEMPTS_MAX = 8  # attempts that one checkpoint keeps alive
NBYTES_MULTIPLE_MAX = 2.0  # bytes that these hold together, as a multiple of the checkpoint's own
RANGES_MAX = 100_000  # that a rank refers to; they make its file's header about 10 MB
NBYTES_UNCOUNTED = 16 << 20  # attempts that hold less together are kept alive in any case

Checksums: TypeAlias = Uint32s


class SharedFile(NamedTuple):
    """A data file as the next manifest would name it: `../<step directory>/<name>`."""

    name: str
    attempt: str
    nbytes: int
    data_start: int
    seal: Seal


class KnownChunk(NamedTuple):
    """A chunk that is stored already: where, and what its bytes are."""

    file: SharedFile
    byte_start: int
    digest: bytes
    checksums: Checksums


Known: TypeAlias = Mapping[StoredChunk, KnownChunk]


def identity(chunk: StoredChunk) -> StoredChunk:
    """The key that recognises `chunk`: a box that is one run in row-major order becomes a span."""
    region = chunk.region
    if not isinstance(region, Span):
        region = span_of(region, chunk.global_shape) or region
    return chunk._replace(region=region)


# The previous checkpoint --------------------------------------------------------------------------


def known_of_part(part: Part, header: Header) -> dict[StoredChunk, KnownChunk]:
    """The chunks of one rank's part of a checkpoint that was committed. Empty without digests."""
    known = {}
    for file in part.files:
        if not len(file.digests):
            continue
        shared = _shared_file(header, file.name, file.nbytes, file.data_start, file.seal)
        first, digests = starts_of(file.block_counts).tolist(), file.digests
        rows = zip(file.chunks, file.offsets.tolist(), strict=True)
        for number, (chunk, start) in enumerate(rows):
            sums = file.checksums[first[number] : first[number + 1]]
            known[identity(chunk)] = KnownChunk(shared, start, digests[number].tobytes(), sums)
    return known


def known_of_files(
    manifest: Manifest, wanted: Iterable[StoredChunk], sums_of: Callable[[int], StoredSums | None]
) -> dict[StoredChunk, KnownChunk]:
    """The `wanted` chunks that a checkpoint has, according to its data files. `sums_of(file)` gives
    None for a file that cannot be referred to.
    """
    known = {}
    opened: dict[int, StoredSums | None] = {}
    for chunk in map(identity, wanted):
        number = _find(manifest, chunk)
        if number < 0:
            continue
        file = int(manifest.chunks.file[number])
        if file not in opened:
            opened[file] = sums_of(file)
        if (there := opened[file]) is None:
            continue
        index, digests = there
        byte_start = int(manifest.chunks.byte_start[number])
        row = int(np.searchsorted(index.offsets, byte_start))
        # The manifest and the file's header must agree on which chunk lies there. The file's word
        # counts: its checksums are what a load compares.
        if row < len(index.offsets) and identity(index.chunks[row]) == chunk:
            place = index.nbytes, len(index.header), index.seal
            shared = _shared_file(manifest.header, manifest.files[file], *place)
            sums = index.checksums[slice(*index.first_block[row : row + 2].tolist())]
            known[chunk] = KnownChunk(shared, byte_start, digests[row].tobytes(), sums)
    return known


def _shared_file(header: Header, name: str, nbytes: int, data_start: int, seal: Seal) -> SharedFile:
    """A file of a checkpoint with this header, as a later one would name it."""
    reference = parse_reference(name)
    if reference is None:
        name = reference_to(header.step, header.attempt, name)
    attempt = header.attempt if reference is None else reference.attempt
    return SharedFile(name, attempt, nbytes, data_start, seal)


def _find(manifest: Manifest, chunk: StoredChunk) -> int:
    """The number of that chunk in `manifest`, -1 if it has none."""
    tensor = bisect_left(manifest.fqns, chunk.fqn)
    if tensor == len(manifest.fqns) or manifest.fqns[tensor] != chunk.fqn:
        return -1
    stored = (manifest.dtypes[tensor], manifest.shapes[tensor], int(manifest.kinds[tensor]))
    if stored != (chunk.dtype, chunk.global_shape, chunk.kind):
        return -1
    table = manifest.chunks
    first, last = int(table.first[tensor]), int(table.first[tensor + 1])
    if isinstance(chunk.region, Span):
        is_there = table.span_start[first:last] == chunk.region.start
        is_there &= table.box[first:last] < 0
    else:
        is_there = table.box[first:last] >= 0
    # Compared as columns first: regions are built only of the few rows that remain.
    is_there &= table.numel[first:last] == chunk.region.numel
    rows = (np.flatnonzero(is_there) + first).tolist()
    return next((row for row in rows if table.region(row) == chunk.region), -1)


# What to write ------------------------------------------------------------------------------------


class Division(NamedTuple):
    """A rank's chunks, divided: indexes of those to write, and what stands for the others.

    `ranges` are the bytes of `referenced`, as the metadata of a data file lists them.
    """

    written: tuple[int, ...]
    referenced: tuple[FileColumns, ...]
    ranges: tuple[FileRange, ...]


def divide(
    chunks: Sequence[StoredChunk],
    digests: Sequence[bytes],
    checksums_of: Callable[[int], Checksums],
    *,
    known: Known,
    allowed: Collection[str],
) -> Division:
    """Refer to every chunk that is `known` with the same bytes in an attempt that is `allowed`.

    `checksums_of(index)` returns the block checksums of a chunk's bytes as they are now; it is
    called for chunks of equal digest only. A chunk whose checksums differ is written: its stored
    bytes had changed between being hashed and being written. All chunks are written when the known
    ones are so scattered that listing their ranges would take too long a header.
    """
    written: list[int] = []
    references: dict[SharedFile, list[tuple[int, KnownChunk]]] = {}
    for index, (chunk, digest) in enumerate(zip(chunks, digests, strict=True)):
        there = known.get(identity(chunk))
        if (
            there is not None
            and there.file.attempt in allowed
            and there.digest == digest
            # Last, because it reads the bytes once more.
            and np.array_equal(checksums_of(index), there.checksums)
        ):
            references.setdefault(there.file, []).append((index, there))
        else:
            written.append(index)
    columns: list[FileColumns] = []
    ranges: list[FileRange] = []
    for file, rows in sorted(references.items()):
        rows.sort(key=lambda row: row[1].byte_start)
        here = [chunks[index] for index, _ in rows]
        _, starts, digests_there, checksums = zip(*[there for _, there in rows], strict=True)
        columns.append(
            FileColumns(
                *(file.name, file.nbytes, file.data_start, here, int64s(starts)),
                block_counts=int64s(list(map(len, checksums))),
                checksums=np.concatenate(checksums),
                seal=file.seal,
                digests=digests_from(b"".join(digests_there)),
            )
        )
        own: list[FileRange] = []  # neighbours made one
        for start, chunk in zip(starts, here, strict=True):
            stop = start + chunk.nbytes
            if own and own[-1].stop == start:
                own[-1] = own[-1]._replace(stop=stop)
            else:
                own.append(FileRange(file.name, start, stop))
        ranges += own
    if len(ranges) > RANGES_MAX:
        return Division(tuple(range(len(chunks))), (), ())
    return Division(tuple(written), tuple(columns), tuple(ranges))


# What may be referred to --------------------------------------------------------------------------


def nbytes_held(manifest: Manifest) -> dict[str, int]:
    """Bytes of a checkpoint's chunks by the attempt that wrote them, its own included."""
    held = manifest.nbytes_referenced()
    total = int(manifest.chunk_sizes().sum())
    return {manifest.header.attempt: total - sum(held.values()), **held}


def kept_alive(attempts: Iterable[str], live: Sequence[LiveEntry]) -> set[str]:
    """`attempts`, everything that these refer to, and so on. All of them are live."""
    references = {entry.attempt: entry.references for entry in live}
    kept: set[str] = set()
    todo = list(attempts)
    while todo:
        name = todo.pop()
        if name not in kept:
            kept.add(name)
            todo += references.get(name, ())
    return kept


def references_allowed(
    held: Mapping[str, int],
    live: Sequence[LiveEntry],
    nbytes_of: Callable[[LiveEntry], int],
    *,
    nbytes_uncounted: int = NBYTES_UNCOUNTED,
) -> frozenset[str]:
    """The attempts whose files the next checkpoint may refer to.

    `held` are the bytes of the previous checkpoint by the attempt that wrote them, `nbytes_of` the
    bytes of an attempt's own files. What is no longer live is left out; then attempts are given up,
    those that hold the least first, until all that would be kept alive is at most ATTEMPTS_MAX
    attempts with at most `NBYTES_MULTIPLE_MAX` times the bytes of `held`, or `nbytes_uncounted`.
    See note "growth".
    """
    entries = {entry.attempt: entry for entry in live}
    nbytes_max = max(NBYTES_MULTIPLE_MAX * sum(held.values()), nbytes_uncounted)
    # Ties by name: the order of `held` is that of a dict, and no rule.
    most_first = sorted(held, key=lambda name: (-held[name], name))
    allowed = [name for name in most_first if name in entries and held[name]]
    while allowed:
        kept = kept_alive(allowed, live)
        if len(kept) <= ATTEMPTS_MAX:
            nbytes = sum(nbytes_of(entries[name]) for name in kept)
            if nbytes <= nbytes_max:
                break
        allowed.pop()
    return frozenset(allowed)


logger = logging.getLogger(__name__)

HASHED_NBYTES = 8 * BLOCK_BYTES  # of memory that needs a copy to be hashed


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

    def offer(self, session: Session, full_every: int | timedelta) -> Base:
        """On the coordinator: what the next save may refer to. Nothing at every save number
        `full_every`, where files would be older than that, or where all live checkpoints of the
        training share a file: damage to one file must not end many. Raises Fenced and the store's
        errors.
        """
        state = session.state()
        if state.latest is None:
            return NOTHING
        data, held, since_full = b"", self.held, self.since_full
        if state.latest.attempt != self.attempt:
            manifest = _read(session.store, state.latest)
            if manifest is None:
                return NOTHING
            header, latest = manifest.header, state.latest
            # Not its root: a copied root has a new name, but its checkpoints keep the old one.
            is_named_right = (header.step, header.attempt) == (latest.step, latest.attempt)
            has_digests = header.block_bytes == BLOCK_BYTES and SINCE_FULL in header.user
            if not (is_named_right and has_digests):
                return NOTHING
            data, held, since_full = manifest.data, nbytes_held(manifest), _since_full(header)
        # A newest checkpoint without references is a full one, whatever its note says.
        since_full = since_full + 1 if state.latest.references else 1
        if isinstance(full_every, timedelta):
            needed = (state.latest.attempt, *state.latest.references)
            first = min([one.committed_unix for one in state.live if one.attempt in needed])
            # Below 0 where a clock was ahead. Nothing is deleted by this clock: a wrong one makes
            # a save full, or refer for longer.
            is_due = not 0.0 <= time.time() - first < full_every.total_seconds()
        else:
            is_due = since_full >= full_every
        if is_due or _all_share_files(state):
            return NOTHING
        live = {entry.attempt for entry in state.live}
        # Sizes of attempts are listed once each; without this the dict would grow with every save.
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
    # A note of somebody else's tool is no reason to fail: it counts as 0.
    return int(note) if note.isdecimal() and len(note) < 10 else 0


def _read(store: Store, entry: LiveEntry) -> Manifest | None:
    try:
        return decode_manifest(read_manifest(store, entry))
    except CheckpointError as error:
        if is_outage(error):
            raise
        # A load of that checkpoint raises this error; this save can do without it.
        logger.warning(
            "this save writes everything, because the previous checkpoint cannot be read: %s", error
        )
        return None


def _sums_of(store: Store, manifest: Manifest, file: int) -> StoredSums | None:
    """What a data file of the previous checkpoint says of its chunks. None without digests, or if
    it contradicts its manifest, which a load reports.
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


class Referred(NamedTuple):
    """The sources to be written, with the digest of each, and what stands for the others."""

    sources: Sequence[Source]
    digests: tuple[bytes, ...]
    division: Division


def refer(sources: Sequence[Source], base: Base, previous: Previous, store: Store) -> Referred:
    """Hash all sources, and leave out those whose bytes are stored already.

    Every byte is hashed at every save. The bytes must not change until the files are written.
    """
    chunks = [source.chunk for source in sources]
    digests = [digest_of(_bytes_of(source)) for source in sources]
    known = previous.known_of(base, chunks, store) if base.allowed else {}

    def checksums_of(index: int) -> Checksums:
        runs = _bytes_of(sources[index])
        return np.concatenate([block_checksums(run, BLOCK_BYTES) for run in runs])

    division = divide(chunks, digests, checksums_of, known=known, allowed=base.allowed)
    return Referred(
        [sources[index] for index in division.written],
        tuple([digests[index] for index in division.written]),
        division,
    )


def _bytes_of(source: Source) -> Iterator[memoryview]:
    """The source's bytes in order: where they are, or in copies of some blocks."""
    nbytes = source.chunk.nbytes
    if source.address or is_plain_memory(source.view):
        start = source.start * source.view.dtype.itemsize
        yield bytes_at(source.address or source.view.data_ptr() + start, nbytes)
        return
    scratch = memoryview(bytearray(min(nbytes, HASHED_NBYTES)))
    for start in range(0, nbytes, HASHED_NBYTES):
        piece = scratch[: min(nbytes - start, HASHED_NBYTES)]
        copy_elements(source, start, piece)
        yield piece
