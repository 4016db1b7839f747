"""The Checkpointer: when it saves, what it restores, and how failures of saves are reported.

Method: trainings of one process over stores in memory, whose operations fail as scripted, and of
several ranks that are threads. Clocks are numbers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.commit.session import Session, SessionRegistry
from ckpt.errors import (
    Corrupt,
    Failure,
    Fenced,
    InvalidArgument,
    InvalidState,
    LoadInterrupted,
    Mismatch,
    NoCheckpoint,
)
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.policies import SavePolicy
from ckpt.service.training import Training
from ckpt.world.base import SoloWorld, World
from storage import StorageError, Store, open_store
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore
from storage.wrap import WrappedStore
from tests.e2e.job import NO_WAITING, assert_is_step, state_at
from tests.service.chaos import ThreadTarget, UploadingStore
from tests.thread_ranks import run_ranks


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def steps_of(url: str) -> list[int]:
    return [info.step for info in ckpt.list_steps(url)]


class Broken(FaultyStore):
    """A store that refuses to take files while `refuses`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultPlan(0))
        self.refuses = False

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        if self.refuses:
            raise StorageError(f"create {key}: the disk is full")
        return self.inner.create(key, nbytes, **how)


def alone(store: Store, state: Any, save: SavePolicy, **how: Any) -> Checkpointer:
    """A training of one rank over any store."""
    target = ThreadTarget(SoloWorld(), store, SessionRegistry())
    return Checkpointer(state, target, save=save, **how)


# --- saving ---------------------------------------------------------------------------------------


def test_saves_when_the_policy_says_so_and_at_exit(url: str) -> None:
    state = {"x": torch.zeros(3), "step": 0}
    policy = ckpt.EverySteps(4) | ckpt.AtExit()
    with Checkpointer(state, url, save=policy) as checkpointer:
        assert checkpointer.last_saved is None
        begun = []
        for step in range(1, 11):
            state["x"].fill_(step)
            state["step"] = step
            if checkpointer.step(step):
                begun.append(step)
        assert begun == [4, 8]
        saved = checkpointer.wait()
        assert saved is not None and saved.step == 8 and saved.nbytes > 0
        assert checkpointer.in_flight == () and checkpointer.failures == ()
    assert steps_of(url) == [4, 8, 10]
    for step in (4, 8, 10):
        with ckpt.open(url, step) as stored:
            assert torch.equal(stored["x"], torch.full((3,), float(step)))


def test_nothing_is_saved_at_exit_when_nothing_is_new_or_the_training_failed(url: str) -> None:
    policy = ckpt.EverySteps(5) | ckpt.AtExit()
    with Checkpointer({"x": 1}, url, save=policy) as checkpointer:
        for step in range(1, 6):
            checkpointer.step(step)
    assert steps_of(url) == [5]
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer({"x": 1}, url, save=policy) as checkpointer,
    ):
        checkpointer.step(1)
        raise ZeroDivisionError
    assert steps_of(url) == [5]


def test_the_save_in_flight_is_finished_when_the_training_fails(url: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer({"x": 1}, url, save=ckpt.EverySteps(1)) as checkpointer,
    ):
        checkpointer.step(1)
        raise ZeroDivisionError
    assert steps_of(url) == [1]


@pytest.mark.parametrize("root", ["run", "./run", "file://run", Path("run")])
def test_a_relative_root_stays_where_it_was_after_a_chdir(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "data").mkdir()
    with Checkpointer({"x": torch.zeros(2)}, root, save=ckpt.EverySteps(1)) as saver:
        saver.step(1)
        saver.wait()
        monkeypatch.chdir(tmp_path / "data")
        saver.step(2)
    assert [one.step for one in ckpt.list_steps(tmp_path / "run")] == [1, 2]
    assert not list((tmp_path / "data").iterdir())
    ckpt.save({"x": torch.zeros(2)}, root, step=3)  # a call of now is for the directory of now
    assert [one.step for one in ckpt.list_steps(tmp_path / "data" / "run")] == [3]


