"""How much work a call does, in counts that are the same on every machine and under every load."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def python_calls(fn: Callable[[], Any]) -> int:
    """The number of calls, of Python and of C functions, that `fn()` makes in this thread."""
    count = 0

    def count_call(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    profiled(fn, count_call)
    return count


def profiled(fn: Callable[[], Any], note: Callable[[FrameType, str, Any], object]) -> None:
    """Run `fn()` and tell `note` of its calls in this thread."""
    before = sys.getprofile()
    with without_collector():
        sys.setprofile(note)
        try:
            fn()
        finally:
            sys.setprofile(before)


@contextmanager
def without_collector() -> Iterator[None]:
    """What earlier tests have left is not finalized here, and not counted."""
    # Not gc.disable: a thread that another test has left may enable it.
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class AtOnce:
    """How many threads are inside of `entered` blocks at once; `most` at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self.most = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1
