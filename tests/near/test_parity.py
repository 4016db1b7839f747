"""Parity of near files: how hosts are grouped, what each keeps, and what it rebuilds.

Method: every job of up to 8 hosts in many divisions into racks, for every width; groups of two to
five hosts with streams of many small lengths, each host lost once, every range read; damage.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from ckpt.errors import Corrupt
from ckpt.format.checksum import Seal
from ckpt.near.parity import (
    Parity,
    ParityGroup,
    RebuiltStore,
    decode_parity,
    files_in,
    read_chunk,
    read_parity,
    rebuilds_of,
    xor_into,
)
from ckpt.near.placement import groups_of, placed_copies, sharing_racks
from ckpt.near.records import NearFile
from ckpt.near.value import Near
from storage import KeyNotFoundError, ShortReadError, Store
from storage.memory import MemoryStore
from storage.store import ByteRange
from tests.near.test_placement import divisions

PREFIX = "steps/00000004-e000001-0123456789abcdef/"


# groups -------------------------------------------------------------------------------------------


def jobs() -> Iterator[tuple[dict[str, str], int]]:
    for count in range(2, 9):
        for division in divisions(count, 8 if count < 7 else 3):
            racks = {f"h{number}": f"r{rack}" for number, rack in enumerate(division)}
            for parity in range(1, count):
                yield racks, parity


def test_groups_divide_the_hosts_and_none_is_too_small() -> None:
    count = 0
    for racks, parity in jobs():
        others = groups_of(racks, parity)
        groups = {tuple(sorted((host, *those))) for host, those in others.items()}
        assert sorted(host for group in groups for host in group) == sorted(racks)
        assert len(groups) == len(racks) // (parity + 1)
        sizes = {len(group) for group in groups}
        assert min(sizes) >= parity + 1 and max(sizes) - min(sizes) <= 1, (racks, parity)
        if len(groups) >= parity:
            assert max(sizes) <= parity + 2
        count += 1
    assert count > 4000


def test_groups_share_no_rack_wherever_that_is_possible() -> None:
    possible = 0
    for racks, parity in jobs():
        largest = max(Counter(racks.values()).values())
        shared = sharing_racks(racks, groups_of(racks, parity))
        assert bool(shared) == (largest > len(racks) // (parity + 1)), (racks, parity)
        possible += not shared
    assert possible > 100


def test_hosts_without_racks_are_grouped_in_order() -> None:
    assert groups_of(dict.fromkeys("abcd", ""), 1) == {
        "a": ("c",),
        "b": ("d",),
        "c": ("a",),
        "d": ("b",),
    }


def test_too_few_hosts_are_refused_unless_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    racks = dict.fromkeys("abc", "")
    with pytest.raises(ValueError, match="a group for parity has 5 hosts, and this job has 3; use"):
        placed_copies(racks, 0, parity=4, allow_fewer=False, warns=True)
    assert placed_copies(racks, 0, parity=4, allow_fewer=True, warns=True)["a"] == ("b", "c")
    assert "have parity of 3 hosts instead of 5" in caplog.text
    assert placed_copies({"a": ""}, 0, parity=4, allow_fewer=True, warns=True) == {"a": ()}
    assert "have parity of 1 hosts instead of 5" in caplog.text


def test_racks_that_share_a_group_are_named(caplog: pytest.LogCaptureFixture) -> None:
    racks = {"a": "x", "b": "x", "c": "y"}
    placed_copies(racks, 0, parity=2, allow_fewer=False, warns=True)
    assert "3 of 3 hosts have" in caplog.text
    assert "because a rack has more hosts than there are groups, 1" in caplog.text


@pytest.mark.parametrize("wrong", [1, 17, -1, 2.5, "4"])
def test_other_widths_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected 0, or 2 to 16"):
        Near("/tmp/x", parity=wrong)  # type: ignore[arg-type]


def test_parity_and_replicas_are_not_both_to_be_had() -> None:
    with pytest.raises(ValueError, match="expected one of them"):
        Near("/tmp/x", parity=4, replicas=1)


# what is kept and rebuilt -------------------------------------------------------------------------


def group_with(
    sizes: Sequence[Sequence[int]], seed: int = 0
) -> tuple[ParityGroup, dict[str, Store]]:
    """A group whose hosts have files of these sizes, each by a rank of its own, and their tiers."""
    rng, rank = random.Random(seed), itertools.count()
    hosts = tuple(f"h{number}" for number in range(len(sizes)))
    stores: dict[str, Store] = {host: MemoryStore() for host in hosts}
    for host, of_host in zip(hosts, sizes, strict=True):
        for nbytes in of_host:
            key = f"{PREFIX}rank{next(rank):05d}-000.safetensors"
            stores[host].put_if_absent(key, rng.randbytes(nbytes))
    files = tuple(files_in(stores[host], PREFIX) for host in hosts)
    return ParityGroup(PREFIX, hosts, files), stores


def keep(group: ParityGroup, stores: dict[str, Store], ranks: int = 1) -> list[Parity]:
    """Every host keeps its parity, in `ranks` files."""
    kept = []
    for keeper in group.hosts:
        total = group.parity_nbytes(keeper)
        for rank in range(ranks):
            start, stop = total * rank // ranks, total * (rank + 1) // ranks
            parity = Parity(group, keeper, rank, start, stop)
            target = memoryview(bytearray(stop - start))
            for host in group.others(keeper):
                chunk = memoryview(bytearray(stop - start))
                read_chunk(stores[host].get_into, group, host, keeper, start, chunk)
                xor_into(target, chunk)
            stores[keeper].put_if_absent(parity.key, parity.header() + bytes(target))
            kept.append(read_parity(stores[keeper], parity.key))
            assert kept[-1] == parity
    return kept


def rank_of(name: str) -> int:
    return int(name[4:9])


def recorded(group: ParityGroup) -> list[NearFile]:
    """The files as a record has them; seals do not matter here."""
    names = sorted(one for each in group.files for one in each)
    return [NearFile(rank_of(name), 0, nbytes, Seal(1, b"")) for name, nbytes in names]


def homes(group: ParityGroup, *without: str) -> list[tuple[str, ...]]:
    """Where the files of each rank are, when hosts are lost."""
    of_rank = {
        rank_of(name): host
        for host, files in zip(group.hosts, group.files, strict=True)
        for name, _ in files
    }
    return [() if (h := of_rank[rank]) in without else (h,) for rank in sorted(of_rank)]


def shapes() -> Iterator[list[tuple[int, ...]]]:
    """The files of each host of groups of two to five."""
    for count in (2, 3, 4, 5):
        for sizes in itertools.product((1, 2, 7, 12), repeat=min(count, 3)):
            yield [(size,) for size in (*sizes, *(5,) * (count - len(sizes)))]
    yield [(3, 1, 9), (1,), (4, 4)]
    yield [(1, 1, 1, 1), (30,), (2, 13), (8,)]


def test_each_lost_host_comes_back_byte_for_byte() -> None:
    count = 0
    for number, sizes in enumerate(shapes()):
        group, stores = group_with(sizes, number)
        parities = keep(group, stores, ranks=1 + number % 3)
        for lost in group.hosts:
            ranks = {rank_of(name) for name, _ in group.files_of(lost)}
            kept = [one for one in parities if one.keeper != lost]
            (rebuild,), problems = rebuilds_of(recorded(group), homes(group, lost), kept, ranks)
            assert not problems and rebuild.hosts == group.others(lost)
            left = {host: store for host, store in stores.items() if host != lost}
            store = RebuiltStore(MemoryStore(), [rebuild], left)
            for name, nbytes in group.files_of(lost):
                whole = stores[lost].get(PREFIX + name)
                assert store.get(PREFIX + name) == whole, (sizes, lost)
                assert store.info(PREFIX + name).nbytes == nbytes
                for start in range(nbytes):
                    for stop in range(start, nbytes + 1):
                        part = store.get(PREFIX + name, ByteRange(start, stop))
                        assert part == whole[start:stop]
                        count += 1
    assert count > 10_000


def test_each_host_keeps_a_share_and_every_byte_is_kept_once() -> None:
    for sizes in shapes():
        group, _ = group_with(sizes)
        for host in group.hosts:
            streams = sum(nbytes for _, nbytes in group.files_of(host))
            sent = [
                (group.others(host).index(keeper), name, start, stop)
                for keeper in group.others(host)
                for name, start, stop in group.pieces(host, keeper, 0, group.parity_nbytes(keeper))
            ]
            assert sum(stop - start for *_, start, stop in sent) == streams
            # Each byte of the stream is of one chunk, and chunks follow each other.
            files = {name: 0 for name, _ in group.files_of(host)}
            for _, name, start, stop in sorted(sent):
                assert files[name] == start
                files[name] = stop
            assert files == dict(group.files_of(host))
            longest = max(
                sum(n for _, n in group.files_of(one)) for one in group.hosts if one != host
            )
            assert group.parity_nbytes(host) == -(-longest // (len(group.hosts) - 1))


def test_two_lost_hosts_of_a_group_are_named() -> None:
    group, stores = group_with([(5,), (6, 2), (7,), (8,)])
    parities = keep(group, stores)
    for first, second in itertools.combinations(group.hosts, 2):
        kept = [one for one in parities if one.keeper not in (first, second)]
        ranks = [rank for rank, home in enumerate(homes(group, first, second)) if not home]
        rebuilds, (problem,) = rebuilds_of(
            recorded(group), homes(group, first, second), kept, ranks
        )
        assert not rebuilds
        assert f"one host of a group of 4, and 2 lack files: {first} (ranks" in problem
        assert f"{second} (ranks" in problem
        # Asked of all ranks, as a rescue does, it says no more: the others lack nothing.
        asked = rebuilds_of(recorded(group), homes(group, first, second), kept, range(5))
        assert asked == ([], [problem])


def test_a_host_without_all_of_its_parity_rebuilds_nothing() -> None:
    group, stores = group_with([(50,), (60,), (70,)])
    parities = keep(group, stores, ranks=3)
    for missing in [one for one in parities if one.keeper == "h1"]:
        kept = [one for one in parities if one.keeper != "h0" and one != missing]
        rebuilds, problems = rebuilds_of(recorded(group), homes(group, "h0"), kept, [0])
        assert not rebuilds and "h1 (ranks 1)" in problems[0]
    # Nor does one whose files are gone; and those of another generation are no group at all.
    assert rebuilds_of(recorded(group), homes(group, "h0", "h2"), parities, [0])[0] == []
    others = [file for file in recorded(group) if file.rank != 1]
    assert rebuilds_of(others, homes(group, "h0"), parities, [0]) == ([], [])


def test_damage_is_repaired_where_the_host_is_still_there() -> None:
    group, stores = group_with([(50, 3), (60,), (70,)])
    parities = keep(group, stores)
    (rebuild,), _ = rebuilds_of(recorded(group), [(), *homes(group)[1:]], parities, [0])
    assert rebuild.lost == "h0"
    store = RebuiltStore(stores["h1"], [rebuild], {h: stores[h] for h in ("h1", "h2")})
    name = group.files_of("h0")[0][0]
    assert store.get(PREFIX + name) == stores["h0"].get(PREFIX + name)
    # What is not lost is read where it is.
    own = PREFIX + group.files_of("h1")[0][0]
    assert store.get(own) == stores["h1"].get(own)


def test_what_is_gone_meanwhile_is_corrupt_and_a_range_ends() -> None:
    group, stores = group_with([(50,), (60,), (70,)])
    (rebuild,), _ = rebuilds_of(recorded(group), homes(group, "h0"), keep(group, stores), [0])
    store = RebuiltStore(MemoryStore(), [rebuild], stores)
    key = PREFIX + group.files_of("h0")[0][0]
    with pytest.raises(ShortReadError):
        store.get(key, ByteRange(40, 51))
    stores["h1"].delete(PREFIX + group.files_of("h1")[0][0])
    with pytest.raises(Corrupt, match="cannot be rebuilt from parity"):
        store.get(key)
    with pytest.raises(KeyNotFoundError):
        store.get(PREFIX + "rank00009-000.safetensors")


# the file -----------------------------------------------------------------------------------------


def test_a_parity_file_is_safetensors_and_canonical() -> None:
    group, stores = group_with([(50,), (60,), (70,)])
    parity = keep(group, stores, 2)[3]
    data = stores[parity.keeper].get(parity.key)
    (nbytes,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + nbytes])
    assert head["parity"]["data_offsets"] == [0, len(data) - 8 - nbytes] and not nbytes % 8
    header = parity.header()
    assert decode_parity(header, "x") == parity
    for wrong in (header + b" ", header.replace(b"h2", b"h1"), header[:-1], b"", bytes(9)):
        with pytest.raises(Corrupt, match="parity header"):
            decode_parity(wrong, "x")
    rng = random.Random(7)
    for _ in range(2000):  # a flipped bit never becomes another group
        damaged = bytearray(header)
        damaged[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        try:
            other = decode_parity(bytes(damaged), "x")
        except Corrupt:
            continue
        assert other.header() == bytes(damaged) and other != parity


@pytest.mark.parametrize("name", ["MANIFEST", "PART-a", f"rank{'9' * 5000}-000.safetensors"])
def test_parity_of_files_of_no_rank_is_refused(name: str) -> None:
    group = ParityGroup(PREFIX, ("a", "b"), (((name, 3),), (("rank00001-000.safetensors", 3),)))
    with pytest.raises(Corrupt, match="parity header"):
        decode_parity(Parity(group, "b", 1, 0, 3).header(), "x")


def test_a_newer_parity_and_a_cut_one_are_refused() -> None:
    group, stores = group_with([(50,), (60,), (70,)])
    parity = keep(group, stores)[0]
    newer = parity.header().replace(b'\\"version\\":1', b'\\"version\\":2')
    with pytest.raises(Corrupt, match="not in canonical form"):
        decode_parity(newer, "x")
    data, other = stores["h0"].get(parity.key), MemoryStore()
    other.put_if_absent(parity.key, data[:-1])
    with pytest.raises(Corrupt, match="is cut, or of another place"):
        read_parity(other, parity.key)
    moved = parity.key.replace("00000004", "00000006")
    other.put_if_absent(moved, data)
    with pytest.raises(Corrupt, match="is cut, or of another place"):
        read_parity(other, moved)
    other.put_if_absent(parity._replace(rank=7).key, b"\xff" * 8 + data)
    with pytest.raises(Corrupt, match="header of 18446744073709551615 bytes"):
        read_parity(other, parity._replace(rank=7).key)
