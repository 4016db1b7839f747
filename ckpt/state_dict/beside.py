"""The part of an optimizer's state dict that is a rank's own: parameters beside units, and groups.

No engine shares such a parameter with another rank, so ranks may have other ones, of other shapes,
under other names. See `Unshared`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.state.describe import Described, DescribedTensor
from ckpt.state.optimizer import options_of
from ckpt.state.own import copy_of
from ckpt.world.base import World

__all__ = ["Rest", "copied", "is_beside", "separate"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rest:
    """This rank's own part of a state dict: state by parameter, and all groups; live, no copies."""

    state: dict[str, dict[Any, Any]]
    groups: list[dict[str, Any]]

    def copied_state(self, *, to_cpu: bool) -> dict[str, Any]:
        """The state by parameter, in memory of its own."""
        return {name: copied(self.state[name], to_cpu=to_cpu) for name in self.state}

    def copied_groups(self) -> list[dict[str, Any]]:
        """The groups with copies of what is in them."""
        return [copy.deepcopy(group) for group in self.groups]

    def keep_those_of_first(self, world: World) -> None:
        """Leave the state of parameters of which the first rank has some. Collective.

        Raises Mismatch on all ranks when one lacks state that the first has.
        """
        reports = world.gather("beside", encode_values(sorted(self.state)))
        wanted, *others = [decode_values(report) for report in reports]
        problems = [
            f"{name}: no engine shares it, the first rank has state of it and rank {rank} has "
            "none; step it there too, or wrap with use_orig_params=True, where each rank has its "
            "own"
            for rank, names in enumerate(others, start=1)
            for name in wanted
            if name not in names
        ]
        if problems:
            raise Mismatch(problems)
        for name in [name for name in self.state if name not in wanted]:
            logger.warning(
                "%s: the first rank has no such parameter with state: its state is left out; "
                "use_orig_params=True keeps what each rank has",
                name,
            )
            del self.state[name]


def separate(view: Any, described: Described) -> Rest:
    """Take the rank's own state and all groups out of `view`; what ranks share is left, in one
    group without options.
    """
    state: dict[str, dict[Any, Any]] = {}
    groups: list[dict[str, Any]] = []
    shared: list[torch.Tensor] = []
    for group in view.param_groups:
        names: list[str] = []
        for param in group["params"]:
            source = described.by_param[id(param)]
            names += [member.fqn for member in source.members]
            if not is_beside(source):
                shared.append(param)
            elif own_state := view.state.pop(param, None):
                state[names[-1]] = own_state  # it is whole, so it has one member: the last name
        groups.append({"params": names, **options_of(group)})
    view.param_groups = [{"params": shared}]
    return Rest(state, groups)


def is_beside(source: DescribedTensor) -> bool:
    """Whether the parameter is whole here, and no engine shares it with another rank."""
    return source.owned.owners == () and source.owned.is_whole


def copied(state: Mapping[Any, Any], *, to_cpu: bool = False) -> dict[Any, Any]:
    """The state of one parameter, in memory of its own."""
    return {
        name: copy_of(item, to_cpu=to_cpu)
        if isinstance(item, torch.Tensor)
        else copy.deepcopy(item)
        for name, item in state.items()
    }
