"""Who shares which blocks, who reads them and who passes them on, against block sets counted one by
one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from ckpt.loading.exchange import (
    Group,
    Move,
    ShareLimits,
    Sharing,
    Weight,
    long_only,
    relay,
    share,
    weigh,
)
from ckpt.loading.matching import NeedMap, all_together, halvings, match, needs_of
from ckpt.loading.plan import Ints, NeededBlocks
from tests.thread_ranks import run_ranks

LIMITS = ShareLimits(12, 6, 30, repeated_nbytes_max=0)


class Case(NamedTuple):
    """Blocks of a line, and which of them each rank needs."""

    edges: list[int]
    wanted: list[set[int]]

    @classmethod
    def drawn(cls, seed: int, ranks: int | None = None) -> Case:
        """Every rank wants some blocks, or what another one wants, or nothing."""
        random_ = random.Random(seed)
        total = random_.randint(1, 40)
        edges = np.cumsum([random_.randint(0, 3), *(random_.randint(1, 10) for _ in range(total))])
        likely = random_.choice([0.1, 0.5, 0.9])
        wanted: list[set[int]] = []
        for _ in range(ranks or random_.randint(1, 9)):
            new = {block for block in range(total) if random_.random() < likely}
            wanted.append(random_.choice([new, new, *wanted[-3:], set()]))
        return cls(edges.tolist(), wanted)

    def blocks(self, rank: int) -> NeededBlocks:
        rows = np.array(sorted(self.wanted[rank]), dtype=np.int64)
        edges = np.array(self.edges, dtype=np.int64)
        return NeededBlocks(edges[rows], edges[rows + 1], rows, rows * 0)

    def needs(self, rank: int) -> Ints:
        return self.blocks(rank).runs()

    def groups(self, rank: int) -> list[tuple[list[int], list[list[int]]]]:
        """The groups of a rank, counted block by block: sets, each with its longest runs."""
        runs: dict[tuple[int, ...], list[list[int]]] = {}
        for block in sorted(self.wanted[rank]):
            ranks = tuple(r for r, wanted in enumerate(self.wanted) if block in wanted)
            if len(ranks) > 1:
                ours = runs.setdefault(ranks, [])
                start, stop = self.edges[block : block + 2]
                if ours and ours[-1][1] == start:
                    ours[-1][1] = stop
                else:
                    ours.append([start, stop])
        return [(list(ranks), ours) for ranks, ours in runs.items()]

    def sharings(self) -> list[Sharing]:
        sharings = []
        for rank in range(len(self.wanted)):
            groups = [Group(np.array(r), np.array(runs)) for r, runs in self.groups(rank)]
            sharings.append(share(self.blocks(rank), groups, rank, LIMITS))
        return sharings

    def blocks_in(self, start: int, stop: int) -> list[int]:
        return list(range(self.edges.index(start), self.edges.index(stop)))


def _plain(groups: list[Group]) -> list[tuple[list[int], list[list[int]]]]:
    return [(group.ranks.tolist(), group.runs.tolist()) for group in groups]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 16, 33])
def test_ranks_find_exactly_those_that_share_their_blocks(ranks: int) -> None:
    cases = [Case.drawn(seed, ranks) for seed in range(300 // (ranks + 5))]

    def rank_main(world) -> list[list[Group]]:  # type: ignore[no-untyped-def]
        matches = []
        for case in cases:
            with world.transfers("needs") as wires:
                matches.append(match(wires, world.rank, range(ranks), case.needs(world.rank), 400))
        return matches

    for rank, matches in enumerate(run_ranks(ranks, rank_main)):
        for case, groups in zip(cases, matches, strict=True):
            assert _plain(groups) == case.groups(rank)


def test_the_sum_of_all_needs_has_the_same_groups() -> None:
    for seed in range(100):
        case = Case.drawn(seed)
        needs = [needs_of(rank, case.needs(rank)) for rank in range(len(case.wanted))]
        everybodys = NeedMap.decode(all_together(needs).encode())
        for rank, one in enumerate(needs):
            assert _plain(everybodys.shared_in(one).groups()) == case.groups(rank)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 32, 1000])
def test_halvings_end_with_stretches_that_make_up_the_line(size: int) -> None:
    """Each rank sends one message a level, to one that expects it, and gets at most two."""
    levels = [halvings(rank, range(size), 10**6) for rank in range(size)]
    assert max(len(halves) for halves in levels) == math.ceil(math.log2(size))
    stretches = [halves[-1].mine if halves else range(10**6) for halves in levels]
    assert [one.start for one in stretches] == [0, *(one.stop for one in stretches[:-1])]
    assert stretches[-1].stop == 10**6
    for level in range(max(len(halves) for halves in levels)):
        here = {rank: halves[level] for rank, halves in enumerate(levels) if level < len(halves)}
        sent = {(rank, half.partner) for rank, half in here.items()}
        assert sent == {(one, rank) for rank, half in here.items() for one in half.senders}
        assert all(len(half.senders) <= 2 for half in here.values())


@pytest.mark.parametrize("count", range(1, 40))
def test_relays_reach_every_member_once(count: int) -> None:
    for reader in range(count):
        ways = [relay(here, reader, count) for here in range(count)]
        reached = Counter(target for _, targets in ways for target in targets)
        assert reached == Counter(here for here in range(count) if here != reader)
        assert ways[reader][0] is None
        for here, (_, targets) in enumerate(ways):
            assert all(ways[target][0] == here for target in targets)
    near = {n for reader in range(count) for n in [relay(0, reader, count)[0]] if n is not None}
    near |= {n for reader in range(count) for n in relay(0, reader, count)[1]}
    assert len(near) <= 2 * math.ceil(math.log2(count))


def test_every_needed_block_is_read_once_in_the_whole_job() -> None:
    for seed in range(200):
        case = Case.drawn(seed)
        reads: list[int] = []
        for sharing in case.sharings():
            for start, stop in sharing.private.tolist():
                reads += case.blocks_in(start, stop)
            for run in sharing.moves:
                if run.source is None:
                    reads += case.blocks_in(*run.runs[0].tolist())
        assert sorted(reads) == sorted(set.union(*case.wanted))


def test_every_rank_gets_exactly_the_blocks_it_needs() -> None:
    for seed in range(200):
        case = Case.drawn(seed)
        for rank, sharing in enumerate(case.sharings()):
            runs = [*sharing.private.tolist(), *(run.runs[0].tolist() for run in sharing.moves)]
            got = [block for start, stop in runs for block in case.blocks_in(start, stop)]
            assert sorted(got) == sorted(case.wanted[rank])


def test_what_one_rank_passes_on_the_other_expects() -> None:
    for seed in range(200):
        case = Case.drawn(seed)
        sharings = case.sharings()
        sent = Counter(
            (rank, target, *run.runs[0].tolist())
            for rank, sharing in enumerate(sharings)
            for run in sharing.moves
            for target in run.targets
        )
        expected = Counter(
            (run.source, rank, *run.runs[0].tolist())
            for rank, sharing in enumerate(sharings)
            for run in sharing.moves
            if run.source is not None
        )
        assert sent == expected
        for sharing in sharings:
            starts = [run.start for run in sharing.moves]
            assert starts == sorted(starts)
            assert all(run.nbytes <= 12 for run in sharing.moves)


def _one_group(ranks: int, sizes: list[int], limits: ShareLimits) -> list[list[Move]]:
    edges = np.cumsum([0, *sizes])
    blocks = NeededBlocks(
        edges[:-1], edges[1:], np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    )
    group = Group(np.arange(ranks), np.array([[0, edges[-1]]]))
    return [share(blocks, [group], rank, limits).moves for rank in range(ranks)]


def test_replicas_divide_the_reading_evenly_and_the_passing_on() -> None:
    for ranks in (2, 4, 7, 32):
        parts = _one_group(ranks, [4] * 5 * ranks, ShareLimits(16, 4, 64, repeated_nbytes_max=0))
        read = [sum(run.nbytes for run in part if run.source is None) for part in parts]
        sent = [sum(run.nbytes * len(run.targets) for run in part) for part in parts]
        assert max(read) - min(read) <= 16
        assert sum(sent) == (ranks - 1) * 4 * 5 * ranks
        assert max(sent) <= 1.2 * 4 * 5 * ranks + 16


def test_little_that_many_ranks_need_is_cut_so_that_all_of_them_read() -> None:
    mib = 1 << 20
    read = [
        sum(run.nbytes for run in part if run.source is None)
        for part in _one_group(8, [mib] * 16, ShareLimits())
    ]
    assert read == [2 * mib] * 8


def test_groups_of_one_run_do_not_all_fall_to_their_first_rank() -> None:
    """Blocks on the edges of shards: 60 runs, which rank 0 shares with one of three others each."""
    mib = 1 << 20
    readers: Counter[int] = Counter()
    for index in range(60):
        start = index * mib
        blocks = NeededBlocks(*(np.array([x]) for x in (start, start + mib, 0, 0)))
        group = Group(np.array([0, 1 + index % 3]), np.array([[start, start + mib]]))
        for rank in group.ranks.tolist():
            (run,) = share(blocks, [group], rank, ShareLimits()).moves
            readers[rank] += run.source is None
    assert sum(readers.values()) == 60
    assert readers[0] <= 40


def _two_ranks(sizes: tuple[int, int, int], limits: ShareLimits) -> tuple[bool, list[Group]]:
    """Each has blocks of its own, and both need the one between them."""
    a, b, c = sizes
    needs = [np.array([[0, a + b]]), np.array([[a, a + b + c]])]
    group = Group(np.array([0, 1]), np.array([[a, a + b]]))
    weights = [weigh(needs[rank], [group], rank, limits) for rank in range(2)]
    sums = Weight(*(sum(column) for column in zip(*weights, strict=True)))
    assert sums.unique == a + b + c
    return sums.is_little(limits), long_only([group], limits)


def test_a_few_bytes_that_everybody_needs_are_not_worth_an_exchange() -> None:
    """Each rank has 100 KiB of its own, and both need 8 bytes: nothing changes hands."""
    assert _two_ranks((100 << 10, 8, 100 << 10), ShareLimits()) == (True, [])


def test_reading_twice_is_next_to_nothing_up_to_one_part_in_100_of_all_bytes() -> None:
    """100 bytes that both ranks need, beside so many bytes of their own that all are `total`."""
    for total, is_little in ((9_999, False), (10_000, True), (10_001, True)):
        assert _two_ranks((4_000, 100, total - 4_100), ShareLimits())[0] is is_little


def test_what_is_long_is_shared_however_little_it_is_of_all() -> None:
    is_little, kept = _two_ranks((1 << 40, 64 << 10, 1 << 40), ShareLimits())
    assert is_little and [group.runs.tolist() for group in kept] == [
        [[1 << 40, (1 << 40) + (64 << 10)]]
    ]


def test_ranks_that_need_nothing_share_nothing() -> None:
    case = Case([0, 1], [set(), set()])
    for rank, sharing in enumerate(case.sharings()):
        assert sharing.private.tolist() == [] and sharing.moves == []
        assert weigh(case.needs(rank), [], rank, LIMITS) == Weight(0, 0, 0)
