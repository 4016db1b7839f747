"""Readers of the latest checkpoint, while a writer saves and retires as fast as it can.

Method: a writer keeps one checkpoint only and deletes the others at once, so that readers lose what
they read all the time. A reader that loads the latest begins anew by itself when that happens; what
it gets is bit for bit one step. One that holds a checkpoint open gets an error, and opens again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.commit.session import SessionRegistry
from ckpt.errors import NoCheckpoint
from ckpt.loading.load import LoadOptions, load_state
from ckpt.loading.plan import ReadPath
from ckpt.world.base import SoloWorld
from storage import StorageError, Store, open_store
from storage.wrap import WrappedStore
from tests.conftest import Scale
from tests.results import Counted
from tests.service.chaos import ThreadTarget

NUMEL = 40_000  # four tensors of 160 kB: long enough to be retired in the middle of a read


def state_of(step: int) -> dict[str, Any]:
    return {**{f"t{index}": torch.full((NUMEL,), float(step)) for index in range(4)}, "step": step}


def is_of_one_step(state: dict[str, Any]) -> bool:
    expected = state_of(state["step"])
    return all(torch.equal(state[name], expected[name]) for name in ("t0", "t1", "t2", "t3"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


class RetiredWhileRead(WrappedStore):
    """Calls `retire` before the n-th ranged read of a data file, once for each number."""

    def __init__(self, inner: Store, reads: set[int], retire: Callable[[], None]) -> None:
        super().__init__(inner)
        self._retire_at, self._retire, self._reads = reads, retire, 0

    def get_into(self, key: str, start: int, buffers: Any) -> None:
        self._reads += 1
        if self._reads in self._retire_at:
            self._retire()
        self.inner.get_into(key, start, buffers)


def _writer_over(store: Store) -> Callable[[], None]:
    """A function that saves the next step and retires all before it."""
    state = state_of(0)
    target = ThreadTarget(SoloWorld(), store, SessionRegistry())
    checkpointer = ckpt.Checkpointer(
        state, target, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(1)
    )
    checkpointer.restore()

    def advance() -> None:
        state["step"] += 1
        for name in ("t0", "t1", "t2", "t3"):
            state[name].fill_(state["step"])
        checkpointer.step(state["step"])
        checkpointer.wait()

    return advance


@pytest.mark.parametrize("reads", [{1}, {2}, {3}, {1, 2, 3, 4, 5, 6, 7}])
def test_a_load_of_the_latest_begins_anew_when_it_is_retired(
    tmp_path: Path, reads: set[int]
) -> None:
    """On a disk, so that the files are really gone; reads are small, so that there are several."""
    advance = _writer_over(open_store(str(tmp_path)))
    advance()
    store = RetiredWhileRead(open_store(str(tmp_path)), reads, advance)
    state = state_of(-1)
    options = LoadOptions(path=ReadPath(request_nbytes_max=1 << 17))
    report = load_state(state, store=store, world=SoloWorld(), step=None, options=options)
    assert report.step == state["step"] == 1 + len(reads)
    assert is_of_one_step(state)


@pytest.mark.parametrize("asked_for", ["step", "attempt"])
def test_a_load_of_a_step_that_is_retired_says_so(tmp_path: Path, asked_for: str) -> None:
    """By its step or by its attempt: another one is never loaded in its place."""
    advance = _writer_over(open_store(str(tmp_path)))
    advance()
    store = RetiredWhileRead(open_store(str(tmp_path)), {1}, advance)
    (entry,) = live_entries(store)
    with pytest.raises(ckpt.errors.LoadInterrupted, match=r"Step 1 \(e\w*-\w*\) was retired"):
        load_state(
            state_of(-1),
            store=store,
            world=SoloWorld(),
            step=1 if asked_for == "step" else None,
            options=LoadOptions(),
            attempt=entry.attempt if asked_for == "attempt" else "",
        )


def test_a_load_that_cannot_begin_anew_does_not_say_that_the_state_is_as_it_was(
    tmp_path: Path,
) -> None:
    """The latest is retired half-way, and the next one turns out to be damaged."""
    reader = open_store(str(tmp_path))
    advance = _writer_over(reader)
    advance()

    def damage() -> None:
        advance()
        (tmp_path / live_entries(reader)[-1].prefix / "MANIFEST").write_bytes(b"damaged")

    state = state_of(-1)
    store = RetiredWhileRead(reader, {2}, damage)
    options = LoadOptions(path=ReadPath(request_nbytes_max=1 << 17))
    with pytest.raises(ckpt.errors.LoadInterrupted, match="MANIFEST"):
        load_state(state, store=store, world=SoloWorld(), step=None, options=options)
    with pytest.raises(ckpt.errors.LoadInterrupted):
        ckpt.save(state, str(tmp_path / "other"), step=1)


def _write(url: str, until: float) -> int:
    """Save and retire as fast as it goes; how many were saved."""
    advance, saved = _writer_over(open_store(url)), 0
    while time.monotonic() < until:
        advance()
        saved += 1
    return saved


def _read(url: str, until: float, stop: threading.Event) -> tuple[int, int]:
    """Load the latest again and again; loads, and how often the step moved on."""
    loads, steps = 0, set()
    store = open_store(url)
    while time.monotonic() < until and not stop.is_set():
        state = state_of(-1)
        load_state(state, store=store, world=SoloWorld(), step=None, options=LoadOptions())
        assert is_of_one_step(state), state["step"]
        loads += 1
        steps.add(state["step"])
    return loads, len(steps)


def _look(url: str, until: float, stop: threading.Event) -> tuple[int, int]:
    """Open the latest and read a tensor; looks, and how often it was gone by then."""
    looks = gone = 0
    while time.monotonic() < until and not stop.is_set():
        try:
            with ckpt.open(url) as opened:
                step = opened.values["step"]
                assert opened.step == step
                assert torch.equal(opened["t2"], torch.full((NUMEL,), float(step)))
            looks += 1
        except NoCheckpoint:
            gone += 1  # said clearly: whoever holds a checkpoint open opens the next one
    return looks, gone


@pytest.mark.ranks  # no processes, but 5 seconds by the clock: too long for `make quick`
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_readers_beside_a_writer_that_retires_at_once(
    tmp_path: Path, request: pytest.FixtureRequest, scale: Scale, counted: Counted, place: str
) -> None:
    seconds = scale.count(5, 600) / 2
    url = str(tmp_path) if place == "disk" else f"memory://{request.node.name}"
    until = time.monotonic() + seconds
    _writer_over(open_store(url))()
    stop = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(_read, url, until, stop) for _ in range(2)]
        looking = pool.submit(_look, url, until, stop)
        writing = pool.submit(_write, url, until)
        try:
            saved = writing.result()
            loads = [one.result() for one in reading]
            looks, gone = looking.result()
        finally:
            stop.set()
    counted(saves=saved, loads=sum(count for count, _ in loads), looks=looks)
    counted(looks_told_that_the_step_was_retired=gone)
    print(f"{place}: {dict(counted)}")
    assert saved > 2 and all(count > 1 and steps > 1 for count, steps in loads) and looks
    assert len(live_entries(open_store(url))) == 1


def test_a_store_error_of_a_reader_is_not_mistaken_for_retirement(tmp_path: Path) -> None:
    advance = _writer_over(open_store(str(tmp_path)))
    advance()

    def fail() -> None:
        raise StorageError("the disk is gone")

    store = RetiredWhileRead(open_store(str(tmp_path)), {1}, fail)
    with pytest.raises(ckpt.errors.LoadInterrupted, match="disk is gone"):
        load_state(state_of(-1), store=store, world=SoloWorld(), step=None, options=LoadOptions())
