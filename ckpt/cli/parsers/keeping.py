"""Commands that keep a root sound and small: verify, salvage, mend, prune, rm, pin."""

from __future__ import annotations

from typing import Any

from ckpt.cli.parsers.arguments import (
    RULES,
    Command,
    Commands,
    add_json,
    add_metadata_max,
    add_rules,
    add_step,
    add_url,
    rules_problem,
    seconds,
)


def add_verify(commands: Commands) -> None:
    """`ckpt verify`."""
    command = commands.add(
        "verify",
        "keeping:verify_checkpoint",
        "read a whole checkpoint and report every changed byte",
        "ckpt verify s3://bucket/run --step 1200\nckpt verify runs/7b --mark",
    )
    add_url(command)
    add_step(command)
    command.add_argument("--mark", action="store_true", help="record success in the log")
    add_metadata_max(command)
    add_json(command)


def add_salvage(commands: Commands) -> None:
    """`ckpt salvage`."""
    command = commands.add(
        "salvage",
        "keeping:salvage_checkpoint",
        "rebuild a lost MANIFEST from the data files, reading and checking all of them",
        "ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef\nckpt salvage runs/7b",
    )
    add_url(command)
    command.add_argument("--step", type=int, help="of a root; default: all without a MANIFEST")
    command.add_argument("--dry-run", action="store_true", help="check only; write no MANIFEST")
    add_json(command)


def add_rescue(commands: Commands) -> None:
    """`ckpt rescue`."""
    command = commands.add(
        "rescue",
        "rescuing:rescue_near",
        "make the newest near checkpoint of a dead job durable, from its hosts' directories",
        "ckpt rescue /mnt/host1/run /mnt/host2/run s3://bucket/run",
    )
    command.add_argument("near", nargs="+", metavar="NEAR", help="the directory of one host")
    add_url(command, "the root that the job saved to: a path, s3://bucket/prefix, ...")
    add_json(command)


def add_mend(commands: Commands) -> None:
    """`ckpt mend`."""
    command = commands.add(
        "mend",
        "keeping:mend_log",
        "bring back every whole checkpoint where log, FORMAT or MANIFESTs were lost or damaged",
        "ckpt mend runs/7b --dry-run\nckpt mend runs/7b",
    )
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    command.add_argument("--dry-run", action="store_true", help="report only; write nothing")
    add_json(command)


def add_prune(commands: Commands) -> None:
    """`ckpt prune`."""
    command = commands.add(
        "prune",
        "removing:prune",
        "retire and delete old checkpoints; a running training is not disturbed",
        "ckpt prune runs/7b --keep-last 3 --dry-run\n"
        "ckpt prune runs/7b --keep-last 3 --yes            in a script, which cannot answer\n"
        "ckpt prune runs/7b --keep-last 2 --keep-every 10000 --keep-best 1:min\n"
        "a checkpoint is kept if any rule keeps it; always kept are the latest, the last verified\n"
        "one, pinned ones, those whose files a kept one needs, and imports (see `ckpt rm`)",
    )
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    add_rules(command)
    command.add_argument(
        "--retire-after",
        type=seconds,
        metavar="TIME",
        help="only what these rules have given up for that long, e.g. 1d; default: at once",
    )
    _add_consent(command)
    add_json(command)
    command.set_defaults(check=_some_rule)


def add_rm(commands: Commands) -> None:
    """`ckpt rm`."""
    command = commands.add(
        "rm",
        "removing:rm",
        "delete one checkpoint, unless another one needs it or it is the last",
        "ckpt rm runs/7b 1200\nckpt rm runs/7b 0 --attempt e000002-0123456789abcdef --yes",
    )
    _add_one(command)
    _add_consent(command)


def add_pin(commands: Commands) -> None:
    """`ckpt pin`."""
    command = commands.add(
        "pin",
        "keeping:pin_checkpoint",
        "keep one checkpoint, whatever rules say, until it is unpinned",
        "ckpt pin runs/7b 1200\nckpt pin runs/7b 0 --attempt e000002-0123456789abcdef",
    )
    _add_one(command)
    command.set_defaults(pinned=True)


def add_unpin(commands: Commands) -> None:
    """`ckpt unpin`."""
    command = commands.add(
        "unpin",
        "keeping:pin_checkpoint",
        "lift the pin of a checkpoint: rules decide about it again",
        "ckpt unpin runs/7b 1200",
    )
    _add_one(command)
    command.set_defaults(pinned=False)


def _add_one(command: Command) -> None:
    """One checkpoint of a root, by its step."""
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    command.add_argument("step", type=int, help="its step, as `ckpt ls` shows it")
    command.add_argument(
        "--attempt", default="", help="which one, if the root has several checkpoints of that step"
    )
    add_json(command)


def _add_consent(command: Command) -> None:
    command.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted; delete nothing"
    )
    command.add_argument("--yes", "-y", action="store_true", help="delete without asking")
    command.set_defaults(after_interrupt="what was not confirmed is still there")


def _some_rule(arguments: Any) -> str:
    if problem := rules_problem(arguments):
        return problem
    # Several may be given. A required group of argparse takes exactly one of its options.
    if any(getattr(arguments, rule) is not None for rule in RULES):
        return ""
    return "prune needs a rule: --keep-last, --keep-every, --keep-best or --keep-younger"
