"""Which ranks share a model, as its engines declare: they make state dicts of it together."""

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
        # An engine that fails to describe itself: raised again where all ranks see it.
        return everyone
    declared = _declared_ranks(layout)
    if declared is None:
        return everyone
    return tuple(sorted(declared)) if me in declared else ()


def _declared_ranks(layout: ModuleLayout) -> set[int] | None:
    declared: set[int] = set()
    for owned in (*layout.params, *layout.buffers):
        if owned.owners is None:
            return None
        declared.update(owned.owners)
    for _, unit in layout.units:  # also of those whose tensors were refused
        sharding = sharding_of(unit)
        if sharding is not None and sharding.process_group is not None:
            declared.update(dist.get_process_group_ranks(sharding.process_group))
    return None if layout.problems and not declared else declared
