"""Near saves that end in the middle: whatever dies at whatever moment, a whole state is left.

Method: two ranks on two hosts whose tiers count their operations; one rank is killed at the n-th of
them, the job ends, and the next job must restore a state that all hosts have, bit for bit, and none
older than what was recorded before.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CheckpointError
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearSaved
from ckpt.service.policies import EverySteps
from ckpt.world.base import World
from storage import StorageError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore, Killed
from tests.conftest import Scale
from tests.near.training import Life
from tests.thread_ranks import RankKilled, RanksFailed

Plans = dict[str, FaultPlan]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """What goes wrong in the tiers, by the name of the host; nothing for hosts without a plan."""
    plans: Plans = {}

    def store(root: str) -> Any:
        named = [plan for host, plan in plans.items() if f"/{host}/" in root]
        return FaultyStore(LocalStore(root), named[0]) if named else LocalStore(root)

    monkeypatch.setattr("ckpt.near.tier.LocalStore", store)
    return plans


def life_that_is_killed(store: MemoryStore, hosts: list[Path]) -> int:
    """A life of six steps in which a rank may be killed; the newest step that a rank knew of as
    recorded.
    """
    life = Life(2, store, hosts, save=EverySteps(3))

    def wait(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()

    try:
        life.run(6, then=wait)
    except RanksFailed as failed:
        for error in failed.errors.values():
            expected = (Killed, RankKilled, CheckpointError, StorageError)
            assert isinstance(error, expected), repr(error)
    saved = [e.report.step for es in life.events.values() for e in es if isinstance(e, NearSaved)]
    return max(saved, default=0)


def restored(store: MemoryStore, hosts: list[Path]) -> tuple[str, int]:
    life = Life(2, store, hosts)
    life.run(0)
    (origin,) = {(r.origin, r.step) if r else ("", 0) for r in life.reports.values()}
    return origin


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_state(
    tmp_path: Path,
    plans: Plans,
    scale: Scale,
    in_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("host0", "host1")
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: in_memory)

    def hosts(number: int) -> list[Path]:
        return [tmp_path / str(number) / name for name in names]

    for name in names:
        plans[name] = FaultPlan(0)
    assert life_that_is_killed(MemoryStore(), hosts(0)) == 6
    counts = {name: len(plans[name].operations) for name in names}
    moments = [(name, n) for name in names for n in range(1, counts[name] + 1)]
    rng = random.Random(7 + in_memory)
    chosen = moments if scale.soak else rng.sample(moments, 3)
    for number, (name, n) in enumerate(chosen, 1):
        plans.clear()
        plans[name] = FaultPlan(n, kill=True, mode=rng.choice(("before", "after")))
        store = MemoryStore()
        known = life_that_is_killed(store, hosts(number))
        plans.clear()
        origin, step = restored(store, hosts(number))
        assert step >= known, (name, n, origin, step, known)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_rank_that_loses_another_keeps_what_hosts_may_have_recorded(
    tmp_path: Path, plans: Plans, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies right after its host has the record: whether others know of it, nobody knows."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: in_memory)
    # A process that is dead cleans nothing up, and the rank that is killed here is a thread.
    monkeypatch.setattr("ckpt.near.memory.TierMemory.close", lambda memory: None)

    def train(folder: Path) -> list[Path]:
        hosts = [folder / "host0", folder / "host1"]
        with contextlib.suppress(RanksFailed):
            Life(2, store, hosts).run(2, then=lambda service, state, world: service.wait())
        return hosts

    store = MemoryStore()
    plans["host1"] = FaultPlan(0)
    train(tmp_path / "dry")
    puts = [
        name == "put_if_absent" and "records/" in key for name, key in plans["host1"].operations
    ]
    plans["host1"] = FaultPlan(puts.index(True) + 1, kill=True, mode="after")
    store = MemoryStore()
    hosts = train(tmp_path / "killed")
    plans.clear()
    assert restored(store, hosts) == ("near", 2)
