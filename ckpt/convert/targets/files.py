"""Files to be written, as values: which bytes are known, which come from tensors, which come last.

    outputs -> files (fixed bytes, tensor data, late bytes) -> parts, read from the source

A part is filled by reading straight into its buffer, so memory is bounded by the number of threads,
whatever the size of the files. `ckpt.format.object_parts` has the threads and the store.

A format is a function from outputs to planned files. Everything about a file but the tensors' bytes
(and the checksums over them, in zip files) is known before the first byte is read.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeAlias

import torch

from ckpt.convert.sources.blobs import (
    DESCRIPTOR_NBYTES,
    ZipEntry,
    descriptor,
    directory,
    local_header,
)
from ckpt.convert.sources.source import CheckpointSource, ReadRequest, SourceTensor
from ckpt.convert.sources.torch_pickle import write_tree
from ckpt.format.datafile import StoredChunk, file_entries, order_key, split_into_files
from ckpt.format.manifest import Header
from ckpt.format.object_parts import DataFile, DataFileBuilder, rank_files, write_filled
from ckpt.format.part import FileColumns, PartTexts, TensorRecord
from ckpt.layout.dtypes import DTYPES, DType, dtype_name, torch_dtype
from ckpt.layout.memory import tensor_over
from ckpt.layout.region import Box, Region, Span, boxes_of
from storage import Store

HEADER_ALIGNMENT = 64
ARCHIVE = "archive"
FILE_NBYTES_MAX = 4 << 30  # of a data file of ours


class Output(NamedTuple):
    """A tensor of the export: its name, its source tensor, and its dtype and size in the target."""

    name: str
    tensor: SourceTensor
    dtype: DType
    nbytes: int


class ExportSelection(NamedTuple):
    """All tensors of the export, the tied names that stand for one of them, and values."""

    outputs: list[Output]
    tied: dict[str, str]
    values: Mapping[str, Any]


class Fixed(NamedTuple):
    """Bytes that are known in advance, from `start` on."""

    start: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Data(NamedTuple):
    """A region of an output from byte `start` on. `number` is the index of its crc32."""

    start: int
    nbytes: int
    output: Output
    region: Region
    number: int = -1


class Late(NamedTuple):
    """`nbytes` from `start` on, made of the crc32 of the data with these numbers."""

    start: int
    nbytes: int
    make: Callable[[Sequence[int]], bytes]


FilePiece: TypeAlias = Fixed | Data | Late


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written; its pieces follow each other without gaps. `checksums` says how many
    crc32 its late pieces need.
    """

    key: str
    nbytes: int
    pieces: tuple[FilePiece, ...]
    checksums: int = 0


def known_file(key: str, data: bytes) -> PlannedFile:
    """A file whose bytes are all known."""
    return PlannedFile(key, len(data), (Fixed(0, data),))


# safetensors --------------------------------------------------------------------------------


def safetensors_files(
    outputs: Sequence[Output], tied: Mapping[str, str], name: str, shard_bytes_max: int | None
) -> list[PlannedFile]:
    """The files, in writing order: the index of several comes last."""
    groups: list[list[Output]] = [[]]  # in name order, cut before the size is passed
    filled = 0
    for output in outputs:
        # A tensor that is larger than a shard gets one of its own.
        if shard_bytes_max is not None and groups[-1] and filled + output.nbytes > shard_bytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    if len(groups) == 1:
        return [_safetensors_file(name, outputs, tied)]
    stem = name.removesuffix(".safetensors")
    files: list[PlannedFile] = []
    weight_map = {}
    for number, group in enumerate(groups, 1):
        key = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        held = {output.name for output in group}
        files.append(_safetensors_file(key, group, {a: b for a, b in tied.items() if b in held}))
        weight_map.update({output.name: key for output in group})
    total = sum(output.nbytes for output in outputs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files.append(known_file(f"{name}.index.json", json.dumps(index, indent=2).encode() + b"\n"))
    return files


def _safetensors_file(key: str, outputs: Sequence[Output], tied: Mapping[str, str]) -> PlannedFile:
    # Widest first, as safetensors' own writer does: every tensor is then aligned to its elements.
    ordered = sorted(outputs, key=lambda output: (-output.dtype.itemsize, output.name))
    # "format" is what Hugging Face's loaders ask for; tied names stand as `save_model` notes them.
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    ends = list(accumulate((output.nbytes for output in ordered), initial=0))
    for output, start, stop in zip(ordered, ends, ends[1:], strict=False):
        shape = list(output.tensor.shape)
        offsets = [start, stop]
        head[output.name] = {"dtype": output.dtype.code, "shape": shape, "data_offsets": offsets}
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    # The specification allows spaces behind the JSON of a header.
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8, b" ")
    data = [
        Data(padded + start, output.nbytes, output, _all_of(output))
        for output, start in zip(ordered, ends, strict=False)
    ]
    return PlannedFile(key, padded + ends[-1], (Fixed(0, header), *data))


