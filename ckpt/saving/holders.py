"""Ranks that hold different things: what each of them has, and who has the same.

Nothing in a plain tensor says which ranks have it too, and values are stored once for all. So the
ranks tell each other the names of what they hold, in two rounds at the first save of a session and
whenever the names have changed on any rank. Most trainings have the same names everywhere; then
digests of 32 bytes are all that is sent. Otherwise one rank of each kind sends its names, and every
rank learns who holds what some ranks do not.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ckpt.errors import InvalidState
from ckpt.format.uniting import is_groups
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks
from ckpt.saving.plan import Contents
from ckpt.state.types import FlatState
from ckpt.world.base import World


class NamedTensor(NamedTuple):
    """A tensor of a rank. `is_plain`: nothing but its name says who holds it as well."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    is_plain: bool


class NamedValue(NamedTuple):
    """A value of a rank; of param groups with the names of the parameters, group by group."""

    fqn: str
    params: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank holds, by name. State of parameters is where the parameter is: without it."""

    tensors: tuple[NamedTensor, ...]
    values: tuple[NamedValue, ...]
    modules: tuple[str, ...]

    def encode(self) -> bytes:
        """As JSON; equal inventories are equal bytes."""
        return json.dumps([self.tensors, self.values, self.modules]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Inventory:
        tensors, values, modules = json.loads(data)
        return cls(
            tuple(NamedTensor(fqn, dtype, tuple(shape), p) for fqn, dtype, shape, p in tensors),
            tuple(NamedValue(fqn, tuple(map(tuple, params))) for fqn, params in values),
            tuple(modules),
        )


@dataclass(frozen=True, slots=True)
class Holders:
    """What the ranks have reported to each other, as far as this rank needs it.

    `tensors` has the holders of plain tensors that not all ranks hold, `sends` the names of the
    values that this rank sends for all. `modules` are the paths of the modules of all ranks.
    """

    of: Inventory
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sends: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()


def inventory_of(contents: Contents, ranks: Ranks) -> Inventory:
    """What this rank holds of the state that is saved. `ranks` are those it was flattened with."""
    flat = contents.flat
    # As long as the plan is the same, so are the tensors; values are looked at every time.
    tensors = contents.plan.of_memory.once("names", lambda: _tensors_of(flat, ranks))
    values = [
        NamedValue(
            fqn,
            tuple(tuple(group["params"]) for group in value) if is_groups(value, fqn) else (),
        )
        for fqn, value in flat.values.items()
    ]
    return Inventory(tensors, tuple(sorted(values)), contents.modules)


def _tensors_of(flat: FlatState, ranks: Ranks) -> tuple[NamedTensor, ...]:
    names: dict[Any, str] = {}
    tensors: dict[str, NamedTensor] = {}
    for holding in (*flat.holdings, *flat.witnesses):
        if holding.kind is Kind.OPTIMIZER:
            continue
        for piece in holding.pieces:
            if piece.fqn not in tensors:
                dtype = names.get(piece.dtype) or names.setdefault(
                    piece.dtype, dtype_name(piece.dtype)
                )
                plain = _is_plain(holding, piece.holders, piece.fqn, ranks)
                tensors[piece.fqn] = NamedTensor(piece.fqn, dtype, piece.global_shape, plain)
    return tuple(sorted(tensors.values()))


def _is_plain(holding: Holding, holders: tuple[int, ...], fqn: str, ranks: Ranks) -> bool:
    return holding.is_unshared and (len(holders) == len(ranks.global_ranks) or fqn in ranks.held)


def report_names(world: World, mine: Inventory | None) -> Holders | None:
    """Report to the other ranks what this one holds. Collective; None when a rank has no inventory.

    Raises InvalidState on all ranks where they contradict each other.
    """
    digest = b"" if mine is None else hashlib.sha256(mine.encode()).digest()
    digests = world.gather_to_coordinator("names", digest)
    answer = world.broadcast("alike", None if digests is None else _first_ranks(digests))
    first_ranks: list[int] = json.loads(answer)
    if mine is None or not first_ranks:
        return None
    if len(set(first_ranks)) == 1:
        sends = frozenset(value.fqn for value in mine.values) if world.rank == 0 else frozenset()
        return Holders(mine, {}, sends, mine.modules)
    is_first = first_ranks[world.rank] == world.rank
    payload = zlib.compress(mine.encode(), level=1) if is_first else b""
    received = world.gather_to_coordinator("inventories", payload)
    joined = None if received is None else _joined(received, first_ranks)
    return _holders_of(mine, json.loads(zlib.decompress(world.broadcast("holders", joined))), world)


def _first_ranks(digests: Sequence[bytes]) -> bytes:
    """Per rank the first one with the same digest; nothing when a rank has none."""
    if not all(digests):
        return json.dumps([]).encode()
    first: dict[bytes, int] = {}
    return json.dumps([first.setdefault(d, rank) for rank, d in enumerate(digests)]).encode()


def _holders_of(mine: Inventory, answer: Mapping[str, Any], world: World) -> Holders:
    if answer["problems"]:
        raise InvalidState(answer["problems"])
    names = {tensor.fqn for tensor in mine.tensors if tensor.is_plain}
    tensors = {
        fqn: tuple(ranks)
        for ranks, fqns in answer["tensors"]
        for fqn in fqns
        if world.rank in ranks and fqn in names
    }
    sends = frozenset(answer["values"].get(str(world.rank), ()))
    return Holders(mine, tensors, sends, tuple(answer["modules"]))


def _joined(received: Sequence[bytes], first_ranks: Sequence[int]) -> bytes:
    """The answer of the coordinator, from one inventory of each kind."""
    kinds: dict[int, list[int]] = {}
    for rank, first in enumerate(first_ranks):
        kinds.setdefault(first, []).append(rank)
    inventories = {
        first: Inventory.decode(zlib.decompress(received[first])) for first in sorted(kinds)
    }
    by_holders: dict[tuple[int, ...], list[str]] = {}
    problems = []
    for fqn, firsts in _having(inventories).items():
        claims = {first: tensor for first, tensor in firsts}
        problems += _contradictions(fqn, claims, kinds)
        ranks = tuple(sorted(rank for first in claims for rank in kinds[first]))
        if len(ranks) < len(first_ranks):
            by_holders.setdefault(ranks, []).append(fqn)
    modules = {path for inventory in inventories.values() for path in inventory.modules}
    answer = {
        "problems": problems,
        "tensors": list(by_holders.items()),
        "values": _senders(inventories),
        "modules": sorted(modules),
    }
    return zlib.compress(json.dumps(answer).encode(), level=1)


def _having(inventories: Mapping[int, Inventory]) -> dict[str, list[tuple[int, NamedTensor]]]:
    having: dict[str, list[tuple[int, NamedTensor]]] = {}
    for first, inventory in inventories.items():
        for tensor in inventory.tensors:
            having.setdefault(tensor.fqn, []).append((first, tensor))
    return having


def _senders(inventories: Mapping[int, Inventory]) -> dict[int, list[str]]:
    """By rank the values that it sends: the first rank that has each, or these param groups."""
    known: set[NamedValue] = set()
    senders: dict[int, list[str]] = {}
    for first, inventory in inventories.items():
        new = set(inventory.values) - known
        known |= new
        senders[first] = sorted(value.fqn for value in new)
    return senders


def _contradictions(
    fqn: str, claims: Mapping[int, NamedTensor], kinds: Mapping[int, Sequence[int]]
) -> list[str]:
    """That ranks have different tensors of one name, and what to do."""
    different: dict[NamedTensor, list[int]] = {}
    for first, tensor in claims.items():
        different.setdefault(tensor, []).extend(kinds[first])
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


def ranks_in_words(ranks: Collection[int], shown_max: int = 8) -> str:
    """Some ranks for a message: "rank 3", "ranks 0 to 3", "ranks 0, 2 and 5 more"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and all(b == a + 1 for a, b in pairwise(ordered)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    more = len(ordered) - shown_max
    shown = ", ".join(map(str, ordered[:shown_max]))
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")
