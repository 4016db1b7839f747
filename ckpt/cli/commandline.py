"""All commands, made of the signatures of their functions. Imports nothing slow: see `ckpt.cli`.

A new command is a function in `ckpt.operate` that returns a report, a function in the module of
`ckpt.cli` of the same name that shows it, and an entry in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args

from ckpt import operate
from ckpt.cli import printing
from ckpt.operate.arguments import Argument, Unfold
from ckpt.version import __version__

# 2 is what argparse exits with, 130 what shells show for a process that Ctrl-C ended.
OK, PROBLEM, USAGE, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = """\
exit codes: 0 success; 1 damage was found, or the command failed; 2 wrong command line;
3 checkpoints differ (diff), one does not fit (plan), or you said no (prune, rm); 130 interrupted
"""


class Option(NamedTuple):
    """One argument of a command: `dest` is the parameter that it sets, `names` its flags.

    `how` is for `add_argument`, without what stores its value.
    """

    dest: str
    names: tuple[str, ...]
    how: Mapping[str, Any]
    argument: Argument

    @property
    def is_switch(self) -> bool:
        """Whether no value follows."""
        return self.how.get("action") == "store_true"


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `function` does it; one that is not of `ckpt.operate` prints for itself.

    What a function of `ckpt.operate` returns is shown by `show_` and its name in the module of
    `ckpt.cli` that is called as its own, which is imported when the command runs; the arguments
    `shown` go there alone. `code` makes the exit code of a report. `after_interrupt` says what
    Ctrl-C leaves. The `examples` are lines; the first one is shown for `ckpt` itself, too.
    """

    function: Callable[..., Any]
    examples: str
    code: Callable[[Any], int] = lambda report: OK
    shown: Mapping[str, Any] = field(default_factory=dict)
    after_interrupt: str = "nothing half-done was published"

    @property
    def name(self) -> str:
        """What it is called by, as its first example says."""
        return str(re.findall(r"ckpt (\w+)", self.examples)[0])

    @property
    def views(self) -> str:
        """The module that shows its report; "" where there is none."""
        package, _, module = self.function.__module__.rpartition(".")
        return f"ckpt.cli.{module}" if package == "ckpt.operate" else ""

    @property
    def text(self) -> str:
        """What it does, in a sentence."""
        return " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())

    @property
    def options(self) -> list[Option]:
        """Its arguments, in the order in which help shows them."""
        parameters = inspect.signature(self.function).parameters
        options = [one for p in parameters.values() for one in _options(p.name, p.annotation, p)]
        options += [one for item in self.shown.items() for one in _options(*item, None)]
        if self.views:
            options += _options("json", Annotated[bool, Argument("print JSON")], None)
        return options


def _options(name: str, annotation: Any, parameter: inspect.Parameter | None) -> Iterator[Option]:
    """The arguments that stand for one parameter; none where it is Python's alone."""
    if (argument := Argument.of(annotation)) is None:
        return
    default: Any = inspect.Parameter.empty if parameter is None else parameter.default
    is_keyword = parameter is None or parameter.kind is inspect.Parameter.KEYWORD_ONLY
    flags = argument.flag or (f"--{name.replace('_', '-')}" if is_keyword else "")
    how: dict[str, Any] = {"help": argument.help}
    choices = argument.choices_of(annotation)
    if get_args(annotation)[0] is bool:
        how["action"] = "store_true"
    else:
        how["type"] = _reading(argument.parse)
        how |= {"choices": choices} if choices else {}
        how |= {"metavar": argument.metavar} if argument.metavar else {}
        how |= {"action": "append"} if argument.collect and flags else {}
        how |= {"nargs": "?", "const": argument.bare} if argument.bare is not None else {}
        if type(default) in (int, float, str) and default != "" and "default:" not in argument.help:
            how["help"] += f"; default: {default}"
    if flags:
        is_required = parameter is not None and default is inspect.Parameter.empty
        yield Option(name, tuple(flags.split()), how | {"required": is_required}, argument)
    else:
        is_needed = default is inspect.Parameter.empty
        nargs = ("+" if is_needed else "*") if argument.collect else None if is_needed else "?"
        yield Option(name, (), how | ({"nargs": nargs} if nargs else {}), argument)
    # A file, and not the key itself: a command line is in the list of processes and in histories.
    if argument.collect is dict and "option" in flags:
        about = f"the key of the {'other ' * ('other' in flags)}root, where that is encrypted: "
        key: dict[str, Any] = {
            "action": "append",
            "metavar": "FILE",
            "help": about + "32 bytes, or 64 hex digits",
        }
        key["type"] = lambda path: ("encryption_key", path)
        yield Option(name, (flags.split()[-1].replace("option", "key-file"),), key, argument)


