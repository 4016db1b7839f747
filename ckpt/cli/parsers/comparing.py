"""Commands that compare: diff, plan."""

from __future__ import annotations

from ckpt.cli.parsers.arguments import (
    Commands,
    add_json,
    add_key_file,
    add_layout,
    add_memory_max,
    add_metadata_max,
    add_options,
    add_rename,
    add_stacks,
    add_step,
    add_url,
    count,
)


def add_diff(commands: Commands) -> None:
    """`ckpt diff`."""
    command = commands.add(
        "diff",
        "comparing:diff_checkpoints",
        "show which tensors and values differ between two checkpoints, and by how much",
        "ckpt diff runs/7b                         the newest against the one before it\n"
        "ckpt diff runs/7b --step-a 100 --step-b 900\n"
        "ckpt diff runs/7b s3://bucket/run --include 'model.*' --quick",
    )
    add_url(command, "checkpoint a: a root, or one step's directory")
    command.add_argument("other", nargs="?", help="checkpoint b; default: the same root")
    command.add_argument("--step-a", type=int, metavar="STEP", help="of a; default: the latest")
    command.add_argument("--step-b", type=int, metavar="STEP", help="of b; default: the latest")
    command.add_argument(
        "--quick", action="store_true", help="compare checksums only; read no tensor"
    )
    for name, text in (("include", "only names that match"), ("exclude", "no names that match")):
        command.add_argument(
            f"--{name}", action="append", default=[], metavar="PATTERN", help=f"{text}; repeatable"
        )
    add_stacks(command)
    add_rename(command, "replace in names of a, such as '^backbone\\.=' ; repeatable, in order")
    command.add_argument(
        "--sort", choices=("name", "amount"), default="name", help="amount: relative norm first"
    )
    add_options(command, "--other-option", "of the other store (default: the same)")
    add_key_file(command, "--other-option", "of the other root (default: the same)")
    add_metadata_max(command)
    add_json(command)


def add_plan(commands: Commands) -> None:
    """`ckpt plan`."""
    command = commands.add(
        "plan",
        "comparing:plan",
        "show what a load would read, per rank, and which names would not fit; reads no tensor",
        "ckpt plan runs/7b --ranks 8 --layout fsdp2\n"
        "ckpt plan runs/7b --ranks 8 --like other/run      does its state fit?\n"
        "ckpt plan runs/7b --like model.safetensors --entry model",
    )
    add_url(command)
    add_step(command)
    command.add_argument("--ranks", type=count, metavar="N", help="default: as when it was saved")
    add_layout(command)
    command.add_argument(
        "--like",
        metavar="URL",
        help="the state to load into looks like this one: a checkpoint of ours or of torch, or a "
        "safetensors file; default: a state that fits",
    )
    command.add_argument(
        "--entry",
        help="with --like: the entry of the state that it is; default: the only model",
    )
    add_memory_max(command)
    add_metadata_max(command)
    add_options(command, "--like-option", "of the store of --like (default: the same)")
    add_key_file(command, "--like-option", "of the root of --like (default: the same)")
    add_json(command)
