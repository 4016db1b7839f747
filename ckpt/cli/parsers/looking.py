"""Commands that show what is there: ls, log, du, show, report."""

from __future__ import annotations

from ckpt.cli.parsers.arguments import (
    Commands,
    add_json,
    add_step,
    add_url,
    count_or_all,
)


def add_ls(commands: Commands) -> None:
    """`ckpt ls`."""
    command = commands.add(
        "ls",
        "looking:ls",
        "list the checkpoints of a root, with their times and sizes",
        "ckpt ls s3://bucket/run\nckpt ls runs/7b --json | jq '.[-1].step'",
    )
    add_url(command)
    add_json(command)


def add_log(commands: Commands) -> None:
    """`ckpt log`."""
    command = commands.add(
        "log",
        "looking:log",
        "show the history of a root: claims, commits, retirements, pins",
        "ckpt log runs/7b\nckpt log runs/7b -n 0 --json",
    )
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    command.add_argument(
        "-n",
        "--count",
        type=count_or_all,
        default=30,
        metavar="N",
        help="newest N records; 0: all",
    )
    add_json(command)


def add_du(commands: Commands) -> None:
    """`ckpt du`."""
    command = commands.add(
        "du",
        "looking:du",
        "show what every checkpoint takes, and what unfinished saves left",
        "ckpt du s3://bucket/run\nckpt du runs/7b --json",
    )
    add_url(command)
    add_json(command)


def add_show(commands: Commands) -> None:
    """`ckpt show`."""
    command = commands.add(
        "show",
        "showing:show",
        "show the tensors of a checkpoint and who stored them",
        "ckpt show runs/7b 'model.*.weight' --step 1200\n"
        "ckpt show runs/7b --map\n"
        "ckpt show runs/7b --map --output map.html",
    )
    add_url(command)
    command.add_argument("pattern", nargs="?", default="*", help="shell pattern of names")
    add_step(command)
    command.add_argument("--map", action="store_true", help="a picture: tensors x ranks x files")
    command.add_argument(
        "--output", metavar="FILE", help="with --map: write one self-contained HTML page"
    )
    command.add_argument("--json", action="store_true", help="print JSON, with every stored part")


def add_report(commands: Commands) -> None:
    """`ckpt report`."""
    command = commands.add(
        "report",
        "reporting:report",
        "write a page about the saves of a root: how long, how large, which ranks were slow",
        "ckpt report s3://bucket/run --output report.html\nckpt report runs/7b --json",
    )
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    command.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="one self-contained HTML page; default: report.html",
    )
    add_json(command)
