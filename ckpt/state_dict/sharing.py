"""Which ranks share a model, as its engines tell: those that make a state dict of it together."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ckpt.layout.modules import ModuleLayout, describe_module
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import sharding_of

__all__ = ["ranks_that_share"]


def ranks_that_share(model: nn.Module) -> tuple[int, ...]:
    """torch's numbers of the ranks over which units, meshes and DDP lay out `model`, ascending.

    Empty for a model that no engine shares with another rank, all ranks where an engine does not
    say. Asks no other rank: all ranks that share the model find the same.
    """
    everyone = tuple(range(dist.get_world_size()))
    me = dist.get_rank()
    try:
        layout = describe_module(model, Ranks(me, everyone))
    except Exception:
        # An engine that fails to describe itself: said again where all ranks hear of it.
        return everyone
    found = _told(layout)
    if found is None:
        return everyone
    return tuple(sorted(found)) if me in found else ()


def _told(layout: ModuleLayout) -> set[int] | None:
    found: set[int] = set()
    for owned in (*layout.params, *layout.buffers):
        if owned.owners is None:
            return None
        found.update(owned.owners)
    for _, unit in layout.units:  # also of those whose tensors were refused
        told = sharding_of(unit)
        if told is not None and told.process_group is not None:
            found.update(dist.get_process_group_ranks(told.process_group))
    return None if layout.problems and not found else found
