"""What near acknowledgements promise: checks like those of `history`, for jobs with near tiers.

A job's lives follow on each other by the time at which they began. The driver notes the hosts of
each life ("started"), and which host has lost its folder ("lost host").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ckpt.commit.names import attempt_epoch, parse_step_key
from storage.local import LocalStore
from tests.cluster.history import Check, Event, Root


class NearLife(NamedTuple):
    """One life as far as near states are concerned. `newest` is the last state that it was told is
    near, by a near save or because it was restored and recorded again; None for none.
    """

    number: int
    hosts: frozenset[str]
    began: float
    until: float  # the time of its last event
    restored: Event | None
    newest: Event | None
    epoch: int  # the newest that it was told of, 0 for none
    replicas: int


def near_lives(events: Sequence[Event]) -> list[NearLife]:
    """All lives with near tiers, in the order in which they began."""
    lives = []
    started = [e for e in events if e.kind == "started" and e.facts.get("near") is not None]
    for start in started:
        own = [event for event in events if event.life == start.life and event.rank >= 0]
        began = min((event.time for event in own), default=start.time)
        restored = next((event for event in own if event.kind == "restored"), None)
        saves = [event for event in own if event.kind == "near saved"]
        # Those of a life come in the order of their steps, whichever rank was told first.
        newest = max(saves, key=lambda event: int(event.facts["step"]), default=None)
        if newest is None and restored is not None and restored.facts["origin"] == "near":
            newest = restored
        attempts = [event.attempt for event in own if event.kind in ("saved", "near saved")]
        lives.append(
            NearLife(
                start.life,
                frozenset(start.facts["hosts"]),
                began,
                max((event.time for event in own), default=began),
                restored,
                newest,
                max(map(attempt_epoch, attempts), default=0),
                int(start.facts["near"]),
            )
        )
    return sorted(lives, key=lambda life: life.began)


def due_promises(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """What a life was told last is near, and what the next one restored, where that has to be at
    least as new: the first had ended, and its hosts are there, but for as many as there are
    replicas, with their folders.
    """
    lost = [(e.time, e.facts["host"]) for e in events if e.kind == "lost host"]
    due = []
    for before, life in pairwise(near_lives(events)):
        if before.newest is None or life.restored is None or before.until >= life.began:
            continue
        # A host counts as gone if it lost its folder at any time since that life began to write.
        gone = {host for time, host in lost if before.began <= time <= life.restored.time}
        gone |= before.hosts - life.hosts
        if len(gone & before.hosts) <= before.replicas:
            due.append((before.newest, life.restored))
    return due


def near_survives(events: Sequence[Event], root: Root) -> list[str]:
    """What was told is near comes back where it has to, or something newer."""
    return [
        f"{restored}: {promise} had been acknowledged"
        for promise, restored in due_promises(events)
        if restored.facts["step"] < promise.facts["step"]
    ]


def near_of_newest_epoch(events: Sequence[Event], root: Root) -> list[str]:
    """A near state that is restored is of the newest job that saved, or was restored by it."""
    problems = []
    lives = near_lives(events)
    for number, life in enumerate(lives):
        if life.restored is None or life.restored.facts["origin"] != "near":
            continue
        past = [one for one in lives[:number] if one.until < life.began and one.epoch]
        newest = max(past, key=lambda one: one.epoch, default=None)
        if newest is None or attempt_epoch(life.restored.attempt) >= newest.epoch:
            continue
        if newest.restored is None or newest.restored.attempt != life.restored.attempt:
            problems.append(f"{life.restored}: epoch {newest.epoch} had been acknowledged")
    return problems


def near_fenced_are_silent(events: Sequence[Event], root: Root) -> list[str]:
    """Once a newer job's near state lies on a host, no near save that begins there afterwards is
    acknowledged to an older job.
    """
    calls = {
        (e.life, e.rank, e.facts["step"]): e.time - e.facts["seconds"]
        for e in events
        if e.kind == "stepped"
    }
    lives = near_lives(events)
    problems = []
    for event in events:
        if event.kind != "near saved":
            continue
        epoch, began = attempt_epoch(event.attempt), calls.get((*event[:2], event.facts["step"]))
        hosts = next((life.hosts for life in lives if life.number == event.life), frozenset())
        for other in lives:
            first = min(
                (e.time for e in events if e.life == other.number and e.kind == "near saved"),
                default=None,
            )
            if other.epoch <= epoch or first is None or began is None or not hosts & other.hosts:
                continue
            if began > first:
                problems.append(f"{event}: epoch {other.epoch} had a record on its host")
    return problems


NEAR_CHECKS: tuple[Check, ...] = (near_survives, near_of_newest_epoch, near_fenced_are_silent)


def left_in_tiers(tiers: Mapping[str, Path]) -> list[str]:
    """What lies in the tiers of hosts, all of which are part of the job that ended last, besides
    its two newest states and one that it lends to a durable save.
    """
    problems = []
    for host, folder in tiers.items():
        for root in (folder / "near").iterdir():
            with closing(LocalStore(str(root))) as store:
                unfinished = store.abort_unfinished("")
                parsed = [parse_step_key(info.key) for info in store.list("steps/")]
            attempts = {key[1] for key in parsed if key is not None}
            if unfinished:
                problems.append(f"{host}: {unfinished} unfinished files in its tier")
            if not 1 <= len(attempts) <= 3:
                problems.append(f"{host}: {len(attempts)} states in its tier: {sorted(attempts)}")
    return problems
