"""The columns of a manifest that describe its chunks, encoded and decoded.

A manifest has millions of chunks and few of everything else, so this is where its bytes are and
where its time goes. A chunk's position is not stored: only the gap to the chunk before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt
from ckpt.format.chunk_rules import Bools, check_cover
from ckpt.format.columns import (
    Ints,
    Progressions,
    checked_indexes,
    ints_in,
    is_below,
    pack_ints,
    required_field,
    unpack_regular,
    unpack_rules,
)
from ckpt.format.datafile import NDIM_MAX
from ckpt.format.manifest import (
    NUMEL_MAX,
    BoxTable,
    ChunkTable,
    Header,
    Int64s,
    MetadataBudget,
    RuledChunks,
    Wanted,
    starts_of,
)
from ckpt.layout.region import Shape


class Counts(NamedTuple):
    """The field `counts`: how many rows each table has, in the order of the file."""

    files: int
    tensors: int
    shapes: int
    chunks: int
    boxes: int
    blocks: int
    aliases: int
    ranks: int


def fields_of_boxes(boxes: BoxTable) -> dict[str, bytes]:
    """The fields with the unique boxes, encoded."""
    return {
        "box_ndims": pack_ints(np.diff(boxes.first), constant=False),
        "box_offsets": pack_ints(boxes.offsets, constant=False),
        "box_sizes": pack_ints(boxes.sizes, constant=False),
    }


def gaps_of(
    files: Ints, positions: Int64s, nbytes: Int64s, itemsizes: Int64s
) -> npt.NDArray[np.uint64]:
    """Bytes between each chunk and the one before it in its file, both in the canonical order;
    `positions` count from the end of the file's header.

    Modulo 2^64: a file in another order costs space and nothing else.
    """
    order = file_order(files, itemsizes)
    file, starts = files[order], positions[order]
    expected = np.zeros(len(order), dtype=np.int64)
    if len(order):
        expected[1:] = (starts + nbytes[order])[:-1]
        # The first chunk of a file is measured from the end of the header.
        expected[np.append(True, file[1:] != file[:-1])] = 0
    gaps = np.empty(len(order), dtype=np.uint64)
    gaps[order] = (starts - expected).astype(np.uint64)
    return gaps


def file_order(files: Ints, itemsizes: Ints) -> npt.NDArray[np.intp]:
    """Chunks by file, then widest elements first, then in table order.

    `chunk_gaps` counts in this order: writers lay files out by it, so almost all gaps are zero.
    """
    if not len(files):
        return np.empty(0, dtype=np.intp)
    # As `order_key` lays files out: 16 bytes first, then 8, 4, 2 and 1.
    widest_first = np.array([9] * 17, dtype=np.uint8)
    widest_first[[16, 8, 4, 2, 1]] = [0, 1, 2, 3, 4]
    # 16-bit keys are sorted by radix, ten times faster than anything else.
    key: Ints = files.astype(np.uint16 if int(files.max()) < 1 << 13 else np.uint64)
    key = (key << key.dtype.type(3)) | widest_first[itemsizes]
    return np.argsort(key, kind="stable")


class ChunkBounds(NamedTuple):
    """The files and tensors that the chunks must fit into."""

    file_nbytes: Int64s
    data_start: Int64s
    itemsizes: npt.NDArray[np.uint8]
    fqns: Sequence[str]
    shapes: Sequence[Shape]
    numels: Int64s


# Of each chunk of a table, and while it is made.
CHUNK_NBYTES = 40


def chunk_rules(
    fields: Mapping[str, memoryview],
    counts: Counts,
    make: Callable[[], ChunkTable],
    some: Callable[[Int64s, Wanted], ChunkTable | None],
) -> RuledChunks:
    """The chunks as they are stored; `make` makes their table, `some` one of what is wanted. Raises
    Corrupt naming the field.
    """
    per_tensor = unpack_rules(
        required_field(fields, "chunk_counts"), counts.tensors, "chunk_counts"
    )
    # Tensors have names, which are bytes that are there.
    items = per_tensor.items() if isinstance(per_tensor, Progressions) else per_tensor
    files = unpack_rules(required_field(fields, "chunk_files"), counts.chunks, "chunk_files")
    if not is_below(files, counts.files):
        raise Corrupt(f"field 'chunk_files': an index beyond {counts.files}")
    first = _decode_first(items, counts)
    return RuledChunks(first, files, make, partial(some, first))


def decode_chunks(
    fields: Mapping[str, memoryview], counts: Counts, header: Header, bounds: ChunkBounds
) -> ChunkTable:
    """The chunks of a manifest: together they cover every tensor exactly once.

    Raises Corrupt naming the field, or the tensors that are not covered.
    """

    def column(name: str, count: int = counts.chunks) -> Ints:
        return unpack_regular(required_field(fields, name), count, name)

    first = _decode_first(column("chunk_counts", counts.tensors), counts)
    files = checked_indexes(column("chunk_files"), "chunk_files", counts.files)
    numels, skips = column("chunk_numels"), column("chunk_skips")
    if counts.chunks:
        # As floats: the sum of hostile integers could wrap around and look right.
        total = float(numels.sum(dtype=np.float64)) + float(skips.sum(dtype=np.float64))
        if total > NUMEL_MAX or int(numels.min()) == 0:
            raise Corrupt("field 'chunk_numels': an empty chunk, or more elements than can be")
    itemsizes = np.repeat(bounds.itemsizes, np.diff(first))
    byte_start = _decode_byte_starts(column("chunk_gaps"), files, numels, itemsizes, bounds)
    first_block = _decode_first_block(numels, itemsizes, header.block_bytes, counts)
    # A byte per chunk is a megabyte per million: freed before more columns are made.
    del itemsizes
    ids = checked_indexes(column("chunk_boxes"), "chunk_boxes", counts.boxes + 1)
    box, boxes = _decode_boxes(fields, ids, counts)
    span_start = _decode_span_starts(first, numels, skips, box, bounds)
    chunks = ChunkTable(first, files, byte_start, span_start, numels, box, boxes, first_block)
    problems = check_cover(chunks, bounds.fqns, bounds.shapes, bounds.numels)
    if problems:
        raise Corrupt(f"chunks do not cover their tensors: {'; '.join(problems[:5])}")
    return chunks


# A file's chunks are looked for in every progression, at 47 ns; to list a chunk takes 108.
_STEPS_PER_CHUNK_MAX = 2


def decode_some(
    fields: Mapping[str, memoryview],
    counts: Counts,
    header: Header,
    bounds: ChunkBounds,
    budget: MetadataBudget,
    first: Int64s,
    wanted: Wanted,
) -> ChunkTable | None:
    """The table of `decode_chunks` without the chunks of files that have nothing of what is wanted.

    None where that spares little or memory is short, or where chunks are boxes, leave elements out
    or are no progressions: all of them are to be listed then. That each tensor is covered once is
    proved for all, places in files for those that are listed. Raises Corrupt.
    """
    names = ("chunk_files", "chunk_numels", "chunk_gaps", "chunk_skips")
    columns = [_progressions(required_field(fields, name), counts.chunks, name) for name in names]
    if counts.boxes or not counts.chunks or None in columns:
        return None
    files, numels, gaps, skips = [one for one in columns if one is not None]
    lasts = numels.take(np.cumsum(numels.lengths) - 1)
    is_short = is_below(numels, 1 << 32) and numels.firsts.all() and lasts.all()
    # Spans one after the other, none empty, as many elements as the tensor: each element once.
    if not is_short or skips.firsts.any() or skips.steps.any():
        return None
    before = numels.sums(first)
    if not np.array_equal(np.diff(before), bounds.numels):
        return None
    tensor, low, high = wanted
    begin, end = first[tensor], first[tensor + 1]
    low, high = low + before[tensor], high + before[tensor]
    begin = _bisected(begin, end, lambda chunk: numels.sums(chunk + 1) <= low)
    end = _bisected(begin, end, lambda chunk: numels.sums(chunk) < high)
    size = end - begin
    # As many as memory is left for: a few hundred bytes may describe millions of chunks.
    most = min(counts.chunks // 2, budget.nbytes_left // CHUNK_NBYTES)
    if int(size.sum()) > most:
        return None
    with budget.using(CHUNK_NBYTES * most, f"a part of a table of {counts.chunks} chunks"):
        ends = np.cumsum(size)
        needed = np.unique(
            files.take(np.arange(int(size.sum())) + np.repeat(begin - ends + size, size))
        )
        if len(needed) * len(files.lengths) > _STEPS_PER_CHUNK_MAX * counts.chunks:
            return None
        chunks = files.places(needed.tolist(), most)
    if chunks is None:
        return None
    budget.charge(CHUNK_NBYTES * len(chunks), f"a table of {len(chunks)} chunks")
    own = np.searchsorted(first, chunks, side="right") - 1
    file, numel, itemsize = files.take(chunks), numels.take(chunks), bounds.itemsizes[own]
    blocks = -(-numel * itemsize // header.block_bytes)
    return ChunkTable(
        first=np.searchsorted(chunks, first),
        file=file,
        byte_start=_decode_byte_starts(gaps.take(chunks), file, numel, itemsize, bounds),
        span_start=numels.sums(chunks) - before[own],
        numel=numel,
        box=np.broadcast_to(np.array([-1], dtype=np.int8), (len(chunks),)),
        boxes=BoxTable.of([]),
        first_block=starts_of(blocks),
    )


def _progressions(data: memoryview, count: int, name: str) -> Progressions | None:
    """A column that is one number, or progressions; None for any other."""
    column = unpack_rules(data, count, name)
    if isinstance(column, Progressions):
        return column
    is_constant = count and column.strides == (0,)
    none = np.zeros(1, dtype=np.int64)
    return Progressions.of(none + count, column[:1], none) if is_constant else None


def _bisected(low: Int64s, high: Int64s, is_before: Callable[[Int64s], Bools]) -> Int64s:
    """Per row the first number from `low` to `high` that is not before."""
    while (is_open := low < high).any():
        middle = (low + high) // 2
        before = is_before(middle) & is_open
        low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
    return low


def _decode_first(per_tensor: Ints, counts: Counts) -> Int64s:
    # Compared before they are added up: a hostile sum could wrap around.
    if counts.tensors and int(per_tensor.max()) > counts.chunks:
        raise Corrupt(f"field 'chunk_counts': {int(per_tensor.max())} of {counts.chunks} chunks")
    first = starts_of(per_tensor)
    if int(first[-1]) != counts.chunks:
        raise Corrupt(f"field 'chunk_counts': add up to {int(first[-1])}, expected {counts.chunks}")
    return first


def _runs(counts: Ints, total: int) -> list[tuple[int, int]]:
    """Ranges of `counts` that add up to about a 32nd of `total` each.

    Columns are processed in such runs: temporaries for a million chunks at once would take more
    memory than the manifest itself.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    marks = np.arange(1, 33) * max(total // 32, 1 << 13)
    cuts = np.unique(np.searchsorted(ends, marks, side="left") + 1)
    inner = [cut for cut in cuts.tolist() if cut < len(counts)]
    return list(pairwise([0, *inner, len(counts)]))


def _decode_byte_starts(
    gaps: Ints, files: Ints, numels: Ints, itemsizes: Ints, bounds: ChunkBounds
) -> Ints:
    if np.any(bounds.data_start > bounds.file_nbytes):
        raise Corrupt("field 'file_data_starts': data would start after the end of a file")
    if not len(files):
        return np.zeros(0, dtype=np.int64)
    largest = int(bounds.file_nbytes.max())
    # 32 bits where they suffice: a table has millions of rows.
    byte_start: Ints = np.empty(len(files), dtype=np.uint32 if largest < 1 << 32 else np.int64)
    per_file = np.bincount(files, minlength=len(bounds.file_nbytes))
    for low, high in _runs(per_file, len(files)):
        index = np.flatnonzero((files >= low) & (files < high))
        if not len(index):
            continue
        index = index[file_order(files[index], itemsizes[index])]
        nbytes = np.multiply(numels[index], itemsizes[index], dtype=np.int64)
        inside = np.flatnonzero(per_file[low:high]) + low
        # File by file, one chunk after the other. Modulo 2^64, as the encoder.
        ends = nbytes.astype(np.uint64) + gaps[index].astype(np.uint64)
        np.cumsum(ends, out=ends)
        base = bounds.data_start[inside].astype(np.uint64)
        base[1:] -= ends[starts_of(per_file[inside])[1:-1] - 1]
        ends += np.repeat(base, per_file[inside])
        starts = ends.view(np.int64) - nbytes
        _check_inside_files(starts, nbytes, inside, per_file[inside], bounds)
        byte_start[index] = starts
    return byte_start


def _check_inside_files(
    starts: Int64s, nbytes: Int64s, files: npt.NDArray[np.intp], per_file: Ints, bounds: ChunkBounds
) -> None:
    """Chunks, by file: within their file's bytes and disjoint."""
    limits = bounds.file_nbytes[files]
    firsts = starts_of(per_file)
    low = np.minimum.reduceat(starts, firsts[:-1])
    high = np.maximum.reduceat(starts, firsts[:-1])
    # Starts below 2^62 first: only then can an end be computed without wrapping around.
    if np.any(low < bounds.data_start[files]) or np.any(high > limits):
        raise Corrupt("field 'chunk_gaps': a chunk starts outside of its file")
    ends = starts + nbytes
    if np.any(np.maximum.reduceat(ends, firsts[:-1]) > limits):
        raise Corrupt("field 'chunk_gaps': a chunk ends after the end of its file")
    # Writers keep this order; only what is in another one has to be sorted.
    overlap = starts[1:] < ends[:-1]
    overlap[firsts[1:-1] - 1] = False  # neighbours of different files
    if overlap.any():
        file = np.repeat(files, per_file)
        order = np.lexsort((starts, file))
        starts, ends, file = starts[order], ends[order], file[order]
        if np.any((starts[1:] < ends[:-1]) & (file[1:] == file[:-1])):
            raise Corrupt("field 'chunk_gaps': two chunks share bytes of a file")


def _decode_first_block(numels: Ints, itemsizes: Ints, block_bytes: int, counts: Counts) -> Ints:
    small = counts.blocks < 1 << 31
    first_block: Ints = np.zeros(counts.chunks + 1, dtype=np.int32 if small else np.int64)
    last = 0
    step = 1 << 14
    # Piece by piece, so that temporaries stay small and a wrong count ends it early.
    for start in range(0, counts.chunks, step):
        part = slice(start, start + step)
        blocks = np.multiply(numels[part], itemsizes[part], dtype=np.int64)
        blocks += block_bytes - 1
        blocks //= block_bytes
        np.cumsum(blocks, out=blocks)
        blocks += last
        last = int(blocks[-1])
        if last > counts.blocks:
            break
        first_block[start + 1 : start + 1 + len(blocks)] = blocks
    if last != counts.blocks:
        raise Corrupt(f"field 'counts': {counts.blocks} blocks, the chunks have {last}")
    return first_block


def _decode_boxes(
    fields: Mapping[str, memoryview], ids: Ints, counts: Counts
) -> tuple[Ints, BoxTable]:
    """Per chunk the index of its box or -1, and the boxes."""
    ndims = ints_in(fields, "box_ndims", counts.boxes, constant=False)
    if counts.boxes and int(ndims.max()) > NDIM_MAX:
        raise Corrupt(f"field 'box_ndims': {int(ndims.max())} dims, at most {NDIM_MAX}")
    first = starts_of(ndims)
    total = int(first[-1])
    offsets = ints_in(fields, "box_offsets", total, constant=False)
    sizes = ints_in(fields, "box_sizes", total, constant=False)
    if total and max(int(offsets.max()), int(sizes.max())) > NUMEL_MAX:
        raise Corrupt("field 'box_sizes': a box of more than 2^58 elements")
    # Most checkpoints have no boxes: one number then stands for the whole column.
    if counts.chunks and not counts.boxes:
        return np.broadcast_to(np.array([-1], dtype=np.int8), (counts.chunks,)), BoxTable(
            first, offsets, sizes
        )
    box: Ints = ids.astype(np.int16 if counts.boxes < 1 << 15 else np.int64)
    np.subtract(box, 1, out=box)
    return box, BoxTable(first, offsets, sizes)


def _decode_span_starts(
    first: Int64s, numels: Ints, skips: Ints, box: Ints, bounds: ChunkBounds
) -> Ints:
    """First element of each span, -1 for boxes. Spans end within their tensor."""
    if not len(numels):
        return np.zeros(0, dtype=np.int64)
    # Stride zero is the column of a checkpoint without boxes.
    has_boxes = box.strides != (0,)
    small = int(bounds.numels.max()) < 1 << 31
    result: Ints = np.empty(len(numels), dtype=np.int32 if small else np.int64)
    counts = np.diff(first)
    for low, high in _runs(counts, len(numels)):
        part = slice(int(first[low]), int(first[high]))
        if part.start == part.stop:
            continue
        lengths = numels[part].astype(np.int64)
        if has_boxes:
            lengths[box[part] >= 0] = 0
            if np.any(skips[part][box[part] >= 0]):
                raise Corrupt("field 'chunk_skips': not zero for a box")
        starts = np.cumsum(lengths + skips[part].astype(np.int64))
        offset = first[low:high] - part.start
        base = np.where(offset > 0, starts[np.maximum(offset, 1) - 1], 0)
        starts -= np.repeat(base, counts[low:high])
        if np.any(starts > np.repeat(bounds.numels[low:high], counts[low:high])):
            raise Corrupt("field 'chunk_numels': a span ends after the end of its tensor")
        starts -= lengths
        if has_boxes:
            starts[box[part] >= 0] = -1
        result[part] = starts
    return result
