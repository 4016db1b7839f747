"""Data files in a store, opened: indexes in headers, reserved tensors, checksum tables.

A manifest that is lost, or that was never written, is built of what they say, as of the parts of a
save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.checksum import (
    DIGEST_NBYTES,
    BlockChecksums,
    Digests,
    Seal,
    crc32c,
    digests_from,
    no_digests,
    once_more,
    raising_corrupt,
    seal_of,
)
from ckpt.format.codec import decode_values
from ckpt.format.datafile import DIGESTS, PER_RANK, VALUES
from ckpt.format.datafile_index import DataFileIndex, read_data_file_index
from ckpt.format.manifest import Manifest
from ckpt.format.object_parts import FileDescription, describe_file
from ckpt.format.part import FileColumns, Part, PartTexts, TensorRecord, part_of_files
from storage import ShortReadError, Store

READ_NBYTES = 8 << 20


def read_into(
    store: Store, key: str, start: int, buffers: Sequence[memoryview], *, direct: bool = False
) -> None:
    """`get_into` of a data file. Raises Corrupt when the file ends too early, or is encoded and
    damaged.
    """
    try:
        with raising_corrupt():
            (store.get_direct_into if direct else store.get_into)(key, start, buffers)
    except ShortReadError as error:
        raise Corrupt(
            f"{error}: the file was cut. Load an older step, or restore this file from a copy."
        ) from error


def read_bytes(store: Store, key: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a data file. Raises Corrupt when the file ends too early."""
    data = bytearray(stop - start)
    if data:
        read_into(store, key, start, [memoryview(data)])
    return bytes(data)


def index_of(store: Store, key: str, nbytes: int, header_nbytes: int = 0) -> DataFileIndex:
    """The index in a data file's header. `header_nbytes`, where they are known, are read at once.

    Raises Corrupt, UnsupportedFormat, the store's errors.
    """

    def index() -> DataFileIndex:
        head = read_bytes(store, key, 0, header_nbytes)

        def read(start: int, stop: int) -> bytes:
            return head[start:stop] if stop <= len(head) else read_bytes(store, key, start, stop)

        return read_data_file_index(read, nbytes, name=f"{store.url}/{key}")

    return once_more(index)


def check_seal(actual: Seal, expected: Seal, where: str) -> None:
    """Raises Corrupt, naming the file, unless its checksum table is the one of the manifest."""
    if actual != expected:
        raise Corrupt(
            f"{where}: its checksums ({actual.nbytes} bytes) are not those that MANIFEST has the "
            f"digest of ({expected.nbytes} bytes): they were changed, or the file belongs to "
            "another checkpoint. Load an older step, or restore this file from a copy."
        )


def check_table(table: bytes | memoryview, expected: Seal, where: str) -> None:
    """Raises Corrupt, naming the file, unless `table` has this seal."""
    check_seal(seal_of(table), expected, where)


def check_blocks(store: Store, key: str, index: DataFileIndex) -> None:
    """Read all chunks of a data file. Raises Corrupt unless each block matches its checksum."""
    ends: list[int] = []
    chunks_nbytes = 0
    for chunk in index.chunks:
        begin, chunks_nbytes = chunks_nbytes, chunks_nbytes + chunk.nbytes
        ends += range(begin + index.block_bytes, chunks_nbytes, index.block_bytes)
        ends += [chunks_nbytes] if chunk.nbytes else []
    sums = BlockChecksums(ends)
    first = len(index.header)  # the chunks follow it, one right after the other
    buffer = memoryview(bytearray(min(READ_NBYTES, chunks_nbytes)))
    for start in range(0, chunks_nbytes, READ_NBYTES):
        run = buffer[: min(READ_NBYTES, chunks_nbytes - start)]
        read_into(store, key, first + start, [run])
        sums.add(run)
    damaged = np.flatnonzero(sums.result() != index.checksums)
    if len(damaged):
        chunk = index.chunks[int(np.searchsorted(index.first_block, damaged[0], side="right")) - 1]
        raise Corrupt(
            f"{store.url}/{key}: {len(damaged)} of {len(ends)} blocks do not match their "
            f"checksums, the first one of {chunk.fqn!r}"
        )


def extra_of(store: Store, key: str, index: DataFileIndex, extra: str) -> bytes:
    """The bytes of a reserved tensor. Raises Corrupt unless they match their checksum."""
    start, nbytes = index.extras[extra]

    def read() -> bytes:
        data = read_bytes(store, key, start, start + nbytes)
        if crc32c(data) != index.extra_checksums[extra]:
            raise Corrupt(f"{key}: {extra} does not match its checksum")
        return data

    return once_more(read)


class StoredSums(NamedTuple):
    """What a data file says of its chunks' bytes: its index, and a digest per chunk."""

    described: DataFileIndex
    digests: Digests


