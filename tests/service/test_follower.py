"""A follower takes over what a training commits: whole, checked, and only what changed.

Method: a small training saves with `dedup`, on stores that count, fail, or lose what is read. After
each swap the follower's tensors are those of one step, bit for bit; before it, and after every
failure, they are those of the step before. Ranks are threads; real processes and S3 are at the end.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ckpt
from ckpt.cli import main
from ckpt.commit.leases import LEASE_SECONDS_MAX, lease_key, leased, leases_of
from ckpt.commit.locate import AGAIN_MAX, live_entries
from ckpt.commit.maintenance import Maintenance
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    LoadInterrupted,
    LogDiverged,
    Mismatch,
    NoCheckpoint,
)
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from ckpt.service.follower import Follower, FollowOptions, followed
from ckpt.world.base import SoloWorld, World
from storage import AccessDeniedError, Store, TransientError, open_store
from storage.wrap import WrappedStore
from tests.e2e.job import Job, Sharded
from tests.e2e.lora import DEDUP
from tests.e2e.test_flips import FlippedStore
from tests.ranks import run_ranks
from tests.servers import moto_server
from tests.service.test_readers import RetiredWhileRead
from tests.stores import CountingStore
from tests.thread_ranks import RanksFailed
from tests.thread_ranks import run_ranks as run_threads

NUMEL = 30_000  # of each tensor: 120 kB, more than the gaps that a request reads over
TENSORS = 10


class Net(nn.Module):
    """Ten tensors; `set_to` changes the last one at every step, and all at every hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(NUMEL) for _ in range(TENSORS)])

    def set_to(self, step: int) -> Net:
        with torch.no_grad():
            for index, tensor in enumerate(self.layers):
                last = index == TENSORS - 1
                tensor.copy_(torch.arange(NUMEL) + index + (step if last else step // 100 * 100))
        return self


def is_at(net: Net, step: int) -> bool:
    expected = Net().set_to(step)
    return all(torch.equal(a, b) for a, b in zip(net.layers, expected.layers, strict=True))


def save(store: Store, step: int, *, dedup: bool = True) -> None:
    state = {"model": Net().set_to(step), "optim": torch.ones(3), "step": step}
    ckpt.save(state, store, step=step, dedup=dedup)


def follower_of(target: Any, store: Store, world: World | None = None, **options: Any) -> Follower:
    load = LoadOptions("state", path=ReadPath(request_nbytes_max=1 << 16))
    return Follower(followed(target), store, world or SoloWorld(), FollowOptions(load, **options))


@pytest.fixture
def store(request: pytest.FixtureRequest) -> CountingStore:
    return CountingStore(open_store(f"memory://{request.node.name}"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


def test_a_model_is_as_it_was_until_the_swap_and_then_bit_for_bit_the_step(tmp_path: Path) -> None:
    root, net = str(tmp_path / "run"), Net()
    with ckpt.follow(net, root) as follower:
        assert follower.poll() is None and follower.step is None
        assert follower.swap() is None, "a training that has not begun is no error"
        for step in (1, 2, 150):
            before = [tensor.detach().clone() for tensor in net.layers]
            save(open_store(root), step)
            update = follower.poll()
            assert update is not None and update.step == step and update is follower.staged
            assert all(map(torch.equal, before, net.layers)), "changed before the swap"
            assert follower.poll() is update, "nothing newer: the same one is still ready"
            swapped = follower.swap()
            assert swapped is not None and swapped[:3] == (step, update.attempt, update.nbytes)
            assert is_at(net, step) and follower.step == step and follower.poll() is None
    assert not list(Path(root).glob("leases/*")), "a lease outlived its reading"


@pytest.mark.parametrize("dedup", [True, False])
def test_only_what_is_not_proved_to_be_in_memory_is_read(store: CountingStore, dedup: bool) -> None:
    """One of ten tensors changed. Without digests equal checksums prove nothing: all is read."""
    net = Net()
    follower = follower_of(net, store)
    save(store, 1, dedup=dedup)
    first = follower.poll()
    assert first is not None and first.nbytes_read == first.nbytes_total == TENSORS * NUMEL * 4
    follower.swap()
    save(store, 2, dedup=dedup)
    store.reset()
    update = follower.poll()
    assert update is not None
    changed = 1 if dedup else TENSORS
    assert update.nbytes == update.nbytes_read == changed * NUMEL * 4
    assert update.nbytes_total == first.nbytes_total and len(update.names) == changed
    # And headers, checksums and digests of the files in question.
    assert 0 < store.stats.nbytes["get_into"] - changed * NUMEL * 4 < 10_000
    store.reset()
    swapped = follower.swap()
    assert swapped is not None and swapped.nbytes == changed * NUMEL * 4
    assert not store.stats.requests, "a swap asks the store for nothing"
    assert is_at(net, 2)


class Copies(TorchFunctionMode):
    """Counts the elements that `Tensor.copy_` writes."""

    numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_swap_is_one_copy_of_what_changed(store: CountingStore) -> None:
    net = Net()
    follower = follower_of(net, store)
    for step, changed in ((1, TENSORS), (2, 1), (100, TENSORS)):
        save(store, step)
        with Copies() as polling:
            follower.poll()
        with Copies() as swapping:
            follower.swap()
        assert (polling.numel, swapping.numel) == (0, changed * NUMEL)
        assert is_at(net, step)


def test_digests_prove_what_was_written_again(store: CountingStore) -> None:
    """An older step in between is not what the next save refers to; its digests are the same."""
    net = Net()
    follower = follower_of(net, store)
    save(store, 1)
    save(store, 200)
    follower.poll()
    follower.swap()
    save(store, 1)  # refers to nothing of step 200, and is written anew
    update = follower.go_to(1, attempt=live_entries(store)[0].attempt)
    assert update.nbytes_read == TENSORS * NUMEL * 4
    follower.swap()
    again = follower.go_to(1, attempt=live_entries(store)[-1].attempt)
    assert (again.nbytes_read, again.names) == (0, ())
    follower.swap()
    assert is_at(net, 1)


def test_an_idle_poll_is_two_small_requests(store: CountingStore) -> None:
    save(store, 1)
    follower = follower_of(Net(), store)
    follower.poll()
    follower.swap()
    store.reset()
    for _ in range(5):
        assert follower.poll() is None
    # Whether the newest record is still there, and whether another one is.
    assert store.stats.requests == {"info": 10, "get": 5}


def test_what_lies_elsewhere_now_is_read_again(store: CountingStore) -> None:
    """The proof is about memory that a swap has filled: a parameter made anew has none of it."""
    net = Net()
    follower = follower_of(net, store)
    save(store, 1)
    follower.poll()
    follower.swap()
    net.layers[3] = nn.Parameter(torch.zeros(NUMEL))
    save(store, 2)
    update = follower.poll()
    assert update is not None and update.nbytes_read == 2 * NUMEL * 4
    assert update.names == ("model.layers.3", "model.layers.9")
    follower.swap()
    assert is_at(net, 2)


def test_new_memory_is_filled_from_chunks_that_others_have(store: CountingStore) -> None:
    """Two tensors of one name in the checkpoint: one is new, of the other half is in memory."""
    training = Job(2, lambda rank: store)
    state: dict[str, Any] = {"rows": {"tensor": torch.zeros(SHAPE)}, "again": torch.zeros(SHAPE)}
    load = LoadOptions("state", rename={"again": "rows.tensor"}, path=ReadPath())
    follower = Follower(followed(state), store, SoloWorld(), FollowOptions(load))
    for step in (1, 2):
        save_rows(store, step, 2, training)
        follower.poll()
        follower.swap()
        assert torch.equal(state["rows"]["tensor"], rows_at(step))
        assert torch.equal(state["again"], rows_at(step))
        state["again"] = torch.zeros(SHAPE)


# Steps that are not newer by their numbers -----------------------------------------------------


def test_it_goes_back_and_then_on_with_what_is_committed_later(store: CountingStore) -> None:
    net = Net()
    follower = follower_of(net, store)
    for step in (1, 2, 3):
        save(store, step)
    with pytest.raises(NoCheckpoint, match="has no step 7"):
        follower.go_to(7)
    assert follower.go_to(1).step == 1
    follower.swap()
    assert is_at(net, 1) and follower.poll() is None, "what it went back from is no news"
    save(store, 4)
    follower.poll()
    follower.swap()
    assert is_at(net, 4)


def test_a_training_that_went_back_is_followed(tmp_path: Path) -> None:
    root, net = str(tmp_path), Net()
    follower = follower_of(net, open_store(root))
    for step in (10, 20, 30):
        save(open_store(root), step)
    follower.poll()
    follower.swap()
    assert is_at(net, 30)
    ckpt.load({"model": Net()}, root, step=10, strict="state")
    save(open_store(root), 11)
    follower.poll()
    follower.swap()
    assert is_at(net, 11)


# What goes wrong -------------------------------------------------------------------------------


def flip(root: Path, step: int) -> None:
    (entry,) = (one for one in live_entries(open_store(str(root))) if one.step == step)
    file = next((root / entry.prefix).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[4096 + 50] ^= 4
    file.write_bytes(data)


def test_a_damaged_step_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    root, net = tmp_path / "run", Net()
    save(open_store(str(root)), 1)
    store = CountingStore(open_store(str(root)))
    follower = follower_of(net, store)
    follower.poll()
    follower.swap()
    for step in (100, 200):
        save(open_store(str(root)), step)
    flip(root, 200)
    update = follower.poll()
    assert update is not None and update.step == 100
    assert [one.step for one in update.skipped] == [200]
    assert "checksum" in update.skipped[0].reason and is_at(net, 1)
    follower.swap()
    assert is_at(net, 100)
    save(open_store(str(root)), 300)
    flip(root, 300)
    assert follower.poll() is None and is_at(net, 100)
    assert {one.step for one in follower.skipped} == {200, 300}
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 300 that is whole"):
        follower.go_to(300)


def test_no_flipped_bit_is_ever_taken_over(store: CountingStore) -> None:
    """A seeded sample of the bits of everything that the second step adds, and of FORMAT."""

    def saved(step: int) -> dict[str, Any]:
        torch.manual_seed(step)
        return {"a": torch.randn(50), "b": torch.ones(70), "step": step}

    ckpt.save(saved(1), store, step=1, dedup=True)
    before = {info.key: info.nbytes for info in store.list("")}
    ckpt.save(saved(2), store, step=2, dedup=True)
    second = {info.key: info.nbytes for info in store.list("")}
    added = {key: size for key, size in second.items() if key not in before or key == "FORMAT"}
    draw = random.Random(11)
    taken, refused = [], 0
    for key, nbytes in sorted(added.items()):
        for _ in range(8):
            state = saved(0)
            flipped = FlippedStore(store, "", draw.randrange(8 * nbytes))
            follower = follower_of(state, flipped)
            follower.go_to(1)
            follower.swap()
            flipped.key = key
            follower = follower_of(state, flipped)
            try:
                follower.poll()
                follower.swap()
            except CheckpointError:
                refused += 1
            assert state["step"] in (1, 2)
            taken.append(state["step"])
            assert all(torch.equal(state[name], saved(state["step"])[name]) for name in "ab")
    print(f"{refused} polls refused; steps taken: {taken.count(1)} and {taken.count(2)}")
    assert refused and {1, 2} == set(taken)


def test_what_was_ready_stays_when_the_next_is_damaged(tmp_path: Path) -> None:
    net = Net()
    follower = follower_of(net, open_store(str(tmp_path)))
    save(open_store(str(tmp_path)), 1)
    update = follower.poll()
    save(open_store(str(tmp_path)), 100)
    flip(tmp_path, 100)
    assert follower.poll() is update
    follower.swap()
    assert is_at(net, 1)


@pytest.mark.parametrize("reads", [{1}, {3}, {1, 2, 3, 4, 5}])
def test_a_step_that_is_retired_while_it_is_read_gives_way_to_the_next(
    tmp_path: Path, reads: set[int]
) -> None:
    steps = iter(range(100, 10_000, 100))

    def advance() -> None:
        save(open_store(str(tmp_path)), next(steps), dedup=False)
        for entry in live_entries(open_store(str(tmp_path)))[:-1]:
            Maintenance.open(open_store(str(tmp_path))).retire(entry.attempt)

    advance()
    store = RetiredWhileRead(open_store(str(tmp_path)), reads, advance)
    net = Net()
    follower = follower_of(net, store)
    update = follower.poll()
    assert update is not None and update.step == 100 * (1 + len(reads))
    follower.swap()
    assert is_at(net, update.step)


class Failing(WrappedStore):
    """Raises at every ranged read while it is armed, and at every write with `is_read_only`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.armed = False
        self.is_read_only = False

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if self.armed:
            raise TransientError("away")
        self.inner.get_into(key, start, buffers)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.is_read_only:
            raise AccessDeniedError(f"{key}: may only be read")
        self.inner.put_if_absent(key, data)


def test_a_store_that_is_away_is_asked_again_by_the_next_poll(store: CountingStore) -> None:
    failing, net = Failing(store), Net()
    follower = follower_of(net, failing)
    save(store, 1)
    failing.armed = True
    for _ in range(2):
        with pytest.raises(TransientError):
            follower.poll()
    failing.armed = False
    assert follower.poll() is not None
    follower.swap()
    assert is_at(net, 1)


def test_a_model_that_does_not_fit_is_refused_and_unchanged(store: CountingStore) -> None:
    save(store, 1)
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    follower = follower_of(other, store)
    for _ in range(2):
        with pytest.raises(Mismatch, match=r"weight"):
            follower.poll()
    assert torch.equal(other.weight, before) and follower.staged is None


class Fragile:
    """A part of the state that refuses its new values as often as it was told to."""

    def __init__(self) -> None:
        self.refusals = 0

    def state_dict(self) -> dict[str, Any]:
        return {"extra": torch.full((5,), 3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("not now")
        self.loaded = state


def test_after_a_swap_that_failed_everything_is_read_again(store: CountingStore) -> None:
    net, part = Net(), Fragile()
    follower = follower_of({"model": net, "part": part}, store)
    for step in (1, 2):
        state = {"model": Net().set_to(step), "part": Fragile()}
        ckpt.save(state, store, step=step, dedup=True)
        update = follower.poll()
        assert update is not None
        # Memory that the update itself has made is read each time, whatever is proved.
        assert update.nbytes_read == (TENSORS if step == 1 else 1) * NUMEL * 4 + 20
        part.refusals = step - 1
        if step == 1:
            follower.swap()
    with pytest.raises(LoadInterrupted, match="not now"):
        follower.swap()
    assert follower.step is None
    update = follower.poll()
    assert update is not None and update.nbytes_read == TENSORS * NUMEL * 4 + 20
    follower.swap()
    assert is_at(net, 2) and torch.equal(part.loaded["extra"], torch.full((5,), 3.0))


def test_a_root_that_moves_away_is_reported_and_found_again(tmp_path: Path) -> None:
    root, net = tmp_path / "run", Net()
    save(open_store(str(root)), 1)
    follower = follower_of(net, open_store(str(root)))
    follower.poll()
    follower.swap()
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(LogDiverged, match="it is gone"):
        follower.poll()
    assert is_at(net, 1)
    (tmp_path / "elsewhere").rename(root)
    save(open_store(str(root)), 2)
    follower.poll()
    follower.swap()
    assert is_at(net, 2)
    root.rename(tmp_path / "old")
    ckpt.forget(str(root))
    for step in range(5):
        ckpt.save({"model": Net().set_to(step)}, open_store(str(root)), step=step)
    with pytest.raises(LogDiverged, match="another training"):
        follower.poll()
    assert is_at(net, 2)


def test_a_root_replaced_by_its_backup_is_reported_at_once(tmp_path: Path) -> None:
    """Whatever was saved there since: the log may even be longer than before."""
    for later in (0, 1, 9):
        root = tmp_path / f"run{later}"
        save(open_store(str(root)), 1)
        shutil.copytree(root, backup := tmp_path / f"backup{later}")
        for step in (2, 3):
            save(open_store(str(root)), step)
        follower = follower_of(Net(), open_store(str(root)))
        follower.poll()
        shutil.rmtree(root)
        shutil.copytree(backup, root)
        ckpt.forget(str(root))
        for step in range(100, 100 + later):
            save(open_store(str(root)), step)
        for _ in range(2):
            with pytest.raises(LogDiverged, match="slot 3 of its log"):
                follower.poll()


def test_a_lost_log_is_reported_at_once(tmp_path: Path) -> None:
    save(open_store(str(tmp_path)), 1)
    follower = follower_of(Net(), open_store(str(tmp_path)))
    follower.poll()
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogDiverged):
        follower.poll()
    with pytest.raises(Corrupt, match="ckpt mend"):
        follower_of(Net(), open_store(str(tmp_path))).poll()


@pytest.mark.parametrize("what", ["MANIFEST", "*.safetensors"])
def test_files_that_arrive_after_the_log_are_waited_for(tmp_path: Path, what: str) -> None:
    """As in a mirror, or where a bucket is replicated; the last checkpoint of a training, too."""
    save(open_store(str(tmp_path)), 1)
    net = Net()
    follower = follower_of(net, open_store(str(tmp_path)))
    late = [*(tmp_path / "steps").glob(f"*/{what}")]
    for path in late:
        path.rename(tmp_path / path.name)
    for _ in range(2):
        with pytest.raises(NoCheckpoint, match="step 1 "):
            follower.poll()  # there is nothing else
    for path in late:
        (tmp_path / path.name).rename(path)
    assert follower.poll() is not None
    follower.swap()
    save(open_store(str(tmp_path)), 2)
    (path,) = [*(tmp_path / "steps").glob(f"00000002-*/{what}")]
    path.rename(tmp_path / path.name)
    assert [follower.poll() for _ in range(4)] == [None] * 4
    (tmp_path / path.name).rename(path)
    updates = [follower.poll() for _ in range(AGAIN_MAX)]
    assert any(update is not None and update.step == 2 for update in updates)
    follower.swap()
    assert is_at(net, 2)


def test_damage_is_looked_at_again_and_ever_more_rarely(tmp_path: Path) -> None:
    store = CountingStore(open_store(str(tmp_path)))
    net = Net()
    follower = follower_of(net, store)
    for step in (1, 100):
        save(open_store(str(tmp_path)), step)
    flip(tmp_path, 100)
    follower.poll()
    follower.swap()
    assert is_at(net, 1)
    looks = []
    for _ in range(100):
        store.reset()
        assert follower.poll() is None
        looks.append(sum(store.stats.requests.values()) > 3)
    assert [number for number, looked in enumerate(looks, 1) if looked] == [1, 3, 7, 15, 31, 63, 95]
    flip(tmp_path, 100)  # back
    assert any(follower.poll() is not None for _ in range(AGAIN_MAX))
    follower.swap()
    assert is_at(net, 100)


# Leases ----------------------------------------------------------------------------------------


class LeaseSeen(WrappedStore):
    """Notes which attempts are leased whenever data is read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.leased: list[set[str]] = []

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.leased.append(set(leases_of(self.inner, now_unix=1.0)))
        self.inner.get_into(key, start, buffers)


def test_what_is_read_is_leased_and_retention_leaves_it(tmp_path: Path) -> None:
    root = str(tmp_path)
    for step in (1, 2):
        save(open_store(root), step, dedup=False)
    first, latest = (entry.attempt for entry in live_entries(open_store(root)))
    store = LeaseSeen(open_store(root))
    follower = follower_of(Net(), store)
    follower.poll()
    assert store.leased and all(attempts == {latest} for attempts in store.leased)
    assert not leases_of(store, now_unix=1.0)

    state = {"model": Net().set_to(3)}
    keep = ckpt.KeepLatest(1)
    with leased(store, first, 900):
        with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1), keep=keep) as saves:
            saves.step(3)
        assert next(iter(live_entries(store))).attempt == first
        assert latest not in {entry.attempt for entry in live_entries(store)}
        assert main(["prune", root, "--keep-last", "1", "--yes"]) == 1
    assert main(["prune", root, "--keep-last", "1", "--yes"]) == 0
    assert [entry.step for entry in live_entries(store)] == [3]


def test_leases_end_by_themselves_and_none_keeps_anything_for_years(store: CountingStore) -> None:
    attempt = "e000001-0123456789abcdef"
    keys = [lease_key(attempt, seconds, bytes(8)) for seconds in (900, 10**9 - 1)]
    for key in [*keys, "leases/of-somebody-else"]:
        store.put_if_absent(key, b"")
    created, last = (store.info(key).modified_unix for key in keys)
    assert leases_of(store, now_unix=last)[attempt] == last + LEASE_SECONDS_MAX
    assert store.exists(keys[0])
    assert leases_of(store, now_unix=created + 901) == {attempt: last + LEASE_SECONDS_MAX}
    assert not store.exists(keys[0]), "what has ended is removed by who retires"
    # Where the clock of the store runs ahead.
    assert leases_of(store, now_unix=100.0) == {attempt: 100.0 + LEASE_SECONDS_MAX}
    assert leases_of(store, now_unix=last + LEASE_SECONDS_MAX) == {}
    assert [info.key for info in store.list("leases/")] == ["leases/of-somebody-else"]


def test_who_may_only_read_follows_without_a_lease(store: CountingStore) -> None:
    save(store, 1)
    reading, net = Failing(store), Net()
    reading.is_read_only = True
    follower = follower_of(net, reading)
    store.reset()
    assert follower.poll() is not None
    assert {"put_if_absent", "create", "delete"}.isdisjoint(store.stats.requests)
    follower.swap()
    assert is_at(net, 1)


# Several ranks ---------------------------------------------------------------------------------

SHAPE = (12, 500)


def rows_at(step: int) -> torch.Tensor:
    """Of the rows only the last half changes with the step."""
    full = torch.arange(12.0 * 500).view(SHAPE)
    full[6:] += step
    return full


def save_rows(store: Store, step: int, size: int, job: Job | None = None) -> None:
    job = job or Job(size, lambda rank: store)
    job.save(lambda rank: {"rows": Sharded(rows_at(step), rank, size)}, step, DEDUP)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_take_over_the_same_step_on_another_layout(store: CountingStore, size: int) -> None:
    """Two ranks saved rows; those who follow have runs of elements. Half of it changed, and where a
    rank has parts of both halves, only the changed chunk is read.
    """
    training = Job(2, lambda rank: store)
    save_rows(store, 1, 2, training)
    turns: list[Callable[[], None]] = [
        lambda: save_rows(store, 2, 2, training),
        lambda: save_rows(store, 3, 2, training),
    ]

    def rank_main(world: World) -> list[tuple[int | None, int, int]]:
        part = Sharded(torch.zeros(SHAPE), world.rank, size, dim=None)
        follower = follower_of({"rows": part}, store, world)
        seen = []
        for step in (1, 2, 3):
            update = follower.poll()
            assert update is not None
            follower.swap()
            full = Sharded(rows_at(step), world.rank, size, dim=None)
            assert torch.equal(part.local, full.local)
            seen.append((follower.step, update.nbytes_read, update.nbytes_total))
            world.agree("turn", None)
            if world.rank == 0 and turns:
                turns.pop(0)()
            world.agree("turned", None)
        return seen

    results = run_threads(size, rank_main, deadline_seconds=120.0)
    for position, step in enumerate((1, 2, 3)):
        assert {seen[position][0] for seen in results} == {step}
        read = sum(seen[position][1] for seen in results)
        # What two ranks need of one block is read by one of them.
        assert read == (12 if step == 1 else 6) * 500 * 4


def test_ranks_that_swap_different_things_get_an_error(store: CountingStore) -> None:
    save_rows(store, 1, 2)
    parts = [Sharded(torch.zeros(SHAPE), rank, 2) for rank in range(2)]

    def rank_main(world: World) -> None:
        follower = follower_of({"rows": parts[world.rank]}, store, world)
        follower.poll()
        if world.rank == 1:
            follower._staged.clear()
        follower.swap()

    with pytest.raises(RanksFailed) as failed:
        run_threads(2, rank_main, deadline_seconds=120.0)
    assert {type(error) for error in failed.value.errors.values()} <= {ckpt.errors.RankFailed}
    assert len(failed.value.errors) == 2 and not any(part.local.any() for part in parts)


def test_damage_that_one_rank_reads_is_passed_over_by_all(tmp_path: Path) -> None:
    job = Job(2, lambda rank: open_store(str(tmp_path)))
    job.save(lambda rank: {"rows": Sharded(rows_at(1) + 1, rank, 2)}, 1)
    job.save(lambda rank: {"rows": Sharded(rows_at(2) + 2, rank, 2)}, 2)
    flip(tmp_path, 2)

    def rank_main(world: World) -> int | None:
        part = Sharded(torch.zeros(SHAPE), world.rank, 2)
        follower = follower_of({"rows": part}, open_store(str(tmp_path)), world)
        follower.poll()
        follower.swap()
        assert torch.equal(part.local, Sharded(rows_at(1) + 1, world.rank, 2).local)
        return follower.step

    assert run_threads(2, rank_main, deadline_seconds=120.0) == [1, 1]


# Ways to ask -----------------------------------------------------------------------------------


def test_tensors_by_name_come_as_tensors(store: CountingStore) -> None:
    follower = follower_of(["model.layers.9", "optim"], store)
    assert not follower.tensors
    for step in (1, 2):
        save(store, step)
        update = follower.poll()
        assert update is not None
        held = dict(follower.tensors)
        follower.swap()
        assert set(follower.tensors) == {"model.layers.9", "optim"}
        assert torch.equal(follower.tensors["model.layers.9"], Net().set_to(step).layers[9])
        assert all(follower.tensors[name] is tensor for name, tensor in held.items())
        # Nothing else is read, and of the second step only what changed.
        assert update.nbytes_read == NUMEL * 4 + (12 if step == 1 else 0)
    with pytest.raises(Mismatch, match="no tensor of the checkpoint has this name"):
        follower_of(["model.layer*.x"], store).poll()
    patterns = follower_of("model.layers.*", store)
    patterns.poll()
    patterns.swap()
    assert len(patterns.tensors) == TENSORS


def test_tensors_of_the_caller_are_filled_in_place(store: CountingStore) -> None:
    """Full names as keys; `aside="device"` keeps the new bytes beside the tensors."""
    mine = {"model.layers.9": torch.zeros(NUMEL), "optim": torch.zeros(3)}
    addresses = [tensor.data_ptr() for tensor in mine.values()]
    follower = follower_of(mine, store, aside="device")
    for step in (1, 2):
        save(store, step)
        follower.poll()
        follower.swap()
        assert torch.equal(mine["model.layers.9"], Net().set_to(step).layers[9])
    assert [tensor.data_ptr() for tensor in mine.values()] == addresses


def test_updates_are_given_until_none_comes(store: CountingStore) -> None:
    """By a clock that is a number: it passes only while the follower sleeps."""
    clock = [0.0]
    saves = iter([1, 0, 2, 0, 0, 0, 0, 0, 0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if step := next(saves):
            save(store, step)

    net = Net()
    follower = follower_of(net, store, sleep=sleep, now_seconds=lambda: clock[0])
    steps = []
    for update in follower.updates(timeout=20.0, poll_seconds=7.0):
        follower.swap()
        assert is_at(net, update.step)
        steps.append(update.step)
    assert steps == [1, 2] and clock[0] == 3 * 7.0 + 21.0


def test_two_models_need_a_choice_and_wrong_calls_say_so(store: CountingStore) -> None:
    ckpt.save({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, store, step=1)
    net = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"2 modules, 'a', 'b'.*\{'a': model\}"):
        follower_of(net, store).poll()
    follower = follower_of({"b": net}, store)
    assert follower.poll() is not None
    with pytest.raises(ValueError, match="aside"):
        ckpt.follow(net, "memory://x", aside="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to follow"):
        ckpt.follow([], "memory://x")
    with pytest.raises(TypeError, match="path"):
        ckpt.follow(Path("run"), "memory://x")
    with pytest.raises(ValueError, match="lease_seconds"):
        ckpt.follow(net, "memory://x", lease_seconds=-1)


def test_a_poll_reads_in_another_thread_while_the_model_is_used(store: CountingStore) -> None:
    net = Net()
    follower = follower_of(net, store)
    with ThreadPoolExecutor(1) as pool:
        for step in (1, 2):
            save(store, step)
            reading = pool.submit(follower.poll)
            assert sum(tensor.sum() for tensor in net.layers) is not None
            assert reading.result() is not None
            follower.swap()
            assert is_at(net, step)


# Real processes, and S3 ------------------------------------------------------------------------


def _blocks() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)])


def follow_flat_training(root: str) -> None:
    """The training is one flat parameter per unit; the follower has DTensors."""
    from torch.distributed.fsdp import fully_shard

    from sharding import FullyShardedDataParallel

    trained = FullyShardedDataParallel(_blocks())
    served = _blocks()
    for layer in served:
        fully_shard(layer)
    fully_shard(served)
    flat = FullyShardedDataParallel(_blocks())
    batch = torch.ones(2, 24)
    with ckpt.follow(served, root) as follower, ckpt.follow({"model": flat}, root) as other:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(step / 8)
            ckpt.save({"model": trained}, root, step=step, dedup=True)
            update = follower.poll()
            assert update is not None and update.step == step
            served(batch)  # gathers what the swap must not leave gathered
            follower.swap()
            assert follower.step == step
            other.poll()
            other.swap()
            with torch.no_grad():
                assert torch.equal(served(batch), trained(batch))
                assert torch.equal(flat(batch), trained(batch))
        assert follower.poll() is None


@pytest.mark.ranks
def test_sharded_models_follow_a_training_of_another_engine(tmp_path: Path) -> None:
    run_ranks(2, follow_flat_training, str(tmp_path / "run"), timeout_seconds=120)


@pytest.mark.server
def test_a_training_on_s3_is_followed() -> None:
    with moto_server() as server:
        url = f"s3://{server.make_bucket()}/run"
        net = Net()
        with ckpt.follow(net, url, storage_options=server.options) as follower:
            for step in (1, 2):
                ckpt.save(
                    {"model": Net().set_to(step)},
                    url,
                    step=step,
                    dedup=True,
                    storage_options=server.options,
                )
                update = follower.poll()
                assert update is not None
                follower.swap()
                assert is_at(net, step)
            assert update.nbytes_read == NUMEL * 4
        leases = open_store(url, **server.options).list("leases/")
        assert next(iter(leases), None) is None
