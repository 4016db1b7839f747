"""Runs that several ranks need: read by one of them, passed on along a tree, put into place.

Every rank goes through its runs in the order of the byte line, a few at once, each in a thread of
its own, and nobody waits for a round. That cannot stand still: the first run that is not finished
everywhere is among the first unfinished ones of each rank that needs it, so all of them have begun
with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ckpt.loading.plan import ReadPath
from ckpt.loading.reader import Reader
from ckpt.loading.shared_reads import SharedRun, ShareLimits
from ckpt.world.base import Message, Transfers, World

_FINE, _FAILED = b"\x01", b"\x00"


class Exchange:
    """One rank's part in the shared runs of a load.

    A failure here or elsewhere ends no transfer: whoever has none of the bytes says so in place of
    them, and the ranks agree on the error afterwards. `flag`, of which all ranks know, goes up with
    the first failure; runs that are not read yet are not read then.
    """

    def __init__(self, reader: Reader, world: World, flag: str) -> None:
        self._reader = reader
        self._world = world
        self._flag = flag
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def move(self, runs: Sequence[SharedRun], limits: ShareLimits, path: ReadPath) -> None:
        """Read, receive, pass on and deliver `runs`, which ascend. Collective over all that share.

        Raises RankFailed when a rank is gone; `error` is what failed on this rank.
        """
        with self._world.transfers("shared blocks") as wires:
            tagged = [(run, *tag) for run, tag in zip(runs, _tags(runs), strict=True)]
            threads = _threads(runs, limits, path)
            if threads == 1:
                for one in tagged:
                    self._move(wires, *one)
                return
            pool = ThreadPoolExecutor(threads)
            try:
                moves = [pool.submit(self._move, wires, *one) for one in tagged]
                for future in wait(moves, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                wires.abort()  # else the threads that wait for others would go on
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _move(self, wires: Transfers, run: SharedRun, tag: int, tags: Sequence[int]) -> None:
        data = self._read(run) if run.source is None else _received(wires, run, tag)
        word = memoryview(_FAILED if data is None else _FINE)
        send = []
        for target, number in zip(run.targets, tags, strict=True):
            send.append(Message(target, number, word))
            if data is not None:
                send.append(Message(target, number + 1, data))
        wires.move(send, [])
        if data is not None:
            self._deliver(run, data)

    def _read(self, run: SharedRun) -> memoryview | None:
        if self._world.flag_is_up(self._flag):
            return None
        try:
            return self._reader.read_run(run)
        except Exception as error:
            self._fail(error)
            return None

    def _deliver(self, run: SharedRun, data: memoryview) -> None:
        try:
            self._reader.deliver_run(run, data)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
        self._world.raise_flag(self._flag)


def _received(wires: Transfers, run: SharedRun, tag: int) -> memoryview | None:
    assert run.source is not None, "what this rank reads comes from nobody"
    word = memoryview(bytearray(1))
    wires.move([], [Message(run.source, tag, word)])
    if word.tobytes() == _FAILED:
        return None
    data = memoryview(bytearray(run.nbytes))
    wires.move([], [Message(run.source, tag + 1, data)])
    return data


def _tags(runs: Sequence[SharedRun]) -> list[tuple[int, list[int]]]:
    """For each run the tag of what comes from its source, and of what goes to each target: the
    count of runs that took that way before, which is the same at both ends.
    """
    came: Counter[int] = Counter()
    went: Counter[int] = Counter()
    tags = []
    for run in runs:
        here = 0
        if run.source is not None:
            here = 2 * came[run.source]
            came[run.source] += 1
        tags.append((here, [2 * went[target] for target in run.targets]))
        went.update(run.targets)
    return tags


def nbytes_under_way(runs: Sequence[SharedRun], limits: ShareLimits, path: ReadPath) -> int:
    """The most bytes of `runs` that are in memory at once."""
    return sum(sorted(run.nbytes for run in runs)[-_threads(runs, limits, path) :])


def _threads(runs: Sequence[SharedRun], limits: ShareLimits, path: ReadPath) -> int:
    """How many of `runs` may be under way: no more bytes than the window, which is as wide as
    reading ahead may be where several requests are to be in flight.
    """
    window = limits.window_nbytes_max
    if path.readers > 1:
        window = max(window, path.read_ahead_nbytes_max)
    longest = max((run.nbytes for run in runs), default=1)
    return min(max(window // longest, 1), max(len(runs), 1))
