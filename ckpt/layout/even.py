"""Even layouts: which part of a tensor each of N ranks holds when nothing but its shape is known.

For questions about ranks that are not there: laying out a checkpoint for them, planning their load.
"""

from __future__ import annotations

import math
from typing import Literal

from ckpt.layout.region import Box, Region, Shape, Span, whole

EvenLayout = Literal["fsdp2", "flat", "replicated"]
LAYOUTS: tuple[EvenLayout, ...] = ("fsdp2", "flat", "replicated")


def even_part(shape: Shape, rank: int, ranks: int, layout: EvenLayout) -> Region | None:
    """What `rank` of `ranks` holds of a tensor of `shape`; None when every rank holds all of it.

    "fsdp2" cuts dim 0 as `fully_shard` does: equal runs of rows, the last ones shorter or empty.
    "flat" cuts the row-major order into equal runs, as flat parameters do on the average; where
    theirs begin depends on how the model was wrapped. Tensors without dims are whole everywhere, as
    everything is with "replicated".
    """
    if layout == "replicated" or not shape:
        return None
    if layout == "flat":
        start, stop = _chunk(math.prod(shape), rank, ranks)
        return Span(start, stop)
    return chunk_of(shape, ranks, rank)


def chunk_of(shape: Shape, parts: int, part: int) -> Box:
    """What `torch.chunk(parts)` along dim 0 leaves for `part`; without rows when there is no such
    chunk.
    """
    start, stop = _chunk(shape[0], part, parts)
    return Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))


def _chunk(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Items `start` to `stop` of `count` for one rank, as `torch.chunk` cuts them."""
    size = -(-count // ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


def wanted_part(shape: Shape, rank: int, ranks: int, layout: EvenLayout) -> Region:
    """As `even_part`, with the whole tensor said as a region."""
    part = even_part(shape, rank, ranks, layout)
    return whole(shape) if part is None else part
