"""Mistakes of ranks that hold different things are found before anything is written.

Method: ranks are threads over one memory store, which counts the objects that are made below
`steps/`; and states that are wrong in one way each.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState
from ckpt.saving.task import PartMemory
from storage.memory import MemoryStore
from tests.e2e.job import Job
from tests.thread_ranks import RanksFailed, ThreadWorld


class Watched(MemoryStore):
    """Keeps the names of the objects of steps that were begun, whatever became of them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    def create(self, key: str, *args: Any, **options: Any) -> Any:
        if key.startswith("steps/"):
            self.begun.append(key)
        return super().create(key, *args, **options)


def refused(states: list[Any], memories: dict[int, PartMemory] | None = None) -> str:
    """The error of a save by one rank for each of `states`, the same on all of them."""
    store = Watched()
    job = Job(len(states), lambda rank: store, memories=memories)
    with pytest.raises(RanksFailed) as failed:
        job.save(states.__getitem__, step=1)
    texts = {str(error) for error in failed.value.errors.values()}
    assert len(failed.value.errors) == len(states) and len(texts) == 1, failed.value
    assert all(isinstance(error, InvalidState) for error in failed.value.errors.values())
    assert store.begun == []
    return texts.pop()


def linear(value: float) -> nn.Linear:
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def layer(number: int) -> nn.Module:
    """A stage of one layer, with the name that it has in the whole model."""
    return nn.ModuleDict({str(number): linear(float(number))})


def test_different_tensors_of_one_name_on_some_ranks() -> None:
    own = [{"own": {str(rank): torch.zeros(1)}} for rank in range(4)]
    states = [one | {"w": torch.full((3,), float(n == 1))} for n, one in enumerate(own[:3])]
    text = refused([*states, own[3]])
    assert "w: the ranks have different values of it" in text
    assert "on 0, 2; " in text and "on 1)" in text and "a name of its own" in text
    assert "own." not in text


def test_different_parameters_of_one_name_on_all_ranks() -> None:
    """Local experts, each rank's under the same name."""
    text = refused([{"model": linear(float(rank))} for rank in range(3)])
    assert "model.weight: the ranks have different values of it" in text
    assert "as experts and stages have" in text


def test_the_comparison_is_made_once_for_one_set_of_names_and_again_for_another() -> None:
    store = Watched()
    memories: dict[int, PartMemory] = {}
    job = Job(2, lambda rank: store, memories=memories)
    models = [linear(1.0), linear(1.0)]
    job.save(lambda rank: {"model": models[rank]}, step=1)
    assert all(memory.is_compared for memory in memories.values())
    # What differs later is found with what was written, as in every save.
    nn.init.constant_(models[1].weight, 5.0)
    before = len(store.begun)
    with pytest.raises(RanksFailed, match="different values"):
        job.save(lambda rank: {"model": models[rank]}, step=2)
    assert len(store.begun) > before
    before = len(store.begun)
    with pytest.raises(RanksFailed, match="different values"):
        job.save(lambda rank: {"model": models[rank], "new": torch.zeros(1)}, step=2)
    assert len(store.begun) == before
    # A comparison that failed is made again.
    with pytest.raises(RanksFailed, match="different values"):
        job.save(lambda rank: {"model": models[rank], "new": torch.zeros(1)}, step=2)
    assert len(store.begun) == before


def test_a_stage_that_is_on_no_rank() -> None:
    numbers = [(0, 1), (3,), (4,)]
    states = [
        {"model": ckpt.Stages(*map(layer, own), numbers=own, count=6), "n": 1} for own in numbers
    ]
    text = refused(states)
    assert "model: of 6 stages 2, 5 are on no rank" in text
    assert "(0 on rank 0; 1 on rank 0; 3 on rank 1; 4 on rank 2)" in text
    assert "with all ranks of the pipeline" in text
    # The same stage on all ranks, whose names are all the same then.
    text = refused([{"model": ckpt.Stages(linear(1.0), numbers=[0], count=2)} for _ in range(2)])
    assert "model: of 2 stages 1 is on no rank (0 on ranks 0, 1)" in text
    # And one process by itself.
    text = refused([{"model": ckpt.Stages(linear(1.0), numbers=[1], count=2)}])
    assert "model: of 2 stages 0 is on no rank (1 on rank 0)" in text


def test_ranks_that_count_stages_otherwise() -> None:
    states = [
        {"model": ckpt.Stages(layer(n), numbers=[n], count=count)} for n, count in enumerate([2, 3])
    ]
    assert "model: the ranks count the stages otherwise: 2 on rank 0; 3 on rank 1" in refused(
        states
    )


def test_all_stages_on_all_kinds_of_ranks_are_saved() -> None:
    store = Watched()
    numbers = [(0, 2), (0, 2), (1, 3), ()]

    def state_of(rank: int) -> dict[str, Any]:
        own = numbers[rank]  # two ranks have the same stages, as replicas
        stages = [layer(number) for number in own]
        return {"n": 1, **({"model": ckpt.Stages(*stages, numbers=own, count=4)} if own else {})}

    Job(4, lambda rank: store).save(state_of, step=1)
    assert store.begun


def test_stages_of_torch_s_pipelines_know_their_numbers() -> None:
    """By the attributes that torch's stages have; tests with its schedules have them themselves."""
    first, third = (
        SimpleNamespace(submod=layer(number), stage_index=number, num_stages=4) for number in (0, 2)
    )
    stages = ckpt.Stages(first, third)
    assert stages.parts == (first.submod, third.submod)
    assert (stages.numbers, stages.count) == ((0, 2), 4)
    other = SimpleNamespace(submod=layer(1), stage_index=1, num_stages=3)
    with pytest.raises(ValueError, match=r"pipelines of \[4, 3\] stages"):
        ckpt.Stages(first, other)
    with pytest.raises(TypeError, match="expected modules alone"):
        ckpt.Stages(first, layer(1))


@pytest.mark.parametrize(
    ("numbers", "count"), [([0], 2), ([0, 0], 2), ([0, 2], 2), ([0, -1], 2), ([0, 1], None)]
)
def test_numbers_that_are_none_are_refused(numbers: list[int], count: int | None) -> None:
    with pytest.raises(ValueError, match="Stages: numbers="):
        ckpt.Stages(layer(0), layer(1), numbers=numbers, count=count)


def test_who_holds_what_is_exchanged_once_for_each_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at each save: of thousands of ranks with thousands of names, that would be megabytes."""
    rounds: list[str] = []
    gather = ThreadWorld.gather_to_coordinator

    def counted(world: ThreadWorld, name: str, payload: bytes) -> list[bytes] | None:
        rounds.append(name)
        return gather(world, name, payload)

    monkeypatch.setattr(ThreadWorld, "gather_to_coordinator", counted)
    store = MemoryStore()
    memories = {rank: PartMemory() for rank in range(3)}
    job = Job(3, lambda rank: store, memories=memories)
    states = [{"model": layer(rank)} for rank in range(3)]
    exchanges = []
    for step in range(1, 7):
        if step == 4:
            states[1]["model"]["more"] = linear(4.0)
        with torch.no_grad():
            for state in states:
                for parameter in state["model"].parameters():
                    parameter += 1
        rounds.clear()
        job.save(states.__getitem__, step=step)
        exchanges.append((rounds.count("names"), rounds.count("inventories")))
    assert exchanges == [(3, 3), (0, 0), (0, 0), (3, 3), (0, 0), (0, 0)]
