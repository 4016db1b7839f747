"""A small model checker: runs real code under every schedule and every fault, within a budget.

Actors are functions that use a `SteppedStore`. Each store operation stops its actor until the
explorer chooses who goes next and how the operation ends. A run is the list of its choices; the
next run changes the last choice that has another alternative, so all runs within the budget are
made exactly once. Leaving the current actor while it could go on costs 1, and so does every fault.
What others do to the objects from outside (restore a backup, make links) may come between any two
operations, and costs 1 too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from storage.errors import KeyExistsError, OutcomeUnknownError
from storage.store import ByteRange, Store
from storage.wrap import WrappedStore

PUT_FAULTS = ("unknown, applied", "unknown, lost", "unknown, late", "killed before", "killed after")
# Not among these, so that other searches are not longer: it is answered, and a copy that the store
# has sent because the first one took long is still on its way.
SENT_TWICE = "sent twice"

Outside = Callable[[], dict[str, Callable[[], None]]]


class Killed(BaseException):
    """The process of this actor ends here."""


@dataclass
class Choices:
    """The choices of one run: `prefix` is given, beyond it always the first alternative."""

    prefix: list[int]
    budget: int
    made: list[tuple[int, int]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def choose(self, options: list[tuple[str, int]]) -> str:
        """One of the (label, cost) options that the budget allows; the first one costs nothing."""
        allowed = [option for option in options if option[1] <= self.budget]
        depth = len(self.made)
        index = self.prefix[depth] if depth < len(self.prefix) else 0
        self.made.append((index, len(allowed)))
        label, cost = allowed[index]
        self.budget -= cost
        if cost or len(allowed) > 1:
            self.labels.append(label)
        return label

    def next_prefix(self) -> list[int] | None:
        made = list(self.made)
        while made:
            index, count = made.pop()
            if index + 1 < count:
                return [chosen for chosen, _ in made] + [index + 1]
        return None


class _Actor:
    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped_at: str | None = None
        self.order = ""
        self.go = threading.Semaphore(0)


class Run:
    """One run: the actors, the store below them, and writes that are still under way."""

    def __init__(
        self,
        store: Store,
        choices: Choices,
        pool: ThreadPoolExecutor,
        outside: Outside | None,
        *,
        stops_at_files: bool = False,
        put_faults: Sequence[str] = PUT_FAULTS,
    ) -> None:
        self.store = store
        self.faults = {"put": put_faults, "file": ("killed before",)}
        self.choices = choices
        self.stops_at_files = stops_at_files
        self.outside: Outside = outside or dict
        self.stops_at_reads = outside is not None
        self.under_way: list[tuple[str, bytes]] = []
        self.arrived: list[str] = []
        self.errors: list[str] = []
        self._pool = pool
        self._came = threading.Semaphore(0)

    def go(self, actors: dict[str, Callable[[Store], None]]) -> None:
        """Run the actors to their ends, then let what is under way arrive or be lost."""
        running = {name: _Actor(name) for name in actors}
        futures: list[Future[None]] = []
        for name, fn in actors.items():
            futures.append(self._pool.submit(self._live, running[name], fn))
            self._came.acquire()
        current = next(iter(running))
        while waiting := [a for a in running.values() if a.stopped_at is not None]:
            names = [a.name for a in waiting]
            current = current if current in names else names[0]
            current = self._step(running, current, names)
        for key, data in self.under_way:
            if self.choices.choose([("lost", 0), ("arrives at last", 0)]) != "lost":
                self._arrive(key, data)
        for name, future in zip(actors, futures, strict=True):
            error = future.exception()
            if error is not None:
                self.errors.append(f"I9: {name} ended with {type(error).__name__}: {error}")

    def _step(self, running: dict[str, _Actor], current: str, names: list[str]) -> str:
        options = [(current, 0)] + [(name, 1) for name in names if name != current]
        options += [(f"arrives: {i}", 1) for i in range(len(self.under_way))]
        outside = self.outside()
        options += [(name, 1) for name in outside]
        chosen = self.choices.choose(options)
        if chosen.startswith("arrives"):
            self._arrive(*self.under_way.pop(int(chosen.split()[1])))
            return current
        if chosen in outside:
            outside[chosen]()
            return current
        actor = running[chosen]
        faults = [(fault, 1) for fault in self.faults.get(actor.stopped_at or "", ())]
        actor.order = self.choices.choose([("done", 0), *faults])
        actor.stopped_at = None
        actor.go.release()
        self._came.acquire()
        return chosen

    def _arrive(self, key: str, data: bytes) -> None:
        self.arrived.append(key)
        with contextlib.suppress(KeyExistsError):
            self.store.put_if_absent(key, data)

    def _live(self, actor: _Actor, fn: Callable[[Store], None]) -> None:
        try:
            fn(SteppedStore(self, actor))
        except Killed:
            pass
        finally:
            actor.stopped_at = None
            self._came.release()

    def stop(self, actor: _Actor, op: str) -> str:
        """Called by the actor: wait to be chosen; how the operation shall end."""
        actor.stopped_at = op
        self._came.release()
        actor.go.acquire()
        return actor.order


class SteppedStore(WrappedStore):
    """One actor's view: log operations stop and wait for the explorer; the rest passes."""

    def __init__(self, run: Run, actor: _Actor) -> None:
        super().__init__(run.store)
        self._run = run
        self._actor = actor

    def pause(self, op: str) -> None:
        """Stop in the middle of an operation."""
        self._run.stop(self._actor, op)

    def info(self, key: str) -> Any:
        if key.startswith("log/"):
            self._run.stop(self._actor, "info")
        return self.inner.info(key)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if key.startswith("log/") and self._run.stops_at_reads:
            self._run.stop(self._actor, "get")
        return self.inner.get(key, byte_range)

    def delete(self, key: str) -> None:
        self._run.stop(self._actor, "delete")
        self.inner.delete(key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not key.startswith("log/"):
            if self._run.stops_at_files and self._run.stop(self._actor, "file") != "done":
                raise Killed
            return self.inner.put_if_absent(key, data)
        order = self._run.stop(self._actor, "put")
        if order == "killed before":
            raise Killed
        if order == SENT_TWICE:
            self._run.under_way.append((key, data))
            return self.inner.put_if_absent(key, data)
        if order == "unknown, late":
            self._run.under_way.append((key, data))
        elif order != "unknown, lost":
            try:
                self.inner.put_if_absent(key, data)
            except KeyExistsError:
                if order == "done":
                    raise
        if order == "killed after":
            raise Killed
        if order != "done":
            raise OutcomeUnknownError(f"create {key}: no answer ({order})")
        return None


def explore(
    make: Callable[[], Store],
    actors: Callable[[], dict[str, Callable[[Store], None]]],
    check: Callable[[Store], list[str]],
    *,
    budget: int,
    outside: Outside | None = None,
    arrived: list[str] | None = None,
    stops_at_files: bool = False,
    put_faults: Sequence[str] = PUT_FAULTS,
) -> tuple[int, list[str]]:
    """All runs within `budget`: how many, and the violations of the first run that has any.

    `outside()` are the things by name that somebody else may do at this moment of a run. With it,
    actors stop where they read the log, too.
    `arrived` gets the keys of a run that were written after their writer had given up. With
    `stops_at_files`, actors stop before they create data files and manifests, too. `put_faults`
    are the ways in which a write of the log may end beside the usual one.
    """
    runs = 0
    prefix: list[int] = []
    with ThreadPoolExecutor(8) as pool:
        while True:
            store, choices = make(), Choices(prefix, budget)
            run = Run(
                store,
                choices,
                pool,
                outside,
                stops_at_files=stops_at_files,
                put_faults=put_faults,
            )
            run.go(actors())
            runs += 1
            if arrived is not None:
                arrived[:] = run.arrived
            problems = run.errors + check(store)
            if problems:
                return runs, [*problems, "choices: " + "; ".join(choices.labels)]
            following = choices.next_prefix()
            if following is None:
                return runs, []
            prefix = following
