"""Shows what is in a root and what it costs: ls, log, du, report, cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

from ckpt.loading.contents import StepInfo
from ckpt.screens.rows import goodput_text, per_day_text, problems, risks_text
from ckpt.screens.terminal import age, counted, date, show_table, size, write_page
from ckpt.screens.visible import visible
from ckpt.tools.cost import Cost, CostReport, Prices, Workload, daly, young
from ckpt.tools.near_tiers import NearListing, newest_status_of
from ckpt.tools.overview import DiskUsage, Event, LogReport, RootListing
from ckpt.tools.report import Report, duration

WHAT_HAPPENED = {
    "CLAIM": "a session began to write",
    "COMMIT": "saved",
    "RETIRE": "retired",
    "PIN": "pinned",
    "UNPIN": "unpinned",
    "VERIFIED": "verified, every byte",
}


def show_ls(listing: RootListing | NearListing) -> None:
    """`ckpt ls`."""
    if isinstance(listing, NearListing):
        _show_near(listing)
        return
    if listing.uncommitted:
        print(listing.uncommitted, file=sys.stderr)
    infos, begun = listing.checkpoints, listing.begun_unix
    # A step's directory, or another library's: no log says when it was committed.
    if infos and infos[0].committed_unix is None:
        print(f"{listing.url}: {'the directory of ' if begun is not None else ''}1 checkpoint")
        one = infos[0]
        row = (f"{one.step}", date(begun), size(one.nbytes), one.attempt, ", ".join(_needs(one)))
        show_table(("step", "begun", "size", "attempt", "notes"), [row], right=("step", "size"))
        return
    print(f"{listing.url}: {counted(len(infos), 'checkpoint')}")
    rows = []
    for info in infos:
        of_none = IS_DELTA if info.references else "no training's own; loads by its attempt"
        notes = [] if info.line is not None else [of_none]
        notes += [word for word in ("pinned", "verified") if getattr(info, word)]
        notes += ["latest"] if info is infos[-1] else []
        notes += [f"metric {info.metric:g}"] if info.metric is not None else []
        notes += _needs(info)
        committed, line = date(info.committed_unix), _line_cell(info.line)
        said = ", ".join(notes)
        rows.append((f"{info.step}", committed, size(info.nbytes), line, info.attempt, said))
    titles = ("step", "committed", "size", "line", "attempt", "notes")
    show_table(titles, rows, right=("step", "size", "line"))


IS_DELTA = "a delta, for ckpt.follow"  # imports and copies refer to nothing


def _needs(info: StepInfo) -> list[str]:
    return [f"needs files of {counted(len(info.references), 'other')}"] * bool(info.references)


def _line_cell(line: int | None) -> str:
    return "none" if line is None else f"{line}"


def _show_near(listing: NearListing) -> None:
    views = {view.root: [v for v in listing.tiers if v.root == view.root] for view in listing.tiers}
    roots = counted(len(views), "root")
    print(f"{listing.url}: {counted(len(listing.checkpoints), 'near checkpoint')} of {roots}")
    for root, seen in views.items():
        if (status := newest_status_of(seen)) is not None:
            risks = risks_text(seen, None)
            print(f"root {root}: step {status.step} done, {date(status.time_unix)}; {risks}")
        for problem in problems(seen):
            print(f"root {root}: {visible(problem)}")
    rows = []
    for one in listing.checkpoints:
        when, nbytes, here = date(one.recorded_unix), size(one.nbytes_here), one.ranks_here
        rows.append(
            (f"{one.step}", when, nbytes, f"{here} of {one.ranks}", f"{one.epoch}", one.root)
        )
    titles = ("step", "recorded", "size here", "ranks here", "epoch", "root")
    show_table(titles, rows, right=("step", "size here", "ranks here", "epoch"))


def show_log(report: LogReport) -> None:
    """`ckpt log`. All records come first: with a broken log, they are what one looks for."""
    # Once for all rows, so that ages of the same moment look the same.
    now = time.time()
    show_table(
        ("slot", "when", "", "what", "step", "line", "session", "attempt", "kept"),
        [_event_row(event, now) for event in report.events],
        right=("slot", "step", "line", "kept"),
    )
    if report.events and report.events[-1].slot > 0:
        print(f"... and {report.events[-1].slot} older records; `ckpt log -n 0` shows all")
    if report.problem:
        print(report.problem, file=sys.stderr)


def _event_row(event: Event, now: float) -> tuple[str, ...]:
    what = WHAT_HAPPENED.get(event.kind, event.kind.lower())
    if event.kind == "COMMIT" and event.metric is not None:
        what += f", metric {event.metric:g}"
    what += ": nobody had acknowledged it" if event.is_undone else ""
    what += f" (!) {event.problem}" if event.problem else ""
    return (
        f"{event.slot}",
        date(event.time_unix),
        age(now - event.time_unix),
        what,
        "" if event.step is None else f"{event.step}",
        "" if event.step is None else _line_cell(event.line),
        f"e{event.epoch}",
        event.attempt or "",
        f"{event.live}",
    )


def show_disk_usage(usage: DiskUsage) -> None:
    """`ckpt du`."""
    print(usage.url)
    rows = []
    for attempt in usage.attempts:
        notes = [] if attempt.is_live else ["not a checkpoint: a save under way, or remains of one"]
        notes += ["pinned"] if attempt.pinned else []
        if attempt.referenced_by:
            notes.append(f"{len(attempt.referenced_by)} other checkpoints need files of it")
        nbytes, objects = size(attempt.nbytes), f"{attempt.objects}"
        rows.append((f"{attempt.step}", nbytes, objects, attempt.attempt, ", ".join(notes)))
    rows.append(("", size(usage.log_nbytes), f"{usage.log_objects}", "", "FORMAT and log"))
    if usage.other_objects:
        rows.append(("", size(usage.other_nbytes), f"{usage.other_objects}", "", "other objects"))
    show_table(
        ("step", "size", "objects", "attempt", "notes"), rows, right=("step", "size", "objects")
    )
    print(f"all: {size(usage.nbytes)}; checkpoints that exist: {size(usage.live_nbytes)}")
    if usage.unfinished_nbytes:
        print(
            f"{size(usage.unfinished_nbytes)} are of saves under way or never finished; the next "
            "job that saves here removes those of dead jobs"
        )


def show_report(report: Report, output: str = "report.html") -> None:
    """`ckpt report`: a page, and what is wrong."""
    from ckpt.screens.pages import report_page

    write_page(output, report_page(report))
    counts = {"save": report.saves, "checkpoint": report.live, "notice": report.notices}
    shown = ", ".join(counted(len(items), noun) for noun, items in counts.items())
    print(f"{output}: {shown}; open it in a browser")
    if goodput := goodput_text(report.goodput):
        print(goodput)
    if day := per_day_text(report.per_day):
        print(f"a day: {day}")
    for notice in report.notices:
        # Notes are on the page; here they would hide what has to be done.
        if notice.severity != "note":
            print(f"{notice.severity}: {notice.text}")


# What checkpoints cost: a row for each number that is known ---------------------------------------

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
    evenly = f"sharded evenly over {counted(load.ranks, 'rank')}"
    yield "of each rank", size(result.nbytes_per_rank), evenly
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
    # The oldest is retired only once the newest is committed.
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
    if (lost := result.lost_seconds_per_failure) is not None:
        more = ", and a save that is not there yet"
        if load.persist_seconds is None:
            more = "; more by what a save takes (--persist)"
        text = f"on average: half of the time between saves{more}"
        yield "lost in a failure", duration(lost), text
    if lost is not None and result.lost_share is not None:
        text = f"{result.failures_per_month:,.1f} failures in a month"
        if load.restart_seconds is not None:
            text += f", {duration(load.restart_seconds)} to start again"
        yield "of the time, redone", f"{100 * result.lost_share:.2f} %", text
    if result.blocked_share is not None:
        text = f"a save costs the training {duration(load.blocked_seconds or 0.0)}"
        yield "of the time, in saves", f"{100 * result.blocked_share:.2f} %", text


def _interval_rows(load: Workload, result: Cost) -> Iterator[Row]:
    if (mtbf := load.mtbf_seconds) is None:
        return
    known = load.blocked_seconds
    # Without a measured cost, some typical ones: no single number is assumed.
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
