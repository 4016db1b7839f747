"""Which ranks share a tier, and which hosts keep copies of whose files: arithmetic, the same on
every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from ckpt.near.tier import Tier
from ckpt.world.base import World

logger = logging.getLogger(__name__)


class Hosts(NamedTuple):
    """The tier of this host, and which ranks share one: the name of that of each rank."""

    world: World
    tier: Tier
    names: tuple[str, ...]

    @classmethod
    def of(cls, world: World, tier: Tier) -> Hosts:
        """Gathered from all ranks. Collective."""
        gathered = world.gather("near hosts", tier.host.encode())
        return cls(world, tier, tuple(one.decode() for one in gathered))

    @property
    def own(self) -> str:
        """The name of the tier of this rank."""
        return self.names[self.world.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank does for its host what is done once."""
        return self.names.index(self.own) == self.world.rank

    def ranks_of(self, name: str) -> list[int]:
        """The ranks that share a tier, ascending."""
        return [rank for rank, other in enumerate(self.names) if other == name]


def placed_copies(
    racks: Mapping[str, str], replicas: int, *, allow_fewer: bool, warns: bool
) -> dict[str, tuple[str, ...]]:
    """`copies_of`, with as many copies as there are hosts for where `allow_fewer`. Where copies
    are fewer than `replicas`, or share a rack, one rank of the job `warns` of it.

    Raises like `copies_of`.
    """
    count = len(racks)
    if allow_fewer and count <= replicas:
        # A training that continues after a lost host must not end for that.
        if warns:
            logger.warning(
                "near checkpoints have %d copies instead of %d: the training continues with %d "
                "hosts, and a file without a copy is lost with its host. Start again with more "
                "hosts, each with a directory of its own, to have all copies",
                count - 1,
                replicas,
                count,
            )
        replicas = count - 1
    copies = copies_of(racks, replicas)
    if warns and (shared := sharing_racks(racks, copies)):
        logger.warning(
            "near copies: %d of %d hosts have two copies of their files in one rack, because a "
            "rack has more than 1/%d of the hosts",
            len(shared),
            count,
            replicas + 1,
        )
    return copies


def copies_of(racks: Mapping[str, str], replicas: int) -> dict[str, tuple[str, ...]]:
    """For each host, the `replicas` hosts that keep copies of its files.

    `racks` has the rack of every host, "" where it is not known, in an order that all ranks know.
    Each host keeps copies of exactly `replicas` others, and no two copies of a file lie on one
    host, its own one included. Nor do they lie in one rack, unless some rack has more than its
    share, 1 / (replicas + 1) of the hosts: then no balanced placement could avoid that.

    Raises ValueError, with the numbers, when there are too few hosts.
    """
    count = len(racks)
    if count <= replicas:
        raise ValueError(
            f"Near(replicas={replicas}): copies of a host's files lie on {replicas} other hosts, "
            f"so it takes {replicas + 1} hosts, and this job has {count}; use at most "
            f"replicas={count - 1}, or more hosts (each with a directory of its own)"
        )
    # Racks in the order in which they first appear; a host without one is a rack by itself.
    labels = {host: (rack, "" if rack else host) for host, rack in racks.items()}
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels.values()))}
    order = sorted(racks, key=lambda host: numbers[labels[host]])
    # Hosts of a rack are neighbours now, so copies that are `stride` apart, all around, share none
    # as long as no rack has more hosts than that.
    stride = count // (replicas + 1)
    return {
        host: tuple(order[(place + k * stride) % count] for k in range(1, replicas + 1))
        for place, host in enumerate(order)
    }


def sharing_racks(racks: Mapping[str, str], copies: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The hosts that have two copies of their files in one rack, as far as racks are known."""
    shared = []
    for host, others in copies.items():
        known = [racks[one] for one in (host, *others) if racks[one]]
        if len(set(known)) < len(known):
            shared.append(host)
    return shared
