"""Ranges for profilers, with the names that torch's classes give them: tools look for those."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

from torch.profiler import record_function

from sharding.engine.torch_seam import is_profiling

__all__ = ["FLAT", "IN_PLACE", "RangeName", "Ranges"]


class RangeName(Enum):
    """What a unit does, by the names of the flat wrapper and of `fully_shard`; "" has none."""

    FORWARD = ("forward", "")
    ROOT_PRE_FORWARD = ("_root_pre_forward", "root_pre_forward")
    INPUTS = ("_to_kwargs", "")
    PRE_FORWARD = ("_pre_forward", "pre_forward")
    FORWARD_PREFETCH = ("_pre_forward_prefetch", "")
    POST_FORWARD = ("_post_forward", "post_forward")
    PRE_BACKWARD = ("_pre_backward_hook", "pre_backward")
    BACKWARD_PREFETCH = ("_pre_backward_prefetch", "")
    POST_BACKWARD = ("_post_backward_hook", "")
    LATE_PREFETCH = ("_post_backward_prefetch", "")
    LIMIT = ("rate_limiter", "")
    GATHER = ("", "all_gather")
    GATHERED = ("", "all_gather_copy_out")
    RESHARD = ("", "post_backward_reshard")
    ACCUMULATE = ("", "post_backward_accumulate")
    REDUCE = ("", "post_backward_reduce")
    END = ("", "root_post_backward_callback")
    WAIT = ("", "post_backward_rs_wait ()")


# Parts that belong to the whole model carry no name of a unit.
_OF_ALL = (RangeName.ROOT_PRE_FORWARD, RangeName.END, RangeName.WAIT)
FLAT, IN_PLACE = 0, 1


class Ranges:
    """The ranges of one unit. `face` selects whose names they have, `fqn` is the unit's name, ""
    for the root.
    """

    def __init__(self, face: int, fqn: str = "") -> None:
        self.face = face
        self.fqn = fqn

    def __call__(self, part: RangeName) -> AbstractContextManager[Any]:
        """A context that profilers show; nothing without one, or where torch has no such range."""
        name = part.value[self.face]
        if not name or not is_profiling():
            return nullcontext()
        if self.face == FLAT:
            return record_function(f"FullyShardedDataParallel.{name}")
        of = f" ({self.fqn})" if self.fqn and part not in _OF_ALL else ""
        return record_function(f"FSDP::{name}{of}")

    def of_flat(self, part: RangeName) -> AbstractContextManager[Any]:
        """The same, for the flat wrapper alone."""
        return self(part) if self.face == FLAT else nullcontext()

    def prefetching(self, other: Ranges) -> AbstractContextManager[Any]:
        """For gathering another unit early in the backward, which `fully_shard` names by it."""
        if self.face == FLAT or not is_profiling():
            return nullcontext()
        return record_function(f"FSDP::backward_prefetch for {other.fqn}")
