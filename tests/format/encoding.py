"""A manifest as bytes, from the table of its chunks: the library encodes the rules of ranks alone.

Both have to give the same bytes, so this is what its encoder is compared with.
"""

from __future__ import annotations

import numpy as np

from ckpt.format.chunk_columns import fields_of_boxes, gaps_of
from ckpt.format.columns import pack_regular
from ckpt.format.manifest import ChunkTable, Int64s, Manifest, RuledChunks
from ckpt.format.manifest_codec import encoded, fields_of_tensors
from ckpt.layout.dtypes import DTYPES


def encode_manifest(m: Manifest) -> bytes:
    """The bytes of a MANIFEST object: one encoding per manifest."""
    counts = len(set(m.shapes)), len(m.chunks), len(m.chunks.boxes), m.block_count
    return encoded(m, counts, fields_of_tensors(m), fields_of_chunks(m)).data


def fields_of_chunks(m: Manifest) -> dict[str, bytes]:
    """The fields that describe the chunks, encoded."""
    chunks = m.chunks
    itemsizes = np.array([DTYPES[name].itemsize for name in m.dtypes], dtype=np.int64)
    counts = np.diff(chunks.first)
    nbytes = chunks.numel.astype(np.int64) * np.repeat(itemsizes, counts)
    positions = chunks.byte_start.astype(np.int64) - m.file_data_start[chunks.file]
    gaps = gaps_of(chunks.file, positions, nbytes, np.repeat(itemsizes, counts))
    return {
        "chunk_counts": pack_regular(counts),
        "chunk_files": pack_regular(chunks.file),
        "chunk_numels": pack_regular(chunks.numel),
        "chunk_skips": pack_regular(_skips(chunks)),
        "chunk_gaps": pack_regular(gaps),
        "chunk_boxes": pack_regular(chunks.box.astype(np.int64) + 1),
        **fields_of_boxes(chunks.boxes),
    }


def _skips(chunks: ChunkTable | RuledChunks) -> Int64s:
    """Elements between each span and the one before it in its tensor; zero for boxes."""
    skips = np.zeros(len(chunks), dtype=np.int64)
    spans = np.flatnonzero(chunks.box < 0)
    starts = chunks.span_start[spans].astype(np.int64)
    ends = starts + chunks.numel[spans].astype(np.int64)
    tensor = np.searchsorted(chunks.first, spans, side="right")
    previous = np.zeros(len(spans), dtype=np.int64)
    same = tensor[1:] == tensor[:-1]
    previous[1:][same] = ends[:-1][same]
    skips[spans] = starts - previous
    return skips
