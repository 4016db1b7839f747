"""The memory store keeps the contract; stores of one name share their objects."""

from __future__ import annotations

from inspect import signature

import pytest

from storage import PrefixStore, Store, open_store
from storage.generic import FsspecStore
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from storage.obstore_objects import CloudStore
from storage.peers.store import PeerStore
from storage.s3.store import S3Store
from storage.testing import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestMemoryStoreBelowAPrefix(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        bucket = MemoryBucket()
        bucket.add("run/70/other", b"a neighbour that must not show")
        return PrefixStore(MemoryStore(bucket), "run/7")


def test_stores_of_one_name_share_objects_and_a_path_below_is_a_prefix() -> None:
    """Open one name three times, once with a path below it; compare what each sees."""
    open_store("memory://shared-by-name").put_if_absent("steps/1/data", b"x")
    assert open_store("memory://shared-by-name/").get("steps/1/data") == b"x"
    below = open_store("memory://shared-by-name/steps/1")
    assert [entry.key for entry in below.list("")] == ["data"]
    assert list(open_store("memory://another-name").list("")) == []


@pytest.mark.parametrize(
    "cls", [CloudStore, FsspecStore, LocalStore, MemoryStore, PeerStore, S3Store]
)
def test_create_takes_the_hints_of_the_contract_alone(cls: type[Store]) -> None:
    """One that is misspelled would be ignored."""
    hints = {"durable": False, "direct": True}
    signature(cls.create).bind(None, "key", 1, part_nbytes=1, **hints)
    with pytest.raises(TypeError, match="durabel"):
        signature(cls.create).bind(None, "key", 1, part_nbytes=1, durabel=False)
