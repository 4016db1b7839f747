"""Near tiers as texts, which `ls --near`, `watch`, `serve` and `report` show. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.near.status import WorkAtRisk
from ckpt.screens.terminal import counted, size
from ckpt.tools.near_tiers import TierView, work_at_risk
from ckpt.tools.report import ReportedSave, durable_risk, duration

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


def problems(views: Sequence[TierView]) -> list[str]:
    """What could not be read, each once."""
    return list(dict.fromkeys(view.problem for view in views if view.problem))
