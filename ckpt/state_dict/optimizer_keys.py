"""The keys of optimizers' state dicts: names or ids, nested or joined with dots."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.state.names import split_state_name


def check_keys(state_dict: Mapping[str, Any]) -> type | None:
    """The type of the keys of `state_dict`; None without keys. Raises Mismatch when mixed."""
    groups = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    state = state_dict.get("state", {})
    # Groups decide: state may have keys of the user's own, of any type, beside the parameters'.
    kinds = {type(key) for key in groups} or {type(key) for key in state if type(key) is int}
    if not groups and not kinds:
        kinds = {type(key) for key in state}
    if len(kinds) > 1 or (kinds == {str} and any(type(key) is int for key in state)):
        names = [repr(key) for key in (*groups, *state)]
        shown = sorted({name.__name__ for name in kinds | {type(key) for key in state}})
        raise Mismatch(
            [
                f"keys of types {', '.join(shown)} in one dict ({', '.join(names[:6])} ...); use "
                "names or ids throughout, see rekey_optimizer_state_dict"
            ]
        )
    return kinds.pop() if kinds else None


def nested(state_dict: Mapping[str, Any], params: Collection[str]) -> Mapping[str, Any]:
    """A dict whose keys are joined with dots, as torch can give it, with its levels put back.

    Any other comes back as it is. Groups are made of parameters whose hyperparameters are equal.
    """
    if (
        not state_dict
        or "state" in state_dict
        or not all(
            isinstance(key, str) and key.startswith(("state.", "param_groups."))
            for key in state_dict
        )
    ):
        return state_dict
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    known = frozenset(params)
    for key, content in state_dict.items():
        kind, _, rest = key.partition(".")
        head, name = split_state_name(rest, known) or _last_part(rest)
        (state if kind == "state" else hyper).setdefault(head, {})[name] = content
    # Which groups there were is lost in such a dict; of equal options it makes no difference.
    groups: list[dict[str, Any]] = []
    for param, options in hyper.items():
        for group in groups:
            if _same_hyper({k: v for k, v in group.items() if k != "params"}, options):
                group["params"].append(param)
                break
        else:
            groups.append({**options, "params": [param]})
    return {"state": state, "param_groups": groups}


def _last_part(name: str) -> tuple[str, str]:
    """How to cut a name whose parameter is not known: most names of states have no dot."""
    head, _, tail = name.rpartition(".")
    return head, tail


def _same_hyper(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        for key in a
    )
