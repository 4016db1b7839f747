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
from typing import NoReturn

from ckpt.cli.commandline import INTERRUPTED, OK, PROBLEM, USAGE, build_parser, given, refused
from ckpt.screens.visible import visible_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; for the entry point `ckpt`."""
    with visible_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
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
        if not command.views:
            command.function(**of_function)
            code = OK
        else:
            from ckpt.cli.running import run

            code = run(command, of_function, of_view)
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
