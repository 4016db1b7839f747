"""A near checkpoint of a dead job made durable, from the directories of its hosts.

    records and files of all directories -> the newest whole one -> files -> MANIFEST -> commit

Every byte is compared with its checksum on the way. No process of the job is needed, nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.commit.lines import ResumePoint, resumable
from ckpt.commit.log import read_format
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME
from ckpt.commit.records import manifest_digest
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError, Corrupt, InvalidState, NoCheckpoint
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import encode_manifest
from ckpt.format.opened_files import OpenedFile, contradictions, part_of_rank
from ckpt.near.records import NearRecord
from ckpt.near.tier import Tier, tiers_in
from ckpt.short import ShortRecord
from ckpt.tools.relay import is_there, relay_file, tiles_of
from storage import KeyExistsError, KeyNotFoundError, Store

logger = logging.getLogger(__name__)

THREADS = 4


@dataclass(frozen=True, slots=True, repr=False)
class RescueReport(ShortRecord):
    """What was made durable. `passed_over` are newer near checkpoints: step, and why not."""

    step: int
    attempt: str
    path: str
    files: int
    nbytes: int
    passed_over: tuple[tuple[int, str], ...]


class _Rescued(NamedTuple):
    record: NearRecord
    homes: Mapping[int, Sequence[Tier]]  # by rank: those with all its files


def rescue_in(store: Store, near: Sequence[str]) -> RescueReport:
    """Commit the newest near checkpoint that the directories `near` have of a store's root. See
    `ckpt.operate.rescue`.
    """
    with ExitStack() as stack:
        maintenance = Maintenance.open(store)
        tiers = [tier for path in near for tier in tiers_in(path, store)]
        for tier in tiers:
            stack.callback(tier.close)
        own = [tier for tier in tiers if tier.root == maintenance.root]
        if not own:
            raise NoCheckpoint(
                f"none of {', '.join(near)} is a near directory of {store.url} (root "
                f"{read_format(store).root}); they are of {_roots(tiers)}"
            )
        passed_over: list[tuple[int, str]] = []
        for record in _newest_first(own, maintenance):
            try:
                whole = _Rescued(record, _homes(own, record))
                nbytes = _make_durable(whole, store, maintenance)
            except (Corrupt, InvalidState, KeyNotFoundError) as error:
                logger.warning("step %d is passed over: %s", record.head.step, error)
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


def _roots(tiers: Sequence[Tier]) -> str:
    return ", ".join(sorted({tier.root for tier in tiers})) or "no root"


def _newest_first(tiers: Sequence[Tier], maintenance: Maintenance) -> list[NearRecord]:
    """The records that count and are newer than the newest durable checkpoint of the training."""
    state = maintenance.state()
    records = {record.order: record for tier in tiers for record in tier.records()}
    durable = resumable(state.live)[:1]
    return [
        record
        for _, record in sorted(records.items(), reverse=True)
        if record.head.epoch == state.epoch
        and state.find(record.head.attempt) is None
        and not any(record.head.is_before(entry.slot, entry.step) for entry in durable)
    ]


def _homes(tiers: Sequence[Tier], record: NearRecord) -> dict[int, list[Tier]]:
    """For each rank the tiers with all its files. Raises Corrupt where there is none."""
    homes: dict[int, list[Tier]] = {}
    for tier in tiers:
        for rank in tier.whole_ranks(record):
            homes.setdefault(rank, []).append(tier)
    missing = [rank for rank in range(record.head.world_size) if rank not in homes]
    if missing:
        raise Corrupt(
            f"no directory has the files of {len(missing)} of {record.head.world_size} ranks: "
            f"{', '.join(map(str, missing[:8]))}; pass the directories of all hosts"
        )
    return homes


def _make_durable(whole: _Rescued, store: Store, maintenance: Maintenance) -> int:
    """Copy the files, write the MANIFEST and commit; returns the bytes of the checkpoint."""
    record, homes = whole
    opened = {rank: _opened(record, rank, tiers) for rank, tiers in sorted(homes.items())}
    if problems := contradictions([file for own, _ in opened.values() for file in own]):
        raise Corrupt("; ".join(problems))
    header = opened[0][0][0].place.header
    # Before anything is copied: where files contradict each other, this raises.
    manifest = build_manifest(
        header, [part_of_rank(rank, own) for rank, (own, _) in opened.items()]
    )
    keys = []
    for own, tiers in opened.values():
        for file in own:
            keys.append(record.prefix + file.name)
            if is_there(store, keys[-1], file.described.header, file.described.nbytes) is None:
                _relay(tiers, keys[-1], store, file)
    store.sync(keys)
    return _commit(manifest, record, store, maintenance)


def _opened(
    record: NearRecord, rank: int, tiers: Sequence[Tier]
) -> tuple[list[OpenedFile], list[Tier]]:
    """The files of a rank, and the tiers that have them, one where they could be opened first."""
    for number, tier in enumerate(tiers):
        try:
            return tier.opened(record, rank), [tier, *tiers[number + 1 :]]
        except (Corrupt, KeyNotFoundError) as error:
            _note_copy(error, is_last=number + 1 == len(tiers))
            if number + 1 == len(tiers):
                raise
    raise AssertionError("every rank has a home")


def _relay(tiers: Sequence[Tier], key: str, store: Store, file: OpenedFile) -> None:
    """Copy a file from the first of some tiers whose copy is whole. Raises Corrupt."""
    for number, tier in enumerate(tiers):
        try:
            relay_file(
                tier.files,
                key,
                store,
                key,
                tiles=tiles_of(file.described),
                threads=THREADS,
                add=lambda nbytes: None,
            )
            return
        except (Corrupt, KeyNotFoundError) as error:
            _note_copy(error, is_last=number + 1 == len(tiers))
            if number + 1 == len(tiers):
                raise


def _note_copy(error: Exception, *, is_last: bool) -> None:
    if not is_last:
        logger.warning("another copy is used, because %s", error)


def _commit(manifest: Manifest, record: NearRecord, store: Store, maintenance: Maintenance) -> int:
    data, key = encode_manifest(manifest), record.prefix + MANIFEST_NAME
    try:
        store.put_if_absent(key, data)
    except KeyExistsError:
        # Of an earlier run that ended before its commit.
        if store.get(key) != data:
            raise CheckpointError(
                f"{store.url}/{key} is there and differs from what the data files say: move it "
                "away, then repeat"
            ) from None
    head = record.head
    nbytes = manifest.own_nbytes + len(data)
    continues = ResumePoint(head.anchor, head.is_new_line) if head.anchor else None
    commit = Commit(head.attempt, head.step, len(data), manifest_digest(data), nbytes=nbytes)
    maintenance.commit_rescued(commit, continues=continues, epoch=head.epoch)
    return nbytes
