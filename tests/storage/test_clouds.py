"""Azure and Google stores: the contract against Azurite, and what can be tested without a server.

Azurite is a Node program (`npm install azurite`); without it these tests are skipped. There is no
server for GCS to test against: what is tested is that nothing is sent by opening one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ckpt
from storage import InvalidUrlError, KeyExistsError, Store, open_store
from storage.clouds import CloudStore, open_cloud
from storage.retry import NO_RETRY
from storage.store import ExclusiveCreate
from storage.testing import StoreContract
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


def test_options_that_are_not_known_are_named() -> None:
    for url in ("gs://bucket/run", "az://container/run"):
        with pytest.raises(InvalidUrlError, match="no_such"):
            open_store(url, no_such=1)
    with pytest.raises(InvalidUrlError, match="BUCKET"):
        open_store("gs://key:secret@bucket")
    with pytest.raises(InvalidUrlError, match="do not fit"):
        CloudStore("gs", "b", "", config={"service_account_key": "{"}, retry=NO_RETRY)
    assert open_cloud("gs", "b/p", {"anon": True}, NO_RETRY).url == "gs://b/p"
