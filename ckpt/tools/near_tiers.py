"""Near tiers as an operator sees them, by their directories: what each has, and the work at risk.

A look reads the records and lists the files. No data file is opened, so a file counts by its
length; a restore and `ckpt rescue` compare more. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.commit.names import STEPS_PREFIX
from ckpt.errors import CheckpointError
from ckpt.near.records import NearFile, NearRecord
from ckpt.near.status import TierStatus, read_status
from ckpt.near.status import WorkAtRisk as WorkAtRisk
from ckpt.near.tier import Tier, tier_roots
from ckpt.short import ShortRecord


@dataclass(frozen=True, slots=True)
class NearInfo:
    """What one tier has of a near checkpoint, by its record there: `ranks_here` of the `ranks` that
    saved have all their files here. `reached_step` is how far its training is.
    """

    root: str
    step: int
    attempt: str
    epoch: int
    recorded_unix: float
    ranks: int
    ranks_here: int
    nbytes_here: int
    in_memory: bool
    reached_step: int | None
    reached_unix: float | None


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of a root as it was seen. `steps` are newest first, `nbytes` are those of all its
    files and `free_nbytes` those that the file system has left.

    `problem` says what could not be read; the rest is then what could be, or nothing.
    """

    path: str
    root: str
    host: str = ""
    is_in_memory: bool = False
    steps: tuple[NearInfo, ...] = ()
    nbytes: int = 0
    free_nbytes: int = 0
    status: TierStatus | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class NearListing(ShortRecord):
    """The near checkpoints below the directory `url` of a host, and its tiers by root."""

    url: str
    checkpoints: tuple[NearInfo, ...]
    tiers: tuple[TierView, ...]


def near_listing(url: str) -> NearListing:
    """What `ckpt ls --near` shows. Raises NoCheckpoint where there is no tier."""
    views = tuple(view for root in tier_roots(url) for view in tier_views([url], root))
    return NearListing(url, tuple(one for view in views for one in reversed(view.steps)), views)


def tier_views(paths: Sequence[str], root: str = "") -> list[TierView]:
    """The tiers of `root` below each directory, or those of all roots; one for each directory at
    least, with a problem where there is none. Raises nothing that depends on what lies there.
    """
    views = []
    for path in paths:
        try:
            roots = [name for name in tier_roots(path) if root in ("", name)]
        except (CheckpointError, OSError) as error:
            views.append(TierView(path, root, problem=str(error)))
            continue
        views += [_view(path, name) for name in roots]
        if root and not roots:
            views.append(TierView(path, root, problem=f"{path} has no tier of this root"))
    return views


def work_at_risk(views: Sequence[TierView]) -> WorkAtRisk | None:
    """The work since the newest near checkpoint of one root, None while there is none or nobody
    says how far the training is.
    """
    if (status := newest_status_of(views)) is None:
        return None
    # Of several tiers of a host, each notes its own newest checkpoint.
    # Those of an older epoch are of a job before this one.
    statuses = [one.status for one in views if one.status and one.status.epoch == status.epoch]
    newest = max(statuses, key=lambda one: (one.near_step, one.order))
    return None if newest.near_step < 0 else status.since(newest.near_step, newest.near_unix)


def newest_status_of(views: Sequence[TierView]) -> TierStatus | None:
    """How far the training of one root is, by what its hosts have noted."""
    statuses = [view.status for view in views if view.status is not None]
    return max(statuses, key=lambda one: one.order, default=None)


def _view(path: str, root: str) -> TierView:
    try:
        tier = Tier(path, root)
    except (CheckpointError, OSError) as error:
        return TierView(path, root, problem=str(error))
    problem, status = "", None
    try:
        status = read_status(tier.store.place)
    except (CheckpointError, OSError) as error:
        # The checkpoints next to a damaged status are as good as before, and worth showing.
        problem = str(error)
    try:
        files = {info.key: info.nbytes for info in tier.store.list(STEPS_PREFIX)}
        usage = os.statvfs(tier.store.place)
        return TierView(
            path=path,
            root=root,
            host=tier.host,
            is_in_memory=tier.is_in_memory,
            steps=tuple(_step(tier, record, files, status) for record in tier.records()),
            nbytes=sum(files.values()),
            free_nbytes=usage.f_bavail * usage.f_frsize,
            status=status,
            problem=problem,
        )
    except (CheckpointError, OSError) as error:
        return TierView(path, root, tier.host, tier.is_in_memory, problem=str(error))
    finally:
        tier.close()


def _step(
    tier: Tier, record: NearRecord, files: Mapping[str, int], status: TierStatus | None
) -> NearInfo:
    def is_here(file: NearFile) -> bool:
        # An encrypted one is longer.
        return files.get(record.prefix + file.name, 0) >= file.nbytes

    head, lacking = record.head, {one.rank for one in record.files if not is_here(one)}
    return NearInfo(
        root=tier.root,
        step=head.step,
        attempt=head.attempt,
        epoch=head.epoch,
        recorded_unix=head.time_unix,
        ranks=head.world_size,
        ranks_here=head.world_size - len(lacking),
        nbytes_here=sum(one.nbytes for one in record.files if is_here(one)),
        in_memory=tier.is_in_memory,
        reached_step=None if status is None else status.step,
        reached_unix=None if status is None else status.time_unix,
    )
