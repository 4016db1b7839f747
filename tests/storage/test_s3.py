"""The S3 store keeps the contract against a moto server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage import Store
from storage.retry import NO_RETRY, RetryingStore, RetryPolicy
from storage.s3 import S3Store
from storage.testing import StoreContract
from tests.servers import S3Server

pytestmark = pytest.mark.server

MiB = 1024 * 1024


class TestS3StoreOnMoto(StoreContract):
    part_nbytes = 5 * MiB

    @pytest.fixture
    def store(self, moto: S3Server) -> Iterator[Store]:
        inner = S3Store(
            moto.make_bucket(),
            "runs/7",
            options=moto.options,
            retry=NO_RETRY,
            keys_per_page=10,  # so that the contract's listings have pages
        )
        store = RetryingStore(inner, RetryPolicy())
        yield store
        store.close()
