"""TorchWorld among real processes: rounds, tensor exchange, and ranks that die, hang or leave.

Method: forked gloo ranks; the victims kill themselves with SIGKILL, the survivors measure how long
it took to hear the victim's name.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.world.torch_world
import ckpt.world.tree
from ckpt.errors import Fenced, RankFailed
from ckpt.process import world_of_members
from ckpt.world.base import Message, SoloWorld, Transfers, World
from ckpt.world.rounds import Deadlines
from ckpt.world.torch_world import TorchWorld, current_world
from tests.ranks import run_ranks, stop_here

pytestmark = pytest.mark.ranks
MiB = 1024 * 1024


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _heard(world: World, call: Any) -> tuple[int, str]:
    """Which rank the error of `call` names, and its text."""
    try:
        call()
    except RankFailed as error:
        return error.rank, str(error)
    raise AssertionError(f"rank {world.rank} noticed nothing")


def _talk() -> list[Any]:
    world = current_world()
    assert isinstance(world, TorchWorld)
    mine = bytes([world.rank]) * 3
    large = bytes(range(256)) * (9 * MiB // 256) + b"end"
    results: list[Any] = [
        world.gather("a", mine),
        world.gather_to_coordinator("b", mine),
        world.broadcast("c", b"tiny" if world.rank == 0 else None),
        world.broadcast("empty", b"" if world.rank == 0 else None),
        world.broadcast("large", large if world.rank == 0 else None) == large,
    ]
    parts = world.gather_to_coordinator("pieces", large + mine)
    results.append(parts is None or [part[-3:] for part in parts])
    for _ in range(3):
        results.append(_exchange(world))
    results.append(_exchange_nothing(world))
    world.agree("fine", None)
    try:
        world.agree("claim", Fenced("newer session") if world.rank == 0 else None)
    except Fenced as error:
        results.append(str(error))
    world.agree("still usable", None)
    world.close()
    return results


def _exchange(world: World) -> bool:
    """Uneven buffers, one of them above the size that is sent at once, one of them read-only."""
    sizes = [
        [0 if a == b else 70 * MiB if (a, b) == (1, 0) else 1000 * a + b for b in range(3)]
        for a in range(3)
    ]
    send = [memoryview(bytearray([world.rank]) * n) for n in sizes[world.rank]]
    send[2] = memoryview(bytes(send[2]))
    recv = [memoryview(bytearray(sizes[peer][world.rank])) for peer in range(3)]
    world.all_to_all("tensors", *(_each_in_a_list(world, side) for side in (send, recv)))
    return all(view == bytes([peer]) * view.nbytes for peer, view in enumerate(recv))


def _each_in_a_list(world: World, views: list[memoryview]) -> list[list[memoryview]]:
    return [[view] if rank != world.rank else [] for rank, view in enumerate(views)]


def _exchange_nothing(world: World) -> bool:
    empty = [memoryview(bytearray()) for _ in range(world.size)]
    world.all_to_all("nothing", *(_each_in_a_list(world, side) for side in (empty, empty)))
    return True


def _exchange_with_a_slow_waiter() -> list[str]:
    """Threads that are left when the exchange is over; the one that waits is slow to end."""
    waiter, world = ckpt.world.torch_world._Waiter, current_world()
    wait = waiter._wait

    def slow(self: Any) -> None:
        wait(self)
        time.sleep(0.3)

    waiter._wait = slow  # type: ignore[method-assign]
    try:
        assert _exchange(world)
        return [one.name for one in threading.enumerate() if one.name == "ckpt-all-to-all"]
    finally:
        waiter._wait = wait  # type: ignore[method-assign]


def test_an_exchange_leaves_no_thread_in_torchs_code() -> None:
    """An interpreter that ends would be aborted by it."""
    assert run_ranks(3, _exchange_with_a_slow_waiter) == [[], [], []]


def test_rounds_and_exchange_of_three_ranks() -> None:
    results = run_ranks(3, _talk)
    gathered = [bytes([rank]) * 3 for rank in range(3)]
    for rank, got in enumerate(results):
        assert got == [
            gathered,
            gathered if rank == 0 else None,
            b"tiny",
            b"",
            True,
            gathered if rank == 0 else True,
            *[True] * 4,
            "rank 0: newer session",
        ]


def _leave_no_keys() -> int:
    world = TorchWorld()
    for index in range(20):
        world.broadcast(f"s{index}", b"x" if world.rank == 0 else None)
        world.gather(f"g{index}", b"x" * 10)
        world.gather_to_coordinator(f"l{index}", b"x" * 10)
    before = dist.distributed_c10d._get_default_store().num_keys()
    world.gather("last", b"")
    world.close()
    return int(before)


def test_rounds_delete_their_keys() -> None:
    """60 rounds of 2 ranks would leave more than 100 keys behind; torch's own are about 20."""
    assert max(run_ranks(2, _leave_no_keys)) < 40


