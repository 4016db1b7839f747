"""Bytes find their way from any regions to any regions; each travels once, in small batches.

Ranks as threads. Tensors of random shapes and dtypes are cut at random, among spans and boxes, with
and without replicas; what each rank wants is cut in another way. What arrives is compared with the
tensor itself. Exchanged bytes are counted, buffers measured.
"""

from __future__ import annotations

import math
import random
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch

from ckpt.errors import Mismatch
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Shape, Span, whole
from ckpt.state_dict import redistribute as module
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import gather_table
from ckpt.world.base import Transfers, World
from tests.state.checkpoints import elements, put, same_bits
from tests.thread_ranks import RanksFailed, run_ranks

REPLICAS = tuple(range(4))  # holders of equal regions are declared replicas of each other
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def a_tensor(shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def cut(rng: random.Random, shape: Shape, ranks: int) -> list[list[Region]]:
    """A partition of a tensor among ranks; some may have nothing, all may have all."""
    kind = rng.choice(["spans", "rows", "columns", "whole", "one", "twice"])
    numel = math.prod(shape)
    if kind == "whole":
        return [[whole(shape)] for _ in range(ranks)]
    if kind == "one" or not shape:
        holder = rng.randrange(ranks)
        return [[whole(shape)] if rank == holder else [] for rank in range(ranks)]
    if kind in ("spans", "twice"):
        groups = max(ranks // 2, 1) if kind == "twice" else ranks
        ends = sorted(rng.randint(0, numel) for _ in range(groups - 1))
        spans = [Span(a, b) for a, b in zip([0, *ends], [*ends, numel], strict=True)]
        return [[spans[rank % groups]] for rank in range(ranks)]
    dim = 0 if kind == "rows" else len(shape) - 1
    size = -(-shape[dim] // ranks)
    regions: list[list[Region]] = []
    for rank in range(ranks):
        start = min(rank * size, shape[dim])
        stop = min(start + size, shape[dim])
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        extent = tuple(stop - start if d == dim else s for d, s in enumerate(shape))
        regions.append([Box(offset, extent)])
    return regions


def holding(
    fqn: str, shape: Shape, region: Region, source: torch.Tensor | None, *, like: Any, odd: bool
) -> Holding:
    """Memory for a region, filled from `source`; boxes in `odd` memory have gaps."""
    dtype: torch.dtype = like
    extent = (region.numel,) if isinstance(region, Span) else region.shape
    local = torch.zeros(extent, dtype=dtype)
    if odd and not isinstance(region, Span):
        local = torch.zeros((*extent, 2), dtype=dtype)[..., 1]
    if source is not None:
        put(local, whole(tuple(local.shape)), elements(source, region))
    local_region = Span(0, region.numel) if isinstance(region, Span) else whole(tuple(local.shape))
    piece = Piece(fqn, shape, dtype, region, local_region, REPLICAS)
    return Holding(local, (piece,), Kind.OTHER, False)


@pytest.mark.parametrize(("batch_nbytes", "direct_nbytes_min"), [(64, 16), (1 << 20, 100)])
def test_what_arrives_is_what_was_there(
    rng: random.Random,
    scale: Any,
    batch_nbytes: int,
    direct_nbytes_min: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH_NBYTES", batch_nbytes)
    monkeypatch.setattr(module, "DIRECT_NBYTES_MIN", direct_nbytes_min)
    for _ in range(scale.count(30, 1000)):
        ranks = rng.choice([1, 2, 3, 4])
        cases = []
        for index in range(rng.randint(1, 5)):
            least = 0 if rng.random() < 0.1 else 1
            shape = tuple(rng.randint(least, 7) for _ in range(rng.randint(0, 3)))
            tensor = a_tensor(shape, rng.choice(DTYPES), index)
            cases.append((f"t{index}", tensor, cut(rng, shape, ranks), cut(rng, shape, ranks)))

        def run(world: World, cases: Any = cases, odd: bool = rng.random() < 0.5) -> list[str]:
            held, wanted = [], []
            for fqn, tensor, sources, targets in cases:
                shape = tuple(tensor.shape)
                for region in sources[world.rank]:
                    held.append(holding(fqn, shape, region, tensor, like=tensor.dtype, odd=odd))
                for region in targets[world.rank] * 2:  # twice: two holdings of one region
                    wanted.append(holding(fqn, shape, region, None, like=tensor.dtype, odd=odd))
            redistribute(world, held, gather_table(world, "held", held), wanted)
            tensors = {fqn: tensor for fqn, tensor, _, _ in cases}
            return [
                f"{h.pieces[0]}"
                for h in wanted
                if not same_bits(
                    elements(h.local, h.pieces[0].local_region),
                    elements(tensors[h.pieces[0].fqn], h.pieces[0].region),
                )
            ]

        assert run_ranks(ranks, run) == [[]] * ranks, cases


class Counting(World):
    """Counts what passes through a world."""

    def __init__(self, inner: World) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.global_ranks = inner.global_ranks
        self.received = 0
        self.largest = 0

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        return self.inner.gather(name, payload)

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        return self.inner.gather_to_coordinator(name, payload)

    def merge_to_coordinator(self, name: str, merge: Any) -> list[bytes] | None:
        return self.inner.merge_to_coordinator(name, merge)

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        return self.inner.broadcast(name, payload)

    def agree(self, phase: str, error: BaseException | None) -> None:
        self.inner.agree(phase, error)

    def all_to_all(self, name: str, send: Any, recv: Any) -> None:
        nbytes = sum(view.nbytes for parts in recv for view in parts)
        self.received += nbytes
        self.largest = max(self.largest, nbytes)
        self.inner.all_to_all(name, send, recv)

    def transfers(self, name: str, *lengths: Any) -> AbstractContextManager[Transfers]:
        return self.inner.transfers(name, *lengths)

    def raise_flag(self, name: str) -> None:
        self.inner.raise_flag(name)

    def flag_is_up(self, name: str) -> bool:
        return self.inner.flag_is_up(name)

    def check_neighbour(self, phase: str) -> None:
        self.inner.check_neighbour(phase)

    def duplicate(self) -> World:
        return self.inner.duplicate()

    def close(self) -> None:
        self.inner.close()


def test_each_byte_travels_once_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks have a fourth each, of 64 KiB and of a small tensor; all want everything."""
    monkeypatch.setattr(module, "BATCH_NBYTES", 4096)
    shape = (128, 128)

    def run(world: World) -> tuple[int, int]:
        counting = Counting(world)
        part = 128 * 128 // 4
        span = Span(world.rank * part, (world.rank + 1) * part)
        held = [holding("t", shape, span, None, like=torch.float32, odd=False)]
        wanted = [holding("t", shape, whole(shape), None, like=torch.float32, odd=False)]
        redistribute(counting, held, gather_table(counting, "held", held), wanted)
        return counting.received, counting.largest

    for received, largest in run_ranks(4, run):
        assert received == 3 * 128 * 128 // 4 * 4
        assert largest <= 4096


def test_replicas_are_asked_in_turn_and_own_memory_first() -> None:
    """Two pairs of ranks hold halves twice; everybody gets the other half from his own pair."""

    def run(world: World) -> int:
        counting = Counting(world)
        span = Span(0, 50) if world.rank % 2 == 0 else Span(50, 100)
        held = [holding("t", (100,), span, None, like=torch.uint8, odd=False)]
        held[0].local.fill_(world.rank)
        wanted = [holding("t", (100,), Span(0, 100), None, like=torch.uint8, odd=False)]
        redistribute(counting, held, gather_table(counting, "held", held), wanted)
        pair = world.rank // 2 * 2
        assert sorted(set(wanted[0].local.tolist())) == [pair, pair + 1]
        return counting.received

    assert run_ranks(4, run) == [64] * 4  # 50 bytes, rounded up to 16


def test_gaps_overlaps_and_disagreement_are_reported_on_all_ranks() -> None:
    def run(world: World, spans: Any, shape: Shape) -> None:
        held = [holding("a.b", shape, spans[world.rank], None, like=torch.uint8, odd=False)]
        wanted = [holding("a.b", shape, Span(0, shape[0]), None, like=torch.uint8, odd=False)]
        redistribute(world, held, gather_table(world, "held", held), wanted)

    for spans in ([Span(0, 3), Span(4, 6)], [Span(0, 4), Span(3, 6)]):
        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, partial(run, spans=spans, shape=(6,)))
        texts = {str(error) for error in failed.value.errors.values()}
        assert len(failed.value.errors) == 2 and len(texts) == 1
        assert all(isinstance(error, Mismatch) for error in failed.value.errors.values())
        assert "a.b" in texts.pop()
    with pytest.raises(RanksFailed, match=r"a\.b: rank 1 has shape \(7,\)"):
        run_ranks(2, lambda world: run(world, [Span(0, 3), Span(3, 6)], (6 + world.rank,)))


def test_what_a_rank_holds_itself_is_never_sent_to_it() -> None:
    """Ranks 0 and 1 hold the first half, 2 and 3 the second; every half is marked by its rank."""

    def run(world: World) -> tuple[list[int], int]:
        counting = Counting(world)
        span = Span(0, 64) if world.rank < 2 else Span(64, 128)
        held = [holding("t", (128,), span, None, like=torch.uint8, odd=False)]
        held[0].local.fill_(world.rank)
        wanted = [holding("t", (128,), Span(0, 128), None, like=torch.uint8, odd=False)]
        redistribute(counting, held, gather_table(counting, "held", held), wanted)
        return sorted(set(wanted[0].local.tolist())), counting.received

    for rank, (marks, received) in enumerate(run_ranks(4, run)):
        assert rank in marks and len(marks) == 2 and received == 64


def _held(world: World, owners: Any, replicas: Any) -> tuple[list[Holding], list[Holding]]:
    """Two tensors of one name: halves of ones on ranks 0 and 2, of twos on ranks 1 and 3."""
    span = Span(0, 8) if world.rank < 2 else Span(8, 16)
    held = [holding("a.b", (16,), span, None, like=torch.uint8, odd=False)]
    held[0].local.fill_(world.rank % 2 + 1)
    pieces = (held[0].pieces[0]._replace(holders=replicas[world.rank]),)
    held = [held[0]._replace(pieces=pieces, owners=owners[world.rank])]
    return held, [holding("a.b", (16,), Span(0, 16), None, like=torch.uint8, odd=False)]


def test_a_rank_takes_only_from_those_that_share_its_tensor() -> None:
    def run(world: World) -> list[int]:
        held, wanted = _held(world, [(0, 2), (1, 3)] * 2, [(0,), (1,), (2,), (3,)])
        redistribute(world, held, gather_table(world, "held", held), wanted)
        return sorted(set(wanted[0].local.tolist()))

    assert run_ranks(4, run) == [[1], [2], [1], [2]]


@pytest.mark.parametrize("replicas", [[(0,), (1,), (2,), (3,)], [(0, 1), (1,), (2, 3), (3,)]])
def test_equal_regions_of_strangers_are_an_error_that_names_both(replicas: Any) -> None:
    """Nobody says who shares the tensor; one side alone cannot make the other a replica."""

    def run(world: World) -> None:
        held, wanted = _held(world, [None] * 4, replicas)
        redistribute(world, held, gather_table(world, "held", held), wanted)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(4, run)
    texts = {str(error) for error in failed.value.errors.values()}
    assert len(failed.value.errors) == 4 and len(texts) == 1
    assert all(isinstance(error, Mismatch) for error in failed.value.errors.values())
    assert "a.b: ranks 0 and 1 both have" in texts.pop()
