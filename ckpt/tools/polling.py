"""A run that is followed: a root is looked at again and again, and only what is new is read.

A look at a root where nothing has happened is three requests: whether the last record that was read
is still there (a root that was removed, rolled back or exchanged is read anew), whether another one
follows it, and the list of jobs. Each new record is one more, of the log or of a job, and so is the
telemetry of each new checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry, Record
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.telemetry.record import JobRecord, Telemetry, read_jobs
from ckpt.tools.near_tiers import TierView, tier_views
from ckpt.tools.overview import READERS, Event, events_of
from ckpt.tools.report import Measurements, TrainingRun, run_of, telemetry_of
from storage import RetryPolicy, StorageError, Store, StoreLike, TransientError, open_store
from storage.hidden import hides_secrets
from storage.threads import in_order

RECORDS_MAX = 1000  # newest of the log, read at the first look and never again
EVENTS_MAX = 4000  # that are kept: a week of a save and a retirement in five minutes
FULL_MAX = 8  # newest checkpoints whose telemetry is kept in full
TRIES = 5  # looks: a save writes its telemetry after its commit, and a look may fall between
CHOSEN_MAX = 16  # telemetries that are kept because somebody has chosen their saves
AWAY_SECONDS = 5.0  # until a store that does not answer is called away
SLOWER, SLOWEST = 1.5, 8.0  # the pause between looks grows by the one, up to the other, in pauses

Availability = Literal["there", "waiting", "away"]


@dataclass(frozen=True, slots=True)
class RunState:
    """A run as it was seen last. `version` grows with every change.

    `availability` is "waiting" before the first save, and "away" while the store does not answer
    or the root cannot be read, for the reason `problem`; `run` is then what was seen before.
    It is so since `since_unix`. `entries` are the live checkpoints as the log has them, `near` the
    tiers of hosts that somebody wants to see.
    """

    run: TrainingRun
    entries: tuple[LiveEntry, ...] = ()
    near: tuple[TierView, ...] = ()
    availability: Availability = "waiting"
    problem: str = ""
    since_unix: float = 0.0
    version: int = 0


def next_pause(pause_seconds: float, *, shortest_seconds: float, has_changed: bool) -> float:
    """How long to wait before the next look: short after a change, longer while nothing happens."""
    if has_changed:
        return shortest_seconds
    return min(SLOWER * pause_seconds, SLOWEST * shortest_seconds)


class RunPoller:
    """Looks at one root. `poll` is called by one thread at a time, everything else by any."""

    @hides_secrets
    def __init__(
        self,
        url: StoreLike,
        *,
        storage_options: Mapping[str, Any] | None = None,
        near: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads nothing yet. `near` are directories of hosts with tiers. Raises InvalidUrlError."""
        # A training waits minutes for a store that is away; a screen has to say so within seconds.
        policy = RetryPolicy(deadline_seconds=AWAY_SECONDS)
        self._store = open_store(url, retry=policy, **(storage_options or {}))
        self._near = tuple(near)
        self._root = ""  # the identity of the root, once it was read
        self._clock = clock
        self._known = _ReadSoFar(Log(self._store))
        self._was_answered = False
        self._chosen: dict[str, tuple[Telemetry | None, int]] = {}
        self._lock = threading.Lock()
        self.state = RunState(TrainingRun(self._store.url), since_unix=clock())

    def poll(self) -> RunState:
        """Look once. What stays the same is the same object as in the last state.

        A store that does not answer is a state, and so is an empty place where a run may begin.
        Until the first answer, all else is raised, as by any command: NoCheckpoint for a place that
        holds other things, Corrupt, UnsupportedFormat, the store's errors.
        """
        state = self._poll_root()
        if not self._near or not self._root:
            return state
        # While the store is away, too: that is when near checkpoints matter.
        near = tuple(tier_views(self._near, self._root))
        if near != self.state.near:
            self.state = replace(self.state, near=near, version=self.state.version + 1)
        return self.state

    def _poll_root(self) -> RunState:
        try:
            known = self._look()
        except NoCheckpoint as error:
            return self._without_root(error)
        except (CheckpointError, OSError) as error:
            if not self._was_answered and not isinstance(error, TransientError):
                raise
            return self._became("away", str(error))
        self._was_answered = True
        if known is not self._known:
            self._known = known
            state = replace(self.state, run=known.run(self._store.url), entries=known.live)
            if (state.run, state.entries) != (self.state.run, self.state.entries):
                self.state = replace(state, version=state.version + 1)
        return self._became("there", "")

    def telemetry(self, attempt: str) -> Telemetry | None:
        """How the save of a live checkpoint went, in full; None where that is not known. At most
        one request for each of the last few that were asked for, and where there is nothing, one
        for each version of the state.
        """
        state = self.state
        for one in state.run.measured.full:
            if one.totals.attempt == attempt:
                return one
        with self._lock:
            known, version = self._chosen.get(attempt, (None, -1))
        entry = next((entry for entry in state.entries if entry.attempt == attempt), None)
        if known is not None or version == state.version or entry is None:
            return known
        # Without the lock: two screens may read the same one, and none waits for another's store.
        own = telemetry_of(self._store, entry)
        with self._lock:
            self._chosen[attempt] = (own, state.version)
            # A dict keeps the order of insertion: the first ones were chosen longest ago.
            for oldest in list(self._chosen)[:-CHOSEN_MAX]:
                del self._chosen[oldest]
        return own

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def hurry(self) -> None:
        """Give up what is being repeated: the caller ends, and will not wait for a store."""
        if self._store.patience is not None:
            self._store.patience.set(0.0)

    def _became(self, availability: Availability, problem: str) -> RunState:
        state = self.state
        if (state.availability, state.problem) != (availability, problem):
            is_new = state.availability != availability
            self.state = replace(
                state,
                availability=availability,
                problem=problem,
                since_unix=self._clock() if is_new else state.since_unix,
                version=state.version + 1,
            )
        return self.state

    def _without_root(self, error: NoCheckpoint) -> RunState:
        if self.state.run.saves or self.state.run.sessions:
            return self._became("away", str(error))  # it was there: a disk may be unmounted
        try:
            is_empty = next(iter(self._store.list("")), None) is None
        except (StorageError, OSError) as failure:
            if not self._was_answered and not isinstance(failure, TransientError):
                raise
            return self._became("away", str(failure))
        if not is_empty and not self._was_answered:
            raise error
        self._was_answered = True
        return self._became("waiting", "" if is_empty else str(error))

    def _look(self) -> _ReadSoFar:
        """What is known now: `self._known` itself where nothing has happened."""
        known = self._known
        # Records are never changed: one that reads otherwise is of another log under this url.
        if known.last is None or not known.log.holds(known.last):
            self._root = read_format(self._store)
            known = _ReadSoFar(Log(self._store))
        state = known.log.state()
        last = -1 if known.last is None else known.last.slot
        if state.slot != last:
            known = known.read_on(state.slot, state.live)
        known = known.with_telemetry(self._store)
        jobs = read_jobs(self._store, known.jobs)
        return known if jobs == known.jobs else replace(known, jobs=jobs)


