"""Shell completion, made from the command line itself: bash, zsh and fish."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from ckpt.cli.commandline import OK, all_commands
from ckpt.cli.parsers.arguments import Command


class Flag(NamedTuple):
    """One option: its spellings, what it means, whether a value follows, and which there are."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


# argparse adds it by itself, so no command lists it.
HELP = Flag(("-h", "--help"), "show help and examples", False, ())


class Completed(NamedTuple):
    """One command: its name, what it does, its options, and choices for its first argument."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    choices: tuple[str, ...]


def completion(arguments: argparse.Namespace) -> int:
    """`ckpt completion`: print the script."""
    script = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[arguments.shell]
    print(script(completed(all_commands())), end="")
    return OK


def completed(commands: Sequence[Command]) -> list[Completed]:
    """What completion has to know of the commands, in their order."""
    return [
        Completed(command.name, command.text, (HELP, *_flags(command)), _choices(command))
        for command in commands
    ]


def _flags(command: Command) -> list[Flag]:
    return [
        Flag(
            tuple(action.option_strings),
            action.help or "",
            action.nargs != 0,
            tuple(map(str, action.choices or ())),
        )
        for action in command.actions
        if action.option_strings
    ]


def _choices(command: Command) -> tuple[str, ...]:
    positional = [action for action in command.actions if not action.option_strings]
    return tuple(map(str, positional[0].choices or ())) if positional else ()


def bash_script(commands: list[Completed]) -> str:
    """For `eval "$(ckpt completion bash)"`."""
    cases = []
    for command in commands:
        words = " ".join(name for flag in command.flags for name in flag.names)
        values = "".join(
            f'      {"|".join(flag.names)}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}"'
            ' -- "$word")); return;;\n'
            for flag in command.flags
            if flag.choices
        )
        valued = f'    case "$before" in\n{values}    esac\n' if values else ""
        cases.append(
            f'    {command.name})\n{valued}      flags="{words}"; '
            f'choices="{" ".join(command.choices)}";;\n'
        )
    names = " ".join(command.name for command in commands)
    return f"""\
# Completion of ckpt for bash: eval "$(ckpt completion bash)"
_ckpt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local flags="" choices=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names} --help" -- "$word")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{"".join(cases)}  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word"));;
    *) if [ -n "$choices" ]; then COMPREPLY=($(compgen -W "$choices" -- "$word"));
       else COMPREPLY=($(compgen -f -- "$word")); fi;;
  esac
}}
complete -o filenames -F _ckpt ckpt
"""


def zsh_script(commands: list[Completed]) -> str:
    """For `eval "$(ckpt completion zsh)"`, after compinit."""
    names = "\n".join(f"    {_quoted(f'{c.name}:{_plain(c.help)}')}" for c in commands)
    cases = []
    for command in commands:
        lines = []
        for flag in command.flags:
            # Brackets and colons have a meaning in the arguments of `_arguments`.
            about = _plain(flag.help).replace("[", "(").replace("]", ")").replace(":", " ")
            value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
            # The star: an option may be given again.
            for name in flag.names:
                lines.append(_quoted(f"*{name}[{about}]" + (value if flag.takes_value else "")))
        rest = f"*:choice:({' '.join(command.choices)})" if command.choices else "*:file:_files"
        lines.append(_quoted(rest))
        cases.append(f"    {command.name}) _arguments {' '.join(lines)};;")
    listed = "\n".join(cases)
    return f"""\
#compdef ckpt
# Completion of ckpt for zsh: eval "$(ckpt completion zsh)", after compinit
_ckpt() {{
  local -a commands
  commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe 'command' commands; return
  fi
  local name="${{words[2]}}"
  shift words; (( CURRENT-- ))
  case "$name" in
{listed}
  esac
}}
compdef _ckpt ckpt
"""


def fish_script(commands: list[Completed]) -> str:
    """For `ckpt completion fish | source`."""
    lines = ["# Completion of ckpt for fish: ckpt completion fish | source"]
    for command in commands:
        about = _quoted(_plain(command.help))
        lines.append(f"complete -c ckpt -f -n __fish_use_subcommand -a {command.name} -d {about}")
        seen = f"'__fish_seen_subcommand_from {command.name}'"
        if command.choices:
            lines.append(f"complete -c ckpt -f -n {seen} -a {_quoted(' '.join(command.choices))}")
        else:
            # -F completes file names, as urls of stores may be paths; -f completes none.
            lines.append(f"complete -c ckpt -F -n {seen}")
        for flag in command.flags:
            spelled = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = " -r" if flag.takes_value else ""
            if flag.choices:
                value += f" -f -a {_quoted(' '.join(flag.choices))}"
            lines.append(
                f"complete -c ckpt -n {seen} {spelled}{value} -d {_quoted(_plain(flag.help))}"
            )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """One line without percent signs doubled for argparse."""
    return re.sub(r"\s+", " ", text.replace("%%", "%"))


def _quoted(text: str) -> str:
    """In single quotes, for any of the three shells."""
    return "'" + text.replace("'", "'\\''") + "'"
