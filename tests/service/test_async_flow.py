"""What becomes of saves in the background: policies when busy, failures, memory, agreement.

Method: the worker is held at scripted places, never by time. Ranks are threads, each with its own
worker, over a memory store that can be made to fail.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.saving.background import Background, PendingSave
from ckpt.saving.image import Image, Staging, WritePath
from ckpt.saving.staging import Staged, stage
from ckpt.saving.step_gate import Gate, Steps
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.world.base import World
from storage import open_store
from storage.memory import MemoryStore
from storage.ranges import aligned_buffer
from tests.e2e.job import NO_WAITING, state_at
from tests.service.staging import differing, late_copies, saved_tensors, tensors_now
from tests.thread_ranks import run_ranks

URL = "memory://async-flow"
MIB = 1 << 20


def trained() -> tuple[dict[str, Any], Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def train() -> None:
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    return {"model": model, "optim": optimizer}, train


def steps_at(url: str) -> list[int]:
    return [info.step for info in ckpt.list_steps(url)]


def test_a_second_save_waits_for_the_first() -> None:
    state, _ = trained()
    first = ckpt.async_save(state, f"{URL}-wait", step=1)
    second = ckpt.async_save(state, f"{URL}-wait", step=2, when_busy="wait")
    assert first.done()
    second.result()
    assert steps_at(f"{URL}-wait") == [1, 2]


def test_a_busy_worker_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{URL}-skip"
    state, _ = trained()
    with late_copies(monkeypatch):
        first = ckpt.async_save(state, url, step=1)
        second = ckpt.async_save(state, url, step=2, when_busy="skip")
        assert not first.done() and first.attempt == second.attempt == ""
    with pytest.raises(ckpt.errors.SaveDropped, match="step 2"):
        second.result()
    assert second.skipped and not first.skipped and first.result().step == 1
    assert first.attempt == first.result().attempt
    ckpt.async_save(state, url, step=3, when_busy="skip").result()
    assert steps_at(url) == [1, 3]


def test_a_newer_save_replaces_one_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{URL}-replace"
    state, _ = trained()
    with late_copies(monkeypatch) as release:
        real = Background.replace

        def replace(self: Background) -> None:
            real(self)
            release.set()

        monkeypatch.setattr(Background, "replace", replace)
        first = ckpt.async_save(state, url, step=1)
        second = ckpt.async_save(state, url, step=2, when_busy="replace")
    assert second.result().step == 2
    assert first.skipped
    assert steps_at(url) == [2]


def failing_write(self: WritePath, *args: Any, **kwargs: Any) -> Any:
    raise OSError("planted: the disk is gone")


def test_a_failure_surfaces_in_result(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{URL}-failure"
    state, train = trained()
    ckpt.async_save(state, url, step=1).result()
    expected = tensors_now(state)
    with monkeypatch.context() as patch:
        patch.setattr(WritePath, "write", failing_write)
        pending = ckpt.async_save(state, url, step=2)
        with pytest.raises(OSError, match="planted"):
            pending.result()
    train()  # nothing holds the step back
    ckpt.async_save(state, url, step=3).result()
    assert steps_at(url) == [1, 3]
    assert differing(saved_tensors(url, 1), expected) == []


@pytest.mark.parametrize("again", ["async_save", "save"])
def test_a_failure_that_nobody_asked_about_is_raised_by_the_next_save(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{URL}-untold-{again}"
    state, _ = trained()
    with monkeypatch.context() as patch:
        patch.setattr(WritePath, "write", failing_write)
        ckpt.async_save(state, url, step=1)
        with pytest.raises(OSError, match="planted"):
            getattr(ckpt, again)(state, url, step=2)
    report = getattr(ckpt, again)(state, url, step=3)  # reported once
    if isinstance(report, PendingSave):
        report.result()
    assert steps_at(url) == [3]


def test_a_bad_state_fails_in_result_and_not_in_the_call() -> None:
    pending = ckpt.async_save({"what": object()}, f"{URL}-bad", step=1)
    with pytest.raises(ckpt.errors.InvalidState, match="what"):
        pending.result()
    with pytest.raises(ValueError, match="when_busy"):
        ckpt.async_save({}, f"{URL}-bad", step=1, when_busy="maybe")  # type: ignore[arg-type]


def test_result_gives_up_after_its_timeout_and_the_save_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, train = trained()
    ckpt.async_save(state, f"{URL}-timeout", step=0).result()
    train()
    with late_copies(monkeypatch):
        pending = ckpt.async_save(state, f"{URL}-timeout", step=1)
        with pytest.raises(TimeoutError, match="step 1"):
            pending.result(0.01)
        with pytest.raises(TimeoutError, match="step 1"):
            pending.wait_staged(0.01)
    assert pending.result().step == 1


def test_what_was_copied_aside_goes_with_a_failed_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps its error, as a Checkpointer does, does not keep the memory."""
    copied: list[weakref.ref[memoryview]] = []

    def noted(nbytes: int) -> memoryview:
        buffer = aligned_buffer(nbytes)
        copied.append(weakref.ref(buffer))
        return buffer

    url = f"{URL}-aside"
    state, train = trained()
    state["large"] = nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(state["large"].parameters(), lr=0.1)
    optimizer.step()
    ckpt.async_save(state, url, step=1).result()
    train()
    optimizer.step()
    monkeypatch.setattr("ckpt.saving.staging.aligned_buffer", noted)
    with monkeypatch.context() as patch:
        patch.setattr(WritePath, "write", failing_write)
        pending = ckpt.async_save(state, url, step=2, host_bytes_max=18 * MIB)
        with pytest.raises(OSError, match="planted") as kept:
            pending.result()
    assert kept.value.__traceback__ is not None
    gc.collect()
    assert [reference() for reference in copied] == [None]


