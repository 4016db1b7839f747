"""Saves in the background: one worker, at most one save in flight, and its outcome.

While a save is in flight the worker runs the collectives of its world, so other users of the same
world wait for it first (`Background.settle`). A rank that stops there with an error reports it in
the next collective, because the other ranks may have seen the failure already and continue.

No failure is lost: `PendingSave.result` raises it, or else the next call that saves there, or else
it is logged when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from ckpt.commit.appender import HURRIED_SECONDS, patience_for
from ckpt.errors import Forked, NamesChanged, SaveDropped
from ckpt.format.part import Part
from ckpt.saving.image import Staging
from ckpt.saving.replica_check import compared
from ckpt.saving.save import publish, report_names_of_copied
from ckpt.saving.staging import BufferNeed, Staged
from ckpt.saving.step_gate import Gate
from ckpt.saving.task import Attempt, SaveReport, SaveTask, refuse_other_names
from ckpt.telemetry.record import Recorder
from ckpt.world.base import World

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "skip", "replace"]
Publish = Callable[[SaveTask, Callable[[], Sequence[str]], Callable[[Attempt], Part]], SaveReport]

GIVE_UP_SECONDS_MAX = 10.0  # for a request that a store does not answer: a guess
EXIT_SECONDS_MAX = 300.0  # how long an ending interpreter waits for a save: an estimate


class PendingSave:
    """A save under way. `attempt` is empty until the ranks have agreed on its name.

    `call_seconds` is what the call that started it took.
    """

    def __init__(self, step: int, gate: Gate) -> None:
        self.step = step
        self.attempt = ""
        self.call_seconds = 0.0
        self.recorder: Recorder | None = None  # once it is under way
        self._gate = gate
        self._is_dropped = threading.Event()
        self._hurried_seconds = math.inf
        self._hurried: Callable[[float], object] | None = None
        self._is_reported = False
        self._future: Future[SaveReport] = Future()
        self._pid = os.getpid()

    def staged(self) -> bool:
        """Whether the state is copied, or the save over: from then on anything may change it."""
        return self._gate.opened.is_set()

    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """Returns when the state is copied, or the save over. Raises TimeoutError."""
        self._refuse_forked()
        if not self._gate.opened.wait(timeout_seconds):
            raise TimeoutError(f"step {self.step} is not copied after {timeout_seconds} s")

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return os.getpid() != self._pid or self._future.done()

    @property
    def blocked_seconds(self) -> float:
        """How long this save has blocked the training so far: in the call, and before steps."""
        return self.call_seconds + self._gate.waited_seconds

    @property
    def skipped(self) -> bool:
        """Whether `when_busy` dropped this save; False as long as that is open."""
        return self._future.done() and isinstance(self._future.exception(), SaveDropped)

    def hurry(self, seconds: float = HURRIED_SECONDS) -> None:
        """Give up requests that have failed for `seconds`, because something waits for this save.

        Requests that the store answers continue, however slow they are.
        """
        self._hurried_seconds = min(self._hurried_seconds, seconds)
        # Read once: the worker takes it away when the save is over.
        shorten = self._hurried
        if shorten is not None and not self.done():
            shorten(seconds)

    @contextlib.contextmanager
    def _patient(self, task: SaveTask) -> Iterator[None]:
        """Retry for as long as the task allows, or for less once `hurry` was called."""
        self.recorder = task.recorder
        patience = task.store.patience
        with patience_for(task.store, task.session.world, task.retry_seconds_max):
            if patience is not None:
                self._hurried = patience.shorten
                # `hurry` may have been called before the worker came here.
                patience.shorten(self._hurried_seconds)
            try:
                yield
            finally:
                self._hurried = None

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits for the checkpoint to be committed, and returns its report.

        Raises the save's own error, the same on all ranks; SaveDropped when `when_busy` had it
        dropped; TimeoutError when it takes longer; the save continues then.
        """
        self.wait(timeout_seconds)
        # Before the future raises: the caller has the failure then, and no later call raises it
        # again.
        self._is_reported = True
        return self._future.result()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when the save is over, whatever its outcome. Raises TimeoutError."""
        self._refuse_forked()
        # Not `Future.result`, whose TimeoutError is another class than the builtin one before
        # Python 3.11.
        over = threading.Event()
        self._future.add_done_callback(lambda _: over.set())
        if not over.wait(timeout_seconds):
            raise TimeoutError(
                f"the save of step {self.step} is not over after {timeout_seconds} s"
            )

    def _refuse_forked(self) -> None:
        # The worker that makes this save is a thread of the process that began it.
        if os.getpid() != self._pid:
            raise Forked(
                f"the save of step {self.step} belongs to process {self._pid}, which this one was "
                "forked from: wait for it there"
            )

    def failure(self) -> BaseException | None:
        """Why the save has failed; None while it is under way, and if it succeeded. Never waits;
        the failure is still raised elsewhere.
        """
        error = self._future.exception() if self._future.done() else None
        return None if isinstance(error, SaveDropped) else error

    def _unreported_error(self) -> BaseException | None:
        """The failure that was neither raised nor logged yet."""
        return None if self._is_reported else self.failure()


class Preparation:
    """Memory that is made for a save that may come."""

    def __init__(self, staging: Staging) -> None:
        self.is_stopped = threading.Event()
        self.is_over = threading.Event()
        self._staging = staging

    def make(self, need: BufferNeed) -> None:
        """Make the buffers, in the thread that calls. What fails is left to the save."""
        try:
            self._staging.make(
                need.nbytes, need.number, pinned=need.pinned, is_stopped=self.is_stopped.is_set
            )
        except (MemoryError, OSError, RuntimeError) as error:
            logger.info("memory for a save in the background was not made ahead: %s", error)
        finally:
            self.is_over.set()

    def stop(self) -> None:
        """Make no more of it, and give it back unless a save has begun that uses it."""
        if not self.is_stopped.is_set():
            self.is_stopped.set()
            self._staging.keep(0)


class Background:
    """The worker of one world. Its methods are called by one thread, the one that trains."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[PendingSave] = []
        self._preparation = Preparation(Staging())

    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return any(not pending.done() for pending in self._pending)

    def is_needed(self) -> bool:
        """Whether a save is in flight, or has failed without anybody knowing."""
        return self.is_busy() or any(one._unreported_error() for one in self._pending)

    def wait(self) -> None:
        """Returns when nothing is in flight; failures are kept for the next `settle`."""
        for pending in self._pending:
            pending.wait()

    def settle(self) -> None:
        """Wait until nothing is in flight; then raise a failure that was not reported yet.

        A newer state is waiting to be saved, so the save in flight gives up early on a store that
        does not answer.
        """
        for pending in self._pending:
            pending.hurry()
        self.wait()
        # Emptied before raising: the same failure must not stop the next call, too.
        over, self._pending = self._pending, []
        for pending in over:
            error = pending._unreported_error()
            if error is not None:
                pending._is_reported = True
                logger.error("the save of step %d in the background has failed", pending.step)
                raise error

    def settle_before(self, task: SaveTask) -> None:
        """`settle` before a save that the other ranks may begin, because they know of the failure.

        The failure that is raised here is reported to them in that save, so that all ranks stay in
        the same collective.
        """
        try:
            self.settle()
        except Exception as error:
            self.refuse(task, error)._is_reported = True
            raise

    def give_up(self, seconds_max: float = GIVE_UP_SECONDS_MAX) -> None:
        """End what is in flight, because its world has ended; nothing of it is committed.

        Returns when it is over, or leaves it behind after `seconds_max`: a store does not answer.
        No step of an optimizer is held back any more. A world of one is not ended by others, so
        its save is waited for.
        """
        self._preparation.stop()
        for pending in self._pending:
            # First the mark, then the hurry: a request that ends early must find the save dropped.
            pending._is_dropped.set()
            pending.hurry(0.0)
        until = time.monotonic() + seconds_max
        for pending in self._pending:
            try:
                left = max(0.0, until - time.monotonic())
                pending.wait(None if self._world.size == 1 else left)
            except TimeoutError as error:
                logger.warning("%s; it is left behind, and cannot be committed any more", error)
                pending._is_reported = True
            # Also for a save that is left behind: the training continues in another world.
            pending._gate.open()

    def replace(self) -> None:
        """Drop the save in flight, unless all ranks have written it already."""
        for pending in self._pending:
            pending._is_dropped.set()

    def start(
        self, task: SaveTask, begin: Callable[[], Staged], *, publish: Publish = publish
    ) -> PendingSave:
        """Stage with `begin` in this thread; the worker does the rest and commits with `publish`.

        Returns when `begin` has returned, or with `is_blocking` when everything is copied. An error
        of `begin` is reported to all ranks and raised by `result`.
        """
        # The worker is needed; what is ready by now is used.
        self._preparation.is_stopped.set()
        try:
            staged = begin()
        except Exception as error:
            return self.refuse(task, error)
        pending: PendingSave | None = None
        try:
            pending = PendingSave(task.step, staged.gate)
            self._submit(pending, partial(_run, pending, task, staged, publish))
            if staged.is_blocking:
                pending.wait_staged()
        except BaseException:  # Ctrl-C too
            if pending not in self._pending:
                staged.release()  # the next step must not wait for a save that never runs
            elif pending is not None:
                pending._is_dropped.set()  # bytes not copied yet may change from here on
            raise
        pending.call_seconds = task.blocked_seconds()
        return pending

    def begin(self, task: SaveTask, gate: Gate, run: Callable[[], SaveReport]) -> PendingSave:
        """Do `run` in the worker, which opens `gate` when steps may change the state."""
        pending = PendingSave(task.step, gate)

        def patient() -> SaveReport:
            try:
                with pending._patient(task):
                    return run()
            finally:
                gate.open()

        self._submit(pending, patient)
        return pending

    def make_ready(self, staging: Staging, need: BufferNeed) -> Preparation:
        """Make the buffers of a first save in the worker, as long as no save begins."""
        preparation = Preparation(staging)
        if self.is_busy() or not need.number:
            preparation.is_over.set()
            return preparation
        self._preparation.stop()
        self._preparation = preparation
        self._worker().submit(preparation.make, need)
        return preparation

    def refuse(self, task: SaveTask, error: Exception) -> PendingSave:
        """A save that this rank cannot make; `error` is reported to the other ranks."""
        gate = Gate(frozenset(), frozenset())
        gate.open()
        pending = PendingSave(task.step, gate)

        def report() -> SaveReport:
            task.session.world.agree("begin", error)
            raise AssertionError("agree raises when a rank has an error") from error

        self._submit(pending, report)
        return pending

    def _submit(self, pending: PendingSave, run: Callable[[], SaveReport]) -> None:
        pool = self._worker()
        kept = [one for one in self._pending if one._unreported_error() or not one.done()]
        try:
            # Listed before the worker can begin, so that no save runs that `settle` cannot see.
            self._pending = [*kept, pending]
            pool.submit(_answer, pending._future, run)
        except BaseException:  # Ctrl-C too: the worker may or may not have received the save
            if pending._future.cancel():  # then it never begins
                self._pending = kept
            raise

    def _worker(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
            _with_workers.add(self)
            _watch_exit()
        return self._pool

    def close(self) -> None:
        """Wait for what is in flight and end the worker; failures are logged."""
        self._preparation.stop()
        # With its own deadline, since `shutdown` waits without one.
        _log_unreported(self, EXIT_SECONDS_MAX)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _answer(future: Future[SaveReport], run: Callable[[], SaveReport]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        report = run()
    # SystemExit and the like, too: a future without an outcome hangs every `wait`.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(report)


def _run(pending: PendingSave, task: SaveTask, staged: Staged, publish: Publish) -> SaveReport:
    def give_up() -> None:
        if pending._is_dropped.is_set():
            raise SaveDropped(f"the save of step {task.step} was dropped for a newer one")

    def write(attempt: Attempt) -> Part:
        pending.attempt = attempt.header.attempt
        if isinstance(contents, Exception):
            raise contents
        return staged.write(attempt, give_up)

    def blocked_seconds() -> float:
        return pending.blocked_seconds if pending.call_seconds else task.blocked_seconds()

    error: Exception | None = None
    try:
        try:
            staged.copy()
            refuse_other_names(staged.contents, task)
        except Exception as caught:
            error = caught  # raised by `agree`, where the other ranks wait
        try:
            task.session.world.agree("begin", error)
        except NamesChanged:
            report_names_of_copied(staged.contents, task)
        contents = compared(task, staged.contents, staged.digests, staged.replicas)
        watched = replace(task, blocked_seconds=blocked_seconds)
        with pending._patient(task):
            return publish(watched, lambda: staged.contents.modules, write)
    finally:
        staged.release()


def _at_exit() -> None:
    """Wait for saves in flight when the interpreter ends, and log failures."""
    until = time.monotonic() + EXIT_SECONDS_MAX
    for background in list(_with_workers):
        background._preparation.is_stopped.set()  # else its thread would be joined to the end
        _log_unreported(background, max(0.0, until - time.monotonic()))


def _log_unreported(background: Background, seconds_max: float) -> None:
    until = time.monotonic() + seconds_max
    for pending in background._pending:
        try:
            pending.wait(max(0.0, until - time.monotonic()))
        except TimeoutError:
            logger.error(
                "the save of step %d is not over after %.0f s; the process ends without it, the "
                "checkpoint before it is the latest",
                pending.step,
                seconds_max,
            )
            background._world.abandon()
            pending.hurry(0.0)  # the interpreter joins this thread without a deadline
            continue
        error = pending._unreported_error()
        if error is not None:
            pending._is_reported = True
            logger.error(
                "the save of step %d has failed, and its result was never requested: %s: %s",
                pending.step,
                type(error).__name__,
                error,
            )


@cache
def _watch_exit() -> None:
    # A save needs thread pools, and these refuse new work once the interpreter shuts them down.
    # That is before `atexit`, and no public hook is called earlier.
    getattr(threading, "_register_atexit", atexit.register)(_at_exit)


_with_workers: weakref.WeakSet[Background] = weakref.WeakSet()
# A forked child, such as a worker of a data loader, lacks the thread that saves. It must not wait
# for the parent's saves, nor abandon its world, which would report that this rank is gone.
os.register_at_fork(after_in_child=_with_workers.clear)
