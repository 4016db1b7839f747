"""Parts: what one rank, or consecutive ranks together, contribute to a checkpoint.

On its way to the coordinator a part is merged with those of the ranks below, so that nobody gets
more than a few, and regular layouts stay as small as one rank's. Merging is associative, and
refuses nothing: where ranks contradict each other, a joint part says which do, and the coordinator
makes an error of it (`joint_manifest`).

A part has a structure, which repeats while only values change, and a rest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, filterfalse, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpt.errors import InvalidState
from ckpt.format.checksum import Digests, Seal, Seals, Uint32s, crc32c, no_digests
from ckpt.format.chunk_columns import gaps_of
from ckpt.format.chunk_rules import BOXED, SHARED, Of, Rules, joined_rules, renamed, single_rules
from ckpt.format.codec import encode_values
from ckpt.format.columns import pack_tree
from ckpt.format.datafile import StoredChunk, region_start
from ckpt.format.manifest import Int64s, int64s, is_reference, starts_of
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Shape, Span, span_of

_T = TypeVar("_T")
_Key = TypeVar("_Key")


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

    tensor: Int64s
    start: Int64s
    must_agree: Int64s
    digests: Uint32s


NO_REPLICAS = ReplicaColumns(int64s([]), int64s([]), int64s([]), np.zeros(0, dtype=np.uint32))


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
    checksums: Uint32s
    seal: Seal
    digests: Digests = no_digests()


NUMBERS = (bool, int, float)
SHOWN_MAX = 1 << 63  # more digits are no text for a message; nor are infinities, and no NaN is less
LETTERS_SHOWN_MAX = 40


class PartTexts(NamedTuple):
    """The contents of a part besides tensors; see `Part`. What is not given is not there."""

    aliases: Mapping[str, str]
    values: bytes = b""
    value_digests: Mapping[str, int | str] = {}  # short ones as text, which messages show
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
            {
                # Equal values must have equal texts: a list may equal a tuple, and has none.
                name: repr(value)
                if value is None
                or (type(value) is str and len(value) <= LETTERS_SHOWN_MAX)
                or (type(value) in NUMBERS and abs(value) < SHOWN_MAX)
                else crc32c(encode_values(value))
                for name, value in sorted(values.items())
            },
            encode_values(dict(per_rank)) if per_rank else b"",
        )


class ReplicaList(NamedTuple):
    """What some ranks have that other ranks may have as well (`ReplicaColumns`), and those ranks,
    ascending.
    """

    tensor: Int64s
    start: Int64s
    must_agree: Int64s
    ranks: Int64s


@dataclass(frozen=True, eq=False)
class JointStructure:
    """What stays the same from save to save of `rank_count` ranks from `first_rank` on.

    `tensors` are sorted records, one for each way in which ranks describe a tensor, with the lowest
    rank of each; `aliases` are pairs of a name and its target, likewise. `files` are the ranks' own
    in the order of the ranks, `shared` the names of other attempts' files, sorted; `several` tells
    of which of them more than one rank has chunks.
    """

    first_rank: int
    rank_count: int
    files: tuple[str, ...]
    shared: tuple[str, ...]
    several: tuple[bool, ...]
    tensors: tuple[TensorRecord, ...]
    tensor_ranks: Int64s
    aliases: Mapping[tuple[str, str], int]
    rules: Rules
    boxes: tuple[Box, ...]
    blocks: int  # of all chunks together
    replicas: tuple[ReplicaList, ...]
    sent_tensors: bytes = b""  # as they were received, if they were

    @cached_property
    def encoded_tensors(self) -> bytes:
        """The tensors as they are sent: made for that alone."""
        # By themselves, because most ranks have the same, and they are most of a part: who gets
        # them from many ranks unpacks them once.
        return self.sent_tensors or zlib.compress(pack_tree(self.tensors), level=1)

    def is_like(self, other: JointStructure) -> bool:
        """Whether both are the same, of one rank."""
        # With a kept plan it is the very same object.
        if self is other:
            return True
        ours, theirs = (
            [one.tensors, one.files, one.shared, one.aliases, one.boxes, len(one.replicas)]
            for one in (self, other)
        )
        mine = [self.rules, *chain(*self.replicas)]
        return ours == theirs and all(
            map(np.array_equal, mine, [other.rules, *chain(*other.replicas)])
        )

    @property
    def ranks(self) -> Int64s:
        """All ranks, ascending."""
        return np.arange(self.first_rank, self.first_rank + self.rank_count)


class FileSizes(NamedTuple):
    """What saves change about files, as columns with one item per file."""

    nbytes: Int64s
    data_start: Int64s
    seals: Seals

    @classmethod
    def of(cls, files: Sequence[FileColumns]) -> FileSizes:
        """The columns of these files."""
        _, nbytes, starts, *_, seals, _ = _columns(files, 9)
        return cls(int64s(nbytes), int64s(starts), Seals.of(seals))

    def taken(self, files: Int64s) -> FileSizes:
        """The rows of these files."""
        seals = Seals(self.seals.nbytes[files], self.seals.digests[files])
        return FileSizes(self.nbytes[files], self.data_start[files], seals)


class EncodedValues(NamedTuple):
    """The values that one rank has sent, encoded; not empty."""

    rank: int
    data: bytes


class RankGroup(NamedTuple):
    """Ranks, ascending, that have the same bytes."""

    data: bytes
    ranks: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class JointRest:
    """What differs from save to save. `texts` are digests of values and warnings, as a part has
    them; `replicas` are digests, as many groups as there are different ones, for each replica list
    of the structure. `differing` are files of other attempts that ranks describe in two ways.
    """

    own: FileSizes
    shared: FileSizes
    differing: tuple[str, ...]
    values: tuple[EncodedValues, ...]  # of the ranks that send some
    per_rank: tuple[bytes, ...]  # of each rank, or empty
    texts: tuple[RankGroup, ...]
    replicas: tuple[tuple[RankGroup, ...], ...]


class Part(NamedTuple):
    """What one rank contributes. `files` are its own, then those of other attempts, with the chunks
    that this rank would have written; empty for a part that was sent.
    """

    structure: JointStructure
    rest: JointRest
    files: Sequence[FileColumns] = ()


def part_of_files(
    files: Sequence[FileColumns],
    *,
    rank: int,
    tensors: Sequence[TensorRecord],
    texts: PartTexts,
    structure: JointStructure | None = None,
) -> Part:
    """The part of `rank` from its files. Those of other attempts come last, with those of their
    chunks that stand for chunks that this rank would have written.

    `tensors` are all tensors of the rank's state, those without elements included. `structure` is
    what `structure_of` gives, if it is known. Raises InvalidState when a tensor is described in two
    ways.
    """
    structure = structure or structure_of(files, rank, tensors, texts)
    own = len(structure.files)
    ranks = int64s([rank])
    digests = texts.replicas.digests.astype("<u4").tobytes()
    # Files of other attempts sorted as in the structure, so that columns and names agree.
    rest = JointRest(
        own=FileSizes.of(files[:own]),
        shared=FileSizes.of(sorted(files[own:], key=itemgetter(0))),
        differing=(),
        values=(EncodedValues(rank, texts.values),) if texts.values else (),
        per_rank=(texts.per_rank,) if texts.per_rank else (),
        texts=(
            RankGroup(compact_json([dict(texts.value_digests), texts.warnings]).encode(), ranks),
        ),
        replicas=((RankGroup(digests, ranks),),) if structure.replicas else (),
    )
    return Part(structure, rest, files)


def itemsizes_of(tensors: Sequence[TensorRecord]) -> Int64s:
    """Bytes of an element of each."""
    return int64s([DTYPES[tensor.dtype].itemsize for tensor in tensors])


def structure_of(
    files: Sequence[FileColumns], rank: int, tensors: Sequence[TensorRecord], texts: PartTexts
) -> JointStructure:
    """The structure of one rank's part."""
    known = tuple(sorted(tensors))
    index = {tensor.fqn: position for position, tensor in enumerate(known)}
    if len(index) != len(known):
        raise InvalidState(
            [
                f"{b.fqn}: in the state twice, as {a} and {b}"
                for a, b in pairwise(known)
                if a[0] == b[0]
            ]
        )
    names, _, data_starts, of_files, offsets, block_counts, *_ = _columns(files, 9)
    chunks = list(chain.from_iterable(of_files))
    fqns, _, _, _, nbytes, _ = _columns(chunks, 6)
    if unknown := sorted(set(fqns) - index.keys()):
        raise ValueError(f"chunks of tensors that are not in `tensors`: {unknown[:5]}")
    first, box_ids, boxes = _region_columns(chunks)
    starts, tensor = int64s(first), int64s(list(map(index.__getitem__, fqns)))
    order = np.lexsort((starts, tensor))
    tensor, box, nbytes = tensor[order], int64s(box_ids)[order], int64s(nbytes)[order]
    itemsizes = itemsizes_of(known)[tensor]
    counts = list(map(len, of_files))
    file = np.repeat(np.arange(len(files)), counts)[order]
    # Counted from the end of the file's header, which may grow from save to save.
    place = np.concatenate([int64s([]), *offsets])[order] - int64s(data_starts)[file]
    own = tuple(filterfalse(is_reference, names))
    others = names[len(own) :]
    shared = tuple(sorted(others))
    in_shared = file >= len(own)
    columns = [
        tensor,
        SHARED * in_shared + BOXED * (box >= 0),
        nbytes // itemsizes,
        gaps_of(file, place, nbytes, itemsizes).view(np.int64),
        np.where(in_shared, place, 0),
        starts[order],
        int64s([*range(len(own)), *map(shared.index, others)])[file],
        np.full(len(order), rank),
        box,
    ]
    replicas = ReplicaList(*texts.replicas[:3], int64s([rank]))
    return JointStructure(
        first_rank=rank,
        rank_count=1,
        files=own,
        shared=shared,
        several=(False,) * len(shared),
        tensors=known,
        tensor_ranks=np.full(len(known), rank),
        aliases=dict.fromkeys(sorted(texts.aliases.items()), rank),
        rules=joined_rules([single_rules(columns)]),
        boxes=tuple(boxes),
        blocks=int(np.concatenate([int64s([]), *block_counts]).sum()),
        replicas=(replicas,) if len(replicas.tensor) else (),
    )


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> Sequence[Any]:
    return list(zip(*rows, strict=True)) or [()] * count


