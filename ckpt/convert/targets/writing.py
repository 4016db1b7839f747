"""Write planned files: parts are filled by several threads, finished in order, written at once.

    fill (read, cast, checksum) -> finish (late bytes, which need the checksums before) -> write

A part is filled by reading straight into its buffer, so memory is bounded by the number of threads,
whatever the size of the files. A file appears whole or not at all.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from ckpt.convert.sources.source import CheckpointSource, ReadRequest
from ckpt.convert.targets.files import Data, Fixed, Late, PlannedFile
from ckpt.format.crc_combine import joined_crc32
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.memory import aligned_buffer, tensor_over
from ckpt.layout.region import Span
from storage import Store

MIB = 1 << 20
PART_NBYTES = 16 * MIB
PARTS_MAX = 10_000  # S3's limit for one object
CAST_SCRATCH_NBYTES = 8 * MIB

Progress: TypeAlias = Callable[[int, int], None]


class Meter:
    """Adds up the bytes done and reports them to the caller; used from one thread."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


class Writing(NamedTuple):
    """From where, to where, and with how many threads files are written."""

    source: CheckpointSource
    store: Store
    threads: int
    part_nbytes: int


class Counted(NamedTuple):
    """The crc32 of some bytes of the data `number`, all of them in one part."""

    number: int
    crc32: int
    nbytes: int


def write_file(writing: Writing, file: PlannedFile, meter: Meter) -> None:
    """Create one file. Raises the source's and the store's errors; nothing is visible then."""
    if file.nbytes == 0:
        writing.store.put_if_absent(file.key, b"")
        return
    part_nbytes = part_nbytes_of(writing, file)
    finishing = Finishing(file)
    # Around the page cache: a third of the CPU seconds, and what others have cached stays.
    is_large = file.nbytes >= PART_NBYTES
    with writing.store.create(
        file.key, file.nbytes, part_nbytes=part_nbytes, direct=is_large
    ) as writer:
        in_order(
            Parts(file.nbytes, part_nbytes, writing.threads),
            fill=lambda start, part: fill_part(writing.source, file, start, part),
            finish=finishing.finish,
            write=lambda index, part: writer.write_part(index, [part]),
            meter=meter,
        )


def write_share(
    writing: Writing, file: PlannedFile, token: str, share: tuple[int, int], meter: Meter
) -> dict[int, str]:
    """Write parts `share` of a file that others write with us; returns the receipts of them."""
    part_nbytes = part_nbytes_of(writing, file)
    writer = writing.store.joint(file.key, file.nbytes, part_nbytes=part_nbytes, token=token)
    try:
        if share[0] < share[1]:
            in_order(
                Parts(file.nbytes, part_nbytes, writing.threads, *share),
                fill=lambda start, part: fill_part(writing.source, file, start, part),
                finish=lambda start, part, counted: None,
                write=lambda index, part: writer.write_part(index, [part]),
                meter=meter,
            )
    finally:
        writer.close()
    return writer.receipts


