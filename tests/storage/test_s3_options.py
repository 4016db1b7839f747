"""Options and environment mean the same with both clients; what ours cannot do, s3fs does.

Method: stores opened by every way to give endpoint, region and credentials, against a moto server;
and the settings of the fast client are read from it.
"""

from __future__ import annotations

import datetime
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage import AccessDeniedError, open_store
from storage.retry import NO_RETRY
from storage.s3.fast import FastS3Store
from storage.s3.options import Transfer
from storage.s3.store import S3Store
from storage.testing import write_object
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


def fast_store(bucket: str, **options: Any) -> FastS3Store:
    return FastS3Store(bucket, "run", options=options, retry=NO_RETRY, transfer=Transfer())


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
    store = fast_store(moto.make_bucket())
    facts = store.client_facts()
    assert (facts.endpoint_url, facts.region) == (moto.endpoint_url, "us-east-1")
    assert facts.credentials() == (moto.key, moto.secret, None, False)
    assert store.wire() is not None
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
    store = fast_store(moto.make_bucket(), profile="train")
    assert store.client_facts().region == "eu-west-3"
    assert store.client_facts().credentials() == ("from-process", "s", "t", True)
    assert store.wire() is not None
    use(store)


def test_both_styles_of_addressing(moto: S3Server) -> None:
    styles = {}
    for style in ("path", "virtual"):
        config = {"s3": {"addressing_style": style}}
        options = {**moto.options, "endpoint_url": "http://s3.example.com:81"}
        facts = fast_store("bucket", **options, config_kwargs=config).client_facts()
        styles[style] = (facts.bucket_in_host, facts.endpoint_url)
    assert styles == {
        "path": (False, "http://s3.example.com:81"),
        "virtual": (True, "http://bucket.s3.example.com:81"),
    }


def test_without_credentials_the_error_says_what_to_set(moto: S3Server) -> None:
    store = fast_store("bucket", endpoint_url=moto.endpoint_url)
    with pytest.raises(AccessDeniedError, match="anon=True"):
        store.get("a")
    assert fast_store("bucket", endpoint_url=moto.endpoint_url, anon=True).client_facts().anonymous


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
    store = FastS3Store(
        "bucket",
        "",
        options={"endpoint_url": endpoint, "key": "k", "secret": "s"},
        retry=NO_RETRY,
        transfer=Transfer(unsigned_payload=wanted),
    )
    wire = store.wire()
    assert wire is not None
    assert wire.unsigned is expected


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"StorageClass": "STANDARD"}},
        {"client_kwargs": {"region_name": "us-east-1", "verify": True}},
        {"config_kwargs": {"tcp_keepalive": True}},
        {"config_kwargs": {"signature_version": "s3"}},
    ],
)
def test_what_only_s3fs_can_do_is_done_by_s3fs_and_said(
    moto: S3Server, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.DEBUG, logger="storage.s3.fast")
    store = fast_store(moto.make_bucket(), **{**moto.options, **options})
    assert store.wire() is None
    assert "it sends everything" in caplog.text
    use(store)


@pytest.mark.parametrize("fast", [False, True], ids=["s3fs", "obstore"])
@pytest.mark.parametrize("checksums", [False, True])
def test_every_upload_carries_a_checksum_for_the_server(
    moto: S3Server, fast: bool, checksums: bool
) -> None:
    with fault_proxy(moto.endpoint_url) as proxy:
        options = {**S3Server(proxy.endpoint_url).options, "fast": fast, "checksums": checksums}
        store = open_store(f"s3://{moto.make_bucket()}/run", **options)
        store.put_if_absent("put", b"x")
        write_object(store, "one", b"x" * 100, part_nbytes=5 * MiB)
        write_object(store, "parts", bytes(6 * MiB), part_nbytes=5 * MiB)
        store.close()
    puts = [request for request in proxy.requests if request.method == "PUT"]
    sent = [[n for n in request.headers if n.startswith("x-amz-checksum-")] for request in puts]
    assert sent == [["x-amz-checksum-crc32c"] if checksums else []] * 4


FORKS = """
import json, os, sys
from storage.retry import NO_RETRY
from storage.s3.fast import FastS3Store
from storage.s3.options import Transfer

store = FastS3Store(
    sys.argv[1], "run", options=json.loads(sys.argv[2]), retry=NO_RETRY, transfer=Transfer()
)
store.put_if_absent("a", b"x")
child = os.fork()
if child == 0:
    store.put_if_absent("b", b"y")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.get("b") == b"y"
store.close()
"""


def test_a_forked_child_uses_s3fs(moto: S3Server) -> None:
    """Open connections are the parent's; the child must neither hang nor use them.

    In a process of its own: a fork of one that has every library of the tests in it may crash for
    reasons of theirs.
    """
    command = [sys.executable, "-c", FORKS, moto.make_bucket(), json.dumps(moto.options)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
