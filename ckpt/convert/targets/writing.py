"""Write planned files of any format: what fills and finishes their parts.

    fill (read, cast, checksum) -> finish (late bytes, which need the checksums before) -> send

A part is filled by reading straight into its buffer, so memory is bounded by the number of threads,
whatever the size of the files. `ckpt.format.object_parts` has the threads and the store.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple, TypeAlias

import torch

from ckpt.convert.sources.source import CheckpointSource, ReadRequest
from ckpt.convert.targets.files import Data, FilePiece, Fixed, Late, PlannedFile
from ckpt.format.checksum import joined_crc32
from ckpt.format.object_parts import filled_parts, part_nbytes_for, send_parts, write_filled
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.memory import tensor_over
from ckpt.layout.region import Span
from storage import Store

MIB = 1 << 20
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
    write_filled(
        writing.store,
        file.key,
        file.nbytes,
        fill=lambda start, part: fill_part(writing.source, file.pieces, start, part),
        finish=Finishing(file).finish,
        threads=writing.threads,
        part_nbytes=writing.part_nbytes,
        durable=True,
        add=meter.add,
    )


def write_share(
    writing: Writing, file: PlannedFile, token: str, share: tuple[int, int], meter: Meter
) -> dict[int, str]:
    """Write parts `share` of a file that others write with us; returns the receipts of them."""
    first, stop = share
    part_nbytes = part_nbytes_for(file.nbytes, writing.part_nbytes)
    writer = writing.store.joint(file.key, file.nbytes, part_nbytes=part_nbytes, token=token)
    threads = max(1, writing.threads)
    try:
        parts = filled_parts(
            file.nbytes,
            part_nbytes,
            fill=lambda start, part: fill_part(writing.source, file.pieces, start, part),
            finish=lambda start, part, counted: None,
            threads=threads,
            first=first,
            stop=stop,
        )
        with closing(parts):
            send_parts(writer, parts, threads=threads, add=meter.add, first=first)
    finally:
        writer.close()
    return writer.receipts


class Finishing:
    """Fills in the late bytes of a file's parts, from the crc32 of the data before them."""

    def __init__(self, file: PlannedFile) -> None:
        self._checksums = [0] * file.checksums
        self._seen = [False] * file.checksums
        self._late = [piece for piece in file.pieces if isinstance(piece, Late)]
        self._next_late = 0

    def finish(self, start: int, part: memoryview, counted: list[Counted]) -> None:
        """Complete the part that begins at byte `start`. Parts come in order, so that all data
        before a late piece has passed when its bytes are due.
        """
        for number, crc32, nbytes in counted:
            before = self._checksums[number]
            self._checksums[number] = (
                joined_crc32(before, crc32, nbytes) if self._seen[number] else crc32
            )
            self._seen[number] = True
        stop = start + len(part)
        while self._next_late < len(self._late):
            late = self._late[self._next_late]
            if late.start >= stop:
                return
            low, high = max(late.start, start), min(late.start + late.nbytes, stop)
            if low < high:
                made = late.make(self._checksums)
                part[low - start : high - start] = made[low - late.start : high - late.start]
            if late.start + late.nbytes > stop:
                return  # the rest of it is in the next part, and is made once more for that
            self._next_late += 1


def fill_part(
    source: CheckpointSource, pieces: Sequence[FilePiece], start: int, part: memoryview
) -> list[Counted]:
    """Fill `part`, which begins at byte `start` of a file, with its `pieces`, but for late ones.

    Returns the crc32 of the data in it, where the file needs them.
    """
    stop = start + len(part)
    direct: list[ReadRequest] = []
    counted: list[tuple[int, memoryview]] = []
    first = max(bisect_right(pieces, start, key=lambda piece: piece.start) - 1, 0)
    for piece in islice(pieces, first, None):
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
