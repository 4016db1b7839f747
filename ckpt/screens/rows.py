"""Numbers of saves and near tiers as texts, for `ls --near`, `watch`, `serve`, `report`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from ckpt.near.status import WorkAtRisk
from ckpt.screens.terminal import counted, date, rate_text, seconds_text, size
from ckpt.telemetry.record import JobRecord
from ckpt.tools.near_tiers import TierView, work_at_risk
from ckpt.tools.report import Goodput, PerDay, ReportedSave, durable_risk, duration


class Chart(NamedTuple):
    """What a chart shows of each save, and in which words."""

    name: str
    title: str
    of_one: Callable[[ReportedSave], float | None]
    text: Callable[[float], str]
    is_from_zero: bool = True

    def of(self, saves: Sequence[ReportedSave]) -> list[float | None]:
        """The number of each save, None where it is not known."""
        return [self.of_one(save) for save in saves]

    def median(self, saves: Sequence[ReportedSave]) -> float | None:
        """Of all saves of which it is known."""
        known = [one for one in self.of(saves) if one is not None]
        return statistics.median(known) if known else None

    def scale(self, runs: Iterable[Sequence[ReportedSave]], newest: int = 0) -> tuple[float, float]:
        """Where the bars of the newest saves of several runs begin to rise, and where they end."""
        numbers = [one for saves in runs for one in self.of(saves[-newest:]) if one is not None]
        low = 0.0 if self.is_from_zero else min(numbers, default=0.0)
        high = max(numbers, default=0.0)
        # Never of no height: bars are divided by it.
        return low, high if high > low else low + (abs(low) or 1.0)


def _total(name: str) -> Callable[[ReportedSave], float | None]:
    return lambda save: None if save.totals is None else getattr(save.totals, name)


CHARTS = (
    Chart("blocked", "Training blocked", _total("blocked_seconds"), seconds_text),
    Chart("duration", "Duration, begin to commit", _total("seconds"), seconds_text),
    Chart("written", "Bytes written", _total("nbytes"), lambda number: size(int(number))),
    Chart("throughput", "Throughput", _total("nbytes_per_second"), rate_text),
)
# How good checkpoints are, by what the training says; the curve begins at the least.
METRIC = Chart("metric", "Metric", attrgetter("metric"), "{:.4g}".format, is_from_zero=False)


def charts_of(saves: Sequence[ReportedSave]) -> tuple[Chart, ...]:
    """Those that have something to show."""
    return (*CHARTS, METRIC) if any(one.metric is not None for one in saves) else CHARTS


TITLES = ("directory", "in", "newest step", "ranks here", "takes", "free")
QUIET_SECONDS = 30.0  # without a new status: the training has ended, or hangs


def risk_text(risk: WorkAtRisk) -> str:
    """`14 steps, 9 s`."""
    return f"{counted(risk.steps, 'step')}, {duration(risk.seconds)}"


def risks_text(views: Sequence[TierView], newest: ReportedSave | None) -> str:
    """What a failure would cost now, from either kind of checkpoint; "" where that is not known."""
    near, durable = work_at_risk(views), durable_risk(views, newest)
    parts = [] if near is None else [f"{risk_text(near)} since the newest near checkpoint"]
    parts += [] if durable is None else [f"{risk_text(durable)} since the newest durable one"]
    return f"work at risk: {'; '.join(parts)}" if parts else ""


def tier_row(view: TierView) -> tuple[str, ...]:
    """One tier, as `TITLES` says. Why one cannot be read is in `problems`."""
    if not view.host:
        return (view.path, "", "", "", "", "")
    newest = view.steps[0] if view.steps else None
    return (
        view.path,
        "memory" if view.is_in_memory else "disk",
        "none" if newest is None else f"{newest.step}",
        "" if newest is None else f"{newest.ranks_here} of {newest.ranks}",
        size(view.nbytes),
        size(view.free_nbytes),
    )


JOB_TITLES = ("job begun", "host", "ranks", "state", "step", "began with", "failed saves", "commit")


def job_row(job: JobRecord, now_unix: float) -> tuple[str, ...]:
    """One job, as `JOB_TITLES` says."""
    began = "nothing" if job.restored_step is None else f"step {job.restored_step}"
    if job.steps_lost is not None:
        lost = f"{counted(job.steps_lost, 'step')}, {duration(job.seconds_lost or 0.0)}"
        began += f", {lost} lost"
    # The cause is the text of an error, which may be a page long; `ckpt report` has all of it.
    state = job.state(now_unix) + (f": {job.cause[:40]}" if job.cause else "")
    commit = "-".join(part[:10] for part in job.commit.split("-"))
    counts = (f"{job.step}", began, f"{job.failed}", commit)
    return (date(job.begun_unix), job.host, f"{job.ranks}", state, *counts)


def goodput_text(goodput: Goodput | None) -> str:
    """`goodput 93 %: 4 % redone, 2 % saving, 1 % down`; "" where nothing is known."""
    if goodput is None or not (total := sum(goodput)):
        return ""
    parts = [(100 * seconds / total, name) for name, seconds in goodput._asdict().items()]
    (steps, _), *others = parts
    shown = ", ".join(f"{share:.0f} % {name}" for share, name in others if share >= 0.5)
    return f"goodput {steps:.0f} %" + (f": {shown}" if shown else "")


def per_day_text(day: PerDay) -> str:
    """`2.1 GiB saved, cost 0.35`; "" where nothing is known."""
    parts = [] if day.nbytes is None else [f"{size(int(day.nbytes))} saved"]
    return ", ".join(parts + ([] if day.cost is None else [f"cost {day.cost:.3g}"]))


def problems(views: Sequence[TierView]) -> list[str]:
    """What could not be read, each once."""
    return list(dict.fromkeys(view.problem for view in views if view.problem))
