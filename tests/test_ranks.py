"""The harness for real ranks does what tests rest on: results, tracebacks, deadlines."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, fork_ranks, run_ranks

pytestmark = pytest.mark.ranks


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")
    dist.barrier()
    return "fine"


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(9)
    return "fine"


def _hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.05)


def _fork(failing: int) -> None:
    fork_ranks(3, _fail_on, failing, timeout_seconds=5)


def test_forks_of_a_rank_are_ranks_and_their_failure_is_its_own() -> None:
    """The others wait in a barrier until their deadline."""
    assert run_ranks(1, _fork, -1, group=False) == [None]
    with pytest.raises(RanksFailed, match=r"ranks failed: \{0: 256, 1: 256, 2: 256\}"):
        run_ranks(1, _fork, 1, group=False)


def test_results_come_back_in_rank_order() -> None:
    """An all-reduce over three ranks, and each rank's own number."""
    assert run_ranks(3, _sum_of_ranks, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_an_exception_comes_back_with_its_traceback() -> None:
    """The others wait in a barrier that never ends; the failure must not wait for the deadline."""
    with pytest.raises(RanksFailed, match="planted on 1") as caught:
        run_ranks(2, _fail_on, 1, timeout_seconds=120)
    assert "_fail_on" in str(caught.value)
    assert isinstance(caught.value.errors[1], ValueError)


def test_a_hanging_rank_is_named_at_the_deadline() -> None:
    """Rank 0 never returns; rank 1 waits for it in the last barrier."""
    with pytest.raises(RanksFailed, match=r"no answer from rank 0") as caught:
        run_ranks(2, _hang_on, 0, timeout_seconds=5)
    assert 0 in caught.value.silent


def test_a_rank_that_may_die_leaves_the_others_their_results() -> None:
    """Rank 1 ends without a word."""
    assert run_ranks(3, _die_on, 1, allow_dead=[1]) == ["fine", None, "fine"]


def test_a_rank_that_dies_is_named() -> None:
    """Rank 1 ends without a word, and nobody expected it."""
    with pytest.raises(RanksFailed, match=r"no answer from rank .*1"):
        run_ranks(2, _die_on, 1, timeout_seconds=30)


def skips() -> None:
    pytest.skip("not here")


@pytest.mark.ranks
def test_a_test_that_ranks_skip_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(2, skips)


def one_skips() -> None:
    if dist.get_rank() == 0:
        pytest.skip("not here")
    raise ValueError("and wrong there")


@pytest.mark.ranks
def test_a_skip_hides_no_failure() -> None:
    with pytest.raises(RanksFailed, match="and wrong there"):
        run_ranks(2, one_skips)
