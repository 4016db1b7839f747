"""Conversion from and to buckets is as on a disk."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load

import ckpt
from storage import open_store
from tests.convert.jobs import assert_same
from tests.servers import S3Server, moto_server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {"large": torch.randn(1200, 1500), "small": torch.randn(5), "n": torch.tensor(3)}


@pytest.fixture(scope="module")
def bucket(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket with a DCP directory below `dcp`."""
    folder = tmp_path_factory.mktemp("s3") / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state(), "step": 4}, checkpoint_id=folder)
    name = server.make_bucket()
    store = open_store(f"s3://{name}/dcp", **server.options)
    for path in folder.iterdir():
        data = path.read_bytes()
        with store.create(path.name, len(data), part_nbytes=max(len(data), 1)) as writer:
            writer.write_part(0, [memoryview(bytearray(data))])
    return name


def test_dcp_in_a_bucket_becomes_a_root_in_it(server: S3Server, bucket: str) -> None:
    root = f"s3://{bucket}/run"
    ckpt.import_checkpoint(
        f"s3://{bucket}/dcp",
        root,
        verify=True,
        other_options=server.options,
        storage_options=server.options,
    )
    with ckpt.open(root, storage_options=server.options) as opened:
        assert_same({name: opened[f"model.{name}"] for name in state()}, state())
        assert opened.values == {"step": 4}


def test_dcp_in_a_bucket_becomes_one_file_there(server: S3Server, bucket: str) -> None:
    for name in ("model.safetensors", "model.pt"):
        url = f"s3://{bucket}/out/{name}"
        ckpt.export(f"s3://{bucket}/dcp", url, verify=True, storage_options=server.options)
    store = open_store(f"s3://{bucket}/out", **server.options)
    assert_same(load(store.get("model.safetensors")), state())
    exported = torch.load(io.BytesIO(store.get("model.pt")), weights_only=True)
    assert_same(exported, state())
    assert sorted(info.key for info in store.list("")) == ["model.pt", "model.safetensors"]


def test_from_a_bucket_to_a_disk_and_back(server: S3Server, bucket: str, tmp_path: Path) -> None:
    whole = dict(optimizer=True)
    ckpt.export(
        f"s3://{bucket}/dcp",
        str(tmp_path / "dcp"),
        format="dcp",
        **whole,
        storage_options=server.options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {"model": {n: torch.zeros_like(t) for n, t in state().items()}, "step": 0}
        dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    assert_same(wanted, {"model": state(), "step": 4})
    ckpt.import_checkpoint(
        str(tmp_path / "dcp"), f"s3://{bucket}/again", storage_options=server.options
    )
    assert ckpt.verify(f"s3://{bucket}/again", storage_options=server.options).ok
