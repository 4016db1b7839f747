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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice, pairwise, starmap
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch

from ckpt.errors import InvalidState
from ckpt.format.datafile import FileEntries
from ckpt.format.object_parts import (
    DataFile,
    DataFileBuilder,
    Part,
    cut_into_parts,
    nothing,
    part_nbytes_for,
    write_parts,
)
from ckpt.format.part import FileColumns
from ckpt.layout.memory import SideStreams, devices_of, staging_buffer, tensor_over
from ckpt.saving.plan import Source, copy_elements
from storage import Store
from storage.forks import ForkSafeLock
from storage.page_cache import memory_left
from storage.ranges import address_of, bytes_at, copy_bytes, gathered, touch

MIB = 1 << 20
# Reserved in each header for what this rank cannot know yet: rank 0's notes and paths of modules.
HEADER_SLACK_NBYTES = 4096
# Tensors of a save that are copied where they might be sent as they are: each costs some 4 us then.
COPIED_NBYTES_MAX = 64 << 10


class Staging:
    """Buffers that outlive a save: fresh memory costs a page fault per 4 KiB, ten times a copy.

    For one save at a time. Buffers of another size than the last ones are dropped. Thread-safe, for
    those that are made while a save may begin. With `is_one_range`, parts of one file follow each
    other in memory.
    """

    is_one_range = False

    def __init__(self) -> None:
        self._sets = 1  # of buffers that are kept between saves
        self._free: list[memoryview] = []
        self._nbytes = 0
        self._pinned = False
        self._lock = ForkSafeLock()

    def expect(self, counts: Sequence[int], nbytes: int, *, pinned: bool) -> None:
        """A save in the background begins: it stages files of so many parts of `nbytes`. For memory
        that has a place for each part; here one buffer is as good as any.
        """

    def take(self, nbytes: int, *, pinned: bool, part: int = 0) -> memoryview:
        """A writable buffer of `nbytes` that starts at a page boundary, with undefined content, for
        the staged part of this number.
        """
        with self._lock:
            self._use_size(nbytes, pinned)
            if self._free:
                return self._free.pop()
        return staging_buffer(nbytes, pinned=pinned)

    def give_back(self, buffer: memoryview) -> None:
        """The buffer may be taken again; nothing refers to it any more."""
        with self._lock:
            # A buffer of an older size is dropped: the next save would not use it.
            if len(buffer) == self._nbytes:
                self._free.append(buffer)

    def hold(self) -> Callable[[], None]:
        """The places of the save under way are not used again until what this returns is called.

        Buffers have no places: its holder gives it back later. The next save needs others
        meanwhile, so from now on there are buffers for two.
        """
        self._sets = 2
        return lambda: None

    def keep(self, count_max: int) -> None:
        """Drop free buffers beyond `count_max`, which one save takes."""
        with self._lock:
            del self._free[count_max * self._sets :]

    def make(
        self, nbytes: int, count: int, *, pinned: bool, is_stopped: Callable[[], bool]
    ) -> None:
        """Make buffers, with memory behind them, until `count` are free or `is_stopped`."""
        with self._lock:
            if not is_stopped():
                self._use_size(nbytes, pinned)
        while not is_stopped() and len(self._free) < count:
            buffer = staging_buffer(nbytes, pinned=pinned)
            if not pinned:  # pinned memory is at hand
                # Outside of the lock: page faults take most of the time, and a save may begin
                # meanwhile.
                touch(buffer)
            with self._lock:
                if is_stopped() or (self._nbytes, self._pinned) != (nbytes, pinned):
                    return
                self._free.append(buffer)

    def _use_size(self, nbytes: int, pinned: bool) -> None:
        if (self._nbytes, self._pinned) != (nbytes, pinned):
            self._free.clear()
            self._nbytes, self._pinned = nbytes, pinned


Parts: TypeAlias = Callable[[DataFileBuilder], Generator[Part, None, None]]


