"""`Checkpointer.step` holds no round: it returns although all other ranks are held back.

Method: one process makes its steps while the other makes none and the store takes no status, then
the other way round. Rounds of the thread that trains are counted where a world begins them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.world.attendance
import ckpt.world.board
from ckpt.world import job
from ckpt.world.torch_world import TorchWorld
from tests.ranks import run_ranks

GUARD_SECONDS = 60.0


class HeldStore:
    """The rendezvous store, which answers to no status until it is let go."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked, self._let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.asked.set()
        self._let_go.wait(GUARD_SECONDS)
        self._store.multi_set(keys, values)

    def let_go(self) -> Any:
        self._let_go.set()
        return self._store


class Free(NamedTuple):
    """What the steps of the rank that was not held did."""

    begun: list[bool]
    rounds: list[str]
    in_flight: tuple[int, ...]
    status_was_held: bool


def _count_rounds(rounds: list[str]) -> None:
    training, in_round = threading.get_ident(), TorchWorld._in_round

    def counted(self: TorchWorld, name: str) -> Any:
        if threading.get_ident() == training:
            rounds.append(name)
        return in_round(self, name)

    pytest.MonkeyPatch().setattr(TorchWorld, "_in_round", counted)


def _steps(scratch: str) -> list[Free]:
    ckpt.world.attendance.PERIOD_SECONDS = ckpt.world.board.POST_SECONDS = 0.1
    rank, rounds, results = dist.get_rank(), list[str](), []
    _count_rounds(rounds)
    board = job.this_process.in_job().board
    with ckpt.Checkpointer(
        {"x": torch.zeros(8)}, f"{scratch}/root", save=ckpt.EverySteps(4), only=True
    ) as saver:
        for step in range(1, 5):
            saver.step(step)
        for free, steps in ((0, range(5, 12)), (1, range(12, 16))):
            saver.wait()
            dist.barrier()
            done = Path(scratch) / f"{free} is done"
            if rank == free:
                board.store = held = HeldStore(board.store)
                status_was_held = held.asked.wait(GUARD_SECONDS)
                rounds.clear()
                begun = [saver.step(step) for step in steps]
                results.append(Free(begun, list(rounds), saver.in_flight, status_was_held))
                board.store = held.let_go()
                done.touch()
                continue
            while not done.exists():
                time.sleep(0.02)
            for step in steps:
                saver.step(step)
    return results


@pytest.mark.ranks
def test_a_step_returns_while_all_other_ranks_are_held_back(tmp_path: Path) -> None:
    """Steps at which nothing is due, a save is due, a save runs, and a status cannot be posted."""
    (coordinator,), (other,) = run_ranks(2, _steps, str(tmp_path), timeout_seconds=240.0)
    assert coordinator == Free([False] * 3 + [True] + [False] * 3, [], (8,), True)
    assert other == Free([True] + [False] * 3, [], (12,), True)
