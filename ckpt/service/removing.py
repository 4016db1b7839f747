"""What people do to the live set: prune by rules, remove one, pin one. Needs no torch.

A deletion asks first, and looks again after the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Literal, SupportsIndex, TypeAlias, cast

from ckpt.commit.leases import leases_of
from ckpt.commit.locate import line_text, of_step, resumable
from ckpt.commit.log import LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import plain_int
from ckpt.commit.records import LiveEntry
from ckpt.commit.writer import NotRetired, why_not_retire
from ckpt.errors import CheckpointError, InvalidArgument, NoCheckpoint
from ckpt.loading.contents import StepInfo
from ckpt.service.retention import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepRule,
    KeepYounger,
    RetentionPlan,
    carry_out,
    plan_retention,
    with_grace,
)
from ckpt.short import ShortRecord
from storage import Store

DELETED_NOTHING = "nothing was deleted"
Outcome: TypeAlias = Literal["deleted", "dry run", "declined"]


@dataclass(frozen=True, slots=True, repr=False)
class PruneReport(ShortRecord):
    """What was deleted, or would be: `outcome` says which. `nbytes` are those of `deleted`.

    `why` has a line for each checkpoint that stays or goes, `stayed` the reasons of those that were
    to go and are still there.
    """

    url: str
    deleted: tuple[StepInfo, ...]
    kept: tuple[StepInfo, ...]
    stayed: tuple[str, ...]
    nbytes: int
    why: str
    outcome: Outcome


def rule_of(
    last: int | None = None,
    every: int | None = None,
    best: int | tuple[int, str] | None = None,
    younger: float | None = None,
    retire_unmeasured: bool = False,
) -> KeepRule:
    """A rule that keeps what any of these keeps. Raises InvalidArgument without one."""
    if retire_unmeasured and best is None:
        raise InvalidArgument("retire_unmeasured= is about keep_best=: give both")
    rules: list[KeepRule] = []
    try:
        rules += [] if last is None else [KeepLatest(last)]
        rules += [] if every is None else [KeepEvery(every)]
        rules += [] if younger is None else [KeepYounger(younger)]
        if best is not None:
            count, mode = best if isinstance(best, tuple) else (best, "min")
            unmeasured: Literal["retire", "keep"] = "retire" if retire_unmeasured else "keep"
            rules.append(KeepBest(count, cast(Literal["min", "max"], mode), unmeasured))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(str(error)) from error
    if not rules:
        needed = "keep_last=, keep_every=, keep_best= or keep_younger="
        raise InvalidArgument(f"a rule is needed: {needed}")
    return reduce(or_, rules)


def prune_store(
    store: Store,
    rule: KeepRule,
    retire_after: float | None,
    *,
    dry_run: bool,
    confirm: Callable[[PruneReport], bool] | None,
) -> PruneReport:
    """Retire and delete what `rule` gives up. See `ckpt.operate.prune`."""
    maintenance = Maintenance.open(store)
    rule = with_grace(rule, retire_after)
    plan = _plan(store, maintenance, rule)
    victims = [verdict.entry for verdict in plan.retire]
    report = _report(store, victims, [verdict.entry for verdict in plan.keep], plan.describe())
    if dry_run:
        return report
    if confirm is not None and not confirm(report):
        return replace(report, outcome="declined")
    # Somebody may have saved, or gone back to an older one, while we waited for the answer.
    agreed = {verdict.entry.attempt for verdict in plan.retire}
    latest = _plan(store, maintenance, rule)
    retire = tuple(verdict for verdict in latest.retire if verdict.entry.attempt in agreed)
    gone, stayed = carry_out(
        RetentionPlan(latest.keep, retire),
        maintenance.retire,
        leases=lambda: leases_of(store, now_unix=time.time()),
    )
    stay = [v.entry for v in (*latest.keep, *latest.retire) if v.entry not in gone]
    return replace(_report(store, gone, stay, report.why), stayed=stayed, outcome="deleted")


def _plan(store: Store, maintenance: Maintenance, rule: KeepRule) -> RetentionPlan:
    """Raises CheckpointError for a rule that matches nothing."""
    plan = plan_retention(maintenance.state().live, rule, now_unix=time.time())
    if plan.refused:
        raise CheckpointError(f"{store.url}: {DELETED_NOTHING}: {plan.refused}")
    return plan


def _report(
    store: Store, deleted: Sequence[LiveEntry], kept: Sequence[LiveEntry], why: str
) -> PruneReport:
    return PruneReport(
        url=store.url,
        deleted=tuple(StepInfo.of(entry, store.url) for entry in deleted),
        kept=tuple(StepInfo.of(entry, store.url) for entry in kept),
        stayed=(),
        nbytes=sum(entry.nbytes for entry in deleted),
        why=why,
        outcome="dry run",
    )


@dataclass(frozen=True, slots=True)
class Removal:
    """One checkpoint that was deleted, or would be: `outcome` says which.

    `line` says of which training it is, and `resumes_from` is the step from which that resumes when
    the latest is gone; None for any other one.
    """

    step: int
    attempt: str
    line: str
    nbytes: int
    resumes_from: int | None
    outcome: Outcome


def remove(
    store: Store,
    step: SupportsIndex | None,
    attempt: str,
    *,
    dry_run: bool,
    confirm: Callable[[Removal], bool] | None,
) -> Removal:
    """Retire and delete one checkpoint. See `ckpt.operate.rm`."""
    number = one_step(step, attempt)
    maintenance = Maintenance.open(store)
    state = maintenance.state()
    entry = chosen(store, state, number, attempt)
    if problem := why_not_retire(state, entry):
        raise NotRetired(f"{DELETED_NOTHING}: {entry.attempt} (step {entry.step}) {problem}")
    # What a restore would find afterwards, for the question and the report.
    rest = [other for other in state.live if other is not entry]
    # Removing the latest is going back: the one who is asked has to know to where.
    resumes = resumable(rest)[0].step if entry == state.latest else None
    line = line_text(entry.line)
    removal = Removal(entry.step, entry.attempt, line, entry.nbytes, resumes, "dry run")
    if dry_run:
        return removal
    if confirm is not None and not confirm(removal):
        return replace(removal, outcome="declined")
    if maintenance.retire(entry.attempt) is None:
        raise NoCheckpoint(f"{store.url}: {entry.attempt} was removed by somebody else meanwhile")
    return replace(removal, outcome="deleted")


# One checkpoint ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinReport:
    """Which checkpoint was pinned, or is no longer."""

    step: int
    attempt: str
    pinned: bool


def set_pinned(
    store: Store, step: SupportsIndex | None, attempt: str, *, pinned: bool
) -> PinReport:
    """Pin or unpin one checkpoint. See `ckpt.pin`."""
    number = one_step(step, attempt)
    maintenance = Maintenance.open(store)
    entry = chosen(store, maintenance.state(), number, attempt)
    (maintenance.pin if pinned else maintenance.unpin)(entry.attempt)
    return PinReport(entry.step, entry.attempt, pinned)


def one_step(step: SupportsIndex | None, attempt: str) -> int | None:
    """`step` as an int. Raises InvalidArgument where neither it nor `attempt` is given."""
    if step is None and not attempt:
        raise InvalidArgument("which checkpoint? give step= or attempt=")
    return cast("int | None", plain_int(step))


def chosen(store: Store, state: LogState, step: int | None, attempt: str) -> LiveEntry:
    """The one checkpoint that is meant. Raises NoCheckpoint, and CheckpointError for several."""
    # Of a step that several lines have, none is chosen for the user: what follows may delete it.
    of_it = list(state.live) if step is None else of_step(state.live, step)
    matching = [entry for entry in of_it if attempt in ("", entry.attempt)]
    choices = ", ".join(f"{entry.attempt} ({line_text(entry.line)})" for entry in of_it)
    if not matching:
        steps = sorted({entry.step for entry in state.live})
        is_known = choices and step is not None
        there = f"it has {choices}" if is_known else f"the root has steps {steps[-10:]}"
        words = [f"checkpoint {attempt}"] * bool(attempt) + [f"step {step}"] * (step is not None)
        raise NoCheckpoint(f"{store.url} has no {' of '.join(words)}; {there}")
    if len(matching) > 1:
        raise CheckpointError(
            f"{store.url} has {len(matching)} checkpoints of step {step}; choose one by its "
            f"attempt: {choices}"
        )
    return matching[0]
