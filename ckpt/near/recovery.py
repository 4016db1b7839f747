"""From the tiers of all hosts to a state: which near checkpoints are whole, and a load of one.

records and files of each host -> candidates -> parts from headers -> manifest -> load
                       gathered by the coordinator   by ranks that have the files
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt.api import read_path
from ckpt.commit.locate import ResumePoint
from ckpt.errors import CheckpointError, Corrupt, InvalidState, LoadInterrupted, Mismatch
from ckpt.format.datafile_index import part_of_rank
from ckpt.format.joint_codec import decode_part, encode_part
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Header, Manifest, unlimited
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.exchange import Origins
from ckpt.loading.load import LoadOptions, LoadReport, load_located
from ckpt.near.parity import Parity, Rebuild, RebuiltStore, decode_parity, rebuilds_of
from ckpt.near.peers import open_copies
from ckpt.near.placement import Hosts
from ckpt.near.records import NearRecord, decode_near_record, encode_near_record
from ckpt.near.status import TierStatus, read_status
from ckpt.near.tier import Tier
from ckpt.near.value import Near
from ckpt.service.restore import TierRestorable
from ckpt.world.base import collectively, decided, joined, pack, shared, split, unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NearCandidate(TierRestorable):
    """A record that some host has, and for each rank that saved, the hosts that have all its files:
    its own, and those that keep copies; or those that rebuild them by one of `rebuilds`.
    """

    hosts: Hosts
    record: NearRecord
    homes: tuple[tuple[str, ...], ...]
    near: Near
    has_parity: bool  # somewhere
    rebuilds: tuple[Rebuild, ...] = ()

    @classmethod
    def of(
        cls,
        hosts: Hosts,
        record: NearRecord,
        homes: Sequence[Sequence[str]],
        near: Near,
        has_parity: bool,
    ) -> NearCandidate:
        """The one that a record makes. Collective where it `has_parity`."""
        missing = [rank for rank, names in enumerate(homes) if not names]
        rebuilds, why = list[Rebuild](), ""
        if missing and has_parity:
            rebuilds, problems = rebuilds_of(
                record.files, homes, _parities(hosts, record, missing), missing
            )
            why = "".join(f"; {one}" for one in problems)
            made = {rank: one.hosts for one in rebuilds for rank in one.ranks}
            homes = [names or made.get(rank, ()) for rank, names in enumerate(homes)]
        missing, problem = [rank for rank, names in enumerate(homes) if not names], ""
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            of_all = f"{len(missing)} of {len(homes)} ranks"
            problem = f"no host has the near files of {of_all}: {shown}{why}"
        head = record.head
        continues = ResumePoint(head.anchor, head.is_new_line)
        base = (head.step, head.attempt, head.time_unix, continues, head.number, problem)
        of_hosts = (hosts, record, tuple(map(tuple, homes)), near, has_parity)
        return cls(*base, *of_hosts, tuple(rebuilds))

    def is_before(self, slot: int, step: int) -> bool:
        return self.record.head.is_before(slot, step)

    def load(self, state: Any, options: Mapping[str, Any]) -> LoadReport | str:
        if self.problem:
            return self.problem
        try:
            return load_near(state, self, options)
        except (InvalidState, Mismatch):
            raise  # the state is another one, as it is to older checkpoints
        except CheckpointError as error:
            # A host that cannot read its tier is as good as one that has none: there are others.
            # Without all ranks no other candidate can be loaded either.
            if self.hosts.world.failure is not None:
                raise
            is_half = isinstance(error, LoadInterrupted)
            return str(error.__cause__ or error) if is_half else str(error)


def near_candidates(
    hosts: Hosts, epoch: int, near: Near
) -> tuple[TierStatus | None, list[NearCandidate]]:
    """How far the training of an epoch had come, as far as a host has noted it, and all of its near
    checkpoints that any host knows of, newest first. Collective.
    """
    world, tier, is_first = hosts.world, hosts.tier, hosts.is_first
    own: dict[str, bytes] = {}

    def look() -> list[Any]:
        if not is_first:
            return [None, []]
        # Of an older epoch: that session is fenced, and this one has not adopted its states.
        for record in tier.records(epoch):
            encoded = encode_near_record(record)
            own[hashlib.sha256(encoded).hexdigest()] = encoded
        return [_status(tier), sorted(own)]

    seen = shared(world, "near records", look)
    statuses = [TierStatus(**one) for one, _ in seen if one and one["epoch"] == epoch]
    status = max(statuses, key=lambda one: one.order, default=None)
    # Each record is sent by the first rank that has it: of thousands of hosts all have the same.
    senders: dict[str, int] = {}
    for rank, (_, digests) in enumerate(seen):
        for digest in digests:
            senders.setdefault(digest, rank)
    sent = [encoded for digest, encoded in own.items() if senders[digest] == world.rank]
    gathered = world.gather_to_coordinator("near records", _packed(sent))
    mine = None if gathered is None else _packed(each for one in gathered for each in unpack(one))
    records = [
        decode_near_record(encoded, "a near record of another rank")
        for encoded in unpack(world.broadcast("near records", mine))
    ]
    records.sort(key=lambda record: record.order, reverse=True)

    # A host offers the files of all records, of those that others have as well: its own copy of a
    # record may be damaged, or it had no time to write one.
    def offered() -> list[tuple[list[int], bool]]:
        if not is_first:
            return []
        return [(tier.whole_ranks(one), tier.has_parity(one.prefix)) for one in records]

    homes: list[list[list[str]]] = [[[] for _ in range(r.head.world_size)] for r in records]
    have_parity = [False] * len(records)
    for rank, offers in enumerate(shared(world, "near offers", offered)):
        for number, (ranks, has_parity) in enumerate(offers):  # only the first of a host has any
            have_parity[number] |= has_parity
            for one in ranks:
                homes[number][one].append(hosts.names[rank])
    return status, [
        NearCandidate.of(hosts, record, known, near, has_parity)
        for record, known, has_parity in zip(records, homes, have_parity, strict=True)
    ]


def _parities(hosts: Hosts, record: NearRecord, ranks: Collection[int]) -> list[Parity]:
    """The parity that hosts have of a record, as far as it is of files of `ranks`. Collective."""

    def kept() -> list[str]:
        own = hosts.tier.parities(record.prefix) if hosts.is_first else ()
        return [
            one.header().hex()
            for one in own
            if any(one.group.ranks_of(host) & {*ranks} for host in one.group.hosts)
        ]

    return [
        decode_parity(bytes.fromhex(one), "parity of another rank")
        for each in shared(hosts.world, "near parity", kept)
        for one in each
    ]


def _status(tier: Tier) -> dict[str, Any] | None:
    try:
        status = read_status(tier.store.place)
    except (CheckpointError, OSError) as error:
        logger.warning("how far the training was is not known of this host: %s", error)
        return None
    return None if status is None else asdict(status)


def load_near(state: Any, candidate: NearCandidate, options: Mapping[str, Any]) -> LoadReport:
    """Fill `state` from a near checkpoint whose files are all there; of `options` it takes `stacks`
    and `resize`, as `ckpt.load`. Collective. Where a file turns out to be damaged or not readable,
    another copy of it is used.

    Raises like `ckpt.loading.load.load_state` when no other copy is left; a damaged header is
    Corrupt with the state as it was, a damaged block is LoadInterrupted by Corrupt.
    """
    try:
        return _load(state, candidate, options)
    except (InvalidState, Mismatch):
        raise
    except CheckpointError as error:
        world = candidate.hosts.world
        has_more = candidate.has_parity or any(len(homes) > 1 for homes in candidate.homes)
        if world.failure is not None or not has_more:
            raise
        sound = _checked(candidate)
        if sound.problem or sound == candidate:
            raise
        if world.rank == 0:
            text = "near step %d is loaded again, from other copies: %s"
            logger.warning(text, candidate.step, error)
    return _load(state, sound, options)


@contextmanager
def _rebuilding(candidate: NearCandidate) -> Iterator[NearCandidate]:
    """The candidate with tiers that have all files of their homes: those of lost hosts are made as
    they are read. Each home reads from the others then. Collective.
    """
    hosts, rebuilds = candidate.hosts, candidate.rebuilds
    if not rebuilds:
        yield candidate
        return
    own = [one for one in rebuilds if hosts.own in one.hosts]
    others = {
        name: tuple(sorted({h for r in rebuilds if name in r.hosts for h in r.hosts} - {name}))
        for name in hosts.names
    }
    if hosts.world.rank == 0:
        text = "near step %d: the files of %d lost or damaged hosts are rebuilt from parity"
        logger.warning(text, candidate.step, len(rebuilds))
    copies = open_copies(hosts.world, hosts, others, candidate.near)
    try:
        tier = hosts.tier
        stores = dict(zip(others[hosts.own], copies.stores, strict=True))
        tier = tier.over(RebuiltStore(tier.store, own, {hosts.own: tier.store, **stores}))
        yield replace(candidate, hosts=hosts._replace(tier=tier))
        # Others may still read here.
        hosts.world.gather("near rebuilt", b"")
    finally:
        copies.close()


def _load(state: Any, candidate: NearCandidate, options: Mapping[str, Any]) -> LoadReport:
    with _rebuilding(candidate) as whole:
        return _load_whole(state, whole, options)


def _load_whole(state: Any, candidate: NearCandidate, options: Mapping[str, Any]) -> LoadReport:
    record, hosts = candidate.record, candidate.hosts
    world, tier, own_host = hosts.world, hosts.tier, hosts.own
    manifest = _manifest(candidate)
    rank_of = {file.name: file.rank for file in record.files}
    ranks = [rank_of[name] for name in manifest.files]
    owners = {
        number: _reader_at(hosts, candidate.homes[rank], rank, world.rank)
        for number, rank in enumerate(ranks)
        if own_host not in candidate.homes[rank]
    }
    # What is rebuilt is read in one way only.
    is_plain_disk = not (tier.is_in_memory or candidate.rebuilds)
    ranks_here = hosts.ranks_of(own_host)
    path = read_path(tier.files, "auto" if is_plain_disk else "buffered", len(ranks_here))
    resize, stacks = options.get("resize"), options.get("stacks") or {}
    return load_located(
        state,
        store=tier.files,
        world=world,
        located=(record.prefix, manifest),
        options=LoadOptions(stacks=stacks, path=path, resize=resize),
        origins=Origins(ranks_here, owners),
    )


def _checked(candidate: NearCandidate) -> NearCandidate:
    """The candidate with those homes alone whose files are as they were written: every rank reads a
    share of what its host has, all bytes of it. Collective.
    """
    hosts, world, own_host = candidate.hosts, candidate.hosts.world, candidate.hosts.own
    ranks_here = hosts.ranks_of(own_host)
    rebuilt = {rank for one in candidate.rebuilds for rank in one.ranks}
    offered = [
        r for r, homes in enumerate(candidate.homes) if own_host in homes and r not in rebuilt
    ]
    mine = offered[ranks_here.index(world.rank) :: len(ranks_here)]

    def damaged() -> Iterator[int]:
        for rank in mine:
            try:
                hosts.tier.opened(candidate.record, rank, with_blocks=True)
            except CheckpointError as error:
                logger.warning("a copy of near files of rank %d does not count: %s", rank, error)
                yield rank

    bad = {
        (hosts.names[reader], rank)
        for reader, ranks in enumerate(shared(world, "near damage", lambda: list(damaged())))
        for rank in ranks
    }
    homes = [
        [home for home in homes if (home, rank) not in bad and rank not in rebuilt]
        for rank, homes in enumerate(candidate.homes)
    ]
    near, has_parity = candidate.near, candidate.has_parity
    return NearCandidate.of(hosts, candidate.record, homes, near, has_parity)


def _reader_at(hosts: Hosts, homes: Sequence[str], rank: int, user: int) -> int:
    """Which rank reads the files of `rank`, which are at `homes`, for the rank `user`."""
    ranks = hosts.ranks_of(homes[user % len(homes)])
    return ranks[rank % len(ranks)]


def _manifest(candidate: NearCandidate) -> Manifest:
    """The manifest that the headers of all files make. Collective."""
    record, hosts, world = candidate.record, candidate.hosts, candidate.hosts.world
    # Of several homes, each opens its share.
    owners = [_reader_at(hosts, homes, rank, rank) for rank, homes in enumerate(candidate.homes)]

    def opened() -> bytes:
        sent = [b""]  # from a rank that opens none: nothing at all stands for an error
        for rank, owner in enumerate(owners):
            if owner == world.rank:
                files = hosts.tier.opened(record, rank)
                header = files[0].place.header.model_dump_json().encode()
                sent.append(joined(header, encode_part(part_of_rank(rank, files))))
        return _packed(sent)

    def merged(received: list[bytes]) -> bytes:
        pairs = [split(each) for one in received for each in unpack(one) if each]
        # Compared as bytes: files of two attempts must never make one state.
        headers = {header for header, _ in pairs}
        if len(headers) != 1:
            raise Corrupt(f"near files of step {record.head.step} are of {len(headers)} attempts")
        parts = [decode_part(data) for _, data in pairs]
        parts.sort(key=lambda part: part.structure.first_rank)
        header = Header.model_validate_json(headers.pop())
        return build_manifest(header, parts).data

    sent = decided(world, "near parts", "near manifest", opened, merged)
    return collectively(world, "decode", lambda: decode_manifest(sent, unlimited()))


def _packed(messages: Iterable[bytes]) -> bytes:
    return b"".join(map(pack, messages))
