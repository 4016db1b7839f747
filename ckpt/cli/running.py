"""Runs one command: calls its function, shows the report, or prints it as JSON."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from ckpt.cli.commandline import Command
from ckpt.screens.terminal import as_json, progress_bar, show_json


def run(command: Command, arguments: Mapping[str, Any], shown: dict[str, Any]) -> int:
    """Call the function with `arguments` and show its report with `shown`; the exit code."""
    to_json = shown.pop("json", False)
    views = import_module(command.views)
    parameters = inspect.signature(command.function).parameters
    with ExitStack() as stack:
        rank = 0
        extra: dict[str, Any] = {}
        # What a function does not take, its command does not have: no table says so again.
        if "process_group" in parameters:
            rank = stack.enter_context(ranks_of_launcher())
        if "progress" in parameters:
            bar = progress_bar(command.name, shown=rank == 0)
            extra["progress"] = stack.enter_context(bar)
        if "confirm" in parameters:
            yes = shown.pop("yes", False)
            extra["confirm"] = partial(views.confirmed, yes=yes, as_json=to_json)
        report = command.function(**arguments, **extra)
    # All ranks have the same report, and share one terminal.
    if rank == 0 and to_json:
        show_json(json_of(command.name, report))
    elif rank == 0:
        getattr(views, f"show_{command.function.__name__}")(report, **shown)
    return command.code(report)


def json_of(name: str, report: Any) -> dict[str, Any]:
    """What `--json` prints: the fields of a report, and of which command and version they are.

    The version of a command's fields counts up when one gets another meaning, or goes.
    """
    fields = as_json(report)
    fields = {"reports": fields} if isinstance(fields, list) else fields
    return {"schema": f"ckpt.{name}", "version": 1, **fields}


@contextmanager
def ranks_of_launcher() -> Iterator[int]:
    """This process's rank; with several, a gloo process group exists within the block.

    Launchers set RANK and WORLD_SIZE in the environment, as `torchrun` does.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not world_size.isdigit() or int(world_size) < 2 or "RANK" not in os.environ:
        yield 0
        return
    import torch.distributed as dist  # most commands do without torch

    # Ranks of a command exchange bytes of host memory, and may have no accelerator.
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
