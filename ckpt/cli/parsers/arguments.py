"""What the parsers of commands are made of: a command, arguments that several have, their types.

A command is given as "module:function"; its module is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import re
from contextlib import suppress
from typing import Any


class Command:
    """One command: its parser, and what was added to it, for help and for completion.

    Kept here because argparse has no public way to list the arguments of a parser.
    """

    def __init__(self, name: str, text: str, parser: argparse.ArgumentParser) -> None:
        self.name = name
        self.text = text
        self._parser = parser
        self.actions: list[argparse.Action] = []

    def add_argument(self, *names: str, **how: Any) -> None:
        """As of argparse."""
        self.actions.append(self._parser.add_argument(*names, **how))

    def set_defaults(self, **values: Any) -> None:
        """As of argparse."""
        self._parser.set_defaults(**values)


class Commands:
    """All commands in the order in which help shows them."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self.all: list[Command] = []

    def add(self, name: str, run: str, text: str, examples: str) -> Command:
        """A new command that calls `run`, a "module:function" below `ckpt.cli`; `text` is its
        help.
        """
        parser = self._parsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines()),
            # As it is: argparse would fill the examples into one paragraph.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command = Command(name, text, parser)
        command.set_defaults(
            # A name and not the function: what a command needs is imported when it runs.
            command=f"ckpt.cli.{run}",
            after_interrupt="nothing half-done was published",
            check=lambda arguments: "",
            refuse=parser.error,
        )
        self.all.append(command)
        return command


def add_url(command: Command, help: str = "") -> None:
    """The url, by default of a root or a step, and options of its store."""
    about = "a path, s3://bucket/prefix, or any url of fsspec"
    command.add_argument("url", help=help or f"{about}; a root, or one step's directory")
    add_options(command, "--option", "of the store", short="-o")
    add_key_file(command, "--option", "of the root")


def add_memory_max(command: Command) -> None:
    """`--memory-max`, for commands that read files of other libraries."""
    text = (
        "memory for the metadata of other libraries' files, besides the bytes of the tensors; "
        "default: 64MiB"
    )
    command.add_argument("--memory-max", type=nbytes, metavar="SIZE", help=text)


def add_output_max(command: Command) -> None:
    """`--output-max`, for commands that write what is in files of other libraries."""
    text = "bytes of tensors to write; default: 64MiB and 8 times those that are stored"
    command.add_argument("--output-max", type=nbytes, metavar="SIZE", help=text)


def add_metadata_max(command: Command) -> None:
    """`--metadata-max`, for commands that use all that a root says of a checkpoint."""
    text = "memory for what describes checkpoints, and 10 seconds of a CPU a GiB; default: 1GiB"
    command.add_argument("--metadata-max", type=nbytes, metavar="SIZE", help=text)


def add_options(command: Command, name: str, whose: str, *, short: str = "") -> None:
    """Repeatable options of a store, `KEY=VALUE` each."""
    command.add_argument(
        *([short] if short else []),
        name,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_key_value,
        help=f"an option {whose}, such as endpoint_url=http://localhost:9000; repeatable",
    )


def add_key_file(command: Command, option: str, whose: str) -> None:
    """`--key-file` and its like, which gives one more option to what `option` collects."""
    command.add_argument(
        option.replace("option", "key-file"),
        action="append",
        dest=option.strip("-").replace("-", "_"),
        metavar="FILE",
        type=_key_file,
        help=f"the key {whose}, where that is encrypted: 32 bytes, or 64 hex digits",
    )


def add_step(command: Command) -> None:
    """`--step`: which checkpoint, by default the latest."""
    command.add_argument("--step", type=int, help="default: the latest")


def add_json(command: Command) -> None:
    """`--json`: output for programs."""
    command.add_argument("--json", action="store_true", help="print JSON")


def add_rename(command: Command, help: str) -> None:
    """`--rename REGEX=TEXT`, repeatable."""
    command.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="REGEX=TEXT",
        type=_substitution,
        help=help,
    )


