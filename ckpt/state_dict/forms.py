"""From named holdings to the tensors of a state dict, in each form."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ckpt.errors import InvalidState
from ckpt.layout.kind import Kind
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Box, Span, boxes_of, chunk_of, whole
from ckpt.layout.sharded_tensor import (
    UnitSharding,
    chunk_placements,
    make_dtensor,
    make_sharded_tensor,
)
from ckpt.state.types import Unshared
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.model import ranks_of
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import Known, Table, gather_table
from ckpt.world.base import World, collectively

Make = Callable[[], Any]


class DictForm(NamedTuple):
    """What a state dict shall be: its form, where its tensors lie, and whether this rank gets any.

    `use_dtensor` is that of `ShardedStateDictConfig`, `group` the ranks of the world as torch knows
    them (None for all), `beside` is for optimizers. With `copied`, identities of parameters, a
    model's other tensors are given as they are.
    """

    form: StateDictType
    offload_to_cpu: bool
    is_wanted: bool
    use_dtensor: bool | None
    group: dist.ProcessGroup | None
    beside: Unshared = Unshared.COMPARED
    copied: Container[int] | None = None


class LiveTensors(NamedTuple):
    """The tensors of a state as this rank holds them, and what is known of some by name.

    `models` are DTensors that a tensor is laid out like, `sharding_of` gives the group or mesh that
    the unit of a tensor reports, `dtypes` the dtype in the dict where the live tensor has another.
    """

    holdings: list[Holding]
    models: Mapping[str, torch.Tensor]
    sharding_of: Callable[[str], UnitSharding | None]
    dtypes: Mapping[str, torch.dtype]


class _Made(NamedTuple):
    """Memory to fill, and what then stands in the state dict."""

    holding: Holding | None
    make: Make


def take_out(live: LiveTensors, output: DictForm, world: World) -> dict[str, Any]:
    """The tensors of a state dict by name; collective. Empty on ranks that get nothing."""
    known = gather_table(world, "held", live.holdings)
    taking = _Taking(live, output, ranks_of(world), known)
    # Agreed on: a rank that has no memory for its part must not leave the others in the exchange.
    made = collectively(world, "allocate", taking.all)
    redistribute(world, live.holdings, known, [m.holding for m in made.values() if m.holding])
    return {fqn: one.make() for fqn, one in made.items()}


class _Taking:
    """This rank's tensors of a state dict in the making: memory of the form that is requested."""

    def __init__(self, live: LiveTensors, output: DictForm, ranks: Ranks, known: Table) -> None:
        self.live = live
        self.output = output
        self.ranks = ranks
        self.known = known
        self.problems: list[str] = []
        self.own: dict[str, list[tuple[Holding, Piece]]] = {}
        for holding in live.holdings:
            for piece in holding.pieces:
                self.own.setdefault(piece.fqn, []).append((holding, piece))
        # Where this rank puts what it has nothing of. Not by scalars, which optimizers keep on the
        # host next to parameters on a device.
        homes = [holding.local.device for holding in live.holdings if holding.local.ndim]
        self.home = homes[0] if homes else torch.device("cpu")

    def all(self) -> dict[str, _Made]:
        if not self.output.is_wanted:
            return {}
        made = {
            fqn: self.one(fqn, entry)
            for fqn, entry in self.known.items()
            if not entry.is_own(self.ranks.rank)
        }
        if self.problems:
            raise InvalidState(self.problems)
        return made

    def one(self, fqn: str, entry: Known) -> _Made:
        form = self.output.form
        # A scalar, or a tensor without elements, has no part for each rank.
        if form is StateDictType.FULL or not entry.shape or 0 in entry.shape:
            return self.full(fqn, entry)
        model = self.live.models.get(fqn)
        if form is StateDictType.LOCAL:
            return self.local(fqn, entry, model)
        if model is not None:
            return self.like(fqn, entry, model)
        if self.is_whole_everywhere(entry):
            return self.full(fqn, entry)
        return self.chunk(fqn, entry)

    def is_whole_everywhere(self, entry: Known) -> bool:
        """Whether all ranks that share the tensor have all of it, or it is this rank's own."""
        me = self.ranks.rank
        if entry.owners.get(me) == () and entry.regions.get(me):
            return True
        sources = entry.sources(me)
        ranks = self.ranks.everyone if sources is None else sorted(sources)
        # Together they have all of the tensor, so ranks with equal regions have all of it each.
        held = {tuple(entry.regions.get(rank, ())) for rank in ranks}
        return len(held) == 1 and held != {()}

    def device(self, fqn: str, entry: Known) -> torch.device:
        if self.output.offload_to_cpu:
            return torch.device("cpu")
        own = self.own.get(fqn)
        if own:
            return own[0][0].local.device
        return self.home if entry.shape else torch.device("cpu")

    def full(self, fqn: str, entry: Known) -> _Made:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device(fqn, entry))
        region = whole(entry.shape)
        # A dict has buffers in their own dtype, whatever a unit with mixed precision uses.
        dtype = self.live.dtypes.get(fqn, tensor.dtype)
        # Converted later: the memory is filled in the live dtype first.
        return _Made(self.holding(fqn, entry, tensor, region), lambda: tensor.to(dtype))

    def holding(self, fqn: str, entry: Known, tensor: torch.Tensor, region: Box) -> Holding:
        piece = Piece(
            fqn, entry.shape, entry.dtype, region, whole(tuple(tensor.shape)), (self.ranks.rank,)
        )
        return Holding(tensor, (piece,), Kind.OTHER, False)

    def like(self, fqn: str, entry: Known, model: torch.Tensor) -> _Made:
        """A copy of what this rank has, as a DTensor like `model`; no byte comes from others."""
        (holding, _), *_ = self.own[fqn]
        local = torch.empty_like(
            holding.local, device=self.device(fqn, entry), memory_format=torch.contiguous_format
        )
        mesh: Any = model.device_mesh  # type: ignore[attr-defined]
        placements: Sequence[Any] = model.placements  # type: ignore[attr-defined]

        def make() -> torch.Tensor:
            local.copy_(holding.local)
            return make_dtensor(local, mesh, placements, entry.shape)

        return _Made(None, make)

    def chunk(self, fqn: str, entry: Known) -> _Made:
        """This rank's part of dim 0, over the mesh or the group of its unit."""
        sharding = self.live.sharding_of(fqn)
        mesh = None if sharding is None else sharding.mesh
        if self.output.use_dtensor is not False and mesh is not None:
            parts, part = int(mesh.size(mesh.ndim - 1)), int(mesh.get_local_rank(mesh.ndim - 1))
            box = chunk_of(entry.shape, parts, part)
            local = torch.empty(box.shape, dtype=entry.dtype, device=self.device(fqn, entry))
            placements = chunk_placements(mesh)
            return _Made(
                self.holding(fqn, entry, local, box),
                lambda: make_dtensor(local, mesh, placements, entry.shape),
            )
        if self.output.use_dtensor:
            self.problems.append(
                f"{fqn}: lies on no mesh, so it cannot be a DTensor; shard the model over a "
                "device_mesh, or leave use_dtensor out"
            )
        group, members = self.group_of(fqn)
        # Ranks beyond the last row have no chunk: ShardedTensors list none that are empty.
        boxes = [
            (rank, box)
            for index, rank in enumerate(members)
            if (box := chunk_of(entry.shape, len(members), index)).numel
        ]
        mine = dict(boxes).get(self.ranks.global_ranks[self.ranks.rank])
        like = torch.empty(
            (0,) if mine is None else mine.shape, dtype=entry.dtype, device=self.device(fqn, entry)
        )
        # A rank without rows has a ShardedTensor too, with no shard of its own.
        shards = [] if mine is None else [like]
        return _Made(
            None if mine is None else self.holding(fqn, entry, like, mine),
            lambda: make_sharded_tensor(shards, boxes, entry.shape, like, group),
        )

    def group_of(self, fqn: str) -> tuple[dist.ProcessGroup | None, list[int]]:
        """The group that `fqn` is sharded over, and torch's numbers of its ranks."""
        sharding = self.live.sharding_of(fqn)
        group = self.output.group if sharding is None else sharding.process_group
        if group is None:
            return None, list(self.ranks.global_ranks)
        return group, dist.get_process_group_ranks(group)

    def local(self, fqn: str, entry: Known, model: torch.Tensor | None) -> _Made:
        """This rank's elements in the order of its memory: runs of the flattened tensor.

        What was flattened in a memory order of its own is no run: it is given as boxes, copied.
        """
        if model is not None:
            self.problems.append(
                f"{fqn}: is a DTensor, which has no LOCAL form; use StateDictType.SHARDED"
            )
            return _Made(None, lambda: None)
        to_cpu = self.output.offload_to_cpu
        own = [
            local_view(holding, piece).to("cpu" if to_cpu else holding.local.device).contiguous()
            for holding, piece in self.own.get(fqn, ())
            if piece.region.numel
        ]
        if self.is_whole_everywhere(entry):
            return _Made(None, lambda: own[0].view(entry.shape))
        group, members = self.group_of(fqn)
        # Members are torch's numbers of ranks, the table counts the ranks of the world.
        index_of = {rank: index for index, rank in enumerate(self.ranks.global_ranks)}
        held = [
            (rank, region) for rank in members for region in entry.regions.get(index_of[rank], ())
        ]
        is_flat = all(isinstance(region, Span) for _, region in held)
        shape = (whole(entry.shape).numel,) if is_flat else entry.shape
        if is_flat:
            # A box that is a run of the tensor: of a member in its own memory order, all on a rank.
            own = [one.view(-1) for one in own]
        boxes = [
            (rank, box)
            for rank, region in held
            for box in (
                (Box((region.start,), (region.numel,)),)
                if is_flat and isinstance(region, Span)
                else boxes_of(region, entry.shape)
            )
        ]
        like = torch.empty(0, dtype=entry.dtype, device=self.device(fqn, entry))
        return _Made(None, lambda: make_sharded_tensor(own, boxes, shape, like, group))
