"""DTensors whose local tensors are composites: their components as sharded tensors of their own.

What is stored is the whole composite, as if one rank had it. A component's part on this rank is a
`ComponentShard`, which says by `__ckpt_pieces__()` where it lies in the whole component. Which
components are cut with the tensor, and along which of their dims, is proved by the type's own
slices, see `cutting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.layout.composite import CompositeType, Parts
from ckpt.layout.cutting import (
    Cutting,
    Unproved,
    WholeParts,
    cutting_of,
    cutting_of_whole,
    with_shape,
)
from ckpt.layout.dtensor import ShardPlace, placed
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.plain_context import context_of, plain_of
from ckpt.layout.region import Box, Shape, whole
from ckpt.layout.tensor import is_plain, memory_of

__all__ = [
    "ComponentShard",
    "copy_of_shard",
    "global_shape",
    "is_repeated",
    "laid_out_like",
    "sharded_type",
    "stand_in_shard",
    "zeros_like_shard",
]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """What the components of one DTensor share. `like` is a DTensor of its shape and layout."""

    like: Any
    placed: ShardPlace
    cutting: Cutting


class ComponentShard(torch.Tensor):
    """This rank's part of a component: memory that knows its place in the whole component."""

    sharded: _Sharded
    component: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Whatever is computed of it is plain memory, without a place.
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        local = _memory(self)
        boxes = _boxes(self.sharded, self.component)
        dims = self.sharded.cutting.dims[self.component]
        holders = self.sharded.placed.holders(dims)
        shape = global_shape(self)
        pieces = tuple(Piece("", shape, local.dtype, *pair, holders) for pair in boxes)
        owners = self.sharded.placed.owners
        return [Owned(self, local, (View(pieces),), not is_repeated(self), owners)]


