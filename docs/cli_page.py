"""Writes docs/cli.md, the reference of the command line, from the command line itself.

python -m docs.cli_page
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

from ckpt import reports
from ckpt.cli.commandline import COMMANDS, Command, Option

PAGE = Path(__file__).with_name("cli.md")
OFTEN = 2
NEARLY_ALL = 0.85  # of the commands take an argument: it is named once, with those that do not
HEAD = """\
# Commands

Every command of `ckpt`, with its arguments and its function in Python. `ckpt COMMAND --help` adds
examples. `python -m docs.cli_page` writes this page; see also
[Inspect, compare, copy, repair, remove](howto/command_line.md).

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | damage was found, or the command failed; the reason is on stderr |
| 2 | the command line is wrong |
| 3 | the answer is no: `diff` differs, `plan` does not fit, `prune` or `rm` was not confirmed |
| 130 | interrupted |

`--json` prints the fields of the report that the function in Python returns, with a `schema`, such
as `ckpt.verify`, and a `version`, which counts up when a field changes its meaning or goes. Sizes
are bytes, times seconds since 1970. Several reports are a list `reports`.
"""


def page() -> str:
    """The whole page. What several commands have in common is explained once."""
    counts = Counter(_row(option) for command in COMMANDS for option in command.options)
    # Of several rows of one name, the one that most commands have.
    first: dict[str, str] = {}
    for row, count in counts.most_common():
        if count >= OFTEN:
            first.setdefault(row.split("`")[1], row)
    common = set(first.values())
    everywhere = {row for row in common if counts[row] >= NEARLY_ALL * len(COMMANDS)}
    rows = "".join(row for row in counts if row in common)
    said = [_said_of_all(row) for row in counts if row in everywhere]
    once = f"\n## Arguments of several commands\n\n{' '.join(said)}\n\n{rows}"
    return HEAD + once + "".join(_section(one, common, everywhere) for one in COMMANDS)


def _said_of_all(row: str) -> str:
    """Which commands do not take an argument that nearly all take."""
    name = row.split("`")[1].split()[0]
    without = [
        f"`{one.name}`" for one in COMMANDS if name not in {_name(each) for each in one.options}
    ]
    return f"All take `{name}` but {', '.join(without[:-1])} and {without[-1]}."


def _section(command: Command, common: set[str], everywhere: set[str]) -> str:
    rows = {_row(option): _name(option) for option in command.options}
    own = "".join(row for row in rows if row not in common)
    also = ", ".join(f"`{name}`" for row, name in rows.items() if row in common - everywhere)
    words = " ".join(_usage(option) for option in command.options if not option.names)
    head = f"\n## ckpt {command.name}\n\n{command.text[:-1]}: `ckpt {command.name} {words}`\n"
    parts = (head, _in_python(command), own, f"Also {also}.\n" if also else "")
    return "\n".join(part for part in parts if part)


def _in_python(command: Command) -> str:
    """The function of a command, and the report that it returns and `--json` prints."""
    if not command.views:
        return ""
    returned = str(inspect.signature(command.function).return_annotation)
    kinds = [one for one in re.findall(r"\w+", returned) if hasattr(reports, one)]
    listed = " or ".join(f"`{one}`" for one in kinds)
    return f"`ckpt.operate.{command.function.__name__}` returns {listed}.\n"


def _name(option: Option) -> str:
    return option.names[0] if option.names else option.dest


def _usage(option: Option) -> str:
    """A positional argument as a usage line has it."""
    forms = {"?": "[{}]", "*": "[{}...]", "+": "{}..."}
    return forms.get(option.how.get("nargs", ""), "{}").format(option.dest)


def _row(option: Option) -> str:
    choices, value = option.how.get("choices"), option.how.get("metavar") or option.dest.upper()
    value = "{" + ",".join(choices) + "}" if choices else value
    if option.names:
        suffix = "" if option.is_switch else f" {value}"
        shown = ", ".join(f"`{name}{suffix}`" for name in option.names)
    else:
        shown = f"`{value if choices else option.dest}`"
        shown += " (optional)" if option.how.get("nargs") in ("?", "*") else ""
    return f"- {shown}: {_cell(option.how['help'])}\n"


def _cell(text: str) -> str:
    """Help as text: what markdown would take for its own is shown as it is, and what a place is
    stands at the first `url` alone.
    """
    text = re.sub(r": a path, s3://bucket/prefix, (or any url of fsspec|\.\.\.)", "", text)
    return text.replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
