"""The drawings of the documents: `python docs/drawings.py` writes docs/drawings/*.svg.

Each is a function that returns marks, on a canvas that is WIDTH wide. tests/docs/test_drawings.py
compares the files with what is drawn here, and looks for text that leaves its box.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.demo.timeline import (  # noqa: E402
    BLUE,
    GREEN,
    GREY,
    INK,
    LINE,
    ORANGE,
    PAPER,
    RED,
    SHADE,
    dark_style,
)

WIDTH, FOLDER = 860, ROOT / "docs" / "drawings"
LETTER = 7.0  # the widest average of a letter at 13 pixels, in the fonts that are likely


class Drawing(NamedTuple):
    """A title for who cannot see it, a height in pixels, and the marks."""

    title: str
    height: int
    marks: list[str]

    def svg(self) -> str:
        """As one file without a script or a font."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'font-family="system-ui, sans-serif" font-size="13">\n<title>{self.title}</title>\n'
            f'{dark_style()}\n<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" '
            f'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" '
            f'fill="{GREY}"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self.height}" fill="{PAPER}"/>\n'
            + "\n".join(self.marks)
            + "\n</svg>\n"
        )


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start") -> str:
    """One line of text. `y` is its base line."""
    place = f'x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(words)}</text>"


def box(
    x: float, y: float, width: float, height: float, words: str = "", color: str = INK
) -> list[str]:
    """A frame with lines of text in its middle, separated by newlines."""
    lines = words.split("\n") if words else []
    assert not lines or max(map(len, lines)) * LETTER <= width, f"{words!r} is wider than its box"
    first = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{PAPER}" '
        f'stroke="{color}" stroke-width="1.5"/>',
        *(text(x + width / 2, first + 17 * n, one, color, "middle") for n, one in enumerate(lines)),
    ]


def bar(x: float, y: float, width: float, color: str, words: str = "") -> list[str]:
    """A piece of time, or of a tensor, 22 high; `words` below it."""
    mark = (
        f'<rect x="{x:g}" y="{y:g}" width="{width - 1:g}" height="22" rx="2" fill="{color}" '
        f'stroke="{PAPER}"/>'
    )
    return [mark, text(x + width / 2, y + 38, words, color, "middle")] if words else [mark]


def arrow(
    x: float, y: float, to_x: float, to_y: float, words: str = "", dashed: bool = False
) -> list[str]:
    """A straight arrow, with words above its middle."""
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    marks = [
        f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{GREY}" stroke-width="1.5" '
        f'fill="none"{dashes} marker-end="url(#end)"/>'
    ]
    if words:
        marks.append(text((x + to_x) / 2, (y + to_y) / 2 - 6, words, GREY, "middle"))
    return marks


def line(x: float, y: float, to_x: float, to_y: float, color: str = LINE) -> str:
    """A plain line."""
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{color}" stroke-width="1.5"/>'


def note(x: float, y: float, *lines: str) -> list[str]:
    """What the marks do not say, below or next to them."""
    return [text(x, y + 18 * n, one, GREY) for n, one in enumerate(lines)]


def save() -> Drawing:
    """The life of one save, from the call to the commit."""
    marks = []
    for row, name in enumerate(("rank 0", "rank 1", "rank 2", "store")):
        y = 50 + 56 * row
        marks += [text(14, y + 16, name), line(70, y + 11, 840, y + 11)]
    for x, words in (
        (130, "stage"),
        (280, "write files"),
        (450, "parts"),
        (600, "manifest"),
        (740, "commit"),
    ):
        marks.append(text(x, 26, words, GREY, "middle"))
    for row in range(3):
        y = 50 + 56 * row
        marks += [*bar(90, y, 80, ORANGE), *bar(180, y, 200, BLUE)]
        marks += arrow(280, y + 24, 280, 212, "", dashed=True)
    marks += [*arrow(390, 116, 440, 76), *arrow(390, 172, 475, 76)]
    marks += [*bar(420, 50, 100, SHADE), *bar(540, 50, 120, BLUE), *bar(690, 50, 90, GREEN)]
    marks += [
        *arrow(600, 74, 600, 212, "", dashed=True),
        *arrow(735, 74, 735, 212, "", dashed=True),
    ]
    marks += [
        text(280, 250, "data files, checksummed", BLUE, "middle"),
        text(600, 250, "MANIFEST", BLUE, "middle"),
        text(735, 250, "log record", GREEN, "middle"),
        text(130, 250, "training waits", ORANGE, "middle"),
        text(735, 272, "from here on it exists", GREEN, "middle"),
    ]
    return Drawing("A save: copy, write, join what was written, publish, commit", 290, marks)


