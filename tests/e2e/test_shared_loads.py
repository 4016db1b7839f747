"""Blocks that several ranks need are read once, passed on in order, and nobody waits for a round.

Method: ranks as threads over counting and failing stores. Drawn layouts of other numbers of ranks
are compared with what one rank loads alone; messages, rounds and bytes are counted at 8 to 64
ranks.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import Corrupt, LoadInterrupted, RankFailed
from ckpt.loading.exchange import Exchange, Move, ShareLimits
from ckpt.loading.load import LoadOptions
from ckpt.loading.matching import FEW_RANKS
from ckpt.loading.plan import ReadPath
from ckpt.loading.reader import Reader
from ckpt.world.base import Message, Transfers
from storage import open_store
from storage.testing import Killed
from tests.e2e.job import Job, Sharded
from tests.e2e.test_counts import SHAPE, Replicated, _state, _tensor
from tests.stores import CountingStore
from tests.thread_ranks import RanksFailed, ThreadWorld, _ThreadTransfers

MIB = 1 << 20


def _counting(name: str) -> CountingStore:
    return CountingStore(open_store(f"memory://{name}"))


# --- the same bytes as one rank alone -------------------------------------------------------------


def _drawn(random_: random.Random, size: int) -> list[Callable[[torch.Tensor, int], nn.Module]]:
    """For each of a few tensors how it is cut over `size` ranks: by rows, columns or runs, over all
    of them or over equal parts of them that repeat it, or not at all.
    """
    layouts: list[Callable[[torch.Tensor, int], nn.Module]] = []
    for _ in range(6):
        dim = random_.choice([0, 1, None])
        parts = random_.choice([n for n in range(1, size + 1) if size % n == 0])
        if parts == 1:
            layouts.append(lambda full, _: Replicated(full, tuple(range(size))))
        else:
            layouts.append(
                lambda full, rank, dim=dim, parts=parts: Repeated(full, rank, size, dim, parts)
            )
    return layouts


class Repeated(Sharded):
    """Cut over `parts` ranks, and that again over the next ones."""

    def __init__(self, full: torch.Tensor, rank: int, size: int, dim: Any, parts: int) -> None:
        super().__init__(full, rank % parts, parts, dim=dim)
        self.holders = tuple(range(rank % parts, size, parts))

    def __ckpt_pieces__(self) -> Any:
        for owned in super().__ckpt_pieces__():
            views = [
                view._replace(pieces=tuple(p._replace(holders=self.holders) for p in view.pieces))
                for view in owned.views
            ]
            yield owned._replace(views=tuple(views))


def _laid_out(seed: int, size: int, fill: float | None = None) -> Callable[[int], Any]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(13, 10), (40, 33), (64, 64), (5, 300), (7, 1), (200, 9)]
    full = [torch.randn(shape, generator=generator) for shape in shapes]
    layouts = _drawn(random.Random(seed * 100 + size), size)

    def state_of(rank: int) -> dict[str, nn.Module]:
        tensors = full if fill is None else [torch.full_like(one, fill) for one in full]
        return {f"t{i}": how(tensors[i], rank) for i, how in enumerate(layouts)}

    return state_of


@pytest.mark.parametrize("seed", range(6))
def test_drawn_layouts_load_what_one_rank_loads_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks and a narrow window, so that runs, groups and turns are many."""
    for module in ("plan", "task"):
        monkeypatch.setattr(f"ckpt.saving.{module}.BLOCK_BYTES", 256)
    monkeypatch.setattr("ckpt.loading.matching.FEW_RANKS", 4)  # both ways, in turn
    random_ = random.Random(seed)
    store = _counting(f"drawn-{seed}")
    saved = random_.randint(1, 6)
    Job(saved, lambda rank: store).save(_laid_out(seed, saved), step=1)
    alone = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(_shapes(_laid_out(seed, 1)(0)))}
    Job(1, lambda rank: store).load(lambda rank: {n: {"tensor": t} for n, t in alone.items()})
    nbytes = sum(tensor.nbytes for tensor in alone.values())
    for size in (2, 3, 6, 8):
        state_of = _laid_out(seed + 50, size, fill=-1.0)
        states = [state_of(rank) for rank in range(size)]
        window = random_.choice([1, 1000, 10_000])
        limits = ShareLimits(1000, 300, window, repeated_nbytes_max=random_.choice([0, 600]))
        store.reset()
        readers = random_.choice([1, 3])
        options = LoadOptions(
            path=ReadPath(readers=readers, read_ahead_nbytes_max=5000), sharing=limits
        )
        reports = Job(size, lambda rank: store).load(states.__getitem__, options=options)
        expected = _laid_out(seed + 50, size)
        for rank, state in enumerate(states):
            good = expected(rank)
            assert all(torch.equal(state[name].local, good[name].local) for name in state)
        assert sum(report.nbytes_read for report in reports) <= 1.01 * nbytes
    full = _laid_out(seed, 1)(0)
    assert all(
        torch.equal(alone[name], full[name].local.reshape(alone[name].shape)) for name in alone
    )


