"""Read stored chunks into live memory: plan, ranged reads, check, copy.

    wanted pieces x stored chunks -> needs (blocks per chunk) -> private and shared runs -> requests

Requests go by file and offset, whatever tensors the blocks are of: neighbours in a file are read
together, and small gaps between them are read over.

A block that only this rank needs is read by it, straight into the target where the target's memory
allows. A block that several ranks need is read by one of them and exchanged. From a remote file
only the wanted bytes are fetched; its holder verifies their blocks (`loading/exchange`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from itertools import compress, pairwise, repeat
from operator import not_
from typing import NamedTuple

import numpy as np
import torch

from ckpt.errors import Corrupt
from ckpt.format.checksum import Uint32s, once_more
from ckpt.format.datafile_index import read_into
from ckpt.layout.memory import CallersStreams, devices_of, narrowed, staging_buffer, tensor_over
from ckpt.layout.region import row_major_strides
from ckpt.layout.reshard import clip_patch
from ckpt.loading.block_sums import BlockSums, TableRange
from ckpt.loading.plan import (
    PACKED_COUNT_MIN,
    Ints,
    Need,
    ReadPath,
    ReadPlan,
    Scatter,
    expanded,
    file_starts,
    joined,
    length,
    pieces_of,
    plan_for_others,
    requests,
    united,
    whole_need,
)
from storage import ByteRange
from storage.page_cache import memory_left
from storage.ranges import address_of, bytes_at, copy_bytes, scatter_bytes
from storage.threads import RequestWindow, as_done

ALIGNED = 64  # so that elements of any dtype may lie there
TRIED_REQUESTS = 3  # in a row, of a way to read
KEPT_NBYTES_MAX = 8 << 20

_kept = threading.local()


class ReadPart(NamedTuple):
    """Rows `first` to `last` of the reader's blocks, whose bytes follow each other in a file.

    Of one chunk, or, with `is_pack`, of packed chunks. They are read to `address`, which is one of
    their targets, or (0) to scratch.
    """

    first: int
    last: int
    address: int = 0
    is_pack: bool = False


class Segment(NamedTuple):
    """Bytes `start` to `stop` of a chunk, whole elements; `address` is where they were read to, 0
    for scratch.
    """

    chunk: int
    start: int
    stop: int
    address: int


class ReadRange(NamedTuple):
    """Bytes `start` to `stop` of data file number `file`; `nbytes` of them are needed."""

    file: int
    start: int
    stop: int
    nbytes: int


class _Request(NamedTuple):
    """`rows` of blocks that are read together, which lie from `start` to `stop` of a data file, and
    the checksum table that comes with them.
    """

    rows: Ints
    file: int
    start: int
    stop: int
    table: TableRange | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that come, the table's included."""
        return (self.stop if self.table is None else self.table.stop) - self.start


