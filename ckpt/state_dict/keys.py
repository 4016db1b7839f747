"""The keys of optimizers' state dicts: names or the ids that torch counts, nested or joined.

Some optimizers, `NamedOptimizer` for one, key their own dicts by names of parameters: by those in
`model.named_parameters()`, or these without what wrappers add. Flat parameters have such names too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from ckpt.state.bind_optimizer import are_equal
from ckpt.state.describe import members_of
from ckpt.state.names import bare_name, split_state_name
from ckpt.state.optimizer import options_of, params_of


class ListedParams:
    """What an optimizer would be made of, a list of parameters or of groups, in its place.

    Ids count the parameters in this order. Groups, and all that is in them, are those of the state
    dict. Raises ValueError for an empty list, TypeError for what is neither parameters nor groups.
    """

    def __init__(self, given: Iterable[torch.Tensor | Mapping[str, Any]]) -> None:
        try:
            items = list(given)
        except TypeError as error:
            raise TypeError(
                f"parameters or groups of parameters are needed, got a {type(given).__name__}"
            ) from error
        if not items:
            raise ValueError("the list of parameters is empty; pass what the optimizer was given")
        self.params: list[torch.Tensor] = []
        for item in items:
            if isinstance(item, torch.Tensor) and isinstance(items[0], torch.Tensor):
                self.params.append(item)
            elif isinstance(item, dict) and isinstance(items[0], dict):
                own = item["params"]
                self.params += [own] if isinstance(own, torch.Tensor) else own
            else:
                raise TypeError(
                    "a list of parameters, or of dicts with the key params, is needed; this one "
                    f"has a {type(items[0]).__name__} and a {type(item).__name__}"
                )
        # One group, whatever was listed: the groups are those of the state dict, see `grouped`.
        self.param_groups: list[dict[str, Any]] = [{"params": self.params}]
        self.state: dict[Any, Any] = {}

    def grouped(
        self, groups: Sequence[Mapping[str, Any]], names_of: Callable[[torch.Tensor], Iterable[str]]
    ) -> list[dict[str, Any]]:
        """The parameters in the groups that a state dict has, by names; those in none are left out.

        `names_of` gives the names of a parameter.
        """
        listed = [set(group["params"]) for group in groups]
        return [
            {"params": [p for p in self.params if not names.isdisjoint(names_of(p))]}
            for names in listed
        ]


def kind_of_keys(state_dict: Mapping[str, Any]) -> type | None:
    """The type of the keys of `state_dict`; None without keys. Raises Mismatch when mixed."""
    groups = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    state = state_dict.get("state", {})
    # Groups decide: state may have keys of the user's own, of any type, next to the parameters'.
    kinds = {type(key) for key in groups} or {type(key) for key in state if type(key) is int}
    if not groups and not kinds:
        kinds = {type(key) for key in state}
    if len(kinds) > 1 or (kinds == {str} and any(type(key) is int for key in state)):
        names = [repr(key) for key in (*groups, *state)]
        shown = sorted({name.__name__ for name in kinds | {type(key) for key in state}})
        raise Mismatch(
            f"keys of types {', '.join(shown)} in one dict ({', '.join(names[:6])} ...); use "
            "names or ids throughout, see rekey_optimizer_state_dict"
        )
    return kinds.pop() if kinds else None


def nested(state_dict: Mapping[str, Any], params: Collection[str]) -> Mapping[str, Any]:
    """A dict whose keys are joined with dots, as torch can give it, with its levels put back.

    Any other comes back as it is. Groups are made of parameters whose hyperparameters are equal.
    """
    if not state_dict or not all(
        isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in state_dict
    ):
        return state_dict
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    known = frozenset(params)
    for key, content in state_dict.items():
        kind, _, rest = key.partition(".")
        # Where the parameter is not known: most names of states have no dot.
        last = rest.rpartition(".")
        head, name = split_state_name(rest, known) or (last[0], last[2])
        (state if kind == "state" else hyper).setdefault(head, {})[name] = content
    # Which groups there were is lost in such a dict; of equal options it makes no difference.
    groups: list[dict[str, Any]] = []
    for param, options in hyper.items():
        for group in groups:
            own = options_of(group)
            if own.keys() == options.keys() and all(
                are_equal([own[key], options[key]]) for key in own
            ):
                group["params"].append(param)
                break
        else:
            groups.append({**options, "params": [param]})
    return {"state": state, "param_groups": groups}


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
    groups = state_dict["param_groups"]
    keys = [*state_dict["state"], *(key for group in groups for key in group["params"])]
    # No key of the user's own: it would be no parameter.
    kind = kind_of_keys({"param_groups": [{"params": keys}]})
    is_as_wanted = kind in (None, str if to == "fqn" else int)
    # Keys of a dict that is as wanted are looked up too: unknown ones are refused all the same.
    wanted: Mapping[Any, Any]
    if is_as_wanted:
        wanted = {key: key for pair in names.items() for key in pair}
    elif to == "fqn":
        wanted = names
    else:
        wanted = {name: number for number, name in names.items()}
    if unknown := list(dict.fromkeys(key for key in keys if key not in wanted)):
        raise Mismatch(
            [
                f"{key}: the optimizer of this model has no such parameter; pass the model and the "
                "optimizer that the state dict is for"
                for key in unknown
            ]
        )
    made = _rekeyed(state_dict, wanted)
    groups = made["param_groups"]
    if to == "id" and not is_as_wanted:
        groups = _as_loaded(groups, optimizer, names)
    return {"state": made["state"], "param_groups": groups}


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
    live: list[list[int]] = []
    for group in optimizer.param_groups:
        start = sum(map(len, live))
        live.append([*range(start, start + len(group["params"]))])
    by_ids = {tuple(group["params"]): group for group in groups}
    if len(by_ids) == len(live) and all(tuple(ids) in by_ids for ids in live):
        return [by_ids[tuple(ids)] for ids in live]
    if [len(group["params"]) for group in groups] != [len(ids) for ids in live]:
        return groups  # torch's `load_state_dict` compares these sizes, and refuses them
    for number, (group, ids) in enumerate(zip(groups, live, strict=True)):
        if group["params"] != ids:
            theirs, own = (
                ", ".join([*(names[one] for one in some[:4]), *(["..."] if some[4:] else [])])
                for some in (group["params"], ids)
            )
            raise Mismatch(
                f"param group {number}: the state dict has {theirs}, the optimizer {own}: "
                "loaded by position, state would go to other parameters; make the optimizer "
                "with the groups that the state dict has"
            )
    return groups


def _names_by_id(model: nn.Module, optimizer: Any) -> dict[int, str]:
    layout = describe_module(model, Ranks.alone())
    names: dict[int, str] = {}
    problems: list[str] = []
    for number, param in enumerate(params_of(optimizer)):
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
            problems.append(_not_in_model(number, param))
    if problems:
        raise Mismatch(problems)
    return names


def _not_in_model(number: int, param: torch.Tensor) -> str:
    shape = tuple(param.shape)
    return (
        f"parameter {number}: of shape {shape} is not in the model; pass the model whose "
        "parameters the optimizer has"
    )


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
            problems.append(_not_in_model(number, param))
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