def test_an_optimizer_that_has_nothing_to_step_is_left_alone() -> None:
    """The hook is before every optimizer's step, those outside of the state too."""
    ckpt.async_save({}, f"{URL}-nothing", step=1).result()
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    optimizer.param_groups.clear()
    optimizer.step()


class Interrupted:
    """Ctrl-C at the first call of `place`, before it does anything or right after all of it."""

    def __init__(self, when: str) -> None:
        self.is_before = when == "before"
        self.is_left = True

    def __call__(self, place: Callable[[], Any]) -> Any:
        is_now, self.is_left = self.is_left, False
        if is_now and self.is_before:
            raise KeyboardInterrupt
        result = place()
        if is_now:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["gate", "worker"])
def test_an_interrupted_call_leaves_nothing_that_anybody_waits_for(
    place: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C where a step begins to wait for the copy, and where the worker is notified."""
    url = f"{URL}-interrupted-{place}-{when}"
    state, train = trained()
    ckpt.async_save(state, url, step=0).result()
    train()
    interrupt = Interrupted(when)
    with monkeypatch.context() as patch:
        if place == "gate":
            hold = Steps.hold
            patch.setattr(Steps, "hold", lambda *given: interrupt(lambda: hold(*given)))
        else:
            submit = ThreadPoolExecutor.submit
            patch.setattr(
                ThreadPoolExecutor, "submit", lambda *given: interrupt(lambda: submit(*given))
            )
        with pytest.raises(KeyboardInterrupt):
            ckpt.async_save(state, url, step=1)
    stepping = threading.Thread(target=train, daemon=True)
    stepping.start()
    stepping.join(30)
    assert not stepping.is_alive(), "the step waits for a copy that nobody makes"
    saving = threading.Thread(target=ckpt.save, args=(state, url), kwargs={"step": 2}, daemon=True)
    saving.start()
    saving.join(30)
    assert not saving.is_alive(), "the save waits for one that nobody makes"
    assert differing(saved_tensors(url, 2), tensors_now(state)) == []


def test_a_call_that_is_interrupted_while_it_copies_commits_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a state larger than the budget is copied before the call returns, or never: what
    comes after Ctrl-C may change it.
    """
    url = f"{URL}-interrupted-waves"
    state = {"frozen": torch.zeros(8 * MIB)}
    ckpt.async_save({}, url, step=0).result()
    with monkeypatch.context() as patch:
        waiting = Interrupted("before")
        wait_staged = PendingSave.wait_staged
        patch.setattr(
            PendingSave, "wait_staged", lambda *given: waiting(lambda: wait_staged(*given))
        )
        with late_copies(monkeypatch), pytest.raises(KeyboardInterrupt):
            ckpt.async_save(state, url, step=1, host_bytes_max=17 * MIB)
    ckpt.save(state, url, step=2)
    assert steps_at(url) == [0, 2]


@pytest.mark.parametrize("snapshot", ["step", "now"])
def test_a_state_beyond_the_budget_is_copied_in_waves(
    snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the memory: buffers are never more than the budget, and the bytes are right."""
    url = f"{URL}-waves-{snapshot}"
    state = {"model": nn.Linear(1600, 1600), "buffer": torch.randn(1000)}
    optimizer = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    state["optim"] = optimizer

    def train() -> None:
        state["model"](torch.randn(2, 1600)).sum().backward()
        optimizer.step()
        state["buffer"].add_(1)

    ckpt.async_save({}, url, step=0).result()
    train()
    taken: list[int] = []
    take, give_back = Staging.take, Staging.give_back

    def counted_take(self: Staging, nbytes: int, *, pinned: bool, part: int = 0) -> memoryview:
        taken.append(nbytes)
        assert sum(taken) <= 17 * MIB
        return take(self, nbytes, pinned=pinned, part=part)

    def counted_give_back(self: Staging, buffer: memoryview) -> None:
        taken.remove(len(buffer))
        give_back(self, buffer)

    monkeypatch.setattr(Staging, "take", counted_take)
    monkeypatch.setattr(Staging, "give_back", counted_give_back)
    for step in (1, 2):
        train()
        expected = tensors_now(state)
        pending = ckpt.async_save(state, url, step=step, host_bytes_max=17 * MIB, snapshot=snapshot)
        train()
        pending.result()
        assert differing(saved_tensors(url, step), expected) == []


def test_values_behind_small_tensors_do_not_make_parts_too_small_for_an_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3 wants 5 MiB of every part but the last; the values here need a second MiB."""
    create = MemoryStore.create

    def strict_create(self: MemoryStore, key: str, nbytes: int, **how: Any) -> Any:
        assert nbytes <= how["part_nbytes"] or how["part_nbytes"] >= 5 * MIB
        return create(self, key, nbytes, **how)

    monkeypatch.setattr(MemoryStore, "create", strict_create)
    monkeypatch.setattr(MemoryStore, "part_nbytes_min", 5 * MIB)
    state = {"t": torch.arange(MIB // 4 - 4000, dtype=torch.int32), "notes": "n" * MIB}
    for step in range(2):
        ckpt.async_save(state, f"{URL}-small-parts", step=step).result()
    assert torch.equal(saved_tensors(f"{URL}-small-parts", 1)["t"], state["t"])


def test_a_budget_for_less_than_two_parts_is_refused() -> None:
    pending = ckpt.async_save({"t": torch.zeros(8 * MIB)}, f"{URL}-tiny", step=1, host_bytes_max=1)
    with pytest.raises(ValueError, match="host_bytes_max=1"):
        pending.result()


def test_weights_that_do_not_change_are_warned_of() -> None:
    """Also by `save`; with an optimizer that trains something else, or a stale copy of a model."""
    url = f"{URL}-unchanged"
    state, train = trained()
    assert ckpt.async_save(state, url, step=0).result().warnings == ()
    train()
    assert ckpt.async_save(state, url, step=1).result().warnings == ()
    (warning,) = ckpt.async_save(state, url, step=2).result().warnings
    assert "no trainable tensor has changed" in warning
    assert ckpt.save(state, url, step=3).warnings == (warning,)
    train()
    assert ckpt.save(state, url, step=4).warnings == ()


@pytest.mark.parametrize("again", ["async_save", "save"])
def test_weights_are_not_compared_with_a_save_that_failed(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a save that is tried once more warns of nothing."""
    url = f"{URL}-retried-{again}"
    state, train = trained()
    ckpt.save(state, url, step=0)
    train()

    def failing(*given: Any, **named: Any) -> Any:
        raise OSError("planted: no manifest")

    with monkeypatch.context() as patch:
        patch.setattr("ckpt.saving.save._create_manifest", failing)
        with pytest.raises(OSError, match="planted"):
            ckpt.async_save(state, url, step=1).result()
    report = getattr(ckpt, again)(state, url, step=1)
    assert (report.result() if isinstance(report, PendingSave) else report).warnings == ()


def test_buffers_that_are_not_filled_anew_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: buffers of the save before are written again as they are. The warning says so."""
    state, train = trained()
    ckpt.async_save(state, f"{URL}-stale", step=0).result()
    train()
    monkeypatch.setattr(Image, "_fill", lambda self, part, slots, **how: None)
    (warning,) = ckpt.async_save(state, f"{URL}-stale", step=1).result().warnings
    assert "no trainable tensor has changed" in warning


def test_time_that_a_step_was_held_back_counts_as_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    state, train = trained()
    ckpt.async_save(state, f"{URL}-blocked", step=0).result()
    train()
    with late_copies(monkeypatch):
        pending = ckpt.async_save(state, f"{URL}-blocked", step=1)
        train()  # waits for the copy, which begins only now
    report = pending.result()
    held = report.counters["step_wait_seconds"]
    assert held > 0.0
    assert pending.blocked_seconds == pending.call_seconds + held


def test_a_forked_child_waits_for_nothing_that_its_parent_does() -> None:
    """A worker of a data loader may be forked at any moment, in the middle of a save too."""
    steps, gate = Steps(), Gate(frozenset({1}), frozenset())
    steps.hold(gate)
    with steps._lock:
        steps.forked()
        steps.forget(gate)  # takes the lock that no thread of the child would ever give back
    assert steps._gates == ()


# Several ranks ------------------------------------------------------------------------------------


class Rank:
    """One rank of a job with its own worker, as `ckpt.async_save` makes it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        store = open_store(f"memory://{name}")
        registry = _registries.setdefault(name, SessionRegistry())
        self.session = open_session(world, store, registry, sources=NO_WAITING)
        self.store, self.memory = store, PartMemory()
        self.background, self.staging = Background(world), Staging()

    def task(self, step: int, **options: Any) -> SaveTask:
        return SaveTask(self.session, self.store, self.memory, step, SaveOptions(**options))

    def start(self, step: int) -> PendingSave:
        state = state_at(step, self.world.rank, self.world.size)
        task = self.task(step)
        return self.background.start(task, lambda: stage(state, task, self.staging))


_registries: dict[str, SessionRegistry] = {}


def outcome(pending: PendingSave) -> str:
    try:
        return f"saved {pending.result(30).step}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_save_that_never_begins_is_not_waited_for() -> None:
    """Ctrl-C came before the worker had it; nobody will ever announce its end."""
    pending = PendingSave(1, Gate(frozenset(), frozenset()))
    assert pending._future.cancel()
    pending.wait(0)


def test_ranks_save_together() -> None:
    def main(world: World) -> list[str]:
        rank = Rank(world, "flow-together")
        outcomes = []
        for step in (1, 2, 3):
            rank.background.settle()
            outcomes.append(outcome(rank.start(step)))
        rank.background.close()
        return outcomes

    assert run_ranks(3, main) == [["saved 1", "saved 2", "saved 3"]] * 3
    assert steps_at("memory://flow-together") == [1, 2, 3]


def test_replicas_that_only_steps_change_are_compared_as_all_others() -> None:
    """They are copied late, and so are their digests taken."""

    def main(world: World) -> tuple[list[str], int]:
        rank = Rank(world, "flow-replicas")
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outcomes = []
        for number in range(3):
            with torch.no_grad():
                model.weight.fill_(number)
                model.bias.fill_(number == 2 and world.rank == 1)
            task = rank.task(number, replicas="strict")
            staged = stage({"model": model}, task, rank.staging)
            outcomes.append(outcome(rank.background.start(task, lambda staged=staged: staged)))
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        rank.background.close()
        return outcomes, len(staged.compared_later)

    (first, later), *others = run_ranks(2, main)
    assert all(other == (first, later) for other in others)
    assert first[:2] == ["saved 0", "saved 1"] and later == 2
    assert (
        first[2].startswith("InvalidState") and "model.bias: the ranks have different" in first[2]
    )
    assert "model.weight" not in first[2]


def test_a_save_that_one_rank_skips_is_skipped_on_all() -> None:
    """Rank 1 is still busy when the others are not: they copy, and hear that it will not be."""

    def main(world: World) -> list[str]:
        rank = Rank(world, "flow-skip")
        if world.rank == 1:
            second = rank.background.refuse(rank.task(1), ckpt.errors.SaveDropped("busy"))
        else:
            second = rank.start(1)
        outcomes = [outcome(second)]
        rank.background.settle()
        outcomes.append(outcome(rank.start(2)))
        rank.background.close()
        return outcomes

    outcomes = run_ranks(3, main)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0].startswith("SaveDropped") and outcomes[0][1] == "saved 2"
    assert steps_at("memory://flow-skip") == [2]


def test_a_failure_on_one_rank_is_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Staged.write
    failing = threading.Event()
    failing.set()

    def on_rank_2(self: Staged, *args: Any) -> Any:
        if self.task.session.world.rank == 2 and failing.is_set():
            raise OSError("planted")
        return write(self, *args)

    monkeypatch.setattr(Staged, "write", on_rank_2)

    def main(world: World) -> list[str]:
        rank = Rank(world, "flow-fail")
        outcomes = [outcome(rank.start(1))]
        world.gather("all heard", b"")
        failing.clear()
        outcomes.append(outcome(rank.start(2)))
        rank.background.close()
        return outcomes

    outcomes = run_ranks(3, main)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0] == "RankFailed: rank 2 failed in phase 'write': OSError: planted"
    assert outcomes[0][1] == "saved 2"


def test_a_failure_that_one_rank_does_not_know_of_yet_keeps_no_rank_out_of_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 0 asks how the first save went. The second fails on all ranks, at once where the
    failure is news and in its result elsewhere; the third is saved.
    """
    write = Staged.write
    failing = threading.Event()
    failing.set()

    def failing_at_first(self: Staged, *args: Any) -> Any:
        if failing.is_set():
            raise OSError("planted")
        return write(self, *args)

    monkeypatch.setattr(Staged, "write", failing_at_first)

    def main(world: World) -> list[str]:
        rank = Rank(world, "flow-untold")
        first = rank.start(1)
        first.wait(30)
        outcomes = [outcome(first)] if world.rank == 0 else []
        world.gather("first is over", b"")
        failing.clear()
        try:
            rank.background.settle_before(rank.task(2))
            outcomes.append(outcome(rank.start(2)))
        except ckpt.errors.RankFailed as error:
            outcomes.append(f"at once: {error}")
        rank.background.settle()
        outcomes.append(outcome(rank.start(3)))
        rank.background.close()
        return outcomes

    outcomes = run_ranks(3, main)
    assert [ended[-1] for ended in outcomes] == ["saved 3"] * 3
    assert [ended[-2].startswith("at once") for ended in outcomes] == [False, True, True]
    assert all("planted" in ended[-2] for ended in outcomes)
    assert steps_at("memory://flow-untold") == [3]
