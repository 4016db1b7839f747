"""A store that is away: the training continues, whatever the settings for outages are.

Method: a training of one rank whose clock runs a thousand times faster, so that ten minutes are
0.6 s. Nothing is repeated by anybody but the usual policy with that clock.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal

import pytest
import torch

import ckpt
from ckpt.commit.appender import BLOCKING_SECONDS
from ckpt.commit.locate import live_entries
from ckpt.commit.session import SessionRegistry
from ckpt.service.checkpointer import Checkpointer
from ckpt.world.base import SoloWorld
from storage import Store, TransientError
from storage.memory import MemoryStore
from storage.retry import RetryingStore, RetryPolicy
from storage.wrap import WrappedStore
from tests.fault_proxy import Request, fault_proxy
from tests.servers import S3Server, moto_server
from tests.service.chaos import ThreadTarget

SPEED = 1000.0


def fast_clock() -> float:
    return time.monotonic() * SPEED


def fast_sleep(seconds: float) -> None:
    time.sleep(seconds / SPEED)


class Away(WrappedStore):
    """Refuses every write of a file until `back_at` of the fast clock."""

    back_at = 0.0

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        if fast_clock() < self.back_at:
            raise TransientError(f"create {key}: no connection")
        return self.inner.create(key, nbytes, **how)


class FastTarget(ThreadTarget):
    """A target whose training lives by the fast clock."""

    def now_seconds(self) -> float:
        return fast_clock()


def training(store: Store, **how: Any) -> Checkpointer:
    return Checkpointer(
        {"x": torch.zeros(3)}, FastTarget(SoloWorld(), store, SessionRegistry()), **how
    )


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("away_seconds", [1.0, 30.0, 600.0])
def test_the_training_goes_on_beside_a_store_that_is_away(
    when_busy: Literal["wait", "skip"], away_seconds: float
) -> None:
    """A save is due every 50 s; steps take 5 s, and 100 s follow the outage."""
    away = Away(MemoryStore())
    store = RetryingStore(away, RetryPolicy(clock=fast_clock, sleep=fast_sleep))
    with training(store, save=ckpt.EverySteps(10), when_busy=when_busy) as checkpointer:
        checkpointer.step(10)
        assert checkpointer.wait() is not None
        away.back_at = fast_clock() + away_seconds
        step = 10
        while fast_clock() < away.back_at + 200 or step < 60:
            step += 1
            checkpointer.step(step)
            fast_sleep(5.0)
        away.back_at = 0.0
        checkpointer._saves.collect(wait=True)
        saved = checkpointer.last_saved
        assert saved is not None and saved.step > step - 60
        assert all(isinstance(one.error, TransientError) for one in checkpointer.failures)
        if away_seconds == 1.0 or (when_busy == "skip" and away_seconds == 30.0):
            assert not checkpointer.failures
        checkpointer.step(step + 1)


def test_saves_without_end_that_fail_end_the_training_after_half_an_hour() -> None:
    away = Away(MemoryStore())
    store = RetryingStore(away, RetryPolicy(clock=fast_clock, sleep=fast_sleep))
    with training(store, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        away.back_at = began = fast_clock() + 1e9
        began -= 1e9
        with pytest.raises(ckpt.errors.SavesFailed):
            for step in range(2, 1000):
                checkpointer.step(step)
                fast_sleep(40.0)
        assert fast_clock() - began >= 1800
        away.back_at = 0.0


def test_an_outage_holds_up_a_newer_save_for_seconds_only() -> None:
    """The first save waits for the store for ten minutes; the second makes it give up."""
    away = Away(MemoryStore())
    store = RetryingStore(away, RetryPolicy(clock=fast_clock, sleep=fast_sleep))
    with training(store, save=ckpt.EverySteps(1)) as checkpointer:
        away.back_at = fast_clock() + 1e9
        checkpointer.step(1)
        fast_sleep(100.0)
        assert checkpointer.in_flight == (1,) and not checkpointer.failures
        began = fast_clock()
        checkpointer.step(2)
        assert [one.step for one in checkpointer.failures] == [1]
        assert fast_clock() - began < 300
        away.back_at = 0.0
    assert [entry.step for entry in live_entries(store)] == [2]


def test_a_blocking_save_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(MemoryStore(name="outage"))
    away.back_at = fast_clock() + 1e9
    policy = RetryPolicy(clock=fast_clock, sleep=fast_sleep)
    monkeypatch.setattr("ckpt.process.open_store", lambda url, **_: RetryingStore(away, policy))
    for bound, given in ((BLOCKING_SECONDS, {}), (300.0, {"retry_seconds_max": 300.0})):
        began = fast_clock()
        with pytest.raises(TransientError, match="gave up"):
            ckpt.save({"x": 1}, "memory://outage", step=1, **given)
        assert bound - 25 <= fast_clock() - began
        assert policy.patience.seconds == policy.deadline_seconds
    for bad in (-1.0, float("inf"), "9"):
        with pytest.raises(ValueError, match="retry_seconds_max"):
            ckpt.save({"x": 1}, "memory://outage", step=1, retry_seconds_max=bad)  # type: ignore[arg-type]


@pytest.mark.server
def test_a_real_server_that_is_away_for_two_seconds_costs_no_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twice: from the first part of an upload on, and from the commit on, whose first answer is
    lost. The training notices nothing but a line in the log.
    """
    until: list[float] = []
    marks = ["partNumber", "/log/"]

    def rule(request: Request) -> str:
        if until and time.monotonic() < until[-1]:
            return "reset"
        if marks and armed.is_set() and request.method == "PUT" and marks[0] in request.path:
            marks.pop(0)
            until.append(time.monotonic() + 2.0)
            return "lost_reply"
        return ""

    armed = threading.Event()
    with moto_server() as moto, fault_proxy(moto.endpoint_url, rule=rule) as proxy:
        server = S3Server(proxy.endpoint_url)
        url = f"s3://{moto.make_bucket()}/run"
        options = server.options
        state = {"x": torch.arange(5 << 20, dtype=torch.int32)}
        with Checkpointer(
            state, url, save=ckpt.EverySteps(1), storage_options=options, only=True
        ) as checkpointer:
            checkpointer.step(1)
            checkpointer.wait()
            armed.set()
            for step in (2, 3):
                checkpointer.step(step)
                saved = checkpointer.wait()
                assert saved is not None and saved.step == step
            assert not checkpointer.failures
        assert len(until) == 2
        with ckpt.open(url, 3, storage_options=options) as stored:
            assert torch.equal(stored["x"], state["x"])
    texts = [r.getMessage() for r in caplog.records if "tried again" in r.getMessage()]
    assert texts
