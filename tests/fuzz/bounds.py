"""What a reader of foreign bytes may take for one input: time, and memory beside the input."""

from __future__ import annotations

import resource
import time
import tracemalloc

from tests.fuzz.target import Target

SECONDS_MAX = 2.0  # of a CPU: other work on the machine does not count
NBYTES_MAX = 64 << 20


def within_bounds(target: Target, data: bytes) -> bool:
    """Whether the reader takes `data`. Raises what is no refusal, and AssertionError for more than
    the bounds. tracemalloc is on, so all memory counts that was asked for.
    """
    tracemalloc.reset_peak()
    before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
    taken = target.try_(data)
    seconds = time.thread_time() - began
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < NBYTES_MAX + 8 * len(data), f"{target.name}: {peak} bytes for {data!r:.200}"
    assert seconds < SECONDS_MAX, f"{target.name}: {seconds:.1f} s for {data!r:.200}"
    return taken


def within_rough_bounds(target: Target, data: bytes) -> bool:
    """The same at the speed of a search: of memory, only what raises the peak of this process."""
    before, began = _peak_nbytes(), time.thread_time()
    taken = target.try_(data)
    seconds = time.thread_time() - began
    peak = _peak_nbytes() - before
    assert peak < NBYTES_MAX + 8 * len(data), f"{target.name}: {peak} bytes more of memory"
    assert seconds < SECONDS_MAX, f"{target.name}: {seconds:.1f} s"
    return taken


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
