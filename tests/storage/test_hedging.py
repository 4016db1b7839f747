"""A request that takes far longer than its kind is sent a second time: when, how often, who wins.

Method: the rule is fed with durations. Races run on an event loop whose clock jumps to the next
thing that happens, so that a minute takes a millisecond and every duration is exact.
"""

from __future__ import annotations

import asyncio
import logging
import random
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from storage.errors import SlowDownError, StorageError, TransientError
from storage.hedging import COMPLETE, HedgeLimits, Hedger, HedgeRule, NoAnswerError, RequestKind
from storage.store import Patience

T = TypeVar("T")
LIMITS = HedgeLimits()
PART = RequestKind("part", 16 << 20)


class _Jumping(selectors.SelectSelector):
    """Waits by moving the clock. Waiting for nothing at all would be for ever."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("nothing will ever happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class Simulation:
    """A loop in simulated time, and a hedger on it."""

    def __init__(self, limits: HedgeLimits = LIMITS) -> None:
        self._selector = _Jumping()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.loop.time = lambda: self._selector.now  # type: ignore[method-assign]
        self.patience = Patience()
        self.hedger = Hedger(self.patience, limits, clock=self.loop.time)
        self.sent: list[float] = []  # when each request was sent

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self.loop.run_until_complete(coroutine)
        finally:
            self.loop.run_until_complete(asyncio.sleep(0))

    def request(
        self, *seconds: float, errors: dict[int, StorageError] | None = None
    ) -> Callable[[], Awaitable[int]]:
        """A request whose n-th sending is answered by n after `seconds[n]`, or fails then."""

        numbers = iter(range(len(seconds)))

        async def send() -> int:
            number = next(numbers)
            self.sent.append(self.loop.time())
            await asyncio.sleep(seconds[number])
            if errors and number in errors:
                raise errors[number]
            return number

        return send

    def learn(self, *seconds: float) -> None:
        """Requests for parts that took so long each."""
        for one in seconds:
            send = self.request(one)
            self.run(self.hedger.run(PART, "write", send, send))
        self.sent.clear()

    def race(self, send: Callable[[], Awaitable[int]]) -> tuple[int, float]:
        """What came, and after how many seconds."""
        began = self.loop.time()
        return self.run(self.hedger.run(PART, "write a", send, send)), self.loop.time() - began


@pytest.fixture
def sim() -> Iterator[Simulation]:
    simulation = Simulation()
    yield simulation
    simulation.loop.close()


# --- the rule -------------------------------------------------------------------------------------


def test_the_delay_is_a_multiple_of_a_high_quantile_of_its_like_with_a_floor() -> None:
    rule = HedgeRule(LIMITS)
    for number in range(100):
        assert rule.delay(PART) == LIMITS.unknown_seconds or number >= LIMITS.samples_min
        rule.answered(PART, 1.0 + number / 100)
    assert rule.delay(PART) == pytest.approx(3 * 1.94)
    assert rule.delay(RequestKind("part", (16 << 20) - 5)) == rule.delay(PART)
    for other in (RequestKind("part", 4 << 20), RequestKind("read", 16 << 20)):
        assert rule.delay(other) == LIMITS.unknown_seconds
    for _ in range(LIMITS.samples_max):  # the old ones are forgotten
        rule.answered(PART, 0.01)
    assert rule.delay(PART) == LIMITS.floor_seconds


@pytest.mark.parametrize("slow_downs", [0.0, 0.1, 0.2, 1.0])
def test_second_requests_are_a_small_share_and_fewer_the_more_the_server_refuses(
    slow_downs: float, rng: random.Random
) -> None:
    """Whatever is asked for: every request would like to be sent again."""
    rule, count = HedgeRule(LIMITS), 10_000
    taken = answers = 0
    for _ in range(count):
        taken += rule.take()
        if rng.random() < slow_downs:
            rule.refused()
        else:
            answers += 1
            rule.answered(PART, 1.0)
    assert taken <= LIMITS.saved_max / 2 + LIMITS.share * answers
    expected = {0.0: 500, 0.1: 200, 0.2: 60, 1.0: 2}[slow_downs]
    assert taken <= expected * 1.3
    assert taken >= 1


def test_the_first_requests_of_a_process_have_a_few_second_ones() -> None:
    rule = HedgeRule(LIMITS)
    assert [rule.take() for _ in range(4)] == [True, True, False, False]
    for _ in range(1000):
        rule.answered(PART, 1.0)
    assert [rule.take() for _ in range(6)] == [True] * 4 + [False] * 2


# --- races ----------------------------------------------------------------------------------------


def test_a_request_that_is_swallowed_costs_a_multiple_of_its_like(sim: Simulation) -> None:
    sim.learn(*[1.0] * 20)
    answer, seconds = sim.race(sim.request(1e6, 1.0))
    assert answer == 1
    assert sim.sent == [sim.sent[0], pytest.approx(sim.sent[0] + 3.0, abs=LIMITS.tick_seconds)]
    assert seconds == pytest.approx(4.0, abs=LIMITS.tick_seconds)
    assert (sim.hedger.tally.hedges, sim.hedger.tally.won) == (1, 1)


def test_a_request_like_the_others_is_sent_once(sim: Simulation) -> None:
    sim.learn(*[1.0] * 20)
    answer, seconds = sim.race(sim.request(2.9, 0.0))
    assert answer == 0
    assert seconds == pytest.approx(2.9)
    assert len(sim.sent) == 1


def test_the_first_answer_counts_whichever_request_it_is_for(sim: Simulation) -> None:
    sim.learn(*[1.0] * 20)
    answer, seconds = sim.race(sim.request(3.5, 1e6))
    assert answer == 0
    assert seconds == pytest.approx(3.5)
    assert (sim.hedger.tally.hedges, sim.hedger.tally.won) == (1, 0)


def test_what_is_long_follows_from_the_others_that_are_answered_meanwhile(sim: Simulation) -> None:
    """The very first request is swallowed: the others, which run beside it, show what is usual."""

    async def all_of_them() -> list[int]:
        sends = [sim.request(1e6, 1.0), *(sim.request(1.0) for _ in range(8))]
        return await asyncio.gather(*(sim.hedger.run(PART, "a", s, s) for s in sends))

    assert sim.run(all_of_them()) == [1] + [0] * 8
    assert sim.loop.time() == pytest.approx(4.0, abs=2 * LIMITS.tick_seconds)


def test_of_a_hundred_requests_at_once_one_that_hangs_is_sent_again_and_no_other(
    sim: Simulation,
) -> None:
    rng = random.Random(1)

    async def everything() -> None:
        async def one(number: int) -> None:
            send = sim.request(1e6 if number == 7 else rng.uniform(0.5, 1.5), 1.0)
            await sim.hedger.run(PART, "a", send, send)

        await asyncio.gather(*(one(number) for number in range(100)))

    sim.run(everything())
    assert (len(sim.sent), sim.hedger.tally.hedges, sim.hedger.tally.won) == (101, 1, 1)


def test_slow_down_is_no_reason_to_send_more(sim: Simulation) -> None:
    """The answer is raised at once, and repeating is up to the policy with its pauses."""
    sim.learn(*[1.0] * 20)
    with pytest.raises(SlowDownError):
        sim.race(sim.request(0.1, 0.1, errors={0: SlowDownError("503")}))
    assert len(sim.sent) == 1


@pytest.mark.parametrize("late", [3.2, 9.0])
def test_a_first_request_that_fails_late_waits_for_the_second(sim: Simulation, late: float) -> None:
    sim.learn(*[1.0] * 20)
    assert sim.race(sim.request(late, 2.0, errors={0: TransientError("lost")}))[0] == 1
    assert sim.hedger.tally.won == 1


def test_a_second_request_that_is_refused_is_followed_by_another(sim: Simulation) -> None:
    """The first one is swallowed: without a third, the save would wait for it to the end."""
    sim.learn(*[1.0] * 20)
    errors: dict[int, StorageError] = {1: SlowDownError("503")}
    answer, seconds = sim.race(sim.request(1e6, 0.1, 1.0, errors=errors))
    assert answer == 2
    assert seconds == pytest.approx(3.0 + LIMITS.failed_seconds + 1.0, abs=2 * LIMITS.tick_seconds)
    assert (sim.hedger.tally.hedges, sim.hedger.tally.won) == (2, 1)


def test_second_requests_that_fail_follow_each_other_in_growing_distances(sim: Simulation) -> None:
    sim.learn(*[1.0] * 100)
    errors: dict[int, StorageError] = {n: SlowDownError("503") for n in (1, 2)}
    began = sim.loop.time()
    assert sim.race(sim.request(1e6, 0.01, 0.01, 1.0, errors=errors))[0] == 3
    again = [sent - began - 3.0 for sent in sim.sent[1:]]
    assert again == pytest.approx([0.0, 0.2, 0.6], abs=3 * LIMITS.tick_seconds)


def test_a_second_request_has_its_own_time_when_the_first_has_failed(sim: Simulation) -> None:
    sim.learn(*[1.0] * 20)
    errors: dict[int, StorageError] = {0: TransientError("lost")}
    assert sim.race(sim.request(3.2, 2.5, errors=errors))[0] == 1
    assert len(sim.sent) == 2


@pytest.mark.parametrize("late", [3.2, 5.5])
def test_when_both_fail_the_error_is_that_of_the_first(sim: Simulation, late: float) -> None:
    sim.learn(*[1.0] * 20)
    errors: dict[int, StorageError] = {0: TransientError("first"), 1: StorageError("second")}
    with pytest.raises(TransientError, match="first"):
        sim.race(sim.request(late, 2.0, errors=errors))


def test_a_deadline_names_the_object_and_a_line_of_the_log_comes_long_before(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    sim.patience.who = "rank 3"
    sim.learn(*[1.0] * 20)
    began = sim.loop.time()
    with pytest.raises(TransientError, match=r"write a: no answer within 57\d s \(sent 2 times\)"):
        sim.race(sim.request(1e6, 1e6))
    assert sim.loop.time() - began == pytest.approx(60 + 512, abs=1)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines[0].startswith("rank 3: write a: no answer for 10 s, others like it take 1 s; ")
    assert 10 < len(lines) < 20  # every half a minute


@contextmanager
def loop_of_another_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_request_of_a_thread_is_dropped_when_it_loses() -> None:
    hedger = Hedger(Patience(), replace(LIMITS, floor_seconds=0.05, unknown_seconds=0.05))
    dropped = threading.Event()

    def send() -> int:
        assert dropped.wait(60)
        raise TransientError("dropped")

    async def again() -> int:
        return 7

    with loop_of_another_thread() as loop:
        assert hedger.carry(PART, "write a", send, again, dropped.set, loop) == 7
    assert (hedger.tally.requests, hedger.tally.hedges, hedger.tally.won) == (1, 1, 1)
    assert not any(hedger._firsts.values()) and not hedger._carried


def test_the_request_of_a_thread_that_is_answered_soon_has_no_race() -> None:
    """The loop is not even running; the rule learns from it all the same."""
    hedger, loop = Hedger(Patience()), asyncio.new_event_loop()

    def fail() -> int:
        raise SlowDownError("503")

    async def again() -> int:
        raise AssertionError("sent again")

    for number in range(LIMITS.samples_min):
        assert hedger.carry(PART, "a", partial(int, number), again, fail, loop) == number
    with pytest.raises(SlowDownError):
        hedger.carry(PART, "a", fail, again, fail, loop)
    loop.close()
    assert hedger._rule.typical(PART) is not None
    assert not any(hedger._firsts.values()) and not hedger._carried


# --- lines of the log -----------------------------------------------------------------------------


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_completes_an_upload_has_a_deadline_of_its_own(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends no bytes: that of the file's 356 MiB would be three hours."""
    kind, send = RequestKind(COMPLETE, 356 << 20), sim.request(300.0)
    assert sim.run(sim.hedger.run(kind, "complete a", send, send)) == 0
    assert not lines_of(caplog), "half of its time is not over"
    send, began = sim.request(1e6, 1e6, 1e6), sim.loop.time()
    with pytest.raises(NoAnswerError):
        sim.run(sim.hedger.run(kind, "complete a", send, send))
    assert sim.loop.time() - began == pytest.approx(LIMITS.complete_seconds, abs=1)
    assert "complete a: no answer for 300 s" in lines_of(caplog)[0]
    assert "given up after 600 s" in lines_of(caplog)[0]


