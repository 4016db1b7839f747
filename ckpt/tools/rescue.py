"""A near checkpoint of a dead job made durable, from the directories of its hosts.

    records and files of all directories -> the newest whole one -> files -> MANIFEST -> commit

Every byte is compared with its checksum on the way. No process of the job is needed, nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckpt.commit.locate import ResumePoint, resumable
from ckpt.commit.log import read_format
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError, Corrupt, InvalidState, NoCheckpoint
from ckpt.format.datafile_index import OpenedFile, contradictions, part_of_rank
from ckpt.format.joint_manifest import build_manifest
from ckpt.near.parity import RebuiltStore, rebuilds_of
from ckpt.near.records import NearRecord
from ckpt.near.tier import Tier, tiers_in
from ckpt.short import ShortRecord
from ckpt.tools.relay import is_there, relay_file, tiles_of
from ckpt.tools.salvage import put_manifest
from storage import KeyNotFoundError, Store

logger = logging.getLogger(__name__)

THREADS = 4
_Used = TypeVar("_Used")


@dataclass(frozen=True, slots=True, repr=False)
class RescueReport(ShortRecord):
    """What was made durable. `passed_over` are newer near checkpoints: step, and why not."""

    step: int
    attempt: str
    path: str
    files: int
    nbytes: int
    passed_over: tuple[tuple[int, str], ...]


def rescue_in(store: Store, near: Sequence[str]) -> RescueReport:
    """Commit the newest near checkpoint that the directories `near` have of a store's root. See
    `ckpt.operate.rescue`.
    """
    with ExitStack() as stack:
        maintenance = Maintenance.open(store)
        tiers = [tier for path in near for tier in tiers_in(path, store)]
        for tier in tiers:
            stack.callback(tier.close)
        # Hosts keep near checkpoints of several runs next to each other.
        own = [tier for tier in tiers if tier.root == maintenance.root]
        if not own:
            raise NoCheckpoint(
                f"none of {', '.join(near)} is a near directory of {store.url} (root "
                f"{read_format(store)}); they are of "
                f"{', '.join(sorted({tier.root for tier in tiers})) or 'no root'}"
            )
        passed_over: list[tuple[int, str]] = []
        for record in _newest_first(own, maintenance):
            try:
                nbytes = _make_durable(record, _homes(own, record), maintenance)
            except (Corrupt, InvalidState, KeyNotFoundError) as error:
                logger.warning("step %d is skipped: %s", record.head.step, error)
                passed_over.append((record.head.step, str(error)))
                continue
            path = f"{store.url}/{record.prefix}".rstrip("/")
            head, files = record.head, len(record.files)
            return RescueReport(head.step, head.attempt, path, files, nbytes, tuple(passed_over))
    reasons = "".join(f"\n  - step {step}: {reason}" for step, reason in passed_over)
    raise NoCheckpoint(
        f"no near checkpoint in {', '.join(near)} is whole and newer than what {store.url} "
        f"has{reasons}"
    )


def _newest_first(tiers: Sequence[Tier], maintenance: Maintenance) -> list[NearRecord]:
    """The records that count and are newer than the newest durable checkpoint of the training."""
    state = maintenance.state()
    # Every host has the record of the same checkpoint: one of each is enough.
    records = {record.order: record for tier in tiers for record in tier.records()}
    durable = resumable(state.live)[:1]
    return [
        record
        for _, record in sorted(records.items(), reverse=True)
        # Of an older epoch, another job has claimed the root since and continues from elsewhere.
        if record.head.epoch == state.epoch
        and state.find(record.head.attempt) is None
        and not any(record.head.is_before(entry.slot, entry.step) for entry in durable)
    ]


def _homes(tiers: Sequence[Tier], record: NearRecord) -> dict[int, list[Tier]]:
    """For each rank the tiers with all its files, the last one with those that parity makes. Raises
    Corrupt where there is none.
    """
    homes: dict[int, list[Tier]] = {}
    stores: dict[str, Store] = {}
    for tier in tiers:
        for rank in tier.whole_ranks(record):
            homes.setdefault(rank, []).append(tier)
            stores[tier.host] = tier.store  # not that of an older copy of its directory
    ranks = range(record.head.world_size)
    parities = [one for tier in tiers for one in tier.parities(record.prefix)]
    names = [[tier.host for tier in homes.get(rank, ())] for rank in ranks]
    rebuilds, problems = rebuilds_of(record.files, names, parities, ranks)
    for one in rebuilds:
        # By itself: files that are there and damaged are rebuilt as well.
        made = tiers[0].over(RebuiltStore(tiers[0].store, [one], stores))
        for rank in one.ranks:
            homes.setdefault(rank, []).append(made)
    missing = [rank for rank in ranks if rank not in homes]
    if missing:
        raise Corrupt(
            f"no directory has the files of {len(missing)} of {record.head.world_size} ranks: "
            f"{', '.join(map(str, missing[:8]))}; pass the directories of all hosts"
            f"{''.join(f'; {one}' for one in problems)}"
        )
    return homes


def _make_durable(
    record: NearRecord, homes: Mapping[int, Sequence[Tier]], maintenance: Maintenance
) -> int:
    """Copy the files, write the MANIFEST and commit; returns the bytes of the checkpoint. `homes`
    are, by rank, tiers that have all its files.
    """
    store, opened = maintenance.store, {}
    for rank, tiers in sorted(homes.items()):
        opened[rank] = _from_first(tiers, partial(Tier.opened, record=record, rank=rank))
    if problems := contradictions([file for own, _ in opened.values() for file in own]):
        raise Corrupt("; ".join(problems))
    header = opened[0][0][0].place.header
    # Before anything is copied: where files contradict each other, this raises.
    parts = [part_of_rank(rank, own) for rank, (own, _) in opened.items()]
    manifest = build_manifest(header, parts)
    keys = []
    for own, tiers in opened.values():
        for file in own:
            keys.append(record.prefix + file.name)
            if is_there(store, keys[-1], file.described.header, file.described.nbytes) is None:
                _from_first(tiers, partial(_relay, store, keys[-1], file))
    store.sync(keys)
    # No older checkpoint is taken instead of one that is not what its MANIFEST says.
    put_manifest(store, record.prefix + MANIFEST_NAME, manifest, CheckpointError)
    head, commit = record.head, Commit.of(manifest)
    continues = ResumePoint(head.anchor, head.is_new_line) if head.anchor else None
    maintenance.commit_rescued(commit, continues=continues, epoch=head.epoch)
    return commit.nbytes


def _from_first(
    tiers: Sequence[Tier], use: Callable[[Tier], _Used]
) -> tuple[_Used, Sequence[Tier]]:
    """What `use` makes of the first tier whose copy is whole, and the tiers from that one on."""
    for number, tier in enumerate(tiers):
        try:
            return use(tier), tiers[number:]
        except (Corrupt, KeyNotFoundError) as error:
            if number + 1 == len(tiers):
                raise
            logger.warning("another copy is used, because %s", error)
    raise AssertionError("every rank has a home")


def _relay(store: Store, key: str, file: OpenedFile, tier: Tier) -> None:
    tiles = tiles_of(file.described)
    relay_file(tier.files, key, store, key, tiles=tiles, threads=THREADS, add=lambda nbytes: None)
