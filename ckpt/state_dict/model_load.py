"""Loading state dicts of models: every rank gives what its dict has, each takes its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.composites import is_composite
from ckpt.layout.holdings import form_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.sharded_tensor import is_sharded_tensor, is_tensor
from ckpt.state.bind import bind_state
from ckpt.state.binding import Binding
from ckpt.state.describe import Described, LogicalTensor
from ckpt.state.names import bare_names
from ckpt.state.requested import LoadRequest
from ckpt.state.types import Catalog, Loaded, Problem, ProblemKind, fatal_texts
from ckpt.state_dict.model import buffer_dtypes, check_names, describe_model, share_values
from ckpt.state_dict.model_composites import given_composite, tied_composites
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Table, entries_of, gather_table
from ckpt.world.base import World, collectively

__all__ = ["ModelLoad", "put_model"]

EXTRA_STATE = "_extra_state"


def put_model(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    world: World,
    ranks: Ranks,
    request: LoadRequest,
) -> ModelLoad:
    """How to fill `model` from the state dicts of all ranks; collective. Nothing has changed yet.

    A rank may have an empty one, which is what all but the first have with `rank0_only`; all others
    have the same names. Raises Mismatch, the same on all ranks.
    """
    own = {} if request.rank0_only and ranks.rank else state_dict
    given = collectively(world, "read", lambda: _read(model, own, ranks, request))
    known = gather_table(world, "held", given.held)
    names = {holding.pieces[0].fqn for holding in given.held}
    names |= given.extra.keys() | given.composites.keys()
    givers = check_names(world, sorted(names), bool(own), request.call)
    if givers and len(givers) < world.size:
        # As bytes: references to tensors stand among the values.
        tree = {"extra": given.extra, "composites": encode_values(given.composites)}
        shared = share_values(world, tree, givers)
        composites = decode_values(shared["composites"])
        given = replace(given, extra=shared["extra"], composites=composites)
    fitting = _Fitting(model, ranks, request, given, known)
    binding, problems = collectively(world, "compare", fitting.bound)
    return ModelLoad(world, given, known, binding, problems)


@dataclass(frozen=True, slots=True)
class _GivenModel:
    """What one rank's dict has, and the model that it is for, with its tensors by name.

    `extra` are the extra states of the dict, `extra_states` the modules that have some.
    `composites` are descriptions of what consists of other tensors, which are held.
    """

    described: Described
    members: Mapping[str, LogicalTensor]
    extra_states: Mapping[str, nn.Module]
    held: Sequence[Holding]
    extra: Mapping[str, Any]
    composites: Mapping[str, Any]


def _read(
    model: nn.Module, state_dict: Mapping[str, Any], ranks: Ranks, request: LoadRequest
) -> _GivenModel:
    """This rank's dict as holdings. Raises Mismatch with everything that is no tensor."""
    described = describe_model(model, ranks, loading=True)
    extra_states = dict(described.extra_states)
    members = {
        fqn: member
        for source, _ in described.tensors()
        for member, fqn in zip(source.members, source.fqns, strict=True)
    }
    live_dtypes = {
        fqn: source.owned.local.dtype for source in described.buffers for fqn in source.fqns
    }
    recast = buffer_dtypes(described, live_dtypes)
    problems: list[str] = []
    held: list[Holding] = []
    extra: dict[str, Any] = {}
    composites: dict[str, Any] = {}
    tied = tied_composites(described)
    known = {*members, *described.aliases, *extra_states, *described.composites, *tied}
    for fqn, value in bare_names(state_dict, known).items():
        # By its ending too: extra state that this model has no place for is no wrong tensor.
        if fqn in extra_states or fqn.rpartition(".")[2] == EXTRA_STATE:
            extra[fqn] = value
            continue
        if not is_tensor(value):
            problems.append(
                f"{fqn}: is a {type(value).__name__}, expected a tensor, a DTensor or a "
                "ShardedTensor"
            )
            continue
        if not is_sharded_tensor(value) and is_composite(value):
            composites[fqn], components = given_composite(fqn, value, problems)
            for name, part in components:
                held += form_holdings(name, part, Kind.OTHER, ranks, shape=None)
            continue
        # A dict has buffers in their own dtype, a unit with mixed precision has them in another.
        if fqn in recast and isinstance(value, torch.Tensor) and value.dtype is recast[fqn]:
            value = value.to(live_dtypes[fqn])
        member = members.get(fqn)
        if request.cast and member and member.global_shape == () and value.shape == (1,):
            value = value.squeeze(0)  # how torch before 0.4 stored them
        # A tied name stands for the shape of the tensor that it is tied to.
        stored = members.get(described.aliases.get(fqn, fqn))
        shape = None if stored is None else stored.global_shape
        try:
            parts = form_holdings(fqn, value, Kind.OTHER, ranks, shape=shape)
        except UnsupportedTensor as refused:
            problems.append(refused.problem)
            continue
        if request.cast and member:
            parts = [recast_holding(part, member.dtype) for part in parts]
        held += parts
    if problems:
        raise Mismatch(problems)
    return _GivenModel(described, members, extra_states, held, extra, composites)


