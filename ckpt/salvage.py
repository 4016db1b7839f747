"""Rebuilds a lost or damaged MANIFEST from the data files of a step alone.

Nothing is committed here: a rebuilt checkpoint becomes visible only through the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, Corrupt, InvalidState
from ckpt.format.checksum import crc32c
from ckpt.format.codec import decode_values
from ckpt.format.datafile import PER_RANK, VALUES, DataFileIndex, read_data_file_index
from ckpt.format.describe import FileDescription, data_file_name, describe_file
from ckpt.format.manifest import Manifest, encode_manifest
from ckpt.format.part import (
    FileColumns,
    Part,
    PartTexts,
    TensorInfo,
    build_manifest,
    part_of_files,
)
from storage.errors import KeyExistsError, KeyNotFoundError
from storage.store import ByteRange, Store

MANIFEST = "MANIFEST"
SUFFIX = ".safetensors"
READ_BYTES = 8 << 20
MISSING_MAX = 10_000  # names listed


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was found below a step's prefix.

    `manifest` is there only when every file is there, every checksum matches and every tensor is
    covered; otherwise
    `missing` and `problems` tell why not.
    """

    prefix: str
    files: tuple[str, ...]
    nbytes_checked: int
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    manifest: Manifest | None

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None


def salvage(store: Store, prefix: str, *, verify: bool = True) -> SalvageReport:
    """Rebuild the manifest of the step directory `prefix` (such as `steps/00000010-e000001-...`).

    Reads every byte and compares all checksums, in little memory; with `verify=False` only headers,
    values and
    the checksums over those. Changes nothing. Raises StorageError when the store does; damaged
    files are reported, not raised.
    """
    prefix = prefix.rstrip("/")
    names = [info for info in store.list(prefix + "/") if _is_data_file(info.key, prefix)]
    found, problems, checked = [], [], 0
    for info in names:
        name = info.key[len(prefix) + 1 :]
        try:
            file = _open_file(store, info.key, name, info.nbytes)
            checked += _check_file(store, info.key, file) if verify else 0
            found.append(file)
        except CheckpointError as error:
            problems.append(str(error))
    missing = _missing(found)
    problems += _contradictions(found)
    manifest = None
    if found and not missing and not problems:
        try:
            manifest = build_manifest(
                found[0].place.header, [_part(rank, own) for rank, own in _by_rank(found).items()]
            )
        except (InvalidState, Corrupt) as error:
            problems.append(str(error))
    if not names:
        problems.append(f"no data files below {prefix}/ in {store.url}")
    present = tuple(sorted(info.key[len(prefix) + 1 :] for info in names))
    return SalvageReport(prefix, present, checked, missing, tuple(problems), manifest)


def write_manifest(store: Store, report: SalvageReport) -> bytes:
    """Create the MANIFEST of a complete report; returns its bytes, whose digest a commit names.

    An equal one that is there already is left alone. Raises InvalidState when the report is
    incomplete, Corrupt when
    another MANIFEST is there: it is not overwritten.
    """
    if report.manifest is None:
        missing = [f"{name}: missing" for name in report.missing]
        raise InvalidState([*missing, *report.problems] or ["nothing was salvaged"])
    data = encode_manifest(report.manifest)
    key = f"{report.prefix}/{MANIFEST}"
    try:
        store.put_if_absent(key, data)
    except KeyExistsError:
        if store.get(key) != data:
            raise Corrupt(
                f"{key} exists and differs from what the data files tell: move it away, then repeat"
            ) from None
    return data


def matches_manifest(store: Store, report: SalvageReport) -> bool | None:
    """Whether the MANIFEST that is there equals the rebuilt one; None when there is none."""
    with contextlib.suppress(KeyNotFoundError):
        there = store.get(f"{report.prefix}/{MANIFEST}")
        return report.manifest is not None and there == encode_manifest(report.manifest)
    return None


class _File(NamedTuple):
    name: str
    described: DataFileIndex
    place: FileDescription
    values: bytes
    per_rank: bytes


def _is_data_file(key: str, prefix: str) -> bool:
    return key.endswith(SUFFIX) and "/" not in key[len(prefix) + 1 :]


