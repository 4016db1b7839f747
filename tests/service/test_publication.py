"""Publications: followers get the bits that were published, whatever happens on the way.

Method: a small training publishes; followers of one and more ranks, in other layouts, take it over
from stores that count, flip and lose. After each swap the weights are those of one publication, bit
for bit; after each failure those of the one before.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.commit.locate import live_entries
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.errors import InvalidArgument, LoadInterrupted, UnsupportedFormat
from ckpt.loading.load import LoadOptions
from ckpt.loading.patch import SparseWrite
from ckpt.saving.task import PartMemory, SaveOptions, SaveReport, SaveTask
from ckpt.service.follower import Follower, FollowOptions, followed
from ckpt.service.publisher import Due, Publication
from ckpt.world.base import SoloWorld, World
from storage import Store, TransientError, open_store
from storage.wrap import WrappedStore
from tests.e2e.job import NO_WAITING, Sharded
from tests.e2e.test_flips import FlippedStore
from tests.ranks import run_ranks as run_processes
from tests.stores import CountingStore
from tests.thread_ranks import RanksFailed, run_ranks

NEVER = Due(10**9, 1e9)
SHAPE = (12, 10)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> CountingStore:
    return CountingStore(open_store(f"memory://{request.node.name}"))


def weights(step: int) -> dict[str, torch.Tensor]:
    """Two of three tensors change with the step, in some of their elements. Arithmetic:
    bits have to be the same on every machine.
    """
    every = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    names = ("rows", "columns", "frozen")
    full = {name: (every * 37 + 11 * nth) % 101 / 16 - 3 for nth, name in enumerate(names)}
    for nth in range(1, step + 1):
        for odd, name in ((3, "rows"), (7, "columns")):
            full[name][(every * odd + every // 9 + nth * 5) % 10 == 3] += 0.5 + nth
    return full


def published(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights(step).items()}


class Trainer:
    """`size` ranks that publish; another one on the same store is a restart."""

    def __init__(self, store: Store, size: int = 1, due: Due = NEVER) -> None:
        self.store, self.size, self.due = store, size, due
        self.registry = SessionRegistry()
        self.memories = [PartMemory() for _ in range(size)]

    def publish(
        self, step: int, full: dict[str, torch.Tensor] | None = None, *, number: int = 0
    ) -> SaveReport:
        full = weights(step) if full is None else full

        def rank_main(world: World) -> SaveReport:
            session = open_session(world, self.store, self.registry, sources=NO_WAITING)
            options = SaveOptions(user={"number": str(number)}, publication=())
            memory = self.memories[world.rank]
            task = SaveTask(session, self.store, memory, step, options)
            state = shards(full, world.rank, world.size)
            return Publication.begin(state, task, torch.bfloat16).finish(self.due)

        return run_ranks(self.size, rank_main)[0]


def shards(full: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, Sharded]:
    cuts = {"rows": 0, "columns": 1, "frozen": None}
    return {name: Sharded(full[name], rank, size, dim=dim) for name, dim in cuts.items()}


def blank(cut: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    zeros = {name: torch.zeros(SHAPE, dtype=torch.bfloat16) for name in weights(0)}
    return cut(zeros)


def whole_model(full: dict[str, torch.Tensor]) -> dict[str, Sharded]:
    return shards(full, 0, 1)


def follower_of(state: Any, store: Store, world: World | None = None) -> Follower:
    load = LoadOptions("state")
    return Follower(followed(state), store, world or SoloWorld(), FollowOptions(load))


def has(state: dict[str, Sharded], step: int) -> bool:
    expected = published(step)
    return all(torch.equal(state[name].local.reshape(SHAPE), expected[name]) for name in expected)


def test_a_follower_reads_what_is_new_and_has_the_published_bits(store: CountingStore) -> None:
    trainer, state = Trainer(store), blank(whole_model)
    follower = follower_of(state, store)
    for step in range(6):
        report = trainer.publish(step)
        update = follower.poll()
        assert update is not None and update.step == step and not update.skipped
        assert update.attempt == report.attempt
        assert has(state, step - 1) or step == 0, "changed before the swap"
        assert follower.swap() and has(state, step)
        assert follower.poll() is None
        if step:
            assert update.nbytes == 2 * 24 or update.nbytes < 150, "not only what is new"
            assert update.names == ("columns.tensor", "rows.tensor")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_swap_says_which_elements_it_has_written(store: CountingStore, ranks: int) -> None:
    """All that differ, and no others: they are marked, and what is left is as it was."""
    trainer = Trainer(store)
    trainer.publish(0)
    states = [blank(lambda full, rank=rank: shards(full, rank, ranks)) for rank in range(ranks)]
    followers = [follower_of(state, store) for state in states]
    for follower in followers:
        assert follower.poll() and (first := follower.swap()) and first.changed is None
    trainer.publish(1)
    for rank, (state, follower) in enumerate(zip(states, followers, strict=True)):
        update, swapped = follower.poll(), follower.swap()
        assert update and swapped and swapped.changed is not None
        assert {one.name for one in swapped.changed} == set(update.names)
        for _, part, positions in swapped.changed:
            part.view(-1)[positions] = math.nan
        before = shards(published(0), rank, ranks)
        after = shards(published(1), rank, ranks)
        for name, has_now in state.items():
            was, new = before[name].local, after[name].local
            assert torch.equal(has_now.local.isnan(), was != new), name
            assert torch.equal(has_now.local[was == new], was[was == new]), name


@pytest.mark.parametrize(("trainers", "followers"), [(1, 3), (3, 1), (3, 2), (2, 4)])
def test_ranks_of_any_layout_follow_ranks_of_any_layout(
    store: CountingStore, trainers: int, followers: int
) -> None:
    """Boxes of both dims and spans, cut for other numbers of ranks; several deltas at once."""
    trainer = Trainer(store, trainers)

    def rank_main(world: World) -> None:
        state = shards(published(0), world.rank, world.size)
        for part in state.values():
            part.local.zero_()
        follower = follower_of(state, store, world)
        for step in (0, 1, 2, 5, 6):
            if world.rank == 0:
                for one in range(last[0] + 1, step + 1):
                    trainer.publish(one)
                last[0] = step
            world.gather("published", b"")
            update = follower.poll()
            assert update is not None and update.step == step and not update.skipped
            follower.swap()
            expected = shards(published(step), world.rank, world.size)
            assert all(torch.equal(state[name].local, expected[name].local) for name in state)

    last = [-1]
    run_ranks(followers, rank_main)


def test_an_anchor_is_a_checkpoint_and_a_delta_is_none(
    store: CountingStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latest is the anchor; a delta of its own is refused, and so does nobody resume it."""
    trainer = Trainer(store)
    anchor = trainer.publish(0)
    delta = trainer.publish(1)
    latest, after = live_entries(store)
    assert latest.line == 0 and latest.attempt == anchor.attempt
    assert after.line is None and after.references == (anchor.attempt,)
    assert after.attempt == delta.attempt
    state = blank(whole_model)
    ckpt.load(state, store)
    assert has(state, 0)
    with pytest.raises(ckpt.Mismatch, match="is a delta"):
        ckpt.load(state, store, step=1)
    assert has(state, 0)
    assert ckpt.verify(store, 1).ok
    main(["ls", store.url])
    assert "a delta, for ckpt.follow, needs files of 1 other" in capsys.readouterr().out


