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
from ckpt.format.checksum import decode_seals, fields_of_seals
from ckpt.format.chunk_rules import Of
from ckpt.format.columns import (
    as_int64s,
    checked_indexes,
    pack_ints,
    pack_map,
    pack_regular,
    unpack_ints,
    unpack_map,
    unpack_regular,
)
from ckpt.format.datafile import NDIM_MAX
from ckpt.format.manifest import BoxTable, Int64s, int64s, starts_of
from ckpt.format.part import (
    EncodedValues,
    FileSizes,
    JointRest,
    JointStructure,
    Part,
    RankGroup,
    ReplicaList,
    TensorRecord,
    decode_tensors,
)

_Fields = Mapping[str, memoryview]

RANKS_MAX = 1 << 20  # of one joint part
# What is regular takes few bytes, whatever its count: so counts are compared with these.
_RULES_PER_TENSOR_MAX = 1024


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


def encode_part(part: Part) -> bytes:
    """The part of one rank as bytes for the coordinator."""
    structure = encode_structure(part.structure)
    rest = encode_rest(part.rest, digest_of_structure(structure))
    return len(structure).to_bytes(8, "little") + structure + rest


def decode_part(data: bytes) -> Part:
    """What `encode_part` gave. Raises Corrupt."""
    size = int.from_bytes(data[:8], "little")
    known = StructureReader().read(data[8 : 8 + size])
    return Part(known.structure, decode_rest(data[8 + size :], known))


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
            unpacked = zlib.decompress(fields["packed"])
            tensors = self._tensors[encoded]
            items_max = len(unpacked) + _RULES_PER_TENSOR_MAX * (len(tensors) + 1)
            structure = _structure(unpack_map(unpacked), tensors, encoded, items_max)
        except (*_UNREADABLE, zlib.error) as error:
            raise _unreadable(error) from error
        return SentStructure(structure, digest_of_structure(data))


def digest_of_structure(data: bytes | memoryview) -> bytes:
    """sha256 of an encoded structure: 32 bytes."""
    return hashlib.sha256(data).digest()


