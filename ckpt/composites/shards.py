"""DTensors whose local tensors are composites: their components as sharded tensors of their own.

What is stored is the whole composite, as if one rank had it. A component's part on this rank is a
`ComponentShard`, which says by `__ckpt_pieces__()` where it lies in the whole component. Which
components are cut with the tensor, and along which of their dims, is declared by the type (`cut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckpt.layout.composites import DATA_KEY, CompositeType, Cut, Parts
from ckpt.layout.dtensor import ShardPlace, placed
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.region import Box, Shape
from ckpt.layout.sharded_tensor import make_dtensor
from ckpt.layout.tensor import is_plain, memory_of


class _Sharded(NamedTuple):
    """What the components of one DTensor share. `like` is a DTensor of its shape and layout."""

    like: Any
    placed: ShardPlace
    cut: Cut

    def dims_of(self, component: str) -> dict[int, int]:
        """The dims of the tensor along which `component` is cut, each with the component's own."""
        return {
            dim: self.cut[dim][component]
            for dim in self.placed.cut_dims
            if component in self.cut[dim]
        }

    def boxes(self, component: str, shape: Shape) -> list[tuple[Box, Box]]:
        """Where this rank's part, of `shape`, lies: in the component's coordinates, and its own.

        None where the rank has no elements of what is cut.
        """
        boxes: list[tuple[Box, Box]] = []
        if not all(map(self.placed.local_shape.__getitem__, self.dims_of(component))):
            return boxes
        for pair in self.placed.boxes:
            made = []
            for box in pair:
                offset, size = [0] * len(shape), [*shape]
                for dim, along in self.dims_of(component).items():
                    per_row = shape[along], self.placed.local_shape[dim]
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


class ComponentShard(torch.Tensor):
    """This rank's part of a component: memory that knows its place in the whole component."""

    sharded: _Sharded
    component: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Otherwise the call below would come back here.
        with torch.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        # Whatever else is computed of it is plain memory, without a place.
        keeps_place = getattr(func, "__name__", "") in ("detach", "clone", "zeros_like")
        return _shard(made, args[0].component, args[0].sharded) if keeps_place else made

    @property
    def global_shape(self) -> Shape:
        """The shape of the whole component; -1 where a rank without elements cannot tell."""
        sizes = [*self.shape]
        for dim, along in self.sharded.dims_of(self.component).items():
            there, here = self.sharded.like.shape[dim], self.sharded.placed.local_shape[dim]
            sizes[along] = _scaled(there, sizes[along], here) if here else -1
        return tuple(sizes)

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        local, sharded = _memory(self), self.sharded
        dims = sharded.dims_of(self.component)
        holders, shape = sharded.placed.holders(dims), self.global_shape
        pieces = tuple(
            Piece("", shape, local.dtype, *pair, holders)
            for pair in sharded.boxes(self.component, tuple(local.shape))
        )
        # Ranks with different shards have copies that no engine keeps equal of what is not cut.
        is_repeated = any(dim not in dims for dim in sharded.placed.cut_dims)
        owners = sharded.placed.owners
        return [Owned(self, local, (View(pieces),), not is_repeated, owners, is_repeated)]


def _memory(shard: torch.Tensor) -> torch.Tensor:
    return shard.as_subclass(torch.Tensor).detach()


def _shard(memory: torch.Tensor, name: str, sharded: _Sharded) -> ComponentShard:
    made: ComponentShard = memory.as_subclass(ComponentShard)
    made.component, made.sharded = name, sharded
    return made


def stand_in(fqn: str, tensor: torch.Tensor, one: torch.Tensor) -> Owned:
    """What optimizers know of a DTensor whose shards are composites: `one` element as a tensor of
    the shape of its shard, without memory.
    """
    where = placed(tensor)
    holders, shape = where.holders(where.cut_dims), tuple(tensor.shape)
    pieces = tuple(Piece(fqn, shape, one.dtype, *pair, holders) for pair in where.boxes)
    return Owned(tensor, one.expand(where.local_shape), (View(pieces),), True, where.owners)


