"""Every way to give endpoint, region and credentials works as in s3fs.

Method: stores opened by each of them, against a moto server behind a proxy that notes the requests.
`test_s3_aws.py` compares all requests with those of s3fs.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from storage import AccessDeniedError, InvalidUrlError, open_store
from storage.retry import NO_RETRY
from storage.s3.client import Transfer
from storage.s3.store import S3Store
from storage.testing import write_object
from tests.fake_aws import http_proxy
from tests.fault_proxy import fault_proxy
from tests.servers import S3Server

pytestmark = pytest.mark.server

MiB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*AWS, "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def plain_store(bucket: str, **options: Any) -> S3Store:
    return S3Store(bucket, "run", options=options, retry=NO_RETRY)


def asked(store: S3Store, key: str = "a") -> tuple[str, dict[str, str]]:
    """Url and headers of a request to read an object; nothing is sent."""
    arguments = {"Key": store.full_key(key)}
    client = store.client()
    made = asyncio.run_coroutine_threadsafe(client.prepare("get_object", arguments), client.loop)
    url, headers = made.result().request(arguments, [])
    return url, dict(headers)


def use(store: S3Store) -> None:
    data = bytes(range(256)) * (20 * 1024) + b"tail"
    store.put_if_absent("small", b"x")
    write_object(store, "large", data + data, part_nbytes=5 * MiB)
    assert store.get("small") == b"x"
    assert store.get("large") == data + data
    store.close()


def test_environment_variables_alone(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    store = plain_store(moto.make_bucket())
    url, headers = asked(store)
    assert url.startswith(moto.endpoint_url)
    assert f"Credential={moto.key}/" in headers["Authorization"]
    assert "/us-east-1/s3/" in headers["Authorization"]
    use(store)


def test_a_profile_with_a_process_that_gives_credentials(moto: S3Server, tmp_path: Path) -> None:
    """Which expire: s3fs's own session requests them again."""
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    credentials = {
        "Version": 1,
        "AccessKeyId": "from-process",
        "SecretAccessKey": "s",
        "SessionToken": "t",
        "Expiration": later.isoformat(),
    }
    program = tmp_path / "give.py"
    program.write_text(f"print({json.dumps(credentials)!r})")
    command = shlex.join([sys.executable, str(program)])
    (tmp_path / "config").write_text(
        f"[profile train]\nregion = eu-west-3\nendpoint_url = {moto.endpoint_url}\n"
        f"credential_process = {command}\n"
    )
    store = plain_store(moto.make_bucket(), profile="train")
    _, headers = asked(store)
    assert "Credential=from-process/" in headers["Authorization"]
    assert "/eu-west-3/" in headers["Authorization"]
    assert headers["X-Amz-Security-Token"] == "t"
    use(store)


def test_both_styles_of_addressing(moto: S3Server) -> None:
    urls = {}
    for style in ("path", "virtual"):
        config = {"s3": {"addressing_style": style}}
        options = {**moto.options, "endpoint_url": "http://s3.example.com:81"}
        urls[style] = asked(plain_store("bucket", **options, config_kwargs=config))[0]
    assert urls == {
        "path": "http://s3.example.com:81/bucket/run/a",
        "virtual": "http://bucket.s3.example.com:81/run/a",
    }


def test_an_endpoint_may_have_a_path(moto: S3Server) -> None:
    store = plain_store("bucket", **{**moto.options, "endpoint_url": "http://h.example/s3/v2"})
    assert asked(store, "a b")[0] == "http://h.example/s3/v2/bucket/run/a%20b"


def test_without_credentials_the_error_says_what_to_set(moto: S3Server) -> None:
    store = plain_store("bucket", endpoint_url=moto.endpoint_url)
    with pytest.raises(AccessDeniedError, match="anon=True"):
        store.get("a")
    _, headers = asked(plain_store("bucket", endpoint_url=moto.endpoint_url, anon=True))
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("endpoint", "wanted", "expected"),
    [
        ("https://s3.example.com", None, True),
        ("https://s3.example.com", False, False),
        ("http://127.0.0.1:1", None, False),
        ("http://127.0.0.1:1", True, True),
    ],
)
def test_payloads_are_unsigned_over_tls_or_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, wanted: bool | None, expected: bool
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    store = S3Store(
        "bucket",
        "",
        options={"endpoint_url": endpoint, "key": "k", "secret": "s"},
        retry=NO_RETRY,
        transfer=Transfer(unsigned_payload=wanted),
    )
    _, headers = asked(store)
    assert (headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD") is expected


@pytest.mark.parametrize("checksums", [False, True])
def test_every_upload_carries_a_checksum_for_the_server(moto: S3Server, checksums: bool) -> None:
    with fault_proxy(moto.endpoint_url) as proxy:
        options = {**S3Server(proxy.endpoint_url).options, "checksums": checksums}
        store = open_store(f"s3://{moto.make_bucket()}/run", **options)
        store.put_if_absent("put", b"x")
        write_object(store, "one", b"x" * 100, part_nbytes=5 * MiB)
        write_object(store, "parts", bytes(6 * MiB), part_nbytes=5 * MiB)
        store.close()
    puts = [request for request in proxy.requests if request.method == "PUT"]
    sent = [[n for n in request.headers if n.startswith("x-amz-checksum-")] for request in puts]
    assert sent == [["x-amz-checksum-crc32c"] if checksums else []] * 4


KMS = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}}
CONFIGURED = {**KMS, "requester_pays": True, "config_kwargs": {"user_agent_extra": "of-conf"}}