def _shapes(state: dict[str, Any]) -> list[tuple[int, ...]]:
    return [
        next(iter(module.__ckpt_pieces__())).views[0].pieces[0].global_shape
        for module in state.values()
    ]


# --- what it costs --------------------------------------------------------------------------------


class Costs:
    """Rounds, and messages and bytes between pairs, of each rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[int, Counter[str]] = defaultdict(Counter)
        self.peers: dict[int, set[int]] = defaultdict(set)
        lock = threading.Lock()
        move, call = _ThreadTransfers.move, ThreadWorld._round

        def counted(wires: Any, send: Sequence[Message], receive: Sequence[Message]) -> None:
            with lock:
                counts = self.counts[wires._rank]
                counts[f"{wires._name}: messages"] += len(send)
                counts[f"{wires._name}: bytes"] += sum(one.data.nbytes for one in send)
                self.peers[wires._rank].update(one.rank for one in (*send, *receive))
            move(wires, send, receive)

        def called(world: Any, op: str, name: str, payload: Any, ranks: Any) -> Any:
            got = call(world, op, name, payload, ranks)  # type: ignore[arg-type]
            with lock:
                self.counts[world.rank]["rounds"] += 1
                if name != "manifest":
                    sent = len(payload) if isinstance(payload, bytes) else 0
                    self.counts[world.rank]["bytes in rounds"] += sent
            return got

        monkeypatch.setattr(_ThreadTransfers, "move", counted)
        monkeypatch.setattr(ThreadWorld, "_round", called)

    def most(self, what: str) -> int:
        return max((counts[what] for counts in self.counts.values()), default=0)

    def clear(self) -> None:
        self.counts.clear()
        self.peers.clear()


SIZES = (8, FEW_RANKS, 2 * FEW_RANKS, 4 * FEW_RANKS)
COUNT = 24


def _cut(size: int, dim: int | None) -> Callable[[int], Any]:
    full = [torch.arange(256.0 * 64).reshape(256, 64) + index for index in range(COUNT)]
    return lambda rank: {
        f"t{index:02d}": Sharded(one, rank, size, dim=dim) for index, one in enumerate(full)
    }


def _replicas(size: int) -> Callable[[int], Any]:
    full = torch.arange(8.0 * MIB)
    return lambda rank: {"t": Replicated(full, tuple(range(size)))}


CASES: dict[str, tuple[int, Callable[[int], Any], Callable[[int], Any]]] = {
    "same": (0, lambda n: _cut(n, 0), lambda n: _cut(n, 0)),
    "fewer files": (3, lambda n: _cut(n, 0), lambda n: _cut(n, 0)),
    "columns": (4, lambda n: _cut(n, 0), lambda n: _cut(n, 1)),
    "runs": (5, lambda n: _cut(n, 1), lambda n: _cut(n, None)),
    "replicas": (2, _replicas, _replicas),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_sends_grows_with_the_logarithm_of_the_world(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that find out who shares: four for each halving, of a few ranks none. Bytes between
    the ranks: none but those that a rank passes on, about as many as it gets.
    """
    saved, saved_of, loaded_of = CASES[case]
    costs = Costs(monkeypatch)
    rounds: dict[bool, set[int]] = {True: set(), False: set()}
    for size in SIZES:
        store = _counting(f"costs-{case}-{size}")
        Job(saved or size, lambda rank, store=store: store).save(saved_of(saved or size), step=1)
        states = [loaded_of(size)(rank) for rank in range(size)]
        costs.clear()
        store.reset()
        Job(size, lambda rank, store=store: store).load(lambda rank, states=states: states[rank])
        halvings = math.ceil(math.log2(size))
        is_few = size <= FEW_RANKS
        assert costs.most("needs: messages") <= (0 if is_few else 4 * halvings)
        assert costs.most("needs: bytes") <= 4 * halvings * 60
        assert costs.most("bytes in rounds") <= 320
        # As much as it gets, and a run or two that it read itself to a branch of the tree each.
        wanted = sum(one.local.nbytes for one in states[0].values())
        assert costs.most("shared blocks: bytes") <= wanted + 2 * halvings * MIB
        assert max(map(len, costs.peers.values()), default=0) <= 6 * halvings
        # Of a file that several ranks read from, each needs the checksums at its end.
        assert store.stats.requests["get_into"] <= 2 * max(size, saved) + 8
        rounds[is_few].add(costs.most("rounds"))
    assert rounds[True] <= {7, 9} and len(rounds[True]) == 1
    assert rounds[False] == {few + 2 for few in rounds[True]}


