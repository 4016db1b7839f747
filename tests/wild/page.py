"""The page of results: written from them, and read again as what tests expect."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from tests.wild.rows import Result

PACKAGES = (
    "torch", "transformers", "accelerate", "lightning", "peft", "diffusers", "pytorch_optimizer",
    "schedulefree", "torchao", "bitsandbytes", "torchdata",
)  # fmt: skip
# What cannot be imported where the page is written has no rows, and the page says why.
WANTED = ("timm", "torchvision", "torchtitan.trainer", "ray.train", "dion", "heavyball")
CELL_MAX = 260

HEAD = """# Tried on what others wrote

Models, optimizers and frameworks of other libraries, trained for a few steps with tiny
configurations and random weights, saved, and resumed. This page is written by
`python -m tests.wild --table docs/compatibility.md`, and not by hand; `make test-wild` installs the
libraries and tries everything again, against this page. Beside this library stands torch's own
`torch.distributed.checkpoint` (DCP), used as torch's documents say, with `get_state_dict` and
`set_state_dict`.

- **A model** passes through {links}: one step under each, saved there and resumed by the next on
  its number of ranks. It passes when every loss, and at the end every bit of the model and of
  AdamW's state, is that of a training in one process that nothing interrupts, and when the
  library's own `from_pretrained` opens what `ckpt.export` writes, with the same bits. The relay of
  DCP has torch's engines only.
- **An optimizer** passes when a training that goes on after a save, and one from other weights that
  loads it, have the same losses, and the same bits in the model and in the optimizer's state, two
  steps later. That is tried under each of the engines that the row names, in one process and on two
  ranks; under the others the optimizer itself cannot step. DCP is tried under torch's engines only.

All ranks train on the same batches, with kernels that round alike wherever their operands lie, on
the CPU, with gloo. Tried with Python {python} and {versions}; this page is of {date}.
"""


def page_of(results: Sequence[Result], absent: Mapping[str, str], links: str) -> str:
    """The page as text. `absent` are titles of groups that could not run here, and why."""
    text = HEAD.format(
        links=links,
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
        versions=", ".join(versions()),
    )
    text += "\n" + summary(results)
    for title, rows in groupby(results, key=lambda result: result.group):
        text += f"\n## {title}\n\n| | | ours | DCP | why |\n| --- | --- | --- | --- | --- |\n"
        text += "".join(line_of(result) for result in rows)
    if absent:
        text += "\n## Not tried here\n\n"
        text += "".join(f"- {title}: {cell(why)}\n" for title, why in absent.items())
    return text


def summary(results: Sequence[Result]) -> str:
    results = [result for result in results if result.what]
    passed = [sum(not getattr(result, who) for result in results) for who in ("ours", "dcp")]
    return f"Of {len(results)} rows, {passed[0]} pass with this library and {passed[1]} with DCP.\n"


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
        elif row := re.match(r"\| `([^`]+)` \| .*? \| (pass|fails|-) \| (pass|fails|-) \|", line):
            outcomes[title, row[1]] = row[2]
    return outcomes
