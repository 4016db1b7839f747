"""This rank's shares: where their bytes are, the memory they pass through, and how they leave.

shares -> sources -> files -> parts -> store
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from ckpt.format.datafile import (
    FileEntries,
    StoredChunk,
    file_entries,
    is_small_or_uneven,
    region_start,
    split_into_files,
)
from ckpt.format.object_parts import (
    DataFileBuilder,
    write_parts,
)
from ckpt.format.object_parts import Part as ObjectPart
from ckpt.format.part import FileColumns
from ckpt.format.rank_files import DataFile
from ckpt.layout.assign import Share
from ckpt.layout.buffers import touch
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.memory import (
    is_plain_memory,
    local_view,
    narrowed,
    staging_buffer,
    tensor_over,
)
from ckpt.layout.region import Region, Span, boxes_of
from storage import Store
from storage.forks import ForkSafeLock

MIB = 1 << 20


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
            if len(buffer) == self._nbytes:
                self._free.append(buffer)

    def hold(self) -> Callable[[], None]:
        """The places of the save under way are not used again until what this returns is called.

        Buffers have no places: whoever holds one gives it back later. The next save needs others
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
            if not pinned:  # pinned memory is there already
                touch(buffer)
            with self._lock:
                if is_stopped() or (self._nbytes, self._pinned) != (nbytes, pinned):
                    return
                self._free.append(buffer)

    def _use_size(self, nbytes: int, pinned: bool) -> None:
        if (self._nbytes, self._pinned) != (nbytes, pinned):
            self._free.clear()
            self._nbytes, self._pinned = nbytes, pinned


Parts: TypeAlias = Callable[[DataFileBuilder], Generator[ObjectPart, None, None]]


@dataclass(frozen=True, slots=True)
class WritePath:
    """How parts leave this process: `writers` of them at once, or written by the caller's thread.

    `direct`: around the page cache, which costs the least CPU and leaves the cache to the training;
    not for files of less than `direct_nbytes_min`. `staging` is for one save at a time.
    """

    part_nbytes: int = 8 * MIB
    writers: int = 0
    direct: bool = False
    direct_nbytes_min: int = 0
    file_nbytes_max: int = 4 << 30
    staging: Staging = field(default_factory=lambda: Staging())

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
            builder, nbytes = DataFileBuilder(file), file.layout.nbytes
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
                direct=direct,
            )
            written.append(builder.result())
        # One sync for all files: each on its own would wait for the disk once per file.
        store.sync([directory + file.name for file in files])
        return written


class Source(NamedTuple):
    """A chunk to write, and where its bytes are: at `address` in host memory, or (address 0) in
    `view`, which is on a device or strided and is copied from its element `start` on.
    """

    chunk: StoredChunk
    view: torch.Tensor
    start: int
    address: int


def sources_of(shares: Sequence[Share]) -> list[Source]:
    """Where the bytes of every share are now, in the canonical order of a data file."""
    keys: list[tuple[bool, int, str, int, Region, int]] = []
    sources: list[Source] = []
    dtypes: dict[torch.dtype, tuple[str, int]] = {}
    for holding, piece, start, stop, region in shares:
        fqn, global_shape, dtype, _, _, _ = piece
        known = dtypes.get(dtype)
        if known is None:
            known = dtypes[dtype] = (dtype_name(dtype), dtype.itemsize)
        name, itemsize = known
        view = local_view(holding, piece)
        nbytes = (stop - start) * itemsize
        address = view.data_ptr() + start * itemsize if is_plain_memory(view) else 0
        chunk = StoredChunk(fqn, name, global_shape, region, nbytes, int(holding.kind))
        # This is `order_key`, with the regions compared only where their starts are the same.
        first = region_start(region, global_shape)
        late = is_small_or_uneven(nbytes)
        keys.append((late, -itemsize, fqn, first, region, len(sources)))
        sources.append(Source(chunk, view, start, address))
    keys.sort()
    return [sources[key[5]] for key in keys]


def entries_of(
    sources: Sequence[Source], file_nbytes_max: int, block_nbytes: int
) -> tuple[FileEntries, ...]:
    """The files that hold `sources`, in this order; at least one."""
    groups = split_into_files([source.chunk for source in sources], file_nbytes_max)
    return tuple(file_entries(group, block_nbytes) for group in groups)


def copy_elements(
    source: Source, start: int, target: memoryview, *, non_blocking: bool = False
) -> None:
    """Fill `target` with the source's bytes from `start` on, in row-major order of its view.

    With `non_blocking`, copies from a device into pinned memory are only started.
    """
    dtype = source.view.dtype
    first = source.start + start // dtype.itemsize
    last = first + len(target) // dtype.itemsize
    for nbytes, piece in _pieces_between(source.view, first, last):
        place = tensor_over(target[:nbytes], dtype, tuple(piece.shape))
        place.copy_(piece, non_blocking=non_blocking)
        target = target[nbytes:]


def _pieces_between(
    view: torch.Tensor, first: int, last: int
) -> Iterator[tuple[int, torch.Tensor]]:
    for box in boxes_of(Span(first, last), tuple(view.shape)):
        yield box.numel * view.dtype.itemsize, narrowed(view, box)