class Reader:
    """Executes a plan: reads runs of blocks, checks every block, delivers the bytes.

    `blocks` are all blocks that the plan needs some of, `needs` what it needs: these blocks, and of
    the files that are `away`, by their numbers, exactly the wanted bytes. The runs are some of
    them. Every method raises Corrupt when bytes differ from what was written, and the store's
    errors.
    """

    def __init__(
        self, sums: BlockSums, plan: ReadPlan, path: ReadPath, away: Collection[int] = ()
    ) -> None:
        manifest = sums.manifest
        self._sums = sums
        self._store = sums.store
        self._manifest = manifest
        # A copy: packed chunks are added when they are delivered one by one.
        self._needs = dict(plan.needs)
        self._packed = plan.packed
        self._path = path
        devices = devices_of(one.target for need in plan.needs.values() for one in need.scatters)
        self._streams, self._is_pinned = CallersStreams(devices), bool(devices)
        self._own = threading.local()
        self._block_nbytes = manifest.header.block_bytes
        self.files = file_starts(manifest.file_nbytes)
        self._starts: list[int] = self.files.tolist()
        self.blocks = plan.blocks(manifest)
        # For all blocks at once, here: after a request of megabytes little of this program is left
        # in the CPU's cache, and the same for each request took a third of a load from memory.
        self._sizes = self.blocks.stop - self.blocks.start
        self._is_packed = np.isin(
            self.blocks.chunk, np.fromiter(plan.packed, np.int64, len(plan.packed))
        )
        self._cuts = self._cut_rows(np.arange(len(self._sizes)))
        self._expected: dict[int, tuple[int, Uint32s]] = {}  # by file: its first row, and sums
        self._goes_through = False  # what is cold, through the page cache
        self._counting = threading.Lock()
        self.nbytes_read = 0
        self.nbytes_passed = 0  # read over, between what is needed
        self.nbytes_cached = 0
        self.nbytes_direct = 0  # of those of the store, around the page cache
        self.needs, self.away = self.blocks.runs(), np.empty((0, 2), dtype=np.int64)
        if away:
            pieces, file = pieces_of(self.needs, self.files[:-1], self.files[1:])
            self.away = plan.wanted(manifest, away)
            here = pieces[~np.isin(file, list(away))]
            self.needs = united(np.concatenate([here, self.away]))
        self._nbytes = length(self.needs) - length(self.away)
        self._listed: set[int] = set()  # files whose tables `requests` has listed
        self._shared: set[int] = set()  # files of shared runs, and those with one run and no more
        self._shared_once: set[int] = set()

    def read_private(self, runs: Ints) -> None:
        """Read the blocks of `runs` and put them where the plan says."""
        requests = self._requests(runs)
        if self._path.cache is not None:
            keys = [self._sums.cache_keys[file] for file in {one.file for one in requests}]
            self._path.cache.expect(self._manifest.header.root, keys)
        if self._path.readers > 1:
            # From the most on: a short load is over before it has found what is right.
            readers, most = self._path.readers, self._path.in_flight_max
            window = RequestWindow(readers, most, first=most)
            # Tables that come with none of these requests are in flight with them.
            files = {one.file for one in requests}
            files -= {one.file for one in requests if one.table is not None}
            tables = map(self._sums.table_of, sorted(files))
            sized = [(partial(self._sums.read, one.file), one.stop - one.start) for one in tables]
            sized += [(partial(self._read_and_deliver, one), one.nbytes) for one in requests]
            for _ in as_done(
                _nbytes_of_read,
                sized,
                threads=readers,
                name="ckpt-read",
                window=window,
                nbytes_of=int,
                repeated=lambda: self._store.retries,
            ):
                pass
            return
        cold = [self._is_cold(request) for request in requests]
        beside, here = list(compress(requests, cold)), list(compress(requests, map(not_, cold)))
        around = partial(self._read_and_deliver, is_cold=True)
        if 0 < len(beside) < 3 * len(here) and self._has_room():
            # Around the cache, what is missing in it would be missing at the next load, too.
            beside, here = [], requests
        elif beside and self._has_room():
            # Of a short load there is nothing to try, and through the cache it is seldom slower.
            self._goes_through = self._nbytes < 8 * TRIED_REQUESTS * self._path.request_nbytes_max
            if not self._goes_through and len(beside) >= 8 * TRIED_REQUESTS:
                tried, beside = beside[: 3 * TRIED_REQUESTS], beside[3 * TRIED_REQUESTS :]
                self._goes_through = self._is_faster_through(tried)
            if self._goes_through:
                beside, here = [], [*here, *beside]
        reads = [*map(partial, repeat(around), beside)]
        cached = [*map(partial, repeat(self._read_and_deliver), here)]
        if self._path.cached_readers > 1 and len(cached) > 1 and not self._goes_through:
            reads, cached = [*reads, *cached], []
        _run_all(reads, cached, max(self._path.direct_readers, self._path.cached_readers))

    def _has_room(self) -> bool:
        return 0 < self._nbytes <= self._path.through_share_max * memory_left()

    def _is_faster_through(self, tried: Sequence[_Request]) -> bool:
        """Read cold requests around the page cache, several at once, and then through it, in a row,
        where the kernel reads ahead. Whether that was faster; then the rest is read so.

        A cold GiB on two ranks took 0.9 s around it and 0.5 s through it on a quiet machine; where
        other work took its memory and cores 1.4 s around it, and 2.5 s through it.
        """
        seconds = []
        # Around it first, while all ranks do: alone, one would find that faster than it is. Through
        # it twice, of which the better counts: reading ahead has a start, and another rank may hold
        # up one.
        for trial, around in enumerate((True, False, False)):
            some = tried[trial * TRIED_REQUESTS :][:TRIED_REQUESTS]
            reads = [partial(self._read_and_deliver, one, is_cold=around) for one in some]
            begun = time.perf_counter()
            _run_all(reads, (), self._path.direct_readers if around else 1)
            seconds.append((time.perf_counter() - begun) / sum(one.nbytes for one in some))
        return min(seconds[1:]) < 0.9 * seconds[0]

    def for_others(self, some: Sequence[Ints]) -> Reader:
        """A reader of the same checkpoint, for runs that other ranks ask for."""
        reader = Reader(self._sums, plan_for_others(self._manifest, some), self._path)
        reader.expect(self.away[:0], some)
        return reader

    def _is_cold(self, request: _Request) -> bool:
        """Whether a request is read around the page cache."""
        path = self._path
        if not path.direct_readers or self._nbytes < path.direct_nbytes_min or self._goes_through:
            return False
        if path.direct_always:
            return True
        return self._store.is_cold(
            self._sums.keys[request.file], ByteRange(request.start, request.stop)
        )

    def requests(self, runs: Ints, *, shared: bool = False) -> list[ReadRange]:
        """The ranges that reading `runs` requests from the store; nothing is read. Tables that
        earlier calls have listed are left out. `shared`: by `read_run`.
        """
        ranges = []
        for rows, file, start, stop, table in self._requests(runs, shared=shared):
            nbytes = int((self.blocks.stop[rows] - self.blocks.start[rows]).sum())
            if file not in self._listed:
                self._listed.add(file)
                if table is None:
                    ranges.append(ReadRange(*self._sums.table_of(file), 0))
                else:
                    stop = table.stop
            ranges.append(ReadRange(file, start, stop, nbytes))
        return ranges

    def expect(self, private: Ints, shared: Sequence[Ints]) -> None:
        """What this rank will read by `read_private`, and by each `read_run`."""
        files = self._files_of(np.concatenate([self.away[:0], *shared]))
        self._shared = set(files)
        self._shared_once = {file for file, count in Counter(files).items() if count == 1}
        self._shared_once -= set(self._files_of(private))

    def _files_of(self, runs: Ints) -> list[int]:
        # A run may go over the end of a file, where blocks of the next one follow at once.
        first = np.searchsorted(self.files, runs[:, 0], side="right") - 1
        last = np.searchsorted(self.files, runs[:, 1], side="left")
        files: list[int] = expanded(first, last).tolist()
        return files

    def _requests(self, runs: Ints, *, shared: bool = False) -> list[_Request]:
        """The blocks in `runs`, those of one request together. The table of a file comes with them
        where this rank makes no other request for its blocks: which would be first is chance.
        """
        requests = self._together(self.blocks.within(runs), self._path.request_nbytes_max)
        counts = Counter(request.file for request in requests)
        self._sums.expect(np.array(sorted(counts), dtype=np.int64))
        for index, request in enumerate(requests):
            file = request.file
            alone = file in self._shared_once if shared else file not in self._shared
            if alone and counts[file] == 1 and self._sums.may_join(file):
                table = self._sums.table_of(file)
                if table.start - request.stop <= self._path.gap_nbytes_max:
                    requests[index] = request._replace(table=table)
        return requests

    def _together(self, rows: Ints, nbytes_max: int) -> list[_Request]:
        """`rows` of blocks by requests of at most `nbytes_max`, or of one block."""
        blocks = self.blocks.only(rows)
        reads = requests(blocks, self.files, nbytes_max, self._path.gap_nbytes_max)
        together = []
        for read in reads:
            start, stop = int(blocks.start[read.start]), int(blocks.stop[read.stop - 1])
            file = bisect_right(self._starts, start) - 1
            base = self._starts[file]
            some = rows[read.start : read.stop]
            together.append(_Request(some, file, start - base, stop - base))
        return together

    def _groups(self, rows: Ints) -> list[range]:
        """`rows` in runs that have one place each, as far as the blocks alone tell."""
        first, stop = int(rows[0]), int(rows[-1]) + 1
        if stop - first == len(rows):
            cuts = self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, stop)]
            return [range(a, b) for a, b in pairwise([first, *cuts, stop])]
        edges = [0, *self._cut_rows(rows), len(rows)]
        return [range(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(edges)]

    def _cut_rows(self, rows: Ints) -> list[int]:
        """The positions in `rows` before which bytes are left out, or where another chunk begins
        that is not packed like the one before it.
        """
        blocks = self.blocks
        packed, chunk = self._is_packed[rows], blocks.chunk[rows]
        follows = blocks.start[rows[1:]] == blocks.stop[rows[:-1]]
        follows &= (chunk[1:] == chunk[:-1]) | (packed[1:] & packed[:-1])
        cuts: list[int] = (np.flatnonzero(~follows) + 1).tolist()
        return cuts

    def _parts(self, rows: Ints) -> Iterator[ReadPart]:
        """A request in parts that have one place each."""
        for group in self._groups(rows):
            if not self._is_packed[group.start]:
                yield from self._straight(group)
            elif len(group) >= PACKED_COUNT_MIN:
                yield ReadPart(group.start, group.stop, is_pack=True)
            else:
                for row in group:
                    yield ReadPart(row, row + 1, self._packed[int(self.blocks.chunk[row])])

    def _straight(self, group: range) -> Iterator[ReadPart]:
        """Blocks of one chunk: those that lie wholly in a target's memory, and others."""
        block, blocks = self._block_nbytes, self.blocks
        need = self._need(int(blocks.chunk[group.start]))
        first_row, row = group.start - int(blocks.number[group.start]), group.start
        for direct in sorted(need.directs):
            # Only whole blocks are read in place: the rest of a partial one would overwrite memory
            # next to the target.
            low = max(first_row - (-direct.start // block), row)
            high = -(-direct.stop // block) if direct.stop == need.nbytes else direct.stop // block
            high = min(first_row + high, group.stop)
            if low < high:
                if row < low:
                    yield ReadPart(row, low)
                start = (low - first_row) * block
                yield ReadPart(low, high, direct.address + start - direct.start)
                row = high
        if row < group.stop:
            yield ReadPart(row, group.stop)

    def _read_and_deliver(self, request: _Request, is_cold: bool = False) -> None:
        parts = list(self._parts(request.rows))
        scratch = self._scratch(request.stop - request.start + 2 * ALIGNED * len(parts))
        buffers: list[memoryview] = []
        read: list[memoryview] = []
        for index, part in enumerate(parts):
            start, stop = self._extent(part)
            if index and (gap := start - self._extent(parts[index - 1])[1]):
                # Of its own: what is kept in a cache must be what lies in the file.
                buffers.append(scratch[:gap])
                scratch = scratch[gap + -gap % ALIGNED :]
            nbytes = stop - start
            read.append(bytes_at(part.address, nbytes) if part.address else scratch[:nbytes])
            scratch = scratch if part.address else scratch[nbytes + -nbytes % ALIGNED :]
            buffers.append(read[-1])

        def check() -> None:
            for part, data in zip(parts, read, strict=True):
                self._check(part.first, part.last, data)

        self._get(request, buffers, sum(data.nbytes for data in read), check, direct=is_cold)
        with self._streams.entered():
            for part, data in zip(parts, read, strict=True):
                if part.is_pack:
                    rows = slice(part.first, part.last)
                    sizes = self._sizes[rows].tolist()
                    chunks = self.blocks.chunk[rows].tolist()
                    scatter_bytes(list(map(self._packed.__getitem__, chunks)), data, sizes)
                    continue
                need = self._need(int(self.blocks.chunk[part.first]))
                # The request has put the bytes into their only target already.
                if not part.address or len(need.directs) > 1 or need.scatters:
                    self._deliver(self._segment(part.first, part.last, part.address), data)

    def _scratch(self, nbytes: int) -> memoryview:
        """This thread's memory for what is not read to where it belongs. It is the same for each
        request, and a few megabytes for each load: fresh memory takes longer than a read from
        memory. Pinned where a device copies from it.
        """
        own = self._own if self._is_pinned or nbytes > KEPT_NBYTES_MAX else _kept
        # A forked child has its parent's, as the same memory.
        pid, memory = getattr(own, "memory", (0, memoryview(b"")))
        if pid != os.getpid() or len(memory) < nbytes:
            memory = staging_buffer(nbytes, pinned=self._is_pinned)
            own.memory = os.getpid(), memory
        return memory

    def _extent(self, part: ReadPart) -> tuple[int, int]:
        return int(self.blocks.start[part.first]), int(self.blocks.stop[part.last - 1])

    def _segment(self, first: int, last: int, address: int = 0) -> Segment:
        start = int(self.blocks.number[first]) * self._block_nbytes
        nbytes = int(self.blocks.stop[last - 1] - self.blocks.start[first])
        return Segment(int(self.blocks.chunk[first]), start, start + nbytes, address)

    def _need(self, chunk: int) -> Need:
        if chunk not in self._needs:
            self._needs[chunk] = whole_need(self._manifest, chunk, self._packed[chunk])
        return self._needs[chunk]

    def read_run(self, runs: Ints) -> memoryview:
        """The bytes of `runs`, one after the other, of blocks that are checked."""
        blocks, requests = self.blocks, self._requests(runs, shared=True)
        begin = int(blocks.start[requests[0].rows[0]])
        # One buffer for all requests; what lies between the runs is cut out at the end.
        nbytes = int(blocks.stop[requests[-1].rows[-1]]) - begin
        buffer = np.empty(nbytes, np.uint8).data
        for request in requests:
            rows = request.rows
            start, stop = int(blocks.start[rows[0]]), int(blocks.stop[rows[-1]])
            data = buffer[start - begin : stop - begin]
            check = partial(self._check_all, rows, data)
            self._get(request, [data], data.nbytes, check, direct=self._is_cold(request))
        if length(runs) == len(buffer):
            return buffer
        parts = [buffer[start:stop] for start, stop in (runs - begin).tolist()]
        return memoryview(bytearray().join(parts))

    def deliver_run(self, runs: Ints, data: memoryview) -> None:
        """Put the bytes of `runs`, as `read_run` returns them, where this rank wants them."""
        blocks = self.blocks
        pieces, row = pieces_of(runs, blocks.start, blocks.stop)
        chunk = blocks.chunk[row]
        cuts = np.flatnonzero((chunk[1:] != chunk[:-1]) | (row[1:] > row[:-1] + 1)) + 1
        with self._streams.entered():
            for some, rows in zip(np.split(pieces, cuts), np.split(row, cuts), strict=True):
                # Of blocks that follow each other in a chunk.
                first, last = int(rows[0]), int(rows[-1]) + 1
                start, stop = int(blocks.start[first]), int(blocks.stop[last - 1])
                nbytes = length(some)
                self._put(joined(some), self._segment(first, last), start, stop, data[:nbytes])
                data = data[nbytes:]

    def _put(self, pieces: Ints, blocks: Segment, start: int, stop: int, data: memoryview) -> None:
        """Deliver `pieces` of blocks that lie from `start` to `stop`, whose bytes are `data`."""
        sizes = (pieces[:, 1] - pieces[:, 0]).tolist()
        wanted, _ = pieces_of(np.array([[start, stop]]), self.away[:, 0], self.away[:, 1])
        if len(pieces) > 1 and length(wanted) == len(data):
            # All that is wanted of these blocks. Put where they lie in them, thousands of pieces
            # are delivered at once; what is between them is not looked at.
            space = memoryview(bytearray(stop - start))
            targets = (pieces[:, 0] - start + address_of(space)).tolist()
            scatter_bytes(targets, data, sizes)
            self._deliver(blocks, space)
            return
        base = start - blocks.start
        for (low, high), nbytes in zip((pieces - base).tolist(), sizes, strict=True):
            self._deliver(Segment(blocks.chunk, low, high, 0), data[:nbytes])
            data = data[nbytes:]

    def _get(
        self,
        request: _Request,
        buffers: Sequence[memoryview],
        needed: int,
        check_blocks: Callable[[], None],
        *,
        direct: bool = False,
    ) -> None:
        """Fill `buffers` from the start of a block on: from the cache, if what it has passes the
        checks, or from the store. `needed` of their bytes are; the rest is read over. The table of
        the request follows.
        """
        file, start = request.file, request.start
        table = memoryview(b"")
        if request.table is not None:
            table = memoryview(bytearray(request.table.stop - request.table.start))
            buffers = [*buffers, memoryview(bytearray(request.table.start - request.stop)), table]

        def check() -> None:
            if table.nbytes:
                self._sums.take(file, table)
            check_blocks()

        cache, root = self._path.cache, self._manifest.header.root
        if cache is not None and cache.fill(root, self._sums.cache_keys[file], start, buffers):
            # Bytes of a cache that do not match are no damage of the checkpoint: read the store.
            with contextlib.suppress(Corrupt):
                check()
                with self._counting:
                    self.nbytes_cached += needed
                return
        with self._counting:
            self.nbytes_read += needed
            self.nbytes_direct += direct * needed
            self.nbytes_passed += sum(buffer.nbytes for buffer in buffers) - needed

        def read() -> None:
            read_into(self._store, self._sums.keys[file], start, buffers, direct=direct)
            check()

        once_more(read, self._store)
        if cache is not None:
            # After the check: nothing is gained by keeping what every load would have to read
            # again.
            cache.keep(root, self._sums.cache_keys[file], start, buffers)

    def _check_all(self, rows: Ints, data: memoryview) -> None:
        """Raise Corrupt unless `data` are the blocks `rows`, with what lies between them."""
        begin = int(self.blocks.start[rows[0]])
        for group in self._groups(rows):
            start, stop = self.blocks.start[group.start], self.blocks.stop[group.stop - 1]
            self._check(group.start, group.stop, data[int(start) - begin : int(stop) - begin])

    def _check(self, first: int, last: int, data: memoryview) -> None:
        """Raise Corrupt unless `data` are the blocks `first` to `last`."""
        rows = slice(first, last)
        chunk, number = self.blocks.chunk[rows], self.blocks.number[rows]
        file = bisect_right(self._starts, int(self.blocks.start[first])) - 1
        # Looked up once per file and not once per request.
        if file not in self._expected:
            low, high = np.searchsorted(self.blocks.start, self.files[file : file + 2]).tolist()
            chunks, numbers = self.blocks.chunk[low:high], self.blocks.number[low:high]
            self._expected[file] = low, self._sums.of_blocks(chunks, numbers)
        low, sums = self._expected[file]
        known = sums[first - low : last - low]
        self._sums.check(data, self._sizes[rows], chunk, number, known)

    def _deliver(self, segment: Segment, data: memoryview) -> None:
        """Copy the bytes of a segment to every target that does not have them yet."""
        need = self._need(segment.chunk)
        for direct in need.directs:
            start, stop = max(direct.start, segment.start), min(direct.stop, segment.stop)
            target = direct.address + start - direct.start
            # What was read in place need not be copied.
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
            with may_write(scatter.target):
                narrowed(scatter.target, patch.target_box).copy_(source)


def _nbytes_of_read(read: tuple[Callable[[], object], int]) -> int:
    run, nbytes = read
    run()
    return nbytes


def _run_all(
    beside: Sequence[Callable[[], None]], here: Iterable[Callable[[], None]], threads: int
) -> None:
    """Run `beside` in up to `threads` threads, and `here`, in turn, in this one meanwhile.

    Raises the first error. The rest need not be read then: the load fails anyway.
    """
    with ThreadPoolExecutor(max(threads, 1)) as pool:  # starts no thread that it does not need
        running = [pool.submit(read) for read in beside]
        try:
            for read in here:
                read()
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            for future in running:
                # Without this, leaving the pool would read all that is left.
                future.cancel()


def may_write(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """The context in which `tensor` may be changed: torch refuses in-place operations on inference
    tensors outside of inference mode.
    """
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()
