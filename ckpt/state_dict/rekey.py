"""State dicts of optimizers, keyed by the ids that torch counts or by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from ckpt.state_dict.describe import members_of


def rekey_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    to: Literal["fqn", "id"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """`state_dict`, as `optimizer.state_dict()` gives it, keyed by names or by ids.

    Names are those on the bare `model`; ids count the parameters of `optimizer`, group by group.
    State and hyperparameters are those of `state_dict`, not copies; "params" keep their order. A
    dict that is keyed as wanted comes back equal. Raises Mismatch when keys are of both kinds, or
    unknown.
    """
    names = _names_by_id(model, optimizer)
    is_named = _is_named(state_dict)
    wanted: Mapping[Any, Any]
    if is_named is None or is_named == (to == "fqn"):
        wanted = {key: key for pair in names.items() for key in pair}
    elif to == "fqn":
        wanted = names
    else:
        wanted = {name: number for number, name in names.items()}
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    unknown = list(dict.fromkeys(key for key in keys if key not in wanted))
    if unknown:
        raise Mismatch(
            [
                f"{key}: the optimizer of this model has no such parameter; pass the model and the "
                "optimizer that the state dict is for"
                for key in unknown
            ]
        )
    return {
        "state": {wanted[key]: state for key, state in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [wanted[key] for key in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


def _names_by_id(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    layout = describe_module(model, Ranks.alone())
    names: dict[int, str] = {}
    problems: list[str] = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        number = len(names) + len(problems)
        owned = layout.owned_by_param.get(id(param))
        members = () if owned is None else members_of(owned)
        if len(members) == 1:
            names[number] = members[0].fqn
        elif members:
            problems.append(
                f"parameter {number}: is a flat parameter of {[m.fqn for m in members]}; pass "
                "the bare model and its optimizer, or wrap with use_orig_params=True"
            )
        else:
            problems.append(
                f"parameter {number}: of shape {tuple(param.shape)} is not in the model; pass "
                "the model whose parameters the optimizer has"
            )
    if problems:
        raise Mismatch(problems)
    return names


def _is_named(state_dict: Mapping[str, Any]) -> bool | None:
    """Whether keys are names; None when there are no keys."""
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    kinds = {type(key) for key in keys}
    if kinds <= {str} or kinds <= {int}:
        return str in kinds if kinds else None
    shown = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise Mismatch([f"the state dict has keys of types {shown}; use names or ids throughout"])
