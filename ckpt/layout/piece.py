"""Pieces: what one rank holds of logical tensors, and where in its local memory.

These values alone describe how any engine holds tensors. An engine takes part by offering
`__ckpt_pieces__()`; see `ckpt.layout.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Region, Shape
from ckpt.layout.tensor import is_dtensor


class Piece(NamedTuple):
    """One region of one logical tensor, as this rank holds it.

    `region` is in the logical tensor's index space, `local_region` in that of the local tensor;
    both have the same number of elements, in the same row-major order. `holders` are the ranks of
    the world that hold this same region, ascending, this rank among them.
    """

    fqn: str
    global_shape: Shape
    dtype: torch.dtype
    region: Region
    local_region: Region
    holders: tuple[int, ...]


class Holding(NamedTuple):
    """Local memory together with the pieces that lie in it.

    `local` is the live sharded memory itself, detached, of any strides, on any device; never a
    copy. `synchronized` says that the engine keeps replicas bit-equal, so holders may share the
    writing of one region; otherwise one holder writes all of it and all holders compare digests.
    `owners` are the ranks of the world that the tensor is laid out over, as in `Owned`.
    `must_agree`: no engine keeps the tensor equal, and a save fails when ranks differ in it.
    """

    local: torch.Tensor
    pieces: tuple[Piece, ...]
    kind: Kind
    synchronized: bool
    owners: tuple[int, ...] | None = None
    must_agree: bool = False

    @property
    def is_unshared(self) -> bool:
        """Whether no engine shares the tensor with another rank: plain memory of this rank's."""
        return self.owners == ()


class Window(NamedTuple):
    """A strided view of a local tensor, as `torch.as_strided` takes it, offset from the tensor's
    start.
    """

    shape: Shape
    stride: Shape
    offset: int


class View(NamedTuple):
    """Pieces that lie in one window of a local tensor; `None` is the local tensor as it is."""

    pieces: tuple[Piece, ...]
    window: Window | None = None


class Owned(NamedTuple):
    """One tensor that an engine owns: the answer of `__ckpt_pieces__()` is an iterable of these.

    `param` is the object that optimizers know, `local` the sharded memory behind it (they may be
    the same). `views` says which pieces lie where in `local`, and by that in every optimizer state
    tensor of the shape of `local`. Names are relative to the module whose method it is.

    `owners` are the ranks that together have the tensor: of a group, of a mesh. Its bytes are
    exchanged only among them. Empty: this rank's own, which no engine shares with any other. None:
    not known, so all ranks of the world may have parts of it. `must_agree`: holders have copies
    that no engine keeps equal, and a save fails where they differ.
    """

    param: torch.Tensor
    local: torch.Tensor
    views: tuple[View, ...]
    synchronized: bool
    owners: tuple[int, ...] | None = None
    must_agree: bool = False

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of the logical tensors, in the order in which they lie in memory."""
        return tuple(dict.fromkeys(piece.fqn for view in self.views for piece in view.pieces))

    @property
    def template(self) -> torch.Tensor | None:
        """The tensor that says by itself how this one is laid out, a DTensor; None where only the
        engine knows. What is made for the tensor can be laid out like it.
        """
        return self.param if is_dtensor(self.param) else None

    @property
    def is_whole(self) -> bool:
        """Whether this rank, with or without others, has all of one tensor in memory of its shape.

        A member of a flat parameter that happens to lie on one rank is a span, and not whole.
        """
        if len(self.views) != 1 or self.template is not None or len(self.fqns) != 1:
            return False
        (view,) = self.views
        piece = view.pieces[0]
        return (
            view.window is None
            and tuple(self.local.shape) == piece.global_shape
            and isinstance(piece.region, Box)
        )

    @property
    def is_flat_shard(self) -> bool:
        """Whether this rank has some part of parameters in memory that does not say which."""
        return self.template is None and not self.is_whole

    def with_pieces(self, change: Callable[[Piece], Piece]) -> Owned:
        """The same with other pieces in the places of these."""
        views = [view._replace(pieces=tuple(map(change, view.pieces))) for view in self.views]
        return self._replace(views=tuple(views))

    def is_whole_on(self, ranks: tuple[int, ...]) -> bool:
        """Whether each of `ranks` has all of one tensor, and no other rank has any of it."""
        return self.is_whole and self.views[0].pieces[0].holders == ranks
