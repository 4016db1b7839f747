"""What state dicts ask of a model: its tensors by bare name, its units, the ranks that share it."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ckpt.errors import CheckpointError, InvalidState
from ckpt.layout.modules import ModuleLayout, describe_module
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import UnitSharding, sharding_of
from ckpt.layout.tensor import is_dtensor
from ckpt.layout.torch_fsdp import is_fsdp1
from ckpt.process import world_of, world_of_members
from ckpt.state.describe import Described, describe_modules
from ckpt.state.names import heads
from ckpt.state.values import join
from ckpt.state.walk import Leaves
from ckpt.world.base import World


def describe_model(model: nn.Module, ranks: Ranks, *, loading: bool) -> Described:
    """The tensors of one module by their bare names. Raises InvalidState with all problems."""
    described = describe_modules(Leaves(modules=[("", model)]), ranks, loading=loading)
    if described.problems:
        raise InvalidState(described.problems)
    return described


def names_of(described: Described) -> list[str]:
    """The names that tensors are stored by: parameters, then buffers."""
    return [fqn for source, _ in described.tensors() for fqn in source.fqns]


def is_beside(owned: Owned) -> bool:
    """Whether a parameter is whole here, and no engine shares it with another rank."""
    return owned.owners == () and owned.is_whole


# --- units ---------------------------------------------------------------------------------------


def shardings(described: Described) -> dict[str, UnitSharding]:
    """What the innermost unit above a tensor says of itself, for each tensor below one."""
    by_path = _unit_shardings(described)
    around = {name: _unit_around(name, by_path) for name in names_of(described) if by_path}
    return {name: by_path[path] for name, path in around.items() if path is not None}


def buffer_dtypes(described: Described) -> dict[str, torch.dtype]:
    """The dtype of buffers in state dicts, where their unit lets them live in another."""
    named = {
        join(path, name): dtype
        for path, sharding in _unit_shardings(described).items()
        for name, dtype in sharding.buffer_dtypes.items()
    }
    # In the order of the model, whatever order its units have.
    buffers = [fqn for source in described.buffers for fqn in source.fqns]
    return {name: named[name] for name in buffers if name in named}


def _unit_shardings(described: Described) -> dict[str, UnitSharding]:
    return {
        name: sharding
        for layout in described.layouts
        for name, unit in layout.units
        if (sharding := sharding_of(unit)) is not None
    }


# --- the ranks that share a model ----------------------------------------------------------------


def ranks_of(world: World) -> Ranks:
    """The same ranks, as layouts know them."""
    return Ranks(world.rank, world.global_ranks)


def world_to_take(model: nn.Module, group: dist.ProcessGroup | None) -> tuple[World, bool]:
    """The ranks that take a state dict of `model` together, and whether this one is the first."""
    members = _members(model, group, "describe")
    if members == ():
        # No engine shares it, so each rank takes its own alone; with `rank0_only` it is still the
        # first of all ranks that gets a dict.
        me = dist.get_rank()
        return world_of_members((me,)), me == 0
    world = world_of(group) if members is None else world_of_members(members)
    world.begin_call("a call for state dicts")
    return world, world.rank == 0


def world_to_load(model: nn.Module, group: dist.ProcessGroup | None) -> World:
    """The ranks that load state dicts into `model` together."""
    members = _members(model, group, "read")
    # A model that no engine shares may be loaded from the dict of another rank: all take part.
    world = world_of_members(members) if members else world_of(group)
    world.begin_call("a load of state dicts")
    return world


def _members(
    model: nn.Module, group: dist.ProcessGroup | None, phase: str
) -> tuple[int, ...] | None:
    """The global ranks over which units, meshes and DDP lay out `model`, ascending.

    Empty for a model that no engine shares with another rank, all ranks where an engine does not
    say. None where `group` says them, and where there are no other ranks. All ranks that share the
    model find the same without a round; but where a unit is repeated over ranks and knows the shard
    group of this rank only, these ranks exchange theirs.

    Raises InvalidState where groups of units overlap and no unit is laid out over both: then the
    ranks would wait for different ones. The ranks of those groups get the error in `phase`, the
    first that they agree on.
    """
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return None
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
    # Those of the groups that are in no other one. In one order on all ranks, so that ranks in two
    # groups do not wait for each other crosswise.
    groups, of_units = declared
    inner = (one for one in of_units if any(one < other for other in of_units))
    widest = sorted(of_units.keys() - inner, key=sorted)
    if len(widest) > 1:
        _refuse_overlap(widest, of_units, phase)
    together = frozenset().union(*groups)
    # A rank may describe a mesh that it is not in: what it has of such a model is its own.
    return tuple(sorted(together)) if me in together else ()


# Groups of ranks that tensors are laid out over; and those that this rank is in and that only their
# own ranks know, each with the name of a tensor.
_Declared = tuple[set[frozenset[int]], dict[frozenset[int], str]]


def _declared_groups(layout: ModuleLayout) -> _Declared | None:
    """None where an engine does not say over which ranks a tensor is laid out."""
    groups: set[frozenset[int]] = set()
    of_units: dict[frozenset[int], str] = {}
    units = dict(layout.units)
    # One round for the tensors of equal ranks, not one for each: all find them in one order.
    asked: dict[frozenset[int], frozenset[int]] = {}
    for owned in (*layout.params, *layout.buffers):
        # A component of which this rank has no elements has no name here.
        name = next(iter(owned.fqns), "")
        unit = _unit_around(name, units)
        if owned.owners is not None:
            group = frozenset(owned.owners)
        elif unit is not None and is_fsdp1(units[unit]):
            group = _group_of_hybrid(owned, units[unit], asked)
        else:
            return None
        groups.add(group)
        # Of meshes without units all ranks may know, also those that are not in them.
        if dist.get_rank() in group and (unit is not None or not is_dtensor(owned.param)):
            of_units.setdefault(group, name)
    for module in units.values():  # also of those whose tensors were refused
        sharding = sharding_of(module)
        if sharding is not None and sharding.process_group is not None:
            groups.add(frozenset(dist.get_process_group_ranks(sharding.process_group)))
    return None if layout.problems and not any(groups) else (groups, of_units)


def _unit_around(name: str, units: Container[str]) -> str | None:
    """The path of the innermost unit around a tensor, "" for the model."""
    return next((path for path in (*heads(name), "") if path in units), None)


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


def _refuse_overlap(
    widest: Sequence[frozenset[int]], names: dict[frozenset[int], str], phase: str
) -> NoReturn:
    """Raise on all ranks of the groups that this rank is in, which all call, each among its own."""
    one, other = (f"{names[group]} over ranks {sorted(group)}" for group in widest[:2])
    error = InvalidState(
        f"{one} and {other}: the groups overlap at rank {dist.get_rank()}, and no unit is laid "
        "out over both, so that ranks would wait for different ones. Pass process_group= with "
        "all ranks that share the model"
    )
    agreed: list[CheckpointError] = []
    for group in widest:
        # The ranks of each group wait in its `agree`, also when that of another has raised.
        try:
            world_of_members(tuple(sorted(group))).agree(phase, error)
        except CheckpointError as raised:
            agreed.append(raised)
    raise agreed[0]
