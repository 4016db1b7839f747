"""Rewrite a checkpoint for another number of ranks: one file per rank with what it will read.

A load on N ranks from a checkpoint of M ranks reads many small pieces of many files. Laid out for
N, every rank reads a few large runs of one file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import attempt_epoch, attempt_name, step_prefix
from ckpt.commit.numbers import plain_int
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError
from ckpt.format.datafile import StoredChunk
from ckpt.format.manifest import Header, Manifest
from ckpt.format.manifest_codec import encode_manifest
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.layout.even import EvenLayout, even_part
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Region, Shape, span_of, whole
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint, leased_checkpoint
from ckpt.loading.load import RETIRED_MAX
from ckpt.tools.copy import CopyMeter, CopyReport, report_of_one
from ckpt.tools.rewrite import Layout, chunk_of, rewrite, written_whole
from storage import PrefixStore, Store, StoreLike, open_store, options_of_other
from storage.hidden import hides_secrets

logger = logging.getLogger(__name__)

SMALL_NBYTES = 1 << 20
RESHARDED = "ckpt.resharded"  # key of `Header.user`: the attempt it was made of, and for whom

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class NewLayout:
    """How many ranks will load, and how they shard: see `ckpt.layout.even`.

    "fsdp2" suits `fully_shard` and other shards of dim 0, "flat" FSDP1 and our flat parameters.
    """

    ranks: int
    layout: EvenLayout = "fsdp2"


@hides_secrets
def reshard_at(
    url: StoreLike,
    target: StoreLike | None,
    *,
    ranks: SupportsIndex,
    layout: EvenLayout,
    step: SupportsIndex | None,
    attempt: str,
    threads: int,
    progress: Progress | None,
    metadata_bytes_max: int | None,
    storage_options: Mapping[str, Any] | None,
    target_options: Mapping[str, Any] | None,
) -> CopyReport:
    """Write a checkpoint anew, laid out for loads on `ranks` ranks. See `ckpt.reshard`."""
    how = _How(NewLayout(plain_int(ranks), layout), threads, progress)
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_store(url, **(storage_options or {}))))
        there: Store | None = None
        if target is not None:
            options = options_of_other(url, storage_options, target, target_options)
            there = stack.enter_context(closing(open_store(target, **options)))
        # In another place lie files of the checkpoint that was begun with.
        tries_left = RETIRED_MAX if step is None and not attempt and there is None else 1
        while True:
            budget = MetadataBudget(metadata_bytes_max)
            with leased_checkpoint(source, step, attempt=attempt, budget=budget) as located:
                try:
                    return _resharded(source, located, there, how)
                except CheckpointError as error:
                    tries_left -= 1
                    if not tries_left or not _was_retired(source, located):
                        raise
                    logger.warning("begin again with what is the latest now: %s", error)


class _How(NamedTuple):
    """How a new form is written."""

    new: NewLayout
    threads: int
    progress: Progress | None


def _resharded(
    source: Store, located: LocatedCheckpoint, there: Store | None, how: _How
) -> CopyReport:
    """Write the new form of one checkpoint into the top of `there`, or beside it in its root."""
    manifest = located.manifest
    meter = CopyMeter(int(manifest.file_nbytes.sum()), how.progress)
    if there is None:
        opened = _second_form(source, located, how.new)
        if isinstance(opened, LiveEntry):
            where = f"{source.url.rstrip('/')}/{opened.prefix}".rstrip("/")
            report = report_of_one(source, where, manifest, meter)
            return replace(report, attempt=opened.attempt, is_second_form=True)
    else:
        opened = _NewAttempt(there, new_header(manifest, how.new))
    chunks = cut_for(manifest, how.new, opened.header.world_size)
    checkpoint = Checkpoint(source, located)
    made = rewrite(checkpoint, opened.header, chunks, opened.store, threads=how.threads, add=meter)
    if there is None:
        commit_second_form(source, located, made)
    report = report_of_one(source, opened.store.url, made, meter)
    return replace(report, is_second_form=there is None)


def _was_retired(source: Store, located: LocatedCheckpoint) -> bool:
    """Whether the log of the root no longer has what was located there."""
    entry = located.entry
    return entry is not None and Log(source).state().find(entry.attempt) is None


class _NewAttempt(NamedTuple):
    """The directory of the new attempt, and its header."""

    store: Store
    header: Header


def _second_form(
    source: Store, located: LocatedCheckpoint, new: NewLayout
) -> _NewAttempt | LiveEntry:
    """Where in its root the new form of a checkpoint goes, or the entry of that form if the root
    has it already.

    Raises CheckpointError for a checkpoint that was opened as a single directory.
    """
    if located.entry is None:
        raise CheckpointError(
            f"{source.url} is one step's directory, and only a root has a place for a second form "
            "of its checkpoint; give a target for it"
        )
    state = Log(source).state()
    note = located.manifest.header.user.get(RESHARDED, "")
    if note.endswith(_described(new)):
        return located.entry
    header = new_header(located.manifest, new, epoch=state.epoch)
    # The name has the epoch of the run that made it, and then what it is a copy of.
    _, _, unique = header.attempt.partition("-")
    for entry in state.live:
        if entry.step == header.step and entry.attempt.endswith(f"-{unique}"):
            return entry
    prefix = step_prefix(header.step, header.attempt)
    return _NewAttempt(PrefixStore(source, prefix.rstrip("/")), header)


def commit_second_form(source: Store, located: LocatedCheckpoint, made: Manifest) -> None:
    """The one write that makes the new form a checkpoint of the root. Raises CheckpointError when
    the old one was retired by now, or a session has claimed the root.
    """
    data = encode_manifest(made)
    header = made.header
    nbytes = made.own_nbytes + len(data)
    commit = Commit(header.attempt, header.step, len(data), manifest_digest(data), nbytes=nbytes)
    Maintenance.open(source).commit_copy(commit, of=located.manifest.header.attempt)


def _described(new: NewLayout) -> str:
    return f"for {new.ranks} ranks, {new.layout}"


def new_header(manifest: Manifest, new: NewLayout, *, epoch: int | None = None) -> Header:
    """The header of the new checkpoint: an attempt of its own, the same in every try.

    `epoch` is that of the new attempt, by default that of the old one.

    Values of single ranks belong to the ranks that saved; with any, their number stays.
    """
    old = written_whole(manifest.header)
    note = f"{old.attempt} {_described(new)}"
    # Not random: a run that is repeated has to recognise the files of the one that died.
    unique = hashlib.sha256(note.encode()).digest()[:8]
    return old.model_copy(
        update={
            "attempt": attempt_name(_epoch(old.attempt) if epoch is None else epoch, unique),
            "world_size": old.world_size if manifest.per_rank else new.ranks,
            "user": {**old.user, RESHARDED: note},
        }
    )


def _epoch(attempt: str) -> int:
    try:
        return attempt_epoch(attempt)
    except ValueError:
        return 1  # another writer's name for its attempt


def cut_for(manifest: Manifest, new: NewLayout, world_size: int) -> Layout:
    """All chunks of the new checkpoint by writing rank, in groups that go to files of their own.

    One group is what rank r of `new` holds. Small tensors that every rank holds whole are another
    one, which all ranks read in one go. Large ones are divided among the ranks: the largest first,
    each to the rank that has the least.
    """
    cut: list[list[StoredChunk]] = [[] for _ in range(new.ranks)]
    held_whole: list[StoredChunk] = []
    for tensor, shape in enumerate(manifest.shapes):
        if 0 in shape:
            continue
        parts = [even_part(shape, rank, new.ranks, new.layout) for rank in range(new.ranks)]
        if parts[0] is None or not _is_sharded(manifest, tensor):
            held_whole.append(chunk_of(manifest, tensor, whole(shape)))
            continue
        for rank, part in enumerate(parts):
            if part is not None and part.numel:
                cut[rank].append(chunk_of(manifest, tensor, _as_span(part, shape)))
    small = [chunk for chunk in held_whole if chunk.nbytes < SMALL_NBYTES]
    large = [chunk for chunk in held_whole if chunk.nbytes >= SMALL_NBYTES]
    loads = [sum(chunk.nbytes for chunk in chunks) for chunks in cut]
    for chunk in sorted(large, key=lambda chunk: (-chunk.nbytes, chunk.fqn)):
        emptiest = loads.index(min(loads))
        cut[emptiest].append(chunk)
        loads[emptiest] += chunk.nbytes
    files: list[list[list[StoredChunk]]] = [[] for _ in range(world_size)]
    for rank, chunks in enumerate(cut):
        # Values of single ranks keep the old number of ranks, which may be fewer than will load.
        files[rank % world_size].append(chunks)
    files[0].append(small)
    return files


def _is_sharded(manifest: Manifest, tensor: int) -> bool:
    """Parameters and what has their kind of shape; buffers and the like are whole everywhere."""
    return int(manifest.kinds[tensor]) in (Kind.PARAMETER, Kind.OPTIMIZER)


def _as_span(part: Region, shape: Shape) -> Region:
    """Runs of the row-major order are stored as spans."""
    span = span_of(part, shape) if isinstance(part, Box) else part
    if span is not None and span.numel == whole(shape).numel:
        return whole(shape)
    return span or part
