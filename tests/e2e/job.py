"""A job of several ranks as threads, for end-to-end tests without processes.

`Sharded` is a small engine of its own: it holds one logical tensor cut over the ranks along dim 0,
and speaks `__ckpt_pieces__`. A `Job` is what one process group is in a real training: it has its
own sessions, so a second `Job` on the same root is a restart, or a rival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.commit.appender import Sources
from ckpt.commit.log import LogState
from ckpt.commit.names import attempt_epoch, attempts_on
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Box, Span, whole
from ckpt.loading.load import LoadOptions, LoadReport, load_state
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveReport, SaveTask
from ckpt.world.base import World
from storage import Store
from tests.thread_ranks import run_ranks

NO_WAITING = Sources(pause=lambda seconds: None)
StoreOf = Callable[[int], Store]


class Sharded(nn.Module):
    """Rank `rank`'s chunk of a tensor along `dim`, or with `dim=None` its run of elements."""

    def __init__(self, full: torch.Tensor, rank: int, size: int, *, dim: int | None = 0) -> None:
        super().__init__()
        self.shape = tuple(full.shape)
        self.dim = dim
        along = full.reshape(-1) if dim is None else full
        length = along.shape[dim or 0]
        chunk = -(-length // size)
        self.start = min(rank * chunk, length)
        self.stop = min(self.start + chunk, length)
        local = along.narrow(dim or 0, self.start, self.stop - self.start).contiguous().clone()
        self.local = nn.Parameter(local, requires_grad=False)
        self.rank = rank

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        local = self.local.detach()
        inside = whole(tuple(local.shape))
        region: Box | Span = Span(self.start, self.stop)
        if self.dim is not None:
            offset = [0] * len(self.shape)
            offset[self.dim] = self.start
            region = Box(tuple(offset), inside.shape)
        piece = Piece("tensor", self.shape, local.dtype, region, inside, (self.rank,))
        yield Owned(self.local, local, (View((piece,)),), True)


@dataclass
class Job:
    """`size` ranks over `store_of(rank)`; every call runs them as fresh threads of one session."""

    size: int
    store_of: StoreOf
    registry: SessionRegistry = field(default_factory=SessionRegistry)
    deadline_seconds: float = 120.0  # machines may stand still; the dead are noticed at once
    memories: dict[int, PartMemory] | None = None  # None: no rank remembers an earlier save

    def save(
        self,
        state_of: Callable[[int], Any],
        step: int = 0,
        options: SaveOptions | None = None,
        *,
        step_of: Sequence[int] = (),
    ) -> list[SaveReport]:
        """Collective save of `state_of(rank)`. Raises tests.thread_ranks.RanksFailed.

        `step_of` has another step for each rank, for tests of ranks that disagree.
        """

        def rank_main(world: World) -> SaveReport:
            store = self.store_of(world.rank)
            session = open_session(world, store, self.registry, sources=NO_WAITING)
            memory = PartMemory()
            if self.memories is not None:
                memory = self.memories.setdefault(world.rank, memory)
            return save_task(
                state_of(world.rank),
                SaveTask(
                    session,
                    store,
                    memory,
                    step_of[world.rank] if step_of else step,
                    options or SaveOptions(),
                ),
            )

        return run_ranks(self.size, rank_main, deadline_seconds=self.deadline_seconds)

    def load(
        self,
        state_of: Callable[[int], Any],
        step: int | None = None,
        options: LoadOptions | None = None,
        *,
        step_of: Sequence[int | None] = (),
    ) -> list[LoadReport]:
        """Collective load into `state_of(rank)`."""

        def rank_main(world: World) -> LoadReport:
            return load_state(
                state_of(world.rank),
                store=self.store_of(world.rank),
                world=world,
                step=step_of[world.rank] if step_of else step,
                options=options or LoadOptions(),
            )

        return run_ranks(self.size, rank_main, deadline_seconds=self.deadline_seconds)


def tensors_at(step: int, names: int = 3) -> dict[str, torch.Tensor]:
    """Small tensors whose every element depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return {f"t{index}": torch.randn(5 + index, 7, generator=generator) for index in range(names)}


def state_at(step: int, rank: int, size: int) -> dict[str, Any]:
    """What rank `rank` of `size` has at `step`: sharded rows, sharded runs, replicas, values."""
    tensors = tensors_at(step)
    return {
        "rows": Sharded(tensors["t0"], rank, size),
        "runs": Sharded(tensors["t1"], rank, size, dim=None),
        "replica": tensors["t2"],
        "step": step,
    }


def assert_is_step(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    """Every tensor and value of `state` is bit for bit that of `step`."""
    expected = state_at(step, rank, size)
    assert state["step"] == step
    assert torch.equal(state["replica"], expected["replica"])
    for name in ("rows", "runs"):
        assert torch.equal(state[name].local, expected[name].local)


__all__ = ["NO_WAITING", "Job", "Sharded", "assert_is_step", "state_at", "tensors_at"]


def left_by_sweep(store: Store, state: LogState) -> list[str]:
    """The attempts that a sweep has left without need: but for what is live, and what was written
    whole and may have lost its COMMIT, because no later job has committed.
    """
    since = max((attempt_epoch(one.attempt) for one in state.live[-1:]), default=0)
    return [
        one.attempt
        for one in attempts_on(store)
        if state.find(one.attempt) is None
        and not (one.is_written and attempt_epoch(one.attempt) >= since)
    ]
