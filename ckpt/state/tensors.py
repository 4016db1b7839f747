"""Tensors that stand in the state by themselves, as holdings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.layout.dtypes import DTYPES
from ckpt.layout.modules import describe_tensor
from ckpt.layout.piece import Holding, Kind, Owned, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Box, Shape, whole
from ckpt.state.describe import holdings_of

Named = tuple[str, torch.Tensor]

_ORDINARY_TYPES = (torch.Tensor, torch.nn.Parameter)
_ORDINARY_DTYPES = frozenset(
    getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is plain strided memory of a storable dtype, whole on this rank.

    False means only that the adapters have to look at it: they describe it or refuse it.
    """
    return (
        type(tensor) in _ORDINARY_TYPES
        and tensor.layout is torch.strided
        and tensor.dtype in _ORDINARY_DTYPES
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def plain_holdings(
    tensors: Sequence[Named], ranks: Ranks, *, kept: bool
) -> tuple[list[Holding], dict[str, str], list[Named]]:
    """Ordinary tensors as whole holdings, aliases of those that share their memory, and the others.

    Two tensors are tied when they are the same elements of the same memory. Holdings that are to be
    `kept` never have the object itself, which may then go away before them.
    """
    holders = ranks.everyone
    holdings: list[Holding] = []
    aliases: dict[str, str] = {}
    others: list[Named] = []
    regions: dict[Shape, tuple[Shape, Box]] = {}
    at_address: dict[int, Named] = {}
    kind = Kind.OTHER
    for fqn, tensor in tensors:
        if not is_ordinary(tensor):
            others.append((fqn, tensor))
            continue
        size = tensor.shape
        known = regions.get(size)
        if known is None:
            shape = tuple(size)
            known = regions[size] = (shape, whole(shape))
        shape, box = known
        first_fqn, first = at_address.setdefault(tensor.data_ptr(), (fqn, tensor))
        if first is not tensor and tensor.numel() and _same_elements(first, tensor):
            aliases[fqn] = first_fqn
            continue
        if first is tensor and first_fqn != fqn:
            aliases[fqn] = first_fqn
            continue
        local = tensor.detach() if kept or tensor.requires_grad else tensor
        piece = Piece(fqn, shape, tensor.dtype, box, box, holders)
        holdings.append(Holding(local, (piece,), kind, False, ()))
    return holdings, aliases, others


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two DTensors lie alike: shape, mesh and placements. A plain tensor lies like none."""
    mesh_a, mesh_b = getattr(a, "device_mesh", None), getattr(b, "device_mesh", None)
    return (
        mesh_a is not None
        and mesh_a == mesh_b
        and a.shape == b.shape
        and tuple(a.placements) == tuple(b.placements)  # type: ignore[attr-defined]
    )


def tensor_holdings(
    fqn: str, tensor: torch.Tensor, kind: Kind, ranks: Ranks, *, like: Owned | None = None
) -> list[Holding]:
    """Any tensor as holdings under one name; a plain one is held by whoever holds `like`.

    Raises Refused, with the name, when it cannot take part.
    """
    if like is None:
        owned = describe_tensor(fqn, tensor, ranks)
    else:
        owned = describe_tensor(
            fqn,
            tensor,
            ranks,
            holders=like.views[0].pieces[0].holders,
            synchronized=like.synchronized,
            owners=like.owners or (),
        )
    return list(holdings_of(owned, owned.local, lambda name: name, kind=kind))