def test_save_now_gives_the_save_to_wait_for(url: str) -> None:
    with Checkpointer({"x": 1}, url, save=ckpt.Never()) as checkpointer:
        checkpointer.step(3)
        assert checkpointer.save_now().result().step == 3
    assert steps_of(url) == [3]


def test_a_closed_checkpointer_says_so(url: str) -> None:
    checkpointer = Checkpointer({"x": 1}, url, save=ckpt.Never())
    checkpointer.close()
    checkpointer.close()
    for use in (checkpointer.restore, checkpointer.wait, lambda: checkpointer.step(1)):
        with pytest.raises(ckpt.CheckpointError, match="closed"):
            use()


def test_a_metric_that_is_no_number_costs_no_checkpoint(url: str) -> None:
    with Checkpointer({"x": 1}, url, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1, metric=float("nan"))
        checkpointer.step(2, metric=3)
    assert [info.metric for info in ckpt.list_steps(url)] == [None, 3.0]


def test_arguments_that_no_save_takes_are_refused_before_the_training(url: str) -> None:
    for bad in ({"snapshots": "now"}, {"step": 3}):
        with pytest.raises(TypeError, match=r"has no argument"):
            Checkpointer({"x": 1}, url, **bad)
    with pytest.raises(ValueError, match="when_busy"):
        Checkpointer({"x": 1}, url, when_busy="replace")  # type: ignore[arg-type]


def test_what_would_be_retired_can_be_asked_for(url: str) -> None:
    with Checkpointer({"x": 1}, url, save=ckpt.EverySteps(1)) as checkpointer:
        assert checkpointer.retention_plan() is None
        for step in range(1, 4):
            checkpointer.step(step)
        checkpointer.wait()
        plan = checkpointer.retention_plan()
        assert plan is not None and len(plan.keep) == 3 and not plan.retire


