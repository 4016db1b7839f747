"""A spread root behaves like any other: the contract over it, and what its record decides.

Method: SpreadStore over memory, with all keys spread for the contract, and with data files alone
for the rest; what lies where is read from the store beneath.
"""

from __future__ import annotations

import pytest
import torch

import ckpt
from storage import InvalidUrlError, KeyNotFoundError, Store
from storage.memory import MemoryStore
from storage.testing import StoreContract, write_object
from storage.wrap import SpreadStore
from tests.stores import CountingStore

FILES = [f"steps/00000001-e000001-{index:016x}/rank00000.safetensors" for index in range(40)]


class TestSpreadStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return SpreadStore(MemoryStore(), 5, is_spread=lambda key: True)


class TestSpreadStoreOfARootThatIsNotSpread(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return SpreadStore(MemoryStore())


def fill(store: Store) -> None:
    store.put_if_absent("FORMAT", b"f")
    store.put_if_absent("log/0", b"l")
    for key in FILES:
        write_object(store, key, key.encode(), part_nbytes=4096)
    store.put_if_absent("steps/00000001-e000001-x/MANIFEST", b"m")


def test_data_files_are_spread_and_nothing_else() -> None:
    inner = MemoryStore()
    fill(SpreadStore(inner, 8))
    keys = [entry.key for entry in inner.list("")]
    plain = [key for key in keys if not key.startswith("spread/")]
    assert plain == ["FORMAT", "SPREAD", "log/0", "steps/00000001-e000001-x/MANIFEST"]
    prefixes = {key.split("/")[1] for key in keys if key.startswith("spread/")}
    assert prefixes == {f"{number:02x}" for number in range(8)}


def test_every_later_open_finds_what_is_recorded() -> None:
    inner = MemoryStore()
    fill(SpreadStore(inner, 8))
    for store in (SpreadStore(inner), SpreadStore(inner, 8)):
        listed = [entry.key for entry in store.list("steps/")]
        assert [key for key in listed if key in FILES] == FILES and listed == sorted(listed)
        assert all(store.get(key) == key.encode() for key in FILES)
        write_object(store, f"steps/{id(store)}.safetensors", b"new", part_nbytes=4096)
    assert len(list(inner.list("spread/"))) == len(FILES) + 2


def test_a_process_that_looked_before_the_record_finds_and_is_found() -> None:
    inner = MemoryStore()
    early = SpreadStore(inner)
    write_object(early, FILES[0], b"early", part_nbytes=4096)
    early.delete(FILES[0])
    reader = SpreadStore(inner)
    with pytest.raises(KeyNotFoundError):
        reader.get(FILES[1])
    late = SpreadStore(inner, 4)
    write_object(late, FILES[1], b"late", part_nbytes=4096)
    write_object(early, FILES[2], b"early", part_nbytes=4096)
    for store in (early, late, reader):
        assert store.get(FILES[1]) == b"late"
        assert store.get(FILES[2]) == b"early"
        assert [entry.key for entry in store.list("steps/")] == [FILES[1], FILES[2]]
    reader.delete(FILES[1])
    reader.delete(FILES[2])
    assert [entry.key for entry in inner.list("")] == ["SPREAD"]


@pytest.mark.parametrize("recorded", [None, 4])
def test_another_number_than_the_roots_is_refused(recorded: int | None) -> None:
    inner = MemoryStore()
    fill(SpreadStore(inner, recorded))
    with pytest.raises(InvalidUrlError, match="begin a new root"):
        write_object(SpreadStore(inner, 8), "steps/new.safetensors", b"", part_nbytes=4096)
    for count in (0, 257, -1):
        with pytest.raises(InvalidUrlError, match="1 to 256"):
            SpreadStore(inner, count)


def test_reading_a_root_that_is_not_spread_costs_no_request_more() -> None:
    inner = MemoryStore()
    fill(SpreadStore(inner))
    counting = CountingStore(inner)
    store = SpreadStore(counting)
    for key in FILES:
        store.get(key)
    assert counting.stats.requests_total == len(FILES)


def test_a_checkpoint_in_a_spread_root_is_saved_verified_loaded_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from storage import url as url_module

    inner = MemoryStore()
    monkeypatch.setattr(url_module, "_open_memory", lambda *_: SpreadStore(inner, 16))
    state = {f"w{index}": torch.arange(10_000.0) + index for index in range(4)}
    for step in (1, 2):
        ckpt.save(state, "memory://spread-root", step=step)
    monkeypatch.setattr(url_module, "_open_memory", lambda *_: SpreadStore(inner))
    assert ckpt.verify("memory://spread-root").ok
    assert [info.step for info in ckpt.list_steps("memory://spread-root")] == [1, 2]
    other = {name: torch.zeros(10_000) for name in state}
    ckpt.load(other, "memory://spread-root")
    assert all(torch.equal(other[name], state[name]) for name in state)
    assert not [e.key for e in inner.list("steps/") if e.key.endswith(".safetensors")]
