"""Durable saves at steps of near saves: one copy of the state in all, and the same checkpoint.

Method: trainings as in `test_near_training`, once with near saves and once without; bytes that are
copied are counted, files of both roots are compared, and uploads are held up by a slow store.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.commit.session import SessionRegistry
from ckpt.errors import CheckpointError, SaveDropped
from ckpt.near.memory import TierMemory
from ckpt.near.value import Near
from ckpt.saving import image
from ckpt.saving.image import StagedRange
from ckpt.saving.staging import LentCopy
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, SaveSucceeded
from ckpt.service.policies import AtExit, EverySeconds, EverySteps, are_multiples
from ckpt.world.base import World
from storage import NoSpaceError, Store
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore
from tests.e2e.job import state_at
from tests.near.training import Life, advance
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import run_ranks


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of these tests count as memory."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: True)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call copies into buffers of saves."""
    sizes: list[int] = []
    fill = image.Image._fill

    def counting(self: Any, part: Any, ranges: list[StagedRange], **how: Any) -> None:
        sizes.extend(one.stop - one.start for one in ranges)
        fill(self, part, ranges, **how)

    monkeypatch.setattr(image.Image, "_fill", counting)
    return sizes


def random_state(seed: int, rank: int, size: int) -> dict[str, Any]:
    """Tensors of many shapes, dtypes and layouts of memory; those of rows belong to ranks."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = state_at(seed % 50, rank, size)
    for index in range(draw.randrange(1, 8)):
        shape = [draw.choice((1, 3, 64, 257)) for _ in range(draw.randrange(3))]
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.uint8, torch.float64))
        tensor = (torch.randn(shape, generator=generator) * 50).to(dtype)
        state[f"x{index}"] = tensor.t() if tensor.ndim == 2 and draw.random() < 0.4 else tensor
    if draw.random() < 0.3:
        state["large"] = torch.randn(3 << 20, generator=generator)  # of two parts
    return state


def saved(
    store: Callable[[], Store],
    state: Callable[[int, int], Any],
    size: int,
    near: Callable[[int], Near] | None,
    *,
    dedup: bool = False,
) -> list[dict[str, float]]:
    """Two durable saves, of steps 4 and 8; the counters of both, of rank 0."""
    registry, counters = SessionRegistry(), list[dict[str, float]]()

    def note(event: Any) -> None:
        if isinstance(event, SaveSucceeded):
            counters.append(dict(event.report.counters))

    def rank_main(world: World) -> None:
        rank = world.rank
        target = ThreadTarget(world, store(), registry, dedup=dedup)
        holder = {"state": state(rank, 0)}
        with Checkpointer(
            holder,
            target,
            save=EverySteps(4),
            near=near(rank) if near else None,
            observers=[note] if rank == 0 else [],
            only=True,
        ) as service:
            for step in range(1, 9):
                if step in (4, 8):
                    service.wait()
                    holder["state"] = state(rank, step)
                service.step(step)
            service.wait()
            assert not service.near_failures

    run_ranks(size, rank_main, deadline_seconds=120.0)
    return counters


def contents(store: Store) -> dict[str, bytes]:
    """The data files and manifests of a root, without what names the attempt and the time."""
    kept: dict[str, bytes] = {}
    for info in sorted(store.list("steps/")):
        if not info.key.endswith((".safetensors", "MANIFEST")):
            continue
        step, _, name = info.key.removeprefix("steps/").partition("/")
        kept[f"{step[:8]}/{name}"] = store.get_bounded(info.key, 1 << 30)
    return kept


def bodies(files: dict[str, bytes]) -> dict[str, Any]:
    """Of each data file the places and bytes of its tensors, and the names of its notes."""
    made: dict[str, Any] = {}
    for key, data in files.items():
        if not key.endswith(".safetensors"):
            made[key] = len(data)
            continue
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        notes = header.pop("__metadata__")
        last = max((v["data_offsets"] for v in header.values()), key=lambda span: span[1])
        # The last tensor has the checksum of the header.
        made[key] = (start, header, sorted(notes), data[start : start + last[0]])
    return made


@pytest.mark.parametrize("seed", range(6))
def test_an_upload_is_the_checkpoint_that_a_save_of_its_own_would_be(
    tmp_path: Path, seed: int
) -> None:
    size, dedup = (1, 2, 3)[seed % 3], seed % 2 == 1

    def state(rank: int, step: int) -> Any:
        return random_state(seed * 100 + step, rank, size)

    stores = [MemoryStore(), MemoryStore()]
    near = Near(tmp_path / "near", every=EverySteps(2))
    own = saved(lambda: stores[0], state, size, None, dedup=dedup)
    shared = saved(lambda: stores[1], state, size, lambda rank: near, dedup=dedup)
    assert [c["near_bytes"] > 0 for c in shared] == [True, True], "both were uploads"
    assert not any("near_bytes" in c for c in own)
    assert bodies(contents(stores[0])) == bodies(contents(stores[1]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_memory", [True, False])
def test_one_copy_is_made_where_both_are_due(
    tmp_path: Path,
    copied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    is_memory: bool,
) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_memory)
    life = Life(size, MemoryStore(), [tmp_path] * size, near_every=2, save=EverySteps(2))
    life.run(6, then=lambda service, state, world: service.wait())
    # t0, t1 and t2 of the state, in float32; three steps had both saves.
    assert sum(copied) == 3 * 4 * 7 * (5 + 6 + 7)
    for events in life.events.values():
        assert [e.report.step for e in events if isinstance(e, SaveSucceeded)] == [2, 4, 6]


class HeldUp(FaultyStore):
    """A store whose data files are not begun before `go_on`, once `holds`."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), FaultPlan(0))
        self.go_on = threading.Event()
        self.holds = True

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        if self.holds and key.endswith(".safetensors"):
            assert self.go_on.wait(60)
        return self.inner.create(key, nbytes, **how)


