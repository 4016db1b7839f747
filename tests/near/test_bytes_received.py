"""What a recovery receives from other hosts: what the new layout lacks, and next to nothing else.

Method: trainings whose ranks are threads and whose hosts are folders save in one layout and restore
in another; all bytes of messages between ranks of two hosts are counted. What a host lacks is
counted element by element, from the headers of the files in its folder and the regions that its
ranks want: what several ranks of a host want counts once, for one of them can pass it on there.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.commit.session import SessionRegistry
from ckpt.format.datafile_index import open_index
from ckpt.layout.region import Box, boxes_of
from ckpt.loading.exchange import ShareLimits
from ckpt.loading.reader import Reader
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.policies import EverySteps, Never
from ckpt.world.base import Message, World
from storage import StorageError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import Killed
from tests.e2e.job import Sharded
from tests.e2e.test_counts import Replicated
from tests.e2e.test_shared_loads import Repeated, _laid_out
from tests.near.test_near_training import data_files, flip_a_byte, folders, origins
from tests.near.training import Life
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import RanksFailed, _ThreadTransfers, run_ranks

Layout = Callable[[int, int], dict[str, nn.Module]]
RATIO_MAX = 1.05
NBYTES_ASIDE = 4096  # of requests and of who needs what: counted against what is lacking, too

# Neither rows nor runs end with the blocks of 1 MiB.
SHAPES = {
    "embedding": (2100, 1024),
    "attention": (1536, 1000),
    "mlp": (3, 1111, 700),
    "odd": (1_000_003,),
    "norm": (1024,),
}


def _full(name: str) -> torch.Tensor:
    seed = sorted(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def _cut(dim: int | None, parts: int | None = None) -> Layout:
    """Cut along a dim, or by runs; over all ranks, or over `parts` of them that are repeated."""

    def layout(rank: int, size: int) -> dict[str, nn.Module]:
        state: dict[str, nn.Module] = {}
        for name, shape in SHAPES.items():
            along = dim if dim is None or dim < len(shape) else 0
            if parts is None:
                state[name] = Sharded(_full(name), rank, size, dim=along)
            else:
                state[name] = Repeated(_full(name), rank, size, along, parts)
        return state

    return layout


class Overlapping(Sharded):
    """Columns of a tensor, and half of those of the rank before: a block has bytes that one rank of
    a host wants, and others that two do.
    """

    def __init__(self, full: torch.Tensor, rank: int, size: int) -> None:
        along = min(1, full.dim() - 1)
        super().__init__(full, rank, size, dim=along)
        self.start -= (self.stop - self.start) // 2 if rank else 0
        local = full.narrow(along, self.start, self.stop - self.start).contiguous().clone()
        self.local = nn.Parameter(local, requires_grad=False)


def _overlapping(rank: int, size: int) -> dict[str, nn.Module]:
    return {name: Overlapping(_full(name), rank, size) for name in SHAPES}


def _replicas(rank: int, size: int) -> dict[str, nn.Module]:
    return {name: Replicated(_full(name), tuple(range(size))) for name in SHAPES}


def _drawn(seed: int) -> Layout:
    return lambda rank, size: _laid_out(seed, size)(rank)


def _run(
    store: MemoryStore, hosts: Sequence[Path], layout: Layout, replicas: int, *, restores: bool
) -> list[tuple[dict[str, nn.Module], Any]]:
    """One start of a job: save one near checkpoint, or restore into zeros. The states and reports,
    by rank.
    """
    registry, size = SessionRegistry(), len(hosts)

    def rank_main(world: World) -> tuple[dict[str, nn.Module], Any]:
        target = ThreadTarget(world, store, registry)
        near = Near(hosts[world.rank] / "near", every=EverySteps(1), replicas=replicas)
        state = layout(world.rank, size)
        with Checkpointer(state, target, save=Never(), near=near) as service:
            if restores:
                for module in state.values():
                    module.local.data.zero_()  # type: ignore[union-attr, operator]
                return state, service.restore()
            service.step(1)
            service.wait()
            assert service.last_near is not None and service.last_near.step == 1
            return state, None

    return run_ranks(size, rank_main, deadline_seconds=120.0)


class Crossing:
    """Bytes of messages that ranks receive from ranks of other hosts, by host."""

    def __init__(self, hosts: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes: Counter[Path] = Counter()
        lock, move = threading.Lock(), _ThreadTransfers.move

        def counted(wires: Any, send: Sequence[Message], receive: Sequence[Message]) -> None:
            move(wires, send, receive)
            here = hosts[wires._rank]
            with lock:
                for source, _, data in receive:
                    self.nbytes[here] += data.nbytes * (hosts[source] != here)

        monkeypatch.setattr(_ThreadTransfers, "move", counted)


def _mark(mask: torch.Tensor, boxes: Sequence[Box]) -> None:
    for box in boxes:
        cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        mask[cut] = True


def _lacking(
    hosts: Sequence[Path], states: Sequence[dict[str, nn.Module]], saved: Sequence[Path]
) -> Counter[Path]:
    """The bytes that each host's ranks want and none of the files on it has."""
    lacking: Counter[Path] = Counter()
    for host in set(hosts):
        wanted: dict[str, torch.Tensor] = {}
        for rank, state in enumerate(states):
            if hosts[rank] != host:
                continue
            for name, module in state.items():
                for owned in module.__ckpt_pieces__():  # type: ignore[operator]
                    for piece in owned.views[0].pieces:
                        blank = torch.zeros(piece.global_shape, dtype=torch.bool)
                        mask = wanted.setdefault(f"{name}.{piece.fqn}", blank)
                        _mark(mask, boxes_of(piece.region, piece.global_shape))
        for path in data_files(host) if host in saved else ():
            store = LocalStore(str(path.parent))
            index, _ = open_index(store, path.name, path.stat().st_size)
            for chunk in index.chunks:
                if chunk.fqn in wanted:
                    had = torch.zeros(chunk.global_shape, dtype=torch.bool)
                    _mark(had, boxes_of(chunk.region, chunk.global_shape))
                    wanted[chunk.fqn] &= ~had
        lacking[host] = sum(4 * int(mask.sum()) for mask in wanted.values())
    return lacking


