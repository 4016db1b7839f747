"""Ranks that hold different things: what each of them has, and who has the same.

Nothing in a plain tensor says which ranks have it too, and values are stored once for all. So the
ranks tell each other the names of what they hold, in two rounds at the first save of a session and
whenever the names have changed on any rank. Most trainings have the same names everywhere; then
digests of 32 bytes are all that is sent. Otherwise one rank of each kind sends its names, and every
rank learns who holds what some ranks do not.

Stages that say of how many they are have to be there, all of them, on one rank or another. Other
names that are on no rank prove nothing: a model may have had more layers before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ckpt.errors import InvalidState
from ckpt.format.joint_manifest import is_groups
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.plain import Ranks
from ckpt.saving.plan import Contents, is_shared
from ckpt.state.types import FlatState, StagesHere
from ckpt.world.agreement import ranks_in_words
from ckpt.world.base import World, decided_json


class NamedTensor(NamedTuple):
    """A tensor of a rank. `is_plain`: only its name says who holds it as well. Otherwise
    `group` is the number of the ranks, among the groups of the inventory, that an engine lays it
    out over; None for all ranks, or where the engine does not say.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    is_plain: bool
    group: int | None = None


class NamedValue(NamedTuple):
    """A value of a rank; of param groups with the names of the parameters, group by group."""

    fqn: str
    params: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank holds, by name, without the optimizer state of parameters: that is where the
    parameter is.

    `is_replicated`: some of it is on other ranks as well, and an engine keeps it equal there.
    """

    tensors: tuple[NamedTensor, ...]
    values: tuple[NamedValue, ...]
    modules: tuple[str, ...]
    stages: tuple[StagesHere, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    is_replicated: bool = False

    def encode(self) -> str:
        """As JSON; equal inventories are equal texts."""
        fields = (self.tensors, self.values, self.modules, self.stages, self.groups)
        return json.dumps((*fields, self.is_replicated))

    @classmethod
    def decode(cls, data: str) -> Inventory:
        tensors, values, *others = _as_tuples(json.loads(data))
        named = tuple(map(NamedTensor._make, tensors)), tuple(map(NamedValue._make, values))
        return cls(*named, *others)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Holders:
    """What the ranks have reported to each other, as far as this rank needs it.

    `tensors` has the holders of plain tensors that not all ranks hold, `sends` the names of the
    values that this rank sends for all. `modules` are the paths of the modules of all ranks.
    `are_shared`: some tensors are on several ranks and must be equal there, though no engine keeps
    them so; `are_replicated`: some are, and an engine does. `copies` has the groups of ranks of
    which each has all of a tensor of one name.
    """

    of: Inventory
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sends: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    are_shared: bool = False
    copies: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    are_replicated: bool = False


def inventory_of(contents: Contents, ranks: Ranks) -> Inventory:
    """What this rank holds of the state that is saved. `ranks` are those it was flattened with."""
    flat = contents.flat
    # As long as the plan is the same, so are the tensors; values are looked at every time.
    tensors, groups = contents.plan.of_memory.once("names", lambda: _tensors_of(flat, ranks))
    # Groups are united by the names of their parameters, so ranks may send different groups under
    # one name; all other values of one name have to be equal.
    values = [
        NamedValue(
            fqn, tuple(tuple(group["params"]) for group in value) if is_groups(value, fqn) else ()
        )
        for fqn, value in flat.values.items()
    ]
    return Inventory(
        tensors,
        tuple(sorted(values)),
        contents.modules,
        contents.stages,
        groups,
        bool(contents.plan.replicated),
    )


def _tensors_of(
    flat: FlatState, ranks: Ranks
) -> tuple[tuple[NamedTensor, ...], tuple[tuple[int, ...], ...]]:
    tensors: dict[str, NamedTensor] = {}
    groups: dict[tuple[int, ...], int] = {}
    for holding in (*flat.holdings, *flat.witnesses):
        if holding.kind is Kind.OPTIMIZER:
            continue
        for piece in holding.pieces:
            if piece.fqn not in tensors:
                is_everywhere = len(piece.holders) == len(ranks.global_ranks)
                plain = holding.is_unshared and (is_everywhere or piece.fqn in ranks.held)
                owners = _owners(holding, piece, ranks)
                group = groups.setdefault(owners, len(groups)) if owners else None
                dtype = dtype_name(piece.dtype)
                tensors[piece.fqn] = NamedTensor(piece.fqn, dtype, piece.global_shape, plain, group)
    return tuple(tensors[fqn] for fqn in sorted(tensors)), tuple(groups)


def _owners(holding: Holding, piece: Piece, ranks: Ranks) -> tuple[int, ...]:
    """The ranks that have all of a tensor together, if they are some of all; else nothing."""
    owners = holding.owners or ()
    if len(owners) == len(ranks.global_ranks):
        return ()
    # Holders outside are replicas that the engine knows of: its group is a part of a larger one.
    is_all = piece.fqn in ranks.copies or owners == piece.holders or {*piece.holders} <= {*owners}
    return owners if is_all else ()


def report_names(world: World, contents: Contents | None, ranks: Ranks) -> Holders | None:
    """Report to the other ranks what this one holds, None where it cannot say. Collective; None
    when a rank cannot.

    Raises InvalidState on all ranks where they contradict each other, or a stage is on none of
    them.
    """
    mine = None if contents is None else inventory_of(contents, ranks)
    are_shared = contents is not None and any(is_shared(*one) for one in contents.plan.compared)
    # 32 bytes instead of all names: with equal ranks, which is the rule, nothing else is sent.
    digest = "" if mine is None else hashlib.sha256(mine.encode().encode()).hexdigest()

    def alike(digests: list[str]) -> tuple[list[int], bool]:
        # Per rank the first one with the same digest; nothing when a rank has none.
        known: dict[str, int] = {}
        first = [known.setdefault(one, rank) for rank, one in enumerate(digests)]
        return first if all(digests) else [], are_shared

    first_ranks, are_shared = decided_json(world, "names", "alike", digest, alike)
    if mine is None or not first_ranks:
        return None
    kinds: dict[int, list[int]] = {}
    for rank, first in enumerate(first_ranks):
        kinds.setdefault(first, []).append(rank)
    if len(kinds) == 1:
        # Equal on all ranks, so each of them finds the same.
        answer = {**_answer({0: mine}, kinds), "are_shared": are_shared}
    else:

        def joined(received: list[str]) -> dict[str, Any]:
            return _answer({first: Inventory.decode(received[first]) for first in kinds}, kinds)

        # One rank of each kind sends its inventory: the others would send the same again.
        own = mine.encode() if world.rank in kinds else ""
        answer = decided_json(world, "inventories", "holders", own, joined)
    if answer["problems"]:
        raise InvalidState(answer["problems"])
    names = {tensor.fqn for tensor in mine.tensors if tensor.is_plain}
    return Holders(
        mine,
        {
            fqn: tuple(holders)
            for holders, fqns in answer["tensors"]
            if world.rank in holders
            for fqn in names.intersection(fqns)
        },
        frozenset(dict(answer["values"]).get(world.rank, ())),
        tuple(answer["modules"]),
        answer["are_shared"],
        {fqn: groups for groups, fqns in _as_tuples(answer["copies"]) for fqn in fqns},
        answer["are_replicated"],
    )


def _answer(
    inventories: Mapping[int, Inventory], kinds: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    """What all ranks need to know, from one inventory of each kind of them."""
    by_holders: dict[tuple[int, ...], list[str]] = {}
    problems = _missing_stages(inventories, kinds)
    are_shared = False
    copies: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    having: dict[str, dict[int, NamedTensor]] = {}
    for first, inventory in inventories.items():
        for tensor in inventory.tensors:
            having.setdefault(tensor.fqn, {})[first] = tensor
    # Thousands of tensors share a few sets of ranks: each set is sorted once.
    members = cache(lambda *firsts: tuple(sorted(chain(*map(kinds.__getitem__, firsts)))))
    for fqn, claims in having.items():
        if len(claims) > 1:
            problems += _contradictions(fqn, claims, kinds)
        ranks = members(*claims)
        are_shared |= len(ranks) > 1 and any(tensor.is_plain for tensor in claims.values())
        if len(groups := _groups_of(claims, inventories)) > 1:
            copies.setdefault(groups, []).append(fqn)
            if len(set(map(len, groups))) > 1:
                texts = "; ".join(map(ranks_in_words, groups))
                problems.append(
                    f"{fqn}: lies on groups of ranks of different sizes, which share no rank: "
                    f"{texts}; cut it over as many ranks in each, or give each a name of its own"
                )
        # What every kind has is held by everyone, which needs no word.
        if len(claims) < len(inventories):
            by_holders.setdefault(ranks, []).append(fqn)
    # Each value is sent by the first rank that has it, or these param groups.
    sent, senders = set[NamedValue](), list[tuple[int, list[str]]]()
    for first, inventory in inventories.items():
        senders.append((first, sorted(value.fqn for value in {*inventory.values} - sent)))
        sent |= {*inventory.values}
    return {
        "problems": problems,
        "tensors": list(by_holders.items()),
        "values": senders,
        "modules": sorted({path for one in inventories.values() for path in one.modules}),
        "are_shared": are_shared or bool(copies),
        "are_replicated": any(one.is_replicated for one in inventories.values()),
        "copies": list(copies.items()),
    }


def _groups_of(
    claims: Mapping[int, NamedTensor], inventories: Mapping[int, Inventory]
) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks of which each has all of a tensor. None if two share a rank, or an engine
    does not say what its group is.
    """
    numbers = [(first, tensor.group) for first, tensor in claims.items()]
    groups = {inventories[first].groups[n] for first, n in numbers if n is not None}
    members = [rank for group in groups for rank in group]
    is_apart = len(members) == len(set(members)) and all(n is not None for _, n in numbers)
    return tuple(sorted(groups)) if is_apart else ()


