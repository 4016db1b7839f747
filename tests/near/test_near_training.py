"""Near tiers under a Checkpointer: what is saved on the hosts, and what a restart finds there.

Method: trainings whose ranks are threads, whose hosts are folders and whose durable store is in
memory; every state that comes back is compared bit for bit with that of its step.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckpt.api import forget, read_path
from ckpt.errors import Fenced
from ckpt.loading.plan import ReadPath
from ckpt.near.memory import MappedStore, TierMemory
from ckpt.near.placement import Hosts
from ckpt.near.records import NearRecord
from ckpt.near.saving import NearSaves
from ckpt.near.tier import Tier, tiers_in
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, NearSaved, SaveSucceeded
from ckpt.service.policies import EverySteps, Never
from ckpt.world.base import SoloWorld, World, collectively
from storage import NoSpaceError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore
from tests.e2e.job import Job, state_at
from tests.near.training import Life, advance
from tests.thread_ranks import RanksFailed, ThreadWorld


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of these tests count as memory; those on a disk are in other files."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: True)


def folders(tmp_path: Path, *of_ranks: int) -> list[Path]:
    """The folder of each rank's host, by the numbers of the hosts."""
    return [tmp_path / f"host{number}" for number in of_ranks]


def origins(life: Life) -> set[tuple[str, int]]:
    """What the ranks have restored: one pair, when they agree."""
    return {(r.origin, r.step) if r else ("", 0) for r in life.reports.values()}


def data_files(host: Path) -> list[Path]:
    """The data files in a host's tier, by step and rank."""
    return sorted(host.glob("near/*/steps/*/*.safetensors"))


