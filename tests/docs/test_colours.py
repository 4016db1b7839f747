"""Text of the site and of the README's picture can be read in light and in dark.

Method: the contrast of WCAG 2 (relative luminance, at least 4.5 to 1 for text) is computed from the
colours that docs/site.css and the picture define.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.demo import timeline

CSS = (Path(__file__).resolve().parents[2] / "docs" / "site.css").read_text()
ROOTS = re.findall(r":root \{(.*?)\}", CSS, re.S)
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in ROOTS)
PAPERS = ("code-paper", "paper", "raised")
LINES = ("line",)  # no text is in them
BARS = ("bar",)  # under the theme's white


def luminance(color: str) -> float:
    """Relative luminance of `#rgb` or `#rrggbb`, 0 to 1."""
    digits = color.removeprefix("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])
def test_every_text_of_the_site_has_contrast(scheme: dict[str, str]) -> None:
    papers = [color for name, color in scheme.items() if name in PAPERS]
    texts = {name: color for name, color in scheme.items() if name not in PAPERS + LINES + BARS}
    assert papers and texts
    poor = {
        f"{name} on {paper}": round(contrast(color, paper), 2)
        for name, color in texts.items()
        for paper in papers
        if contrast(color, paper) < 4.5
    }
    assert not poor
    assert all(contrast("#ffffff", scheme[bar]) >= 4.5 for bar in BARS)


def test_the_picture_has_contrast_in_the_dark() -> None:
    paper = timeline.DARK[timeline.PAPER]
    for light, dark in timeline.DARK.items():
        if light not in (timeline.PAPER, timeline.LINE, timeline.SHADE):
            assert contrast(dark, paper) >= 4.5, light
