"""State dicts of optimizers, keyed by the names of parameters on the bare module.

{"state": {fqn: {name: tensor or value}}, "param_groups": [{"params": [fqn, ...], ...}]}

Several optimizers of one model make one dict. State under keys that are no parameters is the user's
own: it is handed on as it is.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.holdings import form_holdings
from ckpt.layout.piece import Holding, Kind
from ckpt.layout.plain import Ranks, Refused
from ckpt.layout.region import Shape
from ckpt.layout.sharded_tensor import UnitSharding, is_tensor
from ckpt.layout.tensor import template_of
from ckpt.state.bind_optimizer import bind_optimizer
from ckpt.state.bind_parameter import BoundOptimizer
from ckpt.state.describe import Described
from ckpt.state.names import Names, bare_name, split_state_name
from ckpt.state.optimizer import (
    NAME_KEYS,
    flatten_groups,
    flatten_optimizer,
    named_groups,
    refusals,
    user_state,
)
from ckpt.state.optimizer_kinds import NUMBER_OF_SUFFIX, StateKind, kind_of, number_suffix
from ckpt.state.own import PerRankState, StateDeclaration, declared, own_state, tensors_of
from ckpt.state.requested import STATE_DICT, Offers
from ckpt.state.types import Catalog, Loaded, ProblemKind, TensorEntry
from ckpt.state.values import join_tree, references, split_tree
from ckpt.state_dict.forms import Live, Output, take_out
from ckpt.state_dict.listed import ListedParams
from ckpt.state_dict.model import check_names, describe_model, names_of, shardings, share_values
from ckpt.state_dict.optimizer_keys import check_keys, nested
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Table, tell
from ckpt.world.base import World, collectively

logger = logging.getLogger(__name__)

PATH = "optim"
OWN = "per_rank"
"""Under this key a dict tells which states are the rank's own, by parameter and name."""
OWN_KEYS = ("rank", "world_size", "layout")
GROUPS = f"{PATH}.param_groups"
STATE = f"{PATH}.state."
Optimizers = Sequence[torch.optim.Optimizer]


class OptimizerView:
    """Optimizers seen as one, or a state dict of theirs in the place of their own state."""

    def __init__(self, optimizers: Optimizers, state_dict: Mapping[str, Any] | None = None) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups: list[dict[str, Any]] = groups
        self.state: dict[Any, Any] = {}
        self.__ckpt_state__ = _declared(optimizers)
        if state_dict is None:
            for optimizer in optimizers:
                self.state.update(optimizer.state)

    @classmethod
    def of_dict(
        cls, optimizers: Optimizers, described: Described, state_dict: Mapping[str, Any]
    ) -> OptimizerView:
        """`state_dict`, keyed by ids or names, as if it were the live state.

        Raises Mismatch for keys that no parameter goes by.
        """
        view = cls(optimizers, state_dict)
        params = [param for group in view.param_groups for param in group["params"]]
        by_key: dict[Any, torch.Tensor] = dict(enumerate(params))
        for param in params:
            source = described.by_param.get(id(param))
            if source is not None and len(source.members) == 1:
                by_key[source.members[0].fqn] = param
        check_keys(state_dict)
        states = state_dict.get("state", {})
        if unknown := [key for key in states if type(key) is int and key not in by_key]:
            raise Mismatch(
                [f"{key}: the optimizer has {len(params)} parameters" for key in unknown]
            )
        for key, state in states.items():
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
    """What this rank holds of optimizers, and the values that all ranks have alike."""

    live: Live
    values: dict[str, Any]
    user: dict[str, Any]
    has_groups: bool
    own: Mapping[str, PerRankState]


