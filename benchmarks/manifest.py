"""Size, decoding time and memory of manifests of a million chunks.

Prints what was measured; asserts only the size, which does not depend on the machine. The bars are
16 bytes and, decoded, 40 bytes of memory per chunk, and 1.5 s.

    python -m benchmarks.manifest [--chunks 1000000] [--ranks 1024]
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

import numpy as np

from benchmarks.measure import report, row
from ckpt.format.checksum import Seals
from ckpt.format.chunk_columns import CHUNK_NBYTES
from ckpt.format.codec import encode_values
from ckpt.format.manifest import BoxTable, ChunkTable, Header, Manifest, starts_of
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.region import Box
from tests.format.encoding import encode_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    options = parser.parse_args()
    tensors = max(options.chunks // options.ranks, 1)
    for layout, manifest in (
        ("dim 0", sharded(tensors, options.ranks)),
        ("dim 1 (boxes)", sharded(tensors, options.ranks, by_columns=True)),
        ("flat spans, uneven", sharded(tensors, options.ranks, uneven=True)),
        ("large and small by turns", sharded(tensors, options.ranks, mixed=True)),
        ("many tensors", sharded(20 * tensors, max(options.ranks // 20, 1))),
    ):
        measure(layout, encode_manifest(manifest))


def measure(layout: str, data: bytes) -> None:
    """Decode `data` three times: twice for the time, once for the memory, `data` included."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        manifest = decode_manifest(data)
        seconds.append(time.perf_counter() - start)
    chunks = len(manifest.chunks)
    del manifest
    tracemalloc.start()
    kept = decode_manifest(data)
    peak = tracemalloc.get_traced_memory()[1] + len(data)
    tracemalloc.stop()
    del kept
    report(
        f"manifest of {chunks} chunks, {layout}: {len(data) / 1e6:.2f} MB",
        [
            row("bytes per chunk", f"{len(data) / chunks:.2f}", "<= 16"),
            row("decode", f"{min(seconds):.2f} s", "<= 1.5 s"),
            row("memory per chunk", f"{peak / chunks:.1f} bytes", f"<= {CHUNK_NBYTES}"),
        ],
    )
    assert len(data) <= 16 * chunks, f"{len(data) / chunks} bytes per chunk"


def sharded(
    tensors: int,
    ranks: int,
    *,
    by_columns: bool = False,
    uneven: bool = False,
    mixed: bool = False,
) -> Manifest:
    """`tensors` tensors of float32, each cut over all ranks, one file per rank.

    `mixed`: every second one is small, and lies behind the large ones, as writers put it.
    """
    rng = np.random.default_rng(0)
    rows, width = 4 * ranks, 1000
    chunks = tensors * ranks
    shapes = ((width, rows) if by_columns else (rows, width),) * tensors
    numels = np.full((tensors, ranks), 4 * width, dtype=np.int64)
    if uneven:
        moved = rng.integers(-2000, 2000, size=(tensors, ranks // 2))
        numels[:, 0 : 2 * moved.shape[1] : 2] += moved
        numels[:, 1 : 2 * moved.shape[1] : 2] -= moved
    if mixed:
        numels[::2], numels[1::2] = 4 * 2048, 4 * 16
        shapes = tuple((rows, 16 if tensor % 2 else 2048) for tensor in range(tensors))
    spans = np.cumsum(numels, axis=1) - numels
    order = np.argsort(np.arange(tensors) % 2 if mixed else np.arange(tensors), kind="stable")
    byte_starts = np.empty_like(numels)
    byte_starts[order] = 4096 + 4 * (np.cumsum(numels[order], axis=0) - numels[order])
    blocks = -(-4 * numels.ravel() // (1 << 20))
    boxes = [Box((0, 4 * rank), (width, 4)) for rank in range(ranks)] if by_columns else []
    table = ChunkTable(
        first=np.arange(tensors + 1, dtype=np.int64) * ranks,
        file=np.tile(np.arange(ranks), tensors),
        byte_start=byte_starts.ravel(),
        span_start=np.full(chunks, -1) if by_columns else spans.ravel(),
        numel=numels.ravel(),
        box=np.tile(np.arange(ranks), tensors) if by_columns else np.full(chunks, -1),
        boxes=BoxTable.of(boxes),
        first_block=starts_of(blocks),
    )
    tables = 12 + 4 * np.bincount(table.file, weights=blocks).astype(np.int64)
    nbytes = 4096 + 4 * numels.sum(axis=0) + 4096 + tables
    return Manifest(
        header=Header(
            root="0" * 32,
            attempt="e000001-0000000000000000",
            step=1,
            world_size=ranks,
            created_unix=0,
        ),
        files=tuple(f"rank{rank:05d}-000.safetensors" for rank in range(ranks)),
        file_nbytes=nbytes,
        file_data_start=np.full(ranks, 4096),
        fqns=tuple(sorted(f"model.layers.{t}.feed_forward.weight" for t in range(tensors))),
        dtypes=("float32",) * tensors,
        shapes=shapes,
        kinds=np.zeros(tensors, dtype=np.uint8),
        aliases={},
        chunks=table,
        values=encode_values({}),
        per_rank=(),
        seals=Seals(tables, rng.integers(0, 256, (ranks, 32), dtype=np.uint8)),
    )


if __name__ == "__main__":
    main()
