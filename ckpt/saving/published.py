"""What a rank has published last, to the bit, and what of a live state is new since then.

live state -> cast -> compare with the bits published last -> positions and values, by blocks

One pass over the state, on the device where it lies: only what is new leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ckpt.errors import InvalidState
from ckpt.format.codec import encode_values
from ckpt.format.delta import BLOCK_NUMEL, DeltaBlock
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.elements import bits_of, digest_of, numbers_of, unsigned
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region, whole
from ckpt.saving.plan import Contents, PlanMemory, plan_of
from ckpt.state.flatten import structure_of, values_of
from ckpt.state.half_loaded import refuse_interrupted
from ckpt.state.types import FlatState
from ckpt.state.walk import walk

DENSE_SHARE = 15 / 16  # of a block: where more is new, gaps take more bytes than what is not new

_Key = tuple[str, Region]


class Fresh(NamedTuple):
    """New bits of one block, and where they belong among those that were published last."""

    bits: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    key: tuple[str, Region, int]
    after: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What of a state is new on this rank: `blocks` for the delta, of which each has one writer,
    and `fresh` for what this rank remembers.
    """

    blocks: tuple[DeltaBlock, ...]
    fresh: tuple[Fresh, ...]

    def take(self, digests: dict[tuple[str, Region, int], int]) -> None:
        """The new bits are the published ones now."""
        for one in self.fresh:
            one.bits[one.positions] = one.values
            digests[one.key] = one.after


@dataclass(slots=True)
class Published:
    """The state that was published last: its bits on this rank, in memory of their own.

    `attempts` have that state: the one that the next delta needs first. `nbytes` and `count` are
    of deltas since the newest anchor, which has `anchor_nbytes`. `others` are all values of the
    state that are no tensors, encoded.
    """

    dtype: torch.dtype | None
    bits: dict[_Key, torch.Tensor] = field(default_factory=dict)
    others: bytes = b""
    digests: dict[tuple[str, Region, int], int] = field(default_factory=dict)
    attempts: tuple[str, ...] = ()
    anchor_nbytes: int = 0
    nbytes: int = 0
    count: int = 0

    def contents(self, state: Any, ranks: Ranks, memory: PlanMemory) -> Contents:
        """`state` as an anchor has it: its bits are taken now, and what is saved is these.

        Raises InvalidState.
        """
        flat, modules = _flattened(state, ranks)
        problems, holdings = list[str](), list[Holding]()
        self.bits, self.others = {}, encode_values([flat.values, flat.per_rank])
        for holding, piece, view in _views(flat):
            dtype = piece.dtype if not self._is_cast(piece.dtype) else self.dtype or piece.dtype
            if dtype.itemsize > 8:
                problems.append(
                    f"{piece.fqn}: {dtype_name(dtype)} cannot be published; leave it out"
                )
                continue
            bits = torch.empty(
                view.shape, dtype=view.dtype if dtype is piece.dtype else dtype, device=view.device
            )
            self.bits[piece.fqn, piece.region] = bits.copy_(view)
            place = piece._replace(dtype=dtype, local_region=whole(tuple(bits.shape)))
            holdings.append(holding._replace(local=bits, pieces=(place,)))
        if problems:
            raise InvalidState(problems)
        flat = FlatState(holdings, flat.values, flat.per_rank, flat.aliases)
        return Contents(flat, plan_of(flat, ranks, memory), modules)

    def difference(self, state: Any, ranks: Ranks) -> Difference | None:
        """What of `state` is new; None where it has other parts than what was published, or other
        values that are no tensors.
        """
        flat, _ = _flattened(state, ranks)
        live = {(piece.fqn, piece.region): (piece, view) for _, piece, view in _views(flat)}
        shapes = {key: tuple(view.shape) for key, (_, view) in live.items()}
        if shapes != {key: tuple(bits.shape) for key, bits in self.bits.items()}:
            return None
        if self.others != encode_values([flat.values, flat.per_rank]):
            return None
        blocks, fresh = list[DeltaBlock](), list[Fresh]()
        for key, (piece, view) in live.items():
            bits = self.bits[key]
            # The same one on every rank, and another for every region.
            turn = crc32(repr(key).encode()) % len(piece.holders)
            is_writer = piece.holders[turn] == ranks.rank
            for block, new in self._blocks(piece, view, bits):
                fresh.append(new)
                if is_writer:
                    blocks.append(block)
        return Difference(tuple(blocks), tuple(fresh))

    def _blocks(
        self, piece: Piece, view: torch.Tensor, bits: torch.Tensor
    ) -> Iterator[tuple[DeltaBlock, Fresh]]:
        flat, last = view.reshape(-1), bits_of(bits.view(-1))
        name = dtype_name(bits.dtype if bits.dtype is not view.dtype else piece.dtype)
        for start in range(0, bits.numel(), BLOCK_NUMEL):
            old = last[start : start + BLOCK_NUMEL]
            new = bits_of(flat[start : start + BLOCK_NUMEL].to(bits.dtype))
            is_new = new != old
            if int(is_new.count_nonzero()) > DENSE_SHARE * len(old):
                is_new.fill_(True)
            positions = is_new.nonzero().view(-1)
            values, key = new[positions], (piece.fqn, piece.region, start)
            numbers = numbers_of(piece.region, piece.global_shape, positions + start)
            before = self.digests.get(key)
            if before is None:
                before = self.digests[key] = _digest(piece, start, old)
            change = digest_of(numbers, unsigned(values) - unsigned(old[positions]))
            after = (before + change) % (1 << 64)
            place = piece.fqn, name, piece.global_shape, piece.region, start, len(old)
            there, words = positions.cpu().numpy(), values.cpu().numpy()
            block = DeltaBlock(*place, before, after, there, words.tobytes())
            yield block, Fresh(old, positions, values, key, after)

    def _is_cast(self, dtype: torch.dtype) -> bool:
        # Types of a byte are somebody's own quantization.
        return self.dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


def _digest(piece: Piece, start: int, bits: torch.Tensor) -> int:
    positions = torch.arange(start, start + len(bits), device=bits.device)
    return digest_of(numbers_of(piece.region, piece.global_shape, positions), bits)


def _flattened(state: Any, ranks: Ranks) -> tuple[FlatState, tuple[str, ...]]:
    refuse_interrupted(state)
    leaves = walk(state)
    flat = values_of(structure_of(leaves, ranks), leaves, ranks, state)
    return flat, tuple(sorted({path for path, _ in leaves.modules}))


def _views(flat: FlatState) -> Iterator[tuple[Holding, Piece, torch.Tensor]]:
    for holding in flat.holdings:
        for piece in holding.pieces:
            yield holding, piece, local_view(holding, piece)
