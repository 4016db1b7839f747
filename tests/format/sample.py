"""A tiny checkpoint of two ranks with everything the format can hold, the same bytes every time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ckpt.format.checksum import block_checksums
from ckpt.format.codec import encode_values
from ckpt.format.datafile import StoredChunk, checksum_tensor, layout_data_file, order_key
from ckpt.format.describe import data_file_name, file_extras, file_metadata
from ckpt.format.dtypes import DTYPES
from ckpt.format.manifest import Header, Manifest
from ckpt.format.part import Part, PartFile, TensorInfo, build_manifest, make_part
from ckpt.layout.region import Box, Region, Span, boxes_of, row_major_strides, whole

BLOCK_BYTES = 64
STEP_DIR = "steps/00000003-e000001-0123456789abcdef"
HEADER = Header(
    root="00112233445566778899aabbccddeeff",
    attempt="e000001-0123456789abcdef",
    step=3,
    world_size=2,
    block_bytes=BLOCK_BYTES,
    created_unix=1_750_000_000,
    user={"note": "tiny"},
)
TENSORS = (
    TensorInfo("empty", "float16", (0, 3), 2),
    TensorInfo("phase", "complex128", (), 3),
    TensorInfo("steps@seen", "int64", (), 1),
    TensorInfo("weight", "float32", (6, 8), 0),
    TensorInfo("weight.columns", "bfloat16", (4, 6), 0),
    TensorInfo("weight.momentum", "float32", (6, 8), 1),
)
ALIASES = {"tied": "weight"}
VALUES: dict[str, Any] = {"groups": [{"lr": 0.1, "betas": (0.9, 0.999)}], "seed": 2**70, "ü": None}
PER_RANK: list[dict[str, Any]] = [{"rng": b"\x00\x01"}, {"rng": b"\x02"}]
WRITES: tuple[tuple[tuple[str, Region], ...], ...] = (
    (
        ("phase", whole(())),
        ("weight", Box((0, 0), (3, 8))),
        ("weight.columns", Box((0, 0), (4, 3))),
        ("weight.momentum", Span(0, 20)),
    ),
    (
        ("steps@seen", whole(())),
        ("weight", Box((3, 0), (3, 8))),
        ("weight.columns", Box((0, 3), (4, 3))),
        ("weight.momentum", Span(20, 48)),
    ),
)


class Sample(NamedTuple):
    files: dict[str, bytes]
    parts: list[Part]
    manifest: Manifest


def tensor_bytes(info: TensorInfo) -> bytes:
    """The whole tensor's bytes: a count up, different per tensor."""
    numel = int(np.prod(info.shape, dtype=np.int64))
    nbytes = numel * DTYPES[info.dtype].itemsize
    return ((np.arange(nbytes) * 7 + len(info.fqn)) % 256).astype(np.uint8).tobytes()


def region_bytes(info: TensorInfo, region: Region) -> bytes:
    itemsize = DTYPES[info.dtype].itemsize
    data = np.frombuffer(tensor_bytes(info), dtype=np.uint8).reshape(-1, itemsize)
    strides = row_major_strides(info.shape)
    rows = []
    for box in boxes_of(region, info.shape):
        for index in np.ndindex(*box.shape):
            rows.append(
                sum((o + i) * s for o, i, s in zip(box.offset, index, strides, strict=True))
            )
    return data[rows].tobytes()


def make_sample(header: Header = HEADER) -> Sample:
    files, parts = {}, []
    for rank, writes in enumerate(WRITES):
        name, data, part = _rank(header, rank, writes)
        files[name] = data
        parts.append(part)
    return Sample(files, parts, build_manifest(header, parts))


def _rank(
    header: Header, rank: int, writes: tuple[tuple[str, Region], ...]
) -> tuple[str, bytes, Part]:
    infos = {info.fqn: info for info in TENSORS}
    chunks = []
    for fqn, region in writes:
        info = infos[fqn]
        nbytes = region.numel * DTYPES[info.dtype].itemsize
        chunks.append(StoredChunk(fqn, info.dtype, info.shape, region, nbytes, info.kind))
    chunks.sort(key=order_key)
    values = encode_values(VALUES) if rank == 0 else b""
    extras = file_extras(values=values, per_rank=encode_values(PER_RANK[rank]))
    layout = layout_data_file(
        chunks,
        block_bytes=header.block_bytes,
        metadata=file_metadata(
            header, rank=rank, index=0, count=1, empty_tensors=TENSORS[:1], aliases=ALIASES
        ),
        extra={name: len(data) for name, data in extras.items()},
    )
    stored = [region_bytes(infos[chunk.fqn], chunk.region) for chunk in chunks]
    sums = np.concatenate([block_checksums(data, header.block_bytes) for data in stored])
    data = b"".join(
        [layout.header, *stored, *extras.values(), checksum_tensor(layout, sums, extras)]
    )
    assert len(data) == layout.nbytes
    name = data_file_name(rank, 0)
    part = make_part(
        rank=rank,
        files=[PartFile(name, layout, chunks, sums)],
        tensors=TENSORS,
        aliases=ALIASES,
        values=VALUES,
        keeps_values=rank == 0,
        per_rank=PER_RANK[rank],
        replica_digests={},
    )
    return name, data, part
