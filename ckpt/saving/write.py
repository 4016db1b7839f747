"""Write this rank's shares into data files: one pass over live memory, checksums taken on the way.

shares -> sources -> files -> parts (vectors of live memory, or one aligned buffer) -> store
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from ckpt.format.datafile import (
    FileEntries,
    StoredChunk,
    file_entries,
    is_small_or_uneven,
    region_start,
    split_into_files,
)
from ckpt.format.datafile_builder import DataFileBuilder
from ckpt.format.object_parts import PartSender, sending
from ckpt.format.part import PartFile
from ckpt.format.rank_files import DataFile
from ckpt.layout.assign import Share
from ckpt.layout.buffers import address_of, bytes_at, copy_bytes, touch
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.memory import (
    devices_of,
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
PACKED_NBYTES_MAX = 16 << 10  # chunks up to this size are copied together, many in one call


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


@dataclass(frozen=True, slots=True)
class WritePath:
    """How parts leave this process.

    `direct`: gather every part into an aligned buffer and write around the page cache, which costs
    the least CPU and leaves the cache to the training; otherwise parts are vectors of live memory,
    and so they are for files of less than `direct_nbytes_min`. With `writers=0` the caller's thread
    writes; with more, that many parts are in flight. `staging` is for one save at a time.
    """

    part_nbytes: int = 8 * MIB
    writers: int = 0
    direct: bool = False
    direct_nbytes_min: int = 0
    file_nbytes_max: int = 4 << 30
    staging: Staging = field(default_factory=lambda: Staging())

    def for_file(self, nbytes: int) -> WritePath:
        """The path of a file of `nbytes`. Small files are written through the page cache, and those
        of one part by the caller's thread, which would only wait for another: direct writes and
        threads would cost more than they save.
        """
        direct = self.direct and nbytes >= self.direct_nbytes_min
        is_alone = nbytes <= self.part_nbytes or direct is not self.direct
        return replace(self, direct=direct, writers=0 if is_alone else self.writers)


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


def write_files(
    store: Store,
    directory: str,
    sources: Sequence[Source],
    *,
    files: Sequence[DataFile],
    path: WritePath,
) -> list[PartFile]:
    """Write `sources` as `files` below `directory`, "" or with a `/` at its end.

    Durable when this returns. Raises the store's errors; then no incomplete file is visible.
    """
    # What has an address is host memory: of thousands of tensors few have to be asked.
    pinned = bool(devices_of(source.view for source in sources if not source.address))
    written = []
    first = 0
    for file in files:
        own = sources[first : first + len(file.entries.chunks)]
        first += len(own)
        nbytes = file.layout.nbytes
        here = path.for_file(nbytes)
        builder = DataFileBuilder(file)
        with (
            sending(
                store,
                directory + file.name,
                nbytes,
                part_nbytes=here.part_nbytes,
                threads=here.writers,
                direct=here.direct,
            ) as sender,
            PartStream(sender, path.staging, gathers=here.direct, pinned=pinned) as parts,
        ):
            parts.add(builder.header)
            _stream(own, parts, builder, file.entries.block_bytes)
            parts.add(builder.tail)
        written.append(builder.result())
    # One sync for all files: each one on its own would wait for the disk once per file.
    store.sync([directory + file.name for file in files])
    return written


def _stream(
    sources: Sequence[Source], parts: PartStream, builder: DataFileBuilder, block_nbytes: int
) -> None:
    """Pass every source's bytes to `parts` and `builder`, in order."""
    packed_nbytes_max = min(PACKED_NBYTES_MAX, block_nbytes)
    index = 0
    while index < len(sources):
        if sources[index].chunk.nbytes <= packed_nbytes_max:
            pack = _pack(sources, index, parts.room, packed_nbytes_max)
            if pack:
                builder.add(parts.push_pack(pack, sum([one.chunk.nbytes for one in pack])))
                index += len(pack)
                continue
        source = sources[index]
        index += 1
        nbytes = source.chunk.nbytes
        position = 0
        while position < nbytes:
            # Checksums are taken as bytes pass, while they are in the CPU's cache: a pass of its
            # own would read all memory a second time. So no run is longer than a block.
            block_end = (position // block_nbytes + 1) * block_nbytes
            stop = min(nbytes, block_end, position + parts.room)
            builder.add(parts.push(source, position, stop))
            position = stop


def _pack(
    sources: Sequence[Source], first: int, nbytes_max: int, each_nbytes_max: int
) -> list[Source]:
    """Small whole host tensors of one dtype from `first` on, as many as fit into `nbytes_max`."""
    dtype = sources[first].view.dtype
    pack = []
    for source in islice(sources, first, None):
        nbytes, view = source.chunk.nbytes, source.view
        nbytes_max -= nbytes
        if nbytes > each_nbytes_max or nbytes_max < 0 or view.dtype is not dtype:
            break
        if view.nbytes != nbytes or not view.is_cpu:
            break
        pack.append(source)
    return pack


class PartStream:
    """The object under construction as a stream, cut into parts for `sender`.

    A part is a list of vectors. Bytes that need a copy get it in a scratch buffer, at the place
    that they have in the part; with `gathers` all bytes do, so that the part is one aligned buffer.
    """

    def __init__(
        self, sender: PartSender, staging: Staging, *, gathers: bool, pinned: bool = False
    ) -> None:
        self._sender = sender
        self._staging = staging
        self._gathers = gathers
        self._pinned = pinned
        self._part_nbytes = min(sender.part_nbytes, sender.nbytes)
        self._scratch: memoryview | None = None
        self._scratch_address = 0
        self._vectors: list[memoryview] = []
        self._filled = 0

    def __enter__(self) -> PartStream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._filled:
            self._emit()

    @property
    def room(self) -> int:
        """Bytes until the end of the current part; at least one."""
        return self._part_nbytes - self._filled

    def add(self, data: memoryview) -> None:
        """Append bytes of any length. Unless they are gathered, they stay alive and unchanged until
        the sender's `with` block ends.
        """
        position = 0
        while position < len(data):
            stop = min(len(data), position + self.room)
            if self._gathers:
                self._place(stop - position)[:] = data[position:stop]
            else:
                self._vectors.append(data[position:stop])
            self._advance(stop - position)
            position = stop

    def push(self, source: Source, start: int, stop: int) -> memoryview:
        """Append bytes `start` to `stop` of a source, which fit into `room`; returns them as
        written.
        """
        nbytes = stop - start
        if source.address and not self._gathers:
            vector = bytes_at(source.address + start, nbytes)
            self._vectors.append(vector)
        else:
            vector = self._place(nbytes)
            if source.address:
                target = self._scratch_address + self._filled
                copy_bytes(target, source.address + start, nbytes)
            else:
                copy_elements(source, start, vector)
        self._advance(nbytes)
        return vector

    def push_pack(self, pack: Sequence[Source], nbytes: int) -> memoryview:
        """Append whole small tensors, `nbytes` together, by one copy; returns their bytes."""
        place = self._place(nbytes)
        views = [source.view for source in pack]
        flat = [view if view.dim() == 1 else view.reshape(-1) for view in views]
        target = tensor_over(place, views[0].dtype, (nbytes // views[0].dtype.itemsize,))
        torch.cat(flat, out=target)
        self._advance(nbytes)
        return place

    def _place(self, nbytes: int) -> memoryview:
        if self._scratch is None:
            # Whole MiB, so that the next save, of a few bytes more or less, can use it again.
            whole_mib = -(-self._part_nbytes // MIB) * MIB
            self._scratch = self._staging.take(whole_mib, pinned=self._pinned)
            self._scratch_address = address_of(self._scratch)
        place = self._scratch[self._filled : self._filled + nbytes]
        if not self._gathers:
            self._vectors.append(place)
        return place

    def _advance(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == self._part_nbytes:
            self._emit()

    def _emit(self) -> None:
        vectors, scratch = self._vectors, self._scratch
        if self._gathers:
            assert scratch is not None, "in this mode every byte was placed"
            vectors = [scratch[: self._filled]]
        self._vectors, self._scratch, self._filled = [], None, 0
        # Wait before sending: parts hold their buffers, so this bounds the memory in flight.
        while self._sender.is_busy:
            self._sender.wait_for_one()
        if scratch is None:
            self._sender.send(vectors)
        else:
            self._sender.send(vectors, partial(self._staging.give_back, scratch))


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
