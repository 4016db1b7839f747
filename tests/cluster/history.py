"""What callers were told, and whether a root keeps the promises that follow from it.

A history is a list of events in the order of one clock: what ranks were told, what an onlooker saw,
and what the driver did. A root is what its log says. Each check takes both, knows nothing of how
the library works, and returns what is wrong; near tiers have theirs in `near_history.py`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.commit.log import Log
from ckpt.commit.names import attempt_epoch, parse_step_key
from ckpt.commit.records import LiveEntry, Record
from ckpt.commit.session import Session
from ckpt.loading.load import LoadOptions, load_state
from ckpt.world.base import World
from storage import Store
from tests.cluster.agent import is_step, state_of
from tests.e2e.job import NO_WAITING, left_by_sweep
from tests.thread_ranks import run_ranks

# How a rank may end: by itself; fenced; because others are gone, which we find, or gloo
# (RuntimeError), or torch's store (Dist...); as the store says, where that does not come back: a
# restore may learn it in the middle of its reads.
EXPECTED = {"Fenced", "RankFailed", "RuntimeError", "DistNetworkError", "DistStoreError"}
EXPECTED |= {"SavesFailed", "TransientError", "OutcomeUnknown", "LoadInterrupted"}
EXPECTED |= {"RankFailedInCommit"}

# A save that ends so may have made its checkpoint. The second is no contradiction to what others
# are told: this rank has lost one of them before it learned the outcome.
UNKNOWN = {"OutcomeUnknown", "RankFailedInCommit"}

# What an onlooker may be told where it sees nothing: the store fails, or has nothing yet.
UNSEEN = {"TransientError", "SlowDownError", "StorageError", "AccessDeniedError", "NoCheckpoint"}
UNSEEN |= {"LoadInterrupted", "OSError"}

# Of one call. A store is waited for as long as PATIENCE_SECONDS says (12), other ranks by gloo for
# as long again; a call may meet both, and twice where it has to tell the others. Each machine that
# stands still adds its own time.
CALL_SECONDS_MAX = 60.0


class Event(NamedTuple):
    """A line of a history: what one rank of one life was told. Rank -1 is an onlooker's or the
    driver's; the life of an onlooker is -1.
    """

    life: int
    rank: int
    kind: str
    facts: Mapping[str, Any]

    @property
    def time(self) -> float:
        return float(self.facts["time"])

    @property
    def attempt(self) -> str:
        return str(self.facts.get("attempt", ""))


class Root(NamedTuple):
    """What a log says: its records in the order of their slots, and what exists, step by attempt.

    `kept_min` is how many newer checkpoints there are at least when one is retired, by any rule
    that somebody applied to it.
    """

    records: tuple[Record, ...]
    live: Mapping[str, int]
    kept_min: int = 1

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each commit, by attempt."""
        return {r.attempt: r.slot for r in self.records if r.kind == "COMMIT" and r.attempt}


Check = Callable[[Sequence[Event], Root], list[str]]


