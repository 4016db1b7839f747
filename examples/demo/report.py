"""The picture at the end: the loss curve, and which rank stored which part. One HTML file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from ckpt import Checkpoint
from ckpt.layout.kind import Kind
from ckpt.loading.contents import TensorInfo

Run: TypeAlias = dict[int, float]
Stored: TypeAlias = tuple[Checkpoint, list[TensorInfo]]

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
RUN_STYLES = {
    "uninterrupted": ("#bbbbbb", 6, "", "4 ranks, uninterrupted"),
    "killed": ("#4e79a7", 2, "", "4 ranks, killed in the middle of a save"),
    "4 ranks": ("#59a14f", 2, "", "resumed on 4 ranks: bit-equal"),
    "2 ranks": ("#e15759", 2, "6 4", "resumed on 2 ranks"),
}
EVENT_COLORS = ("#393", "#c00", "#a60")
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 360, 50, 40
BAR_MIN = 24  # so that the shares of small tensors are seen as well


def write_report(
    path: Path,
    runs: dict[str, Run],
    stored: Sequence[Stored],
    *,
    events: dict[int, str],
    happened: Sequence[tuple[str, int]],
) -> None:
    """Write the page. `stored` are checkpoints with the tensors to draw, `events` what happened at
    which step, `happened` what each event cost in steps.
    """
    rows = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{steps}</td></tr>" for what, steps in happened
    )
    story = "; ".join(f"step {step}: {event}" for step, event in sorted(events.items()))
    parts = "".join(
        f"<h2>Who stored what: step {checkpoint.step}, saved by {checkpoint.world_size} ranks</h2>"
        f"{_legend(checkpoint.world_size)}{_parts_chart(infos)}"
        for checkpoint, infos in stored
    )
    path.write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>A training that was killed while saving</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; color: #222; }}
svg text {{ font: 12px system-ui, sans-serif; fill: #444; }}
td, th {{ text-align: left; padding: .2em 1.5em .2em 0; }}
.key {{ display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; }}
</style></head><body>
<h1>A training that was killed while saving</h1>
<p>A byte-level transformer on the sources of Python's standard library. {story}.</p>
{_loss_chart(runs, events)}
{parts}
<h2>What was lost</h2>
<table><tr><th>what happened</th><th>steps to train again</th></tr>{rows}</table>
</body></html>
""",
        encoding="utf-8",
    )


def _loss_chart(runs: dict[str, Run], events: dict[int, str]) -> str:
    last = max(max(run) for run in runs.values())
    low = min(min(run.values()) for run in runs.values())
    high = max(max(run.values()) for run in runs.values())

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * step / last

    def y(loss: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (high - loss) / (high - low)

    marks = [
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#eee"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>'
        for loss in range(int(low) + 1, int(high) + 1)
    ]
    marks += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, 20)
    ]
    for name, (color, width, dashes, _) in RUN_STYLES.items():
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in runs[name].items())
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}" stroke-opacity="0.9"/>'
        )
    for line, (step, label) in enumerate(sorted(events.items())):
        color = EVENT_COLORS[line % len(EVENT_COLORS)]
        marks.append(
            f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="10" y2="{HEIGHT - BOTTOM}" '
            f'stroke="{color}" stroke-dasharray="3 3"/>'
            f'<text x="{x(step) + 5:.1f}" y="{24 + 18 * line}" '
            f'style="fill:{color}">{label} (step {step})</text>'
        )
    keys = " ".join(
        f'<span class="key" style="background:{color}"></span>{label}'
        for color, _, _, label in RUN_STYLES.values()
    )
    middle = (LEFT + WIDTH) // 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(marks)}</svg><p>{keys}</p>'


def _parts_chart(infos: Sequence[TensorInfo]) -> str:
    """One bar per parameter, as long as the tensor, colored by the rank that stored each part."""
    shown = [info for info in infos if info.kind is Kind.PARAMETER and info.parts]
    longest = max(info.nbytes for info in shown)
    left, row = 260, 16
    marks = []
    for number, info in enumerate(shown):
        top = number * row
        label = html.escape(info.fqn)
        marks.append(f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{label}</text>')
        x = float(left)
        bar = max((WIDTH - left) * info.nbytes / longest, BAR_MIN)
        for part in info.parts:
            wide = bar * part.nbytes / info.nbytes
            rank = _rank_of(part.file)
            title = html.escape(f"rank {rank}: {part.nbytes} bytes in {part.file}, {part.region}")
            marks.append(
                f'<rect x="{x:.2f}" y="{top + 2}" width="{wide:.2f}" height="{row - 4}" '
                f'fill="{RANK_COLORS[rank % len(RANK_COLORS)]}"><title>{title}</title></rect>'
            )
            x += wide
    return f'<svg viewBox="0 0 {WIDTH} {len(shown) * row}">{"".join(marks)}</svg>'


def _rank_of(file: str) -> int:
    match = re.match(r"rank(\d+)-", file)
    return int(match[1]) if match else 0


def _legend(ranks: int) -> str:
    keys = (
        f'<span class="key" style="background:{RANK_COLORS[rank % len(RANK_COLORS)]}"></span>'
        f"rank {rank}"
        for rank in range(ranks)
    )
    return f"<p>{' '.join(keys)}</p>"