def refuse_missing_stages(stages: Sequence[StagesHere]) -> None:
    """Raise InvalidState where a process that saves alone lacks a stage."""
    if problems := _missing_stages({0: Inventory((), (), (), tuple(stages))}, {0: [0]}):
        raise InvalidState(problems)


def _missing_stages(
    inventories: Mapping[int, Inventory], kinds: Mapping[int, Sequence[int]]
) -> list[str]:
    """Texts about stages that no rank has, and about ranks that disagree on their number."""
    counts: dict[str, dict[int, list[int]]] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    for first, inventory in inventories.items():
        for path, count, numbers in inventory.stages:
            counts.setdefault(path, {}).setdefault(count, []).extend(kinds[first])
            for number in numbers:
                holders.setdefault(path, {}).setdefault(number, []).extend(kinds[first])
    problems = []
    for path, by_count in sorted(counts.items()):
        if len(by_count) > 1:
            texts = [f"{count} on {ranks_in_words(ranks)}" for count, ranks in by_count.items()]
            problems.append(
                f"{path}: the ranks count the stages otherwise: {'; '.join(texts)}; give all "
                "stages of one pipeline the same count"
            )
            continue
        (count,) = by_count
        held = holders[path]
        if missing := [str(number) for number in range(count) if number not in held]:
            texts = [f"{number} on {ranks_in_words(held[number])}" for number in sorted(held)]
            problems.append(
                f"{path}: of {count} stages {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} on no rank ({'; '.join(texts)}); save "
                "with all ranks of the pipeline, or pass modules that say no count"
            )
    return problems


def _contradictions(
    fqn: str, claims: Mapping[int, NamedTensor], kinds: Mapping[int, Sequence[int]]
) -> list[str]:
    """A text where ranks have different tensors of one name."""
    different: dict[NamedTensor, list[int]] = {}
    for first, tensor in claims.items():
        # Numbers of groups are each rank's own; they say nothing about the tensor.
        different.setdefault(tensor._replace(group=None), []).extend(kinds[first])
    if len(different) == 1:
        return []
    texts = [
        f"{tensor.dtype}{list(tensor.shape)}{'' if tensor.is_plain else ', laid out by an engine,'}"
        f" on {ranks_in_words(ranks)}"
        for tensor, ranks in different.items()
    ]
    return [
        f"{fqn}: the ranks hold different tensors of this name: {'; '.join(texts)}; keep the names "
        "of the whole model in every stage, or give what is something else a name of its own"
    ]
