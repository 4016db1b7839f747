"""S3 as Amazon has it: every region, kind of host, kind of bucket, rule and option.

Method: a fake AWS on the loopback (`tests.fake_aws`) checks hosts, signatures, certificates and
rules as the documents say. Requests of every option and region are compared with those that s3fs
itself would send (`tests.storage.s3_table`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from storage import AccessDeniedError, InvalidUrlError, KeyExistsError, open_store
from storage.retry import RetryPolicy
from storage.testing import write_object
from tests.conftest import Scale
from tests.fake_aws import FakeAws, fake_aws, http_proxy
from tests.storage.s3_table import OPTIONS, differences, models_read_once, regions

pytestmark = pytest.mark.server

MiB = 1024 * 1024
QUICK = RetryPolicy(attempts_max=3, sleep=lambda seconds: None)
FIVE = ("us-east-1", "eu-central-1", "ap-east-1", "me-south-1", "cn-north-1")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAws]:
    with fake_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(running: FakeAws, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """With nothing but credentials, and an authority, in the environment."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.seen.clear()
    return running


def use(url: str, **options: Any) -> None:
    """Everything that a store does: small objects, an upload of three parts, lists, deletions."""
    store = open_store(url, retry=QUICK, **options)
    data = bytes(range(251)) * (11 * MiB // 251)
    store.put_if_absent("log/b", b"first")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("log/b", b"second")
    store.put_if_absent("log/a c+ü", b"")
    write_object(store, "steps/large", data, part_nbytes=5 * MiB)
    target = bytearray(6 * MiB)
    store.get_into("steps/large", 7, [memoryview(target)[:99], memoryview(target)[99:]])
    assert target == data[7 : 6 * MiB + 7]
    assert store.get("log/b") == b"first"
    assert [one.key for one in store.list("log/")] == ["log/a c+ü", "log/b"]
    assert [one.key for one in store.list("l", after="log/a c+ü")] == ["log/b"]
    assert store.info("steps/large").nbytes == len(data)
    store.delete("log/b")
    assert not store.exists("log/b")
    store.create("steps/dead", 6 * MiB, part_nbytes=5 * MiB).__enter__()
    assert store.abort_unfinished("steps/de") == 1
    store.close()


def refused(aws: FakeAws) -> list[tuple[str, str]]:
    """The answers that were errors, but for those that `use` asks for."""
    asked_for = ("PreconditionFailed", "NoSuchKey")
    return [(one.operation, one.code) for one in aws.seen if one.code and one.code not in asked_for]


# Regions and hosts -------------------------------------------------------------------------------


@pytest.mark.parametrize("region", FIVE)
def test_a_region_alone_is_enough(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    """Each request goes to the region's own host at once."""
    monkeypatch.setenv("AWS_REGION", region)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    aws.make("bucket", region, is_new=True)
    use("s3://bucket/runs/7")
    assert not refused(aws)
    domain = "amazonaws.com" + ".cn" * region.startswith("cn-")
    host = "bucket.s3" if region == "us-east-1" else f"bucket.s3.{region}"
    assert {one.host for one in aws.seen} == {f"{host}.{domain}"}


@pytest.mark.parametrize(
    ("here", "there", "is_new", "code"),
    [
        ("us-east-1", "eu-central-1", True, "TemporaryRedirect"),
        ("us-east-1", "ap-east-1", False, "IllegalLocationConstraintException"),
        ("eu-west-1", "ap-east-1", False, "PermanentRedirect"),
        ("aws-global", "eu-central-1", True, "TemporaryRedirect"),
        ("aws-global", "ap-east-1", False, "IllegalLocationConstraintException"),
        ("aws-global", "eu-west-1", False, "AuthorizationHeaderMalformed"),
    ],
)
@pytest.mark.parametrize("first", ["small", "bulk"])
def test_another_region_is_found_once_and_remembered(
    aws: FakeAws, here: str, there: str, is_new: bool, code: str, first: str
) -> None:
    """301, 307 and both kinds of 400, answered to a small request or to one that moves bytes."""
    aws.make("bucket", there, is_new=is_new)
    store = open_store("s3://bucket/run", retry=QUICK, client_kwargs={"region_name": here})
    if first == "small":
        assert list(store.list("")) == []
    store.put_if_absent("a", b"x")
    write_object(store, "b", bytes(6 * MiB), part_nbytes=5 * MiB)
    assert store.get("a") == b"x"
    store.close()
    away = [one for one in refused(aws) if one[1] != "NoSuchKey"]
    assert 1 <= len(away) <= 2 and {one[1] for one in away} <= {code, "400", "301", "307"}, away


@pytest.mark.parametrize(
    ("options", "host"),
    [
        ({"config_kwargs": {"use_fips_endpoint": True}}, "bucket.s3-fips.us-west-2"),
        ({"config_kwargs": {"use_dualstack_endpoint": True}}, "bucket.s3.dualstack.us-west-2"),
        (
            {"config_kwargs": {"use_fips_endpoint": True, "use_dualstack_endpoint": True}},
            "bucket.s3-fips.dualstack.us-west-2",
        ),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "s3.us-west-2"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "bucket.s3-accelerate"),
        ({"endpoint_url": "https://s3.us-west-2.amazonaws.com"}, "s3.us-west-2"),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, "bucket.s3.us-west-2"),
    ],
)
def test_every_kind_of_host_is_used_by_all_requests(
    aws: FakeAws, options: dict[str, Any], host: str
) -> None:
    aws.make("bucket", "us-west-2", is_accelerated=True)
    use("s3://bucket/run", client_kwargs={"region_name": "us-west-2"}, **options)
    assert not refused(aws)
    assert {one.host for one in aws.seen} == {f"{host}.amazonaws.com"}


