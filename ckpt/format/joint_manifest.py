"""From the joint part of all ranks to the manifest, and where ranks contradict each other.

What regular layouts have cut stays as rules from the ranks to the manifest: no table of all chunks
is made. Param groups are sent by one rank of each list of parameters, as stages of a pipeline have
their own. Those of several ranks become one where all options are equal, those of one rank do not.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

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
from ckpt.format.codec import decode_values, encode_values
from ckpt.format.columns import Progressions, pack_progressions, pack_regular
from ckpt.format.manifest import (
    CHUNKS_MAX,
    REFERENCES,
    BoxTable,
    Header,
    Int64s,
    Manifest,
    int64s,
    no_chunks,
    parse_reference,
    starts_of,
)
from ckpt.format.manifest_codec import Encoded, decode_manifest, encoded, fields_of_tensors
from ckpt.format.part import (
    EncodedValues,
    JointRest,
    JointStructure,
    Part,
    TensorRecord,
    itemsizes_of,
    joined_sizes,
    merge_structures,
)
from ckpt.layout.kind import is_numbered


class JointTable:
    """What follows from the structure of all ranks: proofs, and most of the manifest's bytes.

    `nbytes` are the bytes of all chunks, `referenced` of those in files of other attempts, by
    attempt.

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
            raise InvalidState(list(map(self._with_writers, problems)))
        chunks = chunk_total(rules)
        if chunks > CHUNKS_MAX:  # readers would take it for a hostile one
            problem = f"{chunks} regions of tensors on all ranks, at most {CHUNKS_MAX} fit into one"
            raise InvalidState([f"{problem} manifest: save fewer tensors, or on fewer ranks"])
        self.referenced = _nbytes_shared(structure, itemsizes)
        self.nbytes = int((rules[Of.COUNT] * rules[Of.NUMEL] * itemsizes[rules[Of.TENSOR]]).sum())
        rules = _with_gaps_of_all(rules, np.array(structure.several, dtype=bool), itemsizes)
        rules, used = _with_numbered_boxes(rules)
        boxes = BoxTable.of(list(map(structure.boxes.__getitem__, used.tolist())))
        self._sizes = len(set(self._shapes)), chunks, len(boxes)
        self._chunk_fields = {
            **_fields_of_rules(rules, len(structure.files), len(self._tensors)),
            **fields_of_boxes(boxes),
        }
        self._tensor_fields: dict[str, bytes] = {}

    def _with_writers(self, problem: str) -> str:
        """A problem of `check_rules` with the ranks that write the tensor."""
        named = enumerate(self._fqns)
        tensor = next(number for number, fqn in named if problem.startswith(f"{fqn}: "))
        rules = self._structure.rules
        rules = rules[:, rules[Of.TENSOR] == tensor]
        ranks = np.unique(expanded(rules, np.ones(rules.shape[1], dtype=bool))[Of.RANK]).tolist()
        text = f"{problem} (written by ranks {ranks[:20]})"
        if "are missing" in problem:
            return f"{text}; {UNLIKE_STATE}"
        return f"{text}; {TWO_MODELS}" if "overlap" in problem else text

    def manifest(self, header: Header, rest: JointRest) -> Encoded:
        """The manifest of a save of this structure. Raises InvalidState like `JointTable`."""
        structure = self._structure
        if (structure.first_rank, structure.rank_count) != (0, header.world_size):
            raise ValueError(f"{structure.rank_count} ranks from {structure.first_rank} on")
        # What ranks describe in two ways comes twice, and is refused.
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
        # Kept: while the structure stays, only headers, sizes and values change.
        self._tensor_fields = self._tensor_fields or fields_of_tensors(head)
        sizes_of = (*self._sizes, structure.blocks)
        return encoded(head, sizes_of, self._tensor_fields, self._chunk_fields)


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
    # By first use: whatever order ranks were merged in, the bytes are the same.
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
        """Where ranks have different bytes of what a checkpoint stores once: see
        `texts_of_regions`.
        """
        if not self._lists:
            return [], []
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


