"""The store over fsspec keeps the contract; it cannot create exclusively and says so."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from storage import ExclusiveCreate, Store, open_store
from storage.testing import StoreContract


class TestGenericStoreOnDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"fsspec+file://{tmp_path}/root")


class TestGenericStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"fsspec+memory://contract-{uuid.uuid4().hex}")


def test_fsspec_filesystems_say_that_they_cannot_create_exclusively(tmp_path: Path) -> None:
    """A session reads this attribute before it trusts a store with its log."""
    assert open_store(f"fsspec+file://{tmp_path}").exclusive_create is ExclusiveCreate.NONE
