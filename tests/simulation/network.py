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

from ckpt.commit.names import MANIFEST_NAME
from storage import Store, TransientError
from storage.errors import OutcomeUnknownError, StorageError
from storage.store import ObjectInfo
from storage.testing import FaultPlan, FaultyStore
from tests.simulation.scheduler import Process, Scheduler

T = TypeVar("T")

SLOWER = 30.0  # how many times longer a slow request takes
PUBLISHING = ("put_if_absent", "publish")
ARRIVING_LATE = (*PUBLISHING, "delete")  # the others borrow memory of their caller


class Weather(NamedTuple):
    """How a store behaves under a seed. Rates are of requests, seconds are simulated."""

    travel_seconds_max: float
    refused: float  # never arrives, and the caller knows
    unanswered: float  # arrives or not, and the caller does not know
    late: float  # arrives long after the caller has given up
    late_seconds_max: float
    outages: tuple[tuple[float, float], ...]  # from, until: nothing arrives
    cuts: tuple[tuple[int, float], ...]  # the n-th record gets no answer, and nothing after it
    slow: float  # travels for many times as long


def weather_of(rng: random.Random) -> Weather:
    """Half of the seeds have good weather: what goes wrong there is the order alone."""
    travel, slow = rng.choice((0.001, 0.05, 1.0)), rng.choice((0.0, 0.02, 0.2))
    if rng.random() < 0.5:
        return Weather(travel, 0.0, 0.0, 0.0, 0.0, (), (), slow)
    cuts = []
    if rng.random() < 0.5:
        cuts.append((rng.randint(2, 12), rng.choice((2.0, 20.0, 90.0))))
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
        tuple(cuts),
        slow,
    )


class Network:
    """Between all processes and one store. `counts` has what went wrong."""

    def __init__(self, scheduler: Scheduler, weather: Weather, seed: str) -> None:
        self.scheduler = scheduler
        self.weather = weather
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(f"network {seed}")
        self.unlisted: set[str] = set()  # each came while its attempt was being deleted
        self._published: dict[str, int] = {}  # when, in requests
        self._listed: dict[tuple[str, str], int] = {}
        self._requests = 0
        self._records = 0  # that were sent
        self._cut_until = 0.0

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
        if weather.slow and self._rng.random() < weather.slow:
            there *= SLOWER
        fate = self._fate(operation, key)
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
            self._note_order(process, operation, key)
            try:
                answers.append((apply(), None))
            except StorageError as error:
                answers.append((None, error))

        what = f"{operation} {key}: {fate} by the simulation"
        if fate not in ("refused", "lost"):
            scheduler.later(there, arrive)
        process.requests += 1
        if process.requests == process.dies_at_request and not process.is_dead:
            process.dies()
        scheduler.sleep((0.0 if fate == "late" else there) + back)
        if fate in ("refused", "lost") and operation == "publish":
            discard()
        if fate == "refused":
            raise TransientError(what)
        if fate:
            raise OutcomeUnknownError(what) if operation in PUBLISHING else TransientError(what)
        value, error = answers[0]
        if error is not None:
            raise error
        answer: T = value
        return answer

    def begin_list(self, process: Process, prefix: str) -> None:
        """A process is about to list what lies below a prefix."""
        self._listed[process.name, prefix] = self._requests

    def _note_order(self, process: Process, operation: str, key: str) -> None:
        """Note a MANIFEST that has arrived since the list by which its attempt is deleted."""
        self._requests += 1
        folder, _, name = key.rpartition("/")
        if operation == "publish":
            self._published[key] = self._requests
        if operation != "delete" or name == MANIFEST_NAME:
            return
        lists = [
            n
            for (who, prefix), n in self._listed.items()
            if who == process.name and key.startswith(prefix)
        ]
        manifest = f"{folder}/{MANIFEST_NAME}"
        if lists and self._published.get(manifest, -1) > max(lists):
            self.unlisted.add(manifest)

    def _fate(self, operation: str, key: str) -> str:
        now, weather = self.scheduler.now, self.weather
        draw = self._rng.random()
        if now < self._cut_until:
            return "refused"
        if operation == "put_if_absent" and key.startswith("log/"):
            self._records += 1
            for number, seconds in weather.cuts:
                if number == self._records:
                    self._cut_until = now + seconds
                    return self._rng.choice(("lost", "unanswered"))
        if any(begin <= now < end for begin, end in weather.outages):
            return "refused"
        for fate, rate in (("refused", weather.refused), ("unanswered", weather.unanswered)):
            if draw < rate:
                # A part that has arrived cannot be written again in this store.
                if operation == "write_part":
                    return "refused"
                is_lost = fate == "unanswered" and self._rng.random() < 0.5
                return "lost" if is_lost and operation in PUBLISHING else fate
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
        self._network.begin_list(self._process, prefix)
        while True:
            page = self.perform("list", prefix, partial(self._page, prefix, after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].key

    def _page(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        return tuple(islice(self.inner.list(prefix, after=after), PAGE))


PAGE = 7