CASES: dict[str, tuple[tuple[int, ...], Layout, tuple[int, ...], Layout, tuple[int, ...]]] = {
    # hosts that save, their layout, hosts that restore, their layout, hosts that are lost
    "the same": ((0, 0, 1, 1), _cut(0), (0, 0, 1, 1), _cut(0), ()),
    "rows to columns": ((0, 0, 1, 1), _cut(0), (0, 0, 1, 1), _cut(1), ()),
    "columns to rows": ((0, 0, 1, 1), _cut(1), (0, 1, 1), _cut(0), ()),
    "rows to runs": ((0, 1, 2), _cut(0), (0, 1, 2, 2), _cut(None), ()),
    "fewer ranks": ((0, 0, 1, 1), _cut(0), (0, 0, 1), _cut(0), ()),
    "one of two hosts": ((0, 1), _cut(0), (0,), _cut(0), (1,)),
    "more ranks": ((0, 0, 1, 1), _cut(0), (0, 0, 1, 1, 2, 2), _cut(0), ()),
    "a lost host": ((0, 1, 2, 3), _cut(0), (0, 1, 3), _cut(0), (2,)),
    "a new host": ((0, 1, 2), _cut(0), (0, 1, 3), _cut(1), (2,)),
    "replicas": ((0, 0, 1, 1), _replicas, (0, 0, 1, 1), _replicas, ()),
    "replicas on a new host": ((0, 0, 1, 1), _replicas, (0, 0, 2, 2), _replicas, (1,)),
    "rows that are repeated": ((0, 0, 1, 1), _cut(0, 2), (0, 0, 0, 1, 1, 1), _cut(0, 3), ()),
    "columns that are repeated on a host": (
        (0, 0, 1, 1),
        _cut(0),
        (0, 0, 0, 0, 1, 1, 1, 1),
        _cut(1, 4),
        (),
    ),
    "columns that overlap": ((0, 0, 1, 1), _cut(0), (0, 1, 2, 2, 2), _overlapping, ()),
    "rows to replicas": ((0, 0, 1, 1), _cut(0), (0, 0, 1, 1), _replicas, ()),
}


