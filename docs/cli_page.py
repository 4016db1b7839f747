"""Writes docs/cli.md, the reference of the command line, from the command line itself.

python -m docs.cli_page
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from ckpt.cli.commandline import all_commands
from ckpt.cli.parsers.arguments import Command

PAGE = Path(__file__).with_name("cli.md")
OFTEN = 2
HEAD = """\
# Commands

Every command of `ckpt`, with its arguments. `ckpt COMMAND --help` shows the same, with examples;
[Inspect, compare, copy, repair, remove](howto/command_line.md) explains. Written by
`python -m docs.cli_page`.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | damage was found, or the command failed; the reason is on stderr |
| 2 | the command line is wrong |
| 3 | the answer is no: `diff` differs, `plan` does not fit, `prune` or `rm` was not confirmed |
| 130 | interrupted |
"""


def page() -> str:
    """The whole page. What several commands have in common is explained once."""
    commands = all_commands()
    counts = Counter(_row(action) for command in commands for action in command.actions)
    # Of several rows of one name, the one that most commands have.
    first: dict[str, str] = {}
    for row, count in counts.most_common():
        if count >= OFTEN:
            first.setdefault(row.split("`")[1], row)
    common = set(first.values())
    table = _table(row for row in counts if row in common)
    once = f"\n## Arguments of several commands\n\n{table}"
    return HEAD + once + "".join(_section(command, common) for command in commands)


def _section(command: Command, common: Collection[str]) -> str:
    text = command.text[0].upper() + command.text[1:]
    rows = {_row(action): _names(action)[0] for action in command.actions}
    table = _table(row for row in rows if row not in common)
    also = ", ".join(f"`{name}`" for row, name in rows.items() if row in common)
    words = " ".join(_usage(action) for action in command.actions if not action.option_strings)
    head = f"\n## ckpt {command.name}\n\n{text}: `ckpt {command.name} {words}`\n"
    parts = (head, table, f"Also {also}.\n" if also else "")
    return "\n".join(part for part in parts if part)


def _table(rows: Iterable[str]) -> str:
    text = "".join(rows)
    return f"| argument | meaning |\n| --- | --- |\n{text}" if text else ""


def _names(action: argparse.Action) -> list[str]:
    return list(action.option_strings) or [str(action.metavar or action.dest)]


def _usage(action: argparse.Action) -> str:
    """A positional argument as a usage line has it."""
    name = _names(action)[0]
    return f"[{name}]" if action.nargs == "?" else f"{name}..." if action.nargs == "+" else name


def _row(action: argparse.Action) -> str:
    names = _names(action)
    value = action.metavar or action.dest.upper().replace("-", "_")
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    shown = ", ".join(f"`{name}`" for name in names)
    if action.option_strings and action.nargs != 0:
        shown = ", ".join(f"`{name} {value}`" for name in names)
    elif not action.option_strings and action.choices:
        shown = f"`{value}`"
    if not action.option_strings and action.nargs == "?":
        shown += " (optional)"
    return f"| {shown} | {_cell(action.help or '')} |\n"


def _cell(text: str) -> str:
    """Help as a cell: what markdown would take for its own is shown as it is."""
    return text.replace("%%", "%").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
