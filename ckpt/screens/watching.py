"""`ckpt watch`: follows a run in the terminal. It needs no torch.

A frame is lines of styled text, made of a run's state and a size alone. Its texts come from
storage: each is made visible before it is cut to the width of a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ckpt.errors import CheckpointError
from ckpt.screens import rows
from ckpt.screens.following import STEP_SECONDS, Ending, Following, Versions, versions_of
from ckpt.screens.terminal import (
    age,
    as_json,
    counted,
    date,
    rate_text,
    screen_width,
    seconds_text,
    show_json,
    size,
)
from ckpt.screens.visible import below, visible
from ckpt.telemetry.record import SaveTotals, Telemetry
from ckpt.tools.cost import Prices, per_day
from ckpt.tools.near_tiers import newest_status_of
from ckpt.tools.polling import RunPoller, RunState
from ckpt.tools.report import (
    ReportedSave,
    TrainingRun,
    busiest_ranks,
    duration,
    longest_phases,
    near_report,
)
from storage import StoreLike

TICK_SECONDS = 1.0  # between frames: ages grow, and the terminal may have another size
ONCE_HEIGHT = 60  # lines of the frame of --once
NOTICES_MAX = 4  # of the worst; `ckpt report` has all
BUSY_RANKS = 3
JOBS_SHOWN = 3
LABEL = 11  # columns of the name of a chart or a phase
STYLES = {"bad": "bold red", "warning": "yellow", "note": "dim"}

Line = list[tuple[str, str]]  # texts, each with a style of rich


def _text(line: Line) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for words, style in line:
        text.append(words, style)
    return text


def watch_once(
    url: StoreLike,
    near: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    *,
    as_json: bool,
    prices: Prices,
) -> None:
    """`ckpt watch --once`."""
    poller = RunPoller(url, storage_options=storage_options, near=near)
    try:
        state = poller.poll()
    finally:
        poller.close()
    # Who watches waits for a store that is away; a script that looks once has to learn of it.
    if state.availability == "away":
        raise CheckpointError(state.problem)
    if as_json:
        show_json({"schema": "ckpt.watch", "version": 1, **_state_json(state, prices)})
        return
    width, marks = screen_width(), marks_of(sys.stdout.encoding)
    how: Any = {"width": min(width, 120), "height": ONCE_HEIGHT, "marks": marks}
    lines = frame_of(state, time.time(), prices=prices, **how)
    # Below the stream that shows codes: rich writes some on purpose, and texts were made visible.
    console = Console(file=below(sys.stdout), width=width)
    for line in lines:
        console.print(_text(line))


def _wait(following: Following, ending: Ending, seen: Versions) -> None:
    """Until something is of another version than in `seen`, or for a tick."""
    # In short steps: a signal leaves a mark only, and somebody has to look at it.
    deadline = time.monotonic() + TICK_SECONDS
    ending.check()
    while versions_of(following.wait(seen, STEP_SECONDS)) == seen and time.monotonic() < deadline:
        ending.check()


def draw_frames(following: Following, ending: Ending, prices: Prices) -> None:
    """A frame in a page of the terminal's own, drawn anew for each change, until it is left."""
    marks, console = marks_of(sys.stdout.encoding), Console(file=below(sys.stdout))
    # Lines of the log would be written across the page, which says the same.
    for name in ("ckpt", "storage"):
        logging.getLogger(name).addHandler(logging.NullHandler())

    def drawn() -> Group:
        width, height = console.size  # which may be another one at each frame
        (state,) = following.states
        lines = frame_of(state, time.time(), width=width, height=height, marks=marks, prices=prices)
        return Group(*map(_text, lines))

    with Live(
        get_renderable=drawn,
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        while True:
            seen = versions_of(following.states)
            live.refresh()
            _wait(following, ending, seen)


def print_lines(following: Following, ending: Ending, *, as_json: bool) -> None:
    """A line for each thing that happens, until it is left."""
    before: RunState | None = None
    while True:
        (state,) = following.states
        for happening in happenings(before, state):
            line = f"{date(happening.time_unix)}  {happening.text}"
            own = json.dumps(happening._asdict(), allow_nan=False) if as_json else line
            print(own, flush=True)
        before = state
        _wait(following, ending, (state.version,))


def _state_json(state: RunState, prices: Prices) -> dict[str, Any]:
    return {
        "url": state.run.url,
        "availability": state.availability,
        "problem": state.problem,
        "sessions": state.run.sessions,
        "is_whole_history": state.run.is_whole_history,
        "saves": as_json(state.run.saves),
        "failed_saves": state.run.failed_saves,
        "failures": as_json(state.run.failures),
        "jobs": [{"state": job.state(time.time()), **as_json(job)} for job in state.run.jobs],
        "goodput": state.run.goodput and state.run.goodput._asdict(),
        "per_day": as_json(per_day(state.run, prices)),
        "near": as_json(near_report(state.near, state.run.live[-1] if state.run.live else None)),
        "notices": as_json(state.run.notices(time.time())),
    }


# A frame ------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The characters of charts, as the terminal can show them."""

    live: str
    retired: str
    failed: str
    steps: str  # from little to much


DRAWN = Marks("●", "○", "✗", "▁▂▃▄▅▆▇█")
PLAIN = Marks("o", ".", "x", "_.-=+*#@")


def marks_of(encoding: str | None) -> Marks:
    """What a stream of this encoding can show; one without takes any text."""
    # Tried, not looked up: the locale of a container is often C, whose encoding is ASCII.
    try:
        "".join(DRAWN).encode(encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return PLAIN
    return DRAWN


def frame_of(
    state: RunState,
    now_unix: float,
    *,
    width: int,
    height: int,
    marks: Marks = DRAWN,
    prices: Prices | None = None,
) -> list[Line]:
    """At most `height` lines; what does not fit is left out from the end, the oldest saves first.

    Lines may be wider than `width`: who prints them cuts them.
    """
    run = state.run
    lines = _head(state, now_unix) + _near(state, now_unix)
    jobs = run.jobs[-JOBS_SHOWN:]
    cells = [rows.job_row(job, now_unix) for job in jobs]
    styles = ["dim", *("red" if job.failed else "" for job in jobs)]
    lines += _aligned(rows.JOB_TITLES, cells, (2, 4, 6), styles) if jobs else []
    goodput = rows.goodput_text(run.goodput)
    lines += [[(goodput, "bold")]] if goodput else []
    if not run.saves and not run.failures:
        return lines[:height]
    lines += _numbers(run, now_unix, prices or Prices()) if run.saves else []
    lines += _notices(run, now_unix)
    # A run of failures alone has notices, and nothing to draw.
    if not run.saves:
        return lines[:height]
    lines += _charts(run, max(width - LABEL - 24, 10), marks)
    if run.measured.full:
        lines += _phases(run.measured.full[-1], max(width - LABEL - 24, 10), marks)
    room = height - len(lines) - 2
    if room > 0:
        lines += [[], *_table(run.saves[: -room - 1 : -1])]
    return lines[:height]


def _head(state: RunState, now_unix: float) -> list[Line]:
    lines: list[Line] = [[(visible(state.run.url), "bold")]]
    since = age(now_unix - state.since_unix)
    if state.availability == "away":
        lines.append([(f"not to be read since {since.removesuffix(' ago')}: ", "bold red")])
        lines[-1].append((visible(state.problem), "red"))
    elif state.availability == "waiting":
        lines.append([("nothing was saved here yet; waiting for the first save", "yellow")])
        if state.problem:
            lines.append([(visible(state.problem), "dim")])
    elif not state.run.saves:
        lines.append([("a job has begun here; waiting for its first save", "yellow")])
    return lines


def _near(state: RunState, now_unix: float) -> list[Line]:
    """The tiers of hosts, and what a failure would cost now."""
    if not state.near:
        return []
    run, lines = state.run, list[Line]()
    if (status := newest_status_of(state.near)) is None:
        lines.append([("near: no host says how far the training is", "yellow")])
    else:
        silent = now_unix - status.time_unix
        words = f"near: step {status.step} done, noted {age(silent)}"
        lines.append([(words, "yellow" if silent > rows.QUIET_SECONDS else "bold")])
        risks = rows.risks_text(state.near, run.live[-1] if run.live else None)
        lines.append([(visible(risks), "bold")])
    cells = [rows.tier_row(view) for view in state.near]
    lines += _aligned(rows.TITLES, cells, (2, 3, 4, 5), ["dim", *[""] * len(cells)])
    lines += [[(visible(text), "yellow")] for text in rows.problems(state.near)]
    return [*lines, []]


def _aligned(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    styles: Sequence[str],
) -> list[Line]:
    """A table; texts come from anywhere. The columns `right` are numbers, `styles` are of lines."""
    cells = [[visible(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if index in right else "<" for index in range(len(widths))]
    lines = []
    for row, style in zip(cells, styles, strict=True):
        each = zip(row, sides, widths, strict=True)
        padded = "  ".join(f"{cell:{side}{width}}" for cell, side, width in each)
        lines.append([(padded.rstrip(), style)])
    return lines


def _numbers(run: TrainingRun, now_unix: float, prices: Prices) -> list[Line]:
    live, totals = run.live, run.totals
    words = "none of its checkpoints exists any more"
    if live:
        saved = age(now_unix - live[-1].committed_unix)
        nbytes = sum(save.nbytes_stored or 0 for save in live)
        words = f"step {live[-1].step}, saved {saved}"
        words += f" | {len(live)} live of {counted(len(run.saves), 'save')}, {size(nbytes)}"
    lines: list[Line] = [[(words, "bold")]]
    if day := rows.per_day_text(per_day(run, prices)):
        lines.append([(f"a day: {day}", "")])
    if totals:
        retries = sum(one.retries for one in totals)
        shown = [one for one in rows.CHARTS if one.name != "written"]
        medians = ", ".join(f"{one.name} {one.text(one.median(run.saves) or 0.0)}" for one in shown)
        others = counted(retries, "repeated request"), counted(run.failed_saves, "failed save")
        lines.append([(f"median: {medians} | {', '.join(others)}", "")])
    return lines


def _notices(run: TrainingRun, now_unix: float) -> list[Line]:
    notices = [notice for notice in run.notices(now_unix) if notice.severity != "note"]
    lines: list[Line] = [
        [(f"{notice.severity}: ", STYLES[notice.severity]), (visible(notice.text), "")]
        for notice in notices[:NOTICES_MAX]
    ]
    if len(notices) > NOTICES_MAX:
        lines.append([(f"and {len(notices) - NOTICES_MAX} more; `ckpt report` has all", "dim")])
    return [[], *lines] if lines else []


# Charts -------------------------------------------------------------------------------------------


def _charts(run: TrainingRun, columns: int, marks: Marks) -> list[Line]:
    """A column for each of the newest saves, and in the first row for each that failed."""
    saves = run.saves[-columns:]
    begun = saves[0].committed_unix
    happened = [(save.committed_unix, save.is_live, False) for save in saves]
    failed = [one for one in run.failures if one.time_unix >= begun]
    happened += [(one.time_unix, False, True) for one in failed]
    row: Line = [(f"{'saves':{LABEL}}", "dim")]
    for _, is_live, is_failure in sorted(happened)[-columns:]:
        if is_failure:
            row.append((marks.failed, "bold red"))
        else:
            row.append((marks.live, "green") if is_live else (marks.retired, "dim"))
    row.append((f"  {marks.live} live {marks.retired} retired {marks.failed} failed", "dim"))
    lines: list[Line] = [[], row]
    return lines + [
        line for what in (*rows.CHARTS[:3], rows.METRIC) for line in _chart(what, saves, marks)
    ]


def _chart(what: rows.Chart, saves: Sequence[ReportedSave], marks: Marks) -> list[Line]:
    values = what.of(saves)
    known = [value for value in values if value is not None]
    if not known:
        return []
    low, high = what.scale([saves])
    rise = (len(marks.steps) - 1) / (high - low)
    places = [None if value is None else round(rise * (value - low)) for value in values]
    drawn = "".join(" " if place is None else marks.steps[place] for place in places)
    about = f"  last {what.text(known[-1])}, most {what.text(max(known))}"
    return [[(f"{what.name:{LABEL}}", "dim"), (drawn, "cyan"), (about, "dim")]]


def _phases(telemetry: Telemetry, columns: int, marks: Marks) -> list[Line]:
    totals = telemetry.totals
    words = f"step {totals.step} took {seconds_text(totals.seconds)} on "
    lines: list[Line] = [[], [(words + counted(totals.ranks, "rank"), "bold")]]
    busiest = busiest_ranks(telemetry, BUSY_RANKS)
    busy = ", ".join(f"{rank} ({seconds_text(seconds)})" for rank, seconds in busiest)
    lines[-1].append((f"; longest at work: rank {busy}" * bool(busy), ""))
    phases = longest_phases(telemetry)
    longest = max((one.seconds for one in phases), default=0.0) or 1.0
    for one in phases:
        bar = marks.steps[-1] * round(columns * one.seconds / longest)
        where = f"{seconds_text(one.seconds):>8}  rank {one.rank:<6} "
        name = visible(one.phase)[: LABEL - 1]
        lines.append([(f"{name:{LABEL}}", "dim"), (where, ""), (bar, "cyan")])
    return lines


# The table ----------------------------------------------------------------------------------------


def _table(saves: Sequence[ReportedSave]) -> list[Line]:
    titles = ("step", "committed", "state", "blocked", "duration", "written", "rate", "slowest")
    styles = ["bold", *("" if save.is_live else "dim" for save in saves)]
    return _aligned(titles, [_row(save) for save in saves], (0, 3, 4, 5, 6), styles)


def _row(save: ReportedSave) -> tuple[str, ...]:
    words = ["live"] if save.is_live else ["retired"]
    words += ["pinned"] * save.pinned + ["verified"] * save.verified
    words += [] if save.metric is None else [f"metric {save.metric:.4g}"]
    stored = "" if save.nbytes_stored is None else size(save.nbytes_stored)
    known = ("", "", stored, "", "")
    if (totals := save.totals) is not None:
        known = (
            seconds_text(totals.blocked_seconds),
            seconds_text(totals.seconds),
            size(totals.nbytes),
            rate_text(totals.nbytes_per_second),
            f"rank {totals.slowest_rank}, {visible(totals.slowest_phase)}",
        )
    return (f"{save.step}", date(save.committed_unix), " ".join(words), *known)


# Lines --------------------------------------------------------------------------------------------


class Happening(NamedTuple):
    """Something that has happened to a run, for who reads lines."""

    kind: str
    time_unix: float
    step: int | None
    text: str


def happenings(before: RunState | None, after: RunState) -> list[Happening]:
    """What has happened between two looks, in the order of time; at the first, how things are."""
    if before is None:
        news = [_summary(after)]
    else:
        news = [*_of_saves(before.run, after.run), *_of_failures(before.run, after.run)]
        news += _of_near(before, after)
        # Of one moment, what was saved comes before what was retired for it.
        news.sort(key=lambda one: (one.time_unix, one.kind == "retired"))
    if before is None or before.availability != after.availability:
        news += _of_availability(before, after)
    return news


def _summary(state: RunState) -> Happening:
    live = state.run.live
    text = f"{state.run.url}: {counted(len(live), 'checkpoint')}"
    if not live:
        return Happening("begun", state.since_unix, None, text)
    newest = live[-1]
    text += f", the newest is step {newest.step}, saved {date(newest.committed_unix)}"
    return Happening("begun", newest.committed_unix, newest.step, text)


def _of_saves(before: TrainingRun, after: TrainingRun) -> list[Happening]:
    known = {save.attempt: save for save in before.saves}
    news = []
    for save in after.saves:
        if (old := known.get(save.attempt)) is None:
            nbytes = "" if save.nbytes_stored is None else f", {size(save.nbytes_stored)}"
            metric = "" if save.metric is None else f", metric {save.metric:.4g}"
            text = f"saved step {save.step}{nbytes}{metric}"
            news.append(Happening("saved", save.committed_unix, save.step, text))
        if save.totals is not None and (old is None or old.totals is None):
            text = f"step {save.step} took {_totals_text(save.totals)}"
            news.append(Happening("measured", save.committed_unix, save.step, text))
        if not save.is_live and (old is None or old.is_live):
            when = save.committed_unix if save.retired_unix is None else save.retired_unix
            news.append(Happening("retired", when, save.step, f"retired step {save.step}"))
        for word in ("pinned", "verified"):
            if getattr(save, word) and not (old is not None and getattr(old, word)):
                text = f"{word} step {save.step}"
                news.append(Happening(word, save.committed_unix, save.step, text))
    return news


def _totals_text(totals: SaveTotals) -> str:
    return (
        f"{seconds_text(totals.seconds)}: training blocked {seconds_text(totals.blocked_seconds)}, "
        f"{size(totals.nbytes)} at {rate_text(totals.nbytes_per_second)}, "
        f"slowest rank {totals.slowest_rank} of {totals.ranks} "
        f"({totals.slowest_phase} {seconds_text(totals.slowest_seconds)})"
    )


def _of_failures(before: TrainingRun, after: TrainingRun) -> list[Happening]:
    # By value: a job keeps its newest failures only, so a count could stay the same.
    known = set(before.failures)
    return [
        Happening("failed", one.time_unix, one.step, f"failed to save step {one.step}: {one.error}")
        for one in after.failures
        if one not in known
    ]


def _of_near(before: RunState, after: RunState) -> list[Happening]:
    """That there is a newer near checkpoint: one line a look, of however many."""
    old, new = newest_status_of(before.near), newest_status_of(after.near)
    if new is None or new.near_step < 0:
        return []
    if old is not None and (old.epoch, old.near_step) == (new.epoch, new.near_step):
        return []
    risks = rows.risks_text(after.near, after.run.live[-1] if after.run.live else None)
    text = f"near checkpoint of step {new.near_step}; {risks}"
    return [Happening("near", new.time_unix, new.near_step, text)]


def _of_availability(before: RunState | None, after: RunState) -> list[Happening]:
    if after.availability == "away":
        text = f"cannot be read: {after.problem}"
    elif after.availability == "waiting":
        text = "nothing was saved here yet; waiting for the first save"
    elif before is not None and before.availability == "away":
        text = f"can be read again, after {duration(after.since_unix - before.since_unix)}"
    else:
        return []
    return [Happening(after.availability, after.since_unix, None, text)]
