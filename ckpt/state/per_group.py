"""Values that a group of ranks has in common and other groups have otherwise.

Stored as common values, one for each group: `<name>~group<n>`, where n is the group's lowest rank,
is `{"group": ranks, "world_size": ranks of the world that saved, "value": value}`. So the ranks of
a group are compared like those of the world are in other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckpt.layout.plain import Ranks
from ckpt.state.types import PerGroup

SUFFIX = "~group"
NOT_IN_GROUP = "this rank is not in the group of its PerGroup value; pass the group that it is in"


class GroupValue(NamedTuple):
    """The value of one group, as a checkpoint has it under `fqn`."""

    fqn: str
    group: tuple[int, ...]
    world_size: int
    value: Any


def group_of(marked: PerGroup, ranks: Ranks) -> tuple[int, ...] | None:
    """The group's ranks in the world, ascending; None when this rank is not among them."""
    group: Any = marked.group
    if hasattr(group, "mesh"):
        members = group.mesh.flatten().tolist()
    elif isinstance(group, Sequence):
        members = list(group)
    else:
        members = torch.distributed.get_process_group_ranks(group)
    known = ranks.known_of(members)
    return known if ranks.rank in known else None


def group_values(values: Mapping[str, Any], name: str) -> list[GroupValue]:
    """The values of all groups that a checkpoint has for `name`, by their lowest ranks."""
    prefix = f"{name}{SUFFIX}"
    saved = [
        GroupValue(fqn, tuple(entry["group"]), entry["world_size"], entry["value"])
        for fqn, entry in values.items()
        if fqn.startswith(prefix) and fqn[len(prefix) :].isdecimal()
        if isinstance(entry, dict) and entry.keys() == {"group", "world_size", "value"}
    ]
    return sorted(saved, key=lambda one: one.group)


def value_for(saved: Sequence[GroupValue], group: tuple[int, ...], size: int) -> tuple[Any] | None:
    """What a group in a world of `size` ranks gets back by itself; None if only the user knows."""
    for one in saved:
        if one.group == group and one.world_size == size:
            return (one.value,)
    # Equal values leave nothing to decide.
    if all(one.value == saved[0].value for one in saved[1:]):
        return (saved[0].value,)
    return None
