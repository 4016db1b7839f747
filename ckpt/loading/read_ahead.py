"""A window of reads in flight, bounded in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt.loading.plan import ReadPath
from ckpt.loading.reader import Reader
from ckpt.loading.shared_reads import SharedRun


class ReadAhead:
    """This rank's shared runs, read by threads before they are requested, in the order of `runs`.

    A context manager: leaving it waits for what is being read and drops it.
    """

    def __init__(self, reader: Reader, runs: Sequence[SharedRun], path: ReadPath) -> None:
        self._reader = reader
        self._waiting = deque(runs)
        self._nbytes_max = path.read_ahead_nbytes_max
        self._pool = ThreadPoolExecutor(path.readers) if path.readers > 1 else None
        self._running: dict[SharedRun, Future[memoryview]] = {}
        self._sizes: dict[SharedRun, int] = {}

    def __enter__(self) -> ReadAhead:
        self._start_more()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            # Waits: a thread that still reads must not outlive the store.
            self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, runs: Sequence[SharedRun]) -> dict[SharedRun, memoryview]:
        """The checked bytes of the next runs, which must be requested in order."""
        if self._pool is None:
            return {run: self._reader.read_run(run) for run in runs}
        for run in runs:
            # What the budget did not allow to read ahead, at the least a run that is larger than
            # the budget.
            if run not in self._running:
                self._start(self._waiting.popleft())
        return {run: self._running.pop(run).result() for run in runs}

    def give_back(self, runs: Iterable[SharedRun]) -> None:
        """The bytes of `runs` are not needed any more; others may be read instead."""
        for run in runs:
            self._sizes.pop(run, None)
        self._start_more()

    def _start_more(self) -> None:
        while self._pool is not None and self._waiting:
            nbytes = self._reader.run_nbytes(self._waiting[0])
            if sum(self._sizes.values()) + nbytes > self._nbytes_max:
                return
            self._start(self._waiting.popleft())

    def _start(self, run: SharedRun) -> None:
        assert self._pool is not None, "only with threads"
        self._sizes[run] = self._reader.run_nbytes(run)
        self._running[run] = self._pool.submit(self._reader.read_run, run)