def take_optimizer(
    model: nn.Module,
    optimizers: Optimizers,
    output: Output,
    world: World,
    ranks: Ranks,
    *,
    state_dict: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state dict of `optimizers`; collective over `world`.

    Raises InvalidState or Mismatch, the same on all ranks, for state that cannot be told by
    parameter, and for values that differ between ranks.
    """
    taken = collectively(world, "describe", lambda: _taken(model, optimizers, ranks, state_dict))
    check_values(world, _in_one_order(taken.values))
    tensors = take_out(taken.live, output, world, ranks)
    if not output.is_wanted:
        return {}
    groups = taken.values[GROUPS]
    names = [name for group in groups for name in group["params"]]
    found: dict[str, Any] = {"state": _state(names, tensors, taken.values)}
    for key, value in taken.user.items():
        logger.warning("state %r belongs to no parameter; it is handed on as it is", key)
        found["state"][key] = value
    if taken.own:
        found[OWN] = {}
    for own in taken.own.values():
        content = own.content(to_cpu=output.offload_to_cpu)
        found["state"].setdefault(own.param, {})[own.name] = content
        told = {key: own.entry[key] for key in OWN_KEYS}
        found[OWN].setdefault(own.param, {})[own.name] = told
    if taken.has_groups:
        found["param_groups"] = [
            {**join_tree(group, tensors.__getitem__), "params": list(group["params"])}
            for group in groups
        ]
    return found


def _taken(
    model: nn.Module,
    optimizers: Optimizers,
    ranks: Ranks,
    state_dict: Mapping[str, Any] | None,
) -> _Taken:
    described = describe_model(model, ranks, loading=False)
    problems = [p for one in optimizers for p in refusals(PATH, one, described, ranks)]
    if problems:
        raise InvalidState(problems)
    if state_dict is None:
        view: Any = OptimizerView(optimizers)
    else:
        view = OptimizerView.of_dict(optimizers, described, state_dict)
    user = user_state(view.state)
    for key in user:  # goes into the dict as it is, whatever it is
        del view.state[key]
    flat = flatten_optimizer(PATH, view, described, ranks)
    if not flat.problems:
        rest = flatten_groups(PATH, view, flat.groups, ranks)
        flat.holdings.extend(rest.holdings)
        flat.values.update(rest.values)
        flat.problems.extend(rest.problems)
    if flat.problems:
        raise InvalidState(flat.problems)
    live = Live(
        flat.holdings,
        _templates(view, described, ranks),
        _sharding_of(described),
        {},
    )
    has_groups = state_dict is None or "param_groups" in state_dict
    return _Taken(live, flat.values, user, has_groups, flat.own)


def _templates(view: Any, described: Described, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The DTensor that each tensor of the state is laid out like."""
    templates = {}
    declarations = declared(view)
    for group in view.param_groups:
        for param in group["params"]:
            source = described.by_param[id(param)]
            for name, content in view.state.get(param, {}).items():
                kind = kind_of(content, source.owned, ranks, declarations.get(name))
                template = None
                if kind is StateKind.SHARD:
                    template = source.owned.template
                elif kind is StateKind.TENSOR:
                    template = template_of(content)
                if template is not None:
                    templates[f"{STATE}{source.members[0].fqn}.{name}"] = template
    return templates


def _sharding_of(described: Described) -> Callable[[str], UnitSharding | None]:
    """A state that is shaped like its parameter is cut like it, also where it is held elsewhere."""
    told = shardings(described, names_of(described))

    def sharding_of(fqn: str) -> UnitSharding | None:
        return next((told[param] for param, _, _ in by_parameter([fqn], told)), None)

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
    """The states by parameter, in the order of the groups."""
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    inside = {fqn for value in values.values() for fqn in references(value)}
    for param, name, fqn in by_parameter(tensors, names):
        if fqn in inside:
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


def check_values(world: World, values: Mapping[str, Any]) -> None:
    """Raise Mismatch on all ranks, naming what differs, unless all have the same values."""
    encoded = encode_values(dict(values))
    digests = world.gather("values", hashlib.sha256(encoded).digest())
    if len(set(digests)) == 1:
        return
    differ: dict[str, list[int]] = {}
    everybody = [decode_values(part) for part in world.gather("differing values", encoded)]
    for rank, theirs in enumerate(everybody):
        for fqn in {*theirs, *everybody[0]}:
            if encode_values(theirs.get(fqn)) != encode_values(everybody[0].get(fqn)):
                differ.setdefault(fqn, []).append(rank)
    raise Mismatch(
        [
            f"{fqn}: ranks {ranks} have another value than rank 0; all ranks need the same "
            "optimizer and the same dict"
            for fqn, ranks in sorted(differ.items())
        ]
    )


# --- loading -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Read:
    """A state dict in the making of a load: tensors as holdings, values, the user's own."""

    held: list[Holding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class OptimizerLoad:
    """A load of optimizers, in the order: read, bind, fill, install. Collective over `world`.

    With `fresh`, live state is neither written nor used: the result is what `to_load` gives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        world: World,
        ranks: Ranks,
        *,
        fresh: bool,
        offers: Offers = STATE_DICT,
    ) -> None:
        self.model = model
        self.offers = offers._replace(cast=False)
        self.optimizers = optimizers
        self.targets: list[Any] = [_Fresh(one) for one in optimizers] if fresh else [*optimizers]
        self.world = world
        self.ranks = ranks
        self.known: Table = {}
        self.bound: list[BoundOptimizer] = []
        self.loaded: list[Names] = []
        self.own: list[Mapping[str, Any]] = []
        self.groups: list[dict[str, Any]] | None = None

    def prepare(
        self, state_dict: Mapping[str, Any], *, strict: bool, rank0_only: bool, needs_groups: bool
    ) -> None:
        """Everything that can be known before a byte moves. Raises Mismatch on all ranks."""
        own = {} if rank0_only and self.ranks.rank else state_dict

        def read() -> _Read:
            self.described = describe_model(self.model, self.ranks, loading=True)
            return self.read(own)

        self.given = collectively(self.world, "read", read)
        self.share_own(bool(own))
        self.known = tell(self.world, "held", self.given.held)
        names = {h.pieces[0].fqn for h in self.given.held} | set(self.given.values)
        names -= tensors_of(self.given.own.values())
        givers = check_names(self.world, sorted(names), bool(own), self.offers)
        shared = {"values": self.given.values, "user": self.given.user}
        shared = share_values(self.world, shared, givers)
        self.given.values, self.given.user = shared["values"], shared["user"]
        check_values(self.world, _in_one_order(self.given.values))
        self.groups = self.given.values.get(GROUPS)
        if needs_groups and self.groups is None:
            raise Mismatch([_NO_GROUPS + (_WITHOUT_GROUPS if self.offers.strict else "")])
        collectively(self.world, "compare", lambda: self.bind(strict))

    def share_own(self, gives: bool) -> None:
        """What each rank gives of its own, told to all. Raises Mismatch for what is nobody's."""
        given = self.given
        is_mine = all(entry["rank"] == self.ranks.rank for entry in given.own.values())
        mine = {"gives": gives and is_mine, "own": given.own, "odd": given.odd}
        told = [decode_values(b) for b in self.world.gather("own state", encode_values(mine))]
        self.own = [one["own"] for one in told if one["gives"]]
        digests: dict[str, set[bytes]] = {}
        for one in told:
            for fqn, digest in one["odd"].items():
                digests.setdefault(fqn, set()).add(digest)
        if differing := sorted(fqn for fqn, found in digests.items() if len(found) > 1):
            raise Mismatch(
                [
                    f"{fqn}: is a plain tensor of another shape than its parameter, and another "
                    "one on each rank; nothing tells what part of what it is. Take the dict with "
                    "optimizer_state_dict, which keeps such state as each rank's own"
                    for fqn in differing
                ]
            )

    # reading

    def read(self, state_dict: Mapping[str, Any]) -> _Read:
        read = _Read()
        names = self.live_names()
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
            self.read_group(at, group, key_of, read)
            for at, group in enumerate(state_dict.get("param_groups", ()))
        ]
        if "param_groups" in state_dict:
            read.values[GROUPS] = groups
        listed = {name for group in groups for name in group["params"]} | known
        shapes = self.shapes()
        told = {bare_name(key, known): own for key, own in state_dict.get(OWN, {}).items()}
        for key, state in state_dict["state"].items():
            name = key_of.get(key, key)
            if name in listed and isinstance(state, Mapping):
                own = told.get(name, {})
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
        self, at: int, group: Mapping[str, Any], key_of: Mapping[Any, str], read: _Read
    ) -> dict[str, Any]:
        hyper = {key: item for key, item in group.items() if key not in NAME_KEYS}
        value, tensors = split_tree(hyper, f"{GROUPS}.{at}", read.problems)
        for fqn, tensor in tensors:
            self.hold(read, fqn, tensor, None)
        params = [key_of[key] for key in group["params"] if key in key_of]
        return {"params": params, **(value or {})}

    def read_state(
        self, read: _Read, param: str, name: str, content: Any, shape: Shape | None
    ) -> None:
        fqn = f"{STATE}{param}.{name}"
        if is_tensor(content):
            holdings = self.hold(read, fqn, content, shape)
            is_odd = shape is not None and content.ndim and tuple(content.shape) != shape
            if is_odd and any(holding.is_unshared for holding in holdings):
                # Nobody can tell what a shard of it would be: all ranks have to give the same one.
                read.odd[fqn] = _digest(content)
            return
        value, tensors = split_tree(content, fqn, read.problems)
        read.values[fqn] = value
        for tensor_fqn, tensor in tensors:
            self.hold(read, tensor_fqn, tensor, None)

    def read_own(
        self, read: _Read, param: str, name: str, content: Any, told: Mapping[str, Any]
    ) -> None:
        fqn = f"{STATE}{param}.{name}"
        split = split_tree(content, fqn, read.problems)
        own = own_state(fqn, param, name, split, self.ranks)
        if told.keys() != set(OWN_KEYS):
            read.problems.append(f"{fqn}: the dict tells {sorted(told)} of it, not {OWN_KEYS}")
            return
        own.entry.update(told)
        read.own[fqn] = own.entry
        read.held += own.holdings(self.ranks)

    def hold(self, read: _Read, fqn: str, content: Any, shape: Shape | None) -> list[Holding]:
        try:
            holdings = form_holdings(fqn, content, Kind.OPTIMIZER, self.ranks, shape=shape)
        except Refused as refused:
            read.problems.append(refused.problem)
            return []
        read.held += holdings
        return holdings

    def live_names(self) -> set[str]:
        return {
            name
            for optimizer in self.optimizers
            for group in named_groups(optimizer, self.described)
            for named in group
            for name in named.names
        }

    def shapes(self) -> dict[str, Shape]:
        return {
            member.fqn: member.global_shape
            for source in self.described.params
            for member in source.members
        }

    # binding

    def bind(self, strict: bool) -> None:
        problems: list[str] = []
        live = self.live_names()
        listed = {name for group in self.groups or () for name in group["params"]}
        told = {param for param, _, _ in by_parameter(self.known, listed | live)}
        told |= {param for param, _, _ in by_parameter(self.given.values, listed | live)}
        extra = sorted((listed | told) - live)
        if strict and extra:
            problems += [
                f"{name}: is in the dict and no parameter of the optimizer"
                + self.offers.moves(rename="", leave="leave it out")
                for name in extra
            ]
        for at, target in enumerate(self.targets):
            problems += self.bind_one(self.optimizers[at], target, strict)
        if problems:
            raise Mismatch(problems)

    def bind_one(self, optimizer: torch.optim.Optimizer, target: Any, strict: bool) -> list[str]:
        listed: Any = optimizer
        if isinstance(listed, ListedParams) and self.groups is not None:
            target.param_groups = listed.grouped(self.groups, self.names_of)
        elif isinstance(target, _Fresh) and self.groups is not None:
            self.leave_out(target)
        own = {
            name: None
            for group in named_groups(target, self.described)
            for named in group
            for name in named.names
        }
        values = dict(self.given.values)
        values[GROUPS] = self.groups_of(optimizer, own)
        catalog = Catalog(
            {f: TensorEntry(known.dtype, known.shape) for f, known in self.known.items()},
            _of_params(values, own),
            per_rank=self.own,
        )
        names = Names(catalog, None, None, self.offers)
        names.aliases = self.described.aliases
        if found := refusals(PATH, optimizer, self.described, self.ranks):
            return found
        self.bound.append(bind_optimizer(PATH, target, self.described, names, self.ranks))
        self.loaded.append(names)
        tolerated = (ProblemKind.MISSING, ProblemKind.UNEXPECTED)
        return [p.text for p in names.problems if strict or p.kind not in tolerated]

    def groups_of(
        self, optimizer: torch.optim.Optimizer, own: Collection[str]
    ) -> list[dict[str, Any]]:
        """The groups of the dict as far as they are this optimizer's; its own if there are none."""
        if self.groups is None:
            return [
                {"params": [name for named in group for name in named.names]}
                for group in named_groups(optimizer, self.described)
            ]
        listed: Any = optimizer
        if isinstance(listed, ListedParams):
            return self.groups
        cut = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in self.groups
        ]
        return [
            group
            for group, given in zip(cut, self.groups, strict=True)
            if group["params"] or not given["params"]
        ]

    def leave_out(self, target: _Fresh) -> None:
        """Take out of `target` the parameters beside the units that the dict does not have.

        The engine does not manage them, so a dict of what it manages may lack them. What is made
        for `optimizer.load_state_dict` lacks them too, and that refuses what does not fit it.
        """
        if all(source.owned.is_whole for source in self.described.params):
            return
        listed = {name for group in self.groups or () for name in group["params"]}
        for group in target.param_groups:
            group["params"] = [
                param
                for param in group["params"]
                if not self.described.by_param[id(param)].owned.is_whole
                or not listed.isdisjoint(self.names_of(param))
            ]

    def names_of(self, param: torch.Tensor) -> list[str]:
        """The bare names that a parameter object stands for; none where it is not the model's."""
        source = self.described.by_param.get(id(param))
        return [] if source is None else [member.fqn for member in source.members]

    # filling

    def fill(self) -> None:
        """Bring the bytes to where they belong; collective."""
        wanted = [holding for bound in self.bound for holding in bound.holdings]
        redistribute(self.world, self.given.held, self.known, wanted)

    def install(self) -> Loaded:
        """Give the optimizers their state; collective, to fail together."""
        return collectively(self.world, "finish", self._install)

    def _install(self) -> Loaded:
        for bound in self.bound:
            bound.install()
        for key, value in self.given.user.items():
            logger.warning("state %r belongs to no parameter; it is handed on as it is", key)
            states: Any = self.optimizers[0].state
            states[key] = value
        return Loaded(
            tuple(name for names in self.loaded for name in names.loaded_tensors),
            tuple(name for names in self.loaded for name in names.loaded_values),
            self._reported(ProblemKind.MISSING),
            self._reported(ProblemKind.UNEXPECTED),
            (),
            0,
        )

    def _reported(self, kind: ProblemKind) -> tuple[str, ...]:
        return tuple(p.fqn for names in self.loaded for p in names.problems if p.kind is kind)

    def to_load(self) -> dict[str, Any]:
        """What `load_state_dict` of the one optimizer takes: keyed by ids, as it holds it."""
        (optimizer,), (bound,) = self.optimizers, self.bound
        bound.install()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        id_of = {id(param): number for number, param in enumerate(params)}
        target = self.targets[0]
        state: dict[Any, Any] = {
            id_of[id(param)]: found for param in params if (found := target.state.get(param))
        }
        state.update(self.given.user)
        result: dict[str, Any] = {"state": state}
        if self.groups is not None:
            result["param_groups"] = [
                {**group, "params": sorted(id_of[id(param)] for param in group["params"])}
                for group in target.param_groups
            ]
        return result


