"""Parts of many ranks, at random: what each wrote of tensors that were cut somehow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.format.checksum import block_count, seal_of
from ckpt.format.codec import encode_values
from ckpt.format.datafile import StoredChunk, order_key
from ckpt.format.joint_manifest import ReplicaDifferences, ReplicaRegions, differing_values
from ckpt.format.manifest import Header, Manifest, int64s
from ckpt.format.part import (
    FileColumns,
    Part,
    PartTexts,
    ReplicaColumns,
    TensorRecord,
    merge_structures,
    part_of_files,
)
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Region, Shape, Span
from ckpt.saving.dedup import identity

BLOCK_BYTES = 16


class Drawn(NamedTuple):
    """What a part is made of."""

    rank: int
    files: tuple[FileColumns, ...]
    tensors: tuple[TensorRecord, ...]
    texts: PartTexts

    @property
    def part(self) -> Part:
        return part_of_files(self.files, rank=self.rank, tensors=self.tensors, texts=self.texts)

    def saying(self, **texts: Any) -> Drawn:
        """With other texts."""
        return self._replace(texts=self.texts._replace(**texts))

    def with_chunks(self, change: Callable[[StoredChunk], StoredChunk]) -> Drawn:
        """With other chunks in the places of its own."""
        files = [one._replace(chunks=list(map(change, one.chunks))) for one in self.files]
        return self._replace(files=tuple(files))


def parts_of(drawn: Sequence[Drawn]) -> list[Part]:
    return [one.part for one in drawn]


def header_of(ranks: int, step: int = 1) -> Header:
    """Of a save by that many ranks."""
    return Header(
        root="0" * 32,
        attempt=f"e000001-{step:016x}",
        step=step,
        world_size=ranks,
        block_bytes=BLOCK_BYTES,
        created_unix=step,
    )


def random_parts(seed: int, ranks: int, tensors: int = 6) -> list[Drawn]:
    """Parts that cover their tensors: runs and columns, even and uneven, on ranks in any order."""
    rng = np.random.default_rng(seed)
    records: list[TensorRecord] = []
    chunks: dict[int, list[StoredChunk]] = {rank: [] for rank in range(ranks)}
    for number in range(tensors):
        shape = tuple(rng.integers(1, 3 * ranks, size=rng.integers(0, 3)).tolist())
        dtype = ("float32", "int8", "float64")[int(rng.integers(3))]
        record = TensorRecord(f"t{number:02d}", dtype, shape, number % 3)
        records.append(record)
        regions = list(_cut(rng, shape, ranks))
        turned = bool(rng.integers(2))
        for index, region in enumerate(regions):
            rank = int(rng.integers(ranks)) if turned else index % ranks
            nbytes = region.numel * DTYPES[dtype].itemsize
            chunks[rank].append(StoredChunk(record.fqn, dtype, shape, region, nbytes, number % 3))
    # Ranks may know a tensor or not, as long as those that write it do.
    return [
        _part(rng, rank, chunks[rank], [r for r in records if rank % 3 or _has(chunks[rank], r)])
        for rank in range(ranks)
    ]


def saved_again(drawn: list[Drawn], seed: int, *, longer_headers: bool = False) -> list[Drawn]:
    """The parts of another save of the same regions: other bytes, and headers that may grow."""
    again = []
    for one in drawn:
        rng = np.random.default_rng([seed, one.rank])
        grown = 4096 * int(longer_headers and one.rank % 2)
        files = [
            file._replace(
                nbytes=file.nbytes + grown,
                data_start=file.data_start + grown,
                offsets=file.offsets + grown,
                checksums=_sums(rng, len(file.checksums)),
                seal=file.seal._replace(digest=rng.bytes(32)),
            )
            for file in one.files
        ]
        values = encode_values({"step": seed}) if one.rank == 0 else b""
        own = encode_values({"rng": bytes([one.rank % 256])})
        one = one.saying(values=values, value_digests={"step": seed}, per_rank=own)
        again.append(one._replace(files=tuple(files)))
    return again


def merged_of(parts: Sequence[Part]) -> Part:
    """The parts of all ranks as one, merged at once."""
    merged = merge_structures([part.structure for part in parts])
    return Part(merged.structure, merged.rest([part.rest for part in parts]))


def differences_of(parts: Sequence[Part]) -> tuple[ReplicaDifferences, list[str]]:
    """Where ranks differ, in replicas and in values."""
    structure, rest, _ = merged_of(parts)
    return ReplicaRegions(structure).differences(rest), differing_values(rest)


Place = tuple[str, Region, str, int]


def places_of(parts: Sequence[Part]) -> set[Place]:
    """Every chunk of the parts: tensor, region, file, first byte."""
    return {
        (chunk.fqn, identity(chunk).region, file.name, byte)
        for part in parts
        for file in part.files
        for chunk, byte in zip(file.chunks, file.offsets.tolist(), strict=True)
    }


def places_in(manifest: Manifest) -> set[Place]:
    """Every chunk of a manifest, likewise."""
    chunks = manifest.chunks
    return {
        (
            manifest.fqns[manifest.tensor_of(chunk)],
            manifest.region(chunk),
            manifest.files[int(chunks.file[chunk])],
            int(chunks.byte_start[chunk]),
        )
        for chunk in range(len(chunks))
    }


def _has(chunks: list[StoredChunk], record: TensorRecord) -> bool:
    return any(chunk.fqn == record.fqn for chunk in chunks)


def _cut(rng: np.random.Generator, shape: Shape, ranks: int) -> Iterator[Region]:
    numel = math.prod(shape)
    kind = int(rng.integers(4))
    if not shape or kind == 0:
        yield Span(0, numel)
    elif kind == 1 and len(shape) == 2:  # by columns
        size = -(-shape[1] // ranks)
        for start in range(0, shape[1], size):
            yield Box((0, start), (shape[0], min(size, shape[1] - start)))
    else:
        size = -(-numel // ranks)
        cuts = np.arange(0, numel, size) if kind == 2 else rng.integers(0, numel, size=ranks)
        edges = sorted({0, numel, *cuts.tolist()})
        for start, stop in pairwise(edges):
            yield Span(start, stop)


def _part(
    rng: np.random.Generator, rank: int, chunks: list[StoredChunk], tensors: list[TensorRecord]
) -> Drawn:
    chunks = sorted(chunks, key=order_key)
    middle = len(chunks) // 2 if rank % 4 == 1 else len(chunks)
    files = [data_file(rng, f"rank{rank:05d}-000.safetensors", chunks[:middle])]
    if middle < len(chunks):
        files.append(data_file(rng, f"rank{rank:05d}-001.safetensors", chunks[middle:]))
    replicas = ReplicaColumns(
        int64s(range(len(tensors))),
        int64s([0] * len(tensors)),
        int64s([0] * len(tensors)),
        np.zeros(len(tensors), dtype=np.uint32),
    )
    values = encode_values({}) if rank == 0 else b""
    texts = PartTexts({}, values, {}, b"", replicas)
    return Drawn(rank, tuple(files), tuple(tensors), texts)


def data_file(rng: np.random.Generator, name: str, chunks: list[StoredChunk]) -> FileColumns:
    """A file with these chunks, and with checksums and a seal at random."""
    nbytes = int64s([chunk.nbytes for chunk in chunks])
    counts = int64s([block_count(int(size), BLOCK_BYTES) for size in nbytes])
    end = 4096 + int(nbytes.sum())
    offsets = 4096 + np.cumsum(nbytes) - nbytes
    sums = _sums(rng, counts.sum())
    seal = seal_of(bytes(8) + sums.tobytes() + bytes(4))
    nbytes = end + seal.nbytes + 64
    return FileColumns(name, nbytes, 4096, chunks, offsets, counts, sums, seal=seal)


def _sums(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    return rng.integers(0, 1 << 32, size=count, dtype=np.uint32)
