"""Which ranks share a tier."""

from __future__ import annotations

from typing import NamedTuple

from ckpt.near.tier import Tier
from ckpt.world.base import World


class Hosts(NamedTuple):
    """Which ranks share a tier: the name of the tier of each rank, in rank order."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, world: World, tier: Tier) -> Hosts:
        """Gathered from all ranks. Collective."""
        return cls(tuple(one.decode() for one in world.gather("near hosts", tier.host.encode())))

    def ranks_of(self, name: str) -> list[int]:
        """The ranks that share a tier, ascending."""
        return [rank for rank, other in enumerate(self.names) if other == name]

    def is_first(self, rank: int) -> bool:
        """Whether `rank` does for its host what is done once."""
        return self.names.index(self.names[rank]) == rank
