"""All commands and their options, as an argparse tree. Imports nothing slow: see `ckpt.cli`.

A command is given as "module:function"; its module is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

OK, PROBLEM, USAGE, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 130

EXAMPLES = """\
examples:
  ckpt ls s3://bucket/run                          which checkpoints are there
  ckpt log runs/7b                                 what happened to them, newest first
  ckpt du runs/7b                                  what they take on the disk
  ckpt show runs/7b --step 1200                    names, shapes, dtypes, and who stored what
  ckpt show runs/7b --map --output map.html        a picture of it: tensors x ranks x files
  ckpt report runs/7b --output report.html         a page: saves, slow ranks, warnings
  ckpt diff runs/7b other/run                      which tensors changed, and by how much
  ckpt plan runs/7b --ranks 8 --layout fsdp2       what a load on 8 ranks would read
  ckpt verify s3://bucket/run -o endpoint_url=http://localhost:9000
  ckpt cp /nvme/run s3://bucket/release-1200       a copy, verified, that can be resumed
  ckpt reshard runs/7b runs/on-8 --ranks 8         the latest, laid out for 8 ranks
  ckpt export runs/7b model.safetensors --dtype bfloat16
  ckpt import fsdp-checkpoint/ runs/7b --step 1200
  ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef
  ckpt prune runs/7b --keep-last 3 --dry-run
  ckpt rm runs/7b 1200
  eval "$(ckpt completion bash)"

exit codes: 0 success; 1 damage was found, or the command failed; 2 wrong command line;
3 checkpoints differ (diff), one does not fit (plan), or you said no (prune, rm); 130 interrupted
"""


class Command:
    """One command: its parser, and what was added to it, for help and for completion."""

    def __init__(self, name: str, text: str, parser: argparse.ArgumentParser) -> None:
        self.name = name
        self.text = text
        self.parser = parser
        self.actions: list[argparse.Action] = []

    def add_argument(self, *names: str, **how: Any) -> None:
        """As of argparse."""
        self.actions.append(self.parser.add_argument(*names, **how))


class Commands:
    """All commands in the order in which help shows them."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self.all: list[Command] = []

    def add(self, name: str, text: str, **how: Any) -> Command:
        """A new command with the help `text`."""
        self.all.append(Command(name, text, self._parsers.add_parser(name, help=text, **how)))
        return self.all[-1]


def build_parser() -> argparse.ArgumentParser:
    """The command line of `ckpt`."""
    return _built()[0]


def all_commands() -> list[Command]:
    """Every command with its arguments."""
    return _built()[1]


