"""The command that computes: cost."""

from __future__ import annotations

import argparse

from ckpt.cli.parsers.arguments import (
    Commands,
    add_json,
    add_key_file,
    add_options,
    count,
    number,
    params,
    seconds,
)
from ckpt.cli.parsers.arguments import nbytes as size

OPTIMIZERS = (
    "adam", "adamw", "adagrad", "lion", "muon", "rmsprop", "sgd-momentum", "sgd", "none"
)  # fmt: skip


def add_cost(commands: Commands) -> None:
    """`ckpt cost`."""
    command = commands.add(
        "cost",
        "costing:cost",
        "compute what checkpoints cost: bytes, requests, money, lost work, and how often to save",
        "ckpt cost --params 70B --optimizer adamw --ranks 512 --every 10m --keep 3 --mtbf 6h\n"
        "ckpt cost s3://bucket/run --mtbf 6h             with the numbers of its saves\n"
        "ckpt cost s3://bucket/run --every 5m            what if it saved every 5 minutes\n"
        "neither prices nor speeds are assumed; lines that depend on one appear when you give it",
    )
    command.add_argument(
        "url", nargs="?", help="a root; numbers that you leave out come from its telemetry and log"
    )
    add_options(command, "--option", "of the store", short="-o")
    add_key_file(command, "--option", "of the root")
    command.add_argument("--params", type=params, metavar="N", help="parameters, such as 70B")
    command.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    command.add_argument("--dtype", help="of the parameters; default: float32")
    command.add_argument("--state-dtype", help="of the optimizer's states; default: as --dtype")
    command.add_argument("--master-dtype", help="of a second copy of the parameters; default: none")
    command.add_argument("--ranks", type=count, metavar="N", help="processes that save")
    command.add_argument("--keep", type=count, metavar="N", help="checkpoints that are kept")
    for name, text in (
        ("every", "from one save to the next, such as 10m"),
        ("mtbf", "between failures of the whole job, on average, such as 6h"),
        ("blocked", "that a save costs the training, such as 0.5s"),
        ("persist", "from the call of a save until the checkpoint exists"),
        ("restart", "from a failure to the first step of the new job"),
    ):
        command.add_argument(f"--{name}", type=seconds, metavar="TIME", help=f"time {text}")
    command.add_argument(
        "--bandwidth",
        type=size,
        metavar="SIZE",
        help="bytes per second of the store; gives --persist",
    )
    for name, text in (
        ("storage", "of 1 GiB for a month"),
        ("writes", "of 1,000 PUT requests"),
        ("reads", "of 1,000 GET requests"),
        ("rank-hour", "of one rank for an hour: of its GPU, and its part of the machine"),
    ):
        help = f"price {text}, in any one currency"
        command.add_argument(f"--price-{name}", type=number, metavar="PRICE", help=help)
    add_json(command)
    command.set_defaults(check=_check)


def _check(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments together; "" where nothing is."""
    if arguments.persist and arguments.bandwidth:
        return "--bandwidth determines --persist: give one of them"
    of_model = ("params", "optimizer", "dtype", "state_dtype", "master_dtype")
    if arguments.url is None:
        missing = [f"--{name}" for name in ("params", "ranks") if getattr(arguments, name) is None]
        return f"give a url, or {' and '.join(missing)}" if missing else ""
    given = [f"--{name.replace('_', '-')}" for name in of_model if getattr(arguments, name)]
    return f"{given[0]} goes without a url: a root has its own size" if given else ""