def test_a_save_that_is_due_beside_another_waits_or_is_skipped() -> None:
    """The store holds the first save until the training has gone on for some steps."""

    class Slow(Broken):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            assert go_on.wait(20)
            return self.inner.create(key, nbytes, **how)

    for when_busy, expected in (("skip", [1, 5]), ("wait", [1, 2, 3, 4, 5])):
        go_on = threading.Event()
        store = Slow(MemoryStore())
        with alone(store, {"x": 1}, ckpt.EverySteps(1), when_busy=when_busy) as checkpointer:
            begun = []
            for step in range(1, 5):
                if when_busy == "wait" and step == 2:
                    go_on.set()
                begun.append(checkpointer.step(step))
            go_on.set()
            checkpointer.wait()
            checkpointer.step(5)
        assert [entry.step for entry in live_entries(store)] == expected
        assert begun == [True, *[when_busy == "wait"] * 3]


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_save_is_logged_and_the_next_one_works_without_help(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Broken(MemoryStore())
    state = {"x": 1}
    with alone(store, state, ckpt.EverySteps(1)) as checkpointer:
        for step, refuses in ((1, False), (2, True), (3, True), (4, False)):
            store.refuses = refuses
            checkpointer.step(step)
            if refuses:
                with pytest.raises(StorageError, match="disk is full"):
                    checkpointer.wait()
            else:
                assert checkpointer.wait() is not None
        assert [failure.step for failure in checkpointer.failures] == [2, 3]
        saved = checkpointer.last_saved
        assert saved is not None and saved.step == 4
    assert [entry.step for entry in live_entries(store)] == [1, 4]
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "save of step 3 has failed, 2 in a row (StorageError)" in texts[-1]


def test_what_failed_saves_left_is_swept_after_the_next_commit() -> None:
    """Deleting fails as well, and an upload is left as by a rank that died."""

    class Stubborn(Broken):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            if self.refuses and key.endswith("MANIFEST"):
                left = self.inner.create(key.replace("MANIFEST", "rank9.safetensors"), 9, **how)
                left.__enter__()
                raise StorageError(f"create {key}: the disk is full")
            return self.inner.create(key, nbytes, **how)

        def delete(self, key: str) -> None:
            if self.refuses:
                raise StorageError(f"delete {key}: not now")
            self.inner.delete(key)

    uploads = UploadingStore(MemoryStore())
    store = Stubborn(uploads)
    with alone(store, {"x": torch.ones(10)}, ckpt.EverySteps(1)) as checkpointer:
        for step in (1, 2, 3, 4):
            store.refuses = step in (2, 3)
            checkpointer.step(step)
            checkpointer._saves.collect(wait=True)
            if step == 3:
                assert len({info.key.split("/")[1] for info in store.list("steps/")}) == 3
                assert len(uploads.uploads) == 2
        checkpointer.wait()
        live = {entry.prefix.split("/")[1] for entry in live_entries(store)}
        assert {info.key.split("/")[1] for info in store.list("steps/")} == live
        assert not uploads.uploads and len(live) == 2


def test_after_n_failures_in_a_row_the_training_hears_of_them() -> None:
    store = Broken(MemoryStore())
    with alone(
        store, {"x": 1}, ckpt.EverySteps(1), alarm=ckpt.Alarm(after=3, unsaved_seconds=0)
    ) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        store.refuses = True
        with pytest.raises(ckpt.errors.SavesFailed, match="3 saves in a row") as caught:
            for step in range(2, 20):
                checkpointer.step(step)
        assert [one.step for one in caught.value.failures] == [2, 3, 4]
        store.refuses = False
        checkpointer.step(21)
        saved = checkpointer.wait()
        assert saved is not None and saved.step == 21
        checkpointer.step(22)


def test_an_alarm_may_be_a_call_and_the_training_goes_on() -> None:
    store = Broken(MemoryStore())
    heard: list[tuple[Failure, ...]] = []
    alarm = ckpt.Alarm(after=2, unsaved_seconds=0, call=heard.append)
    with alone(store, {"x": 1}, ckpt.EverySteps(1), alarm=alarm) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        store.refuses = True
        for step in range(2, 7):
            checkpointer.step(step)
        store.refuses = False
        checkpointer.step(7)
        checkpointer.wait()
    assert [one.step for one in heard[0]] == [2, 3]
    assert all(len(failures) >= 2 for failures in heard)


@pytest.mark.parametrize("lasting", ["fenced", "invalid"])
def test_failures_that_do_not_go_away_are_raised_at_once(lasting: str) -> None:
    store = MemoryStore()
    state: dict[str, Any] = {"x": 1}
    with alone(store, state, ckpt.EverySteps(1), only=True) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        if lasting == "fenced":
            Session.claim(store, sources=NO_WAITING)
        else:
            state["x"] = object()
        with pytest.raises(Fenced if lasting == "fenced" else InvalidState):
            for step in range(2, 10):
                checkpointer.step(step)
        state["x"] = 1


def test_a_failure_at_the_end_is_raised_by_close() -> None:
    store = Broken(MemoryStore())
    checkpointer = alone(store, {"x": 1}, ckpt.AtExit())
    checkpointer.step(1)
    store.refuses = True
    with pytest.raises(StorageError, match="disk is full"):
        checkpointer.close()


def test_ranks_hear_of_an_alarm_at_the_same_step() -> None:
    """The store of one rank fails; all three raise the same, at the same step."""
    bytes_of_all = MemoryStore()
    stores = [Broken(bytes_of_all) for _ in range(3)]
    registry = SessionRegistry()

    def rank(world: World) -> tuple[int, str]:
        target = ThreadTarget(world, stores[world.rank], registry)
        state = state_at(0, world.rank, 3)
        reached = 0
        try:
            with Checkpointer(state, target, save=ckpt.EverySteps(2), alarm=ckpt.Alarm(2, 0)) as it:
                for step in range(1, 1000):
                    stores[2].refuses = step > 4
                    reached = step
                    it.step(step)
        except ckpt.errors.SavesFailed as failed:
            return reached, str(failed)
        raise AssertionError("no alarm")

    texts = run_ranks(3, rank)
    assert len(set(texts)) == 1, texts
    assert "rank 2 failed in phase 'write'" in texts[0][1]


@pytest.mark.parametrize("coordinators", [False, True])
def test_clocks_differ_and_the_coordinators_decides(coordinators: bool) -> None:
    def rank(world: World) -> bool:
        training = Training(ThreadTarget(world, MemoryStore(), SessionRegistry()), {}, world)
        return training.decided("due", coordinators == (world.rank == 0))

    assert run_ranks(3, rank) == [coordinators] * 3


# --- restoring ------------------------------------------------------------------------------------


def saved_steps(store: Store, *steps: int) -> None:
    with alone(store, {"x": torch.zeros(1000), "step": 0}, ckpt.EverySteps(1)) as checkpointer:
        for step in steps:
            state = checkpointer._training.state
            state["x"].fill_(step)
            state["step"] = step
            checkpointer.step(step)


def damage(store: Store, step: int, how: str) -> None:
    entry = next(entry for entry in live_entries(store) if entry.step == step)
    keys = [info.key for info in store.list(entry.prefix)]
    manifest = entry.prefix + "MANIFEST"
    data_file = next(key for key in keys if key.endswith(".safetensors"))
    key = manifest if "manifest" in how else data_file
    data = store.get(key)
    store.delete(key)
    if "missing" in how:
        return
    middle = len(data) // 2 if key == manifest else _data_start(data) + 2000  # in x
    data = data[:middle] if "short" in how else _flipped(data, middle)
    store.put_if_absent(key, data)


def _data_start(data: bytes) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + int.from_bytes(data[:8], "little")


def _flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "how",
    ["flipped", "short", "missing", "flipped manifest", "short manifest", "missing manifest"],
)
def test_a_damaged_checkpoint_is_passed_over_and_reported(how: str) -> None:
    store = MemoryStore()
    saved_steps(store, 1, 2, 3, 4)
    damage(store, 4, how)
    damage(store, 3, how)
    state = {"x": torch.full((1000,), -1.0), "step": -1}
    with alone(store, state, ckpt.EverySteps(1)) as checkpointer:
        report = checkpointer.restore()
        assert report is not None and report.step == state["step"] == 2
        assert torch.equal(state["x"], torch.full((1000,), 2.0))
        assert [one.step for one in report.skipped] == [4, 3]
        assert all(one.reason for one in report.skipped)
        checkpointer.step(3)
    assert [entry.step for entry in live_entries(store)] == [1, 2, 3, 4, 3]


