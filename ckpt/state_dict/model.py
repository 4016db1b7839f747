"""State dicts of models: names of the bare module, tensors in the form that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.holdings import form_holdings, holdings_of
from ckpt.layout.piece import Holding, Kind
from ckpt.layout.plain import Ranks, Refused
from ckpt.layout.region import Shape
from ckpt.layout.sharded_tensor import UnitSharding, is_tensor, sharding_of
from ckpt.state.bind import Binding, bind_state
from ckpt.state.describe import Described, describe_modules, prefixed
from ckpt.state.names import bare_names
from ckpt.state.requested import Asked, Offers
from ckpt.state.types import Catalog, Loaded, Problem, ProblemKind, TensorEntry
from ckpt.state.values import split_tree
from ckpt.state.walk import Leaves
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.forms import Live, Output, take_out
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Table, tell
from ckpt.world.base import World, collectively

EXTRA_STATE = "_extra_state"


def take_model(model: nn.Module, output: Output, world: World, ranks: Ranks) -> dict[str, Any]:
    """The state dict of `model`; collective over `world`. Nothing is gathered that is not asked
    for.

    Raises InvalidState, the same on all ranks, for what cannot be told in this form.
    """
    described, live = collectively(world, "describe", lambda: describe_live(model, ranks, output))
    tensors = take_out(live, output, world, ranks)
    if not output.is_wanted:
        return {}
    found = {name: tensors[name] for name in names_of(described) if name in tensors}
    for fqn, module in described.extra_states:
        found[fqn] = module.get_extra_state()
    for tied, stored in described.aliases.items():
        if stored in found:
            found[tied] = found[stored]
    return found


def describe_live(model: nn.Module, ranks: Ranks, output: Output) -> tuple[Described, Live]:
    """What this rank holds of `model`. Raises InvalidState with all that cannot take part."""
    described = describe_model(model, ranks, loading=False)
    holdings = [
        holding
        for sources, kind in (
            (described.params, Kind.PARAMETER),
            (described.buffers, Kind.BUFFER),
        )
        for source in sources
        for holding in holdings_of(
            source.owned, source.owned.local, prefixed(source.path), kind=kind
        )
    ]
    models = {
        fqn: template
        for source in (*described.params, *described.buffers)
        if (template := source.owned.template) is not None
        for fqn in source.fqns
    }
    buffers = {fqn for source in described.buffers for fqn in source.fqns}
    keeps_low = output.form is StateDictType.LOCAL
    dtypes = {} if keeps_low else buffer_dtypes(described, buffers)
    return described, Live(holdings, models, shardings(described, names_of(described)).get, dtypes)


def describe_model(model: nn.Module, ranks: Ranks, *, loading: bool) -> Described:
    """The tensors of one module by their bare names. Raises InvalidState with all problems."""
    described = describe_modules(Leaves(modules=[("", model)]), ranks, loading=loading)
    if described.problems:
        raise InvalidState(described.problems)
    return described


def names_of(described: Described) -> list[str]:
    """The names that tensors are stored by: parameters, then buffers."""
    return [f for source in (*described.params, *described.buffers) for f in source.fqns]


def shardings(described: Described, names: Iterable[str]) -> dict[str, UnitSharding]:
    """What the innermost unit above each tensor says of itself."""
    told = _told(described)
    if not told:
        return {}
    found = {}
    for name in names:
        path = name
        while path:
            path = path.rpartition(".")[0]
            if path in told:
                found[name] = told[path]
                break
    return found


def buffer_dtypes(described: Described, buffers: Iterable[str]) -> dict[str, torch.dtype]:
    """The dtype of each of `buffers` in state dicts, where its unit lets it live in another."""
    told = _told(described)
    named = {
        f"{path}.{name}" if path else name: dtype
        for path, sharding in told.items()
        for name, dtype in sharding.buffer_dtypes.items()
    }
    return {name: named[name] for name in buffers if name in named}


def _told(described: Described) -> dict[str, UnitSharding]:
    return {
        name: sharding
        for layout in described.layouts
        for name, unit in layout.units
        if (sharding := sharding_of(unit)) is not None
    }


# --- loading -------------------------------------------------------------------------------------


def put_model(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    world: World,
    ranks: Ranks,
    asked: Asked,
) -> ModelLoad:
    """How to fill `model` from the state dicts of all ranks; collective. Nothing has changed yet.

    A rank may have an empty one, which is what all but the first have with `rank0_only`; all others
    have the same names. Raises Mismatch, the same on all ranks.
    """
    loading = ModelLoad(model, world, ranks, asked)
    own = {} if asked.rank0_only and ranks.rank else state_dict
    held = loading.held = collectively(world, "read", lambda: loading.read(own))
    loading.known = tell(world, "held", held)
    names = {holding.pieces[0].fqn for holding in held} | set(loading.extra)
    givers = check_names(world, sorted(names), bool(own), asked.offers)
    loading.extra = share_values(world, loading.extra, givers)
    loading.binding = collectively(world, "compare", lambda: loading.bind(asked.strict))
    return loading


def check_names(world: World, names: list[str], has_any: bool, offers: Offers) -> list[int]:
    """The ranks that have a dict. Raises Mismatch on all ranks when theirs have different names."""
    told = world.gather("names", encode_values(names) if has_any else b"")
    givers = [rank for rank, part in enumerate(told) if part]
    if len({told[rank] for rank in givers}) <= 1:
        return givers
    lists = {rank: set(decode_values(told[rank])) for rank in givers}
    rank0_only = ", or rank0_only=True" if offers.rank0_only else ""
    raise Mismatch(
        [
            f"{name}: is in the dicts of ranks {sorted(r for r in lists if name in lists[r])}, "
            f"not of ranks {sorted(r for r in lists if name not in lists[r])}; pass the same "
            f"dict on all ranks{rank0_only}"
            for name in sorted(set().union(*lists.values()))
            if not all(name in theirs for theirs in lists.values())
        ]
    )


def share_values(world: World, tree: Mapping[str, Any], givers: Sequence[int]) -> Any:
    """`tree`; on ranks that have no dict, that of the first one that does. Collective.

    Raises Mismatch on all ranks when it has something that cannot be sent.
    """
    if not givers or len(givers) == world.size:
        return tree
    is_first = world.rank == givers[0]

    def encoded() -> bytes:
        problems: list[str] = []
        value, tensors = split_tree(dict(tree), "", problems)
        problems += [
            f"{fqn}: a tensor that belongs to no parameter; pass the dict on every rank"
            for fqn, _ in tensors
        ]
        if problems:
            raise Mismatch(problems)
        return encode_values(value)

    data = collectively(world, "values", encoded if is_first else lambda: b"")
    shared = world.gather("values", data)[givers[0]]
    return tree if world.rank in givers else decode_values(shared)


def recast_holding(holding: Holding, dtype: torch.dtype) -> Holding:
    """The holding with values of `dtype`, as `copy_` makes them; itself if they are."""
    if holding.local.dtype is dtype:
        return holding
    local = torch.empty_like(holding.local, dtype=dtype).copy_(holding.local)
    pieces = tuple(piece._replace(dtype=dtype) for piece in holding.pieces)
    return holding._replace(local=local, pieces=pieces)


class ModelLoad:
    """A load of a model in the making, in the order: read, bind, fill."""

    def __init__(self, model: nn.Module, world: World, ranks: Ranks, asked: Asked) -> None:
        self.model = model
        self.asked = asked
        self.world = world
        self.ranks = ranks
        self.held: list[Holding] = []
        self.known: Table = {}
        self.shapes: dict[str, Shape] = {}
        self.extra: dict[str, Any] = {}
        self.binding: Binding
        self.described: Described

    def read(self, state_dict: Mapping[str, Any]) -> list[Holding]:
        """This rank's dict as holdings. Raises Mismatch with everything that is no tensor."""
        self.described = describe_model(self.model, self.ranks, loading=True)
        extra_states = dict(self.described.extra_states)
        described = (*self.described.params, *self.described.buffers)
        shapes = self.shapes = {
            fqn: member.global_shape
            for source in described
            for member, fqn in zip(source.members, source.fqns, strict=True)
        }
        dtypes = {
            fqn: member.dtype
            for source in described
            for member, fqn in zip(source.members, source.fqns, strict=True)
        }
        live_dtypes = {
            fqn: source.owned.local.dtype
            for source in self.described.buffers
            for fqn in source.fqns
        }
        recast = buffer_dtypes(self.described, live_dtypes)
        problems: list[str] = []
        held: list[Holding] = []
        known = {*shapes, *self.described.aliases, *extra_states}
        for fqn, value in bare_names(state_dict, known).items():
            if fqn in extra_states or fqn.rpartition(".")[2] == EXTRA_STATE:
                self.extra[fqn] = value
                continue
            if not is_tensor(value):
                problems.append(
                    f"{fqn}: is a {type(value).__name__}, expected a tensor, a DTensor or a "
                    "ShardedTensor"
                )
                continue
            if fqn in recast and isinstance(value, torch.Tensor) and value.dtype is recast[fqn]:
                value = value.to(live_dtypes[fqn])
            if self.asked.cast and shapes.get(fqn) == () and value.shape == (1,):
                value = value.squeeze(0)  # how torch before 0.4 stored them
            try:
                parts = form_holdings(fqn, value, Kind.OTHER, self.ranks, shape=shapes.get(fqn))
            except Refused as refused:
                problems.append(refused.problem)
                continue
            wanted = dtypes.get(fqn) if self.asked.cast else None
            held += [part if wanted is None else recast_holding(part, wanted) for part in parts]
        if problems:
            raise Mismatch(problems)
        return held

    def bind(self, strict: bool) -> Binding:
        """The live memory that is filled. Raises Mismatch with everything that does not fit."""
        catalog = Catalog(
            {f: TensorEntry(known.dtype, known.shape) for f, known in self.known.items()}
        )
        extra_states = dict(self.described.extra_states)
        binding = bind_state(
            self.model,
            catalog,
            self.ranks,
            strict=strict,
            skip=lambda fqn: fqn in extra_states,
            offers=self.asked.offers,
        )
        problems = [
            problem
            for problem in binding.problems
            if not (
                problem.kind is ProblemKind.UNEXPECTED and problem.fqn in self.described.aliases
            )
        ]
        problems += [*self.tied_problems(), *self.extra_problems(extra_states)]
        if self.asked.every_name:
            reported = {problem.fqn for problem in problems}
            problems += [p for p in self.missing_names() if p.fqn not in reported]
        tolerated = (ProblemKind.MISSING, ProblemKind.UNEXPECTED)
        fatal = [p.text for p in problems if strict or p.kind not in tolerated]
        if fatal:
            raise Mismatch(fatal)
        self.problems = problems
        return binding

    def tied_problems(self) -> list[Problem]:
        """Further names of tied tensors whose values in the dict could not be theirs."""
        return [
            Problem(
                ProblemKind.SHAPE,
                tied,
                f"{tied}: the dict has shape {self.known[tied].shape}, the model has "
                f"{self.shapes[stored]}, tied to {stored}; give it that shape, or leave it out",
            )
            for tied, stored in self.described.aliases.items()
            if tied in self.known
            and stored in self.shapes
            and tuple(self.known[tied].shape) != tuple(self.shapes[stored])
        ]

    def missing_names(self) -> list[Problem]:
        """Names of tied tensors that the dict lacks, also where it has others of the same one."""
        tied = self.described.aliases
        states = dict(self.described.extra_states)
        return [
            Problem(
                ProblemKind.MISSING,
                name,
                f"{name}: is not in the dict; strict=False takes what is tied to it",
            )
            for name in dict.fromkeys((*tied.values(), *tied))
            if name not in self.known and name not in self.extra and tied.get(name) not in states
        ]

    def extra_problems(self, live: Mapping[str, nn.Module]) -> list[Problem]:
        found = []
        for fqn in live:
            if fqn not in self.extra:
                found.append(
                    Problem(
                        ProblemKind.MISSING,
                        fqn,
                        f"{fqn}: is not in the dict"
                        + self.asked.offers.moves(rename="", leave="leave it as it is"),
                    )
                )
        for fqn in self.extra:
            if fqn not in live and fqn not in self.described.aliases:
                found.append(
                    Problem(
                        ProblemKind.UNEXPECTED,
                        fqn,
                        f"{fqn}: is in the dict and the model has no such extra state"
                        + self.asked.offers.moves(rename="", leave="leave it out"),
                    )
                )
        return found

    def fill(self) -> Loaded:
        """Write into the model; collective. An error leaves it half-loaded."""
        collectively(self.world, "prepare", self.binding.prepare)
        redistribute(self.world, self.held, self.known, self.binding.holdings)

        def finish() -> Loaded:
            loaded = self.binding.finish()
            for fqn, module in self.described.extra_states:
                if fqn in self.extra:
                    module.set_extra_state(self.extra[fqn])
            return Loaded(
                loaded.tensors,
                tuple(fqn for fqn, _ in self.described.extra_states if fqn in self.extra),
                tuple(p.fqn for p in self.problems if p.kind is ProblemKind.MISSING),
                tuple(p.fqn for p in self.problems if p.kind is ProblemKind.UNEXPECTED),
                (),
                0,
            )

        return collectively(self.world, "finish", finish)
