"""Taking state dicts: what this rank holds of a model or of optimizers, in the requested form.

A model's has its tensors by name. An optimizer's is keyed by the names of parameters:

{"state": {fqn: {name: tensor or value}}, "param_groups": [{"params": [fqn, ...], ...}]}

Several optimizers of one model make one dict. State under keys that are no parameters is the user's
own: it is handed on as it is. So is, in the wrapper's calls, what belongs to one rank: the state of
parameters that no engine shares with another rank, which may have other ones, of other shapes,
under other names; and the options of groups. See `Unshared`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.descriptions import descriptions, shown_type
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import UnitSharding
from ckpt.state.describe import Described
from ckpt.state.names import split_state_name
from ckpt.state.optimizer import (
    FlatOptimizer,
    flatten_groups,
    flatten_optimizer,
    options_of,
    own_form,
    refusals,
    user_state,
)
from ckpt.state.optimizer_kinds import NUMBER_OF_SUFFIX, copy_of, declared, number_suffix, state_key
from ckpt.state.types import Unshared
from ckpt.state.values import join_tree, references, split_tree
from ckpt.state_dict.agreeing import NOTHING, Agreed, agreed_state, check_values
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.forms import DictForm, LiveTensors, take_out
from ckpt.state_dict.keys import kind_of_keys
from ckpt.state_dict.model import (
    buffer_dtypes,
    describe_model,
    is_beside,
    names_of,
    ranks_of,
    shardings,
)
from ckpt.world.base import World, collectively

logger = logging.getLogger(__name__)

PATH = "optim"
OWN = "per_rank"
"""Under this key a dict says which states are the rank's own, by parameter and name."""
OWN_KEYS = ("rank", "world_size", "layout")
GROUPS = f"{PATH}.param_groups"
STATE = f"{PATH}.state."
Optimizers = Sequence[torch.optim.Optimizer]

FULL, LOCAL = StateDictType.FULL, StateDictType.LOCAL


# --- models --------------------------------------------------------------------------------------


def take_model(model: nn.Module, output: DictForm, world: World) -> dict[str, Any]:
    """The state dict of `model`; collective over `world`. Only what is requested is gathered.

    Raises InvalidState, the same on all ranks, for what has no such form.
    """
    described, live, as_is, composites = collectively(
        world, "describe", lambda: _live_model(model, ranks_of(world), output)
    )
    tensors = take_out(live, output, world)
    if not output.is_wanted:
        return {}
    tensors |= as_is
    tensors |= {fqn: join_tree(one, tensors.__getitem__) for fqn, one in composites.items()}
    # In the order of the module; the exchange has one of its own.
    names = dict.fromkeys(described.components.get(name, name) for name in names_of(described))
    names |= dict.fromkeys((*as_is, *composites))  # of which this rank may have no elements
    state_dict = {name: tensors[name] for name in names if name in tensors}
    for fqn, module in described.extra_states:
        state_dict[fqn] = module.get_extra_state()
    for tied, stored in described.tied.items():
        if stored in state_dict:
            state_dict[tied] = state_dict[stored]
    return state_dict


def _live_model(
    model: nn.Module, ranks: Ranks, output: DictForm
) -> tuple[Described, LiveTensors, dict[str, torch.Tensor], dict[str, Any]]:
    """What this rank holds of `model`: what is exchanged, what it gives as it is, and descriptions
    of composites whose components are exchanged. Raises InvalidState with all that cannot take
    part.

    In the FULL form components are exchanged like other tensors. In the other forms each rank gives
    what it has of a composite: a copy of a whole one, or a DTensor over a copy of its shard.
    """
    described = describe_model(model, ranks, loading=False)
    as_is, composites = _composites(described, output)
    # LOCAL dicts are live memory, in whatever dtype it has.
    dtypes = {} if output.form is LOCAL else buffer_dtypes(described)
    holdings: list[Holding] = []
    models: dict[str, torch.Tensor] = {}
    for source, kind in described.tensors():
        owned, fqns = source.owned, source.fqns
        if not fqns or (output.form is not FULL and fqns[0] in described.components):
            continue
        is_copied = output.copied is None or not owned.is_whole or id(owned.param) in output.copied
        if is_copied or fqns[0] in dtypes:
            holdings += source.holdings(kind)
            if owned.template is not None:
                models |= dict.fromkeys(fqns, owned.template)
        else:
            tensor = owned.param.detach()
            as_is[fqns[0]] = tensor.cpu() if output.offload_to_cpu else tensor
    live = LiveTensors(holdings, models, shardings(described).get, dtypes)
    return described, live, as_is, composites


