"""Merging: how the parts of all ranks become the manifest, and where the ranks differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import InvalidState
from ckpt.format.blake3 import Digests, no_digests
from ckpt.format.checksum_tables import NO_SEALS, Seal, Seals
from ckpt.format.codec import encode_values
from ckpt.format.columns import Ints
from ckpt.format.coverage import check_cover
from ckpt.format.disagreement import (
    BY_NUMBER,
    OR_OWN_NAME,
    OR_PER_GROUP,
    STORED_ONCE,
    TWO_MODELS,
    WRAP,
    disagreement,
    groups_in_words,
    or_per_rank,
    way_out_of,
)
from ckpt.format.manifest import (
    SEALED_CHUNKS_MAX,
    BoxTable,
    ChunkTable,
    Header,
    Int64s,
    Manifest,
    int64s,
    narrowed,
    no_checksums,
    starts_of,
)
from ckpt.format.part import Part, TensorRecord
from ckpt.format.references import REFERENCES, is_reference, parse_reference
from ckpt.format.uniting import EncodedValues, is_groups, sent_by, united_values
from ckpt.layout.kind import is_numbered
from ckpt.layout.region import Box


class KeptMerge:
    """What was worked out for the structures of some parts, for the next save of the same ones.

    Of the ranks' parts, pass those with the very same structures, or make a new one.
    """

    def __init__(self) -> None:
        self.merged: _Merged | None = None
        self.replicas: _ReplicaTable | None = None


def build_manifest(
    header: Header, parts: Sequence[Part], kept: KeptMerge | None = None
) -> Manifest:
    """The manifest of all parts, in rank order, one per rank of `header.world_size`.

    Raises InvalidState naming fqn, region and ranks when ranks contradict each other, or when the
    chunks do not cover every tensor exactly once. It does not compare replicas and values: see
    `replica_differences` and `value_differences`.
    """
    ranks = [part.rank for part in parts]
    if ranks != list(range(header.world_size)):
        raise ValueError(
            f"parts of ranks {ranks[:20]}, expected 0 to {header.world_size - 1} in order"
        )
    kept = kept or KeptMerge()
    if kept.merged is None:
        kept.merged = _Merged(parts)
    return kept.merged.manifest(header, parts)


def check_count(chunks: int) -> None:
    """Raises InvalidState for a manifest that readers would take for a hostile one."""
    if chunks > SEALED_CHUNKS_MAX:
        raise InvalidState(
            [
                f"{chunks} regions of tensors on all ranks, at most {SEALED_CHUNKS_MAX} fit into "
                "one manifest: save fewer tensors, or on fewer ranks"
            ]
        )


class _Merged:
    """All parts as one table of chunks: what does not change from save to save."""

    def __init__(self, parts: Sequence[Part]) -> None:
        tensors, tensor_of = _merge_tensors(parts)
        self._aliases = _merge_aliases(parts, tensors)
        self._fqns = tuple([tensor.fqn for tensor in tensors])
        self._shapes = tuple([tensor.shape for tensor in tensors])
        self._dtypes = tuple([tensor.dtype for tensor in tensors])
        self._kinds = np.array([tensor.kind for tensor in tensors], dtype=np.uint8)
        columns = _merge_chunks(parts, tensor_of, _file_indexes(parts))
        self._order = _table_order(columns, len(tensors))
        self._positions = narrowed(columns.position[self._order])
        self._block_counts = narrowed(columns.block_counts)
        self._data_start = int64s([])
        self._chunks = _chunk_table(columns, self._order, len(tensors))
        numels = int64s([math.prod(shape) for shape in self._shapes])
        if problems := check_cover(self._chunks, self._fqns, self._shapes, numels):
            raise InvalidState([self._with_writers(text, columns, parts) for text in problems])

    @cached_property
    def _blocks(self) -> Ints:
        """Where the checksums of the table come from, among those of all parts."""
        return _run_index(self._block_counts, self._order)

    def manifest(self, header: Header, parts: Sequence[Part]) -> Manifest:
        """The manifest of these parts, whose structures are those that this was made of."""
        files = _merge_files(parts, header)
        if header.has_checksum_tables:
            check_count(len(self._chunks))
            seals = Seals.of([file.seal for file in files])
            if not len(seals.nbytes):
                raise ValueError("a manifest with checksum tables needs the seals of all files")
            checksums, digests = no_checksums(), no_digests()
        else:
            checksums = np.concatenate([part.checksums for part in parts])[self._blocks]
            digests, seals = _merge_digests(parts, self._order), NO_SEALS
        data_start = int64s([file.data_start for file in files])
        if not np.array_equal(data_start, self._data_start) or not len(self._chunks.byte_start):
            # The same table as before wherever it can be: its encoding is known then.
            self._data_start = data_start
            starts = narrowed(self._positions + data_start[self._chunks.file])
            self._chunks = replace(self._chunks, byte_start=starts)
        per_rank = [part.per_rank for part in parts]
        nothing = encode_values({})
        return Manifest(
            header=header,
            files=tuple([file.name for file in files]),
            file_nbytes=int64s([file.nbytes for file in files]),
            file_data_start=data_start,
            fqns=self._fqns,
            dtypes=self._dtypes,
            shapes=self._shapes,
            kinds=self._kinds,
            aliases=self._aliases,
            chunks=self._chunks,
            checksums=checksums,
            values=united_values(_values_of(parts)),
            per_rank=tuple([data or nothing for data in per_rank]) if any(per_rank) else (),
            digests=digests,
            seals=seals,
        )

    def _with_writers(self, problem: str, columns: _Columns, parts: Sequence[Part]) -> str:
        counts = [len(part.chunk_file) for part in parts]
        ranks = np.repeat([part.rank for part in parts], counts)
        return with_writers(problem, self._fqns, lambda tensor: ranks[columns.tensor == tensor])


def with_writers(
    problem: str, fqns: Sequence[str], writers_of: Callable[[int], npt.NDArray[np.integer]]
) -> str:
    """A problem of `check_cover` with the ranks that write the tensor: `writers_of(its index)`."""
    for tensor, fqn in enumerate(fqns):
        if problem.startswith(f"{fqn}: "):
            writers = np.unique(writers_of(tensor)).tolist()
            text = f"{problem} (written by ranks {writers[:20]})"
            return f"{text}; {TWO_MODELS}" if "overlap" in problem else text
    return problem


class _File(NamedTuple):
    name: str
    nbytes: int
    data_start: int
    seal: Seal | None


def _merge_files(parts: Sequence[Part], header: Header) -> list[_File]:
    """All files, those of other attempts last and once."""
    of_all = [
        file
        for p in parts
        for file in map(
            _File, p.files, p.file_nbytes.tolist(), p.file_data_start.tolist(), _seals_of(p, header)
        )
    ]
    own = [file for file in of_all if not is_reference(file.name)]
    shared = sorted({file for file in of_all if is_reference(file.name)})
    check_names([file.name for file in own], [file.name for file in shared], header)
    return [*own, *shared]


def check_names(own: Sequence[str], shared: Sequence[str], header: Header) -> None:
    """Names of data files and of those of other attempts, these once for each way in which ranks
    describe them. Raises InvalidState for a name that comes twice.
    """
    names = [*own, *shared]
    if len(set(names)) != len(names):
        raise InvalidState(
            [f"two data files have one name, or ranks differ in it: {_first_duplicate(names)}"]
        )
    if shared and REFERENCES not in header.required:
        raise ValueError(f"the header must require {REFERENCES!r} for {shared[0]}")
    if wrong := [name for name in shared if parse_reference(name) is None]:
        raise ValueError(f"{wrong[0]} is not a data file of another attempt")


def _seals_of(part: Part, header: Header) -> Iterable[Seal | None]:
    """The seals of a part's files, where the manifest will hold them."""
    if header.has_checksum_tables and len(part.seals.nbytes):
        return map(part.seals.of_file, range(len(part.files)))
    return repeat(None)


