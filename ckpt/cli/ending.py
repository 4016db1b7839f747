"""Commands that last until somebody ends them: `watch` and `serve`.

A signal that raises wherever the main thread happens to be may leave a lock taken that other
threads wait for, and the process never ends. So signals only leave a mark here, and `check` raises
at the places that the command has chosen.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STEP_SECONDS = 0.1  # a command that waits looks this often whether it is to end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ending:
    """Which signal has asked the command to end, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raise KeyboardInterrupt after SIGINT, and after another signal the SystemExit that a
        shell would show for it.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # Asked for a second time: whatever it waits for lasts too long.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """Takes Ctrl-C and SIGTERM over until the block ends; a second one kills the process.

    A signal that is ignored, or that somebody else handles, stays so; and in a thread that is not
    the main one nothing is taken over.
    """
    ending = Ending()
    usual = (signal.default_int_handler, signal.SIG_DFL)
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, ending._note)
        for number in SIGNALS
        if is_main and signal.getsignal(number) in usual
    }
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