def root() -> Drawing:
    """What lies below a root, and what names what."""
    marks = [
        *box(20, 20, 150, 44, "FORMAT\nidentity"),
        *box(20, 90, 150, 44, "log/0\nCLAIM"),
        *box(200, 90, 150, 44, "log/1\nCOMMIT step 20", GREEN),
        *box(380, 90, 150, 44, "log/2\nCOMMIT step 40", GREEN),
        *box(560, 90, 150, 44, "log/3\nRETIRE step 20", RED),
        *arrow(380, 112, 352, 112),
        *arrow(200, 112, 172, 112),
        *arrow(560, 112, 532, 112),
        text(724, 116, "each names the", GREY),
        text(724, 133, "SHA-256 of the last", GREY),
        *box(380, 190, 200, 44, "steps/40-.../MANIFEST", GREEN),
        *arrow(455, 136, 470, 188),
        text(474, 168, "digest", GREY),
        *box(240, 290, 230, 44, "rank00000-000.safetensors", BLUE),
        *box(490, 290, 230, 44, "rank00001-000.safetensors", BLUE),
        *arrow(450, 236, 380, 288),
        *arrow(510, 236, 580, 288),
        text(560, 262, "length and seal of each file's checksums", GREY),
        *box(20, 190, 200, 44, "steps/20-.../ (deleted)", GREY),
        *arrow(560, 130, 222, 200, "", dashed=True),
        text(20, 316, "jobs/, leases/, lines/", GREY),
    ]
    return Drawing("Below a root: a log names manifests, manifests name data files", 350, marks)


