"""How many requests a load has in flight, over links of every kind, and that no more are.

Method: a link is simulated in a time that is a number: requests wait for its latency, then share
its bandwidth. Real threads wait for each other, so that a wrong number of them never ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest

from storage.threads import RequestWindow, as_done
from tests.counting import AtOnce

MIB = 1 << 20
NBYTES = 8 * MIB
GBIT = 1e9 / 8
LEAST, FIRST, MOST = 4, 16, 16  # of loads; puts begin with the least


def run_all(window: RequestWindow, reads: Sequence[Callable[[], None]], **how: Any) -> None:
    """Each is an item that brings NBYTES."""
    list(
        as_done(
            lambda read: read(), reads, threads=1, name="t", window=window, nbytes_of=nbytes, **how
        )
    )


def nbytes(_: object) -> int:
    return NBYTES


@dataclass
class Link:
    """A store behind a network; above `capacity` in flight it refuses, at once."""

    latency: float
    bandwidth: float  # bytes per second, shared by all
    each: float = math.inf  # of one connection
    capacity: int = 1000


class Request(NamedTuple):
    number: int
    round: int
    started: float


class Outcome(NamedTuple):
    """`widths` at the answers, in their order; the seconds that all took."""

    widths: list[int]
    seconds: float
    refusals: int


def simulate(window: RequestWindow, count: int, link_at: Callable[[int], Link]) -> Outcome:
    """Load `count` requests; `link_at(n)` is the link when n are answered."""
    now, sent, answered, refusals = 0.0, 0, 0, 0
    waiting: list[tuple[float, Request]] = []  # until their first byte
    moving: dict[Request, float] = {}  # bytes left
    widths = []
    while answered < count:
        link = link_at(answered)
        while sent < count + refusals and len(waiting) + len(moving) < window.width:
            request = Request(sent, window.round, now)
            sent += 1
            if len(waiting) + len(moving) >= link.capacity:
                refusals += 1
                window.refused(request.round)
            else:
                waiting.append((now + link.latency, request))
        speed = min(link.bandwidth / max(len(moving), 1), link.each)
        first_byte = min((when for when, _ in waiting), default=math.inf)
        last_byte = now + min(moving.values(), default=math.inf) / speed
        step = min(first_byte, last_byte) - now
        now += step
        moving = {request: left - step * speed for request, left in moving.items()}
        for when, request in [one for one in waiting if one[0] <= now]:
            waiting.remove((when, request))
            moving[request] = NBYTES
        in_flight = len(waiting) + len(moving)
        for request in [one for one, left in moving.items() if left < 1]:
            del moving[request]
            answered += 1
            widths.append(window.width)
            window.answered(request.round, in_flight, NBYTES, now - request.started)
    return Outcome(widths, now, refusals)


def wide(link: Link, count: int, width: int) -> float:
    """The seconds with so many in flight all the time."""
    return simulate(RequestWindow(width, width), count, lambda _: link).seconds


LINKS = {
    "1 ms, 1 Gb/s": (Link(0.001, 1 * GBIT), 1.0, 10),
    "50 ms, 10 Gb/s": (Link(0.05, 10 * GBIT), 1.6, MOST),
    "200 ms, 100 Mb/s": (Link(0.2, 0.1 * GBIT), 1.0, 10),
    "connections of 90 MB/s": (Link(0.05, 100 * GBIT, each=90e6), 3.0, MOST),
    "20 ms, 25 Gb/s, of 90 MB/s": (Link(0.02, 25 * GBIT, each=90e6), 3.0, MOST),
}


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("link", [link for link, _, _ in LINKS.values()], ids=LINKS.keys())
def test_a_short_load_is_as_fast_as_with_the_best_number(link: Link, count: int) -> None:
    """128 and 512 MiB: they are over before a climb from fewer would have found it."""
    best = min(wide(link, count, number) for number in range(LEAST, MOST + 1))
    window = RequestWindow(LEAST, MOST, FIRST)
    assert simulate(window, count, lambda _: link).seconds <= 1.02 * best


@pytest.mark.parametrize(("link", "gain", "width"), LINKS.values(), ids=LINKS.keys())
def test_the_pipe_is_filled_and_not_stuffed(link: Link, gain: float, width: int) -> None:
    """`gain` over the fixed number that there was; `width` is the most at the end."""
    count = 400
    outcome = simulate(RequestWindow(LEAST, MOST, FIRST), count, lambda _: link)
    best = min(wide(link, count, number) for number in range(LEAST, MOST + 1))
    assert outcome.seconds <= 1.08 * best
    assert wide(link, count, LEAST) / outcome.seconds >= 0.99 * gain
    late = outcome.widths[count // 2 :]
    assert sum(late) / len(late) <= width
    assert min(outcome.widths) >= LEAST and max(outcome.widths) <= MOST


def test_the_climb_takes_few_requests() -> None:
    """Of puts, from the least on: a round of four, and one of eight."""
    link = Link(0.05, 100 * GBIT, each=90e6)
    outcome = simulate(RequestWindow(LEAST, MOST), 64, lambda _: link)
    assert outcome.widths.index(MOST) <= 4 * LEAST


def test_a_server_that_refuses_gets_fewer() -> None:
    """A far one, where more would be faster if it took them."""
    link = Link(0.05, 100 * GBIT, each=90e6, capacity=10)
    outcome = simulate(RequestWindow(LEAST, MOST, FIRST), 400, lambda _: link)
    assert outcome.refusals <= 400 // 20
    late = outcome.widths[100:]
    assert sum(late) / len(late) <= link.capacity
    assert outcome.seconds <= wide(link, 400, LEAST)


def test_refusals_of_a_round_count_once_and_never_below_the_least() -> None:
    window = RequestWindow(LEAST, MOST)
    while window.width < MOST:
        window.answered(window.round, MOST, NBYTES, 1.0)
    for left in (MOST // 2, MOST // 4, LEAST, LEAST):
        sent_in = window.round
        for _ in range(MOST):
            window.refused(sent_in)
        assert window.width == left


def test_it_follows_a_bandwidth_that_changes() -> None:
    """A tenth, then as before."""
    fast, slow = Link(0.05, 10 * GBIT), Link(0.05, 1 * GBIT)
    outcome = simulate(
        RequestWindow(LEAST, MOST, FIRST),
        1500,
        lambda answered: slow if 500 <= answered < 1000 else fast,
    )
    parts = [outcome.widths[end - 100 : end] for end in (500, 1000, 1500)]
    means = [sum(part) / len(part) for part in parts]
    assert means[1] < 0.75 * min(means[0], means[2]), means
    assert means[2] > 0.7 * means[0], means


def test_requests_that_the_window_was_not_full_for_do_not_count() -> None:
    """The last ones of a load: fewer share the network, so they say nothing of the width."""
    window = RequestWindow(LEAST, MOST)
    for _ in range(100):
        window.answered(window.round, LEAST - 1, NBYTES, 1.0)
    assert window.width == LEAST


# --- with threads -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 16])
def test_as_many_run_at_once_as_the_window_has(width: int) -> None:
    """Each waits for so many others: with fewer at once they would never all be there."""
    barrier, at_once = threading.Barrier(width, timeout=60), AtOnce()

    def read() -> None:
        with at_once.entered():
            barrier.wait()

    run_all(RequestWindow(width, width), [read] * (5 * width))
    assert at_once.most == width


def test_memory_in_flight_is_bounded_while_the_window_grows() -> None:
    """In a time that stands still every step is worth it. Groups of reads wait for each other: the
    window is 4, then 8, then 16 wide, or they would wait for ever.
    """
    groups = [threading.Barrier(LEAST, timeout=60)] * 4 + [threading.Barrier(8, timeout=60)] * 8
    free = [threading.Barrier(1)] * 8  # answers until the window is wide
    groups += free + [threading.Barrier(MOST, timeout=60)] * MOST + free * 3
    at_once = AtOnce()

    def read(group: threading.Barrier) -> None:
        with at_once.entered():
            group.wait()

    reads = [partial(read, group) for group in groups]
    run_all(RequestWindow(LEAST, MOST), reads, clock=lambda: 0.0)
    assert at_once.most == MOST


def test_requests_that_the_store_repeats_make_it_narrower() -> None:
    repeats = iter(range(1000))
    window = RequestWindow(LEAST, MOST)
    while window.width < MOST:
        window.answered(window.round, MOST, NBYTES, 1.0)
    run_all(window, [lambda: None] * 40, repeated=lambda: next(repeats))
    assert window.width == LEAST


def test_an_error_ends_the_rest() -> None:
    begun: list[int] = []

    def read(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise OSError("planned")

    with pytest.raises(OSError, match="planned"):
        run_all(RequestWindow(1, 1), [partial(read, number) for number in range(9)])
    assert begun == [0, 1, 2]