@pytest.mark.parametrize("has_room, is_memory", [(True, True), (False, True), (True, False)])
def test_near_saves_leave_the_files_of_an_upload_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool, is_memory: bool
) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_memory)
    store = HeldUp()
    memories: list[TierMemory] = []

    class Seen(TierMemory):
        def __init__(self, folder: str, *, generations_max: int) -> None:
            super().__init__(folder, generations_max=3 if has_room else 2)
            memories.append(self)

    monkeypatch.setattr("ckpt.near.saving.TierMemory", Seen)

    def train_on(service: Checkpointer, state: Any, world: World) -> list[int]:
        for step in range(5, 13):
            advance(state, step, 0, 1)
            service.step(step)
        service._near.collect(wait=True)  # type: ignore[union-attr]
        failures = [failure.step for failure in service.near_failures]
        store.go_on.set()
        service.wait()
        for step in range(13, 16):
            advance(state, step, 0, 1)
            service.step(step)
        service.wait()
        assert service.last_near is not None and service.last_near.step == 14
        return failures

    life = Life(1, store, [tmp_path], near_every=2, save=EverySteps(100), near=lambda rank: near)
    near = Near(tmp_path, every=EverySteps(2))
    life.save = OnlyAt(4)
    (failures,) = life.run(4, then=train_on)
    # Of step 4 the files are sent; 6 has the other ones, and 8 would need a third state.
    assert failures == ([] if has_room else [8, 10, 12])
    dropped = [e.error for e in life.events[0] if isinstance(e, NearFailed)]
    assert all(isinstance(error, SaveDropped) for error in dropped)
    for memory in memories:
        assert not memory._held
    again = Life(1, store, [tmp_path / "elsewhere"])
    again.run(0)  # compares what was sent with the state of step 4
    assert {r.step for r in again.reports.values() if r} == {4}


class OnlyAt(EverySteps):
    """At one step."""

    def reasons(self, observation: Any) -> tuple[str, ...]:
        return ("once",) if observation.step == self.steps else ()


def test_a_failed_near_save_costs_no_durable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """One rank's memory is full, so it copies for itself; the other's copy serves all the same."""
    expect = TierMemory.expect
    store = MemoryStore()

    def full(self: TierMemory, *how: Any, **more: Any) -> None:
        if "host1" in self._folder:
            raise NoSpaceError("the tmpfs is full")
        expect(self, *how, **more)

    monkeypatch.setattr(TierMemory, "expect", full)
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    life = Life(2, store, hosts, near_every=2, save=EverySteps(2))
    life.run(2, then=lambda service, state, world: service.wait())
    for events in life.events.values():
        assert [e.step for e in events if isinstance(e, NearFailed)] == [2]
        assert [e.report.step for e in events if isinstance(e, SaveSucceeded)] == [2]
    again = Life(2, store, [tmp_path / "elsewhere"] * 2)
    again.run(0)
    assert {(r.origin, r.step) for r in again.reports.values() if r} == {("durable", 2)}


def test_a_failed_upload_leaves_the_near_state_whole(tmp_path: Path) -> None:
    class Refusing(FaultyStore):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            if key.endswith(".safetensors"):
                raise NoSpaceError("the root is full")
            return self.inner.create(key, nbytes, **how)

    memory = MemoryStore()
    life = Life(2, Refusing(memory, FaultPlan(0)), [tmp_path] * 2, save=EverySteps(2))

    def end(service: Checkpointer, state: Any, world: World) -> None:
        with pytest.raises(Exception, match="full"):
            service.wait()
        assert [failure.step for failure in service.failures] == [2, 4]
        assert not service.near_failures

    life.run(5, then=end)
    again = Life(2, memory, [tmp_path] * 2)
    again.run(0)
    assert {(r.origin, r.step) for r in again.reports.values() if r} == {("near", 4)}


def test_a_copy_that_never_comes_is_not_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.10, too, where futures have a TimeoutError of their own."""
    monkeypatch.setattr("ckpt.saving.staging.COPY_SECONDS_MAX", 0.01)
    making: Any = SimpleNamespace(copied=Future())
    with pytest.raises(CheckpointError, match="has copied nothing for 0 s"):
        LentCopy(making, "now").wait()
    making.copied.set_exception(TimeoutError("of the device"))
    with pytest.raises(TimeoutError, match="of the device"):
        LentCopy(making, "now").wait()


def test_spares_that_another_job_has_removed_are_made_anew(tmp_path: Path) -> None:
    memory = TierMemory(str(tmp_path))
    memory.plan_ahead([1])
    memory.make(1 << 16, 1, pinned=False, is_stopped=lambda: False)
    (spare,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    spare.unlink()
    spare.parent.rmdir()
    memory.expect([1], 1 << 16, pinned=False)
    assert [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()] == [1 << 16]
    memory.close()


def test_periods_that_divide_each_other_are_recognised() -> None:
    every = EverySteps
    assert are_multiples(every(1000) | AtExit(), every(20))
    assert not are_multiples(every(30), every(20))
    assert not are_multiples(every(1000) | EverySeconds(1), every(20))
    assert not are_multiples(AtExit(), every(20))
