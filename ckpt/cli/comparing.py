"""Shows what differs between checkpoints (diff), and what a load would do (plan)."""

from __future__ import annotations

import math

from ckpt.screens.terminal import counted, shape_text, short, show_names, show_table, size
from ckpt.tools.diff import DiffReport, TensorChange
from ckpt.tools.plan import LoadPlan, RankPlan

NAMES_SHOWN_MAX = 50
RANKS_SHOWN_MAX = 64


def show_diff(report: DiffReport, sort: str = "name") -> None:
    """`ckpt diff`."""
    print(f"a: step {report.step_a} of {report.url_a}")
    print(f"b: step {report.step_b} of {report.url_b}\n")
    changes = list(report.changed)
    if sort == "amount":
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


def show_plan_ranks(plan: LoadPlan) -> None:
    """`ckpt plan`."""
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