def _region_columns(chunks: Sequence[StoredChunk]) -> tuple[list[int], list[int], list[Box]]:
    """Per chunk the row-major index of its first element, and its box's number or -1 for a run."""
    starts, box_ids = [], []
    boxes: dict[Box, int] = {}
    for chunk in chunks:
        region, shape = chunk.region, chunk.global_shape
        # `type` and not `isinstance`: this runs for each of thousands of chunks.
        if type(region) is Box and region.shape != shape:
            starts.append(region_start(region, shape))
            is_run = span_of(region, shape) is not None
            box_ids.append(-1 if is_run else boxes.setdefault(region, len(boxes)))
        else:
            starts.append(region.start if type(region) is Span else 0)
            box_ids.append(-1)
    return starts, box_ids, list(boxes)


@dataclass(frozen=True, slots=True, eq=False)
class JointMerge:
    """The structures of some joint parts as one, and the new numbers of what each has, for their
    rests: of files of other attempts, and of replica lists.
    """

    structure: JointStructure
    counts: tuple[int, ...]  # of ranks
    shared_of: tuple[Int64s, ...]
    lists_of: tuple[tuple[int, ...], ...]

    def rest(self, rests: Sequence[JointRest]) -> JointRest:
        """The rests of these joint parts as one."""
        if len(rests) == 1:
            return rests[0]
        own, shared = [one.own for one in rests], [one.shared for one in rests]
        by_list: list[list[RankGroup]] = [[] for _ in self.structure.replicas]
        for numbers, one in zip(self.lists_of, rests, strict=True):
            for number, groups in zip(numbers, one.replicas, strict=True):
                by_list[number] += groups
        has_own = any(one.per_rank for one in rests)
        kept, differing = self._shared(shared)
        nothing = [(b"",) * count if has_own else () for count in self.counts]
        pairs = zip(rests, nothing, strict=True)
        return JointRest(
            own=joined_sizes(own),
            shared=kept,
            differing=tuple(sorted({*differing, *chain(*[one.differing for one in rests])})),
            values=tuple(chain(*[one.values for one in rests])),
            per_rank=tuple(chain(*[one.per_rank or empty for one, empty in pairs])),
            texts=_joined_groups(chain(*[one.texts for one in rests])),
            replicas=tuple(map(_joined_groups, by_list)),
        )

    def _shared(self, shared: Sequence[FileSizes]) -> tuple[FileSizes, set[str]]:
        """The files of other attempts, each once, and those that are not the same everywhere."""
        numbers = np.concatenate([int64s([]), *self.shared_of])
        sizes = joined_sizes(shared)
        _, first, own = np.unique(numbers, return_index=True, return_inverse=True)
        kept = sizes.taken(first)
        differs = (
            (kept.nbytes[own] != sizes.nbytes)
            | (kept.data_start[own] != sizes.data_start)
            | (kept.seals.nbytes[own] != sizes.seals.nbytes)
            | np.any(kept.seals.digests[own] != sizes.seals.digests, axis=1)
        )
        return kept, {self.structure.shared[number] for number in numbers[differs].tolist()}


