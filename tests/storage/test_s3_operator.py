"""docs/howto/s3_operator.md is right: its policies suffice and nothing in them is idle, its rules
are taken, versions and encryption work.

Method: the documents are read from the page. Moto enforces policies (signatures and actions), each
user; an action is left out, and what the page says of it fails.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

import ckpt
from ckpt.cli import main
from storage import AccessDeniedError, open_store
from tests.servers import S3Server, moto_server

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "s3_operator.md"
PREFIX = "training"

pytestmark = pytest.mark.server


def from_page(number: int, bucket: str) -> dict[str, Any]:
    """The documents of the page in their order: two policies, and the lifecycle rules."""
    documents = re.findall(r"```text\n(\{.*?\n\})\n```", PAGE.read_text(), re.S)
    text = documents[number].replace("BUCKET", bucket).replace("PREFIX", PREFIX)
    document: dict[str, Any] = json.loads(text)
    return document


class Account:
    """A server that enforces policies, a bucket, and users with these policies."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.bucket = server.make_bucket()
        self.url = f"s3://{self.bucket}/{PREFIX}"

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self._server.endpoint_url,
            aws_access_key_id=self._server.key,
            aws_secret_access_key=self._server.secret,
            region_name="us-east-1",
        )

    def enforce(self, *, enforced: bool) -> None:
        request = urllib.request.Request(
            f"{self._server.endpoint_url}/moto-api/reset-auth",
            data=b"0" if enforced else b"inf",
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request, timeout=60).close()

    def user(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Storage options of a new user who may do what `policy` says, once it is enforced."""
        iam = self.client("iam")
        name = f"user-{len(iam.list_users()['Users'])}"
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        secrets = {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
        return {**self._server.options, **secrets}


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    with moto_server() as server:
        yield Account(server)


@pytest.fixture
def enforcing(account: Account) -> Iterator[Callable[[], None]]:
    """Call it when all users are made."""
    yield lambda: account.enforce(enforced=True)
    account.enforce(enforced=False)


def command(options: dict[str, Any], *words: str) -> int:
    given = [f"-o{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]
    return main([*words, *given])


def state(mib: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(mib << 18)}


def test_the_policy_suffices_for_a_training_and_ends_at_its_prefix(
    account: Account, enforcing: Callable[[], None]
) -> None:
    options = account.user(from_page(0, account.bucket))
    enforcing()
    url = f"{account.url}/suffices"
    ckpt.save(state(), url, step=1, storage_options=options)
    ckpt.save(state(17), url, step=2, storage_options=options)  # an upload in parts
    assert ckpt.load(state(17), url, storage_options=options).step == 2
    assert command(options, "verify", url, "--mark") == 0
    assert command(options, "prune", url, "--keep-last", "1", "--yes") == 0
    assert [s.step for s in ckpt.list_steps(url, storage_options=options)] == [2]
    with pytest.raises(AccessDeniedError):
        ckpt.save(state(), f"s3://{account.bucket}/elsewhere", step=1, storage_options=options)


def left_upload(account: Account, url: str, step: int, options: dict[str, Any]) -> str:
    """An upload that a dead job left in the directory of `step`."""
    (entry,) = [s for s in ckpt.list_steps(url, storage_options=options) if s.step == step]
    key = f"{entry.url.removeprefix(f's3://{account.bucket}/')}/rank00009-000.safetensors"
    account.client("s3").create_multipart_upload(Bucket=account.bucket, Key=key)
    return key


def test_no_action_of_the_policy_is_idle(
    account: Account, enforcing: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = from_page(0, account.bucket)
    whole = account.user(policy)
    actions = [action for part in policy["Statement"] for action in part["Action"]]
    without = {}
    for left_out in actions:
        parts = [
            {**part, "Action": [action for action in part["Action"] if action != left_out]}
            for part in policy["Statement"]
        ]
        without[left_out] = account.user({**policy, "Statement": parts})
    url = f"{account.url}/idle"
    for step in (1, 2, 3, 4):
        ckpt.save(state(), url, step=step, storage_options=whole)
        left_upload(account, url, step, whole)
    enforcing()
    for action, call in (
        ("s3:ListBucket", lambda to: ckpt.list_steps(url, storage_options=to)),
        ("s3:GetObject", lambda to: ckpt.load(state(), url, storage_options=to)),
        ("s3:PutObject", lambda to: ckpt.save(state(), url, step=5, storage_options=to)),
    ):
        with pytest.raises(AccessDeniedError):
            call(without.pop(action))
    assert sorted(without) == sorted(
        ["s3:DeleteObject", "s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload"]
    )
    # Each retires one more: what the log no longer has, the next prune does not delete again.
    for kept, options in zip("321", without.values(), strict=True):
        capsys.readouterr()
        code = command(options, "prune", url, "--keep-last", kept, "--yes")
        assert code == 1 and "AccessDenied" in capsys.readouterr().err


def test_a_reader_needs_two_actions(account: Account, enforcing: Callable[[], None]) -> None:
    writer, reader = (account.user(from_page(number, account.bucket)) for number in (0, 1))
    url = f"{account.url}/reader"
    ckpt.save(state(), url, step=1, storage_options=writer)
    enforcing()
    assert command(reader, "ls", url) == 0
    assert command(reader, "verify", url) == 0
    assert ckpt.load(state(), url, storage_options=reader).step == 1
    with pytest.raises(AccessDeniedError):
        ckpt.save(state(), url, step=2, storage_options=reader)


def test_the_lifecycle_rules_are_taken(account: Account) -> None:
    s3, rules = account.client("s3"), from_page(2, account.bucket)
    s3.put_bucket_lifecycle_configuration(Bucket=account.bucket, LifecycleConfiguration=rules)
    taken = s3.get_bucket_lifecycle_configuration(Bucket=account.bucket)["Rules"]
    assert [rule["ID"] for rule in taken] == [rule["ID"] for rule in rules["Rules"]]
    assert taken[0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}
    # A rule with an age for current objects would expire parts of checkpoints.
    assert all("Days" not in rule.get("Expiration", {}) for rule in taken)
    s3.delete_bucket_lifecycle(Bucket=account.bucket)


def test_a_versioned_bucket_keeps_what_retention_deletes(account: Account) -> None:
    s3, bucket = account.client("s3"), "versioned"
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    options, url = account.user(from_page(0, bucket)), f"s3://{bucket}/{PREFIX}"
    for step in (1, 2):
        ckpt.save(state(), url, step=step, storage_options=options)
    assert command(options, "prune", url, "--keep-last", "1", "--yes") == 0
    assert ckpt.load(state(), url, storage_options=options).step == 2
    versions = s3.list_object_versions(Bucket=bucket, Prefix=f"{PREFIX}/steps/00000001-")
    assert versions["DeleteMarkers"] and not any(v["IsLatest"] for v in versions["Versions"])
    written = [v["Key"] for v in s3.list_object_versions(Bucket=bucket)["Versions"]]
    assert len(set(written)) == len(written), "each name is written once"


def test_a_key_is_asked_for_by_request(account: Account) -> None:
    key = account.client("kms").create_key()["KeyMetadata"]["Arn"]
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
    options = {
        **account.user(from_page(0, account.bucket)),
        "s3_additional_kwargs": encryption,
    }
    url = f"{account.url}/encrypted"
    ckpt.save(state(17), url, step=1, storage_options=options)  # in parts
    assert ckpt.load(state(17), url, storage_options=options).step == 1
    s3, store = account.client("s3"), open_store(url, **options)
    keys = [info.key for info in store.list("")]
    store.close()
    assert any(name.endswith(".safetensors") for name in keys)
    for name in keys:
        head = s3.head_object(Bucket=account.bucket, Key=f"{PREFIX}/encrypted/{name}")
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", key), name
