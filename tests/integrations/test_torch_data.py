"""Data loaders go on where they were, on another number of ranks too: no sample is left out.

Method: real stateful loaders of torchdata read a part of an epoch, their states go through a
checkpoint of ranks as threads, and loaders of another number of ranks read the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.state.types import PerRank
from storage.memory import MemoryStore
from tests.e2e.job import Job

loaders = pytest.importorskip("torchdata.stateful_dataloader")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
divide_samples = pytest.importorskip("ckpt.integrations.torch_data").divide_samples

SAMPLES = list(range(48))
pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchdata


def loader(rank: int, size: int, workers: int = 0) -> Any:
    sampler = samplers.StatefulDistributedSampler(
        SAMPLES, num_replicas=size, rank=rank, shuffle=True, seed=1
    )
    return loaders.StatefulDataLoader(SAMPLES, batch_size=2, sampler=sampler, num_workers=workers)


def read(source: Any, batches: int | None = None) -> list[int]:
    taken: list[torch.Tensor] = []
    for batch in source:
        taken.append(batch)
        if len(taken) == batches:
            break
    return [number for batch in taken for number in batch.tolist()]


@pytest.mark.parametrize(
    ("saver", "loader_count", "batches", "twice"), [(4, 2, 3, 0), (2, 4, 4, 0), (2, 3, 5, 2)]
)
def test_other_ranks_read_the_rest_of_the_epoch(
    saver: int, loader_count: int, batches: int, twice: int
) -> None:
    store = MemoryStore()
    before = [loader(rank, saver) for rank in range(saver)]
    seen = [number for one in before for number in read(one, batches)]
    Job(saver, lambda rank: store).save(
        lambda rank: {"data": PerRank(before[rank], divide_samples)}, step=1
    )
    after = [loader(rank, loader_count) for rank in range(loader_count)]
    Job(loader_count, lambda rank: store).load(
        lambda rank: {"data": PerRank(after[rank], divide_samples)}
    )
    rest = [number for one in after for number in read(one)]
    assert set(seen) | set(rest) == set(SAMPLES)
    assert len(seen) + len(rest) == len(SAMPLES) + twice


def test_worker_processes_make_no_difference() -> None:
    states = []
    for rank in range(2):
        one = loader(rank, 2, workers=1)
        read(one, 4)
        states.append(one.state_dict())
    expected = []
    for rank in range(2):
        one = loader(rank, 2)
        read(one, 4)
        expected.append(one.state_dict())
    rest = []
    for saved in (states, expected):
        one = loader(1, 4, workers=0 if saved is expected else 1)
        one.load_state_dict(divide_samples(saved, 1, 4))
        rest.append(read(one))
    assert rest[0] == rest[1]
    assert len(rest[0]) == 8


def test_loaders_that_cannot_be_divided_are_reported() -> None:
    with pytest.raises(ValueError, match="StatefulDistributedSampler"):
        divide_samples([{"position": 3}], 0, 2)
    one, other = loader(0, 2), loader(1, 2)
    read(one, 2)
    read(other, 3)
    with pytest.raises(ValueError, match="not equally far"):
        divide_samples([one.state_dict(), other.state_dict()], 0, 1)
