"""Reading a state dict of optimizers: its keys become names, its tensors holdings."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.layout.composites import is_composite
from ckpt.layout.holdings import form_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.region import Shape
from ckpt.layout.sharded_tensor import is_sharded_tensor, is_tensor
from ckpt.layout.tensor import is_dtensor
from ckpt.state.describe import Described
from ckpt.state.names import bare_name
from ckpt.state.optimizer import named_groups, options_of
from ckpt.state.own import own_state
from ckpt.state.values import split_tree
from ckpt.state_dict.beside import copied, is_beside
from ckpt.state_dict.model import names_of
from ckpt.state_dict.optimizer_keys import check_keys, nested
from ckpt.state_dict.optimizers import GROUPS, OWN, OWN_KEYS, STATE, Optimizers

__all__ = ["DictReader", "GivenState", "live_names"]


@dataclass(slots=True)
class GivenState:
    """What one rank's dict has: tensors as holdings, values, the user's own state.

    `own` is what the rank had for itself. `odd` has digests of plain tensors of another shape than
    their parameter: nothing says what a shard of them would be, so all ranks must give the same.
    `beside` is the state of parameters that no engine shares.
    """

    held: list[Holding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, bytes] = field(default_factory=dict)
    beside: dict[str, dict[Any, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DictReader:
    """Reads a state dict for `optimizers` of a model that is `described`.

    With `keeps_own`, state of parameters that no engine shares, and the options of groups, are not
    held for others: they are this rank's own.
    """

    optimizers: Optimizers
    described: Described
    ranks: Ranks
    keeps_own: bool

    def read(self, state_dict: Mapping[str, Any]) -> GivenState:
        """The dict of this rank. Raises Mismatch with everything that cannot be read."""
        read = GivenState()
        names = live_names(self.optimizers, self.described)
        known = {*names, *names_of(self.described)}
        state_dict = nested(state_dict, known)
        if not state_dict:
            return read
        if "state" not in state_dict:
            raise Mismatch(
                ['the dict has no "state"; pass what optimizer_state_dict() or state_dict() gives']
            )
        key_of = self.key_names(state_dict, known, read.problems)
        groups = [
            self.read_group(index, group, key_of, read)
            for index, group in enumerate(state_dict.get("param_groups", ()))
        ]
        if "param_groups" in state_dict:
            read.values[GROUPS] = groups
        listed = {name for group in groups for name in group["params"]} | known
        shapes = self.shapes()
        description = {bare_name(key, known): own for key, own in state_dict.get(OWN, {}).items()}
        beside = self.names_beside() & names if self.keeps_own else set()
        for key, state in state_dict["state"].items():
            name = key_of.get(key, key)
            if name in listed and isinstance(state, Mapping):
                own = description.get(name, {})
                # What says its layout, or is described, can be loaded without being a rank's own.
                if name in beside and not own and not any(map(_tells_layout, state.values())):
                    read.beside[name] = copied(state)
                    continue
                for part, content in state.items():
                    if part in own:
                        self.read_own(read, name, str(part), content, own[part])
                    else:
                        self.read_state(read, name, str(part), content, shapes.get(name))
            else:
                read.user[key] = state
        if read.problems:
            raise Mismatch(read.problems)
        return read

    def key_names(
        self, state_dict: Mapping[str, Any], known: Collection[str], problems: list[str]
    ) -> dict[Any, str]:
        """The bare name for each key that stands for a parameter."""
        groups = state_dict.get("param_groups", ())
        keys = [key for group in groups for key in group["params"]]
        if check_keys(state_dict) is not int:
            names = [*keys, *(key for key in state_dict["state"] if isinstance(key, str))]
            return {key: bare_name(key, known) for key in names}
        # torch counts a flat parameter as one: its number stands for no single name.
        numbered: dict[Any, str] = {}
        number = 0
        for optimizer in self.optimizers:
            for group in named_groups(optimizer, self.described):
                for named in group:
                    if len(named.names) == 1:
                        numbered[number] = named.names[0]
                    number += 1
        for key in dict.fromkeys([*keys, *state_dict["state"]]):
            if type(key) is int and key not in numbered:
                problems.append(
                    f"{key}: no single parameter of the optimizer has this number (it has {number},"
                    " a flat parameter stands for several names); give the dict names with "
                    "rekey_optimizer_state_dict on the bare model"
                )
        return numbered

    def read_group(
        self, index: int, group: Mapping[str, Any], key_of: Mapping[Any, str], read: GivenState
    ) -> dict[str, Any]:
        hyper = options_of(group)
        params = [key_of[key] for key in group["params"] if key in key_of]
        if self.keeps_own:
            return {"params": params, **copy.deepcopy(hyper)}
        value, tensors = split_tree(hyper, f"{GROUPS}.{index}", read.problems)
        for fqn, tensor in tensors:
            self.hold(read, fqn, tensor, None)
        return {"params": params, **(value or {})}

    def read_state(
        self, read: GivenState, param: str, name: str, content: Any, shape: Shape | None
    ) -> None:
        fqn = f"{STATE}{param}.{name}"
        if is_tensor(content) and (is_sharded_tensor(content) or not is_composite(content)):
            holdings = self.hold(read, fqn, content, shape)
            if shape is None or not all(holding.is_unshared for holding in holdings):
                return  # its layout says what of it is where
            if content.ndim and tuple(content.shape) != shape:
                # Nobody knows what a shard of it would be: all ranks have to give the same one.
                read.odd[fqn] = _digest(content)
            return
        value, tensors = split_tree(content, fqn, read.problems)
        read.values[fqn] = value
        for tensor_fqn, tensor in tensors:
            self.hold(read, tensor_fqn, tensor, None)

    def read_own(
        self, read: GivenState, param: str, name: str, content: Any, description: Mapping[str, Any]
    ) -> None:
        fqn = f"{STATE}{param}.{name}"
        split = split_tree(content, fqn, read.problems)
        own = own_state(fqn, param, name, split, self.ranks)
        if description.keys() != set(OWN_KEYS):
            read.problems.append(f"{fqn}: the dict has {sorted(description)} of it, not {OWN_KEYS}")
            return
        own.entry.update(description)
        read.own[fqn] = own.entry
        read.held += own.holdings(self.ranks)

    def hold(self, read: GivenState, fqn: str, content: Any, shape: Shape | None) -> list[Holding]:
        try:
            holdings = form_holdings(fqn, content, Kind.OPTIMIZER, self.ranks, shape=shape)
        except UnsupportedTensor as refused:
            read.problems.append(refused.problem)
            return []
        read.held += holdings
        return holdings

    def names_beside(self) -> set[str]:
        """The parameters that no engine shares with another rank."""
        return {
            member.fqn
            for source in self.described.params
            if is_beside(source)
            for member in source.members
        }

    def shapes(self) -> dict[str, Shape]:
        return {
            member.fqn: member.global_shape
            for source in self.described.params
            for member in source.members
        }


def live_names(optimizers: Optimizers, described: Described) -> set[str]:
    """The names of all parameters of `optimizers`."""
    return {
        name
        for optimizer in optimizers
        for group in named_groups(optimizer, described)
        for named in group
        for name in named.names
    }


def _tells_layout(content: Any) -> bool:
    return is_sharded_tensor(content) or is_dtensor(content)


def _digest(tensor: torch.Tensor) -> bytes:
    # With dtype and shape: equal bytes of another shape are another tensor.
    digest = hashlib.sha256(repr((tensor.dtype, tuple(tensor.shape))).encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
