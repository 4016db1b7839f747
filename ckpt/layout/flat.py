"""Members of flat parameters as views: how engines that flatten parameters describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ckpt.layout.piece import Owned, Piece, View, Window
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.region import Box, Shape, Span, boxes_of, row_major_strides, whole


class Inside(NamedTuple):
    """Of what a member is a part, when it was cut before it was flattened (tensor parallelism)."""

    global_shape: Shape
    offset: Shape
    """Where the member starts in the whole tensor."""
    cut_over: tuple[tuple[int, ...], ...]
    """The groups of global ranks over which it is cut, this rank in each."""


class FlatMember(NamedTuple):
    """One original parameter in a flat one: what of it lies here, counted in memory order."""

    fqn: str
    shape: Shape
    order: tuple[int, ...]  # dims from the slowest to the fastest in memory; row-major is ascending
    start: int  # first element in this rank's shard, in the parameter's memory order
    numel: int
    offset: int  # where it is in the local shard
    holders: tuple[int, ...]
    inside: Inside | None = None
    part_shape: Shape | None = None
    """Of this rank's part, as parameters and states of optimizers have it; None: 1-D."""

    @property
    def global_shape(self) -> Shape:
        return self.shape if self.inside is None else self.inside.global_shape

    def globally(self, box: Box) -> Box:
        """A box of this member in the coordinates of the whole tensor."""
        if self.inside is None:
            return box
        offset = tuple(a + b for a, b in zip(box.offset, self.inside.offset, strict=True))
        return Box(offset, box.shape)


def memory_order(fqn: str, shape: Shape, strides: Shape) -> tuple[int, ...]:
    """Dims by falling stride, as `FlatMember.order` wants them; dims of size 1 do not count.

    Row-major strides give 0, 1, 2, ... Raises `UnsupportedTensor` for strides that leave holes.
    """
    dims = range(len(shape))
    if 0 in shape:
        return tuple(dims)
    ones = [dim for dim in dims if shape[dim] == 1]
    others = sorted((dim for dim in dims if shape[dim] != 1), key=lambda dim: -strides[dim])
    expected = row_major_strides(tuple(shape[dim] for dim in others))
    if tuple(strides[dim] for dim in others) != expected:
        raise UnsupportedTensor(
            f"{fqn}: was flattened with strides {strides} of shape {shape}, which leave gaps or "
            "overlap; make it contiguous() before wrapping it"
        )
    # Dims of size 1 lie anywhere, so row-major order is kept where the others allow it.
    if others == sorted(others):
        return tuple(dims)
    return (*ones, *others)


def flat_views(members: Sequence[FlatMember], dtype: torch.dtype, *, base: int) -> tuple[View, ...]:
    """Views of members in a 1-D local tensor that starts at `base` of the local shard.

    In the members' order, whatever this rank holds of them: names have this order on every rank.
    """
    plain: list[Piece] = []
    views: list[View] = []
    for member in members:
        offset = member.offset - base if member.numel else 0
        is_plain = member.order == tuple(range(len(member.shape))) and member.inside is None
        if is_plain or not member.numel:
            span = Span(member.start, member.start + member.numel)
            here = Span(offset, offset + member.numel)
            shape = member.global_shape
            plain.append(Piece(member.fqn, shape, dtype, span, here, member.holders))
        else:
            if plain:
                # Closed here and not at the end: names come in the order of the members.
                views.append(View(tuple(plain)))
                plain = []
            views += _permuted_views(member, dtype, offset)
    return (*views, View(tuple(plain))) if plain else tuple(views)


def _permuted_views(member: FlatMember, dtype: torch.dtype, offset: int) -> Iterator[View]:
    """A member whose elements here are no run of the tensor's row-major order, because it was
    flattened in another order, or is a part of a larger tensor: boxes with their strides.
    """
    memory_shape = tuple(member.shape[dim] for dim in member.order)
    for box in boxes_of(Span(member.start, member.start + member.numel), memory_shape):
        logical = Box(_unpermuted(box.offset, member.order), _unpermuted(box.shape, member.order))
        strides = _unpermuted(row_major_strides(box.shape), member.order)
        piece = Piece(
            member.fqn,
            member.global_shape,
            dtype,
            member.globally(logical),
            whole(logical.shape),
            member.holders,
        )
        yield View((piece,), Window(logical.shape, strides, offset))
        offset += box.numel


def _unpermuted(values: Sequence[int], order: Sequence[int]) -> Shape:
    """`values` of the dims in memory order, put back into the order of the tensor's own dims."""
    placed = [0] * len(order)
    for value, dim in zip(values, order, strict=True):
        placed[dim] = value
    return tuple(placed)


def member_as_param(
    param: torch.Tensor,
    local: torch.Tensor,
    member: FlatMember,
    owners: tuple[int, ...] | None,
    *,
    whole_here: bool,
) -> Owned:
    """A member that optimizers know by itself; `local` is the shard of the whole flat parameter.

    `whole_here` says that the parameter keeps its own shape, because nothing is sharded. `owners`
    are as in `Owned`.
    """
    shard = local[member.offset : member.offset + member.numel]
    if not whole_here:
        views = flat_views([member], local.dtype, base=member.offset)
        if member.part_shape == member.shape:
            shard = shard.as_strided(member.shape, _strides(member))
        elif member.part_shape is not None:
            shard = shard.view(member.part_shape)
        return Owned(param, shard, views, True, owners)
    # Unsharded units show the original shapes, and so do the states of optimizers.
    here = whole(member.shape)
    region = member.globally(here)
    piece = Piece(member.fqn, member.global_shape, local.dtype, region, here, member.holders)
    shown = shard.as_strided(member.shape, _strides(member))
    return Owned(param, shown, (View((piece,)),), True, owners)


def _strides(member: FlatMember) -> Shape:
    """Of the whole member in its memory order."""
    memory_shape = tuple(member.shape[dim] for dim in member.order)
    return _unpermuted(row_major_strides(memory_shape), member.order)
