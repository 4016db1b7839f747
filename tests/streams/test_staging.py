"""A save in the background copies under forward and backward, and holds the step back until it has.

Method: the library's own staging, step gate and worker, on the simulated device. The worker is a
thread of the host, in no order with the training but by the gate's event; it begins when the
training waits for it, as late as it may. Staged memory is pinned memory of the simulation, beside
which the real bytes that are written say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ckpt.format.object_parts as object_parts
import ckpt.saving.image as image
import ckpt.saving.plan as plan
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.saving.background import Background
from ckpt.saving.image import Staging
from ckpt.saving.staging import Staged, stage
from ckpt.saving.step_gate import steps
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.world.base import SoloWorld
from storage.memory import MemoryStore
from storage.ranges import address_of, aligned_buffer
from tests.e2e.job import NO_WAITING
from tests.ranks import run_ranks
from tests.streams.clocks import Agent, Moment
from tests.streams.device import NAME, Stream, using
from tests.streams.groups import world
from tests.streams.mutants import GATE, SAVES, applied, copy_mutants, mutants
from tests.streams.simulation import simulated
from tests.streams.test_saves import in_a_thread

COPIES = ("ckpt.saving.plan:copy_elements",)


class Worker:
    """Stands for the pool of one thread: what is submitted runs when somebody waits for it."""

    def __init__(self) -> None:
        self._agent = Agent("the worker")
        self._job: Callable[[], Any] = lambda: None

    def submit(self, fn: Callable[..., Any], *args: Any) -> None:
        self._agent.learn(using().host.moment())
        self._job = partial(fn, *args)

    def run(self) -> None:
        job, self._job = self._job, lambda: None
        with using().on_thread(self._agent):
            in_a_thread(job)


class Opened:
    """Stands for the event of a gate, and orders the threads that use it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._moments: list[Moment] = []

    def is_set(self) -> bool:
        for moment in self._moments:
            using().host.learn(moment)
        return bool(self._moments)

    def set(self) -> None:
        self._moments.append(using().host.moment())

    def wait(self, timeout: float | None = None) -> bool:
        self._worker.run()
        assert self.is_set(), "the step waits for ever"
        return True


class StagedMemory:
    """Pinned memory of the simulation for each buffer of a stage."""

    def __init__(self) -> None:
        self._pinned: list[tuple[int, torch.Tensor]] = []

    def take(self, nbytes: int, *, pinned: bool) -> memoryview:
        assert pinned, "memory that is not pinned makes the host wait"
        buffer = aligned_buffer(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._pinned.append((address_of(buffer), memory))
        return buffer

    def behind(self, buffer: memoryview) -> torch.Tensor:
        address = address_of(buffer)
        for start, memory in self._pinned:
            if start <= address < start + memory.numel():
                return memory[address - start : address - start + len(buffer)]
        raise AssertionError("bytes that no stage has")

    def over(self, buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self.behind(buffer).view(dtype).view(shape)


class Net(nn.Module):
    """Its buffer changes in every forward, so that it is copied before the call of a save returns:
    by a copy that the host waits for, and with it for all that was queued. Unless it is not saved.
    """

    def __init__(self, *, saves_all: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("count", torch.ones(16), persistent=saves_all)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.layer(x) * self.count.clone()


def training(*, saves_all: bool) -> list[int]:
    """Saves under forward and backward, twice; returns the bytes that were copied late."""
    worker, solo, store = Worker(), SoloWorld(), MemoryStore()
    session = open_session(solo, store, SessionRegistry(), sources=NO_WAITING)
    background: Any = Background(solo)
    background._pool = worker
    parts, staging, late = PartMemory(), Staging(), []
    with torch.device(NAME):
        model = Net(saves_all=saves_all)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def forward_and_backward() -> None:
        model(torch.ones(4, 16, device=NAME)).sum().backward()

    def begin(task: SaveTask) -> Staged:
        staged = stage({"model": model, "optim": optimizer}, task, staging)
        if not staged.gate.opened.is_set():
            gate: Any = staged.gate
            gate.opened = Opened(worker)
        late.append(staged.nbytes_later)
        return staged

    steps.watch()
    for step in range(2):
        forward_and_backward()
        optimizer.step()
        task = SaveTask(session, store, parts, step, SaveOptions())
        pending = background.start(task, partial(begin, task))
        optimizer.zero_grad()
        forward_and_backward()
        optimizer.step()
        worker.run()
        pending.result(60)
    return late


def run() -> list[str]:
    memory = StagedMemory()
    buffers: Any = image
    copies: Any = plan
    files: Any = object_parts
    buffers.staging_buffer, copies.tensor_over = memory.take, memory.over
    complete = object_parts.DataFileBuilder.complete

    def read_and_complete(self: Any, start: int, buffer: memoryview) -> Any:
        memory.behind(buffer).sum()  # by the host, which writes it
        return complete(self, start, buffer)

    files.DataFileBuilder.complete = read_and_complete
    problems = []
    with world(1), simulated() as device:
        try:
            with Stream(name="the training"):
                late = [*training(saves_all=True), *training(saves_all=False)]
            if not all(late):
                problems.append(f"nothing was copied late: {late}")
        except Exception as error:  # a mutant may show in the library's own checks
            problems.append(f"{type(error).__name__}: {error}")
        finally:
            files.DataFileBuilder.complete = complete
            steps.forked()  # gates that a mutant has never opened
        device.end()
        return [*map(str, device.findings), *problems]


def run_all() -> tuple[list[str], dict[str, list[str]]]:
    """What is reported as it is, and with one wait, event or order less."""
    clean = run()
    left_out = [one for one in mutants(SAVES, *GATE) if not one.call.startswith("module.")]
    without = {}
    for one in [*left_out, *copy_mutants(*COPIES)]:
        with applied(one):
            without[str(one)] = run()
    return clean, without


@pytest.mark.ranks
def test_a_step_waits_for_the_copy_of_what_it_changes_and_nothing_else_does() -> None:
    ((clean, without),) = run_ranks(1, run_all, group=False, timeout_seconds=170)
    assert clean == []
    assert len(without) == 8, list(without)
    assert all(without.values()), [name for name, texts in without.items() if not texts]
