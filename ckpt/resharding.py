"""Rewrite a checkpoint for another number of ranks: one file per rank with what it will read.

A load on N ranks from a checkpoint of M ranks reads many small pieces of many files. Laid out for
N, every rank reads a few large runs of one file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt.copying import CopyReport, Meter
from ckpt.format.datafile import StoredChunk
from ckpt.format.manifest import Header, Manifest
from ckpt.format.references import REFERENCES
from ckpt.layout.even import LAYOUTS, EvenLayout, even_part
from ckpt.layout.piece import Kind
from ckpt.layout.region import Box, Region, Shape, Span, span_of, whole
from ckpt.log import attempt_epoch, attempt_name
from ckpt.reader import Checkpoint, find_checkpoint
from ckpt.rewriting import Layout, chunk_of, rewrite
from storage import open_store

SMALL_NBYTES = 1 << 20
RESHARDED = "ckpt.resharded"  # key of `Header.user`: the attempt that this one was made of

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class NewLayout:
    """How many ranks will load, and how they shard: see `ckpt.layout.even`.

    "fsdp2" suits `fully_shard` and other shards of dim 0, "flat" FSDP1 and our flat parameters.
    """

    ranks: int
    layout: EvenLayout = "fsdp2"


def reshard(
    url: str,
    target: str,
    *,
    ranks: int,
    layout: EvenLayout = "fsdp2",
    step: int | None = None,
    threads: int = 3,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> CopyReport:
    """Write the checkpoint of `step`, by default the latest, to `target`, laid out for `ranks`.

    The new checkpoint has the same tensors and values, bit for bit, and loads on any number of
    ranks; on `ranks` of that layout each rank reads its own file from one end to the other. It
    opens by its path. Every byte is checked on the way; a run that died is gone on with by running
    again. Raises like `ckpt.copy`, and ValueError for no ranks or an unknown layout.
    """
    if ranks < 1 or layout not in LAYOUTS:
        raise ValueError(
            f"ranks={ranks!r}, layout={layout!r}; expected at least 1, and one of {LAYOUTS}"
        )
    if target_options is None and url.partition("://")[0] == target.partition("://")[0]:
        target_options = storage_options
    with ExitStack() as stack:
        source = open_store(url, **(storage_options or {}))
        stack.callback(source.close)
        there = open_store(target, **(target_options or {}))
        stack.callback(there.close)
        checkpoint = Checkpoint(source, find_checkpoint(source, step))
        manifest = checkpoint.manifest
        meter = Meter(int(manifest.file_nbytes.sum()), progress)
        new = NewLayout(ranks, layout)
        header = new_header(manifest, new)
        made = rewrite(
            checkpoint,
            header,
            cut_for(manifest, new, header.world_size),
            there,
            threads=threads,
            add=meter,
        )
    return CopyReport(
        source=source.url,
        target=there.url,
        steps=(made.header.step,),
        files=len(made.files),
        nbytes=int(made.file_nbytes.sum()),
        nbytes_written=meter.written,
    )


def new_header(manifest: Manifest, new: NewLayout) -> Header:
    """The header of the new checkpoint: an attempt of its own, the same in every try.

    Values of single ranks belong to the ranks that saved; with any, their number stays.
    """
    old = manifest.header
    told = f"{old.attempt} for {new.ranks} ranks, {new.layout}"
    unique = hashlib.sha256(told.encode()).digest()[:8]
    return old.model_copy(
        update={
            "attempt": attempt_name(_epoch(old.attempt), unique),
            "world_size": old.world_size if manifest.per_rank else new.ranks,
            "required": tuple(name for name in old.required if name != REFERENCES),
            "user": {**old.user, RESHARDED: old.attempt},
        }
    )


def _epoch(attempt: str) -> int:
    try:
        return attempt_epoch(attempt)
    except ValueError:
        return 1  # a checkpoint that no session of ours has written


def cut_for(manifest: Manifest, new: NewLayout, world_size: int) -> Layout:
    """All chunks of the new checkpoint by writing rank. What rank r of `new` holds is a file of its
    own, or several; small tensors that every rank holds whole are one more, that all of them read
    in one go; large ones are divided among the ranks, largest first onto the emptiest.
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
        files[rank % world_size].append(chunks)
    files[0].append(small)
    return files


def _is_sharded(manifest: Manifest, tensor: int) -> bool:
    """Parameters and what has their kind of shape; buffers and the like are whole everywhere."""
    return int(manifest.kinds[tensor]) in (Kind.PARAMETER, Kind.OPTIMIZER)


def _as_span(part: Region, shape: Shape) -> Region:
    """Runs of the row-major order are stored as spans."""
    span = span_of(part, shape) if isinstance(part, Box) else part
    if isinstance(span, Span) and span.numel == whole(shape).numel:
        return whole(shape)
    return span if span is not None else part
