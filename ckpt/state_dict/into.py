"""Loading state dicts: every rank gives what its dict has, each takes its shards.

What the dicts hold is a catalog, as a checkpoint has one; the live memory that `bind` names for it
is filled by the exchange.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks
from ckpt.state.bind import bind_state
from ckpt.state.bind_optimizer import bind_optimizer
from ckpt.state.bind_parameter import BoundOptimizer
from ckpt.state.binding import Binding
from ckpt.state.describe import Described
from ckpt.state.names import Left, Names
from ckpt.state.optimizer import named_groups, own_form, params_of, refusals
from ckpt.state.optimizer_kinds import tensors_of
from ckpt.state.types import (
    CallArguments,
    Catalog,
    Loaded,
    LoadRequest,
    Problem,
    ProblemKind,
    Unshared,
    fatal_texts,
)
from ckpt.state.values import references, split_tree
from ckpt.state_dict.agreeing import check_values
from ckpt.state_dict.keys import ListedParams
from ckpt.state_dict.model import describe_model, is_beside, ranks_of
from ckpt.state_dict.out import GROUPS, PATH, Optimizers, StandIn, by_parameter, in_one_order
from ckpt.state_dict.reading import GivenModel, GivenState, live_names, read_model
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Table, entries_of, gather_table
from ckpt.world.base import World, collectively

logger = logging.getLogger(__name__)


# --- what all dicts have -------------------------------------------------------------------------


def _shared(
    world: World,
    held: Sequence[Holding],
    names: set[str],
    tree: Callable[[], Mapping[str, Any]],
    call: CallArguments,
    *,
    gives: bool,
) -> tuple[Table, Mapping[str, Any] | None]:
    """What the ranks hold; and on ranks that give no dict, `tree()` of the first one that does.

    Collective. Raises Mismatch on all ranks when the dicts have different `names`, or one has
    something that cannot be sent to those who lack it.
    """
    known = gather_table(world, "held", held)
    # Nothing at all from a rank without a dict: the names of a dict may be an empty list.
    lists = world.gather("names", encode_values(sorted(names)) if gives else b"")
    givers = [rank for rank, part in enumerate(lists) if part]
    # As bytes: encoding is the same for the same names, and only a refusal decodes them.
    if len({lists[rank] for rank in givers}) > 1:
        _refuse_names({rank: set(decode_values(lists[rank])) for rank in givers}, call)
    if not givers or len(givers) == world.size:
        return known, None

    def encoded() -> bytes:
        if world.rank != givers[0]:
            return b""
        problems: list[str] = []
        value, tensors = split_tree(dict(tree()), "", problems)
        problems += [
            f"{fqn}: a tensor that belongs to no parameter; pass the dict on every rank"
            for fqn, _ in tensors
        ]
        if problems:
            raise Mismatch(problems)
        return encode_values(value)

    # What fails on the first rank has to reach the others, which wait for its values.
    data = world.gather("values", collectively(world, "values", encoded))[givers[0]]
    return known, None if gives else decode_values(data)


def _refuse_names(lists: Mapping[int, set[str]], call: CallArguments) -> None:
    rank0_only = ", or rank0_only=True" if call.rank0_only else ""
    raise Mismatch(
        [
            f"{name}: is in the dicts of ranks {sorted(r for r in lists if name in lists[r])}, "
            f"not of ranks {sorted(r for r in lists if name not in lists[r])}; pass the same "
            f"dict on all ranks{rank0_only}"
            for name in sorted(set().union(*lists.values()))
            if not all(name in theirs for theirs in lists.values())
        ]
    )


def _names_in(held: Sequence[Holding]) -> set[str]:
    return {holding.pieces[0].fqn for holding in held}


# --- models --------------------------------------------------------------------------------------


def put_model(
    model: nn.Module, state_dict: Mapping[str, Any], world: World, request: LoadRequest
) -> Callable[[], Loaded]:
    """How to fill `model` from the state dicts of all ranks; collective. Nothing has changed yet.
    What is returned writes into it, collectively; an error of that leaves it half-loaded.

    A rank may have an empty one, which is what all but the first have with `rank0_only`; all others
    have the same names. Raises Mismatch, the same on all ranks.
    """
    ranks = ranks_of(world)
    own = {} if request.rank0_only and ranks.rank else state_dict
    given = collectively(world, "read", lambda: read_model(model, own, ranks, request))
    names = _names_in(given.held) | given.extra.keys() | given.composites.keys()
    # Also those of components of which this rank has no elements.
    names |= {*references(given.composites)}

    def tree() -> Mapping[str, Any]:
        # As bytes: references to tensors stand among the values.
        return {"extra": given.extra, "composites": encode_values(given.composites)}

    known, shared = _shared(world, given.held, names, tree, request.call, gives=bool(own))
    if shared is not None:
        composites = decode_values(shared["composites"])
        given = replace(given, extra=shared["extra"], composites=composites)

    def bound() -> tuple[Binding, list[Problem]]:
        catalog = Catalog(entries_of(known), given.composites)
        # Extra states are no tensors: `finish` gives them to their modules.
        skip = given.extra_states.__contains__
        strict, call = request.strict, request.call
        binding = bind_state(model, catalog, ranks, strict=strict, skip=skip, call=call)
        problems = _problems_of(binding, given, known, request)
        if fatal := fatal_texts(problems, strict=strict):
            raise Mismatch(fatal)
        return binding, problems

    binding, problems = collectively(world, "compare", bound)

    def finish() -> Loaded:
        tensors, modules = binding.finish().tensors, given.extra_states
        loaded = [fqn for fqn in modules if fqn in given.extra]
        for fqn in loaded:
            modules[fqn].set_extra_state(given.extra[fqn])
        return Loaded(tensors, tuple(loaded), *_on_one_side(problems))

    def fill() -> Loaded:
        collectively(world, "prepare", binding.prepare)
        redistribute(world, given.held, known, binding.holdings)
        return collectively(world, "finish", finish)

    return fill


def _on_one_side(problems: Sequence[Problem]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that are missing, and those that are unexpected."""
    # Other kinds were fatal before anything was written.
    kinds = ProblemKind.MISSING, ProblemKind.UNEXPECTED
    missing, unexpected = (tuple(p.fqn for p in problems if p.kind is kind) for kind in kinds)
    return missing, unexpected


