"""The command `ckpt`: look at checkpoints, compare, check, move, export and prune them.

Exit codes: 0 all is well; 1 damage was found, or the command failed (the reason is on stderr);
2 the command line is wrong, a url that cannot name a store included; 3 the answer is "no":
checkpoints differ (`diff`), one does not fit (`plan`), or the user did not confirm (`prune`, `rm`);
130 interrupted.

The command line is parsed before anything else is imported, so that help and completion are quick;
the modules that show reports are imported when their command runs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from ckpt.cli.commandline import (
    INTERRUPTED,
    OK,
    PROBLEM,
    USAGE,
    Command,
    build_parser,
    given,
    refused,
)
from ckpt.screens.visible import visible_streams


@visible_streams()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; for the entry point `ckpt`."""
    words = list(sys.argv[1:] if argv is None else argv)
    # As git has it: `ckpt help cp` is what people type who know no flag yet.
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    # Without a command, show what there is. Unknown words are refused by the parser of the command:
    # its usage is what helps, and argparse would show that of `ckpt`.
    arguments, unknown = build_parser().parse_known_args(words or ["--help"])
    command, wrong = arguments.command, arguments.parser.error
    if unknown:
        wrong(f"unknown: {' '.join(unknown)}")
    try:
        of_function, of_view = given(command, arguments)
        code = OK
        if command.views:
            code = _run(command, of_function, of_view)
        else:
            command.function(**of_function)
        # Here a reader that has gone is still an exception; at exit, Python only complains.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough; python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _failed(f"interrupted; {command.after_interrupt}", INTERRUPTED)
    except Exception as error:
        return _explained(error, lambda text: refused(command, text, wrong))


def _run(command: Command, arguments: Mapping[str, Any], shown: dict[str, Any]) -> int:
    """Call the function with `arguments` and show its report with `shown`; the exit code."""
    from ckpt.screens.terminal import progress_bar, show_json

    to_json = shown.pop("json", False)
    views = import_module(command.views)
    parameters = inspect.signature(command.function).parameters
    with ExitStack() as stack:
        rank = 0
        extra: dict[str, Any] = {}
        # What a function does not take, its command does not have: no table says so again.
        if "process_group" in parameters:
            rank = stack.enter_context(_ranks_of_launcher())
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
    from ckpt.screens.terminal import as_json

    fields = as_json(report)
    fields = {"reports": fields} if isinstance(fields, list) else fields
    return {"schema": f"ckpt.{name}", "version": 1, **fields}


@contextmanager
def _ranks_of_launcher() -> Iterator[int]:
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


def _explained(error: Exception, refuse: Callable[[str], NoReturn]) -> int:
    """The exit code of a failure that a user can do something about; raises any other."""
    # Here and not above: help and completion do without.
    from ckpt.errors import CheckpointError, InvalidArgument
    from storage import InvalidUrlError

    # Functions name arguments as Python does; who typed a command line knows them by their flags.
    if isinstance(error, InvalidArgument):
        refuse(str(error))
    if isinstance(error, InvalidUrlError):
        return _failed(error, USAGE)
    if isinstance(error, CheckpointError | OSError):
        return _failed(error, PROBLEM)
    raise error  # a mistake of ours: the traceback is what helps


def _failed(error: object, code: int) -> int:
    print(f"ckpt: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