def _built() -> tuple[argparse.ArgumentParser, list[Command]]:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Look at sharded checkpoints; compare, check, move, export and prune them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = Commands(parser.add_subparsers(metavar="COMMAND", required=True))
    _add_ls(commands)
    _add_log(commands)
    _add_du(commands)
    _add_show(commands)
    _add_report(commands)
    _add_diff(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_cp(commands)
    _add_reshard(commands)
    _add_export(commands)
    _add_import(commands)
    _add_salvage(commands)
    _add_mend(commands)
    _add_prune(commands)
    _add_rm(commands)
    _add_completion(commands)
    return parser, commands.all


def _add(commands: Commands, name: str, run: str, text: str, examples: str) -> Command:
    command = commands.add(
        name,
        text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.parser.set_defaults(
        command=f"ckpt.cli.{run}",
        after_interrupt="nothing half-done was published",
        check=lambda arguments: "",
    )
    return command


def _add_url(parser: Command, help: str = "") -> None:
    about = "a path, s3://bucket/prefix, or any url of fsspec"
    parser.add_argument("url", help=help or f"{about}; a root, or one step's directory")
    _add_options(parser, "--option", "of the store", short="-o")


def _add_options(parser: Command, name: str, whose: str, *, short: str = "") -> None:
    parser.add_argument(
        *([short] if short else []),
        name,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_key_value,
        help=f"an option {whose}, such as endpoint_url=http://localhost:9000; repeatable",
    )


def _add_step(parser: Command) -> None:
    parser.add_argument("--step", type=int, help="default: the latest")


def _add_json(parser: Command) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_ls(commands: Commands) -> None:
    parser = _add(
        commands,
        "ls",
        "looking:ls",
        "list the checkpoints of a root",
        "ckpt ls s3://bucket/run\nckpt ls runs/7b --json | jq '.[-1].step'",
    )
    _add_url(parser)
    _add_json(parser)


def _add_log(commands: Commands) -> None:
    parser = _add(
        commands,
        "log",
        "looking:log",
        "show the history of a root: claims, commits, retirements, pins",
        "ckpt log runs/7b\nckpt log runs/7b -n 0 --json",
    )
    _add_url(parser)
    parser.add_argument(
        "-n",
        "--count",
        type=_count_or_all,
        default=30,
        metavar="N",
        help="newest N records; 0: all",
    )
    _add_json(parser)


def _add_du(commands: Commands) -> None:
    parser = _add(
        commands,
        "du",
        "looking:du",
        "show what every checkpoint takes, and what unfinished saves left",
        "ckpt du s3://bucket/run\nckpt du runs/7b --json",
    )
    _add_url(parser)
    _add_json(parser)


def _add_show(commands: Commands) -> None:
    parser = _add(
        commands,
        "show",
        "showing:show",
        "show the tensors of a checkpoint and who stored them",
        "ckpt show runs/7b 'model.*.weight' --step 1200\n"
        "ckpt show runs/7b --map\n"
        "ckpt show runs/7b --map --output map.html",
    )
    _add_url(parser)
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern of names")
    _add_step(parser)
    parser.add_argument("--map", action="store_true", help="a picture: tensors x ranks x files")
    parser.add_argument(
        "--output", metavar="FILE", help="with --map: write one self-contained HTML page"
    )
    parser.add_argument("--json", action="store_true", help="for programs: every stored part")


def _add_report(commands: Commands) -> None:
    parser = _add(
        commands,
        "report",
        "reporting:report",
        "write a page about the saves of a root: how long, how large, who was slow",
        "ckpt report s3://bucket/run --output report.html\nckpt report runs/7b --json",
    )
    _add_url(parser, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="one self-contained HTML page; default: report.html",
    )
    _add_json(parser)


def _add_diff(commands: Commands) -> None:
    parser = _add(
        commands,
        "diff",
        "comparing:diff_checkpoints",
        "tell which tensors and values differ between two checkpoints, and by how much",
        "ckpt diff runs/7b                         the newest against the one before it\n"
        "ckpt diff runs/7b --step-a 100 --step-b 900\n"
        "ckpt diff runs/7b s3://bucket/run --include 'model.*' --quick",
    )
    _add_url(parser, "checkpoint a: a root, or one step's directory")
    parser.add_argument("other", nargs="?", help="checkpoint b; default: the same root")
    parser.add_argument("--step-a", type=int, metavar="STEP", help="of a; default: the latest")
    parser.add_argument("--step-b", type=int, metavar="STEP", help="of b; default: the latest")
    parser.add_argument(
        "--quick", action="store_true", help="compare checksums only; read no tensor"
    )
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN")
    _add_rename(parser, "replace in names of a, such as '^backbone\\.=' ; repeatable, in order")
    parser.add_argument(
        "--sort", choices=("name", "amount"), default="name", help="amount: relative norm first"
    )
    _add_options(parser, "--other-option", "of the other store (default: the same)")
    _add_json(parser)


def _add_plan(commands: Commands) -> None:
    parser = _add(
        commands,
        "plan",
        "comparing:plan",
        "tell what a load would read, per rank, and which names would not fit; reads no tensor",
        "ckpt plan runs/7b --ranks 8 --layout fsdp2\n"
        "ckpt plan runs/7b --ranks 8 --like other/run      does its state fit?\n"
        "ckpt plan runs/7b --like model.safetensors --entry model",
    )
    _add_url(parser)
    _add_step(parser)
    parser.add_argument("--ranks", type=_count, metavar="N", help="default: as many as saved it")
    _add_layout(parser)
    parser.add_argument(
        "--like",
        metavar="URL",
        help="the state is like what is there: a checkpoint of ours or of torch, a safetensors "
        "file; default: the state fits",
    )
    parser.add_argument(
        "--entry", help="with --like: below which name it stands; default: the only model"
    )
    _add_options(parser, "--like-option", "of the store of --like (default: the same)")
    _add_json(parser)


def _add_rename(parser: Command, help: str) -> None:
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="REGEX=TEXT",
        type=substitution,
        help=help,
    )


def _add_verify(commands: Commands) -> None:
    parser = _add(
        commands,
        "verify",
        "keeping:verify_checkpoint",
        "read a whole checkpoint and report every changed byte",
        "ckpt verify s3://bucket/run --step 1200\nckpt verify runs/7b --mark",
    )
    _add_url(parser)
    _add_step(parser)
    parser.add_argument("--mark", action="store_true", help="note success in the log")
    _add_json(parser)


def _add_cp(commands: Commands) -> None:
    parser = _add(
        commands,
        "cp",
        "moving:cp",
        "copy a checkpoint, or a whole root, to another place or store; every byte is verified",
        "ckpt cp /nvme/run s3://bucket/release-1200 --step 1200\n"
        "ckpt cp --root /nvme/run s3://bucket/run      all checkpoints, as a root to go on with\n"
        "when it was interrupted: run it again, what is there is not sent again",
    )
    _add_url(parser)
    parser.add_argument("target", help="a new directory, or prefix of an object store")
    _add_step(parser)
    parser.add_argument(
        "--root", action="store_true", help="copy all checkpoints of a root to a new root"
    )
    parser.add_argument("--threads", type=_count, default=4, metavar="N", help="default: 4")
    _add_options(parser, "--target-option", "of the target's store (default: the source's)")
    _add_json(parser)
    parser.parser.set_defaults(after_interrupt="the target is as it was; run again to go on")


def _add_reshard(commands: Commands) -> None:
    parser = _add(
        commands,
        "reshard",
        "moving:reshard_checkpoint",
        "write a checkpoint anew, laid out for faster loads on another number of ranks",
        "ckpt reshard runs/7b --ranks 8                 loads by its attempt, which is printed\n"
        "ckpt reshard runs/7b runs/7b-on-8 --ranks 8\n"
        "ckpt reshard s3://bucket/run s3://bucket/run-on-64 --ranks 64 --layout flat",
    )
    _add_url(parser)
    parser.add_argument(
        "target",
        nargs="?",
        help="a new directory, or prefix of an object store; default: the root itself, where the "
        "new form becomes the latest checkpoint",
    )
    parser.add_argument("--ranks", type=_count, required=True, metavar="N", help="that will load")
    _add_layout(parser)
    _add_step(parser)
    parser.add_argument("--threads", type=_count, default=3, metavar="N", help="default: 3")
    _add_options(parser, "--target-option", "of the target's store (default: the source's)")
    _add_json(parser)
    parser.parser.set_defaults(after_interrupt="the target is as it was; run again to go on")


def _add_layout(parser: Command) -> None:
    parser.add_argument(
        "--layout",
        choices=("fsdp2", "flat", "replicated"),
        default="fsdp2",
        help="fsdp2: rows, as fully_shard cuts (default); flat: even runs, as FSDP1; replicated",
    )


def _add_export(commands: Commands) -> None:
    parser = _add(
        commands,
        "export",
        "exporting:export_checkpoint",
        "write a model, or a whole state, as safetensors, torch.save file or DCP directory",
        "ckpt export runs/7b out/model.safetensors --dtype bfloat16 --shard-size 5GB\n"
        "ckpt export fsdp-checkpoint/ model.safetensors      straight from torch's DCP directory\n"
        "ckpt export runs/7b state.pt --optimizer\n"
        "torchrun --nproc-per-node 8 -m ckpt export runs/7b s3://bucket/model.safetensors",
    )
    _add_url(parser, "a root or step of ours, a DCP directory, a .pt or .safetensors file")
    parser.add_argument("target", help="the file to write, on a disk or in an object store")
    _add_step(parser)
    parser.add_argument(
        "--format", choices=("safetensors", "torch", "dcp"), help="default: by the target's name"
    )
    parser.add_argument("--entry", help="which module of the state; default: the only one")
    parser.add_argument("--dtype", help="for floating-point tensors, e.g. bfloat16")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN")
    _add_rename(parser, r"replace in names, such as '^backbone\.=' ; repeatable, in order")
    parser.add_argument(
        "--shard-size",
        type=_nbytes,
        metavar="SIZE",
        help="cut into files of at most this size, e.g. 5GB, with an index",
    )
    parser.add_argument("--keep-tied", action="store_true", help="write every tied name")
    parser.add_argument(
        "--optimizer", action="store_true", help="the whole state; for torch files and DCP"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all files back and compare with the source"
    )
    _add_options(parser, "--target-option", "of the target's store (default: the source's)")
    _add_json(parser)


def _add_import(commands: Commands) -> None:
    parser = _add(
        commands,
        "import",
        "exporting:import_foreign",
        "make a checkpoint of ours of one that another library wrote; no code in it is run",
        "ckpt import fsdp-checkpoint/ runs/7b --step 1200\n"
        "ckpt import model.safetensors runs/7b --rename '^=model.' --verify\n"
        "torchrun --nproc-per-node 8 -m ckpt import dcp/ s3://bucket/run",
    )
    parser.add_argument(
        "source", help="a DCP directory, a .pt file, safetensors files with or without an index"
    )
    _add_url(parser, "the root to save to, new or old")
    parser.add_argument("--step", type=int, default=0, help="default: 0")
    _add_rename(parser, r"replace in names, such as '^module\.=' ; repeatable, in order")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="leave out; repeatable"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read it back and compare with the source"
    )
    _add_options(parser, "--source-option", "of the source's store")
    _add_json(parser)


