"""The page of `ckpt serve`: sections of HTML, from the states of runs to text. Pure.

Ages are written by the page's script, so that sections do not change with the clock. Every text
that comes from storage is escaped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from urllib.parse import urlencode

from ckpt.screens.page_parts import CHARTS, NOTHING, STYLE, chart, heat_map, near_of, state_tags
from ckpt.screens.terminal import counted, date, rate_text, seconds_text, size
from ckpt.screens.visible import page_text
from ckpt.service.retention import EVERYTHING, KeepAll, KeepRule, plan_retention
from ckpt.telemetry.record import SaveTotals, Telemetry
from ckpt.tools.polling import RunState
from ckpt.tools.report import ReportedSave, busiest_ranks

BARS_MAX = 200  # newest saves of a run in a chart
ROWS_MAX = 100  # newest saves in the table
RETIRED_MAX = 20  # newest retired ones that are listed
FAILURES_MAX = 50
NOTICES_MAX = 20
BUSY_RANKS = 5
TIMELINE = 1000  # units of its width

SECTIONS = {
    "runs": "Now",
    "look": "To look at",
    "near": "Near checkpoints",
    "timeline": "Timeline",
    "charts": "History",
    "save": "One save",
    "keep": "Retention",
    "failures": "Failures",
    "saves": "Saves",
}

PAGE_STYLE = """
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 10px 0; }
a { color: var(--accent); }
a:focus-visible, .scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px;
  border-radius: 3px; }
.tag.lost { color: var(--bad); border-color: var(--bad); }
.tag.away, .tag.waiting { color: var(--warn); border-color: var(--warn); }
.tag.there { color: var(--good); border-color: var(--good); }
#runs { background: none; border: 0; padding: 0; display: grid; gap: 12px; overflow: visible;
  grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
.run { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; min-width: 0; } .run h2 { overflow-wrap: anywhere; }
.run.chosen { border-color: var(--accent); }
dl { display: grid; gap: 2px; margin: 8px 0 0; } dt { color: var(--soft); }
dl div { display: flex; justify-content: space-between; gap: 12px; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.only dl { gap: 12px; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
.only dl div { display: block; } .only dd { text-align: left; font-size: 17px; font-weight: 650; }
.lane { margin: 10px 0; } .lane h3, #charts h3 { font-size: 13px; margin: 0 0 4px; font-weight: 600;
  overflow-wrap: anywhere; }
#charts h3 { margin-top: 14px; } .lane svg { height: 34px; width: 100%; display: block;
  background: var(--page); border-radius: 4px; }
.failed { fill: var(--bad); } .key i.failed { background: var(--bad); }
.moves { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 8px; }
.why { white-space: normal; overflow-wrap: anywhere; }
tr.chosen td { background: var(--page); } table.tight { width: auto; }
@media (max-width: 800px) { .extra { display: none; } td, th { padding-right: 8px; }
  .heat td, .heat th { min-width: 0; padding: 3px 6px; } }