def _file_indexes(parts: Sequence[Part]) -> list[Int64s]:
    """Per part, the indexes of its files among all, in the order of `_merge_files`."""
    names = [name for part in parts for name in part.files]
    shared = sorted({name for name in names if is_reference(name)})
    own = [name for name in names if not is_reference(name)]
    index = {name: position for position, name in enumerate([*own, *shared])}
    return [int64s([index[name] for name in part.files]) for part in parts]


def _merge_digests(parts: Sequence[Part], order: npt.NDArray[np.intp]) -> Digests:
    """A row per chunk, or none when no part has any. Raises ValueError when only some have."""
    digests = np.concatenate([part.digests for part in parts])
    if len(digests) not in (0, len(order)):
        raise ValueError("some ranks have digests of their chunks and some have not")
    return digests[order] if len(digests) else digests


class _Columns(NamedTuple):
    tensor: Int64s
    file: Int64s
    position: Int64s  # from the end of the file's header on
    start: Int64s
    numel: Int64s
    box: Int64s
    boxes: tuple[Box, ...]
    block_counts: Int64s


def _merge_tensors(parts: Sequence[Part]) -> tuple[list[TensorRecord], list[Int64s]]:
    """All tensors by fqn, and per part the indexes of its tensors among them."""
    first = parts[0].tensors  # sorted, each name once, as in every part
    if all(part.tensors == first for part in parts[1:]):
        return list(first), [np.arange(len(first))] * len(parts)
    # Most ranks have the same tensors: each distinct list is merged once, not once per rank.
    lists: dict[tuple[TensorRecord, ...], int] = {}
    for part in parts:
        lists.setdefault(part.tensors, part.rank)
    lowest = {info: rank for infos, rank in reversed(lists.items()) for info in infos}
    tensors = agreed_tensors(lowest)
    positions = {info.fqn: position for position, info in enumerate(tensors)}
    by_list = {infos: int64s([positions[info.fqn] for info in infos]) for infos in lists}
    return tensors, [by_list[part.tensors] for part in parts]


