"""fsspec's own abstract tests judge our stores, each as a filesystem: `make judges`."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from fsspec.tests import abstract

from storage import open_store
from tests.judges.as_filesystem import StoreFileSystem

pytestmark = pytest.mark.judges

Place = tuple[str, dict[str, Any]]


class JudgedFixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, place: Place) -> StoreFileSystem:
        url, options = place
        return StoreFileSystem(open_store(url, **options), part_nbytes=5 << 20)

    @pytest.fixture
    def fs_path(self) -> str:
        return "tests"

    @pytest.fixture
    def fs_join(self) -> Any:
        return posixpath.join

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestCopy(abstract.AbstractCopyTests, JudgedFixtures):  # type: ignore[misc]
    pass


class TestGet(abstract.AbstractGetTests, JudgedFixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, JudgedFixtures):  # type: ignore[misc]
    pass


class TestOpen(abstract.AbstractOpenTests, JudgedFixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, JudgedFixtures):  # type: ignore[misc]
    pass