def test_a_late_follower_takes_the_anchor_and_the_deltas(store: CountingStore) -> None:
    trainer = Trainer(store)
    for step in range(4):
        trainer.publish(step)
    state = blank(whole_model)
    follower = follower_of(state, store)
    update = follower.poll()
    assert update is not None and update.step == 3 and follower.swap() and has(state, 3)
    trainer.publish(4)
    update = follower.poll()
    assert update is not None and update.nbytes < 150 and follower.swap() and has(state, 4)


def test_anchors_behind_deltas_cost_a_follower_nothing(store: CountingStore) -> None:
    """Every third publication has a twin; who follows reads deltas, who begins reads the twin."""
    trainer, state = Trainer(store, due=Due(3, 1e9)), blank(whole_model)
    follower = follower_of(state, store)
    for step in range(10):
        trainer.publish(step)
        update = follower.poll()
        assert update is not None and follower.swap() and has(state, step)
        assert step == 0 or update.nbytes < 150
        assert follower.poll() is None
    other = blank(whole_model)
    late = follower_of(other, store)
    assert late.poll() and late.swap() and has(other, 9)
    trainer.publish(10)
    trainer.publish(11)
    steps = [(entry.step, entry.line) for entry in live_entries(store)]
    deltas = [(step, None) for step in range(7, 12)]
    assert steps == sorted([(6, 0), *deltas, (9, 0)], key=lambda one: (one[0], one[1] == 0))


