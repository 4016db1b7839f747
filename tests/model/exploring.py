"""All schedules of actions within bounds, and random ones: the model says what must come of each.

Breadth first: worlds that the model cannot tell apart are gone on from once. Each step of each
schedule is made by the product, and compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.model.driving import Driven
from tests.model.log_model import NONE, Action, Model, broken_promises, record_of

UNKNOWN = ("applied", "lost", "late")
KILLS = ("killed before", "killed after")


class Scope(NamedTuple):
    """How often each kind of action may still happen."""

    steps: int = 3
    claims: int = 2
    commands: int = 1
    clean_ups: int = 1
    unknown: int = 1
    kills: int = 0
    twice: int = 0
    stalls: int = 0
    exchanges: int = 0
    jobs: int = 2

    def without(self, action: Action) -> Scope | None:
        """What is left after an action; None where it may not happen any more."""
        left = self
        for field in _costs(action):
            count = getattr(left, field) - 1
            if count < 0:
                return None
            left = left._replace(**{field: count})
        return left


WALKS = Scope(9, 5, 6, 6, 3, 3, 2, 2, 2)

_FIELD = {
    **dict.fromkeys(("save", "dedup", "stall"), "steps"),
    "claim": "claims",
    **dict.fromkeys(("retire", "prune", "pin", "unpin", "lease"), "commands"),
    **dict.fromkeys(("sweep", "sweep_failed", "take_back"), "clean_ups"),
    **dict.fromkeys(("restore", "copy_over", "go_on_elsewhere"), "exchanges"),
}


def _costs(action: Action) -> Iterator[str]:
    if action.name in _FIELD:
        yield _FIELD[action.name]
    if action.name == "stall":
        yield "stalls"
    if action.name == "go_on_elsewhere":
        yield "steps"
    if action.fault in UNKNOWN:
        yield "unknown"
    elif action.fault == "twice":
        yield "twice"
    elif action.fault:
        yield "kills"


def actions(model: Model, scope: Scope) -> Iterator[Action]:
    """What may happen next. Some of it never meets its fault: see `Model.has_met_the_fault`."""
    has_live = not model.is_refused() and bool(model.view().live)
    # Nothing tells two jobs apart before the first has done something: that is always A.
    is_begun = bool(model.slots or model.late or model.jobs or model.backup)
    for name in "AB"[: scope.jobs if is_begun else 1]:
        yield from _faulted("claim", name)
        job = model.jobs.get(name)
        if job is None:
            continue
        if job.stalled is not None:
            yield Action("resume", name)
            continue
        if job.diverged:  # it was told to begin anew: what it reads means nothing any more
            yield Action("save", name)
            continue
        for call in ("save", *(("dedup",) if has_live else ())):
            yield from _faulted(call, name)
            yield Action(call, name, "killed at manifest")
        if job.pending == NONE:  # else it would stall where it settles that
            yield Action("stall", name)
        for call in ("sweep", "sweep_failed", "take_back"):
            yield from _deleting(call, name)
        if job.pending != NONE:
            yield from _faulted("settle", name)
        if has_live:
            yield from _deleting("retire", name)
    if has_live:
        for call in ("retire", "prune"):
            yield from _faulted(call, "command")
            yield from (Action(call, "command", f"deleted {n}") for n in range(4))
        for call in ("pin", "unpin"):
            yield from _faulted(call, "command")
        if model.leased is None:
            yield Action("lease")
    for index in range(len(model.late)):
        yield Action("arrive", str(index))
    if scope.exchanges:
        yield from _exchanges(model)


def _exchanges(model: Model) -> Iterator[Action]:
    if model.backup is None:
        if model.slots:
            yield Action("back_up")
        return
    yield Action("restore")
    yield Action("copy_over")
    if all(name != "elsewhere" for name in _writers(model)):
        yield Action("go_on_elsewhere")


def _writers(model: Model) -> Iterator[str]:
    assert model.backup is not None
    yield from (record_of(uid).by for _, uid in model.backup.slots)


def _faulted(name: str, job: str) -> Iterator[Action]:
    yield from (Action(name, job, fault) for fault in ("", *UNKNOWN, *KILLS, "twice"))


def _deleting(name: str, job: str) -> Iterator[Action]:
    yield Action(name, job)
    yield from (Action(name, job, f"deleted {count}") for count in range(4))


class Report(NamedTuple):
    """`depth` is the number of actions of the longest schedules that were all made."""

    depth: int
    worlds: int
    steps: int
    problems: list[str]


class Node(NamedTuple):
    model: Model
    driven: Driven
    scope: Scope
    path: tuple[Action, ...]


def step(node: Node, action: Action) -> tuple[Node, list[str]] | None:
    """The world after an action, and what is wrong with it. None where it cannot happen."""
    left = node.scope.without(action)
    if left is None:
        return None
    model = node.model.copy()
    expected = model.apply(action)
    if not model.has_met_the_fault:
        return None
    model.jobs.pop("command", None)
    driven = node.driven.copy()
    outcome = driven.apply(action, node.model)
    problems = [] if outcome == expected else [f"it reports {outcome}, the model {expected}"]
    problems += driven.differences(model) or broken_promises(model)
    return Node(model, driven, left, (*node.path, action)), problems


def _with_schedule(node: Node, problems: list[str]) -> list[str]:
    return [*problems, "schedule: " + "; ".join(str(action) for action in node.path)]


def begin(scope: Scope) -> Node:
    return Node(Model(), Driven(), scope, ())


def explore(scope: Scope, depth: int, *, worlds_max: int = 10**9) -> Report:
    """All schedules of up to `depth` actions, or as deep as `worlds_max` reaches."""
    level = [begin(scope)]
    seen = {(level[0].model.key(), scope)}
    steps = 0
    for reached in range(depth):
        following = []
        for node in level:
            for action in actions(node.model, node.scope):
                made = step(node, action)
                if made is None:
                    continue
                steps += 1
                after, problems = made
                if problems:
                    return Report(reached, len(seen), steps, _with_schedule(after, problems))
                key = after.model.key(), after.scope
                if key not in seen:
                    seen.add(key)
                    if reached + 1 < depth:
                        following.append(after)
        level = following
        if not level or len(seen) > worlds_max:
            return Report(reached + 1, len(seen), steps, [])
    return Report(depth, len(seen), steps, [])


def walk(scope: Scope, length: int, rng: random.Random) -> Report:
    """One random schedule."""
    node = begin(scope)
    for count in range(length):
        # By name first: most actions differ in their fault only, and most should have none.
        weights = {action: rng.random() for action in actions(node.model, node.scope)}
        names = {name: rng.random() for name in sorted({action.name for action in weights})}
        names["claim"] = names.get("claim", 0.0) / 3
        choices = sorted(weights, key=lambda one: (-names[one.name], weights[one]))
        if rng.random() < 0.7:
            choices.sort(key=lambda one: bool(one.fault))
        made = next((one for action in choices if (one := step(node, action))), None)
        if made is None:
            return Report(count, count, count, [])
        node, problems = made
        if problems:
            return Report(count, count, count + 1, _with_schedule(node, problems))
    return Report(length, length, length, [])


def played(*schedule: str, scope: Scope = WALKS) -> list[str]:
    """What is wrong after these actions: `name job fault`."""
    node = begin(scope)
    for text in schedule:
        made = step(node, Action(*text.split(" ", 2)))
        assert made is not None, f"{text} cannot happen"
        node, problems = made
        if problems:
            return problems
    return []
