"""Which ranks share a model, as its engines declare: they make state dicts of it together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn

from ckpt.errors import CheckpointError, InvalidState
from ckpt.layout.modules import ModuleLayout, describe_module
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import sharding_of
from ckpt.layout.tensor import is_dtensor
from ckpt.layout.torch_fsdp import is_fsdp1
from ckpt.process import world_of_members

__all__ = ["ranks_that_share"]


def ranks_that_share(model: nn.Module, phase: str) -> tuple[int, ...]:
    """The global ranks over which units, meshes and DDP lay out `model`, ascending.

    Empty for a model that no engine shares with another rank, all ranks where an engine does not
    say. All ranks that share the model find the same without a round; but where a unit is
    repeated over ranks and knows the shard group of this rank only, these ranks exchange theirs.

    Raises InvalidState where groups of units overlap and no unit is laid out over both: then the
    ranks would wait for different ones. The ranks of those groups get the error in `phase`, the
    first that they agree on.
    """
    everyone = tuple(range(dist.get_world_size()))
    me = dist.get_rank()
    try:
        layout = describe_module(model, Ranks(me, everyone))
    except Exception:
        # An engine that fails to describe itself: raised again where all ranks see it.
        return everyone
    declared = _declared_groups(layout)
    if declared is None:
        return everyone
    if len(_widest(declared.of_units)) > 1:
        _refuse_overlap(declared, phase)
    together = declared.everyone()
    # A rank may describe a mesh that it is not in: what it has of such a model is its own.
    return tuple(sorted(together)) if me in together else ()


class _Declared(NamedTuple):
    """Groups of ranks that tensors are laid out over. `of_units` are those that this rank is in and
    that only their own ranks know, each with the name of a tensor.
    """

    groups: set[frozenset[int]]
    of_units: dict[frozenset[int], str]

    def everyone(self) -> frozenset[int]:
        return frozenset().union(*self.groups)


def _declared_groups(layout: ModuleLayout) -> _Declared | None:
    """None where an engine does not say over which ranks a tensor is laid out."""
    declared = _Declared(set(), {})
    units = dict(layout.units)
    # One round for the tensors of equal ranks, not one for each: all find them in one order.
    asked: dict[frozenset[int], frozenset[int]] = {}
    for owned in (*layout.params, *layout.buffers):
        unit = _unit_around(owned, units)
        if owned.owners is not None:
            group = frozenset(owned.owners)
        elif unit is not None and is_fsdp1(units[unit]):
            group = _group_of_hybrid(owned, units[unit], asked)
        else:
            return None
        declared.groups.add(group)
        # Of meshes without units all ranks may know, also those that are not in them.
        if dist.get_rank() in group and (unit is not None or not is_dtensor(owned.param)):
            declared.of_units.setdefault(group, owned.fqns[0])
    for module in units.values():  # also of those whose tensors were refused
        sharding = sharding_of(module)
        if sharding is not None and sharding.process_group is not None:
            declared.groups.add(frozenset(dist.get_process_group_ranks(sharding.process_group)))
    return None if layout.problems and not declared.everyone() else declared


def _unit_around(owned: Owned, names: Iterable[str]) -> str | None:
    """The name of the innermost unit around a tensor."""
    around = [name for name in names if not name or f"{owned.fqns[0]}.".startswith(f"{name}.")]
    return max(around, key=len) if around else None


def _group_of_hybrid(
    owned: Owned, unit: nn.Module, asked: dict[frozenset[int], frozenset[int]]
) -> frozenset[int]:
    """The ranks of a unit of torch's that is repeated over the holders of its pieces.

    Each of them knows the ranks that it shards with itself. `asked` has the answers, by the ranks.
    """
    holders = frozenset(
        rank for view in owned.views for piece in view.pieces for rank in piece.holders
    )
    if holders not in asked:
        sharding = sharding_of(unit)
        assert sharding is not None and sharding.process_group is not None
        group = dist.get_process_group_ranks(sharding.process_group)
        world = world_of_members(tuple(sorted(holders)))
        reports = world.gather("shard groups", json.dumps(group).encode())
        asked[holders] = frozenset(rank for part in reports for rank in json.loads(part))
    return asked[holders]


def _widest(groups: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Those of the groups that are in no other one, in one order on all ranks."""
    several = set(groups)
    return sorted((one for one in several if not any(one < other for other in several)), key=sorted)


def _refuse_overlap(declared: _Declared, phase: str) -> NoReturn:
    """Raise on all ranks of the groups that this rank is in, which all call, each among its own."""
    # One order on all ranks, so that ranks in two groups do not wait for each other crosswise.
    widest = _widest(declared.of_units)
    error = InvalidState([_overlap(widest, declared.of_units)])
    agreed: list[CheckpointError] = []
    for group in widest:
        try:
            world_of_members(tuple(sorted(group))).agree(phase, error)
        except CheckpointError as raised:
            agreed.append(raised)
    raise agreed[0]


def _overlap(groups: Sequence[frozenset[int]], names: dict[frozenset[int], str]) -> str:
    one, other = (f"{names[group]} over ranks {sorted(group)}" for group in groups[:2])
    return (
        f"{one} and {other}: the groups overlap at rank {dist.get_rank()}, and no unit is laid out "
        "over both, so that ranks would wait for different ones. Pass process_group= with all "
        "ranks that share the model"
    )
