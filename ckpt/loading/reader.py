"""Read stored chunks into live memory: plan, ranged reads, check, copy.

    wanted pieces x stored chunks -> needs (blocks per chunk) -> private and shared runs -> requests

A block that only this rank needs is read by it, straight into the target where the target's memory
allows. A block that several ranks need is read by one of them and exchanged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ckpt.commit.locate import file_key, file_keys
from ckpt.errors import Corrupt
from ckpt.format.checksum import crc32c, crc32c_of_each
from ckpt.format.manifest import Manifest
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.memory import (
    CallersStreams,
    address_of,
    bytes_at,
    copy_bytes,
    devices_of,
    narrowed,
    tensor_over,
)
from ckpt.layout.region import row_major_strides
from ckpt.layout.reshard import clip_patch
from ckpt.loading.plan import (
    PACK_NBYTES_MAX,
    PACKED_COUNT_MIN,
    Need,
    ReadPath,
    ReadPlan,
    Scatter,
    joined,
    whole_need,
)
from ckpt.loading.shared_reads import Ints, SharedRun, expanded
from storage import ShortReadError, Store


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


class ReadRange(NamedTuple):
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
        self._streams = CallersStreams(
            devices_of(one.target for need in plan.needs.values() for one in need.scatters)
        )
        self._block_nbytes = manifest.header.block_bytes
        # By the checkpoint's own name and not by its path, so that a copy of it shares the cache.
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
            # After the first error the rest need not be read: the load fails anyway.
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
            for future in done:
                future.result()

    def private_requests(self, runs: Ints) -> list[ReadRange]:
        """The ranges that `read_private` requests from the store; nothing is read."""
        packs, rest = self._packs(runs)
        ranges = [
            ReadRange(pack.file, pack.byte_start, pack.byte_start + int(pack.sizes.sum()))
            for pack in packs
        ]
        return ranges + self._ranges(self._segments(rest, straight=True))

    def shared_requests(self, run: SharedRun) -> list[ReadRange]:
        """The ranges that `read_run` requests from the store; nothing is read."""
        return self._ranges(self._segments(np.array([[run.start, run.stop]]), straight=False))

    def _ranges(self, segments: Iterator[Segment]) -> list[ReadRange]:
        return [
            ReadRange(
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
        # Packed chunks that other ranks need, too, are read as shared runs.
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
                head = part[0]
                packs.append(Pack(int(file[head]), int(start[head]), chunks[part], sizes[part]))
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
            actual = np.array(crc32c_of_each(data, sizes), dtype=np.uint32)
            if len(bad := np.flatnonzero(actual != expected)):
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
        with self._streams.entered():
            self._deliver_all(request, scratch)

    def _deliver_all(self, request: Request, scratch: memoryview) -> None:
        used = 0
        for segment in request.segments:
            if segment.address:
                need = self._need(segment.chunk)
                # The request has put the bytes into their only target already.
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
            # Bytes of a cache that do not match are no damage of the checkpoint: read the store.
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
            # After the check: nothing is gained by keeping what every load would have to read
            # again.
            cache.keep(root, self._cache_keys[file], start, buffers)

    def _check(self, segment: Segment, data: memoryview) -> None:
        block_nbytes = self._block_nbytes
        first = self._need(segment.chunk).first_block + segment.start // block_nbytes
        for block, start in enumerate(range(0, len(data), block_nbytes), first):
            actual = crc32c(data[start : start + block_nbytes])
            if actual != self._manifest.checksums[block]:
                number = (segment.start + start) // block_nbytes
                raise corrupt_block(self._manifest, self._directory, segment.chunk, number)

    def _deliver(self, segment: Segment, data: memoryview) -> None:
        """Copy the bytes of a segment to every target that does not have them yet."""
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
                # One past the last block of the chunk: a run may continue in the next chunk.
                first = need.first_block - (-need.nbytes // block_nbytes)
                chunk += 1

    def _cut(self, chunk: int, start: int, stop: int, straight: bool) -> Iterator[Segment]:
        # Whole blocks in every request, since a checksum covers no less.
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
            # Only whole blocks are read in place: the rest of a partial one would land on the
            # memory beside the target.
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
            position = need.byte_start + segment.start
            nbytes = segment.stop - segment.start
            too_long = end + nbytes - start > self._path.request_nbytes_max
            if joined and (need.file != file or position != end or too_long):
                yield Request(file, start, joined)
                joined = []
            if not joined:
                file, start = need.file, position
            joined.append(segment)
            end = position + nbytes
        if joined:
            yield Request(file, start, joined)


def read_into(store: Store, key: str, start: int, buffers: Sequence[memoryview]) -> None:
    """`get_into` of a data file. Raises Corrupt when the file ends too early."""
    try:
        store.get_into(key, start, buffers)
    except ShortReadError as error:
        raise Corrupt(
            f"{error}: the file was cut. Load an older step, or restore this file from a copy."
        ) from error


def _may_write(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """The context in which `tensor` may be changed: torch refuses in-place operations on inference
    tensors outside of inference mode.
    """
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
