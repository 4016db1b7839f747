"""What the metadata that a store holds may cost those who use it: memory, and seconds of a CPU.

A few hundred bytes of rules may describe tens of millions of chunks. So what is made of metadata is
charged before it is made, at what it takes from then on, and long walks over it are timed. One
command has one budget for all that it opens; each manifest has the one that it was decoded with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckpt.errors import UnsupportedFormat
from storage.forks import ForkSafeLock

NBYTES_MAX = 1 << 30
SECONDS_PER_GIB = 10.0
_STEP_SECONDS = 0.05  # of a walk, counted at once

_Item = TypeVar("_Item")


class MetadataBudget:
    """Counts for one command what metadata takes together: at most `nbytes_max` of memory (None:
    1 GiB), and 10 seconds of a CPU for each GiB of that. Used from several threads.
    """

    def __init__(self, nbytes_max: int | None = None) -> None:
        self.nbytes_max = NBYTES_MAX if nbytes_max is None else nbytes_max
        self.seconds_max = SECONDS_PER_GIB * self.nbytes_max / (1 << 30)
        self._nbytes = 0
        self._seconds = 0.0
        self._lock = ForkSafeLock()
        self._turn = ForkSafeLock()

    def charge(self, nbytes: int, what: str) -> None:
        """Count memory that is about to be taken. Raises UnsupportedFormat beyond the budget."""
        with self._lock:
            taken = self._nbytes + nbytes
            if taken <= self.nbytes_max:
                self._nbytes = taken
                return
        raise UnsupportedFormat(
            f"{what} would take {taken} bytes of memory with what is open; at most "
            f"{self.nbytes_max} are allowed for metadata; {_ALLOW}"
        )

    def release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        with self._lock:
            self._nbytes -= nbytes

    @contextmanager
    def using(self, nbytes: int, what: str) -> Iterator[None]:
        """Within the block so much memory is taken, by one thread at a time. Raises
        UnsupportedFormat beyond the budget, before the block begins.
        """
        with self._turn:
            self._spend(0.0, what)
            self.charge(nbytes, what)
            began = time.thread_time()
            try:
                yield
            finally:
                self.release(nbytes)
                with self._lock:
                    self._seconds += time.thread_time() - began

    def timed(self, items: Iterable[_Item], what: str) -> Iterator[_Item]:
        """`items`; what this thread does between them is counted. Raises UnsupportedFormat when
        all of that has taken too long.
        """
        began = time.thread_time()
        stride, left = 1, 1  # items between looks at the clock, which takes as long as a small one
        for item in items:
            left -= 1
            if not left:
                now, stride = time.thread_time(), min(2 * stride, 256)
                if now - began > _STEP_SECONDS:
                    self._spend(now - began, what)
                    began, stride = now, 1
                left = stride
            yield item
        self._spend(time.thread_time() - began, what)

    def _spend(self, seconds: float, what: str) -> None:
        with self._lock:
            self._seconds += seconds
            taken = self._seconds
        if taken > self.seconds_max:
            raise UnsupportedFormat(
                f"{what}: metadata has taken {taken:.1f} seconds of a CPU; at most "
                f"{self.seconds_max:.1f} are allowed; {_ALLOW}"
            )


def unlimited() -> MetadataBudget:
    """For what this process has made itself, and only decodes again."""
    return MetadataBudget(sys.maxsize)


_ALLOW = "if you trust the store, pass metadata_bytes_max= (--metadata-bytes-max)"