def _add_salvage(commands: Commands) -> None:
    parser = _add(
        commands,
        "salvage",
        "keeping:salvage_checkpoint",
        "rebuild a lost MANIFEST from the data files, reading and checking all of them",
        "ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef\nckpt salvage runs/7b",
    )
    _add_url(parser)
    parser.add_argument("--step", type=int, help="of a root; default: all without a MANIFEST")
    parser.add_argument("--dry-run", action="store_true", help="check only, write no MANIFEST")
    _add_json(parser)


def _add_mend(commands: Commands) -> None:
    parser = _add(
        commands,
        "mend",
        "keeping:mend_log",
        "make a log whole that was rolled back, restored in part or merged; nothing is removed",
        "ckpt mend runs/7b --dry-run\nckpt mend runs/7b",
    )
    _add_url(parser, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    parser.add_argument("--dry-run", action="store_true", help="look only, append nothing")
    _add_json(parser)


def _add_prune(commands: Commands) -> None:
    parser = _add(
        commands,
        "prune",
        "removing:prune",
        "retire and delete old checkpoints; a running training is not disturbed",
        "ckpt prune runs/7b --keep-last 3 --dry-run\n"
        "ckpt prune runs/7b --keep-last 3 --yes            in a script, where nobody can answer\n"
        "ckpt prune runs/7b --keep-last 2 --keep-every 10000 --keep-best 1:min\n"
        "kept is what any rule keeps, and always: the latest, the last verified one, pinned ones,\n"
        "those whose files a kept one needs, and what no training saved (imports; see `ckpt rm`)",
    )
    _add_url(parser)
    parser.add_argument("--keep-last", type=_count, metavar="N", help="the N newest")
    parser.add_argument(
        "--keep-every", type=_count, metavar="STEPS", help="the first at or after each multiple"
    )
    parser.add_argument(
        "--keep-best", type=_best, metavar="N[:min|max]", help="by metric; default: the lowest"
    )
    parser.add_argument(
        "--keep-younger", type=_seconds, metavar="AGE", help="younger than e.g. 90m, 12h, 7d"
    )
    parser.add_argument(
        "--retire-unmeasured",
        action="store_true",
        help="with --keep-best: checkpoints without a metric go, too; default: they stay",
    )
    _add_consent(parser)
    _add_json(parser)
    parser.parser.set_defaults(check=_some_rule)


def _add_consent(parser: Command) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")
    parser.add_argument("--yes", "-y", action="store_true", help="delete without asking")
    parser.parser.set_defaults(after_interrupt="what was not told to be deleted is there")


def _add_rm(commands: Commands) -> None:
    parser = _add(
        commands,
        "rm",
        "removing:rm",
        "delete one checkpoint, unless another one needs it or it is the last",
        "ckpt rm runs/7b 1200\nckpt rm runs/7b 0 --attempt e000002-0123456789abcdef --yes",
    )
    _add_url(parser, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    parser.add_argument("step", type=int, help="its step, as `ckpt ls` shows it")
    parser.add_argument(
        "--attempt", default="", help="which one, where the root has several of that step"
    )
    _add_consent(parser)
    _add_json(parser)


def _some_rule(arguments: Any) -> str:
    if arguments.retire_unmeasured and arguments.keep_best is None:
        return "--retire-unmeasured is about --keep-best: give both"
    rules = ("keep_last", "keep_every", "keep_best", "keep_younger")
    if any(getattr(arguments, rule) is not None for rule in rules):
        return ""
    return "prune needs a rule: --keep-last, --keep-every, --keep-best or --keep-younger"


def _add_completion(commands: Commands) -> None:
    parser = _add(
        commands,
        "completion",
        "completing:completion",
        "print a script that completes commands and options in a shell",
        'eval "$(ckpt completion bash)"\n'
        'eval "$(ckpt completion zsh)"          after compinit\n'
        "ckpt completion fish | source",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


# Types of arguments ----------------------------------------------------------------------------


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)  # numbers, true, {"nested": "options"}
    except ValueError:
        return key, value


def substitution(text: str) -> tuple[re.Pattern[str], str]:
    """The argument REGEX=TEXT. The last "=" counts, so that the expression may hold some."""
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TEXT")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{pattern!r} is no regular expression: {error}"
        ) from error


def _nbytes(text: str) -> int:
    from ckpt.convert.export import parse_nbytes  # slow to import, and seldom needed

    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _count_or_all(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _best(text: str) -> tuple[int, str]:
    number, _, mode = text.partition(":")
    if mode not in ("", "min", "max"):
        raise argparse.ArgumentTypeError(f"{text!r}: write N, N:min or N:max")
    return _count(number), mode or "min"


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write e.g. 90m, 12h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
