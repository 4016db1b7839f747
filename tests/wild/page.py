"""The page of results: written from them, and read again as what tests expect."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from tests.wild.rows import Result

PACKAGES = (
    "torch", "transformers", "accelerate", "lightning", "peft", "diffusers", "pytorch_optimizer",
    "schedulefree", "torchao", "bitsandbytes", "torchdata", "torchtitan", "ray", "torchvision",
    "timm",
)  # fmt: skip
# What cannot be imported where the page is written has no rows, and the page says why.
WANTED = ("timm", "torchvision", "torchtitan.trainer", "ray.train", "dion", "heavyball")
CELL_MAX = 260
ROW = re.compile(r"\| `([^`]+)` \| .*? \| (pass|fails|-) \| (pass|fails|-) \|")

HEAD = """# Tried with other libraries

Models, optimizers and frameworks of other libraries are trained for a few steps with tiny
configurations and random weights, saved, and resumed. `python -m tests.wild --table
docs/compatibility.md` writes this page; `make test-wild` installs the libraries, tries everything
again and compares the results with it. The column DCP is torch's own
`torch.distributed.checkpoint`, used as torch's documents say, with `get_state_dict` and
`set_state_dict`.

- **A model** passes through {links}: it trains one step under each and is saved; the next one
  resumes it on its own number of ranks. It passes when every loss, and at the end every bit of the
  model and of AdamW's state, equals that of an uninterrupted training in one process, and when the
  library's own `from_pretrained` opens what `ckpt.export` writes, with the same bits. DCP passes
  through torch's engines only.
- **An optimizer** passes when two trainings, one that continues after a save and one that starts
  from other weights and loads that save, have the same losses and, two steps later, the same bits
  in the model and in the optimizer's state. This is tried under each engine that the row names,
  in one process and on two ranks; under the others the optimizer itself cannot step. Then each of
  these engines loads on two ranks what one process saved, saves it as it is and after one more
  step, and one process loads both. Nothing may be lost on the way, and the training must end as one
  without interruption does, unless the steps of the optimizer depend on the layout (the row says
  so). DCP is tried under torch's engines only.
- **A trainer** of another library trains a step in each layout that its row names, on that number
  of ranks, in fresh processes, from what the one before saved. It passes when every loss, and at
  the end every bit, equals that of the same trainer in one process without interruption. "Ours"
  is our integration for it, "DCP" the library's own checkpoints.

Schedules of torch's pipelines and products of layouts are in [a page of their own](layouts.md).
torchvision and timm come in by `pip install --no-deps torchvision timm`; where their build does not
fit torch's (one for CUDA, the other for the CPU), the tests declare two operators that torchvision
has to have to be imported, and that no row calls. All ranks train on the same batches, on the CPU,
with gloo, and with kernels whose rounding does not depend on where their operands lie.

Tried with Python {python} and {versions}; this page is of {date}.
"""


class Section(NamedTuple):
    """The rows of a group as lines of the page, and the day on which they were tried."""

    lines: tuple[str, ...]
    date: str


def sections_of(page: str) -> dict[str, Section]:
    """The groups of a page that was written earlier, by title."""
    sections: dict[str, Section] = {}
    of_page = re.search(r"this page is of ([\d-]+)", page)
    for part in page.split("\n## ")[1:]:
        lines = tuple(line + "\n" for line in part.splitlines() if line.startswith("| `"))
        own = re.search(r"^Tried on ([\d-]+)\.$", part, re.MULTILINE) or of_page
        if lines and own:
            sections[part.partition("\n")[0]] = Section(lines, own[1])
    return sections


def sections_now(results: Sequence[Result]) -> dict[str, Section]:
    """The groups of results of today."""
    today = datetime.date.today().isoformat()
    return {
        title: Section(tuple(map(line_of, rows)), today)
        for title, rows in groupby(results, key=lambda result: result.group)
    }


def page_of(sections: Mapping[str, Section], absent: Mapping[str, str], links: str) -> str:
    """The page as text. `absent` are titles of groups that could not run here, and why."""
    dates = {section.date for section in sections.values()}
    text = HEAD.format(
        links=links,
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
        versions=", ".join(versions()),
    )
    text += "\n" + summary(sections.values())
    for title, section in sections.items():
        date = f"\n\nTried on {section.date}." if len(dates) > 1 else ""
        text += f"\n## {title}{date}\n\n| | | ours | DCP | why |\n| --- | --- | --- | --- | --- |\n"
        text += "".join(section.lines)
    if absent:
        text += "\n## Not tried here\n\n"
        text += "".join(f"- {title}: {cell(why)}\n" for title, why in absent.items())
    return text


def summary(sections: Iterable[Section]) -> str:
    rows = [row for each in sections for row in map(ROW.match, each.lines) if row and row[2] != "-"]
    passed = [sum(row[number] == "pass" for row in rows) for number in (2, 3)]
    return f"Of {len(rows)} rows, {passed[0]} pass with this library and {passed[1]} with DCP.\n"


def line_of(result: Result) -> str:
    why = [
        f"{who}: {cell(text)}" for who, text in (("ours", result.ours), ("DCP", result.dcp)) if text
    ]
    if result.remark:
        why.append(cell(result.remark))
    name = f"`{result.name}`"
    return f"| {' | '.join([name, cell(result.what), *verdicts_of(result), '. '.join(why)])} |\n"


def verdicts_of(result: Result) -> tuple[str, str]:
    """Of this library and of DCP; "-" for an optimizer that steps nowhere: nothing was tried."""
    if not result.what:
        return "-", "-"
    return "fails" if result.ours else "pass", "fails" if result.dcp else "pass"


def cell(text: str) -> str:
    """`text` in a line of a table: no marks of Markdown, no paths of this machine, not too long."""
    text = re.sub(r"/\S*/(?=[\w.-]+)", "", " ".join(text.split()))
    text = text.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")
    text = re.sub(r"([*_\[\]])", r"\\\1", text)
    return text if len(text) <= CELL_MAX else f"{text[:CELL_MAX].rstrip(chr(92))} ..."


def not_importable() -> dict[str, str]:
    """Libraries that would have rows here and cannot be imported, and why."""
    outcomes = {}
    for name in WANTED:
        try:
            importlib.import_module(name)
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


def versions() -> list[str]:
    outcomes = []
    for name in PACKAGES:
        try:
            outcomes.append(f"{name} {importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return outcomes


def expected(page: str) -> dict[tuple[str, str], str]:
    """What the page says of this library: "pass", "fails" or "-", by title and name."""
    outcomes, title = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif row := ROW.match(line):
            outcomes[title, row[1]] = row[2]
    return outcomes
