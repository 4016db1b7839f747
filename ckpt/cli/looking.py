"""Shows what is in a root: ls, log, du, report."""

from __future__ import annotations

import sys
import time

from ckpt.loading.contents import StepInfo
from ckpt.screens.near_rows import problems, risks_text
from ckpt.screens.terminal import age, counted, date, show_table, size, write_page
from ckpt.screens.visible import visible
from ckpt.tools.near_tiers import NearListing, newest_status_of
from ckpt.tools.overview import AttemptUsage, DiskUsage, Event, LogReport, RootListing
from ckpt.tools.report import Report

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
    if begun is not None:
        print(f"{listing.url}: the directory of 1 checkpoint")
        one = infos[0]
        row = (f"{one.step}", date(begun), size(one.nbytes), one.attempt, ", ".join(_needs(one)))
        show_table(("step", "begun", "size", "attempt", "notes"), [row], right=("step", "size"))
        return
    print(f"{listing.url}: {counted(len(infos), 'checkpoint')}")
    rows = []
    for info in infos:
        notes = [] if info.line is not None else ["no training's own; loads by its attempt"]
        notes += [word for word in ("pinned", "verified") if getattr(info, word)]
        notes += ["latest"] if info is infos[-1] else []
        notes += [f"metric {info.metric:g}"] if info.metric is not None else []
        notes += _needs(info)
        committed, line = date(info.committed_unix), _line_cell(info.line)
        rows.append(
            (f"{info.step}", committed, size(info.nbytes), line, info.attempt, ", ".join(notes))
        )
    titles = ("step", "committed", "size", "line", "attempt", "notes")
    show_table(titles, rows, right=("step", "size", "line"))


def _needs(info: StepInfo) -> list[str]:
    return [f"needs files of {counted(len(info.references), 'other')}"] * bool(info.references)


def _line_cell(line: int | None) -> str:
    return "none" if line is None else f"{line}"


def _show_near(listing: NearListing) -> None:
    views = {view.root: [v for v in listing.tiers if v.root == view.root] for view in listing.tiers}
    roots = counted(len(views), "root")
    print(f"{listing.url}: {counted(len(listing.checkpoints), 'near checkpoint')} of {roots}")
    for root, seen in views.items():
        status = newest_status_of(seen)
        if status is not None:
            risks = risks_text(seen, None)
            print(f"root {root}: step {status.step} done, {date(status.time_unix)}; {risks}")
        for problem in problems(seen):
            print(f"root {root}: {visible(problem)}")
    rows = [
        (
            f"{one.step}",
            date(one.recorded_unix),
            size(one.nbytes_here),
            f"{one.ranks_here} of {one.ranks}",
            f"{one.epoch}",
            one.root,
        )
        for one in listing.checkpoints
    ]
    titles = ("step", "recorded", "size here", "ranks here", "epoch", "root")
    show_table(titles, rows, right=("step", "size here", "ranks here", "epoch"))


def show_log(report: LogReport) -> None:
    """`ckpt log`. All records come first: with a broken log, they are what one looks for."""
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


def show_du(usage: DiskUsage) -> None:
    """`ckpt du`."""
    print(usage.url)
    rows = [_usage_row(attempt) for attempt in usage.attempts]
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


def _usage_row(attempt: AttemptUsage) -> tuple[str, ...]:
    notes = [] if attempt.is_live else ["not a checkpoint: a save under way, or remains of one"]
    notes += ["pinned"] if attempt.pinned else []
    if attempt.referenced_by:
        notes.append(f"{len(attempt.referenced_by)} other checkpoints need files of it")
    nbytes, objects = size(attempt.nbytes), f"{attempt.objects}"
    return (f"{attempt.step}", nbytes, objects, attempt.attempt, ", ".join(notes))


def show_report(report: Report, output: str = "report.html") -> None:
    """`ckpt report`: a page, and what is wrong."""
    from ckpt.screens.pages import report_page

    write_page(output, report_page(report))
    counts = {"save": report.saves, "checkpoint": report.live, "notice": report.notices}
    shown = ", ".join(counted(len(items), noun) for noun, items in counts.items())
    print(f"{output}: {shown}; open it in a browser")
    for notice in report.notices:
        if notice.severity != "note":
            print(f"{notice.severity}: {notice.text}")
