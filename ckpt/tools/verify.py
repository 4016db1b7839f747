"""Read a whole checkpoint and report everything that is not as it was written.

Every block of every chunk against the manifest, and every data file against its own header, so that
both ways to the data (manifest, salvage) are known to work.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from ckpt.commit.locate import file_key
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.checksum import crc32c_of_each
from ckpt.format.datafile import DIGESTS
from ckpt.format.datafile_index import DataFileIndex, extra_of, index_of, read_into
from ckpt.format.manifest import Int64s, Manifest, is_reference
from ckpt.loading.block_sums import BlockSums
from ckpt.loading.contents import LocatedCheckpoint
from ckpt.short import ShortRecord
from storage import CorruptObjectError, KeyNotFoundError, ShortReadError, Store
from storage.ranges import aligned_buffer
from storage.threads import in_order

MIB = 1 << 20
READ_NBYTES = 8 * MIB

Progress: TypeAlias = Callable[[int, int], None]


class Damage(NamedTuple):
    """Something that differs from what was written, in bytes `start` to `stop` of `file`.

    `fqn` is "" and `block` is -1 when the file as a whole is damaged.
    """

    file: str
    fqn: str
    block: int
    start: int
    stop: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(ShortRecord):
    """What `verify` looked at and found. `damage` is in file order."""

    url: str
    step: int
    attempt: str
    files: int
    blocks: int
    nbytes: int
    damage: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written, or without `blocks`, can be read."""
        return not self.damage


def verify_located(
    store: Store, located: LocatedCheckpoint, threads: int, progress: Progress | None
) -> VerifyReport:
    """Read all bytes of a checkpoint that is leased. See `ckpt.verify`."""
    manifest = located.manifest
    # Bytes of the own data files, and of what is needed of others.
    nbytes = manifest.own_nbytes + sum(manifest.nbytes_referenced().values())
    sums = BlockSums(store, located.prefix, manifest)
    damage = _all_damage(sums, threads, nbytes, progress or (lambda done, total: None))
    damage.sort(key=lambda entry: (entry.file, entry.start, entry.block))
    return VerifyReport(
        url=f"{store.url.rstrip('/')}/{located.prefix}".rstrip("/"),
        step=manifest.header.step,
        attempt=manifest.header.attempt,
        files=len(manifest.files),
        blocks=manifest.block_count,
        nbytes=nbytes,
        damage=tuple(damage),
    )


def read_other(store: Store, located: LocatedCheckpoint) -> VerifyReport:
    """Read all bytes of what another library has written: that is all that can be said of it.
    Raises Corrupt where they cannot be read.
    """
    header, nbytes = located.manifest.header, located.manifest.own_nbytes
    buffer = memoryview(bytearray(min(READ_NBYTES, nbytes)))
    with closing(store):
        for start in range(0, nbytes, READ_NBYTES):
            read_into(store, located.manifest.files[0], start, [buffer[: nbytes - start]])
    return VerifyReport(store.url, header.step, header.attempt, 1, 0, nbytes, ())


# A block: the chunk, its number in the chunk, its first byte in the file, and the one behind it.
_Block = tuple[int, int, int, int]


def _all_damage(sums: BlockSums, threads: int, total: int, progress: Progress) -> list[Damage]:
    store, prefix, manifest = sums.store, sums.directory, sums.manifest
    damage: list[Damage] = []
    done, lengths, known = 0, [], []
    for file, name in enumerate(manifest.files):
        # Values in a file of another checkpoint are that one's; damage to them does no harm here.
        extras = {DIGESTS} if is_reference(name) else None
        nbytes = int(manifest.file_nbytes[file])
        key = file_key(prefix, name)
        damaged, length, index = _file_damage(store, key, nbytes, extras)
        lost = "cut off"
        if length >= nbytes:
            lost = ""
            try:
                if index is None:
                    sums.read(file)
                else:
                    sums.describe(file, index)
            except (Corrupt, UnsupportedFormat) as error:
                lost = str(error)
        # Where the file's own header or end is damaged, that has been said.
        damage += damaged or ([Damage(key, "", -1, 0, nbytes, lost)] if lost else [])
        lengths.append(length)
        known.append(not lost)
    damage += _cut_off(sums, np.array(lengths, dtype=np.int64))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    # A run ends with the block that goes beyond READ_NBYTES, so there is room for one block more.
    for _ in range(threads):
        buffers.put(aligned_buffer(READ_NBYTES + manifest.header.block_bytes))

    def check(run: tuple[int, list[_Block]]) -> tuple[int, list[Damage]]:
        buffer, (file, blocks) = buffers.get(), run
        try:
            damaged = _run_damage(sums, file, blocks, buffer, known=known[file])
            # Requested once more, as by a load: bytes may have changed on their way.
            again = damaged and _run_damage(sums, file, blocks, buffer, known=known[file])
            return blocks[-1][3] - blocks[0][2], again
        finally:
            buffers.put(buffer)

    # A few at a time: all runs of a large checkpoint would fill the memory.
    runs = _runs(manifest, lengths)
    for nbytes, damaged in in_order(
        check, runs, threads=threads, name="ckpt-verify", ahead=2 * threads
    ):
        damage += damaged
        done += nbytes
        progress(done, total)
    progress(total, total)
    return damage


