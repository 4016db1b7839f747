"""The page of results: written from them, and read again as what tests expect."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.wild.rows import Result

PACKAGES = (
    "torch", "transformers", "accelerate", "lightning", "peft", "diffusers", "pytorch_optimizer",
    "schedulefree", "torchao", "bitsandbytes", "torchdata", "torchtitan", "ray", "torchvision",
    "timm", "heavyball",
)  # fmt: skip
# What cannot be imported where the page is written has no rows, and the page says why.
WANTED = ("timm", "torchvision", "torchtitan.trainer", "ray.train", "dion", "heavyball")
CELL_MAX = 60
ROW = re.compile(r"- `([^`]+)`(.*)")

FOLDED = re.compile(r"- both pass[^:]*: (.*)")
PEER_FAILS = re.compile(r"- DCP fails \(.*?\): (`.*)")
PEER_ROW = re.compile(r"- (`[^`]+`)(?: \(.*?\))?: DCP fails: (.*)\n")
REASON_MAX = 30
LINE_MAX = 120
# What is said of a row that passes, unless it only says where others' optimizers cannot step.
SAID_NOWHERE = ("cannot step here", "steps ")
ROUNDED = "engines round differently here"

HEAD = """# Tried with other libraries

Models, optimizers and trainers of other libraries take a few steps on the CPU, with tiny
configurations and random weights, save and resume. They pass where losses and bits are those of a
training that never stopped; within rounding, losses to 1e-06 and tensors to 0.001. DCP is torch's
own, used as its documents say. `make test-wild` tries everything,
`python -m tests.wild --table docs/compatibility.md` writes this page.

- **Models** move through {links}; `from_pretrained` opens what `ckpt.export` writes.
- **Optimizers** resume under the engines named, on one and two ranks and between these, unless
  steps depend on the layout. Under others they cannot step.
- **Trainers** move between their layouts.

