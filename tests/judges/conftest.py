"""Stores that foreign tests judge, and a way to run tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import S3Server, moto_server

KEY = bytes(range(32))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(params=["disk", "memory", "encrypted", "fsspec", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The url of an empty store, and its options."""
    name = secrets.token_hex(8)
    if request.param == "s3":
        server = request.getfixturevalue("moto")
        return f"s3://{server.make_bucket()}/run", server.options
    places: dict[str, tuple[str, dict[str, Any]]] = {
        "disk": (f"file://{tmp_path}/root", {}),
        "memory": (f"memory://{name}", {}),
        "encrypted": (f"memory://{name}", {"encryption_key": KEY, "compression": "zstd"}),
        "fsspec": (f"fsspec+memory://{name}", {}),
    }
    return places[request.param]
