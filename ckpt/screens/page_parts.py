"""What pages about saves are made of: their style, charts, heat maps and tags.

Every text that comes from storage is escaped. No part needs a script or a style of its own element,
so that a page can forbid both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ckpt.screens.near_rows import TITLES, problems, risks_text, tier_row
from ckpt.screens.terminal import date, rate_text, seconds_text, size
from ckpt.screens.visible import page_text
from ckpt.telemetry.record import SaveTotals, Telemetry
from ckpt.tools.near_tiers import TierView, newest_status_of
from ckpt.tools.report import ReportedSave

RANKS_MAX = 128  # in the heat map: those that were at work longest
NOTHING = '<span class="note">&ndash;</span>'
NARROW = 23  # bars that have a width of their own; more share the room that there is
BAR_PIXELS = 26
HEATS = 10  # shades of a heat map

STYLE = """
:root { --ink: #1b1f24; --soft: #5c6570; --line: #e3e6ea; --page: #f6f7f9; --card: #fff;
  --accent: #2563eb; --gone: #7f93ba; --heat: 37, 99, 235; --hottest: .72;
  --bad: #c62828; --bad-soft: #fdecea; --warn: #9a5b00; --warn-soft: #fff4e0; --good: #1f7a3d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --soft: #9aa4b0; --line: #30353d;
  --page: #14171b; --card: #1c2026; --accent: #6ea0ff; --gone: #64779e; --heat: 96, 150, 255;
  --hottest: .55; --bad: #ff8a80; --bad-soft: #3a2020; --warn: #ffc266; --warn-soft: #372b17;
  --good: #7fd49a; } }
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
@media (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr); }
  body { padding: 12px; } section { padding: 12px; } }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 650; } .tile span { color: var(--soft); }
.charts { display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.chart { margin: 0; display: grid; grid-template-columns: auto 1fr; gap: 4px 8px; }
.chart figcaption { grid-column: 1 / -1; color: var(--soft); }
.ys, .xs { display: flex; justify-content: space-between; white-space: nowrap; font-size: 11px;
  color: var(--soft); } .ys { flex-direction: column; align-items: flex-end; line-height: 1; }
.xs { grid-column: 2; } .chart svg { display: block; width: 100%; height: 110px; }
.chart line { stroke: var(--line); vector-effect: non-scaling-stroke; }
.bar { fill: var(--accent); } .bar.gone { fill: var(--gone); } .unknown { fill: var(--line); }
.bar:hover, a:focus .bar { opacity: .7; }
table { border-collapse: collapse; width: 100%; } td, th { padding: 4px 12px 4px 0;
  text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); } tr:last-child td { border-bottom: 0; }
