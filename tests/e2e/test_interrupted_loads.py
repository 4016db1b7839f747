"""A load either leaves the state alone or says, on all ranks, that it is a mixture now.

Method: three ranks as threads, each over a store that can fail. Failures before the data phase must
leave every bit as it was; failures in it raise LoadInterrupted with one text, and neither an
optimizer step nor a save may use the state until a load succeeds. Then every storage operation of a
load fails, and kills, one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import nn

from ckpt.commit.locate import live_entries
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    LoadInterrupted,
    Mismatch,
    NoCheckpoint,
    UnsupportedFormat,
)
from ckpt.loading.load import LoadOptions
from ckpt.state.binding import refuse_interrupted
from ckpt.state.types import PerRank
from storage import Store, open_store
from storage.testing import FaultPlan, FaultyStore, Killed
from tests.e2e.job import Job, Sharded
from tests.thread_ranks import RanksFailed

pytestmark = pytest.mark.long

SIZE = 3


class Net(nn.Module):
    """Rows, runs and a replica, all of which an optimizer steps."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows = Sharded(torch.randn(40, 9, generator=generator), rank, SIZE, dim=0)
        self.runs = Sharded(torch.randn(37, 5, generator=generator), rank, SIZE, dim=None)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.requires_grad_(True)


def _state(seed: int, rank: int) -> dict[str, Any]:
    model = Net(seed, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 + seed)
    optimizer.step()
    optimizer.zero_grad()
    extra = torch.full((3,), 1.0 * seed)
    return {"model": model, "optim": optimizer, "epoch": seed, "extra": extra}


def _bits(state: dict[str, Any]) -> list[Any]:
    """Everything that a load can change, as values."""
    model, optimizer = state["model"], state["optim"]
    tensors = [*model.parameters(), state["extra"]]
    for parameter in model.parameters():
        entry = optimizer.state[parameter]
        tensors += [entry[name] for name in sorted(entry)]
    values = [t.detach().clone().contiguous().flatten().view(torch.uint8).tolist() for t in tensors]
    return [*values, state["epoch"], copy.deepcopy(optimizer.state_dict()["param_groups"])]


class Scene(NamedTuple):
    """A root with step 1, and three ranks with another state."""

    store: Store
    states: list[dict[str, Any]]
    before: list[list[Any]]
    good: list[list[Any]]

    def is_untouched(self) -> bool:
        return [_bits(state) for state in self.states] == self.before

    def load(self, store_of: Callable[[int], Store] | None = None, **options: Any) -> None:
        step = options.pop("step", None)
        Job(SIZE, store_of or (lambda rank: self.store), deadline_seconds=60.0).load(
            lambda rank: self.states[rank], step, LoadOptions(**options)
        )

    def failure(
        self, store_of: Callable[[int], Store] | None = None, **options: Any
    ) -> CheckpointError:
        """The one error that all ranks raised."""
        with pytest.raises(RanksFailed) as caught:
            self.load(store_of, **options)
        errors = list(caught.value.errors.values())
        assert len(errors) == SIZE, "some ranks returned"
        assert len({(type(error), str(error)) for error in errors}) == 1, caught.value
        assert isinstance(errors[0], CheckpointError)
        return errors[0]

    def load_in_peace(self) -> None:
        self.load()
        assert [_bits(state) for state in self.states] == self.good


NUMBERS = iter(range(10**9))


def _scene(name: str) -> Scene:
    store = open_store(f"memory://{name}-{next(NUMBERS)}")
    saved = [_state(1, rank) for rank in range(SIZE)]
    Job(SIZE, lambda rank: store).save(lambda rank: saved[rank], step=1)
    states = [_state(2, rank) for rank in range(SIZE)]
    return Scene(store, states, [_bits(state) for state in states], [_bits(s) for s in saved])


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    return _scene(request.node.name)


def _change(store: Store, part: str, offset: int) -> str:
    """Flip a bit in the object whose key has `part`; returns the key."""
    key = max(info.key for info in store.list("") if part in info.key)
    data = bytearray(store.get(key))
    data[offset] ^= 4
    store.delete(key)
    store.put_if_absent(key, bytes(data))
    return key


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


# --- in the data phase ----------------------------------------------------------------------------


def _fails_reading(scene: Scene, bad: int) -> Callable[[int], Store]:
    """A store for each rank, where rank `bad` cannot read tensors."""

    class Unreadable(FaultyStore):
        def get_into(self, key: str, start: int, buffers: Any) -> None:
            self.plan.number = len(self.plan.operations) + 1
            super().get_into(key, start, buffers)

    return lambda rank: Unreadable(scene.store, FaultPlan(0)) if rank == bad else scene.store


