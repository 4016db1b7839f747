"""The data files of one save in host memory, part by part: copied first, written later.

A part is an aligned buffer with exactly the bytes of the file at that place, so it is written as it
is. Buffers are reused from save to save. When the budget allows fewer buffers than parts, the other
parts are copied as written parts free their buffers.

The bytes before the first tensor byte depend on the attempt, which the ranks agree on after the
first copies are made; space is reserved for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from ckpt.errors import InvalidState
from ckpt.format.datafile import FileEntries
from ckpt.format.datafile_builder import DataFileBuilder
from ckpt.format.object_parts import PartSender, part_nbytes_for, sending
from ckpt.format.part import PartFile
from ckpt.format.rank_files import DataFile, RankContents, rank_files
from ckpt.layout.buffers import address_of, copy_bytes
from ckpt.layout.memory import SideStreams, devices_of, tensor_over
from ckpt.saving.write import MIB, PartStream, Source, Staging, WritePath, copy_elements
from storage import Store
from storage.forks import ForkSafeLock

# Reserved in each header for what this rank cannot know yet: rank 0's notes and paths of modules.
HEADER_SLACK_NBYTES = 4096


class StagedRange(NamedTuple):
    """Bytes `start` to `stop` of a source, which are copied to byte `offset` of a part."""

    source: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its sources are those from `first` on, its tensor bytes start at `data_start`, and
    `parts` are what is copied into each of its parts.
    """

    entries: FileEntries
    first: int
    data_start: int
    part_nbytes: int
    parts: tuple[tuple[StagedRange, ...], ...]