def agreed_tensors(lowest: Mapping[TensorRecord, int]) -> list[TensorRecord]:
    """The records by fqn, given the lowest rank that has each. Raises InvalidState where ranks
    describe a tensor in several ways.
    """
    merged: dict[str, tuple[TensorRecord, int]] = {}
    problems = []
    for info, rank in sorted(lowest.items(), key=lambda item: (item[0].fqn, item[1], item[0])):
        known, first_rank = merged.setdefault(info.fqn, (info, rank))
        if known != info:
            problems.append(
                f"{info.fqn}: {info.dtype}{list(info.shape)} of kind {info.kind} on rank {rank}, "
                f"{known.dtype}{list(known.shape)} of kind {known.kind} on rank {first_rank}"
            )
    if problems:
        raise InvalidState(problems)
    return [info for info, _ in merged.values()]


def _merge_aliases(parts: Sequence[Part], tensors: Sequence[TensorRecord]) -> dict[str, str]:
    lowest = {alias: part.rank for part in reversed(parts) for alias in part.aliases.items()}
    return agreed_aliases(lowest, tensors)


def agreed_aliases(
    lowest: Mapping[tuple[str, str], int], tensors: Sequence[TensorRecord]
) -> dict[str, str]:
    """The target of each tied name, given the lowest rank that has each pair of them. Raises
    InvalidState where ranks tie a name to several tensors, or to one that is not stored.
    """
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


def _merge_chunks(
    parts: Sequence[Part], tensor_of: Sequence[Int64s], file_of: Sequence[Int64s]
) -> _Columns:
    boxes: dict[Box, int] = {}
    box_columns = []
    for part in parts:
        ids = [boxes.setdefault(box, len(boxes)) for box in part.boxes]
        box_columns.append(int64s([*ids, -1])[part.chunk_box])  # index -1 is the last: a span
    paired = list(zip(parts, tensor_of, file_of, strict=True))
    return _Columns(
        tensor=np.concatenate([tensors[p.chunk_tensor] for p, tensors, _ in paired]),
        file=np.concatenate([files[p.chunk_file] for p, _, files in paired]),
        position=np.concatenate([p.chunk_position for p in parts]),
        start=_joined([p.chunk_start for p in parts]),
        numel=_joined([p.chunk_numel for p in parts]),
        box=np.concatenate(box_columns),
        boxes=tuple(boxes),
        block_counts=_joined([p.block_counts for p in parts]),
    )


def _joined(columns: Sequence[Ints]) -> Int64s:
    return np.concatenate(columns, dtype=np.int64, casting="same_kind")


