"""Joint parts: what consecutive ranks contribute to a checkpoint together.

On its way to the coordinator a part is merged with those of the ranks below, so that nobody gets
more than a few, and regular layouts stay as small as one rank's. Merging is associative, and
refuses nothing: where ranks contradict each other, a joint part says which do, and the coordinator
makes an error of it (`joint_manifest`).

A joint part has a structure, which repeats while only values change, and a rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, filterfalse
from typing import NamedTuple, TypeVar

import numpy as np

from ckpt.format.checksum import Seals
from ckpt.format.chunk_columns import gaps_of
from ckpt.format.chunk_rules import BOXED, SHARED, Of, Rules, joined_rules, renamed, single_rules
from ckpt.format.contradictions import EncodedValues
from ckpt.format.manifest import Int64s, int64s, is_reference, starts_of
from ckpt.format.part import Part, TensorRecord, encode_tensors
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box

_T = TypeVar("_T")
_Key = TypeVar("_Key")


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
        return self.sent_tensors or encode_tensors(self.tensors)

    def is_like(self, other: JointStructure) -> bool:
        """Whether both are the same, of one rank."""
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

    def taken(self, files: Int64s) -> FileSizes:
        """Of some files."""
        seals = Seals(self.seals.nbytes[files], self.seals.digests[files])
        return FileSizes(self.nbytes[files], self.data_start[files], seals)


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


def itemsizes_of(tensors: Sequence[TensorRecord]) -> Int64s:
    """Bytes of an element of each."""
    return int64s([DTYPES[tensor.dtype].itemsize for tensor in tensors])


def structure_of(part: Part) -> JointStructure:
    """The structure of one rank's part."""
    is_shared = np.array(list(map(is_reference, part.files)), dtype=bool)
    own = tuple(filterfalse(is_reference, part.files))
    shared = tuple(sorted({*part.files} - {*own}))
    numbers = dict(zip([*own, *shared], [*range(len(own)), *range(len(shared))], strict=True))
    order = np.lexsort((part.chunk_start, part.chunk_tensor))
    tensor, file = part.chunk_tensor[order], part.chunk_file[order]
    numel, box = part.chunk_numel[order].astype(np.int64), part.chunk_box[order]
    itemsizes = itemsizes_of(part.tensors)[tensor]
    place = part.chunk_position[order]
    gaps = gaps_of(file, place, numel * itemsizes, itemsizes)
    in_shared = is_shared[file]
    columns = [
        tensor,
        SHARED * in_shared + BOXED * (box >= 0),
        numel,
        gaps.view(np.int64),
        np.where(in_shared, place, 0),
        part.chunk_start[order],
        int64s(list(map(numbers.__getitem__, part.files)))[file],
        np.full(len(order), part.rank),
        box,
    ]
    tensors, starts, must_agree = [np.asarray(c, dtype=np.int64) for c in part.replicas[:3]]
    replicas = ReplicaList(tensors, starts, must_agree, int64s([part.rank]))
    return JointStructure(
        first_rank=part.rank,
        rank_count=1,
        files=own,
        shared=shared,
        several=(False,) * len(shared),
        tensors=part.tensors,
        tensor_ranks=np.full(len(part.tensors), part.rank),
        aliases=dict.fromkeys(sorted(part.aliases.items()), part.rank),
        rules=joined_rules([single_rules(columns)]),
        boxes=part.boxes,
        blocks=int(np.sum(part.block_counts, dtype=np.int64)),
        replicas=(replicas,) if len(replicas.tensor) else (),
    )


def rest_of(part: Part) -> JointRest:
    """The rest of one rank's part."""
    sizes = FileSizes(part.file_nbytes, part.file_data_start, part.seals)
    is_shared = np.array(list(map(is_reference, part.files)), dtype=bool)
    index = {part.files[number]: number for number in np.flatnonzero(is_shared).tolist()}
    ranks = int64s([part.rank])
    digests = part.replicas.digests.astype("<u4").tobytes()
    return JointRest(
        own=sizes.taken(np.flatnonzero(~is_shared)),
        shared=sizes.taken(int64s([index[name] for name in sorted(index)])),
        differing=(),
        values=(EncodedValues(part.rank, part.values),) if part.values else (),
        per_rank=(part.per_rank,) if part.per_rank else (),
        texts=(RankGroup(part.texts(), ranks),),
        replicas=((RankGroup(digests, ranks),),) if len(part.replicas.tensor) else (),
    )


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
    """Of all these files, one after the other."""
    nbytes, starts, seals = zip(*sizes, strict=True)
    tables, digests = map(np.concatenate, zip(*seals, strict=True))
    return FileSizes(np.concatenate(nbytes), np.concatenate(starts), Seals(tables, digests))
