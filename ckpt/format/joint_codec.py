"""Joint parts as bytes between ranks. They are read by the ranks of the save that wrote them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import Corrupt
from ckpt.format.checksum import Seals, check_seals, digests_from
from ckpt.format.chunk_rules import Of
from ckpt.format.columns import checked_indexes, pack_map, pack_tree, unpack_map, unpack_tree
from ckpt.format.part import (
    EncodedValues,
    FileSizes,
    JointRest,
    JointStructure,
    Part,
    RankGroup,
    ReplicaList,
    TensorRecord,
)
from ckpt.layout.region import Box

# What is regular takes few bytes, whatever its count: so counts are compared with these.
_RULES_PER_TENSOR_MAX = 1024
_COLUMNS_PER_RANK_MAX = 64  # items of the columns of a rest


def encode_structure(structure: JointStructure) -> bytes:
    """`structure` as bytes for the rank above."""
    one = structure
    aliases = [(name, target, rank) for (name, target), rank in one.aliases.items()]
    texts = [one.first_rank, one.rank_count, one.blocks, one.files, one.shared, one.several]
    tree = [*texts, one.tensor_ranks, aliases, [*one.rules], one.boxes, one.replicas]
    packed = zlib.compress(pack_tree(tree), level=1)
    # Tensors by themselves: most ranks have the same, and they are unpacked once.
    return pack_map({"tensors": one.encoded_tensors, "packed": packed})


class SentStructure(NamedTuple):
    """A structure, and what names it in a rest."""

    structure: JointStructure
    digest: bytes


def encode_part(part: Part) -> bytes:
    """The part of one rank as bytes for the coordinator."""
    # Both in one message: a part that is sent alone has no earlier structure to refer to.
    structure = encode_structure(part.structure)
    rest = encode_rest(part.rest, digest_of_structure(structure))
    return len(structure).to_bytes(8, "little") + structure + rest


def decode_part(data: bytes) -> Part:
    """What `encode_part` gave. Raises Corrupt."""
    size = int.from_bytes(data[:8], "little")
    known = StructureReader().read(data[8 : 8 + size])
    return Part(known.structure, decode_rest(data[8 + size :], known))


RANKS_MAX = 1 << 20  # of a joint part: what is beyond was never written


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
                records = unpack_tree(zlib.decompress(encoded), 0)
                self._tensors[encoded] = tuple(starmap(TensorRecord, records))
            unpacked = zlib.decompress(fields["packed"])
            tensors = self._tensors[encoded]
            # Regular layouts have few rules per tensor; irregular ones take bytes for each.
            items_max = len(Of) * (len(unpacked) + _RULES_PER_TENSOR_MAX * (len(tensors) + 1))
            structure = _structure(unpack_tree(unpacked, items_max), tensors, encoded)
        except (*_UNREADABLE, zlib.error) as error:
            raise _unreadable(error) from error
        return SentStructure(structure, digest_of_structure(data))


def digest_of_structure(data: bytes | memoryview) -> bytes:
    """sha256 of an encoded structure: 32 bytes."""
    return hashlib.sha256(data).digest()


def _structure(tree: Any, tensors: tuple[TensorRecord, ...], encoded: bytes) -> JointStructure:
    first_rank, rank_count, blocks, files, shared, several, *columns = tree
    tensor_ranks, aliases, lines, boxes, replicas = columns
    # Columns of one item per rank are made of this number.
    if type(rank_count) is not int or not 0 <= rank_count <= RANKS_MAX:
        raise Corrupt(f"a joint part of {rank_count!r:.30} ranks")
    rules = np.stack(lines)
    for line, limit in ((Of.TENSOR, len(tensors)), (Of.COUNT, 1 << 62)):
        if rules.size and not 0 <= int(rules[line].min()) <= int(rules[line].max()) < limit:
            raise Corrupt(f"a joint part of rank {first_rank}: {line.name} of a rule")
    ranks = rules[Of.RANK], rules[Of.RANK] + rules[Of.RANK_STEP] * (rules[Of.COUNT] - 1)
    if rules.size and not (first_rank <= np.min(ranks) and np.max(ranks) < first_rank + rank_count):
        raise Corrupt(f"a joint part of rank {first_rank}: chunks of ranks beyond {rank_count}")
    for of_list, *_ in replicas:
        checked_indexes(of_list, "replica_tensor", len(tensors))
        if len(of_list) and int(of_list.min()) < 0:
            raise Corrupt(f"a joint part of rank {first_rank}: replicas of no tensor")
    if len(rules) != len(Of) or len(tensor_ranks) != len(tensors) or len(several) != len(shared):
        raise Corrupt(f"a joint part of rank {first_rank}: columns of other lengths")
    return JointStructure(
        first_rank=first_rank,
        rank_count=rank_count,
        files=files,
        shared=shared,
        several=several,
        tensors=tensors,
        tensor_ranks=tensor_ranks,
        aliases={(name, target): rank for name, target, rank in aliases},
        rules=rules,
        boxes=tuple(starmap(Box, boxes)),
        blocks=blocks,
        replicas=tuple(starmap(ReplicaList, replicas)),
        sent_tensors=encoded,
    )


def encode_rest(rest: JointRest, digest: bytes) -> bytes:
    """`rest` as bytes for the rank above; `digest` names its structure."""
    sizes = [
        (one.nbytes, one.data_start, one.seals.nbytes, one.seals.digests.tobytes())
        for one in (rest.own, rest.shared)
    ]
    groups = rest.texts, rest.replicas
    packed = pack_tree([*sizes, rest.differing, rest.values, rest.per_rank, *groups])
    return pack_map({"structure_digest": digest, "packed": packed})


def decode_rest(data: bytes | memoryview, known: SentStructure) -> JointRest:
    """What `encode_rest` gave, of a structure sent now or earlier. Raises Corrupt when the two do
    not belong together.
    """
    try:
        fields = unpack_map(data)
        if bytes(fields["structure_digest"]) != known.digest:
            raise Corrupt("a rank's checksums do not belong to the structure that it sent")
        one = known.structure
        items_max = _COLUMNS_PER_RANK_MAX * (one.rank_count + len(one.files) + len(one.shared))
        return _rest(unpack_tree(fields["packed"], items_max), one)
    except _UNREADABLE as error:
        raise _unreadable(error) from error


def _rest(tree: Any, structure: JointStructure) -> JointRest:
    own, shared, differing, values, per_rank, texts, replicas = tree
    for of_list, groups in zip(structure.replicas, replicas, strict=True):
        if any(len(data) != 4 * len(of_list.tensor) for data, _ in groups):
            raise Corrupt("digests of ranks are not one per replica")
    if len(per_rank) not in (0, structure.rank_count):
        raise Corrupt(f"values of {len(per_rank)} ranks of {structure.rank_count}")
    return JointRest(
        own=_sizes(len(structure.files), *own),
        shared=_sizes(len(structure.shared), *shared),
        differing=differing,
        values=tuple(starmap(EncodedValues, values)),
        per_rank=per_rank,
        texts=tuple(starmap(RankGroup, texts)),
        replicas=tuple([tuple(starmap(RankGroup, groups)) for groups in replicas]),
    )


def _sizes(files: int, nbytes: Any, data_start: Any, tables: Any, digests: bytes) -> FileSizes:
    seals = Seals(tables, digests_from(digests))
    if {*map(len, (nbytes, data_start, *seals))} != {files}:
        raise Corrupt(f"a joint part: columns of other lengths than {files} files")
    if files and min(int(np.min(nbytes)), int(np.min(data_start))) < 0:
        raise Corrupt("a joint part: files of fewer than no bytes")
    check_seals(seals, nbytes - data_start)
    return FileSizes(nbytes, data_start, seals)


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
