"""The drawings are those of their script, can be read, and each is on a page with its words.

Method: the marks are read from the SVG files; widths are estimated by letters, generously.
"""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from docs.drawings import DRAWINGS, FOLDER, LETTER, ROOT, WIDTH, box
from examples.demo.timeline import DARK
from tests.docs.test_colours import contrast

SVG = "{http://www.w3.org/2000/svg}"


def marks(name: str, kind: str) -> list[ElementTree.Element]:
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot().findall(f"{SVG}{kind}")


def test_files_are_what_the_script_draws() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == DRAWINGS.keys() and len(DRAWINGS) == 10
    differing = [
        name
        for name, draw in DRAWINGS.items()
        if (FOLDER / f"{name}.svg").read_text(encoding="utf-8") != draw().svg()
    ]
    assert not differing, "run: python docs/drawings.py"


@pytest.mark.parametrize("name", DRAWINGS)
def test_all_text_is_on_the_canvas_and_lines_do_not_touch(name: str) -> None:
    height = DRAWINGS[name]().height
    spans = []
    for one in marks(name, "text"):
        width = len(one.text or "") * LETTER * 0.95
        left = (
            float(one.attrib["x"])
            - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.attrib["text-anchor"]] * width
        )
        base = float(one.attrib["y"])
        assert left >= 0 and left + width <= WIDTH and 12 <= base <= height - 4, one.text
        spans.append((base, left, left + width, one.text))
    touching = [
        (one[3], other[3])
        for n, one in enumerate(spans)
        for other in spans[:n]
        if abs(one[0] - other[0]) < 12 and one[1] < other[2] and other[1] < one[2]
    ]
    assert not touching


@pytest.mark.parametrize("name", DRAWINGS)
def test_text_has_contrast_on_light_and_dark(name: str) -> None:
    used = {one.attrib["fill"] for one in marks(name, "text")}
    assert used <= DARK.keys()  # so that it is seen in the dark, too
    assert all(contrast(color.replace("white", "#fff"), "#ffffff") >= 4.5 for color in used)


def test_text_that_is_wider_than_its_box_is_refused() -> None:
    box(0, 0, 100, 40, "short")
    with pytest.raises(AssertionError, match="wider than its box"):
        box(0, 0, 100, 40, "a text that is too long")


def test_each_drawing_is_on_one_page_with_its_words() -> None:
    shown = {}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for words, path in re.findall(r"!\[([^\]]*)\]\(([\w./]+)\)", page.read_text("utf-8")):
            target = (page.parent / path).resolve()
            assert target.exists(), (page, path)
            if target.parent == FOLDER:
                assert len(unescape(words)) > 20, (page, path)
                shown.setdefault(target.stem, []).append(page)
    assert shown.keys() == DRAWINGS.keys()
    assert all(len(pages) == 1 for pages in shown.values()), shown
