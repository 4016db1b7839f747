"""Data files: safetensors files whose `__metadata__` and reserved last tensor make them
self-describing.

FORMAT.md, "Data files", is the specification. Writers plan a file with `layout_data_file`, write
header, chunks and extras in any order, and end it with `checksum_tensor`. `datafile_index` reads
such a file back without its manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from typing import NamedTuple

import numpy as np

from ckpt.errors import Corrupt, InvalidState
from ckpt.format.checksum import Int64s, Uint32s, crc32c
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Region, Shape, Span, is_inside, whole

VERSION = 1
ALIGNMENT = 4096  # tensor bytes start at a multiple: O_DIRECT and mmap want it
BLOCK_BYTES = 1 << 20  # what a read of some elements reads and checks at least
HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors readers
NDIM_MAX = 64  # torch's own
SMALL_NBYTES_MAX = 16 << 10  # chunks up to this size lie together, and are read together
CACHE_LINE_NBYTES = 64
CHECKSUMS = "__ckpt_checksums__"
VALUES = "__ckpt_values__"
PER_RANK = "__ckpt_per_rank__"
DIGESTS = "__ckpt_digests__"
CHECKSUM_MAGIC = int.from_bytes(b"CKS1", "little")

REGION_LENGTH_MAX = 40 * NDIM_MAX  # of the text: two numbers of 19 digits for each dimension
SHAPES_KEPT_MAX = 1024  # thousands of chunks share a few shapes and regions: worked out once

_RESERVED = ("__metadata__", "__ckpt_")


class StoredChunk(NamedTuple):
    """One region of one tensor as a writer wants to store it. `dtype` is the canonical name."""

    fqn: str
    dtype: str
    global_shape: Shape
    region: Region
    nbytes: int
    kind: int


def order_key(chunk: StoredChunk) -> tuple[bool, int, str, int, Region]:
    """Sorts chunks into the order of a file: large even ones first, then widest elements, then
    name.

    All elements are then aligned, the large chunks to cache lines, and the small ones lie together.
    """
    shape, region = chunk.global_shape, chunk.region
    itemsize = DTYPES[chunk.dtype].itemsize
    first = region_start(region, shape)
    return (is_small_or_uneven(chunk.nbytes), -itemsize, chunk.fqn, first, region)


def is_small_or_uneven(nbytes: int) -> bool:
    """Whether a chunk goes after the large even ones, which keep each other on cache lines."""
    # A counter of 4 bytes between moments cost the reads of all behind it 10 %.
    return nbytes <= SMALL_NBYTES_MAX or nbytes % CACHE_LINE_NBYTES != 0


def region_start(region: Region, shape: Shape) -> int:
    """The row-major index of the first element of `region` in a tensor of `shape`."""
    if isinstance(region, Span):
        return region.start
    if region.shape == shape:
        return 0
    start = 0
    for offset, size in zip(region.offset, shape, strict=True):
        start = start * size + offset
    return start


@dataclass(frozen=True, slots=True, eq=False)
class FileEntries:
    """The part of a file's layout that depends on its chunks alone; see `file_entries`."""

    chunks: Sequence[StoredChunk]
    block_bytes: int
    text: bytes  # the JSON entries of the chunks, with a comma after each
    metadata: Mapping[str, str]
    ends: Int64s  # [chunks], from the first tensor byte on
    block_counts: Int64s  # [chunks]
    block_ends: Sequence[int]  # [blocks], from the first tensor byte on

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.ends[-1]) if len(self.ends) else 0


