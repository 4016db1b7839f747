"""The page of `ckpt report`: one HTML file with everything in it, light and dark.

No script, font or image is loaded from anywhere. Every text that comes from storage is escaped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from ckpt.cli.screen import age, date, size
from ckpt.cli.visible import page_text
from ckpt.telemetry.record import SaveTotals, Telemetry
from ckpt.tools.report import Report, ReportedSave

BARS_MAX = 200  # newest saves in a chart
ROWS_MAX = 1000  # newest saves in the table
RANKS_MAX = 128  # in the heat map: those that were at work longest
LABEL_WIDTH = 84  # of "1023.9 MiB/s", 7 units a character, which is more than any usual font takes
CHART_WIDTH, CHART_HEIGHT, AXIS_WIDTH = 580, 130, LABEL_WIDTH + 6
NOTHING = '<span class="note">&ndash;</span>'

STYLE = """
:root { --ink: #1b1f24; --soft: #5c6570; --line: #e3e6ea; --page: #f6f7f9; --card: #fff;
  --accent: #2563eb; --gone: #a9b8d6; --heat: 37, 99, 235; --bad: #c62828; --bad-soft: #fdecea;
  --warn: #9a5b00; --warn-soft: #fff4e0; --good: #1f7a3d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --soft: #9aa4b0; --line: #30353d;
  --page: #14171b; --card: #1c2026; --accent: #6ea0ff; --gone: #4a5a7c; --heat: 96, 150, 255;
  --bad: #ff8a80; --bad-soft: #3a2020; --warn: #ffc266; --warn-soft: #372b17; --good: #7fd49a; } }
* { box-sizing: border-box; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0; padding: 28px; color: var(--ink);
  background: var(--page); font-variant-numeric: tabular-nums; }
main { max-width: 1360px; margin: 0 auto; }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 10px; }
p { margin: 4px 0 12px; } .note { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 16px 0; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 18px 0; }
@media (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 650; } .tile span { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 18px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.bar { fill: var(--accent); } .bar.gone { fill: var(--gone); } .unknown { fill: var(--line); }
.bar:hover { opacity: .7; } .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; } td, th { padding: 4px 12px 4px 0;
  text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); } tr:last-child td { border-bottom: 0; }
.number { text-align: right; } .mono { font: 12px ui-monospace, monospace; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 220px; }
.heat { width: auto; } .heat td { padding: 3px 10px; text-align: right; min-width: 84px;
  border: 2px solid var(--card); border-radius: 4px; }
.heat th { padding: 3px 10px; border: 0; } .heat th.rank { text-align: right; }
.heat .slowest { color: var(--bad); font-weight: 700; }
.tag { border: 1px solid var(--line); border-radius: 9px; padding: 0 8px; font-size: 12px;
  margin-right: 4px; }
.tag.live { color: var(--good); border-color: var(--good); }
.tag.gone { color: var(--soft); }
.notice { border-left: 4px solid var(--line); padding: 6px 12px; margin: 6px 0;
  border-radius: 4px; overflow-wrap: anywhere; }
.notice.bad { border-color: var(--bad); background: var(--bad-soft); }
.notice.warning { border-color: var(--warn); background: var(--warn-soft); }
.notice b { text-transform: uppercase; font-size: 11px; margin-right: 8px; }
.notice.bad b { color: var(--bad); } .notice.warning b { color: var(--warn); }
.meter { background: var(--line); border-radius: 3px; height: 10px; min-width: 160px; }
.meter i { display: block; height: 10px; border-radius: 3px; background: var(--accent); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 14px;
  background: var(--accent); } .key i.gone { background: var(--gone); }