def merge_structures(parts: Sequence[JointStructure]) -> JointMerge:
    """The structures of consecutive ranks, in the order of the ranks, as one.

    Raises ValueError when ranks are missing between them.
    """
    if len(parts) == 1:
        one = parts[0]
        lists = tuple(range(len(one.replicas)))
        return JointMerge(one, (one.rank_count,), (np.arange(len(one.shared)),), (lists,))
    ends = [one.first_rank + one.rank_count for one in parts]
    if ends[:-1] != [one.first_rank for one in parts[1:]]:
        raise ValueError(f"joint parts that begin at ranks {[one.first_rank for one in parts]}")
    tensors, sent, tensor_ranks, tensor_of = _merged_tensors(parts)
    shared = sorted({name for one in parts for name in one.shared})
    shared_of = tuple(_numbers_of(shared, [one.shared for one in parts]))
    several = np.zeros(len(shared), dtype=np.int64)
    for numbers, one in zip(shared_of, parts, strict=True):
        # Above one where two parts have chunks of it, or one part says that several of its ranks
        # do.
        several[numbers] += 1 + np.array(one.several, dtype=np.int64)
    boxes = list(dict.fromkeys(chain(*[one.boxes for one in parts])))
    box_of = _numbers_of(boxes, [one.boxes for one in parts])
    before = starts_of([len(one.files) for one in parts])
    tables = []
    for index, one in enumerate(parts):
        rules = one.rules.copy()
        rules[Of.TENSOR] = tensor_of[index][rules[Of.TENSOR]]
        rules[Of.FILE, (rules[Of.KIND] & SHARED) == 0] += before[index]
        rules = renamed(rules, Of.FILE, SHARED, shared_of[index])
        tables.append(renamed(rules, Of.BOX, BOXED, box_of[index]))
    replicas, lists_of = _merged_replicas(parts, tensor_of)
    structure = JointStructure(
        first_rank=parts[0].first_rank,
        rank_count=ends[-1] - parts[0].first_rank,
        files=tuple(chain(*[one.files for one in parts])),
        shared=tuple(shared),
        several=tuple((several > 1).tolist()),
        tensors=tensors,
        tensor_ranks=tensor_ranks,
        aliases=_lowest([one.aliases.items() for one in parts]),
        rules=joined_rules(tables),
        boxes=tuple(boxes),
        blocks=sum(one.blocks for one in parts),
        replicas=replicas,
        sent_tensors=sent,
    )
    return JointMerge(structure, tuple([one.rank_count for one in parts]), shared_of, lists_of)