def read_history(folder: Path, whose: str = "*") -> list[Event]:
    """All events, in the order of time of this machine's clock. A line may be under way."""
    events = []
    for path in folder.glob(f"{whose}.history"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            facts = json.loads(line)
            events.append(Event(facts["life"], facts["rank"], facts["event"], facts))
    return sorted(events, key=lambda event: event.time)


def root_of(store: Store, kept_min: int) -> Root:
    """What the log in a store says."""
    log = Log(store)
    records = sorted(log.history(), key=lambda record: record.slot)
    live = {entry.attempt: entry.step for entry in log.state().live}
    return Root(tuple(records), live, kept_min)


def broken_promises(
    events: Sequence[Event], root: Root, checks: Iterable[Check] | None = None
) -> list[str]:
    """What callers were told that is not so; empty if all is well."""
    return [
        f"{check.__name__}: {problem}"
        for check in (CHECKS if checks is None else checks)
        for problem in check(events, root)
    ]


def acknowledged_exist(events: Sequence[Event], root: Root) -> list[str]:
    """What was acknowledged is in the log, and lives unless a RETIRE names it."""
    retired = {r.attempt for r in root.records if r.kind == "RETIRE"}
    problems = []
    for event in events:
        if event.kind == "saved" and event.attempt not in root.slots:
            problems.append(f"{event}: acknowledged, and not in the log")
        elif event.kind == "saved" and event.attempt not in {*root.live, *retired}:
            problems.append(f"{event}: acknowledged, and gone without a RETIRE")
    return problems


def failed_do_not_exist(events: Sequence[Event], root: Root) -> list[str]:
    """What was reported as failed was never committed, unless the error says that this is open."""
    return [
        f"{event}: reported as failed, and in the log"
        for event in events
        if event.kind == "failed"
        and event.facts["error"] not in UNKNOWN
        and event.attempt in root.slots
    ]


def retired_by_rule(events: Sequence[Event], root: Root) -> list[str]:
    """What leaves the live set was retired, and at that moment a rule allowed it: enough newer ones
    exist, and it is no import, which no rule retires.
    """
    problems, before = [], dict[str, LiveEntry]()
    for record in root.records:
        live = {entry.attempt: entry for entry in record.live}
        for attempt in before.keys() - live.keys():
            slot = before[attempt].slot
            newer = [e for e in live.values() if e.slot > slot and e.line is not None]
            if record.kind != "RETIRE" or record.attempt != attempt:
                problems.append(f"slot {record.slot}, a {record.kind}, drops {attempt}")
            elif before[attempt].line is None:
                problems.append(f"slot {record.slot} retires {attempt}, of no training")
            elif len(newer) < root.kept_min:
                problems.append(f"slot {record.slot} retires {attempt}: {len(newer)} are newer")
        before = live
    return problems


def only_whole_ones_are_listed(events: Sequence[Event], root: Root) -> list[str]:
    """Whatever an onlooker finds listed is a commit, and can be loaded or was retired."""
    retired = {r.attempt for r in root.records if r.kind == "RETIRE"}
    problems = []
    for event in events:
        if event.kind in ("seen", "gone") and event.attempt not in root.slots:
            problems.append(f"{event}: listed, and not in the log")
        if event.kind == "gone" and event.attempt not in retired:
            problems.append(f"{event}: listed, and gone without a RETIRE")
        if event.kind == "not seen" and event.facts["error"] not in UNSEEN:
            problems.append(f"{event}: no error of a store that fails")
    return problems


def no_wrong_byte(events: Sequence[Event], root: Root) -> list[str]:
    """Whatever anybody loaded has the bits of its step."""
    loads = [event for event in events if event.kind in ("restored", "seen")]
    return [f"{event}: wrong bits" for event in loads if not event.facts["right"]]


def latest_never_goes_back(events: Sequence[Event], root: Root) -> list[str]:
    """Who begins after a save was acknowledged, or seen as the latest, restores or sees that one,
    or one committed later. Near states have no slot: they are at least as far in steps.
    """
    newest, problems = (-1, -1), []  # slot and step
    before: dict[int, tuple[int, int]] = {}
    for event in events:
        slot, step = root.slots.get(event.attempt, -1), int(event.facts.get("step", -1))
        if event.kind == "began":
            before.setdefault(event.life, newest)
        if event.kind == "saved" or (event.kind == "seen" and event.facts["latest"]):
            if event.kind == "seen" and slot < before.get(event.life, (-1, -1))[0]:
                problems.append(f"{event}: slot {before[event.life][0]} had been the latest")
            newest = max(newest, (slot, step))
        if event.kind == "seen" and event.facts["latest"]:
            before[event.life] = newest
        if event.kind == "restored":
            is_near = event.facts.get("origin") == "near"
            known = before.get(event.life, (-1, -1))
            if (step < known[1]) if is_near else (slot < known[0]):
                problems.append(f"{event}: slot and step {known} had been acknowledged")
    return problems


def fenced_are_silent(events: Sequence[Event], root: Root) -> list[str]:
    """A writer that was fenced commits nothing afterwards, and no caller of it is told so."""
    highest, problems, late = 0, [], set()
    for record in root.records:
        highest = max(highest, record.epoch)
        if record.kind == "COMMIT" and record.attempt and record.epoch < highest:
            late.add(record.attempt)
        if record.kind == "COMMIT" and attempt_epoch(record.attempt or "") < highest:
            late.add(record.attempt or "")
            problems.append(f"slot {record.slot}: {record.attempt} is of a fenced writer")
    fenced: dict[int, float] = {}
    began: dict[tuple[int, int], float] = {}  # the call of `step` that began the save
    for event in events:
        if event.kind == "stepped":
            began.setdefault((event.life, event.facts["step"]), event.time - event.facts["seconds"])
        if event.kind in ("ended", "failed") and event.facts["error"] == "Fenced":
            fenced.setdefault(event.life, event.time)
        if event.kind == "saved" and event.attempt in late:
            problems.append(f"{event}: acknowledged to a fenced writer")
        if event.kind == "saved" and event.life in fenced:
            since = began.get((event.life, event.facts["step"]), event.time)
            if since > fenced[event.life]:
                problems.append(f"{event}: begun after its job was told that it is fenced")
    return problems


def calls_end_in_time(events: Sequence[Event], root: Root) -> list[str]:
    """Every call ends by its deadline, and every rank that was not killed ends."""
    stopped: Counter[int] = Counter()
    for event in events:
        if event.kind == "stopped":
            stopped[event.life] += event.facts["seconds"]
    problems = []
    for event in events:
        seconds = event.facts.get("seconds", 0.0)
        is_call = event.kind in ("restored", "stepped", "closed")
        if is_call and seconds > CALL_SECONDS_MAX + stopped[event.life]:
            problems.append(f"{event}: took {seconds:.1f} s")
        if event.kind == "late":
            problems.append(f"life {event.life}: ranks {event.facts['ranks']} have not ended")
    return problems


def errors_are_documented(events: Sequence[Event], root: Root) -> list[str]:
    """A rank that does not end by itself ends with an error that the documents name."""
    return [
        f"{event}: no error that the documents name"
        for event in events
        if event.kind == "ended" and event.facts["error"] not in {"", *EXPECTED}
    ]


def ranks_agree(events: Sequence[Event], root: Root) -> list[str]:
    """All ranks of a life that were told how a save ended were told the same, and all began from
    the same state. A rank may be told that it has not learned the outcome.
    """
    reported: dict[tuple[int, str, int], set[tuple[str, str]]] = defaultdict(set)
    starts: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for event in events:
        kind, _, outcome = event.kind.rpartition(" ")
        error = event.facts.get("error", "")
        if outcome == "failed" and error in UNKNOWN:
            outcome = "unknown"
        if outcome in ("saved", "failed", "unknown") and error != "RankFailedInCommit":
            place = event.life, kind or "durable", event.facts["step"]
            reported[place].add((outcome, event.attempt if outcome == "saved" else ""))
        if event.kind == "restored":
            starts[event.life].add((event.facts["step"], event.attempt))
    both = [
        f"life {life}: {kind} save of step {step} ended as {sorted(outcomes)}"
        for (life, kind, step), outcomes in reported.items()
        if len(outcomes) > 1
    ]
    return both + [f"life {n}: restored {sorted(s)}" for n, s in starts.items() if len(s) > 1]


def training_goes_on(events: Sequence[Event], root: Root) -> list[str]:
    """Where the documents say that a training goes on ("harmless"), all its ranks end by
    themselves; who is only fenced is told so ("fenced").
    """
    ends: dict[int, dict[int, str]] = defaultdict(dict)
    ranks: dict[int, int] = {}
    expected: dict[int, set[str]] = {}
    for event in events:
        if event.kind == "started":
            ranks[event.life] = event.facts["ranks"]
            allowed = {"harmless": {""}, "fenced": {"", "Fenced"}}
            if event.facts["ends"] in allowed:
                expected[event.life] = allowed[event.facts["ends"]]
        if event.kind == "ended":
            ends[event.life][event.rank] = event.facts["error"]
    problems = []
    for life, allowed_ends in expected.items():
        has = ends[life]
        if len(has) < ranks[life] or not set(has.values()) <= allowed_ends:
            problems.append(f"life {life} of {ranks[life]} ranks ended as {has}")
    return problems


CHECKS: tuple[Check, ...] = (
    acknowledged_exist,
    failed_do_not_exist,
    retired_by_rule,
    only_whole_ones_are_listed,
    no_wrong_byte,
    latest_never_goes_back,
    fenced_are_silent,
    calls_end_in_time,
    errors_are_documented,
    ranks_agree,
    training_goes_on,
)


# What is there itself ----------------------------------------------------------------------------


def wrong_bits(store: Store) -> list[str]:
    """The checkpoints of a root that do not have the bits of their step."""
    problems = []
    for entry in Log(store).state().live:
        state = state_of(entry.step, 0, 1)
        for tensor in (state["rows"].local.data, state["replica"]):
            tensor.zero_()
        name = {"step": entry.step, "attempt": entry.attempt}

        def load(world: World, state: Any = state, name: Any = name) -> object:
            return load_state(state, store=store, world=world, options=LoadOptions(), **name)

        run_ranks(1, load)
        if not is_step(state, entry.step, 0, 1):
            problems.append(f"step {entry.step} ({entry.attempt}): wrong bits in the root")
    return problems


def left_behind(store: Store) -> list[str]:
    """What a new job's sweep leaves besides the checkpoints that exist."""
    session = Session.claim(store, sources=NO_WAITING)
    session.sweep_unfinished()
    session.sweep()
    left = [info.key for info in store.list("steps/") if parse_step_key(info.key) is None]
    left += left_by_sweep(store, session.state())
    uploads = store.abort_unfinished("steps/")
    return left + [f"{uploads} uploads"] * (uploads > 0)


def counts(events: Sequence[Event]) -> Counter[str]:
    """How much was tried."""
    kinds = Counter(event.kind for event in events)
    lives = len({event.life for event in events if event.kind == "started"})
    ended = [event for event in events if event.kind == "ended"]
    return Counter(
        lives=lives,
        acknowledged=len({e.attempt for e in events if e.kind == "saved"}),
        near_acknowledged=len({e.attempt for e in events if e.kind == "near saved"}),
        restores=kinds["restored"],
        near_restores=len([e for e in events if e.facts.get("origin") == "near"]),
        looks=kinds["seen"],
        failed_saves=len({(e.life, e.facts["step"]) for e in events if e.kind == "failed"}),
        fenced_ranks=len([e for e in ended if e.facts["error"] == "Fenced"]),
    )
