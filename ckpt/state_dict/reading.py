"""Reading state dicts of any form: their keys become names, their tensors holdings."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.layout.composites import is_composite
from ckpt.layout.holdings import form_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.region import Shape
from ckpt.layout.sharded_tensor import is_sharded_tensor, is_tensor
from ckpt.layout.tensor import is_dtensor
from ckpt.state.describe import Described, LogicalTensor
from ckpt.state.names import bare_name, bare_names
from ckpt.state.optimizer import NamedParam, named_groups, options_of
from ckpt.state.optimizer_kinds import own_state, state_name
from ckpt.state.types import LoadRequest
from ckpt.state.values import split_tree
from ckpt.state_dict.keys import kind_of_keys, nested
from ckpt.state_dict.model import buffer_dtypes, describe_model, is_beside, names_of
from ckpt.state_dict.out import GROUPS, OWN, OWN_KEYS, STATE, Optimizers, copied

EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class GivenModel:
    """What one rank's dict has, and the model that it is for, with its tensors by name.

    `extra` are the extra states of the dict, `extra_states` the modules that have some.
    `composites` are descriptions of what consists of other tensors, which are held.
    """

    described: Described
    members: Mapping[str, LogicalTensor]
    extra_states: Mapping[str, nn.Module]
    held: list[Holding] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    composites: dict[str, Any] = field(default_factory=dict)


def read_model(
    model: nn.Module, state_dict: Mapping[str, Any], ranks: Ranks, request: LoadRequest
) -> GivenModel:
    """This rank's dict. Raises Mismatch with everything that is no tensor."""
    described = describe_model(model, ranks, loading=True)
    members = {
        fqn: member
        for source, _ in described.tensors()
        for member, fqn in zip(source.members, source.fqns, strict=True)
    }
    given = GivenModel(described, members, dict(described.extra_states))
    live_dtypes = {
        fqn: source.owned.local.dtype for source in described.buffers for fqn in source.fqns
    }
    recast = buffer_dtypes(described)
    problems: list[str] = []
    known = {*members, *described.tied, *given.extra_states, *described.composites}
    for fqn, value in bare_names(state_dict, known).items():
        # By its ending too: extra state that this model has no place for is no wrong tensor.
        if fqn in given.extra_states or fqn.rpartition(".")[2] == EXTRA_STATE:
            given.extra[fqn] = value
            continue
        if not is_tensor(value):
            problems.append(
                f"{fqn}: is a {type(value).__name__}, expected a tensor, a DTensor or a "
                "ShardedTensor"
            )
            continue
        if not is_sharded_tensor(value) and is_composite(value):
            description, components = split_tree(value, fqn, problems)
            given.composites[fqn] = description or {}
            for name, part in components:
                given.held.extend(form_holdings(name, part, Kind.OTHER, ranks, shape=None))
            continue
        # A dict has buffers in their own dtype, a unit with mixed precision has them in another.
        if fqn in recast and isinstance(value, torch.Tensor) and value.dtype is recast[fqn]:
            value = value.to(live_dtypes[fqn])
        member = members.get(fqn)
        if request.cast and member and member.global_shape == () and value.shape == (1,):
            value = value.squeeze(0)  # how torch before 0.4 stored them
        # A tied name stands for the shape of the tensor that it is tied to.
        stored = members.get(described.aliases.get(fqn, fqn))
        shape = None if stored is None else stored.global_shape
        try:
            parts = form_holdings(fqn, value, Kind.OTHER, ranks, shape=shape)
        except UnsupportedTensor as refused:
            problems.append(refused.problem)
            continue
        if request.cast and member:
            parts = [_recast(part, member.dtype) for part in parts]
        given.held.extend(parts)
    if problems:
        raise Mismatch(problems)
    return given


def _recast(holding: Holding, dtype: torch.dtype) -> Holding:
    """The holding with values of `dtype`, as `copy_` makes them; itself if they are."""
    if holding.local.dtype is dtype:
        return holding
    local = torch.empty_like(holding.local, dtype=dtype).copy_(holding.local)
    pieces = tuple(piece._replace(dtype=dtype) for piece in holding.pieces)
    return holding._replace(local=local, pieces=pieces)