def test_what_a_trainer_publishes_larger_than_its_share_makes_an_anchor(
    store: CountingStore,
) -> None:
    trainer = Trainer(store, due=Due(10**9, 0.5))
    for step in range(3):
        trainer.publish(step)
    assert [entry.line for entry in live_entries(store)][-1] == 0


def test_a_restarted_trainer_of_another_size_begins_with_an_anchor(store: CountingStore) -> None:
    state = blank(whole_model)
    follower = follower_of(state, store)
    for size, steps in ((1, (0, 1, 2)), (3, (1, 2, 3)), (2, (3, 4))):
        trainer = Trainer(store, size)
        for step in steps:
            trainer.publish(step)
            assert follower.poll() and follower.swap() and has(state, step)
        lines = [entry.line for entry in live_entries(store)]
        assert lines.count(max(line or 0 for line in lines)) == 1


def test_a_trainer_that_goes_back_in_memory_publishes_the_way_back(store: CountingStore) -> None:
    trainer, state = Trainer(store), blank(whole_model)
    follower = follower_of(state, store)
    for step in (0, 1, 2, 1, 0, 2):
        trainer.publish(step)
        assert follower.poll() and follower.swap() and has(state, step)
    follower.go_to(1)
    assert follower.swap() and has(state, 1)


def test_a_pruned_base_is_never_replayed_onto_other_weights(store: CountingStore) -> None:
    """SkyRL#1902: the base of a chain is gone, and its deltas were applied to what was there."""
    trainer = Trainer(store, due=Due(2, 1e9))
    state = blank(whole_model)
    follower = follower_of(state, store)
    trainer.publish(0)
    assert follower.poll() and follower.swap()
    for step in range(1, 12):
        trainer.publish(step)
    assert all(entry.step > 0 for entry in live_entries(store)), "the base is not pruned"
    update = follower.poll()
    assert update is not None and update.nbytes == update.nbytes_total, "not by an anchor"
    assert follower.swap() and has(state, 11)


def test_no_rule_and_no_command_removes_the_base_of_a_live_delta(store: CountingStore) -> None:
    trainer = Trainer(store)
    anchor, *deltas = [trainer.publish(step) for step in range(3)]
    keeper = Maintenance.open(store)
    for needed in (anchor, deltas[0]):
        with pytest.raises(ckpt.CheckpointError, match="is needed by"):
            keeper.retire(needed.attempt)
    ckpt.operate.prune(store, keep_last=1)
    assert len(live_entries(store)) == 3
    # The newest one may go: the next delta is from nothing that is there, so it is an anchor.
    keeper.retire(deltas[1].attempt)
    report = trainer.publish(3)
    (entry,) = [one for one in live_entries(store) if one.attempt == report.attempt]
    assert entry.line == 0
    state = blank(whole_model)
    follower = follower_of(state, store)
    assert follower.poll() and follower.swap() and has(state, 3)


