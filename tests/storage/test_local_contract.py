"""The local store keeps the contract on the disk of the tests and on a tmpfs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import Store
from storage.local import LocalStore
from storage.testing import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LocalStore(str(tmp_path / "made" / "by the first write"))
        yield store
        store.close()
