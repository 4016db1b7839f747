"""How a Checkpointer joins another world: what it refuses, and how the ranks of that world meet."""

from __future__ import annotations

import math

import torch.distributed as dist

from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.service.target import Target
from ckpt.world.rounds import Deadlines
from ckpt.world.torch_world import current_world


def rejoining_target(
    target: Target, process_group: dist.ProcessGroup | None, meet_seconds_max: float
) -> Target:
    """`target` over another group. Raises before anything is left: ValueError, and CheckpointError
    where this process is not in that group or the target is bound to its ranks.
    """
    if not 0.0 < meet_seconds_max < math.inf:
        raise ValueError(f"meet_seconds_max={meet_seconds_max!r}: expected seconds above 0")
    is_joined = dist.is_available() and dist.is_initialized()
    if process_group is not None and not is_joined:
        raise CheckpointError(
            "a process group was given, and torch.distributed is not initialised: make the group "
            "of the processes that are left first"
        )
    if is_joined and dist.get_rank(process_group) < 0:
        raise CheckpointError(
            "this process is not in the process group that was given: only those that go on call "
            "rejoin"
        )
    return target.over(process_group)


def meet(process_group: dist.ProcessGroup | None, *, seconds_max: float) -> None:
    """Return when all ranks of `process_group`, or all ranks, have called this.

    Raises RankFailed on all that have, naming one that has not within `seconds_max`.
    """
    world = current_world(process_group, deadlines=Deadlines(round_seconds_max=seconds_max))
    try:
        world.agree("rejoin", None)
    finally:
        world.close()


def nothing_to_rejoin_with(url: str) -> NoCheckpoint:
    """The error of a state whose other parts are lost, where nothing was saved."""
    return NoCheckpoint(
        f"{url} has no checkpoint, and parts of the state are lost with their ranks: pass "
        "rejoin(state=) with a state as at the beginning, or save before the first step"
    )