@dataclass(frozen=True)
class _ReadSoFar:
    """What was read of one root. `tries` are looks that are left for telemetry that is missing."""

    log: Log
    last: Record | None = None
    events: tuple[Event, ...] = ()
    live: tuple[LiveEntry, ...] = ()
    measured: Measurements = field(default_factory=Measurements)
    tries: tuple[tuple[LiveEntry, int], ...] = ()
    jobs: Mapping[str, JobRecord] = field(default_factory=dict)

    def run(self, url: str) -> TrainingRun:
        """All of it as a value."""
        return run_of(url, self.events, self.live, self.measured, [*self.jobs.values()])

    def read_on(self, slot: int, live: Sequence[LiveEntry]) -> _ReadSoFar:
        """With the records up to `slot`: those behind `last`, or the newest if they are many."""
        # After a night without looks the events would have a hole: they begin again behind it.
        is_anew = self.last is None or slot - self.last.slot > RECORDS_MAX
        first = max(0, slot + 1 - RECORDS_MAX) if is_anew or not self.last else self.last.slot + 1
        # The record before the first has the step of what the first may have retired.
        before = [self.last] if self.last is not None and not is_anew else []
        slots = range(first if before else max(0, first - 1), slot + 1)
        records = [*before, *in_order(self.log.record, slots, threads=READERS, name="ckpt-poll")]
        new = tuple(event for event in events_of(self.log, records) if event.slot >= first)
        events = (*(() if is_anew else self.events), *new)[-EVENTS_MAX:]
        seen = {entry.attempt for entry in self.live}
        fresh = [entry for entry in live if entry.attempt not in seen][-FULL_MAX:]
        # At the first look, only the newest one may have been committed a moment ago.
        few = [(entry, 1 if self.last is None else TRIES) for entry in fresh[:-1]]
        tries = [*self.tries, *few, *((entry, TRIES) for entry in fresh[-1:])]
        return replace(
            self, last=records[-1], events=events, live=tuple(live), tries=tuple(tries[-FULL_MAX:])
        )

    def with_telemetry(self, store: Store) -> _ReadSoFar:
        """With what telemetry was missing and is there now."""
        alive = {entry.attempt for entry in self.live}
        missing = [(entry, left) for entry, left in self.tries if entry.attempt in alive]
        if not missing:
            return self
        entries = [entry for entry, _ in missing]
        look = partial(telemetry_of, store)
        read = [*in_order(look, entries, threads=READERS, name="ckpt-poll")]
        pairs = zip(missing, read, strict=True)
        left = tuple((entry, left - 1) for (entry, left), one in pairs if one is None and left > 1)
        measured = self._bounded(one for one in read if one is not None)
        return replace(self, tries=left, measured=measured)

    def _bounded(self, telemetries: Iterable[Telemetry]) -> Measurements:
        """What was measured, with these, of no more saves than are known by their commits."""
        measured = self.measured.with_telemetry(telemetries)
        commits = {event.attempt for event in self.events if event.kind == "COMMIT"}
        known = commits | {entry.attempt for entry in self.live}
        return Measurements(
            tuple(sorted(measured.full, key=lambda one: one.totals.committed_unix))[-FULL_MAX:],
            {name: totals for name, totals in measured.totals.items() if name in known},
        )