def reshard() -> Drawing:
    """Twelve rows that four ranks wrote, and three ranks read."""
    colors = (BLUE, GREEN, ORANGE, RED)
    marks = [text(14, 56, "saved by 4 ranks"), text(14, 186, "loaded by 3 ranks")]
    unit = 54
    for row in range(12):
        x = 180 + unit * row
        marks += bar(x, 40, unit, colors[row // 3])
        marks += bar(x, 170, unit, colors[row // 3])
        marks.append(text(x + unit / 2, 232, f"row {row}", GREY, "middle"))
    for rank in range(4):
        marks.append(
            text(180 + unit * (3 * rank + 1.5), 30, f"rank {rank}", colors[rank], "middle")
        )
    for rank in range(3):
        x = 180 + unit * 4 * rank
        marks += box(x - 1, 164, unit * 4 - 2, 34)
        for row in range(4):
            marks += bar(x + unit * row + 1, 170, unit - 2, colors[(4 * rank + row) // 3])
        marks.append(text(x + unit * 2, 256, f"rank {rank}", INK, "middle"))
    for first, last in ((0, 2), (3, 3), (4, 5), (6, 7), (8, 8), (9, 11)):
        x = 180 + unit * (first + last + 1) / 2
        marks += arrow(x, 66, x, 160)
    marks += note(180, 284, "Each arrow is one ranged read. Nothing is gathered or read twice.")
    return Drawing("Twelve rows saved by four ranks are read by three", 300, marks)


def background() -> Drawing:
    """Steps of one rank, and a save in the background below them."""
    marks = [text(14, 56, "training"), text(14, 126, "save")]
    for step in range(8):
        x = 110 + 90 * step + (24 if step > 1 else 0)
        marks += bar(x, 40, 86, BLUE)
        marks.append(text(x + 43, 34, f"step {step + 19}", GREY, "middle"))
    marks += [
        *bar(288, 40, 24, ORANGE),
        *arrow(306, 64, 318, 106),
        *bar(312, 110, 330, GREEN, "write, checksum, upload"),
        *bar(642, 110, 60, GREEN, "commit"),
        text(296, 96, "step 20 is copied", ORANGE, "end"),
        *note(
            110,
            190,
            "Training stops for the copy alone. What only optimizers change is copied meanwhile,",
            "and the next optimizer step waits until that is done.",
        ),
    ]
    return Drawing("A save in the background beside training steps", 224, marks)


def near() -> Drawing:
    """Near copies on three hosts, one of which is lost."""
    marks = []
    for host, (x, color, own, copy) in enumerate(
        ((30, BLUE, "A", "C"), (320, RED, "B", "A"), (610, GREEN, "C", "B"))
    ):
        name = f"host {own}"
        marks += box(x, 50, 220, 110, "", RED if host == 1 else INK)
        marks.append(text(x + 110, 40, f"{name}: lost" if host == 1 else name, color, "middle"))
        marks += box(x + 14, 66, 192, 34, f"ranks of {own}: their files", color)
        marks += box(x + 14, 112, 192, 34, f"copy of the files of {copy}", GREY)
    marks += [
        *arrow(252, 83, 330, 122),
        *arrow(542, 83, 620, 122),
        line(322, 52, 538, 158, RED),
        line(538, 52, 322, 158, RED),
        *box(320, 220, 220, 60, "new host B\nrestores from memory", ORANGE),
        *arrow(700, 162, 545, 240, "", dashed=True),
        text(660, 226, "files of B, from their copy", GREY),
        *arrow(430, 330, 430, 284, "", dashed=True),
        text(430, 348, "the store: older, used where copies are missing", GREY, "middle"),
    ]
    return Drawing("Each host keeps a copy of another's files; a lost one is replaced", 364, marks)


def publication() -> Drawing:
    """A training publishes deltas and anchors, followers apply them."""
    marks = [
        *box(20, 110, 150, 60, "training\nany layout", BLUE),
        *box(300, 30, 240, 226, "", INK),
        text(420, 50, "root, line published", INK, "middle"),
        *arrow(172, 140, 298, 140, "publishes"),
    ]
    for row, (kind, step, color) in enumerate(
        (("anchor", 100, BLUE), ("delta", 101, GREEN), ("delta", 102, GREEN), ("anchor", 103, BLUE))
    ):
        marks += box(330, 64 + 46 * row, 180, 34, f"{kind}: step {step}", color)
    for row, (name, what) in enumerate(
        (
            ("at step 101", "reads one delta"),
            ("4 ranks, TP", "their regions"),
            ("slept", "reads the anchor"),
        )
    ):
        y = 30 + 86 * row
        marks += [*box(690, y, 150, 60, f"{name}\n{what}", ORANGE)]
        marks += arrow(542, 140, 688, y + 30, "", dashed=True)
    marks += [
        text(690, 20, "followers", ORANGE),
        *note(
            20,
            286,
            "A delta has new values by position, and digests of the state before and after.",
            "It is applied where they fit; else a follower takes an anchor and what follows.",
        ),
    ]
    return Drawing("One root serves the training and its followers", 318, marks)


def unit() -> Drawing:
    """Two units of the engine in one step, on two streams."""
    marks = [text(14, 56, "compute"), text(14, 126, "collectives"), text(14, 196, "memory")]
    compute = (
        (190, 110, "forward 1", BLUE),
        (310, 110, "forward 2", GREEN),
        (450, 140, "backward 2", GREEN),
        (600, 140, "backward 1", BLUE),
        (760, 80, "step", ORANGE),
    )
    for x, width, words, color in compute:
        marks += bar(x, 40, width, color, words)
    sends = (
        (110, 75, "gather 1", BLUE),
        (195, 100, "gather 2", GREEN),
        (455, 100, "gather 1", BLUE),
        (595, 80, "reduce 2", GREEN),
        (745, 80, "reduce 1", BLUE),
    )
    for x, width, words, color in sends:
        marks += bar(x, 110, width, color, words)
    for x, width, color, y in (
        (110, 190, BLUE, 176),
        (195, 395, GREEN, 200),
        (455, 285, BLUE, 176),
    ):
        marks += bar(x, y, width, color)
    marks += [
        *note(
            14,
            256,
            "Unit 2 is gathered while unit 1 computes. Gathered memory is freed after use,",
            "but for the last unit, which the backward needs first.",
        ),
    ]
    return Drawing("Two units in one training step: gathers run ahead of compute", 290, marks)


def house() -> Drawing:
    """The packages and the rooms of ckpt, from the top down."""
    floors = (
        ("cli, integrations", "commands; trainers and loaders of other libraries"),
        ("operate, screens", "what operators do; pages and tables"),
        ("tools, sharding", "checkpoints without ranks; the engine"),
        ("convert, service", "other formats; the Checkpointer, tiers, followers"),
        ("api, state_dict", "save, async_save, load; torch's forms of state"),
        ("saving, loading", "one save; one load"),
        ("commit, telemetry", "the log; how saves went"),
        ("state, format", "a state as pieces and values; bytes"),
        ("layout, world", "tensors as regions; ranks that talk"),
        ("storage", "bytes by key: disk, S3, any filesystem"),
    )
    marks = []
    for floor, (rooms, what) in enumerate(floors):
        y = 20 + 40 * floor
        color = GREEN if rooms == "storage" else BLUE if floor > 4 else INK
        marks += [*box(120, y, 200, 32, rooms, color), text(340, y + 21, what, GREY)]
    for row, wing in enumerate(("composites", "stacks", "near", "foreign formats")):
        marks += box(710, 150 + 50 * row, 130, 36, wing, ORANGE)
    marks += [
        *arrow(60, 30, 60, 410),
        text(14, 440, "imports go down", GREY),
        text(775, 138, "wings", ORANGE, "middle"),
        text(775, 372, "called by name,", GREY, "middle"),
        text(775, 390, "imported by nobody", GREY, "middle"),
    ]
    return Drawing("The rooms of the code, one floor above the other, and four wings", 456, marks)


def ranks() -> Drawing:
    """Who talks to whom in a job."""
    marks = [
        *box(340, 20, 180, 40, "rank 0: coordinator", GREEN),
        *arrow(522, 40, 688, 40, "log, MANIFEST"),
        *box(690, 20, 150, 40, "store", INK),
        *box(20, 20, 150, 40, "rendezvous", INK),
        *arrow(338, 40, 172, 40, "", dashed=True),
        text(255, 34, "at the start", GREY, "middle"),
    ]
    for child, x in enumerate((140, 340, 540)):
        marks += [
            *box(x, 130, 150, 40, f"rank {3 * child + 1}", BLUE),
            *arrow(x + 75, 128, 430, 64),
        ]
    for child, x in enumerate((60, 220)):
        marks += [*box(x, 240, 130, 40, f"rank {child + 2}", BLUE), *arrow(x + 65, 238, 215, 174)]
    marks += [
        *note(20, 84, "rounds: one tree of TCP", "connections"),
        *arrow(692, 150, 765, 64, "", dashed=True),
        *note(745, 150, "data files,", "by every rank"),
        *arrow(492, 150, 538, 150),
        *note(430, 200, "gloo: bytes that several ranks need,", "from the one that has read them"),
        *note(430, 262, "A connection that closes is looked into: dead, or replaced."),
    ]
    return Drawing("Ranks talk in a tree; each one reads and writes its own bytes", 300, marks)


def kills() -> Drawing:
    """What a kill leaves at each point of a save."""
    points = (
        (150, "while files\nare written", "files that\nnobody names"),
        (330, "before\nMANIFEST", "whole files\nwithout a name"),
        (510, "before\nCOMMIT", "a checkpoint\nnobody sees"),
        (690, "after\nCOMMIT", "the new\ncheckpoint"),
    )
    marks = [
        *bar(60, 60, 640, BLUE),
        *bar(700, 60, 140, GREEN),
        text(60, 50, "the previous checkpoint is the latest", BLUE),
        text(840, 50, "the new one is", GREEN, "end"),
    ]
    for x, when, leaves in points:
        at = x + 20 if x < 690 else x + 60
        color = GREEN if x == 690 else RED
        marks.append(
            f'<path d="M{at - 6} 65 l12 12 m0 -12 l-12 12" stroke="{PAPER}" stroke-width="3"/>'
        )
        marks += [*arrow(at, 86, at, 112), *box(at - 65, 116, 130, 48, when, color)]
        marks += [*arrow(at, 166, at, 190), *box(at - 65, 194, 130, 48, leaves, GREY)]
    marks += note(105, 272, "The next session of the root removes what no record names.")
    return Drawing(
        "A kill before the commit leaves the previous checkpoint, after it the new one", 288, marks
    )


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    one.__name__: one
    for one in (save, root, reshard, background, near, publication, unit, house, ranks, kills)
}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
