"""Commands that delete checkpoints: prune, rm. They say what will go, and ask before it does."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from ckpt.cli.commandline import DIFFERENT, OK, PROBLEM
from ckpt.cli.rules import rule_of
from ckpt.cli.screen import confirmed, counted, show_json, size
from ckpt.commit.leases import leases_of
from ckpt.commit.lines import line_text, resumable
from ckpt.commit.log import LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.records import LiveEntry
from ckpt.commit.sweep import NotRetired, why_not_retire
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.service.retention import (
    KeepRule,
    RetentionPlan,
    candidates_of,
    carry_out,
    plan_retention,
    with_grace,
)
from ckpt.tools.pins import chosen
from storage import Store, open_store

DELETED_NOTHING = "nothing was deleted"


# prune -----------------------------------------------------------------------------------------


def prune(arguments: argparse.Namespace) -> int:
    """`ckpt prune`."""
    with closing(open_store(arguments.url, **dict(arguments.option))) as store:
        maintenance = Maintenance.open(store)
        rule = rule_of(arguments)
        assert rule is not None, "the command line has made sure that there is one"
        rule = with_grace(rule, arguments.retire_after)
        plan = _plan(store, maintenance, rule)
        if arguments.dry_run and arguments.json:
            show_json(_plan_json(plan))
            return OK
        _show_plan(plan, to_stderr=arguments.json)
        if (code := _stopped(arguments, len(plan.retire))) is not None:
            return code
        # Somebody may have saved, or gone back to an older one, while we waited for the answer.
        agreed = {verdict.entry.attempt for verdict in plan.retire}
        latest = _plan(store, maintenance, rule)
        retire = tuple(verdict for verdict in latest.retire if verdict.entry.attempt in agreed)
        gone, stayed = carry_out(
            RetentionPlan(latest.keep, retire),
            maintenance.retire,
            leases=lambda: leases_of(store, now_unix=time.time()),
        )
    kept = len(latest.keep) + len(latest.retire) - len(gone)
    if arguments.json:
        show_json({"deleted": _entries_json(gone), "stayed": list(stayed)})
        return PROBLEM if stayed else OK
    for entry in gone:
        print(f"deleted step {entry.step} ({entry.attempt})")
    for reason in stayed:
        print(f"kept: {reason}", file=sys.stderr)
    print(f"{counted(len(gone), 'checkpoint')} deleted, {kept} kept")
    return PROBLEM if stayed else OK


def _plan(store: Store, maintenance: Maintenance, rule: KeepRule) -> RetentionPlan:
    """Raises CheckpointError for a rule that matches nothing."""
    candidates = candidates_of(maintenance.state())
    plan = plan_retention(candidates, rule, now_unix=time.time())
    if plan.refused:
        raise CheckpointError(f"{store.url}: {DELETED_NOTHING}: {plan.refused}")
    return plan


def _show_plan(plan: RetentionPlan, *, to_stderr: bool) -> None:
    # With --json, stdout is for the answer alone.
    file = sys.stderr if to_stderr else sys.stdout
    victims = [verdict.entry for verdict in plan.retire]
    print(plan.describe(), file=file)
    nbytes = sum(one.nbytes for one in victims)
    print(f"{counted(len(victims), 'checkpoint')} to delete, {size(nbytes)}", file=file)


def _plan_json(plan: RetentionPlan) -> dict[str, Any]:
    victims = [verdict.entry for verdict in plan.retire]
    return {
        "would_delete": _entries_json(victims),
        "would_keep": _entries_json([verdict.entry for verdict in plan.keep]),
        "nbytes": sum(one.nbytes for one in victims),
    }


def _stopped(arguments: argparse.Namespace, count: int) -> int | None:
    """The exit code when nothing is deleted, with --dry-run or without consent; None otherwise."""
    if arguments.dry_run:
        print(DELETED_NOTHING)
        return OK
    question = "delete it?" if count == 1 else f"delete these {count}?"
    if count and not confirmed(question, yes=arguments.yes):
        print(DELETED_NOTHING, file=sys.stderr)
        return DIFFERENT
    return None


def _entries_json(entries: Sequence[LiveEntry]) -> list[dict[str, Any]]:
    return [{"step": entry.step, "attempt": entry.attempt} for entry in entries]


# rm --------------------------------------------------------------------------------------------


def rm(arguments: argparse.Namespace) -> int:
    """`ckpt rm`."""
    with closing(open_store(arguments.url, **dict(arguments.option))) as store:
        maintenance = Maintenance.open(store)
        state = maintenance.state()
        entry = chosen(store, state, arguments.step, arguments.attempt)
        if problem := why_not_retire(state, entry):
            raise NotRetired(f"{DELETED_NOTHING}: {entry.attempt} (step {entry.step}) {problem}")
        nbytes = entry.nbytes
        if arguments.dry_run and arguments.json:
            show_json({"would_delete": _entries_json([entry]), "nbytes": nbytes})
            return OK
        file = sys.stderr if arguments.json else sys.stdout
        print(
            f"step {entry.step} ({entry.attempt}), {_consequences(state, entry, nbytes)}", file=file
        )
        if (code := _stopped(arguments, 1)) is not None:
            return code
        is_gone = maintenance.retire(entry.attempt) is not None
    if not is_gone:
        raise NoCheckpoint(f"{store.url}: {entry.attempt} was removed by somebody else meanwhile")
    if arguments.json:
        show_json({"deleted": _entries_json([entry])})
    else:
        print(f"deleted step {entry.step} ({entry.attempt})")
    return OK


def _consequences(state: LogState, entry: LiveEntry, nbytes: int) -> str:
    """Line and size of a checkpoint, and what a training resumes from when it is gone."""
    summary = f"{line_text(entry.line)}, {size(nbytes)}"
    if entry == state.latest:
        rest = [other for other in state.live if other is not entry]
        summary += (
            f"; it is the latest: a training resumes from step {resumable(rest)[0].step} then"
        )
    return summary