def _digests_of(texts: bytes) -> dict[str, int | str]:
    digests: dict[str, int | str] = json.loads(texts)[0]
    return digests


def build_manifest(header: Header, parts: Sequence[Part]) -> Manifest:
    """The manifest of all parts, in rank order, one per rank of `header.world_size`.

    Raises InvalidState like `JointTable`.
    """
    merged = merge_structures([part.structure for part in parts])
    rest = merged.rest([part.rest for part in parts])
    return decode_manifest(JointTable(merged.structure).manifest(header, rest).data)


GROUPS = ".param_groups"

Groups = list[dict[str, Any]]


def united_values(encoded: Sequence[EncodedValues]) -> bytes:
    """The values of all ranks, encoded. Raises InvalidState for a parameter in two groups."""
    if len(encoded) <= 1:
        return encoded[0].data if encoded else encode_values({})
    versions: dict[str, list[tuple[int, Any]]] = {}
    for rank, data in encoded:
        for fqn, value in decode_values(data).items():
            versions.setdefault(fqn, []).append((rank, value))
    united = {}
    problems: list[str] = []
    for fqn, of_ranks in sorted(versions.items()):
        first = of_ranks[0][1]
        if len(of_ranks) > 1 and all(is_groups(value, fqn) for _, value in of_ranks):
            united[fqn] = _united_groups(fqn, of_ranks, problems)
        else:
            # What differs between ranks was refused before; see `texts_of_values`.
            united[fqn] = first
    if problems:
        raise InvalidState(problems)
    return encode_values(united)


def is_groups(value: object, fqn: str) -> TypeGuard[Groups]:
    """Whether a value is the param groups of an optimizer, as `ckpt.state` stores them."""
    return (
        fqn.endswith(GROUPS)
        and isinstance(value, list)
        and all(isinstance(group, dict) and "params" in group for group in value)
    )


def _united_groups(fqn: str, of_ranks: Sequence[tuple[int, Groups]], problems: list[str]) -> Groups:
    united: Groups = []
    options: list[bytes] = []
    places: dict[str, tuple[int, int]] = {}  # of a parameter: its group, and the rank that said so
    for rank, groups in of_ranks:
        taken: set[int] = set()
        for position, group in enumerate(groups):
            own = encode_values({key: item for key, item in group.items() if key != "params"})
            # Optimizers of stages are made by the same code, so the group at the same place first.
            free = [
                index
                for index in (position, *range(len(united)))
                if index < len(united) and index not in taken and options[index] == own
            ]
            if not free:
                free = [len(united)]
                united.append({**group, "params": []})
                options.append(own)
            index = free[0]
            taken.add(index)
            for name in group["params"]:
                known = places.get(name)
                if known is None:
                    places[name] = (index, rank)
                    united[index]["params"].append(name)
                elif known[0] != index:
                    problems.append(
                        f"{fqn}: the parameter {name} is in groups with different options on rank "
                        f"{known[1]} and on rank {rank}; give it the same options on all ranks, or "
                        "each rank's optimizer a name of its own in the state"
                    )
    return united


RanksOf: TypeAlias = Mapping[Any, Sequence[int]]  # by a digest, or a number as text; None: absent
TWO_MODELS = (
    "they are no declared replicas of each other: give each model a name of its own in the state, "
    "stages of a pipeline the names of the whole model, or save each with process_group= its ranks"
)
UNLIKE_STATE = (
    "the ranks that share its writing hold different things: does the optimizer have state on some "
    "ranks only, because it made no step on the others?"
)
WRAP = "wrap it in PerRank to keep every rank's own"
OR_PER_GROUP = ", or in PerGroup(value, group) where it is equal in each group"
STORED_ONCE = "a checkpoint stores one for all"
OR_OWN_NAME = (
    ", or give each rank's own a name of its own, as experts and stages have; parts of one tensor "
    "have to be a DTensor"
)
BY_NUMBER = (
    "; an optimizer's state_dict() numbers its parameters, on each rank from 0 on: put the "
    "optimizer itself into the state"
)