def _table_order(columns: _Columns, tensors: int) -> npt.NDArray[np.intp]:
    """The chunks by tensor, then by their first element."""
    tensor, start = columns.tensor, columns.start
    # Mostly the ranks have their regions in order, and 16-bit keys are sorted by radix.
    keys: Ints = tensor.astype(np.uint16) if tensors < 1 << 16 else tensor
    order = np.argsort(keys, kind="stable")
    by_start, by_tensor = start[order], keys[order]
    if np.all((by_start[1:] >= by_start[:-1]) | (by_tensor[1:] != by_tensor[:-1])):
        return order
    return np.lexsort((start, tensor))


def _chunk_table(columns: _Columns, order: npt.NDArray[np.intp], tensors: int) -> ChunkTable:
    """The table but for `byte_start`, which has no items: files have not got their sizes yet."""
    box = columns.box[order]
    # Boxes are numbered as they first appear in the table, whatever rank they came from: a
    # manifest has one encoding, so the numbers must not depend on the order of the ranks.
    used, first_at = np.unique(box[box >= 0], return_index=True)
    renumbered = np.full(len(columns.boxes) + 1, -1, dtype=np.int64)
    renumbered[used[np.argsort(first_at)]] = np.arange(len(used))
    by_number = np.argsort(renumbered[used])
    boxes = [columns.boxes[index] for index in used[by_number].tolist()]
    return ChunkTable(
        first=starts_of(np.bincount(columns.tensor, minlength=tensors)),
        file=narrowed(columns.file[order]),
        byte_start=int64s([]),
        span_start=np.where(box < 0, columns.start[order], -1),
        numel=narrowed(columns.numel[order]),
        box=renumbered[box],
        boxes=BoxTable.of(boxes),
        first_block=starts_of(columns.block_counts[order]),
    )


def _run_index(lengths: Ints, order: npt.NDArray[np.intp]) -> Ints:
    """Where the items of runs of these lengths come from when the runs are put into `order`.

    Vectorized over items: a checkpoint has millions of block checksums.
    """
    sources = starts_of(lengths)[:-1][order]
    sizes = lengths[order].astype(np.int64)
    targets = starts_of(sizes)
    return narrowed(np.arange(int(targets[-1])) + np.repeat(sources - targets[:-1], sizes))


