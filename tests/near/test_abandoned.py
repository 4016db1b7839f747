"""A training that fails does not wait for a near save that a silent host holds up.

Method: threads as ranks. The store of one rank does not answer while another rank's training fails.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import RankFailed
from ckpt.service import checkpointer
from ckpt.service.checkpointer import Checkpointer
from ckpt.world.base import World
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore
from tests.near.test_near_training import folders
from tests.near.training import Life, advance
from tests.thread_ranks import RanksFailed

LEFT_SECONDS_MAX = 30.0  # a round would wait for minutes


class TrainingFailed(Exception):
    pass


def test_a_failed_training_gives_up_a_near_save_that_another_rank_holds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent, has_left = threading.Event(), threading.Event()
    waited: list[bool] = []

    class Silent(FaultyStore):
        """The second host's disk: it answers when the first rank has left, or never."""

        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            if is_silent.is_set() and "rank00001" in key:
                waited.append(has_left.wait(LEFT_SECONDS_MAX))
            return self.inner.create(key, nbytes, **how)

    monkeypatch.setattr(
        "ckpt.near.tier.LocalStore", lambda root: Silent(LocalStore(root), FaultPlan(0))
    )
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: False)
    monkeypatch.setattr(checkpointer, "ABANDON_SECONDS", 0.1)
    ended = Checkpointer.__exit__

    def end(service: Checkpointer, kind: Any, *error: Any) -> Any:
        result = ended(service, kind, *error)
        if kind is TrainingFailed:
            has_left.set()
        return result

    monkeypatch.setattr(Checkpointer, "__exit__", end)

    def then(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        world.gather("is silent", b"")
        is_silent.set()
        advance(state, 3, world.rank, world.size)
        service.step(3)
        advance(state, 4, world.rank, world.size)
        service.step(4)  # begins the near save
        if world.rank == 0:
            raise TrainingFailed

    with pytest.raises(RanksFailed) as failed:
        Life(2, MemoryStore(), folders(tmp_path, 0, 1)).run(2, then=then)
    assert waited == [True], "the first rank waited for the silent one"
    kinds = {rank: type(error) for rank, error in failed.value.errors.items()}
    assert kinds.pop(0) is TrainingFailed and set(kinds.values()) <= {RankFailed}
    # What was there before is what the next start finds.
    is_silent.clear()
    again = Life(2, MemoryStore(), folders(tmp_path, 0, 1))
    again.run(0)
