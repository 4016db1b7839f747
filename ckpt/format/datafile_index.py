"""Reading the header of a data file: the way back from bytes to chunks when a manifest is lost.

The bytes come from a disk or a network that may have changed them, so every field is validated
against the file's length and against what a writer of this library would have written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.checksum import Seal, block_count, crc32c, seal_of
from ckpt.format.datafile import (
    CHECKSUM_MAGIC,
    CHECKSUMS,
    HEADER_BYTES_MAX,
    NDIM_MAX,
    VERSION,
    StoredChunk,
    entry_name,
    entry_parts,
    parse_entry_name,
)
from ckpt.layout.dtypes import NATIVE_BY_CODE
from ckpt.layout.region import Shape, whole


@dataclass(frozen=True, slots=True, eq=False)
class DataFileIndex:
    """What the header of a data file states, validated against the file's length. The checksums
    are read, not yet compared with the bytes.
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
    seal: Seal  # of the checksum tensor
    nbytes: int


def read_data_file_index(
    read: Callable[[int, int], bytes], nbytes: int, *, name: str = "data file"
) -> DataFileIndex:
    """The index of the file of `nbytes`; `read(start, stop)` returns its bytes.

    Raises Corrupt naming the file and the field when fields contradict each other or the length,
    UnsupportedFormat when a newer version wrote it. The checksums of the header and of the checksum
    tensor are compared; those of chunks and extras are not.
    """
    try:
        return _read_index(read, nbytes)
    except Corrupt as error:
        raise Corrupt(f"{name}: {error}") from error
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{name}: {error}") from error


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
        raise Corrupt(f"ckpt.format {version} with ckpt.block_bytes {block_bytes} is not possible")
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
        seal=seal_of(words.tobytes()),
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
    # Counted before parsing: a real entry has three brackets in 50 bytes, but 100 MB of "[],[],..."
    # would become 1.7 GB of Python lists.
    containers = header.count(b"[") + header.count(b"{")
    if containers > max(len(header) // 8, 1 << 17):
        raise Corrupt(f"header of {len(header)} bytes has {containers} brackets")
    try:
        parsed = json.loads(header[8:], object_pairs_hook=_no_duplicates, parse_int=_small_int)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"header is not valid JSON of its kind: {error!s:.200}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("__metadata__"), dict):
        raise Corrupt("header is not a JSON object with __metadata__: not a file of this library")
    metadata = parsed.pop("__metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise Corrupt("__metadata__ has a value that is not a string")
    entries = sorted((_entry(name, value) for name, value in parsed.items()), key=lambda e: e.start)
    expected = 0
    for entry in entries:
        if entry.start != expected:
            raise Corrupt(f"{entry.name!r:.200}: starts at {entry.start}, expected {expected}")
        expected = entry.stop
    if expected != data_nbytes:
        raise Corrupt(f"entries take {expected} bytes, the file has {data_nbytes} after its header")
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
        raise Corrupt(f"{name!r:.200}: dtype {code!r:.50} is not one that this library writes")
    if not _is_sizes(shape) or len(shape) > NDIM_MAX + 1:
        raise Corrupt(f"{name!r:.200}: shape {shape!r:.100} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
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
    """The chunk that an entry describes.

    Writing the chunk again must give the same entry, letter by letter: so no second spelling of
    a name, region or shape is ever accepted.
    """
    fqn, region = parse_entry_name(entry.name)
    name = dtype or NATIVE_BY_CODE[entry.code].name
    bounded_numel(shape)
    region = whole(shape) if region is None else region
    _, text, _, true_dtype, nbytes = entry_parts(name, shape, region)
    expected = f':{{"dtype":"{entry.code}","shape":[{",".join(map(str, entry.shape))}],'
    is_same = text == expected and true_dtype == dtype and nbytes == entry.stop - entry.start
    if not is_same or entry_name(fqn, region, shape) != entry.name:
        raise Corrupt(
            f"{entry.name!r:.200}: {entry.code}{list(entry.shape)!r:.100} is not {region!r:.200} "
            f"of a {name!r:.50} tensor of shape {shape!r:.100}"
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
