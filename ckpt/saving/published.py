"""The bits that a rank published last, and what of a live state is new since then.

live state -> cast -> compare with the bits published last -> positions and values, by blocks

One pass over the state, on the device where it lies: only what is new leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch

from ckpt.errors import InvalidState
from ckpt.format.codec import encode_values
from ckpt.format.delta import BLOCK_NUMEL, DeltaBlock
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.elements import bits_of, differing, digest_of, digest_of_run, numbers_of, unsigned
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region, whole
from ckpt.saving.plan import Contents, PlanMemory, contents_of, plan_of
from ckpt.state.types import FlatState

DENSE_SHARE = 15 / 16  # of a block: where more is new, gaps take more bytes than what is not new

_Key = tuple[str, Region]
_BlockKey = tuple[str, Region, int]
LivePart: TypeAlias = tuple[Piece, torch.Tensor]


class Fresh(NamedTuple):
    """New bits of one block, and where they belong among those that were published last.

    `group` stands for the ranks that have it, 0 for one alone.
    """

    bits: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    key: _BlockKey
    after: int
    group: int


@dataclass(slots=True)
class Published:
    """The state that was published last: its bits on this rank, in memory of their own.

    `attempts` have that state: the one that the next delta needs first. `nbytes` and `count` are
    of deltas since the newest anchor, which has `anchor_nbytes`. `others` are all values of the
    state that are no tensors, and its tied names.
    """

    dtype: torch.dtype | None
    others: tuple[dict[str, Any], dict[str, Any], dict[str, str]]
    bits: dict[_Key, torch.Tensor] = field(default_factory=dict)
    digests: dict[_BlockKey, int] = field(default_factory=dict)
    attempts: tuple[str, ...] = ()
    anchor_nbytes: int = 0
    nbytes: int = 0
    count: int = 0

    def is_like(self, flat: FlatState) -> bool:
        """Whether a state has the same parts, types, ties, and values that are no tensors."""
        parts = {
            (piece.fqn, piece.region): (view.shape, self._dtype_of(piece, view))
            for piece, view in views_of(flat)
        }
        own = {key: (bits.shape, bits.dtype) for key, bits in self.bits.items()}
        # Encoded: `==` of nested values would compare tensors and NaN by their own rules.
        return parts == own and encode_values(others_of(flat)) == encode_values(self.others)

    def fill(self, views: Iterable[LivePart]) -> None:
        """Take all bits of some parts of a state. Raises InvalidState."""
        problems = []
        for piece, view in views:
            dtype = self._dtype_of(piece, view)
            if dtype.itemsize > 8:
                problems.append(f"{piece.fqn}: {view.dtype} cannot be published; leave it out")
            bits = torch.empty(view.shape, dtype=dtype, device=view.device)
            self.bits[piece.fqn, piece.region] = bits.copy_(view)
        if problems:
            raise InvalidState(problems)

    def _dtype_of(self, piece: Piece, view: torch.Tensor) -> torch.dtype:
        # Types of a byte are somebody's own quantization.
        is_cast = piece.dtype.is_floating_point and piece.dtype.itemsize > 1
        return self.dtype if self.dtype is not None and is_cast else view.dtype

    def contents(self, state: Any, ranks: Ranks, memory: PlanMemory) -> Contents:
        """What an anchor has of `state`: these bits and values, in its parts."""
        live, holdings = contents_of(state, ranks, memory), []
        for holding in live.flat.holdings:
            for piece in holding.pieces:
                bits = self.bits[piece.fqn, piece.region]
                dtype = bits.dtype if bits.dtype is self.dtype else piece.dtype
                place = piece._replace(dtype=dtype, local_region=whole(tuple(bits.shape)))
                holdings.append(holding._replace(local=bits, pieces=(place,)))
        flat = FlatState(holdings, *self.others)
        return Contents(flat, plan_of(flat, ranks, memory), live.modules)

    def difference(
        self, views: Iterable[LivePart], ranks: Ranks
    ) -> Iterator[tuple[DeltaBlock | None, Fresh]]:
        """What of some parts of a state is new, block by block; each has one writer for a delta."""
        for piece, view in views:
            bits = self.bits[piece.fqn, piece.region]
            # The same holder on every rank, and another for every region: holders share the work.
            turn = crc32(repr((piece.fqn, piece.region)).encode()) % len(piece.holders)
            is_writer = piece.holders[turn] == ranks.rank
            for block, fresh in self._blocks(piece, view, bits):
                yield block if is_writer else None, fresh

    def take(self, fresh: Iterable[Fresh]) -> None:
        """The new bits are the published ones now."""
        for one in fresh:
            one.bits.scatter_(0, one.positions, one.values)
            self.digests[one.key] = one.after

    def _blocks(
        self, piece: Piece, view: torch.Tensor, bits: torch.Tensor
    ) -> Iterator[tuple[DeltaBlock, Fresh]]:
        flat, last = view.reshape(-1), bits_of(bits.view(-1))
        name = dtype_name(bits.dtype if bits.dtype is not view.dtype else piece.dtype)
        group = crc32(repr(piece.holders).encode()) if len(piece.holders) > 1 else 0
        cast: torch.Tensor | None = None
        for start in range(0, bits.numel(), BLOCK_NUMEL):
            old = last[start : start + BLOCK_NUMEL]
            new = flat[start : start + BLOCK_NUMEL]
            if new.dtype is not bits.dtype:  # into memory that is in the cache
                cast = torch.empty_like(new, dtype=bits.dtype) if cast is None else cast
                new = cast[: len(new)].copy_(new)
            new = bits_of(new)
            positions = differing(new, old)
            if len(positions) > DENSE_SHARE * len(old):
                positions = torch.arange(len(old), device=old.device)
            # Far quicker than by an index.
            values, replaced = new.gather(0, positions), old.gather(0, positions)
            key = piece.fqn, piece.region, start
            numbers = numbers_of(piece.region, piece.global_shape, positions + start)
            before = self.digests.get(key)
            # Digests are sums over elements, so a change adds to the last one; the first is of all
            # elements.
            if before is None:
                where = piece.region, piece.global_shape, start
                before = self.digests[key] = digest_of_run(*where, old)
            change = digest_of(numbers, unsigned(values) - unsigned(replaced))
            # Digests are 64-bit sums that wrap around.
            after = (before + change) % (1 << 64)
            place = piece.fqn, name, piece.global_shape, piece.region, start, len(old)
            there, words = positions.cpu().numpy(), values.cpu().numpy()
            block = DeltaBlock(*place, before, after, there, words.tobytes())
            yield block, Fresh(old, positions, values, key, after, group)


def others_of(flat: FlatState) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """What a state has besides tensors."""
    return flat.values, flat.per_rank, flat.aliases


def views_of(flat: FlatState) -> Iterator[LivePart]:
    """All parts of a state on this rank."""
    for holding in flat.holdings:
        for piece in holding.pieces:
            yield piece, local_view(holding, piece)