def _composites(
    described: Described, output: DictForm
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The composites of a model that this rank gives as it has them, and descriptions of those that
    are put together of what is exchanged.
    """
    problems: list[str] = []
    as_is: dict[str, torch.Tensor] = {}
    exchanged = {}
    for fqn, tensor in described.composites.items():
        description, components = split_tree(tensor, fqn, problems)
        if output.form is FULL:
            exchanged[fqn] = description
        elif output.form is LOCAL and any(hasattr(one, "global_shape") for _, one in components):
            problems.append(
                f"{fqn}: is a DTensor, which has no LOCAL form; use StateDictType.SHARDED"
            )
        elif output.form is LOCAL and not output.offload_to_cpu:
            as_is[fqn] = tensor.detach()  # live memory, as all of that form
        elif not problems:
            to_cpu = output.offload_to_cpu
            copies = {name: copy_of(part, to_cpu=to_cpu) for name, part in components}
            as_is[fqn] = join_tree(description, copies.__getitem__)
    if problems:
        raise InvalidState(problems)
    return as_is, exchanged


# --- optimizers ----------------------------------------------------------------------------------


class StandIn:
    """Stands in for optimizers: groups and state of its own, and what is declared of theirs."""

    def __init__(
        self, optimizers: Optimizers, groups: list[dict[str, Any]], state: dict[Any, Any]
    ) -> None:
        self.param_groups = groups
        self.state = state
        # What `declared` reads: the declarations of all of them.
        self.__ckpt_state__ = {
            name: what for one in optimizers for name, what in declared(one).items()
        }


def _seen_as_one(
    optimizers: Optimizers, described: Described, state_dict: Mapping[str, Any] | None
) -> StandIn:
    """The optimizers, or `state_dict`, keyed by ids or names, as if it were their live state.

    Raises Mismatch for keys that no parameter goes by.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if state_dict is None:
        state = {key: one for optimizer in optimizers for key, one in optimizer.state.items()}
        return StandIn(optimizers, groups, state)
    params = [param for group in groups for param in group["params"]]
    by_key: dict[Any, torch.Tensor] = dict(enumerate(params))
    for param in params:
        source = described.by_param.get(id(param))
        # A flat parameter of several members goes by no name of theirs.
        if source is not None and len(source.members) == 1:
            by_key[source.members[0].fqn] = param
    kind_of_keys(state_dict)
    states, given = state_dict.get("state", {}), state_dict.get("param_groups")
    problems = [
        f"{key}: the optimizer has {len(params)} parameters"
        for key in states
        if type(key) is int and key not in by_key
    ] or [
        f"{key}: no parameter of the optimizer has this name or number"
        for group in given or ()
        for key in group["params"]
        if key not in by_key
    ]
    if problems:
        raise Mismatch(problems)
    if given is not None:
        groups = [{**group, "params": [by_key[key] for key in group["params"]]} for group in given]
    # A key that is no parameter's is state of the user's own.
    return StandIn(optimizers, groups, {by_key.get(key, key): one for key, one in states.items()})


class _Rest(NamedTuple):
    """This rank's own part of a state dict: state by parameter, and all groups; live, no copies."""

    state: dict[str, dict[Any, Any]]
    groups: list[dict[str, Any]]


class _Taken(NamedTuple):
    """What this rank holds of optimizers; `flat` has the values that all ranks have alike.

    `agreed` is compared. `shards` are parts of composites that no other rank gives anything for.
    `place` is that of a parameter in the model: this order is the same on all ranks, that of the
    groups need not be.
    """

    flat: FlatOptimizer
    live: LiveTensors
    agreed: Agreed
    user: dict[str, Any]
    rest: _Rest | None
    shards: Mapping[str, torch.Tensor]
    place: Mapping[str, int]


def take_optimizer(
    model: nn.Module,
    optimizers: Optimizers,
    output: DictForm,
    world: World,
    state_dict: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The state dict of `optimizers`, or `state_dict` in its place; collective over `world`.

    Raises InvalidState or Mismatch, the same on all ranks, for state that cannot be named by
    parameter, and for values that differ between ranks; `output.beside` says which may differ.
    """
    taken = collectively(
        world, "describe", lambda: _taken(model, optimizers, ranks_of(world), state_dict, output)
    )
    flat, rest = taken.flat, taken.rest
    # In the wrapper's calls, a rank that holds all of a parameter gives what it has itself.
    mine_counts = output.beside is Unshared.OWN
    check_values(world, in_one_order(flat.values), taken.agreed, each_has_its_own=mine_counts)
    if rest is not None and output.beside is Unshared.OWN_BY_FIRST:
        _keep_those_of_first(rest.state, world)
    tensors = take_out(taken.live, output, world)
    if not output.is_wanted:
        return {}
    to_cpu = output.offload_to_cpu
    tensors |= {fqn: copy_of(shard, to_cpu=to_cpu) for fqn, shard in taken.shards.items()}
    if _keeps_own_scalars(output):
        tensors |= {
            piece.fqn: copy_of(holding.local, to_cpu=to_cpu)
            for holding in flat.witnesses
            for piece in holding.pieces
        }
    groups = flat.values[GROUPS]
    state = _state([name for group in groups for name in group["params"]], tensors, flat.values)
    if rest is not None:
        state |= {name: copied(one, to_cpu=to_cpu) for name, one in rest.state.items()}
    states: dict[Any, Any] = {fqn: state[fqn] for fqn in sorted(state, key=taken.place.__getitem__)}
    result: dict[str, Any] = {"state": states}
    for key, value in taken.user.items():
        logger.warning("state %r belongs to no parameter; it is handed on as it is", key)
        states[key] = value
    if flat.own:
        result[OWN] = {}
    for own in flat.own.values():
        states.setdefault(own.param, {})[own.name] = own.content(to_cpu=to_cpu)
        described_as = {key: own.entry[key] for key in OWN_KEYS}
        result[OWN].setdefault(own.param, {})[own.name] = described_as
    if state_dict is None or "param_groups" in state_dict:
        result["param_groups"] = (
            [
                {**join_tree(group, tensors.__getitem__), "params": list(group["params"])}
                for group in groups
            ]
            if rest is None
            else [copy.deepcopy(group) for group in rest.groups]
        )
    return result


def _taken(
    model: nn.Module,
    optimizers: Optimizers,
    ranks: Ranks,
    state_dict: Mapping[str, Any] | None,
    output: DictForm,
) -> _Taken:
    described = describe_model(model, ranks, loading=False)
    problems = [p for one in optimizers for p in refusals(PATH, one, described, ranks)]
    if problems:
        raise InvalidState(problems)
    for one in optimizers:
        own_form(PATH, one)  # raises for those that have another form
    view: Any = _seen_as_one(optimizers, described, state_dict)
    user = user_state(view.state)
    for key in user:  # goes into the dict as it is, whatever it is
        del view.state[key]
    # Out of the view before it is flattened: names and shapes of it need not be other ranks'.
    rest = None if output.beside is Unshared.COMPARED else _separate(view, described)
    flat = flatten_optimizer(PATH, view, described, ranks, splits_containers=False)
    if not flat.problems:
        options = flatten_groups(PATH, view, flat.groups, ranks)
        flat.holdings.extend(options.holdings)
        flat.values.update(options.values)
        flat.problems.extend(options.problems)
    shards = {} if output.form is FULL else flat.shards
    if output.form is LOCAL and shards:
        flat.problems.extend(_without_local_form(flat))
    if flat.problems:
        raise InvalidState(flat.problems)
    by_name = shardings(described)

    def sharding_of(fqn: str) -> UnitSharding | None:
        # A state that is shaped like its parameter is cut like it, also where it is held elsewhere.
        return next((by_name[param] for param, _, _ in by_parameter([fqn], by_name)), None)

    live = LiveTensors(
        [one for one in flat.holdings if shards.keys().isdisjoint(p.fqn for p in one.pieces)],
        flat.templates,
        sharding_of,
        {},
    )
    # Nothing to compare, no bytes to read for it: device memory would be waited for.
    compares = len(ranks.everyone) > 1 and not _keeps_own_scalars(output)
    agreed = agreed_state(flat.holdings, flat.witnesses) if compares else NOTHING
    place = {fqn: i for i, one in enumerate(described.by_param.values()) for fqn in one.fqns}
    return _Taken(flat, live, agreed, user, rest, shards, place)


def _separate(view: Any, described: Described) -> _Rest:
    """Take the rank's own state and all groups out of `view`; what ranks share is left, in one
    group without options.
    """
    rest = _Rest({}, [])
    shared: list[torch.Tensor] = []
    for group in view.param_groups:
        names: list[str] = []
        for param in group["params"]:
            source = described.by_param[id(param)]
            names += [member.fqn for member in source.members]
            if not is_beside(source.owned):
                shared.append(param)
            elif own_state := view.state.pop(param, None):
                rest.state[names[-1]] = own_state  # it is whole: it has one member, the last name
        rest.groups.append({"params": names, **options_of(group)})
    view.param_groups = [{"params": shared}]
    return rest


def _keep_those_of_first(state: dict[str, dict[Any, Any]], world: World) -> None:
    """Leave the state of parameters of which the first rank has some. Collective.

    Raises Mismatch on all ranks when one lacks state that the first has.
    """
    reports = world.gather("beside", encode_values(sorted(state)))
    wanted, *others = [decode_values(report) for report in reports]
    problems = [
        f"{name}: no engine shares it, the first rank has state of it and rank {rank} has none; "
        "step it there too, or wrap with use_orig_params=True, where each rank has its own"
        for rank, names in enumerate(others, start=1)
        for name in wanted
        if name not in names
    ]
    if problems:
        raise Mismatch(problems)
    for name in [name for name in state if name not in wanted]:
        logger.warning(
            "%s: the first rank has no such parameter with state: its state is left out; "
            "use_orig_params=True keeps what each rank has",
            name,
        )
        del state[name]


def copied(state: Mapping[Any, Any], *, to_cpu: bool = False) -> dict[Any, Any]:
    """The state of one parameter, in memory of its own."""
    return {
        name: copy_of(item, to_cpu=to_cpu)
        if isinstance(item, torch.Tensor)
        else copy.deepcopy(item)
        for name, item in state.items()
    }


def _without_local_form(flat: FlatOptimizer) -> list[str]:
    """What is wrong with composites of which this rank has a shard, in the LOCAL form."""
    cut = {
        piece.fqn
        for holding in flat.holdings
        for piece in holding.pieces
        if piece.region.numel != math.prod(piece.global_shape)
    }
    return [
        f"{fqn}: is a DTensor over shards of a {shown_type(inside)}, which has no LOCAL form; use "
        "StateDictType.SHARDED"
        for fqn, value in flat.values.items()
        for inside in descriptions(value)
        if cut.intersection(references(inside))
    ]


def _keeps_own_scalars(output: DictForm) -> bool:
    """Whether each rank's dict has the scalars that this rank has, whatever others have: the LOCAL
    form, and the wrapper's calls with flat parameters, as torch has them.
    """
    return output.form is LOCAL or output.beside is Unshared.OWN_BY_FIRST


def by_parameter(fqns: Collection[str], params: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Parameter and state name of each name of a state tensor or value, with that name."""
    known = frozenset(params)
    for fqn in fqns:
        if fqn.startswith(STATE) and (parts := split_state_name(fqn[len(STATE) :], known)):
            yield *parts, fqn


def _state(
    names: Sequence[str], tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, dict[Any, Any]]:
    """The states by parameter."""
    states: dict[str, dict[Any, Any]] = {name: {} for name in names}
    inside = {fqn for value in values.values() for fqn in references(value)}
    for param, name, fqn in by_parameter(tensors, names):
        if fqn in inside:  # a part of a value, which is joined below
            continue
        suffix = number_suffix(name)
        if suffix is None:
            states[param][state_key(name)] = tensors[fqn]
        else:
            number = NUMBER_OF_SUFFIX[suffix](tensors[fqn].item())
            states[param][state_key(name.removesuffix(suffix))] = number
    for param, name, fqn in by_parameter(values, names):
        states[param][state_key(name)] = join_tree(values[fqn], tensors.__getitem__)
    return {param: state for param, state in states.items() if state}


def in_one_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the groups, and the parameters in them, sorted: ranks may differ in order."""
    groups = [{**group, "params": sorted(group["params"])} for group in values.get(GROUPS, ())]
    return {**values, GROUPS: sorted(groups, key=lambda group: list(group["params"]))}
