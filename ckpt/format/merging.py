"""Merging: how the parts of all ranks become the manifest, and where the ranks differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import InvalidState
from ckpt.format.blake3 import Digests
from ckpt.format.codec import encode_values
from ckpt.format.coverage import check_cover
from ckpt.format.manifest import BoxTable, ChunkTable, Header, Int64s, Manifest, int64s, starts_of
from ckpt.format.part import Part, TensorRecord
from ckpt.format.references import REFERENCES, is_reference, parse_reference
from ckpt.layout.region import Box


def build_manifest(header: Header, parts: Sequence[Part]) -> Manifest:
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
    tensors, tensor_of = _merge_tensors(parts)
    aliases = _merge_aliases(parts, tensors)
    files, file_of = _merge_files(parts, header)
    columns = _merge_chunks(parts, tensor_of, file_of)
    order = np.lexsort((columns.start, columns.tensor))
    chunks = _chunk_table(columns, order, len(tensors), header)
    numels = int64s([math.prod(tensor.shape) for tensor in tensors])
    fqns = tuple([tensor.fqn for tensor in tensors])
    shapes = tuple([tensor.shape for tensor in tensors])
    if problems := check_cover(chunks, fqns, shapes, numels):
        raise InvalidState([_with_writers(text, fqns, columns) for text in problems])
    per_rank = tuple([part.per_rank for part in parts])
    nothing = encode_values({})
    return Manifest(
        header=header,
        files=tuple([file.name for file in files]),
        file_nbytes=int64s([file.nbytes for file in files]),
        file_data_start=int64s([file.data_start for file in files]),
        fqns=fqns,
        dtypes=tuple([tensor.dtype for tensor in tensors]),
        shapes=shapes,
        kinds=np.array([tensor.kind for tensor in tensors], dtype=np.uint8),
        aliases=aliases,
        chunks=chunks,
        checksums=_reorder_runs(columns.checksums, columns.block_counts, order),
        values=next((part.values for part in parts if part.values), nothing),
        per_rank=tuple([data or nothing for data in per_rank]) if any(per_rank) else (),
        digests=_merge_digests(parts, order),
    )


class _File(NamedTuple):
    name: str
    nbytes: int
    data_start: int


def _merge_files(parts: Sequence[Part], header: Header) -> tuple[list[_File], list[Int64s]]:
    """All files, those of other attempts last and once, and per part the indexes of its files."""
    of_part = [
        list(map(_File, p.files, p.file_nbytes.tolist(), p.file_data_start.tolist())) for p in parts
    ]
    own = [file for files in of_part for file in files if not is_reference(file.name)]
    shared = sorted({file for files in of_part for file in files if is_reference(file.name)})
    names = [file.name for file in (*own, *shared)]
    if len(set(names)) != len(names):
        raise InvalidState(
            [f"two data files have one name, or ranks differ in it: {_first_duplicate(names)}"]
        )
    if shared and REFERENCES not in header.required:
        raise ValueError(f"the header must require {REFERENCES!r} for {shared[0].name}")
    if wrong := [file.name for file in shared if parse_reference(file.name) is None]:
        raise ValueError(f"{wrong[0]} is not a data file of another attempt")
    index = {name: position for position, name in enumerate(names)}
    return [*own, *shared], [int64s([index[name] for name in part.files]) for part in parts]


def _merge_digests(parts: Sequence[Part], order: npt.NDArray[np.intp]) -> Digests:
    """A row per chunk, or none when no part has any. Raises ValueError when only some have."""
    digests = np.concatenate([part.digests for part in parts])
    if len(digests) not in (0, len(order)):
        raise ValueError("some ranks have digests of their chunks and some have not")
    return digests[order] if len(digests) else digests


class _Columns(NamedTuple):
    rank: Int64s
    tensor: Int64s
    file: Int64s
    byte_start: Int64s
    start: Int64s
    numel: Int64s
    box: Int64s
    boxes: tuple[Box, ...]
    block_counts: Int64s
    checksums: npt.NDArray[np.uint32]


def _merge_tensors(parts: Sequence[Part]) -> tuple[list[TensorRecord], list[Int64s]]:
    """All tensors by fqn, and per part the indexes of its tensors among them."""
    first = parts[0].tensors  # sorted, each name once, as in every part
    if all(part.tensors == first for part in parts[1:]):
        return list(first), [np.arange(len(first))] * len(parts)
    # Most ranks have the same tensors: each distinct list is merged once, not once per rank.
    lists: dict[tuple[TensorRecord, ...], list[int]] = {}
    for part in parts:
        lists.setdefault(part.tensors, []).append(part.rank)
    merged: dict[str, tuple[TensorRecord, int]] = {}
    problems = []
    for infos, ranks in lists.items():
        for info in infos:
            known, first_rank = merged.setdefault(info.fqn, (info, ranks[0]))
            if known != info:
                problems.append(
                    f"{info.fqn}: {info.dtype}{list(info.shape)} of kind {info.kind} on rank "
                    f"{ranks[0]}, "
                    f"{known.dtype}{list(known.shape)} of kind {known.kind} on rank {first_rank}"
                )
    if problems:
        raise InvalidState(problems)
    tensors = [info for info, _ in sorted(merged.values())]
    positions = {info.fqn: position for position, info in enumerate(tensors)}
    by_list = {infos: int64s([positions[info.fqn] for info in infos]) for infos in lists}
    return tensors, [by_list[part.tensors] for part in parts]


def _merge_aliases(parts: Sequence[Part], tensors: Sequence[TensorRecord]) -> dict[str, str]:
    stored = {tensor.fqn for tensor in tensors}
    merged: dict[str, tuple[str, int]] = {}
    problems = []
    for part in parts:
        for name, target in part.aliases.items():
            first, rank = merged.setdefault(name, (target, part.rank))
            if first != target:
                problems.append(
                    f"{name}: tied to {target} on rank {part.rank}, to {first} on rank {rank}"
                )
            if target not in stored or name in stored:
                problems.append(
                    f"{name}: tied to {target}, expected a stored tensor of another name"
                )
    if problems:
        raise InvalidState(sorted(set(problems)))
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
        rank=np.repeat(int64s([p.rank for p in parts]), [len(p.chunk_file) for p in parts]),
        tensor=np.concatenate([tensors[p.chunk_tensor] for p, tensors, _ in paired]),
        file=np.concatenate([files[p.chunk_file] for p, _, files in paired]),
        byte_start=np.concatenate([p.chunk_byte_start for p in parts]),
        start=np.concatenate([p.chunk_start for p in parts]),
        numel=np.concatenate([p.chunk_numel for p in parts]),
        box=np.concatenate(box_columns),
        boxes=tuple(boxes),
        block_counts=np.concatenate([p.block_counts for p in parts]),
        checksums=np.concatenate([p.checksums for p in parts]),
    )


def _chunk_table(
    columns: _Columns, order: npt.NDArray[np.intp], tensors: int, header: Header
) -> ChunkTable:
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
        file=columns.file[order],
        byte_start=columns.byte_start[order],
        span_start=np.where(box < 0, columns.start[order], -1),
        numel=columns.numel[order],
        box=renumbered[box],
        boxes=BoxTable.of(boxes),
        first_block=starts_of(columns.block_counts[order]),
    )


def _reorder_runs(
    items: npt.NDArray[np.uint32], lengths: Int64s, order: npt.NDArray[np.intp]
) -> npt.NDArray[np.uint32]:
    """Runs of `items` of these lengths, in another order.

    Vectorized over items: a checkpoint has millions of block checksums.
    """
    sources = starts_of(lengths)[:-1][order]
    sizes = lengths[order]
    targets = starts_of(sizes)
    index = np.arange(int(targets[-1])) + np.repeat(sources - targets[:-1], sizes)
    return items[index].astype(np.uint32)


def _with_writers(problem: str, fqns: Sequence[str], columns: _Columns) -> str:
    for position, fqn in enumerate(fqns):
        if problem.startswith(f"{fqn}: "):
            ranks = sorted(set(columns.rank[columns.tensor == position].tolist()))
            text = f"{problem} (written by ranks {ranks[:20]})"
            return f"{text}; {_TWO_MODELS}" if "overlap" in problem else text
    return problem


_TWO_MODELS = (
    "they are no declared replicas of each other: give each model a name of its own in the state, "
    "or save each with process_group= its ranks"
)


def _first_duplicate(names: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


class ReplicaDifferences(NamedTuple):
    """One text per tensor, or region, whose bytes are not the same on all ranks that have it.

    `failures` are those on which the ranks must agree.
    """

    failures: list[str]
    warnings: list[str]


def replica_differences(parts: Sequence[Part]) -> ReplicaDifferences:
    """Where ranks have different bytes of what a checkpoint stores once.

    Works on columns: a thousand ranks have a million digests.
    """
    regions, ids = _numbered_replicas(parts)
    ranks = np.repeat([part.rank for part in parts], [len(p.replicas.tensor) for p in parts])
    digests = np.concatenate([part.replicas.digests for part in parts])
    must_agree = np.concatenate([part.replicas.must_agree for part in parts])
    order = np.lexsort((ranks, ids))
    ids, ranks, digests, must_agree = (c[order] for c in (ids, ranks, digests, must_agree))
    firsts = np.searchsorted(ids, np.arange(len(regions) + 1))
    differing = digests != digests[firsts[ids]]  # from the first rank that has it
    failures, warnings = {}, {}
    for number in np.unique(ids[differing]).tolist():
        those = slice(*firsts[number : number + 2].tolist())
        groups: dict[int | None, list[int]] = {}
        for rank, digest in zip(ranks[those].tolist(), digests[those].tolist(), strict=True):
            groups.setdefault(digest, []).append(rank)
        region = regions[number]
        if must_agree[those].any():
            text = disagreement(_region_name(region), groups, _STORED)
            values = parts[0].value_digests
            failures[region] = text + (_way_out(region[0], values) or or_per_rank(region[0]))
        else:
            warnings[region] = _unsynchronized(region, _groups(groups))
    return ReplicaDifferences(
        [failures[region] for region in sorted(failures)],
        [warnings[region] for region in sorted(warnings)],
    )


_ReplicaRegion = tuple[str, int]  # the name of a tensor, and the first element of a region of it


def _numbered_replicas(parts: Sequence[Part]) -> tuple[list[_ReplicaRegion], Int64s]:
    """All regions, and the number of each item of all parts' replicas among them."""
    numbers: dict[_ReplicaRegion, int] = {}
    # Most ranks have the same replicas: each distinct list is numbered once, not once per rank.
    known: dict[tuple[tuple[str, ...], bytes], Int64s] = {}
    ids = []
    for part in parts:
        fqns = tuple([part.tensors[index].fqn for index in part.replicas.tensor.tolist()])
        starts = np.asarray(part.replicas.start, dtype=np.int64)
        key = (fqns, starts.tobytes())
        if key not in known:
            regions = zip(fqns, starts.tolist(), strict=True)
            known[key] = int64s([numbers.setdefault(region, len(numbers)) for region in regions])
        ids.append(known[key])
    return list(numbers), np.concatenate(ids)