def sharded_type(kind: CompositeType) -> CompositeType:
    """The type of DTensors whose local tensors are of the type `kind`; it has the same name."""

    def take(tensor: Any) -> Parts:
        local = memory_of(tensor)
        components, context = kind.take(local)
        try:
            sharded = _sharded(kind, context, tensor, tuple(local.shape))
            for name, item in components.items():
                if not is_plain(item):
                    raise UnsupportedTensor(f"its component {name} is no plain memory")
            shards = {name: _shard(one.detach(), name, sharded) for name, one in components.items()}
            for shard in shards.values():
                shard.__ckpt_pieces__()  # raises for shards that end inside of blocks
        except UnsupportedTensor as odd:
            raise NotImplementedError(
                f"it cannot be said how its components are cut with it: {odd.problem}; let each "
                "shard end where a block of it ends, or keep the tensor replicated"
            ) from odd
        return Parts(shards, _of_shape(context, tuple(local.shape), tuple(tensor.shape)))

    def build(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        shards: Any = parts.components
        sharded: _Sharded = next(iter(shards.values())).sharded
        like, local_shape = sharded.like, sharded.placed.local_shape
        memory = {name: _memory(shard) for name, shard in shards.items()}
        context = _of_shape(parts.context, tuple(like.shape), local_shape)
        local = kind.build(Parts(memory, context), local_shape, dtype)
        return make_dtensor(local, like.device_mesh, like.placements, tuple(like.shape))

    filled = kind.filled
    after = None if filled is None else (lambda tensor: filled(memory_of(tensor)))
    return CompositeType(kind.name, take, build, filled=after)


def _sharded(kind: CompositeType, context: Any, like: Any, shape: Shape) -> _Sharded:
    """What the components of a DTensor that lies like `like` share; `context` is of `shape`."""
    where, cut = placed(like), kind.cut(context, shape)
    for dim in where.cut_dims:
        if dim not in cut:
            raise UnsupportedTensor(
                f"a {kind.name} declares no cut along dim {dim}, see `cut` of "
                "ckpt.register_tensor_type"
            )
        # Without elements, torch may give a shard one dim, and no other rank tells of its parts.
        if len(where.local_shape) != len(like.shape) or not like.shape[dim]:
            raise UnsupportedTensor("this rank has no elements of it")
        _refuse_split_blocks(dim, where.local_shape[dim], like.shape[dim], kind.blocks.get(dim, 1))
    return _Sharded(like, where, cut)


def _refuse_split_blocks(dim: int, rows: int, of_rows: int, block: int) -> None:
    """Raise UnsupportedTensor, with the cuts that are possible, where a shard ends inside a block.

    `rows` are a shard's elements along `dim`, `of_rows` those of the tensor.
    """
    if not rows % block:
        return
    ways = [n for n in range(1, of_rows // block + 1) if not of_rows % (n * block)]
    shown = ", ".join(map(str, ways[:8])) + (f" and {len(ways) - 8} more" if len(ways) > 8 else "")
    raise UnsupportedTensor(
        f"a shard has {rows} of {of_rows} elements along dim {dim}, in blocks of {block}; numbers "
        f"of equal parts that end where blocks end: {shown or 'none'}"
    )


def _of_shape(context: Any, old: Shape, new: Shape) -> Any:
    """A context, as a value, with the shape `new` where it has the shape `old` of its tensor."""
    if isinstance(context, dict):
        if context.get(DATA_KEY) == "size" and tuple(context["value"]) == old:
            return {DATA_KEY: "size", "value": new}
        return {key: _of_shape(item, old, new) for key, item in context.items()}
    if isinstance(context, (list, tuple)):
        return type(context)(_of_shape(item, old, new) for item in context)
    return context


def zeros(
    kind: CompositeType,
    context: Any,
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
    template: Any,
) -> Mapping[str, torch.Tensor]:
    """Zeros for the components of a composite, of whole `shapes`, that is to lie like the DTensor
    `template`. Raises UnsupportedTensor, without a name, when its blocks cannot be cut so.
    """
    sharded = _sharded(kind, context, template, tuple(template.shape))
    made = {}
    for name, (shape, dtype) in shapes.items():
        sizes = [*shape]
        for dim, along in sharded.dims_of(name).items():
            here, there = sharded.placed.local_shape[dim], template.shape[dim]
            if sizes[along] and not there % sizes[along]:
                _refuse_split_blocks(dim, here, there, there // sizes[along])
            sizes[along] = _scaled(here, sizes[along], there)
        memory = torch.zeros(sizes, dtype=dtype, device=sharded.placed.device)
        # For its error: raises where a shard would end inside of a block.
        sharded.boxes(name, tuple(sizes))
        made[name] = _shard(memory, name, sharded)
    return made
