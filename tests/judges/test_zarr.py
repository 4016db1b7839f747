"""zarr's own tests of stores, and its state machine, judge our stores: `make judges`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("zarr", reason="zarr is installed by `make judges`")

from zarr.core.buffer import Buffer, cpu
from zarr.testing.stateful import ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from tests.judges.as_zarr_store import JudgedStore, ours

pytestmark = pytest.mark.judges

Place = tuple[str, dict[str, Any]]


class TestZarrStore(StoreTests[JudgedStore, cpu.Buffer]):
    store_cls = JudgedStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, place: Place) -> dict[str, Any]:
        return {"url": place[0], "options": place[1]}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> JudgedStore:
        store = JudgedStore(**store_kwargs)
        store._is_open = True
        return store

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> JudgedStore:
        return JudgedStore(**store_kwargs)

    async def set(self, store: JudgedStore, key: str, value: Buffer) -> None:
        store.inner.put_if_absent(ours(key), value.to_bytes())

    async def get(self, store: JudgedStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.inner.get(ours(key)))

    def test_store_repr(self, store: JudgedStore) -> None:
        assert "JudgedStore" in repr(store)

    def test_store_supports_writes(self, store: JudgedStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: JudgedStore) -> None:
        assert store.supports_listing


def test_state_machine(place: Place) -> None:
    """Any sequence of operations leaves what a dict would hold."""
    url, options = place
    # A request to moto takes milliseconds, and each step makes dozens.
    count = 5 if url.startswith("s3:") else 50
    run_state_machine_as_test(
        lambda: ZarrStoreStateMachine(JudgedStore(url, options)),
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
