"""Checkpoints in memory: what all ranks flatten, put together, and filled into bound states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region, boxes_of
from ckpt.state.bind import bind_state
from ckpt.state.binding import Binding
from ckpt.state.flatten import flatten_state as flatten
from ckpt.state.types import Catalog, FlatState, Loaded, TensorEntry

State = Any


def world() -> Ranks:
    """All ranks of the default group, or this process alone."""
    if not dist.is_initialized():
        return Ranks.alone()
    return Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))


class Part(NamedTuple):
    """What one rank would write: elements of pieces it is the first holder of, and its values."""

    pieces: list[tuple[Piece, Kind, torch.Tensor]]
    values: bytes
    per_rank: bytes
    aliases: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """Whole tensors by name, and the catalog of them."""

    tensors: dict[str, torch.Tensor]
    catalog: Catalog


def part_of(state: State) -> Part:
    """What this rank flattens `state` to, with copies of the elements."""
    flat: FlatState = flatten(state, world())
    pieces = [
        (piece, holding.kind, elements(holding.local, piece.local_region).clone())
        for holding in flat.holdings
        for piece in holding.pieces
    ]
    return Part(pieces, encode_values(flat.values), encode_values(flat.per_rank), flat.aliases)


def assembled(parts: Sequence[Part]) -> Checkpoint:
    """The checkpoint that all ranks' parts make; fails unless every element is there once."""
    tensors: dict[str, torch.Tensor] = {}
    missing: dict[str, torch.Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    for rank, part in enumerate(parts):
        assert part.values == parts[0].values, "values differ between ranks"
        assert part.aliases == parts[0].aliases
        for piece, kind, content in part.pieces:
            entry = TensorEntry(piece.dtype, piece.global_shape, kind)
            assert entries.setdefault(piece.fqn, entry) == entry, piece.fqn
            whole = tensors.setdefault(
                piece.fqn, torch.zeros(piece.global_shape, dtype=piece.dtype)
            )
            absent = missing.setdefault(piece.fqn, torch.ones(piece.global_shape, dtype=torch.bool))
            assert rank in piece.holders and list(piece.holders) == sorted(piece.holders)
            if rank == piece.holders[0]:
                put(whole, piece.region, content)
                assert elements(absent, piece.region).all(), f"{piece.fqn}: written twice"
                put(absent, piece.region, torch.zeros(content.shape, dtype=torch.bool))
    for fqn, absent in missing.items():
        assert not absent.any(), f"{fqn}: elements that nobody writes"
    per_rank = [decode_values(part.per_rank) for part in parts]
    catalog = Catalog(
        dict(sorted(entries.items())),
        decode_values(parts[0].values),
        parts[0].aliases,
        per_rank if any(per_rank) else (),
        [range(len(parts))],
    )
    return Checkpoint(tensors, catalog)


def gathered(state: State) -> Checkpoint:
    """The checkpoint of what all ranks of the default group hold, on every rank."""
    if not dist.is_initialized():
        return assembled([part_of(state)])
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part_of(state))
    return assembled(parts)


def bound(state: State, checkpoint: Checkpoint, **options: Any) -> Binding:
    """`state` bound to the checkpoint, without anything filled."""
    return bind_state(state, checkpoint.catalog, world(), **options)


def load(state: State, checkpoint: Checkpoint, **options: Any) -> Loaded:
    """Load as the library does, from memory. Fails when a problem is fatal."""
    binding = bound(state, checkpoint, **options)
    assert not binding.fatal, "\n".join(binding.fatal)
    binding.prepare()
    fill(binding, checkpoint)
    return binding.finish()


def fill(binding: Binding, checkpoint: Checkpoint) -> None:
    """Write the checkpoint's elements into everything that is bound."""
    for holding in binding.holdings:
        for piece in holding.pieces:
            source = checkpoint.tensors[piece.fqn]
            assert source.dtype is holding.local.dtype is piece.dtype, piece.fqn
            assert tuple(source.shape) == piece.global_shape
            content = elements(source, piece.region)
            put(holding.local, piece.local_region, content)


def elements(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region, 1-D, in row-major order."""
    shape = tuple(tensor.shape)
    if not shape:
        return tensor.reshape(1)[: region.numel]
    parts = [
        tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
        for box in boxes_of(region, shape)
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else tensor.new_zeros(0)


def put(tensor: torch.Tensor, region: Region, content: torch.Tensor) -> None:
    """Write 1-D `content` into a region, in row-major order."""
    if not tensor.shape:
        tensor.copy_(content.reshape(()))
        return
    offset = 0
    for box in boxes_of(region, tuple(tensor.shape)):
        index = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
        tensor[index] = content[offset : offset + box.numel].reshape(box.shape)
        offset += box.numel
    assert offset == content.numel()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    """Fails, naming the tensors, unless both hold the same bits under the same names."""
    assert sorted(a.tensors) == sorted(b.tensors)
    differ = [fqn for fqn in a.tensors if not same_bits(a.tensors[fqn], b.tensors[fqn])]
    assert not differ, f"differ: {differ}"