def recast_holding(holding: Holding, dtype: torch.dtype) -> Holding:
    """The holding with values of `dtype`, as `copy_` makes them; itself if they are."""
    if holding.local.dtype is dtype:
        return holding
    local = torch.empty_like(holding.local, dtype=dtype).copy_(holding.local)
    pieces = tuple(piece._replace(dtype=dtype) for piece in holding.pieces)
    return holding._replace(local=local, pieces=pieces)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Compares what all ranks gave with the model of this rank."""

    model: nn.Module
    ranks: Ranks
    request: LoadRequest
    given: _GivenModel
    known: Table

    def bound(self) -> tuple[Binding, list[Problem]]:
        """The live memory that is filled. Raises Mismatch with everything that does not fit."""
        strict, given = self.request.strict, self.given
        binding = bind_state(
            self.model,
            Catalog(entries_of(self.known), given.composites),
            self.ranks,
            strict=strict,
            # Extra states are no tensors: `ModelLoad.fill` gives them to their modules.
            skip=given.extra_states.__contains__,
            call=self.request.call,
        )
        # A dict has tied tensors under all their names, and the state takes one of them.
        tied = given.described.aliases | tied_composites(given.described)
        problems = [
            problem
            for problem in binding.problems
            if problem.kind is not ProblemKind.UNEXPECTED or problem.fqn not in tied
        ]
        problems += [*self.tied_problems(), *self.extra_problems()]
        if self.request.every_name:
            reported = {problem.fqn for problem in problems}
            problems += [p for p in self.missing_names() if p.fqn not in reported]
        if fatal := fatal_texts(problems, strict=strict):
            raise Mismatch(fatal)
        return binding, problems

    def tied_problems(self) -> list[Problem]:
        """Further names of tied tensors whose values in the dict could not be theirs."""
        members = self.given.members
        return [
            Problem(
                ProblemKind.SHAPE,
                tied,
                f"{tied}: the dict has shape {self.known[tied].shape}, the model has "
                f"{members[stored].global_shape}, tied to {stored}; give it that shape, or leave "
                "it out",
            )
            for tied, stored in self.given.described.aliases.items()
            if tied in self.known
            and stored in members
            and self.known[tied].shape != members[stored].global_shape
        ]

    def missing_names(self) -> list[Problem]:
        """Names of tied tensors that the dict lacks, also where it has others of the same one."""
        tied = self.given.described.aliases
        return [
            Problem(
                ProblemKind.MISSING,
                name,
                f"{name}: is not in the dict; strict=False takes what is tied to it",
            )
            for name in dict.fromkeys((*tied.values(), *tied))
            if name not in self.known
            and name not in self.given.extra
            and tied.get(name) not in self.given.extra_states
        ]

    def extra_problems(self) -> list[Problem]:
        """Extra states that the dict lacks, and those that no module takes."""
        given, call = self.given, self.request.call
        lacks = "is not in the dict" + call.moves(rename="", leave="leave it as it is")
        odd = "is in the dict and the model has no such extra state" + call.moves(
            rename="", leave="leave it out"
        )
        taken = {*given.extra_states, *given.described.aliases}
        return [
            Problem(ProblemKind.MISSING, fqn, f"{fqn}: {lacks}")
            for fqn in given.extra_states
            if fqn not in given.extra
        ] + [
            Problem(ProblemKind.UNEXPECTED, fqn, f"{fqn}: {odd}")
            for fqn in given.extra
            if fqn not in taken
        ]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A load of a model that fits; `fill` does it."""

    world: World
    given: _GivenModel
    known: Table
    binding: Binding
    problems: Sequence[Problem]

    def fill(self) -> Loaded:
        """Write into the model; collective. An error leaves it half-loaded."""
        collectively(self.world, "prepare", self.binding.prepare)
        redistribute(self.world, self.given.held, self.known, self.binding.holdings)

        def finish() -> Loaded:
            loaded = self.binding.finish()
            extra, modules = self.given.extra, self.given.extra_states
            given = [fqn for fqn in modules if fqn in extra]
            for fqn in given:
                modules[fqn].set_extra_state(extra[fqn])
            return Loaded(
                loaded.tensors,
                tuple(given),
                tuple(p.fqn for p in self.problems if p.kind is ProblemKind.MISSING),
                tuple(p.fqn for p in self.problems if p.kind is ProblemKind.UNEXPECTED),
            )

        return collectively(self.world, "finish", finish)