def plan_files(
    files: Sequence[FileEntries], *, contents: RankContents, path: WritePath, part_nbytes_min: int
) -> tuple[FilePlan, ...]:
    """Divide `files` into parts. Of `contents`, only what makes headers long need be right.

    No part is smaller than `part_nbytes_min`: what follows the tensors may need a second one.
    """
    planned = rank_files(files, contents)
    starts = [len(file.layout.header) + HEADER_SLACK_NBYTES for file in planned]
    largest = max(start + file.nbytes for start, file in zip(starts, files, strict=True))
    # An eighth more, for values and checksums: the parts are cut before their sizes are known.
    part_nbytes = part_nbytes_for(largest + largest // 8, path.part_nbytes)
    # Whole MiB and the same for all files, so that any buffer serves any part of any save.
    part_nbytes = min(part_nbytes, -(-max(largest, part_nbytes_min) // MIB) * MIB)
    plans = []
    first = 0
    for start, file in zip(starts, files, strict=True):
        parts = _plan_parts(file, first, start, part_nbytes)
        plans.append(FilePlan(file, first, start, part_nbytes, parts))
        first += len(file.chunks)
    return tuple(plans)


def _plan_parts(
    file: FileEntries, first: int, data_start: int, part_nbytes: int
) -> tuple[tuple[StagedRange, ...], ...]:
    parts: list[list[StagedRange]] = [
        [] for _ in range(-(-(data_start + file.nbytes) // part_nbytes))
    ]
    position = data_start
    for source, chunk in enumerate(file.chunks, first):
        start = 0
        while start < chunk.nbytes:
            part, offset = divmod(position, part_nbytes)
            stop = min(chunk.nbytes, start + part_nbytes - offset)
            parts[part].append(StagedRange(source, start, stop, offset))
            position += stop - start
            start = stop
    return tuple(map(tuple, parts))


class CopyOrder(NamedTuple):
    """Which ranges of each part are copied first, and which later; one item per part of all files.

    `devices` are those with streams of their own that some sources are on.
    """

    first: tuple[tuple[StagedRange, ...], ...]
    later: tuple[tuple[StagedRange, ...], ...]
    later_nbytes: int
    devices: tuple[torch.device, ...]


def copy_order(
    files: Sequence[FilePlan], sources: Sequence[Source], first: Collection[int]
) -> CopyOrder:
    """The order that copies the sources with the indices `first` first, the others later."""
    plans = [part for file in files for part in file.parts]
    later = [tuple(one for one in plan if one.source not in first) for plan in plans]
    return CopyOrder(
        tuple(tuple(one for one in plan if one.source in first) for plan in plans),
        tuple(later),
        sum(one.stop - one.start for ranges in later for one in ranges),
        devices_of(source.view for source in sources if not source.address),
    )


_NO_BUFFER = memoryview(b"")


class Hold:
    """Keeps the memory of one save from being used again until `end`. Thread-safe."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._release = staging.hold()
        self._kept: list[memoryview] = []
        self._is_over = False
        self._lock = ForkSafeLock()

    def give_back(self, buffer: memoryview) -> None:
        """The save itself needs this buffer no more."""
        with self._lock:
            if not self._is_over:
                self._kept.append(buffer)
                return
        self._staging.give_back(buffer)

    def end(self) -> None:
        """Give everything back that was kept. May be repeated."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            kept, self._kept = self._kept, []
        if not was_over:
            self._release()
        for buffer in kept:
            self._staging.give_back(buffer)


@dataclass(slots=True)
class _StagedPart:
    """A part, its number in the save, and its memory. `missing` is still to be copied; an empty
    buffer means none.
    """

    number: int
    ranges: Sequence[StagedRange]
    missing: Sequence[StagedRange]
    buffer: memoryview = _NO_BUFFER


class Image:
    """All files of one save, partly in memory. Used by one thread at a time.

    At most `buffers_max` parts, which is at least two, are in memory at once. `sources` and the
    memory that they point to must stay until everything is copied. The constructor copies what
    `order` lists first; there must be buffers for it.
    """

    def __init__(
        self,
        files: Sequence[FilePlan],
        sources: Sequence[Source],
        staging: Staging,
        *,
        order: CopyOrder,
        buffers_max: int,
    ) -> None:
        self.files = tuple(files)
        self.sources = sources
        self._staging = staging
        self._give_back = staging.give_back
        self._buffers_max = buffers_max
        self._is_pinned = bool(order.devices)
        self._side = SideStreams(order.devices)
        self._part_nbytes = files[0].part_nbytes
        counts = [len(file.parts) for file in files]
        staging.expect(counts, self._part_nbytes, pinned=self._is_pinned)
        plans = [part for file in files for part in file.parts]
        self._parts = list(map(_StagedPart, count(), plans, order.later))
        self._unfinished = 0  # index of the first part that may have bytes missing
        self._taken = 0
        for part, ranges in zip(self._parts, order.first, strict=True):
            if ranges:
                assert self._has_buffer(part), "what is copied first fits"
                # Not in the background: training may change these bytes when the call returns.
                self._fill(part, ranges, non_blocking=False)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to copy."""
        return self._unfinished == len(self._parts)

    def lend(self) -> Hold:
        """Keep the memory of all parts until the hold ends: another save reads it, too."""
        hold = Hold(self._staging)
        self._give_back = hold.give_back
        return hold

    def buffers(self) -> list[memoryview]:
        """The memory of all parts, of an image that is whole and not written yet."""
        assert self.is_whole, "every part has a buffer then"
        return [part.buffer for part in self._parts]

    def copy(self) -> None:
        """Copy what is left, as far as there are buffers."""
        copied = self._unfinished
        with self._side.copying():
            # In order, and including parts that hold only a header: the part that is written next
            # must never wait for a buffer that a later part holds, because that one is written
            # after it.
            while copied < len(self._parts) and self._has_buffer(self._parts[copied]):
                part = self._parts[copied]
                self._fill(part, part.missing, non_blocking=True)
                part.missing = ()
                copied += 1
        self._unfinished = copied

    def write(
        self,
        store: Store,
        directory: str,
        *,
        contents: RankContents,
        path: WritePath,
        between_parts: Callable[[], None],
    ) -> list[PartFile]:
        """Write all files below `directory`, which ends with a `/`, and copy the rest on the way.

        The files are durable when this returns.
        Calls `between_parts` often, which may raise to give up. All buffers are given back, on
        failure too. Raises the store's errors; then no incomplete file is visible.
        """
        written = []
        try:
            files = placed_files(self.files, contents)
            for index, file in enumerate(files):
                nbytes = file.layout.nbytes
                with sending(
                    store,
                    directory + file.name,
                    nbytes,
                    part_nbytes=self._part_nbytes,
                    threads=max(1, path.writers),
                    direct=path.for_file(nbytes).direct,
                ) as sender:
                    assert sender.part_nbytes == self._part_nbytes, "planned for any store"
                    written.append(self._write_file(index, file, sender, between_parts))
            store.sync([directory + file.name for file in files])
        finally:
            self.release()
        return written

    def staged(self) -> list[Source]:
        """The sources, each with its staged copy in place of live memory.

        For whole images with one part per file; valid until `release`.
        """
        moved = list(self.sources)
        for part in self._parts:
            for index, _, nbytes, offset in part.ranges:
                source = self.sources[index]
                memory, dtype = part.buffer[offset : offset + nbytes], source.view.dtype
                view = tensor_over(memory, dtype, (nbytes // dtype.itemsize,))
                moved[index] = Source(source.chunk, view, 0, address_of(memory))
        return moved

    def release(self) -> None:
        """Give all buffers back."""
        for part in self._parts:
            self._free(part)

    # memory

    def _has_buffer(self, part: _StagedPart) -> bool:
        if not part.buffer:
            if self._taken >= self._buffers_max:
                return False
            part.buffer = self._staging.take(
                self._part_nbytes, pinned=self._is_pinned, part=part.number
            )
            self._taken += 1
        return True

    def _free(self, part: _StagedPart) -> None:
        if part.buffer:
            self._give_back(part.buffer)
            part.buffer = _NO_BUFFER
            self._taken -= 1

    def _fill(
        self, part: _StagedPart, ranges: Sequence[StagedRange], *, non_blocking: bool
    ) -> None:
        base = address_of(part.buffer)
        sources = self.sources
        for index, start, stop, offset in ranges:
            source = sources[index]
            if source.address:
                copy_bytes(base + offset, source.address + start, stop - start)
            else:
                target = part.buffer[offset : offset + stop - start]
                copy_elements(source, start, target, non_blocking=non_blocking)

    # writing

    def _write_file(
        self,
        index: int,
        file: DataFile,
        sender: PartSender,
        between_parts: Callable[[], None],
    ) -> PartFile:
        builder, nbytes, part_nbytes = DataFileBuilder(file), file.layout.nbytes, self._part_nbytes
        before = part_count(self.files[:index])
        start = 0
        for part in self._parts[before : before + len(self.files[index].parts)]:
            self._make_whole(part, sender)
            between_parts()
            memory = part.buffer[: min(part_nbytes, nbytes - start)]
            builder.complete(start, memory)
            sender.send([memory], partial(self._free, part))
            start += part_nbytes
        # Values and checksums may need more parts than the chunks, which have no buffers.
        for first in range(start, nbytes, part_nbytes):
            memory = memoryview(bytearray(min(part_nbytes, nbytes - first)))
            builder.complete(first, memory)
            sender.send([memory])
        return builder.result()

    def _make_whole(self, part: _StagedPart, sender: PartSender) -> None:
        sender.collect()
        while not self._has_buffer(part):
            sender.wait_for_one()
        # Copy as much as fits now and not this part alone: steps of optimizers may wait for it.
        self.copy()


def placed_files(files: Sequence[FilePlan], contents: RankContents) -> list[DataFile]:
    """The files that were planned, each with its chunks where the plan has them."""
    planned = rank_files([file.entries for file in files], contents)
    for file, place in zip(planned, files, strict=True):
        missing = len(file.layout.header) - place.data_start
        if missing > 0:
            raise InvalidState(
                [
                    f"user: the notes of rank 0 need {missing} bytes more than this rank "
                    "reserved for them; pass the same notes on all ranks"
                ]
            )
    return [
        file.with_data_start(place.data_start) for file, place in zip(planned, files, strict=True)
    ]


def write_copied(
    store: Store,
    directory: str,
    files: Sequence[FilePlan],
    tensor_bytes: Sequence[Sequence[memoryview]],
    *,
    contents: RankContents,
    path: WritePath,
    between_parts: Callable[[], None],
) -> list[PartFile]:
    """Write the same files as `Image.write` from a copy that stays as it is: `tensor_bytes` are
    those of the chunks of each file.

    Raises and calls `between_parts` like that.
    """
    written = []
    planned = placed_files(files, contents)
    for file, place, runs in zip(planned, files, tensor_bytes, strict=True):
        builder, nbytes = DataFileBuilder(file), file.layout.nbytes
        with (
            sending(
                store,
                directory + file.name,
                nbytes,
                part_nbytes=place.part_nbytes,
                threads=max(1, path.writers),
                direct=path.for_file(nbytes).direct,
            ) as sender,
            PartStream(sender, path.staging, gathers=False) as parts,
        ):
            parts.add(builder.header)
            for run in runs:
                between_parts()
                builder.add(run)
                parts.add(run)
            parts.add(builder.tail)
        written.append(builder.result())
    store.sync([directory + file.name for file in planned])
    return written


def part_count(files: Sequence[FilePlan]) -> int:
    """How many parts all files have together, which is how many buffers hold all of them."""
    return sum(len(file.parts) for file in files)
