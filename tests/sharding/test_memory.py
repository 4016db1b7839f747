"""Memory of gathered parameters comes and goes at one address; pages move between users.

Method: write, release, fetch and look, with both ways of keeping memory; resident pages are counted
by the kernel. Scratch buffers are used again when they fit, and never by two at once.
"""

from __future__ import annotations

import sys

import pytest
import torch

from sharding.engine.memory import BufferPool, GatheredMemory, PagePool, _can_move, _Moved, _Resized

SIZE = 4 * 1024 * 1024
CPU = torch.device("cpu")
moves = pytest.mark.skipif(not _can_move(), reason="this system does not move pages")


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * 4096


def made(kind: str) -> GatheredMemory:
    return _Resized(SIZE, CPU) if kind == "resized" else _Moved(SIZE, PagePool())


@pytest.mark.parametrize("kind", ["resized", pytest.param("moved", marks=moves)])
def test_views_are_valid_again_after_release_and_fetch(kind: str) -> None:
    memory = made(kind)
    view = memory.whole.view(torch.float32)[1000:2000]
    for value in (1.0, 2.0):
        memory.fetch()
        memory.fetch()
        assert memory.nbytes == SIZE
        memory.whole.view(torch.float32).fill_(value)
        assert float(view.sum()) == 1000 * value
        memory.release()
        memory.release()
        assert memory.nbytes == 0


@moves
def test_released_pages_serve_the_next_user() -> None:
    pool = PagePool()
    first = _Moved(SIZE, pool)
    first.whole.fill_(7)
    first.release()
    second = _Moved(SIZE, pool)
    assert int(second.whole[0]) == 7
    before = resident()
    second.whole.fill_(8)
    assert resident() - before < SIZE // 2  # no new pages
    assert int(first.whole.sum()) == 0  # reading what was released is harmless


@moves
def test_pages_beyond_those_that_are_kept_go_back_to_the_system() -> None:
    pool = PagePool(kept_max=1)
    users = [_Moved(8 * SIZE, pool) for _ in range(4)]
    for user in users:
        user.whole.fill_(1)
    before = resident()
    for user in users:
        user.release()
    freed = before - resident()
    assert freed > 2 * 8 * SIZE


@moves
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_address_range_lives_as_long_as_its_tensors() -> None:
    memory = _Moved(SIZE, PagePool())
    view = memory.whole[:8]
    view.fill_(3)
    del memory
    assert view.tolist() == [3] * 8


def test_scratch_is_used_again_and_never_shared() -> None:
    pool = BufferPool(kept_max=2)
    first = pool.take(100, torch.float32, CPU)
    second = pool.take(100, torch.float32, CPU)
    assert first.data_ptr() != second.data_ptr() and first.numel() == 100
    pool.give_back(first)
    again = pool.take(30, torch.float64, CPU)
    assert again.data_ptr() == first.data_ptr() and again.dtype == torch.float64
    pool.give_back(second)
    pool.give_back(again)
    pool.give_back(torch.empty(5).view(torch.float32))
    assert pool.take(100, torch.float32, CPU).data_ptr() in (first.data_ptr(), second.data_ptr())


@moves
def test_pages_that_a_pool_keeps_go_with_it() -> None:
    before = resident()
    for _ in range(8):
        pool = PagePool()
        memory = _Moved(SIZE, pool)
        memory.whole.fill_(1)
        memory.release()
        del memory, pool
    assert resident() - before < 4 * SIZE
