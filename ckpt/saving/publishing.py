"""Publish a state: what is new in it as a delta, all of it as an anchor where one is due.

compare with the bits published last -> delta -> commit -> (anchor -> commit) -> retire old chains

A delta is a checkpoint of no line that needs the publication before it, by the log's own
references: nothing retires a base under a live delta. An anchor is a checkpoint in a line like any
other. Where both have one state, followers take the delta, and the next delta needs the anchor.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import not_
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ckpt.commit.leases import leases_of
from ckpt.commit.locate import read_manifest
from ckpt.commit.session import ReferenceRetired
from ckpt.commit.writer import NotRetired
from ckpt.errors import CheckpointError, OutcomeUnknown
from ckpt.format.delta import DeltaBlock, encode_delta
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.memory import SideStreams, devices_of, storage_of
from ckpt.layout.plain import times_changed
from ckpt.saving.plan import contents_of
from ckpt.saving.published import (
    Fresh,
    LivePart,
    Published,
    others_of,
    views_of,
)
from ckpt.saving.save import save_task
from ckpt.saving.staging import changed_by_steps
from ckpt.saving.step_gate import Gate, seen_since, steps
from ckpt.saving.task import PartMemory, SaveReport, SaveTask
from storage import StorageError

logger = logging.getLogger(__name__)

DELTAS = "delta"  # what the state of a delta has: a tensor of bytes for each rank
ANCHORS_KEPT = 2  # with all that was published since the oldest of them
RETIRED_MAX = 2  # by one publication, which adds one


class Due(NamedTuple):
    """When an anchor follows a delta: after `every` deltas, or when those since the last anchor
    have more than the share `larger` of its bytes.
    """

    every: int
    larger: float

    def is_now(self, published: Published) -> bool:
        """Whether the next anchor is due."""
        share = published.nbytes / max(published.anchor_nbytes, 1)
        return published.count >= self.every or share > self.larger


@dataclass
class Publication:
    """A state that is being published: what is new in it, or all of it, is taken now, or before the
    next step of an optimizer.

    `published` has what was published last, or for an anchor what this one takes.
    """

    state: Any
    task: SaveTask
    published: Published
    is_delta: bool
    later: Sequence[LivePart]
    gate: Gate
    reading: SideStreams
    versions: Sequence[int | None]
    blocks: list[DeltaBlock] = field(default_factory=list)
    fresh: list[Fresh] = field(default_factory=list)

    @classmethod
    def begin(cls, state: Any, task: SaveTask, dtype: torch.dtype | None) -> Publication:
        """Take what may change at any time; steps that change the rest are held back. Waits for no
        rank. Raises InvalidState and LoadInterrupted.
        """
        steps.watch()
        flat = contents_of(state, task.ranks, task.memory.plans).flat
        views, known = list(views_of(flat)), task.memory.published
        is_delta = known is not None and known.dtype is dtype and known.is_like(flat)
        if known is None or not is_delta:
            known = Published(dtype, others_of(flat))
        changes = changed_by_steps(flat, seen_since(task.memory.steps_seen))
        waits = [storage_of(view) in changes.storages for _, view in views]
        later = list(compress(views, waits))
        gate = Gate(changes.storages, changes.parameters)
        versions = [times_changed(view) for _, view in later]
        made = cls(state, task, known, is_delta, later, gate, SideStreams(()), versions)
        made._take(compress(views, map(not_, waits)))
        # Behind what was just queued: the worker's own stream knows nothing of it.
        made.reading = SideStreams(devices_of(view for _, view in views))
        # With nothing left to read, no step has to wait.
        if later:
            steps.hold(gate)
        else:
            gate.open()
        return made

    def _take(self, views: Iterable[LivePart]) -> None:
        if not self.is_delta:
            self.published.fill(views)
            return
        for block, fresh in self.published.difference(views, self.task.ranks):
            self.blocks += [block] if block is not None else []
            self.fresh.append(fresh)

    def finish(self, due: Due) -> SaveReport:
        """Take the rest and publish; collective. Returns how the delta was saved, or else the
        anchor. Raises like `save_task`; the next publication is then from the last one that is
        committed, or an anchor.
        """
        task, published, error, encoded = self.task, self.published, None, b""
        try:
            with self.reading.copying():
                self._take(self.later)
            if self.versions != [times_changed(view) for _, view in self.later]:
                raise CheckpointError(
                    "the state was changed by something else than a step of an optimizer while it "
                    "was published; call wait_staged() of what ckpt.publish returns before"
                )
            encoded = encode_delta(self.blocks)
        except Exception as caught:
            error = caught  # the other ranks wait
        self.gate.open()
        task.session.world.agree("begin", error)
        # A rank whose last publication failed, or that holds other things now, needs an anchor.
        mine = published.attempts[0] if self.is_delta else ""
        received = [*map(json.loads, task.session.world.gather("bases", self._base_and_sums(mine)))]
        sums: dict[str, int] = {}
        is_same = all(sums.setdefault(*one) == one[1] for _, own in received for one in own.items())
        if not is_same and task.session.world.rank == 0:
            logger.warning("step %d: replicas differ, so an anchor is published", task.step)
        report = None
        if {base for base, _ in received} == {mine} and mine and is_same:
            report = self._save_delta(encoded)
        with self.reading.copying():
            # Whatever is published next, delta or anchor: these bits are in it.
            published.take(self.fresh)
        if report is None or due.is_now(published):
            same = () if report is None else (report.attempt,)
            anchor = _save_anchor(self.state, task, published, same)
            report = report or anchor
        task.memory.published = published
        if task.session.session is not None:
            _retire_old(task)
        return report

    def _base_and_sums(self, base: str) -> bytes:
        """The base of the delta, and a checksum for each group of ranks that hold the same."""
        sums = Counter[str]()
        for one in self.fresh:
            if one.group:
                change = one.key, self.published.digests[one.key], one.after
                sums[str(one.group)] += crc32(repr(change).encode())
        return json.dumps([base, sums]).encode()

    def _save_delta(self, encoded: bytes) -> SaveReport | None:
        """None where the publication that it is from was retired meanwhile."""
        task, published = self.task, self.published
        blob = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        attempts = published.attempts
        options = replace(task.options, in_line=False, publication=attempts, telemetry=False)
        task.memory.published = None  # until it is known what was published
        try:
            report = save_task(
                {DELTAS: {f"{task.session.world.rank:05d}": blob}},
                # Of its own: names and plans of a delta must not replace those of the state.
                replace(task, options=options, memory=PartMemory()),
            )
        except ReferenceRetired:
            return None
        except OutcomeUnknown:
            raise
        except Exception:
            task.memory.published = published
            raise
        published.attempts = (report.attempt,)
        published.count += 1
        published.nbytes += report.nbytes
        return report


def _save_anchor(
    state: Any, task: SaveTask, published: Published, same: tuple[str, ...]
) -> SaveReport:
    # Until the anchor is committed: a failure leaves the next publication to begin anew.
    task.memory.published = None
    options = replace(task.options, publication=same)
    report = save_task(state, replace(task, options=options, contents=published.contents))
    published.attempts = (report.attempt, *same)
    published.anchor_nbytes = report.nbytes
    published.count = published.nbytes = 0
    return report


def _retire_old(task: SaveTask) -> None:
    """Retire what was published before the oldest anchor that is kept, newest first: nothing that
    is left needs it. Failures are logged; they cost space, and the next publication tries again.
    """
    session = task.session.session
    assert session is not None
    try:
        live = session.state().live
        anchors = [entry for entry in live if entry.line is not None]
        oldest = anchors[-ANCHORS_KEPT].slot if len(anchors) > ANCHORS_KEPT else 0
        old = [entry for entry in reversed(live) if entry.slot < oldest]
        # Followers on their way from an old publication hold a lease on it.
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
