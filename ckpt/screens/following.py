"""Runs that are followed in the background while a command shows them: for `watch` and `serve`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ckpt.tools.polling import RunPoller, RunState, next_pause
from storage import StoreLike, options_of_other

STEP_SECONDS = 0.1  # a command that waits looks this often whether it is to end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ending:
    """Which signal has asked the command to end, if any.

    A handler that raised, wherever the main thread is, could leave a lock taken for which other
    threads wait, and the process would never end. So signals leave a mark here, and `check` raises.
    """

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
        # Commands run inside other programs, too, whose own Ctrl-C must work after them.
        for number, handler in before.items():
            signal.signal(number, handler)


Versions = tuple[int, ...]


class Following:
    """Looks at each root in a thread of its own, inside of the `with` block.

    Raises on entering what `RunPoller.poll` raises at its first look, and what `ending.check` does.
    """

    def __init__(
        self,
        urls: Sequence[StoreLike],
        options: Mapping[str, Any],
        *,
        interval_seconds: float,
        near: Sequence[str] = (),
        ending: Ending | None = None,
    ) -> None:
        # Options are of the first url, and of others that are of its kind.
        self.pollers = [
            RunPoller(url, storage_options=options_of_other(urls[0], options, url, None), near=near)
            for url in urls
        ]
        self._interval_seconds = interval_seconds
        self._ending = ending or Ending()
        self._changed = threading.Condition()
        self.is_closing = False
        """Whether the `with` block has ended."""
        self._threads: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(len(self.pollers), thread_name_prefix="ckpt-follow")

    def __enter__(self) -> Following:
        try:
            # All at once: a store that is away takes seconds to be called so.
            looks = [self._pool.submit(poller.poll) for poller in self.pollers]
            while wait(looks, STEP_SECONDS).not_done:
                self._ending.check()
            for look in looks:
                look.result()
        except BaseException:
            self.__exit__()
            raise
        self._threads = [self._pool.submit(self._follow, poller) for poller in self.pollers]
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()
        # A look that waits for its store to answer again would hold up the end for minutes.
        for poller in self.pollers:
            poller.hurry()
        self._pool.shutdown(wait=True)
        for poller in self.pollers:
            poller.close()

    @property
    def states(self) -> tuple[RunState, ...]:
        """Every run as it was seen last."""
        return tuple(poller.state for poller in self.pollers)

    def wait(self, seen: Versions, seconds: float) -> tuple[RunState, ...]:
        """The states, once any is of another version than in `seen`, or after `seconds`. Raises as
        `check` does.
        """

        # A thread that has failed counts as news: nobody else would tell of its error.
        def is_over() -> bool:
            ended = any(thread.done() for thread in self._threads)
            return ended or self.is_closing or versions_of(self.states) != seen

        with self._changed:
            self._changed.wait_for(is_over, seconds)
        self.check()
        return self.states

    def check(self) -> None:
        """Raise what a look has raised, when no root could be read before."""
        for thread in self._threads:
            if thread.done():
                thread.result()

    def _follow(self, poller: RunPoller) -> None:
        pause, seen = self._interval_seconds, poller.state
        try:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self.is_closing, pause):
                        return
                state = poller.poll()
                has_changed, seen = state is not seen, state
                pause = next_pause(
                    pause, shortest_seconds=self._interval_seconds, has_changed=has_changed
                )
                if has_changed:
                    self._notify()
        finally:
            self._notify()  # a thread that has failed is news, too

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def versions_of(states: Sequence[RunState]) -> Versions:
    """What `Following.wait` compares."""
    return tuple(state.version for state in states)
