"""The store over fsspec keeps the contract; it cannot create exclusively and says so."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from storage import (
    ExclusiveCreate,
    KeyNotFoundError,
    StorageError,
    Store,
    TransientError,
    open_store,
)
from storage.generic import open_generic
from storage.testing import StoreContract


class TestGenericStoreOnDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"fsspec+file://{tmp_path}/root")


class TestGenericStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"fsspec+memory://contract-{uuid.uuid4().hex}")


class _Answer(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the server says {status}")
        self.status = status


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (None, KeyNotFoundError),
        (_Answer(404), KeyNotFoundError),
        (_Answer(403), KeyNotFoundError),  # of an object store, to who may not list
        (_Answer(429), TransientError),
        (_Answer(503), TransientError),
        (NotADirectoryError("f"), KeyNotFoundError),
        (ConnectionRefusedError("refused"), TransientError),
        (OSError("no route to host"), StorageError),
    ],
)
def test_not_found_is_said_of_what_is_not_there_only(
    cause: Exception | None,
    expected: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fsspec raises FileNotFoundError when a server does not answer; the cause tells which."""
    store = open_generic(f"file://{tmp_path}", {})

    def fail(*args: object, **options: object) -> None:
        raise FileNotFoundError("http://host/key") from cause

    for name in ("info", "find"):
        monkeypatch.setattr(store.filesystem, name, fail)
    with pytest.raises(StorageError) as caught:
        store.info("key")
    assert type(caught.value) is expected
    if expected is KeyNotFoundError:
        assert list(store.list("")) == []
    else:
        with pytest.raises(expected):
            list(store.list(""))


def test_fsspec_filesystems_say_that_they_cannot_create_exclusively(tmp_path: Path) -> None:
    """A session reads this attribute before it trusts a store with its log."""
    assert open_store(f"fsspec+file://{tmp_path}").exclusive_create is ExclusiveCreate.NONE
