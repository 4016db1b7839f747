"""The demo as one picture: which jobs ran which steps, where one was killed, and the losses.

python -m examples.demo.timeline demo-out/timeline.json docs/timeline.svg
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 860, 150, 20
LANE, TOP, CURVES = 46, 34, 150
BLUE, GREEN, RED, ORANGE, GREY = "#3b6ea5", "#277a42", "#c0392b", "#97600a", "#6a6a6a"
PAPER, INK, LINE, SHADE = "white", "#222", "#e8e8e8", "#cccccc"
# What a reader sees who prefers dark pages.
DARK = {
    PAPER: "#1f2228",
    INK: "#d9dce1",
    LINE: "#343941",
    SHADE: "#565d68",
    GREY: "#9aa1ac",
    BLUE: "#6fa8e6",
    GREEN: "#5cc47f",
    RED: "#f0705f",
    ORANGE: "#e0a03c",
}


class Story(NamedTuple):
    """What happened in one run of the demo. Losses by step; `killed_in` is the step of the save
    that was killed, `latest` the one from which the next jobs resumed, `preempted` the last step
    before SIGTERM ended a job.
    """

    whole: dict[int, float]
    killed: dict[int, float]
    on_4: dict[int, float]
    on_2: dict[int, float]
    save_every: int
    killed_in: int
    latest: int
    preempted: int

    def to_json(self) -> str:
        """As a file beside the picture."""
        return json.dumps(self._asdict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Story:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        losses = {
            name: {int(step): loss for step, loss in value.items()}
            for name, value in fields.items()
            if isinstance(value, dict)
        }
        return cls(**{**fields, **losses})


def timeline(story: Story) -> str:
    """The picture, as one SVG file without a script or a font."""
    height = TOP + 3 * LANE + CURVES + 50
    marks = [*_lanes(story), *_curves(story, TOP + 3 * LANE + 18)]
    middle = (LEFT + WIDTH - RIGHT) // 2
    marks.append(_text(middle, height - 8, "training step", GREY, "middle"))
    title = "A training is killed in the middle of a save, and resumes on 4 ranks and on 2"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<title>{title}</title>\n'
        f"{dark_style()}\n"
        # Its own paper: the page that shows it may be of the other kind.
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


def dark_style() -> str:
    """The colours by another name each: style rules win over attributes."""
    rules = " ".join(
        f'[{attribute}="{light}"] {{ {attribute}: {dark} }}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def _lanes(story: Story) -> Iterator[str]:
    """One bar per job, with its saves on it."""
    end = max(story.whole)
    first_end = max(story.killed)
    resumed = story.latest + 1
    jobs = (
        ("4 ranks", [(1, first_end, BLUE)]),
        ("resumed on 4 ranks", [(resumed, end, GREEN)]),
        (
            "resumed on 2 ranks",
            [(resumed, story.preempted, ORANGE), (story.preempted, end, ORANGE)],
        ),
    )
    for lane, (name, bars) in enumerate(jobs):
        y = TOP + lane * LANE
        yield _text(LEFT - 10, y + 5, name, INK, "end")
        for start, stop, color in bars:
            x, width = _x(start - 1, end), _x(stop, end) - _x(start - 1, end) - 1
            yield (
                f'<rect x="{x:.1f}" y="{y - 7}" width="{width:.1f}" height="14" rx="2" '
                f'fill="{color}"/>'
            )
    for step in range(story.save_every, story.killed_in, story.save_every):
        yield f'<circle cx="{_x(step, end):.1f}" cy="{TOP}" r="5" fill="{PAPER}" stroke="{BLUE}"/>'
    x = _x(story.latest, end)
    yield _text(x, TOP - 13, f"saved: step {story.latest}", BLUE, "middle")
    yield (
        f'<path d="M{x:.1f} {TOP + 6} V{TOP + 2 * LANE - 8}" stroke="{GREEN}" '
        'stroke-dasharray="3 3" fill="none"/>'
    )
    x = _x(first_end, end)
    yield (
        f'<path d="M{x - 5:.1f} {TOP - 6} l12 12 m0 -12 l-12 12" stroke="{RED}" stroke-width="3"/>'
    )
    yield _text(x + 13, TOP + 5, f"SIGKILL while saving step {story.killed_in}", RED)
    yield _text(_x(story.latest, end) + 8, TOP + LANE + 22, "every loss bit-equal", GREEN)
    x = _x(story.preempted, end)
    y = TOP + 2 * LANE
    yield f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{PAPER}" stroke="{ORANGE}"/>'
    text = f"SIGTERM: saved step {story.preempted}, exit code 0; resumed"
    yield _text(WIDTH - RIGHT, y + 22, text, ORANGE, "end")


def _curves(story: Story, top: int) -> Iterator[str]:
    """The losses below, on the same steps."""
    end = max(story.whole)
    low, high = min(story.whole.values()), max(story.whole.values())

    def y(loss: float) -> float:
        return top + (CURVES - 10) * (high - loss) / (high - low)

    yield _text(LEFT - 10, top + 12, "loss", INK, "end")
    for loss in range(int(low) + 1, int(high) + 1):
        right = WIDTH - RIGHT
        yield f'<path d="M{LEFT} {y(loss):.1f} H{right}" stroke="{LINE}"/>'
        yield _text(LEFT - 10, y(loss) + 4, f"{loss}", GREY, "end")
    for run, color, width, dashes in (
        (story.whole, SHADE, 7, ""),
        (story.killed, BLUE, 2, ""),
        (story.on_4, GREEN, 2, ""),
        (story.on_2, ORANGE, 2, "5 5"),
    ):
        points = " ".join(f"{_x(step, end):.1f},{y(loss):.1f}" for step, loss in run.items())
        yield (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}"/>'
        )
    text = "grey: the same training, never interrupted"
    yield _text(WIDTH - RIGHT, top + 12, text, GREY, "end")
    for step in range(0, end + 1, story.save_every):
        yield _text(_x(step, end), top + CURVES + 12, f"{step}", GREY, "middle")


def _x(step: float, end: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / end


def _text(x: float, y: float, text: str, color: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(text)}</text>"


def main() -> None:
    """Draw the picture of a run."""
    source, target = map(Path, sys.argv[1:])
    target.write_text(timeline(Story.from_json(source.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
