"""Data files without a manifest: what their headers say, and the parts that it makes.

A manifest that is lost, or that was never written, is built of these, as of the parts of a save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.checksum import Digests
from ckpt.format.codec import decode_values
from ckpt.format.datafile import DIGESTS, PER_RANK, VALUES
from ckpt.format.datafile_index import DataFileIndex, read_data_file_index
from ckpt.format.part import FileColumns, Part, PartTexts, TensorRecord, part_of_files
from ckpt.format.rank_files import FileDescription, describe_file
from ckpt.format.stored_index import digests_in, extra_of, read_bytes
from storage.store import Store


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
