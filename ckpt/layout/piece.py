"""Pieces: what one rank holds of logical tensors, and where in its local memory.

Every engine's way of holding tensors is told in these values alone. An engine takes part by
offering `__ckpt_pieces__()`; see `Owned`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from ckpt.layout.region import Region, Shape


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


class Kind(enum.IntEnum):
    """What a tensor is to training. The numbers are part of the format."""

    PARAMETER = 0
    OPTIMIZER = 1  # optimizer state of any shape
    BUFFER = 2
    OTHER = 3  # any other tensor in the state


class Holding(NamedTuple):
    """Local memory together with the pieces that lie in it.

    `local` is the live sharded memory itself, detached, of any strides, on any device; never a
    copy. `synchronized` says that the engine keeps replicas bit-equal, so holders may share the
    writing of one region; otherwise one holder writes all of it and all holders compare digests.
    `owners` are the ranks of the world that the tensor is laid out over, as in `Owned`.
    """

    local: torch.Tensor
    pieces: tuple[Piece, ...]
    kind: Kind
    synchronized: bool
    owners: tuple[int, ...] | None = None


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
    the same). `views` tells which pieces lie where in `local`, and by that in every optimizer state
    tensor of the shape of `local`. Names are relative to the module that was asked.

    `owners` are the ranks that together have the tensor: of a group, of a mesh. Only among them are
    its bytes exchanged. Empty: this rank's own, which no engine shares with any other. None: nobody
    told, all ranks of the world may have parts of it.
    """

    param: torch.Tensor
    local: torch.Tensor
    views: tuple[View, ...]
    synchronized: bool
    owners: tuple[int, ...] | None = None