def _received(
    case: tuple[tuple[int, ...], Layout, tuple[int, ...], Layout, tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Counter[Path], Counter[Path]]:
    """What crossed, and what was lacking, by host; compared bit for bit with what was saved."""
    saved_on, saved_as, loaded_on, loaded_as, lost = case
    store, before = MemoryStore(), folders(tmp_path, *saved_on)
    _run(store, before, saved_as, int(bool(lost)), restores=False)
    for host in folders(tmp_path, *lost):
        shutil.rmtree(host)
    hosts = folders(tmp_path, *loaded_on)
    left = [host for host in before if host.exists()]
    size = len(hosts)
    lacking = _lacking(hosts, [loaded_as(rank, size) for rank in range(size)], left)
    crossing = Crossing(hosts, monkeypatch)
    results = _run(store, hosts, loaded_as, 0, restores=True)
    received = Counter(crossing.nbytes)
    reported: Counter[Path] = Counter()
    for rank, (state, report) in enumerate(results):
        assert (report.origin, report.step) == ("near", 1)
        for name, module in loaded_as(rank, size).items():
            assert torch.equal(state[name].local, module.local), (rank, name)  # type: ignore[arg-type]
        reported[hosts[rank]] += report.nbytes_of_other_hosts
    for host in set(hosts):
        assert reported[host] <= received[host], "the report counts what was received"
        assert reported[host] >= lacking[host], "what was lacking came from elsewhere"
    return received, lacking


@pytest.mark.parametrize("name", CASES)
def test_a_host_receives_what_it_lacks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, lacking = _received(CASES[name], tmp_path, monkeypatch)
    print({host.name: (received[host], lacking[host]) for host in lacking})
    assert any(lacking.values()) == (name not in ("the same", "one of two hosts"))
    for host, nbytes in lacking.items():
        assert received[host] <= RATIO_MAX * nbytes + NBYTES_ASIDE, (host.name, nbytes)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_layouts_of_small_blocks_receive_what_they_lack(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks, wanted whole and in parts, by one rank of a host and by several. A host asks for
    none twice, however little it is.
    """
    monkeypatch.setattr("ckpt.loading.exchange.AGAIN_NBYTES_MAX", (0, 4 << 20)[seed // 2 % 2])
    for module in ("plan", "task"):
        monkeypatch.setattr(f"ckpt.saving.{module}.BLOCK_BYTES", 256)
    saved_on, loaded_on = [((0, 0, 1, 1), (0, 0, 1, 1, 1, 2)), ((0, 1, 2), (2, 2, 1, 0, 0))][
        seed % 2
    ]
    case = (saved_on, _drawn(seed), loaded_on, _drawn(seed + 50), ())
    received, lacking = _received(case, tmp_path, monkeypatch)
    print({host.name: (received[host], lacking[host]) for host in lacking})
    assert any(lacking.values())
    for host, nbytes in lacking.items():
        assert received[host] <= RATIO_MAX * nbytes + NBYTES_ASIDE, (host.name, nbytes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_damage_is_found_by_whoever_has_the_file(tmp_path: Path, order: tuple[int, int]) -> None:
    """Of a block whose first byte is wrong, another host wants other bytes, or all of them."""
    store = MemoryStore()
    Life(2, store, folders(tmp_path, 0, 1)).run(4)
    flip_a_byte(data_files(folders(tmp_path, 1)[0])[-1])
    again = Life(3, store, folders(tmp_path, *order, 0))
    again.run(0)
    assert origins(again) == {("near", 2)}
    for report in again.reports.values():
        assert report is not None
        assert [one.step for one in report.skipped] == [4]
        assert "does not match its checksum" in report.skipped[0].reason


def _errors_of_a_failing_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> dict[int, BaseException]:
    """What ranks raise where the first one that other hosts ask fails at the second of its moves
    for them.
    """
    real, count, lock = Reader.for_others, Counter[int](), threading.Lock()
    asked: list[Reader] = []

    def for_others(self: Reader, some: Any) -> Reader:
        reader = real(self, some)
        with lock:
            asked.append(reader)
        read_run = reader.read_run

        def failing(runs: Any) -> memoryview:
            with lock:
                count[id(reader)] += 1
                if reader is asked[0] and count[id(reader)] == 2:
                    raise error
            return read_run(runs)

        reader.read_run = failing  # type: ignore[method-assign]
        return reader

    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    _run(store, hosts, _cut(0), 0, restores=False)
    monkeypatch.setattr(Reader, "for_others", for_others)
    with pytest.raises(RanksFailed) as failed:
        _run(store, [*hosts, hosts[0]], _cut(0), 0, restores=True)
    return failed.value.errors


def test_an_owner_that_cannot_read_is_one_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = StorageError("the disk is gone")
    errors = _errors_of_a_failing_owner(tmp_path, monkeypatch, planted)
    texts = {str(one) for one in errors.values()}
    assert len(errors) == 3 and len(texts) == 1
    (text,) = texts
    assert "the disk is gone" in text and "rank " in text


def test_an_owner_that_dies_between_its_moves_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = _errors_of_a_failing_owner(tmp_path, monkeypatch, Killed("killed"))
    (victim,) = [rank for rank, one in errors.items() if isinstance(one, Killed)]
    del errors[victim]
    assert len(errors) == 2
    assert all(f"rank {victim} " in str(one) for one in errors.values()), errors


@pytest.mark.parametrize("parts", [9, 4])
def test_reads_for_other_hosts_fit_into_the_window(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a new host want narrow columns, alone or several of them the same."""
    store, here = MemoryStore(), folders(tmp_path, 0)
    _run(store, here, _cut(0), 0, restores=False)
    real, lock = Reader.read_run, threading.Lock()
    under_way, most = Counter[int](), Counter[int]()

    def watched(self: Reader, runs: Any) -> memoryview:
        rows = self.blocks.within(runs)
        nbytes = int(self.blocks.stop[rows[-1]] - self.blocks.start[rows[0]])
        with lock:
            under_way[id(self)] += nbytes
            most[id(self)] = max(most[id(self)], under_way[id(self)])
        time.sleep(0.02)  # all that may run at once does
        data = real(self, runs)
        with lock:
            under_way[id(self)] -= nbytes
        return data

    monkeypatch.setattr(Reader, "read_run", watched)
    _run(store, [*here, *folders(tmp_path, *[1] * 8)], _cut(1, parts), 0, restores=True)
    assert 0 < max(most.values()) <= ShareLimits().window_nbytes_max
