"""How many bytes saves write and loads read, counted at the store: never more than needed.

Method: ranks as threads over a counting store, tensors of some MiB held along dim 0, along dim 1 or
as runs of elements; the layouts at save and load differ. Bytes are compared with the unique bytes
of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpt.loading.reader
from ckpt.layout.memory import staging_buffer
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import whole
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from ckpt.saving.image import WritePath
from ckpt.saving.task import SaveOptions
from storage import open_store
from tests.e2e.job import Job, Sharded
from tests.stores import CountingStore

pytestmark = pytest.mark.long

MIB = 1 << 20
SHAPE = (2048, 1536)  # 12 MiB of float32


class Replicated(nn.Module):
    """A tensor that the engine keeps equal on `holders`, as DDP does."""

    def __init__(self, full: torch.Tensor, holders: tuple[int, ...]) -> None:
        super().__init__()
        self.local = nn.Parameter(full.clone(), requires_grad=False)
        self.holders = holders

    def __ckpt_pieces__(self) -> list[Owned]:
        local = self.local.detach()
        shape = tuple(local.shape)
        piece = Piece("tensor", shape, local.dtype, whole(shape), whole(shape), self.holders)
        return [Owned(self.local, local, (View((piece,)),), True)]


def _tensor(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def _state(size: int, dim: int | None, blank: bool = False) -> Callable[[int], Any]:
    def state_of(rank: int) -> dict[str, nn.Module]:
        scale = 0.0 if blank else 1.0
        return {f"t{i}": Sharded(_tensor(i) * scale, rank, size, dim=dim) for i in range(3)}

    return state_of


def _counting(name: str) -> CountingStore:
    return CountingStore(open_store(f"memory://{name}"))


@pytest.mark.parametrize("dim", [0, 1, None], ids=["rows", "columns", "runs"])
def test_a_save_writes_every_byte_once(request: pytest.FixtureRequest, dim: int | None) -> None:
    store = _counting(request.node.name)
    Job(4, lambda rank: store).save(_state(4, dim), step=1)
    unique = 3 * SHAPE[0] * SHAPE[1] * 4
    assert store.stats.bytes_written <= 1.01 * unique


def test_replicas_are_written_once_and_shared_evenly(request: pytest.FixtureRequest) -> None:
    store = _counting(request.node.name)
    sizes = [90, 70, 33, 17, 9, 3, 1]  # MiB; 55.75 MiB a rank

    def state_of(rank: int) -> dict[str, nn.Module]:
        return {
            f"t{i}": Replicated(torch.zeros(size * MIB, dtype=torch.uint8), (0, 1, 2, 3))
            for i, size in enumerate(sizes)
        }

    report = Job(4, lambda rank: store).save(state_of, step=1)[0]
    assert store.stats.bytes_written <= 1.01 * sum(sizes) * MIB
    prefix = report.path.removeprefix(store.url).strip("/")
    shares = [0] * 4
    for info in store.list(prefix):
        if info.key.endswith(".safetensors"):
            shares[int(info.key.rpartition("/")[2][4:9])] += info.nbytes
    assert max(shares) <= 1.05 * sum(shares) / 4


LAYOUTS = [0, 1, None]


@pytest.mark.parametrize("loaded", LAYOUTS, ids=["to-rows", "to-columns", "to-runs"])
@pytest.mark.parametrize("saved", LAYOUTS, ids=["rows", "columns", "runs"])
@pytest.mark.parametrize(("n", "m"), [(4, 3), (3, 2), (2, 4), (4, 4)])
def test_the_job_reads_every_byte_once_at_any_layout(
    request: pytest.FixtureRequest, n: int, m: int, saved: int | None, loaded: int | None
) -> None:
    store = _counting(request.node.name)
    Job(n, lambda rank: store).save(_state(n, saved), step=1)
    store.reset()
    states = [_state(m, loaded, blank=True)(rank) for rank in range(m)]
    reports = Job(m, lambda rank: store).load(lambda rank: states[rank])
    unique = 3 * SHAPE[0] * SHAPE[1] * 4
    assert store.stats.bytes_read <= 1.05 * unique
    assert sum(report.nbytes_read for report in reports) <= store.stats.bytes_read
    for rank, state in enumerate(states):
        expected = _state(m, loaded)(rank)
        assert all(torch.equal(state[name].local, expected[name].local) for name in state)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_replicas_are_read_once_by_the_whole_job(request: pytest.FixtureRequest, m: int) -> None:
    store = _counting(request.node.name)
    everyone = tuple(range(m))
    Job(2, lambda rank: store).save(_state(2, 0), step=1)
    store.reset()
    states = [{f"t{i}": Replicated(_tensor(i) * 0, everyone) for i in range(3)} for _ in everyone]
    reports = Job(m, lambda rank: store).load(lambda rank: states[rank])
    unique = 3 * SHAPE[0] * SHAPE[1] * 4
    assert store.stats.bytes_read <= 1.05 * unique
    assert max(r.nbytes_read for r in reports) <= 1.2 * unique / m + 4 * MIB
    for state in states:
        assert all(torch.equal(state[f"t{i}"].local, _tensor(i)) for i in range(3))


@pytest.mark.parametrize("dim", [0, None], ids=["rows", "runs"])
def test_without_a_group_a_part_of_large_tensors_costs_little_more_than_its_bytes(
    request: pytest.FixtureRequest, dim: int | None
) -> None:
    """A third of a 64 MiB tensor that two ranks saved, read by one rank alone."""
    store = _counting(request.node.name)
    full = torch.arange(16 * MIB, dtype=torch.int32).reshape(4096, 4096)
    Job(2, lambda rank: store).save(lambda rank: {"t": Sharded(full, rank, 2, dim=dim)}, step=1)
    for rank in range(3):
        store.reset()
        state = {"t": Sharded(full * 0, rank, 3, dim=dim)}
        state["t"].rank = 0
        Job(1, lambda _: store).load(lambda _, state=state: state)
        assert torch.equal(state["t"].local, Sharded(full, rank, 3, dim=dim).local)
        needed = state["t"].local.nbytes
        assert store.stats.bytes_read <= 1.05 * needed + 64 * 1024


@pytest.mark.parametrize(
    ("wanted", "request_nbytes_max", "requests"),
    [("012345", 8 * MIB, 2), ("012345", 2 * MIB, 4), ("012345", MIB, 8), ("01345", 8 * MIB, 4)],
    ids=["files", "pairs", "each", "gap"],
)
def test_neighbours_in_a_file_are_read_by_one_request(
    request: pytest.FixtureRequest, wanted: str, request_nbytes_max: int, requests: int
) -> None:
    """Tensors of 1 MiB in files of four and of two. The checksums of a file of which several
    requests are made take one more.
    """
    store = _counting(request.node.name)
    state = {name: torch.full((MIB // 4,), float(name)) for name in "012345"}
    job = Job(1, lambda rank: store)
    files = SaveOptions(path=WritePath(file_nbytes_max=4 * MIB))
    job.save(lambda rank: state, step=1, options=files)
    store.reset()
    loaded = {name: torch.full((MIB // 4,), -1.0) for name in wanted}
    how = LoadOptions(path=ReadPath(request_nbytes_max=request_nbytes_max))
    job.load(lambda rank: loaded, options=how)
    assert store.stats.requests["get_into"] == requests
    assert all(torch.equal(loaded[name], state[name]) for name in wanted)


def test_memory_between_a_file_and_its_target_is_taken_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests of one thread, to rows and columns that do not follow each other."""
    taken: list[int] = []

    def counted(nbytes: int, *, pinned: bool) -> memoryview:
        assert not pinned  # no device works beside the host
        taken.append(nbytes)
        return staging_buffer(nbytes, pinned=pinned)

    monkeypatch.setattr(ckpt.loading.reader, "staging_buffer", counted)
    store = _counting(request.node.name)
    values = torch.arange(float(MIB)).view(1024, 1024)
    state = {"rows": values, "columns": values[:, 512:].bfloat16()}
    job = Job(1, lambda rank: store)
    job.save(lambda rank: state, step=1)
    loaded = {
        "rows": torch.zeros(1024, 1030)[:, :1024],
        "columns": torch.zeros(512, 1024, dtype=torch.bfloat16).t(),
    }
    how = LoadOptions(path=ReadPath(request_nbytes_max=MIB))
    job.load(lambda rank: loaded, options=how)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert store.stats.requests["get_into"] >= 5
    assert len(taken) == 1 and taken[0] < 1.01 * MIB, taken
