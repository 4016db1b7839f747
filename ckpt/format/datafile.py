"""Data files: safetensors files whose `__metadata__` and reserved last tensor make them
self-describing.

FORMAT.md, "Data files", is the specification. Writers plan a file with `layout_data_file`, write
header, chunks and extras as they come, and end it with `checksum_tensor`. Readers of a lost
manifest use
`read_data_file_index`, which trusts nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format.checksum import block_count, crc32c
from ckpt.layout.dtypes import DTYPES, NATIVE_BY_CODE
from ckpt.layout.region import Box, Region, Shape, Span, is_inside, whole

VERSION = 1
ALIGNMENT = 4096  # tensor bytes start at a multiple: O_DIRECT and mmap want it
BLOCK_BYTES = 1 << 20
HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors readers
NDIM_MAX = 64  # torch's own
SMALL_NBYTES_MAX = 16 << 10  # chunks up to this size lie together, and are read together
CACHE_LINE_NBYTES = 64
CHECKSUMS = "__ckpt_checksums__"
VALUES = "__ckpt_values__"
PER_RANK = "__ckpt_per_rank__"
DIGESTS = "__ckpt_digests__"
CHECKSUM_MAGIC = int.from_bytes(b"CKS1", "little")

_RESERVED = ("__metadata__", "__ckpt_")


class StoredChunk(NamedTuple):
    """One region of one tensor as a writer wants to store it. `dtype` is the canonical name."""

    fqn: str
    dtype: str
    global_shape: Shape
    region: Region
    nbytes: int
    kind: int


@dataclass(frozen=True, slots=True, eq=False)
class DataFileLayout:
    """Where everything of one file goes. All offsets are absolute, in bytes.

    The file is `header`, the chunks, the extras, the checksum tensor, one right after the other.
    """

    header: bytes
    offsets: npt.NDArray[np.int64]  # [chunks]
    block_counts: npt.NDArray[np.int64]  # [chunks]
    block_bytes: int
    extra_offsets: Mapping[str, int]
    checksum_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class DataFileIndex:
    """What a data file says of itself, validated against its length; its checksums are not yet
    compared.
    """

    metadata: Mapping[str, str]
    header: bytes
    block_bytes: int
    chunks: tuple[StoredChunk, ...]
    offsets: npt.NDArray[np.int64]
    extras: Mapping[str, tuple[int, int]]  # name -> offset, nbytes
    extra_checksums: Mapping[str, int]
    first_block: npt.NDArray[np.int64]  # [chunks + 1]
    checksums: npt.NDArray[np.uint32]
    checksum_offset: int
    nbytes: int


def order_key(chunk: StoredChunk) -> tuple[bool, int, str, int, Region]:
    """Sorts chunks into the order of a file: large even ones first, then widest elements, then
    name.

    So all elements are aligned, the large chunks to cache lines, and the small ones are neighbours.
    """
    shape, region = chunk.global_shape, chunk.region
    itemsize = DTYPES[chunk.dtype].itemsize
    first = region_start(region, shape)
    return (is_small_or_uneven(chunk.nbytes), -itemsize, chunk.fqn, first, region)


def is_small_or_uneven(nbytes: int) -> bool:
    """Whether a chunk comes behind those that keep each other aligned to cache lines."""
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
    """What of a file's layout follows from its chunks alone; see `file_entries`."""

    chunks: Sequence[StoredChunk]
    block_bytes: int
    text: bytes  # the JSON entries of the chunks, with a comma behind each
    metadata: Mapping[str, str]
    ends: npt.NDArray[np.int64]  # [chunks], from the first tensor byte on
    block_counts: npt.NDArray[np.int64]  # [chunks]

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
    sizes = np.fromiter((chunk.nbytes for chunk in chunks), np.int64, len(chunks))
    ends = np.cumsum(sizes)
    starts = [0, *ends.tolist()]
    text = [
        f'{name}"data_offsets":[{start},{stop}]}},'
        for name, start, stop in zip(entries, starts, starts[1:], strict=False)
    ]
    return FileEntries(
        chunks=chunks,
        block_bytes=block_bytes,
        text=_utf8(text),
        metadata=_chunk_metadata(block_bytes, chunks, shapes, dtypes),
        ends=ends,
        block_counts=-(-sizes // block_bytes),
    )


def layout_data_file(
    chunks: Sequence[StoredChunk] | FileEntries,
    *,
    block_bytes: int,
    metadata: Mapping[str, str],
    extra: Mapping[str, int] | None = None,
) -> DataFileLayout:
    """Plan one file of `chunks`, in that order (see `order_key`), none of them empty.

    `metadata` is stored as it is (see `ckpt.format.metadata.file_metadata`); `extra` maps names of
    reserved U8 tensors to
    their sizes. Raises InvalidState naming the fqns when a chunk cannot be stored.
    """
    if not isinstance(chunks, FileEntries):
        chunks = file_entries(chunks, block_bytes)
    extra = dict(extra or {})
    words = 3 + len(extra) + int(chunks.block_counts.sum())
    at = chunks.nbytes
    text = []
    extra_starts = {}
    for name, nbytes in [*extra.items(), (CHECKSUMS, 4 * words)]:
        if not name.startswith("__ckpt_") or name in extra_starts:
            raise ValueError(
                f"{name!r} is no name for an extra tensor: expected `__ckpt_...__`, once"
            )
        text.append(
            f'{encode_basestring(name)}:{{"dtype":"U8","shape":[{nbytes}],'
            f'"data_offsets":[{at},{at + nbytes}]}}'
        )
        extra_starts[name] = at
        at += nbytes
    if clash := chunks.metadata.keys() & metadata.keys():
        raise ValueError(f"metadata keys {sorted(clash)} are set by the layout itself")
    header = _header(chunks.text, text, {**chunks.metadata, **metadata})
    base = len(header)
    checksum_start = extra_starts.pop(CHECKSUMS)
    return DataFileLayout(
        header=header,
        offsets=np.concatenate(([0], chunks.ends[:-1])) + base if len(chunks.ends) else chunks.ends,
        block_counts=chunks.block_counts,
        block_bytes=chunks.block_bytes,
        extra_offsets={name: start + base for name, start in extra_starts.items()},
        checksum_offset=checksum_start + base,
        nbytes=at + base,
    )


def checksum_tensor(
    layout: DataFileLayout,
    block_checksums: npt.NDArray[np.uint32],
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    """The bytes of the last tensor: checksums of the header, the extras, all blocks, and of itself.

    `block_checksums` are those of all chunks, one after the other in file order.
    """
    extra = extra or {}
    if len(block_checksums) != int(layout.block_counts.sum()):
        raise ValueError(
            f"{len(block_checksums)} block checksums, expected {int(layout.block_counts.sum())}"
        )
    if list(extra) != list(layout.extra_offsets):
        raise ValueError(f"extras are {list(extra)}, planned were {list(layout.extra_offsets)}")
    words = [CHECKSUM_MAGIC, crc32c(layout.header), *(crc32c(data) for data in extra.values())]
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
    names_nbytes = 4 * sum([len(chunk.fqn) for chunk in chunks])
    header_nbytes_max = 6 * names_nbytes + (200 + 90 * NDIM_MAX) * len(chunks)
    total = sum([chunk.nbytes for chunk in chunks])
    if total <= file_bytes_max and header_nbytes_max <= header_bytes_max:
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


def read_data_file_index(
    read: Callable[[int, int], bytes], nbytes: int, *, name: str = "data file"
) -> DataFileIndex:
    """What the file of `nbytes` says of itself; `read(start, stop)` gives its bytes.

    Raises Corrupt naming the file and the field when anything contradicts anything,
    UnsupportedFormat when a
    newer version wrote it. The checksums of header and checksum tensor are compared; those of
    chunks and extras are not.
    """
    try:
        return _read_index(read, nbytes)
    except Corrupt as error:
        raise Corrupt(f"{name}: {error}") from error
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{name}: {error}") from error


# Names of entries


def entry_name(fqn: str, region: Region, global_shape: Shape) -> str:
    """The name of the entry that holds `region`: readable, and different for different regions.

    The whole tensor has its fqn as name (unless that has an `@` or a reserved start).
    """
    return _escape(fqn) + region_suffix(region, global_shape)


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


_SPAN = re.compile(r"span:(0|[1-9]\d{0,18}):([1-9]\d{0,18})", re.ASCII)
_BOX = re.compile(
    r"(?:0|[1-9]\d{0,18}):[1-9]\d{0,18}(?:,(?:0|[1-9]\d{0,18}):[1-9]\d{0,18})*", re.ASCII
)


def parse_entry_name(name: str) -> tuple[str, Region | None]:
    """The fqn and the region that `entry_name` was made of; None for the whole tensor."""
    match = re.fullmatch(r"((?:[^@]|@@|^@(?=__))*)(?:@([^@]+))?", name, re.DOTALL)
    if match is None:
        raise Corrupt(f"entry name {name!r:.200} has a lone '@'")
    fqn = match[1].removeprefix("@") if name.startswith("@__") else match[1]
    fqn = fqn.replace("@@", "@")
    if match[2] is None:
        region: Region | None = None
    elif span := _SPAN.fullmatch(match[2]):
        region = Span(int(span[1]), int(span[2]))
    elif _BOX.fullmatch(match[2]):
        pairs = [part.split(":") for part in match[2].split(",")]
        offset = tuple(int(start) for start, _ in pairs)
        region = Box(offset, tuple(int(b) - a for a, (_, b) in zip(offset, pairs, strict=True)))
    else:
        raise Corrupt(f"entry name {name!r:.200} has no readable region after its '@'")
    return fqn, region


def _escape(fqn: str) -> str:
    if "@" in fqn:
        fqn = fqn.replace("@", "@@")
    return "@" + fqn if fqn.startswith(_RESERVED) else fqn


# Writing headers


def _entries(chunks: Sequence[StoredChunk]) -> tuple[list[str], list[str], list[str]]:
    """Per chunk: the start of its JSON entry, its global shape and its dtype where the entry lacks
    them.
    """
    entries, shapes, dtypes = [], [], []
    # Thousands of chunks share a few shapes, and this runs in the time a save may block.
    known: dict[tuple[str, Shape, Region], tuple[str, str, str, str, int]] = {}
    seen = set()
    problems = []
    last: tuple[str, Shape, Region] | None = None
    for fqn, dtype, global_shape, region, nbytes, _ in chunks:
        # Neighbours mostly share the very objects, and hashing regions takes longer than all else.
        if last is None or region is not last[2] or global_shape is not last[1] or dtype != last[0]:
            last = (dtype, global_shape, region)
            if last not in known:
                known[last] = _entry_parts(dtype, global_shape, region)
            suffix, text, shape, true_dtype, expected = known[last]
        name = _escape(fqn) + suffix
        if nbytes != expected or name in seen:
            problems.append(_chunk_problem(fqn, region, nbytes, expected))
        seen.add(name)
        entries.append(encode_basestring(name) + text)
        shapes.append(shape)
        dtypes.append(true_dtype)
    if problems:
        raise InvalidState(problems)
    return entries, shapes, dtypes


def _entry_parts(dtype: str, global_shape: Shape, region: Region) -> tuple[str, str, str, str, int]:
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


def _chunk_problem(fqn: str, region: Region, nbytes: int, expected: int) -> str:
    if expected < 0:
        return (
            f"{fqn}: {region} is empty, outside of the tensor, or of a dtype that is not storable"
        )
    if nbytes != expected:
        return f"{fqn}: {region} takes {expected} bytes, {nbytes} were announced"
    return f"{fqn}: {region} is to be stored twice in one file"


def _chunk_metadata(
    block_bytes: int,
    chunks: Sequence[StoredChunk],
    shapes: Sequence[str],
    dtypes: Sequence[str],
) -> dict[str, str]:
    ours = {"ckpt.format": str(VERSION), "ckpt.block_bytes": str(block_bytes)}
    ours["ckpt.kinds"] = "".join([f"{chunk.kind:x}" for chunk in chunks])
    if len(ours["ckpt.kinds"]) != len(chunks):
        raise ValueError("a kind is outside of 0 to 15")
    if any(shapes):
        ours["ckpt.shapes"] = ";".join(shapes)
    if any(dtypes):
        ours["ckpt.dtypes"] = ";".join(dtypes)
    return ours


def _header(entries: bytes, reserved: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    told = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    first, last = _utf8(['{"__metadata__":', told, ","]), _utf8([",".join(reserved), "}"])
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
        bad = next(text for text in texts if not _is_unicode(text))
        raise InvalidState([f"{bad[:200]!r}: not valid unicode ({error.reason})"]) from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# Reading


class _Entry(NamedTuple):
    name: str
    code: str
    shape: Shape
    start: int
    stop: int


def _read_index(read: Callable[[int, int], bytes], nbytes: int) -> DataFileIndex:
    header = _read_header(read, nbytes)
    metadata, entries = _parse_header(header, nbytes - len(header))
    version = _decimal(metadata.get("ckpt.format", ""), "ckpt.format")
    if version > VERSION:
        raise UnsupportedFormat(f"format version {version}, this library reads up to {VERSION}")
    block_bytes = _decimal(metadata.get("ckpt.block_bytes", ""), "ckpt.block_bytes")
    if version < 1 or block_bytes <= 0 or block_bytes % 16 or block_bytes >= 1 << 31:
        raise Corrupt(f"ckpt.format {version} with ckpt.block_bytes {block_bytes} cannot be")
    reserved = [entry for entry in entries if entry.name.startswith("__ckpt_")]
    stored = [entry for entry in entries if not entry.name.startswith("__ckpt_")]
    if entries[: len(stored)] != stored or not reserved or reserved[-1].name != CHECKSUMS:
        raise Corrupt(f"reserved tensors must come last, {CHECKSUMS} at the very end")
    if any(entry.code != "U8" or len(entry.shape) != 1 for entry in reserved):
        raise Corrupt("a reserved tensor is not a flat U8 tensor")
    chunks = _stored_chunks(stored, metadata)
    base = len(header)
    extras = {e.name: (e.start + base, e.stop - e.start) for e in reserved[:-1]}
    counts = [block_count(chunk.nbytes, block_bytes) for chunk in chunks]
    first_block = np.concatenate(([0], np.cumsum(np.array(counts, dtype=np.int64)))).astype(
        np.int64
    )
    start, stop = reserved[-1].start + base, reserved[-1].stop + base
    words = _read_checksums(read, (start, stop), header, 3 + len(extras) + int(first_block[-1]))
    extra_words = words[2 : 2 + len(extras)].tolist()
    return DataFileIndex(
        metadata=metadata,
        header=header,
        block_bytes=block_bytes,
        chunks=chunks,
        offsets=np.array([entry.start + base for entry in stored], dtype=np.int64),
        extras=extras,
        extra_checksums=dict(zip(extras, extra_words, strict=True)),
        first_block=first_block,
        checksums=words[2 + len(extras) : -1].astype(np.uint32),
        checksum_offset=start,
        nbytes=nbytes,
    )


def _read_header(read: Callable[[int, int], bytes], nbytes: int) -> bytes:
    if nbytes < 8:
        raise Corrupt(f"{nbytes} bytes cannot hold a safetensors header")
    length = int.from_bytes(_read_exact(read, 0, 8), "little")
    if length > HEADER_BYTES_MAX or length + 8 > nbytes:
        raise Corrupt(f"header of {length} bytes in a file of {nbytes} (limit {HEADER_BYTES_MAX})")
    return _read_exact(read, 0, 8 + length)


def _read_exact(read: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
    data = bytes(read(start, stop))
    if len(data) != stop - start:
        raise Corrupt(f"bytes {start} to {stop} gave {len(data)} bytes")
    return data


def _parse_header(header: bytes, data_nbytes: int) -> tuple[dict[str, str], list[_Entry]]:
    """Metadata and entries in file order. The entries cover the `data_nbytes` bytes without gap."""
    # An entry takes 50 bytes and three containers. A header of "[],[],..." would be 1.7 GB in
    # memory.
    containers = header.count(b"[") + header.count(b"{")
    if containers > max(len(header) // 8, 1 << 17):
        raise Corrupt(f"header of {len(header)} bytes has {containers} brackets")
    try:
        parsed = json.loads(header[8:], object_pairs_hook=_no_duplicates, parse_int=_small_int)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"header is not the JSON it should be: {error!s:.200}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("__metadata__"), dict):
        raise Corrupt("header is no JSON object with __metadata__: not a file of this library")
    metadata = parsed.pop("__metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise Corrupt("__metadata__ has a value that is not a string")
    entries = sorted((_entry(name, value) for name, value in parsed.items()), key=lambda e: e.start)
    at = 0
    for entry in entries:
        if entry.start != at:
            raise Corrupt(f"{entry.name!r:.200}: starts at {entry.start}, expected {at}")
        at = entry.stop
    if at != data_nbytes:
        raise Corrupt(f"entries take {at} bytes, the file has {data_nbytes} behind its header")
    return metadata, entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _small_int(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number beyond 2^63")
    return int(text)


def _entry(name: str, value: Any) -> _Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"{name!r:.200}: not an entry with dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    native = NATIVE_BY_CODE.get(code) if isinstance(code, str) else None
    if native is None:
        raise Corrupt(f"{name!r:.200}: dtype {code!r:.50} is none that this library writes")
    if not _is_sizes(shape) or len(shape) > NDIM_MAX + 1:
        raise Corrupt(f"{name!r:.200}: shape {shape!r:.100} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"{name!r:.200}: data_offsets {offsets!r:.100} are not a range")
    if bounded_numel(shape) * native.itemsize != offsets[1] - offsets[0]:
        raise Corrupt(f"{name!r:.200}: {code} of shape {shape!r:.100} in {offsets} does not fit")
    return _Entry(name, code, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def bounded_numel(shape: Sequence[int]) -> int:
    """Elements of `shape`. Raises Corrupt when they, or the non-zero sizes alone, pass 2^63."""
    numel = 1
    for size in shape:
        numel *= max(size, 1)
        if numel >= 1 << 63:
            raise Corrupt(f"shape {tuple(shape)!r:.100} has more than 2^63 elements")
    return 0 if 0 in shape else numel


def _decimal(text: str, field: str) -> int:
    if not re.fullmatch(r"0|[1-9]\d{0,17}", text, re.ASCII):
        raise Corrupt(f"{field} is {text!r:.50}, expected a decimal number")
    return int(text)


def _stored_chunks(
    entries: Sequence[_Entry], metadata: Mapping[str, str]
) -> tuple[StoredChunk, ...]:
    count = len(entries)
    kinds = metadata.get("ckpt.kinds", "")
    if len(kinds) != count or not re.fullmatch("[0-9a-f]*", kinds):
        raise Corrupt(f"ckpt.kinds has {len(kinds)} characters for {count} tensors, or is not hex")
    shapes = _fields(metadata.get("ckpt.shapes"), count, "ckpt.shapes")
    dtypes = _fields(metadata.get("ckpt.dtypes"), count, "ckpt.dtypes")
    parsed_shapes: dict[str, Shape] = {}
    chunks = []
    for entry, kind, shape_text, dtype in zip(entries, kinds, shapes, dtypes, strict=True):
        if shape_text not in parsed_shapes:
            parsed_shapes[shape_text] = _parse_shape(shape_text)
        shape = parsed_shapes[shape_text] if shape_text else entry.shape
        chunks.append(_stored_chunk(entry, int(kind, 16), shape, dtype))
    return tuple(chunks)


def _fields(text: str | None, count: int, field: str) -> list[str]:
    if text is None:
        return [""] * count
    if text.count(";") != count - 1:
        raise Corrupt(f"{field} has {text.count(';') + 1} fields for {count} tensors")
    return text.split(";")


def _parse_shape(text: str) -> Shape:
    if text in ("", "-"):
        return ()
    if text.count(",") >= NDIM_MAX:
        raise Corrupt(f"ckpt.shapes: {text.count(',') + 1} dims, at most {NDIM_MAX}")
    return tuple(_decimal(size, "ckpt.shapes") for size in text.split(","))


def _stored_chunk(entry: _Entry, kind: int, shape: Shape, dtype: str) -> StoredChunk:
    """The chunk behind an entry. The writer's own text for it must be the entry, to the letter."""
    fqn, region = parse_entry_name(entry.name)
    name = dtype or NATIVE_BY_CODE[entry.code].name
    bounded_numel(shape)
    region = whole(shape) if region is None else region
    _, text, _, true_dtype, nbytes = _entry_parts(name, shape, region)
    expected = f':{{"dtype":"{entry.code}","shape":[{",".join(map(str, entry.shape))}],'
    is_same = text == expected and true_dtype == dtype and nbytes == entry.stop - entry.start
    if not is_same or entry_name(fqn, region, shape) != entry.name:
        raise Corrupt(
            f"{entry.name!r:.200}: {entry.code}{list(entry.shape)!r:.100} is not {region!r:.200} "
            f"of a "
            f"{name!r:.50} tensor of shape {shape!r:.100}"
        )
    return StoredChunk(fqn, name, shape, region, nbytes, kind)


def _read_checksums(
    read: Callable[[int, int], bytes], where: tuple[int, int], header: bytes, count: int
) -> npt.NDArray[np.uint32]:
    start, stop = where
    if stop - start != 4 * count:
        raise Corrupt(f"{CHECKSUMS} has {stop - start} bytes, expected {4 * count}")
    data = _read_exact(read, start, stop)
    words = np.frombuffer(data, dtype="<u4")
    if int(words[-1]) != crc32c(data[:-4]) or int(words[0]) != CHECKSUM_MAGIC:
        raise Corrupt(f"{CHECKSUMS} does not match its own checksum")
    if int(words[1]) != crc32c(header):
        raise Corrupt("the header does not match its checksum")
    return words
