"""The only way by which bytes leave: an object of a store, cut into parts, whole or not at all.
Data files are planned here first, all but the bytes of their chunks.

    chunks of each file + contents besides tensors -> names, headers, reserved tensors

    fill (in any order) -> finish (in order) -> send (in order) -> written (in any order)

Everything that is too large to be written in one go comes here: data files of saves, copies and
imports, and files of other libraries. Writers differ in where the bytes come from. Of a data file
they bring those of its chunks, and `DataFileBuilder` makes all others.

A data file states its place in its checkpoint, so that a lost manifest can be rebuilt: every rank
writes at least one. Its first one has the tensors without elements and the aliases that the rank
knows, and its per-rank values; the first file of rank 0 also the common values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ckpt.format.checksum import (
    BlockChecksums,
    Digests,
    Int64s,
    Seal,
    Uint32s,
    digests_from,
    seal_of,
)
from ckpt.format.datafile import (
    ALIGNMENT,
    DIGESTS,
    PER_RANK,
    VALUES,
    FileEntries,
    checksum_tensor,
    layout_data_file,
)
from ckpt.format.manifest import Header
from ckpt.format.part import FileColumns, PartTexts, TensorRecord, compact_json
from storage import ObjectWriter, Store
from storage.ranges import aligned_buffer
from storage.store import JointWriter
from storage.threads import RequestWindow, as_done, in_order


def data_file_name(rank: int, index: int) -> str:
    """The name of a rank's data file in the step's directory."""
    return f"rank{rank:05d}-{index:03d}.safetensors"


class FileRange(NamedTuple):
    """Whole neighbouring chunks of another attempt's data file, by bytes of that file, half-open.

    `file` is the name in the manifest, `../<step directory>/<name>`.
    """

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """A data file of `nbytes` that a rank writes. `extras` are its reserved tensors, `digests` a
    row per chunk or none.
    """

    name: str
    entries: FileEntries
    header: bytes
    nbytes: int
    extras: Mapping[str, bytes]
    digests: Digests

    @property
    def offsets(self) -> Int64s:
        """Where its chunks begin."""
        ends = self.entries.ends
        return np.append(0, ends)[: len(ends)] + len(self.header)

    def columns(self, checksums: Uint32s, seal: Seal) -> FileColumns:
        """The file once it is written, given the crc32c of all blocks of its chunks."""
        return FileColumns(
            name=self.name,
            nbytes=self.nbytes,
            data_start=len(self.header),
            chunks=self.entries.chunks,
            offsets=self.offsets,
            block_counts=self.entries.block_counts,
            checksums=checksums,
            seal=seal,
            digests=self.digests,
        )

    def with_data_start(self, data_start: int) -> DataFile:
        """The same file, its header padded with spaces so that its chunks begin at `data_start`."""
        shift = data_start - len(self.header)
        assert shift >= 0 and data_start % ALIGNMENT == 0, "headers only grow, to whole pages"
        # JSON may end in spaces: readers of safetensors skip them.
        text = self.header[8:].ljust(data_start - 8, b" ")
        header = (data_start - 8).to_bytes(8, "little") + text
        return replace(self, header=header, nbytes=self.nbytes + shift)


def rank_files(
    files: Sequence[FileEntries],
    header: Header,
    rank: int,
    texts: PartTexts,
    *,
    empty_tensors: Sequence[TensorRecord] = (),
    references: Sequence[FileRange] = (),
    digests: Sequence[bytes] | None = None,
) -> list[DataFile]:
    """The files of one rank that hold these chunks, in this order; at least one, even if empty.

    `texts` are those of the rank's part. `references` are the bytes in files of other attempts that
    the rank would have written. `digests` are those of all chunks in the order of the files; None
    for files without digests. Raises InvalidState when a header becomes longer than readers accept.
    """
    planned, left = [], iter(digests or ())
    for index, entries in enumerate(files):
        metadata = {
            "ckpt.header": header.model_dump_json(),
            "ckpt.rank": str(rank),
            "ckpt.file": f"{index}/{len(files)}",
        }
        extras: dict[str, bytes] = {}
        # Once per rank, in its first file: `ckpt salvage` rebuilds a lost manifest from them.
        if index == 0:
            lists: dict[str, Any] = {
                "empty": list(map(list, sorted(empty_tensors))),
                "aliases": dict(sorted(texts.aliases.items())),
                "references": list(map(list, sorted(references))),
            }
            metadata |= {
                f"ckpt.{name}": compact_json(value) for name, value in lists.items() if value
            }
            both = {VALUES: texts.values, PER_RANK: texts.per_rank}
            extras = {name: data for name, data in both.items() if data}
        own = b"".join(islice(left, len(entries.chunks)))
        if digests is not None:
            extras[DIGESTS] = own
        head, nbytes = layout_data_file(entries, metadata, extras)
        name = data_file_name(rank, index)
        planned.append(DataFile(name, entries, head, nbytes, extras, digests_from(own)))
    return planned


MIB = 1 << 20
PARTS_MAX = 10_000  # S3's limit for one object
PART_NBYTES = 16 * MIB  # of what is read from storage and written: one request each

Filled = TypeVar("Filled")
Part: TypeAlias = tuple[Sequence[memoryview], Callable[[], object]]
"""The bytes of a part, and what is called when they may change, in any thread."""


def part_nbytes_for(nbytes: int, wanted: int) -> int:
    """The size of the parts of an object of `nbytes`: more than `wanted` where there would be too
    many.
    """
    needed = -(-nbytes // PARTS_MAX)
    return wanted if needed <= wanted else -(-needed // MIB) * MIB


def write_parts(
    store: Store,
    key: str,
    nbytes: int,
    parts: Generator[Part, None, None],
    *,
    part_nbytes: int,
    threads: int,
    threads_max: int = 0,
    durable: bool = False,
    direct: bool = False,
    add: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Create an object of `nbytes` from its parts, all of `part_nbytes` but the last.

    After an error, of the `parts` too, nothing is visible and no thread writes any more. `durable`
    and `direct` are those of `Store.create`, the rest is as for `send_parts`.
    """
    # The parts are closed first: no thread fills memory of an object that was given up.
    with (
        store.create(
            key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        ) as writer,
        closing(parts),
    ):
        send_parts(
            writer,
            parts,
            threads=threads,
            threads_max=threads_max,
            repeated=lambda: store.retries,
            add=add,
        )