def file_entries(chunks: Sequence[StoredChunk], block_bytes: int) -> FileEntries:
    """The part of a layout that a later file of the same chunks can use again.

    Chunks are in the order given (see `order_key`), none of them empty. Raises InvalidState naming
    the fqns when a chunk cannot be stored.
    """
    if block_bytes <= 0 or block_bytes % 16:
        raise ValueError(f"block_bytes is {block_bytes}, expected a positive multiple of 16")
    entries, shapes, dtypes = _entries(chunks)
    _, _, _, _, nbytes, kinds = zip(*chunks, strict=True) if chunks else ((),) * 6
    sizes = np.array(nbytes, dtype=np.int64)
    ends = np.cumsum(sizes)
    # Blocks begin anew at each chunk, so that a chunk's checksums do not depend on its place.
    counts = -(-sizes // block_bytes)
    starts = [0, *ends.tolist()]
    text = [
        f'{name}"data_offsets":[{start},{stop}]}},'
        for name, start, stop in zip(entries, starts, starts[1:], strict=False)
    ]
    metadata = {"ckpt.format": str(VERSION), "ckpt.block_bytes": str(block_bytes)}
    metadata["ckpt.kinds"] = "".join(map("{:x}".format, kinds))
    if len(metadata["ckpt.kinds"]) != len(chunks):
        raise ValueError("a kind is outside of 0 to 15")
    if any(shapes):
        metadata["ckpt.shapes"] = ";".join(shapes)
    if any(dtypes):
        metadata["ckpt.dtypes"] = ";".join(dtypes)
    # Where each block of each chunk ends; blocks are counted from the start of the chunk.
    number = np.arange(1, counts.sum() + 1) - np.repeat(np.cumsum(counts) - counts, counts)
    whole_ends = np.repeat(ends - sizes, counts) + number * block_bytes
    return FileEntries(
        chunks=chunks,
        block_bytes=block_bytes,
        text=_utf8(text),
        metadata=metadata,
        ends=ends,
        block_counts=counts,
        block_ends=np.minimum(whole_ends, np.repeat(ends, counts)).tolist(),
    )


def layout_data_file(
    entries: FileEntries, metadata: Mapping[str, str], extras: Mapping[str, bytes]
) -> tuple[bytes, int]:
    """The header of a file, and the bytes of all of it: the header, the chunks of `entries`, the
    extras and the checksum tensor, one right after the other.

    `metadata` is stored as it is (see `object_parts`), `extras` are reserved U8 tensors. Raises
    InvalidState for a header that no reader takes.
    """
    # Three more than extras and blocks: the magic, the header's, and the table's own checksum.
    words = 3 + len(extras) + len(entries.block_ends)
    position = entries.nbytes
    text = []
    sizes = dict(zip(extras, map(len, extras.values()), strict=True))
    for name, nbytes in {**sizes, CHECKSUMS: 4 * words}.items():
        text.append(
            f'"{name}":{{"dtype":"U8","shape":[{nbytes}],'
            f'"data_offsets":[{position},{position + nbytes}]}}'
        )
        position += nbytes
    header = _header(entries.text, text, {**entries.metadata, **metadata})
    return header, len(header) + position


def checksum_tensor(header: bytes, block_checksums: Uint32s, extras: Mapping[str, bytes]) -> bytes:
    """The bytes of the last tensor: checksums of the header, the extras, all blocks, and of itself.

    `block_checksums` are those of all chunks, one after the other in file order.
    """
    words = [CHECKSUM_MAGIC, crc32c(header), *map(crc32c, extras.values())]
    body = np.array(words, dtype="<u4").tobytes() + block_checksums.astype("<u4").tobytes()
    return body + crc32c(body).to_bytes(4, "little")


def split_into_files(
    chunks: Sequence[StoredChunk],
    file_bytes_max: int,
    header_bytes_max: int = HEADER_BYTES_MAX // 2,
) -> list[list[StoredChunk]]:
    """Chunks in the order given, cut into files that exceed neither limit; at least one (empty)
    file.

    A single chunk larger than `file_bytes_max` gets a file of its own.
    """
    fqns, _, _, _, sizes, _ = zip(*chunks, strict=True) if chunks else ((),) * 6
    header_nbytes_max = 24 * sum(map(len, fqns)) + (200 + 90 * NDIM_MAX) * len(chunks)
    if sum(sizes) <= file_bytes_max and header_nbytes_max <= header_bytes_max:
        return [list(chunks)]
    files: list[list[StoredChunk]] = [[]]
    data_nbytes = header_nbytes = 0
    for chunk in chunks:
        # Upper bound of what the chunk adds to the header: its name escaped twice, its numbers.
        text = 200 + 6 * len(chunk.fqn.encode("utf-8", "replace")) + 90 * len(chunk.global_shape)
        fits = (
            data_nbytes + chunk.nbytes <= file_bytes_max
            and header_nbytes + text <= header_bytes_max
        )
        if files[-1] and not fits:
            files.append([])
            data_nbytes = header_nbytes = 0
        files[-1].append(chunk)
        data_nbytes += chunk.nbytes
        header_nbytes += text
    return files


# Names of entries


def entry_name(fqn: str, region: Region, global_shape: Shape) -> str:
    """The name of the entry that holds `region`: readable, and different for different regions.

    The whole tensor has its fqn as name (unless that has an `@` or a reserved start).
    """
    return escaped(fqn) + region_suffix(region, global_shape)


def region_suffix(region: Region, global_shape: Shape) -> str:
    """`@0:4,2:8` for a box, `@span:128:4096` for a span, nothing for the whole tensor."""
    if isinstance(region, Span):
        if region.start == 0 and region.stop == math.prod(global_shape):
            return ""
        return f"@span:{region.start}:{region.stop}"
    if region == whole(global_shape):
        return ""
    pairs = zip(region.offset, region.shape, strict=True)
    return "@" + ",".join([f"{start}:{start + size}" for start, size in pairs])


# `@__` at the start is a name that would otherwise look like a reserved one.
_NAME = re.compile(r"((?:[^@]|@@|^@(?=__))*)(?:@([^@]+))?", re.DOTALL)
_SPAN = re.compile(r"span:(0|[1-9]\d{0,18}):([1-9]\d{0,18})", re.ASCII)
_BOX = re.compile(
    r"(?:0|[1-9]\d{0,18}):[1-9]\d{0,18}(?:,(?:0|[1-9]\d{0,18}):[1-9]\d{0,18})*", re.ASCII
)


def parse_entry_name(name: str) -> tuple[str, Region | None]:
    """The fqn and the region that `entry_name` was made of; None for the whole tensor."""
    if (match := _NAME.fullmatch(name)) is None:
        raise Corrupt(f"entry name {name!r:.200} has a lone '@'")
    fqn = match[1].removeprefix("@") if name.startswith("@__") else match[1]
    text = match[2]
    region = _region(text) if text is not None and len(text) <= REGION_LENGTH_MAX else None
    if text is not None and region is None:
        raise Corrupt(f"entry name {name!r:.200} has no readable region after its '@'")
    return fqn.replace("@@", "@"), region


@lru_cache(SHAPES_KEPT_MAX)
def _region(text: str) -> Region | None:
    """What `region_suffix` wrote after its '@'; None for anything else."""
    if span := _SPAN.fullmatch(text):
        return Span(int(span[1]), int(span[2]))
    if not _BOX.fullmatch(text):
        return None
    pairs = [part.split(":") for part in text.split(",")]
    offset = tuple(int(start) for start, _ in pairs)
    return Box(offset, tuple(int(b) - a for a, (_, b) in zip(offset, pairs, strict=True)))


def escaped(fqn: str) -> str:
    """The name of the entry that holds the whole tensor."""
    if "@" in fqn:
        fqn = fqn.replace("@", "@@")
    return "@" + fqn if fqn.startswith(_RESERVED) else fqn


# Writing headers


def _entries(chunks: Sequence[StoredChunk]) -> tuple[list[str], list[str], list[str]]:
    """Per chunk: the start of its JSON entry, its global shape and its dtype where the entry lacks
    them.
    """
    entries, shapes, dtypes = [], [], []
    seen = set()
    problems = []
    last: tuple[str, Shape, Region] | None = None
    for fqn, dtype, global_shape, region, nbytes, _ in chunks:
        # Neighbours mostly share the very objects, and hashing regions takes longer than all else.
        if last is None or region is not last[2] or global_shape is not last[1] or dtype != last[0]:
            last = (dtype, global_shape, region)
            suffix, text, shape, true_dtype, expected = entry_parts(*last)
        name = escaped(fqn) + suffix
        if expected < 0:
            what = "is empty, outside of the tensor, or of a dtype that is not storable"
            problems.append(f"{fqn}: {region} {what}")
        elif nbytes != expected:
            problems.append(f"{fqn}: {region} takes {expected} bytes, {nbytes} were announced")
        elif name in seen:
            problems.append(f"{fqn}: {region} is to be stored twice in one file")
        seen.add(name)
        entries.append(encode_basestring(name) + text)
        shapes.append(shape)
        dtypes.append(true_dtype)
    if problems:
        raise InvalidState(problems)
    return entries, shapes, dtypes


@lru_cache(SHAPES_KEPT_MAX)
def entry_parts(dtype: str, global_shape: Shape, region: Region) -> tuple[str, str, str, str, int]:
    """What all chunks of one shape and region share: name suffix, JSON, global shape, dtype,
    bytes.
    """
    known = DTYPES.get(dtype)
    if known is None or not is_inside(region, global_shape) or not region.numel:
        return "", "", "", "", -1
    suffix = region_suffix(region, global_shape)
    if not suffix:
        shape: Shape = global_shape
    else:
        shape = (region.numel,) if isinstance(region, Span) else region.shape
    if not known.is_native:
        shape = (*shape, known.itemsize)
    text = f':{{"dtype":"{known.code}","shape":[{",".join(map(str, shape))}],'
    is_plain = not suffix and known.is_native
    true_shape = "" if is_plain else ",".join(map(str, global_shape)) or "-"
    return suffix, text, true_shape, "" if known.is_native else dtype, region.numel * known.itemsize


def _header(entries: bytes, reserved: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    metadata_json = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    first, last = _utf8(['{"__metadata__":', metadata_json, ","]), _utf8([",".join(reserved), "}"])
    data = b"".join([first, entries, last])
    padded = -(-(8 + len(data)) // ALIGNMENT) * ALIGNMENT
    if padded > HEADER_BYTES_MAX:
        raise InvalidState(
            [f"header of {padded} bytes, readers accept {HEADER_BYTES_MAX}: use split_into_files"]
        )
    return (padded - 8).to_bytes(8, "little") + data.ljust(padded - 8, b" ")


def _utf8(texts: Sequence[str]) -> bytes:
    try:
        return "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        bad = next(text for text in texts if text.encode("utf-8", "ignore").decode() != text)
        raise InvalidState([f"{bad[:200]!r}: not valid unicode ({error.reason})"]) from error
