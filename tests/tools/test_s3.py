"""Looking at a checkpoint in S3, and exporting from and to it, is as on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import ckpt
from ckpt.cli import main
from storage import open_store
from tests.servers import S3Server, moto_server
from tests.tools.conftest import make_net
from tests.tools.test_serving import Stream, request, serving

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture(scope="module")
def bucket(server: S3Server) -> str:
    """A bucket with one checkpoint of the model of these tests, below `run`."""
    name = server.make_bucket()
    ckpt.save({"model": make_net()}, f"s3://{name}/run", step=3, storage_options=server.options)
    return name


def test_tensors_and_regions_are_read(server: S3Server, bucket: str) -> None:
    expected = make_net().big
    with ckpt.open(f"s3://{bucket}/run", storage_options=server.options) as ck:
        assert torch.equal(ck["model.big"], expected)
        assert torch.equal(ck.read("model.big", (1, slice(5, 9))), expected[1, 5:9])
    assert ckpt.verify(f"s3://{bucket}/run", storage_options=server.options).ok


def test_export_goes_from_bucket_to_bucket(server: S3Server, bucket: str) -> None:
    target = f"s3://{bucket}/out/model.safetensors"
    ckpt.export(f"s3://{bucket}/run", target, storage_options=server.options)
    data = open_store(f"s3://{bucket}/out", **server.options).get("model.safetensors")
    assert torch.equal(load(data)["big"], make_net().big)


def test_commands_take_the_options_of_the_store(
    server: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", f"endpoint_url={server.endpoint_url}", "-o", f"key={server.key}"]
    options += ["-o", f"secret={server.secret}"]
    assert main(["ls", f"s3://{bucket}/run", *options]) == 0
    assert main(["verify", f"s3://{bucket}/run", *options]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out


def test_copies_go_to_a_bucket_and_back_and_can_be_continued(
    server: S3Server, plain_root: str, tmp_path: Path
) -> None:
    name = server.make_bucket()
    up = f"s3://{name}/release"
    first = ckpt.copy(plain_root, up, other_options=server.options)
    assert first.nbytes_written == first.nbytes
    store = open_store(up, **server.options)
    store.delete("MANIFEST")  # as if the run had died before the last object
    again = ckpt.copy(plain_root, up, other_options=server.options)
    assert again.nbytes_written == 0 and ckpt.verify(up, storage_options=server.options).ok
    down = str(tmp_path / "back")
    ckpt.reshard(up, down, ranks=2, storage_options=server.options)
    assert ckpt.diff(plain_root, down).identical
    report = ckpt.diff(plain_root, up, step_a=5, other_options=server.options)
    assert report.changed and not report.only_a
    root = f"s3://{name}/whole"
    ckpt.copy(plain_root, root, root=True, other_options=server.options)
    assert [info.step for info in ckpt.list_steps(root, server.options)] == [5, 10]


def test_spread_roots_are_copied_to_plain_ones_and_to_others_spread(
    server: S3Server, tmp_path: Path
) -> None:
    """Where files lie is the affair of each root; a copy is spread as it was requested."""
    name = server.make_bucket()
    spread, other = f"s3://{name}/spread", f"s3://{name}/other"
    state = {"model": make_net()}
    for step in (1, 2):
        ckpt.save(state, spread, step=step, storage_options={**server.options, "spread": 3})
    plain = str(tmp_path / "plain")
    ckpt.copy(spread, plain, root=True, storage_options=server.options)
    ckpt.copy(spread, str(tmp_path / "one"), step=1, storage_options=server.options)
    options = {**server.options, "spread": 5}
    for _ in range(2):  # the second time finds all there
        report = ckpt.copy(
            spread,
            other,
            root=True,
            storage_options=server.options,
            other_options=options,
        )
    assert report.nbytes_written == 0
    ckpt.save(state, other, step=3, storage_options=server.options)
    assert [info.step for info in ckpt.list_steps(other, server.options)] == [1, 2, 3]
    assert ckpt.verify(other, storage_options=server.options).ok
    assert ckpt.diff(other, plain, step_a=2, step_b=2, storage_options=server.options).identical
    assert ckpt.verify(str(tmp_path / "one")).ok
    keys = {info.key for info in open_store(f"s3://{name}", **server.options).list("other/")}
    files = {key for key in keys if key.endswith(".safetensors")}
    assert files and all(key.startswith("other/spread/") for key in files)


def test_missing_bucket_is_reported_in_one_line(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", f"endpoint_url={server.endpoint_url}", "-o", "key=k", "-o", "secret=s"]
    assert main(["ls", "s3://no-such-bucket-here/run", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ckpt: error: ") and "no-such-bucket-here" in err
    assert err.count("\n") == 1


def test_a_run_in_a_bucket_is_followed_beside_one_on_a_disk(
    server: S3Server, tmp_path: Path
) -> None:
    url, local = f"s3://{server.make_bucket()}/run", str(tmp_path / "run")
    ckpt.save({"x": torch.ones(8)}, url, step=1, storage_options=server.options)
    ckpt.save({"x": torch.ones(8)}, local, step=5)
    with serving(url, local, options=server.options) as page:
        shown = request(page, "/")[2]
        assert "step 1" in shown and "step 5" in shown and server.secret not in shown
        with Stream(page) as stream:
            ckpt.save({"x": torch.ones(8)}, url, step=2, storage_options=server.options)
            assert "step 2, <time" in stream.until(">2</a>")["data"]