def _file_damage(
    store: Store, key: str, nbytes: int, extras: Container[str] | None
) -> tuple[list[Damage], int, DataFileIndex | None]:
    """What is wrong with a file apart from its chunks, how many bytes of it can be read, and its
    index.

    Of its reserved tensors `extras` are looked at; None stands for all.
    """

    def whole_file(text: str) -> Damage:
        return Damage(key, "", -1, 0, nbytes, text)

    try:
        found_nbytes = store.info(key).nbytes
    except KeyNotFoundError:
        return [whole_file(f"{key}: the file is missing ({nbytes} bytes)")], 0, None
    except CorruptObjectError as error:
        return [whole_file(str(error))], nbytes, None
    if found_nbytes != nbytes:
        # Its blocks are still read: they say which tensors a cut file has lost.
        text = f"{key}: {found_nbytes} bytes long, written were {nbytes}"
        return [whole_file(text)], found_nbytes, None

    try:
        index = index_of(store, key, nbytes)
    except (Corrupt, UnsupportedFormat) as error:
        return [whole_file(str(error))], nbytes, None
    damage = []
    for name, (offset, extra_nbytes) in index.extras.items():
        if extras is not None and name not in extras:
            continue
        stop = offset + extra_nbytes
        try:
            extra_of(store, key, index, name)
        except Corrupt as error:
            text = f"{error} (bytes {offset} to {stop})"
            damage.append(Damage(key, name, 0, offset, stop, text))
    return damage, nbytes, index


def _cut_off(sums: BlockSums, lengths: Int64s) -> list[Damage]:
    """What lies behind the end of files that are shorter than written: an entry for each tensor
    there, however many blocks it has.
    """
    manifest, chunks = sums.manifest, sums.manifest.chunks
    # One that is missing has been reported as a whole.
    short = (lengths < manifest.file_nbytes) & (lengths > 0)
    behind = np.flatnonzero(short[chunks.file] & (chunks.byte_start >= lengths[chunks.file]))
    tensors = np.searchsorted(chunks.first, behind, side="right") - 1
    _, firsts, counts = np.unique(
        np.stack([chunks.file[behind], tensors]), axis=1, return_index=True, return_counts=True
    )
    damage = []
    for row, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        chunk, fqn = int(behind[row]), manifest.fqns[int(tensors[row])]
        file, start = int(chunks.file[chunk]), int(chunks.byte_start[chunk])
        key = sums.keys[file]
        text = f"{key}: {count} chunks of {fqn!r} (from byte {start} on) are behind its end"
        stop = start + manifest.chunk_nbytes(chunk)
        damage.append(Damage(key, fqn, 0, start, stop, text))
    return damage


def _runs(manifest: Manifest, lengths: Sequence[int]) -> Iterator[tuple[int, list[_Block]]]:
    """All blocks of the checkpoint that begin within the `lengths` of files, file after file, in
    runs of about READ_NBYTES that follow each other in one file; and the file of each run.
    """
    chunks = manifest.chunks
    block_nbytes = manifest.header.block_bytes
    # What begins behind the end of a cut file was reported as a whole: see `_cut_off`.
    inside = np.flatnonzero(chunks.byte_start < np.array(lengths, dtype=np.int64)[chunks.file])
    # As bytes lie in files, and not by name: a request of 8 MiB then holds many small chunks.
    order = inside[np.lexsort((chunks.byte_start[inside], chunks.file[inside]))]
    run: list[_Block] = []
    of_file = -1
    for chunk in order.tolist():
        file, start = int(chunks.file[chunk]), int(chunks.byte_start[chunk])
        # Of a tensor that is cut off, the first block behind the end says so.
        end = min(start + manifest.chunk_nbytes(chunk), lengths[file] + block_nbytes)
        for number, offset in enumerate(range(start, end, block_nbytes)):
            stop = min(offset + block_nbytes, end)
            follows = run and of_file == file and run[-1][3] == offset
            if run and not (follows and run[-1][3] - run[0][2] < READ_NBYTES):
                yield of_file, run
                run = []
            of_file = file
            run.append((chunk, number, offset, stop))
    if run:
        yield of_file, run


def _run_damage(
    sums: BlockSums, file: int, run: Sequence[_Block], buffer: memoryview, *, known: bool
) -> list[Damage]:
    """What is wrong with blocks; where their checksums are not `known`, only whether they end."""
    manifest = sums.manifest
    key, start = sums.keys[file], run[0][2]
    data = buffer[: run[-1][3] - start]
    try:
        sums.store.get_into(key, start, [data])
    except (ShortReadError, KeyNotFoundError):
        # The length of the file has been reported; say which tensors that costs.
        return [_damage(manifest, key, block, "is cut off") for block in run]
    except CorruptObjectError:
        # One damaged place fails the whole request: each block by itself shows where it is.
        if len(run) == 1:
            return [_damage(manifest, key, run[0], "is stored encoded, and was damaged")]
        each = (_run_damage(sums, file, [block], buffer, known=known) for block in run)
        return [entry for damage in each for entry in damage]
    if not known:
        return []
    blocks = np.array(run, dtype=np.int64)
    expected = sums.of_blocks(blocks[:, 0], blocks[:, 1]).tolist()
    actual = crc32c_of_each(data, (blocks[:, 3] - blocks[:, 2]).tolist())
    return [
        _damage(manifest, key, block, "does not match its checksum")
        for block, checksum, own in zip(run, expected, actual, strict=True)
        if checksum != own
    ]


def _damage(manifest: Manifest, key: str, block: _Block, what: str) -> Damage:
    chunk, number, start, stop = block
    fqn = manifest.fqns[manifest.tensor_of(chunk)]
    text = f"{key}: block {number} of {fqn!r} (bytes {start} to {stop}) {what}"
    return Damage(key, fqn, number, start, stop, text)


def summary(damage: Sequence[Damage]) -> str:
    """One line: how many files and tensors are concerned."""
    files = len({entry.file for entry in damage})
    tensors = len({entry.fqn for entry in damage if entry.fqn})
    return f"{len(damage)} damaged places in {files} files, {tensors} tensors concerned"
