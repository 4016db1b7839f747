"""A connection that swallows a request holds neither a save nor a load, nor what commits.

Method: the proxy swallows the first request of a kind for longer than any test runs, and its
limits are short. Requests are counted at the proxy. A loaded machine may add second
requests, never more than the limits allow, and no test depends on there being none.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from storage import KeyExistsError, OutcomeUnknownError, StorageError, Store, TransientError
from storage.errors import SlowDownError
from storage.hedging import HedgeLimits, Hedger, HedgeTally, NoAnswerError
from storage.retry import RetryingStore, RetryPolicy
from storage.s3.store import S3Store
from storage.testing import write_object
from tests.fault_proxy import FaultProxy, Request, Rule
from tests.servers import S3Server
from tests.storage.test_s3 import make_store

pytestmark = pytest.mark.server

MiB = 1024 * 1024
LIMITS = HedgeLimits(floor_seconds=0.3, unknown_seconds=0.5, tick_seconds=0.05)
POLICY = RetryPolicy(pause_first_seconds=0.01, pause_max_seconds=0.1)


@pytest.fixture
def held_seconds() -> float:
    """Longer than any test runs."""
    return 600.0


@pytest.fixture
def inner(moto: S3Server, proxy: FaultProxy) -> Iterator[S3Store]:
    server = S3Server(proxy.endpoint_url)
    store = make_store(moto.make_bucket(), server, retry=POLICY)
    store.hedger = Hedger(POLICY.patience, LIMITS)
    yield store
    store.close()


@pytest.fixture
def store(inner: S3Store) -> Store:
    return RetryingStore(inner, POLICY)


def swallowing(method: str, what: str, slow_downs: float = 0.0, kind: str = "held") -> Rule:
    """The first request of that method with `what` in its path is swallowed; of the others, a share
    is refused.
    """
    first, rng = iter([True]), random.Random(1)

    def rule(request: Request) -> str:
        if request.method == method and what in request.path and next(first, False):
            return kind
        return "slow_down" if rng.random() < slow_downs else ""

    return rule


def won(tally: HedgeTally) -> int:
    """How many second requests won, after a look at how many were earned."""
    assert tally.hedges - tally.unearned <= LIMITS.saved_max / 2 + LIMITS.share * tally.requests
    return tally.won


@pytest.mark.parametrize(
    ("method", "what", "nbytes"),
    [
        ("POST", "?uploads", 6 * MiB),
        ("PUT", "partNumber=2", 11 * MiB),
        ("POST", "uploadId=", 6 * MiB),
        ("PUT", "/a", 100),
    ],
    ids=["begin", "part", "end", "one request"],
)
def test_every_request_of_an_upload_may_be_swallowed(
    store: Store, inner: S3Store, proxy: FaultProxy, method: str, what: str, nbytes: int
) -> None:
    data = random.Random(2).randbytes(nbytes)
    proxy.rule = swallowing(method, what)
    write_object(store, "a", data, part_nbytes=5 * MiB)
    assert proxy.counts["held"] == 1
    assert won(inner.hedger.tally) >= 1
    proxy.pause()
    assert store.get("a") == data


def test_every_kind_of_read_may_be_swallowed(
    store: Store, inner: S3Store, proxy: FaultProxy
) -> None:
    data = random.Random(2).randbytes(3 * MiB)
    store.put_if_absent("a", data)
    target = bytearray(2 * MiB)
    proxy.rule = swallowing("GET", "/a")
    store.get_into("a", 7, [memoryview(target)[:9], memoryview(target)[9:]])
    assert target == data[7 : 2 * MiB + 7]
    proxy.rule = swallowing("GET", "/a")
    assert store.get_bounded("a", 3 * MiB) == data
    assert proxy.counts["held"] == 2 <= won(inner.hedger.tally)  # a slow machine repeats more
    for _ in range(40):  # earns two more
        store.info("a")
    proxy.rule = swallowing("GET", "list-type=2")
    assert [entry.key for entry in store.list("")] == ["a"]
    proxy.rule = swallowing("HEAD", "/a")
    assert store.info("a").nbytes == len(data)
    assert proxy.counts["held"] == 4


@pytest.mark.parametrize("kind", ["held", "held_reply"])
def test_what_commits_may_be_swallowed_or_its_answer(
    store: Store, inner: S3Store, proxy: FaultProxy, kind: str
) -> None:
    """Whether the first request or the second made the object: it is ours, and so it is said."""
    proxy.rule = swallowing("PUT", "log/1", kind=kind)
    store.put_if_absent("log/1", b"x")
    assert proxy.counts[kind] == 1
    assert won(inner.hedger.tally) >= 1
    proxy.pause()
    assert store.get("log/1") == b"x"
    with pytest.raises(KeyExistsError):
        store.put_if_absent("log/1", b"x")


def test_what_commits_is_not_taken_for_ours_when_another_was_first(
    store: Store, proxy: FaultProxy
) -> None:
    """Even if it has the same bytes, and both requests got the answer of a race or none."""
    store.put_if_absent("log/1", b"x")
    proxy.rule = swallowing("PUT", "log/1", kind="held_reply")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("log/1", b"x")
    assert proxy.counts["held_reply"] == 1


def test_what_commits_is_unknown_when_no_request_was_answered(
    moto: S3Server, proxy: FaultProxy
) -> None:
    server, impatient = S3Server(proxy.endpoint_url), {"config_kwargs": {"read_timeout": 2}}
    inner = make_store(moto.make_bucket(), server, retry=POLICY, options=impatient)
    inner.hedger = Hedger(POLICY.patience, LIMITS)
    proxy.rule = lambda request: "held" if request.method == "PUT" else ""
    with pytest.raises(OutcomeUnknownError):
        RetryingStore(inner, POLICY).put_if_absent("log/1", b"x")
    sent = [request.method for request in proxy.requests if "log/1" in request.path]
    assert set(sent) == {"PUT"} and len(sent) <= 1 + inner.hedger.tally.hedges
    inner.close()


@pytest.mark.parametrize(
    ("first", "is_sent_again", "expected"),
    [
        (SlowDownError("503"), False, SlowDownError),
        (SlowDownError("503"), True, OutcomeUnknownError),
        (NoAnswerError("nothing"), False, OutcomeUnknownError),
        (KeyExistsError("taken"), False, KeyExistsError),
        (KeyExistsError("taken"), True, OutcomeUnknownError),
        (OutcomeUnknownError("lost"), False, OutcomeUnknownError),
    ],
)
def test_a_refusal_is_certain_only_if_it_is_that_of_all_that_was_sent(
    moto: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    first: StorageError,
    is_sent_again: bool,
    expected: type[StorageError],
) -> None:
    """The second request, and whatever is asked after it, gets no answer."""
    inner = make_store(moto.make_bucket(), moto, retry=POLICY)

    async def send(*args: Any, **arguments: Any) -> Any:
        raise TransientError("lost")

    def put_new(
        key: str, body: bytes, metadata: dict[str, str], again: Any, *, may_be_repeated: bool
    ) -> None:
        assert not may_be_repeated
        if is_sent_again:
            with pytest.raises(TransientError):
                asyncio.run(again())
        raise first

    monkeypatch.setattr(inner, "send", send)
    monkeypatch.setattr(inner, "put_new", put_new)
    with pytest.raises(StorageError) as caught:
        inner.put_if_absent("log/1", b"x")
    assert type(caught.value) is expected
    inner.close()


def test_a_swallowed_part_and_a_tenth_of_refusals_add_few_requests(
    store: Store, inner: S3Store, proxy: FaultProxy
) -> None:
    """Each refusal is repeated once more, by the policy, and the swallowed part by the hedge."""
    data = random.Random(3).randbytes(21 * MiB)
    proxy.rule = swallowing("PUT", "partNumber=2", slow_downs=0.1)
    for key in ("a", "b"):
        write_object(store, key, data, part_nbytes=5 * MiB)
    tally = inner.hedger.tally
    assert won(tally) >= 1
    parts = [request for request in proxy.requests if "partNumber=" in request.path]
    assert len(parts) <= 2 * 5 + proxy.counts["slow_down"] + tally.hedges
    proxy.pause()
    for key in ("a", "b"):
        assert store.get(key) == data


@pytest.mark.parametrize("is_same", [True, False], ids=["same bytes", "others"])
def test_a_part_whose_tag_changed_counts_if_its_bytes_did_not(
    inner: S3Store, is_same: bool
) -> None:
    """A first request that arrives after the second leaves the same bytes, and where the server
    encrypts, another tag.
    """
    data = random.Random(4).randbytes(6 * MiB)
    writer = inner.create("a", len(data), part_nbytes=5 * MiB).__enter__()
    writer.write_part(0, [memoryview(data)[: 5 * MiB]])
    writer.write_part(1, [memoryview(data)[5 * MiB :]])
    if is_same:
        writer._parts[1]["ETag"] = '"0123456789abcdef0123456789abcdef"'
    else:
        inner.put_part("a", json.loads(writer.token)["upload"], 1, [memoryview(bytes(99))])
    if is_same:
        writer.__exit__(None, None, None)
        assert inner.get("a") == data
    else:
        with pytest.raises(StorageError, match="InvalidPart"):
            writer.__exit__(None, None, None)
        assert list(inner.list("")) == []