"""


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
    yield from _charts(report)
    if report.slowest is not None:
        yield from _heat_map(report.slowest, report.totals)
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
        ("throughput, median", _median(totals, lambda one: one.nbytes_per_second, _rate)),
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
    return (text or _seconds)(statistics.median([number(one) for one in totals]))


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
    yield from _chart("Training blocked", saves, lambda one: one.blocked_seconds, _seconds)
    yield from _chart("Duration, begin to commit", saves, lambda one: one.seconds, _seconds)
    yield from _chart("Bytes written", saves, lambda one: one.nbytes, lambda n: size(int(n)))
    yield from _chart("Throughput", saves, lambda one: one.nbytes_per_second, _rate)
    yield "</div></section>\n"


def _chart(
    title: str,
    saves: Sequence[ReportedSave],
    number: Callable[[SaveTotals], float],
    text: Callable[[float], str],
) -> Iterator[str]:
    values = [None if save.totals is None else number(save.totals) for save in saves]
    highest = max((value for value in values if value is not None), default=0.0) or 1.0
    room = CHART_WIDTH - AXIS_WIDTH
    width = min(room / len(saves), 26.0)
    bottom = CHART_HEIGHT - 18
    yield f'<div><div class="note">{title}</div>'
    yield f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{title}">'
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - 12)
        label = page_text(text(share * highest))
        yield f'<line class="grid" x1="{AXIS_WIDTH}" x2="{CHART_WIDTH}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{AXIS_WIDTH - 6}" y="{y + 4}" text-anchor="end">{label}</text>'
    for index, (save, value) in enumerate(zip(saves, values, strict=True)):
        left, wide = AXIS_WIDTH + index * width, max(width - (2 if width > 5 else 0.4), 0.6)
        if value is None:
            about = f"step {save.step}: not known"
            yield (
                f'<rect class="unknown" x="{left:.2f}" y="{bottom - 3}" width="{wide:.2f}" '
                f'height="3"><title>{about}</title></rect>'
            )
            continue
        # At least half a pixel, so that every save can be seen and hovered over.
        high = max(value / highest * (bottom - 12), 0.5)
        kind = "bar" if save.is_live else "bar gone"
        about = page_text(f"step {save.step}: {text(value)}, {date(save.committed_unix)}")
        yield (
            f'<rect class="{kind}" x="{left:.2f}" y="{bottom - high:.2f}" width="{wide:.2f}" '
            f'height="{high:.2f}"><title>{about}</title></rect>'
        )
    for index in sorted({0, (len(saves) - 1) // 2, len(saves) - 1}):
        x = AXIS_WIDTH + (index + 0.5) * width
        anchor = "start" if index == 0 else "middle" if x < CHART_WIDTH - 40 else "end"
        yield (
            f'<text x="{x:.1f}" y="{CHART_HEIGHT - 4}" text-anchor="{anchor}">'
            f"{saves[index].step}</text>"
        )
    yield "</svg></div>\n"


# The heat map ------------------------------------------------------------------------------------


def _heat_map(telemetry: Telemetry, of_all: Sequence[SaveTotals]) -> Iterator[str]:
    totals = telemetry.totals
    work = [sum(took) for took in telemetry.took_us]
    # Those that were at work longest are chosen, and shown in the order of ranks.
    ranks = sorted(sorted(range(len(work)), key=lambda rank: -work[rank])[:RANKS_MAX])
    longest = max((took for rank in ranks for took in telemetry.took_us[rank]), default=0) or 1
    yield (
        f"<section><h2>The slowest save: step {totals.step}, {_seconds(totals.seconds)}</h2>\n"
        f'<p>Slowest was <b class="slowest">rank {totals.slowest_rank}</b>, mostly in '
        f"<b>{page_text(totals.slowest_phase)}</b> ({_seconds(totals.slowest_seconds)})."
        f"{_longest_phase(telemetry)}{_slower_one(totals, of_all)} "
        f'<span class="note">A row is a rank, a column a phase, in the order of time; in '
        "<i>wait</i> a rank is done and others are not. Hover for begin and bytes. <i>manifest</i> "
        "and <i>commit</i> are the coordinator's.</span></p>\n"
    )
    if len(work) > len(ranks):
        yield f'<p class="note">{len(ranks)} of {len(work)} ranks: the longest ones.</p>'
    heads = "".join(f'<th class="number">{page_text(phase)}</th>' for phase in telemetry.phases)
    yield (
        f'<table class="heat"><tr><th class="rank">rank</th>{heads}<th class="number">blocked</th>'
        '<th class="number">retries</th></tr>\n'
    )
    for rank in ranks:
        is_slowest = rank == totals.slowest_rank
        mark = ' class="rank slowest"' if is_slowest else ' class="rank"'
        cells = "".join(
            _cell(telemetry, rank, index, longest) for index in range(len(telemetry.phases))
        )
        yield (
            f"<tr><th{mark}>{rank}</th>{cells}<td>{_seconds(telemetry.blocked_us[rank] / 1e6)}</td>"
            f"<td>{telemetry.retries[rank]}</td></tr>\n"
        )
    yield "</table></section>\n"


def _longest_phase(telemetry: Telemetry) -> str:
    """A sentence, when a phase of the coordinator took longer than any rank's own work."""
    cells = [
        (took, rank, phase)
        for rank, row in enumerate(telemetry.took_us)
        for phase, took in zip(telemetry.phases, row, strict=True)
        if phase != "wait"
    ]
    took, rank, phase = max(cells, default=(0, 0, ""))
    if took <= 1e6 * telemetry.totals.slowest_seconds * 1.05:
        return ""
    text = f"longest was <b>{page_text(phase)}</b> on rank {rank} ({_seconds(took / 1e6)})"
    return f" Of all phases {text}."