def test_a_bucket_with_dots_has_a_certificate_by_its_path(aws: FakeAws) -> None:
    aws.make("a.b.c", "eu-west-1")
    use("s3://a.b.c/run", client_kwargs={"region_name": "eu-west-1"})
    assert {one.host for one in aws.seen} == {"s3.eu-west-1.amazonaws.com"}


def test_an_access_point_is_named_by_its_arn(aws: FakeAws) -> None:
    aws.make("behind", "eu-west-1")
    aws.access_points["team-123456789012"] = "behind"
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/team"
    use(f"s3://{arn}/run/7", client_kwargs={"region_name": "eu-west-1"})
    assert not refused(aws)
    (host,) = {one.host for one in aws.seen}
    assert host == "team-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    assert "run/7/steps/large" in aws.buckets["behind"].objects


# Kinds of buckets --------------------------------------------------------------------------------


def test_express_has_sessions_and_an_order_of_its_own(aws: FakeAws) -> None:
    """CreateSession for reading and writing, its token on every request, the zone's host."""
    name = "train--use1-az4--x-s3"
    aws.make(name, "us-east-1", zone="use1-az4")
    use(f"s3://{name}/run", client_kwargs={"region_name": "us-east-1"})
    assert not refused(aws)
    assert 1 <= aws.count("GET session") <= 2
    others = [one for one in aws.seen if one.operation != "GET session"]
    assert all("x-amz-s3session-token" in one.headers for one in others)
    hosts = {one.host for one in aws.seen}
    assert hosts == {f"{name}.s3express-use1-az4.us-east-1.amazonaws.com"}


def test_a_policy_that_asks_for_a_key_is_kept(aws: FakeAws) -> None:
    aws.make("bucket", "us-east-1", kms_key="key-1")
    region: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}}
    kms = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"}
    use("s3://bucket/run", s3_additional_kwargs=kms, **region)
    assert not refused(aws)
    store = open_store("s3://bucket/other", retry=QUICK, **region)
    with pytest.raises(AccessDeniedError):
        store.put_if_absent("a", b"x")
    store.close()


def test_the_payer_is_named_in_every_request(aws: FakeAws) -> None:
    aws.make("bucket", "us-east-1", requester_pays=True)
    region: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}}
    use("s3://bucket/run", requester_pays=True, **region)
    assert not refused(aws)
    store = open_store("s3://bucket/other", retry=QUICK, **region)
    for call in (lambda: list(store.list("")), lambda: store.get("a")):
        with pytest.raises(AccessDeniedError):
            call()
    store.close()


@pytest.mark.parametrize("kind", ["is_locked", "is_versioned"])
def test_buckets_that_keep_what_is_deleted_are_fine(aws: FakeAws, kind: str) -> None:
    bucket = aws.make("bucket", "us-east-1", **{kind: True})
    use("s3://bucket/run", client_kwargs={"region_name": "us-east-1"})
    assert not refused(aws)
    assert [key for key, version in bucket.older if version is None] == ["run/log/b"]


# Trouble -----------------------------------------------------------------------------------------