@pytest.mark.parametrize("bad", range(SIZE))
def test_a_read_that_fails_on_one_rank_interrupts_the_load_on_all(scene: Scene, bad: int) -> None:
    error = scene.failure(_fails_reading(scene, bad))
    assert isinstance(error, LoadInterrupted)
    assert f"rank {bad}" in str(error)
    assert "injected into get_into" in str(error)
    _assert_unusable_until_loaded(scene)


def test_a_damaged_block_interrupts_the_load_on_all_and_is_named(scene: Scene) -> None:
    key = _change(scene.store, "rank00001", 4096)
    error = scene.failure()
    assert isinstance(error, LoadInterrupted)
    assert f"{key}: block 0 of" in str(error)
    _change(scene.store, "rank00001", 4096)
    _assert_unusable_until_loaded(scene)


def _assert_unusable_until_loaded(scene: Scene) -> None:
    job = Job(SIZE, lambda rank: scene.store)
    half = [_bits(state) for state in scene.states]
    for state in scene.states:
        with pytest.raises(LoadInterrupted, match="load a checkpoint into it"):
            state["optim"].step()
        # Another optimizer over the same parameters must not step them either.
        with pytest.raises(LoadInterrupted):
            torch.optim.SGD(state["model"].parameters(), lr=1.0).step()
    with pytest.raises(RanksFailed) as caught:
        job.save(lambda rank: scene.states[rank], step=2)
    assert {type(error) for error in caught.value.errors.values()} == {LoadInterrupted}
    # In other words too: the model alone, or one tensor of the state.
    for part in ("model", "extra"):
        with pytest.raises(RanksFailed) as caught:
            job.save(lambda rank, part=part: {"x": scene.states[rank][part]}, step=2)
        assert {type(error) for error in caught.value.errors.values()} == {LoadInterrupted}
    assert [_bits(state) for state in scene.states] == half
    assert [entry.step for entry in live_entries(scene.store)] == [1]
    assert not [info for info in scene.store.list("steps/00000002")]
    job.save(lambda rank: _state(5, rank), step=4)  # states that are whole can be saved
    scene.load(step=1)
    assert [_bits(state) for state in scene.states] == scene.good
    for state in scene.states:
        refuse_interrupted(state)
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optim"].step()
    job.save(lambda rank: scene.states[rank], step=5)


class Thing:
    """An object with a state of its own, which may refuse to take one."""

    def __init__(self, value: int, *, stubborn: bool = False) -> None:
        self.value, self.stubborn = value, stubborn

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.stubborn:
            raise ValueError("I will not")
        self.value = state["value"]


def test_an_object_that_refuses_its_state_interrupts_the_load_on_all(store: Store) -> None:
    """Tensors are there by then, on all ranks; only a load without the refusal makes it whole."""

    def states(value: int, stubborn: int = -1) -> list[dict[str, Any]]:
        return [
            {"t": torch.full((5,), 1.0 * value), "thing": Thing(value, stubborn=rank == stubborn)}
            for rank in range(SIZE)
        ]

    job = Job(SIZE, lambda rank: store)
    job.save(states(1).__getitem__, step=1)
    loaded = states(2, stubborn=1)
    with pytest.raises(RanksFailed) as caught:
        job.load(loaded.__getitem__)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {LoadInterrupted}
    assert len({str(error) for error in errors.values()}) == 1
    assert "rank 1" in str(errors[0])
    assert "I will not" in str(errors[0])
    # Values that differ between ranks refuse a save too; equal ones leave that to the mark.
    for state in loaded:
        state["thing"].value = 1
    with pytest.raises(RanksFailed) as caught:
        job.save(loaded.__getitem__, step=2)
    assert {type(error) for error in caught.value.errors.values()} == {LoadInterrupted}
    loaded[1]["thing"].stubborn = False
    job.load(loaded.__getitem__)
    assert [state["thing"].value for state in loaded] == [1] * SIZE
    job.save(loaded.__getitem__, step=2)


def test_a_reshard_function_that_fails_leaves_the_state_alone(store: Store) -> None:
    Job(2, lambda rank: store).save(lambda rank: {"data": PerRank(rank), "t": torch.ones(3)}, 1)
    mine = PerRank(9, lambda values, rank, world_size: _or_fail(rank))
    states = [{"data": mine, "t": torch.zeros(3)} for _ in range(SIZE)]
    with pytest.raises(RanksFailed) as caught:
        Job(SIZE, lambda rank: store).load(states.__getitem__)
    (text,) = {str(error) for error in caught.value.errors.values()}
    assert "rank 1" in text
    assert "cannot divide the data" in text
    assert {type(error) for error in caught.value.errors.values()} == {Mismatch}
    assert all(torch.equal(state["t"], torch.zeros(3)) for state in states)


