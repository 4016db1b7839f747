"""A simulated object store: requests travel, get lost, and land late, even after their sender died.

A request reaches the bytes at one moment of simulated time, and its answer comes at a later one.
Whoever asked may be dead by then; what was sent may land nevertheless.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from storage import Store, TransientError
from storage.errors import OutcomeUnknownError, StorageError
from storage.store import ObjectInfo
from storage.testing import FaultPlan, FaultyStore
from tests.simulation.scheduler import Process, Scheduler

T = TypeVar("T")

PUBLISHING = ("put_if_absent", "publish")
ARRIVING_LATE = (*PUBLISHING, "delete")  # the others borrow memory of their caller


class Weather(NamedTuple):
    """How a store behaves under a seed. Rates are of requests, seconds are simulated."""

    travel_seconds_max: float
    refused: float  # never arrives, and the caller knows
    unanswered: float  # arrives, and the caller does not know
    late: float  # arrives long after the caller has given up
    late_seconds_max: float
    outages: tuple[tuple[float, float], ...]  # from, until: nothing arrives


def weather_of(rng: random.Random) -> Weather:
    """Half of the seeds have good weather: what goes wrong there is the order alone."""
    travel = rng.choice((0.001, 0.05, 1.0))
    if rng.random() < 0.5:
        return Weather(travel, 0.0, 0.0, 0.0, 0.0, ())
    outages = []
    if rng.random() < 0.4:
        begin = rng.uniform(0.0, 20.0)
        outages.append((begin, begin + rng.choice((0.5, 5.0, 60.0))))
    return Weather(
        travel,
        rng.choice((0.0, 0.01, 0.08)),
        rng.choice((0.0, 0.01, 0.08)),
        rng.choice((0.0, 0.0, 0.02)),
        rng.choice((0.5, 5.0, 60.0)),
        tuple(outages),
    )


class Network:
    """Between all processes and one store. `counts` has what went wrong."""

    def __init__(self, scheduler: Scheduler, weather: Weather, seed: str) -> None:
        self.scheduler = scheduler
        self.weather = weather
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(f"network {seed}")

    def request(
        self,
        process: Process,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object],
    ) -> T:
        """Send it, and wait for the answer."""
        scheduler, weather = self.scheduler, self.weather
        there, back = (self._rng.random() * weather.travel_seconds_max for _ in range(2))
        fate = self._fate(operation)
        if fate:
            self.counts[fate] += 1
        if fate == "late":
            there += self._rng.random() * weather.late_seconds_max
        survives = self._rng.random() < 0.5  # what its sender has sent, if that dies meanwhile
        answers: list[tuple[Any, BaseException | None]] = []

        def arrive() -> None:
            if process.is_dead and not survives:
                return
            scheduler.note(f"{operation} {key} arrives")
            try:
                answers.append((apply(), None))
            except StorageError as error:
                answers.append((None, error))

        what = f"{operation} {key}: {fate} by the simulation"
        if fate != "refused":
            scheduler.later(there, arrive)
        scheduler.sleep((0.0 if fate == "late" else there) + back)
        if fate == "refused":
            if operation == "publish":
                discard()
            raise TransientError(what)
        if fate:
            raise OutcomeUnknownError(what) if operation in PUBLISHING else TransientError(what)
        value, error = answers[0]
        if error is not None:
            raise error
        answer: T = value
        return answer

    def _fate(self, operation: str) -> str:
        now, weather = self.scheduler.now, self.weather
        draw = self._rng.random()
        if any(begin <= now < end for begin, end in weather.outages):
            return "refused"
        for fate, rate in (("refused", weather.refused), ("unanswered", weather.unanswered)):
            if draw < rate:
                # A part that has arrived cannot be written again in this store.
                return "refused" if operation == "write_part" else fate
            draw -= rate
        return "late" if draw < weather.late and operation in ARRIVING_LATE else ""


class NetworkStore(FaultyStore):
    """The store as one process sees it."""

    def __init__(self, inner: Store, network: Network, process: Process) -> None:
        super().__init__(inner, FaultPlan(0))
        self._network = network
        self._process = process

    def perform(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object] = lambda: None,
    ) -> T:
        return self._network.request(self._process, operation, key, apply, discard)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """In pages: what is created or deleted meanwhile may be in a later one."""
        while True:
            page = self.perform("list", prefix, partial(self._page, prefix, after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].key

    def _page(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        return tuple(islice(self.inner.list(prefix, after=after), PAGE))


PAGE = 7