def write_safetensors(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of tensors in memory, which replaces another one when it is whole."""
    outputs = []
    for name, tensor in tensors.items():
        dtype = DTYPES[dtype_name(tensor.dtype)]
        source = SourceTensor(name, dtype.name, tuple(tensor.shape))
        outputs.append(Output(name, source, dtype, source.nbytes))
    planned = _safetensors_file(path, outputs, {})
    # In the same folder, because a rename does not cross filesystems.
    new = f"{path}.new-{secrets.token_hex(8)}"
    try:
        with open(new, "xb") as file:
            for piece in planned.pieces:
                if isinstance(piece, Fixed):
                    file.write(piece.data)
                elif isinstance(piece, Data) and piece.nbytes:
                    flat = tensors[piece.output.name].contiguous().view(-1)
                    file.write(flat.view(torch.uint8).numpy().data)
            file.flush()
            # Before the rename: a power failure must not leave the name of the old file on an empty
            # one.
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # or the old file may be there again after a power failure
    finally:
        os.close(folder)


def _all_of(output: Output) -> Span:
    return Span(0, output.nbytes // output.dtype.itemsize)


# torch.save ---------------------------------------------------------------------------------


def torch_file(key: str, tree: Any, outputs: Sequence[Output]) -> PlannedFile:
    """The file that torch.save would have written of `tree`.

    Its tensors are `TensorOut`s whose keys are the outputs' numbers.
    """
    building = ZipBuilding()
    data = [(str(number), output, _all_of(output)) for number, output in enumerate(outputs)]
    building.add(write_tree(tree), data)
    return building.file(key)


class ZipBuilding:
    """Plans a file that consists of one or more blobs of torch.save."""

    def __init__(self) -> None:
        self.pieces: list[FilePiece] = []
        self.nbytes = 0
        self.checksums = 0

    def add(self, pickle: bytes, data: Sequence[tuple[str, Output, Span]]) -> tuple[int, int]:
        """Append a blob of a tree and its storages by key; returns its start and its length."""
        start, entries = self.nbytes, list[ZipEntry]()
        # In torch.save's order: what is known before the storages, but for the version.
        contents: dict[str, bytes | tuple[Output, Span]] = {
            "data.pkl": pickle,
            "byteorder": b"little",
            **{f"data/{key}": (output, span) for key, output, span in data},
            "version": b"3\n",
        }
        for key, content in contents.items():
            name, header_start = f"{ARCHIVE}/{key}", self.nbytes - start
            self._put(Fixed(self.nbytes, local_header(name, self.nbytes)))
            if isinstance(content, bytes):
                crc32, nbytes = zlib.crc32(content), len(content)
                self._put(Fixed(self.nbytes, content + descriptor(nbytes, crc32)))
            else:
                crc32, nbytes = ~self.checksums, content[1].numel * content[0].dtype.itemsize
                self._put(Data(self.nbytes, nbytes, *content, self.checksums))
                make = partial(_descriptor_of, nbytes, self.checksums)
                self._put(Late(self.nbytes, DESCRIPTOR_NBYTES, make))
                self.checksums += 1
            entries.append(ZipEntry(name, header_start, nbytes, crc32))
        position = self.nbytes - start

        def make_directory(checksums: Sequence[int]) -> bytes:
            known = [
                one if one.crc32 >= 0 else one._replace(crc32=checksums[~one.crc32])
                for one in entries
            ]
            return directory(known, position)

        # Any checksums will do: a directory's numbers have a fixed width.
        nbytes = len(make_directory([0] * self.checksums))
        self._put(Late(self.nbytes, nbytes, make_directory))
        return start, self.nbytes - start

    def _put(self, piece: FilePiece) -> None:
        self.pieces.append(piece)
        self.nbytes += piece.nbytes

    def file(self, key: str) -> PlannedFile:
        """The file of all that was added."""
        return PlannedFile(key, self.nbytes, tuple(self.pieces), self.checksums)


def _descriptor_of(nbytes: int, number: int, checksums: Sequence[int]) -> bytes:
    return descriptor(nbytes, checksums[number])


# Bytes --------------------------------------------------------------------------------------------

MIB = 1 << 20
CAST_SCRATCH_NBYTES = 8 * MIB

Progress: TypeAlias = Callable[[int, int], None]


class Meter:
    """Adds up the bytes done, of which `written` are new, and reports them to the caller; used from
    any thread.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = self.written = 0
        self.total, self.progress = total, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int, *, is_new: bool = True) -> None:
        """`nbytes` more are done, by an earlier run if they are not new."""
        with self._lock:
            self.done += nbytes
            self.written += nbytes if is_new else 0
            if self.progress is not None:
                # The total is of a copy's source; files that are written anew may be longer.
                self.progress(min(self.done, self.total), self.total)