def _reading(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which shows the text of its own error only."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


class Parser(argparse.ArgumentParser):
    """A parser of one command, of which `options` are the arguments."""

    def add(self, option: Option) -> None:
        """One argument; what is not given is no argument of the call."""
        how = dict(option.how, default=argparse.SUPPRESS, help=_escaped(option.how["help"]))
        if option.names:
            self.add_argument(*option.names, dest=option.dest, **how)
        else:
            self.add_argument(option.dest, **how)

    def error(self, message: str) -> NoReturn:
        """End with status 2. A wrong choice names the nearest one, which may be one of many."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += "".join(f"; did you mean {one!r}?" for one in near)
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `ckpt`: `command` is the `Command`, `parser` its own parser."""
    firsts = "".join(f"  {one.examples.splitlines()[0]}\n" for one in COMMANDS)
    parser = Parser(
        prog="ckpt",
        description="Inspect, compare, verify, move, export and prune sharded checkpoints.",
        epilog=f"examples:\n{firsts}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        own = commands.add_parser(
            command.name,
            help=_escaped(command.text[0].lower() + command.text[1:].rstrip(".")),
            description=_escaped(command.text),
            epilog="examples:\n" + "\n".join(f"  {one}" for one in command.examples.splitlines()),
            # As it is: argparse would fill the examples into one paragraph.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(command=command, parser=own)
        for option in command.options:
            own.add(option)
    return parser


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # argparse formats help by it


def given(command: Command, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that were given for the function, and for what shows its report."""
    values = vars(arguments)
    # Only what was given: the defaults are those of the function.
    collected = {
        option.dest: option.argument.collect(values[option.dest])
        if option.argument.collect
        else values[option.dest]
        for option in command.options
        if option.dest in values
    }
    shown = {name: value for name, value in collected.items() if name in {*command.shown, "json"}}
    return {n: v for n, v in collected.items() if n not in shown or not command.views}, shown


def refused(command: Command, text: str, error: Callable[[str], NoReturn]) -> NoReturn:
    """End with `text`, in which arguments of Python, such as `keep_best=`, get their flags."""
    for option in command.options:
        if option.names:
            # `step='a'` becomes `--step 'a'`, and a bare `step=` or `mark=True` the flag alone.
            text = re.sub(rf"\b{option.dest}=(?=['\"\d])", f"{option.names[-1]} ", text)
            text = re.sub(rf"\b{option.dest}=(True\b)?", option.names[-1], text)
    error(text)


def _code_of_deletion(report: Any) -> int:
    # Not a failure, and yet a script must see that nothing was deleted.
    if report.outcome == "declined":
        return DIFFERENT
    return PROBLEM if getattr(report, "stayed", ()) else OK


_RUN_AGAIN = "the target is as it was; run again to continue"
_CONFIRMED = "what was not confirmed is still there"
_YES = Annotated[bool, Argument("delete without asking", flag="-y --yes")]
_PAGE = Annotated[
    str, Argument("one self-contained HTML page; default: report.html", metavar="FILE")
]
_SORT = Annotated[Literal["name", "amount"], Argument("amount: relative norm first")]

# In the order in which help shows them.
COMMANDS = (
    Command(
        operate.ls,
        "ckpt ls s3://bucket/run\n"
        "ckpt ls runs/7b --json | jq '.checkpoints[-1].step'\n"
        "ckpt ls --near /dev/shm/run                       what this host has",
        code=lambda report: PROBLEM if any(t.problem for t in getattr(report, "tiers", ())) else OK,
    ),
    Command(
        operate.log,
        "ckpt log runs/7b\nckpt log runs/7b -n 0 --json",
        code=lambda report: PROBLEM if report.problem else OK,
    ),
    Command(operate.disk_usage, "ckpt du s3://bucket/run\nckpt du runs/7b --json"),
    Command(
        printing.show,
        "ckpt show runs/7b 'model.*.weight' --step 1200\nckpt show runs/7b --map --output map.html",
    ),
    Command(
        operate.report,
        "ckpt report s3://bucket/run --output report.html\nckpt report runs/7b --json",
        shown={"output": _PAGE},
    ),
    Command(
        printing.watch,
        "ckpt watch s3://bucket/run                        Ctrl-C ends it\n"
        "ckpt watch runs/7b --once                         one frame\n"
        "ckpt watch runs/7b | tee saves.txt                a line for each thing that happens\n"
        "ckpt watch runs/7b --json | jq 'select(.kind == \"failed\")'",
    ),
    Command(
        printing.follow,
        "ckpt follow s3://bucket/run --line published --into w.safetensors --exec ./reload.sh\n"
        "ckpt follow runs/7b --once --exec 'python evaluate.py --step $CKPT_STEP'",
    ),
    Command(
        printing.serve,
        "ckpt serve s3://bucket/run                        then open the page that it names\n"
        "ckpt serve runs/7b runs/7b-lr3e4                  two runs next to each other\n"
        "ssh -t -L 8642:localhost:8642 cluster ckpt serve runs/7b",
    ),
    Command(
        operate.diff,
        "ckpt diff runs/7b                         the newest against the one before it\n"
        "ckpt diff runs/7b --step-a 100 --step-b 900\n"
        "ckpt diff runs/7b s3://bucket/run --include 'model.*' --quick",
        code=lambda report: OK if report.identical else DIFFERENT,
        shown={"sort": _SORT, "unfold": Unfold},
    ),
    Command(
        operate.plan_ranks,
        "ckpt plan runs/7b --ranks 8 --layout fsdp2\n"
        "ckpt plan runs/7b --ranks 8 --like other/run      does its state fit?\n"
        "ckpt plan runs/7b --like model.safetensors --entry model",
        code=lambda report: OK if report.fits else DIFFERENT,
    ),
    Command(
        operate.rehearse,
        "ckpt rehearse -- torchrun --nproc-per-node 2 train.py\n"
        "ckpt rehearse --kill 'by SIGTERM' --json -- python train.py\n"
        "exit codes: 0 the same; 1 it differs; 2 nothing is proved",
        code=lambda report: OK if report.difference is None else PROBLEM,
        shown={"output": Annotated[str, Argument("one self-contained HTML page", metavar="FILE")]},
        after_interrupt="its processes and its folder are gone",
    ),
    Command(
        operate.cost,
        "ckpt cost --params 70B --optimizer adamw --ranks 512 --every 10m --keep 3 --mtbf 6h\n"
        "ckpt cost s3://bucket/run --mtbf 6h             with the numbers of its saves\n"
        "neither prices nor speeds are assumed; lines that depend on one appear when you give it",
    ),
    Command(
        operate.verify,
        "ckpt verify s3://bucket/run --step 1200\nckpt verify runs/7b --mark",
        code=lambda report: OK if report.ok else PROBLEM,
    ),
    Command(
        operate.copy,
        "ckpt cp /nvme/run s3://bucket/release-1200 --step 1200\n"
        "ckpt cp --root /nvme/run s3://bucket/run      all checkpoints, as a root to save to\n"
        "after an interruption, run it again: what has arrived is not sent again",
        after_interrupt=_RUN_AGAIN,
    ),
    Command(
        operate.reshard,
        "ckpt reshard runs/7b --ranks 8                 loads by its attempt, which is printed\n"
        "ckpt reshard s3://bucket/run s3://bucket/run-on-64 --ranks 64 --layout flat",
        after_interrupt=_RUN_AGAIN,
    ),
    Command(
        operate.export,
        "ckpt export runs/7b out/model.safetensors --dtype bfloat16 --shard-bytes-max 5GB\n"
        "ckpt export runs/7b served --format hf --config models/base     for vLLM, transformers\n"
        "ckpt export fsdp-checkpoint/ model.safetensors      straight from torch's DCP directory\n"
        "torchrun --nproc-per-node 8 -m ckpt export runs/7b s3://bucket/model.safetensors",
    ),
    Command(
        operate.import_checkpoint,
        "ckpt import fsdp-checkpoint/ runs/7b --step 1200\n"
        "ckpt import model.safetensors runs/7b --rename '=model' --verify\n"
        "torchrun --nproc-per-node 8 -m ckpt import dcp/ s3://bucket/run",
    ),
    Command(
        operate.salvage,
        "ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef\nckpt salvage runs/7b",
        code=lambda report: OK if all(one.whole for one in report) else PROBLEM,
    ),
    Command(operate.rescue, "ckpt rescue /mnt/host1/run /mnt/host2/run s3://bucket/run"),
    Command(
        operate.mend,
        "ckpt mend runs/7b --dry-run\nckpt mend runs/7b",
        code=lambda report: PROBLEM if report.lost else OK,
    ),
    Command(
        operate.prune,
        "ckpt prune runs/7b --keep-last 3 --yes            in a script, which cannot answer\n"
        "ckpt prune runs/7b --keep-last 2 --keep-every 10000 --keep-best 1:min\n"
        "a checkpoint is kept if any rule keeps it; always kept are the latest, the last verified\n"
        "one, pinned ones, those whose files a kept one needs, and imports (see `ckpt rm`)",
        code=_code_of_deletion,
        shown={"yes": _YES},
        after_interrupt=_CONFIRMED,
    ),
    Command(
        operate.rm,
        "ckpt rm runs/7b --step 1200\nckpt rm runs/7b --attempt e000002-0123456789abcdef --yes",
        code=_code_of_deletion,
        shown={"yes": _YES},
        after_interrupt=_CONFIRMED,
    ),
    Command(
        operate.pin,
        "ckpt pin runs/7b --step 1200\nckpt pin runs/7b --attempt e000002-0123456789abcdef",
    ),
    Command(operate.unpin, "ckpt unpin runs/7b --step 1200"),
    Command(
        printing.completion,
        'eval "$(ckpt completion bash)"\n'
        'eval "$(ckpt completion zsh)"          after compinit\n'
        "ckpt completion fish | source",
    ),
)