def add_stacks(command: Command) -> None:
    """`--stack OLD=NEW`, repeatable."""
    command.add_argument(
        "--stack",
        action="append",
        default=[],
        metavar="OLD=NEW",
        type=_names,
        help="stacks of experts as one tensor for each, such as 'experts.weight=experts.{}.weight',"
        " or the other way round; repeatable, before --rename",
    )


def add_layout(command: Command) -> None:
    """`--layout`: how the ranks that load hold tensors."""
    command.add_argument(
        "--layout",
        choices=("fsdp2", "flat", "replicated"),
        default="fsdp2",
        help="fsdp2: rows, as fully_shard cuts (default); flat: even runs, as FSDP1; replicated",
    )


RULES = ("keep_last", "keep_every", "keep_best", "keep_younger")


def add_rules(command: Command) -> None:
    """Rules of retention, as `ckpt.cli.rules` reads them."""
    command.add_argument("--keep-last", type=count, metavar="N", help="the N newest")
    command.add_argument(
        "--keep-every", type=count, metavar="STEPS", help="the first at or after each multiple"
    )
    command.add_argument(
        "--keep-best", type=best, metavar="N[:min|max]", help="by metric; default: the lowest"
    )
    command.add_argument(
        "--keep-younger", type=seconds, metavar="AGE", help="younger than e.g. 90m, 12h, 7d"
    )
    command.add_argument(
        "--retire-unmeasured",
        action="store_true",
        help="with --keep-best: delete checkpoints without a metric too; default: keep them",
    )


def rules_problem(arguments: argparse.Namespace) -> str:
    """What is wrong with the rules; "" when they make sense."""
    if arguments.retire_unmeasured and arguments.keep_best is None:
        return "--retire-unmeasured is about --keep-best: give both"
    return ""


# Types of arguments ----------------------------------------------------------------------------


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    with suppress(ValueError):
        value = json.loads(value)  # numbers, true, {"nested": "options"}
    from storage.hidden import without_secrets  # here: help and completion do without

    return key, without_secrets({key: value})[key]


def _names(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not old or not new:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def _key_file(path: str) -> tuple[str, Any]:
    return "encryption_key", path


def _substitution(text: str) -> tuple[re.Pattern[str], str]:
    """The argument REGEX=TEXT. The last "=" counts, so that the expression may hold some."""
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TEXT")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{pattern!r} is not a regular expression: {error}"
        ) from error


def nbytes(text: str) -> int:
    """The argument SIZE, such as 5GB, 500MB, 2GiB or 1048576."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write e.g. 5GB, 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))


def count(text: str) -> int:
    """The argument N: at least 1."""
    # Not by int() alone, which takes signs, spaces and underscores.
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def block(text: str) -> tuple[int, int]:
    """The argument ROWSxCOLUMNS: two numbers of at least 1."""
    rows, _, columns = text.partition("x")
    return count(rows), count(columns)


def count_or_all(text: str) -> int:
    """The argument N: at least 0, which stands for all."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def port(text: str) -> int:
    """The argument PORT: 0 to 65535."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, which is a number up to 65535")
    return int(text)


def best(text: str) -> tuple[int, str]:
    """The argument N[:min|max]: how many, and which are the best."""
    number, _, mode = text.partition(":")
    if mode not in ("", "min", "max"):
        raise argparse.ArgumentTypeError(f"{text!r}: write N, N:min or N:max")
    return count(number), mode or "min"


def params(text: str) -> int:
    """The argument N: a number of parameters, such as 70B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    number = 0 if match is None else float(match[1]) * 1000 ** " KMBT".index(match[2] or " ")
    if number < 1 or number >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write e.g. 70B")
    return round(number)


def number(text: str) -> float:
    """The argument PRICE: a number of at least 0."""
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return float(text)


def seconds(text: str) -> float:
    """The argument AGE or TIME, such as 90m, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write e.g. 0.5s, 90m, 12h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