def _problems_of(
    binding: Binding, given: GivenModel, known: Table, request: LoadRequest
) -> list[Problem]:
    """What does not fit between the dicts and the model, in the words of a load of state dicts."""
    call, aliases, tied_names = request.call, given.described.aliases, given.described.tied
    # A dict has tied tensors under all their names, and the state takes one of them.
    problems = [
        problem
        for problem in binding.problems
        if problem.kind is not ProblemKind.UNEXPECTED or problem.fqn not in tied_names
    ]
    for tied, stored in aliases.items():
        member = given.members.get(stored)
        if tied in known and member and known[tied].shape != member.global_shape:
            text = (
                f"{tied}: the dict has shape {known[tied].shape}, the model has "
                f"{member.global_shape}, tied to {stored}; give it that shape, or leave it out"
            )
            problems.append(Problem(ProblemKind.SHAPE, tied, text))
    lacks = "is not in the dict" + call.moves(rename="", leave="leave it as it is")
    odd = "is in the dict and the model has no such extra state" + call.moves(
        rename="", leave="leave it out"
    )
    problems += [
        Problem(ProblemKind.MISSING, fqn, f"{fqn}: {lacks}")
        for fqn in given.extra_states
        if fqn not in given.extra
    ] + [
        Problem(ProblemKind.UNEXPECTED, fqn, f"{fqn}: {odd}")
        for fqn in given.extra
        if fqn not in given.extra_states and fqn not in aliases
    ]
    if not request.every_name:
        return problems
    # Names of tied tensors that the dict lacks, also where it has others of the same one.
    reported = {problem.fqn for problem in problems}
    return problems + [
        Problem(
            ProblemKind.MISSING,
            name,
            f"{name}: is not in the dict; strict=False takes what is tied to it",
        )
        for name in dict.fromkeys((*aliases.values(), *aliases))
        if name not in known
        and name not in given.extra
        and aliases.get(name) not in given.extra_states
        and name not in reported
    ]


# --- optimizers ----------------------------------------------------------------------------------


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


