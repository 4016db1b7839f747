"""Roots that are encrypted and compressed, kept for ever: every later version has to load them.

`root_encrypted` (AES-256-GCM and zstd) and `root_compressed` (zstd) were saved once by three ranks
with `python -m tests.golden.test_root_encoded DIRECTORY`: the state of `test_root_v1`, step 1. The
key is the bytes 0 to 31.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from storage import open_store
from tests.e2e.job import Job
from tests.golden import test_root_v1 as plain

GOLDEN = Path(__file__).parent
KEY = {"encryption_key": bytes(range(32))}
ROOTS: dict[str, dict[str, Any]] = {"root_encrypted": KEY, "root_compressed": {}}

pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")
pytest.importorskip("zstandard", reason="the extra 'encode' is not installed")


@pytest.mark.parametrize("name", ROOTS)
def test_golden_roots_load_on_other_rank_counts_and_verify(name: str) -> None:
    url, options = str(GOLDEN / name), ROOTS[name]
    for size in (1, 2, 3):
        states = [plain.blank_state(rank, size) for rank in range(size)]
        job = Job(size, lambda rank: open_store(url, **options))
        reports = job.load(lambda rank, states=states: states[rank])  # type: ignore[misc]
        assert [report.step for report in reports] == [1] * size
        for rank, state in enumerate(states):
            plain.assert_is(state, 1, rank, size)
    assert ckpt.verify(url, storage_options=options).ok


def _make(directory: str) -> None:
    for name, options in ROOTS.items():
        url = f"{directory}/{name}"
        plain.make(
            lambda rank, url=url, options=options: open_store(url, compression="zstd", **options), 1
        )  # type: ignore[misc]


if __name__ == "__main__":
    _make(sys.argv[1])
