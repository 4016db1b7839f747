"""Which hosts keep copies of which host's files: arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping


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
