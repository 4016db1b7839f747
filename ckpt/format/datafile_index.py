"""Data files, opened: the way back from bytes to chunks when a manifest is lost, or was never made.
It is then built from what they say, as from the parts of a save.

The bytes come from a disk or a network that may have changed them, so every field is validated
against the file's length and against what a writer of this library would have written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.checksum import (
    DIGEST_NBYTES,
    BlockChecksums,
    Digests,
    Int64s,
    Seal,
    Uint32s,
    block_count,
    crc32c,
    digests_from,
    no_digests,
    once_more,
    raising_corrupt,
    seal_of,
)
from ckpt.format.codec import decode_values
from ckpt.format.datafile import (
    CHECKSUM_MAGIC,
    CHECKSUMS,
    DIGESTS,
    HEADER_BYTES_MAX,
    NDIM_MAX,
    PER_RANK,
    VALUES,
    VERSION,
    StoredChunk,
    entry_parts,
    escaped,
    parse_entry_name,
)
from ckpt.format.manifest import Header, Manifest, parse_reference
from ckpt.format.object_parts import FileRange
from ckpt.format.part import FileColumns, Part, PartTexts, TensorRecord, part_of_files
from ckpt.layout.dtypes import NATIVE_BY_CODE
from ckpt.layout.region import Shape, whole
from storage import ShortReadError, Store


@dataclass(frozen=True, slots=True, eq=False)
class DataFileIndex:
    """What the header of a data file states, validated against the file's length. The checksums
    are read, not yet compared with the bytes.
    """

    metadata: Mapping[str, str]
    header: bytes
    block_bytes: int
    chunks: tuple[StoredChunk, ...]
    offsets: Int64s
    extras: Mapping[str, tuple[int, int]]  # name -> offset, nbytes
    extra_checksums: Mapping[str, int]
    first_block: Int64s  # [chunks + 1]
    checksums: Uint32s
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
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{name}: {error}") from error


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
    # Elements take up to 16 bytes, and none may lie in two blocks.
    if version < 1 or block_bytes <= 0 or block_bytes % 16 or block_bytes >= 1 << 31:
        raise Corrupt(f"ckpt.format {version} with ckpt.block_bytes {block_bytes} is not possible")
    reserved = [entry for entry in entries if entry.name.startswith("__ckpt_")]
    stored = [entry for entry in entries if not entry.name.startswith("__ckpt_")]
    # Chunks first: to check all of them is to read one run of bytes from the header's end on.
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
    # A store may give less than asked for: the caller must not parse that.
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
    # The members of a JSON object have no order: only the offsets say where an entry lies.
    entries = sorted((_entry(name, value) for name, value in parsed.items()), key=lambda e: e.start)
    # safetensors allows no holes either. Bytes could hide there that no checksum covers.
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
    # Python takes quadratic time for thousands of digits.
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
    return isinstance(value, list) and all([type(item) is int and item >= 0 for item in value])


def bounded_numel(shape: Sequence[int]) -> int:
    """Elements of `shape`. Raises Corrupt when they, or the non-zero sizes alone, pass 2^63."""
    numel = 1
    for size in shape:
        # A size of 0 must not hide others that int64 cannot count.
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
    # The chunks of a tensor, and most tensors of a layer, share few shapes: each text is parsed
    # once.
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
    suffix, text, _, true_dtype, nbytes = entry_parts(name, shape, region)
    expected = f':{{"dtype":"{entry.code}","shape":[{",".join(map(str, entry.shape))}],'
    is_same = text == expected and true_dtype == dtype and nbytes == entry.stop - entry.start
    if not is_same or escaped(fqn) + suffix != entry.name:
        raise Corrupt(
            f"{entry.name!r:.200}: {entry.code}{list(entry.shape)!r:.100} is not {region!r:.200} "
            f"of a {name!r:.50} tensor of shape {shape!r:.100}"
        )
    return StoredChunk(fqn, name, shape, region, nbytes, kind)


def _read_checksums(
    read: Callable[[int, int], bytes], where: tuple[int, int], header: bytes, count: int
) -> Uint32s:
    start, stop = where
    if stop - start != 4 * count:
        raise Corrupt(f"{CHECKSUMS} has {stop - start} bytes, expected {4 * count}")
    data = _read_exact(read, start, stop)
    words = np.frombuffer(data, dtype="<u4")
    # Its own sum first: a damaged word would else be blamed on the bytes that it stands for.
    if int(words[-1]) != crc32c(data[:-4]) or int(words[0]) != CHECKSUM_MAGIC:
        raise Corrupt(f"{CHECKSUMS} does not match its own checksum")
    if int(words[1]) != crc32c(header):
        raise Corrupt("the header does not match its checksum")
    return words


class FileDescription(NamedTuple):
    """What a data file states about its place in its checkpoint."""

    header: Header
    rank: int
    file_index: int
    file_count: int
    empty_tensors: tuple[TensorRecord, ...]
    aliases: dict[str, str]
    references: tuple[FileRange, ...]


def describe_file(index: DataFileIndex) -> FileDescription:
    """What a data file states about its place in its checkpoint. Raises Corrupt naming the
    field.
    """
    metadata = index.metadata
    try:
        header = Header.model_validate_json(metadata["ckpt.header"])
        index_in_rank, count = (int(number) for number in metadata["ckpt.file"].split("/"))
        rank = int(metadata["ckpt.rank"])
        empty = [_tensor_info(row) for row in json.loads(metadata.get("ckpt.empty", "[]"))]
        aliases = json.loads(metadata.get("ckpt.aliases", "{}"))
        ranges = [_file_range(row) for row in json.loads(metadata.get("ckpt.references", "[]"))]
    except (KeyError, TypeError, ValueError, RecursionError, ValidationError) as error:
        raise Corrupt(f"__metadata__ of a data file is not readable: {error!r:.200}") from error
    strings = isinstance(aliases, dict) and all(isinstance(name, str) for name in aliases.values())
    if not (0 <= index_in_rank < count and 0 <= rank < header.world_size and strings):
        raise Corrupt(
            f"__metadata__: file {index_in_rank} of {count} of rank {rank} is not possible"
        )
    return FileDescription(header, rank, index_in_rank, count, tuple(empty), aliases, tuple(ranges))


def _tensor_info(row: Any) -> TensorRecord:
    fqn, dtype, shape, kind = row
    sizes = all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    if not (isinstance(fqn, str) and isinstance(dtype, str) and sizes and 0 in shape):
        raise ValueError(f"{row!r:.100} is not a tensor without elements")
    # One hex digit in a header, of which 4 to 15 are for later versions.
    if type(kind) is not int or not 0 <= kind <= 15:
        raise ValueError(f"{kind!r:.20} is not a kind")
    return TensorRecord(fqn, dtype, tuple(shape), kind)


def _file_range(row: Any) -> FileRange:
    file, start, stop = row
    # The name is the file's own word: one that leads out of the root's step directories is refused.
    if not isinstance(file, str) or parse_reference(file) is None:
        raise ValueError(f"{file!r:.200} is not a data file of another attempt")
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop < 1 << 62:
        raise ValueError(f"{start!r:.30} to {stop!r:.30} is not a range of bytes")
    return FileRange(file, start, stop)


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
        # One request where the header's length is known, as from a manifest.
        head = read_bytes(store, key, 0, header_nbytes)

        def read(start: int, stop: int) -> bytes:
            return head[start:stop] if stop <= len(head) else read_bytes(store, key, start, stop)

        return read_data_file_index(read, nbytes, name=f"{store.url}/{key}")

    return once_more(index, store)


def check_seal(actual: Seal, expected: Seal, where: str) -> None:
    """Raises Corrupt, naming the file, unless its checksum table is the one of the manifest."""
    if actual != expected:
        raise Corrupt(
            f"{where}: its checksums ({actual.nbytes} bytes) are not those that MANIFEST has the "
            f"digest of ({expected.nbytes} bytes): they were changed, or the file belongs to "
            "another checkpoint. Load an older step, or restore this file from a copy."
        )


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
    # One buffer for all runs: a file may be larger than memory.
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

    return once_more(read, store)


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
            # A row per chunk: a file without chunks has none in either case.
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
    # A rank's first file alone has these, and the texts below: see `rank_files`.
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