Counted: TypeAlias = tuple[int, int, int]
"""The number of some data, and the crc32 and the length of its bytes in one part."""


def plan_data_files(
    header: Header,
    rank: int,
    groups: Iterable[Sequence[StoredChunk]],
    texts: PartTexts,
    tensors: Iterable[TensorRecord],
) -> list[DataFile]:
    """The data files of a rank: some for each of `groups`, and one at least, which values and empty
    tensors need. Those of `tensors` that are empty are listed.
    """
    entries = [
        file_entries(chunks, header.block_bytes)
        for group in [group for group in groups if group] or [[]]
        for chunks in split_into_files(sorted(group, key=order_key), FILE_NBYTES_MAX)
    ]
    empty = [tensor for tensor in tensors if 0 in tensor.shape]
    return rank_files(entries, header, rank, texts, empty_tensors=empty)


def write_data_file(
    source: CheckpointSource,
    file: DataFile,
    store: Store,
    key: str,
    *,
    threads: int,
    add: Callable[[int], object],
    origin: Mapping[str, str] | None = None,
) -> FileColumns:
    """Create a data file of ours from the tensors of `source`; `origin` has their names there."""
    pieces = []
    for chunk, start in zip(file.entries.chunks, file.offsets.tolist(), strict=True):
        tensor = source.contents.tensors[origin[chunk.fqn] if origin else chunk.fqn]
        output = Output(chunk.fqn, tensor, DTYPES[chunk.dtype], chunk.nbytes)
        pieces.append(Data(start, chunk.nbytes, output, chunk.region))
    builder = DataFileBuilder(file)
    write_filled(
        store,
        key,
        file.nbytes,
        fill=partial(fill_part, source, pieces),
        finish=lambda start, part, _: builder.complete(start, part),
        threads=threads,
        add=add,
    )
    return builder.result()


def fill_part(
    source: CheckpointSource, pieces: Sequence[FilePiece], start: int, part: memoryview
) -> list[Counted]:
    """Fill `part`, which begins at byte `start` of a file, with its `pieces`, but for late ones.

    Returns the crc32 of the data in it, where the file needs them.
    """
    stop = start + len(part)
    direct: list[ReadRequest] = []
    counted: list[tuple[int, memoryview]] = []
    # A file may have thousands of pieces, and is searched once for each part.
    first = max(bisect_right(pieces, start, key=lambda piece: piece.start) - 1, 0)
    for piece in islice(pieces, first, None):
        if piece.start >= stop:
            break
        low, high = max(piece.start, start), min(piece.start + piece.nbytes, stop)
        if low >= high or isinstance(piece, Late):
            continue
        memory = part[low - start : high - start]
        if isinstance(piece, Fixed):
            memory[:] = piece.data[low - piece.start : high - piece.start]
            continue
        _fill_data(source, piece, (low - piece.start, high - piece.start), memory, direct)
        if piece.number >= 0:
            counted.append((piece.number, memory))
    source.fill(direct)
    # zlib's crc32, because zip files demand it: ours have crc32c.
    return [(number, zlib.crc32(memory), len(memory)) for number, memory in counted]


def _fill_data(
    source: CheckpointSource,
    piece: Data,
    within: tuple[int, int],
    memory: memoryview,
    direct: list[ReadRequest],
) -> None:
    """Bytes `within` a piece of data: noted in `direct`, or read and cast here."""
    output, width = piece.output, piece.output.dtype.itemsize
    assert within[0] % width == 0 and within[1] % width == 0, "parts and data are aligned"
    low, high = within[0] // width, within[1] // width
    target = tensor_over(memory, torch_dtype(output.dtype.name), (high - low,))
    if isinstance(piece.region, Box):
        for part in boxes_of(Span(low, high), piece.region.shape):
            here, target = target[: part.numel].view(part.shape), target[part.numel :]
            offset = [a + b for a, b in zip(piece.region.offset, part.offset, strict=True)]
            box = Box(tuple(offset), part.shape)
            direct.append(ReadRequest(output.tensor.fqn, box, here))
        return
    span = Span(piece.region.start + low, piece.region.start + high)
    if output.dtype.name == output.tensor.dtype:
        direct.append(ReadRequest(output.tensor.fqn, span, target))
        return
    dtype = torch_dtype(output.tensor.dtype)
    step = CAST_SCRATCH_NBYTES // dtype.itemsize
    # In bands: the source's dtype may take more memory than the part.
    for start in range(span.start, span.stop, step):
        band = Span(start, min(start + step, span.stop))
        scratch = torch.empty(band.numel, dtype=dtype)
        source.fill([ReadRequest(output.tensor.fqn, band, scratch)])
        target[band.start - span.start : band.stop - span.start].copy_(scratch)
