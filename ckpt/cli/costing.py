"""`ckpt cost`: what checkpoints cost, computed from arguments or from what a root measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from ckpt.cli.commandline import OK
from ckpt.cli.screen import counted, fields_json, show_json, show_table, size
from ckpt.errors import CheckpointError
from ckpt.tools.cost import (
    OPTIMIZER_STATES,
    Cost,
    Measured,
    Prices,
    Workload,
    cost_of,
    daly,
    measured_of,
    state_nbytes,
    young,
)
from ckpt.tools.report import report_of
from ckpt.tools.run import duration

Row: TypeAlias = tuple[str, str, str]

# Costs of a save for which intervals are shown where nothing says what one costs.
BLOCKED_SHOWN = (0.1, 1.0, 10.0)


def cost(arguments: argparse.Namespace) -> int:
    """`ckpt cost`."""
    measured = None if arguments.url is None else _measured(arguments)
    load = _workload(arguments, measured)
    prices = Prices(
        gib_month=arguments.price_storage,
        thousand_writes=arguments.price_writes,
        thousand_reads=arguments.price_reads,
        rank_hour=arguments.price_rank_hour,
    )
    result = cost_of(load, prices)
    if arguments.json:
        show_json(_json(load, result, measured))
        return OK
    if measured is not None:
        print(
            f"{arguments.url}: medians of {counted(measured.saves, 'save')}; "
            f"{counted(measured.sessions, 'job')} in {duration(measured.span_seconds)}\n"
        )
    rows = [*_size_rows(arguments, load, result), *_month_rows(load, result, prices)]
    rows += [*_failure_rows(load, result), *_interval_rows(load, result)]
    show_table(("what", "", "because"), rows, right=("",))
    return OK


def _measured(arguments: argparse.Namespace) -> Measured:
    measured = measured_of(report_of(arguments.url, storage_options=dict(arguments.option)))
    if measured is None:
        raise CheckpointError(
            f"{arguments.url}: no checkpoint there says how its save went; give --params and "
            "--ranks instead of a url"
        )
    return measured


def _workload(arguments: argparse.Namespace, measured: Measured | None) -> Workload:
    """What was measured, and in its place what was given."""
    given: dict[str, Any] = {
        "ranks": arguments.ranks,
        "keep": arguments.keep,
        "every_seconds": arguments.every,
        "mtbf_seconds": arguments.mtbf,
        "blocked_seconds": arguments.blocked,
        "persist_seconds": arguments.persist,
        "restart_seconds": arguments.restart,
    }
    known = {name: value for name, value in given.items() if value is not None}
    if measured is None:
        try:
            nbytes = state_nbytes(
                arguments.params,
                arguments.optimizer or "adamw",
                dtype=arguments.dtype or "float32",
                state_dtype=arguments.state_dtype or "",
                master_dtype=arguments.master_dtype or "",
            )
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        load = Workload(nbytes, **known)
    else:
        load = replace(measured.workload, **known)
    if arguments.bandwidth:
        load = replace(load, persist_seconds=load.nbytes / arguments.bandwidth)
    return load


# What is shown ---------------------------------------------------------------------------------


def _size_rows(arguments: argparse.Namespace, load: Workload, result: Cost) -> Iterator[Row]:
    yield "a checkpoint", size(load.nbytes), _why_nbytes(arguments, load)
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


def _why_nbytes(arguments: argparse.Namespace, load: Workload) -> str:
    if arguments.params is None:
        return "its newest"
    optimizer, dtype = arguments.optimizer or "adamw", arguments.dtype or "float32"
    states = OPTIMIZER_STATES[optimizer]
    text = f"{load.nbytes // arguments.params} bytes a parameter: {dtype}"
    if states:
        text += f", {counted(states, 'state')} of {optimizer} in {arguments.state_dtype or dtype}"
    return text + (f", a copy in {arguments.master_dtype}" if arguments.master_dtype else "")


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


def _json(load: Workload, result: Cost, measured: Measured | None) -> dict[str, Any]:
    seen = None
    if measured is not None:
        seen = {**fields_json(measured), "workload": fields_json(measured.workload)}
    bill = {**result.bill._asdict(), "total": result.bill.total}
    return {
        "workload": fields_json(load),
        "measured": seen,
        "cost": {**fields_json(result), "bill": bill},
    }
