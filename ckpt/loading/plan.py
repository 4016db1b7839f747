"""Plans of reads: which blocks of which files are needed, and where their bytes go. Pure.

The byte line is all data files of a checkpoint, one after the other, in the order of the manifest.
A place on it says file and offset in one number that all ranks share. What a rank needs are runs of
whole blocks; blocks that follow each other in a file follow each other here, whatever their tensors
are called, so a few runs describe thousands of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ckpt.format.checksum import block_count
from ckpt.format.datafile import SMALL_NBYTES_MAX, region_start
from ckpt.format.manifest import ChunkTable, Manifest, Wanted
from ckpt.layout.dtypes import ITEMSIZES
from ckpt.layout.holdings import WholeTensors
from ckpt.layout.memory import is_plain_memory, local_view, narrowed
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Span, boxes_of, row_major_strides, span_of, whole
from ckpt.layout.reshard import Copy, Patch, copies, touched
from ckpt.loading.block_sums import BlockCache

Ints = npt.NDArray[np.int64]


class NeededBlocks(NamedTuple):
    """Blocks that one rank needs, ascending on the byte line; columns of one length.

    Block i is bytes `start[i]` to `stop[i]` of the line, and block `number[i]` of chunk `chunk[i]`.
    """

    start: Ints
    stop: Ints
    chunk: Ints
    number: Ints

    def runs(self) -> Ints:
        """The blocks as ascending disjoint runs of the line, an (n, 2) array."""
        return joined(np.stack([self.start, self.stop], axis=1))

    def only(self, rows: Ints) -> NeededBlocks:
        """Those of some rows."""
        return NeededBlocks(self.start[rows], self.stop[rows], self.chunk[rows], self.number[rows])

    def within(self, runs: Ints) -> Ints:
        """The rows of the blocks that have bytes in `runs`, which are ascending and disjoint."""
        first = np.searchsorted(self.stop, runs[:, 0], side="right")
        last = np.searchsorted(self.start, runs[:, 1], side="left")
        # Two runs may meet in one block.
        first[1:] = np.maximum(first[1:], last[:-1])
        return expanded(first, last)


def file_starts(file_nbytes: Sequence[int] | npt.NDArray[np.integer]) -> Ints:
    """Where each file starts on the byte line, and at the end the length of the line."""
    ends = np.cumsum(np.asarray(file_nbytes, dtype=np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])


def joined(runs: Ints) -> Ints:
    """Ascending disjoint runs, those that touch made one."""
    if len(runs) == 0:
        return runs
    is_first = np.append(True, runs[1:, 0] != runs[:-1, 1])
    is_last = np.append(is_first[1:], True)
    return np.stack([runs[is_first, 0], runs[is_last, 1]], axis=1)


def united(runs: Ints, gap_max: int = 0) -> Ints:
    """Runs in any order, some of which may overlap, as ascending disjoint ones; what lies between
    two of them is taken in, if it is at most `gap_max` bytes.
    """
    if len(runs) == 0:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    stops = np.maximum.accumulate(runs[:, 1])
    first = np.flatnonzero(np.append(True, runs[1:, 0] > stops[:-1] + gap_max))
    last = np.append(first[1:], len(runs)) - 1
    return np.stack([runs[first, 0], stops[last]], axis=1)


def pieces_of(runs: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """`runs`, cut at the edges of the intervals from `starts[i]` to `stops[i]`: what lies in them,
    as ascending runs, and for each of these the number of its interval. All ascending and disjoint.

    Runs that are intervals come back as they are.
    """
    first = np.searchsorted(stops, runs[:, 0], side="right")
    last = np.maximum(np.searchsorted(starts, runs[:, 1], side="left"), first)
    row = expanded(first, last)
    run = runs[np.repeat(np.arange(len(runs)), last - first)]
    low, high = np.maximum(run[:, 0], starts[row]), np.minimum(run[:, 1], stops[row])
    return np.stack([low, high], axis=1), row


def expanded(first: npt.NDArray[np.integer], last: npt.NDArray[np.integer]) -> Ints:
    """All integers of the ranges `first[i]` to `last[i]`, one range after the other."""
    sizes = last - first
    skipped = np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers: npt.NDArray[np.intp] = np.arange(int(sizes.sum())) - skipped + np.repeat(first, sizes)
    return numbers


def length(runs: Ints) -> int:
    """The bytes of `runs`."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def without(runs: Ints, taken: Ints) -> Ints:
    """What is left of `runs` without `taken`; both ascending and disjoint, `taken` inside `runs`.

    Nothing taken leaves `runs` as they are.
    """
    if len(taken) == 0:
        return runs
    # Between the ends of both, in order, what is left begins where neither has begun to be taken.
    edges = np.concatenate([runs.reshape(-1), taken.reshape(-1)])
    edges.sort(kind="stable")
    pairs = edges.reshape(-1, 2)
    return joined(pairs[pairs[:, 0] < pairs[:, 1]])


