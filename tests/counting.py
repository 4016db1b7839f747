"""How much work a call does, in counts that are the same on every machine and under every load."""

from __future__ import annotations

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

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count
