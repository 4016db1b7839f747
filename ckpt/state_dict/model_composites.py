"""Tensors of a model that consist of others: in state dicts under their own names, as they are.

In the FULL form their components are exchanged like other tensors, and put together. In the other
forms each rank gives what it has: a copy of a whole one, or a DTensor over a copy of its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import InvalidState
from ckpt.layout.component_shards import ComponentShard, copy_of_shard
from ckpt.state.describe import Described
from ckpt.state.own import copy_of
from ckpt.state.values import join_tree, split_tree
from ckpt.state_dict.config import StateDictType


@dataclass(frozen=True, slots=True)
class _ModelComposite:
    """A composite of the model: its description, and its components as this rank has them."""

    tensor: torch.Tensor
    description: dict[str, Any]
    components: Mapping[str, torch.Tensor]

    @property
    def is_cut(self) -> bool:
        return any(isinstance(part, ComponentShard) for part in self.components.values())


@dataclass(frozen=True, slots=True)
class ModelComposites:
    """The composites of a model by name, for a state dict of one form."""

    of_name: Mapping[str, _ModelComposite]
    form: StateDictType

    @property
    def not_exchanged(self) -> set[str]:
        """The names of components that no other rank gives anything for."""
        if self.form is StateDictType.FULL:
            return set()
        return {name for one in self.of_name.values() for name in one.components}

    def names(self, names: Iterable[str]) -> list[str]:
        """`names` of tensors with each composite instead of its components."""
        outer = {name: fqn for fqn, one in self.of_name.items() for name in one.components}
        return list(dict.fromkeys(outer.get(name, name) for name in names))

    def joined(self, tensors: Mapping[str, torch.Tensor], *, to_cpu: bool) -> dict[str, Any]:
        """The composites, over components in `tensors`, or over copies of this rank's."""
        made = {}
        for fqn, one in self.of_name.items():
            if self.form is StateDictType.LOCAL and not to_cpu:
                made[fqn] = one.tensor.detach()  # live memory, as all of that form
                continue
            parts = tensors
            if self.form is not StateDictType.FULL:
                parts = {name: _copied(part, to_cpu) for name, part in one.components.items()}
            made[fqn] = join_tree(one.description, parts.__getitem__)
        return made


def composites_of(described: Described, form: StateDictType) -> ModelComposites:
    """Those of a model. Raises InvalidState for what cannot be in a dict of this form."""
    problems: list[str] = []
    of_name = {}
    for fqn, tensor in described.composites.items():
        description, components = split_tree(tensor, fqn, problems)
        one = of_name[fqn] = _ModelComposite(tensor, description, dict(components))
        if one.is_cut and form is StateDictType.LOCAL:
            problems.append(
                f"{fqn}: is a DTensor, which has no LOCAL form; use StateDictType.SHARDED"
            )
    if problems:
        raise InvalidState(problems)
    return ModelComposites(of_name, form)


def tied_composites(described: Described) -> dict[str, str]:
    """Further names of composites: the names of their components alone are known as tied."""
    outer = {name: fqn for fqn in described.composites for name in described.components_of(fqn)}
    return {
        alias.removesuffix(stored.removeprefix(fqn)): fqn
        for alias, stored in described.aliases.items()
        if (fqn := outer.get(stored)) is not None
    }


def given_composite(
    fqn: str, tensor: torch.Tensor, problems: list[str]
) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]:
    """The description of a composite of a dict, and its components by name."""
    value, components = split_tree(tensor, fqn, problems)
    return value or {}, components


def _copied(part: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    if isinstance(part, ComponentShard):
        return copy_of_shard(part)
    return copy_of(part, to_cpu=to_cpu)