def requests(blocks: NeededBlocks, files: Ints, nbytes_max: int, gap_max: int) -> list[range]:
    """The rows of `blocks` that one read fetches, read by read: as few reads as there can be.

    A read lies in one file, passes over gaps of at most `gap_max` bytes, and is at most
    `nbytes_max` long, or one block. `files` is `file_starts` of the line.
    """
    start, stop = blocks.start, blocks.stop
    file = np.searchsorted(files, start, side="right")
    is_cut = (start[1:] - stop[:-1] > gap_max) | (file[1:] != file[:-1])
    edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(start)]
    reads: list[range] = []
    for first, end in pairwise(edges):
        while first < end:
            last = int(np.searchsorted(stop, start[first] + nbytes_max, side="right"))
            last = min(max(last, first + 1), end)
            reads.append(range(first, last))
            first = last
    return reads


MIB = 1 << 20
PACKED_NBYTES_MAX = SMALL_NBYTES_MAX  # whole chunks up to this size are read together and copied
PACKED_COUNT_MIN = 8  # unless fewer of them than this are neighbours
# Listing fewer chunks takes less than finding out which ones are needed.
LISTED_MIN = 1 << 16
# Of what is not here: shorter gaps are received as well, or a tensor that is cut finely would be
# described by more bytes than it has.
GAP_NBYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class ReadPath:
    """Bounds of reading: bytes of one request, and how many requests are in flight at once.

    A request reads over what is not needed, up to `gap_nbytes_max` at a time, where that saves a
    request. `readers` requests are in flight at once, and up to `readers_max` where that moves more
    bytes per second (`storage.threads.RequestWindow`): in memory are at most that many times
    `request_nbytes_max`. With several readers, blocks for other ranks are read ahead of their
    round, up to `read_ahead_nbytes_max` bytes that are read and not sent yet. What `cache` has is
    not read from the store.

    With `direct_readers`, what the store says is on a disk and not in memory is read around the
    page cache, that many requests at once, and with `direct_always` everything is. A rank that
    needs less than `direct_nbytes_min` reads all of it through the page cache. One that needs at
    most `through_share_max` of the memory that is left does so where it makes few requests, tries
    both ways with more and takes the faster, and puts what is missing into the page cache where
    most is there. What is in memory is copied and checked by `cached_readers` threads.
    """

    request_nbytes_max: int = 8 * MIB
    gap_nbytes_max: int = 64 << 10
    readers: int = 1
    readers_max: int = 0
    read_ahead_nbytes_max: int = 64 * MIB
    cache: BlockCache | None = None
    direct_readers: int = 0
    direct_always: bool = False
    direct_nbytes_min: int = 0
    through_share_max: float = 0.0
    cached_readers: int = 1

    @property
    def in_flight_max(self) -> int:
        """The most requests that are in flight at once, of those that one rank needs alone."""
        return max(self.readers, self.readers_max, 1)


class Direct(NamedTuple):
    """Bytes `start` to `stop` of a chunk belong at `address` in host memory."""

    start: int
    stop: int
    address: int


class Scatter(NamedTuple):
    """Elements of a chunk for strided or device memory; the patch's target box lies in `target`."""

    patch: Patch
    target: torch.Tensor


