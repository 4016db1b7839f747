"""What the storage tests share: a server for all of one run, and a proxy before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault_proxy import FaultProxy, fault_proxy
from tests.servers import S3Server, moto_server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture
def held_seconds() -> float:
    """How long the proxy holds what it swallows; modules may have their own."""
    return 1.0


@pytest.fixture
def proxy(moto: S3Server, held_seconds: float) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint_url, held_seconds=held_seconds) as proxy:
        yield proxy
