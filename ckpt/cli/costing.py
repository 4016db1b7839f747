"""Shows what checkpoints cost: a row for each number that is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ckpt.screens.terminal import counted, show_table, size
from ckpt.tools.cost import Cost, CostReport, Prices, Workload, daly, young
from ckpt.tools.report import duration

Row: TypeAlias = tuple[str, str, str]

# Costs of a save for which intervals are shown where nothing says what one costs.
BLOCKED_SHOWN = (0.1, 1.0, 10.0)


def show_cost(report: CostReport) -> None:
    """`ckpt cost`."""
    measured, load, result = report.measured, report.workload, report.cost
    if measured is not None:
        print(
            f"{report.url}: medians of {counted(measured.saves, 'save')}; "
            f"{counted(measured.sessions, 'job')} in {duration(measured.span_seconds)}\n"
        )
    rows = [*_size_rows(report, load, result), *_month_rows(load, result, report.prices)]
    rows += [*_failure_rows(load, result), *_interval_rows(load, result)]
    show_table(("what", "", "because"), rows, right=("",))


def _size_rows(report: CostReport, load: Workload, result: Cost) -> Iterator[Row]:
    yield "a checkpoint", size(load.nbytes), report.model.why(load.nbytes)
    yield (
        "of each rank",
        size(result.nbytes_per_rank),
        f"sharded evenly over {counted(load.ranks, 'rank')}",
    )
    if load.every_seconds is not None and result.nbytes_per_second is not None:
        text = f"a save every {duration(load.every_seconds)}"
        if load.persist_seconds is not None and load.persist_seconds > load.every_seconds:
            text = f"a save takes longer than {duration(load.every_seconds)}: the next one waits"
        yield "written, on average", f"{size(int(result.nbytes_per_second))}/s", text
    if load.persist_seconds is not None and result.burst_nbytes_per_second is not None:
        text = f"a save is under way for {duration(load.persist_seconds)}"
        yield "written, at a time", f"{size(int(result.burst_nbytes_per_second))}/s", text
    yield "requests of a save", f"{result.requests_of_save:,}", "to S3; parts of 16 MiB"
    yield "requests of a load", f"{result.requests_of_load:,}", "at least; 8 MiB with one"
    if load.keep is not None and result.stored_nbytes_max is not None:
        text = f"{load.keep} kept, and the one that is being written"
        yield "stored, at most", size(result.stored_nbytes_max), text


def _month_rows(load: Workload, result: Cost, prices: Prices) -> Iterator[Row]:
    """Of 730 hours."""
    if result.saves_per_month is not None:
        yield "saves in a month", f"{result.saves_per_month:,.0f}", "730 hours"
    bill = result.bill
    for what, amount, text in (
        ("storage", bill.storage, f"{prices.gib_month} for a GiB and month"),
        ("writes", bill.writes, f"{prices.thousand_writes} for 1,000 requests"),
        ("reads", bill.reads, f"{prices.thousand_reads} for 1,000; a load after each failure"),
        ("lost work", bill.lost_work, f"{prices.rank_hour} for a rank and hour"),
    ):
        if amount is not None:
            yield f"{what} in a month", f"{amount:,.2f}", text
    if bill.total is not None:
        yield "together", f"{bill.total:,.2f}", "in the currency of the prices"


def _failure_rows(load: Workload, result: Cost) -> Iterator[Row]:
    lost = result.lost_seconds_per_failure
    if lost is not None:
        text = "half of the time between saves"
        if load.persist_seconds is None:
            text += "; more by what a save takes (--persist)"
        else:
            text += ", and a save that is not there yet"
        yield "lost in a failure", duration(lost), f"on average: {text}"
    if lost is not None and result.lost_share is not None:
        text = f"{result.failures_per_month:,.1f} failures in a month"
        if load.restart_seconds is not None:
            text += f", {duration(load.restart_seconds)} to start again"
        yield "of the time, redone", f"{100 * result.lost_share:.2f} %", text
    if result.blocked_share is not None:
        text = f"a save costs the training {duration(load.blocked_seconds or 0.0)}"
        yield "of the time, in saves", f"{100 * result.blocked_share:.2f} %", text


def _interval_rows(load: Workload, result: Cost) -> Iterator[Row]:
    mtbf = load.mtbf_seconds
    if mtbf is None:
        return
    known = load.blocked_seconds
    for blocked in BLOCKED_SHOWN if known is None else (known,):
        text = f"Young 1974; {duration(daly(blocked, mtbf))} by Daly 2006"
        if load.persist_seconds is not None and young(blocked, mtbf) < load.persist_seconds:
            text += f"; but a save takes {duration(load.persist_seconds)}"
        if known is None:
            text += f", if a save costs the training {duration(blocked)} (--blocked)"
        yield "best time between saves", duration(young(blocked, mtbf)), text
    if known is None and load.every_seconds is not None:
        best = result.blocked_seconds_at_best or 0.0
        text = f"for which {duration(load.every_seconds)} is the best time, by Young"
        yield "cost of a save", duration(best), text