def put_optimizer(
    target: OptimizerTarget, state_dict: Mapping[str, Any], request: LoadRequest
) -> OptimizerLoad:
    """How to fill the optimizers from the state dicts of all ranks; collective. Nothing has changed
    yet. Raises Mismatch, the same on all ranks.
    """
    # Optimizer state takes the dtype of the dict, so no call has `cast` to advise.
    request = request._replace(call=request.call._replace(cast=False))
    world, ranks = target.world, target.ranks
    dict_here = {} if request.rank0_only and ranks.rank else state_dict
    keeps_own = request.beside is not Unshared.COMPARED and not request.rank0_only
    if keeps_own:
        # A rank without a dict takes all of it from the others: then nothing is a rank's own.
        keeps_own = all(world.gather("dicts", b"given" if dict_here else b""))

    def read() -> GivenState:
        given = GivenState(describe_model(target.model, ranks, loading=True), ranks, keeps_own)
        given.read(target.optimizers, dict_here)
        return given

    given = collectively(world, "read", read)
    own = _share_own(world, ranks, given, gives=bool(dict_here))
    # The tensors of a rank's own state have its rank in their names: all ranks differ there.
    names = (_names_in(given.held) | given.values.keys()) - tensors_of(given.own.values())

    def tree() -> Mapping[str, Any]:
        # As bytes: references to tensors stand among the values. Only where a rank lacks them:
        # values that cannot be encoded, such as rates in tensors, load where all ranks have them.
        return {"values": encode_values(given.values), "user": given.user}

    known, shared = _shared(world, given.held, names, tree, request.call, gives=bool(dict_here))
    if shared is not None:
        given.values, given.user = decode_values(shared["values"]), shared["user"]
    common = {fqn: v for fqn, v in given.values.items() if fqn != GROUPS or not keeps_own}
    check_values(world, in_one_order(common))
    # A live optimizer would keep its options in silence; a fresh result just has no groups.
    if request.strict and not target.fresh and GROUPS not in given.values:
        without = ", or strict=False to keep the hyperparameters as they are"
        text = 'the dict has no "param_groups"; pass what optimizer_state_dict() gives'
        raise Mismatch([text + (without if request.call.strict else "")])
    loading = OptimizerLoad(target, request, given, own, known, given.values.get(GROUPS))
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