def is_repeated(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a component of which ranks with different shards of the composite have
    the same: copies that no engine keeps equal.
    """
    if not isinstance(tensor, ComponentShard):
        return False
    cut = tensor.sharded.placed.cut_dims
    return any(dim not in tensor.sharded.cutting.dims[tensor.component] for dim in cut)


def _memory(shard: ComponentShard) -> torch.Tensor:
    return shard.as_subclass(torch.Tensor).detach()


def _shard(memory: torch.Tensor, name: str, sharded: _Sharded) -> ComponentShard:
    made = memory.detach().as_subclass(ComponentShard)
    made.component, made.sharded = name, sharded
    return made


def global_shape(tensor: torch.Tensor) -> Shape:
    """The shape of the whole tensor, of which `tensor` may be a shard."""
    if not isinstance(tensor, ComponentShard):
        return tuple(tensor.shape)
    sharded = tensor.sharded
    sizes = list(tensor.shape)
    for dim, along in sharded.cutting.dims[tensor.component].items():
        there, here = sharded.like.shape[dim], sharded.placed.local_shape[dim]
        sizes[along] = _scaled(there, sizes[along], here)
    return tuple(sizes)


def _boxes(sharded: _Sharded, name: str) -> list[tuple[Box, Box]]:
    """Where this rank's part of a component lies: in the component's coordinates, and its own."""
    dims, shape = sharded.cutting.dims[name], sharded.cutting.local_shapes[name]
    local_shape = sharded.placed.local_shape
    boxes = []
    for pair in sharded.placed.boxes:
        made = []
        for box in pair:
            inside = whole(shape)
            offset, size = list(inside.offset), list(inside.shape)
            for dim, along in dims.items():
                per_row = shape[along], local_shape[dim]
                offset[along] = _scaled(box.offset[dim], *per_row)
                size[along] = _scaled(box.shape[dim], *per_row)
            made.append(Box(tuple(offset), tuple(size)))
        boxes.append((made[0], made[1]))
    # What is not cut lies in one box, however many the tensor lies in.
    return list(dict.fromkeys(boxes))


def _scaled(rows: int, size: int, of_rows: int) -> int:
    """`rows` of the tensor, of which `of_rows` are `size` of the component, in the component."""
    scaled, rest = divmod(rows * size, of_rows)
    if rest:
        raise UnsupportedTensor(
            "a shard ends inside of a block, of which the component has one element"
        )
    return scaled


def stand_in_shard(fqn: str, tensor: torch.Tensor, local: torch.Tensor) -> Owned:
    """What optimizers know of a DTensor whose shards are composites: `local` has the shape of its
    shard, and no memory.
    """
    where = placed(tensor)
    holders, shape = where.holders(where.cut_dims), tuple(tensor.shape)
    pieces = tuple(Piece(fqn, shape, local.dtype, *pair, holders) for pair in where.boxes)
    return Owned(tensor, local, (View(pieces),), True, where.owners)


# --- types ---------------------------------------------------------------------------------------


def sharded_type(kind: CompositeType) -> CompositeType:
    """The type of DTensors whose local tensors are of the type `kind`; it has the same name."""

    def take(tensor: Any) -> Parts:
        try:
            return _taken(tensor, kind)
        except (Unproved, UnsupportedTensor) as odd:
            reason = odd.problem if isinstance(odd, UnsupportedTensor) else str(odd)
            raise NotImplementedError(
                f"its shards are cut where nothing proves how its components are: {reason}; let "
                "each shard end where a block of it ends and have elements on every rank, or "
                "keep the tensor replicated"
            ) from odd

    def build(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return _built(kind, parts, dtype)

    return CompositeType(kind.name, take, build)


def _taken(tensor: Any, kind: CompositeType) -> Parts:
    where, local = placed(tensor), memory_of(tensor)
    components, context = kind.take(local)
    parts = Parts({name: item.detach() for name, item in components.items()}, context)
    if odd := [name for name, item in parts.components.items() if not is_plain(item)]:
        raise UnsupportedTensor(f"its component {odd[0]} is no plain memory")
    cutting = cutting_of(kind, parts, where.local_shape, local.dtype, where.cut_dims)
    sharded = _Sharded(tensor, where, cutting)
    return _parts_of(parts.components, sharded, cutting.context_at(tuple(tensor.shape)))


def _parts_of(components: Mapping[str, torch.Tensor], sharded: _Sharded, context: Any) -> Parts:
    shards = {name: _shard(item, name, sharded) for name, item in components.items()}
    for name, shard in shards.items():
        # Both raise for shards that end inside of blocks.
        _boxes(sharded, name)
        global_shape(shard)
    return Parts(shards, context)


def _built(kind: CompositeType, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    shards: Mapping[str, Any] = parts.components
    sharded = next(iter(shards.values())).sharded
    shape = sharded.placed.local_shape
    memory = {name: _memory(shard) for name, shard in shards.items()}
    context = parts.context
    if sharded.cutting.has_shape:
        plain = with_shape(plain_of(context), tuple(sharded.like.shape), shape)
        context = context_of(plain, sharded.placed.device)
    local = kind.build(Parts(memory, context), shape, dtype)
    from torch.distributed.tensor import DTensor

    like = sharded.like
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


# --- fresh memory --------------------------------------------------------------------------------


def laid_out_like(
    template: Any, kind: CompositeType, parts: WholeParts, dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    """Zeros for the components of a composite that is to lie like the DTensor `template`, which
    has its shape. Raises UnsupportedTensor, without a name, when its blocks cannot be cut so.
    """
    where = placed(template)
    try:
        cutting = cutting_of_whole(
            kind, parts, (tuple(template.shape), where.local_shape), dtype, where.cut_dims
        )
    except Unproved as odd:
        raise UnsupportedTensor(str(odd)) from odd
    sharded = _Sharded(template, where, cutting)
    device = where.device
    memory = {
        name: torch.zeros(shape, dtype=parts.dtypes[name], device=device)
        for name, shape in cutting.local_shapes.items()
    }
    return _parts_of(memory, sharded, None).components


def copy_of_shard(shard: ComponentShard) -> ComponentShard:
    """The same elements in memory of their own, in the same place."""
    return _shard(_memory(shard).clone(), shard.component, shard.sharded)


def zeros_like_shard(shard: ComponentShard) -> ComponentShard:
    """Zeros in the place of `shard`."""
    return _shard(torch.zeros_like(_memory(shard)), shard.component, shard.sharded)
