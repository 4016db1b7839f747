"""Collectives of several tensors at once, direct or packed, by messages or the backend's own.

Method: random members (uneven, empty, large and small, several dtypes) on three ranks, gathered and
reduced by every `Comm`, against what all ranks' values say; integers as floats, so that sums are
exact in any order. Where a `Comm` takes one member of equal parts only, they are packed first.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sharding.dtensor.gathering import PackedGather, pack_gradients
from sharding.engine.collectives import (
    Comm,
    RankParts,
    _Native,
    _Pairwise,
    comm_of,
    default_group,
)
from sharding.engine.memory import BufferPool
from tests.sharding.fully_scenarios import claims

pytestmark = pytest.mark.ranks
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


CPU = torch.device("cpu")


def comms() -> tuple[Comm, ...]:
    return _Pairwise(default_group()), _Native(default_group())


def gather(comm: Comm, wanted: list[RankParts], pool: BufferPool, tag: int) -> list[torch.Tensor]:
    """Everyone's parts of what is wanted, of which this rank gives its own."""
    own = [parts.of(comm.rank) for parts in wanted]
    even = all(one.whole.numel() == comm.size * one.part_numel for one in wanted)
    if isinstance(comm, _Pairwise) or comm.apart([0] * len(wanted), even=even, device=CPU):
        members = [
            RankParts(torch.full_like(parts.whole, 99), parts.part_numel) for parts in wanted
        ]
        comm.all_gather(members, own, tag=tag).wait()
        return [parts.whole for parts in members]
    padded = []
    for part, parts in zip(own, wanted, strict=True):
        padded.append(part.new_zeros(parts.part_numel))
        padded[-1][: part.numel()] = part
    packed = PackedGather(comm, padded, [one.dtype for one in own], CPU, pool)
    comm.all_gather([packed.whole], [packed.own], tag=tag).wait()
    targets = [
        RankParts(parts.whole.new_full((comm.size * parts.part_numel,), 99), parts.part_numel)
        for parts in wanted
    ]
    packed.copy_out(targets)
    return [
        target.whole[: parts.whole.numel()] for target, parts in zip(targets, wanted, strict=True)
    ]


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
    size = dist.get_world_size()
    for seed in range(25):
        rng = random.Random(seed)
        sizes = random_sizes(rng, size)
        dtypes = [rng.choice(DTYPES) for _ in sizes]
        for comm in comms():
            wanted = [
                RankParts(values_of(0, index, numel, dtype), part)
                for index, ((numel, part), dtype) in enumerate(zip(sizes, dtypes, strict=True))
            ]
            gathered = gather(comm, wanted, BufferPool(), seed)
            for whole, parts in zip(gathered, wanted, strict=True):
                assert torch.equal(whole, parts.whole), f"{seed} {type(comm)}"


def everyone_gets_the_sum_of_its_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(25):
        rng = random.Random(seed)
        sizes = random_sizes(rng, size)
        dtype = rng.choice((torch.float32, torch.bfloat16))
        for comm in comms():
            if not isinstance(comm, _Pairwise):
                continue  # see below
            members = [
                RankParts(values_of(rank, index, numel, dtype), part)
                for index, (numel, part) in enumerate(sizes)
            ]
            outs = [torch.full_like(parts.of(rank), 99) for parts in members]
            comm.reduce_scatter(members, outs, pool=BufferPool(), tag=seed).wait()
            for index, (out, (numel, part)) in enumerate(zip(outs, sizes, strict=True)):
                whole = torch.stack([values_of(r, index, numel, dtype) for r in range(size)]).sum(0)
                assert torch.equal(out, RankParts(whole, part).of(rank)), f"{seed} {type(comm)}"


