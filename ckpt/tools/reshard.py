"""Write a checkpoint anew, its chunks cut and placed by a layout: an import of one of our own.

    layout -> files (headers planned) -> parts, read from the source -> manifest -> MANIFEST

A load on N ranks from a checkpoint of M ranks reads many small pieces of many files. Laid out for
N, every rank reads a few large runs of one file.

Everything but the checksums follows from the source's manifest and the layout, so that a run that
died can be repeated: files that are there are recognised by their headers and kept. Memory is two
parts of a file per thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import SupportsIndex

from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, attempt_epoch, attempt_name, step_prefix
from ckpt.commit.records import LiveEntry
from ckpt.commit.writer import Commit
from ckpt.convert.sources.source import NativeSource
from ckpt.convert.targets.files import Meter, Progress, plan_data_files, write_data_file
from ckpt.errors import CheckpointError, Corrupt
from ckpt.format.datafile import StoredChunk
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import DELTA, PUBLICATION, SINCE_FULL, Header, Manifest, MetadataBudget
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.object_parts import DataFile
from ckpt.format.part import FileColumns, PartTexts, TensorRecord, part_of_files
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, EvenLayout, Region, even_part, span_of, whole
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint, leased_checkpoint
from ckpt.loading.load import IS_DELTA, RETIRED_MAX
from ckpt.saving.resumable import begin, end
from ckpt.tools.relay import CopyReport, is_there
from storage import PrefixStore, Store
from storage.threads import in_order

logger = logging.getLogger(__name__)

SMALL_NBYTES = 1 << 20
RESHARDED = "ckpt.resharded"  # key of `Header.user`: the attempt it was made of, and for whom
BLOCK_NBYTES = 32  # for each block of what is rewritten, while its files are planned
PARTS_AHEAD = 2  # of a file: one is read while the one before it is written

# By rank of the new checkpoint: groups of chunks that go to files of their own, in any order.
Layout = Sequence[Sequence[Sequence[StoredChunk]]]


@dataclass(frozen=True, slots=True)
class NewLayout:
    """How many ranks will load, and how they shard: see `ckpt.layout.region`.

    "fsdp2" suits `fully_shard` and other shards of dim 0, "flat" FSDP1 and our flat parameters.
    """

    ranks: int
    layout: EvenLayout = "fsdp2"

    def __str__(self) -> str:
        return f"for {self.ranks} ranks, {self.layout}"


def reshard_in(
    source: Store,
    there: Store | None,
    new: NewLayout,
    step: SupportsIndex | None,
    attempt: str,
    threads: int,
    progress: Progress | None,
    nbytes_max: int | None,
) -> CopyReport:
    """Write a checkpoint anew, laid out for loads on other ranks, into the top of `there` or as a
    second form in its root. See `ckpt.reshard`.
    """

    def resharded(located: LocatedCheckpoint) -> CopyReport:
        manifest = located.manifest
        meter = Meter(int(manifest.file_nbytes.sum()), progress)
        target, header = there, new_header(manifest, new)
        if target is None:
            second = _second_form(source, located, new)
            if isinstance(second, LiveEntry):
                where = f"{source.url.rstrip('/')}/{second.prefix}".rstrip("/")
                report = CopyReport.of_one(source, where, manifest, 0)
                return replace(report, attempt=second.attempt, is_second_form=True)
            header = second
            target = PrefixStore(source, step_prefix(header.step, header.attempt).rstrip("/"))
        layout = cut_for(manifest, new, header.world_size)
        checkpoint = Checkpoint(source, located)
        made = rewrite(checkpoint, header, layout, target, threads=threads, meter=meter)
        if there is None:
            commit_second_form(source, located, made)
        report = CopyReport.of_one(source, target.url, made, meter.written)
        return replace(report, is_second_form=there is None)

    # Another place has files of the checkpoint that the copy began with, and takes no other's.
    tries_left = RETIRED_MAX if step is None and not attempt and there is None else 1
    while True:
        budget = MetadataBudget(nbytes_max)
        with leased_checkpoint(source, step, attempt=attempt, budget=budget) as located:
            try:
                return resharded(located)
            except CheckpointError as error:
                tries_left -= 1
                entry = located.entry
                is_retired = entry and Log(source).state().find(entry.attempt) is None
                if not tries_left or not is_retired:
                    raise
                logger.warning("begin again with what is the latest now: %s", error)


def _second_form(source: Store, located: LocatedCheckpoint, new: NewLayout) -> Header | LiveEntry:
    """The header of the new form of a checkpoint in its root, or the entry of that form if the root
    has it already.

    Raises CheckpointError for a checkpoint that was opened as a single directory.
    """
    if located.entry is None:
        raise CheckpointError(
            f"{source.url} is one step's directory, and only a root has a place for a second form "
            "of its checkpoint; give a target for it"
        )
    state = Log(source).state()
    if located.manifest.header.user.get(RESHARDED, "").endswith(str(new)):
        return located.entry
    header = new_header(located.manifest, new, epoch=state.epoch)
    # The name has the epoch of the run that made it, and then what it is a copy of.
    _, _, unique = header.attempt.partition("-")
    for entry in state.live:
        if entry.step == header.step and entry.attempt.endswith(f"-{unique}"):
            return entry
    return header


def commit_second_form(source: Store, located: LocatedCheckpoint, made: Manifest) -> None:
    """The one write that makes the new form a checkpoint of the root. Raises CheckpointError when
    the old one was retired by now, or a session has claimed the root.
    """
    Maintenance.open(source).commit_copy(Commit.of(made), of=located.manifest.header.attempt)


def new_header(manifest: Manifest, new: NewLayout, *, epoch: int | None = None) -> Header:
    """The header of the new checkpoint: an attempt of its own, the same in every try.

    `epoch` is that of the new attempt, by default that of the old one.

    Values of single ranks belong to the ranks that saved; with any, their number stays.
    """
    old = written_whole(manifest.header)
    note = f"{old.attempt} {new}"
    # Not random: a run that is repeated has to recognise the files of the one that died.
    unique = hashlib.sha256(note.encode()).digest()[:8]
    if epoch is None:
        try:
            epoch = attempt_epoch(old.attempt)
        except ValueError:
            epoch = 1  # another writer's name for its attempt
    return old.model_copy(
        update={
            "attempt": attempt_name(epoch, unique),
            "world_size": old.world_size if manifest.per_rank else new.ranks,
            "user": {**old.user, RESHARDED: note},
        }
    )


def cut_for(manifest: Manifest, new: NewLayout, world_size: int) -> Layout:
    """All chunks of the new checkpoint by writing rank, in groups that go to files of their own.

    One group is what rank r of `new` holds. Small tensors that every rank holds whole are another
    one, which all ranks read in one go. Large ones are divided among the ranks: the largest first,
    each to the rank that has the least.
    """
    cut: list[list[StoredChunk]] = [[] for _ in range(new.ranks)]
    held_whole: list[StoredChunk] = []
    for tensor, shape in enumerate(manifest.shapes):
        if 0 in shape:
            continue
        parts = [even_part(shape, rank, new.ranks, new.layout) for rank in range(new.ranks)]
        # Buffers and the like are whole everywhere.
        is_sharded = int(manifest.kinds[tensor]) in (Kind.PARAMETER, Kind.OPTIMIZER)
        if parts[0] is None or not is_sharded:
            held_whole.append(chunk_of(manifest, tensor, whole(shape)))
            continue
        for rank, part in enumerate(parts):
            if part is not None and part.numel:
                # Runs of the row-major order are stored as spans.
                run: Region | None = span_of(part, shape) if isinstance(part, Box) else part
                is_whole = run is not None and run.numel == whole(shape).numel
                region = whole(shape) if is_whole else run or part
                cut[rank].append(chunk_of(manifest, tensor, region))
    small = [chunk for chunk in held_whole if chunk.nbytes < SMALL_NBYTES]
    large = [chunk for chunk in held_whole if chunk.nbytes >= SMALL_NBYTES]
    loads = [sum(chunk.nbytes for chunk in chunks) for chunks in cut]
    # The largest first fills ranks most evenly; the name makes the order the same in every try.
    for chunk in sorted(large, key=lambda chunk: (-chunk.nbytes, chunk.fqn)):
        emptiest = loads.index(min(loads))
        cut[emptiest].append(chunk)
        loads[emptiest] += chunk.nbytes
    files: list[list[list[StoredChunk]]] = [[] for _ in range(world_size)]
    for rank, chunks in enumerate(cut):
        # Values of single ranks keep the old number of ranks, which may be fewer than will load.
        files[rank % world_size].append(chunks)
    files[0].append(small)
    return files


# Any layout ---------------------------------------------------------------------------------


def own_layout(manifest: Manifest) -> Layout:
    """The chunks unchanged, by the rank that wrote them; those in files of other attempts, by the
    rank that wrote them there, or by rank 0 where this world has no such rank.
    """
    ranks: list[list[StoredChunk]] = [[] for _ in range(manifest.header.world_size)]
    number = []
    for name in manifest.files:
        digits = name.rpartition("/")[2].removeprefix("rank").partition("-")[0]
        rank = int(digits) if digits.isascii() and digits.isdigit() else 0
        # Files of other attempts may be of a larger world, and other writers name theirs otherwise.
        number.append(rank if rank < len(ranks) else 0)
    for tensor in range(len(manifest.fqns)):
        for chunk in manifest.chunks.of_tensor(tensor):
            rank = number[int(manifest.chunks.file[chunk])]
            ranks[rank].append(chunk_of(manifest, tensor, manifest.region(chunk)))
    return [[chunks] for chunks in ranks]


def written_whole(header: Header) -> Header:
    """The header of a copy that refers to no other attempt, has no digests, and is no publication.
    Raises CheckpointError for a delta, which is nothing without what it refers to.
    """
    if DELTA in header.required:
        raise CheckpointError(f"step {header.step} ({header.attempt}) is not copied: {IS_DELTA}")
    user = {n: note for n, note in header.user.items() if n not in (SINCE_FULL, PUBLICATION)}
    return header.model_copy(update={"required": (), "user": user})


def chunk_of(manifest: Manifest, tensor: int, region: Region) -> StoredChunk:
    """A region of stored tensor number `tensor` as a chunk to be written."""
    fqn, dtype, shape = manifest.fqns[tensor], manifest.dtypes[tensor], manifest.shapes[tensor]
    nbytes, kind = region.numel * DTYPES[dtype].itemsize, int(manifest.kinds[tensor])
    return StoredChunk(fqn, dtype, shape, region, nbytes, kind)


def rewrite(
    checkpoint: Checkpoint,
    header: Header,
    layout: Layout,
    target: Store,
    *,
    threads: int,
    meter: Meter,
) -> Manifest:
    """Write the checkpoint into the top of `target`, cut by `layout`; returns its manifest.

    MANIFEST is written last: until then the target is not a checkpoint. Raises CheckpointError when
    something else is at the target, Corrupt when stored bytes were changed, and the stores' errors;
    running again continues.
    """
    old = checkpoint.manifest
    old.budget.charge(BLOCK_NBYTES * old.block_count, f"files of {old.block_count} blocks")
    columns = (old.fqns, old.dtypes, old.shapes, old.kinds.tolist())
    tensors = [TensorRecord(*row) for row in zip(*columns, strict=True)]
    # What is common to all ranks is in rank 0's files.
    per_rank = old.per_rank or [b""] * header.world_size
    texts = [PartTexts({}, per_rank=own) for own in per_rank]
    texts[0] = PartTexts(old.aliases, values=old.values, per_rank=per_rank[0])
    planned = [
        plan_data_files(header, rank, groups, texts[rank], () if rank else tensors)
        for rank, groups in enumerate(layout)
    ]
    files = [file for own in planned for file in own]
    names = [file.name for file in files]

    def is_same(data: bytes) -> bool:
        """Whether a manifest is one that this would store. Its checksums are not known yet."""
        try:
            there = decode_manifest(data)
        except Corrupt:
            return False
        sizes = [file.nbytes for file in files]
        is_same = (there.header, there.files) == (header, tuple(names))
        return is_same and there.file_nbytes.tolist() == sizes

    ended = begin(target, others=names, last=MANIFEST_NAME, is_ours=is_same)
    if ended is not None:
        return decode_manifest(ended)
    source = NativeSource(checkpoint)

    def written(file: DataFile) -> FileColumns:
        name = file.name
        there = is_there(target, name, file.header, file.nbytes)
        if there is None:
            return write_data_file(source, file, target, name, threads=PARTS_AHEAD, add=meter.add)
        meter.add(file.nbytes, is_new=False)
        return file.columns(there.checksums, there.seal)

    made = iter([*in_order(written, files, threads=threads, name="ckpt-rewrite")])
    parts = []
    for rank, own in enumerate(planned):
        of_rank = [*islice(made, len(own))]
        # Rank 0 lists all tensors: one without elements has no chunk, so no other rank would.
        held = {chunk.fqn for columns in of_rank for chunk in columns.chunks}
        listed = [tensor for tensor in tensors if rank == 0 or tensor.fqn in held]
        parts.append(part_of_files(of_rank, rank=rank, tensors=listed, texts=texts[rank]))
    manifest = build_manifest(header, parts)
    end(target, names, [(MANIFEST_NAME, manifest.data)])
    return manifest
