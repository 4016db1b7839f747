"""The data files of one rank, planned: everything but the bytes of their chunks.

    chunks of each file + contents besides tensors -> names, headers, reserved tensors

Saves, imports and rewritten checkpoints plan their files here and nowhere else. A file states its
place in its checkpoint, so that a lost manifest can be rebuilt: every rank writes at least one. Its
first one has the tensors without elements and the aliases that the rank knows, and its per-rank
values; the first file of rank 0 also the common values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ckpt.errors import Corrupt
from ckpt.format.checksum import Digests, Seal, digests_from
from ckpt.format.datafile import (
    ALIGNMENT,
    DIGESTS,
    PER_RANK,
    VALUES,
    DataFileLayout,
    FileEntries,
    layout_data_file,
)
from ckpt.format.datafile_index import DataFileIndex
from ckpt.format.manifest import Header, parse_reference
from ckpt.format.part import FileColumns, PartTexts, TensorRecord


def data_file_name(rank: int, index: int) -> str:
    """The name of a rank's data file in the step's directory."""
    return f"rank{rank:05d}-{index:03d}.safetensors"


class FileRange(NamedTuple):
    """Whole neighbouring chunks of another attempt's data file, by bytes of that file, half-open.

    `file` is the name in the manifest, `../<step directory>/<name>`.
    """

    file: str
    start: int
    stop: int


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
    if type(kind) is not int or not 0 <= kind <= 15:
        raise ValueError(f"{kind!r:.20} is not a kind")
    return TensorRecord(fqn, dtype, tuple(shape), kind)


def _file_range(row: Any) -> FileRange:
    file, start, stop = row
    if not isinstance(file, str) or parse_reference(file) is None:
        raise ValueError(f"{file!r:.200} is not a data file of another attempt")
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop < 1 << 62:
        raise ValueError(f"{start!r:.30} to {stop!r:.30} is not a range of bytes")
    return FileRange(file, start, stop)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """A data file that `rank` writes. `extras` are its reserved tensors, `digests` a row per chunk
    or none.
    """

    rank: int
    name: str
    entries: FileEntries
    layout: DataFileLayout
    extras: Mapping[str, bytes]
    digests: Digests

    def columns(self, checksums: npt.NDArray[np.uint32], seal: Seal) -> FileColumns:
        """The file once it is written, given the crc32c of all blocks of its chunks."""
        layout = self.layout
        head = self.name, layout.nbytes, len(layout.header), self.entries.chunks
        return FileColumns(
            *head, layout.offsets, layout.block_counts, checksums, seal, self.digests
        )

    def with_data_start(self, data_start: int) -> DataFile:
        """The same file, its header padded with spaces so that its chunks begin at `data_start`."""
        layout = self.layout
        shift = data_start - len(layout.header)
        assert shift >= 0 and data_start % ALIGNMENT == 0, "headers only grow, to whole pages"
        text = layout.header[8:].ljust(data_start - 8, b" ")
        moved = replace(
            layout,
            header=(data_start - 8).to_bytes(8, "little") + text,
            offsets=layout.offsets + shift,
            nbytes=layout.nbytes + shift,
        )
        return replace(self, layout=moved)


def rank_files(
    files: Sequence[FileEntries],
    header: Header,
    rank: int,
    texts: PartTexts,
    *,
    empty_tensors: Sequence[TensorRecord] = (),
    references: Sequence[FileRange] = (),
    digests: Sequence[bytes] | None = None,
) -> list[DataFile]:
    """The files of one rank that hold these chunks, in this order; at least one, even if empty.

    `texts` are those of the rank's part. `references` are the bytes in files of other attempts that
    the rank would have written. `digests` are those of all chunks in the order of the files; None
    for files without digests. Raises InvalidState when a header becomes longer than readers accept.
    """
    planned = []
    left = list(digests or ())
    for index, entries in enumerate(files):
        metadata = {
            "ckpt.header": header.model_dump_json(),
            "ckpt.rank": str(rank),
            "ckpt.file": f"{index}/{len(files)}",
        }
        extras: dict[str, bytes] = {}
        if index == 0:
            lists: dict[str, Any] = {
                "empty": list(map(list, sorted(empty_tensors))),
                "aliases": dict(sorted(texts.aliases.items())),
                "references": list(map(list, sorted(references))),
            }
            metadata |= {f"ckpt.{name}": _json(value) for name, value in lists.items() if value}
            both = {VALUES: texts.values, PER_RANK: texts.per_rank}
            extras = {name: data for name, data in both.items() if data}
        own, left = left[: len(entries.chunks)], left[len(entries.chunks) :]
        if digests is not None:
            extras[DIGESTS] = b"".join(own)
        sizes = dict(zip(extras, map(len, extras.values()), strict=True))
        layout = layout_data_file(
            entries, block_bytes=entries.block_bytes, metadata=metadata, extra=sizes
        )
        name = data_file_name(rank, index)
        rows = digests_from(b"".join(own))
        planned.append(DataFile(rank, name, entries, layout, extras, rows))
    return planned
