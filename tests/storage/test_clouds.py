"""Azure and Google stores: the contract against Azurite, and what can be tested without a server.

Azurite is a Node program (`npm install azurite`); without it these tests are skipped. There is no
server for GCS to test against: what is tested is that nothing is sent by opening one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from storage import FsspecStore, InvalidUrlError, KeyExistsError, Store, open_store
from storage.clouds import open_cloud
from storage.retry import NO_RETRY
from storage.store import ExclusiveCreate
from storage.testing import StoreContract
from storage.wrap import WrappedStore
from tests.servers import AzureServer, azurite_path, azurite_server


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzureServer]:
    if azurite_path() is None:
        pytest.skip("azurite-blob is not on PATH (npm install -g azurite)")
    with azurite_server() as server:
        yield server


@pytest.mark.server
class TestAzureStoreOnAzurite(StoreContract):
    part_nbytes = 5 << 20

    @pytest.fixture
    def store(self, azurite: AzureServer) -> Store:
        return open_store(f"az://{azurite.make_container()}/runs/7", **azurite.options)


@pytest.mark.server
def test_one_of_many_writers_creates_a_blob(azurite: AzureServer) -> None:
    url = f"az://{azurite.make_container()}/run"
    store = open_store(url, **azurite.options)

    def put(number: int) -> bool:
        try:
            store.put_if_absent("log/0", b"%d" % number)
        except KeyExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(put, range(32)))
    assert sum(won) == 1
    assert store.get("log/0") == b"%d" % won.index(True)


@pytest.mark.server
def test_a_checkpoint_is_committed_and_loaded(azurite: AzureServer) -> None:
    url = f"az://{azurite.make_container()}/run"
    state = {"w": torch.randn(3_000_000)}
    options = azurite.options
    for step in (1, 2):
        ckpt.save(state, url, step=step, storage_options=options)
    other = {"w": torch.zeros(3_000_000)}
    assert ckpt.load(other, url, storage_options=options).step == 2
    assert torch.equal(other["w"], state["w"])


def test_opening_sends_nothing_and_trusts_no_server() -> None:
    for url, options in (
        ("gs://bucket/run", {"anon": True, "endpoint_url": "http://127.0.0.1:1"}),
        ("az://container/run", {"account_name": "me", "anon": True}),
    ):
        store = open_store(url, **options)  # type: ignore[arg-type]
        assert store.url == url
        assert store.exclusive_create is ExclusiveCreate.CONDITIONAL
        assert store.part_nbytes_min > 1


class OwnCloud(MemoryFileSystem):  # type: ignore[misc]
    """Stands for gcsfs and adlfs: it has their options, and shows what it was given."""

    cachable = False

    def __init__(self, project: str = "", token: Any = None, connection_string: str = "") -> None:
        super().__init__()
        self.given = {"project": project, "token": token, "connection_string": connection_string}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.partition('://')[2] or path.lstrip('/')}"


@pytest.mark.parametrize(
    ("url", "options", "configured"),
    [
        ("gcs://bucket/run", {"project": "mine"}, {}),
        ("gs://bucket/run", {"token": "google_default"}, {}),
        ("gs://bucket/run", {"token": {"client_email": "a"}}, {}),
        ("gs://bucket/run", {}, {"gcs": {"project": "mine"}}),
        ("az://container/run", {"connection_string": "AccountName=a"}, {}),
        ("abfss://container/run", {}, {"abfs": {"connection_string": "AccountName=a"}}),
    ],
)
def test_options_of_gcsfs_and_adlfs_work_by_their_names(
    url: str, options: dict[str, Any], configured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where obstore has no such option, the filesystem that has it is used."""
    scheme = url.partition("://")[0]
    for name in ("gs", "gcs", "az", "abfs", "abfss"):
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, OwnCloud)
    for name, values in configured.items():
        monkeypatch.setitem(fsspec.config.conf, name, values)
    monkeypatch.setattr(OwnCloud, "protocol", (scheme, *configured))
    store = open_store(url, **options)
    while isinstance(store, WrappedStore):
        store = store.inner
    assert isinstance(store, FsspecStore)
    (wanted,) = (options or next(iter(configured.values()))).items()
    assert wanted in store.filesystem.given.items()
    with pytest.raises(InvalidUrlError, match="unknown storage options no_such; neither"):
        open_store(url, no_such=1, **options)


def test_clouds_have_the_names_that_fsspec_gives_them() -> None:
    for url, shown in (
        ("gcs://bucket/run", "gs://bucket/run"),
        ("abfs://container/run", "az://container/run"),
        ("abfss://container@me.dfs.core.windows.net/run", "az://container/run"),
    ):
        options: dict[str, Any] = {"anon": True}
        if url.startswith("abfs://"):
            options["account_name"] = "me"
        assert open_store(url, **options).url == shown


def test_options_that_are_not_known_are_named() -> None:
    for url in ("gs://bucket/run", "az://container/run"):
        with pytest.raises(InvalidUrlError, match="no_such"):
            open_store(url, no_such=1)
    with pytest.raises(InvalidUrlError, match="BUCKET"):
        open_store("gs://key:secret@bucket")
    with pytest.raises(InvalidUrlError, match="do not fit"):
        open_cloud("gs", "b", {"service_account_key": "{"}, NO_RETRY)
    assert open_cloud("gs", "b/p", {"anon": True}, NO_RETRY).url == "gs://b/p"
