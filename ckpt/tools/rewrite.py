"""Rewrite a checkpoint into other files, its chunks cut and placed by a layout.

    layout -> files (headers planned) -> stream tensors band by band -> manifest -> MANIFEST

Everything but the checksums follows from the source's manifest and the layout, so that a run that
died can be repeated: files that are there are recognised by their headers and kept. Memory is a few
bands and one part of a file per thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from ckpt.commit.names import MANIFEST_NAME
from ckpt.errors import Corrupt
from ckpt.format.datafile import StoredChunk, file_entries, order_key, split_into_files
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import SINCE_FULL, Header, Manifest
from ckpt.format.manifest_codec import decode_manifest, encode_manifest
from ckpt.format.object_parts import DataFileBuilder, write_filled
from ckpt.format.part import (
    FileColumns,
    PartTexts,
    TensorRecord,
    part_of_files,
)
from ckpt.format.rank_files import DataFile, RankContents, rank_files
from ckpt.layout.buffers import aligned_buffer
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.memory import tensor_over
from ckpt.layout.region import Box, Region, Span, span_of
from ckpt.loading.checkpoint import Checkpoint, fill, piece_of
from ckpt.loading.contents import StoredTensor
from ckpt.loading.plan import ReadPath
from ckpt.saving.resumable import begin, end
from ckpt.tools.relay import is_there
from storage import Store
from storage.threads import in_order

MIB = 1 << 20
BAND_NBYTES = 4 * MIB
BANDS_AHEAD = 3
FILE_NBYTES_MAX = 4 << 30
BLOCK_NBYTES = 32  # for each block of what is rewritten, while its files are planned

# By rank of the new checkpoint: groups of chunks that go to files of their own, in any order.
Layout = Sequence[Sequence[Sequence[StoredChunk]]]


class Counter(Protocol):
    """Counts bytes: those written, and those that were there from an earlier run."""

    def add(self, nbytes: int) -> None:
        """Bytes that were written."""

    def skip(self, nbytes: int) -> None:
        """Bytes that were there."""


def own_layout(manifest: Manifest) -> Layout:
    """The chunks unchanged, by the rank that wrote them; those in files of other attempts, by the
    rank that wrote them there, or by rank 0 where this world has no such rank.
    """
    ranks: list[list[StoredChunk]] = [[] for _ in range(manifest.header.world_size)]
    # Files of other attempts may be of a larger world, and other writers name theirs otherwise.
    number = [_rank_of(name, len(ranks)) for name in manifest.files]
    chunks = manifest.chunks
    for tensor in range(len(manifest.fqns)):
        for chunk in manifest.chunks.of_tensor(tensor):
            rank = number[int(chunks.file[chunk])]
            ranks[rank].append(chunk_of(manifest, tensor, manifest.region(chunk)))
    return [[chunks] for chunks in ranks]


def _rank_of(file: str, ranks: int) -> int:
    digits = file.rpartition("/")[2].removeprefix("rank").partition("-")[0]
    rank = int(digits) if digits.isascii() and digits.isdigit() else 0
    return rank if rank < ranks else 0


def written_whole(header: Header) -> Header:
    """The header of a copy that refers to no other attempt, and has no digests."""
    user = {name: note for name, note in header.user.items() if name != SINCE_FULL}
    return header.model_copy(update={"required": (), "user": user})


def chunk_of(manifest: Manifest, tensor: int, region: Region) -> StoredChunk:
    """A region of stored tensor number `tensor` as a chunk to be written."""
    dtype = manifest.dtypes[tensor]
    return StoredChunk(
        manifest.fqns[tensor],
        dtype,
        manifest.shapes[tensor],
        region,
        region.numel * DTYPES[dtype].itemsize,
        int(manifest.kinds[tensor]),
    )


def rewrite(
    checkpoint: Checkpoint,
    header: Header,
    layout: Layout,
    target: Store,
    *,
    threads: int,
    add: Counter,
) -> Manifest:
    """Write the checkpoint into the top of `target`, cut by `layout`; returns its manifest.

    MANIFEST is written last: until then the target is not a checkpoint. Raises CheckpointError when
    something else is at the target, Corrupt when stored bytes were changed, and the stores' errors;
    running again continues.
    """
    blocks = checkpoint.manifest.block_count
    checkpoint.manifest.budget.charge(BLOCK_NBYTES * blocks, f"files of {blocks} blocks")
    files = _plan(checkpoint.manifest, header, layout)
    names = [file.name for file in files]
    ended = begin(
        target,
        others=names,
        last=MANIFEST_NAME,
        is_ours=lambda data: _is_same(data, header, files),
    )
    if ended is not None:
        return decode_manifest(ended)
    written = [
        *in_order(
            lambda file: _written(checkpoint, target, file, add),
            files,
            threads=threads,
            name="ckpt-rewrite",
        )
    ]
    manifest = _manifest(checkpoint.manifest, header, files, written)
    end(target, names, [(MANIFEST_NAME, encode_manifest(manifest))])
    return manifest


# What is written where ----------------------------------------------------------------------


def _plan(manifest: Manifest, header: Header, layout: Layout) -> list[DataFile]:
    """The files of all ranks, in the order of ranks and indexes. Every rank has one at least."""
    empty = [tensor for tensor in _tensors_of(manifest) if 0 in tensor.shape]
    planned: list[DataFile] = []
    for rank in range(header.world_size):
        files = [
            file_entries(chunks, header.block_bytes)
            # Also where a rank has no chunk: its values and empty tensors need a file.
            for group in [group for group in layout[rank] if group] or [[]]
            for chunks in split_into_files(sorted(group, key=order_key), FILE_NBYTES_MAX)
        ]
        texts = _texts(manifest, rank)
        planned += rank_files(files, RankContents(header, rank, texts, empty if rank == 0 else ()))
    return planned


def _texts(manifest: Manifest, rank: int) -> PartTexts:
    """What a rank's files hold besides tensors; what is common to all ranks is in rank 0's."""
    per_rank = manifest.per_rank[rank] if manifest.per_rank else b""
    if rank:
        return PartTexts({}, per_rank=per_rank)
    return PartTexts(manifest.aliases, values=manifest.values, per_rank=per_rank)


def _tensors_of(manifest: Manifest) -> list[TensorRecord]:
    columns = (manifest.fqns, manifest.dtypes, manifest.shapes, manifest.kinds.tolist())
    return [TensorRecord(*row) for row in zip(*columns, strict=True)]


def _is_same(data: bytes, header: Header, files: Sequence[DataFile]) -> bool:
    """Whether a manifest is one that this rewrite would store. Its checksums are not known yet."""
    try:
        manifest = decode_manifest(data)
    except Corrupt:
        return False
    names, sizes = tuple(file.name for file in files), [file.layout.nbytes for file in files]
    is_same = (manifest.header, manifest.files) == (header, names)
    return is_same and manifest.file_nbytes.tolist() == sizes


def _manifest(
    old: Manifest, header: Header, files: Sequence[DataFile], written: Sequence[FileColumns]
) -> Manifest:
    all_tensors = _tensors_of(old)
    by_rank: list[list[FileColumns]] = [[] for _ in range(header.world_size)]
    for file, result in zip(files, written, strict=True):
        by_rank[file.rank].append(result)
    parts = []
    for rank, own in enumerate(by_rank):
        # Rank 0 lists all tensors: one without elements has no chunk, so no other rank would.
        names = {chunk.fqn for column in own for chunk in column.chunks}
        tensors = [tensor for tensor in all_tensors if rank == 0 or tensor.fqn in names]
        parts.append(part_of_files(own, rank=rank, tensors=tensors, texts=_texts(old, rank)))
    return build_manifest(header, parts)


# Writing one file ---------------------------------------------------------------------------


def _written(checkpoint: Checkpoint, target: Store, file: DataFile, add: Counter) -> FileColumns:
    layout = file.layout
    there = is_there(target, file.name, layout.header, layout.nbytes)
    if there is None:
        return _write(checkpoint, target, file, add)
    add.skip(layout.nbytes)
    return file.columns(there.checksums, there.seal)


def _write(checkpoint: Checkpoint, target: Store, file: DataFile, add: Counter) -> FileColumns:
    builder, layout = DataFileBuilder(file), file.layout
    with closing(_bytes_of(checkpoint, file.entries.chunks)) as bands:
        band = memoryview(b"")
        first = len(layout.header)

        def fill(start: int, part: memoryview) -> None:
            nonlocal band
            position = max(first - start, 0)
            end = min(len(part), first + file.entries.nbytes - start)
            while position < end:
                band = band or next(bands)
                here = band[: end - position]
                part[position : position + len(here)] = here
                band, position = band[len(here) :], position + len(here)

        # One thread, so the parts are filled in order.
        write_filled(
            target,
            file.name,
            layout.nbytes,
            fill=fill,
            finish=lambda start, part, _: builder.complete(start, part),
            threads=1,
            add=add.add,
        )
    return builder.result()


class _Band(NamedTuple):
    chunk: int
    region: Region


def _bytes_of(
    checkpoint: Checkpoint, chunks: Sequence[StoredChunk]
) -> Generator[memoryview, None, None]:
    """The bytes of all chunks, in order; each run of them is valid until the next is taken."""

    def read(band: _Band) -> tuple[_Band, memoryview]:
        buffer = buffers.get()
        chunk = chunks[band.chunk]
        shape = band.region.shape if isinstance(band.region, Box) else (band.region.numel,)
        nbytes = band.region.numel * DTYPES[chunk.dtype].itemsize
        target = tensor_over(buffer[:nbytes], torch_dtype(chunk.dtype), shape)
        number = manifest.index(chunk.fqn)
        wanted = StoredTensor(number, chunk.fqn, chunk.dtype, chunk.global_shape)
        holding = piece_of(wanted, band.region, target)
        fill(checkpoint, [holding], ReadPath())
        return band, buffer

    manifest = checkpoint.manifest
    # Used again and again: fresh memory costs more than the copy, and piles up in the allocator.
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    # One more than are read ahead: the caller still has the band that it took last.
    for _ in range(BANDS_AHEAD + 1):
        buffers.put(aligned_buffer(BAND_NBYTES))
    for band, buffer in in_order(read, _bands(chunks), threads=BANDS_AHEAD, name="ckpt-read"):
        yield buffer[: band.region.numel * DTYPES[chunks[band.chunk].dtype].itemsize]
        buffers.put(buffer)


def _bands(chunks: Sequence[StoredChunk]) -> Iterator[_Band]:
    """The chunks in pieces of about BAND_NBYTES, each a run of its chunk's own order."""
    for number, chunk in enumerate(chunks):
        numel_max = max(1, BAND_NBYTES // DTYPES[chunk.dtype].itemsize)
        for region in bands_of(chunk.region, chunk.global_shape, numel_max):
            yield _Band(number, region)


def bands_of(region: Region, shape: tuple[int, ...], numel_max: int) -> Iterator[Region]:
    """`region` in consecutive runs of its own row-major order, of at most `numel_max` elements.

    One that is small enough is itself.
    """
    if region.numel <= numel_max:
        yield region
        return
    span = region if isinstance(region, Span) else span_of(region, shape)
    if span is not None:
        for start in range(span.start, span.stop, numel_max):
            yield Span(start, min(start + numel_max, span.stop))
        return
    assert isinstance(region, Box)
    yield from _rows(region, 0, numel_max)


def _rows(box: Box, dim: int, numel_max: int) -> Iterator[Box]:
    """A box whose dims before `dim` have size 1, in runs of whole rows."""
    row = math.prod(box.shape[dim + 1 :])
    step = max(1, numel_max // row)
    for start in range(0, box.shape[dim], step):
        size = min(step, box.shape[dim] - start)
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        part = Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :]))
        if part.numel <= numel_max:
            yield part
        else:
            yield from _rows(part, dim + 1, numel_max)
