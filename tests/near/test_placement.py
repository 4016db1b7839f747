"""Where copies of near files go: on different hosts, in different racks, the same load on all.

Method: every job of up to 8 hosts in every division into racks, for every number of replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from ckpt.near.placement import copies_of, sharing_racks


def divisions(count: int, racks_max: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `count` hosts racks, up to the names of racks."""
    if not count:
        yield ()
        return
    for shorter in divisions(count - 1, racks_max):
        for rack in range(min(max(shorter, default=-1) + 2, racks_max)):
            yield *shorter, rack


def jobs() -> Iterator[tuple[dict[str, str], int]]:
    for count in range(1, 9):
        for division in divisions(count, 8 if count < 7 else 4):
            racks = {f"h{number}": f"r{rack}" for number, rack in enumerate(division)}
            for replicas in range(count):
                yield racks, replicas


def test_every_host_keeps_as_many_copies_and_no_two_of_the_same_files() -> None:
    count = 0
    for racks, replicas in jobs():
        copies = copies_of(racks, replicas)
        assert list(sorted(copies)) == sorted(racks)
        load = Counter(one for others in copies.values() for one in others)
        assert all(load[host] == replicas for host in racks), (racks, replicas)
        for host, others in copies.items():
            assert len({host, *others}) == replicas + 1, (racks, replicas)
        count += 1
    assert count > 4000


def test_racks_are_not_shared_wherever_a_balanced_placement_allows_it() -> None:
    """A rack of s hosts keeps s * (replicas + 1) states in all, so it keeps one of them twice, when
    that is more than there are hosts.
    """
    possible = 0
    for racks, replicas in jobs():
        largest = max(Counter(racks.values()).values())
        shared = sharing_racks(racks, copies_of(racks, replicas))
        assert bool(shared) == (largest * (replicas + 1) > len(racks)), (racks, replicas)
        possible += not shared and replicas > 0
    assert possible > 100


def test_hosts_without_a_rack_share_none() -> None:
    racks = {"a": "x", "b": "x", "c": "", "d": "", "e": "", "f": ""}
    assert not sharing_racks(racks, copies_of(racks, 2))
    assert copies_of({"a": "", "b": "", "c": "", "d": ""}, 1) == {
        "a": ("c",),
        "b": ("d",),
        "c": ("a",),
        "d": ("b",),
    }


def test_too_few_hosts_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="takes 3 hosts, and this job has 2; use at most replicas"):
        copies_of({"a": "", "b": ""}, 2)