def test_a_failed_write_is_taken_back_and_tried_again(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime#2119: an apply that failed was dropped, and both sides drifted apart for ever."""
    trainer, state = Trainer(store), blank(whole_model)
    follower = follower_of(state, store)
    trainer.publish(0)
    assert follower.poll() and follower.swap()
    trainer.publish(1)
    write = SparseWrite.write
    for failing in range(1, 3):
        calls = 0

        def fails(one: SparseWrite, values: torch.Tensor, nth: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                write(one._replace(positions=one.positions[:1]), values[:1])
                raise RuntimeError("out of memory")
            write(one, values)

        assert follower.poll()
        monkeypatch.setattr(SparseWrite, "write", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            follower.swap()
        monkeypatch.undo()
        logging.getLogger("ckpt").setLevel(logging.CRITICAL)
        assert has(state, 0) and follower.step == 0
    trainer.publish(2)
    update = follower.poll()
    assert update is not None and update.nbytes < 300, "not by deltas"
    assert follower.swap() and has(state, 2)


def test_a_write_that_cannot_be_taken_back_marks_the_model(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, state = Trainer(store), blank(whole_model)
    follower = follower_of(state, store)
    trainer.publish(0)
    assert follower.poll() and follower.swap()
    trainer.publish(1)
    assert follower.poll()

    def fails(one: SparseWrite, values: torch.Tensor) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(SparseWrite, "write", fails)
    with pytest.raises(LoadInterrupted):
        follower.swap()
    with pytest.raises(LoadInterrupted):
        ckpt.save(state, "memory://never", step=1)
    monkeypatch.undo()
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    update = follower.poll()
    assert update is not None and update.nbytes == update.nbytes_total, "not read whole"
    assert follower.swap() and has(state, 1)


@pytest.mark.parametrize("place", ["new", "old"])
def test_weights_that_somebody_changed_are_read_whole(store: CountingStore, place: str) -> None:
    """Drift is noticed: at the first delta anywhere, later where something new is written."""
    trainer, state = Trainer(store), blank(whole_model)
    follower = follower_of(state, store)
    for step in range(2 if place == "new" else 1):
        trainer.publish(step)
        assert follower.poll() and follower.swap()
    name = "rows" if place == "new" else "frozen"
    with torch.no_grad():
        state[name].local.add_(1.0)
    trainer.publish(2)
    update = follower.poll()
    assert update is not None and update.nbytes == update.nbytes_total
    assert follower.swap() and has(state, 2)


@pytest.mark.parametrize("which", [1, 2])
def test_a_damaged_delta_is_gone_around(store: CountingStore, which: int) -> None:
    """Damage to the newest one leaves the one before; to one between, too, until an anchor."""
    trainer, state = Trainer(store), blank(whole_model)
    trainer.publish(0)
    follower = follower_of(state, store)
    assert follower.poll() and follower.swap()
    for step in (1, 2):
        trainer.publish(step)
    entry = live_entries(store)[which]
    (key,) = [one.key for one in store.list(entry.prefix) if one.key.endswith("safetensors")]
    bad = FlippedStore(store.inner, key, 8 * (4096 + 60))
    follower._store = follower._commits.store = bad
    update = follower.poll()
    if which == 1:
        assert update is None and follower.step == 0
    else:
        assert update is not None and follower.swap() and has(state, 1)
    trainer.due = Due(0, 0)
    trainer.publish(3)
    assert follower.poll() and follower.swap() and has(state, 3)


class Failing(WrappedStore):
    """Fails the n-th request that writes, once it is armed."""

    fails_in = -1

    def _count(self) -> None:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise TransientError("planted")

    def put_if_absent(self, key: str, data: Any) -> None:
        self._count()
        self.inner.put_if_absent(key, data)

    def create(self, key: str, *args: Any, **named: Any) -> Any:
        self._count()
        return self.inner.create(key, *args, **named)


def test_a_publication_that_fails_is_made_up_for_by_the_next(store: CountingStore) -> None:
    """Every write of a publication fails once; the next delta or anchor has what that one lost."""
    for nth in range(1, 6):
        place = open_store(f"memory://failing{nth}")
        failing = Failing(place)
        trainer, state = Trainer(failing), blank(whole_model)
        follower = follower_of(state, place)
        trainer.publish(0)
        assert follower.poll() and follower.swap()
        failing.fails_in = nth
        try:
            trainer.publish(1)
        except RanksFailed:
            assert follower.poll() is None
        failing.fails_in = -1
        trainer.publish(2)
        assert follower.poll() and follower.swap() and has(state, 2)


def test_other_tensors_and_other_values_need_an_anchor(store: CountingStore) -> None:
    trainer = Trainer(store)
    trainer.publish(0)
    trainer.publish(1)
    wider = {**weights(2), "rows": torch.ones(14, 10)}
    trainer.publish(2, wider)
    trainer.publish(3, wider)
    assert [entry.line for entry in live_entries(store)] == [0, None, 0, None]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_another_type_need_an_anchor(tmp_path: Any, dtype: Any) -> None:
    numbers = torch.arange(2000)
    with ckpt.follow(["*"], tmp_path, line="published") as follower:
        for step, one in enumerate((torch.int8, torch.int64, torch.int32)):
            state = {"a": (numbers % 100).to(one), "b": torch.ones(9000)}
            ckpt.publish(state, tmp_path, step=step, dtype=dtype).result()
            assert follower.poll() and follower.swap()
            taken = follower.tensors["a"]
            assert torch.equal(taken, state["a"]) and taken.dtype is one
    assert not any(one.references for one in ckpt.list_steps(f"{tmp_path}/lines/published"))
    for wrong in (torch.int8, torch.complex64, "bfloat16"):
        with pytest.raises(InvalidArgument, match="floating-point"):
            ckpt.publish({}, tmp_path, step=9, dtype=wrong)


def test_tensors_that_are_tied_otherwise_need_an_anchor(tmp_path: Any) -> None:
    one, other = torch.ones(3), torch.zeros(9000)
    first = other[:3]
    for step, third in enumerate((one, first)):
        state = {"a": one, "b": first, "c": third, "rest": torch.ones(9000)}
        ckpt.publish(state, tmp_path, step=step).result()
    with ckpt.follow(["*"], tmp_path, line="published") as follower:
        assert follower.poll() and follower.swap()
        assert not follower.tensors["c"].any()


def test_a_delta_alone_is_not_resharded(tmp_path: Any) -> None:
    """It would be a checkpoint that looks whole, of bytes that mean nothing."""
    state = {"a": torch.ones(9000)}
    for step in range(2):
        state["a"][step] = 5
        ckpt.publish(state, tmp_path / "run", step=step).result()
    line = f"{tmp_path}/run/lines/published"
    with pytest.raises(ckpt.CheckpointError, match="delta"):
        ckpt.reshard(line, tmp_path / "out", ranks=2, step=1)
    assert not (tmp_path / "out").exists()
    ckpt.reshard(line, tmp_path / "out", ranks=2)
    with ckpt.open(tmp_path / "out") as made:
        assert made.manifest.header.publication is None and made["a"][0] == 5
        assert not made.user


def test_replicas_that_drift_are_published_whole(store: CountingStore) -> None:
    """A delta of one replica does not go from an anchor that has bits of the other."""
    trainer = Trainer(store, 2)
    live = [{name: torch.ones(2000) for name in "abcdefgh"} for _ in range(2)]
    state = {name: torch.zeros(2000, dtype=torch.bfloat16) for name in live[0]}
    follower = follower_of(state, store)

    def rank_main(world: World) -> SaveReport:
        session = open_session(world, store, trainer.registry, sources=NO_WAITING)
        memory, options = trainer.memories[world.rank], SaveOptions(publication=())
        task = SaveTask(session, store, memory, step, options)
        return Publication.begin(live[world.rank], task, torch.bfloat16).finish(Due(2, 1e9))

    for step in range(10):
        for rank, own in enumerate(live):
            for tensor in own.values():
                tensor[step] = step + 2.0 * (rank if step == 1 else 0)
        if step == 8:  # they are equal again
            live[1] = {name: tensor.clone() for name, tensor in live[0].items()}
        run_ranks(2, rank_main)
        other = follower_of({name: torch.zeros_like(one) for name, one in state.items()}, store)
        assert other.poll() and other.swap() and other.step == step, other.skipped
        assert follower.poll() and follower.swap() and follower.step == step
        for name, tensor in state.items():
            either = [tensor == own[name].to(torch.bfloat16) for own in live]
            assert (either[0] | either[1]).all()


def test_publish_and_follow_a_model_by_their_names(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ckpt").setLevel(logging.WARNING)
    torch.manual_seed(0)
    model, served = nn.Linear(40, 30), nn.Linear(40, 30).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ckpt.follow(served, tmp_path, line="published") as follower:
        assert follower.poll() is None
        for step in range(4):
            model(torch.randn(2, 40)).square().sum().backward()
            optimizer.step()
            ckpt.publish(model, tmp_path, step=step).result()
            assert follower.poll() and follower.swap()
            for live, taken in zip(model.parameters(), served.parameters(), strict=True):
                assert torch.equal(live.to(torch.bfloat16), taken)
        ckpt.save({"model": model}, tmp_path, step=4)
        assert "begins a line of its own" not in caplog.text
        assert follower.poll() is None, "a save is no publication"
    assert [one.step for one in ckpt.list_steps(tmp_path)] == [4]
    with pytest.raises(ValueError, match="line"):
        ckpt.publish(model, tmp_path, step=5, line="")
    wrong = ckpt.publish({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "b", step=1)
    with pytest.raises(ckpt.CheckpointError, match="complex128"):
        wrong.result()


def test_a_step_waits_until_what_is_published_is_taken(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is held back while the training steps on; what is published is of the call."""
    model, served = nn.Linear(40, 30), nn.Linear(40, 30).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begun, finish = threading.Event(), Publication.finish

    def late(one: Publication, due: Due) -> SaveReport:
        begun.wait(5)
        return finish(one, due)

    with ckpt.follow(served, tmp_path, line="published") as follower, ThreadPoolExecutor(1) as pool:
        for step in range(3):
            model(torch.randn(2, 40)).square().sum().backward()
            begun.clear()
            monkeypatch.setattr(Publication, "finish", late)
            expected = [one.detach().to(torch.bfloat16) for one in model.parameters()]
            pending = ckpt.publish(model, tmp_path, step=step)
            assert pending.staged() == (step == 0), "no step was seen before"
            stepping = pool.submit(optimizer.step)
            begun.set()
            stepping.result()
            pending.result()
            assert follower.poll() and follower.swap()
            assert all(map(torch.equal, served.parameters(), expected))
        with torch.no_grad():
            begun.clear()
            pending = ckpt.publish(model, tmp_path, step=9)
            model.weight.zero_()
            begun.set()
        with pytest.raises(ckpt.CheckpointError, match="something else than a step"):
            pending.result()
        monkeypatch.undo()
        logging.getLogger("ckpt").setLevel(logging.CRITICAL)
        ckpt.publish(model, tmp_path, step=10).result()
        assert follower.poll() and follower.swap() and not served.weight.any()


def test_a_reader_that_knows_no_deltas_refuses_them(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(store)
    trainer.publish(0)
    trainer.publish(1)
    state = blank(whole_model)
    monkeypatch.setattr("ckpt.format.manifest_codec.FEATURES", frozenset({"references"}))
    with pytest.raises(UnsupportedFormat, match="delta"):
        ckpt.load(state, store, step=1)
    ckpt.load(state, store)
    assert has(state, 0)


def publish_from_an_engine(root: str) -> None:
    """Two ranks train DTensors; a flat engine, and whole models, follow in bfloat16."""
    from torch.distributed.fsdp import fully_shard

    from sharding import FullyShardedDataParallel

    def blocks() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(*[nn.Linear(24, 25) for _ in range(2)])

    trained, whole = blocks(), blocks().to(torch.bfloat16)
    for layer in trained:
        fully_shard(layer)
    fully_shard(trained)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    flat = FullyShardedDataParallel(blocks().to(torch.bfloat16))
    followers = [ckpt.follow(one, root, line="published") for one in (flat, whole)]
    for step in range(4):
        for layer in trained:
            layer(torch.randn(2, 24)).square().sum().backward()
        optimizer.step()
        pending = ckpt.publish(trained, root, step=step, anchor_every=2)
        expected = [one.full_tensor().to(torch.bfloat16) for one in trained.parameters()]  # type: ignore[attr-defined]
        pending.result()
        for follower in followers:
            update = follower.poll()
            assert update is not None and update.step == step and not update.skipped
            assert step == 0 or update.nbytes < update.nbytes_total
            follower.swap()
        assert all(map(torch.equal, whole.parameters(), expected))
        with FullyShardedDataParallel.summon_full_params(flat):
            assert all(map(torch.equal, flat.parameters(), expected))
    for follower in followers:
        follower.close()


@pytest.mark.ranks
def test_engines_publish_to_engines(tmp_path: Any) -> None:
    run_processes(2, publish_from_an_engine, str(tmp_path / "run"), timeout_seconds=120)