_STORED = "a checkpoint stores one for all"


def disagreement(name: str, groups: Mapping[int | None, Sequence[int]], why: str) -> str:
    """That ranks, in groups by digest, differ in a tensor which is kept once, `why`, and what to do
    about it.
    """
    return (
        f"{name}: the ranks have different values of it ({_groups(groups)}), and {why}; make it "
        "equal on all ranks first"
    )


def or_per_rank(fqn: str, values: Collection[str] = ()) -> str:
    """The end of a message about optimizer state: how each rank keeps its own; "" for the rest.

    `values` are the names of values: a tensor inside of one has the name of that value's state.
    """
    _, is_state, name = fqn.rpartition(".state.")
    if not is_state:
        return ""
    outer = next((value for value in values if fqn.startswith(f"{value}.")), "")
    key = outer.rpartition(".")[2] if ".state." in outer else _key_of(name)
    return (
        ", or say that each rank keeps its own: "
        f'declare_optimizer_state(optimizer, {{"{key}": PerRank(None, on_reshard)}})'
    )


def _key_of(name: str) -> str:
    """The optimizer's own name of a state, from its full name in a checkpoint."""
    parts = name.split("~")[0].split(".")
    while len(parts) > 1 and parts[-1].isdecimal():  # an item of a list that the state is
        parts.pop()
    return parts[-1]


