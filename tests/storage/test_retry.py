"""The retry policy, with a clock that only sleeping moves, and the store that applies it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import (
    KeyNotFoundError,
    ObjectInfo,
    OutcomeUnknownError,
    StorageError,
    Store,
    TransientError,
)
from storage.memory import MemoryStore
from storage.retry import RetryingStore, RetryPolicy
from storage.testing import FaultPlan, FaultyStore, StoreContract, write_object


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def policy(time: Time, *, attempts_max: int = 4, deadline_seconds: float = 60.0) -> RetryPolicy:
    """Pauses are the longest that jitter may give: 1, 2, 4, ... up to 5 seconds."""
    return RetryPolicy(
        attempts_max=attempts_max,
        deadline_seconds=deadline_seconds,
        pause_first_seconds=1.0,
        pause_max_seconds=5.0,
        clock=lambda: time.now,
        sleep=time.sleep,
        uniform=lambda low, high: high,
    )


def failing(times: int, error: type[StorageError]) -> Callable[[], str]:
    calls = iter(range(times))

    def attempt() -> str:
        if next(calls, None) is not None:
            raise error("planted")
        return "done"

    return attempt


def test_transient_errors_are_repeated_with_growing_bounded_pauses() -> None:
    time = Time()
    assert policy(time, attempts_max=6).run(failing(5, TransientError)) == "done"
    assert time.pauses == [1, 2, 4, 5, 5]


def test_attempts_are_bounded_and_the_error_says_so() -> None:
    time = Time()
    with pytest.raises(TransientError, match=r"planted.*attempt 4"):
        policy(time).run(failing(99, TransientError))
    assert len(time.pauses) == 3


def test_no_attempt_starts_after_the_deadline() -> None:
    time = Time()
    with pytest.raises(TransientError, match="gave up"):
        policy(time, attempts_max=99, deadline_seconds=8.0).run(failing(99, TransientError))
    assert time.now < 108


@pytest.mark.parametrize("error", [OutcomeUnknownError, KeyNotFoundError, StorageError])
def test_other_errors_are_never_repeated(error: type[StorageError]) -> None:
    time = Time()
    with pytest.raises(error):
        policy(time).run(failing(1, error))
    assert time.pauses == []


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return RetryingStore(MemoryStore(), policy(Time()))


def all_operations(store: Store) -> tuple[bytes, list[ObjectInfo]]:
    write_object(store, "d/a", b"12345678", part_nbytes=4)
    store.put_if_absent("d/b", b"x")
    store.sync(["d/a"])
    listed = [entry._replace(modified_unix=0) for entry in store.list("d/")]
    target = memoryview(bytearray(4))
    store.get_into("d/a", 2, [target])
    assert store.info("d/a").nbytes == 8
    store.delete("d/b")
    store.abort_unfinished("d/")
    return store.get("d/a") + bytes(target), listed


def test_one_transient_failure_of_any_operation_goes_unnoticed() -> None:
    """Fail the n-th operation, for every n, before it happens; the results stay the same.

    Publishing is left out: a back-end repeats it itself or fails.
    """
    dry = FaultPlan(0)
    expected = all_operations(FaultyStore(MemoryStore(), dry))
    for nth, (operation, _) in enumerate(dry.operations, 1):
        if operation == "publish":
            continue
        inner = FaultyStore(MemoryStore(), FaultPlan(nth, error=TransientError))
        assert all_operations(RetryingStore(inner, policy(Time()))) == expected


def test_a_listing_goes_on_where_it_failed() -> None:
    """A listing that breaks after every third object gives each object once."""

    class Breaking(MemoryStore):
        def list(self, prefix, *, after=""):  # type: ignore[no-untyped-def]
            for i, entry in enumerate(super().list(prefix, after=after)):
                if i == 3:
                    raise TransientError("the connection broke")
                yield entry

    inner = Breaking()
    keys = [f"k{i:02d}" for i in range(10)]
    for key in keys:
        inner.put_if_absent(key, b"")
    time = Time()
    listing = RetryingStore(inner, policy(time, attempts_max=2)).list("")
    assert [entry.key for entry in listing] == keys
    assert time.pauses == [1, 1, 1]


# --- bounded by time ------------------------------------------------------------------------------


@pytest.mark.parametrize("away_seconds", [1.0, 30.0, 590.0])
def test_a_store_that_is_away_is_waited_for_by_time_not_by_tries(away_seconds: float) -> None:
    time = Time()
    usual = RetryPolicy(clock=lambda: time.now, sleep=time.sleep)
    usual.patience.set(600.0)

    def attempt() -> float:
        if time.now < 100 + away_seconds:
            raise TransientError("away")
        return time.now

    late = usual.run(attempt) - 100 - away_seconds
    assert 0 <= late <= usual.pause_max_seconds


def test_a_wait_is_logged_at_once_and_every_30_seconds_and_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    usual = RetryPolicy(clock=lambda: time.now, sleep=time.sleep, deadline_seconds=600.0)
    logged: list[tuple[float, str]] = []

    def attempt() -> None:
        logged.extend((time.now - 100, record.getMessage()) for record in caplog.records)
        caplog.clear()
        if time.now < 200:
            raise TransientError("no connection")

    usual.run(attempt)
    times = [when for when, _ in logged]
    assert 3 <= len(times) <= 4 and times[0] <= usual.pause_first_seconds
    assert all(abs(b - a - 30) <= 2 * usual.pause_max_seconds for a, b in itertools.pairwise(times))
    assert "no connection" in logged[0][1] and "600 s at most" in logged[0][1]
    assert "answers again" in caplog.records[-1].getMessage()


def test_a_bound_that_shrinks_ends_a_pause_at_once() -> None:
    usual = RetryPolicy(pause_first_seconds=60.0, pause_max_seconds=60.0, uniform=lambda a, b: b)
    usual.patience.set(600.0)
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def attempt() -> None:
            waiting.set()
            raise TransientError("away")

        ended = pool.submit(usual.run, attempt)
        assert waiting.wait(10)
        while not usual.patience.repeated:
            time.sleep(0.001)
        usual.patience.shorten(0.0)
        with pytest.raises(TransientError, match="gave up: attempt 2"):
            ended.result(10)
    usual.patience.shorten(10.0)
    assert usual.patience.seconds == 0.0
    usual.patience.set(None)
    assert usual.patience.seconds == usual.deadline_seconds


def test_who_asks_hears_when_something_waits_and_when_nothing_does() -> None:
    clock = Time()
    usual = policy(clock)
    heard: list[bool] = []
    usual.patience.set(60.0, heard.append)
    usual.run(failing(2, TransientError))
    with pytest.raises(TransientError):
        usual.run(failing(99, TransientError))
    assert heard == [True, False, True, False]
    usual.patience.begin(0.0)
    usual.patience.set(None)
    assert heard[4:] == [True, False]


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_bound_of_a_store_is_reached_through_what_wraps_it(wrapped: bool) -> None:
    usual = RetryPolicy()
    store: Store = RetryingStore(MemoryStore(), usual)
    if wrapped:
        store = FaultyStore(store, FaultPlan(0))
    assert store.patience is usual.patience
    assert MemoryStore().patience is None