def test_clocks_tokens_and_throttling_are_answered_right(aws: FakeAws) -> None:
    aws.make("bucket", "us-east-1")
    aws.secrets["ASIATEMP"] = ("s", "token")
    keys = {"key": "ASIATEMP", "secret": "s", "token": "token"}
    store = open_store(
        "s3://bucket/run", retry=QUICK, client_kwargs={"region_name": "us-east-1"}, **keys
    )
    store.put_if_absent("a", b"x")
    for name, change in (("RequestTimeTooSkewed", 3600.0), ("", 0.0)):
        aws.skew_seconds = change
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.get("a"),
            lambda: store.info("a"),
            lambda: store.put_if_absent("b", b"x"),
        )
        for call in calls if name else ():
            with pytest.raises(AccessDeniedError):
                call()
    aws.slow_downs = 2
    assert store.get("a") == b"x"
    aws.slow_downs = 2
    store.put_if_absent("b", b"x")
    aws.slow_seconds = 0.3
    assert store.get("b") == b"x"
    aws.slow_seconds = 0.0
    aws.expired.add("ASIATEMP")
    for call in (lambda: store.get("a"), lambda: list(store.list(""))):
        with pytest.raises(AccessDeniedError, match=r"ExpiredToken|400"):
            call()
    store.close()


def test_a_token_that_is_renewed_is_used_at_once(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a process that gives credentials: one that is over before its time is asked for again."""
    aws.make("bucket", "us-east-1")
    aws.secrets["ASIAFIRST"], aws.secrets["ASIASECOND"] = ("s", "t1"), ("s", "t2")
    given = tmp_path / "given.json"
    (tmp_path / "config").write_text(
        f"[default]\nregion = us-east-1\ncredential_process = cat {given}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    def give(name: str, token: str, seconds: float) -> None:
        until = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        keys = {"AccessKeyId": name, "SecretAccessKey": "s", "SessionToken": token}
        given.write_text(json.dumps({"Version": 1, **keys, "Expiration": until.isoformat()}))

    give("ASIAFIRST", "t1", 300.0)  # so soon that botocore asks again at each request
    store = open_store("s3://bucket/run", retry=QUICK)
    store.put_if_absent("a", b"x")
    aws.expired.add("ASIAFIRST")
    give("ASIASECOND", "t2", 3600.0)
    assert store.get("a") == b"x"
    store.put_if_absent("b", b"x")
    store.close()
    assert len(refused(aws)) <= 2


@pytest.mark.parametrize("first", ["small", "bulk"])
def test_an_authority_that_is_not_known_fails_at_once(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    aws.make("bucket", "us-east-1")
    store = open_store("s3://bucket/run", client_kwargs={"region_name": "us-east-1"})
    with pytest.raises(InvalidUrlError, match="AWS_CA_BUNDLE"):
        store.info("a") if first == "small" else store.get("a")
    store.close()
    verify = {"region_name": "us-east-1", "verify": str(aws.authority.path)}
    use("s3://bucket/run", client_kwargs=verify)
    use("s3://bucket/run2", client_kwargs={**verify, "verify": False})


@pytest.mark.parametrize("first", ["small", "bulk"])
def test_a_name_that_does_not_resolve_fails_at_once(aws: FakeAws, first: str) -> None:
    store = open_store("s3://bucket/run", endpoint_url="https://s3.nowhere.example")
    with pytest.raises(InvalidUrlError, match="AWS_ENDPOINT_URL"):
        store.info("a") if first == "small" else store.get("a")
    store.close()


@pytest.mark.parametrize("password", ["", "user:pass@"])
def test_a_proxy_tunnels_every_request(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    """Through CONNECT, by `HTTPS_PROXY`; hosts of `NO_PROXY` go without."""
    aws.make("bucket", "us-east-1")
    region: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}}
    wanted = "Basic dXNlcjpwYXNz" if password else ""
    with http_proxy({"*": f"http://127.0.0.1:{aws.port}"}, wanted) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("http://", f"http://{password}"))
        use("s3://bucket/run", **region)
        assert proxy.requests and not refused(aws)
        assert all(line.startswith("CONNECT bucket.s3.") for line in proxy.requests)
        if password:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            store = open_store("s3://bucket/run", **region)
            with pytest.raises(InvalidUrlError, match="HTTPS_PROXY"):
                store.get("a")
            store.close()
        monkeypatch.setenv("NO_PROXY", "amazonaws.com")
        proxy.requests.clear()
        use("s3://bucket/other", **region)
        assert not proxy.requests


# The table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_requests_of_both_ways_differ_in_nothing(
    aws: FakeAws, name: str, scale: Scale, seed: int
) -> None:
    """In one region, or all; `python -m tests.storage.s3_table` prints the table."""
    chosen = regions()
    if not scale.soak:
        chosen = [chosen[seed % len(chosen)]]
    with models_read_once():
        assert [text for region in chosen for text in differences(name, region)] == []
