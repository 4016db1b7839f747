"""The memory store keeps the contract; stores of one name share their objects."""

from __future__ import annotations

import pytest

from storage import Store, open_store
from storage.memory import MemoryStore
from storage.testing import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestMemoryStoreBelowAPrefix(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        store = MemoryStore(prefix="run/7")
        store._bucket.add("run/70/other", b"a neighbour that must not show")
        return store


def test_stores_of_one_name_share_objects_and_a_path_below_is_a_prefix() -> None:
    """Open one name three times, once with a path below it; compare what each sees."""
    open_store("memory://shared-by-name").put_if_absent("steps/1/data", b"x")
    assert open_store("memory://shared-by-name/").get("steps/1/data") == b"x"
    below = open_store("memory://shared-by-name/steps/1")
    assert [entry.key for entry in below.list("")] == ["data"]
    assert list(open_store("memory://another-name").list("")) == []