def part_nbytes_of(writing: Writing, file: PlannedFile) -> int:
    """The size of the parts of a file: larger than requested where there would be too many."""
    needed = -(-file.nbytes // PARTS_MAX)
    return writing.part_nbytes if needed <= writing.part_nbytes else -(-needed // MIB) * MIB


class Parts(NamedTuple):
    """`nbytes` in parts of `part_nbytes`, `threads` of them in memory at once."""

    nbytes: int
    part_nbytes: int
    threads: int
    first: int = 0
    stop: int = -1  # one past the last part; -1 for all


T = TypeVar("T")


def in_order(
    parts: Parts,
    *,
    fill: Callable[[int, memoryview], T],
    finish: Callable[[int, memoryview, T], None],
    write: Callable[[int, memoryview], None],
    meter: Meter,
) -> None:
    """Fill and write all parts in threads, and finish each between, in order, in this thread.

    `fill` and `finish` get the part's first byte and its memory, `write` its index. The first error
    of any of them is raised when all threads are done.
    """
    nbytes, part_nbytes, threads, following, count = parts
    if count < 0:
        count = -(-nbytes // part_nbytes)
    threads = max(1, min(threads, count - following))
    # Buffers are used again for every part: fresh memory costs more than the copy. They are given
    # out here, in the order of the parts, so that no part waits for a later one.
    free = [aligned_buffer(min(part_nbytes, nbytes)) for _ in range(threads)]
    filling: deque[tuple[int, memoryview, Future[T]]] = deque()
    writing: deque[tuple[memoryview, Future[None]]] = deque()
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="ckpt-fill") as fillers,
        ThreadPoolExecutor(threads, thread_name_prefix="ckpt-write") as writers,
    ):
        while following < count or filling or writing:
            while writing and (writing[0][1].done() or not (free or filling)):
                buffer, done = writing.popleft()
                done.result()
                free.append(buffer)
            while free and following < count:
                buffer, start = free.pop(), following * part_nbytes
                part = buffer[: min(part_nbytes, nbytes - start)]
                filling.append((following, buffer, fillers.submit(fill, start, part)))
                following += 1
            if filling:
                index, buffer, filled = filling.popleft()
                found = filled.result()
                start = index * part_nbytes
                part = buffer[: min(part_nbytes, nbytes - start)]
                finish(start, part, found)
                writing.append((buffer, writers.submit(write, index, part)))
                meter.add(len(part))
            elif following == count and writing:
                writing.popleft()[1].result()


class Finishing:
    """Keeps the crc32 of each data of a file, and makes the late bytes of its parts."""

    def __init__(self, file: PlannedFile) -> None:
        self._checksums = [0] * file.checksums
        self._seen = [False] * file.checksums
        self._late = [piece for piece in file.pieces if isinstance(piece, Late)]
        self._at = 0

    def finish(self, start: int, part: memoryview, counted: list[Counted]) -> None:
        for number, crc32, nbytes in counted:
            before = self._checksums[number]
            self._checksums[number] = (
                joined_crc32(before, crc32, nbytes) if self._seen[number] else crc32
            )
            self._seen[number] = True
        stop = start + len(part)
        while self._at < len(self._late):
            late = self._late[self._at]
            if late.start >= stop:
                return
            low, high = max(late.start, start), min(late.start + late.nbytes, stop)
            if low < high:
                made = late.make(self._checksums)
                part[low - start : high - start] = made[low - late.start : high - late.start]
            if late.start + late.nbytes > stop:
                return
            self._at += 1


def fill_part(
    source: CheckpointSource, file: PlannedFile, start: int, part: memoryview
) -> list[Counted]:
    """Fill `part` with the bytes of `file` from `start` on, but for late ones.

    Returns the crc32 of the data in it, where the file needs them.
    """
    stop = start + len(part)
    direct: list[ReadRequest] = []
    counted: list[tuple[int, memoryview]] = []
    first = max(bisect_right(file.pieces, start, key=lambda piece: piece.start) - 1, 0)
    for piece in islice(file.pieces, first, None):
        if piece.start >= stop:
            break
        low, high = max(piece.start, start), min(piece.start + piece.nbytes, stop)
        if low >= high or isinstance(piece, Late):
            continue
        memory = part[low - start : high - start]
        if isinstance(piece, Fixed):
            memory[:] = piece.data[low - piece.start : high - piece.start]
            continue
        _fill_data(source, piece, (low - piece.start, high - piece.start), memory, direct)
        if piece.number >= 0:
            counted.append((piece.number, memory))
    source.fill(direct)
    return [Counted(number, zlib.crc32(memory), len(memory)) for number, memory in counted]


def _fill_data(
    source: CheckpointSource,
    piece: Data,
    within: tuple[int, int],
    memory: memoryview,
    direct: list[ReadRequest],
) -> None:
    """Bytes `within` a piece of data: noted in `direct`, or read and cast here."""
    output, width = piece.output, piece.output.dtype.itemsize
    assert within[0] % width == 0 and within[1] % width == 0, "parts and data are aligned"
    first = piece.span.start
    span = Span(first + within[0] // width, first + within[1] // width)
    target = tensor_over(memory, torch_dtype(output.dtype.name), (span.numel,))
    if output.dtype.name == output.tensor.dtype:
        direct.append(ReadRequest(output.tensor.fqn, span, target))
        return
    dtype = torch_dtype(output.tensor.dtype)
    step = CAST_SCRATCH_NBYTES // dtype.itemsize
    for start in range(span.start, span.stop, step):
        band = Span(start, min(start + step, span.stop))
        scratch = torch.empty(band.numel, dtype=dtype)
        source.fill([ReadRequest(output.tensor.fqn, band, scratch)])
        target[band.start - span.start : band.stop - span.start].copy_(scratch)