.number { text-align: right; } .mono { font: 12px ui-monospace, monospace; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 220px; }
.scroll { overflow-x: auto; } .heat { width: auto; }
.heat td { padding: 3px 10px; text-align: right; min-width: 84px;
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
STYLE += "".join(
    f".n{count} {{ max-width: {BAR_PIXELS * count}px; }}\n" for count in range(1, NARROW + 1)
)
STYLE += "".join(
    f".h{level} {{ background: rgba(var(--heat), calc(var(--hottest) * {level / HEATS})); }}\n"
    for level in range(HEATS + 1)
)


def state_tags(save: ReportedSave) -> str:
    """Whether a checkpoint exists, and what is known of it."""
    if not save.is_live:
        when = "" if save.retired_unix is None else f" {date(save.retired_unix)}"
        return f'<span class="tag gone">retired<span class="extra">{when}</span></span>'
    words = ["live"] + ["pinned"] * save.pinned + ["verified"] * save.verified
    return "".join(f'<span class="tag live">{word}</span>' for word in words)


# Charts ------------------------------------------------------------------------------------------


class Chart(NamedTuple):
    """What a chart shows of each save, and in which words."""

    title: str
    number: Callable[[SaveTotals], float]
    text: Callable[[float], str]


CHARTS = (
    Chart("Training blocked", lambda one: one.blocked_seconds, seconds_text),
    Chart("Duration, begin to commit", lambda one: one.seconds, seconds_text),
    Chart("Bytes written", lambda one: one.nbytes, lambda number: size(int(number))),
    Chart("Throughput", lambda one: one.nbytes_per_second, rate_text),
)


def chart(
    what: Chart,
    saves: Sequence[ReportedSave],
    *,
    highest: float = 0.0,
    link: Callable[[ReportedSave], str] | None = None,
) -> Iterator[str]:
    """A bar for each of one or more saves, oldest first. Labels are text of the page beside the
    drawing, which is stretched: they have the room they need at any width.

    `highest` is the least that the scale reaches, so that charts can be compared. `link` makes the
    address, which is escaped here, to which a bar leads.
    """
    values = [None if save.totals is None else what.number(save.totals) for save in saves]
    highest = max([highest, *(value for value in values if value is not None)]) or 1.0
    title = page_text(what.title)
    labels = "".join(f"<span>{page_text(what.text(s * highest))}</span>" for s in (1, 0.5, 0))
    few = f' class="n{len(saves)}"' if len(saves) <= NARROW else ""
    yield (
        f'<figure class="chart"><figcaption>{title}</figcaption><div class="ys">{labels}</div>'
        f'<svg{few} viewBox="0 0 {len(saves)} 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{title}">'
    )
    for y in (0, 50, 100):
        yield f'<line x1="0" x2="{len(saves)}" y1="{y}" y2="{y}"/>'
    for index, (save, value) in enumerate(zip(saves, values, strict=True)):
        bar = _bar(what, index, save, None if value is None else value / highest)
        # Not in the order of the tab key: the table has the same links.
        href = "" if link is None else page_text(link(save))
        yield f'<a href="{href}" tabindex="-1">{bar}</a>' if href else bar
    steps = sorted({0, (len(saves) - 1) // 2, len(saves) - 1} if len(saves) > 4 else {0})
    shown = "".join(f"<span>{saves[index].step}</span>" for index in steps)
    yield f'</svg><div class="xs{few and " " + few[8:-1]}">{shown}</div></figure>\n'


def _bar(what: Chart, index: int, save: ReportedSave, share: float | None) -> str:
    """`share` is its height, of the whole drawing's; None where it is not known."""
    if share is None or save.totals is None:
        about, kind, high = f"step {save.step}: not known", "unknown", 3.0
    else:
        value = what.text(what.number(save.totals))
        about = page_text(f"step {save.step}: {value}, {date(save.committed_unix)}")
        # At least half a pixel, so that every save can be seen and hovered over.
        kind, high = "bar" if save.is_live else "bar gone", max(100 * share, 0.5)
    return (
        f'<rect class="{kind}" x="{index + 0.06:.2f}" y="{100 - high:.2f}" width="0.88" '
        f'height="{high:.2f}"><title>{about}</title></rect>'
    )


# The heat map ------------------------------------------------------------------------------------


def heat_map(telemetry: Telemetry, title: str, more: str = "") -> Iterator[str]:
    """About one save: ranks x phases. `title` and `more` are of HTML; `more` follows the
    sentence about the slowest rank.
    """
    totals = telemetry.totals
    work = [sum(took) for took in telemetry.took_us]
    # Those that were at work longest are chosen, and shown in the order of ranks.
    ranks = sorted(sorted(range(len(work)), key=lambda rank: -work[rank])[:RANKS_MAX])
    longest = max((took for rank in ranks for took in telemetry.took_us[rank]), default=0) or 1
    yield (
        f"<h2>{title}</h2>\n"
        f'<p>Slowest was <b class="slowest">rank {totals.slowest_rank}</b>, mostly in '
        f"<b>{page_text(totals.slowest_phase)}</b> ({seconds_text(totals.slowest_seconds)})."
        f"{_longest_phase(telemetry)}{more} "
        f'<span class="note">A row is a rank, a column a phase, in the order of time; in '
        "<i>wait</i> a rank is done and others are not. Hover for begin and bytes. <i>manifest</i> "
        "and <i>commit</i> are the coordinator's.</span></p>\n"
    )
    if len(work) > len(ranks):
        yield f'<p class="note">{len(ranks)} of {len(work)} ranks: the longest ones.</p>'
    heads = "".join(f'<th class="number">{page_text(phase)}</th>' for phase in telemetry.phases)
    yield (
        f'<div class="scroll" tabindex="0" role="region" aria-label="ranks and phases">'
        f'<table class="heat"><tr><th class="rank">rank</th>{heads}<th class="number">blocked</th>'
        '<th class="number">retries</th></tr>\n'
    )
    for rank in ranks:
        is_slowest = rank == totals.slowest_rank
        mark = ' class="rank slowest"' if is_slowest else ' class="rank"'
        cells = "".join(
            _cell(telemetry, rank, index, longest) for index in range(len(telemetry.phases))
        )
        blocked = seconds_text(telemetry.blocked_us[rank] / 1e6)
        yield (
            f"<tr><th{mark}>{rank}</th>{cells}<td>{blocked}</td>"
            f"<td>{telemetry.retries[rank]}</td></tr>\n"
        )
    yield "</table></div>\n"


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
    text = f"longest was <b>{page_text(phase)}</b> on rank {rank} ({seconds_text(took / 1e6)})"
    return f" Of all phases {text}."


def _cell(telemetry: Telemetry, rank: int, index: int, longest_us: int) -> str:
    took, start = telemetry.took_us[rank][index], telemetry.started_us[rank][index]
    nbytes = telemetry.nbytes[rank][index]
    if not took:
        return f"<td>{NOTHING}</td>"
    share = min(took / longest_us, 1.0)
    about = f"rank {rank}, {telemetry.phases[index]}: from {seconds_text(start / 1e6)} on"
    about += f", {size(nbytes)} at {rate_text(nbytes * 1e6 / took)}" if nbytes else ""
    return (
        f'<td class="h{round(HEATS * share)}" '
        f'title="{page_text(about)}">{seconds_text(took / 1e6)}</td>'
    )


_NUMBERS = ("newest step", "ranks here", "takes", "free")


def near_of(
    views: Sequence[TierView], newest: ReportedSave | None, when: Callable[[float], str]
) -> Iterator[str]:
    """What a failure would cost now, and what each directory has; `newest` is the newest durable
    checkpoint. `when` writes a moment.
    """
    status = newest_status_of(views)
    if status is None:
        yield '<p class="note">No host says how far the training is.</p>\n'
    else:
        yield f"<p>step {status.step} done, noted {when(status.time_unix)}</p>\n"
        if risks := risks_text(views, newest):
            yield f"<p><b>{page_text(risks)}</b></p>\n"
    kinds = ["number" if title in _NUMBERS else "" for title in TITLES]
    heads = zip(kinds, TITLES, strict=True)
    yield '<div class="scroll" tabindex="0" role="region" aria-label="near directories"><table><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for kind, title in heads) + "</tr>\n"
    for view in views:
        cells = zip(kinds, tier_row(view), strict=True)
        row = "".join(f'<td class="{kind}">{page_text(text)}</td>' for kind, text in cells)
        yield f"<tr>{row}</tr>\n"
    yield "</table></div>\n"
    for problem in problems(views):
        yield f'<div class="notice warning"><b>warning</b>{page_text(problem)}</div>\n'