def stored_sums(store: Store, key: str, manifest: Manifest, file: int) -> StoredSums | None:
    """What data file number `file` of a manifest, at `key`, says of its chunks; None without
    digests. Raises Corrupt unless it is the file that the manifest has the seal of, and the store's
    errors.
    """
    nbytes, header_nbytes = int(manifest.file_nbytes[file]), int(manifest.file_data_start[file])
    index = index_of(store, key, nbytes, header_nbytes)
    check_seal(index.seal, manifest.seals.of_file(file), f"{store.url}/{key}")
    if DIGESTS not in index.extras:
        return None
    return StoredSums(index, digests_in(key, index, extra_of(store, key, index, DIGESTS)))


def digests_in(key: str, index: DataFileIndex, data: bytes | None) -> Digests:
    """A row per chunk of what the reserved tensor of digests holds; no rows without one."""
    if data is None:
        return no_digests()
    if len(data) != DIGEST_NBYTES * len(index.chunks):
        raise Corrupt(f"{key}: {DIGESTS} has {len(data)} bytes for {len(index.chunks)} chunks")
    return digests_from(data)


class OpenedFile(NamedTuple):
    """A data file of which everything but the bytes of its chunks was read and checked.

    `referenced` are chunks that its rank has in files of other attempts.
    """

    name: str
    described: DataFileIndex
    place: FileDescription
    values: bytes
    per_rank: bytes
    digests: Digests
    referenced: tuple[FileColumns, ...] = ()


def open_file(store: Store, key: str, name: str, nbytes: int) -> OpenedFile:
    """Open a data file of `nbytes`, called `name` in its checkpoint.

    Raises Corrupt, UnsupportedFormat, the store's errors.
    """
    index, place = open_index(store, key, nbytes)
    extras = {extra: extra_of(store, key, index, extra) for extra in index.extras}
    for extra in (VALUES, PER_RANK):
        # Raises Corrupt: a manifest with values that nothing can decode would load nowhere.
        if extra in extras:
            decode_values(extras[extra])
    return OpenedFile(
        name,
        index,
        place,
        extras.get(VALUES, b""),
        extras.get(PER_RANK, b""),
        digests_in(key, index, extras.get(DIGESTS)),
    )


def open_index(store: Store, key: str, nbytes: int) -> tuple[DataFileIndex, FileDescription]:
    """The index of a data file, and what it states about its place. Raises like `open_file`."""
    index = read_data_file_index(partial(read_bytes, store, key), nbytes, name=key)
    try:
        place = describe_file(index)
    except Corrupt as error:
        raise Corrupt(f"{key}: {error}") from error
    if place.header.block_bytes != index.block_bytes:
        raise Corrupt(f"{key}: block_bytes {index.block_bytes}, header {place.header.block_bytes}")
    return index, place


def files_by_rank(files: Sequence[OpenedFile]) -> dict[int, list[OpenedFile]]:
    """The files of each rank, in their order."""
    ranks: dict[int, list[OpenedFile]] = {}
    for file in sorted(files, key=lambda file: (file.place.rank, file.place.file_index)):
        ranks.setdefault(file.place.rank, []).append(file)
    return ranks


def contradictions(files: Sequence[OpenedFile]) -> list[str]:
    """Files of different attempts, or two files for one place."""
    problems = []
    has_digests = any(len(file.digests) or file.referenced for file in files)
    for rank, own in files_by_rank(files).items():
        places: dict[int, str] = {}
        for file in own:
            if file.place.header != files[0].place.header:
                problems.append(f"{file.name}: its header differs from that of {files[0].name}")
            if file.place.file_count != own[0].place.file_count:
                problems.append(
                    f"{file.name}: differs from {own[0].name} in how many files there are"
                )
            if bool(len(file.digests)) != has_digests and file.described.chunks:
                problems.append(
                    f"{file.name}: has digests of its chunks, or lacks them, unlike others"
                )
            other = places.setdefault(file.place.file_index, file.name)
            if other != file.name:
                problems.append(f"{file.name}: is the same file of rank {rank} as {other}")
    return problems


def part_of_rank(rank: int, files: Sequence[OpenedFile]) -> Part:
    """What a rank would have sent to the coordinator, as far as the manifest needs it."""
    infos: dict[str, TensorRecord] = {}
    shared = [columns for file in files for columns in file.referenced]
    for chunks in (*(file.described.chunks for file in files), *(file.chunks for file in shared)):
        for chunk in chunks:
            info = TensorRecord(chunk.fqn, chunk.dtype, chunk.global_shape, chunk.kind)
            if infos.setdefault(chunk.fqn, info) != info:
                raise Corrupt(f"{chunk.fqn}: described as {info} and as {infos[chunk.fqn]}")
    for info in files[0].place.empty_tensors:
        infos.setdefault(info.fqn, info)
    columns = [
        FileColumns(
            name=file.name,
            nbytes=file.described.nbytes,
            data_start=len(file.described.header),
            chunks=file.described.chunks,
            offsets=file.described.offsets,
            block_counts=np.diff(file.described.first_block),
            checksums=file.described.checksums,
            digests=file.digests,
            seal=file.described.seal,
        )
        for file in files
    ]
    texts = PartTexts(files[0].place.aliases, files[0].values, per_rank=files[0].per_rank)
    return part_of_files([*columns, *shared], rank=rank, tensors=list(infos.values()), texts=texts)
