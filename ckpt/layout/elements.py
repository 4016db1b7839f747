"""Elements of regions by number: where they are in the tensor, in another region, and their digest.

A *number* of an element counts in the row-major order of the whole tensor, a *position* in that of
a region of it. The digest of some elements is a sum over them modulo 2^64, so ranks of any layout
add up to that of the tensor, and what a few new values change in it costs those few alone. It finds
accidents; it is no protection from an attacker.
"""

from __future__ import annotations

import torch

from ckpt.layout.region import Region, Shape, Span, row_major_strides, span_of

_PART = 1 << 16  # elements that are digested at a time: what is made of them stays in the cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers with bits all over: 2^64 by the golden ratio, and one of Stafford's multipliers.
_GOLDEN, _STAFFORD = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size. Raises ValueError for 16 bytes."""
    if tensor.dtype.itemsize not in _BITS:
        raise ValueError(f"{tensor.dtype} has no integer of its size")
    return tensor.view(_BITS[tensor.dtype.itemsize])


def numbers_of(region: Region, shape: Shape, positions: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor of `shape` at `positions` of a region of it."""
    span = region if isinstance(region, Span) else span_of(region, shape)
    if span is not None:
        return positions + span.start
    assert not isinstance(region, Span)
    numbers = torch.zeros_like(positions)
    for offset, inner, stride in zip(
        region.offset,
        zip(region.shape, row_major_strides(region.shape), strict=True),
        row_major_strides(shape),
        strict=True,
    ):
        numbers += (positions // inner[1] % inner[0] + offset) * stride
    return numbers


def positions_in(
    region: Region, shape: Shape, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the elements lie in a region, a bool for each, and the positions of those there."""
    span = region if isinstance(region, Span) else span_of(region, shape)
    if span is not None:
        is_there = (numbers >= span.start) & (numbers < span.stop)
        return is_there, numbers[is_there] - span.start
    assert not isinstance(region, Span)
    is_there = torch.ones_like(numbers, dtype=torch.bool)
    positions = torch.zeros_like(numbers)
    for dim, stride in enumerate(row_major_strides(shape)):
        place = numbers // stride % shape[dim] - region.offset[dim]
        is_there &= (place >= 0) & (place < region.shape[dim])
        positions += place * row_major_strides(region.shape)[dim]
    return is_there, positions[is_there]


def digest_of(numbers: torch.Tensor, bits: torch.Tensor) -> int:
    """The sum over elements of their bits times an odd factor that their number gives, modulo 2^64.

    `bits` are as `bits_of` has them, or differences of such in int64: then it is what the digest
    grows by. Where one element differs the digest does, always; where several do, but once in 2^48.
    """
    total = 0
    for start in range(0, len(numbers), _PART):
        factors = (numbers[start : start + _PART] + 1) * _GOLDEN
        factors ^= (factors >> 32) & 0xFFFFFFFF
        factors *= _STAFFORD
        factors |= 1
        total += int((factors * unsigned(bits[start : start + _PART])).sum())
    return total % (1 << 64)


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Bits as int64 numbers, not negative; those of 8 bytes as they are."""
    if bits.dtype is torch.int64:
        return bits
    wide = bits.to(torch.int64)
    return wide if bits.dtype is torch.uint8 else wide & ((1 << 8 * bits.dtype.itemsize) - 1)
