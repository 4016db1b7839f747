"""Values of ranks that hold different things, as the one mapping that a checkpoint has.

A value is sent by one of the ranks that have it. The param groups of an optimizer are sent by one
rank of each list of parameters: every stage of a pipeline has parameters of its own. Groups of
several ranks become one where all their options are equal, and stay apart otherwise; two groups of
one rank always stay apart, since only that rank knows why it has two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from ckpt.errors import InvalidState
from ckpt.format.codec import decode_values, encode_values

GROUPS = ".param_groups"

Groups = list[dict[str, Any]]


class Sent(NamedTuple):
    """The values that one rank has sent."""

    rank: int
    values: Mapping[str, Any]


class EncodedValues(NamedTuple):
    """The values that one rank has sent, encoded; not empty."""

    rank: int
    data: bytes


def sent_by(encoded: Sequence[EncodedValues]) -> list[Sent]:
    """What each rank has sent."""
    return [Sent(rank, decode_values(data)) for rank, data in encoded]


def united_values(encoded: Sequence[EncodedValues]) -> bytes:
    """The values of all ranks, encoded. Raises InvalidState for a parameter in two groups."""
    if len(encoded) <= 1:
        return encoded[0].data if encoded else encode_values({})
    versions: dict[str, list[tuple[int, Any]]] = {}
    for rank, values in sent_by(encoded):
        for fqn, value in values.items():
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