"""


def style() -> str:
    """The style sheet."""
    return STYLE + PAGE_STYLE


@dataclass(frozen=True, slots=True)
class PageChoice:
    """What somebody has chosen to look at: a run, by its number, and one of its saves; "" stands
    for the newest that was measured.
    """

    run: int = 0
    attempt: str = ""


@dataclass(frozen=True)
class PageMatter:
    """Everything that a page is made of. `telemetry` returns that of a run's live checkpoint, and
    `rule` is the rule of retention to try, None without one.
    """

    states: tuple[RunState, ...]
    choice: PageChoice
    telemetry: Callable[[int, str], Telemetry | None]
    rule: KeepRule | None
    now_unix: float

    @property
    def chosen(self) -> RunState:
        """The run to look at."""
        return self.states[self.choice.run]


def page_of(look: PageMatter, sections: Mapping[str, str], seen: str) -> str:
    """The whole page around its sections; `seen` is what its script begins with."""
    names = ", ".join(labels(look.states))
    title = page_text(f"ckpt: {names}")
    links = "".join(f'<a href="#{name}">{text}</a>' for name, text in SECTIONS.items())
    body = "\n".join(f'<section id="{name}">{sections[name]}</section>' for name in SECTIONS)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page.css">'
        f'<script src="/page.js" defer></script></head><body data-seen="{page_text(seen)}"><main>'
        f'<h1>{page_text(names)}</h1><nav aria-label="sections">{links}'
        '<span id="live" class="tag" role="status">as it was loaded</span></nav>\n'
        f"{body}\n</main></body></html>\n"
    )


def sections_of(look: PageMatter) -> dict[str, str]:
    """The inside of each section, by its id."""
    made = {
        "runs": _runs(look),
        "look": _notices(look),
        "near": _near(look),
        "timeline": _timeline(look),
        "charts": _charts(look),
        "save": _one_save(look),
        "keep": _retention(look),
        "failures": _failures(look),
        "saves": _saves(look),
    }
    return {name: "".join(pieces) for name, pieces in made.items()}


def labels(states: Sequence[RunState]) -> list[str]:
    """Urls, without what several have in common before their last names."""
    urls = [state.run.url for state in states]
    if len({*urls}) < 2:
        return urls
    names = [url.split("/") for url in urls]
    folders = [one[:-1] for one in names]
    same = takewhile(lambda column: len({*column}) == 1, zip(*folders, strict=False))
    common = sum(1 for _ in same)
    return ["/".join(one[common:]) for one in names]


def _heading(name: str, more: str = "") -> str:
    return f"<h2>{SECTIONS[name]}{more}</h2>\n"


def _link(run: int, attempt: str = "") -> str:
    chosen = {"run": f"{run}", **({"save": attempt} if attempt else {})}
    return f"/?{urlencode(chosen)}"


def _link_to(run: int, save: ReportedSave) -> str:
    return _link(run, save.attempt)


def _when(unix: float) -> str:
    """A moment, of which the script makes an age."""
    return f'<time data-unix="{unix:.3f}" title="{date(unix)}">{date(unix)}</time>'


# Now ----------------------------------------------------------------------------------------------


def _runs(look: PageMatter) -> Iterator[str]:
    for index, (state, label) in enumerate(zip(look.states, labels(look.states), strict=True)):
        if len(look.states) == 1:
            yield f'<div class="run only">{_availability(state)}'
        else:
            chosen = " chosen" * (index == look.choice.run)
            link = f'<a href="{page_text(_link(index))}">{page_text(label)}</a>'
            yield f'<div class="run{chosen}"><h2>{link}</h2>{_availability(state)}'
        facts = _facts(state)
        rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        yield f"<dl>{rows}</dl></div>\n"


def _availability(state: RunState) -> str:
    if state.availability == "away":
        text = f"{page_text(state.problem)}"
        since = f"not to be read since {date(state.since_unix)}"
        return f'<p><span class="tag away">{since}</span></p><p class="why">{text}</p>'
    if state.availability == "waiting":
        return (
            '<p><span class="tag waiting">waiting for the first save</span></p>'
            f'<p class="why note">{page_text(state.problem)}</p>'
        )
    return '<p><span class="tag there">followed</span></p>'


def _facts(state: RunState) -> Iterator[tuple[str, str]]:
    run, live = state.run, state.run.live
    if live:
        yield "newest checkpoint", f"step {live[-1].step}, {_when(live[-1].committed_unix)}"
    else:
        yield "newest checkpoint", "none"
    count = f"{len(live)} of {counted(len(run.saves), 'save')}"
    yield "live checkpoints", count if run.is_whole_history else f"{count}, of the newest records"
    yield "they take", size(sum(save.nbytes_stored or 0 for save in live))
    for what, name in zip(CHARTS, ("blocked", "duration", "written", "throughput"), strict=True):
        yield f"{name}, median", _median(run.totals, what.number, what.text)
    yield "repeated requests", f"{sum(one.retries for one in run.totals)}"
    yield "failed saves", f"{len(run.measured.failures)}"
    yield "jobs that wrote", f"{run.sessions}"


def _median(
    totals: Sequence[SaveTotals],
    number: Callable[[SaveTotals], float],
    text: Callable[[float], str],
) -> str:
    if not totals:
        return NOTHING
    return page_text(text(statistics.median(number(one) for one in totals)))


def _notices(look: PageMatter) -> Iterator[str]:
    yield _heading("look")
    several = len(look.states) > 1
    count = 0
    for state, label in zip(look.states, labels(look.states), strict=True):
        whose = f"{page_text(label)}: " if several else ""
        # Before a run has saved, that there is nothing to resume from is no news.
        notices = state.run.notices(look.now_unix) if state.run.saves else []
        for notice in notices[:NOTICES_MAX]:
            count += 1
            kind = page_text(notice.severity)
            text = f"<b>{kind}</b>{whose}{page_text(notice.text)}"
            yield f'<div class="notice {kind}">{text}</div>\n'
    if not count:
        yield '<p class="note">Nothing: no failures, no gaps, no warnings.</p>'


# Near tiers ---------------------------------------------------------------------------------------


def _near(look: PageMatter) -> Iterator[str]:
    """What the hosts of every run have that somebody looks at from here."""
    yield _heading("near")
    seen = False
    for state, label in zip(look.states, labels(look.states), strict=True):
        if not state.near:
            continue
        seen = True
        if len(look.states) > 1:
            yield f"<h3>{page_text(label)}</h3>\n"
        yield from near_of(state.near, state.run.live[-1] if state.run.live else None, _when)
    if not seen:
        text = "None to be seen from here; --near DIR shows the directory of a host."
        yield f'<p class="note">{text}</p>'


# Timeline and charts ------------------------------------------------------------------------------


def _timeline(look: PageMatter) -> Iterator[str]:
    key = '<span class="key note"><i></i>live<i class="gone"></i>retired<i class="failed"></i>'
    yield _heading("timeline", f" {key}failed</span>")
    shown = [state.run.saves[-BARS_MAX:] for state in look.states]
    begins = [save.committed_unix for saves in shown for save in saves[:1]]
    ends = [save.committed_unix for saves in shown for save in saves[-1:]]
    if not begins:
        yield '<p class="note">No save yet.</p>'
        return
    begin, end = min(begins), max(ends)
    scale = TIMELINE / max(end - begin, 1e-3)
    for index, (state, saves) in enumerate(zip(look.states, shown, strict=True)):
        label = page_text(labels(look.states)[index])
        name = f"<h3>{label}</h3>" if len(look.states) > 1 else ""
        yield (
            f'<div class="lane">{name}<svg viewBox="0 0 {TIMELINE} 100" role="img" '
            f'preserveAspectRatio="none" aria-label="saves of {label} over time">'
        )
        for save in saves:
            yield _mark(
                save, (save.committed_unix - begin) * scale, scale, _link(index, save.attempt)
            )
        for failure in state.run.measured.failures:
            x = (failure.time_unix - begin) * scale
            if 0 <= x <= TIMELINE:
                about = page_text(f"step {failure.step} failed: {failure.error}")
                yield (
                    f'<rect class="failed" x="{x:.1f}" y="0" width="4" height="100">'
                    f"<title>{about}</title></rect>"
                )
        yield "</svg></div>\n"
    middle = date((begin + end) / 2)
    dates = (date(begin), f'<span class="extra">{middle}</span>', date(end))
    yield f'<div class="xs"><span>{dates[0]}</span>{dates[1]}<span>{dates[2]}</span></div>'


def _mark(save: ReportedSave, x: float, scale: float, href: str) -> str:
    """From the beginning of a save to its commit, at `x`; never too narrow to be seen."""
    seconds = 0.0 if save.totals is None else save.totals.seconds
    width = min(max(seconds * scale, 3.0), x + 3.0)
    kind, high = ("bar", 80) if save.is_live else ("bar gone", 50)
    took = "" if save.totals is None else f", took {seconds_text(seconds)}"
    about = page_text(f"step {save.step}, {date(save.committed_unix)}{took}")
    return (
        f'<a href="{page_text(href)}" tabindex="-1"><rect class="{kind}" x="{x - width + 3:.1f}" '
        f'y="{100 - high}" width="{width:.1f}" height="{high}"><title>{about}</title></rect></a>'
    )


def _charts(look: PageMatter) -> Iterator[str]:
    yield _heading("charts", ' <span class="note">blocked, duration, sizes, throughput</span>')
    runs = [
        (index, state.run.saves[-BARS_MAX:])
        for index, state in enumerate(look.states)
        if any(save.totals for save in state.run.saves[-BARS_MAX:])
    ]
    if not runs:
        yield '<p class="note">How saves went is not known: none, or made without telemetry.</p>'
    for index, saves in runs:
        if len(look.states) > 1:
            yield f"<h3>{page_text(labels(look.states)[index])}</h3>"
        yield '<div class="charts">\n'
        for what in CHARTS:
            # One scale for all runs, so that their bars can be compared.
            highest = max(what.number(s.totals) for _, all_ in runs for s in all_ if s.totals)
            yield from chart(what, saves, highest=highest, link=partial(_link_to, index))
        yield "</div>\n"


# One save -----------------------------------------------------------------------------------------


def _one_save(look: PageMatter) -> Iterator[str]:
    save = _chosen_save(look)
    if save is None:
        yield _heading("save") + '<p class="note">No save yet.</p>'
        return
    yield _moves(look, save)
    telemetry = look.telemetry(look.choice.run, save.attempt)
    if telemetry is None:
        yield f"<h2>Step {save.step}</h2>{_totals_only(save)}"
        return
    busy = ", ".join(
        f"rank {rank} ({seconds_text(seconds)})"
        for rank, seconds in busiest_ranks(telemetry, BUSY_RANKS)
    )
    title = f"Step {save.step}, {seconds_text(telemetry.totals.seconds)} on "
    title += counted(telemetry.totals.ranks, "rank")
    yield from heat_map(telemetry, title, f" Longest at work: {page_text(busy)}.")


def _chosen_save(look: PageMatter) -> ReportedSave | None:
    saves = look.chosen.run.saves
    for save in saves:
        if save.attempt == look.choice.attempt:
            return save
    measured = {one.totals.attempt for one in look.chosen.run.measured.full}
    newest = (save for save in reversed(saves) if save.attempt in measured and save.is_live)
    return next(newest, saves[-1] if saves else None)


def _moves(look: PageMatter, save: ReportedSave) -> str:
    """Links to the saves before and after."""
    saves = look.chosen.run.saves
    index = saves.index(save)
    moves = []
    for name, other in (("earlier", index - 1), ("later", index + 1), ("newest", len(saves))):
        if name == "newest":
            moves.append(
                f'<a href="{page_text(_link(look.choice.run))}#save">follow the newest</a>'
            )
        elif 0 <= other < len(saves):
            href = page_text(_link(look.choice.run, saves[other].attempt))
            moves.append(f'<a href="{href}#save">{name}: step {saves[other].step}</a>')
    return f'<p class="moves">{"".join(moves)}</p>'


def _totals_only(save: ReportedSave) -> str:
    if save.totals is None:
        return '<p class="note">How it went is not known.</p>'
    one = save.totals
    return (
        f"<p>Took {seconds_text(one.seconds)} on {counted(one.ranks, 'rank')}; training was "
        f"blocked for {seconds_text(one.blocked_seconds)}; {size(one.nbytes)} at "
        f"{rate_text(one.nbytes_per_second)}. Slowest was rank {one.slowest_rank}, in "
        f"{page_text(one.slowest_phase)} ({seconds_text(one.slowest_seconds)}).</p>"
        '<p class="note">Phases of each rank are known of checkpoints that exist.</p>'
    )


# Retention ----------------------------------------------------------------------------------------


def _retention(look: PageMatter) -> Iterator[str]:
    label = labels(look.states)[look.choice.run]
    yield _heading("keep", f" of {page_text(label)}" * (len(look.states) > 1))
    state = look.chosen
    if not state.entries:
        yield '<p class="note">No checkpoint exists.</p>'
    else:
        yield from _kept(look)
    retired = [save for save in state.run.saves if not save.is_live]
    if retired:
        nbytes = sum(save.nbytes_stored or 0 for save in retired)
        shown = sorted(retired, key=lambda save: save.retired_unix or 0.0)[-RETIRED_MAX:]
        steps = ", ".join(f"{save.step}" for save in reversed(shown))
        more = f" and {len(retired) - len(shown)} before" if len(retired) > len(shown) else ""
        yield (
            f"<p>Retired: {counted(len(retired), 'checkpoint')}, which took {size(nbytes)}; "
            f"last first: step {steps}{more}.</p>"
        )


def _kept(look: PageMatter) -> Iterator[str]:
    rule = look.rule
    rule_shown = KeepAll() if rule is None else rule
    plan = plan_retention(look.chosen.entries, rule_shown, now_unix=look.now_unix)
    if rule is None:
        yield (
            '<p class="note">The rule of the training is its own and not in the root. With '
            "<code>--keep-last</code> and the like, as of <code>ckpt prune</code>, this shows what "
            "such a rule would keep.</p>"
        )
    elif plan.refused:
        yield f'<p class="why">{page_text(plan.refused)}</p>'
    yield '<table class="tight"><tr><th class="number">step</th><th>size</th>'
    yield "<th>why it is kept</th></tr>\n"
    verdicts = [(verdict, True) for verdict in plan.keep]
    verdicts += [(verdict, False) for verdict in plan.retire]
    for verdict, stays in sorted(verdicts, key=lambda pair: -pair[0].entry.slot)[:ROWS_MAX]:
        reasons = [one for one in verdict.reasons if rule is not None or one != EVERYTHING]
        text = "; ".join(reasons) or "nothing but its training's rule"
        if rule is not None:
            text = text if stays else f"would be retired: {text}"
        nbytes = size(verdict.entry.nbytes)
        yield (
            f'<tr><td class="number">{verdict.entry.step}</td><td>{nbytes}</td>'
            f'<td class="why">{page_text(text)}</td></tr>\n'
        )
    yield "</table>\n"


# Tables -------------------------------------------------------------------------------------------


def _failures(look: PageMatter) -> Iterator[str]:
    yield _heading("failures")
    rows = [
        (failure, label)
        for state, label in zip(look.states, labels(look.states), strict=True)
        for failure in state.run.measured.failures
    ]
    if not rows:
        yield (
            '<p class="note">None is known. A failed save is known once a later one has succeeded.'
            "</p>"
        )
        return
    rows.sort(key=lambda row: -row[0].time_unix)
    for failure, label in rows[:FAILURES_MAX]:
        run = f"{page_text(label)}, " * (len(look.states) > 1)
        yield (
            f'<div class="notice bad"><b>step {failure.step}</b>{run}{date(failure.time_unix)}: '
            f"{page_text(failure.error)}</div>\n"
        )
    if len(rows) > FAILURES_MAX:
        yield f'<p class="note">and {len(rows) - FAILURES_MAX} before</p>'


def _saves(look: PageMatter) -> Iterator[str]:
    saves = look.chosen.run.saves
    label = labels(look.states)[look.choice.run]
    yield _heading("saves", f" of {page_text(label)}" * (len(look.states) > 1))
    if not saves:
        yield '<p class="note">No save yet.</p>'
        return
    heads = (
        ("number", "step"), ("", "committed"), ("", "state"), ("number", "duration"),
        ("number extra", "blocked"), ("number", "written"), ("number extra", "rate"),
        ("number extra", "retries"), ("extra", "slowest rank"), ("number extra", "metric"),
    )  # fmt: skip
    cells = "".join(f'<th class="{kind}">{text}</th>' for kind, text in heads)
    yield f"<table><tr>{cells}</tr>\n"
    chosen = _chosen_save(look)
    for save in saves[: -ROWS_MAX - 1 : -1]:
        row = "".join(
            f'<td class="{kind}">{text}</td>'
            for (kind, _), text in zip(heads, _cells(look, save), strict=True)
        )
        yield f"<tr{' class=' * (save is chosen)}{'chosen' * (save is chosen)}>{row}</tr>\n"
    yield "</table>\n"
    if len(saves) > ROWS_MAX:
        yield f'<p class="note">and {len(saves) - ROWS_MAX} older ones</p>'


def _cells(look: PageMatter, save: ReportedSave) -> tuple[str, ...]:
    href = page_text(_link(look.choice.run, save.attempt))
    step = f'<a href="{href}#save">{save.step}</a>'
    metric = NOTHING if save.metric is None else f"{save.metric:.4g}"
    one = save.totals
    if one is None:
        stored = NOTHING if save.nbytes_stored is None else size(save.nbytes_stored)
        known = (NOTHING, NOTHING, stored, NOTHING, NOTHING, NOTHING)
    else:
        known = (
            seconds_text(one.seconds),
            seconds_text(one.blocked_seconds),
            size(one.nbytes),
            rate_text(one.nbytes_per_second),
            f"{one.retries}",
            f"{one.slowest_rank} of {one.ranks} in {page_text(one.slowest_phase)}",
        )
    return (step, _when(save.committed_unix), state_tags(save), *known, metric)