def _or_fail(rank: int) -> int:
    if rank == 1:
        raise ZeroDivisionError("cannot divide the data")
    return rank


# --- before the data phase ------------------------------------------------------------------------


def test_states_that_do_not_fit_are_left_alone(scene: Scene) -> None:
    """Missing and unexpected names, shapes, dtypes, on one rank only: all ranks hear all of it."""
    scene.states[1]["missing"] = torch.zeros(2)
    scene.states[2]["extra"] = torch.zeros(4)
    scene.states[0]["model"].head.weight.data = scene.states[0]["model"].head.weight.data.double()
    scene = scene._replace(before=[_bits(state) for state in scene.states])
    error = scene.failure()
    assert isinstance(error, Mismatch)
    for text in ("missing", "extra", "model.head.weight", "float64", "rank 1", "rank 2", "rank 0"):
        assert text in str(error)
    assert scene.is_untouched()
    for state in scene.states:
        state["optim"].step()  # nothing is marked


@pytest.mark.parametrize(
    ("part", "offset", "kind"),
    [("MANIFEST", 30, Corrupt), ("log/", 30, Corrupt), ("FORMAT", 30, Corrupt)],
    ids=["manifest", "log", "format"],
)
def test_damage_that_shows_before_the_data_leaves_the_state_alone(
    scene: Scene, part: str, offset: int, kind: type[CheckpointError]
) -> None:
    key = _change(scene.store, part, offset)
    error = scene.failure()
    assert type(error) is kind
    assert key in str(error)
    assert scene.is_untouched()
    _change(scene.store, part, offset)
    scene.load_in_peace()


def test_a_newer_version_leaves_the_state_alone(scene: Scene) -> None:
    text = scene.store.get("FORMAT")
    scene.store.delete("FORMAT")
    scene.store.put_if_absent("FORMAT", text.replace(b" 1 ", b" 9 ", 1))
    error = scene.failure()
    assert isinstance(error, UnsupportedFormat)
    assert "version 9" in str(error)
    assert scene.is_untouched()


def test_a_step_that_is_not_there_leaves_the_state_alone(scene: Scene) -> None:
    assert isinstance(scene.failure(step=7), NoCheckpoint)
    assert scene.is_untouched()


# --- every operation ------------------------------------------------------------------------------


def _operations(scene: Scene) -> int:
    plan = FaultPlan(0)
    store = FaultyStore(scene.store, plan)
    scene.load(lambda rank: store)
    return len(plan.operations)


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("fault", ["fails", "fails-for-ever", "kills-rank"])
def test_every_operation_of_a_load_may_fail(
    request: pytest.FixtureRequest, fault: str, mode: Literal["before", "after"]
) -> None:
    total = _operations(_scene(request.node.name))
    assert total >= 8
    interrupted = untouched = 0
    for nth in range(1, total + 1):
        scene = _scene(request.node.name)
        kill = fault == "kills-rank"
        plan = FaultPlan(nth, kill=kill, mode=mode, forever=fault == "fails-for-ever")
        stores = [FaultyStore(scene.store, plan) for _ in range(SIZE)]
        try:
            scene.load(stores.__getitem__)
        except RanksFailed as failed:
            errors = failed.errors
        else:
            # A look at a log slot that is still free has failed already: nothing to inject after.
            assert mode == "after"
            assert plan.operations[nth - 1][1].startswith("log/")
            assert [_bits(state) for state in scene.states] == scene.good
            continue
        alive = [error for error in errors.values() if not isinstance(error, Killed)]
        assert len(errors) == SIZE
        assert len({(type(error), str(error)) for error in alive}) == 1, alive
        assert isinstance(alive[0], CheckpointError)
        if isinstance(alive[0], LoadInterrupted):
            interrupted += 1
            survivors = [r for r, error in errors.items() if error in alive]
            for rank in survivors:
                with pytest.raises(LoadInterrupted):
                    scene.states[rank]["optim"].step()
        else:
            untouched += 1
            assert scene.is_untouched(), f"operation {nth} of {total}: {plan.operations[nth - 1]}"
        if not kill:
            assert "injected into" in str(alive[0])
        scene.load_in_peace()
    assert interrupted
    assert untouched
