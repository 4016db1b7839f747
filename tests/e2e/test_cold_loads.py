"""Loads of files that are not in memory, all of them or in part: which bytes are read how, counted.

Method: ranks as threads over local stores that say which ranges are cold, by a rule or by the
kernel, and note who reads what and how.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import api
from ckpt.api import read_path
from ckpt.errors import LoadInterrupted
from ckpt.loading import reader
from ckpt.loading.exchange import ShareLimits
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from ckpt.loading.reader import TRIED_REQUESTS
from ckpt.saving import image
from storage import ByteRange, StorageError
from storage.file_io import cached_nbytes, is_in_memory
from storage.local import LocalStore
from storage.memory import MemoryStore
from tests.e2e.job import Job, Sharded
from tests.thread_ranks import RanksFailed

pytestmark = pytest.mark.syncs  # what is not on the disk stays in the cache
MIB = 1 << 20
TENSORS = 12  # of 1 MiB

Rule = Callable[[str, ByteRange], bool]


class Noting(LocalStore):
    """A local store whose ranges are cold by a rule."""

    def __init__(self, root: str, rule: Rule) -> None:
        super().__init__(root)
        self.rule = rule
        self.asked = 0
        self.reads: list[tuple[ByteRange, bool, int]] = []  # range, whether direct, thread
        self.tables = 0  # reads of the checksums of a file alone
        self.before_direct: Callable[[], object] = lambda: None
        self.before_cached: Callable[[], object] = lambda: None

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        self.asked += 1
        return self.rule(key, byte_range)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if self._note(start, buffers, direct=False):
            self.before_cached()
        super().get_into(key, start, buffers)

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._note(start, buffers, direct=True)
        self.before_direct()
        super().get_direct_into(key, start, buffers)

    def _note(self, start: int, buffers: Sequence[memoryview], *, direct: bool) -> bool:
        """Whether these are bytes of tensors."""
        where = ByteRange(start, start + sum(buffer.nbytes for buffer in buffers))
        is_table = where.nbytes < 1024
        if is_table:
            self.tables += 1
        else:
            self.reads.append((where, direct, threading.get_ident()))
        return not is_table

    def nbytes(self, *, direct: bool) -> int:
        """Bytes that were read so."""
        return sum(where.nbytes for where, is_direct, _ in self.reads if is_direct == direct)


def _state(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"t{i:02d}": torch.full((MIB // 4,), i + 1.0) * scale for i in range(TENSORS)}


def _saved(root: Path) -> None:
    store = LocalStore(str(root))
    Job(1, lambda rank: store).save(lambda rank: _state(), step=1)


def _load(store: LocalStore, path: ReadPath) -> tuple[dict[str, Any], Any]:
    state = _state(0.0)
    report = Job(1, lambda rank: store).load(lambda rank: state, options=LoadOptions(path=path))
    return state, report[0]


def _is_right(state: dict[str, Any]) -> bool:
    return all(torch.equal(state[name], saved) for name, saved in _state().items())


AUTO = ReadPath(request_nbytes_max=MIB, direct_readers=4)


def test_of_a_file_that_is_partly_in_memory_the_rest_is_read_around_the_cache(
    tmp_path: Path,
) -> None:
    """Every third request is cold. The others are read by the thread that loads."""
    _saved(tmp_path)
    asked: list[int] = []

    def every_third(key: str, byte_range: ByteRange) -> bool:
        asked.append(byte_range.nbytes)
        return len(asked) % 3 == 0

    store = Noting(str(tmp_path), every_third)
    state, report = _load(store, AUTO)
    assert _is_right(state)
    assert store.asked == TENSORS
    cold = sum(asked[2::3])
    assert store.nbytes(direct=True) == report.counters["direct_bytes"] == cold
    assert store.nbytes(direct=False) == TENSORS * MIB - cold
    assert report.nbytes_read == TENSORS * MIB
    loading = {thread for _, direct, thread in store.reads if not direct}
    assert len(loading) == 1
    assert not loading & {thread for _, direct, thread in store.reads if direct}


@pytest.mark.parametrize(
    ("path", "asked", "direct"),
    [
        (ReadPath(request_nbytes_max=MIB), 0, 0),
        (AUTO, TENSORS, TENSORS),
        (ReadPath(MIB, direct_readers=4, direct_nbytes_min=TENSORS * MIB), TENSORS, TENSORS),
        (ReadPath(MIB, direct_readers=4, direct_nbytes_min=TENSORS * MIB + 1), 0, 0),
        (ReadPath(MIB, direct_readers=4, direct_always=True), 0, TENSORS),
    ],
    ids=["buffered", "auto", "enough", "little", "direct"],
)
def test_which_loads_go_around_the_cache(
    tmp_path: Path, path: ReadPath, asked: int, direct: int
) -> None:
    _saved(tmp_path)
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    state, _ = _load(store, path)
    assert _is_right(state)
    assert (store.asked, store.nbytes(direct=True)) == (asked, direct * MIB)
    assert len(store.reads) == TENSORS and store.tables == 1


@pytest.mark.parametrize("stalled", [TRIED_REQUESTS, 2 * TRIED_REQUESTS])
@pytest.mark.parametrize("faster", ["around", "through"])
def test_the_first_cold_requests_show_the_faster_way(
    tmp_path: Path, faster: str, stalled: int
) -> None:
    """Some go around the page cache, some through it, in two rows of which one stalls, and all
    others the way without a delay.
    """
    count, nbytes = 8 * TRIED_REQUESTS + 5, 4096
    state = {f"t{i:02d}": torch.full((nbytes // 4,), i + 1.0) for i in range(count)}
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    Job(1, lambda rank: store).save(lambda rank: state, step=1)
    slow = partial(time.sleep, 0.02)

    def stall() -> None:
        if len(store.reads) - 1 in range(stalled, stalled + TRIED_REQUESTS):
            time.sleep(0.1)

    store.before_direct, store.before_cached = (
        (lambda: None, slow) if faster == "around" else (slow, stall)
    )
    path = replace(AUTO, request_nbytes_max=nbytes, through_share_max=0.5)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    report = Job(1, lambda rank: store).load(lambda rank: loaded, options=LoadOptions(path=path))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    ways = [direct for _, direct, _ in store.reads]
    tried = [True] * TRIED_REQUESTS + [False] * 2 * TRIED_REQUESTS
    assert ways[: len(tried)] == tried
    assert ways[len(tried) :] == [faster == "around"] * (count - len(tried))
    assert report[0].counters["direct_bytes"] == sum(ways) * nbytes
    if faster == "through":
        assert len({thread for _, _, thread in store.reads[len(tried) :]}) == 1


def test_a_cold_load_that_is_too_short_for_a_trial_goes_through_the_cache(tmp_path: Path) -> None:
    count, nbytes = 8 * TRIED_REQUESTS - 1, 4096
    state = {f"t{i:02d}": torch.full((nbytes // 4,), i + 1.0) for i in range(count)}
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    Job(1, lambda rank: store).save(lambda rank: state, step=1)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    path = replace(AUTO, request_nbytes_max=nbytes, through_share_max=0.5, cached_readers=4)
    Job(1, lambda rank: store).load(lambda rank: loaded, options=LoadOptions(path=path))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert [direct for _, direct, _ in store.reads] == [False] * count
    assert len({thread for _, _, thread in store.reads}) == 1  # in a row


@pytest.mark.parametrize("own", [0, 1])
def test_little_of_its_own_does_not_decide_how_a_rank_reads_what_is_shared(
    tmp_path: Path, own: int
) -> None:
    """Two ranks share the rest of what would be enough for a trial."""
    count, nbytes = 24 * TRIED_REQUESTS, 4096
    full = {f"t{i:02d}": torch.full((nbytes // 4,), i + 1.0) for i in range(count)}
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    Job(1, lambda rank: store).save(lambda rank: full, step=1)
    wanted = [[name for i, name in enumerate(full) if i >= 2 * own or i == r] for r in range(2)]
    states = [{name: torch.zeros_like(full[name]) for name in names} for names in wanted]
    path = replace(AUTO, request_nbytes_max=nbytes, through_share_max=0.5)
    options = LoadOptions(path=path, sharing=ShareLimits(nbytes, nbytes, repeated_nbytes_max=0))
    Job(2, lambda rank: store).load(states.__getitem__, options=options)
    for state in states:
        assert all(torch.equal(tensor, full[name]) for name, tensor in state.items())
    assert len(store.reads) == count and all(direct for _, direct, _ in store.reads)


@pytest.mark.parametrize("cold", [3, 1, TENSORS - 1])
def test_what_memory_lacks_of_a_file_is_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: int
) -> None:
    """Some requests are cold: so few that all go through the cache, or nearly all, which do not."""
    _saved(tmp_path)
    monkeypatch.setattr(reader, "TRIED_REQUESTS", 1)
    asked: list[int] = []

    def first_ones(key: str, byte_range: ByteRange) -> bool:
        asked.append(byte_range.nbytes)
        return len(asked) <= cold

    store = Noting(str(tmp_path), first_ones)
    store.before_cached = partial(time.sleep, 0.02)
    state, _ = _load(store, replace(AUTO, through_share_max=0.5))
    assert _is_right(state)
    assert len(store.reads) == TENSORS
    # Two go through the cache, to see how fast that is.
    expected = TENSORS - 1 - 2 if cold == TENSORS - 1 else 0
    assert store.nbytes(direct=True) == expected * MIB


@pytest.mark.parametrize("left", [0, 10 * TENSORS * MIB - 1])
def test_cold_loads_go_around_the_cache_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    _saved(tmp_path)
    monkeypatch.setattr(reader, "memory_left", lambda: left)
    monkeypatch.setattr(reader, "TRIED_REQUESTS", 1)
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    _load(store, replace(AUTO, through_share_max=0.1))
    assert store.nbytes(direct=True) == TENSORS * MIB


def test_cold_requests_are_in_flight_together(tmp_path: Path) -> None:
    """Four wait for each other in the store: with fewer in flight, nobody would come."""
    _saved(tmp_path)
    store = Noting(str(tmp_path), lambda key, byte_range: True)
    together = threading.Barrier(4)
    store.before_direct = lambda: together.wait(60)
    state, _ = _load(store, AUTO)
    assert _is_right(state)
    assert len({thread for _, _, thread in store.reads}) <= 4


def test_after_a_cold_read_has_failed_the_rest_is_not_read(tmp_path: Path) -> None:
    _saved(tmp_path)
    store = Noting(str(tmp_path), lambda key, byte_range: True)

    def fail() -> None:
        if len(store.reads) > 1:
            time.sleep(1.0)  # eleven of these, for the error to be heard, on any machine
        raise StorageError("planted")

    store.before_direct = fail
    with pytest.raises(RanksFailed) as caught:
        _load(store, ReadPath(MIB, direct_readers=1))
    assert isinstance(caught.value.errors[0], LoadInterrupted)
    assert "planted" in str(caught.value.errors[0])
    assert len(store.reads) < TENSORS


def test_shared_and_sharded_blocks_are_read_around_the_cache_once(tmp_path: Path) -> None:
    """Two ranks load a replica and their halves of a tensor; all is cold."""
    full = torch.arange(2.0 * MIB).reshape(2048, 1024)

    def state(rank: int, scale: float) -> dict[str, Any]:
        return {"sharded": Sharded(full * scale, rank, 2), "replica": full * scale}

    stores = [Noting(str(tmp_path), lambda key, byte_range: True) for _ in range(2)]
    job = Job(2, stores.__getitem__)
    job.save(lambda rank: state(rank, 1.0), step=1)
    states = [state(rank, 0.0) for rank in range(2)]
    reports = job.load(states.__getitem__, options=LoadOptions(path=AUTO))
    for rank in range(2):
        assert torch.equal(states[rank]["replica"], full)
        assert torch.equal(states[rank]["sharded"].local, state(rank, 1.0)["sharded"].local)
    read = [store.nbytes(direct=True) for store in stores]
    assert sum(read) == 2 * full.nbytes and min(read) > 0
    assert read == [report.counters["direct_bytes"] for report in reports]


def test_cached_requests_are_copied_by_several_threads(tmp_path: Path) -> None:
    """Two wait for each other in the store: with one thread, nobody would come."""
    _saved(tmp_path)
    store = Noting(str(tmp_path), lambda key, byte_range: False)
    together = threading.Barrier(2)
    store.before_cached = lambda: together.wait(60)
    state, _ = _load(store, replace(AUTO, cached_readers=2))
    assert _is_right(state)
    assert store.nbytes(direct=False) == TENSORS * MIB
    assert len({thread for _, _, thread in store.reads}) <= 4


@pytest.mark.parametrize(
    ("cores", "ranks", "readers"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (64, 8, 4), (2, 0, 1)]
)
def test_memory_is_read_by_threads_that_have_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, ranks: int, readers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    path = read_path(LocalStore(str(tmp_path)), world_size=ranks)
    assert path.cached_readers == readers


@pytest.mark.parametrize(
    ("io", "left", "is_direct"),
    [
        ("auto", 0, True),
        ("auto", 8 * 16 * MIB - 1, True),
        ("auto", 8 * 16 * MIB, False),
        ("buffered", 0, False),
        ("direct", 1 << 40, True),
    ],
)
def test_a_load_with_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: Any, left: int, is_direct: bool
) -> None:
    """16 MiB that the save has written around the cache are not in it after the load, unless it
    went through it: where memory is left for eight of them, too short for a trial of both ways."""
    monkeypatch.setattr(reader, "memory_left", lambda: left)
    state = {"t": torch.arange(16 * MIB // 8)}
    ckpt.save(state, tmp_path, step=1, io="direct")
    (data,) = tmp_path.rglob("*.safetensors")
    if _cached(data) > MIB:
        pytest.skip("this filesystem keeps its files in memory")
    loaded = {"t": torch.zeros(16 * MIB // 8, dtype=torch.int64)}
    report = ckpt.load(loaded, tmp_path, io=io)
    assert torch.equal(loaded["t"], state["t"])
    assert report.counters["direct_bytes"] == (state["t"].nbytes if is_direct else 0)
    # The end of the file, with its checksums, may be in memory.
    assert (_cached(data) < MIB) == is_direct
    with pytest.raises(ValueError, match="io='fast'"):
        ckpt.load(loaded, tmp_path, io="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "io", "is_cached"),
    [
        (8 * 17 * MIB, "auto", True),
        (8 * 16 * MIB - 1, "auto", False),
        (0, "auto", False),
        (0, "buffered", True),
        (1 << 40, "direct", False),
    ],
)
def test_a_load_finds_what_was_just_saved_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, io: Any, is_cached: bool
) -> None:
    """Where memory is left for eight saves; nothing is written into the cache where it is short."""
    monkeypatch.setattr(image, "memory_left", lambda: left)
    monkeypatch.setattr(reader, "memory_left", lambda: 0)
    state = {"t": torch.arange(16 * MIB // 8)}
    ckpt.save(state, tmp_path, step=1, io=io)
    (data,) = tmp_path.rglob("*.safetensors")
    if not is_cached and _cached(data) > MIB:
        pytest.skip("this filesystem keeps its files in memory")
    loaded = {"t": torch.zeros_like(state["t"])}
    report = ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["t"], state["t"])
    assert report.counters["direct_bytes"] == (0 if is_cached else state["t"].nbytes)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (2, 8), (3, 12), (8, 32)])
def test_ranks_share_what_they_leave_in_memory(ranks: int, expected: int) -> None:
    path = api.write_path("auto", MemoryStore(), image.Staging(), cached_ranks=ranks)
    assert path.cached_share_max == 1 / expected
    for other in (
        api.write_path("auto", MemoryStore(), image.Staging()),
        api.write_path("direct", MemoryStore(), image.Staging(), cached_ranks=ranks),
    ):
        assert other.cached_share_max == 0


def test_saves_in_the_background_leave_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "memory_left", lambda: 1 << 40)
    ckpt.async_save({"t": torch.arange(16 * MIB // 8)}, tmp_path, step=1).result()
    (data,) = tmp_path.rglob("*.safetensors")
    if is_in_memory(str(tmp_path)):
        pytest.skip("this filesystem keeps its files in memory")
    assert _cached(data) < MIB


def test_a_checkpointer_reads_as_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"t": torch.ones(8)}
    ckpt.save(state, tmp_path, step=1)
    passed: list[str] = []
    real = ckpt.api.load

    def load(*args: Any, io: str, **kwargs: Any) -> Any:
        passed.append(io)
        return real(*args, io=io, **kwargs)

    monkeypatch.setattr(ckpt.api, "load", load)
    for io in ("buffered", "auto"):
        with ckpt.Checkpointer(state, tmp_path, io=io) as checkpointer:  # type: ignore[arg-type]
            checkpointer.restore()
    assert passed == ["buffered", "auto"]


def _cached(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return cached_nbytes(fd, 0, path.stat().st_size)
    finally:
        os.close(fd)
