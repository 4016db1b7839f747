"""Joint parts as bytes between ranks. They are read by the ranks of the save that wrote them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.checksum_tables import decode_seals, fields_of_seals
from ckpt.format.chunk_rules import Of
from ckpt.format.columns import as_int64s, pack_ints, pack_map, unpack_ints, unpack_map
from ckpt.format.joint_part import FileSizes, JointRest, JointStructure, RankGroup, ReplicaList
from ckpt.format.manifest import BoxTable, Int64s, int64s, starts_of
from ckpt.format.part import TensorRecord
from ckpt.format.part_codec import decode_tensors
from ckpt.format.progressions import pack_regular, unpack_regular
from ckpt.format.uniting import EncodedValues

_Fields = Mapping[str, memoryview]


def encode_structure(structure: JointStructure) -> bytes:
    """`structure` as bytes for the rank above."""
    one = structure
    boxes = BoxTable.of(one.boxes)
    aliases = [[name, target, rank] for (name, target), rank in one.aliases.items()]
    ranks = [one.first_rank, one.rank_count, one.blocks]
    texts = [ranks, one.files, one.shared, one.several, aliases, one.rules.shape[1]]
    packed = pack_map(
        {
            "texts": json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode(),
            "tensor_ranks": pack_regular(one.tensor_ranks),
            **{line.name: _pack_signed(one.rules[line]) for line in Of},
            "box_ndims": _pack_column(np.diff(boxes.first)),
            "box_offsets": pack_ints(boxes.offsets),
            "box_sizes": pack_ints(boxes.sizes),
            **{
                f"replica_{name}": _pack_lists([getattr(each, name) for each in one.replicas])
                for name in ReplicaList._fields
            },
        }
    )
    # Tensors by themselves: most ranks have the same, and they are unpacked once.
    return pack_map({"tensors": one.encoded_tensors, "packed": zlib.compress(packed, level=1)})


class SentStructure(NamedTuple):
    """A structure, and what names it in a rest."""

    structure: JointStructure
    digest: bytes


class StructureReader:
    """Decodes the structures of several ranks. Tensors that they have in common are decoded once,
    and not at all where one of the `known` has them.
    """

    def __init__(self, known: Iterable[JointStructure] = ()) -> None:
        self._tensors: dict[bytes, tuple[TensorRecord, ...]] = {
            one.encoded_tensors: one.tensors for one in known
        }

    def read(self, data: bytes | memoryview) -> SentStructure:
        """What `encode_structure` gave. Raises Corrupt."""
        try:
            fields = unpack_map(data)
            encoded = bytes(fields["tensors"])
            if encoded not in self._tensors:
                self._tensors[encoded] = decode_tensors(encoded)
            packed = unpack_map(zlib.decompress(fields["packed"]))
            structure = _structure(packed, self._tensors[encoded], encoded)
        except (KeyError, ValueError, TypeError, IndexError, zlib.error) as error:
            raise _unreadable(error) from error
        return SentStructure(structure, digest_of_structure(data))


def digest_of_structure(data: bytes | memoryview) -> bytes:
    """sha256 of an encoded structure: 32 bytes."""
    return hashlib.sha256(data).digest()


def _structure(
    fields: _Fields, tensors: tuple[TensorRecord, ...], encoded: bytes
) -> JointStructure:
    texts = json.loads(bytes(fields["texts"]))
    (first_rank, rank_count, blocks), files, shared, several, aliases, count = texts
    rules = np.stack([_unpack_signed(fields[line.name], count, line.name) for line in Of])
    for line, limit in ((Of.TENSOR, len(tensors)), (Of.COUNT, 1 << 62)):
        if count and not 0 <= int(rules[line].min()) <= int(rules[line].max()) < limit:
            raise Corrupt(f"a joint part of rank {first_rank}: {line.name} of a rule")
    ranks = rules[Of.RANK], rules[Of.RANK] + rules[Of.RANK_STEP] * (rules[Of.COUNT] - 1)
    if count and not (first_rank <= np.min(ranks) and np.max(ranks) < first_rank + rank_count):
        raise Corrupt(f"a joint part of rank {first_rank}: chunks of ranks beyond {rank_count}")
    box_first = starts_of(_unpack_column(fields["box_ndims"]))
    total = int(box_first[-1])
    boxes = BoxTable(
        box_first,
        unpack_ints(fields["box_offsets"], total, "box_offsets"),
        unpack_ints(fields["box_sizes"], total, "box_sizes"),
    )
    columns = [_unpack_lists(fields[f"replica_{name}"]) for name in ReplicaList._fields]
    return JointStructure(
        first_rank=first_rank,
        rank_count=rank_count,
        files=tuple(files),
        shared=tuple(shared),
        several=tuple(several),
        tensors=tensors,
        encoded_tensors=encoded,
        tensor_ranks=_int64s(fields["tensor_ranks"], len(tensors), "tensor_ranks"),
        aliases={(name, target): rank for name, target, rank in aliases},
        rules=rules,
        boxes=tuple([boxes[index] for index in range(len(boxes))]),
        blocks=blocks,
        replicas=tuple([ReplicaList(*lists) for lists in zip(*columns, strict=True)]),
    )


def encode_rest(rest: JointRest, digest: bytes) -> bytes:
    """`rest` as bytes for the rank above; `digest` names its structure."""
    groups = [group for of_list in rest.replicas for group in of_list]
    return pack_map(
        {
            "structure_digest": digest,
            **_fields_of_sizes("own", rest.own),
            **_fields_of_sizes("shared", rest.shared),
            "differing": json.dumps(rest.differing).encode(),
            "values": _pack_blobs([one.data for one in rest.values]),
            "values_ranks": _pack_column(int64s([one.rank for one in rest.values])),
            "per_rank": b"".join(rest.per_rank),
            "per_rank_sizes": _pack_column(int64s([len(data) for data in rest.per_rank])),
            "texts": _pack_blobs([group.data for group in rest.texts]),
            "texts_ranks": _pack_lists([group.ranks for group in rest.texts]),
            "digest_lists": _pack_column(int64s([len(of_list) for of_list in rest.replicas])),
            "digests": _pack_blobs([group.data for group in groups]),
            "digests_ranks": _pack_lists([group.ranks for group in groups]),
        }
    )


def decode_rest(data: bytes | memoryview, known: SentStructure) -> JointRest:
    """What `encode_rest` gave, of a structure sent now or earlier. Raises Corrupt when the two do
    not belong together.
    """
    try:
        fields = unpack_map(data)
        if bytes(fields["structure_digest"]) != known.digest:
            raise Corrupt("a rank's checksums do not belong to the structure that it sent")
        return _rest(fields, known.structure)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise _unreadable(error) from error


def _rest(fields: _Fields, structure: JointStructure) -> JointRest:
    groups = _groups(fields, "digests")
    counts = _unpack_column(fields["digest_lists"])
    edges = starts_of(counts).tolist()
    replicas = tuple([tuple(groups[a:b]) for a, b in pairwise(edges)])
    for replica_list, of_list in zip(structure.replicas, replicas, strict=True):
        if any(len(group.data) != 4 * len(replica_list.tensor) for group in of_list):
            raise Corrupt("digests of ranks are not one per replica")
    sizes = _unpack_column(fields["per_rank_sizes"])
    if len(sizes) not in (0, structure.rank_count):
        raise Corrupt(f"values of {len(sizes)} ranks of {structure.rank_count}")
    of_ranks = zip(
        _unpack_column(fields["values_ranks"]).tolist(),
        _unpack_blobs(fields["values"]),
        strict=True,
    )
    return JointRest(
        own=_sizes(fields, "own", len(structure.files)),
        shared=_sizes(fields, "shared", len(structure.shared)),
        differing=tuple(json.loads(bytes(fields["differing"]))),
        values=tuple(starmap(EncodedValues, of_ranks)),
        per_rank=tuple(_cut(fields["per_rank"], sizes)),
        texts=tuple(_groups(fields, "texts")),
        replicas=replicas,
    )


def _fields_of_sizes(name: str, sizes: FileSizes) -> dict[str, bytes]:
    fields = {
        "nbytes": pack_ints(sizes.nbytes),
        "data_start": pack_ints(sizes.data_start),
        **fields_of_seals(sizes.seals),
    }
    return {f"{name}_{field}": data for field, data in fields.items()}


def _sizes(fields: _Fields, name: str, files: int) -> FileSizes:
    mine = {key.removeprefix(f"{name}_"): data for key, data in fields.items()}
    nbytes = as_int64s(unpack_ints(mine["nbytes"], files, "nbytes"), "nbytes")
    data_start = as_int64s(unpack_ints(mine["data_start"], files, "data_start"), "data_start")
    return FileSizes(nbytes, data_start, decode_seals(mine, nbytes - data_start))


def _groups(fields: _Fields, name: str) -> list[RankGroup]:
    sets = _unpack_lists(fields[f"{name}_ranks"])
    return [RankGroup(*pair) for pair in zip(_unpack_blobs(fields[name]), sets, strict=True)]


# Columns that say themselves how long they are


def _pack_column(values: Int64s) -> bytes:
    return len(values).to_bytes(8, "little") + pack_regular(values)


def _unpack_column(data: memoryview) -> Int64s:
    return _int64s(data[8:], int.from_bytes(data[:8], "little"), "column")


def _pack_lists(lists: Sequence[Int64s]) -> bytes:
    """Some columns: their lengths, then the items of all."""
    lengths = _pack_column(int64s([len(values) for values in lists]))
    items = pack_regular(np.concatenate([int64s([]), *lists]))
    return len(lengths).to_bytes(8, "little") + lengths + items


def _unpack_lists(data: memoryview) -> list[Int64s]:
    begin = 8 + int.from_bytes(data[:8], "little")
    edges = starts_of(_unpack_column(data[8:begin]))
    items = _int64s(data[begin:], int(edges[-1]), "lists")
    return np.split(items, edges[1:-1]) if len(edges) > 1 else []


def _pack_blobs(blobs: Sequence[bytes]) -> bytes:
    sizes = _pack_column(int64s([len(blob) for blob in blobs]))
    return len(sizes).to_bytes(8, "little") + sizes + b"".join(blobs)


def _unpack_blobs(data: memoryview) -> list[bytes]:
    begin = 8 + int.from_bytes(data[:8], "little")
    return _cut(data[begin:], _unpack_column(data[8:begin]))


def _cut(data: memoryview, sizes: Int64s) -> list[bytes]:
    edges = starts_of(sizes).tolist()
    if edges[-1] != len(data):
        raise Corrupt(f"a joint part: {edges[-1]} of {len(data)} bytes are used")
    return [bytes(data[a:b]) for a, b in pairwise(edges)]


def _pack_signed(values: Int64s) -> bytes:
    """Numbers of either sign, small ones in few bytes: 0, -1, 1, -2, 2."""
    return pack_regular(((values << 1) ^ (values >> 63)).view(np.uint64))


def _unpack_signed(data: memoryview, count: int, name: str) -> Int64s:
    packed = unpack_regular(data, count, name).astype(np.uint64)
    halves = (packed >> np.uint64(1)) ^ (np.uint64(0) - (packed & np.uint64(1)))
    return halves.view(np.int64)


def _int64s(data: memoryview, count: int, name: str) -> Int64s:
    return as_int64s(unpack_regular(data, count, name), name)


def _unreadable(error: Exception) -> Corrupt:
    return Corrupt(f"a rank's joint part is not readable: {error!r:.200}")
