"""State dicts of optimizers, keyed by the names of parameters on the bare module.

{"state": {fqn: {name: tensor or value}}, "param_groups": [{"params": [fqn, ...], ...}]}

Several optimizers of one model make one dict. State under keys that are no parameters is the user's
own: it is handed on as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.component_shards import ComponentShard, copy_of_shard
from ckpt.layout.composites import is_composite
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import UnitSharding
from ckpt.layout.tensor import template_of
from ckpt.state.describe import Described
from ckpt.state.descriptions import descriptions, shown_type
from ckpt.state.names import split_state_name
from ckpt.state.optimizer import (
    FlatOptimizer,
    extra_state,
    flatten_groups,
    flatten_optimizer,
    named_groups,
    refusals,
    user_state,
)
from ckpt.state.optimizer_kinds import NUMBER_OF_SUFFIX, StateKind, kind_of, number_suffix
from ckpt.state.own import PerRankState, copy_of, declared
from ckpt.state.requested import Unshared
from ckpt.state.values import join_tree, references, split_tree
from ckpt.state_dict.agreeing import NOTHING, Agreed, agreed_state, check_values
from ckpt.state_dict.beside import Rest, separate
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.forms import DictForm, LiveTensors, take_out
from ckpt.state_dict.model import describe_model, names_of, shardings
from ckpt.state_dict.optimizer_keys import check_keys
from ckpt.world.base import World, collectively

logger = logging.getLogger(__name__)

PATH = "optim"
OWN = "per_rank"
"""Under this key a dict says which states are the rank's own, by parameter and name."""
OWN_KEYS = ("rank", "world_size", "layout")
GROUPS = f"{PATH}.param_groups"
STATE = f"{PATH}.state."
Optimizers = Sequence[torch.optim.Optimizer]


class OptimizerView:
    """Optimizers seen as one, or a state dict of theirs in the place of their own state."""

    def __init__(self, optimizers: Optimizers) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups: list[dict[str, Any]] = groups
        self.state: dict[Any, Any] = {}
        # What `declared` reads: the declarations of all of them.
        self.__ckpt_state__ = {
            name: what for one in optimizers for name, what in declared(one).items()
        }
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    @classmethod
    def of_dict(
        cls, optimizers: Optimizers, described: Described, state_dict: Mapping[str, Any]
    ) -> OptimizerView:
        """`state_dict`, keyed by ids or names, as if it were the live state.

        Raises Mismatch for keys that no parameter goes by.
        """
        view = cls(optimizers)
        view.state = {}
        params = [param for group in view.param_groups for param in group["params"]]
        by_key: dict[Any, torch.Tensor] = dict(enumerate(params))
        for param in params:
            source = described.by_param.get(id(param))
            # A flat parameter of several members goes by no name of theirs.
            if source is not None and len(source.members) == 1:
                by_key[source.members[0].fqn] = param
        check_keys(state_dict)
        states = state_dict.get("state", {})
        if unknown := [key for key in states if type(key) is int and key not in by_key]:
            raise Mismatch(
                [f"{key}: the optimizer has {len(params)} parameters" for key in unknown]
            )
        for key, state in states.items():
            # A key that is no parameter's is state of the user's own.
            view.state[by_key.get(key, key)] = state
        given = state_dict.get("param_groups")
        if given is not None:
            view.param_groups = [_group_of(group, by_key) for group in given]
        return view


def _group_of(group: Mapping[str, Any], by_key: Mapping[Any, torch.Tensor]) -> dict[str, Any]:
    unknown = [key for key in group["params"] if key not in by_key]
    if unknown:
        raise Mismatch(
            [f"{key}: no parameter of the optimizer has this name or number" for key in unknown]
        )
    return {**group, "params": [by_key[key] for key in group["params"]]}