def _subgroups() -> list[Any]:
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1, 3]), dist.new_group([2, 0])]
    results: list[Any] = []
    if rank == 0:
        results.append(type(current_world(groups[0])).__name__)
    if rank in (1, 3):
        world = current_world(groups[1])
        theirs = memoryview(bytearray(2))
        mine = memoryview(bytearray([rank, rank]))
        pair: list[list[list[memoryview]]] = [[[], [mine]], [[], [theirs]]]
        world.all_to_all("t", *(p if world.rank == 0 else p[::-1] for p in pair))
        results += [world.rank, world.gather("x", b"%d" % rank), bytes(theirs)]
        second = current_world(groups[1])
        results.append(second.gather("y", b"%d" % rank))
    return results


def test_world_of_a_subgroup_uses_the_groups_ranks() -> None:
    assert run_ranks(4, _subgroups) == [
        ["SoloWorld"],
        [0, [b"1", b"3"], b"\x03\x03", [b"1", b"3"]],
        [],
        [1, [b"1", b"3"], b"\x01\x01", [b"1", b"3"]],
    ]


def test_without_a_process_group_the_world_is_solo() -> None:
    assert isinstance(current_world(), SoloWorld)


def _relay(world: World, count: int = 3) -> list[bytes]:
    """Messages to the next rank by several threads, those of later tags first on one side."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    room = [memoryview(bytearray(4)) for _ in range(count)]

    def move(wires: Transfers, tag: int) -> None:
        data = memoryview(b"%d  %d" % (world.rank, tag))
        wires.move([Message(right, tag, data)], [])

    with world.transfers("relay") as wires, ThreadPoolExecutor(2 * count) as pool:
        works = [pool.submit(move, wires, tag) for tag in reversed(range(count))]
        works += [
            pool.submit(wires.move, [], [Message(left, tag, room[tag])]) for tag in range(count)
        ]
        for work in works:
            work.result()
    return [bytes(one) for one in room]


def _relayed() -> list[bytes]:
    world = TorchWorld()
    first = _relay(world)
    assert _relay(world) == first
    world.agree("x", None)
    return first


def test_messages_of_several_threads_meet_by_their_tags() -> None:
    results = run_ranks(3, _relayed)
    for rank, got in enumerate(results):
        left = (rank - 1) % 3
        assert got == [b"%d  %d" % (left, tag) for tag in range(3)]


class _Broken:
    """A group in whose transfers tag 0 never ends, and any other fails once that one waits."""

    def __init__(self) -> None:
        self._is_waiting = threading.Event()
        self._never = threading.Event()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        def wait() -> None:
            if tag == 0:
                self._is_waiting.set()
                self._never.wait()
            self._is_waiting.wait()
            raise RuntimeError("the cable was cut")

        return SimpleNamespace(wait=wait)

    send = recv


def _cut_off() -> str:
    world = TorchWorld(deadlines=Deadlines(grace_seconds=0.1))
    world._group = _Broken()

    def move(wires: Transfers, tag: int) -> None:
        wires.move([], [Message(1 - world.rank, tag, memoryview(bytearray(1)))])

    def run() -> None:
        with world.transfers("x") as wires, ThreadPoolExecutor(2) as pool:
            for work in [pool.submit(move, wires, tag) for tag in range(2)]:
                work.result()  # that of tag 0 first, which only ends because the other has failed

    return _heard(world, run)[1]


def test_the_first_of_several_failed_threads_says_why() -> None:
    first, second = run_ranks(2, _cut_off)
    assert first == second
    assert "the cable was cut" in first


def _killed_in(what: str, victim: int) -> tuple[int, str]:
    world = TorchWorld()
    world.gather("start", b"")
    if what == "all_to_all":
        _exchange(world)
    if what == "transfers":
        _relay(world)
        if world.rank == victim:
            with world.transfers("relay"):
                _die()
    if world.rank == victim:
        time.sleep(0.3)  # die while the others wait
        _die()

    def agreed(phase: str, call: Callable[[], object]) -> None:
        call()
        world.agree(phase, None)

    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: world.gather("parts", b""),
        "gather_to_coordinator": lambda: agreed(
            "parts", lambda: world.gather_to_coordinator("parts", b"")
        ),
        "merge_to_coordinator": lambda: agreed(
            "parts", lambda: world.merge_to_coordinator("parts", lambda below: b"")
        ),
        "broadcast": lambda: agreed(
            "x", lambda: world.broadcast("plan", b"" if world.rank == 0 else None)
        ),
        "all_to_all": lambda: agreed("x", lambda: _exchange(world)),
        "transfers": lambda: _relay(world),
    }
    heard = _heard(world, calls[what])
    assert _heard(world, lambda: world.gather("again", b""))[0] == victim
    return heard


@pytest.mark.parametrize(
    ("what", "victim"),
    [
        ("gather", 2),
        ("gather", 0),
        ("gather_to_coordinator", 1),
        ("merge_to_coordinator", 1),
        ("broadcast", 0),
        ("all_to_all", 1),
        ("transfers", 1),
    ],
)
def test_killed_rank_is_named_by_all_others(what: str, victim: int) -> None:
    results = run_ranks(3, _killed_in, what, victim, allow_dead=[victim])
    for rank, heard in enumerate(results):
        if rank != victim:
            assert heard[0] == victim, heard
            assert f"rank {victim} has died" in heard[1]
    assert len({heard[1] for heard in results if heard}) == 1


def _killed_in_a_deep_tree(victim: int, merges: bool) -> tuple[int, str]:
    ckpt.world.tree.CHILDREN_MAX = 2  # so that six ranks are three levels
    world = TorchWorld()
    world.gather("start", b"")
    if world.rank == victim:
        _die()

    def merge() -> None:
        world.merge_to_coordinator("parts", lambda below: b"".join(below))
        world.agree("parts", None)

    return _heard(world, merge if merges else lambda: world.gather("parts", b""))


@pytest.mark.parametrize(("victim", "merges"), [(0, False), (1, False), (5, False), (5, True)])
def test_a_rank_killed_anywhere_in_the_tree_is_named_by_all_others(
    victim: int, merges: bool
) -> None:
    results = run_ranks(6, _killed_in_a_deep_tree, victim, merges, allow_dead=[victim])
    (heard,) = {one for rank, one in enumerate(results) if rank != victim}
    # A rank that has passed on what it merged is in the next round already.
    phases = ["'parts'", *(["'agree on parts'"] if merges else [])]
    assert heard in [(victim, f"rank {victim} has died in phase {phase}") for phase in phases]


def _stopped_for_long(scratch: str) -> list[bytes]:
    world = TorchWorld()
    (Path(scratch) / f"{world.rank}").write_text(str(os.getpid()))
    world.gather("start", b"")
    if world.rank == 1:
        stop_here()
    if world.rank == 2:
        time.sleep(3.0)  # longer than any confirmation of a death takes
        os.kill(int((Path(scratch) / "1").read_text()), signal.SIGCONT)
    return world.gather("parts", b"x")


def test_a_stopped_rank_is_no_dead_one(tmp_path: Path) -> None:
    assert run_ranks(3, _stopped_for_long, str(tmp_path)) == [[b"x"] * 3] * 3


def _killed_on_another_machine() -> tuple[int, str]:
    rank = dist.get_rank()
    ckpt.world.liveness._machine = lambda: f"machine {rank}"  # so that no pid can be looked up
    world = TorchWorld()
    world.gather("start", b"")
    if rank == 1:
        _die()
    return _heard(world, lambda: world.gather("parts", b""))


def test_silent_rank_of_another_machine_is_named() -> None:
    for heard in run_ranks(3, _killed_on_another_machine, allow_dead=[1])[::2]:
        assert heard[0] == 1 and "has died (its port is closed)" in heard[1]


def _hang() -> tuple[int, str]:
    world = TorchWorld(deadlines=Deadlines(round_seconds_max=1.0, grace_seconds=2.0))
    world.gather("start", b"")
    if world.rank == 1:
        time.sleep(2.0)
        return _heard(world, lambda: world.gather("parts", b""))
    return _heard(world, lambda: world.gather("parts", b""))


def test_hanging_rank_is_named_at_the_deadline_and_hears_it_later() -> None:
    for heard in run_ranks(3, _hang):
        assert heard[0] == 1 and "rank 1 did not answer within 1 s in phase 'parts'" in heard[1]


def _leave_early() -> tuple[int, str] | None:
    world = TorchWorld()
    if world.rank == 1:
        world.close()
        return None
    return _heard(world, lambda: world.gather("parts", b""))


def test_rank_that_left_is_named() -> None:
    heard = run_ranks(2, _leave_early)[0]
    assert heard[:2] == (1, "rank 1 has left in phase 'parts'")


def _other_path() -> tuple[int, str]:
    world = TorchWorld()
    return _heard(world, lambda: world.gather(f"round of {world.rank}", b""))


def test_ranks_on_different_paths_are_an_error_of_both() -> None:
    results = run_ranks(2, _other_path)
    assert all("the same calls in the same order" in heard[1] for heard in results)


def _store_host_dies(scratch: str) -> tuple[int, str] | None:
    """Like torchrun with rank 0 as the host of the TCPStore. The system chooses the port."""
    store_class: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch hides it from checkers
    rank = int(os.environ["RANK"])
    port_file = Path(scratch) / "port"
    timeout = timedelta(seconds=30)
    if rank == 0:
        store = store_class("127.0.0.1", 0, 3, True, timeout=timeout, wait_for_workers=False)
        (Path(scratch) / "aside").write_text(str(store.port))
        (Path(scratch) / "aside").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        port = int(port_file.read_text())
        store = store_class("127.0.0.1", port, 3, False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    world = TorchWorld()
    world.gather("start", b"")
    if rank == 0:
        time.sleep(0.3)
        _die()
    return _heard(world, lambda: world.gather("parts", b""))


def test_death_of_the_stores_host_ends_in_an_error_that_says_so(tmp_path: Path) -> None:
    results = run_ranks(3, _store_host_dies, str(tmp_path), group=False, allow_dead=[0])
    for heard in results[1:]:
        assert heard[0] == 0
        assert "rank 0" in heard[1]


def _looks(victim: int) -> tuple[int, str] | None:
    world = current_world()
    duplicate = world.duplicate()
    if world.rank == 2:
        duplicate.raise_flag("stop")
    world.gather("raised", b"")
    assert duplicate.flag_is_up("stop") and not world.flag_is_up("stop")
    if world.rank == victim:
        _die()

    def look_on() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            duplicate.check_neighbour("training")
            time.sleep(0.05)  # as a watcher does

    return _heard(duplicate, look_on)


@pytest.mark.parametrize("victim", [0, 1])
def test_all_others_hear_of_a_death_by_looking(victim: int) -> None:
    """Only one of them looks at the victim itself."""
    results = run_ranks(3, _looks, victim, allow_dead=[victim])
    for rank, heard in enumerate(results):
        if rank != victim:
            assert heard[0] == victim and "has died in phase 'training'" in heard[1], heard


def _waits_for_storage(tells: bool) -> tuple[int, str] | list[bytes]:
    deadlines = Deadlines(round_seconds_max=0.5, grace_seconds=1.0, storage_seconds_max=30.0)
    world = TorchWorld(deadlines=deadlines)
    world.gather("start", b"")
    if world.rank == 1:
        if tells:
            world.report_storage_wait(True)
        time.sleep(3.0)
        world.report_storage_wait(False)
    if not tells:
        return _heard(world, lambda: world.gather("parts", b""))
    return world.gather("parts", b"x")


def test_a_rank_that_waits_for_its_storage_is_waited_for() -> None:
    """Also by a rank that waits for the coordinator, which waits for that one."""
    assert run_ranks(3, _waits_for_storage, True) == [[b"x"] * 3] * 3
    assert all(heard[0] == 1 for heard in run_ranks(2, _waits_for_storage, False))


def _leaves_groups_to_torch(scratch: str) -> list[bool]:
    """Whether torch frees its groups when this process leaves the job, as without this library."""
    url = f"{scratch}/root"
    part = dist.new_group([0, 1])
    ckpt.save({"x": 1}, url, step=1)
    ckpt.save({"x": 2}, url, step=2, process_group=part)
    groups = [weakref.ref(part), weakref.ref(dist.group.WORLD)]
    del part
    dist.destroy_process_group()
    return [group() is None for group in groups]


def test_torch_ends_the_threads_of_its_groups(tmp_path: Path) -> None:
    """A thread that lets go of a tensor while the interpreter is taken down aborts the process."""
    assert run_ranks(2, _leaves_groups_to_torch, str(tmp_path)) == [[True, True]] * 2


def _joins_job_after_job(scratch: str) -> list[int]:
    """How many hearts this process has after each of three jobs, in the end."""
    counts = []
    for job in range(3):
        dist.destroy_process_group()
        url = f"file://{scratch}/job{job}"
        dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=2)
        ckpt.save({"x": job}, f"{scratch}/root", step=job)
        until = time.monotonic() + 20.0
        while len(_hearts()) > 1 and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        counts.append(len(_hearts()))
        dist.barrier()
    return counts


def _hearts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpt-heart"]


def test_a_process_that_joins_another_job_leaves_the_heart_of_the_former(tmp_path: Path) -> None:
    assert run_ranks(2, _joins_job_after_job, str(tmp_path), timeout_seconds=120) == [[1] * 3] * 2


def _one_alone_between_saves(root: str) -> list[int]:
    ckpt.save({"a": torch.ones(2)}, root, step=1)
    if dist.get_rank() == 0:
        assert world_of_members((0,)).size == 1
    ckpt.save({"a": torch.ones(2)}, root, step=2)
    return [one.step for one in ckpt.list_steps(root)]


def test_a_world_of_one_member_leaves_that_of_all(tmp_path: Path) -> None:
    assert run_ranks(2, _one_alone_between_saves, str(tmp_path / "root")) == [[1, 2]] * 2
