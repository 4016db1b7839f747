"""How many bytes a state has on this rank."""

from __future__ import annotations

from typing import Any

from ckpt.layout.plain import Ranks
from ckpt.state_dict import flatten_state
from ckpt.world import World


def nbytes_of(state: Any, world: World) -> int:
    """The bytes of all tensors of `state` that lie on this rank of `world`."""
    flat = flatten_state(state, Ranks(world.rank, world.global_ranks))
    held = {id(holding.local): holding.local for holding in flat.holdings}
    return sum(local.numel() * local.element_size() for local in held.values())