# --- taking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Taken:
    """What this rank holds of optimizers, and the values that all ranks have alike.

    `witnesses` are scalars that other ranks hold, as this one has them. `agreed` is compared.
    `shards` are parts of composites that no other rank gives anything for. `place` is that of a
    parameter in the model: this order is the same on all ranks, that of the groups need not be.
    """

    live: LiveTensors
    witnesses: Sequence[Holding]
    agreed: Agreed
    values: dict[str, Any]
    user: dict[str, Any]
    has_groups: bool
    own: Mapping[str, PerRankState]
    rest: Rest | None
    shards: Mapping[str, ComponentShard]
    place: Callable[[str], int]


def take_optimizer(
    model: nn.Module,
    optimizers: Optimizers,
    output: DictForm,
    world: World,
    ranks: Ranks,
    *,
    state_dict: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state dict of `optimizers`; collective over `world`.

    Raises InvalidState or Mismatch, the same on all ranks, for state that cannot be named by
    parameter, and for values that differ between ranks; `output.beside` says which may differ.
    """
    taken = collectively(
        world, "describe", lambda: _taken(model, optimizers, ranks, state_dict, output)
    )
    # In the wrapper's calls, a rank that holds all of a parameter gives what it has itself.
    mine_counts = output.beside is Unshared.OWN
    check_values(world, in_one_order(taken.values), taken.agreed, each_has_its_own=mine_counts)
    if taken.rest is not None and output.beside is Unshared.OWN_BY_FIRST:
        taken.rest.keep_those_of_first(world)
    tensors = take_out(taken.live, output, world, ranks)
    if not output.is_wanted:
        return {}
    to_cpu = output.offload_to_cpu
    tensors.update({fqn: copy_of_shard(shard) for fqn, shard in taken.shards.items()})
    if _keeps_own_scalars(output):
        tensors.update(_own_scalars(taken.witnesses, to_cpu=to_cpu))
    groups = taken.values[GROUPS]
    state = _state([name for group in groups for name in group["params"]], tensors, taken.values)
    if taken.rest is not None:
        state |= taken.rest.copied_state(to_cpu=to_cpu)
    result: dict[str, Any] = {"state": {fqn: state[fqn] for fqn in sorted(state, key=taken.place)}}
    for key, value in taken.user.items():
        logger.warning("state %r belongs to no parameter; it is handed on as it is", key)
        result["state"][key] = value
    if taken.own:
        result[OWN] = {}
    for own in taken.own.values():
        result["state"].setdefault(own.param, {})[own.name] = own.content(to_cpu=to_cpu)
        described_as = {key: own.entry[key] for key in OWN_KEYS}
        result[OWN].setdefault(own.param, {})[own.name] = described_as
    if taken.has_groups and taken.rest is not None:
        result["param_groups"] = taken.rest.copied_groups()
    elif taken.has_groups:
        result["param_groups"] = [
            {**join_tree(group, tensors.__getitem__), "params": list(group["params"])}
            for group in groups
        ]
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
        extra_state(PATH, one)  # raises for those that have another form
    if state_dict is None:
        view: Any = OptimizerView(optimizers)
    else:
        view = OptimizerView.of_dict(optimizers, described, state_dict)
    user = user_state(view.state)
    for key in user:  # goes into the dict as it is, whatever it is
        del view.state[key]
    is_compared = output.beside is Unshared.COMPARED
    # Out of the view before it is flattened: names and shapes of it need not be other ranks'.
    rest = None if is_compared else separate(view, described)
    flat = flatten_optimizer(PATH, view, described, ranks, splits_containers=False)
    if not flat.problems:
        options = flatten_groups(PATH, view, flat.groups, ranks)
        flat.holdings.extend(options.holdings)
        flat.values.update(options.values)
        flat.problems.extend(options.problems)
    shards = {} if output.form is StateDictType.FULL else _component_shards(view, described)
    if output.form is StateDictType.LOCAL and shards:
        flat.problems.extend(_without_local_form(flat))
    if flat.problems:
        raise InvalidState(flat.problems)
    live = LiveTensors(
        [one for one in flat.holdings if shards.keys().isdisjoint(p.fqn for p in one.pieces)],
        _templates(view, described, ranks),
        _sharding_of(described),
        {},
    )
    has_groups = state_dict is None or "param_groups" in state_dict
    # Nothing to compare, no bytes to read for it: device memory would be waited for.
    keeps_own = _keeps_own_scalars(output)
    is_alone = len(ranks.everyone) == 1
    agreed = NOTHING if keeps_own or is_alone else agreed_state(flat.holdings, flat.witnesses)
    order = {fqn: i for i, one in enumerate(described.by_param.values()) for fqn in one.fqns}
    place = order.__getitem__
    return _Taken(
        live, flat.witnesses, agreed, flat.values, user, has_groups, flat.own, rest, shards, place
    )


def _component_shards(view: Any, described: Described) -> dict[str, ComponentShard]:
    """The parts that this rank has of composites of which others have other shards, by name."""
    shards = {}
    for group in named_groups(view, described):
        for named in group:
            for name, content in view.state.get(named.param, {}).items():
                if not isinstance(content, torch.Tensor) or is_composite(content):
                    _, tensors = split_tree(content, f"{STATE}{named.names[0]}.{name}", [])
                    shards.update({n: t for n, t in tensors if isinstance(t, ComponentShard)})
    return shards


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
    return output.form is StateDictType.LOCAL or output.beside is Unshared.OWN_BY_FIRST


def _own_scalars(witnesses: Sequence[Holding], *, to_cpu: bool) -> dict[str, torch.Tensor]:
    """Copies of this rank's own, by name."""
    return {
        piece.fqn: copy_of(holding.local, to_cpu=to_cpu)
        for holding in witnesses
        for piece in holding.pieces
    }


def _templates(view: Any, described: Described, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The DTensor that each tensor of the state is laid out like."""
    templates = {}
    declarations = declared(view)
    for group in view.param_groups:
        for param in group["params"]:
            source = described.by_param[id(param)]
            for name, content in view.state.get(param, {}).items():
                kind = kind_of(content, source.owned, ranks, declarations.get(name))
                fqn = f"{STATE}{source.members[0].fqn}.{name}"
                if kind is StateKind.SHARD and source.owned.template is not None:
                    templates[fqn] = source.owned.template
                elif kind in (StateKind.TENSOR, StateKind.VALUE):
                    for inside, tensor in split_tree(content, fqn, [])[1]:
                        if (template := template_of(tensor)) is not None:
                            templates[inside] = template
    return templates


def _sharding_of(described: Described) -> Callable[[str], UnitSharding | None]:
    """A state that is shaped like its parameter is cut like it, also where it is held elsewhere."""
    by_name = shardings(described, names_of(described))

    def sharding_of(fqn: str) -> UnitSharding | None:
        return next((by_name[param] for param, _, _ in by_parameter([fqn], by_name)), None)

    return sharding_of


def by_parameter(fqns: Collection[str], params: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Parameter and state name of each name of a state tensor or value, with that name."""
    known = frozenset(params)
    for fqn in fqns:
        if fqn.startswith(STATE) and (parts := split_state_name(fqn[len(STATE) :], known)):
            yield *parts, fqn


def _state(
    names: Sequence[str], tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The states by parameter."""
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    inside = {fqn for value in values.values() for fqn in references(value)}
    for param, name, fqn in by_parameter(tensors, names):
        if fqn in inside:  # a part of a value, which is joined below
            continue
        suffix = number_suffix(name)
        if suffix is None:
            states[param][name] = tensors[fqn]
        else:
            number = NUMBER_OF_SUFFIX[suffix](tensors[fqn].item())
            states[param][name.removesuffix(suffix)] = number
    for param, name, fqn in by_parameter(values, names):
        states[param][name] = join_tree(values[fqn], tensors.__getitem__)
    return {param: state for param, state in states.items() if state}


def in_one_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the groups, and the parameters in them, sorted: ranks may differ in order."""
    groups = [{**group, "params": sorted(group["params"])} for group in values.get(GROUPS, ())]
    return {**values, GROUPS: sorted(groups, key=lambda group: list(group["params"]))}
