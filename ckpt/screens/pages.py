"""Pages of HTML, made from the templates in this folder: report, what `ckpt serve` shows, the map.

Whatever a template shows is escaped, and control characters in it are shown as codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from ckpt.screens import rows, terminal
from ckpt.screens.visible import visible
from ckpt.service.retention import EVERYTHING, KeepAll, KeepRule, RetentionPlan, plan_retention
from ckpt.telemetry.record import SaveFailure, Telemetry
from ckpt.tools.cost import Prices, per_day
from ckpt.tools.near_tiers import newest_status_of
from ckpt.tools.polling import RunState
from ckpt.tools.report import PerDay, Report, ReportedSave, busiest_ranks, duration

RANKS_MAX = 128  # in the heat map: those that were at work longest
NARROW = 23  # bars that have a width of their own; more share the room that there is
HEATS = 10  # shades of a heat map
BARS_MAX = 200  # newest saves of a run in a chart
LINKED_MAX = 30  # newest saves of a table that are links: who tabs must come through
KEPT_MAX = 100  # checkpoints of which it is shown why they are kept

NO_PRICES = Prices()

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


class Heat(NamedTuple):
    """Of one save the ranks to show and the longest time of theirs; and the phase that took longer
    than any rank's own work, which is the coordinator's: "" where there is none.
    """

    ranks: list[int]
    longest_us: int
    phase: str
    rank: int
    took_us: int


def _heat_of(telemetry: Telemetry) -> Heat:
    work = [sum(took) for took in telemetry.took_us]
    # Those that were at work longest are chosen, and shown in the order of ranks: neighbours are on
    # one host, and a slow host is a stripe.
    ranks = sorted(sorted(range(len(work)), key=lambda rank: -work[rank])[:RANKS_MAX])
    longest = max((took for rank in ranks for took in telemetry.took_us[rank]), default=0) or 1
    each = (
        (took, rank, phase)
        for rank, row in enumerate(telemetry.took_us)
        for phase, took in zip(telemetry.phases, row, strict=True)
    )
    took, rank, phase = max((one for one in each if one[2] != "wait"), default=(0, 0, ""))
    is_longer = took > 1e6 * telemetry.totals.slowest_seconds * 1.05
    return Heat(ranks, longest, phase if is_longer else "", rank, took)


class Axis(NamedTuple):
    """Where a save is on it, from it and the first save of its run, and how that is written."""

    place: Callable[[ReportedSave, ReportedSave], float]
    text: Callable[[float], str]


# What charts of several runs may share, besides the order of saves.
AXES = {
    "step": Axis(lambda save, _: save.step, "{:.0f}".format),
    "time": Axis(lambda save, _: save.committed_unix, terminal.date),
    "since the first save": Axis(
        lambda save, first: save.committed_unix - first.committed_unix, duration
    ),
}


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("ckpt.screens", "."),
        # Names of tensors, hosts and errors come from storage, where others may have written them.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A wrong name in a template is an error, and not an empty cell.
        undefined=StrictUndefined,
        # Before it escapes, and not what is HTML already: line breaks of templates are theirs.
        finalize=lambda one: one if hasattr(one, "__html__") else visible(f"{one}"),
    )
    # What templates may call: all that makes texts, and a few more.
    texts = {**vars(terminal), **vars(rows)}
    made.globals |= {name: one for name, one in texts.items() if not name.startswith("_")}
    made.globals |= {"zip": zip, "heat_of": _heat_of}
    functions: tuple[Any, ...] = facts_of_day, busiest_ranks, newest_status_of
    made.globals |= {one.__name__: one for one in functions}
    made.globals |= {"axes": AXES, "narrow": NARROW, "heats": HEATS, "bars_max": BARS_MAX}
    made.globals |= {"titles": SECTIONS, "linked_max": LINKED_MAX}
    return made


def pieces_of(template: str, **values: Any) -> Iterator[str]:
    """What a template makes of `values`, in pieces."""
    return _templates().get_template(template).generate(**values)


def facts_of_day(day: PerDay) -> list[tuple[str, str]]:
    """What is shown of a day; nothing where nothing is known."""
    return [("a day", text)] if (text := rows.per_day_text(day)) else []


def report_page(report: Report) -> Iterator[str]:
    """The page of `ckpt report`, in pieces."""
    return pieces_of("report.html", report=report)


# What `ckpt serve` shows ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageChoice:
    """What somebody has chosen to look at: a run, by its number, and one of its saves; "" stands
    for the newest that was measured. `axis` is one of `AXES`, or "" for the order of saves.
    """

    run: int = 0
    attempt: str = ""
    axis: str = ""

    def link(self, run: int, attempt: str = "", axis: str | None = None) -> str:
        """The address of the page with another choice."""
        axis = self.axis if axis is None else axis
        chosen = {"run": run, "save": attempt, "axis": axis}
        return f"/?{urlencode({name: one for name, one in chosen.items() if one != ''})}"

    def links_of(self, run: int) -> Callable[[str], str]:
        """The addresses of the saves of a run."""
        return partial(self.link, run)


class Timeline(NamedTuple):
    """From the first to the last save that is shown; its width is 1000."""

    begin: float
    end: float

    @property
    def scale(self) -> float:
        """Of a second."""
        return 1000 / max(self.end - self.begin, 1e-3)

    def x(self, unix: float) -> float:
        """Where a moment is."""
        return (unix - self.begin) * self.scale


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
    prices: Prices = NO_PRICES

    def facts_of(self, state: RunState) -> list[tuple[str, str]]:
        """What a day of a run is, in the same prices for all runs."""
        return facts_of_day(per_day(state.run, self.prices))

    @property
    def chosen(self) -> RunState:
        """The run to look at."""
        return self.states[self.choice.run]

    @property
    def save(self) -> ReportedSave | None:
        """The save to look at."""
        run = self.chosen.run
        measured = {one.totals.attempt for one in run.measured.full}
        newest = (one for one in reversed(run.saves) if one.attempt in measured and one.is_live)
        default = next(newest, run.saves[-1] if run.saves else None)
        return next((one for one in run.saves if one.attempt == self.choice.attempt), default)

    @property
    def labels(self) -> list[str]:
        """Urls, without what several have in common before their last names."""
        urls = [state.run.url for state in self.states]
        if len({*urls}) < 2:
            return urls
        names = [url.split("/") for url in urls]
        folders = [one[:-1] for one in names]
        same = takewhile(lambda column: len({*column}) == 1, zip(*folders, strict=False))
        common = sum(1 for _ in same)
        return ["/".join(one[common:]) for one in names]

    def label_of(self, state: RunState) -> str:
        """The label of a run."""
        return self.labels[self.states.index(state)]

    @property
    def measured(self) -> list[RunState]:
        """Runs whose newest saves have numbers."""
        return [one for one in self.states if any(s.totals for s in one.run.saves[-BARS_MAX:])]

    def places(self, state: RunState) -> tuple[list[float], list[str]] | None:
        """Where the newest saves of a run are on the chosen axis of all runs, from 0 to 1, and what
        its ends and its middle are; None where saves stand one after the other.
        """
        if self.choice.axis not in AXES:
            return None
        axis, runs = AXES[self.choice.axis], [one.run.saves for one in self.measured]
        places = [[axis.place(save, saves[0]) for save in saves[-BARS_MAX:]] for saves in runs]
        low, high = min(map(min, places)), max(map(max, places))
        own = places[self.measured.index(state)]
        middle = (low + high) / 2
        shares = [(one - low) / (high - low or 1) for one in own]
        return shares, [axis.text(one) for one in (low, middle, high)]

    @property
    def timeline(self) -> Timeline | None:
        """Of all runs together; None before the first save."""
        shown = [one.run.saves[-BARS_MAX:] for one in self.states if one.run.saves]
        begins, ends = ([saves[end].committed_unix for saves in shown] for end in (0, -1))
        return Timeline(min(begins), max(ends)) if shown else None

    @property
    def plan(self) -> RetentionPlan:
        """What the rule would keep of the run."""
        rule = KeepAll() if self.rule is None else self.rule
        return plan_retention(self.chosen.entries, rule, now_unix=self.now_unix)

    @property
    def verdicts(self) -> Iterator[tuple[Any, str]]:
        """The newest checkpoints, each with why it is kept or not."""
        plan = self.plan
        both = [*((one, True) for one in plan.keep), *((one, False) for one in plan.retire)]
        for verdict, stays in sorted(both, key=lambda pair: -pair[0].entry.slot)[:KEPT_MAX]:
            reasons = [one for one in verdict.reasons if self.rule is not None or one != EVERYTHING]
            why = "; ".join(reasons) or "only its training's rule"
            is_kept = stays or self.rule is None
            yield verdict.entry, why if is_kept else f"would be retired: {why}"

    @property
    def retired(self) -> list[ReportedSave]:
        """Saves of the run that exist no more, the last retired first."""
        gone = [save for save in self.chosen.run.saves if not save.is_live]
        return sorted(gone, key=lambda save: save.retired_unix or 0.0)[::-1]

    @property
    def failures(self) -> list[tuple[SaveFailure, str]]:
        """Those of all runs with their labels, the newest first."""
        each = zip(self.states, self.labels, strict=True)
        failures = [(failure, label) for state, label in each for failure in state.run.failures]
        return sorted(failures, key=lambda pair: -pair[0].time_unix)


def serve_page(look: PageMatter, sections: Mapping[str, str], seen: str) -> str:
    """The whole page around its sections; `seen` is what its script begins with."""
    return str(_macro("page")(look, sections, seen))


def sections_of(look: PageMatter) -> dict[str, str]:
    """The inside of each section, by its id."""
    return {name: str(_macro(name)(look)) for name in SECTIONS}


def _macro(name: str) -> Callable[..., object]:
    made: Callable[..., object] = getattr(_templates().get_template("serve.html").module, name)
    return made
