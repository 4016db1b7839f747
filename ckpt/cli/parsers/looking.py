"""Commands that show what is there: ls, log, du, show, report, watch, serve."""

from __future__ import annotations

from ckpt.cli.parsers.arguments import (
    Command,
    Commands,
    add_json,
    add_metadata_max,
    add_options,
    add_rules,
    add_step,
    add_url,
    count_or_all,
    port,
    rules_problem,
    seconds,
)


def add_ls(commands: Commands) -> None:
    """`ckpt ls`."""
    command = commands.add(
        "ls",
        "looking:ls",
        "list the checkpoints of a root, with their times and sizes",
        "ckpt ls s3://bucket/run\nckpt ls runs/7b --json | jq '.[-1].step'\n"
        "ckpt ls --near /dev/shm/run                       what this host has",
    )
    add_url(command)
    command.add_argument(
        "--near", action="store_true", help="URL is a directory of near checkpoints on this host"
    )
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
    add_metadata_max(command)
    command.add_argument("--json", action="store_true", help="print JSON, with every stored part")


def add_report(commands: Commands) -> None:
    """`ckpt report`."""
    command = commands.add(
        "report",
        "reporting:report",
        "write a page about the saves of a root: how long, how large, which ranks were slow",
        "ckpt report s3://bucket/run --output report.html\n"
        "ckpt report runs/7b --near /dev/shm/run           and what this host has\n"
        "ckpt report runs/7b --json",
    )
    add_url(command, "a root: a path, s3://bucket/prefix, or any url of fsspec")
    command.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="one self-contained HTML page; default: report.html",
    )
    add_near(command)
    add_metadata_max(command)
    add_json(command)


def add_watch(commands: Commands) -> None:
    """`ckpt watch`."""
    command = commands.add(
        "watch",
        "watching:watch",
        "follow a run in the terminal: saves as they come, slow ranks, failures",
        "ckpt watch s3://bucket/run                        Ctrl-C ends it\n"
        "ckpt watch runs/7b --once                         one frame\n"
        "ckpt watch runs/7b --near /dev/shm/run            and the work at risk\n"
        "ckpt watch runs/7b | tee saves.txt                a line for each thing that happens\n"
        "ckpt watch runs/7b --json | jq 'select(.kind == \"failed\")'",
    )
    add_url(command, "a root, which need not exist yet: a path, s3://bucket/prefix, ...")
    command.add_argument("--once", action="store_true", help="print one frame and end")
    add_near(command)
    add_interval(command)
    command.add_argument(
        "--json", action="store_true", help="print a line of JSON for each thing that happens"
    )


def add_serve(commands: Commands) -> None:
    """`ckpt serve`."""
    command = commands.add(
        "serve",
        "serving:serve",
        "a local web page that follows runs: timeline, slow ranks, sizes, retention, failures",
        "ckpt serve s3://bucket/run                        then open the page that it names\n"
        "ckpt serve runs/7b runs/7b-lr3e4                  two runs side by side\n"
        "ckpt serve runs/7b --keep-last 3 --keep-every 1000\n"
        "ckpt serve runs/7b --near /dev/shm/run            and the work at risk\n"
        "ssh -t -L 8642:localhost:8642 cluster ckpt serve runs/7b",
    )
    about = (
        "a root, which need not exist yet: a path, s3://bucket/prefix, ...; several are compared"
    )
    command.add_argument("urls", nargs="+", metavar="url", help=about)
    add_options(command, "--option", "of the store", short="-o")
    command.add_argument(
        "--port", type=port, default=8642, help="default: 8642; 0 takes a free one"
    )
    command.add_argument(
        "--host", default="127.0.0.1", help="where to listen; default: 127.0.0.1, this machine only"
    )
    command.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers may call it besides localhost; repeatable",
    )
    add_near(command)
    add_interval(command)
    add_rules(command)
    command.set_defaults(check=rules_problem)


def add_near(command: Command) -> None:
    """`--near`: directories of hosts to look at."""
    command.add_argument(
        "--near",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory of near checkpoints of a host, seen from here; repeatable",
    )


def add_interval(command: Command) -> None:
    """`--interval`: how often to look."""
    command.add_argument(
        "--interval",
        type=seconds,
        default=2.0,
        metavar="TIME",
        help="between looks after something has happened, then up to 8 times as long; default: 2s",
    )
