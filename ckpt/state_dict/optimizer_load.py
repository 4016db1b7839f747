"""Loading state dicts of optimizers: every rank gives what its dict has, each takes its shards."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.plain import Ranks
from ckpt.state.bind_optimizer import bind_optimizer
from ckpt.state.bind_parameter import BoundOptimizer
from ckpt.state.describe import Described
from ckpt.state.names import Left, Names
from ckpt.state.optimizer import extra_state, named_groups, params_of, refusals
from ckpt.state.own import declared, tensors_of
from ckpt.state.requested import LoadRequest, Unshared
from ckpt.state.types import Catalog, Loaded, ProblemKind, fatal_texts
from ckpt.state_dict.agreeing import check_values
from ckpt.state_dict.beside import is_beside
from ckpt.state_dict.listed import ListedParams
from ckpt.state_dict.model import check_names, describe_model, share_values
from ckpt.state_dict.optimizer_reading import DictReader, GivenState, live_names
from ckpt.state_dict.optimizers import (
    GROUPS,
    PATH,
    Optimizers,
    by_parameter,
    in_one_order,
)
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Table, entries_of, gather_table
from ckpt.world.base import World, collectively

logger = logging.getLogger(__name__)


class OptimizerTarget(NamedTuple):
    """What a dict is loaded into, and the ranks that load.

    With `fresh`, live state is neither written nor used: the result is what `to_load` gives.
    `ranks` are those that the layout is over, `world` has those that exchange bytes.
    """

    model: nn.Module
    optimizers: Optimizers
    world: World
    ranks: Ranks
    fresh: bool


def prepare_load(
    target: OptimizerTarget, state_dict: Mapping[str, Any], request: LoadRequest
) -> OptimizerLoad:
    """All that can be known before a byte moves. Collective; raises Mismatch on all ranks."""
    # Optimizer state takes the dtype of the dict, so no call has `cast` to advise.
    request = request._replace(call=request.call._replace(cast=False))
    world, ranks, call = target.world, target.ranks, request.call
    dict_here = {} if request.rank0_only and ranks.rank else state_dict
    keeps_own = request.beside is not Unshared.COMPARED and not request.rank0_only
    if keeps_own:
        # A rank without a dict takes all of it from the others: then nothing is a rank's own.
        keeps_own = all(world.gather("dicts", b"given" if dict_here else b""))

    def read() -> tuple[Described, GivenState]:
        described = describe_model(target.model, ranks, loading=True)
        reader = DictReader(target.optimizers, described, ranks, keeps_own=keeps_own)
        return described, reader.read(dict_here)

    described, given = collectively(world, "read", read)
    own = _share_own(world, ranks, given, gives=bool(dict_here))
    known = gather_table(world, "held", given.held)
    names = {holding.pieces[0].fqn for holding in given.held} | set(given.values)
    # The tensors of a rank's own state have its rank in their names: all ranks differ there.
    names -= tensors_of(given.own.values())
    givers = check_names(world, sorted(names), bool(dict_here), call)
    if givers and len(givers) < world.size:
        # As bytes: references to tensors stand among the values.
        tree = {"values": encode_values(given.values), "user": given.user}
        shared = share_values(world, tree, givers)
        given.values, given.user = decode_values(shared["values"]), shared["user"]
    common = {fqn: v for fqn, v in given.values.items() if fqn != GROUPS or not keeps_own}
    check_values(world, in_one_order(common))
    # A live optimizer would keep its options in silence; a fresh result just has no groups.
    if request.strict and not target.fresh and GROUPS not in given.values:
        raise Mismatch([_NO_GROUPS + (_WITHOUT_GROUPS if call.strict else "")])
    loading = OptimizerLoad(target, request, described, given, own, known)
    collectively(world, "compare", loading.bind)
    return loading


def _share_own(
    world: World, ranks: Ranks, given: GivenState, *, gives: bool
) -> list[Mapping[str, Any]]:
    """What each rank gives of its own, known to all.

    Raises Mismatch for plain state that differs between ranks and that nobody declared its own.
    """
    # The first rank's dict on all ranks has that rank's own state: others do not give it as theirs.
    is_mine = all(entry["rank"] == ranks.rank for entry in given.own.values())
    mine = {"gives": gives and is_mine, "own": given.own, "odd": given.odd}
    reports = [decode_values(b) for b in world.gather("own state", encode_values(mine))]
    digests: dict[str, set[bytes]] = {}
    for one in reports:
        for fqn, digest in one["odd"].items():
            digests.setdefault(fqn, set()).add(digest)
    if differing := sorted(fqn for fqn, seen in digests.items() if len(seen) > 1):
        raise Mismatch(
            [
                f"{fqn}: is a plain tensor of another shape than its parameter, and another "
                "one on each rank; nothing shows what part of what it is. Take the dict with "
                "optimizer_state_dict, which keeps such state as each rank's own"
                for fqn in differing
            ]
        )
    return [one["own"] for one in reports if one["gives"]]


class OptimizerLoad:
    """A load of optimizers that `prepare_load` has checked.

    `fill` brings the bytes, then `install` gives the optimizers their state, or `to_load` returns
    it.
    """

    def __init__(
        self,
        target: OptimizerTarget,
        request: LoadRequest,
        described: Described,
        given: GivenState,
        own: Sequence[Mapping[str, Any]],
        known: Table,
    ) -> None:
        self.world = target.world
        self.ranks = target.ranks
        self.strict = request.strict
        self.call = request.call
        self.may_lack = request.beside is not Unshared.COMPARED
        self.optimizers = target.optimizers
        self.targets: list[Any] = (
            [_Fresh(one) for one in target.optimizers] if target.fresh else [*target.optimizers]
        )
        self.described = described
        self.given = given
        self.own = own
        self.known = known
        self.groups: list[dict[str, Any]] | None = given.values.get(GROUPS)
        self.bound: list[BoundOptimizer] = []
        self.loaded: list[Names] = []

    def bind(self) -> None:
        """Find the memory to fill. Raises Mismatch with everything that does not fit."""
        problems: list[str] = []
        live = live_names(self.optimizers, self.described)
        if self.may_lack and self.groups is not None:
            self.groups = self.completed(self.groups)
        listed = {name for group in self.groups or () for name in group["params"]}
        with_state = {param for param, _, _ in by_parameter(self.known, listed | live)}
        with_state |= {param for param, _, _ in by_parameter(self.given.values, listed | live)}
        # Over all optimizers together: each of them alone has only a part of the dict's names.
        extra = sorted((listed | with_state) - live)
        if self.strict:
            problems += [
                f"{name}: is in the dict and no parameter of the optimizer"
                + self.call.moves(rename="", leave="leave it out")
                for name in extra
            ]
        for optimizer, target in zip(self.optimizers, self.targets, strict=True):
            problems += self.bind_one(optimizer, target)
        if problems:
            raise Mismatch(problems)

    def bind_one(self, optimizer: torch.optim.Optimizer, target: Any) -> list[str]:
        """Bind one optimizer; the problems that forbid the load."""
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
        catalog = Catalog(entries_of(self.known), _of_params(values, own), per_rank=self.own)
        names = Names(catalog, None, None, aliases=self.described.aliases, call=self.call)
        if problems := refusals(PATH, optimizer, self.described, self.ranks):
            return problems
        try:
            extra_state(PATH, optimizer)
        except InvalidState as error:
            return list(error.problems)
        self.bound.append(bind_optimizer(PATH, target, self.described, names, self.ranks))
        names.problems += Left((), names.extra_params).problems(self.call)
        self.loaded.append(names)
        return fatal_texts(names.problems, strict=self.strict)

    def groups_of(
        self, optimizer: torch.optim.Optimizer, own: Collection[str]
    ) -> list[dict[str, Any]]:
        """The groups of the dict with this optimizer's parameters; without any in the dict, the
        optimizer's own.
        """
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
        # One that has lost all parameters is another optimizer's; one that had none may be ours.
        return [
            group
            for group, given in zip(cut, self.groups, strict=True)
            if group["params"] or not given["params"]
        ]

    def leave_out(self, target: _Fresh) -> None:
        """Take the parameters out of `target` that the dict lacks and may lack: those that are held
        whole beside units, or with `may_lack` any.

        The result lacks them too; `optimizer.load_state_dict` refuses it where the optimizer has
        them.
        """
        # Beside no unit: a bare model's dict has to have all of it.
        if not self.may_lack and all(source.owned.is_whole for source in self.described.params):
            return
        listed = {name for group in self.groups or () for name in group["params"]}
        kept, empty_left = [], sum(not group["params"] for group in self.groups or ())
        for group in target.param_groups:
            params = [
                param
                for param in group["params"]
                if not (self.may_lack or self.described.by_param[id(param)].owned.is_whole)
                or not listed.isdisjoint(self.spellings_of(param))
            ]
            # As many empty groups stay as the dict has: they are matched with those.
            empty_left -= not params
            if params or empty_left >= 0:
                kept.append({**group, "params": params})
        target.param_groups = kept

    def completed(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`groups`, with all members of a flat parameter where one of them stands.

        The log names the parameters of units that no group lists.
        """
        completed = [{**group, "params": [*group["params"]]} for group in groups]
        listed = {name for group in completed for name in group["params"]}
        for source in self.described.params:
            param = source.owned.param
            absent = [m.fqn for m in source.members if listed.isdisjoint(self.spellings(m.fqn))]
            if not absent or is_beside(source) or not self.is_optimized(param):
                continue
            spelled = set(self.spellings_of(param))
            home = next(
                (group for group in completed if not spelled.isdisjoint(group["params"])), None
            )
            if home is not None:
                home["params"] += absent
            logger.warning(
                "%s: not in the dict, which leaves %s; take it from the same model, or load it "
                "with ckpt.state_dict.load_optimizer_state_dict, which refuses it",
                ", ".join(absent),
                "out what the optimizer has of it" if home is None else "zeros in its place",
            )
        return completed

    def is_optimized(self, param: torch.Tensor) -> bool:
        """Whether an optimizer has this parameter."""
        return any(param is one for each in self.optimizers for one in params_of(each))

    def spellings(self, name: str) -> list[str]:
        """A parameter's name, and those of what it is tied to."""
        return [name, *(tied for tied, stored in self.described.aliases.items() if stored == name)]

    def spellings_of(self, param: torch.Tensor) -> list[str]:
        """All names that a parameter object goes by."""
        return [spelled for name in self.names_of(param) for spelled in self.spellings(name)]

    def names_of(self, param: torch.Tensor) -> list[str]:
        """The bare names that a parameter object stands for; none where it is not the model's."""
        source = self.described.by_param.get(id(param))
        return [] if source is None else [member.fqn for member in source.members]

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
        )

    def _reported(self, kind: ProblemKind) -> tuple[str, ...]:
        return tuple(p.fqn for names in self.loaded for p in names.problems if p.kind is kind)

    def to_load(self) -> dict[str, Any]:
        """What `load_state_dict` of the one optimizer takes: keyed by ids, as it holds it."""
        (optimizer,), (bound,) = self.optimizers, self.bound
        bound.install()
        params = params_of(optimizer)
        id_of = {id(param): number for number, param in enumerate(params)}
        target = self.targets[0]
        state: dict[Any, Any] = {
            id_of[id(param)]: state_of_param
            for param in params
            if (state_of_param := target.state.get(param))
        }
        # What is this rank's own was read, and never held for the exchange.
        for param in params:
            for name in self.names_of(param):
                if state_of_param := self.given.beside.get(name):
                    state[id_of[id(param)]] = state_of_param
        state.update(self.given.user)
        result: dict[str, Any] = {"state": state}
        if self.groups is not None:
            result["param_groups"] = [
                {**group, "params": sorted(id_of[id(param)] for param in group["params"])}
                for group in target.param_groups
            ]
        return result


class _Fresh:
    """Stands in for an optimizer that must stay as it is: its groups, and state of their own."""

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


class _States(dict[Any, dict[str, Any]]):
    # Like the defaultdict of a live optimizer, which installing state relies on.
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
