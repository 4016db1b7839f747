"""State dicts of optimizers, keyed by the ids that torch counts or by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from ckpt.state.describe import members_of
from ckpt.state_dict.listed import ListedParams


def rekey_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    to: Literal["fqn", "id"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | ListedParams,
) -> dict[str, Any]:
    """`state_dict`, as `optimizer.state_dict()` gives it, keyed by names or by ids.

    Names are those on the bare `model`; ids count the parameters of `optimizer`, group by group.
    State and hyperparameters are those of `state_dict`, not copies. Names keep the order of the
    ids; ids ascend, and their groups stand in the order of the optimizer's, so that
    `optimizer.load_state_dict`, which goes by position, gives each parameter its own state,
    whatever order the names had. A dict that is keyed as wanted comes back equal. Raises Mismatch
    when keys are of both kinds, or unknown, or when no order of the groups would load right.
    """
    names = _names_by_id(model, optimizer)
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    is_named = _is_named(keys)
    is_as_wanted = is_named is None or is_named == (to == "fqn")
    # Keys of a dict that is as wanted are looked up too: unknown ones are refused all the same.
    wanted: Mapping[Any, Any]
    if is_as_wanted:
        wanted = {key: key for pair in names.items() for key in pair}
    elif to == "fqn":
        wanted = names
    else:
        wanted = {name: number for number, name in names.items()}
    unknown = list(dict.fromkeys(key for key in keys if key not in wanted))
    if unknown:
        raise Mismatch(
            [
                f"{key}: the optimizer of this model has no such parameter; pass the model and the "
                "optimizer that the state dict is for"
                for key in unknown
            ]
        )
    groups = [
        {**group, "params": [wanted[key] for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    if to == "id" and not is_as_wanted:
        groups = _as_loaded(groups, optimizer, names)
    return {
        "state": {wanted[key]: state for key, state in state_dict["state"].items()},
        "param_groups": groups,
    }


def _as_loaded(
    groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer | ListedParams,
    names: Mapping[int, str],
) -> list[dict[str, Any]]:
    """Groups of ids in the order in which `optimizer.load_state_dict` pairs them with its own.

    Groups of other parameters than the optimizer's keep their order where it refuses them by their
    sizes. Raises Mismatch where it would not.
    """
    groups = [{**group, "params": sorted(group["params"])} for group in groups]
    if isinstance(optimizer, ListedParams):  # it has no groups of its own to go by
        return groups
    live: list[range] = []
    for group in optimizer.param_groups:
        start = live[-1].stop if live else 0
        live.append(range(start, start + len(group["params"])))
    by_ids = {tuple(group["params"]): group for group in groups}
    if len(by_ids) == len(live) and all(tuple(ids) in by_ids for ids in live):
        return [by_ids[tuple(ids)] for ids in live]
    if [len(group["params"]) for group in groups] != [len(ids) for ids in live]:
        return groups  # torch's `load_state_dict` compares these sizes, and refuses them
    odd = [n for n, ids in enumerate(live) if groups[n]["params"] != [*ids]]
    if not odd:
        return groups
    number = odd[0]
    raise Mismatch(
        [
            f"param group {number}: the state dict has {_shown(groups[number]['params'], names)}, "
            f"the optimizer {_shown(live[number], names)}: loaded by position, state would go to "
            "other parameters; make the optimizer with the groups that the state dict has"
        ]
    )


def _shown(ids: Sequence[int], names: Mapping[int, str]) -> str:
    shown = ", ".join(names[number] for number in ids[:4])
    return f"{shown}, ..." if len(ids) > 4 else shown


def _names_by_id(
    model: nn.Module, optimizer: torch.optim.Optimizer | ListedParams
) -> dict[int, str]:
    layout = describe_module(model, Ranks.alone())
    names: dict[int, str] = {}
    problems: list[str] = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        # Each parameter adds to one of the two: this is its id.
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


def _is_named(keys: Sequence[Any]) -> bool | None:
    """Whether keys are names; None when there are no keys. Raises Mismatch for a mixture."""
    kinds = {type(key) for key in keys}
    if kinds <= {str} or kinds <= {int}:
        return str in kinds if kinds else None
    shown = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise Mismatch([f"the state dict has keys of types {shown}; use names or ids throughout"])
