"""Files to be written, as values: which bytes are known, which come from tensors, which come last.

    outputs -> files (fixed bytes, tensor data, late bytes) -> parts of a file, in any format

A format is a function from outputs to planned files. Everything about a file but the tensors' bytes
(and the checksums over them, in zip files) is known before the first byte is read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ckpt.convert.sources.source import SourceTensor
from ckpt.convert.sources.torch_pickle import write_tree
from ckpt.convert.sources.zips import (
    DESCRIPTOR_NBYTES,
    Placed,
    ZipLayout,
    descriptor,
    directory,
    lay_out,
    local_header,
)
from ckpt.layout.dtypes import DType
from ckpt.layout.region import Span

HEADER_ALIGNMENT = 64
ARCHIVE = "archive"


class Output(NamedTuple):
    """A tensor of the export: its name, its source tensor, and its dtype and size in the target."""

    name: str
    tensor: SourceTensor
    dtype: DType
    nbytes: int


class Fixed(NamedTuple):
    """Bytes that are known in advance, from `start` on."""

    start: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Data(NamedTuple):
    """Elements `span` of an output from byte `start` on. `number` is the index of its crc32."""

    start: int
    nbytes: int
    output: Output
    span: Span
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
    groups = _groups(outputs, shard_bytes_max)
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


def _groups(outputs: Sequence[Output], nbytes_max: int | None) -> list[list[Output]]:
    """Outputs in name order, cut before `nbytes_max` is passed. A larger one stays whole."""
    groups: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if nbytes_max is not None and groups[-1] and filled + output.nbytes > nbytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    return groups


def _safetensors_file(key: str, outputs: Sequence[Output], tied: Mapping[str, str]) -> PlannedFile:
    # Widest first, as safetensors' own writer does: every tensor is then aligned to its elements.
    ordered = sorted(outputs, key=lambda output: (-output.dtype.itemsize, output.name))
    # "format" is what Hugging Face's loaders ask for; tied names stand as `save_model` notes them.
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    position = 0
    for output in ordered:
        head[output.name] = {
            "dtype": output.dtype.code,
            "shape": list(output.tensor.shape),
            "data_offsets": [position, position + output.nbytes],
        }
        position += output.nbytes
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8, b" ")
    pieces: list[FilePiece] = [Fixed(0, header)]
    position = padded
    for output in ordered:
        pieces.append(Data(position, output.nbytes, output, _all_of(output)))
        position += output.nbytes
    return PlannedFile(key, position, tuple(pieces))


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


def blob_of(value: Any) -> bytes:
    """A value as torch.save would have written it."""
    building = ZipBuilding()
    building.add(write_tree(value), [])
    made = bytearray(building.nbytes)
    for piece in building.pieces:
        assert not isinstance(piece, Data)
        data = piece.data if isinstance(piece, Fixed) else piece.make([])
        made[piece.start : piece.start + len(data)] = data
    return bytes(made)


class ZipBuilding:
    """Plans a file that consists of one or more blobs of torch.save."""

    def __init__(self) -> None:
        self.pieces: list[FilePiece] = []
        self.nbytes = 0
        self.checksums = 0

    def add(self, pickle: bytes, data: Sequence[tuple[str, Output, Span]]) -> tuple[int, int]:
        """Append a blob of a tree and its storages by key; returns its start and its length."""
        start = self.nbytes
        # In torch.save's order: what is known before the storages, but for the version.
        contents: dict[str, bytes | tuple[Output, Span]] = {
            "data.pkl": pickle,
            "byteorder": b"little",
            **{f"data/{key}": (output, span) for key, output, span in data},
            "version": b"3\n",
        }
        sizes = {f"{ARCHIVE}/{name}": _size_of(content) for name, content in contents.items()}
        layout = lay_out(sizes, start)
        sums: list[_Sum] = []
        for entry, content in zip(layout.entries, contents.values(), strict=True):
            self.pieces.append(Fixed(entry.header_start, local_header(entry)))
            if isinstance(content, bytes):
                crc32 = zlib.crc32(content)
                sums.append(_Sum(crc32, -1))
                self.pieces.append(Fixed(entry.data_start, content))
                self.pieces.append(Fixed(entry.descriptor_start, descriptor(entry, crc32)))
            else:
                sums.append(_Sum(0, self.checksums))
                self.pieces.append(Data(entry.data_start, entry.nbytes, *content, self.checksums))
                self.pieces.append(_late_descriptor(entry, self.checksums))
                self.checksums += 1
        self.pieces.append(_late_directory(layout, start, sums))
        self.nbytes = start + layout.nbytes
        return start, layout.nbytes

    def file(self, key: str) -> PlannedFile:
        """The file of all that was added."""
        return PlannedFile(key, self.nbytes, tuple(self.pieces), self.checksums)


def _size_of(content: bytes | tuple[Output, Span]) -> int:
    if isinstance(content, bytes):
        return len(content)
    output, span = content
    return span.numel * output.dtype.itemsize


class _Sum(NamedTuple):
    """A crc32 that is known, or (`number` >= 0) the index of the data that it is taken of."""

    known: int
    number: int


def _late_descriptor(entry: Placed, number: int) -> Late:
    return Late(
        entry.descriptor_start,
        DESCRIPTOR_NBYTES,
        lambda checksums: descriptor(entry, checksums[number]),
    )


def _late_directory(layout: ZipLayout, start: int, sums: Sequence[_Sum]) -> Late:
    def make(checksums: Sequence[int]) -> bytes:
        crc32s = [s.known if s.number < 0 else checksums[s.number] for s in sums]
        return directory(layout, start, crc32s)

    stop = start + layout.nbytes
    return Late(layout.directory_start, stop - layout.directory_start, make)
