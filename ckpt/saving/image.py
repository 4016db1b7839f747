"""All files of one save, partly in memory: planned, copied, written.

    sources -> ranges of parts -> aligned buffers -> store

A part is a buffer with exactly the bytes of the file at that place. A save in the background copies
all parts that memory allows before it writes them; a blocking one copies a few at a time, as those
before are written. The bytes before the first tensor byte depend on the attempt, which the ranks
agree on after the first copies are made; space is reserved for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

import torch

from ckpt.errors import InvalidState
from ckpt.format.datafile import FileEntries
from ckpt.format.object_parts import DataFileBuilder, Part, cut_into_parts, part_nbytes_for
from ckpt.format.part import PartFile
from ckpt.format.rank_files import DataFile
from ckpt.layout.buffers import address_of, bytes_at, copy_bytes
from ckpt.layout.memory import SideStreams, devices_of, tensor_over
from ckpt.saving.write import MIB, Source, Staging, WritePath, copy_elements
from storage import Store
from storage.forks import ForkSafeLock

# Reserved in each header for what this rank cannot know yet: rank 0's notes and paths of modules.
HEADER_SLACK_NBYTES = 4096
# Tensors of a save that are copied where they might be sent as they are: each costs some 4 us then.
COPIED_NBYTES_MAX = 64 << 10


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
    files: Sequence[FileEntries], starts: Sequence[int], path: WritePath, part_nbytes_min: int
) -> tuple[FilePlan, ...]:
    """Divide `files`, whose tensor bytes begin at `starts`, into parts.

    No part is smaller than `part_nbytes_min`: what follows the tensors may need a second one.
    """
    largest = max(start + file.nbytes for start, file in zip(starts, files, strict=True))
    # An eighth more, for values and checksums: the parts are cut before their sizes are known.
    part_nbytes = part_nbytes_for(largest + largest // 8, path.part_nbytes)
    # Whole MiB and the same for all files, so that any buffer serves any part of any save.
    part_nbytes = min(part_nbytes, -(-max(largest, part_nbytes_min) // MIB) * MIB)
    firsts = accumulate((len(file.chunks) for file in files), initial=0)
    return tuple(
        FilePlan(file, first, start, part_nbytes, _plan_parts(file, first, start, part_nbytes))
        for file, first, start in zip(files, firsts, starts, strict=False)
    )


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


def part_count(files: Sequence[FilePlan]) -> int:
    """How many parts all files have together, which is how many buffers hold all of them."""
    return sum(len(file.parts) for file in files)


def placed_files(plans: Sequence[FilePlan], files: Sequence[DataFile]) -> list[DataFile]:
    """`files`, each with its chunks where the plan has them."""
    for file, plan in zip(files, plans, strict=True):
        missing = len(file.layout.header) - plan.data_start
        if missing > 0:
            raise InvalidState(
                [
                    f"user: the notes of rank 0 need {missing} bytes more than this rank "
                    "reserved for them; pass the same notes on all ranks"
                ]
            )
    return [file.with_data_start(plan.data_start) for file, plan in zip(files, plans, strict=True)]


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
    plans = tuple(part for file in files for part in file.parts)
    later = plans
    if first:
        later = tuple(tuple(one for one in plan if one.source not in first) for plan in plans)
    return CopyOrder(
        tuple(tuple(one for one in plan if one.source in first) for plan in plans if first)
        or ((),) * len(plans),
        later,
        sum([one.stop - one.start for ranges in later for one in ranges]),
        # What has an address is host memory: of thousands of tensors few have to be asked.
        devices_of(source.view for source in sources if not source.address),
    )


def write_files(
    store: Store,
    directory: str,
    sources: Sequence[Source],
    *,
    files: Sequence[DataFile],
    path: WritePath,
    plans: Sequence[FilePlan] = (),
) -> list[PartFile]:
    """Write `sources`, in live memory, as `files` below `directory`, "" or with a `/` at its end.

    `plans` are those of the files, if they are known. Memory is a buffer of `path.staging` for each
    writer and one more, or none: large host memory is sent as it is, but around the page cache.
    Durable when this returns. Raises the store's errors; then no incomplete file is visible.
    """
    if not plans:
        starts = [len(file.layout.header) for file in files]
        entries = [file.entries for file in files]
        plans = plan_files(entries, starts, path, store.part_nbytes_min)
    nbytes = sum([plan.entries.nbytes for plan in plans])
    is_large = nbytes >= COPIED_NBYTES_MAX * len(sources)
    if is_large and not path.direct and all([source.address for source in sources]):
        runs = [
            [
                bytes_at(one.address, one.chunk.nbytes)
                for one in sources[plan.first :][: len(plan.entries.chunks)]
            ]
            for plan in plans
        ]
        return write_copied(
            store,
            directory,
            runs,
            files=files,
            path=path,
            part_nbytes=plans[0].part_nbytes,
            writers=path.writers,
        )
    order, buffers_max = copy_order(plans, sources, ()), max(2, path.writers + 1)
    image = Image(
        plans,
        sources,
        path.staging,
        order=order,
        buffers_max=buffers_max,
        is_ahead=bool(order.devices),
    )
    return image.write(store, directory, files=files, path=path, writers=path.writers)


def _nothing() -> None:
    pass


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
        is_ahead: bool = True,
    ) -> None:
        self.files = tuple(files)
        self.sources = sources
        self._staging = staging
        self._give_back = staging.give_back
        self._room = threading.Semaphore(buffers_max)
        self._is_ahead = is_ahead
        self._is_pinned = bool(order.devices)
        self._side = SideStreams(order.devices)
        self._part_nbytes = files[0].part_nbytes
        counts = [len(file.parts) for file in files]
        staging.expect(counts, self._part_nbytes, pinned=self._is_pinned)
        plans = [part for file in files for part in file.parts]
        self._parts = list(map(_StagedPart, count(), plans, order.later))
        self._unfinished = 0  # index of the first part that may have bytes missing
        for part, ranges in zip(self._parts, order.first, strict=True):
            if ranges:
                assert self._has_buffer(part, waits=False), "what is copied first fits"
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
            while copied < len(self._parts) and self._has_buffer(self._parts[copied], waits=False):
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
        files: Sequence[DataFile],
        path: WritePath,
        writers: int,
        between_parts: Callable[[], None] = _nothing,
    ) -> list[PartFile]:
        """Write `files`, which were planned, below `directory` and copy the rest on the way.

        They are durable when this returns. Calls `between_parts` often, which may raise to give up.
        All buffers are given back, on failure too. Raises the store's errors; then no incomplete
        file is visible.
        """
        try:
            written = [
                path.write(
                    store,
                    directory + file.name,
                    file,
                    partial(self._file_parts, index, file, between_parts),
                    part_nbytes=self._part_nbytes,
                    writers=writers,
                )
                for index, file in enumerate(placed_files(self.files, files))
            ]
            # One sync for all files: each on its own would wait for the disk once per file.
            store.sync([directory + file.name for file in files])
        finally:
            self.release()
        return written

    def _file_parts(
        self,
        index: int,
        file: DataFile,
        between_parts: Callable[[], None],
        builder: DataFileBuilder,
    ) -> Generator[Part, None, None]:
        nbytes, part_nbytes = file.layout.nbytes, self._part_nbytes
        before = part_count(self.files[:index])
        start = 0
        for part in self._parts[before : before + len(self.files[index].parts)]:
            self._has_buffer(part, waits=True)
            memory = part.buffer[: min(part_nbytes, nbytes - start)]
            done = 0
            if self._is_ahead:
                # As much as fits and not this part alone: steps of optimizers may wait for it.
                self.copy()
            else:
                done = self._copy_on_the_way(part, start, builder)
            between_parts()
            builder.complete(start + done, memory[done:])
            yield [memory], partial(self._free, part)
            start += part_nbytes
        # Values and checksums may need more parts than the chunks, which have no buffers.
        for first in range(start, nbytes, part_nbytes):
            memory = memoryview(bytearray(min(part_nbytes, nbytes - first)))
            builder.complete(first, memory)
            yield [memory], _nothing

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

    def _copy_on_the_way(self, part: _StagedPart, start: int, builder: DataFileBuilder) -> int:
        """Copy a part that begins at byte `start`, and take checksums while the CPU's cache has the
        bytes; returns how many of them are complete.
        """
        done, here = 0, list[StagedRange]()
        for source, low, stop, offset in part.missing:
            while low < stop:
                high = min(low + MIB, stop)
                here.append(StagedRange(source, low, high, offset))
                low, offset = high, offset + high - low
                if offset - done >= MIB:
                    self._fill(part, here, non_blocking=False)
                    builder.complete(start + done, part.buffer[done:offset])
                    done, here = offset, []
        self._fill(part, here, non_blocking=False)
        part.missing = ()
        return done

    def _has_buffer(self, part: _StagedPart, *, waits: bool) -> bool:
        """Whether a part has memory, after it got some if there is any, or `waits` for it."""
        if not part.buffer and self._room.acquire(blocking=waits):
            part.buffer = self._staging.take(
                self._part_nbytes, pinned=self._is_pinned, part=part.number
            )
        return bool(part.buffer)

    def _free(self, part: _StagedPart) -> None:
        """In any thread, of one that is written."""
        if part.buffer:
            self._give_back(part.buffer)
            part.buffer = _NO_BUFFER
            self._room.release()

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


def write_copied(
    store: Store,
    directory: str,
    runs_of_files: Sequence[Sequence[memoryview]],
    *,
    files: Sequence[DataFile],
    path: WritePath,
    part_nbytes: int,
    writers: int,
    between_parts: Callable[[], None] = _nothing,
) -> list[PartFile]:
    """Write `files` from a copy that stays as it is: the bytes of the chunks of each, in runs.

    Raises, and calls `between_parts`, as `Image.write` does.
    """

    def parts(runs: Sequence[memoryview], builder: DataFileBuilder) -> Generator[Part, None, None]:
        def all_runs() -> Iterator[memoryview]:
            yield builder.header
            for run in runs:
                for start in range(0, len(run), MIB):  # which the CPU's cache has when it is sent
                    between_parts()
                    builder.add(run[start : start + MIB])
                    yield run[start : start + MIB]
            yield builder.tail

        return cut_into_parts(all_runs(), part_nbytes)

    written = [
        path.write(
            store,
            directory + file.name,
            file,
            partial(parts, runs),
            part_nbytes=part_nbytes,
            writers=writers,
        )
        for file, runs in zip(files, runs_of_files, strict=True)
    ]
    store.sync([directory + file.name for file in files])
    return written
