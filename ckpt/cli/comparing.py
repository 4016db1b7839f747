"""Commands that compare: a checkpoint with another (diff), with a state to be loaded (plan)."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ckpt.cli.commandline import DIFFERENT, OK
from ckpt.cli.screen import (
    counted,
    fields_json,
    progress_bar,
    shape_text,
    short,
    show_json,
    show_names,
    show_table,
    size,
    value_json,
)
from ckpt.errors import CheckpointError
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.loading.contents import list_steps, open_contents
from ckpt.tools.diff import DiffOptions, DiffReport, TensorChange, diff, renaming
from ckpt.tools.plan import LoadPlan, RankPlan, RequestedNames, entry_for, plan_ranks, wanted_like
from storage import options_of_other

NAMES_SHOWN_MAX = 50
RANKS_SHOWN_MAX = 64


def diff_checkpoints(arguments: argparse.Namespace) -> int:
    """`ckpt diff`."""
    url_a, url_b, step_a, step_b = _sides(arguments)
    with progress_bar("comparing") as progress:
        report = diff(
            url_a,
            url_b,
            step_a=step_a,
            step_b=step_b,
            options=DiffOptions(
                include=arguments.include,
                exclude=arguments.exclude,
                rename=renaming(arguments.rename),
                stacks=dict(arguments.stack),
                data=not arguments.quick,
            ),
            progress=progress,
            storage_options=dict(arguments.option),
            storage_options_b=dict(arguments.other_option) or None,
            metadata_nbytes_max=arguments.metadata_max,
        )
    if arguments.json:
        show_json(_report_json(report))
    else:
        _show_report(report, by_amount=arguments.sort == "amount")
    return OK if report.identical else DIFFERENT


def _sides(arguments: argparse.Namespace) -> tuple[str, str, int | None, int | None]:
    """Urls and steps of a and b. With one url and no step: the newest and the one before it."""
    step_a, step_b = arguments.step_a, arguments.step_b
    if arguments.other is not None:
        return arguments.url, arguments.other, step_a, step_b
    if step_a is None and step_b is None:
        steps = [info.step for info in list_steps(arguments.url, dict(arguments.option))]
        if len(set(steps)) < 2:
            raise CheckpointError(
                f"{arguments.url} has {counted(len(set(steps)), 'step')}: nothing to compare with; "
                "name another checkpoint after it, as in `ckpt diff A B`"
            )
        # The newest step may be there twice, where a training went back and came to it again.
        older = [step for step in steps if step != steps[-1]]
        return arguments.url, arguments.url, older[-1], steps[-1]
    return arguments.url, arguments.url, step_a, step_b


def _show_report(report: DiffReport, *, by_amount: bool) -> None:
    print(f"a: step {report.step_a} of {report.url_a}")
    print(f"b: step {report.step_b} of {report.url_b}\n")
    changes = list(report.changed)
    if by_amount:
        changes.sort(key=lambda c: c.amount.relative_norm if c.amount else math.inf, reverse=True)
    if changes:
        titles = ("changed", "what", "elements", "max abs", "max rel", "norm", "rel norm")
        show_table(titles, [_row(change) for change in changes], right=titles[2:])
        print()
    for title, names in (("only in a", report.only_a), ("only in b", report.only_b)):
        show_names(title, names, NAMES_SHOWN_MAX, more=f" {title}")
    for value in report.values:
        old = short(repr(value.a), 60) if value.has_a else "(absent)"
        new = short(repr(value.b), 60) if value.has_b else "(absent)"
        print(f"value {value.fqn}: {old} -> {new}")
    if report.per_rank_differs:
        print("values of single ranks (PerRank) differ")
    if report.identical:
        print(f"the same: {report.same} tensors and all values, bit for bit")
        return
    print(
        f"{report.same} tensors are the same, {len(report.changed)} changed, "
        f"{len(report.only_a)} only in a, {len(report.only_b)} only in b, "
        f"{counted(len(report.values), 'value')} differ; {size(report.nbytes_read)} of tensors read"
    )


def _row(change: TensorChange) -> tuple[str, ...]:
    if change.what == "shape":
        return (
            change.fqn,
            f"shape {shape_text(change.shape_a)} -> {shape_text(change.shape_b)}",
            *[""] * 5,
        )
    what = change.what
    if what == "dtype":
        what = f"{change.dtype_a} -> {change.dtype_b}"
    amount = change.amount
    if amount is None:
        return change.fqn, what, *[""] * 5
    if amount.not_finite:
        what += f", {amount.not_finite} not finite"
    numel = max(math.prod(change.shape_b), 1)
    share = f"{amount.changed} ({100 * amount.changed / numel:.3g} %)"
    numbers = (amount.max_abs, amount.max_rel, amount.norm, amount.relative_norm)
    return change.fqn, what, share, *(f"{number:.3g}" for number in numbers)


def _report_json(report: DiffReport) -> dict[str, Any]:
    return {
        "a": {"url": report.url_a, "step": report.step_a},
        "b": {"url": report.url_b, "step": report.step_b},
        "identical": report.identical,
        "same": report.same,
        "changed": [_change_json(change) for change in report.changed],
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "values": [
            {
                "name": value.fqn,
                **({"a": value_json(value.a)} if value.has_a else {}),
                **({"b": value_json(value.b)} if value.has_b else {}),
            }
            for value in report.values
        ],
        "per_rank_differs": report.per_rank_differs,
        "nbytes_read": report.nbytes_read,
    }


def _change_json(change: TensorChange) -> dict[str, Any]:
    amount = change.amount
    return {
        "name": change.fqn,
        "what": change.what,
        "dtype_a": change.dtype_a,
        "dtype_b": change.dtype_b,
        "shape_a": list(change.shape_a),
        "shape_b": list(change.shape_b),
        "amount": amount and {**amount._asdict(), "relative_norm": amount.relative_norm},
    }


# plan ------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> int:
    """`ckpt plan`."""
    options = dict(arguments.option)
    ranks = arguments.ranks
    if ranks is None:
        budget = MetadataBudget(arguments.metadata_max)
        with open_contents(arguments.url, arguments.step, options, budget=budget) as checkpoint:
            ranks = checkpoint.world_size
    load_plan = plan_ranks(
        arguments.url,
        ranks=ranks,
        layout=arguments.layout,
        wanted=_wanted(arguments),
        step=arguments.step,
        storage_options=options,
        metadata_nbytes_max=arguments.metadata_max,
    )
    if arguments.json:
        show_json(_plan_json(load_plan))
    else:
        _show_plan(load_plan)
    return OK if load_plan.fits else DIFFERENT


def _wanted(arguments: argparse.Namespace) -> RequestedNames | None:
    if not arguments.like:
        if arguments.entry is not None:
            raise CheckpointError("--entry is for --like; it names the place of that model")
        return None
    options = dict(arguments.option)
    like_options = options_of_other(
        arguments.url, options, arguments.like, dict(arguments.like_option) or None
    )
    entry = arguments.entry
    if entry is None:
        entry = entry_for(
            arguments.url,
            arguments.like,
            step=arguments.step,
            storage_options=options,
            like_options=like_options,
            memory_nbytes_max=arguments.memory_max,
        )
    return wanted_like(
        arguments.like,
        entry=entry,
        storage_options=like_options,
        memory_nbytes_max=arguments.memory_max,
    )


def _show_plan(plan: LoadPlan) -> None:
    print(plan.url)
    print(f"step {plan.step}, {size(plan.nbytes_stored)} of tensors\n")
    titles = ("rank", "fills", "reads", "requests", "from other ranks", "extra memory")
    rows = [_plan_row(rank) for rank in plan.ranks[:RANKS_SHOWN_MAX]]
    show_table(titles, rows, right=titles)
    if len(plan.ranks) > RANKS_SHOWN_MAX:
        print(f"... and {len(plan.ranks) - RANKS_SHOWN_MAX} more ranks; --json lists all")
    share = 100 * plan.nbytes_read / max(plan.nbytes_stored, 1)
    requests = sum(rank.requests for rank in plan.ranks)
    print(
        f"\nall: {size(plan.nbytes_read)} in {requests} requests, {share:.0f} % of what is stored"
    )
    if plan.not_asked:
        print(f"{plan.not_asked} names are below entries that the state does not have")
    show_names("does not fit", plan.problems, NAMES_SHOWN_MAX)
    print("it fits" if plan.fits else "a strict load would be refused; nothing was read")


def _plan_row(rank: RankPlan) -> tuple[str, ...]:
    return (
        f"{rank.rank}",
        size(rank.nbytes_wanted),
        size(rank.nbytes_read),
        f"{rank.requests}",
        size(rank.nbytes_received),
        size(rank.nbytes_extra),
    )


def _plan_json(plan: LoadPlan) -> dict[str, Any]:
    ranks = [fields_json(rank) for rank in plan.ranks]
    all_fields = {**fields_json(plan), "ranks": ranks}
    return {"fits": plan.fits, "nbytes_read": plan.nbytes_read, **all_fields}