@dataclass(frozen=True, slots=True)
class WritePath:
    """How parts leave this process: `writers` of them at once, up to `writers_max` where that moves
    more bytes per second, or written by the caller's thread.

    `direct`: around the page cache, which costs the least CPU and leaves the cache to the training;
    not for files of less than `direct_nbytes_min`, nor for a save of at most `cached_share_max` of
    the memory that is left. `staging` is for one save at a time.
    """

    part_nbytes: int = 8 * MIB
    writers: int = 0
    writers_max: int = 0
    direct: bool = False
    direct_nbytes_min: int = 0
    cached_share_max: float = 0.0
    file_nbytes_max: int = 4 << 30
    staging: Staging = field(default_factory=Staging)

    def write(
        self,
        store: Store,
        directory: str,
        files: Sequence[DataFile],
        parts: Sequence[Parts],
        *,
        part_nbytes: int,
        writers: int,
    ) -> list[FileColumns]:
        """Create `files` below `directory`, "" or with a `/` at its end, from the `parts` of each,
        which a builder completes.

        Durable when this returns. Raises the store's errors; then no incomplete file is visible.
        """
        written = []
        for file, parts_of in zip(files, parts, strict=True):
            builder, nbytes = DataFileBuilder(file), file.nbytes
            # A small file goes through the page cache, and one of one part is written by the
            # caller's thread, which would only wait for another: direct writes and threads would
            # cost more than they save.
            direct = self.direct and nbytes >= self.direct_nbytes_min
            is_alone = nbytes <= part_nbytes or direct is not self.direct
            write_parts(
                store,
                directory + file.name,
                nbytes,
                parts_of(builder),
                part_nbytes=part_nbytes,
                threads=0 if is_alone else writers,
                threads_max=self.writers_max,
                direct=direct,
            )
            written.append(builder.result())
        # One sync for all files: each on its own would wait for the disk once per file.
        store.sync([directory + file.name for file in files])
        return written