Python {python}, {versions}; this page is of {date}.
"""

CORPUS = Path(__file__).parents[1] / "corpus"


class Section(NamedTuple):
    """The rows of a group as lines of the page, and the day on which they were tried."""

    lines: tuple[str, ...]
    date: str


def sections_of(page: str) -> dict[str, Section]:
    """The groups of a page that was written earlier, by title."""
    sections: dict[str, Section] = {}
    of_page = re.search(r"this page is of ([\d-]+)", page)
    for part in page.split("\n## ")[1:]:
        lines = tuple(
            line + "\n"
            for line in part.splitlines()
            if any(form.match(line) for form in (ROW, FOLDED, PEER_FAILS))
        )
        own = re.search(r"^Tried on ([\d-]+)\.$", part, re.MULTILINE) or of_page
        if lines and own:
            sections[part.partition("\n")[0]] = Section(lines, own[1])
    return sections


def sections_now(results: Sequence[Result]) -> dict[str, Section]:
    """The groups of results of today."""
    today = datetime.date.today().isoformat()
    return {
        title: Section(lines_of(list(rows)), today)
        for title, rows in groupby(results, key=lambda result: result.group)
    }


def page_of(
    sections: Mapping[str, Section],
    absent: Mapping[str, str],
    links: str,
    known: Mapping[str, str],
) -> str:
    """The page as text. `absent` are titles of groups that could not run here, and why."""
    dates = Counter(section.date for section in sections.values())
    usual = max(dates, key=lambda date: (dates[date], date))
    text = HEAD.format(
        links=links,
        date=usual,
        python=platform.python_version(),
        versions=", ".join(f"{name} {one}" for name, one in known.items()),
    )
    text += "\n" + summary(sections.values()) + "\n" + opened()
    for title, section in sections.items():
        date = f"\n\nTried on {section.date}." if section.date != usual else ""
        text += f"\n## {title}{date}\n\n" + "".join(failures_first(section.lines))
    if absent:
        text += "\n## Not tried here\n\n"
        text += ", ".join(absent) + ".\n"
    return text


def summary(sections: Iterable[Section]) -> str:
    verdicts = [each for section in sections for each in _verdicts(section.lines)]
    tried = [each for each in verdicts if each[1] != "-"]
    passed = [sum(each[number] == "pass" for each in tried) for number in (1, 2)]
    failed = [f"`{name}`" for name, ours, _ in tried if ours != "pass"]
    return (
        f"Of {len(tried)} rows, {passed[0]} pass with this library and {passed[1]} with DCP. With "
        f"this library fail: {', '.join(failed) or 'none'}.\n"
    )


def opened(failed: Sequence[str] = ()) -> str:
    """The checkpoints that `make corpus` writes, and tests/convert/test_corpus.py loads; those that
    `failed` come first.
    """
    every = sorted(place.parent.name for place in CORPUS.glob("*/by.json"))
    cases = [case for case in every if case not in failed]
    folded = Counter(case.partition("_")[0] for case in cases)
    names = ", ".join(
        f"`{name}` ({count})" if count > 1 else f"`{name}`" for name, count in folded.items()
    )
    fail = f", {', '.join(f'`{case}`' for case in failed)} fail" if failed else ""
    return f"{len(cases)} formats of `make corpus` load bit for bit{fail}: {names}.\n"


def _verdicts(lines: Iterable[str]) -> list[tuple[str, str, str]]:
    """Name, and what came out with this library and with DCP, of each row."""
    outcomes = []
    for line in lines:
        if row := ROW.match(line):
            ours, dcp = (
                "-"
                if row[2].startswith(" steps nowhere.")
                else "fails"
                if f"{who} fails" in row[2]
                else "pass"
                for who in ("ours", "DCP")
            )
            outcomes.append((row[1], ours, dcp))
        elif names := PEER_FAILS.match(line):
            outcomes += [(name, "pass", "fails") for name in re.findall(r"`([^`]+)`", names[1])]
        elif folded := FOLDED.match(line):
            outcomes += [(name, "pass", "pass") for name in re.findall(r"`([^`]+)`", folded[1])]
    return outcomes


def failures_first(lines: Sequence[str]) -> Iterator[str]:
    """What fails with this library, what fails with DCP alone, by the beginning of its reason, and
    what passes.
    """
    peers: dict[str, list[str]] = {}
    rest = []
    for line in lines:
        if "ours fails" in line:
            ours, *dcp = re.split(r"\W+DCP fails", line.rstrip(), maxsplit=1)
            yield cut(ours.rstrip(" .")) + ("; DCP fails" if dcp else "") + "\n"
        elif row := PEER_ROW.fullmatch(line):
            reason = re.split(r"; | (?=\\\[)", row[2])[0]
            if len(reason) > REASON_MAX:
                reason = reason[:REASON_MAX].rpartition(" ")[0]
            reason = reason.strip(" \\.:")
            peers.setdefault(reason.replace("(", "").replace(")", ""), []).append(row[1])
        else:
            rest.append(line)
    yield from (f"- DCP fails ({why}): {', '.join(names)}\n" for why, names in peers.items())
    yield from (cut(line.rstrip()) + "\n" if ROW.match(line) else line for line in rest)


def cut(line: str) -> str:
    """A line of a row that is not too long; its beginning says what came out."""
    return (
        line if len(line) <= LINE_MAX else line[:LINE_MAX].rpartition(" ")[0].rstrip(" .") + " ..."
    )


def lines_of(rows: Sequence[Result]) -> tuple[str, ...]:
    """One line for all that pass with both and need no remark, and one for each other row."""
    folded: dict[str, list[str]] = {}
    table = []
    for row in rows:
        said = row.remark and not row.remark.startswith((*SAID_NOWHERE, ROUNDED))
        if verdicts_of(row) == ("pass", "pass") and not said:
            engines = f" ({cell(row.what)})" if row.group.startswith("Optimizers") else ""
            engines += " (within rounding)" if row.remark.startswith(ROUNDED) else ""
            folded.setdefault(engines, []).append(f"`{row.name}`")
        else:
            table.append(line_of(row))
    both = [f"- both pass{engines}: {', '.join(names)}\n" for engines, names in folded.items()]
    return (*both, *table)


def line_of(result: Result) -> str:
    why = [
        f"{who} fails: {cell(text)}"
        for who, text in (("ours", result.ours), ("DCP", result.dcp))
        if text
    ]
    why += [cell(result.remark)] if result.remark else []
    what = f" ({cell(result.what)})" if result.what else " steps nowhere."
    return f"- `{result.name}`{what}{': ' if why else ''}{'. '.join(why)}\n"


def verdicts_of(result: Result) -> tuple[str, str]:
    """Of this library and of DCP; "-" for an optimizer that steps nowhere: nothing was tried."""
    if not result.what:
        return "-", "-"
    return "fails" if result.ours else "pass", "fails" if result.dcp else "pass"


def cell(text: str) -> str:
    """`text` in a line of a list: no marks of Markdown, no paths of this machine, not too long."""
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


def versions() -> dict[str, str]:
    outcomes = {}
    for name in PACKAGES:
        try:
            outcomes[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return outcomes


def versions_of(page: str) -> dict[str, str]:
    """The versions that a page names."""
    text = re.search(r"^(?:Tried with )?Python .*?; this page is of", page, re.M | re.S)
    pairs = re.findall(r"([\w-]+) (\d[\w.]*)", text[0]) if text else []
    return {name: one for name, one in pairs if name in PACKAGES}


def expected(page: str) -> dict[tuple[str, str], str]:
    """What the page says of this library: "pass", "fails" or "-", by title and name."""
    outcomes, title = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            title = line[3:]
        for name, ours, _ in _verdicts([line]):
            outcomes[title, name] = ours
    return outcomes