def flip_a_byte(path: Path) -> None:
    """Damage the first tensor byte of a data file."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_restart_continues_from_the_newest_near_state(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    first = Life(2, store, hosts)
    first.run(7)
    saved = [e.report.step for e in first.events[1] if isinstance(e, NearSaved)]
    assert saved == [2, 4, 6]
    again = Life(2, store, hosts)
    again.run(3)
    for report in again.reports.values():
        assert report is not None
        assert (report.origin, report.step, report.skipped) == ("near", 6, ())
    # What a job has restored counts for the next one, too, when it dies before its first near save.
    for _ in range(2):
        third = Life(2, store, hosts)
        third.run(0)
        assert origins(third) == {("near", 8)}


def test_a_restart_asks_other_ranks_for_each_fact_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    Life(2, store, hosts).run(2)
    names: list[str] = []
    each_round, get = ThreadWorld._round, LocalStore.get_bounded
    read: list[str] = []

    def seen(world: ThreadWorld, op: Any, name: str, *rest: Any) -> Any:
        names.extend([name] if world.rank == 0 and "near" in name else [])
        return each_round(world, op, name, *rest)

    def noted(store: LocalStore, key: str, nbytes_max: int) -> bytes:
        read.extend([key] if key.startswith("records/") else [])
        return get(store, key, nbytes_max)

    monkeypatch.setattr(ThreadWorld, "_round", seen)
    monkeypatch.setattr(LocalStore, "get_bounded", noted)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}
    both_ways = ["near tier", "near records", "near records", "near offers"]
    assert names[:8] == [name for name in both_ways for _ in "ud"]
    assert names[8:10] == ["near parts", "near manifest"]
    assert names[10:] == ["near room"] * 2 + ["near record", "agree on near record"]
    assert read == ["records/e000001-000000000001"]


def test_a_restore_agrees_on_the_store_once_and_to_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, phases = {"w": torch.ones(8)}, list[str]()

    def noted(world: World, phase: str, run: Callable[[], Any]) -> Any:
        phases.append(phase)
        return collectively(world, phase, run)

    def restored() -> list[str]:
        near = Near(tmp_path / "near", every=EverySteps(1))
        with Checkpointer(state, tmp_path / "run", save=Never(), near=near, only=True) as service:
            phases.clear()
            report = service.restore()
            opened = list(phases)
            service.step(1)
            service.wait()
        return opened if report is not None and report.origin == "near" else []

    monkeypatch.setattr("ckpt.process.collectively", noted)
    assert restored() == []  # the first life saves
    assert restored() == ["open"]
    forget(tmp_path / "run")  # as a process that has not claimed it
    assert restored() == ["open", "open"]


def test_a_host_that_missed_a_job_does_not_say_how_far_it_was(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    first = Life(2, store, hosts, save=EverySteps(2))
    first.run(7)
    Life(2, store, folders(tmp_path, 1, 1), save=EverySteps(2)).run(1)
    again = Life(2, store, hosts)
    again.run(0)
    reports = [report for report in again.reports.values() if report]
    assert {(one.origin, one.step, one.reached_step) for one in reports} == {("durable", 6, None)}


def test_ranks_of_a_host_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 1)
    Life(3, store, hosts).run(2)
    asked: list[tuple[Any, ...]] = []

    def seen(*how: Any) -> ReadPath:
        asked.append(how[1:])
        return read_path(*how)

    monkeypatch.setattr("ckpt.near.recovery.read_path", seen)
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}
    assert sorted(asked) == [("buffered", 1), ("buffered", 2), ("buffered", 2)]


def test_a_tier_keeps_two_states_and_no_leftovers(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    Life(2, store, hosts).run(9)
    steps = {path.parent.name[:8] for path in data_files(hosts[0])}
    assert steps == {"00000006", "00000008"}
    (tier,) = tiers_in(hosts[0] / "near")
    assert [record.head.step for record in tier.records()] == [8, 6]
    # A process that is killed leaves a file under construction; the next job removes it.
    half = (
        next(iter(data_files(hosts[0]))).parent / ".tmp-0123456789abcdef-rank00000-000.safetensors"
    )
    half.write_bytes(b"half")
    Life(2, store, hosts).run(2)
    assert [p for p in hosts[0].rglob("*") if p.name == half.name] == []


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 1), (1, 0, 1, 0, 0)])
def test_other_worlds_restore_what_two_hosts_have(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    store = MemoryStore()
    saved_by = (0, 0, 0, 0) if ranks == (0,) else (0, 0, 1, 1)
    Life(4, store, folders(tmp_path, *saved_by)).run(4)
    other = Life(len(ranks), store, folders(tmp_path, *ranks))
    other.run(2)
    assert origins(other) == {("near", 4)}
    # What was adopted counts for one more job, and so does what that one saved.
    last = Life(4, store, folders(tmp_path, *saved_by))
    last.run(0)
    assert origins(last) == {("near", 6)}


def test_what_is_on_the_own_host_is_read_there(tmp_path: Path) -> None:
    store = MemoryStore()
    hosts = folders(tmp_path, 0, 1)
    Life(2, store, hosts).run(2)

    state = state_at(2, 0, 2)
    replica = state["replica"].nbytes  # one rank has written it, and both want it
    shards = [sum(state_at(2, r, 2)[n].local.nbytes for n in ("rows", "runs")) for r in (0, 1)]
    for order, expected in (((0, 1), [0, replica]), ((1, 0), [shards[0] + replica, shards[1]])):
        life = Life(2, store, folders(tmp_path, *order))
        life.run(0)
        assert [life.reports[r].nbytes_of_other_hosts for r in (0, 1)] == expected  # type: ignore[union-attr]


def test_without_one_host_the_durable_checkpoint_is_restored(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    Life(2, store, hosts, save=EverySteps(5)).run(9)
    shutil.rmtree(hosts[1])
    again = Life(2, store, hosts)
    again.run(1)
    for report in again.reports.values():
        assert report is not None and (report.origin, report.step) == ("durable", 5)
        assert [one.step for one in report.skipped] == [8, 6]
        assert "no host has the near files" in report.skipped[0].reason
        assert report.steps_lost == 3


def test_damage_falls_back_to_the_state_before(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    Life(2, store, hosts, save=EverySteps(3)).run(8)
    newest = data_files(hosts[0])[-1]
    flip_a_byte(newest)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 6)}
    assert all(r and [s.step for s in r.skipped] == [8] for r in again.reports.values())
    for path in data_files(hosts[0]):
        flip_a_byte(path)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("durable", 6)}


def test_the_newest_of_near_and_durable_is_restored(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0)
    Life(1, store, hosts, save=EverySteps(5)).run(5)
    life = Life(1, store, hosts)
    life.run(0)
    assert origins(life) == {("durable", 5)}


def test_going_back_counts_as_newer_than_what_was_left(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)

    def go_back(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        report = service.restore(step=3)
        assert report is not None and report.origin == "durable"
        for step in (4, 5):
            advance(state, step, world.rank, 2)
            service.step(step)

    Life(2, store, hosts, save=EverySteps(3)).run(8, then=go_back)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 4)}


def test_going_back_ends_the_near_states_from_before(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)

    def go_back(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        service.restore(step=3)

    Life(2, store, hosts, save=EverySteps(3)).run(8, then=go_back)
    again = Life(2, store, hosts)
    again.run(0)
    assert {origin for origin, _ in origins(again)} == {"durable"}


# --- fences ---------------------------------------------------------------------------------------


def test_a_state_of_a_fenced_job_is_never_used(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    Life(2, store, hosts).run(6)
    # Another job claims the root, elsewhere, and trains on from its own state.
    Job(2, lambda rank: store).save(lambda rank: state_at(3, rank, 2), 3)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("durable", 3)}


def _trains_on_after(
    other: Callable[[], None], service: Checkpointer, state: Any, world: World
) -> None:
    """`other` happens once, while this job stands still after step 4; then it goes on to step 8."""
    world.gather("recorded", b"")
    if world.rank == 0:
        other()
    world.gather("successor", b"")
    for step in range(5, 9):
        advance(state, step, world.rank, 2)
        service.step(step)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_job_that_was_superseded_learns_it_in_its_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_in_memory)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)

    def zombie(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()

        def succeed() -> None:
            successor = Life(2, store, hosts)
            successor.run(2)
            assert origins(successor) == {("near", 4)}

        _trains_on_after(succeed, service, state, world)

    old = Life(2, store, hosts)
    with pytest.raises(RanksFailed) as failed:
        old.run(4, then=zombie)
    assert {type(error) for error in failed.value.errors.values()} == {Fenced}
    third = Life(2, store, hosts)
    third.run(0)
    assert origins(third) == {("near", 6)}


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_superseded_job_leaves_alone_what_it_does_not_know_that_it_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """A job stops between its record on the hosts and its own note of it. Another one restores that
    state, and dies before it saves anything; the first wakes up, and its next save begins.
    """
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_in_memory)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)

    def zombie(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        assert service._near is not None
        (tier,) = service._near._tiers
        assert tier._saves is not None
        tier._saves._safe = ""

        def succeed() -> None:
            successor = Life(2, store, hosts)
            successor.run(0)
            assert origins(successor) == {("near", 4)}

        _trains_on_after(succeed, service, state, world)

    with pytest.raises(RanksFailed) as failed:
        Life(2, store, hosts).run(4, then=zombie)
    assert {type(error) for error in failed.value.errors.values()} == {Fenced}
    third = Life(2, store, hosts)
    third.run(0)
    assert origins(third) == {("near", 4)}


def test_a_near_state_that_was_restored_is_restored_again(tmp_path: Path) -> None:
    """Each job claims an epoch of its own, and dies before it saves anything."""
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    Life(2, store, hosts).run(4)
    for _ in range(3):
        again = Life(2, store, hosts)
        again.run(0)
        assert origins(again) == {("near", 4)}


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_near_state_stays_until_the_next_is_recorded_on_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_in_memory)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    put = Tier.put

    def failing(self: Tier, record: NearRecord) -> None:
        if record.head.step == 4 and str(hosts[1]) in self.path:
            raise NoSpaceError("the tmpfs is full")
        put(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(Tier, "put", failing)
        Life(2, store, hosts).run(4)
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_a_host_lost_before_the_first_durable_save_gives_an_error_with_a_way_on(
    tmp_path: Path,
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    Life(2, store, hosts).run(4)
    shutil.rmtree(hosts[1])
    with pytest.raises(RanksFailed) as failed:
        Life(2, store, hosts).run(0)
    (text, *others) = {str(error) for error in failed.value.errors.values()}
    assert "no host has the near files of 1 of 2 ranks: 1" in text and not others
    assert "There is no durable checkpoint yet" in text and "remove the near directory" in text
    shutil.rmtree(hosts[0])
    again = Life(2, store, hosts)
    again.run(2)
    assert set(again.reports.values()) == {None}


def test_two_jobs_share_a_directory(tmp_path: Path) -> None:
    stores, hosts = [MemoryStore(), MemoryStore()], folders(tmp_path, 0, 0)
    for store, steps in zip(stores, (4, 8), strict=True):
        Life(2, store, hosts).run(steps)
    for store, step in zip(stores, (4, 8), strict=True):
        life = Life(2, store, hosts)
        life.run(0)
        assert origins(life) == {("near", step)}


# --- room -----------------------------------------------------------------------------------------


def test_a_tier_without_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    hosts = folders(tmp_path, 0, 0)
    small = Life(2, MemoryStore(), hosts, near=lambda rank: Near(hosts[rank], bytes_max=100))
    with pytest.raises(RanksFailed) as failed:
        small.run(1)
    for error in failed.value.errors.values():
        assert isinstance(error, ValueError)
        assert "ranks 0 to 1: 2 generations" in str(error) and "bytes_max is 0 MiB" in str(error)


def test_the_room_check_looks_at_each_rank_a_few_times() -> None:
    """Not once for each other one: jobs have ten thousands of them."""

    class Names(tuple[str, ...]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            for name in super().__iter__():
                Names.looks += 1
                yield name

    count = 64
    names = Names(f"host {rank // 8}" for rank in range(count))
    rank: Any = SimpleNamespace(
        hosts=Hosts(SoloWorld(), cast(Any, None), names),
        _near=Near("near"),
        session=SimpleNamespace(world=SimpleNamespace(rank=1)),
    )
    assert NearSaves._check_room(rank, [1] * count, [1000] * count, {})
    assert Names.looks <= 2 * count


def test_room_for_two_generations_is_enough_and_a_byte_less_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = folders(tmp_path, 0, 0)
    needed: list[int] = []
    check_room = NearSaves._check_room

    def noted(self: NearSaves, needs: Sequence[int], *others: Any) -> bool:
        needed[:] = needs
        return check_room(self, needs, *others)

    monkeypatch.setattr(NearSaves, "_check_room", noted)
    Life(2, MemoryStore(), hosts).run(2)
    assert len(needed) == 2
    bound = 2 * sum(needed)
    for bytes_max in (bound, bound - 1):
        near = partial(_bounded, hosts, bytes_max)
        life = Life(2, MemoryStore(), hosts, near=near)
        if bytes_max == bound:
            life.run(4)
            assert any(isinstance(event, NearSaved) for event in life.events[0])
        else:
            with pytest.raises(RanksFailed, match="generations of their states"):
                life.run(4)


def _bounded(hosts: list[Path], bytes_max: int, rank: int) -> Near:
    return Near(hosts[rank] / "near", every=EverySteps(2), bytes_max=bytes_max)


class FullStore(FaultyStore):
    """A file system that is full while `is_full`."""

    is_full = False

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        if FullStore.is_full:
            raise NoSpaceError(f"create {key}: the tmpfs is full")
        return self.inner.create(key, nbytes, **how)


def test_a_full_tier_stops_no_training_and_costs_no_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: False)
    monkeypatch.setattr(
        "ckpt.near.tier.LocalStore",
        lambda root: (
            FullStore(LocalStore(root), FaultPlan(0)) if "host1" in root else LocalStore(root)
        ),
    )

    def fill(service: Checkpointer, state: Any, world: World) -> int:
        service.wait()
        world.gather("filling", b"")
        FullStore.is_full = True
        for step in range(3, 7):
            advance(state, step, world.rank, 2)
            service.step(step)
        service.wait()
        world.gather("emptying", b"")
        FullStore.is_full = False
        return len(service.near_failures)

    life = Life(2, store, hosts, save=EverySteps(5))
    assert life.run(2, then=fill) == [2, 2]
    for events in life.events.values():
        assert [e.step for e in events if isinstance(e, NearFailed)] == [4, 6]
        assert [e.report.step for e in events if isinstance(e, SaveSucceeded)] == [5]
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("durable", 5)}
    (tier,) = tiers_in(hosts[0] / "near")
    assert [record.head.step for record in tier.records()][-1] == 2


def test_memory_that_is_full_fails_the_near_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    is_full = threading.Event()

    def reserve(fd: int, nbytes: int) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "planted: the tmpfs is full")
        os.ftruncate(fd, nbytes)

    # Not `allocate`, which a file that was made ahead and is still whole does not need.
    monkeypatch.setattr("ckpt.near.memory._reserve", reserve)

    def fill(service: Checkpointer, state: Any, world: World) -> list[int]:
        service.wait()
        world.gather("filling", b"")
        is_full.set()
        for step in (5, 6):
            advance(state, step, world.rank, 2)
            service.step(step)
        service.wait()
        world.gather("emptying", b"")
        # What counted before is still there.
        assert {path.parent.name[:8] for path in data_files(hosts[0])} == {"00000004"}
        is_full.clear()
        world.gather("emptied", b"")
        for step in (7, 8):
            advance(state, step, world.rank, 2)
            service.step(step)
        service.wait()
        assert service.last_near is not None and service.last_near.step == 8
        return [failure.step for failure in service.near_failures]

    life = Life(2, store, hosts)
    assert life.run(4, then=fill) == [[6], [6]]
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 8)}


def test_a_tier_with_room_for_two_states_is_enough_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a job before are no mapped ones, and go before a third generation is made."""
    store, most = MemoryStore(), [0]

    def allocate(fd: int, nbytes: int, *, start: int = 0) -> None:
        # Of each file all is reserved, and data files have kept a part of that.
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        most[0] = max(most[0], sum(-(-size // nbytes) for size in sizes if size > 1000))

    monkeypatch.setattr("ckpt.near.memory.allocate", allocate)
    for _ in range(3):
        # Without durable saves, for which a third one is kept where there is room.
        life = Life(1, store, folders(tmp_path, 0), save=Never())
        life.run(8)
        assert not [e for e in life.events[0] if isinstance(e, NearFailed)]
    assert most == [2]


def test_a_save_waits_for_the_file_that_is_being_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, is_stopped = threading.Event(), threading.Event(), threading.Event()

    def touch(memory: memoryview) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr("ckpt.near.memory.touch", touch)
    memory = TierMemory(str(tmp_path))
    memory.plan_ahead([1])
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(memory.make, 1 << 16, 1, pinned=False, is_stopped=is_stopped.is_set)
        assert begun.wait(60)
        is_stopped.set()
        expected = pool.submit(memory.expect, [1], 1 << 16, pinned=False)
        wait([expected], timeout=0.3)  # it has no file of its own by then
        go_on.set()
        made.result(60)
        expected.result(60)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    memory.close()


# --- counts ---------------------------------------------------------------------------------------


def test_a_near_save_asks_the_durable_store_for_nothing(tmp_path: Path) -> None:
    plan, hosts = FaultPlan(0), folders(tmp_path, 0)
    store = FaultyStore(MemoryStore(), plan)

    def count(service: Checkpointer, state: Any, world: World) -> list[tuple[str, str]]:
        before = len(plan.operations)
        for step in range(3, 9):
            advance(state, step, 0, 1)
            service.step(step)
        assert service.last_near is not None and service.last_near.step == 6
        return plan.operations[before:]

    (operations,) = Life(1, store, hosts).run(2, then=count)
    assert operations == []


def test_what_is_staged_in_memory_is_not_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[MappedStore] = []

    class Seen(MappedStore):
        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            stores.append(self)

    monkeypatch.setattr("ckpt.near.saving.MappedStore", Seen)
    hosts = folders(tmp_path, 0)

    def files(service: Checkpointer, state: Any, world: World) -> set[int]:
        service.wait()
        return {path.stat().st_ino for path in data_files(hosts[0])}

    def more(service: Checkpointer, state: Any, world: World) -> None:
        before = files(service, state, world)
        for step in range(5, 9):
            advance(state, step, 0, 1)
            service.step(step)
        # Two generations take turns in the same memory.
        assert files(service, state, world) == before and len(before) == 2

    Life(1, MemoryStore(), hosts, save=Never()).run(4, then=more)
    assert [store.nbytes_put for store in stores] == [0]
    assert not list(hosts[0].glob("near/*/stage/*"))


def test_a_near_save_takes_six_rounds_and_no_step_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, worlds = folders(tmp_path, 0, 0), dict[int, Any]()
    opened = NearSaves.open

    def noted(saves: NearSaves, *how: Any, **options: Any) -> None:
        opened(saves, *how, **options)
        worlds[saves.session.world.rank] = saves.session.world

    monkeypatch.setattr(NearSaves, "open", noted)

    def count(service: Checkpointer, state: Any, world: World) -> list[int]:
        service.wait()
        counts = [worlds[world.rank].calls]
        for step in (3, 4, 5):
            advance(state, step, world.rank, 2)
            service.step(step)
            service.wait()
            counts.append(worlds[world.rank].calls)
        return [after - before for before, after in pairwise(counts)]

    # The names agree, the attempt, files written, files reported, the record, and that all have it.
    assert Life(2, MemoryStore(), hosts).run(2, then=count) == [[0, 6, 0]] * 2
