"""Publish a state: what is new in it as a delta, all of it as an anchor where one is due.

compare with the bits published last -> delta -> commit -> (anchor -> commit) -> retire old chains

A delta is a checkpoint of no line that needs the publication before it, by the log's own
references: nothing retires a base under a live delta. An anchor is a checkpoint in a line like any
other. Where both have one state, followers take the delta, and the next delta needs the anchor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ckpt.commit.leases import leases_of
from ckpt.commit.locate import read_manifest
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import ReferenceRetired
from ckpt.commit.writer import NotRetired
from ckpt.errors import CheckpointError, OutcomeUnknown
from ckpt.format.delta import encode_delta
from ckpt.format.manifest_codec import decode_manifest
from ckpt.saving.published import Difference, Published
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveReport, SaveTask
from ckpt.world.base import collectively
from storage import StorageError

logger = logging.getLogger(__name__)

DELTAS = "delta"  # what the state of a delta has: a tensor of bytes for each rank
ANCHORS_KEPT = 2  # with all that was published since the oldest of them
RETIRED_MAX = 2  # by one publication, which adds one


class Due(NamedTuple):
    """When an anchor follows a delta: after so many, or when those since the last one have more
    than this share of its bytes.
    """

    every: int
    larger: float

    def is_now(self, published: Published) -> bool:
        """Whether the next anchor is due."""
        share = published.nbytes / max(published.anchor_nbytes, 1)
        return published.count >= self.every or share > self.larger


def publish_state(state: Any, task: SaveTask, *, dtype: torch.dtype | None, due: Due) -> SaveReport:
    """Publish `state` under the session of `task`; collective. Returns how the delta was saved, or
    else the anchor. Raises like `save_task`; after an error the next publication is from the last
    one that is committed, or an anchor.
    """
    memory, world = task.memory, task.session.world

    def compare() -> tuple[Difference, bytes] | None:
        known = memory.published
        difference = None
        if known is not None and known.dtype is dtype:
            difference = known.difference(state, task.ranks)
        return None if difference is None else (difference, encode_delta(difference.blocks))

    new = collectively(world, "compare", compare)
    # A rank whose last publication failed, or that holds other things now, needs an anchor.
    mine = "" if new is None or memory.published is None else memory.published.attempts[0]
    bases = {base.decode() for base in world.gather("bases", mine.encode())}
    report = None
    if new is not None and len(bases) == 1 and memory.published is not None:
        report = _save_delta(new, memory.published, task)
    if report is None or memory.published is None or due.is_now(memory.published):
        same = () if report is None else (report.attempt,)
        anchor = _save_anchor(state, task, dtype, same)
        report = report or anchor
    if task.session.session is not None:
        _retire_old(task)
    return report


def _save_delta(
    new: tuple[Difference, bytes], published: Published, task: SaveTask
) -> SaveReport | None:
    """None where the publication that it is from was retired meanwhile."""
    difference, encoded = new
    blob = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    options = replace(task.options, in_line=False, publication=published.attempts, telemetry=False)
    task.memory.published = None  # until it is known what was published
    try:
        report = save_task(
            {DELTAS: {f"{task.session.world.rank:05d}": blob}},
            replace(task, options=options, memory=PartMemory()),
        )
    except ReferenceRetired:
        return None
    except OutcomeUnknown:
        raise
    except Exception:
        task.memory.published = published
        raise
    difference.take(published.digests)
    published.attempts = (report.attempt,)
    published.count += 1
    published.nbytes += report.nbytes
    task.memory.published = published
    return report


def _save_anchor(
    state: Any, task: SaveTask, dtype: torch.dtype | None, same: tuple[str, ...]
) -> SaveReport:
    before, task.memory.published = task.memory.published, None
    published = Published(dtype, digests=before.digests if before and same else {})
    options = replace(task.options, publication=same)
    report = save_task(state, replace(task, options=options, contents=published.contents))
    published.attempts = (report.attempt, *same)
    published.anchor_nbytes = report.nbytes
    task.memory.published = published
    return report


def _retire_old(task: SaveTask) -> None:
    """Retire what was published before the oldest anchor that is kept, newest first: nothing that
    is left needs it. Failures are logged; they cost space, and the next publication tries again.
    """
    session = task.session.session
    assert session is not None
    try:
        old = outdated(session.state().live)
        leased = leases_of(task.store, now_unix=time.time()) if old else {}
        retired = 0
        for entry in old:
            if retired == RETIRED_MAX:
                break
            manifest = decode_manifest(read_manifest(task.store, entry), ruled=True)
            if entry.attempt in leased or manifest.header.publication is None:
                continue
            try:
                retired += session.retire(entry.attempt) is not None
            except NotRetired as refused:
                logger.info("not retired: %s", refused)
    except (CheckpointError, StorageError) as error:
        logger.warning("old publications stay until the next one: %s", error)


def outdated(live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """What was published before the oldest anchor that is kept, newest first."""
    anchors = [entry for entry in live if entry.line is not None]
    if len(anchors) <= ANCHORS_KEPT:
        return []
    oldest = anchors[-ANCHORS_KEPT].slot
    return [entry for entry in reversed(live) if entry.slot < oldest]
