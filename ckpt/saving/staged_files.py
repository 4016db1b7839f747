"""The data files of one save in host memory, part by part: copied first, written later.

A part is an aligned buffer with the bytes that the file has there, so it leaves this process as it
is. Buffers are reused from save to save. When there may be fewer of them than parts, the rest is
copied as parts become durable and free theirs.

The bytes before the first tensor byte depend on the attempt, which the ranks agree on after the
first copies are made; room is left for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import InvalidState
from ckpt.format.checksum import crc32c, crc32c_of_each
from ckpt.format.datafile import (
    ALIGNMENT,
    DataFileLayout,
    FileEntries,
    checksum_tensor,
    layout_data_file,
)
from ckpt.format.part import PartFile
from ckpt.layout.memory import SideStreams, address_of, copy_bytes, tensor_over
from ckpt.saving.write import MIB, FileTexts, Source, Staging, WritePath, copy_elements
from storage import ObjectWriter, Store

# Room in a header for what the ranks cannot know of each other: notes, paths of modules.
HEADER_SLACK_NBYTES = 4096


class Slot(NamedTuple):
    """Bytes `start` to `stop` of a source go to byte `at` of a part."""

    source: int
    start: int
    stop: int
    at: int


class PartPlan(NamedTuple):
    """One part of a file: what is copied into it, and which runs of bytes are checksummed.

    `cuts` are the lengths of consecutive runs from the first slot on. `continues` says that the
    first run is the rest of a block that began in the part before, `breaks_off` that the last one
    goes on in the next.
    """

    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]
    continues: bool
    breaks_off: bool


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its sources are those from `first` on, its tensor bytes start at `data_start`."""

    entries: FileEntries
    first: int
    data_start: int
    part_nbytes: int
    parts: tuple[PartPlan, ...]