@pytest.mark.parametrize("way", ["conf", "FSSPEC_S3", "options"])
def test_settings_of_fsspec_reach_every_request(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Encryption on each request that creates, payer and agent on all, of both paths."""
    if way == "conf":
        monkeypatch.setitem(fsspec.config.conf, "s3", CONFIGURED)
    elif way == "FSSPEC_S3":
        conf: dict[str, Any] = {}
        monkeypatch.setenv("FSSPEC_S3", json.dumps(CONFIGURED))
        fsspec.config.set_conf_env(conf)
        monkeypatch.setattr(fsspec.config, "conf", conf)
        monkeypatch.setattr("fsspec.config.apply_config.__defaults__", (conf,))
    given = CONFIGURED if way == "options" else {}
    with fault_proxy(moto.endpoint_url) as proxy:
        store = plain_store(moto.make_bucket(), **S3Server(proxy.endpoint_url).options, **given)
        use(store)
    creating = [one for one in proxy.requests if one.method == "PUT" or "?uploads" in one.path]
    assert len(creating) == 5
    key = "x-amz-server-side-encryption-aws-kms-key-id"
    for one in creating:
        is_part = "partNumber" in one.path  # which inherits it from the upload
        assert is_part or one.headers[key] == "k", one
    for one in proxy.requests:
        assert one.headers["x-amz-request-payer"] == "requester", one
        assert "of-conf" in one.headers["user-agent"], one


@pytest.mark.parametrize("proxied", ["HTTP_PROXY", "config_kwargs", "conf"])
def test_a_proxy_of_any_setting_carries_every_request(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch, proxied: str
) -> None:
    """It answers for a host whose name nobody else knows."""
    bucket = moto.make_bucket()
    with http_proxy({"s3.nowhere.example:80": moto.endpoint_url}) as proxy:
        more: dict[str, Any] = {"config_kwargs": {"s3": {"addressing_style": "path"}}}
        if proxied == "HTTP_PROXY":
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
        else:
            more["config_kwargs"]["proxies"] = {"http": proxy.url}
        if proxied == "conf":
            monkeypatch.setitem(fsspec.config.conf, "s3", more)
            more = {}
        there = {**moto.options, "endpoint_url": "http://s3.nowhere.example"}
        use(plain_store(bucket, **there, **more))
    assert len(proxy.requests) == 8


def test_metadata_of_all_objects_is_added_to_ours(moto: S3Server) -> None:
    given = {"s3_additional_kwargs": {"Metadata": {"team": "a"}}}
    with fault_proxy(moto.endpoint_url) as proxy:
        use(plain_store(moto.make_bucket(), **S3Server(proxy.endpoint_url).options, **given))
    creating = [one for one in proxy.requests if "x-amz-meta-write-id" in one.headers]
    assert len(creating) == 2
    assert all(one.headers["x-amz-meta-team"] == "a" for one in creating)


def test_what_differs_with_every_object_is_no_option() -> None:
    with pytest.raises(InvalidUrlError, match="IfMatch"):
        plain_store("bucket", s3_additional_kwargs={"IfMatch": "x"})


FORKS = """
import json, os, sys
from storage.retry import NO_RETRY
from storage.s3.store import S3Store

store = S3Store(sys.argv[1], "run", options=json.loads(sys.argv[2]), retry=NO_RETRY)
store.put_if_absent("a", b"x")
child = os.fork()
if child == 0:
    store.put_if_absent("b", b"y")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.get("b") == b"y"
store.close()
"""


def test_a_forked_child_has_connections_of_its_own(moto: S3Server) -> None:
    """Open connections are the parent's; the child must neither hang nor use them.

    In a process of its own: a fork of one that has every library of the tests in it may crash for
    reasons of theirs.
    """
    command = [sys.executable, "-c", FORKS, moto.make_bucket(), json.dumps(moto.options)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
