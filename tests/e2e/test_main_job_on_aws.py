"""The main job in the fake AWS: save, kill, resume on another number of ranks, export.

Method: five regions, each with a policy that asks for a KMS key, behind a proxy that tunnels and an
authority of its own, and a bucket of S3 Express; ranks are threads with a store each. The fake
checks hosts, signatures and rules. Every object must have moved from and into the ranks' memory:
those requests are counted on both sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ckpt
from ckpt.cli import main
from ckpt.commit.locate import live_entries
from storage import Store, open_store
from storage.s3.requests import S3Requests
from storage.testing import FaultPlan, FaultyStore
from tests.e2e.job import Job, Sharded
from tests.fake_aws import FakeAws, fake_aws, http_proxy
from tests.protocol.invariants import check_live_complete
from tests.storage.test_s3_aws import FIVE, refused
from tests.thread_ranks import RanksFailed

pytestmark = pytest.mark.server

KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"}
EXPRESS = "train--use1-az4--x-s3"
ROWS = 9 << 10  # of 4 KiB: 18 MiB for each of two ranks, which is more than one part


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAws]:
    with fake_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


def state_at(step: int, rank: int, size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    model = torch.nn.Linear(7, 5, bias=False)
    model.weight.data = torch.randn(5, 7, generator=generator)
    rows = torch.arange(ROWS * 1024, dtype=torch.float32).view(ROWS, 1024) + step
    return {"model": model, "rows": Sharded(rows, rank, size), "step": step}


def saved(stores: list[Store], step: int) -> None:
    size = len(stores)
    Job(size, stores.__getitem__).save(lambda rank: state_at(step, rank, size), step=step)


@pytest.mark.parametrize("place", [*FIVE, "express"])
def test_the_main_job_runs_as_amazon_has_it(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    region = "us-east-1" if place == "express" else place
    bucket = EXPRESS if place == "express" else f"bucket-of-{place}"
    given: dict[str, Any] = {} if place == "express" else {"s3_additional_kwargs": KMS}
    kinds: dict[str, Any] = {"zone": "use1-az4"} if place == "express" else {"kms_key": "key-1"}
    aws.make(bucket, region, **kinds)
    for name, value in {**aws.environment, "AWS_REGION": region}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)  # botocore reads this one
    carried: Counter[str] = Counter()
    carry = S3Requests._carried

    def count(
        store: S3Requests, operation: str, key: str, method: str, *more: Any, **x: Any
    ) -> Any:
        carried[method] += 1
        return carry(store, operation, key, method, *more, **x)

    monkeypatch.setattr(S3Requests, "_carried", count)
    aws.seen.clear()
    with http_proxy({"*": f"http://127.0.0.1:{aws.port}"}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        run_main_job(f"s3://{bucket}/runs/7", given, tmp_path)
        assert all(line.startswith("CONNECT ") for line in proxy.requests) and proxy.requests
    assert refused(aws) == []
    seen = Counter(one.operation for one in aws.seen)
    assert carried["upload_part"] == seen["PUT partNumber"] >= 4
    assert carried["get_object"] == seen["GET"] >= 10
    # The second copy of a record that took long goes through botocore.
    assert 10 <= carried["put_object"] <= seen["PUT"] <= carried["put_object"] + 2
    if place == "express":
        assert aws.count("GET session") >= 1
    else:
        objects = aws.buckets[bucket].objects.values()
        key = "x-amz-server-side-encryption-aws-kms-key-id"
        assert objects and all(one.headers.get(key) == "key-1" for one in objects)


def run_main_job(url: str, options: dict[str, Any], folder: Path) -> None:
    two, three = ([open_store(url, **options) for _ in range(size)] for size in (2, 3))
    saved(two, 1)
    plan = FaultPlan(7, kill=True)
    with pytest.raises(RanksFailed):
        saved([FaultyStore(store, plan) for store in two], 2)
    assert [entry.step for entry in live_entries(three[0])] == [1]
    states = [state_at(9, rank, 3) for rank in range(3)]
    Job(3, three.__getitem__).load(states.__getitem__)
    for rank, state in enumerate(states):
        assert state["step"] == 1
        assert torch.equal(state["rows"].local, state_at(1, rank, 3)["rows"].local)
    saved(three, 3)
    assert check_live_complete(three[0]) == []
    for store in (*two, *three):
        store.close()
    target = folder / "model.safetensors"
    model = dict(entry="model")
    ckpt.export(url, str(target), **model, storage_options=options)
    exported = load_file(target)
    assert torch.equal(exported["weight"], state_at(3, 0, 1)["model"].weight)


@pytest.mark.parametrize("region", ["eu-central-1", "ap-east-1"])
def test_the_first_lines_of_the_readme_run(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, region: str
) -> None:
    """With nothing but credentials, AWS_REGION, and the authority of the test."""
    for name, value in {**aws.environment, "AWS_REGION": region}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.chdir(tmp_path)
    bucket = aws.make(f"readme-{region}", region, is_new=True).name
    text = (Path(__file__).parents[2] / "README.md").read_text()
    url = f"s3://{bucket}/first"
    first, second = re.findall(r"```python\n(.*?)```", text.replace("runs/first", url), re.S)[:2]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    try:
        exec(first, {})
    finally:
        dist.destroy_process_group()
    assert [info.step for info in ckpt.list_steps(url)] == [100, 200, 300]
    exec(second, {"ckpt": ckpt})
    (export,) = re.findall(r"^ckpt (export .*)", text.replace("runs/first", url), re.M)
    assert main(export.split()) == 0
    assert (tmp_path / "model.safetensors").exists()
