"""A whole save and a whole load, counted: nothing grows faster than N log N in all.

Method: ranks are threads, each with a real TorchWorld, a heart and a client of its own of one
TCPStore, and one store in memory for checkpoints. Requests to both stores and messages between
ranks are counted; bytes travel over connections made on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.scale import LAYOUTS, Model
from ckpt.commit.appender import Sources
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.loading.load import LoadOptions, load_state
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.world.torch_world import TorchWorld
from storage.memory import MemoryBucket, MemoryStore
from tests.conftest import Scale
from tests.protocol.test_world_counts import ranks_of

TENSORS = 3
PHASES = ("save", "second save", "load")


def _state(rank: int, size: int) -> dict[str, Any]:
    """Sharded tensors, and one that all ranks have and read together."""
    sharded = Model(LAYOUTS["FSDP2 uneven"], TENSORS, rank, size)
    return {"model": sharded, "all": torch.ones(40_000), "step": 1}


class CountingBucket(MemoryBucket):
    """Counts what is read and written, of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.files: list[str] = []

    def find(self, key: str) -> Any:
        self.requests += 1
        return super().find(key)

    def add(self, key: str, data: bytes | bytearray) -> bool:
        self.requests += 1
        self.files.append(key)
        return super().add(key, data)


def _counted(size: int) -> dict[str, int]:
    """Operations of all ranks in each phase: requests to both stores, and messages."""
    bucket, registry = CountingBucket(), SessionRegistry()
    counts: dict[str, int] = {}
    with ranks_of(size, round_seconds_max=300.0, transfers=True) as ranks:
        states = [_state(rank, size) for rank in range(size)]
        stores = [MemoryStore(bucket) for _ in range(size)]
        memories = [PartMemory() for _ in range(size)]
        sources = Sources(pause=lambda seconds: None)

        def save(rank: int, step: int) -> None:
            world: TorchWorld = ranks.worlds[rank]
            session = open_session(world, stores[rank], registry, sources=sources)
            save_task(
                states[rank], SaveTask(session, stores[rank], memories[rank], step, SaveOptions())
            )

        def load(rank: int) -> None:
            world: TorchWorld = ranks.worlds[rank]
            load_state(
                states[rank], store=stores[rank], world=world, step=None, options=LoadOptions()
            )

        acts: tuple[Callable[[int], None], ...] = (
            lambda rank: save(rank, 1),
            lambda rank: save(rank, 2),
            load,
        )
        for phase, act in zip(PHASES, acts, strict=True):
            before = bucket.requests
            with ranks.costing() as cost:
                ranks.all(act)
            counts[phase] = sum(cost.requests) + sum(cost.messages) + bucket.requests - before
        files = [key for key in bucket.files if key.endswith(".safetensors")]
        of_rank = [sum(f"rank{rank:05d}-" in key for key in files) for rank in range(size)]
        assert max(of_rank) <= 2 * 2, "more than two data files of a rank and save"
    return counts


@pytest.mark.ranks
def test_saves_and_loads_cost_at_most_n_log_n_operations(
    scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.loading.matching.FEW_RANKS", 0)  # they need fewer
    sizes = (16, 32, 64)[: scale.count(2, 3)]
    counts = {size: _counted(size) for size in sizes}
    print(counts)
    small, large = sizes[0], sizes[-1]
    growth_max = large * math.log2(large) / (small * math.log2(small))
    for phase in PHASES:
        growth = counts[large][phase] / counts[small][phase]
        assert growth <= growth_max, f"{phase}: {[counts[size][phase] for size in sizes]}"
