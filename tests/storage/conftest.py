"""Servers shared by the storage tests of one run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import S3Server, moto_server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server
