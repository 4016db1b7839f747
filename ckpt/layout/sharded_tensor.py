"""torch's ShardedTensor, and the DTensors of a mesh: tensors of which a rank has one chunk.

Also how an engine declares over which ranks, or which mesh, its tensors are to be cut: an optional
method `__ckpt_sharding__()` on its unit modules that returns a `UnitSharding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ckpt.layout import torch_fsdp
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.plain import Ranks, refuse_unstorable
from ckpt.layout.region import Box, Region, Shape, Span, row_major_strides, whole

NO_DTYPES: Mapping[str, torch.dtype] = {}


class UnitSharding(NamedTuple):
    """How the tensors of a unit are to be cut: over the ranks of a group, or over a mesh.

    `mesh` has one axis, along which dim 0 is cut, or two, the first of which repeats. The buffers
    in `buffer_dtypes`, named relative to the unit, live in another dtype than the one given there.
    """

    process_group: dist.ProcessGroup | None
    mesh: Any = None
    buffer_dtypes: Mapping[str, torch.dtype] = NO_DTYPES


def sharding_of(module: nn.Module) -> UnitSharding | None:
    """What the unit of `module` says of itself; None when it says nothing."""
    engine: Any = module
    if hasattr(engine, "__ckpt_sharding__"):
        sharding: UnitSharding = engine.__ckpt_sharding__()
        return sharding
    if torch_fsdp.is_fsdp1(module):
        return UnitSharding(*torch_fsdp.fsdp1_sharding(module))
    return None


def is_sharded_tensor(value: object) -> bool:
    """Whether `value` is a ShardedTensor, which is no torch.Tensor."""
    return hasattr(type(value), "local_shards") and hasattr(value, "metadata")


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor in one of the forms that state dicts have them in."""
    return isinstance(value, torch.Tensor) or is_sharded_tensor(value)


def describe_sharded_tensor(fqn: str, value: Any, ranks: Ranks, shape: Shape | None) -> list[Owned]:
    """One `Owned` per local shard. `shape` is that of the tensor that a flat one stands for."""
    metadata = value.metadata()
    size: Shape = tuple(metadata.size)
    is_flat = shape is not None and size != shape and size == (math.prod(shape),)
    whole_shape = shape if is_flat and shape is not None else size
    group = getattr(value, "_process_group", None) or dist.group.WORLD
    owners = ranks.known_of(dist.get_process_group_ranks(group))

    def owned(local: torch.Tensor, region: Region, here: Region) -> Owned:
        piece = Piece(fqn, whole_shape, local.dtype, region, here, (ranks.rank,))
        return Owned(local, local, (View((piece,)),), True, owners)

    all_owned = []
    for shard in value.local_shards():
        local, place = shard.tensor.detach(), shard.metadata
        refuse_unstorable(fqn, local)
        offset = tuple(place.shard_offsets)
        if is_flat:
            numel = local.numel()
            all_owned.append(owned(local, Span(offset[0], offset[0] + numel), Span(0, numel)))
        else:
            box = Box(offset, tuple(place.shard_sizes))
            all_owned.append(owned(local, box, whole(tuple(local.shape))))
    # A rank without a shard has an empty piece, so that all ranks know the same names.
    if not all_owned:
        empty = torch.empty(0, dtype=metadata.tensor_properties.dtype)
        all_owned.append(owned(empty, Span(0, 0), Span(0, 0)))
    return all_owned


def make_sharded_tensor(
    local: Sequence[torch.Tensor],
    boxes: Sequence[tuple[int, Box]],
    global_shape: Shape,
    like: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> Any:
    """A ShardedTensor around `local`, without communication.

    `boxes` are torch's global ranks with what each has, none empty; they tile `global_shape`.
    `local` are those of this rank, in the same order. `like` has the dtype and device.
    """
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )

    shards = [
        ShardMetadata(list(box.offset), list(box.shape), _placement(rank, like.device))
        for rank, box in boxes
    ]
    properties = TensorProperties(
        dtype=like.dtype, requires_grad=False, pin_memory=any(part.is_pinned() for part in local)
    )
    torch_classes: Any = sharded_tensor
    me = dist.get_rank()
    mine = [shard for (rank, _), shard in zip(boxes, shards, strict=True) if rank == me]
    # The public constructors gather what every rank has; here each rank knows it.
    return torch_classes.ShardedTensor._init_from_local_shards_and_global_metadata(
        [torch_classes.Shard(*shard) for shard in zip(local, mine, strict=True)],
        ShardedTensorMetadata(shards, torch.Size(global_shape), properties),
        process_group=group,
    )


def _placement(rank: int, device: torch.device) -> str:
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    # By the usual rule of one rank per device: nothing says which device another rank uses.
    count = max(torch.get_device_module(device).device_count(), 1)
    return f"rank:{rank}/{device.type}:{rank % count}"


def make_dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], global_shape: Shape
) -> torch.Tensor:
    """A DTensor around `local`, without communication."""
    from torch.distributed.tensor import DTensor

    # Without `run_check`, which talks to the other ranks.
    made: torch.Tensor = DTensor.from_local(
        local,
        mesh,
        tuple(placements),
        run_check=False,
        shape=torch.Size(global_shape),
        stride=row_major_strides(global_shape),
    )
    return made


def chunk_placements(mesh: Any) -> tuple[Any, ...]:
    """Dim 0 cut along the last axis of `mesh`, repeated along the others."""
    from torch.distributed.tensor import Replicate, Shard

    return (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))
