"""Numbers, positions and digests of elements, against torch's own indexing of small tensors.

Method: all boxes and spans of small shapes. Digests of the regions of every cut add up to that of
the whole, and what they grow by is what new values change.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from ckpt.layout.elements import (
    bits_of,
    differing,
    digest_of,
    digest_of_run,
    numbers_of,
    positions_in,
    unsigned,
)
from ckpt.layout.region import Box, Region, Span

SHAPES = [(), (1,), (5,), (2, 3), (3, 1, 2), (2, 2, 3)]


def regions(shape: tuple[int, ...]) -> list[Region]:
    numel = int(torch.tensor(shape).prod()) if shape else 1
    spans = [Span(a, b) for a in range(numel + 1) for b in range(a, numel + 1)]
    ranges = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = [
        Box(tuple(a for a, _ in cut), tuple(n for _, n in cut))
        for cut in itertools.product(*ranges)
    ]
    return [*spans, *boxes]


def members(region: Region, shape: tuple[int, ...]) -> torch.Tensor:
    every = torch.arange(max(1, int(torch.tensor(shape).prod()))).reshape(shape)
    if isinstance(region, Span):
        return every.reshape(-1)[region.start : region.stop]
    for dim, (start, size) in enumerate(zip(*region, strict=True)):
        every = every.narrow(dim, start, size)
    return every.reshape(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_positions_are_those_of_torch(shape: tuple[int, ...]) -> None:
    whole = members(Span(0, 10**6), shape)
    for region in regions(shape):
        inside = members(region, shape)
        positions = torch.arange(len(inside))
        assert torch.equal(numbers_of(region, shape, positions), inside)
        is_there, inner = positions_in(region, shape, whole)
        assert torch.equal(whole[is_there], torch.sort(inside).values)
        assert torch.equal(inside[inner], whole[is_there])


def test_positions_that_differ_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "empty", np.ones)  # memory is anything
    for numel, share in itertools.product(range(40), (0, 0.1, 0.5, 1)):
        old = torch.arange(numel, dtype=torch.int16)
        new = torch.where(torch.rand(numel) < share, old ^ 256, old)
        assert torch.equal(differing(new, old), (new != old).nonzero().view(-1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_digests_of_parts_add_up_and_grow_by_what_changes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    numel = 200_000
    before = bits_of(torch.randint(0, 250, (numel,), generator=generator).to(dtype))
    numbers = torch.arange(numel)
    whole = digest_of(numbers, before)
    order = torch.randperm(numel, generator=generator)
    parts = (order[:3], order[3:70_000], order[70_000:])
    assert sum(digest_of(part, before[part]) for part in parts) % 2**64 == whole
    row = Box((3, 0), (1, numel))
    of_row = digest_of(numbers[7:] + 3 * numel, before[7:])
    assert digest_of_run(row, (5, numel), 7, before[7:]) == of_row
    after, places = before.clone(), order[:500]
    after[places] ^= 1
    grown = digest_of(places, unsigned(after[places]) - unsigned(before[places]))
    assert (whole + grown) % 2**64 == digest_of(numbers, after) != whole


def test_one_changed_element_always_changes_the_digest() -> None:
    random_ = random.Random(2)
    for _ in range(2000):
        number = torch.tensor([random_.randrange(2**40)])
        one, other = (torch.tensor([random_.randrange(-(2**15), 2**15)]) for _ in range(2))
        if one != other:
            one, other = one.to(torch.int16), other.to(torch.int16)
            assert digest_of(number, one) != digest_of(number, other)
    swapped = torch.tensor([1, 2], dtype=torch.int16)
    assert digest_of(torch.arange(2), swapped) != digest_of(torch.arange(2), swapped.flip(0))