def write_filled(
    store: Store,
    key: str,
    nbytes: int,
    *,
    fill: Callable[[int, memoryview], Filled],
    finish: Callable[[int, memoryview, Filled], object],
    threads: int,
    part_nbytes: int = PART_NBYTES,
    durable: bool = False,
    add: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Create an object of `nbytes` from parts of about `part_nbytes` as `filled_parts` makes them;
    large ones around the page cache, which costs a third of the CPU seconds, and what others have
    cached stays. The rest is as for `write_parts`.
    """
    part_nbytes = part_nbytes_for(nbytes, part_nbytes)
    parts = filled_parts(nbytes, part_nbytes, fill=fill, finish=finish, threads=threads)
    write_parts(
        store,
        key,
        nbytes,
        parts,
        part_nbytes=part_nbytes,
        threads=max(1, threads),
        durable=durable,
        direct=nbytes >= PART_NBYTES,
        add=add,
    )


def send_parts(
    writer: ObjectWriter | JointWriter,
    parts: Iterable[Part],
    *,
    threads: int,
    add: Callable[[int], object],
    first: int = 0,
    threads_max: int = 0,
    repeated: Callable[[], int] = lambda: 0,
) -> None:
    """Write `parts`, numbered from `first` on, up to `threads` at once; without threads the
    caller's writes. Up to `threads_max`, where that moves more bytes per second; fewer when the
    store has `repeated` some. One more is made meanwhile. `add(nbytes)` counts what was written.
    """

    def write(numbered: tuple[int, Part]) -> int:
        index, (buffers, release) = numbered
        try:
            writer.write_part(index, buffers)
            return sum(map(len, buffers))
        finally:
            # After a failure too: what fills the next buffer waits for one.
            release()

    for nbytes in as_done(
        write,
        enumerate(parts, first),
        threads=threads,
        name="ckpt-write",
        window=RequestWindow(threads, threads_max) if threads else None,
        nbytes_of=int,
        repeated=repeated,
    ):
        add(nbytes)


def filled_parts(
    nbytes: int,
    part_nbytes: int,
    *,
    fill: Callable[[int, memoryview], Filled],
    finish: Callable[[int, memoryview, Filled], object],
    threads: int,
    first: int = 0,
    stop: int | None = None,
) -> Generator[Part, None, None]:
    """Parts `first` to `stop` of an object, by default all, in buffers that are used again.

    `fill` runs in threads, `finish` gets what it returned, in order and in the thread that takes
    the parts, and may still change the part. Both get the part's first byte in the object and its
    memory. Memory is a buffer per thread. Ended early, they wait for none that is still in use.
    """
    stop = -(-nbytes // part_nbytes) if stop is None else stop
    threads = max(1, min(threads, stop - first))
    # Fresh memory costs more than the copy.
    free = [aligned_buffer(min(part_nbytes, nbytes)) for _ in range(threads)]
    changed, following, is_over = threading.Condition(), first * part_nbytes, False

    def fill_one(start: int) -> tuple[int, memoryview, memoryview, Filled]:
        nonlocal following
        with changed:
            # In the order of the parts, so that none waits for a later one.
            changed.wait_for(lambda: is_over or (free and following == start))
            if is_over:
                raise CancelledError
            buffer, following = free.pop(), start + part_nbytes
            changed.notify_all()
        part = buffer[: min(part_nbytes, nbytes - start)]
        return start, buffer, part, fill(start, part)

    def give_back(buffer: memoryview) -> None:
        with changed:
            free.append(buffer)
            changed.notify_all()

    starts = range(first * part_nbytes, stop * part_nbytes, part_nbytes)
    with closing(in_order(fill_one, starts, threads=threads, name="ckpt-fill")) as filling:
        try:
            for start, buffer, part, filled in filling:
                finish(start, part, filled)
                yield [part], partial(give_back, buffer)
        finally:
            with changed:
                is_over = True
                changed.notify_all()


def cut_into_parts(runs: Iterable[memoryview], part_nbytes: int) -> Generator[Part, None, None]:
    """Runs of bytes, which stay as they are until all is written, as parts of `part_nbytes`."""
    part: list[memoryview] = []
    room = part_nbytes
    for run in runs:
        while len(run):
            part.append(run[:room])
            run, room = run[room:], room - len(part[-1])
            if not room:
                yield part, nothing
                part, room = [], part_nbytes
    if part:
        yield part, nothing


def nothing() -> None:
    """What is called when the bytes of a part may change, where nobody waits for that."""


class DataFileBuilder:
    """Takes the bytes of one file's chunks, in file order, and makes all its other bytes.

    They come either as runs of any length, between `header` and `tail`, or as parts of the file in
    memory, to be completed there.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._checksums = BlockChecksums(file.entries.block_ends)

    @property
    def header(self) -> memoryview:
        """The bytes before the chunks."""
        return memoryview(self._file.header)

    def add(self, data: memoryview) -> None:
        """The next bytes of the chunks."""
        self._checksums.add(data)

    @cached_property
    def tail(self) -> memoryview:
        """The bytes after the chunks, which must all have passed: reserved tensors, checksums."""
        return memoryview(b"".join([*self._file.extras.values(), self._table]))

    @cached_property
    def _table(self) -> bytes:
        return checksum_tensor(self._file.header, self._checksums.result(), self._file.extras)

    def complete(self, start: int, part: memoryview) -> None:
        """Fill in what a part lacks that holds the bytes of chunks and begins at byte `start`.

        Parts come in file order.
        """
        stop = start + len(part)
        first = len(self.header)
        last = first + self._file.entries.nbytes
        if start < first:
            here = self.header[start:stop]
            part[: len(here)] = here
        low, high = max(start, first), min(stop, last)
        if low < high:
            self.add(part[low - start : high - start])
        if stop > last:
            here = self.tail[max(start - last, 0) : stop - last]
            part[len(part) - len(here) :] = here

    def result(self) -> FileColumns:
        """The file as its rank's part lists it, once all chunks have passed."""
        return self._file.columns(self._checksums.result(), seal_of(self._table))
