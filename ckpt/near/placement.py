"""Which ranks share a tier, and which hosts keep copies of whose files: arithmetic, the same on
every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ckpt.near.tier import Tier
from ckpt.world.base import World, shared

logger = logging.getLogger(__name__)


class Hosts(NamedTuple):
    """The tier of this host, and which ranks share one: the name of that of each rank."""

    world: World
    tier: Tier
    names: tuple[str, ...]

    @classmethod
    def of(cls, world: World, tier: Callable[[], Tier]) -> Hosts:
        """Gathered from all ranks, each of which opens its tier. Collective."""
        opened: list[Tier] = []

        def host() -> str:
            opened.append(tier())
            return opened[0].host

        names = tuple(shared(world, "near tier", host))
        return cls(world, opened[0], names)

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
    racks: Mapping[str, str], replicas: int, *, parity: int = 0, allow_fewer: bool, warns: bool
) -> dict[str, tuple[str, ...]]:
    """`copies_of`, with as many copies as there are hosts for where `allow_fewer`; with `parity`,
    `groups_of`, with one smaller group likewise. Where hosts are too few, or share a rack, one rank
    of the job `warns` of it.

    Raises like these.
    """
    count, wanted = len(racks), parity or replicas
    if allow_fewer and count <= wanted:
        # A training that continues after a lost host must not end for that.
        if warns:
            lacking = f"{count - 1} copies instead of {wanted}"
            if parity:
                lacking = f"parity of {count} hosts instead of {wanted + 1}"
            text = "near checkpoints have %s: the training continues with %d hosts, and a file "
            text += "without copy or parity is lost with its host. Start again with more hosts, "
            text += "each with a directory of its own, to have all"
            logger.warning(text, lacking, count)
        wanted = count - 1
    placed = (groups_of if parity else copies_of)(racks, wanted)
    if warns and (shared := sharing_racks(racks, placed)):
        share = f"more than 1/{wanted + 1} of the hosts"
        if parity:
            share = f"more hosts than there are groups, {count // (wanted + 1)}"
        text = "near copies: %d of %d hosts have two copies of their files, or members of their "
        text += "parity group, in one rack, because a rack has %s"
        logger.warning(text, len(shared), count, share)
    return placed


def groups_of(racks: Mapping[str, str], parity: int) -> dict[str, tuple[str, ...]]:
    """For each host, the others of its group, ascending: `parity` of them at least.

    `racks` are as for `copies_of`. There are as many groups as fit, of sizes that differ by one at
    most: with as many groups as `parity`, or more, each has at most one host more than it needs. No
    two hosts of a group are of one rack, unless some rack has more hosts than there are groups.

    Raises ValueError, with the numbers, when there are too few hosts.
    """
    if (count := len(racks)) <= parity:
        raise ValueError(
            f"Near(parity={parity}): a group for parity has {parity + 1} hosts, and this job has "
            f"{count}; use parity={count - 1} or replicas=1, or more hosts (each with a directory "
            "of its own)"
        )
    order, groups = _by_rack(racks), count // (parity + 1)
    return {
        host: tuple(sorted(one for one in order[place % groups :: groups] if one != host))
        for place, host in enumerate(order)
    }


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
    # Hosts of a rack are neighbours, so copies that are `stride` apart, all around, share none as
    # long as no rack has more hosts than that.
    order = _by_rack(racks)
    stride = count // (replicas + 1)
    return {
        host: tuple(order[(place + k * stride) % count] for k in range(1, replicas + 1))
        for place, host in enumerate(order)
    }


def _by_rack(racks: Mapping[str, str]) -> list[str]:
    """The hosts, those of a rack next to each other: racks in the order in which they first
    appear. A host without one is a rack by itself.
    """
    labels = {host: (rack, "" if rack else host) for host, rack in racks.items()}
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels.values()))}
    return sorted(racks, key=lambda host: numbers[labels[host]])


def sharing_racks(racks: Mapping[str, str], copies: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The hosts that have two copies of their files in one rack, as far as racks are known."""
    known = {host: [racks[h] for h in (host, *hs) if racks[h]] for host, hs in copies.items()}
    return [host for host, own in known.items() if len(set(own)) < len(own)]
