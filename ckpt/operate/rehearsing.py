"""A rehearsal of a training's resume."""

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument, operation

if TYPE_CHECKING:
    from ckpt.rehearse.runs import RehearsalReport

# In the order in which they follow each other.
BOUNDARIES = (
    *("before the save", "in the save", "after the save"),
    *("after the optimizer", "in the data loader", "by SIGTERM"),
)
# Workers of loaders make sockets in theirs, whose paths may have 107 bytes.
SOCKET_FOLDER_MAX = 60


@operation
def rehearse(
    program: Annotated[Sequence[str], Argument("what starts the training, after --", collect=list)],
    *,
    steps: Annotated[int, Argument("of the first run, 6 or more", given.count, "N")] = 12,
    kill: Annotated[
        Sequence[str], Argument("repeatable; default: all", collect=list, choices=BOUNDARIES)
    ] = (),
    other_ranks: Annotated[
        "int | None",
        Argument("for --nproc-per-node of the last run; default: one less", given.whole, "N"),
    ] = None,
    timeout: Annotated[float, Argument("of one run; default: 10m", given.seconds, "TIME")] = 600.0,
) -> "RehearsalReport":
    """Kill a training at its boundaries, resume it, and name what its state lacks.

    `program` runs a few steps without a save. Then it is killed before, in and after a save, after
    a step of the optimizer, in the data loader and by SIGTERM; each next run resumes what the one
    before has left, and finally it is resumed on another number of ranks (0: on none). Data,
    losses, parameters, buffers, optimizers, schedulers, scalers, random states and plain variables
    of all runs are compared step by step, bit for bit. It ends at the first run that differs.

    The script saves by a `ckpt.Checkpointer`, whose url is replaced by a temporary folder, or calls
    `ckpt.watch_resume`. What it writes elsewhere, it writes. Progress goes to stderr.

    Raises InvalidArgument where nothing can be proved: the program fails or hangs by itself, makes
    too few steps, restores nothing, or differs from itself without an interruption.
    """
    from ckpt.errors import InvalidArgument
    from ckpt.rehearse import runs

    if steps < runs.STEPS_MIN:
        raise InvalidArgument(f"steps={steps}: expected at least {runs.STEPS_MIN}")
    if unknown := set(kill) - set(BOUNDARIES):
        raise InvalidArgument(f"kill={min(unknown)!r}: expected one of {', '.join(BOUNDARIES)}")
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="ckpt-rehearse-"))
        if threading.current_thread() is threading.main_thread():
            # CI ends a job by SIGTERM: clean up as after Ctrl-C.
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        short = folder
        if len(folder) > SOCKET_FOLDER_MAX:
            short = stack.enter_context(TemporaryDirectory(prefix="ckpt-", dir="/tmp")) + "/t"
            os.symlink(folder, short)
        one = runs.Rehearsal(program, folder, short, timeout)
        difference = one.rehearse(steps, [b for b in BOUNDARIES if b in (kill or [b])], other_ranks)
        return runs.RehearsalReport(tuple(one.runs), difference)