def _open_file(store: Store, key: str, name: str, nbytes: int) -> _File:
    def read(start: int, stop: int) -> bytes:
        return store.get(key, ByteRange(start, stop))

    index = read_data_file_index(read, nbytes, name=key)
    try:
        place = describe_file(index)
    except Corrupt as error:
        raise Corrupt(f"{key}: {error}") from error
    if place.header.block_bytes != index.block_bytes:
        raise Corrupt(f"{key}: block_bytes {index.block_bytes}, header {place.header.block_bytes}")
    extras = {}
    for extra, (start, size) in index.extras.items():
        data = read(start, start + size)
        if crc32c(data) != index.extra_checksums[extra]:
            raise Corrupt(f"{key}: {extra} does not match its checksum")
        extras[extra] = data
    for extra in (VALUES, PER_RANK):
        if extra in extras:
            decode_values(extras[extra])
    return _File(name, index, place, extras.get(VALUES, b""), extras.get(PER_RANK, b""))


def _check_file(store: Store, key: str, file: _File) -> int:
    """Compare all block checksums; returns the bytes read. Raises Corrupt naming chunk and
    block.
    """
    index = file.described
    block_bytes = index.block_bytes
    # Small chunks are read together: a request per KiB would take hours on an object store.
    step = max(READ_BYTES // block_bytes, 1) * block_bytes
    window, window_start = memoryview(b""), 0
    total = 0
    for at, chunk in enumerate(index.chunks):
        start = int(index.offsets[at])
        first = int(index.first_block[at])
        for block in range(int(index.first_block[at + 1]) - first):
            low = start + block * block_bytes
            high = min(low + block_bytes, start + chunk.nbytes)
            if high > window_start + len(window):
                stop = min(max(low + step, high), index.checksum_offset)
                window, window_start = memoryview(store.get(key, ByteRange(low, stop))), low
                total += stop - low
            if crc32c(window[low - window_start : high - window_start]) != int(
                index.checksums[first + block]
            ):
                raise Corrupt(f"{key}: block {block} of {chunk.fqn} {chunk.region} is damaged")
    return total


def _missing(files: Sequence[_File]) -> tuple[str, ...]:
    """Names of files that other files tell of. A rank of which nothing is there lacks its first
    file.
    """
    if not files:
        return ()
    by_rank = _by_rank(files)
    missing: list[str] = []
    for rank in range(files[0].place.header.world_size):
        own = [file.place for file in by_rank.get(rank, ())]
        there = {place.file_index for place in own}
        count = max((place.file_count for place in own), default=1)
        names = (data_file_name(rank, at) for at in range(count) if at not in there)
        missing += islice(names, MISSING_MAX - len(missing))
        if len(missing) >= MISSING_MAX:  # a crafted file can claim billions of ranks
            break
    return tuple(missing)


def _by_rank(files: Sequence[_File]) -> dict[int, list[_File]]:
    by_rank: dict[int, list[_File]] = {}
    for file in sorted(files, key=lambda file: (file.place.rank, file.place.file_index)):
        by_rank.setdefault(file.place.rank, []).append(file)
    return by_rank


def _contradictions(files: Sequence[_File]) -> list[str]:
    """Files of different attempts, or two files for one place."""
    problems = []
    for rank, own in _by_rank(files).items():
        places: dict[int, str] = {}
        for file in own:
            if file.place.header != files[0].place.header:
                problems.append(f"{file.name}: its header differs from that of {files[0].name}")
            if file.place.file_count != own[0].place.file_count:
                problems.append(
                    f"{file.name}: differs from {own[0].name} in how many files there are"
                )
            other = places.setdefault(file.place.file_index, file.name)
            if other != file.name:
                problems.append(f"{file.name}: is the same file of rank {rank} as {other}")
    return problems


def _part(rank: int, files: Sequence[_File]) -> Part:
    """What the rank would have sent to the lead, as far as the manifest needs it."""
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for chunk in file.described.chunks:
            info = TensorInfo(chunk.fqn, chunk.dtype, chunk.global_shape, chunk.kind)
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
        )
        for file in files
    ]
    texts = PartTexts(
        aliases=files[0].place.aliases,
        values=files[0].values,
        value_digests={},
        per_rank=files[0].per_rank,
        replica_digests={},
        warnings=(),
    )
    return part_of_files(columns, rank=rank, tensors=list(infos.values()), texts=texts)
