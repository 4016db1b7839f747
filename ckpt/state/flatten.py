"""From a state to what is saved: memory with pieces, values, tied names. Nothing is copied or
gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState
from ckpt.layout.composites import is_composite
from ckpt.layout.holdings import tensor_holdings, whole_tensors
from ckpt.layout.kind import Kind, is_numbered
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.state.describe import Described, adopt_parameters, describe_modules
from ckpt.state.optimizer import (
    EXTRA_STATE,
    OWN_OPTIONS,
    FlatOptimizer,
    flatten_groups,
    flatten_optimizer,
    own_form,
    params_of,
)
from ckpt.state.optimizer_kinds import declared
from ckpt.state.per_group import NOT_IN_GROUP, SUFFIX, group_of
from ckpt.state.typed_values import tensor_of, why_no_tensor
from ckpt.state.types import FlatState, PerGroup, PerRank
from ckpt.state.values import join, split_tree
from ckpt.state.walk import Leaves, is_object, read_state, walk
from ckpt.world.base import World


@dataclass(frozen=True, slots=True)
class Structure:
    """The part of a state that lasts while it consists of the same objects in the same memory.

    `values_of` adds what changes between saves to what is `kept`. `names` are those of all leaves
    so far, `clashes` those that two of them have.
    """

    kept: _Building
    names: frozenset[str]
    clashes: tuple[str, ...]
    optimizers: tuple[tuple[str, torch.optim.Optimizer, list[list[str]]], ...]
    extra_states: tuple[tuple[str, nn.Module], ...]
    owned_by_param: Mapping[int, Owned]


def flatten_state(state: Any, ranks: Ranks) -> FlatState:
    """`state` as this rank holds it. Every rank calls this with its own state; no rank waits for
    another.

    Raises InvalidState that lists everything that cannot be saved, by fqn. Holdings alias live
    memory.
    """
    leaves = walk(state)
    return values_of(structure_of(leaves, ranks), leaves, ranks, state)


def structure_of(leaves: Leaves, ranks: Ranks) -> Structure:
    """The part of a state that lasts, from its leaves. Problems are kept for `values_of`."""
    described = describe_modules(leaves, ranks, loading=False)
    if leaves.optimizers:  # nothing else looks parameters up by their objects
        adopt_parameters(described, leaves, ranks)
    building = _Building(leaves.problems + described.problems, ranks)
    building.add_tensors(leaves)
    building.add_modules(described)
    optimizers = []
    for path, optimizer in leaves.optimizers:
        flat = flatten_optimizer(path, optimizer, described, ranks)
        building.add_optimizer(path, flat, is_further=False)
        optimizers.append((path, optimizer, flat.groups))
    building.holdings = _agreeing(building.holdings, ranks)
    return Structure(
        building,
        frozenset(building.names),
        tuple(_repeated(building.names)),
        tuple(optimizers),
        tuple(described.extra_states),
        {key: source.owned for key, source in described.by_param.items()},
    )


def values_of(structure: Structure, leaves: Leaves, ranks: Ranks, state: Any) -> FlatState:
    """The whole state: `structure` and what has to be looked at every time. Raises InvalidState."""
    kept = structure.kept
    building = _Building(list(kept.problems), ranks)
    building.values.update(kept.values)
    building.per_rank.update(kept.per_rank)
    paths: set[str] = set()
    for path, optimizer, groups in structure.optimizers:
        if groups:  # none when it was refused
            options, extra = own_form(path, optimizer)
            flat = flatten_groups(path, optimizer, groups, ranks, options, declared(optimizer))
            building.add_optimizer(path, flat, is_further=path in paths)
            paths.add(path)
            building.add_extra_state(path, optimizer, extra, structure.owned_by_param)
    building.add_values(leaves)
    building.add_arrays(leaves)
    building.add_trees(leaves, structure.extra_states)
    building.add_per_rank(leaves)
    # Names of values may be new at every save, so they are compared with those that last.
    clashes = {*structure.clashes, *_repeated(building.names)}
    clashes |= structure.names.intersection(building.names)
    if clashes:
        building.problems += name_clashes(state, sorted(clashes))
    if building.problems:
        raise InvalidState(building.problems)
    return FlatState(
        [*kept.holdings, *_agreeing(building.holdings, ranks)],
        building.values,
        building.per_rank,
        {**kept.aliases, **building.aliases},
        tuple(optimizer for _, optimizer, _ in structure.optimizers),
        structure.owned_by_param,
        tuple(kept.witnesses),
    )


def _agreeing(holdings: list[Holding], ranks: Ranks) -> list[Holding]:
    """`holdings`, of which plain parameters have to be equal on all ranks that have them, and so
    does what only some ranks hold, and what several meshes hold.

    Equal names do not make replicas: each rank may have experts of its own under them. A buffer or
    a tensor by itself that all ranks have and that differs is one that somebody forgot to
    synchronize, or BatchNorm's, which is never equal. But state dicts of optimizers, which number
    parameters on each rank from 0 on, are those of different stages then.
    """
    if len(ranks.global_ranks) == 1:
        return holdings
    return [
        one._replace(must_agree=True)
        if (
            one.is_unshared
            and (
                one.kind is Kind.PARAMETER
                or (one.kind is Kind.OTHER and any(is_numbered(piece.fqn) for piece in one.pieces))
            )
        )
        or (one.is_unshared and ranks.held and any(p.fqn in ranks.held for p in one.pieces))
        or (ranks.copies and any(p.fqn in ranks.copies for p in one.pieces))
        else one
        for one in holdings
    ]


def _repeated(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):  # almost always, and this runs at every save
        return []
    return [name for name, count in Counter(names).items() if count > 1]


@dataclass(slots=True)
class _Building:
    """A FlatState in the making; `names` has one entry per leaf, so that clashes show."""

    problems: list[str]
    ranks: Ranks
    holdings: list[Holding] = field(default_factory=list)
    witnesses: list[Holding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def add_tensors(self, leaves: Leaves) -> None:
        plain, self.aliases, others = whole_tensors(leaves.tensors, self.ranks)
        self.holdings = plain.holdings(kept=True)
        self.names = [fqn for fqn, _ in leaves.tensors]
        for fqn, tensor in others:
            if is_composite(tensor):
                # `add_tree` names it again, with its components.
                self.names.remove(fqn)
                self.add_tree(fqn, tensor, Kind.OTHER)
            else:
                self.add_tensor(fqn, tensor, Kind.OTHER)

    def add_tensor(self, fqn: str, tensor: torch.Tensor, kind: Kind) -> None:
        try:
            self.holdings += tensor_holdings(fqn, tensor, kind, self.ranks)
        except UnsupportedTensor as refused:
            self.problems.append(refused.problem)

    def add_modules(self, described: Described) -> None:
        for source, kind in described.tensors():
            self.names += source.fqns
            self.holdings += source.holdings(kind)
        # An alias takes a name as well: another leaf under it would be a clash.
        self.names += [*described.aliases, *described.composites]
        for fqn, tensor in described.composites.items():
            self.values[fqn] = split_tree(tensor, fqn, self.problems)[0]
        self.aliases.update(described.aliases)

    def add_optimizer(self, path: str, flat: FlatOptimizer, *, is_further: bool) -> None:
        self.problems += flat.problems
        self.holdings += flat.holdings
        self.witnesses += flat.witnesses
        groups = f"{path}.param_groups"
        before = self.values.get(groups) if is_further else None
        self.values.update(flat.values)
        self.names += flat.names
        if before is not None:  # the groups of all stages of this rank, one after the other
            self.values[groups] = [*before, *flat.values[groups]]
            self.names.remove(groups)
        if flat.own_options:
            self.per_rank.setdefault(f"{groups}{OWN_OPTIONS}", []).extend(flat.own_options)
        for fqn, own in flat.own.items():
            self.per_rank[fqn] = own.entry
            self.holdings += own.holdings(self.ranks)

    def add_extra_state(
        self,
        path: str,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any],
        owned: Mapping[int, Owned],
    ) -> None:
        if not extra:
            return
        fqn, before = f"{path}.{EXTRA_STATE}", len(self.holdings)
        self.add_tree(fqn, extra, Kind.OTHER)
        odd = [each for each in self.holdings[before:] if each.local.ndim]
        if odd and not all(owned[id(param)].is_whole for param in params_of(optimizer)):
            # Nothing tells whether they are shards, and of what.
            self.problems.append(
                f"{odd[0].pieces[0].fqn}: {type(optimizer).__qualname__}.state_dict() adds a "
                "tensor of its own, and its parameters are sharded; keep it under the parameter in "
                "optimizer.state, where it is known what it belongs to"
            )

    def add_values(self, leaves: Leaves) -> None:
        for slot in leaves.values:
            self.names.append(slot.fqn)
            self.values[slot.fqn] = split_tree(slot.value, slot.fqn, self.problems)[0]

    def add_arrays(self, leaves: Leaves) -> None:
        for fqn, array in leaves.arrays:
            self.names.append(fqn)
            tensor = tensor_of(array)
            if tensor is None:
                self.problems.append(f"{fqn}: {why_no_tensor(array)}")
            else:
                self.add_tensor(fqn, tensor, Kind.OTHER)

    def add_trees(self, leaves: Leaves, extra_states: Sequence[tuple[str, nn.Module]]) -> None:
        for fqn, thing in leaves.objects:
            if hasattr(thing, "param_groups") and len(self.ranks.global_ranks) > 1:
                # Its tensors may be shards, and would be stored as if all ranks had the same.
                self.problems.append(
                    f"{fqn}: a {type(thing).__qualname__} has param_groups and is no "
                    "torch.optim.Optimizer, so its state cannot be assigned to parameters; put the "
                    "optimizer that it wraps into the state"
                )
                continue
            self.add_tree(fqn, read_state(fqn, thing.state_dict), Kind.OTHER)
        for fqn, module in extra_states:
            self.add_tree(fqn, read_state(fqn, module.get_extra_state), Kind.BUFFER)

    def add_tree(self, fqn: str, tree: Any, kind: Kind) -> None:
        value, tensors = split_tree(tree, fqn, self.problems)
        # A tree that is one tensor has the tensor's name.
        self.names += [fqn, *(name for name, _ in tensors if name != fqn)]
        self.values[fqn] = value
        for name, tensor in tensors:
            self.add_tensor(name, tensor, kind)

    def add_per_rank(self, leaves: Leaves) -> None:
        for slot in leaves.per_rank:
            marked: PerRank | PerGroup = slot.value
            own = marked.value
            if is_object(own):
                own = read_state(slot.fqn, own.state_dict)
            value, tensors = split_tree(own, slot.fqn, self.problems)
            if tensors:
                self.problems.append(
                    f"{tensors[0][0]}: a tensor in a {type(marked).__name__} value; convert it "
                    "with .tolist() or to bytes, or keep the tensor outside"
                )
            self.names.append(slot.fqn)
            if isinstance(marked, PerRank):
                self.per_rank[slot.fqn] = value
            elif (group := group_of(marked, self.ranks)) is None:
                self.problems.append(f"{slot.fqn}: {NOT_IN_GROUP}")
            else:
                size = len(self.ranks.global_ranks)
                self.names.append(name := f"{slot.fqn}{SUFFIX}{group[0]}")
                self.values[name] = {"group": list(group), "world_size": size, "value": value}


def name_clashes(state: Any, twice: Sequence[str]) -> list[str]:
    """One problem for each name that two leaves of `state` would have, naming both places."""
    places = {name: list(_places(state, "", name, "state"))[:2] for name in twice}
    return [
        f"{name}: two leaves of the state have this name ({' and '.join(both)}); rename one of the "
        "keys"
        for name, both in places.items()
    ]


def _places(node: Any, path: str, name: str, shown: str) -> Iterator[str]:
    """Where leaves stand whose names are `name` or a beginning of it: state["a"]["b"]."""
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, (list, tuple)):
        items = list(enumerate(node))
    else:
        yield shown
        return
    for key, child in items:
        child_path = join(path, key)
        if child_path == name or name.startswith(f"{child_path}."):
            yield from _places(child, child_path, name, f"{shown}[{key!r}]")


def nbytes_of(state: Any, world: World) -> int:
    """The bytes of all tensors of `state` that lie on this rank of `world`."""
    flat = flatten_state(state, Ranks(world.rank, world.global_ranks))
    # One memory may lie under several names.
    held = {id(holding.local): holding.local for holding in flat.holdings}
    return sum(local.numel() * local.element_size() for local in held.values())
