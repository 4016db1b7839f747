"""From the joint part of all ranks to the manifest, and where ranks contradict each other.

What regular layouts have cut stays as rules from the ranks to the manifest: no table of all chunks
is made. `contradictions` has the texts about ranks that contradict each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import InvalidState
from ckpt.format.chunk_columns import fields_of_boxes, gaps_of
from ckpt.format.chunk_rules import (
    BOXED,
    SHARED,
    Bools,
    Of,
    Rules,
    check_rules,
    chunk_total,
    expanded,
    lasts_of,
    renamed,
    sums_by_file,
)
from ckpt.format.codec import encode_values
from ckpt.format.columns import Progressions, pack_progressions, pack_regular
from ckpt.format.contradictions import (
    DifferingRegion,
    ReplicaDifferences,
    agreed_aliases,
    agreed_tensors,
    check_names,
    texts_of_regions,
    texts_of_values,
    united_values,
    with_writers,
)
from ckpt.format.manifest import (
    CHUNKS_MAX,
    BoxTable,
    Header,
    Int64s,
    Manifest,
    int64s,
    no_chunks,
    parse_reference,
    starts_of,
)
from ckpt.format.manifest_codec import (
    Encoded,
    decode_manifest,
    encoded,
    fields_of_tensors,
)
from ckpt.format.part import (
    JointRest,
    JointStructure,
    Part,
    itemsizes_of,
    joined_sizes,
    merge_structures,
)


class JointManifest(NamedTuple):
    """A manifest as bytes, and the bytes of its own data files, of all its chunks, and of those in
    files of other attempts, by attempt.
    """

    encoded: Encoded
    own_nbytes: int
    nbytes: int
    referenced: Mapping[str, int]


class JointTable:
    """What follows from the structure of all ranks: proofs, and most of the manifest's bytes.

    Raises InvalidState naming fqn, region and ranks when ranks contradict each other, or when the
    chunks do not cover every tensor exactly once.
    """

    def __init__(self, structure: JointStructure) -> None:
        self._structure = structure
        self._tensors = agreed_tensors(structure.tensors, structure.tensor_ranks.tolist())
        self._aliases = agreed_aliases(structure.aliases, self._tensors)
        columns: Any = zip(*self._tensors, strict=True) if self._tensors else ((),) * 4
        self._fqns, self._dtypes, self._shapes, kinds = columns
        self._kinds = np.array(kinds, dtype=np.uint8)
        itemsizes = itemsizes_of(self._tensors)
        rules = structure.rules
        numels = int64s(list(map(math.prod, self._shapes)))
        boxes = BoxTable.of(structure.boxes)
        if problems := check_rules(rules, boxes, self._fqns, self._shapes, numels):
            raise InvalidState(
                [with_writers(text, self._fqns, self._writers_of) for text in problems]
            )
        chunks = chunk_total(rules)
        if chunks > CHUNKS_MAX:  # readers would take it for a hostile one
            problem = f"{chunks} regions of tensors on all ranks, at most {CHUNKS_MAX} fit into one"
            raise InvalidState([f"{problem} manifest: save fewer tensors, or on fewer ranks"])
        self._nbytes_shared = _nbytes_shared(structure, itemsizes)
        self._nbytes = int((rules[Of.COUNT] * rules[Of.NUMEL] * itemsizes[rules[Of.TENSOR]]).sum())
        rules = _with_gaps_of_all(rules, np.array(structure.several, dtype=bool), itemsizes)
        rules, used = _with_numbered_boxes(rules)
        boxes = BoxTable.of(list(map(structure.boxes.__getitem__, used.tolist())))
        self._sizes = len(set(self._shapes)), chunks, len(boxes)
        self._chunk_fields = {
            **_fields_of_rules(rules, len(structure.files), len(self._tensors)),
            **fields_of_boxes(boxes),
        }
        self._tensor_fields: dict[str, bytes] = {}

    def _writers_of(self, tensor: int) -> Int64s:
        rules = self._structure.rules
        rules = rules[:, rules[Of.TENSOR] == tensor]
        ranks: Int64s = expanded(rules, np.ones(rules.shape[1], dtype=bool))[Of.RANK]
        return ranks

    def manifest(self, header: Header, rest: JointRest) -> JointManifest:
        """The manifest of a save of this structure. Raises InvalidState like `JointTable`."""
        structure = self._structure
        if (structure.first_rank, structure.rank_count) != (0, header.world_size):
            raise ValueError(f"{structure.rank_count} ranks from {structure.first_rank} on")
        check_names(structure.files, sorted([*structure.shared, *rest.differing]), header)
        sizes = joined_sizes([rest.own, rest.shared])
        # The chunks are in their own fields.
        head = Manifest(
            header=header,
            files=structure.files + structure.shared,
            file_nbytes=sizes.nbytes,
            file_data_start=sizes.data_start,
            fqns=self._fqns,
            dtypes=self._dtypes,
            shapes=self._shapes,
            kinds=self._kinds,
            aliases=self._aliases,
            chunks=no_chunks(),
            values=united_values(rest.values),
            per_rank=tuple([data or encode_values({}) for data in rest.per_rank]),
            seals=sizes.seals,
        )
        self._tensor_fields = self._tensor_fields or fields_of_tensors(head)
        sizes_of = (*self._sizes, structure.blocks)
        made = encoded(head, sizes_of, self._tensor_fields, self._chunk_fields)
        return JointManifest(made, int(rest.own.nbytes.sum()), self._nbytes, self._nbytes_shared)


def _nbytes_shared(structure: JointStructure, itemsizes: Int64s) -> dict[str, int]:
    """Bytes of chunks in files of other attempts, by attempt."""
    rules = structure.rules[:, (structure.rules[Of.KIND] & SHARED) != 0]
    nbytes = rules[Of.NUMEL] * itemsizes[rules[Of.TENSOR]]
    by_file = sums_by_file(rules, nbytes, len(structure.shared)).tolist()
    held: dict[str, int] = {}
    for name, of_file in zip(structure.shared, by_file, strict=True):
        if reference := parse_reference(name):
            held[reference.attempt] = held.get(reference.attempt, 0) + of_file
    return held


def _with_gaps_of_all(rules: Rules, several: Bools, itemsizes: Int64s) -> Rules:
    """Ranks know the gaps in their own files. In a file of another attempt they do not, if several
    ranks have chunks of it.
    """
    if not several.any():
        return rules
    before = np.append(0, np.cumsum(several))
    ends = np.sort([rules[Of.FILE], lasts_of(rules)[1]], axis=0)
    in_shared = (rules[Of.KIND] & SHARED) != 0
    low, high = np.where(in_shared, ends, 0)
    rules = expanded(rules, in_shared & (before[high + 1] > before[low])).copy()
    in_shared = (rules[Of.KIND] & SHARED) != 0
    chosen = np.flatnonzero(in_shared & several[np.where(in_shared, rules[Of.FILE], 0)])
    sizes = itemsizes[rules[Of.TENSOR, chosen]]
    nbytes = rules[Of.NUMEL, chosen] * sizes
    gaps = gaps_of(rules[Of.FILE, chosen], rules[Of.PLACE, chosen], nbytes, sizes)
    rules[Of.GAP, chosen] = gaps.view(np.int64)
    return rules


def _with_numbered_boxes(rules: Rules) -> tuple[Rules, Int64s]:
    """Boxes in the order in which they come first in the table, as a manifest has one encoding; and
    which boxes those are.
    """
    boxed = rules[:, (rules[Of.KIND] & BOXED) != 0]
    # Tensors of one shape have mostly the same boxes: each run of them is looked at once.
    runs = boxed[[Of.BOX, Of.BOX_STEP, Of.COUNT]]
    _, firsts = np.unique(runs, axis=1, return_index=True)
    boxed = boxed[:, np.sort(firsts)]
    numbers = expanded(boxed, np.ones(boxed.shape[1], dtype=bool))[Of.BOX]
    unique, first_at = np.unique(numbers, return_index=True)
    used = unique[np.argsort(first_at)]
    renumbered = np.zeros(int(unique.max(initial=-1)) + 1, dtype=np.int64)
    renumbered[used] = np.arange(len(used))
    return renamed(rules, Of.BOX, BOXED, renumbered), used


def _fields_of_rules(rules: Rules, own_files: int, tensors: int) -> dict[str, bytes]:
    """The columns of all chunks, encoded like those of a table of them."""
    count = rules[Of.COUNT]
    first = np.searchsorted(rules[Of.TENSOR], np.arange(tensors + 1))
    chunk_counts = np.diff(starts_of(count)[first])
    none = np.zeros_like(count)
    in_shared = (rules[Of.KIND] & SHARED) != 0
    files = rules[Of.FILE] + np.where(in_shared, own_files, 0)
    columns = {
        "chunk_files": Progressions.of(count, files, rules[Of.FILE_STEP]),
        "chunk_numels": Progressions.of(count, rules[Of.NUMEL], none),
        "chunk_skips": _skips(rules),
        "chunk_gaps": Progressions.of(count, rules[Of.GAP], none),
        "chunk_boxes": Progressions.of(count, rules[Of.BOX] + 1, rules[Of.BOX_STEP]),
    }
    packed = zip(columns, map(pack_progressions, columns.values()), strict=True)
    return {"chunk_counts": pack_regular(chunk_counts), **dict(packed)}


def _skips(rules: Rules) -> Progressions:
    """Elements between each span and the one before it in its tensor; zero for boxes."""
    is_span = (rules[Of.KIND] & BOXED) == 0
    spans = np.flatnonzero(is_span)
    ends = (lasts_of(rules)[0] + rules[Of.NUMEL])[spans]
    tensor, starts = rules[Of.TENSOR, spans], rules[Of.START, spans]
    before = np.zeros(len(spans), dtype=np.int64)
    before[1:] = np.where(tensor[1:] == tensor[:-1], ends[:-1], 0)
    # The first chunk of a rule, then the others.
    items = np.zeros((2, rules.shape[1]), dtype=np.int64)
    items[0, spans] = starts - before
    items[1] = np.where(is_span, rules[Of.START_STEP] - rules[Of.NUMEL], 0)
    lengths = np.stack([np.ones_like(rules[Of.COUNT]), rules[Of.COUNT] - 1])
    return Progressions.of(lengths.T.ravel(), items.T.ravel(), np.zeros(items.size, np.int64))


class ReplicaRegions:
    """The regions that ranks may have in common, numbered: what stays from save to save."""

    def __init__(self, structure: JointStructure) -> None:
        self._lists = structure.replicas
        if not self._lists:
            return
        fqns = [tensor.fqn for tensor in structure.tensors]
        tensor = np.concatenate([int64s([]), *(one.tensor for one in self._lists)])
        start = np.concatenate([int64s([]), *(one.start for one in self._lists)])
        # By name: where ranks describe a tensor in two ways, that is said elsewhere.
        numbers = {fqn: number for number, fqn in enumerate(dict.fromkeys(fqns))}
        name_of = int64s([numbers[fqn] for fqn in fqns])
        regions, ids = np.unique(np.stack([name_of[tensor], start]), axis=1, return_inverse=True)
        names = list(numbers)
        self._regions = [(names[number], begin) for number, begin in regions.T.tolist()]
        edges = np.cumsum([len(one.tensor) for one in self._lists])
        self._ids = np.split(ids.reshape(-1), edges[:-1])

    def differences(self, rest: JointRest) -> ReplicaDifferences:
        """Where ranks have different bytes of what a checkpoint stores once."""
        if not self._lists:
            return ReplicaDifferences([], [])
        groups = [
            (number, group.ranks, np.frombuffer(group.data, dtype="<u4"))
            for number, of_list in enumerate(rest.replicas)
            for group in of_list
        ]
        ids = np.concatenate([self._ids[number] for number, _, _ in groups])
        digests = np.concatenate([own for _, _, own in groups])
        some = np.zeros(len(self._regions), dtype=np.uint32)
        some[ids] = digests
        differing = np.unique(ids[digests != some[ids]]).tolist()
        regions = []
        for region in differing:
            pairs: list[tuple[int, int]] = []
            must_agree = False
            for number, ranks, own in groups:
                for place in np.flatnonzero(self._ids[number] == region).tolist():
                    pairs += [(rank, int(own[place])) for rank in ranks.tolist()]
                    must_agree |= bool(self._lists[number].must_agree[place])
            regions.append(DifferingRegion(self._regions[region], pairs, must_agree))
        return texts_of_regions(regions, _digests_of(rest.texts[0].data))


def differing_values(rest: JointRest) -> list[str]:
    """One text per value that is not the same on all ranks that have it."""
    if len(rest.texts) == 1:
        return []
    by_text = [(_digests_of(group.data), group.ranks.tolist()) for group in rest.texts]
    if all(digests == by_text[0][0] for digests, _ in by_text):
        return []
    of_ranks = {rank: digests for digests, ranks in by_text for rank in ranks}
    return texts_of_values(of_ranks, rest.values)


def _digests_of(texts: bytes) -> dict[str, int]:
    digests: dict[str, int] = json.loads(texts)[0]
    return digests


def build_manifest(header: Header, parts: Sequence[Part]) -> Manifest:
    """The manifest of all parts, in rank order, one per rank of `header.world_size`.

    Raises InvalidState like `JointTable`.
    """
    merged = merge_structures([part.structure for part in parts])
    rest = merged.rest([part.rest for part in parts])
    return decode_manifest(JointTable(merged.structure).manifest(header, rest).encoded.data)