def _structure(
    fields: _Fields, tensors: tuple[TensorRecord, ...], encoded: bytes, items_max: int
) -> JointStructure:
    texts = json.loads(bytes(fields["texts"]))
    (first_rank, rank_count, blocks), files, shared, several, aliases, count = texts
    _check_count("ranks", rank_count, RANKS_MAX)
    _check_count("rules", count, items_max)
    rules = np.stack([_unpack_signed(fields[line.name], count, line.name) for line in Of])
    for line, limit in ((Of.TENSOR, len(tensors)), (Of.COUNT, 1 << 62)):
        if count and not 0 <= int(rules[line].min()) <= int(rules[line].max()) < limit:
            raise Corrupt(f"a joint part of rank {first_rank}: {line.name} of a rule")
    ranks = rules[Of.RANK], rules[Of.RANK] + rules[Of.RANK_STEP] * (rules[Of.COUNT] - 1)
    if count and not (first_rank <= np.min(ranks) and np.max(ranks) < first_rank + rank_count):
        raise Corrupt(f"a joint part of rank {first_rank}: chunks of ranks beyond {rank_count}")
    box_first = _edges(_unpack_column(fields["box_ndims"], items_max), NDIM_MAX * items_max)
    total = int(box_first[-1])
    boxes = BoxTable(
        box_first,
        unpack_ints(fields["box_offsets"], total, "box_offsets"),
        unpack_ints(fields["box_sizes"], total, "box_sizes"),
    )
    columns = [
        _unpack_lists(fields[f"replica_{name}"], RANKS_MAX if name == "ranks" else items_max)
        for name in ReplicaList._fields
    ]
    for of_list in columns[0]:
        checked_indexes(of_list, "replica_tensor", len(tensors))
    return JointStructure(
        first_rank=first_rank,
        rank_count=rank_count,
        files=tuple(files),
        shared=tuple(shared),
        several=tuple(several),
        tensors=tensors,
        tensor_ranks=_int64s(fields["tensor_ranks"], len(tensors), "tensor_ranks"),
        aliases={(name, target): rank for name, target, rank in aliases},
        rules=rules,
        boxes=tuple([boxes[index] for index in range(len(boxes))]),
        blocks=blocks,
        replicas=tuple([ReplicaList(*lists) for lists in zip(*columns, strict=True)]),
        sent_tensors=encoded,
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
    except _UNREADABLE as error:
        raise _unreadable(error) from error


def _rest(fields: _Fields, structure: JointStructure) -> JointRest:
    ranks = structure.rank_count
    groups = _groups(fields, "digests", ranks)
    counts = _unpack_column(fields["digest_lists"], len(structure.replicas))
    edges = _edges(counts, len(groups)).tolist()
    replicas = tuple([tuple(groups[a:b]) for a, b in pairwise(edges)])
    for replica_list, of_list in zip(structure.replicas, replicas, strict=True):
        if any(len(group.data) != 4 * len(replica_list.tensor) for group in of_list):
            raise Corrupt("digests of ranks are not one per replica")
    sizes = _unpack_column(fields["per_rank_sizes"], ranks)
    if len(sizes) not in (0, ranks):
        raise Corrupt(f"values of {len(sizes)} ranks of {ranks}")
    of_ranks = zip(
        _unpack_column(fields["values_ranks"], ranks).tolist(),
        _unpack_blobs(fields["values"], ranks),
        strict=True,
    )
    return JointRest(
        own=_sizes(fields, "own", len(structure.files)),
        shared=_sizes(fields, "shared", len(structure.shared)),
        differing=tuple(json.loads(bytes(fields["differing"]))),
        values=tuple(starmap(EncodedValues, of_ranks)),
        per_rank=tuple(_cut(fields["per_rank"], sizes)),
        texts=tuple(_groups(fields, "texts", ranks)),
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


def _groups(fields: _Fields, name: str, ranks: int) -> list[RankGroup]:
    sets = _unpack_lists(fields[f"{name}_ranks"], ranks)
    blobs = _unpack_blobs(fields[name], ranks)
    return [RankGroup(*pair) for pair in zip(blobs, sets, strict=True)]


# Columns that say themselves how long they are


def _pack_column(values: Int64s) -> bytes:
    return len(values).to_bytes(8, "little") + pack_regular(values)


def _unpack_column(data: memoryview, count_max: int) -> Int64s:
    count = int.from_bytes(data[:8], "little")
    _check_count("items", count, count_max)
    return _int64s(data[8:], count, "column")


def _pack_lists(lists: Sequence[Int64s]) -> bytes:
    """Some columns: their lengths, then the items of all."""
    lengths = _pack_column(int64s([len(values) for values in lists]))
    items = pack_regular(np.concatenate([int64s([]), *lists]))
    return len(lengths).to_bytes(8, "little") + lengths + items


def _unpack_lists(data: memoryview, items_max: int) -> list[Int64s]:
    """Lists that have so many items in all at most, and at most one without any for each."""
    begin = 8 + int.from_bytes(data[:8], "little")
    edges = _edges(_unpack_column(data[8:begin], items_max), items_max)
    items = _int64s(data[begin:], int(edges[-1]), "lists")
    return np.split(items, edges[1:-1]) if len(edges) > 1 else []


def _pack_blobs(blobs: Sequence[bytes]) -> bytes:
    sizes = _pack_column(int64s([len(blob) for blob in blobs]))
    return len(sizes).to_bytes(8, "little") + sizes + b"".join(blobs)


def _unpack_blobs(data: memoryview, count_max: int) -> list[bytes]:
    begin = 8 + int.from_bytes(data[:8], "little")
    return _cut(data[begin:], _unpack_column(data[8:begin], count_max))


def _cut(data: memoryview, sizes: Int64s) -> list[bytes]:
    edges = _edges(sizes, len(data)).tolist()
    if edges[-1] != len(data):
        raise Corrupt(f"a joint part: {edges[-1]} of {len(data)} bytes are used")
    return [bytes(data[a:b]) for a, b in pairwise(edges)]


def _edges(lengths: Int64s, most: int) -> Int64s:
    """Where runs of these lengths start and end. Raises Corrupt beyond `most`."""
    # Each is compared before they are added up: a hostile sum could wrap around.
    if len(lengths) and (int(lengths.max()) > most or int(lengths.sum()) > most):
        raise Corrupt(f"a joint part: lengths up to {int(lengths.max())}, at most {most} in all")
    return starts_of(lengths)


def _check_count(what: str, count: int, most: int) -> None:
    """Before memory is taken for them."""
    if type(count) is not int or not 0 <= count <= most:
        raise Corrupt(f"a joint part of {count!r:.30} {what}, at most {most}")


def _pack_signed(values: Int64s) -> bytes:
    """Numbers of either sign, small ones in few bytes: 0, -1, 1, -2, 2."""
    return pack_regular(((values << 1) ^ (values >> 63)).view(np.uint64))


def _unpack_signed(data: memoryview, count: int, name: str) -> Int64s:
    packed = unpack_regular(data, count, name).astype(np.uint64)
    halves = (packed >> np.uint64(1)) ^ (np.uint64(0) - (packed & np.uint64(1)))
    return halves.view(np.int64)


def _int64s(data: memoryview, count: int, name: str) -> Int64s:
    return as_int64s(unpack_regular(data, count, name), name)


_UNREADABLE = (
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    OverflowError,
    RecursionError,
    AttributeError,
)


def _unreadable(error: Exception) -> Corrupt:
    return Corrupt(f"a rank's joint part is not readable: {error!r:.200}")
