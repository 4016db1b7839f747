"""Parts: what one rank contributes to a checkpoint. `joint_manifest` makes the manifest of them.

On its way to the coordinator a part is merged with those of other ranks (`joint_part`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import Corrupt, InvalidState
from ckpt.format.checksum import Digests, Seal, Seals, crc32c, no_digests
from ckpt.format.codec import encode_values
from ckpt.format.columns import Ints, pack_ints, pack_map, unpack_ints, unpack_map
from ckpt.format.datafile import NDIM_MAX, StoredChunk, region_start
from ckpt.format.manifest import Int64s, int64s, starts_of
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Shape, Span, span_of


class TensorRecord(NamedTuple):
    """A tensor of a rank's state, whether or not the rank writes any of it. `dtype` is the
    canonical name.
    """

    fqn: str
    dtype: str
    shape: Shape
    kind: int


class ReplicaColumns(NamedTuple):
    """Tensors, or regions of them, that other ranks may have as well: one item each.

    `tensor` are indexes into the part's tensors, `start` the regions' row-major first elements,
    `must_agree` is 1 where a difference fails the save, and `digests` are the crc32c of the bytes.
    """

    tensor: Ints
    start: Ints
    must_agree: Ints
    digests: npt.NDArray[np.uint32]


NO_REPLICAS = ReplicaColumns(int64s([]), int64s([]), int64s([]), np.zeros(0, dtype=np.uint32))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank contributes. Columns have one item per chunk, in the order of its files.

    Files of other attempts, with the chunks that this rank would have written, come after its own.
    """

    rank: int
    files: tuple[str, ...]
    file_nbytes: Int64s
    file_data_start: Int64s
    tensors: tuple[TensorRecord, ...]
    chunk_tensor: Ints  # index into tensors
    chunk_file: Ints  # index into files
    chunk_byte_start: Ints
    chunk_start: Ints  # row-major index of the first element
    chunk_numel: Ints
    chunk_box: Ints  # index into boxes, or -1 for a span
    boxes: tuple[Box, ...]
    block_counts: Ints
    aliases: Mapping[str, str]
    checksums: npt.NDArray[np.uint32]
    values: bytes  # encoded {fqn: value} on the coordinator, empty on the others
    value_digests: Mapping[str, int]  # fqn -> crc32c of the encoded value, on every rank
    per_rank: bytes  # encoded {fqn: value} of this rank; empty when it has none
    seals: Seals  # of the files' checksum tables
    replicas: ReplicaColumns = NO_REPLICAS
    warnings: tuple[str, ...] = field(default=())
    digests: Digests = field(default_factory=no_digests)  # a row per chunk, or no rows

    @property
    def chunk_position(self) -> Int64s:
        """Per chunk, where it starts in its file, counted from the end of the file's header."""
        starts = np.asarray(self.chunk_byte_start, dtype=np.int64)
        return starts - self.file_data_start[self.chunk_file]

    def is_like(self, other: Part) -> bool:
        """Whether the structures of both are the same, as far as that shows without making them: in
        parts that share what follows from the chunks (`part_again`). False where it does not.
        """
        shared = (
            "tensors",
            "chunk_tensor",
            "chunk_file",
            "chunk_start",
            "chunk_numel",
            "chunk_box",
            "boxes",
            "block_counts",
        )
        return (
            all(getattr(self, name) is getattr(other, name) for name in shared)
            and (self.rank, self.files, self.aliases) == (other.rank, other.files, other.aliases)
            and np.array_equal(self.chunk_position, other.chunk_position)
            and all(map(np.array_equal, self.replicas[:3], other.replicas[:3]))
        )

    def texts(self) -> bytes:
        """Digests of values, and warnings, encoded."""
        return _json([dict(self.value_digests), list(self.warnings)])


def encode_tensors(tensors: Sequence[TensorRecord]) -> bytes:
    """The tensors of a rank, packed. By themselves, because most ranks have the same, and they are
    most of a part: who gets them from many ranks unpacks them once.
    """
    names: dict[str, int] = {}
    dtypes = [names.setdefault(tensor.dtype, len(names)) for tensor in tensors]
    fields = {
        "texts": _json([list(names), [tensor.fqn for tensor in tensors]]),
        "dtype_ids": pack_ints(dtypes),
        "kinds": pack_ints([tensor.kind for tensor in tensors]),
        "ndims": pack_ints([len(tensor.shape) for tensor in tensors]),
        "dims": pack_ints([size for tensor in tensors for size in tensor.shape]),
    }
    return zlib.compress(pack_map(fields), level=1)


def decode_tensors(data: bytes) -> tuple[TensorRecord, ...]:
    """The inverse of `encode_tensors`."""
    fields = unpack_map(zlib.decompress(data))
    dtype_names, fqns = json.loads(bytes(fields["texts"]))
    counts = unpack_ints(fields["ndims"], len(fqns), "ndims")
    if len(counts) and int(counts.max()) > NDIM_MAX:
        raise Corrupt(f"a tensor of {int(counts.max())} dims, at most {NDIM_MAX}")
    ndims = starts_of(counts).tolist()
    dims = unpack_ints(fields["dims"], ndims[-1], "dims").tolist()
    shapes = [tuple(dims[a:b]) for a, b in pairwise(ndims)]
    ids = unpack_ints(fields["dtype_ids"], len(fqns), "dtype_ids").tolist()
    kinds = unpack_ints(fields["kinds"], len(fqns), "kinds").tolist()
    return tuple(map(TensorRecord, fqns, [dtype_names[index] for index in ids], shapes, kinds))