def disagreement(name: str, groups: RanksOf, why: str) -> str:
    """A text: ranks, grouped by digest, differ in what is kept once, `why`, and what to do."""
    return (
        f"{name}: the ranks have different values of it ({groups_in_words(groups)}), and {why}; "
        "make it equal on all ranks first"
    )


def or_per_rank(fqn: str, values: Collection[str] = ()) -> str:
    """The end of a message about optimizer state: how each rank keeps its own; "" for the rest.

    `values` are the names of values: a tensor inside of one has the name of that value's state.
    """
    _, is_state, name = fqn.rpartition(".state.")
    if not is_state:
        return ""
    outer = next((value for value in values if fqn.startswith(f"{value}.")), "")
    # The optimizer's own key of the state, as code.
    name = outer.rpartition(".")[2] if ".state." in outer else name
    name, is_number, _ = name.partition("~index")
    parts = name.split("~")[0].split(".")
    while not is_number and len(parts) > 1 and parts[-1].isdecimal():  # an item of a list
        parts.pop()
    key = parts[-1] if is_number else f'"{parts[-1]}"'
    return (
        ", or say that each rank keeps its own: "
        f"declare_optimizer_state(optimizer, {{{key}: PerRank(None, on_reshard)}})"
    )


def way_out_of(fqn: str, values: Collection[str]) -> str:
    """The end of a message about what an optimizer has otherwise on some ranks; "" for the rest."""
    optimizers = [value.removesuffix(GROUPS) for value in values if value.endswith(GROUPS)]
    for path in optimizers:
        if fqn.startswith(f"{path}.state."):
            return or_per_rank(fqn, values)
        if fqn == f"{path}{GROUPS}":
            return (
                ", or say which options, such as d, each rank has for itself: "
                'declare_optimizer_state(optimizer, {"param_groups.d": PerRank(None, on_reshard)})'
            )
        if f"{fqn}.".startswith((f"{path}{GROUPS}.", f"{path}.user_state.")):
            return (
                ", or keep what is each rank's own outside of the optimizer: next to it in the "
                "state, as PerRank(value)"
            )
    return ""


def groups_in_words(groups: RanksOf) -> str:
    """`groups` as text."""
    texts = []
    for digest, ranks in groups.items():
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        label = f"crc32c {digest:08x}" if isinstance(digest, int) else digest or "absent"
        texts.append(f"{label} on {', '.join(map(str, ranks[:8]))}{more}")
    return "; ".join(texts)


def check_names(own: Sequence[str], shared: Sequence[str], header: Header) -> None:
    """Names of data files and of those of other attempts, these once for each way in which ranks
    describe them. Raises InvalidState for a name that comes twice.
    """
    names = [*own, *shared]
    if len(set(names)) != len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise InvalidState([f"two data files have one name, or ranks differ in it: {name}"])
    if shared and REFERENCES not in header.required:
        raise ValueError(f"the header must require {REFERENCES!r} for {shared[0]}")
    for name in shared:
        if parse_reference(name) is None:
            raise ValueError(f"{name} is not a data file of another attempt")


def agreed_tensors(
    records: Sequence[TensorRecord], lowest: Sequence[int]
) -> Sequence[TensorRecord]:
    """The sorted records, given the lowest rank that has each. Raises InvalidState where ranks
    describe a tensor in several ways.
    """
    if len({info.fqn for info in records}) == len(records):
        return records
    merged: dict[str, tuple[TensorRecord, int]] = {}
    problems = []
    pairs = zip(records, lowest, strict=True)
    for info, rank in sorted(pairs, key=lambda item: (item[0].fqn, item[1], item[0])):
        known, first_rank = merged.setdefault(info.fqn, (info, rank))
        if known != info:
            problems.append(
                f"{info.fqn}: {info.dtype}{list(info.shape)} of kind {info.kind} on rank {rank}, "
                f"{known.dtype}{list(known.shape)} of kind {known.kind} on rank {first_rank}"
            )
    raise InvalidState(problems)