def _merged_tensors(
    parts: Sequence[JointStructure],
) -> tuple[tuple[TensorRecord, ...], bytes, Int64s, list[Int64s]]:
    """All records, as sent where a part has all of them, the lowest rank of each, and the new
    numbers of each part's.
    """
    first = parts[0]
    # The usual case: one reader has decoded the tensors of all parts into the same object.
    if all(one.tensors is first.tensors or one.tensors == first.tensors for one in parts[1:]):
        ranks = np.minimum.reduce([one.tensor_ranks for one in parts])
        same = np.arange(len(first.tensors))
        sent = next((one.sent_tensors for one in parts if one.sent_tensors), b"")
        return first.tensors, sent, ranks, [same] * len(parts)
    lowest = _lowest([zip(one.tensors, one.tensor_ranks.tolist(), strict=True) for one in parts])
    tensors = tuple(sorted(lowest))
    ranks = int64s([lowest[record] for record in tensors])
    tensor_of = _numbers_of(tensors, [one.tensors for one in parts])
    return tensors, b"", ranks, tensor_of


def _lowest(ranked: Iterable[Iterable[tuple[_Key, int]]]) -> dict[_Key, int]:
    """The rank of each key that comes first: the lowest, since parts come by rank."""
    lowest: dict[_Key, int] = {}
    for key, rank in chain.from_iterable(ranked):
        lowest.setdefault(key, rank)
    return lowest