@dataclass(slots=True)
class OptimizerLoad:
    """A load of optimizers that `put_optimizer` has checked.

    `fill` brings the bytes, then `install` gives the optimizers their state, or `to_load` returns
    it. `own` is what each rank gives of its own, `groups` are those of the dict.
    """

    target: OptimizerTarget
    request: LoadRequest
    given: GivenState
    own: Sequence[Mapping[str, Any]]
    known: Table
    groups: list[dict[str, Any]] | None
    filled: list[Any] = field(default_factory=list)
    """What gets the state: the optimizers, or what stands in for them."""
    bound: list[BoundOptimizer] = field(default_factory=list)
    loaded: list[Names] = field(default_factory=list)

    @property
    def described(self) -> Described:
        return self.given.described

    @property
    def may_lack(self) -> bool:
        """Whether the dict may lack what the optimizers have."""
        return self.request.beside is not Unshared.COMPARED

    def bind(self) -> None:
        """Find the memory to fill. Raises Mismatch with everything that does not fit."""
        problems: list[str] = []
        live = live_names(self.target.optimizers, self.described)
        if self.may_lack and self.groups is not None:
            self.groups = self.completed(self.groups)
        listed = {name for group in self.groups or () for name in group["params"]}
        stored = [*self.known, *self.given.values]
        with_state = {param for param, _, _ in by_parameter(stored, listed | live)}
        # Over all optimizers together: each of them alone has only a part of the dict's names.
        if self.request.strict:
            problems += [
                f"{name}: is in the dict and no parameter of the optimizer"
                + self.request.call.moves(rename="", leave="leave it out")
                for name in sorted((listed | with_state) - live)
            ]
        for optimizer in self.target.optimizers:
            filled: Any = optimizer
            if self.target.fresh:
                # In the place of one that must stay as it is: its groups, and state of their own,
                # a defaultdict as that of a live one, which installing relies on.
                groups = [
                    {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in g}
                    for g in map(dict.items, optimizer.param_groups)
                ]
                filled = StandIn([optimizer], groups, defaultdict(dict))
            self.filled.append(filled)
            problems += self.bind_one(optimizer, self.filled[-1])
        if problems:
            raise Mismatch(problems)

    def bind_one(self, optimizer: Any, filled: Any) -> list[str]:
        """Bind one optimizer; the problems that forbid the load."""
        described, call, ranks = self.described, self.request.call, self.target.ranks
        if isinstance(optimizer, ListedParams) and self.groups is not None:
            filled.param_groups = optimizer.grouped(self.groups, self.names_of)
        elif self.target.fresh and self.groups is not None:
            self.leave_out(filled)
        own = live_names([filled], described)
        values = {fqn: self.given.values[fqn] for _, _, fqn in by_parameter(self.given.values, own)}
        values[GROUPS] = self.groups_of(optimizer, own)
        catalog = Catalog(entries_of(self.known), values, per_rank=self.own)
        names = Names(catalog, None, None, aliases=described.aliases, call=call)
        if problems := refusals(PATH, optimizer, described, ranks):
            return problems
        try:
            own_form(PATH, optimizer)
        except InvalidState as error:
            return list(error.problems)
        self.bound.append(bind_optimizer(PATH, filled, described, names, ranks))
        names.problems += Left((), names.extra_params).problems(call)
        self.loaded.append(names)
        return fatal_texts(names.problems, strict=self.request.strict)

    def groups_of(self, optimizer: Any, own: Collection[str]) -> list[dict[str, Any]]:
        """The groups of the dict with this optimizer's parameters; without any in the dict, the
        optimizer's own.
        """
        if self.groups is None:
            return [
                {"params": [name for named in group for name in named.names]}
                for group in named_groups(optimizer, self.described)
            ]
        if isinstance(optimizer, ListedParams):
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

    def leave_out(self, filled: StandIn) -> None:
        """Take the parameters out of `filled` that the dict lacks and may lack: those that are held
        whole next to units, or with `may_lack` any.

        The result lacks them too; `optimizer.load_state_dict` refuses it where the optimizer has
        them.
        """
        # Next to no unit: a bare model's dict has to have all of it.
        if not self.may_lack and all(source.owned.is_whole for source in self.described.params):
            return
        groups = self.groups or ()
        listed = {name for group in groups for name in group["params"]}
        kept, empty_left = [], sum(not group["params"] for group in groups)
        for group in filled.param_groups:
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
        filled.param_groups = kept

    def completed(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`groups`, with all members of a flat parameter where one of them stands.

        The log names the parameters of units that no group lists.
        """
        completed = [{**group, "params": [*group["params"]]} for group in groups]
        listed = {name for group in completed for name in group["params"]}
        optimized = {id(p) for optimizer in self.target.optimizers for p in params_of(optimizer)}
        for source in self.described.params:
            param = source.owned.param
            absent = [m.fqn for m in source.members if listed.isdisjoint(self.spellings(m.fqn))]
            if not absent or is_beside(source.owned) or id(param) not in optimized:
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
        redistribute(self.target.world, self.given.held, self.known, wanted)

    def install(self) -> Loaded:
        """Give the optimizers their state."""
        for bound in self.bound:
            bound.install()
        for key, value in self.given.user.items():
            logger.warning("state %r belongs to no parameter; it is handed on as it is", key)
            self.filled[0].state[key] = value
        problems = [problem for names in self.loaded for problem in names.problems]
        return Loaded(
            tuple(name for names in self.loaded for name in names.loaded_tensors),
            tuple(name for names in self.loaded for name in names.loaded_values),
            *_on_one_side(problems),
        )

    def to_load(self) -> dict[str, Any]:
        """What `load_state_dict` of the one optimizer takes: keyed by ids, as it holds it."""
        (optimizer,), (filled,), (bound,) = self.target.optimizers, self.filled, self.bound
        bound.install()
        params = params_of(optimizer)
        id_of = {id(param): number for number, param in enumerate(params)}
        state: dict[Any, Any] = {
            id_of[id(param)]: state_of_param
            for param in params
            if (state_of_param := filled.state.get(param))
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
                for group in filled.param_groups
            ]
        return result