def _way_out(fqn: str, values: Collection[str]) -> str:
    """The end of a message about what an optimizer has otherwise on some ranks; "" for the rest."""
    optimizers = [value.removesuffix(_GROUPS) for value in values if value.endswith(_GROUPS)]
    for path in optimizers:
        if fqn.startswith(f"{path}.state."):
            return or_per_rank(fqn, values)
        if f"{fqn}.".startswith((f"{path}{_GROUPS}.", f"{path}.user_state.")):
            return (
                ", or keep what is each rank's own outside of the optimizer: beside it in the "
                "state, as PerRank(value)"
            )
    return ""


_GROUPS = ".param_groups"


def _unsynchronized(region: _ReplicaRegion, groups: str) -> str:
    return (
        f"{_region_name(region)}: replicas differ between ranks ({groups}); one rank's copy "
        "was stored. Synchronize it before saving, or wrap it in PerRank to keep every rank's own"
    )


def _region_name(region: _ReplicaRegion) -> str:
    fqn, start = region
    return f"{fqn} from element {start} on" if start else fqn


def value_differences(parts: Sequence[Part]) -> list[str]:
    """One text per value that is not the same on all ranks of the world."""
    digests = {part.rank: part.value_digests for part in parts}
    problems = []
    for fqn, groups in _differences(digests):
        way_out = _way_out(fqn, {name for part in parts for name in part.value_digests})
        do = f"make it equal on all ranks first{way_out}" if way_out else _WRAP
        group = _OR_GROUP if None in groups else ""
        problems.append(f"{fqn}: the value differs between ranks ({_groups(groups)}); {do}{group}")
    return problems


