"""Helpers for tests of near tiers: trainings whose ranks are threads and whose hosts are folders.

A `Life` is one start of a job, as in `tests/service/chaos.py`: it restores, trains some steps, and
ends. What a rank trains is a pure function of step, rank and world size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.commit.session import SessionRegistry
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.policies import EverySteps, SavePolicy
from ckpt.service.restore import RestoreReport
from ckpt.world.base import World
from storage import Store
from tests.e2e.job import assert_is_step, state_at
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import run_ranks

NEVER = EverySteps(1 << 40)


@dataclass
class Life:
    """One start of a job of `size` ranks over the durable `store`. `hosts[rank]` is the folder that
    stands for the rank's host. `reports` are what the ranks restored, by rank.
    """

    size: int
    store: Store
    hosts: Sequence[Path]
    near_every: int = 2
    save: SavePolicy = NEVER
    registry: SessionRegistry = field(default_factory=SessionRegistry)
    reports: dict[int, RestoreReport | None] = field(default_factory=dict)
    events: dict[int, list[Any]] = field(default_factory=dict)
    store_of: Callable[[int], Store] | None = None
    near: Callable[[int], Near] | None = None
    deadline_seconds: float = 120.0

    def run(
        self,
        steps: int,
        *,
        then: Callable[[Checkpointer, Any, World], Any] | None = None,
        restores: bool = True,
    ) -> list[Any]:
        """Restore, check what came back, train `steps` more, and call `then` on every rank.

        Ends without a last save. Returns what `then` gave, by rank.
        """

        def rank_main(world: World) -> Any:
            store = self.store_of(world.rank) if self.store_of else self.store
            target = ThreadTarget(world, store, self.registry)
            state = state_at(0, world.rank, self.size)
            events = self.events.setdefault(world.rank, [])
            near = Near(self.hosts[world.rank] / "near", every=EverySteps(self.near_every))
            if self.near is not None:
                near = self.near(world.rank)
            with Checkpointer(
                state, target, save=self.save, near=near, observers=[events.append], only=True
            ) as service:
                first = 1
                if restores:
                    report = self.reports[world.rank] = service.restore()
                    if report is not None:
                        assert_is_step(state, report.step, world.rank, self.size)
                        first = report.step + 1
                for step in range(first, first + steps):
                    advance(state, step, world.rank, self.size)
                    service.step(step)
                return then(service, state, world) if then else None

        return run_ranks(self.size, rank_main, deadline_seconds=self.deadline_seconds)


def advance(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    """Have the state be that of `step`, in place, as a training does."""
    newer = state_at(step, rank, size)
    for name in ("rows", "runs"):
        state[name].local.data.copy_(newer[name].local.data)
    state["replica"].copy_(newer["replica"])
    state["step"] = step
