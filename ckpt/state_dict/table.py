"""Who has what: the tensors of a state as all ranks know them, and whose bytes a rank may take.

Two ranks may hold equal regions of one name and mean different tensors: two models, each sharded
over ranks of its own. So a rank takes bytes only from the ranks that its tensor is laid out over,
and of equal regions there only when their holders are declared replicas of each other.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.format.chunk_rules import cover_problem
from ckpt.layout.dtypes import dtype_name, torch_dtype
from ckpt.layout.piece import Holding
from ckpt.layout.region import Box, Region, Shape, Span, span_of
from ckpt.state.types import TensorEntry
from ckpt.world.base import World

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor as all ranks know it: `regions[r]` are those that rank r has of it, none empty.

    `replicas[r][region]` are the ranks that r says have the same there, `owners[r]` those that r
    says the tensor is laid out over (see `Owned`), missing where r says nothing.
    """

    shape: Shape
    dtype: torch.dtype
    regions: dict[int, list[Region]] = field(default_factory=dict)
    replicas: dict[int, dict[Region, Ranks]] = field(default_factory=dict)
    owners: dict[int, Ranks] = field(default_factory=dict)

    def holders(self) -> dict[Region, list[int]]:
        """The ranks that have each of the regions, in one order on all ranks."""
        holders: dict[Region, list[int]] = {}
        for rank, regions in self.regions.items():
            for region in dict.fromkeys(regions):
                holders.setdefault(region, []).append(rank)
        return holders

    def sources(self, rank: int, owners: Ranks = ()) -> frozenset[int] | None:
        """The ranks whose regions `rank` may take besides its own; None: those of all.

        `owners` are the ranks that the memory to fill there is laid out over, if it says so.
        """
        own = self.owners.get(rank)
        if own:
            return frozenset(own)
        # This rank does not say: a group of others that it is in may.
        groups = {group for group in self.owners.values() if group}
        around = {group for group in groups if rank in group}
        if len(around) == 1:
            return frozenset(around.pop())
        # Nobody says a group (dicts of plain tensors): the ranks that share what is filled, as far
        # as they have the tensor; else all, and `Routes.problem` refuses what is ambiguous.
        near = frozenset(rank for rank in owners if rank in self.regions)
        return near if near and not groups else None

    def is_own(self, rank: int) -> bool:
        """Whether other ranks have such a tensor, each one of its own, and `rank` has none."""
        groups = self.owners.values()
        return rank not in self.owners and bool(groups) and not any(groups)


Table = dict[str, Known]


def normal(region: Region, shape: Shape) -> Region:
    """`region` as a span if it is one run, else as a box."""
    if isinstance(region, Span):
        return region
    return span_of(region, shape) or region


def gather_table(world: World, phase: str, holdings: Sequence[Holding]) -> Table:
    """What all ranks have, in the order of ranks; the same on all ranks. Collective, one round.

    Raises Mismatch on all ranks when they disagree about a tensor's shape or dtype.
    """
    known: Table = {}
    problems: list[str] = []
    for rank, part in enumerate(world.gather(phase, _encoded(holdings))):
        groups, tensors, regions = json.loads(zlib.decompress(part))
        # One message has each group of ranks once; it is looked up by number.
        ranks = [None if group is None else tuple(group) for group in groups]
        for fqn, name, size, owners in tensors:
            shape, dtype = tuple(size), torch_dtype(name)
            entry = known.setdefault(fqn, Known(shape, dtype))
            if (entry.shape, entry.dtype) != (shape, dtype):
                problems.append(
                    f"{fqn}: rank {rank} has shape {shape} and {dtype}, a rank before it has "
                    f"{entry.shape} and {entry.dtype}; give all ranks the same model and dict"
                )
            if (group := ranks[owners]) is not None:
                entry.owners[rank] = group
        for index, replicas, a, b in regions:
            # A span is two numbers, a box two lists.
            region = Span(a, b) if isinstance(a, int) else Box(tuple(a), tuple(b))
            entry = known[tensors[index][0]]
            entry.regions.setdefault(rank, []).append(region)
            entry.replicas.setdefault(rank, {})[region] = ranks[replicas] or ()
    if problems:
        raise Mismatch(problems)
    return known


def entries_of(known: Table) -> dict[str, TensorEntry]:
    """The tensors as the catalog of a checkpoint has them."""
    return {fqn: TensorEntry(entry.dtype, entry.shape) for fqn, entry in known.items()}


def _encoded(holdings: Sequence[Holding]) -> bytes:
    index_of: dict[str, int] = {}
    # Groups of ranks are few and long: they are sent once, and counted.
    number_of: dict[Ranks | None, int] = {}
    tensors: list[tuple[str, str, Shape, int]] = []
    regions: list[tuple[int, int, Any, Any]] = []
    for holding in holdings:
        owners = number_of.setdefault(holding.owners, len(number_of))
        for piece in holding.pieces:
            index = index_of.setdefault(piece.fqn, len(tensors))
            if index == len(tensors):
                tensors.append((piece.fqn, dtype_name(piece.dtype), piece.global_shape, owners))
            region = normal(piece.region, piece.global_shape)
            if region.numel:
                replicas = number_of.setdefault(piece.holders, len(number_of))
                regions.append((index, replicas, *region))
    return zlib.compress(json.dumps([list(number_of), tensors, regions]).encode(), 1)


# --- from whom -----------------------------------------------------------------------------------


class Routes:
    """From whom each rank takes what it wants of one tensor. The same on all ranks."""

    def __init__(self, entry: Known, request: Known) -> None:
        self._entry = entry
        self._sources = {
            rank: entry.sources(rank, request.owners.get(rank, ())) for rank in request.regions
        }

    def giver(self, holders: Sequence[int], taker: int, size: int) -> int | None:
        """Which of the holders of a region gives it to `taker`: itself if it is one, else one that
        it may take bytes from; None without such a holder.
        """
        if taker in holders:
            return taker
        sources = self._sources[taker]
        if sources is not None:
            holders = [rank for rank in holders if rank in sources]
        # Takers are divided evenly among holders, so that no rank sends to all.
        return holders[taker * len(holders) // size] if holders else None

    def problem(self, fqn: str) -> str | None:
        """Why the regions that ranks may take are not one tensor; None when they are."""
        entry, checked = self._entry, set()
        holders = entry.holders()
        for taker, sources in self._sources.items():
            group = frozenset(entry.regions) if sources is None else sources | {taker}
            if group in checked:  # most takers have the same sources
                continue
            checked.add(group)
            here = {region: [r for r in ranks if r in group] for region, ranks in holders.items()}
            for region, ranks in here.items():
                for one, other in itertools.pairwise(ranks):
                    known = entry.replicas[one][region], entry.replicas[other][region]
                    if other not in known[0] or one not in known[1]:
                        return (
                            f"{fqn}: ranks {one} and {other} both have {region} of it, and neither "
                            "their groups nor their meshes make them replicas of each other; rank "
                            f"{taker} cannot tell whose to take. Pass process_group= with the "
                            "ranks that share one model"
                        )
            problem = cover_problem(
                [region for region, ranks in here.items() if ranks], entry.shape
            )
            if problem is not None:
                return (
                    f"{fqn}: the ranks {sorted(group & entry.regions.keys())} that have parts of "
                    f"it do not have all of it once: {problem}; pass the dicts of all ranks"
                )
        return None
