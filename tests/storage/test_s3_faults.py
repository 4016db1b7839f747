"""Requests that fail in every way that clouds know change nothing but the time that things take.

Method: a proxy between the store and a moto server answers 500, 503 and 429, holds and resets
connections, loses replies and cuts bodies in half. What the store says happened
is compared with what the server has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import InvalidUrlError, KeyExistsError, OutcomeUnknownError, Store, TransientError
from storage.retry import NO_RETRY, RetryingStore, RetryPolicy
from storage.testing import StoreContract, write_object
from tests.conftest import Scale
from tests.fault_proxy import KINDS, FaultProxy, Request, Rule, fault_proxy
from tests.servers import S3Server
from tests.storage.test_s3 import failing, make_store

pytestmark = pytest.mark.server

MiB = 1024 * 1024
# What is held ends by a reset, long before the client would give up a slow server.
PATIENT_CLIENT = {"config_kwargs": {"read_timeout": 60, "connect_timeout": 60}}
PATIENT = RetryPolicy(attempts_max=12, pause_first_seconds=0.01, pause_max_seconds=0.1)


@pytest.fixture
def store(moto: S3Server, proxy: FaultProxy) -> Iterator[Store]:
    """Repeats as the usual store does, in less time."""
    inner = make_store(
        moto.make_bucket(),
        S3Server(proxy.endpoint_url),
        options=PATIENT_CLIENT,
        retry=PATIENT,
    )
    yield RetryingStore(inner, PATIENT)
    inner.close()


@pytest.mark.soak
class TestContractThroughFaults(StoreContract):
    """One in seven requests is refused before anything happens; nobody notices."""

    part_nbytes = 5 * MiB

    @pytest.fixture
    def store(self, moto: S3Server, seed: int) -> Iterator[Store]:
        kinds = ("slow_down", "too_many")
        with fault_proxy(moto.endpoint_url, rate=0.15, seed=seed, kinds=kinds) as proxy:
            server = S3Server(proxy.endpoint_url)
            inner = make_store(moto.make_bucket(), server, retry=PATIENT)
            yield RetryingStore(inner, PATIENT)
            inner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_reads_are_repeated_until_they_are_right(
    store: Store, proxy: FaultProxy, kind: str
) -> None:
    data = random.Random(1).randbytes(3 * MiB + 5)
    write_object(store, "a", data, part_nbytes=5 * MiB)
    proxy.rule = failing(2, kind, "GET", "/a")
    target = bytearray(2 * MiB)
    store.get_into("a", 7, [memoryview(target)])
    assert target == data[7 : 2 * MiB + 7]
    assert proxy.counts[kind] >= 1
    assert store.get("a") == data


def test_a_closed_port_is_an_outage_once_it_has_answered(moto: S3Server) -> None:
    """Also for a new store: some save each checkpoint to a url of its own."""
    bucket = moto.make_bucket()
    with fault_proxy(moto.endpoint_url, kinds=()) as proxy:
        server = S3Server(proxy.endpoint_url)
        never = S3Server(f"http://127.0.0.2:{server.endpoint_url.rpartition(':')[2]}")
        make_store(bucket, server, retry=NO_RETRY).put_if_absent("a", b"x")
    with pytest.raises(TransientError, match="the port is closed"):
        make_store(bucket, server, retry=NO_RETRY).get("a")
    with pytest.raises(InvalidUrlError, match="the port is closed; is endpoint_url right"):
        make_store(bucket, never, retry=NO_RETRY).get("a")


def test_an_upload_survives_a_failure_of_every_kind_in_every_request(
    store: Store, proxy: FaultProxy, rng: random.Random, scale: Scale
) -> None:
    """Beginning, a part, completion: each fails once. The object is whole, and no upload is left
    but one whose beginning got no answer.
    """
    data = rng.randbytes(10 * MiB + 5)
    every = [(kind, what) for kind in KINDS for what in ("?uploads", "partNumber=", "uploadId=")]
    for kind, what in rng.sample(every, scale.count(6, len(every))):
        key, before = f"{kind}-{what.strip('?=')}", proxy.counts[kind]
        method = "PUT" if what == "partNumber=" else "POST"
        proxy.rule = failing(1, kind, method, what)
        write_object(store, key, data, part_nbytes=5 * MiB)
        assert proxy.counts[kind] == before + 1, key
        assert store.get(key) == data, key
        unheard = what == "?uploads" and kind in ("lost_reply", "cut_body")
        assert store.abort_unfinished("") == unheard, key


@pytest.mark.parametrize("kind", KINDS)
def test_a_conditional_put_says_the_truth_about_every_failure(
    store: Store, proxy: FaultProxy, kind: str
) -> None:
    """Refused before it began: repeated. Anything else: unknown, sent once and never again."""
    proxy.rule = failing(1, kind, "PUT")
    known = kind in ("slow_down", "too_many")
    if known:
        store.put_if_absent("log/1", b"x")
    else:
        with pytest.raises(OutcomeUnknownError):
            store.put_if_absent("log/1", b"x")
    assert [request.method for request in proxy.requests] == ["PUT"] * (2 if known else 1)
    happened = known or kind in ("lost_reply", "cut_body")
    assert [entry.key for entry in store.list("")] == (["log/1"] if happened else [])
    if happened:
        with pytest.raises(KeyExistsError):
            store.put_if_absent("log/1", b"x")


@pytest.mark.parametrize("kind", ["gone_reply", "refused_reply"])
@pytest.mark.parametrize("nbytes", [5, 5 * MiB + 5])
def test_a_write_done_and_answered_404_or_412_is_ours(
    store: Store, proxy: FaultProxy, kind: str, nbytes: int
) -> None:
    """By its write id: an object of somebody else under the key stays KeyExistsError."""
    method, what = ("POST", "uploadId=") if nbytes > 5 * MiB else ("PUT", "")
    proxy.rule = failing(1, kind, method, what)
    write_object(store, "a", bytes(nbytes), part_nbytes=5 * MiB)
    assert proxy.counts[kind] == 1
    assert store.get("a") == bytes(nbytes)
    with pytest.raises(KeyExistsError):
        write_object(store, "a", bytes(nbytes), part_nbytes=5 * MiB)


def test_a_record_stored_and_answered_404_is_ours(store: Store, proxy: FaultProxy) -> None:
    """Of one that was answered 412, the log compares the bytes itself."""
    proxy.rule = failing(1, "gone_reply", "PUT")
    store.put_if_absent("log/1", b"x")
    assert proxy.counts["gone_reply"] == 1 and store.get("log/1") == b"x"
    with pytest.raises(KeyExistsError):
        store.put_if_absent("log/1", b"x")


def test_an_upload_that_cannot_be_finished_leaves_nothing(store: Store, proxy: FaultProxy) -> None:
    """No part ever gets through; then the network is well again."""
    proxy.rule = failing(10**6, "slow_down", "PUT", "partNumber")
    with pytest.raises(TransientError):
        write_object(store, "a", bytes(10 * MiB + 5), part_nbytes=5 * MiB)
    proxy.pause()
    assert list(store.list("")) == []
    assert store.abort_unfinished("") == 0


def test_a_completion_without_an_answer_is_unknown(store: Store, proxy: FaultProxy) -> None:
    proxy.rule = failing(10**6, "error500", "POST", "uploadId")
    with pytest.raises(OutcomeUnknownError):
        write_object(store, "a", bytes(10 * MiB + 5), part_nbytes=5 * MiB)
    proxy.pause()
    assert list(store.list("")) == []


def test_what_is_acknowledged_is_there_under_a_fifth_of_failures(
    moto: S3Server, seed: int, scale: Scale
) -> None:
    """Many threads write and read through 20 % of every kind of failure."""
    with fault_proxy(moto.endpoint_url, rate=0.2, seed=seed, held_seconds=1) as proxy:
        bucket = moto.make_bucket()
        server = S3Server(proxy.endpoint_url)
        inner = make_store(bucket, server, options=PATIENT_CLIENT, retry=PATIENT)
        store = RetryingStore(inner, PATIENT)

        def work(number: int) -> tuple[str, bytes] | None:
            rng = random.Random(seed + number)
            data = rng.randbytes(rng.choice([1000, 300_000, 5 * MiB + 9]))
            key = f"steps/{number}"
            try:
                write_object(store, key, data, part_nbytes=5 * MiB)
            except OutcomeUnknownError:
                return None
            target = bytearray(len(data))
            store.get_into(key, 0, [memoryview(target)])
            assert target == data
            return key, data

        with ThreadPoolExecutor(8) as pool:
            written = list(pool.map(work, range(scale.count(24, 1000))))
        proxy.pause()
        for pair in filter(None, written):
            assert store.get(pair[0]) == pair[1]
        store.abort_unfinished("")
        assert store.abort_unfinished("") == 0
        assert all(proxy.counts[kind] for kind in KINDS) or not scale.soak
        inner.close()


# --- a server that is away ------------------------------------------------------------------------


def away(is_back: Callable[[], bool]) -> Rule:
    """From the first part of an upload on, every connection is reset until `is_back()`."""
    has_begun = False

    def rule(request: Request) -> str:
        nonlocal has_begun
        has_begun = has_begun or "partNumber" in request.path
        return "reset" if has_begun and not is_back() else ""

    return rule


def usual_store(moto: S3Server, proxy: FaultProxy) -> RetryingStore:
    policy = RetryPolicy()
    server = S3Server(proxy.endpoint_url)
    return RetryingStore(make_store(moto.make_bucket(), server, retry=policy), policy)


def test_an_upload_goes_on_when_the_server_is_back(
    moto: S3Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It is away until a line of the log has said so; without that line the upload gives up."""
    store = usual_store(moto, proxy)
    data = random.Random(1).randbytes(10 * MiB + 5)
    proxy.rule = away(lambda: "tried again" in caplog.text)
    write_object(store, "a", data, part_nbytes=5 * MiB)
    assert store.get("a") == data
    assert "tried again" in caplog.text
    store.close()


def test_an_upload_is_given_up_when_the_bound_is_over(moto: S3Server, proxy: FaultProxy) -> None:
    """Nothing is left of it when the server is back, but what nobody could remove."""
    store = usual_store(moto, proxy)
    store.patience.set(1.0)
    proxy.rule = away(lambda: False)
    with pytest.raises(TransientError, match="gave up"):
        write_object(store, "a", bytes(10 * MiB + 5), part_nbytes=5 * MiB)
    proxy.pause()
    store.patience.set(None)
    assert list(store.list("")) == []
    store.abort_unfinished("")
    write_object(store, "a", b"again", part_nbytes=5 * MiB)
    store.close()