def _first_duplicate(names: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


class ReplicaDifferences(NamedTuple):
    """One text per tensor, or region, whose bytes are not the same on all ranks that have it.

    `failures` are those on which the ranks must agree.
    """

    failures: list[str]
    warnings: list[str]


def replica_differences(parts: Sequence[Part], kept: KeptMerge | None = None) -> ReplicaDifferences:
    """Where ranks have different bytes of what a checkpoint stores once.

    Works on columns: a thousand ranks have a million digests.
    """
    kept = kept or KeptMerge()
    if kept.replicas is None:
        kept.replicas = _ReplicaTable.of(parts)
    regions, ids, ranks, must_agree, order, firsts = kept.replicas
    digests = np.concatenate([part.replicas.digests for part in parts])[order]
    differing = digests != digests[firsts[ids]]  # from the first rank that has it
    unequal = []
    for number in np.unique(ids[differing]).tolist():
        those = slice(*firsts[number : number + 2].tolist())
        pairs = list(zip(ranks[those].tolist(), digests[those].tolist(), strict=True))
        unequal.append(DifferingRegion(regions[number], pairs, bool(must_agree[those].any())))
    return texts_of_regions(unequal, parts[0].value_digests)


class DifferingRegion(NamedTuple):
    """A replica that is not the same on all ranks: the ranks that have it, with their digests."""

    region: _ReplicaRegion
    digests: Sequence[tuple[int, int]]
    must_agree: bool


def texts_of_regions(
    unequal: Iterable[DifferingRegion], values: Collection[str]
) -> ReplicaDifferences:
    """What to say about them; `values` are the names of all values."""
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
            warnings[region] = _unsynchronized(region, groups_in_words(groups))
    return ReplicaDifferences(
        [failures[region] for region in sorted(failures)],
        [warnings[region] for region in sorted(warnings)],
    )


_ReplicaRegion = tuple[str, int]  # the name of a tensor, and the first element of a region of it


class _ReplicaTable(NamedTuple):
    """All replicas of all ranks, by region, then by rank; `order` takes items of parts there.

    Region i has the items `firsts[i]` to `firsts[i + 1]`.
    """

    regions: list[_ReplicaRegion]
    ids: Int64s
    ranks: Int64s
    must_agree: Int64s
    order: npt.NDArray[np.intp]
    firsts: npt.NDArray[np.intp]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> _ReplicaTable:
        """The table of these parts, whatever their digests are."""
        regions, ids = _numbered_replicas(parts)
        ranks = np.repeat([part.rank for part in parts], [len(p.replicas.tensor) for p in parts])
        must_agree = _joined([part.replicas.must_agree for part in parts])
        order = np.lexsort((ranks, ids))
        ids = ids[order]
        firsts = np.searchsorted(ids, np.arange(len(regions) + 1))
        return cls(regions, ids, ranks[order], must_agree[order], order, firsts)


def _numbered_replicas(parts: Sequence[Part]) -> tuple[list[_ReplicaRegion], Int64s]:
    """All regions, and the number of each item of all parts' replicas among them."""
    numbers: dict[_ReplicaRegion, int] = {}
    # Most ranks have the same replicas: each distinct list is numbered once, not once per rank.
    # The readers of parts make one tuple of equal tensors, and its identity is a cheap key.
    known: dict[tuple[int, bytes, bytes], Int64s] = {}
    ids = []
    for part in parts:
        starts = np.asarray(part.replicas.start, dtype=np.int64)
        tensor = np.asarray(part.replicas.tensor, dtype=np.int64)
        key = (id(part.tensors), tensor.tobytes(), starts.tobytes())
        if key not in known:
            fqns = [part.tensors[index].fqn for index in tensor.tolist()]
            regions = zip(fqns, starts.tolist(), strict=True)
            known[key] = int64s([numbers.setdefault(region, len(numbers)) for region in regions])
        ids.append(known[key])
    return list(numbers), np.concatenate(ids)


def _unsynchronized(region: _ReplicaRegion, groups: str) -> str:
    return (
        f"{_region_name(region)}: replicas differ between ranks ({groups}); one rank's copy "
        "was stored. Synchronize it before saving, or wrap it in PerRank to keep every rank's own"
    )


def _region_name(region: _ReplicaRegion) -> str:
    fqn, start = region
    return f"{fqn} from element {start} on" if start else fqn


def value_differences(parts: Sequence[Part]) -> list[str]:
    """One text per value that is not the same on all ranks that have it.

    Param groups may be those of several ranks, each with parameters of its own.
    """
    if all(part.value_digests == parts[0].value_digests for part in parts):
        return []
    return texts_of_values({part.rank: part.value_digests for part in parts}, _values_of(parts))


def _values_of(parts: Sequence[Part]) -> list[EncodedValues]:
    return [EncodedValues(part.rank, part.values) for part in parts if part.values]


def texts_of_values(
    digests: Mapping[int, Mapping[str, int]], values: Sequence[EncodedValues]
) -> list[str]:
    """`value_differences` of digests by rank, and of the values that ranks have sent."""
    names = {name for of_rank in digests.values() for name in of_rank}
    problems = []
    sent = sent_by(values)
    for fqn, groups in _differences(digests):
        versions = [one.rank for one in sent if is_groups(one.values.get(fqn), fqn)]
        if {digests[rank][fqn] for rank in versions} >= set(groups):
            continue  # each as one of the ranks has sent it, to be united
        way_out = way_out_of(fqn, names)
        do = f"make it equal on all ranks first{way_out}" if way_out else WRAP
        if not way_out and any(len(ranks) > 1 for ranks in groups.values()):
            do += OR_PER_GROUP
        problems.append(f"{fqn}: the value differs between ranks ({groups_in_words(groups)}); {do}")
    return problems


def _differences(
    digests: Mapping[int, Mapping[str, int]],
) -> list[tuple[str, dict[int | None, list[int]]]]:
    """Per name with more than one digest: the ranks by digest."""
    ranks_by_digest: dict[str, dict[int | None, list[int]]] = {}
    for rank, own in sorted(digests.items()):
        for fqn, digest in own.items():
            ranks_by_digest.setdefault(fqn, {}).setdefault(digest, []).append(rank)
    return [
        (fqn, ranks_by_digest[fqn])
        for fqn in sorted(ranks_by_digest)
        if len(ranks_by_digest[fqn]) > 1
    ]
