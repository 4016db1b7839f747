"""Parts from bytes, as the coordinator gets them. What ranks have in common is decoded once."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.blake3 import digests_from
from ckpt.format.columns import Ints, as_int64s, unpack_ints, unpack_map
from ckpt.format.datafile import NDIM_MAX
from ckpt.format.manifest import BoxTable, Int64s, starts_of
from ckpt.format.part import Part, ReplicaColumns, TensorRecord


def encode_part(part: Part) -> bytes:
    """`part` as bytes for the coordinator."""
    structure = part.structure()
    return len(structure).to_bytes(8, "little") + structure + part.variable()


def decode_part(data: bytes) -> Part:
    """The part that `data` encodes. Raises Corrupt."""
    size = int.from_bytes(data[:8], "little")
    view = memoryview(data)
    return assemble(view[8 : 8 + size], view[8 + size :])


def assemble(structure: bytes | memoryview, variable: bytes | memoryview) -> Part:
    """The part of a structure and the variable rest.

    Raises Corrupt when they do not belong together.
    """
    reader = PartReader()
    return reader.part(reader.structure(structure), variable)


@dataclass(frozen=True, slots=True, eq=False)
class PartStructure:
    """A rank's structure, decoded: a part without checksums, digests, values and warnings, whose
    files have no sizes yet. `positions` count from the ends of the files' headers.
    """

    digest: bytes
    part: Part
    tensors: bytes  # the tensors of `part`, encoded
    positions: Int64s
    blocks: int


class PartReader:
    """Decodes the parts of many ranks. It remembers what it has decoded, by its bytes, and what is
    decoded in `known`.
    """

    def __init__(self, known: Iterable[PartStructure] = ()) -> None:
        self._tensors = {one.tensors: one.part.tensors for one in known}
        self._texts: dict[bytes, tuple[dict[str, int], tuple[str, ...]]] = {}

    def structure(self, data: bytes | memoryview) -> PartStructure:
        """What `Part.structure` encoded. Raises Corrupt."""
        try:
            return self._structure(unpack_map(data), hashlib.sha256(data).digest())
        except (KeyError, ValueError, TypeError, IndexError, zlib.error) as error:
            raise _unreadable(error) from error

    def part(self, structure: PartStructure, variable: bytes | memoryview) -> Part:
        """The part of a structure sent now or earlier and what `Part.variable` encoded.

        Columns are shared with `structure`. Raises Corrupt when the two do not belong together.
        """
        try:
            rest = unpack_map(variable)
            if bytes(rest["structure_digest"]) != structure.digest:
                raise Corrupt("a rank's checksums do not belong to the structure that it sent")
            part = self._part(structure, rest)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise _unreadable(error) from error
        if structure.blocks != len(part.checksums):
            raise Corrupt(
                f"rank {part.rank}: {len(part.checksums)} checksums are not one per block"
            )
        if len(part.replicas.digests) != len(part.replicas.tensor):
            raise Corrupt(
                f"rank {part.rank}: {len(part.replicas.digests)} digests are not one per replica"
            )
        if len(part.digests) not in (0, len(part.chunk_file)):
            raise Corrupt(f"rank {part.rank}: {len(part.digests)} digests are not one per chunk")
        return part

    def _structure(self, fixed: Mapping[str, memoryview], digest: bytes) -> PartStructure:
        rank, files, aliases = json.loads(bytes(fixed["texts"]))
        chunks, box_count, replicas = np.frombuffer(fixed["counts"], dtype="<u8").tolist()
        _check_count(fixed, "chunk", chunks)
        _check_count(fixed, "replica", replicas)
        if box_count > chunks:
            raise Corrupt(f"rank {rank}: {box_count} boxes of {chunks} chunks")

        def ints(name: str, count: int) -> Ints:
            return unpack_ints(fixed[name], count, name)

        encoded = bytes(fixed["tensors"])
        if encoded not in self._tensors:
            self._tensors[encoded] = decode_tensors(encoded)
        tensors = self._tensors[encoded]
        box_first = starts_of(ints("box_ndims", box_count))
        boxes = BoxTable(
            box_first,
            ints("box_offsets", int(box_first[-1])),
            ints("box_sizes", int(box_first[-1])),
        )
        part = Part(
            rank=rank,
            files=tuple(files),
            file_nbytes=np.zeros(len(files), dtype=np.int64),
            file_data_start=np.zeros(len(files), dtype=np.int64),
            tensors=tensors,
            chunk_tensor=ints("chunk_tensors", chunks),
            chunk_file=ints("chunk_files", chunks),
            chunk_byte_start=np.zeros(0, dtype=np.int64),
            chunk_start=ints("chunk_starts", chunks),
            chunk_numel=ints("chunk_numels", chunks),
            chunk_box=ints("chunk_boxes", chunks).astype(np.int64) - 1,
            boxes=tuple([boxes[index] for index in range(box_count)]),
            block_counts=ints("block_counts", chunks),
            aliases=aliases,
            checksums=np.zeros(0, dtype=np.uint32),
            values=b"",
            value_digests={},
            per_rank=b"",
            replicas=ReplicaColumns(
                ints("replica_tensors", replicas),
                ints("replica_starts", replicas),
                ints("replica_must_agree", replicas),
                np.zeros(0, dtype=np.uint32),
            ),
        )
        for name, column, limit in (
            ("chunk of file", part.chunk_file, len(files)),
            ("chunk of tensor", part.chunk_tensor, len(tensors)),
            ("chunk of box", part.chunk_box, box_count),
            ("replica of tensor", part.replicas.tensor, len(tensors)),
        ):
            if len(column) and int(column.max()) >= limit:
                raise Corrupt(f"rank {rank}: a {name} {int(column.max())}")
        positions = as_int64s(ints("chunk_positions", chunks), "chunk_positions")
        blocks = int(np.sum(part.block_counts, dtype=np.int64))
        return PartStructure(digest, part, encoded, positions, blocks)

    def _part(self, structure: PartStructure, rest: Mapping[str, memoryview]) -> Part:
        fixed = structure.part
        files = len(fixed.files)
        data_start = as_int64s(
            unpack_ints(rest["file_data_starts"], files, "file_data_starts"), "file_data_starts"
        )
        texts = bytes(rest["texts"])
        if texts not in self._texts:
            digests, warnings = json.loads(texts)
            self._texts[texts] = (digests, tuple(warnings))
        value_digests, texts_of_warnings = self._texts[texts]
        file_nbytes = as_int64s(
            unpack_ints(rest["file_nbytes"], files, "file_nbytes"), "file_nbytes"
        )
        return replace(
            fixed,
            file_nbytes=file_nbytes,
            file_data_start=data_start,
            chunk_byte_start=structure.positions + data_start[fixed.chunk_file],
            checksums=np.frombuffer(rest["checksums"], dtype="<u4"),
            values=bytes(rest["values"]),
            value_digests=value_digests,
            per_rank=bytes(rest["per_rank"]),
            replicas=fixed.replicas._replace(
                digests=np.frombuffer(rest["replica_digests"], dtype="<u4")
            ),
            warnings=texts_of_warnings,
            digests=digests_from(rest["digests"]),
        )


def _check_count(fixed: Mapping[str, memoryview], name: str, count: int) -> None:
    """Raises Corrupt for more chunks or replicas than there can be, before memory is taken for
    them: no two begin at the same element of a tensor, so one of the columns has a byte for each.
    """
    if count > 1 and count > max(len(fixed[f"{name}_tensors"]), len(fixed[f"{name}_starts"])):
        raise Corrupt(f"{count} of {name}: more than the columns can hold")


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


def _unreadable(error: Exception) -> Corrupt:
    return Corrupt(f"a rank's part is not readable: {error!r:.200}")