@pytest.mark.usefixtures("quiet")
def test_a_checkpoint_that_is_retired_before_it_is_read_is_no_end() -> None:
    store = MemoryStore()
    saved_steps(store, 1)

    class Slow(WrappedStore):
        """Another job saves on, and retires what was listed, before it is read."""

        def get_bounded(self, key: str, nbytes_max: int) -> bytes:
            if key.endswith("MANIFEST") and not moved:
                moved.append(key)
                other = {"x": torch.full((1000,), -1.0), "step": -1}
                keep = ckpt.KeepLatest(1)
                with alone(self.inner, other, ckpt.EverySteps(1), keep=keep) as checkpointer:
                    checkpointer.restore()
                    other |= {"x": torch.full((1000,), 2.0), "step": 2}
                    checkpointer.step(2)
                assert [entry.step for entry in live_entries(self.inner)] == [2]
            return self.inner.get_bounded(key, nbytes_max)

    moved: list[str] = []
    state = {"x": torch.full((1000,), -1.0), "step": -1}
    with alone(Slow(store), state, ckpt.Never()) as checkpointer:
        report = checkpointer.restore()
    assert moved
    assert report is not None and report.step == state["step"] == 2
    assert torch.equal(state["x"], torch.full((1000,), 2.0))
    assert report.steps_lost == 0


