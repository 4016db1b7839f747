"""A tiny checkpoint of two ranks with everything the format can hold, the same bytes every time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ckpt.format.checksum import (
    block_checksums,
    digest_of,
    seal_of,
)
from ckpt.format.datafile import (
    StoredChunk,
    checksum_tensor,
    file_entries,
    order_key,
)
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Header, Manifest
from ckpt.format.object_parts import rank_files
from ckpt.format.part import Part, PartTexts, TensorRecord, part_of_files
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Region, Span, boxes_of, row_major_strides, whole
from ckpt.saving.dedup import Division, divide, known_of_part

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
INCREMENTS = tuple(
    HEADER.model_copy(
        update={
            "step": 10 + number,
            "attempt": f"e000001-{number:016x}",
            "created_unix": 1_760_000_000 + number,
            "required": ("references",) if number else (),
        }
    )
    for number in range(3)
)
TRAINED = ("phase", "weight.columns")  # what changes from one increment to the next
TENSORS = (
    TensorRecord("empty", "float16", (0, 3), 2),
    TensorRecord("phase", "complex128", (), 3),
    TensorRecord("steps@seen", "int64", (), 1),
    TensorRecord("weight", "float32", (6, 8), 0),
    TensorRecord("weight.columns", "bfloat16", (4, 6), 0),
    TensorRecord("weight.momentum", "float32", (6, 8), 1),
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


def tensor_bytes(info: TensorRecord, trained: int = 0) -> bytes:
    """The whole tensor's bytes: a count up, different per tensor; `trained` adds to two of them."""
    numel = int(np.prod(info.shape, dtype=np.int64))
    nbytes = numel * DTYPES[info.dtype].itemsize
    base = len(info.fqn) + (trained if info.fqn in TRAINED else 0)
    return ((np.arange(nbytes) * 7 + base) % 256).astype(np.uint8).tobytes()


def region_bytes(info: TensorRecord, region: Region, trained: int = 0) -> bytes:
    itemsize = DTYPES[info.dtype].itemsize
    data = np.frombuffer(tensor_bytes(info, trained), dtype=np.uint8).reshape(-1, itemsize)
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


def increment_dir(header: Header) -> str:
    return f"steps/{header.step:08d}-{header.attempt}"


def make_increments() -> list[Sample]:
    """Three saves with dedup: a first one, one that trained two tensors, one that trained them
    again. Both later ones refer to the first one's files."""
    samples: list[Sample] = []
    parts: list[Part] = []
    before = INCREMENTS[0]
    for trained, header in enumerate(INCREMENTS):
        files, known = {}, [known_of_part(part, before) for part in parts]
        parts = []
        for rank, writes in enumerate(WRITES):
            chunks = _chunks(writes)
            stored = [region_bytes(_INFOS[c.fqn], c.region, trained) for c in chunks]
            division = divide(
                chunks,
                [digest_of([data]) for data in stored],
                lambda index, stored=stored: block_checksums(stored[index], BLOCK_BYTES),
                known=known[rank] if known else {},
                allowed=[attempt.attempt for attempt in INCREMENTS],
            )
            name, data, part = _rank(header, rank, writes, trained=trained, division=division)
            files[name] = data
            parts.append(part)
        before = header
        samples.append(Sample(files, parts, build_manifest(header, parts)))
    return samples


_INFOS = {info.fqn: info for info in TENSORS}


def _chunks(writes: tuple[tuple[str, Region], ...]) -> list[StoredChunk]:
    chunks = []
    for fqn, region in writes:
        info = _INFOS[fqn]
        nbytes = region.numel * DTYPES[info.dtype].itemsize
        chunks.append(StoredChunk(fqn, info.dtype, info.shape, region, nbytes, info.kind))
    return sorted(chunks, key=order_key)


def _rank(
    header: Header,
    rank: int,
    writes: tuple[tuple[str, Region], ...],
    *,
    trained: int = 0,
    division: Division | None = None,
) -> tuple[str, bytes, Part]:
    chunks = _chunks(writes)
    if division is not None:
        chunks = [chunks[index] for index in division.written]
    stored = [region_bytes(_INFOS[chunk.fqn], chunk.region, trained) for chunk in chunks]
    entries = file_entries(chunks, header.block_bytes)
    texts = PartTexts.of(ALIASES, VALUES, PER_RANK[rank], sends=None if rank else VALUES)
    (file,) = rank_files(
        [entries],
        header,
        rank,
        texts,
        empty_tensors=TENSORS[:1],
        references=division.ranges if division else (),
        digests=[digest_of([data]) for data in stored] if division else None,
    )
    none = np.zeros(0, dtype=np.uint32)
    sums = np.concatenate([none, *(block_checksums(data, header.block_bytes) for data in stored)])
    table = checksum_tensor(file.header, sums, file.extras)
    data = b"".join([file.header, *stored, *file.extras.values(), table])
    assert len(data) == file.nbytes
    name = file.name
    referenced = division.referenced if division else ()
    columns = file.columns(sums, seal_of(table))
    part = part_of_files([columns, *referenced], rank=rank, tensors=TENSORS, texts=texts)
    return name, data, part