class _Fresh:
    """An optimizer's groups without its state, to be filled in its place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__ckpt_state__ = declared(optimizer)
        self.state: dict[Any, dict[str, Any]] = _States()
        self.param_groups = [
            {
                key: item.clone() if isinstance(item, torch.Tensor) else item
                for key, item in group.items()
            }
            for group in optimizer.param_groups
        ]


def _in_one_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the groups, and the parameters in them, sorted: ranks may differ in order."""
    groups = [{**group, "params": sorted(group["params"])} for group in values.get(GROUPS, ())]
    return {**values, GROUPS: sorted(groups, key=lambda group: list(group["params"]))}


def _declared(optimizers: Optimizers) -> dict[str, StateDeclaration]:
    """What is said of the state of all `optimizers`."""
    return {name: what for one in optimizers for name, what in declared(one).items()}


def _digest(tensor: torch.Tensor) -> bytes:
    found = hashlib.sha256(repr((tensor.dtype, tuple(tensor.shape))).encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


class _States(dict[Any, dict[str, Any]]):
    def __missing__(self, key: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        self[key] = made
        return made


def _of_params(values: Mapping[str, Any], params: Collection[str]) -> dict[str, Any]:
    """The values that belong to `params`, and the groups."""
    kept = {fqn: values[fqn] for _, _, fqn in by_parameter(values, params)}
    return {**kept, GROUPS: values[GROUPS]}


_NO_GROUPS = 'the dict has no "param_groups"; pass what optimizer_state_dict() gives'
_WITHOUT_GROUPS = ", or strict=False to keep the hyperparameters as they are"