def plan_files(
    files: Sequence[FileEntries], *, texts: FileTexts, path: WritePath, part_nbytes_min: int
) -> tuple[FilePlan, ...]:
    """How `files` lie in parts. `texts` is a guess of what their headers will say.

    No part is smaller than `part_nbytes_min`: what follows the tensors may need a second one.
    """
    starts = []
    for index, file in enumerate(files):
        metadata = texts.metadata(index, len(files))
        guess = layout_data_file(file, block_bytes=file.block_bytes, metadata=metadata)
        starts.append(len(guess.header) + HEADER_SLACK_NBYTES)
    largest = max(start + file.nbytes for start, file in zip(starts, files, strict=True))
    # Whole MiB and the same for all files, so that any buffer serves any part of any save.
    part_nbytes = min(path.part_nbytes, -(-max(largest, part_nbytes_min) // MIB) * MIB)
    plans = []
    first = 0
    for start, file in zip(starts, files, strict=True):
        parts = _plan_parts(file, first, start, part_nbytes)
        plans.append(FilePlan(file, first, start, part_nbytes, parts))
        first += len(file.chunks)
    return tuple(plans)


def _plan_parts(
    file: FileEntries, first: int, data_start: int, part_nbytes: int
) -> tuple[PartPlan, ...]:
    sizes, block_nbytes = [chunk.nbytes for chunk in file.chunks], file.block_bytes
    end = data_start + file.nbytes
    slots: list[list[Slot]] = [[] for _ in range(-(-end // part_nbytes))]
    cuts: list[list[int]] = [[] for _ in slots]
    goes_on = [False] * len(slots)
    position = data_start
    for source, nbytes in enumerate(sizes, first):
        start = 0
        while start < nbytes:
            part, at = divmod(position, part_nbytes)
            stop = min(nbytes, start + part_nbytes - at)
            slots[part].append(Slot(source, start, stop, at))
            position += stop - start
            goes_on[part] = stop < nbytes and stop % block_nbytes != 0
            while start < stop:
                cut = min(stop, (start // block_nbytes + 1) * block_nbytes)
                cuts[part].append(cut - start)
                start = cut
    return tuple(
        PartPlan(tuple(slots[at]), tuple(cuts[at]), at > 0 and goes_on[at - 1], goes_on[at])
        for at in range(len(slots))
    )


class Division(NamedTuple):
    """Which slots of each part are copied first, and which later; one item per part of all files.

    `devices` are the CUDA devices that some sources are on.
    """

    first: tuple[tuple[Slot, ...], ...]
    later: tuple[tuple[Slot, ...], ...]
    later_nbytes: int
    devices: tuple[torch.device, ...]


def divide(
    files: Sequence[FilePlan], sources: Sequence[Source], first: Collection[int]
) -> Division:
    """Copy the sources with the indices `first` first, the others later."""
    plans = [part for file in files for part in file.parts]
    later = [tuple(slot for slot in plan.slots if slot.source not in first) for plan in plans]
    return Division(
        tuple(tuple(slot for slot in plan.slots if slot.source in first) for plan in plans),
        tuple(later),
        sum(slot.stop - slot.start for slots in later for slot in slots),
        tuple(dict.fromkeys(source.view.device for source in sources if source.view.is_cuda)),
    )


_NO_BUFFER = memoryview(b"")


@dataclass(slots=True)
class _Part:
    """A part and its memory. `missing` has to be copied yet; an empty buffer is none."""

    plan: PartPlan
    missing: Sequence[Slot]
    buffer: memoryview


class Image:
    """All files of one save, partly in memory. Used by one thread at a time.

    At most `buffers_max` parts are in memory at once, two or more. `sources` and the memory that
    they point to have to stay until everything is copied. What is to be copied first is copied by
    the constructor; there have to be buffers for it.
    """

    def __init__(
        self,
        files: Sequence[FilePlan],
        sources: Sequence[Source],
        staging: Staging,
        *,
        division: Division,
        buffers_max: int,
    ) -> None:
        self.files = tuple(files)
        self.sources = sources
        self._staging = staging
        self._buffers_max = buffers_max
        self._is_pinned = bool(division.devices)
        self._side = SideStreams(division.devices)
        self._part_nbytes = files[0].part_nbytes
        plans = [part for file in files for part in file.parts]
        self._parts = list(map(_Part, plans, division.later, [_NO_BUFFER] * len(plans)))
        self._unfinished = 0  # the first part that may lack something
        self._taken = 0
        for part, slots in zip(self._parts, division.first, strict=True):
            if slots:
                assert self._has_buffer(part), "what is copied first fits"
                self._fill(part, slots, non_blocking=False)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to copy."""
        return self._unfinished == len(self._parts)

    def copy(self) -> None:
        """Copy what is left, as far as there are buffers."""
        copied = self._unfinished
        with self._side.copying():
            # In order, and a part of a header alone too: a part that is to be written next never
            # waits for buffers that later parts have.
            while copied < len(self._parts) and self._has_buffer(self._parts[copied]):
                part = self._parts[copied]
                self._fill(part, part.missing, non_blocking=True)
                part.missing = ()
                copied += 1
        self._unfinished = copied

    def write(
        self,
        store: Store,
        names: Callable[[int], str],
        *,
        texts: FileTexts,
        path: WritePath,
        between_parts: Callable[[], None],
    ) -> list[PartFile]:
        """Write all files, copying on the way what is left; durable when this returns.

        Calls `between_parts` often, which may raise to give up. All buffers are given back, on
        failure too. Raises the store's errors; no file is visible then that is not whole.
        """
        written = []
        try:
            for index, file in enumerate(self.files):
                layout, extras = self._layout(index, texts)
                with (
                    store.create(
                        names(index),
                        layout.nbytes,
                        part_nbytes=self._part_nbytes,
                        durable=False,
                        direct=path.for_file(layout.nbytes).direct,
                    ) as writer,
                    _Sender(writer, max(1, path.writers)) as sender,
                ):
                    checksums = self._write_file(index, layout, extras, sender, between_parts)
                    sender.wait_for_all()
                name = names(index).rpartition("/")[2]
                written.append(PartFile(name, layout, file.entries.chunks, checksums))
            store.sync([names(index) for index in range(len(self.files))])
        finally:
            self.release()
        return written

    def staged(self) -> list[Source]:
        """The sources, with their bytes as they are in memory here. For images that are whole, of
        files of one part each; valid until `release`.
        """
        moved = list(self.sources)
        for part in self._parts:
            for index, _, nbytes, at in part.plan.slots:
                source = self.sources[index]
                memory, dtype = part.buffer[at : at + nbytes], source.view.dtype
                view = tensor_over(memory, dtype, (nbytes // dtype.itemsize,))
                moved[index] = Source(source.chunk, view, 0, address_of(memory))
        return moved

    def release(self) -> None:
        """Give all buffers back."""
        for part in self._parts:
            self._free(part)

    # memory

    def _has_buffer(self, part: _Part) -> bool:
        if not part.buffer:
            if self._taken >= self._buffers_max:
                return False
            part.buffer = self._staging.take(self._part_nbytes, pinned=self._is_pinned)
            self._taken += 1
        return True

    def _free(self, part: _Part) -> None:
        if part.buffer:
            self._staging.give_back(part.buffer)
            part.buffer = _NO_BUFFER
            self._taken -= 1

    def _fill(self, part: _Part, slots: Sequence[Slot], *, non_blocking: bool) -> None:
        base = address_of(part.buffer)
        sources = self.sources
        for index, start, stop, at in slots:
            source = sources[index]
            if source.address:
                copy_bytes(base + at, source.address + start, stop - start)
            else:
                place = part.buffer[at : at + stop - start]
                copy_elements(source, start, place, non_blocking=non_blocking)

    # writing

    def _layout(self, index: int, texts: FileTexts) -> tuple[DataFileLayout, dict[str, bytes]]:
        file = self.files[index]
        extras = dict(texts.extras) if index == 0 else {}
        layout = layout_data_file(
            file.entries,
            block_bytes=file.entries.block_bytes,
            metadata=texts.metadata(index, len(self.files)),
            extra={name: len(value) for name, value in extras.items()},
        )
        needed = len(layout.header)
        if needed > file.data_start:
            raise InvalidState(
                [
                    f"user: the notes of rank 0 take {needed - file.data_start} bytes more than "
                    "there is room for; pass the same on all ranks"
                ]
            )
        return with_data_start(layout, file.data_start), extras

    def _write_file(
        self,
        index: int,
        layout: DataFileLayout,
        extras: dict[str, bytes],
        sender: _Sender,
        between_parts: Callable[[], None],
    ) -> npt.NDArray[np.uint32]:
        part_nbytes = self._part_nbytes
        before = part_count(self.files[:index])
        parts = self._parts[before : before + len(self.files[index].parts)]
        sums = _Sums()
        for at, part in enumerate(parts):
            self._make_whole(part, sender)
            between_parts()
            sums.add(part.plan, part.buffer)
            header = layout.header[at * part_nbytes : (at + 1) * part_nbytes]
            part.buffer[: len(header)] = header
            if at < len(parts) - 1:
                sender.send(part.buffer, partial(self._free, part))
        checksums = sums.result()
        tail = b"".join([*extras.values(), checksum_tensor(layout, checksums, extras)])
        last = parts[-1]
        used = layout.nbytes - len(tail) - (len(parts) - 1) * part_nbytes
        here = tail[: part_nbytes - used]
        last.buffer[used : used + len(here)] = here
        sender.send(last.buffer[: used + len(here)], partial(self._free, last))
        for start in range(len(here), len(tail), part_nbytes):
            sender.send(memoryview(tail[start : start + part_nbytes]), lambda: None)
        return checksums

    def _make_whole(self, part: _Part, sender: _Sender) -> None:
        sender.collect()
        while not self._has_buffer(part):
            sender.wait_for_one()
        # As much as has room now, this part first: steps of optimizers may wait for it.
        self.copy()


class _Sums:
    """Checksums of blocks, from the parts that the blocks lie in, in order."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._begun = 0

    def add(self, plan: PartPlan, buffer: memoryview) -> None:
        if not plan.slots:
            return
        data = buffer[plan.slots[0].at :]
        cuts = plan.cuts
        if plan.continues:
            self._sums.append(crc32c(data[: cuts[0]], self._begun))
            data, cuts = data[cuts[0] :], cuts[1:]
        self._sums += crc32c_of_each(data, cuts)
        if plan.breaks_off:
            self._begun = self._sums.pop()

    def result(self) -> npt.NDArray[np.uint32]:
        return np.array(self._sums, dtype="<u4")


class _Sender:
    """Writes parts in order of `send`, some at once, while the next one is prepared."""

    def __init__(self, writer: ObjectWriter, writers: int) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(writers, thread_name_prefix="ckpt-write")
        self._in_flight: list[tuple[Future[None], Callable[[], None]]] = []
        self._index = 0

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def send(self, data: memoryview, after: Callable[[], None]) -> None:
        """Write `data` as the next part; `after` is called by a later call here, once it is."""
        future = self._pool.submit(self._writer.write_part, self._index, [data])
        self._in_flight.append((future, after))
        self._index += 1

    def wait_for_one(self) -> None:
        """Returns when the oldest part in flight is written."""
        future, after = self._in_flight.pop(0)
        future.result()
        after()

    def wait_for_all(self) -> None:
        while self._in_flight:
            self.wait_for_one()

    def collect(self) -> None:
        """Finish with what is written already, without waiting."""
        while self._in_flight and self._in_flight[0][0].done():
            self.wait_for_one()


def with_data_start(layout: DataFileLayout, data_start: int) -> DataFileLayout:
    """The same file with its tensor bytes from `data_start` on, its header padded with spaces."""
    shift = data_start - len(layout.header)
    assert shift >= 0 and data_start % ALIGNMENT == 0, "headers only grow, to whole pages"
    text = layout.header[8:].ljust(data_start - 8, b" ")
    return replace(
        layout,
        header=(data_start - 8).to_bytes(8, "little") + text,
        offsets=layout.offsets + shift,
        extra_offsets={name: at + shift for name, at in layout.extra_offsets.items()},
        checksum_offset=layout.checksum_offset + shift,
        nbytes=layout.nbytes + shift,
    )


def part_count(files: Sequence[FilePlan]) -> int:
    """Parts, and so buffers, of all files."""
    return sum(len(file.parts) for file in files)
