"""Read stored chunks into live memory: plan, ranged reads, check, copy.

    wanted pieces x stored chunks -> needs (blocks per chunk) -> private and shared runs -> requests

A block that only this rank needs is read by it, straight into the target where the target's memory
allows. A block that several ranks need is read by one of them and exchanged.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ckpt.cache import BlockCache
from ckpt.errors import Corrupt
from ckpt.format.checksum import crc32c, crc32c_of_each
from ckpt.format.datafile import SMALL_NBYTES_MAX
from ckpt.format.dtypes import DTYPES
from ckpt.format.manifest import Manifest
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Shape, Span, boxes_of, row_major_strides, span_of, whole
from ckpt.layout.reshard import Copy, Patch, Run, clip_patch, copies, touched
from ckpt.locate import file_key, file_keys
from ckpt.memory import (
    address_of,
    bytes_at,
    copy_bytes,
    is_plain_memory,
    local_view,
    narrowed,
    tensor_over,
)
from ckpt.share import Ints, SharedRun, expanded
from storage import ShortReadError, Store

MIB = 1 << 20
PACKED_NBYTES_MAX = SMALL_NBYTES_MAX  # whole chunks up to this size are read together and copied
PACKED_COUNT_MIN = 8  # unless fewer of them than this are neighbours
PACK_NBYTES_MAX = MIB  # of one such read: what is copied is still in the CPU's cache then


@dataclass(frozen=True, slots=True)
class ReadPath:
    """Bounds of reading: bytes of one request, and how many requests are in flight at once.

    With several readers, blocks that other ranks wait for are read ahead of their turn, as far as
    `read_ahead_nbytes_max` bytes that were read and not handed over yet. What `cache` has is not
    read from the store.
    """

    request_nbytes_max: int = 8 * MIB
    readers: int = 1
    read_ahead_nbytes_max: int = 64 * MIB
    cache: BlockCache | None = None


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
    """What this rank wants of one chunk: ascending runs of its blocks, and where bytes go.

    The chunk has `nbytes` bytes from `byte_start` of file `file` on; its first block has the number
    `first_block` on the block line.
    """

    file: int
    byte_start: int
    nbytes: int
    first_block: int
    blocks: list[tuple[int, int]]
    directs: list[Direct]
    scatters: list[Scatter]


class ReadPlan(NamedTuple):
    """Everything that one rank wants, by chunk. The holdings keep the target memory alive.

    `packed` are chunks of one small block that are wanted once, whole, at an address. There can be
    thousands of them, so that is all that is noted.
    """

    needs: dict[int, Need]
    packed: dict[int, int]
    holdings: Sequence[Holding]

    def runs(self, first_block: npt.NDArray[np.integer]) -> Ints:
        """The needed blocks as ascending disjoint runs of the block line, an (n, 2) array.

        `first_block` is the manifest's: where each chunk starts on the block line.
        """
        runs = [
            (need.first_block + first, need.first_block + last)
            for need in self.needs.values()
            for first, last in need.blocks
        ]
        packed = first_block[np.fromiter(self.packed, np.int64, len(self.packed))].astype(np.int64)
        together = np.concatenate(
            [np.array(runs, dtype=np.int64).reshape(-1, 2), np.stack([packed, packed + 1], axis=1)]
        )
        return joined(together[np.argsort(together[:, 0])])


def joined(runs: Ints) -> Ints:
    """Ascending disjoint runs, those that touch made one."""
    if len(runs) == 0:
        return runs
    is_first = np.append(True, runs[1:, 0] != runs[:-1, 1])
    is_last = np.append(is_first[1:], True)
    return np.stack([runs[is_first, 0], runs[is_last, 1]], axis=1)


def plan_reads(manifest: Manifest, holdings: Sequence[Holding]) -> ReadPlan:
    """Which blocks of which chunks fill `holdings`, and how. Names and shapes must match."""
    needs: dict[int, Need] = {}
    packed, rest = _pack(manifest, holdings, needs)
    chunks = _Chunks(manifest, wanted=len(rest))
    block_nbytes = manifest.header.block_bytes
    for piece, view in rest:
        if not piece.local_region.numel:
            continue
        address = view.data_ptr() if is_plain_memory(view) else 0
        if address and chunks.put_whole(piece, address, needs):
            continue
        for chunk, found in chunks.meeting(piece):
            need = needs.get(chunk)
            if need is None:
                need = needs[chunk] = chunks.need(chunk, piece.dtype.itemsize)
            for copy in found:
                _add_copy(need, copy, view, address, block_nbytes)
    return ReadPlan(needs, packed, holdings)


def _pack(
    manifest: Manifest, holdings: Sequence[Holding], needs: dict[int, Need]
) -> tuple[dict[int, int], list[tuple[Piece, torch.Tensor]]]:
    """The packed chunks of a plan, and the pieces that are something else, with their memory.

    A chunk that is wanted a second time takes all of the book-keeping, and is in `needs` in the
    end; it is never in both.
    """
    packed: dict[int, int] = {}
    rest: list[tuple[Piece, torch.Tensor]] = []
    otherwise = {-1}  # wanted, but not to be packed; -1 stands for what is not small
    packable = _packable(manifest) if len(holdings) >= PACKED_COUNT_MIN else {}
    for holding in holdings:
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


def whole_need(manifest: Manifest, chunk: int, address: int) -> Need:
    """The need of all of `chunk`, at `address` in host memory."""
    nbytes = manifest.chunk_nbytes(chunk)
    return Need(
        int(manifest.chunks.file[chunk]),
        int(manifest.chunks.byte_start[chunk]),
        nbytes,
        int(manifest.chunks.first_block[chunk]),
        [(0, -(-nbytes // manifest.header.block_bytes))],
        [Direct(0, nbytes, address)],
        [],
    )


def _is_whole(piece: Piece) -> bool:
    return type(piece.region) is Box and piece.region.shape == piece.global_shape


def _packable(manifest: Manifest) -> dict[str, int]:
    """The chunk of every tensor that is one small chunk of one block, by fqn."""
    table = manifest.chunks
    itemsizes = np.array([DTYPES[name].itemsize for name in manifest.dtypes], dtype=np.int64)
    single = np.flatnonzero(np.diff(table.first) == 1)
    chunks = table.first[single]
    nbytes = table.numel[chunks] * itemsizes[single]
    is_small = (nbytes > 0) & (nbytes <= min(PACKED_NBYTES_MAX, manifest.header.block_bytes))
    fqns = manifest.fqns
    names = [fqns[tensor] for tensor in single[is_small].tolist()]
    return dict(zip(names, chunks[is_small].tolist(), strict=True))


class _Chunks:
    """The chunks of a manifest, found by piece. Columns are lists where most of them are wanted."""

    def __init__(self, manifest: Manifest, *, wanted: int) -> None:
        table = manifest.chunks
        self._manifest = manifest
        self._table = table
        self._index: Callable[[str], int] = manifest.index
        columns: list[Any] = [table.file, table.byte_start, table.first_block]
        columns += [table.span_start, table.numel, table.box]
        columns.append(table.first)
        if len(table) <= 8 * wanted:
            # An item of a list costs a fifth of an item of an array, and a dict beats bisection.
            columns = [column.tolist() for column in columns]
            self._index = {fqn: at for at, fqn in enumerate(manifest.fqns)}.__getitem__
        self._file, self._byte_start, self._first_block, *rest = columns
        self._span_start, self._numel, self._box, self._first = rest

    def meeting(self, piece: Piece) -> Iterator[tuple[int, list[Copy]]]:
        """The chunks that share elements with `piece`, each with what to copy."""
        tensor = self._index(piece.fqn)
        first, last = int(self._first[tensor]), int(self._first[tensor + 1])
        near: Iterable[int] = range(first, last)
        if last - first > 4:
            near = self._overlapping(piece, first, last)
        shape, wanted = piece.global_shape, piece.region
        if isinstance(wanted, Box):
            wanted = span_of(wanted, shape) or wanted
        for chunk in near:
            if found := copies(self._region(chunk), wanted, shape):
                yield chunk, found

    def put_whole(self, piece: Piece, address: int, needs: dict[int, Need]) -> bool:
        """The short way for the common case: one chunk is all of a tensor, and so is the piece."""
        tensor = self._index(piece.fqn)
        chunk = int(self._first[tensor])
        if self._first[tensor + 1] != chunk + 1 or chunk in needs or not _is_whole(piece):
            return False
        needs[chunk] = whole_need(self._manifest, chunk, address)
        return True

    def need(self, chunk: int, itemsize: int) -> Need:
        """An empty need of `chunk`."""
        return Need(
            int(self._file[chunk]),
            int(self._byte_start[chunk]),
            int(self._numel[chunk]) * itemsize,
            int(self._first_block[chunk]),
            [],
            [],
            [],
        )

    def _region(self, chunk: int) -> Region:
        if self._box[chunk] >= 0:
            return self._table.region(chunk)
        start = int(self._span_start[chunk])
        return Span(start, start + int(self._numel[chunk]))

    def _overlapping(self, piece: Piece, first: int, last: int) -> list[int]:
        """Chunk numbers left after comparing extents in row-major order, all of them at once.

        Boxes are left to `copies`: their extents say little, and they are few per tensor.
        """
        table = self._table
        boxes = boxes_of(piece.region, piece.global_shape)
        low, _ = _extent(boxes[0], piece.global_shape)
        _, high = _extent(boxes[-1], piece.global_shape)
        start = table.span_start[first:last]
        stop = start + table.numel[first:last].astype(np.int64)
        is_near = ((start < high) & (stop > low)) | (table.box[first:last] >= 0)
        found: list[int] = (np.flatnonzero(is_near) + first).tolist()
        return found


def _extent(box: Box, shape: Shape) -> tuple[int, int]:
    """The row-major index of the first element of `box`, and one past that of the last."""
    strides = row_major_strides(shape)
    first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    return first, first + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1


def _add_copy(need: Need, copy: Copy, view: torch.Tensor, address: int, block_nbytes: int) -> None:
    """Note one copy from the chunk into `view`, whose memory starts at `address` if it is plain."""
    itemsize = view.dtype.itemsize
    unit = block_nbytes // itemsize
    if isinstance(copy, Patch):
        _add_runs(need.blocks, touched(copy, unit))
        need.scatters.append(Scatter(copy, _region_of(view, copy)))
        return
    _add_runs(need.blocks, [(copy.source // unit, (copy.source + copy.numel - 1) // unit + 1)])
    if address:
        start = copy.source * itemsize
        target = address + copy.target * itemsize
        need.directs.append(Direct(start, start + copy.numel * itemsize, target))
    else:
        need.scatters.extend(_scattered(copy, view))


def _region_of(view: torch.Tensor, patch: Patch) -> torch.Tensor:
    """The elements of `view` that `patch.target_shape` describes, sharing memory."""
    if tuple(view.shape) == patch.target_shape and patch.target_base == 0:
        return view
    numel = whole(patch.target_shape).numel
    return view.view(-1)[patch.target_base : patch.target_base + numel].view(patch.target_shape)


def _scattered(run: Run, view: torch.Tensor) -> Iterator[Scatter]:
    """A run for memory that is strided or on a device, told as boxes of `view`."""
    if view.is_contiguous():
        view = view.view(-1)
    source = run.source
    for box in boxes_of(Span(run.target, run.target + run.numel), tuple(view.shape)):
        all_of_it = whole(box.shape)
        patch = Patch(source, box.shape, all_of_it, 0, box.shape, all_of_it)
        yield Scatter(patch, narrowed(view, box))
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


class Segment(NamedTuple):
    """Whole blocks of a chunk, its bytes `start` to `stop`; `address=0` goes to scratch."""

    chunk: int
    start: int
    stop: int
    address: int


class Request(NamedTuple):
    """Consecutive bytes of one file from `start` on, and the segments that they consist of."""

    file: int
    start: int
    segments: list[Segment]


class Pack(NamedTuple):
    """Packed chunks that follow each other in `file` from `byte_start` on, and their sizes."""

    file: int
    byte_start: int
    chunks: Ints
    sizes: Ints


class FileRange(NamedTuple):
    """Bytes `start` to `stop` of data file number `file`."""

    file: int
    start: int
    stop: int


class Reader:
    """Executes a plan: reads runs of blocks, checks every block, delivers the bytes.

    Every method raises Corrupt when bytes differ from what was written, and the store's errors.
    """

    def __init__(
        self, store: Store, directory: str, manifest: Manifest, plan: ReadPlan, path: ReadPath
    ) -> None:
        self._store = store
        self._directory = directory
        self._keys = file_keys(directory, manifest)
        self._manifest = manifest
        self._needs = dict(plan.needs)
        self._packed = plan.packed
        self._path = path
        self._block_nbytes = manifest.header.block_bytes
        # By the checkpoint's own name, whatever path it was opened by.
        header = manifest.header
        self._cache_keys = file_keys(f"{header.step:08d}-{header.attempt}/", manifest)
        self._counting = threading.Lock()
        self.nbytes_read = 0
        self.nbytes_cached = 0

    def read_private(self, runs: Ints) -> None:
        """Read the blocks of `runs` and put them where the plan says."""
        packs, rest = self._packs(runs)
        reads: list[Callable[[], None]] = [partial(self._read_pack, pack) for pack in packs]
        for request in self._requests(self._segments(rest, straight=True)):
            reads.append(partial(self._read_and_deliver, request))
        if self._path.readers <= 1:
            for read in reads:
                read()
            return
        with ThreadPoolExecutor(self._path.readers) as pool:
            running = [pool.submit(read) for read in reads]
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
            for future in done:
                future.result()

    def private_requests(self, runs: Ints) -> list[FileRange]:
        """What `read_private` asks the store for; nothing is read."""
        packs, rest = self._packs(runs)
        found = [
            FileRange(pack.file, pack.byte_start, pack.byte_start + int(pack.sizes.sum()))
            for pack in packs
        ]
        return found + self._ranges(self._segments(rest, straight=True))

    def shared_requests(self, run: SharedRun) -> list[FileRange]:
        """What `read_run` asks the store for; nothing is read."""
        return self._ranges(self._segments(np.array([[run.start, run.stop]]), straight=False))

    def _ranges(self, segments: Iterator[Segment]) -> list[FileRange]:
        return [
            FileRange(
                request.file,
                request.start,
                request.start + sum(s.stop - s.start for s in request.segments),
            )
            for request in self._requests(segments)
        ]

    def _packs(self, runs: Ints) -> tuple[list[Pack], Ints]:
        """The packed chunks of `runs` that are read together, and the runs without them."""
        chunks = np.fromiter(self._packed, np.int64, len(self._packed))
        blocks = expanded(runs[:, 0], runs[:, 1])
        table = self._manifest.chunks
        chunks = chunks[np.isin(table.first_block[chunks], blocks)]
        file, start = table.file[chunks], table.byte_start[chunks].astype(np.int64)
        order = np.lexsort((start, file))
        chunks, file, start = chunks[order], file[order], start[order]
        sizes = table.numel[chunks].astype(np.int64) * self._itemsizes(chunks)
        is_new = (file[1:] != file[:-1]) | (start[1:] != start[:-1] + sizes[:-1])
        packs = []
        for group in np.split(np.arange(len(chunks)), np.flatnonzero(is_new) + 1):
            if len(group) < PACKED_COUNT_MIN:
                continue
            count = -(-int(sizes[group].sum()) // PACK_NBYTES_MAX)
            for part in np.array_split(group, count):
                at = part[0]
                packs.append(Pack(int(file[at]), int(start[at]), chunks[part], sizes[part]))
        taken = [table.first_block[pack.chunks] for pack in packs]
        rest = blocks[~np.isin(blocks, np.concatenate(taken))] if taken else blocks
        return packs, joined(np.stack([rest, rest + 1], axis=1))

    def _itemsizes(self, chunks: Ints) -> Ints:
        tensors = np.searchsorted(self._manifest.chunks.first, chunks, side="right") - 1
        dtypes = self._manifest.dtypes
        return np.array([DTYPES[dtypes[tensor]].itemsize for tensor in tensors.tolist()], np.int64)

    def _read_pack(self, pack: Pack) -> None:
        sizes = pack.sizes.tolist()
        data = memoryview(bytearray(sum(sizes)))
        expected = self._manifest.checksums[self._manifest.chunks.first_block[pack.chunks]]

        def check() -> None:
            found = np.array(crc32c_of_each(data, sizes), dtype=np.uint32)
            if len(bad := np.flatnonzero(found != expected)):
                raise corrupt_block(self._manifest, self._directory, int(pack.chunks[bad[0]]), 0)

        self._get(pack.file, pack.byte_start, [data], check)
        source = address_of(data)
        packed = self._packed
        for chunk, nbytes in zip(pack.chunks.tolist(), sizes, strict=True):
            copy_bytes(packed[chunk], source, nbytes)
            source += nbytes

    def _need(self, chunk: int) -> Need:
        if chunk not in self._needs:
            self._needs[chunk] = whole_need(self._manifest, chunk, self._packed[chunk])
        return self._needs[chunk]

    def read_run(self, run: SharedRun) -> memoryview:
        """The checked bytes of a shared run, chunk after chunk."""
        segments = list(self._segments(np.array([[run.start, run.stop]]), straight=False))
        buffer = memoryview(bytearray(sum(s.stop - s.start for s in segments)))
        filled = 0
        for request in self._requests(iter(segments)):
            nbytes = sum(s.stop - s.start for s in request.segments)
            self._fetch(request, buffer[filled : filled + nbytes])
            filled += nbytes
        return buffer

    def run_nbytes(self, run: SharedRun) -> int:
        """The length of what `read_run` returns."""
        span = np.array([[run.start, run.stop]])
        return sum(s.stop - s.start for s in self._segments(span, straight=False))

    def deliver_run(self, run: SharedRun, data: memoryview) -> None:
        """Put the bytes of a shared run, as `read_run` returns them, where this rank wants them."""
        for segment in self._segments(np.array([[run.start, run.stop]]), straight=False):
            nbytes = segment.stop - segment.start
            self._deliver(segment, data[:nbytes])
            data = data[nbytes:]

    def _read_and_deliver(self, request: Request) -> None:
        scratch_nbytes = sum(s.stop - s.start for s in request.segments if not s.address)
        scratch = memoryview(bytearray(scratch_nbytes))
        self._fetch(request, scratch)
        used = 0
        for segment in request.segments:
            if segment.address:
                need = self._need(segment.chunk)
                if len(need.directs) == 1 and not need.scatters:
                    continue
                self._deliver(segment, bytes_at(segment.address, segment.stop - segment.start))
                continue
            nbytes = segment.stop - segment.start
            self._deliver(segment, scratch[used : used + nbytes])
            used += nbytes

    def _fetch(self, request: Request, scratch: memoryview) -> None:
        """Read a request and check its blocks. Segments without address fill `scratch` in order."""
        buffers = []
        used = 0
        for segment in request.segments:
            nbytes = segment.stop - segment.start
            if segment.address:
                buffers.append(bytes_at(segment.address, nbytes))
            else:
                buffers.append(scratch[used : used + nbytes])
                used += nbytes

        def check() -> None:
            for segment, data in zip(request.segments, buffers, strict=True):
                self._check(segment, data)

        self._get(request.file, request.start, buffers, check)

    def _get(
        self, file: int, start: int, buffers: Sequence[memoryview], check: Callable[[], None]
    ) -> None:
        """Fill `buffers` from the cache, if what it has passes `check`, or from the store."""
        cache, root = self._path.cache, self._manifest.header.root
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if cache is not None and cache.fill(root, self._cache_keys[file], start, buffers):
            with contextlib.suppress(Corrupt):
                check()
                with self._counting:
                    self.nbytes_cached += nbytes
                return
        with self._counting:
            self.nbytes_read += nbytes
        read_into(self._store, self._keys[file], start, buffers)
        check()
        if cache is not None:
            cache.keep(root, self._cache_keys[file], start, buffers)

    def _check(self, segment: Segment, data: memoryview) -> None:
        block_nbytes = self._block_nbytes
        first = self._need(segment.chunk).first_block + segment.start // block_nbytes
        for block, start in enumerate(range(0, len(data), block_nbytes), first):
            found = crc32c(data[start : start + block_nbytes])
            if found != self._manifest.checksums[block]:
                number = (segment.start + start) // block_nbytes
                raise corrupt_block(self._manifest, self._directory, segment.chunk, number)

    def _deliver(self, segment: Segment, data: memoryview) -> None:
        """Copy the bytes of a segment to everything that wants them and does not have them."""
        need = self._need(segment.chunk)
        for direct in need.directs:
            start, stop = max(direct.start, segment.start), min(direct.stop, segment.stop)
            target = direct.address + start - direct.start
            if start < stop and target != segment.address + start - segment.start:
                source = address_of(data) + start - segment.start
                copy_bytes(target, source, stop - start)
        for scatter in need.scatters:
            self._scatter(scatter, segment, data)

    def _scatter(self, scatter: Scatter, segment: Segment, data: memoryview) -> None:
        dtype = scatter.target.dtype
        first = segment.start // dtype.itemsize
        elements = tensor_over(data, dtype, (len(data) // dtype.itemsize,))
        for patch in clip_patch(scatter.patch, first, segment.stop // dtype.itemsize):
            strides = row_major_strides(patch.source_shape)
            offset = patch.source_base - first
            offset += sum(o * s for o, s in zip(patch.source_box.offset, strides, strict=True))
            source = elements.as_strided(patch.source_box.shape, strides, offset)
            with _may_write(scatter.target):
                narrowed(scatter.target, patch.target_box).copy_(source)

    def _segments(self, runs: Ints, *, straight: bool) -> Iterator[Segment]:
        """The chunks' shares of `runs`, in order, cut to the request size.

        With `straight`, blocks that lie wholly in a target's memory are segments of their own.
        """
        block_nbytes = self._block_nbytes
        for first, last in runs.tolist():
            first_block = self._manifest.chunks.first_block
            chunk = int(np.searchsorted(first_block, first, side="right")) - 1
            while first < last:
                need = self._need(chunk)
                start = (first - need.first_block) * block_nbytes
                stop = min((last - need.first_block) * block_nbytes, need.nbytes)
                if straight and stop - start <= block_nbytes and len(need.directs) == 1:
                    direct = need.directs[0]
                    if direct.start == start and direct.stop == stop:
                        yield Segment(chunk, start, stop, direct.address)
                        first, chunk = first + 1, chunk + 1
                        continue
                yield from self._cut(chunk, start, stop, straight)
                first = need.first_block - (-need.nbytes // block_nbytes)
                chunk += 1

    def _cut(self, chunk: int, start: int, stop: int, straight: bool) -> Iterator[Segment]:
        size_max = max(self._path.request_nbytes_max, self._block_nbytes)
        size_max -= size_max % self._block_nbytes
        for low, high, address in self._straight(chunk, start, stop, straight):
            while low < high:
                size = min(size_max, high - low)
                yield Segment(chunk, low, low + size, address)
                low += size
                address = address + size if address else 0

    def _straight(
        self, chunk: int, start: int, stop: int, straight: bool
    ) -> Iterator[tuple[int, int, int]]:
        """`start` to `stop` cut into (start, stop, address): whole blocks with a target, and
        others.
        """
        block = self._block_nbytes
        end = self._need(chunk).nbytes
        for direct in sorted(self._need(chunk).directs) if straight else ():
            low = max(-(-direct.start // block) * block, start)
            high = min(direct.stop if direct.stop == end else direct.stop // block * block, stop)
            if low < high:
                if start < low:
                    yield start, low, 0
                yield low, high, direct.address + low - direct.start
                start = high
        if start < stop:
            yield start, stop, 0

    def _requests(self, segments: Iterator[Segment]) -> Iterator[Request]:
        """Segments that follow each other in a file, joined up to the request size."""
        file, start, end, joined = -1, 0, 0, list[Segment]()
        for segment in segments:
            need = self._need(segment.chunk)
            at_file = need.file
            at = need.byte_start + segment.start
            nbytes = segment.stop - segment.start
            too_long = end + nbytes - start > self._path.request_nbytes_max
            if joined and (at_file != file or at != end or too_long):
                yield Request(file, start, joined)
                joined = []
            if not joined:
                file, start = at_file, at
            joined.append(segment)
            end = at + nbytes
        if joined:
            yield Request(file, start, joined)


class ReadAhead:
    """This rank's shared runs, read by threads before they are asked for, in the order of `runs`.

    A context manager: leaving it waits for what is being read and drops it.
    """

    def __init__(self, reader: Reader, runs: Sequence[SharedRun], path: ReadPath) -> None:
        self._reader = reader
        self._waiting = deque(runs)
        self._nbytes_max = path.read_ahead_nbytes_max
        self._pool = ThreadPoolExecutor(path.readers) if path.readers > 1 else None
        self._running: dict[SharedRun, Future[memoryview]] = {}
        self._sizes: dict[SharedRun, int] = {}

    def __enter__(self) -> ReadAhead:
        self._go_on()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, runs: Sequence[SharedRun]) -> dict[SharedRun, memoryview]:
        """The checked bytes of the next runs, which must be asked for in order."""
        if self._pool is None:
            return {run: self._reader.read_run(run) for run in runs}
        for run in runs:
            if run not in self._running:
                self._start(self._waiting.popleft())
        return {run: self._running.pop(run).result() for run in runs}

    def give_back(self, runs: Iterable[SharedRun]) -> None:
        """The bytes of `runs` are not needed any more; others may be read instead."""
        for run in runs:
            self._sizes.pop(run, None)
        self._go_on()

    def _go_on(self) -> None:
        while self._pool is not None and self._waiting:
            nbytes = self._reader.run_nbytes(self._waiting[0])
            if sum(self._sizes.values()) + nbytes > self._nbytes_max:
                return
            self._start(self._waiting.popleft())

    def _start(self, run: SharedRun) -> None:
        assert self._pool is not None, "only with threads"
        self._sizes[run] = self._reader.run_nbytes(run)
        self._running[run] = self._pool.submit(self._reader.read_run, run)


def read_into(store: Store, key: str, start: int, buffers: Sequence[memoryview]) -> None:
    """`get_into` of a data file, which is Corrupt when it ends too early."""
    try:
        store.get_into(key, start, buffers)
    except ShortReadError as error:
        raise Corrupt(
            f"{error}: the file was cut. Load an older step, or restore this file from a copy."
        ) from error


def _may_write(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Tensors of inference mode take no operation in place outside of it."""
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def corrupt_block(manifest: Manifest, directory: str, chunk: int, number: int) -> Corrupt:
    """The error for a block whose bytes do not match its checksum: file, byte range and tensor."""
    chunks = manifest.chunks
    block_nbytes = manifest.header.block_bytes
    name = file_key(directory, manifest.files[int(chunks.file[chunk])])
    start = int(chunks.byte_start[chunk]) + number * block_nbytes
    stop = int(chunks.byte_start[chunk]) + min(
        (number + 1) * block_nbytes, manifest.chunk_nbytes(chunk)
    )
    fqn = manifest.fqns[manifest.tensor_of(chunk)]
    return Corrupt(
        f"{name}: block {number} of {fqn!r} (bytes {start} to {stop}) does not match its checksum; "
        "the stored bytes were changed. Load an older step, or restore this file from a copy."
    )
