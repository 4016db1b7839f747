"""Values of ranks that hold different things, as the one mapping that a checkpoint has; what ranks
contradict each other in when their parts are merged, and how that is said.

A value is sent by one of the ranks that have it. The param groups of an optimizer are sent by one
rank of each list of parameters: every stage of a pipeline has parameters of its own. Groups of
several ranks become one where all their options are equal, and stay apart otherwise; two groups of
one rank always stay apart, since only that rank knows why it has two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from ckpt.errors import InvalidState
from ckpt.format.codec import decode_values, encode_values
from ckpt.format.manifest import REFERENCES, Header, parse_reference
from ckpt.format.part import EncodedValues, TensorRecord
from ckpt.layout.kind import is_numbered

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


TWO_MODELS = (
    "they are no declared replicas of each other: give each model a name of its own in the state, "
    "stages of a pipeline the names of the whole model, or save each with process_group= its ranks"
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


def disagreement(name: str, groups: Mapping[int | None, Sequence[int]], why: str) -> str:
    """That ranks, in groups by digest, differ in what is kept once, `why`, and what to do."""
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


def way_out_of(fqn: str, values: Collection[str]) -> str:
    """The end of a message about what an optimizer has otherwise on some ranks; "" for the rest."""
    optimizers = [value.removesuffix(GROUPS) for value in values if value.endswith(GROUPS)]
    for path in optimizers:
        if fqn.startswith(f"{path}.state."):
            return or_per_rank(fqn, values)
        if f"{fqn}.".startswith((f"{path}{GROUPS}.", f"{path}.user_state.")):
            return (
                ", or keep what is each rank's own outside of the optimizer: beside it in the "
                "state, as PerRank(value)"
            )
    return ""


def groups_in_words(groups: Mapping[int | None, Sequence[int]]) -> str:
    """Ranks by digest, as text."""
    texts = []
    for digest, ranks in groups.items():
        shown = ", ".join(map(str, ranks[:8])) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        label = "absent" if digest is None else f"crc32c {digest:08x}"
        texts.append(f"{label} on {shown}")
    return "; ".join(texts)


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
            warnings[region] = (
                f"{_region_name(region)}: replicas differ between ranks "
                f"({groups_in_words(groups)}); one rank's copy was stored. Synchronize it before "
                "saving, or wrap it in PerRank to keep every rank's own"
            )
    return ReplicaDifferences(
        [failures[region] for region in sorted(failures)],
        [warnings[region] for region in sorted(warnings)],
    )


_ReplicaRegion = tuple[str, int]  # the name of a tensor, and the first element of a region of it


def _region_name(region: _ReplicaRegion) -> str:
    fqn, start = region
    return f"{fqn} from element {start} on" if start else fqn


def texts_of_values(
    digests: Mapping[int, Mapping[str, int]], values: Sequence[EncodedValues]
) -> list[str]:
    """The values that differ between ranks, by their `digests` per rank, and are not to be united:
    groups of ranks may have `values` of their own.
    """
    ranks_by_digest: dict[str, dict[int | None, list[int]]] = {}
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
