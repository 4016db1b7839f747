"""The command `ckpt`: look at checkpoints, compare, check, move, export and prune them.

Exit codes: 0 all is well; 1 damage was found, or the command failed (the reason is on stderr);
2 the command line is wrong, a url that cannot name a store included; 3 the answer is "no":
checkpoints differ (`diff`), one does not fit (`plan`), or the user did not confirm (`prune`, `rm`);
130 interrupted.

The command line is parsed before anything else is imported, so that help and completion are quick;
the modules here that run commands are imported when their command is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ckpt.cli.commandline import INTERRUPTED, OK, PROBLEM, USAGE, build_parser
from ckpt.cli.visible import visible_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; for the entry point `ckpt`."""
    with visible_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    given = sys.argv[1:] if argv is None else argv
    # Without a command there is nothing to do but to say what there is.
    arguments, unknown = parser.parse_known_args(given or ["--help"])
    if unknown:
        arguments.refuse(f"unknown: {' '.join(unknown)}")
    if problem := arguments.check(arguments):
        arguments.refuse(problem)
    home, _, name = arguments.command.partition(":")
    try:
        command: Callable[[Any], int] = getattr(import_module(home), name)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    return _run(command, arguments)


def _run(command: Callable[[Any], int], arguments: Any) -> int:
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough; python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _failed(f"interrupted; {arguments.after_interrupt}", INTERRUPTED)
    except Exception as error:
        code = _code_of(error)
        if not code:
            raise  # a mistake of ours: the traceback is what helps
        return _failed(error, code)


def _code_of(error: Exception) -> int:
    """The exit code of a failure that a user can do something about; 0 for any other."""
    # Here and not above: help and completion do without.
    from ckpt.errors import CheckpointError
    from storage import InvalidUrlError

    if isinstance(error, InvalidUrlError):
        return USAGE
    return PROBLEM if isinstance(error, (CheckpointError, OSError)) else 0


def _failed(error: object, code: int) -> int:
    print(f"ckpt: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
