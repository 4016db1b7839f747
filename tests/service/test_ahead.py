"""The memory of the first save is there when the save begins, and nobody has it who never saves.

Method: page faults of the thread that calls `step`, as the kernel counts them, with the memory made
ahead and without; buffers that are free, counted, when the training ends, saves or forks first.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.layout.plain import Ranks
from ckpt.process import GroupContext, this_process
from ckpt.saving.background import Preparation
from ckpt.saving.image import Staging, WritePath
from ckpt.saving.staging import buffers_for
from ckpt.service.target import UrlTarget

MIB = 1 << 20
NBYTES = 40 * MIB
PART = 8 * MIB

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="faults of one thread")


@pytest.fixture
def context() -> Iterator[GroupContext]:
    """This process's, as if it had saved nothing yet."""
    context = this_process.of_group(None)
    context.background.wait()
    context.staging.keep(0)
    yield context
    context.background.wait()
    context.staging.keep(0)


def _state() -> dict[str, Any]:
    return {"t": torch.ones(NBYTES // 4)}


def _is_over(context: GroupContext) -> bool:
    return context.background._preparation.is_over.wait(60)


def _faults(checkpointer: ckpt.Checkpointer, step: int) -> int:
    """Pages that this thread had to wait for in a call of `step` that begins a save."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert checkpointer.step(step)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@linux_only
def test_the_first_save_copies_into_memory_that_is_there(
    tmp_path: Path, context: GroupContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = NBYTES // os.sysconf("SC_PAGE_SIZE")
    # What a process does only once is done.
    ckpt.async_save({"x": torch.ones(1)}, tmp_path / "other", step=1).result()
    with ckpt.Checkpointer(_state(), tmp_path / "a", save=ckpt.EverySteps(3)) as checkpointer:
        checkpointer.step(1)
        assert _is_over(context)
        checkpointer.step(2)
        ahead = _faults(checkpointer, 3)
        assert ahead < pages / 8
    with ckpt.open(tmp_path / "a", 3) as stored:
        assert torch.equal(stored["t"], _state()["t"])

    context.staging.keep(0)
    monkeypatch.setattr(UrlTarget, "make_ready", lambda *_: lambda: None)
    with ckpt.Checkpointer(_state(), tmp_path / "b", save=ckpt.EverySteps(2)) as checkpointer:
        checkpointer.step(1)
        without = _faults(checkpointer, 2)
    print(f"{pages} pages: {ahead} faults, {without} without")


@pytest.mark.parametrize(
    ("save", "is_made"),
    [
        (ckpt.EverySteps(100), True),
        (ckpt.EverySeconds(1e9) | ckpt.AtExit(), True),
        (ckpt.EverySteps(1), False),  # the first step is saved
        (ckpt.OnSignal() | ckpt.OnPreemption(), False),
        (ckpt.OnSignal() & ckpt.EverySteps(100), False),
    ],
    ids=["steps", "seconds", "at once", "rare", "both"],
)
def test_memory_is_made_where_saves_are_regular_and_given_back_where_none_came(
    tmp_path: Path, context: GroupContext, save: Any, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr("ckpt.saving.image.touch", lambda buffer: made.append(len(buffer)))
    checkpointer = ckpt.Checkpointer(_state(), tmp_path, save=save)
    for step in (1, 2, 3):
        checkpointer.step(step)
        if is_made:
            assert _is_over(context)
    assert made == ([PART] * (NBYTES // PART + 1) if is_made else [])
    checkpointer._abandon(ZeroDivisionError())  # ends without a save at exit
    context.background.wait()
    assert not is_made or not context.staging._free


def test_a_checkpointer_that_closes_stops_what_is_being_made(
    tmp_path: Path, context: GroupContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def closing(buffer: memoryview) -> None:
        made.append(len(buffer))
        if len(made) == 2:
            context.background._preparation.stop()

    monkeypatch.setattr("ckpt.saving.image.touch", closing)
    with ckpt.Checkpointer(_state(), tmp_path, save=ckpt.EverySteps(100)) as checkpointer:
        checkpointer.step(1)
        assert _is_over(context)
        assert len(made) == 2
        assert not context.staging._free
    stop: list[Any] = []
    monkeypatch.setattr(UrlTarget, "make_ready", lambda *_: lambda: stop.append(1))
    with ckpt.Checkpointer(_state(), tmp_path, save=ckpt.EverySteps(100)) as checkpointer:
        checkpointer.step(1)
        assert not stop
    assert stop


def test_a_save_takes_what_is_ready_and_stops_the_rest(
    tmp_path: Path, context: GroupContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_now` comes when two buffers are made. Then the worker is free for the save."""
    monkeypatch.setattr("ckpt.saving.image.touch", lambda buffer: None)
    need = buffers_for(_state(), Ranks.alone(), WritePath(), None)
    half = need._replace(number=2)
    preparation = context.background.make_ready(context.staging, half)
    assert preparation.is_over.wait(60)
    ready = {id(buffer.obj) for buffer in context.staging._free}
    assert len(ready) == 2
    report = ckpt.async_save(_state(), tmp_path, step=1).result()
    assert report.step == 1
    assert preparation.is_stopped.is_set()
    kept = {id(buffer.obj) for buffer in context.staging._free}
    assert ready < kept and len(kept) == need.number
    preparation.stop()  # a save has begun since: they are its own now
    assert len(context.staging._free) == need.number


def test_what_a_save_takes_is_known_before() -> None:
    state, path, alone = _state(), WritePath(), Ranks.alone()
    assert buffers_for(state, alone, path, None) == (PART, NBYTES // PART + 1, False)
    assert buffers_for(state, alone, path, 20 * MIB).number == 2
    assert buffers_for({"t": torch.ones(10)}, alone, path, None).number == 0
    # Replicas are copied once by all of their holders together.
    module = torch.nn.Linear(1, NBYTES // 4, bias=False)
    assert buffers_for({"m": module}, alone, path, None).number == NBYTES // PART + 1


def test_buffers_of_another_size_are_left_alone() -> None:
    staging = Staging()
    staging.give_back(staging.take(100, pinned=False))
    stopped = False

    def is_stopped() -> bool:
        return stopped

    staging.make(200, 3, pinned=False, is_stopped=is_stopped)
    assert [len(buffer) for buffer in staging._free] == [200] * 3
    stopped = True
    staging.make(100, 3, pinned=False, is_stopped=is_stopped)
    assert [len(buffer) for buffer in staging._free] == [200] * 3


def test_memory_that_cannot_be_had_is_left_to_the_save(
    context: GroupContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(nbytes: int, *, pinned: bool) -> memoryview:
        raise MemoryError("planted")

    monkeypatch.setattr("ckpt.saving.image.staging_buffer", refused)
    need = buffers_for(_state(), Ranks.alone(), WritePath(), None)
    with caplog.at_level("INFO"):
        assert context.background.make_ready(context.staging, need).is_over.wait(60)
    assert "planted" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_saves_and_the_parent_goes_on(
    tmp_path: Path, context: GroupContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork happens in the worker's way: one buffer is made, the lock of the others is held."""
    need = buffers_for(_state(), Ranks.alone(), WritePath(), None)
    preparation = context.background.make_ready(context.staging, need)
    with context.staging._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(120)  # ends a child that waits for a lock for ever
            code = 1
            try:
                context.staging.give_back(context.staging.take(PART, pinned=False))
                ckpt.async_save(_state(), tmp_path / "child", step=1).result(60)
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert preparation.is_over.wait(60)
    assert len(context.staging._free) == need.number
    assert isinstance(preparation, Preparation)
    ckpt.async_save(_state(), tmp_path / "parent", step=1).result(60)