@dataclass(slots=True)
class GivenState:
    """What one rank's dict has for optimizers of a model that is `described`: tensors as holdings,
    values, the user's own state.

    `own` is what the rank had for itself. `odd` has digests of plain tensors of another shape than
    their parameter: nothing says what a shard of them would be, so all ranks must give the same.
    With `keeps_own`, the state of parameters that no engine shares, which is in `beside`, and the
    options of groups are not held for others: they are this rank's own.
    """

    described: Described
    ranks: Ranks
    keeps_own: bool
    held: list[Holding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, bytes] = field(default_factory=dict)
    beside: dict[str, dict[Any, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self, optimizers: Optimizers, state_dict: Mapping[str, Any]) -> None:
        """Add the dict of this rank. Raises Mismatch with everything that cannot be read."""
        names = live_names(optimizers, self.described)
        known = {*names, *names_of(self.described)}
        state_dict = nested(state_dict, known)
        if not state_dict:
            return
        if "state" not in state_dict:
            raise Mismatch(
                ['the dict has no "state"; pass what optimizer_state_dict() or state_dict() gives']
            )
        name_of = self.names_by_key(optimizers, state_dict, known)
        groups = [
            self.group(index, group, name_of)
            for index, group in enumerate(state_dict.get("param_groups", ()))
        ]
        if "param_groups" in state_dict:
            self.values[GROUPS] = groups
        listed = {name for group in groups for name in group["params"]} | known
        description = {bare_name(key, known): own for key, own in state_dict.get(OWN, {}).items()}
        params = {m.fqn: (m, one.owned) for one in self.described.params for m in one.members}
        for key, state in state_dict["state"].items():
            # A key that no group lists may be a name, or the user's own.
            name = name_of.get(key, key)
            if name not in listed or not isinstance(state, Mapping):
                self.user[key] = state
                continue
            own, param = description.get(name, {}), params.get(name)
            # What says its layout, or is described, can be loaded without being a rank's own.
            if (
                (self.keeps_own and name in names and param is not None and is_beside(param[1]))
                and not own
                and not any(is_sharded_tensor(one) or is_dtensor(one) for one in state.values())
            ):
                self.beside[name] = copied(state)
                continue
            shape = None if param is None else param[0].global_shape
            for part, content in state.items():
                if part in own:
                    self.hold_own(name, state_name(part) or str(part), content, own[part])
                else:
                    self.hold_state(f"{STATE}{name}.{state_name(part) or part}", content, shape)
        if self.problems:
            raise Mismatch(self.problems)

    def names_by_key(
        self, optimizers: Optimizers, state_dict: Mapping[str, Any], known: Collection[str]
    ) -> dict[Any, str]:
        """The bare name for each key that stands for a parameter."""
        groups = state_dict.get("param_groups", ())
        keys = [key for group in groups for key in group["params"]]
        if kind_of_keys(state_dict) is not int:
            names = [*keys, *(key for key in state_dict["state"] if isinstance(key, str))]
            return {key: bare_name(key, known) for key in names}
        params = _named_params(optimizers, self.described)
        # torch counts a flat parameter as one: its number stands for no single name.
        numbered: dict[Any, str] = {
            number: named.names[0] for number, named in enumerate(params) if len(named.names) == 1
        }
        self.problems += [
            f"{key}: no single parameter of the optimizer has this number (it has {len(params)}, "
            "a flat parameter stands for several names); give the dict names with "
            "rekey_optimizer_state_dict on the bare model"
            for key in dict.fromkeys([*keys, *state_dict["state"]])
            if type(key) is int and key not in numbered
        ]
        return numbered

    def group(
        self, index: int, group: Mapping[str, Any], name_of: Mapping[Any, str]
    ) -> dict[str, Any]:
        """A group with the names of its parameters, and its options as a value."""
        params = [name_of[key] for key in group["params"] if key in name_of]
        own, fqn = options_of(group), f"{GROUPS}.{index}"
        options = copy.deepcopy(own) if self.keeps_own else self.split(own, fqn) or {}
        return {"params": params, **options}

    def hold_state(self, fqn: str, content: Any, shape: Shape | None) -> None:
        """State of a parameter of `shape`."""
        if not is_tensor(content) or (not is_sharded_tensor(content) and is_composite(content)):
            self.values[fqn] = self.split(content, fqn)
            return
        holdings = self.hold(fqn, content, shape)
        if shape is None or not all(holding.is_unshared for holding in holdings):
            return  # its layout says what of it is where
        if content.ndim and tuple(content.shape) != shape:
            # Nobody knows what a shard of it would be: all ranks have to give the same one. With
            # dtype and shape: equal bytes of another shape are another tensor.
            digest = hashlib.sha256(repr((content.dtype, tuple(content.shape))).encode())
            row = content.detach().cpu().contiguous().reshape(-1)
            digest.update(row.view(torch.uint8).numpy().data)
            self.odd[fqn] = digest.digest()

    def hold_own(self, param: str, name: str, content: Any, description: Mapping[str, Any]) -> None:
        """State that the rank which gave the dict had for itself."""
        fqn = f"{STATE}{param}.{name}"
        own = own_state(param, name, split_tree(content, fqn, self.problems), self.ranks)
        if description.keys() != set(OWN_KEYS):
            self.problems.append(f"{fqn}: the dict has {sorted(description)} of it, not {OWN_KEYS}")
            return
        own.entry.update(description)
        self.own[fqn] = own.entry
        self.held += own.holdings(self.ranks)

    def split(self, tree: Any, fqn: str) -> Any:
        """`tree` as a value; the tensors in it are held."""
        value, tensors = split_tree(tree, fqn, self.problems)
        for name, tensor in tensors:
            self.hold(name, tensor, None)
        return value

    def hold(self, fqn: str, content: Any, shape: Shape | None) -> list[Holding]:
        """The tensor as holdings, which are added."""
        try:
            holdings = form_holdings(fqn, content, Kind.OPTIMIZER, self.ranks, shape=shape)
        except UnsupportedTensor as refused:
            self.problems.append(refused.problem)
            return []
        self.held += holdings
        return holdings


def live_names(optimizers: Optimizers, described: Described) -> set[str]:
    """The names of all parameters of `optimizers`."""
    return {name for named in _named_params(optimizers, described) for name in named.names}


def _named_params(optimizers: Optimizers, described: Described) -> list[NamedParam]:
    groups = (group for one in optimizers for group in named_groups(one, described))
    return [named for group in groups for named in group]
