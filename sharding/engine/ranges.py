"""What is seen of a step: ranges for profilers, and a log of when the units of a model did what.

Ranges have the names that torch's classes give them: tools look for those.

A unit shows `NO_RANGES` until the runtime sees a profiler, once in each forward and backward, so
that without one nothing is asked and nothing is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.profiler import record_function

FLAT, IN_PLACE = 0, 1
# What a unit does, by the names of the flat wrapper and of `fully_shard`; "" has none.
_NAMES = {
    "forward": ("forward", ""),
    "root_pre_forward": ("_root_pre_forward", "root_pre_forward"),
    "inputs": ("_to_kwargs", ""),
    "pre_forward": ("_pre_forward", "pre_forward"),
    "forward_prefetch": ("_pre_forward_prefetch", ""),
    "post_forward": ("_post_forward", "post_forward"),
    "pre_backward": ("_pre_backward_hook", "pre_backward"),
    "backward_prefetch": ("_pre_backward_prefetch", ""),
    "post_backward": ("_post_backward_hook", ""),
    "late_prefetch": ("_post_backward_prefetch", ""),
    "limit": ("rate_limiter", ""),
    "gather": ("", "all_gather"),
    "gathered": ("", "all_gather_copy_out"),
    "reshard": ("", "post_backward_reshard"),
    "accumulate": ("", "post_backward_accumulate"),
    "reduce": ("", "post_backward_reduce"),
    "end": ("", "root_post_backward_callback"),
    "wait": ("", "post_backward_rs_wait ()"),
}
# Parts that belong to the whole model carry no name of a unit.
_OF_ALL = ("end", "wait")


class Ranges:
    """The ranges of one unit; each attribute, of the names above, is a new context that profilers
    show. `face` selects whose names they have, `fqn` is the unit's name, "" for the root.
    """

    def __init__(self, face: int, fqn: str = "") -> None:
        self.face = face
        self.fqn = fqn

    def __getattr__(self, part: str) -> AbstractContextManager[Any]:
        if part not in _NAMES:
            raise AttributeError(part)
        name = _NAMES[part][self.face]
        if self.face == FLAT:
            return record_function(f"FullyShardedDataParallel.{name}") if name else nullcontext()
        # The flat wrapper of torch asks every unit whether it is the root, inside of the range.
        if not name or (part == "root_pre_forward" and self.fqn):
            return nullcontext()
        of = f" ({self.fqn})" if self.fqn and part not in _OF_ALL else ""
        return record_function(f"FSDP::{name}{of}")

    def prefetching(self, other: Ranges) -> AbstractContextManager[Any]:
        """For gathering another unit early in the backward, which `fully_shard` names by it."""
        if self.face == FLAT:
            return nullcontext()
        return record_function(f"FSDP::backward_prefetch for {other.fqn}")


NO_RANGES = Ranges(FLAT)
"""Those that nobody sees."""
vars(NO_RANGES).update(dict.fromkeys(_NAMES, nullcontext()))


class Noted(NamedTuple):
    """Something that a unit did, `at_seconds` after the root's forward had started.

    `what` is "gather", "gathered", "forward", "forward end", "backward", "backward end", "free",
    "reduce" or, with the number of the root, "end".
    """

    what: str
    unit: int
    at_seconds: float


Entry = tuple[str, int, float]
"""What a unit did, its number, and `time.perf_counter()`."""


class StepLog:
    """What units did in the last forward that a backward followed: when, by the host's clock."""

    note: Callable[[Entry], None]
    """A unit does something."""

    def __init__(self) -> None:
        self._last: tuple[list[Entry], float] = ([], 0.0)
        self.begin()

    def begin(self) -> None:
        """The root's forward starts."""
        self._now: list[Entry] = []
        # The list's own method: a unit notes some ten things a step, without a Python call.
        self.note = self._now.append
        self._start = time.perf_counter()

    def end(self) -> None:
        """The backward has ended."""
        self.note(("end", 0, time.perf_counter()))
        self._last = self._now, self._start
        self.begin()

    @property
    def last(self) -> tuple[Noted, ...]:
        """The last step; empty before the first has ended."""
        entries, start = self._last
        return tuple(Noted(what, unit, seconds - start) for what, unit, seconds in entries)