_WRAP = "wrap it in PerRank to keep every rank's own"
_OR_GROUP = ", or save with process_group= the ranks that have it"


def _differences(
    digests: Mapping[int, Mapping[str, int]],
) -> list[tuple[str, dict[int | None, list[int]]]]:
    """Per name with more than one digest: the ranks by digest; None where a rank lacks the name."""
    ranks_by_digest: dict[str, dict[int | None, list[int]]] = {}
    for rank, own in sorted(digests.items()):
        for fqn, digest in own.items():
            ranks_by_digest.setdefault(fqn, {}).setdefault(digest, []).append(rank)
    for groups in ranks_by_digest.values():
        having = {rank for ranks in groups.values() for rank in ranks}
        if missing := [rank for rank in sorted(digests) if rank not in having]:
            groups[None] = missing
    return [
        (fqn, ranks_by_digest[fqn])
        for fqn in sorted(ranks_by_digest)
        if len(ranks_by_digest[fqn]) > 1
    ]


def _groups(groups: Mapping[int | None, Sequence[int]]) -> str:
    texts = []
    for digest, ranks in groups.items():
        shown = ", ".join(map(str, ranks[:8])) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        label = "absent" if digest is None else f"crc32c {digest:08x}"
        texts.append(f"{label} on {shown}")
    return "; ".join(texts)