def agreed_aliases(
    lowest: Mapping[tuple[str, str], int], tensors: Sequence[TensorRecord]
) -> dict[str, str]:
    """The target of each tied name, given the lowest rank that has each pair of them. Raises
    InvalidState where ranks tie a name to several tensors, or to one that is not stored.
    """
    if not lowest:
        return {}
    stored = {tensor.fqn for tensor in tensors}
    merged: dict[str, tuple[str, int]] = {}
    problems = []
    for (name, target), rank in sorted(lowest.items(), key=lambda item: (item[1], item[0])):
        first, first_rank = merged.setdefault(name, (target, rank))
        if first != target:
            problems.append(
                f"{name}: tied to {target} on rank {rank}, to {first} on rank {first_rank}"
            )
        if target not in stored or name in stored:
            problems.append(f"{name}: tied to {target}, expected a stored tensor of another name")
    if problems:
        raise InvalidState(sorted(problems))
    return {name: target for name, (target, _) in sorted(merged.items())}


ReplicaDifferences: TypeAlias = tuple[list[str], list[str]]


class DifferingRegion(NamedTuple):
    """A replica that is not the same on all ranks: the ranks that have it, with their digests."""

    region: _ReplicaRegion
    digests: Sequence[tuple[int, int]]
    must_agree: bool


def texts_of_regions(
    unequal: Iterable[DifferingRegion], values: Collection[str]
) -> ReplicaDifferences:
    """One text per tensor, or region, whose bytes are not the same on all ranks that have it: first
    those on which the ranks must agree, then the others. `values` are the names of all values.
    """
    failures, warnings = {}, {}
    for region, digests, must_agree in unequal:
        groups: dict[int | None, list[int]] = {}
        for rank, digest in sorted(digests):
            groups.setdefault(digest, []).append(rank)
        if must_agree:
            text = disagreement(_region_name(region), groups, STORED_ONCE)
            do = way_out_of(region[0], values) or or_per_rank(region[0])
            do = BY_NUMBER if is_numbered(region[0]) else do
            failures[region] = f"{text}{do or OR_OWN_NAME}"
        else:
            warnings[region] = (
                f"{_region_name(region)}: replicas differ between ranks "
                f"({groups_in_words(groups)}); one rank's copy was stored. Synchronize it before "
                "saving, or wrap it in PerRank to keep every rank's own"
            )
    return [failures[one] for one in sorted(failures)], [warnings[one] for one in sorted(warnings)]


_ReplicaRegion = tuple[str, int]  # the name of a tensor, and the first element of a region of it


def _region_name(region: _ReplicaRegion) -> str:
    fqn, start = region
    return f"{fqn} from element {start} on" if start else fqn


def texts_of_values(
    digests: Mapping[int, Mapping[str, int | str]], values: Sequence[EncodedValues]
) -> list[str]:
    """The values that differ between ranks, by their `digests` per rank, and are not to be united:
    groups of ranks may have `values` of their own.
    """
    ranks_by_digest: dict[str, dict[int | str | None, list[int]]] = {}
    for rank, own in sorted(digests.items()):
        for fqn, digest in own.items():
            ranks_by_digest.setdefault(fqn, {}).setdefault(digest, []).append(rank)
    names = ranks_by_digest.keys()
    problems = []
    sent = [(rank, decode_values(data)) for rank, data in values]
    for fqn, groups in sorted(ranks_by_digest.items()):
        if len(groups) == 1:
            continue
        versions = [rank for rank, own in sent if is_groups(own.get(fqn), fqn)]
        if {digests[rank][fqn] for rank in versions} >= set(groups):
            continue  # each as one of the ranks has sent it, to be united
        way_out = way_out_of(fqn, names)
        do = f"make it equal on all ranks first{way_out}" if way_out else WRAP
        if not way_out and any(len(ranks) > 1 for ranks in groups.values()):
            do += OR_PER_GROUP
        problems.append(f"{fqn}: the value differs between ranks ({groups_in_words(groups)}); {do}")
    return problems
