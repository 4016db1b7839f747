"""Shows what differs between checkpoints (diff), and what a load would do (plan)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt.screens.folding import counted_name, folded, name_of_all
from ckpt.screens.terminal import counted, shape_text, short, show_names, show_table, size
from ckpt.tools.diff import Amount, DiffReport, TensorChange
from ckpt.tools.plan import LoadPlan

NAMES_SHOWN_MAX = 50
RANKS_SHOWN_MAX = 64


def show_diff(report: DiffReport, sort: str = "name", unfold: bool = False) -> None:
    """`ckpt diff`."""
    print(f"a: step {report.step_a} of {report.url_a}")
    print(f"b: step {report.step_b} of {report.url_b}\n")
    lines = _lines(report.changed, unfold)
    # Other shapes and dtypes first: they have no amount, and are the largest change of all.
    if sort == "amount":
        lines.sort(key=lambda line: line[2].relative_norm if line[2] else math.inf, reverse=True)
    if lines:
        titles = ("changed", "what", "elements", "max abs", "max rel", "norm", "rel norm")
        show_table(titles, [_row(*line) for line in lines], right=titles[2:])
        print()
    for title, names in (("only in a", report.only_a), ("only in b", report.only_b)):
        shown = names if unfold else [name for (name,) in folded(zip(names, strict=True))]
        show_names(title, shown, NAMES_SHOWN_MAX, more=f" {title}")
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


def _lines(
    changes: Sequence[TensorChange], unfold: bool
) -> list[tuple[str, str, Amount | None, int]]:
    """Name, what differs, by how much, and of how many elements: of one tensor, or of those that
    blocks and optimizers repeat.
    """
    together: dict[tuple[str, str, bool], list[TensorChange]] = {}
    # Changes with an amount and those without (other dtype or shape) have no common sum.
    for one in changes:
        name = one.fqn if unfold else name_of_all(one.fqn, states=True)
        together.setdefault((name, _what(one), one.amount is None), []).append(one)
    return [
        (
            counted_name(same[0].fqn, name, len(same)),
            what,
            None if has_none else Amount.total(one.amount for one in same if one.amount),
            sum(math.prod(one.shape_b) for one in same),
        )
        for (name, what, has_none), same in together.items()
    ]


def _what(change: TensorChange) -> str:
    if change.what == "shape":
        return f"shape {shape_text(change.shape_a)} -> {shape_text(change.shape_b)}"
    return f"{change.dtype_a} -> {change.dtype_b}" if change.what == "dtype" else change.what


def _row(name: str, what: str, amount: Amount | None, numel: int) -> tuple[str, ...]:
    if amount is None:
        return name, what, *[""] * 5
    if amount.not_finite:
        what += f", {amount.not_finite} not finite"
    share = f"{amount.changed} ({100 * amount.changed / max(numel, 1):.3g} %)"
    numbers = (amount.max_abs, amount.max_rel, amount.norm, amount.relative_norm)
    return name, what, share, *(f"{number:.3g}" for number in numbers)


def show_plan_ranks(plan: LoadPlan) -> None:
    """`ckpt plan`."""
    print(plan.url)
    print(f"step {plan.step}, {size(plan.nbytes_stored)} of tensors\n")
    titles = ("rank", "fills", "reads", "requests", "from other ranks", "extra memory")
    rows = []
    for one in plan.ranks[:RANKS_SHOWN_MAX]:
        filled, read = size(one.nbytes_wanted), size(one.nbytes_read)
        received, extra = size(one.nbytes_received), size(one.nbytes_extra)
        rows.append((f"{one.rank}", filled, read, f"{one.requests}", received, extra))
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
    # "Nothing was read" answers a fear: a plan of terabytes looks like the load itself.
    print("it fits" if plan.fits else "a strict load would be refused; nothing was read")
