"""Full tensors put together from the pieces of all ranks, every claim of them checked."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ckpt.layout.modules import ModuleLayout, Ranks
from ckpt.layout.piece import Owned, Piece, Window
from ckpt.layout.region import Box, Region, Span, boxes_of, is_inside


def world() -> Ranks:
    """The world of the default process group."""
    return Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))


def rebuilt(layout: ModuleLayout) -> dict[str, torch.Tensor]:
    """All parameters and buffers of `layout`, gathered from all ranks.

    Checks that every element is held by exactly the ranks that its pieces name, with equal values,
    and that all ranks agree on names, shapes and dtypes.
    """
    owned = [*layout.params, *layout.buffers]
    mine = [item for entry in owned for item in held(entry)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return assembled(gathered)


def held(owned: Owned) -> list[tuple[Piece, torch.Tensor]]:
    """The pieces of `owned` with their elements, in the order of each region, flat."""
    assert not owned.local.requires_grad
    pieces = []
    for view in owned.views:
        window = seen_through(owned.local, view.window)
        for piece in view.pieces:
            assert is_inside(piece.region, piece.global_shape), piece
            assert is_inside(piece.local_region, tuple(window.shape)), piece
            assert piece.region.numel == piece.local_region.numel, piece
            pieces.append((piece, taken(window, piece.local_region).clone()))
    return pieces


def seen_through(local: torch.Tensor, window: Window | None) -> torch.Tensor:
    if window is None:
        return local
    start = local.storage_offset() + window.offset
    return local.as_strided(window.shape, window.stride, start)


def taken(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of `region`, flat, in its order."""
    if isinstance(region, Span):
        return tensor.reshape(-1)[region.start : region.stop]
    index = tuple(slice(a, a + n) for a, n in zip(region.offset, region.shape, strict=True))
    return tensor[index].reshape(-1)


def put(owned: Owned, values: dict[str, torch.Tensor]) -> None:
    """Write `values` (full tensors by name) into the local memory, as a load does."""
    for view in owned.views:
        window = seen_through(owned.local, view.window)
        for piece in view.pieces:
            flat = taken(values[piece.fqn], piece.region)
            _write(window, piece.local_region, flat)


def _write(window: torch.Tensor, region: Region, flat: torch.Tensor) -> None:
    done = 0
    for box in boxes_of(region, tuple(window.shape)):
        index = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
        window[index].copy_(flat[done : done + box.numel].view(box.shape))
        done += box.numel


def assembled(gathered: list[list[tuple[Piece, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    holders_of: dict[str, torch.Tensor] = {}  # a bit per rank and element
    claims: list[tuple[Piece, torch.Tensor]] = []
    names = [{piece.fqn for piece, _ in pieces} for pieces in gathered]
    assert all(one == names[0] for one in names), "ranks know other tensors"
    for rank, pieces in enumerate(gathered):
        for piece, flat in pieces:
            assert rank in piece.holders and list(piece.holders) == sorted(set(piece.holders))
            shape = piece.global_shape
            if piece.fqn not in full:
                full[piece.fqn] = torch.zeros(shape, dtype=piece.dtype)
                holders_of[piece.fqn] = torch.zeros(math.prod(shape), dtype=torch.int64)
            target = full[piece.fqn]
            assert target.shape == shape and target.dtype == piece.dtype == flat.dtype
            numbers = _element_numbers(piece.region, shape)
            bits = holders_of[piece.fqn]
            assert not (bits[numbers] >> rank & 1).any(), f"{piece.fqn}: held twice by rank {rank}"
            bits[numbers] |= 1 << rank
            target.view(-1)[numbers] = flat
            claims.append((piece, numbers))
    for piece, numbers in claims:
        claimed = sum(1 << rank for rank in piece.holders)
        assert (holders_of[piece.fqn][numbers] == claimed).all(), f"{piece}: other ranks hold it"
    for fqn, bits in holders_of.items():
        assert (bits != 0).all(), f"{fqn}: elements that nobody holds"
    return full


def _element_numbers(region: Region, shape: tuple[int, ...]) -> torch.Tensor:
    """Row-major numbers of the elements of `region`."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    return taken(numbers, region)


def covers(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether `boxes` cover a tensor of `shape`, each element once."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] += 1
    return bool((count == 1).all())
