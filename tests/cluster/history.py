"""What callers were told, and whether a root keeps the promises that follow from it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.commit.log import Log
from ckpt.commit.names import attempt_epoch, parse_step_key
from ckpt.commit.session import Session
from ckpt.loading.load import LoadOptions
from storage import Store
from tests.cluster.agent import is_step, state_of
from tests.e2e.job import NO_WAITING, Job

# How a rank may end: by itself; fenced; because others are gone, which we find, or gloo
# (RuntimeError), or torch's store (Dist...); as the store says, where that does not come back.
EXPECTED = {"Fenced", "RankFailed", "RuntimeError", "DistNetworkError", "DistStoreError"}
EXPECTED |= {"SavesFailed", "TransientError", "OutcomeUnknown"}


class Event(NamedTuple):
    """A line of a history: what one rank of one life was told."""

    life: int
    rank: int
    kind: str
    facts: dict[str, Any]


def read_history(folder: Path) -> list[Event]:
    """All events, in the order of time of this machine's clock."""
    events = []
    for path in folder.glob("life*-rank*"):
        life = int(path.name.removeprefix("life").partition("-")[0])
        for line in path.read_text().splitlines():
            facts = json.loads(line)
            events.append(Event(life, facts["rank"], facts["event"], facts))
    return sorted(events, key=lambda event: event.facts["time"])


def broken_promises(events: Sequence[Event], store: Store) -> list[str]:
    """What callers were told that is not so; empty if all is well."""
    records = list(Log(store).history())
    committed = {r.attempt for r in records if r.kind == "COMMIT"}
    retired = {r.attempt for r in records if r.kind == "RETIRE"}
    live = {entry.attempt: entry.step for entry in Log(store).state().live}
    problems = [*_wrong_bits(live.values(), store), *_epochs(records)]
    for event in events:
        name = event.facts.get("attempt")
        if event.kind == "saved" and name not in committed:
            problems.append(f"{event}: acknowledged, and not in the log")
        elif event.kind == "saved" and name not in live and name not in retired:
            problems.append(f"{event}: acknowledged, and gone without a RETIRE")
        if event.kind == "restored" and not event.facts["right"]:
            problems.append(f"{event}: wrong bits")
        if event.kind == "ended" and event.facts["error"] not in {"", *EXPECTED}:
            problems.append(f"{event}: no error that the documents name")
    slots = {r.attempt: r.slot for r in records if r.kind == "COMMIT" and r.attempt}
    return problems + _outcomes(events) + _went_back(events, slots)


def _wrong_bits(steps: Iterable[int], store: Store) -> list[str]:
    problems = []
    for step in steps:
        state = state_of(0, 0, 1)
        Job(1, lambda rank: store).load([state].__getitem__, step, LoadOptions())
        if not is_step(state, step, 0, 1):
            problems.append(f"step {step}: wrong bits in the root")
    return problems


def _epochs(records: Sequence[Any]) -> list[str]:
    """A writer that was fenced commits nothing afterwards."""
    highest, problems = 0, []
    for record in sorted(records, key=lambda record: record.slot):
        highest = max(highest, record.epoch)
        if record.kind == "COMMIT" and attempt_epoch(record.attempt) < highest:
            problems.append(f"slot {record.slot}: {record.attempt} is of a fenced writer")
    return problems


def _outcomes(events: Sequence[Event]) -> list[str]:
    """All ranks of a life that were told how a save ended were told the same."""
    reported: dict[tuple[int, int], set[str]] = defaultdict(set)
    starts: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.kind in ("saved", "failed"):
            reported[event.life, event.facts["step"]].add(event.kind)
        if event.kind == "restored":
            starts[event.life].add(event.facts["step"])
    both = [
        f"life {life}: step {s} saved and failed" for (life, s), k in reported.items() if len(k) > 1
    ]
    return both + [f"life {n}: restored {steps}" for n, steps in starts.items() if len(steps) > 1]


def _went_back(events: Sequence[Event], slots: Mapping[str, int]) -> list[str]:
    """Who begins after a save was acknowledged restores that one, or one committed later."""
    newest, problems = -1, []
    before: dict[int, int] = {}
    for event in events:
        slot = slots.get(event.facts.get("attempt", ""), -1)
        if event.kind == "began":
            before.setdefault(event.life, newest)
        if event.kind == "saved":
            newest = max(newest, slot)
        if event.kind == "restored" and slot < before[event.life]:
            problems.append(f"{event}: slot {before[event.life]} had been acknowledged")
    return problems


def left_behind(store: Store) -> list[str]:
    """What a new job's sweep leaves besides the checkpoints that exist."""
    session = Session.claim(store, sources=NO_WAITING)
    session.sweep_unfinished()
    session.sweep()
    live = {entry.attempt for entry in session.state().live}
    parsed = [(info.key, parse_step_key(info.key)) for info in store.list("steps/")]
    left = [key for key, name in parsed if name is None or name[1] not in live]
    uploads = store.abort_unfinished("steps/")
    return left + [f"{uploads} uploads"] * (uploads > 0)


def counts(events: Sequence[Event]) -> str:
    """How much was tried, in one line."""
    kinds = Counter(event.kind for event in events)
    ends = Counter(event.facts["error"] or "done" for event in events if event.kind == "ended")
    lives = len({event.life for event in events})
    return f"{lives} lives, {dict(kinds)}, ends {dict(ends)}"
