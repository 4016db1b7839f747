"""Objects from one store to another, every byte compared with its checksum on the way.

A data file holds the checksums of all its bytes: header, blocks, reserved tensors. Several threads
copy the parts of a large file; a block that two of them share is checked by joining the
checksums of its pieces. A file appears in the target whole and checked, or not at all.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.checksum import crc32c, joined_crc32c
from ckpt.format.datafile import CHECKSUM_MAGIC
from ckpt.format.datafile_index import DataFileIndex, index_of, read_into
from ckpt.format.manifest import Manifest
from ckpt.format.object_parts import PART_NBYTES, write_filled
from ckpt.saving.resumable import is_written
from ckpt.short import ShortRecord
from storage import CorruptObjectError, Store
from storage.ranges import aligned_buffer


@dataclass(frozen=True, slots=True, repr=False)
class CopyReport(ShortRecord):
    """What a copy did. `target` opens the copy: a step's directory, or a root.

    `attempt` is the name of a single checkpoint, "" for a whole root. `is_second_form`: it lies in
    the root that it was made of, and loads by its attempt. `seconds` are what it took.
    `nbytes` are those of all its data files, `nbytes_written` those that this run had to write.
    """

    source: str
    target: str
    steps: tuple[int, ...]
    files: int
    nbytes: int
    nbytes_written: int
    attempt: str = ""
    is_second_form: bool = False
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of_one(cls, source: Store, target: str, manifest: Manifest, written: int) -> CopyReport:
        """The report of a copy of one checkpoint; `manifest` is that of the copy."""
        header, nbytes = manifest.header, int(manifest.file_nbytes.sum())
        files, steps = len(manifest.files), (header.step,)
        return cls(source.url, target, steps, files, nbytes, written, header.attempt)


class Tile(NamedTuple):
    """Bytes `start` to `stop` of a file, their crc32c, and `what` they are, for messages."""

    start: int
    stop: int
    checksum: int
    what: str


# Of those bytes of a tile that one part of a file holds: the tile's number, checksum and length.
Fragment = tuple[int, int, int]


def tiles_of(index: DataFileIndex) -> list[Tile]:
    """All bytes of a file, each in one tile, ascending."""
    header = index.header
    tiles = [Tile(0, len(header), crc32c(header), "the header")]
    for position, chunk in enumerate(index.chunks):
        start = int(index.offsets[position])
        first = int(index.first_block[position])
        for number, low in enumerate(range(start, start + chunk.nbytes, index.block_bytes)):
            high = min(low + index.block_bytes, start + chunk.nbytes)
            checksum = int(index.checksums[first + number])
            tiles.append(Tile(low, high, checksum, f"block {number} of {chunk.fqn!r}"))
    for name, (start, nbytes) in index.extras.items():
        tiles.append(Tile(start, start + nbytes, index.extra_checksums[name], name))
    # The checksums end with one of their own, so the last tile is known without being read. The
    # words are laid out as `ckpt.format.datafile` writes them; a difference would fail every copy.
    words = [CHECKSUM_MAGIC, crc32c(header), *index.extra_checksums.values()]
    body = np.array(words, dtype="<u4").tobytes() + index.checksums.astype("<u4").tobytes()
    last = crc32c(crc32c(body).to_bytes(4, "little"), crc32c(body))
    tiles.append(Tile(index.checksum_offset, index.nbytes, last, "the checksums"))
    return [tile for tile in tiles if tile.start < tile.stop]


def relay_file(
    source: Store,
    source_key: str,
    target: Store,
    target_key: str,
    *,
    tiles: Sequence[Tile],
    threads: int,
    add: Callable[[int], None],
) -> None:
    """Copy one data file, `threads` parts of it at once; `add(nbytes)` counts what was written.

    Not durable before `target.sync`. Raises Corrupt when a byte is not what `tiles` say, and the
    stores' errors; the target has no such file then.
    """
    nbytes = tiles[-1].stop
    fragments: list[Fragment] = []

    def fill(start: int, part: memoryview) -> list[Fragment]:
        read_into(source, source_key, start, [part])
        return _fragments(tiles, start, part)

    def finish(start: int, part: memoryview, own: Sequence[Fragment]) -> None:
        fragments.extend(own)
        if start + len(part) == nbytes:  # before the last part is sent: the file appears with it
            _check(tiles, fragments, f"{source.url}/{source_key}")

    write_filled(target, target_key, nbytes, fill=fill, finish=finish, threads=threads, add=add)


def _fragments(tiles: Sequence[Tile], start: int, part: memoryview) -> list[Fragment]:
    """Checksums of what a part, which begins at byte `start`, holds of each tile."""
    fragments, stop = [], start + len(part)
    # Parts and tiles have their own edges: the first tile may have begun in the part before.
    first = bisect_right(tiles, start, key=attrgetter("start")) - 1
    for number in range(first, bisect_left(tiles, stop, key=attrgetter("start"))):
        low, high = max(tiles[number].start, start), min(tiles[number].stop, stop)
        fragments.append((number, crc32c(part[low - start : high - start]), high - low))
    return fragments


def _check(tiles: Sequence[Tile], fragments: Sequence[Fragment], where: str) -> None:
    """Raises Corrupt for the first tile whose fragments, in file order, do not give its sum."""
    by_tile = groupby(fragments, key=itemgetter(0))
    for tile, (_, own) in zip(tiles, by_tile, strict=True):
        _, checksums, lengths = zip(*own, strict=True)
        if joined_crc32c(checksums, lengths) != tile.checksum:
            raise Corrupt(
                f"{where}: {tile.what} (bytes {tile.start} to {tile.stop}) does not match its "
                "checksum; the stored bytes were changed. Take an older step, or restore this file."
            )


def check_tiles(store: Store, key: str, tiles: Sequence[Tile]) -> int:
    """Read bytes of a file whose `tiles` follow each other; returns how many. Raises Corrupt."""
    first, end = tiles[0].start, tiles[-1].stop
    buffer, fragments = aligned_buffer(min(PART_NBYTES, end - first)), list[Fragment]()
    for start in range(first, end, PART_NBYTES):
        part = buffer[: min(PART_NBYTES, end - start)]
        read_into(store, key, start, [part])
        fragments += _fragments(tiles, start, part)
    _check(tiles, fragments, f"{store.url}/{key}")
    return end - first


def is_there(target: Store, key: str, header: bytes, nbytes: int) -> DataFileIndex | None:
    """The index of the file at `key` that an earlier run has finished; None when there is none.

    Files appear whole and checked. On a disk they may have lost bytes since, when the power failed
    before they were synced: they are read once more, and removed when they are damaged. Raises
    CheckpointError when a file with another header is there.
    """
    if not is_written(target, key, nbytes, header):
        return None
    with contextlib.suppress(Corrupt, CorruptObjectError):
        index = index_of(target, key, nbytes)
        # Without a least size of parts it is a disk, or may be one that fsspec has mounted.
        if target.part_nbytes_min == 1:
            check_tiles(target, key, tiles_of(index))
        return index
    # Only a damaged file of our own comes here: its header is byte for byte the one to be written.
    target.delete(key)
    return None
