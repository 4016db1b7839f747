"""Optimizers whose state dicts are keyed by names of parameters, as `NamedOptimizer`'s are.

A parameter goes by its name in `model.named_parameters()`, or by that name without what wrappers
add to it. Flat parameters have such names too.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.state.names import bare_name
from ckpt.state.optimizer import params_of


def own_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names that the optimizer's own state dict is keyed by; empty when by numbers."""
    # Of its own dict, as only that says which spelling of a name it uses.
    keys = (key for group in optimizer.state_dict()["param_groups"] for key in group["params"])
    return {key for key in keys if isinstance(key, str)}


def by_number(
    state_dict: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """A state dict of this optimizer, keyed by the numbers of parameters instead of their names.

    Keys that are no parameter's name stay, and so does a dict without any.
    """
    names = _names(model)
    number_of: dict[Any, int] = {
        name: number
        for number, param in enumerate(params_of(optimizer))
        for name in names.get(id(param), ())
    }
    return _rekeyed(state_dict, number_of)


def by_name(
    to_load: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: Collection[str],
) -> dict[str, Any]:
    """What an ordinary optimizer would load, keyed by names: those in `wanted`, if there are any.

    Such optimizers want an entry for every parameter: members that have no elements on this rank
    keep the state that the optimizer has. Raises Mismatch for a parameter that is not in the model,
    or has none of the wanted names.
    """
    known, params = _names(model), params_of(optimizer)
    names: dict[Any, str] = {}
    problems = []
    for number, param in enumerate(params):
        spelled = known.get(id(param), [])
        fitting = [name for name in spelled if name in wanted] if wanted else spelled
        if fitting:  # of a tied parameter, the first of its names
            names[number] = fitting[0]
        elif spelled:
            problems.append(
                f"{spelled[-1]}: the optimizer's state dict has no such key, it has "
                f"{sorted(wanted)[:3]}; key it by the names of model.named_parameters()"
            )
        else:
            problems.append(
                f"parameter {number}: of shape {tuple(param.shape)} is not in the model; pass the "
                "model whose parameters the optimizer has"
            )
    if problems:
        raise Mismatch(problems)
    named = _rekeyed(to_load, names)
    for number, param in enumerate(params):
        own = optimizer.state.get(param)
        if own and not param.numel():
            named["state"].setdefault(names[number], copy.deepcopy(own))
    return named


def _rekeyed(state_dict: Mapping[str, Any], key_of: Mapping[Any, Any]) -> dict[str, Any]:
    """The dict by other keys; those that have none stay, such as state of the user's own."""
    state = {key_of.get(key, key): value for key, value in state_dict["state"].items()}
    rekeyed: dict[str, Any] = {**state_dict, "state": state}
    if "param_groups" in state_dict:
        rekeyed["param_groups"] = [
            {**group, "params": [key_of.get(key, key) for key in group["params"]]}
            for group in state_dict["param_groups"]
        ]
    return rekeyed


def _names(model: nn.Module) -> dict[int, list[str]]:
    """By identity of the parameter, its names as they are, then bare."""
    # All names of a tied parameter: the optimizer may use any of them.
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {
        key: list(dict.fromkeys([*spelled, *(bare_name(name, ()) for name in spelled)]))
        for key, spelled in names.items()
    }