def _slower_one(totals: SaveTotals, of_all: Sequence[SaveTotals]) -> str:
    """A sentence, when a retired save took longer; only totals are kept of those."""
    slowest = max(of_all, key=lambda one: one.seconds)
    if slowest.seconds <= totals.seconds:
        return ""
    return f" Step {slowest.step} took {_seconds(slowest.seconds)}, but is retired."


def _cell(telemetry: Telemetry, rank: int, index: int, longest_us: int) -> str:
    took, start = telemetry.took_us[rank][index], telemetry.started_us[rank][index]
    nbytes = telemetry.nbytes[rank][index]
    if not took:
        return f"<td>{NOTHING}</td>"
    share = min(took / longest_us, 1.0)
    about = f"rank {rank}, {telemetry.phases[index]}: from {_seconds(start / 1e6)} on"
    about += f", {size(nbytes)} at {_rate(nbytes * 1e6 / took)}" if nbytes else ""
    ink = ";color:#fff" if share > 0.5 else ""
    return (
        f'<td style="background:rgba(var(--heat),{0.06 + 0.84 * share:.2f}){ink}" '
        f'title="{page_text(about)}">{_seconds(took / 1e6)}</td>'
    )


# Tables ------------------------------------------------------------------------------------------


def _saves(report: Report) -> Iterator[str]:
    shown = report.saves[: -ROWS_MAX - 1 : -1]
    yield (
        "<section><h2>Saves and their outcomes</h2>\n<table><tr><th class='number'>step</th>"
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
            ("", _state(save)),
            *_totals_cells(save),
            ("number", NOTHING if save.metric is None else f"{save.metric:.4g}"),
            ("mono", page_text(save.attempt)),
        ]
        row = "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells)
        yield f"<tr>{row}</tr>\n"
    yield "</table>"
    if len(report.saves) > len(shown):
        yield f'<p class="note">and {len(report.saves) - len(shown)} older ones</p>'
    yield "</section>\n"


def _totals_cells(save: ReportedSave) -> list[tuple[str, str]]:
    totals, unknown = save.totals, ("number", NOTHING)
    if totals is None:
        stored = NOTHING if save.nbytes_stored is None else size(save.nbytes_stored)
        return [unknown, unknown, ("number", stored), unknown, unknown, unknown, ("", NOTHING)]
    return [
        ("number", _seconds(totals.blocked_seconds)),
        ("number", _seconds(totals.seconds)),
        ("number", size(totals.nbytes)),
        ("number", size(totals.nbytes_referenced) if totals.nbytes_referenced else NOTHING),
        ("number", _rate(totals.nbytes_per_second)),
        ("number", f"{totals.retries}"),
        (
            "",
            f"{totals.slowest_rank} of {totals.ranks} in {page_text(totals.slowest_phase)}, "
            f"{_seconds(totals.slowest_seconds)}",
        ),
    ]


def _state(save: ReportedSave) -> str:
    if not save.is_live:
        when = "" if save.retired_unix is None else f" {date(save.retired_unix)}"
        return f'<span class="tag gone">retired{when}</span>'
    words = ["live"] + ["pinned"] * save.pinned + ["verified"] * save.verified
    return "".join(f'<span class="tag live">{word}</span>' for word in words)


def _entries(report: Report) -> Iterator[str]:
    if not report.entries:
        return
    total = sum(one.nbytes for one in report.entries) or 1
    yield (
        f"<section><h2>What the newest checkpoint holds: {size(total)}</h2>\n<table><tr>"
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
    yield "</table></section>\n"


def _seconds(seconds: float) -> str:
    """`0.3 ms`, `45 ms`, `1.25 s`, `132 s`."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _rate(nbytes_per_second: float) -> str:
    return f"{size(int(nbytes_per_second))}/s"