class StagedRange(NamedTuple):
    """Bytes `start` to `stop` of a source, which are copied to byte `offset` of a part; of a `run`
    of so many small sources that follow each other, all bytes.
    """

    source: int
    start: int
    stop: int
    offset: int
    run: int = 1

    def each(self, sources: Sequence[Source]) -> Iterator[StagedRange]:
        """The same, source by source."""
        if self.run == 1:
            yield self
            return
        offset = self.offset
        for index, source in enumerate(sources[self.source : self.source + self.run], self.source):
            yield StagedRange(index, 0, source.chunk.nbytes, offset)
            offset += source.chunk.nbytes


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
    largest = max([start + file.nbytes for start, file in zip(starts, files, strict=True)])
    # An eighth more, for values and checksums: the parts are cut before their sizes are known.
    part_nbytes = part_nbytes_for(largest + largest // 8, path.part_nbytes)
    # Whole MiB and the same for all files, so that any buffer serves any part of any save.
    # A small file must not take a buffer of a whole part. Of one that goes through the page cache,
    # the disk writes the first quarter while the next are prepared.
    small = min(largest, max(largest // 4, 2 * MIB)) if path.cached_share_max else largest
    part_nbytes = min(part_nbytes, -(-max(small, part_nbytes_min) // MIB) * MIB)
    first, plans = 0, list[FilePlan]()
    for file, start in zip(files, starts, strict=True):
        count, position = -(-(start + file.nbytes) // part_nbytes), start
        parts = [list[list[int]]() for _ in range(count)]
        small_in = -1  # the part whose last range is of small sources
        for source, chunk in enumerate(file.chunks, first):
            low, small_in = 0, small_in if chunk.nbytes else -1
            while low < chunk.nbytes:
                part, offset = divmod(position, part_nbytes)
                high = min(chunk.nbytes, low + part_nbytes - offset)
                here, is_small = parts[part], high - low == chunk.nbytes <= COPIED_NBYTES_MAX
                # Thousands are few ranges then; the CPU's cache keeps a MiB for its checksums.
                if is_small and part == small_in and here[-1][2] + high <= MIB:
                    here[-1][2] += high
                    here[-1][4] += 1
                else:
                    here.append([source, low, high, offset, 1])
                small_in = part if is_small else -1
                position += high - low
                low = high
        ranges = [tuple(starmap(StagedRange, part)) for part in parts]
        plans.append(FilePlan(file, first, start, part_nbytes, tuple(ranges)))
        first += len(file.chunks)
    return tuple(plans)


def part_count(files: Sequence[FilePlan]) -> int:
    """How many parts all files have together, which is how many buffers hold all of them."""
    return sum(len(file.parts) for file in files)


def placed_files(plans: Sequence[FilePlan], files: Sequence[DataFile]) -> list[DataFile]:
    """`files`, each with its chunks where the plan has them."""
    for file, plan in zip(files, plans, strict=True):
        missing = len(file.header) - plan.data_start
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
    later = tuple(chain(*[file.parts for file in files]))
    now: tuple[tuple[StagedRange, ...], ...] = ((),) * len(later)
    if first:
        every = [list(chain(*[one.each(sources) for one in plan])) for plan in later]
        now = tuple([tuple([one for one in plan if one.source in first]) for plan in every])
        later = tuple([tuple([one for one in plan if one.source not in first]) for plan in every])
    return CopyOrder(
        now,
        later,
        sum([one.stop - one.start for ranges in later for one in ranges]),
        # What has an address is host memory: of thousands of tensors few have to be asked.
        devices_of([source.view for source in sources if not source.address]),
    )


def write_files(
    store: Store,
    directory: str,
    sources: Sequence[Source],
    *,
    files: Sequence[DataFile],
    path: WritePath,
    plans: Sequence[FilePlan] = (),
) -> list[FileColumns]:
    """Write `sources`, in live memory, as `files` below `directory`, "" or with a `/` at its end.

    `plans` are those of the files, if they are known. Memory is a buffer of `path.staging` for each
    writer and one more, or none: large host memory is sent as it is, but around the page cache.
    Durable when this returns. Raises the store's errors; then no incomplete file is visible.
    """
    if not plans:
        starts = [len(file.header) for file in files]
        entries = [file.entries for file in files]
        plans = plan_files(entries, starts, path, store.part_nbytes_min)
    nbytes, share_max = sum([file.nbytes for file in files]), path.cached_share_max
    if nbytes < path.direct_nbytes_min or (share_max and nbytes <= share_max * memory_left()):
        # What was saved is often read soon, and then the page cache has it.
        path = replace(path, direct=False, writers=0)
    part_nbytes, writers = plans[0].part_nbytes, path.writers
    is_large = nbytes >= COPIED_NBYTES_MAX * len(sources)
    if is_large and not path.direct and all([source.address for source in sources]):
        runs = [bytes_at(one.address, one.chunk.nbytes) for one in sources]
        firsts = [*(plan.first for plan in plans), len(runs)]
        parts = [copied_parts(runs[low:high], part_nbytes) for low, high in pairwise(firsts)]
        return path.write(store, directory, files, parts, part_nbytes=part_nbytes, writers=writers)
    order = copy_order(plans, sources, ())
    image = Image(
        plans,
        sources,
        path.staging,
        order=order,
        buffers_max=max(2, writers + 1),
        is_ahead=bool(order.devices),
    )
    try:
        parts = image.parts(files)
        return path.write(store, directory, files, parts, part_nbytes=part_nbytes, writers=writers)
    finally:
        image.release()


_NO_BUFFER = memoryview(b"")
_ADDRESS, _NBYTES = attrgetter("address"), attrgetter("chunk.nbytes")


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
        self.staging = staging
        self._users = 1  # saves that need the memory
        self._let_go: Callable[[], None] = nothing
        self._lock = ForkSafeLock()
        # Counts buffers, not bytes: all have one size. Writers release it in their threads.
        self._room = threading.Semaphore(buffers_max)
        self._is_ahead = is_ahead
        self._is_pinned = bool(order.devices)
        self._side = SideStreams(order.devices)
        self._part_nbytes = files[0].part_nbytes
        numbered = map(_StagedPart, count(), chain(*[file.parts for file in files]), order.later)
        self._of_files = [list(islice(numbered, len(file.parts))) for file in files]
        self._parts = list(chain(*self._of_files))
        counts = list(map(len, self._of_files))
        staging.expect(counts, self._part_nbytes, pinned=self._is_pinned)
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

    def lend(self) -> None:
        """Another save reads the memory, too: it calls `release` as well."""
        # Called before the lender's own `release`, which would give the buffers back.
        self._users, self._let_go = 2, self.staging.hold()

    def tensor_bytes(self) -> list[list[memoryview]]:
        """The bytes of all chunks of each file, in order, of an image that is whole."""
        assert self.is_whole, "every part has a buffer then"
        runs = []
        for file, own in zip(self.files, self._of_files, strict=True):
            start, stop = file.data_start, file.data_start + file.entries.nbytes
            cut = []
            for part in own:
                low, high = max(start, 0), min(stop, file.part_nbytes)
                if low < high:
                    cut.append(part.buffer[low:high])
                # In the coordinates of the next part.
                start, stop = start - file.part_nbytes, stop - file.part_nbytes
            runs.append(cut)
        return runs

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

    def parts(
        self, files: Sequence[DataFile], between_parts: Callable[[], None] = nothing
    ) -> list[Parts]:
        """Those of `files`, which were planned; the rest is copied on the way. `between_parts` is
        called often, and may raise to give up.
        """
        pairs = zip(self._of_files, files, strict=True)
        return [partial(self._file_parts, own, file, between_parts) for own, file in pairs]

    def _file_parts(
        self,
        own: Sequence[_StagedPart],
        file: DataFile,
        between_parts: Callable[[], None],
        builder: DataFileBuilder,
    ) -> Generator[Part, None, None]:
        nbytes, part_nbytes = file.nbytes, self._part_nbytes
        start = 0
        for part in own:
            # Waiting cannot deadlock: parts are taken in file order, and those before this one are
            # being written.
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
            yield [memory], partial(self._written, part)
            start += part_nbytes
        # Values and checksums may need more parts than the chunks, which have no buffers.
        for first in range(start, nbytes, part_nbytes):
            memory = memoryview(bytearray(min(part_nbytes, nbytes - first)))
            builder.complete(first, memory)
            yield [memory], nothing

    def staged(self) -> list[Source]:
        """The sources, each with its staged copy in place of live memory, of an image that is whole
        and has each file in one range of memory; valid until `release`.
        """
        moved = list(self.sources)
        for part in self._parts:
            for index, start, _, offset, _ in chain(*[o.each(self.sources) for o in part.ranges]):
                # A chunk is cut into ranges where parts end; in one range of memory its first gives
                # the place.
                if start == 0:
                    chunk, dtype = self.sources[index].chunk, self.sources[index].view.dtype
                    address = address_of(part.buffer) + offset
                    shape = (chunk.nbytes // dtype.itemsize,)
                    view = tensor_over(bytes_at(address, chunk.nbytes), dtype, shape)
                    moved[index] = Source(chunk, view, 0, address)
        return moved

    def release(self) -> None:
        """Called once by each save that used the memory; the last call gives all buffers back."""
        with self._lock:
            self._users -= 1
            is_over = self._users == 0
        if is_over:
            self._let_go()
            for part in self._parts:
                self._free(part)

    def _copy_on_the_way(self, part: _StagedPart, start: int, builder: DataFileBuilder) -> int:
        """Copy a part that begins at byte `start`, and take checksums while the CPU's cache has the
        bytes; returns how many of them are complete.
        """
        done, small = 0, list[StagedRange]()
        for one in part.missing:
            if one.stop - one.start < MIB:
                small.append(one)
                continue
            self._fill(part, small, non_blocking=False)
            small.clear()
            for low in range(one.start, one.stop, MIB):
                offset, high = one.offset + low - one.start, min(low + MIB, one.stop)
                here = StagedRange(one.source, low, high, offset, one.run)
                self._fill(part, [here], non_blocking=False)
                stop = offset + high - low
                builder.complete(start + done, part.buffer[done:stop])
                done = stop
        self._fill(part, small, non_blocking=False)
        part.missing = ()
        return done

    def _has_buffer(self, part: _StagedPart, *, waits: bool) -> bool:
        """Whether a part has memory, after it got some if there is any, or `waits` for it."""
        if not part.buffer and self._room.acquire(blocking=waits):
            part.buffer = self.staging.take(
                self._part_nbytes, pinned=self._is_pinned, part=part.number
            )
        return bool(part.buffer)

    def _written(self, part: _StagedPart) -> None:
        # A borrower still reads it: then `release` frees all parts at once.
        if self._users == 1:
            self._free(part)

    def _free(self, part: _StagedPart) -> None:
        """Give back the memory of a part that is written. In any thread."""
        if part.buffer:
            self.staging.give_back(part.buffer)
            part.buffer = _NO_BUFFER
            self._room.release()

    def _fill(
        self, part: _StagedPart, ranges: Sequence[StagedRange], *, non_blocking: bool
    ) -> None:
        base, sources = address_of(part.buffer), self.sources
        for one in ranges:
            index, start, stop, offset, run = one
            source = sources[index]
            if run > 1:
                some = sources[index : index + run]
                addresses, sizes = list(map(_ADDRESS, some)), list(map(_NBYTES, some))
                if all(addresses):
                    part.buffer[offset : offset + stop] = gathered(addresses, sizes)
                else:
                    self._fill(part, list(one.each(sources)), non_blocking=non_blocking)
            elif source.address:
                copy_bytes(base + offset, source.address + start, stop - start)
            else:
                target = part.buffer[offset : offset + stop - start]
                copy_elements(source, start, target, non_blocking=non_blocking)


def copied_parts(
    runs: Sequence[memoryview], part_nbytes: int, between_parts: Callable[[], None] = nothing
) -> Parts:
    """A file's parts from a copy of the bytes of its chunks that stays as it is."""

    def all_runs(builder: DataFileBuilder) -> Iterator[memoryview]:
        yield builder.header
        for run in runs:
            for start in range(0, len(run), MIB):  # which the CPU's cache has when it is sent
                between_parts()
                builder.add(run[start : start + MIB])
                yield run[start : start + MIB]
        yield builder.tail

    return lambda builder: cut_into_parts(all_runs(builder), part_nbytes)
