"""What ranks contradict each other in when their parts are merged, and how that is said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import InvalidState
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
from ckpt.format.manifest import CHUNKS_MAX, Header
from ckpt.format.part import TensorRecord
from ckpt.format.references import REFERENCES, parse_reference
from ckpt.format.uniting import EncodedValues, is_groups, sent_by
from ckpt.layout.kind import is_numbered


def check_count(chunks: int) -> None:
    """Raises InvalidState for a manifest that readers would take for a hostile one."""
    if chunks > CHUNKS_MAX:
        raise InvalidState(
            [
                f"{chunks} regions of tensors on all ranks, at most {CHUNKS_MAX} fit into "
                "one manifest: save fewer tensors, or on fewer ranks"
            ]
        )


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


def _first_duplicate(names: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


class ReplicaDifferences(NamedTuple):
    """One text per tensor, or region, whose bytes are not the same on all ranks that have it.

    `failures` are those on which the ranks must agree.
    """

    failures: list[str]
    warnings: list[str]


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


def _unsynchronized(region: _ReplicaRegion, groups: str) -> str:
    return (
        f"{_region_name(region)}: replicas differ between ranks ({groups}); one rank's copy "
        "was stored. Synchronize it before saving, or wrap it in PerRank to keep every rank's own"
    )


def _region_name(region: _ReplicaRegion) -> str:
    fqn, start = region
    return f"{fqn} from element {start} on" if start else fqn


def texts_of_values(
    digests: Mapping[int, Mapping[str, int]], values: Sequence[EncodedValues]
) -> list[str]:
    """The values that differ between ranks, by their `digests` per rank, and are not to be united:
    groups of ranks may have `values` of their own.
    """
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
