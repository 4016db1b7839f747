"""Collectives of several tensors at once, direct or packed, by messages or the backend's own.

Method: random members (uneven, empty, large and small, several dtypes) on three ranks, gathered and
reduced by every `Comm`, against what all ranks' values say; integers as floats, so that sums are
exact in any order.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from sharding.engine.collectives import Comm, RankParts, _Native, _Pairwise, default_group
from sharding.engine.pool import BufferPool
from tests.sharding.fully_scenarios import claims

pytestmark = pytest.mark.ranks
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def comms() -> tuple[Comm, ...]:
    return _Pairwise(default_group()), _Native(default_group())


def random_sizes(rng: random.Random, size: int) -> list[tuple[int, int]]:
    """Elements of the whole and of a part, for some members; above 64 KiB they are sent alone."""
    sizes = []
    for _ in range(rng.randint(1, 6)):
        part = rng.choice([0, 1, 3, rng.randint(2, 50), rng.randint(20_000, 40_000)])
        whole = rng.choice([size * part, rng.randint(0, size * part) if part else 0])
        if whole > (size - 1) * part or rng.random() < 0.5:
            sizes.append((whole, part))
        else:
            sizes.append((whole, -(-whole // size)))  # as `torch.chunk` cuts
    return sizes


def values_of(rank: int, member: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * member + rank)
    return torch.randint(0, 8, (numel,), generator=generator).to(dtype)


def everyone_gets_everyones_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(25):
        rng = random.Random(seed)
        sizes = random_sizes(rng, size)
        dtypes = [rng.choice(DTYPES) for _ in sizes]
        for comm in comms():
            members, wanted = [], []
            for index, ((numel, part), dtype) in enumerate(zip(sizes, dtypes, strict=True)):
                whole = values_of(0, index, numel, dtype)
                parts = RankParts(torch.full_like(whole, 99), part)
                parts.of(rank).copy_(RankParts(whole, part).of(rank))
                members.append(parts)
                wanted.append(whole)
            pool = BufferPool()
            comm.all_gather(members, pool=pool, tag=seed).wait()
            for parts, whole in zip(members, wanted, strict=True):
                held = size * parts.part_numel
                assert torch.equal(parts.whole[:held], whole[:held]), f"{seed} {type(comm)}"


def everyone_gets_the_sum_of_its_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(25):
        rng = random.Random(seed)
        sizes = random_sizes(rng, size)
        dtype = rng.choice((torch.float32, torch.bfloat16))
        for comm in comms():
            members = [
                RankParts(values_of(rank, index, numel, dtype), part)
                for index, (numel, part) in enumerate(sizes)
            ]
            outs = [torch.full_like(parts.of(rank), 99) for parts in members]
            comm.reduce_scatter(members, outs, pool=BufferPool(), tag=seed).wait()
            for index, (out, (numel, part)) in enumerate(zip(outs, sizes, strict=True)):
                whole = torch.stack([values_of(r, index, numel, dtype) for r in range(size)]).sum(0)
                assert torch.equal(out, RankParts(whole, part).of(rank)), f"{seed} {type(comm)}"


def calls_of_several_units_pass_each_other() -> None:
    rank = dist.get_rank()
    comm, pool = comms()[0], BufferPool()
    members, pending = [], []
    for tag in range(4):
        parts = RankParts(torch.full((30,), float(tag)), 10)
        parts.of(rank).fill_(10.0 * tag + rank)
        members.append(parts)
    # Started in other orders on other ranks.
    for tag in sorted(range(4), key=lambda tag: (tag * (rank + 1)) % 5):
        pending.append(comm.all_gather([members[tag]], pool=pool, tag=tag))
    for one in pending:
        one.wait()
        one.wait()
    for tag, parts in enumerate(members):
        assert [float(parts.of(r)[0]) for r in range(3)] == [10.0 * tag + r for r in range(3)]


test_on_three_ranks = claims(
    3,
    [
        everyone_gets_everyones_parts,
        everyone_gets_the_sum_of_its_parts,
        calls_of_several_units_pass_each_other,
    ],
)