class Need(NamedTuple):
    """What this rank reads of one chunk of `nbytes`: ascending runs of its blocks, and where bytes
    go.
    """

    nbytes: int
    blocks: list[tuple[int, int]]
    directs: list[Direct]
    scatters: list[Scatter]


class ReadPlan(NamedTuple):
    """Everything that one rank reads, by chunk. `targets` keep the memory alive that is filled.

    `packed` are chunks of one small block that are wanted once, whole, at an address. There can be
    thousands of them, so that is all that is noted.
    """

    needs: dict[int, Need]
    packed: dict[int, int]
    targets: tuple[Sequence[Holding], Sequence[WholeTensors]]

    def blocks(self, manifest: Manifest) -> NeededBlocks:
        """The blocks that are needed, in the order of the byte line."""
        block_nbytes = manifest.header.block_bytes
        runs = [
            (chunk, first, last, need.nbytes)
            for chunk, need in self.needs.items()
            for first, last in need.blocks
        ]
        # A packed chunk is one block: it needs no run of its own.
        packed = np.fromiter(self.packed, np.int64, len(self.packed))
        zeros = np.zeros_like(packed)
        small = np.stack([packed, zeros, zeros + 1, _sizes(manifest, packed)], axis=1)
        both = np.concatenate([np.array(runs, dtype=np.int64).reshape(-1, 4), small])
        chunk, first, last, nbytes = both.T
        which = np.repeat(np.arange(len(both)), last - first)
        number = expanded(first, last)
        start = number * block_nbytes
        stop = np.minimum(start + block_nbytes, nbytes[which])
        base = _bases(manifest, chunk)[which]
        blocks = NeededBlocks(base + start, base + stop, chunk[which], number)
        return blocks.only(np.argsort(blocks.start, kind="stable"))

    def wanted(self, manifest: Manifest, files: Collection[int]) -> Ints:
        """Exactly what is wanted of these data files, as ascending disjoint runs of the byte line;
        only short gaps inside of blocks are taken in.
        """
        is_remote = np.isin(np.arange(len(manifest.files)), list(files))
        chunks = np.fromiter(self.needs, np.int64, len(self.needs))
        chunks = chunks[is_remote[manifest.chunks.file[chunks]]]
        # Shorter than a block, so that none is taken in of which nothing is wanted.
        gap_max = min(GAP_NBYTES_MAX, manifest.header.block_bytes // 16)
        runs = [np.empty((0, 2), dtype=np.int64)]
        for chunk, base in zip(chunks.tolist(), _bases(manifest, chunks).tolist(), strict=True):
            need = self.needs[chunk]
            some = [np.array([one[:2] for one in need.directs], dtype=np.int64).reshape(-1, 2)]
            some += [element_runs(one.patch) * one.target.dtype.itemsize for one in need.scatters]
            runs.append(united(np.concatenate(some), gap_max) + base)
        packed = np.fromiter(self.packed, np.int64, len(self.packed))
        packed = packed[is_remote[manifest.chunks.file[packed]]]
        base = _bases(manifest, packed)
        runs.append(np.stack([base, base + _sizes(manifest, packed)], axis=1))
        return united(np.concatenate(runs))


def plan_for_others(manifest: Manifest, some: Sequence[Ints]) -> ReadPlan:
    """Reads the blocks that have bytes in `some` runs of the byte line, and fills no memory."""
    runs = united(np.concatenate(some))
    starts, block_nbytes = file_starts(manifest.file_nbytes), manifest.header.block_bytes
    files = np.unique(np.searchsorted(starts, runs[:, 0], side="right") - 1)
    chunks = np.flatnonzero(np.isin(manifest.chunks.file, files))
    base = _bases(manifest, chunks)
    order = np.argsort(base)
    chunks, base = chunks[order], base[order]
    pieces, row = pieces_of(runs, base, base + _sizes(manifest, chunks))
    assert length(pieces) == length(runs), "a rank asks for bytes of blocks"
    needs: dict[int, Need] = {}
    rounded = np.array([0, block_nbytes - 1], dtype=np.int64)
    numbers = (pieces - base[row, None] + rounded) // block_nbytes
    # On a line on which no two chunks touch.
    apart = int(numbers.max(initial=0)) + 1
    for first, last in united(numbers + row[:, None] * apart).tolist():
        index, first = divmod(first, apart)
        chunk = int(chunks[index])
        if chunk not in needs:
            needs[chunk] = Need(manifest.chunk_nbytes(chunk), [], [], [])
        needs[chunk].blocks.append((first, last - index * apart))
    return ReadPlan(needs, {}, ((), ()))


def _bases(manifest: Manifest, chunks: Ints) -> Ints:
    """Where `chunks` begin on the byte line."""
    table = manifest.chunks
    base = file_starts(manifest.file_nbytes)[table.file[chunks]] + table.byte_start[chunks]
    return base.astype(np.int64)


def element_runs(patch: Patch) -> Ints:
    """The chunk elements that a patch takes, as ascending runs; one run where the box is whole."""
    shape, box = patch.source_shape, patch.source_box
    strides = row_major_strides(shape)
    dim = len(shape) - 1  # the last one that is not taken whole: what is behind it is one run
    while dim > 0 and box.shape[dim] == shape[dim]:
        dim -= 1
    starts = np.array([patch.source_base], dtype=np.int64)
    for outer in range(dim):
        steps = (box.offset[outer] + np.arange(box.shape[outer])) * strides[outer]
        starts = np.add.outer(starts, steps).reshape(-1)
    starts = starts + box.offset[dim] * strides[dim]
    return np.stack([starts, starts + box.shape[dim] * strides[dim]], axis=1)


def _sizes(manifest: Manifest, chunks: Ints) -> Ints:
    """The bytes of `chunks`."""
    tensors = np.searchsorted(manifest.chunks.first, chunks, side="right") - 1
    dtypes = map(manifest.dtypes.__getitem__, tensors.tolist())
    itemsizes = list(map(ITEMSIZES.__getitem__, dtypes))
    return manifest.chunks.numel[chunks].astype(np.int64) * np.array(itemsizes, dtype=np.int64)


def needed_part(
    manifest: Manifest, holdings: Sequence[Holding], plain: Sequence[WholeTensors], *, alone: bool
) -> Manifest:
    """The manifest without the chunks of files that have nothing of these; all of it where that
    spares little, and for a rank that is not `alone`: it reads for others what these ask for later.
    Raises Corrupt.
    """
    chunks = manifest.chunks
    if not alone or isinstance(chunks, ChunkTable) or len(chunks) < LISTED_MIN:
        return manifest
    pieces = [piece for one in holdings for piece in one.pieces if piece.local_region.numel]
    wanted = [(manifest.index(piece.fqn), *_extent(piece)) for piece in pieces]
    wanted += [
        (manifest.index(fqn), 0, tensor.numel())
        for one in plain
        for fqn, tensor in zip(one.fqns, one.tensors, strict=True)
    ]
    some = chunks.some(Wanted(*np.array(wanted, dtype=np.int64).reshape(-1, 3).T))
    return manifest if some is None else replace(manifest, chunks=some)


def plan_reads(
    manifest: Manifest, holdings: Sequence[Holding], plain: Sequence[WholeTensors] = ()
) -> ReadPlan:
    """Which blocks of which chunks fill `holdings` and `plain`, and how. Names, shapes and dtypes
    must match.
    """
    needs: dict[int, Need] = {}
    packed, rest = _pack(manifest, holdings, plain, needs)
    chunks = _Chunks(manifest, wanted=len(rest))
    block_nbytes = manifest.header.block_bytes
    for piece, view in rest:
        if not piece.local_region.numel:
            continue
        address = view.data_ptr() if is_plain_memory(view) else 0
        if address and chunks.put_whole(piece, address, needs):
            continue
        for chunk, chunk_copies in chunks.meeting(piece):
            if chunk not in needs:
                nbytes = int(chunks.numel[chunk]) * piece.dtype.itemsize
                needs[chunk] = Need(nbytes, [], [], [])
            for copy in chunk_copies:
                _add_copy(needs[chunk], copy, view, address, block_nbytes)
    return ReadPlan(needs, packed, (holdings, plain))


def _pack(
    manifest: Manifest,
    holdings: Sequence[Holding],
    plain: Sequence[WholeTensors],
    needs: dict[int, Need],
) -> tuple[dict[int, int], list[tuple[Piece, torch.Tensor]]]:
    """The packed chunks of a plan, and the pieces that are something else, with their memory.

    A chunk that is wanted a second time cannot be packed, because it has two targets: it moves to
    `needs`, and is never in both.
    """
    packed: dict[int, int] = {}
    rest: list[tuple[Piece, torch.Tensor]] = []
    otherwise = {-1}  # wanted, but not to be packed; -1 stands for what is not small
    count = len(holdings) + sum(len(some.fqns) for some in plain)
    # The chunk of every tensor that is one small chunk of one block, by fqn.
    packable: dict[str, int] = {}
    if count >= PACKED_COUNT_MIN:
        table, fqns = manifest.chunks, manifest.fqns
        single = np.flatnonzero(np.diff(table.first) == 1)
        chunks = table.first[single]
        nbytes = table.numel[chunks] * manifest.itemsizes[single]
        is_small = (nbytes > 0) & (nbytes <= min(PACKED_NBYTES_MAX, manifest.header.block_bytes))
        names = [fqns[tensor] for tensor in single[is_small].tolist()]
        packable = dict(zip(names, chunks[is_small].tolist(), strict=True))
    left = [some.only(_pack_whole(some, packable, packed)) for some in plain]
    for holding in chain(*(some.holdings(kept=False) for some in left), holdings):
        for piece in holding.pieces:
            view = local_view(holding, piece)
            small = packable.get(piece.fqn, -1)
            if small in packed:
                needs[small] = whole_need(manifest, small, packed.pop(small))
            elif small not in otherwise and _is_whole(piece) and is_plain_memory(view):
                packed[small] = view.data_ptr()
                continue
            otherwise.add(small)
            rest.append((piece, view))
    return packed, rest


def _pack_whole(
    plain: WholeTensors, packable: Mapping[str, int], packed: dict[int, int]
) -> list[int]:
    """Pack what is wanted for the first time of `plain`; returns the rows of all others."""
    left = []
    for row, (fqn, tensor, address) in enumerate(zip(*plain[:3], strict=True)):
        chunk = packable.get(fqn)
        # Plain tensors in host memory without gaps are plain memory.
        if chunk is None or chunk in packed or not (tensor.is_cpu and tensor.is_contiguous()):
            left.append(row)
        else:
            packed[chunk] = address
    return left


def whole_need(manifest: Manifest, chunk: int, address: int) -> Need:
    """The need of all of `chunk`, at `address` in host memory."""
    nbytes = manifest.chunk_nbytes(chunk)
    blocks = block_count(nbytes, manifest.header.block_bytes)
    return Need(nbytes, [(0, blocks)], [Direct(0, nbytes, address)], [])


def _is_whole(piece: Piece) -> bool:
    return type(piece.region) is Box and piece.region.shape == piece.global_shape


def chunks_of(manifest: Manifest, pieces: Sequence[Piece]) -> list[list[int]]:
    """For each piece the chunks that have any of its elements."""
    chunks = _Chunks(manifest, wanted=len(pieces))
    return [
        [chunk for chunk, _ in chunks.meeting(piece)] if piece.local_region.numel else []
        for piece in pieces
    ]


class _Chunks:
    """The chunks of a manifest, looked up by piece. Columns are lists where most are wanted."""

    def __init__(self, manifest: Manifest, *, wanted: int) -> None:
        table = manifest.chunks
        self._manifest = manifest
        self._table = table
        self._index: Callable[[str], int] = manifest.index
        columns: list[Any] = [table.span_start, table.numel, table.box, table.first]
        if len(table) <= 8 * wanted:
            # An item of a list costs a fifth of an item of an array, and a dict beats bisection.
            columns = [column.tolist() for column in columns]
            self._index = {fqn: index for index, fqn in enumerate(manifest.fqns)}.__getitem__
        self._span_start, self.numel, self._box, self._first = columns

    def meeting(self, piece: Piece) -> Iterator[tuple[int, list[Copy]]]:
        """The chunks that share elements with `piece`, each with what to copy."""
        tensor = self._index(piece.fqn)
        first, last = map(int, self._first[tensor : tensor + 2])
        near: Iterable[int] = range(first, last)
        # With fewer chunks, comparing all extents at once costs more than it spares.
        if last - first > 4:
            near = self._overlapping(piece, first, last)
        shape, wanted = piece.global_shape, piece.region
        if isinstance(wanted, Box):
            # Here once, instead of in `copies` for every chunk.
            wanted = span_of(wanted, shape) or wanted
        for chunk in near:
            if chunk_copies := copies(self._region(chunk), wanted, shape):
                yield chunk, chunk_copies

    def put_whole(self, piece: Piece, address: int, needs: dict[int, Need]) -> bool:
        """The short way for the common case: one chunk is all of a tensor, and so is the piece."""
        tensor = self._index(piece.fqn)
        chunk, stop = self._first[tensor : tensor + 2]
        if stop != chunk + 1 or chunk in needs or not _is_whole(piece):
            return False
        needs[int(chunk)] = whole_need(self._manifest, int(chunk), address)
        return True

    def _region(self, chunk: int) -> Region:
        if self._box[chunk] >= 0:
            return self._table.region(chunk)
        start = int(self._span_start[chunk])
        return Span(start, start + int(self.numel[chunk]))

    def _overlapping(self, piece: Piece, first: int, last: int) -> list[int]:
        """Chunk numbers left after comparing extents in row-major order, all of them at once.

        Boxes are left to `copies`: their extents say little, and they are few per tensor.
        """
        table = self._table
        low, high = _extent(piece)
        start = table.span_start[first:last]
        stop = start + table.numel[first:last].astype(np.int64)
        is_near = ((start < high) & (stop > low)) | (table.box[first:last] >= 0)
        overlapping: list[int] = (np.flatnonzero(is_near) + first).tolist()
        return overlapping


def _extent(piece: Piece) -> tuple[int, int]:
    """The row-major index of the first element of a piece, and one past that of the last."""
    region, strides = piece.region, row_major_strides(piece.global_shape)
    if isinstance(region, Span):
        return region
    ends = zip(*region, strides, strict=True)
    high = sum((start + size - 1) * stride for start, size, stride in ends) + 1
    return region_start(region, piece.global_shape), high


def _add_copy(need: Need, copy: Copy, view: torch.Tensor, address: int, block_nbytes: int) -> None:
    """Note one copy from the chunk into `view`, whose memory starts at `address` if it is plain."""
    itemsize = view.dtype.itemsize
    # Blocks hold whole elements: their size is a multiple of every itemsize.
    unit = block_nbytes // itemsize
    if isinstance(copy, Patch):
        _add_runs(need.blocks, touched(copy, unit))
        if tuple(view.shape) != copy.target_shape:  # else it is all of it, from its start
            numel = whole(copy.target_shape).numel
            view = view.view(-1)[copy.target_base : copy.target_base + numel]
            view = view.view(copy.target_shape)
        need.scatters.append(Scatter(copy, view))
        return
    _add_runs(need.blocks, [(copy.source // unit, (copy.source + copy.numel - 1) // unit + 1)])
    if address:
        start = copy.source * itemsize
        target = address + copy.target * itemsize
        need.directs.append(Direct(start, start + copy.numel * itemsize, target))
        return
    # Memory that is strided or on a device: boxes of `view`.
    view, source = view.view(-1) if view.is_contiguous() else view, copy.source
    for box in boxes_of(Span(copy.target, copy.target + copy.numel), tuple(view.shape)):
        all_of_it = whole(box.shape)
        patch = Patch(source, box.shape, all_of_it, 0, box.shape, all_of_it)
        need.scatters.append(Scatter(patch, narrowed(view, box)))
        source += box.numel


def _add_runs(runs: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    """Union of two ascending lists of block runs, into `runs`."""
    if not runs:
        runs.extend(more)
        return
    merged = sorted(runs + more)
    runs.clear()
    for first, last in merged:
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
