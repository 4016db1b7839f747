"""How much work a call does, in counts that are the same on every machine and under every load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_calls(fn: Callable[[], Any]) -> int:
    """The number of calls, of Python and of C functions, that `fn()` makes in this thread."""
    count = 0

    def count_call(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what earlier tests have left would be finalized, and counted
    sys.setprofile(count_call)
    try:
        fn()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
