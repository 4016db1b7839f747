"""The page of `ckpt report`: one HTML file with everything in it, light and dark.

No script, font or image is loaded from anywhere. Every text that comes from storage is escaped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from ckpt.screens.page_parts import CHARTS, NOTHING, STYLE, chart, heat_map, near_of, state_tags
from ckpt.screens.terminal import age, date, rate_text, seconds_text, size
from ckpt.screens.visible import page_text
from ckpt.telemetry.record import SaveTotals
from ckpt.tools.report import Report, ReportedSave

BARS_MAX = 200  # newest saves in a chart
ROWS_MAX = 1000  # newest saves in the table


def page_of(report: Report) -> Iterator[str]:
    """The page, in pieces."""
    title = page_text(f"Checkpoints of {report.url}")
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # Whatever slipped through could still neither run nor load anything.
    yield (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
    )
    yield '<link rel="icon" href="data:,">'
    yield f"<style>{STYLE}</style></head><body><main>\n<h1>{title}</h1>\n"
    yield f'<p class="note">as of {date(report.made_unix)}; {_about_history(report)}</p>\n'
    yield from _tiles(report)
    yield from _notices(report)
    if report.near.tiers:
        yield "<section><h2>Near checkpoints</h2>\n"
        yield from near_of(report.near.tiers, report.live[-1] if report.live else None, date)
        yield "</section>\n"
    yield from _charts(report)
    if report.slowest is not None:
        totals = report.slowest.totals
        title = f"The slowest save: step {totals.step}, {seconds_text(totals.seconds)}"
        yield "<section>"
        yield from heat_map(report.slowest, title, _slower_one(totals, report.totals))
        yield "</section>\n"
    yield from _saves(report)
    yield from _entries(report)
    yield "</main></body></html>\n"


def _about_history(report: Report) -> str:
    jobs = f"{report.sessions} job{'s' if report.sessions != 1 else ''} wrote here"
    return jobs if report.is_whole_history else f"{jobs} in the newest part of a long log"


# Tiles and notices -------------------------------------------------------------------------------


def _tiles(report: Report) -> Iterator[str]:
    totals = report.totals
    newest = report.live[-1] if report.live else None
    tiles = [
        ("newest checkpoint", f"step {newest.step}" if newest else "none"),
        ("saved", age(report.made_unix - newest.committed_unix) if newest else "never"),
        ("live checkpoints", f"{len(report.live)} of {len(report.saves)}"),
        ("in this root", size(report.usage.nbytes)),
        ("training blocked, median", _median(totals, lambda one: one.blocked_seconds)),
        ("duration, median", _median(totals, lambda one: one.seconds)),
        ("throughput, median", _median(totals, lambda one: one.nbytes_per_second, rate_text)),
        ("retries, failed saves", f"{sum(t.retries for t in totals)}, {len(report.failures)}"),
    ]
    yield '<div class="tiles">'
    for name, value in tiles:
        yield f'<div class="tile"><b>{page_text(value)}</b><span>{name}</span></div>'
    yield "</div>\n"


def _median(
    totals: Sequence[SaveTotals],
    number: Callable[[SaveTotals], float],
    text: Callable[[float], str] | None = None,
) -> str:
    if not totals:
        return "unknown"
    return (text or seconds_text)(statistics.median([number(one) for one in totals]))


def _notices(report: Report) -> Iterator[str]:
    yield "<section><h2>To look at</h2>\n"
    if not report.notices:
        yield '<p class="note">Nothing: no failures, no gaps, no warnings.</p>'
    for notice in report.notices:
        yield (
            f'<div class="notice {page_text(notice.severity)}"><b>{page_text(notice.severity)}'
            f"</b>{page_text(notice.text)}</div>\n"
        )
    yield "</section>\n"


# Charts ------------------------------------------------------------------------------------------


def _charts(report: Report) -> Iterator[str]:
    saves = report.saves[-BARS_MAX:]
    yield (
        '<section><h2>History of saves <span class="key note"><i></i>live<i class="gone"></i>'
        "retired</span></h2>\n"
    )
    if len(report.saves) > BARS_MAX:
        yield f'<p class="note">The newest {BARS_MAX} of {len(report.saves)}.</p>'
    if not any(save.totals for save in saves):
        yield (
            '<p class="note">How these saves went is not known: they were made without telemetry. '
            "A Checkpointer keeps it, and so does save(..., telemetry=True).</p></section>\n"
        )
        return
    yield '<div class="charts">\n'
    for what in CHARTS:
        yield from chart(what, saves)
    yield "</div></section>\n"


def _slower_one(totals: SaveTotals, of_all: Sequence[SaveTotals]) -> str:
    """A sentence, when a retired save took longer; only totals are kept of those."""
    slowest = max(of_all, key=lambda one: one.seconds)
    if slowest.seconds <= totals.seconds:
        return ""
    return f" Step {slowest.step} took {seconds_text(slowest.seconds)}, but is retired."


# Tables ------------------------------------------------------------------------------------------


def _saves(report: Report) -> Iterator[str]:
    shown = report.saves[: -ROWS_MAX - 1 : -1]
    yield (
        "<section><h2>Saves and their outcomes</h2>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="saves">'
        "<table><tr><th class='number'>step</th>"
        "<th>committed</th><th>state</th><th class='number'>blocked</th>"
        "<th class='number'>duration</th><th class='number'>written</th>"
        "<th class='number'>referenced</th><th class='number'>rate</th>"
        "<th class='number'>retries</th><th>slowest rank</th><th class='number'>metric</th>"
        "<th>attempt</th></tr>\n"
    )
    for save in shown:
        cells = [
            ("number", f"{save.step}"),
            ("", date(save.committed_unix)),
            ("", state_tags(save)),
            *_totals_cells(save),
            ("number", NOTHING if save.metric is None else f"{save.metric:.4g}"),
            ("mono", page_text(save.attempt)),
        ]
        row = "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells)
        yield f"<tr>{row}</tr>\n"
    yield "</table></div>"
    if len(report.saves) > len(shown):
        yield f'<p class="note">and {len(report.saves) - len(shown)} older ones</p>'
    yield "</section>\n"


def _totals_cells(save: ReportedSave) -> list[tuple[str, str]]:
    totals, unknown = save.totals, ("number", NOTHING)
    if totals is None:
        stored = NOTHING if save.nbytes_stored is None else size(save.nbytes_stored)
        return [unknown, unknown, ("number", stored), unknown, unknown, unknown, ("", NOTHING)]
    return [
        ("number", seconds_text(totals.blocked_seconds)),
        ("number", seconds_text(totals.seconds)),
        ("number", size(totals.nbytes)),
        ("number", size(totals.nbytes_referenced) if totals.nbytes_referenced else NOTHING),
        ("number", rate_text(totals.nbytes_per_second)),
        ("number", f"{totals.retries}"),
        (
            "",
            f"{totals.slowest_rank} of {totals.ranks} in {page_text(totals.slowest_phase)}, "
            f"{seconds_text(totals.slowest_seconds)}",
        ),
    ]


def _entries(report: Report) -> Iterator[str]:
    if not report.entries:
        return
    total = sum(one.nbytes for one in report.entries) or 1
    yield (
        f"<section><h2>What the newest checkpoint holds: {size(total)}</h2>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="entries"><table><tr>'
        "<th>entry</th><th>kind</th><th class='number'>tensors</th><th class='number'>size</th>"
        "<th></th></tr>\n"
    )
    for one in report.entries:
        yield (
            f'<tr><td class="mono long">{page_text(one.entry)}</td><td>{page_text(one.kind)}'
            f'</td><td class="number">{one.tensors}</td><td class="number">{size(one.nbytes)}</td>'
            f'<td><div class="meter"><i style="width:{100 * one.nbytes / total:.1f}%"></i></div>'
            "</td></tr>\n"
        )
    yield "</table></div></section>\n"
