"""The tools for tests do what they say: they fail, kill, count and forget at the right moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import KeyNotFoundError, OutcomeUnknownError, StorageError, Store
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore, Killed, StoreContract, write_object
from tests.stores import CountingStore, PowerLossStore


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore(), FaultPlan(0))


class TestCountingStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return CountingStore(MemoryStore())


class TestPowerLossStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return PowerLossStore(MemoryStore())


def run(store: Store) -> None:
    write_object(store, "a", b"12345678", part_nbytes=4)
    store.put_if_absent("b", b"x")
    store.get("a")


OPERATIONS = ["create", "write_part", "write_part", "publish", "put_if_absent", "get"]


def test_a_dry_run_names_every_operation() -> None:
    plan = FaultPlan(0)
    run(FaultyStore(MemoryStore(), plan))
    assert [operation for operation, _ in plan.operations] == OPERATIONS
    assert not plan.happened


@pytest.mark.parametrize("nth", range(1, len(OPERATIONS) + 1))
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kill", [False, True])
def test_the_nth_operation_fails_and_only_the_right_ones_happened(
    tmp_path: Path, nth: int, mode: str, kill: bool
) -> None:
    """For every n: what was published before is there, and `after` publishes the n-th as well."""
    plan = FaultPlan(nth, mode=mode, kill=kill)  # type: ignore[arg-type]
    disk = LocalStore(str(tmp_path))
    store = FaultyStore(disk, plan)
    with pytest.raises(Killed if kill else StorageError) as caught:
        run(store)
    assert plan.happened
    happened = nth if mode == "after" else nth - 1
    expected = [key for key, number in (("a", 4), ("b", 5)) if number <= happened]
    assert [entry.key for entry in disk.list("")] == expected
    unknown = not kill and mode == "after" and OPERATIONS[nth - 1] in ("publish", "put_if_absent")
    assert isinstance(caught.value, OutcomeUnknownError) is unknown
    left_behind = any(path.name.startswith(".tmp-") for path in tmp_path.iterdir())
    dies_within = ["create", "write_part", "publish"].count(OPERATIONS[nth - 1]) and not (
        (nth == 1 and mode == "before") or (nth == 4 and mode == "after")
    )
    assert left_behind is bool(kill and dies_within)
    if kill:
        with pytest.raises(Killed):
            store.get("a")
    else:
        store.put_if_absent("later", b"once means once")


def test_forever_means_every_operation_from_there_on() -> None:
    store = FaultyStore(MemoryStore(), FaultPlan(2, forever=True))
    store.put_if_absent("a", b"x")
    for _ in range(3):
        with pytest.raises(StorageError):
            store.get("a")


def test_counts_are_requests_and_bytes() -> None:
    store = CountingStore(MemoryStore())
    run(store)
    store.get_into("a", 1, [memoryview(bytearray(3))])
    stats = store.stats
    assert stats.bytes_written == 9
    assert stats.bytes_read == 11
    assert stats.requests == {
        "create": 1,
        "write_part": 2,
        "put_if_absent": 1,
        "get": 1,
        "get_into": 1,
    }
    assert stats.requests_total == 6
    store.reset()
    assert store.stats.requests_total == 0


def test_power_loss_takes_what_was_not_synced() -> None:
    store = PowerLossStore(MemoryStore())
    for key in ("synced", "lost"):
        with store.create(key, 1, part_nbytes=1, durable=False) as writer:
            writer.write_part(0, [memoryview(b"x")])
    write_object(store, "durable", b"x", part_nbytes=1)
    store.sync(["synced"])
    assert store.lose_power() == ("lost",)
    assert [entry.key for entry in store.list("")] == ["durable", "synced"]
    with pytest.raises(KeyNotFoundError):
        store.get("lost")
