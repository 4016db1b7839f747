"""Elements of regions by number: where they are in the tensor, in another region, and their digest.

A *number* of an element counts in the row-major order of the whole tensor, a *position* in that of
a region of it. The digest of some elements is a sum over them modulo 2^64, so ranks of any layout
add up to that of the tensor, and what a few new values change in it costs those few alone. It finds
accidents; it is no protection from an attacker.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ckpt.layout.region import Region, Shape, Span, row_major_strides, span_of

_PART = 1 << 15  # elements that are digested at a time: what is made of them stays in the cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {torch.int16: torch.uint16, torch.int32: torch.uint32}
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


def differing(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The positions where two rows of bits differ, ascending."""
    if not new.is_cpu:
        return (new != old).nonzero().view(-1)
    # Eight at a time first: where few differ, that takes half of numpy's own time.
    is_new = np.empty(-(-len(new) // 8) * 8, dtype=np.bool_)
    is_new[len(new) :] = False
    np.not_equal(new.numpy(), old.numpy(), out=is_new[: len(new)])
    eights = is_new.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[some].view(np.bool_))
    positions = some[inside >> 3]
    positions <<= 3
    positions += inside & 7
    return torch.from_numpy(positions)


def positions_in(
    region: Region, shape: Shape, numbers: torch.Tensor
) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Which elements of ascending numbers lie in a region, an index of them, and their positions
    there.
    """
    span = region if isinstance(region, Span) else span_of(region, shape)
    if span is not None:
        ends = torch.tensor([span.start, span.stop], device=numbers.device)
        is_there = slice(*torch.searchsorted(numbers, ends).tolist())
        return is_there, numbers[is_there] - span.start
    assert not isinstance(region, Span)
    lies_in = torch.ones_like(numbers, dtype=torch.bool)
    positions = torch.zeros_like(numbers)
    for dim, stride in enumerate(row_major_strides(shape)):
        place = numbers // stride % shape[dim] - region.offset[dim]
        lies_in &= (place >= 0) & (place < region.shape[dim])
        positions += place * row_major_strides(region.shape)[dim]
    return lies_in, positions[lies_in]


def digest_of(numbers: torch.Tensor, bits: torch.Tensor) -> int:
    """The sum over elements of their bits times an odd factor that their number gives, modulo 2^64.

    `bits` are as `bits_of` has them, or differences of such in int64: then it is what the digest
    grows by. Where one element differs the digest does, always; where several do, but once in 2^48.
    """
    total = 0
    for start in range(0, len(numbers), _PART):
        some, wide = numbers[start : start + _PART], unsigned(bits[start : start + _PART])
        if some.is_cpu:
            total += _digest_on_host(some.numpy().view(np.uint64), wide.numpy().view(np.uint64))
            continue
        factors = (some + 1) * _GOLDEN
        # The mask makes it a logical shift: torch fills in the sign of an int64.
        factors ^= (factors >> 32) & 0xFFFFFFFF
        factors *= _STAFFORD
        factors |= 1
        total += int((factors * wide).sum())
    return total % (1 << 64)


def _digest_on_host(numbers: npt.NDArray[np.uint64], wide: npt.NDArray[np.uint64]) -> int:
    """As `digest_of` has it; numpy takes half of torch's time."""
    factors = numbers * np.uint64(_GOLDEN % (1 << 64))
    factors += np.uint64(_GOLDEN % (1 << 64))
    factors ^= factors >> np.uint64(32)
    factors *= np.uint64(_STAFFORD % (1 << 64))
    factors |= np.uint64(1)
    factors *= wide
    return int(factors.sum())


def digest_of_run(region: Region, shape: Shape, start: int, bits: torch.Tensor) -> int:
    """The digest of `bits`, which a region has from position `start` on."""
    total = 0
    for part in range(0, len(bits), _PART):
        some = bits[part : part + _PART]
        positions = torch.arange(len(some), device=bits.device)
        total += digest_of(numbers_of(region, shape, positions + start + part), some)
    return total % (1 << 64)


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Bits as int64 numbers, not negative; those of 8 bytes as they are."""
    if bits.dtype is torch.int64:
        return bits
    return bits.view(_UNSIGNED.get(bits.dtype, bits.dtype)).to(torch.int64)