def test_nothing_is_logged_that_is_not_slower_than_its_like(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loaded server, whose parts take 20 s each: neither the first ones nor later ones."""
    send = [sim.request(*[20.0] * 2) for _ in range(8)]

    async def at_once() -> None:
        await asyncio.gather(*(sim.hedger.run(PART, "write", one, one) for one in send[:4]))

    sim.run(at_once())
    for one in send[4:]:
        sim.run(sim.hedger.run(PART, "write", one, one))
    assert not lines_of(caplog)
    slow = sim.request(1e6, 20.0)
    sim.run(sim.hedger.run(PART, "write", slow, slow))
    assert "write: no answer for 30 s, others like it take 20 s" in lines_of(caplog)[0]


# --- without a budget -----------------------------------------------------------------------------


def _spend_all(sim: Simulation) -> None:
    for _ in range(20):
        sim.hedger._rule.refused()
    assert not sim.hedger._rule.take()


def test_a_stuck_request_is_sent_again_without_a_budget(sim: Simulation) -> None:
    sim.learn(*[1.0] * LIMITS.samples_min)
    _spend_all(sim)
    answer, seconds = sim.race(sim.request(1e6, 1.0))
    assert answer == 1
    assert seconds == pytest.approx(LIMITS.stuck_multiple * 1.0 + 1.0, abs=LIMITS.tick_seconds)


def test_one_at_a_time_is_sent_again_without_a_budget(sim: Simulation) -> None:
    sim.learn(*[1.0] * LIMITS.samples_min)
    _spend_all(sim)
    sends, began = [sim.request(1e6, 1.0) for _ in range(3)], sim.loop.time()

    async def all_three() -> list[int]:
        races = [sim.hedger.run(PART, "write a", send, send) for send in sends]
        return await asyncio.gather(*races)

    assert sim.run(all_three()) == [1, 1, 1]
    again = [sent - began for sent in sorted(sim.sent)[3:]]
    for number, seconds in enumerate(again):  # each when the one before it is answered
        late = seconds - (LIMITS.stuck_multiple + 1.0 * number)
        assert 0 <= late <= 3 * LIMITS.tick_seconds, again


def test_a_stuck_request_is_followed_further_when_the_server_refuses(sim: Simulation) -> None:
    sim.learn(*[1.0] * LIMITS.samples_min)
    _spend_all(sim)
    send = sim.request(1e6, 0.1, 0.1, 1.0, errors={1: SlowDownError("x"), 2: SlowDownError("x")})
    answer, seconds = sim.race(send)
    assert answer == 3 and seconds < 40
    assert not sim.hedger._stuck


def test_who_is_overtaken_is_sent_again_soon_without_a_budget(sim: Simulation) -> None:
    """That others were sent later and are answered tells of its connection, not of the server."""
    sim.learn(*[1.0] * 20)
    _spend_all(sim)

    async def seconds_beside(count: int) -> float:
        async def other(after: float) -> None:
            await asyncio.sleep(after)
            send = sim.request(0.5)
            await sim.hedger.run(PART, "write b", send, send)

        send, began = sim.request(1e6, 1.0), sim.loop.time()
        others = [asyncio.ensure_future(other(0.1 * (n + 1))) for n in range(count)]
        assert await sim.hedger.run(PART, "write a", send, send) == 1
        await asyncio.gather(*others)
        return sim.loop.time() - began

    soon = LIMITS.overtaken_multiple * 1.0 + 1.0
    assert sim.run(seconds_beside(LIMITS.overtaken_min)) == pytest.approx(soon, abs=0.2)
    _spend_all(sim)
    late = LIMITS.stuck_multiple * 1.0 + 1.0
    assert sim.run(seconds_beside(LIMITS.overtaken_min - 1)) == pytest.approx(late, abs=0.2)
    assert sim.hedger.tally.unearned == 2
    assert not any(sim.hedger._firsts.values())
