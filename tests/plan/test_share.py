"""Sharing of blocks between ranks, checked against block sets counted one by one."""

from __future__ import annotations

import random

import numpy as np

from ckpt.loading.shared_reads import Ints, ShareLimits, Sharing, share_blocks


def _runs(blocks: set[int]) -> Ints:
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, block + 1])
    return np.array(runs, dtype=np.int64).reshape(-1, 2)


def _blocks(runs: Ints) -> set[int]:
    return {block for first, last in runs.tolist() for block in range(first, last)}


def _case(seed: int) -> tuple[list[set[int]], list[Sharing], Ints]:
    random_ = random.Random(seed)
    ranks, total = random_.randint(1, 5), random_.randint(1, 40)
    sizes = [random_.randint(1, 10) for _ in range(total)]
    line = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    wanted = [{b for b in range(total) if random_.random() < 0.5} for _ in range(ranks)]
    needs = [_runs(blocks) for blocks in wanted]
    sharings = [
        share_blocks(needs, line, rank, ShareLimits(12, 30, repeated_nbytes_max=0))
        for rank in range(ranks)
    ]
    return wanted, sharings, line


def test_every_needed_block_is_read_once_in_the_whole_job() -> None:
    for seed in range(200):
        wanted, sharings, _ = _case(seed)
        reads: list[int] = []
        for rank, sharing in enumerate(sharings):
            reads += sorted(_blocks(sharing.private))
            for run in sharing.shared:
                if run.reader == rank:
                    reads += range(run.start, run.stop)
        assert sorted(reads) == sorted(set.union(*wanted))


def test_every_rank_gets_exactly_the_blocks_it_needs() -> None:
    for seed in range(200):
        wanted, sharings, _ = _case(seed)
        for rank, sharing in enumerate(sharings):
            got = sorted(_blocks(sharing.private))
            for run in sharing.shared:
                if rank == run.reader or rank in run.others:
                    got += range(run.start, run.stop)
            assert sorted(got) == sorted(wanted[rank])


def test_all_ranks_agree_and_rounds_bound_the_bytes_per_rank() -> None:
    for seed in range(200):
        _, sharings, line = _case(seed)
        assert all(sharing.shared == sharings[0].shared for sharing in sharings)
        for rank in range(len(sharings)):
            by_round: dict[int, int] = {}
            for run in sharings[0].shared:
                if rank == run.reader or rank in run.others:
                    nbytes = int(line[run.stop] - line[run.start])
                    by_round[run.round] = by_round.get(run.round, 0) + nbytes
            assert all(nbytes <= 30 for nbytes in by_round.values())


def test_replicas_divide_the_reading_evenly() -> None:
    line = np.arange(0, 101 * 4, 4, dtype=np.int64)
    needs = [np.array([[0, 100]], dtype=np.int64)] * 4
    sharing = share_blocks(needs, line, 0, ShareLimits(16, 64, repeated_nbytes_max=0))
    loads = [0] * 4
    for run in sharing.shared:
        loads[run.reader] += run.stop - run.start
    assert max(loads) - min(loads) <= 4
    assert len(sharing.private) == 0


def test_rounds_are_filled_before_the_next_one_begins() -> None:
    """Each round is a collective: six blocks of 10 bytes in rounds of 30 are two of them."""
    line = np.arange(0, 61, 10, dtype=np.int64)
    needs = [np.array([[0, 6]], dtype=np.int64)] * 2
    sharing = share_blocks(needs, line, 0, ShareLimits(10, 30, repeated_nbytes_max=0))
    assert [run.round for run in sharing.shared] == [0, 0, 0, 1, 1, 1]
    assert sharing.rounds == 2


def test_a_few_bytes_that_everybody_needs_are_not_worth_an_exchange() -> None:
    """Each rank has 100 KiB of its own, and both need 8 bytes: nothing changes hands."""
    line = np.array([0, 100 << 10, (100 << 10) + 8, (200 << 10) + 8], dtype=np.int64)
    needs = [np.array([[0, 2]], dtype=np.int64), np.array([[1, 3]], dtype=np.int64)]
    sharing = share_blocks(needs, line, 0, ShareLimits())
    assert sharing.shared == []
    assert sharing.private.tolist() == [[0, 2]]


def test_reading_twice_is_next_to_nothing_up_to_one_part_in_100_of_all_bytes() -> None:
    """100 bytes that both ranks need, beside so many bytes of their own that all are `total`."""
    needs = [np.array([[0, 2]], dtype=np.int64), np.array([[1, 3]], dtype=np.int64)]
    for total, is_shared in ((9_999, True), (10_000, False), (10_001, False)):
        line = np.array([0, 4_000, 4_100, total], dtype=np.int64)
        shared = share_blocks(needs, line, 0, ShareLimits()).shared
        assert [(run.start, run.stop) for run in shared] == ([(1, 2)] if is_shared else [])


def test_ranks_that_need_nothing_share_nothing() -> None:
    nothing = np.empty((0, 2), dtype=np.int64)
    sharing = share_blocks([nothing, nothing], np.zeros(1, dtype=np.int64), 0, ShareLimits())
    assert sharing.private.tolist() == [] and (sharing.shared, sharing.rounds) == ([], 0)


def test_small_blocks_are_exchanged_when_they_are_all_there_is() -> None:
    line = np.arange(0, 11 * 1024, 1024, dtype=np.int64)
    needs = [np.array([[0, 10]], dtype=np.int64)] * 3
    sharing = share_blocks(needs, line, 0, ShareLimits())
    assert sum(run.stop - run.start for run in sharing.shared) == 10
