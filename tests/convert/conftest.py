"""DCP checkpoints as torch writes them, made once: one start of ranks per world size."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.convert.jobs import save_all, saved_here
from tests.ranks import run_ranks


class Saved(NamedTuple):
    """A DCP directory, and the full state dicts that torch had when it was saved."""

    folder: str
    full: dict[str, Any]


@pytest.fixture(scope="session")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Saved]:
    """Checkpoints by number of ranks and engine."""
    saved = {}
    for size in (1, 2, 3, 4):
        folder = tmp_path_factory.mktemp(f"dcp{size}")
        if size == 1:
            full = saved_here(folder)
        else:
            full = run_ranks(size, save_all, str(folder), timeout_seconds=120)[0]
        for name, state in full.items():
            saved[size, name] = Saved(f"{folder}/{name}", state)
    return saved