def packed_gradients_are_summed_into_one_row() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(25):
        rng = random.Random(seed)
        shapes = [
            (rng.choice([0, 1, 2, 3, rng.randint(4, 60)]), *rng.choice([(), (1,), (5, 2), (0,)]))
            for _ in range(rng.randint(1, 6))
        ]
        dtype = rng.choice((torch.float32, torch.bfloat16))
        # Sums in another dtype than some gradients, or than all.
        dtypes = [rng.choice((dtype, torch.float32)) for _ in shapes]
        numels = [torch.Size(shape).numel() for shape in shapes]
        chunks = [-(-shape[0] // size) * torch.Size(shape[1:]).numel() for shape in shapes]
        comm, width = _Native(default_group()), sum(chunks)
        by_rank = [
            [
                values_of(other, index, numel, torch.float32).to(one).view(shape)
                for index, (numel, shape, one) in enumerate(
                    zip(numels, shapes, dtypes, strict=True)
                )
            ]
            for other in range(size)
        ]
        buffer = torch.full((size * width,), 99, dtype=dtype)
        pack_gradients(by_rank[rank], buffer.view(size, width))
        out = torch.full((width,), 99, dtype=dtype)
        member = RankParts(buffer, width)
        comm.reduce_scatter([member], [out], pool=BufferPool(), tag=seed).wait()
        for index, (part, chunk) in enumerate(zip(out.split(chunks), chunks, strict=True)):
            whole = torch.stack([of_rank[index].to(dtype) for of_rank in by_rank]).sum(0)
            wanted = RankParts(whole.reshape(-1), chunk).of(rank)
            assert torch.equal(part[: wanted.numel()], wanted), (seed, index)
            assert not part[wanted.numel() :].any(), (seed, index)


def parts_of_unlike_lengths_go_over_the_backend() -> None:
    """As `Whole` and `Blocks` cut a unit: gloo's own gather and reduction refuse such parts."""
    comm = _Native(dist.new_group(backend="cpu:gloo"))
    ranges = ((0, 5), (5, 5), (5, 12))
    wanted, got = torch.arange(12.0), RankParts(torch.zeros(12), 7, ranges)
    own = wanted[slice(*ranges[comm.rank])]
    out = torch.zeros_like(own)
    comm.all_gather([got], [own], tag=0).wait()
    assert torch.equal(got.whole, wanted)
    comm.reduce_scatter([got], [out], pool=BufferPool(), tag=0).wait()
    assert torch.equal(out, 3 * own)


def the_backend_of_each_device_is_asked_for() -> None:
    """A group as `init_process_group()` makes it names a backend for each kind of device."""
    comm = comm_of(dist.new_group(backend="cpu:gloo"))
    assert isinstance(comm, _Pairwise)
    sizes, cuda = [1 << 20, 1 << 20, 1], torch.device("cuda")
    assert comm.apart(sizes, even=True, device=CPU) == [0, 1, 2]
    assert comm.apart(sizes, even=True, device=cuda) == []
    assert comm.apart(sizes[:1], even=True, device=cuda) == [0]


def calls_that_nobody_waits_for_hold_up_no_other() -> None:
    """As a model does that is gone before its early gather ends: here when a rank is late."""
    comm, pool = comm_of(dist.new_group(timeout=timedelta(seconds=20))), BufferPool()
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.1)
        comm.all_gather([RankParts(torch.zeros(3), 1)], [torch.tensor([7.0])], tag=1)
        comm.reduce_scatter([RankParts(torch.ones(3), 1)], [torch.zeros(1)], pool=pool, tag=1)
        whole, own = RankParts(torch.zeros(3), 1), torch.tensor([float(comm.rank)])
        comm.all_gather([whole], [own], tag=1).wait()
        assert whole.whole.tolist() == [0.0, 1.0, 2.0]


def calls_of_several_units_pass_each_other() -> None:
    rank = dist.get_rank()
    comm = comms()[0]
    members, pending = [], []
    for tag in range(4):
        members.append(RankParts(torch.full((30,), float(tag)), 10))
    # Started in other orders on other ranks.
    for tag in sorted(range(4), key=lambda tag: (tag * (rank + 1)) % 5):
        own = torch.full((10,), 10.0 * tag + rank)
        pending.append(comm.all_gather([members[tag]], [own], tag=tag))
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
        packed_gradients_are_summed_into_one_row,
        parts_of_unlike_lengths_go_over_the_backend,
        the_backend_of_each_device_is_asked_for,
        calls_that_nobody_waits_for_hold_up_no_other,
        calls_of_several_units_pass_each_other,
    ],
)