@pytest.mark.parametrize(("more", "is_shared"), [(0, False), (1, True)])
def test_ranks_share_nothing_where_that_reads_little_more(
    monkeypatch: pytest.MonkeyPatch, more: int, is_shared: bool
) -> None:
    """Of three ranks, two read all of it again."""
    monkeypatch.setattr("ckpt.loading.exchange.AGAIN_NBYTES_MAX", 4 * MIB)
    costs, full = Costs(monkeypatch), torch.arange(2.0 * MIB // 4 + more)
    store = _counting(f"little-{more}")
    Job(1, lambda rank: store).save(lambda rank: {"t": {"tensor": full}}, step=1)
    states = [{"t": {"tensor": torch.zeros_like(full)}} for _ in range(3)]
    costs.clear()
    reports = Job(3, lambda rank: store).load(states.__getitem__)
    assert all(torch.equal(state["t"]["tensor"], full) for state in states)
    assert costs.most("rounds") == (9 if is_shared else 7)
    read = sum(report.nbytes_read for report in reports)
    assert read == full.nbytes * (1 if is_shared else 3)


@pytest.mark.parametrize("budget", [0, 3 * MIB, 64 * MIB])
def test_replicas_are_read_once_and_passed_on_within_any_window(
    request: pytest.FixtureRequest, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: Counter[int] = Counter()
    most: Counter[int] = Counter()
    lock, move = threading.Lock(), Exchange._move

    def watched(self: Exchange, wires: Transfers, run: Move, *tags: Any) -> None:
        with lock:
            under_way[id(self)] += run.nbytes
            most[id(self)] = max(most[id(self)], under_way[id(self)])
        move(self, wires, run, *tags)
        with lock:
            under_way[id(self)] -= run.nbytes

    monkeypatch.setattr(Exchange, "_move", watched)
    store = _counting(request.node.name)
    everyone = (0, 1, 2)
    Job(2, lambda rank: store).save(_state(2, 0), step=1)
    store.reset()
    states = [{f"t{i}": Replicated(_tensor(i) * 0, everyone) for i in range(3)} for _ in everyone]
    options = LoadOptions(
        path=ReadPath(request_nbytes_max=MIB, readers=4, read_ahead_nbytes_max=budget),
        sharing=ShareLimits(run_nbytes_max=MIB, window_nbytes_max=2 * MIB),
    )
    Job(3, lambda rank: store).load(lambda rank: states[rank], options=options)
    assert store.stats.bytes_read <= 1.05 * 3 * SHAPE[0] * SHAPE[1] * 4
    for state in states:
        assert all(torch.equal(state[f"t{i}"].local, _tensor(i)) for i in range(3))
    assert len(most) == 3
    assert MIB <= max(most.values()) <= max(2 * MIB, budget)


# --- failures -------------------------------------------------------------------------------------


def _replicated_job(name: str, size: int) -> tuple[Job, list[dict[str, Any]]]:
    store = _counting(name)
    full = torch.arange(16.0 * MIB / 4)
    Job(1, lambda rank: store).save(lambda rank: {"t": Replicated(full, (0,))}, step=1)
    everyone = tuple(range(size))
    return Job(size, lambda rank: store), [{"t": Replicated(full * 0, everyone)} for _ in everyone]


@contextmanager
def _failing(
    monkeypatch: pytest.MonkeyPatch, what: str, rank: int, error: BaseException
) -> Iterator[Counter[int]]:
    """Reader `what` fails on one rank from its second run on; counts the calls of every rank."""
    calls: Counter[int] = Counter()
    real, lock = getattr(Reader, what), threading.Lock()

    def failing(self: Reader, run: Move, *data: Any) -> Any:
        number = int(threading.current_thread().name.removeprefix("of rank ").partition(" ")[0])
        with lock:
            calls[number] += 1
            count = calls[number]
        if number == rank and count > 1:
            raise error
        return real(self, run, *data)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, what, failing)
        yield calls


@pytest.fixture
def named_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of an exchange bear the name of their rank."""
    real, lock = Exchange._move, threading.Lock()

    def named(self: Exchange, *args: Any) -> None:
        with lock:
            threading.current_thread().name = f"of rank {self._world.rank} "
        real(self, *args)

    monkeypatch.setattr(Exchange, "_move", named)


SHORT_RUNS = ShareLimits(run_nbytes_max=MIB // 4, run_nbytes_min=1, window_nbytes_max=MIB // 2)


@pytest.mark.usefixtures("named_threads")
@pytest.mark.parametrize("what", ["read_run", "deliver_run"])
def test_a_failure_between_the_runs_is_one_error_on_all_and_ends_the_reading(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 runs; hardly any is read after the failure, and everybody comes to the end."""
    for module in ("plan", "task"):
        monkeypatch.setattr(f"ckpt.saving.{module}.BLOCK_BYTES", MIB // 4)
    job, states = _replicated_job(f"failing-{what}", 5)
    error = Corrupt("block 3 of 't' is not what it was")
    with (
        _failing(monkeypatch, what, 3, error) as calls,
        pytest.raises(RanksFailed) as caught,
    ):
        job.load(states.__getitem__, options=LoadOptions(sharing=SHORT_RUNS))
    errors = caught.value.errors
    assert {type(one) for one in errors.values()} == {LoadInterrupted}
    assert len({str(one) for one in errors.values()}) == 1 and len(errors) == 5
    assert "rank 3" in str(errors[0]) and "block 3 of 't'" in str(errors[0])
    assert sum(calls.values()) < (40 if what == "read_run" else 64 * 5)
    job.load(states.__getitem__, options=LoadOptions(sharing=SHORT_RUNS))


@pytest.mark.usefixtures("named_threads")
def test_a_rank_that_dies_between_the_runs_is_named_by_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("plan", "task"):
        monkeypatch.setattr(f"ckpt.saving.{module}.BLOCK_BYTES", MIB // 4)
    job, states = _replicated_job("dying", 4)
    with (
        _failing(monkeypatch, "read_run", 2, Killed("rank 2 is killed")),
        pytest.raises(RanksFailed) as caught,
    ):
        job.load(states.__getitem__, options=LoadOptions(sharing=SHORT_RUNS))
    errors = caught.value.errors
    assert isinstance(errors.pop(2), Killed)
    for error in errors.values():
        assert isinstance(error, LoadInterrupted)
        assert isinstance(error.__cause__, RankFailed) and error.__cause__.rank == 2
