"""Writes docs/cli.md, the reference of the command line, from the command line itself.

python -m docs.cli_page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ckpt.cli.commandline import all_commands
from ckpt.cli.parsers.arguments import Command

PAGE = Path(__file__).with_name("cli.md")
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
    """The whole page."""
    return HEAD + "".join(map(_section, all_commands()))


def _section(command: Command) -> str:
    text = command.text[0].upper() + command.text[1:]
    rows = "".join(map(_row, command.actions))
    table = f"| argument | meaning |\n| --- | --- |\n{rows}" if rows else ""
    return f"\n## ckpt {command.name}\n\n{text}.\n\n{table}"


def _row(action: argparse.Action) -> str:
    names = list(action.option_strings) or [str(action.metavar or action.dest)]
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