class FileColumns(NamedTuple):
    """A data file as columns, from its writer or from its header; one item per chunk.

    Of a file of another attempt (`../<step directory>/<name>`), some chunks only.
    """

    name: str
    nbytes: int
    data_start: int
    chunks: Sequence[StoredChunk]
    offsets: Int64s
    block_counts: Int64s
    checksums: npt.NDArray[np.uint32]
    seal: Seal
    digests: Digests = no_digests()


class PartTexts(NamedTuple):
    """The contents of a part besides tensors; see `Part`. What is not given is not there."""

    aliases: Mapping[str, str]
    values: bytes = b""
    value_digests: Mapping[str, int] = {}
    per_rank: bytes = b""
    replicas: ReplicaColumns = NO_REPLICAS
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        *,
        sends: Mapping[str, Any] | None,
    ) -> PartTexts:
        """Of the common `values` as this rank has them, those that it `sends` (None: not even an
        empty mapping), and its own.
        """
        return cls(
            dict(aliases),
            b"" if sends is None else encode_values(dict(sends)),
            {name: crc32c(encode_values(values[name])) for name in sorted(values)},
            encode_values(dict(per_rank)) if per_rank else b"",
        )


def part_of_files(
    files: Sequence[FileColumns], *, rank: int, tensors: Sequence[TensorRecord], texts: PartTexts
) -> Part:
    """The part of `rank` from its files. Those of other attempts come last, with those of their
    chunks that stand for chunks that this rank would have written.

    `tensors` are all tensors of the rank's state, those without elements included. Raises
    InvalidState when a tensor is described in two ways.
    """
    known = sorted(tensors)
    index = {tensor.fqn: position for position, tensor in enumerate(known)}
    if len(index) != len(known):
        raise InvalidState(
            [
                f"{b.fqn}: in the state twice, as {a} and {b}"
                for a, b in pairwise(known)
                if a[0] == b[0]
            ]
        )
    columns = _columns(files)
    chunks = list(chain.from_iterable(columns.chunks))
    fqns, dtypes, _, _, nbytes, _ = zip(*chunks, strict=True) if chunks else ((),) * 6
    if unknown := sorted(set(fqns) - index.keys()):
        raise ValueError(f"chunks of tensors that are not in `tensors`: {unknown[:5]}")
    starts, box_ids, boxes = _region_columns(chunks)
    return Part(
        rank=rank,
        files=columns.name,
        file_nbytes=int64s(columns.nbytes),
        file_data_start=int64s(columns.data_start),
        tensors=tuple(known),
        chunk_tensor=int64s(list(map(index.__getitem__, fqns))),
        chunk_file=np.repeat(np.arange(len(files)), list(map(len, columns.chunks))),
        chunk_byte_start=np.concatenate([int64s([]), *columns.offsets]),
        chunk_start=int64s(starts),
        chunk_numel=int64s(nbytes) // int64s([DTYPES[dtype].itemsize for dtype in dtypes]),
        chunk_box=int64s(box_ids),
        boxes=tuple(boxes),
        block_counts=np.concatenate([int64s([]), *columns.block_counts]),
        checksums=np.concatenate([_NO_SUMS, *columns.checksums]),
        digests=np.concatenate([no_digests(), *columns.digests]),
        seals=Seals.of(columns.seal),
        **texts._asdict(),
    )


_NO_SUMS = np.zeros(0, dtype=np.uint32)


def _columns(files: Sequence[FileColumns]) -> Any:
    """The files, field by field."""
    return FileColumns(*(zip(*files, strict=True) if files else [()] * len(FileColumns._fields)))


def part_again(part: Part, files: Sequence[FileColumns], texts: PartTexts) -> Part:
    """The part of a save of the same chunks as `part`, in as many files, none of them another
    attempt's.

    What follows from the chunks alone is shared with `part`.
    """
    columns = _columns(files)
    return replace(
        part,
        file_nbytes=int64s(columns.nbytes),
        file_data_start=int64s(columns.data_start),
        chunk_byte_start=np.concatenate([int64s([]), *columns.offsets]),
        checksums=np.concatenate([_NO_SUMS, *columns.checksums]),
        seals=Seals.of(columns.seal),
        **texts._asdict(),
    )


def _region_columns(chunks: Sequence[StoredChunk]) -> tuple[list[int], list[int], list[Box]]:
    """Per chunk the row-major index of its first element, and its box's number or -1 for a run."""
    starts, box_ids = [], []
    boxes: dict[Box, int] = {}
    for chunk in chunks:
        region, shape = chunk.region, chunk.global_shape
        if type(region) is Box and region.shape != shape:
            starts.append(region_start(region, shape))
            is_run = span_of(region, shape) is not None
            box_ids.append(-1 if is_run else boxes.setdefault(region, len(boxes)))
        else:
            starts.append(region.start if type(region) is Span else 0)
            box_ids.append(-1)
    return starts, box_ids, list(boxes)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
