"""Dedup on S3: what is referred to is read, verified and copied from a bucket as from a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from storage import open_store
from tests.e2e.lora import assert_is_lora, lora_at
from tests.servers import S3Server, moto_server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.mark.parametrize("spread", [False, True], ids=["plain-keys", "spread-keys"])
def test_a_bucket_takes_dedup_as_a_disk_does(
    server: S3Server, tmp_path: Path, spread: bool
) -> None:
    url = f"s3://{server.make_bucket()}/run"
    options: dict[str, Any] = dict(server.options)
    if spread:
        options["spread"] = 7
    for step in (1, 2, 3):
        report = ckpt.save(lora_at(step), url, step=step, dedup=True, storage_options=options)
        assert (report.nbytes_referenced > 0) == (step > 1)
    for step in (1, 3):
        state = lora_at(0)
        ckpt.load(state, url, step=step, storage_options=options)
        assert_is_lora(state, step)
    assert ckpt.verify(url, storage_options=options).ok
    ckpt.copy(url, str(tmp_path / "copy"), storage_options=options, other_options={})
    state = lora_at(0)
    ckpt.load(state, str(tmp_path / "copy"))
    assert_is_lora(state, 3)
    assert next(iter(open_store(url, **options).list("steps/")), None) is not None
