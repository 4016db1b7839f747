"""All commands as one argparse tree. Imports nothing slow: see `ckpt.cli`.

A new command is a function in a module of `ckpt.cli.parsers`, and a line in `_COMMANDS`.
"""

from __future__ import annotations

import argparse

from ckpt.cli.parsers import comparing, costing, keeping, looking, moving
from ckpt.cli.parsers.arguments import Command, Commands
from ckpt.version import __version__

# 2 is what argparse exits with, 130 what shells show for a process that Ctrl-C ended.
OK, PROBLEM, USAGE, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 130

EXAMPLES = """\
examples:
  ckpt ls s3://bucket/run                          its checkpoints
  ckpt log runs/7b                                 what happened to them, newest first
  ckpt du runs/7b                                  how much space they take
  ckpt show runs/7b --step 1200                    names, shapes, dtypes, and who stored what
  ckpt show runs/7b --map --output map.html        a picture of it: tensors x ranks x files
  ckpt report runs/7b --output report.html         a page: saves, slow ranks, warnings
  ckpt watch s3://bucket/run                       follow a run in the terminal
  ckpt serve runs/7b runs/7b-lr3e4                 follow runs in a local web page
  ckpt diff runs/7b other/run                      which tensors changed, and by how much
  ckpt plan runs/7b --ranks 8 --layout fsdp2       what a load on 8 ranks would read
  ckpt cost --params 70B --ranks 512 --every 10m --mtbf 6h
  ckpt verify s3://bucket/run -o endpoint_url=http://localhost:9000
  ckpt cp /nvme/run s3://bucket/release-1200       a copy, verified, that can be resumed
  ckpt reshard runs/7b runs/on-8 --ranks 8         the latest, laid out for 8 ranks
  ckpt export runs/7b model.safetensors --dtype bfloat16
  ckpt import fsdp-checkpoint/ runs/7b --step 1200
  ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef
  ckpt rescue /mnt/host1/run /mnt/host2/run s3://bucket/run
  ckpt prune runs/7b --keep-last 3 --dry-run
  ckpt rm runs/7b 1200
  eval "$(ckpt completion bash)"

exit codes: 0 success; 1 damage was found, or the command failed; 2 wrong command line;
3 checkpoints differ (diff), one does not fit (plan), or you said no (prune, rm); 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of `ckpt`."""
    return _built()[0]


def all_commands() -> list[Command]:
    """Every command with its arguments."""
    return _built()[1]


def _built() -> tuple[argparse.ArgumentParser, list[Command]]:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Inspect, compare, verify, move, export and prune sharded checkpoints.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ckpt {__version__}")
    commands = Commands(parser.add_subparsers(metavar="COMMAND", required=True))
    for add in _COMMANDS:
        add(commands)
    return parser, commands.all


def _add_completion(commands: Commands) -> None:
    command = commands.add(
        "completion",
        "completing:completion",
        "print a script that completes commands and options in a shell",
        'eval "$(ckpt completion bash)"\n'
        'eval "$(ckpt completion zsh)"          after compinit\n'
        "ckpt completion fish | source",
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that you use")


# In the order in which help shows them.
_COMMANDS = (
    looking.add_ls,
    looking.add_log,
    looking.add_du,
    looking.add_show,
    looking.add_report,
    looking.add_watch,
    looking.add_serve,
    comparing.add_diff,
    comparing.add_plan,
    costing.add_cost,
    keeping.add_verify,
    moving.add_cp,
    moving.add_reshard,
    moving.add_export,
    moving.add_import,
    keeping.add_salvage,
    keeping.add_rescue,
    keeping.add_mend,
    keeping.add_prune,
    keeping.add_rm,
    keeping.add_pin,
    keeping.add_unpin,
    _add_completion,
)