@pytest.mark.usefixtures("quiet")
def test_when_none_is_whole_all_are_named() -> None:
    store = MemoryStore()
    saved_steps(store, 1, 2)
    damage(store, 1, "missing")
    damage(store, 2, "flipped")
    state = {"x": torch.zeros(1000), "step": 0}
    with (
        alone(store, state, ckpt.Never()) as checkpointer,
        pytest.raises(NoCheckpoint, match=r"(?s)step 2 .*step 1 .*ckpt salvage"),
    ):
        checkpointer.restore()


def test_an_empty_root_is_a_beginning_and_an_unknown_step_is_not() -> None:
    with alone(MemoryStore(), {"x": 1}, ckpt.Never()) as checkpointer:
        assert checkpointer.restore() is None
        with pytest.raises(NoCheckpoint):
            checkpointer.restore(7)


def test_a_step_that_was_saved_twice_is_restored_by_its_newest() -> None:
    store = MemoryStore()
    saved_steps(store, 1, 2)
    saved_steps(store, 1)
    newest = live_entries(store)[-1]
    state = {"x": torch.zeros(1000), "step": 0}
    with alone(store, state, ckpt.Never()) as checkpointer:
        report = checkpointer.restore(1)
        assert report is not None and report.attempt == newest.attempt


def test_another_state_is_no_damage() -> None:
    store = MemoryStore()
    saved_steps(store, 1, 2)
    state = {"y": torch.zeros(1000)}
    with alone(store, state, ckpt.Never()) as checkpointer, pytest.raises(Mismatch):
        checkpointer.restore()


@pytest.mark.usefixtures("quiet")
def test_a_store_that_fails_is_no_reason_to_go_back() -> None:
    """The newest checkpoint is whole, and reading fails: losing it silently would lose work."""

    class Unreadable(Broken):
        def get_into(self, key: str, start: int, buffers: Any) -> None:
            if self.refuses:
                raise StorageError(f"read {key}: the network is down")
            self.inner.get_into(key, start, buffers)

    store = Unreadable(MemoryStore())
    saved_steps(store, 1, 2)
    store.refuses = True
    state = {"x": torch.zeros(1000), "step": 0}
    with alone(store, state, ckpt.Never()) as checkpointer:
        with pytest.raises(LoadInterrupted, match="network is down"):
            checkpointer.restore()
        store.refuses = False
        report = checkpointer.restore()
        assert report is not None and report.step == 2 and not report.skipped


@pytest.mark.usefixtures("quiet")
def test_all_ranks_fall_back_to_the_same_checkpoint() -> None:
    """The damaged bytes are needed by one rank only."""
    store = MemoryStore()
    registry = SessionRegistry()

    def save(world: World) -> None:
        state = state_at(0, world.rank, 3)
        target = ThreadTarget(world, store, registry)
        with Checkpointer(state, target, save=ckpt.EverySteps(1)) as checkpointer:
            for step in (1, 2):
                newer = state_at(step, world.rank, 3)
                for name in ("rows", "runs"):
                    state[name].local.data.copy_(newer[name].local.data)
                state["replica"].copy_(newer["replica"])
                state["step"] = step
                checkpointer.step(step)

    run_ranks(3, save)
    entry = live_entries(store)[-1]
    key = next(i.key for i in store.list(entry.prefix) if "rank00001" in i.key)
    data = store.get(key)
    store.delete(key)
    # Rows and runs of one rank lie in its own file.
    store.put_if_absent(key, _flipped(data, _data_start(data)))

    def restore(world: World) -> tuple[int, tuple[int, ...]]:
        state = state_at(0, world.rank, 3)
        with Checkpointer(state, ThreadTarget(world, store, registry), save=ckpt.Never()) as it:
            report = it.restore()
        assert report is not None
        assert_is_step(state, report.step, world.rank, 3)
        return report.step, tuple(one.step for one in report.skipped)

    assert run_ranks(3, restore) == [(1, (2,))] * 3