def _numbers_of(merged: Sequence[_T], lists: Sequence[Sequence[_T]]) -> list[Int64s]:
    """Per list, the places of its items among the merged ones."""
    index = {item: number for number, item in enumerate(merged)}
    return [int64s([index[item] for item in items]) for items in lists]


def _merged_replicas(
    parts: Sequence[JointStructure], tensor_of: Sequence[Int64s]
) -> tuple[tuple[ReplicaList, ...], tuple[tuple[int, ...], ...]]:
    """Equal replica lists as one, and the new numbers of each part's."""
    merged: dict[tuple[bytes, ...], list[ReplicaList]] = {}
    numbers: dict[tuple[bytes, ...], int] = {}
    lists_of = []
    for names, one in zip(tensor_of, parts, strict=True):
        of_part = []
        for replicas in one.replicas:
            replicas = replicas._replace(tensor=names[replicas.tensor])
            key = tuple([column.tobytes() for column in replicas[:3]])
            merged.setdefault(key, []).append(replicas)
            of_part.append(numbers.setdefault(key, len(numbers)))
        lists_of.append(tuple(of_part))
    joined = [
        same[0]._replace(ranks=np.concatenate([one.ranks for one in same]))
        for same in merged.values()
    ]
    return tuple(joined), tuple(lists_of)


def _joined_groups(groups: Iterable[RankGroup]) -> tuple[RankGroup, ...]:
    """One group for equal bytes. Groups come by rank, so ranks stay ascending."""
    ranks: dict[bytes, list[Int64s]] = {}
    for group in groups:
        ranks.setdefault(group.data, []).append(group.ranks)
    return tuple([RankGroup(data, np.concatenate(those)) for data, those in ranks.items()])


def joined_sizes(sizes: Sequence[FileSizes]) -> FileSizes:
    """The columns of all these files, one after the other."""
    nbytes, starts, seals = zip(*sizes, strict=True)
    tables, digests = map(np.concatenate, zip(*seals, strict=True))
    return FileSizes(np.concatenate(nbytes), np.concatenate(starts), Seals(tables, digests))


def compact_json(value: Any) -> str:
    """`value` as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