def test_corrupt_is_still_what_a_plain_load_says(url: str) -> None:
    ckpt.save({"x": torch.zeros(1000)}, url, step=1)
    damage(open_store(url), 1, "flipped manifest")
    with pytest.raises(Corrupt):
        ckpt.load({"x": torch.zeros(1000)}, url)


def test_policies_count_on_from_the_step_that_was_restored(url: str) -> None:
    with Checkpointer({"x": 1}, url, save=ckpt.EverySteps(5)) as checkpointer:
        for step in range(1, 8):
            checkpointer.step(step)
    with Checkpointer({"x": 1}, url, save=ckpt.EverySteps(5)) as checkpointer:
        report = checkpointer.restore()
        assert report is not None
        begun = [step for step in range(report.step + 1, 12) if checkpointer.step(step)]
    assert begun == [10]


def test_a_save_that_fails_by_a_timeout_of_its_own_is_a_failure_like_others() -> None:
    class TimesOut(Broken):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            if self.refuses:
                raise TimeoutError(f"create {key}: timed out")
            return self.inner.create(key, nbytes, **how)

    store = TimesOut(MemoryStore())
    with alone(store, {"x": 1}, ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        store.refuses = True
        checkpointer.step(2)
        with pytest.raises(TimeoutError, match="timed out"):
            checkpointer.wait()
        store.refuses = False
        checkpointer.step(3)
    assert [failure.step for failure in checkpointer.failures] == [2]
    assert [entry.step for entry in live_entries(store)] == [1, 3]


def test_steps_may_be_integers_of_numpy_and_torch_and_nothing_else(url: str) -> None:
    with Checkpointer({"t": torch.ones(2)}, url, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(np.int64(1), metric=torch.tensor(0.5, requires_grad=True))
        checkpointer.step(torch.tensor(2), metric="no number")
        for bad in (1.5, -1, True, "3", None):
            with pytest.raises(InvalidArgument, match="step="):
                checkpointer.step(bad)
    assert steps_of(url) == [1, 2]
    assert [entry.metric for entry in live_entries(open_store(url))] == [0.5, None]


# --- the start ------------------------------------------------------------------------------------


def test_a_training_starts_from_another_place_until_it_has_saved(url: str, tmp_path: Path) -> None:
    place = tmp_path / "start.safetensors"
    save_file({"model.weight": torch.full((2, 2), 3.0)}, place)

    def started(training: str, value: float | None) -> Checkpointer:
        state = {"model": {"weight": torch.zeros(2, 2)}}
        checkpointer = Checkpointer(state, training, save=ckpt.EverySteps(1))
        report = checkpointer.restore(from_=place)
        assert report is not None
        assert (report.origin == "elsewhere", report.step) == (
            value == 3.0,
            0 if value == 3.0 else 1,
        )
        assert torch.equal(state["model"]["weight"], torch.full((2, 2), value))
        state["model"]["weight"].fill_(4.0)
        return checkpointer

    with started(url, 3.0):
        pass  # ends before its first save
    with started(url, 3.0) as checkpointer:
        assert next(checkpointer.steps(1)) == 1
        checkpointer.step(1)
    place.unlink()
    with started(url, 4.0) as checkpointer, pytest.raises(InvalidArgument, match="from_="):
        checkpointer.restore(1, from_=place)


def test_a_start_has_arguments_of_load_and_goes_on_counting(url: str) -> None:
    ckpt.save({"net": torch.ones(3), "more": 1}, f"{url} before", step=7)
    state = {"model": torch.zeros(3)}
    with Checkpointer(state, url, save=ckpt.AtExit()) as checkpointer:
        with pytest.raises(NoCheckpoint):
            checkpointer.restore(from_=f"{url} nowhere")
        how = {"rename": {"model": "net"}, "strict": "state"}
        checkpointer.restore(from_=f"{url} before", from_options=how)
        assert state["model"].tolist() == [1.0] * 3
        assert [*checkpointer.steps(8)] == [8]
    assert steps_of(url) == [8]
