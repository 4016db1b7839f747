"""Members of a unit in one buffer, so that one collective of a backend moves all of them.

    gather    own parts -> this rank's row -> collective -> rows -> members
    reduce    gradients -> rows, one for each rank -> collective -> this rank's row

A row has one rank's parts of all members side by side, each as long as the largest rank's part.
Both ways are one kernel each, however many ranks and members there are: copies part by part would
be ranks times members of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharding.engine.collectives import Comm, RankParts
from sharding.engine.pool import BufferPool
from sharding.engine.torch_seam import chunk_cat, foreach_copy

__all__ = ["PackedGather", "pack_gradients"]


class PackedGather:
    """The parts of members, on their way from all ranks.

    `own`: this rank's parts, of any dtype; `dtypes`: those to send them in.
    """

    def __init__(
        self,
        comm: Comm,
        own: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        self._comm = comm
        self._pool = pool
        # Of several dtypes only the bytes can lie side by side, and nothing casts to bytes.
        self._as_bytes = len(set(dtypes)) > 1
        if self._as_bytes:
            cast = [one.to(dtype=dtype) for one, dtype in zip(own, dtypes, strict=True)]
            own = [one.view(torch.uint8) for one in cast]
        self._sizes = list(map(torch.Tensor.numel, own))
        width = sum(self._sizes)
        dtype = torch.uint8 if self._as_bytes else dtypes[0]
        buffer = comm.buffer(width * comm.size, dtype, device, pool)
        self._rows = buffer.view(comm.size, width)
        self.own = self._rows[comm.rank]
        """This rank's row: what the collective sends."""
        self.whole = RankParts(buffer, width)
        """What it fills."""
        foreach_copy(torch.split(self.own, self._sizes), own)

    def copy_out(self, members: Sequence[RankParts]) -> None:
        """All parts have come: copy them to the members, which are as many as `own` was, of the
        dtypes given. Gives the buffer back.
        """
        targets, sizes = [], []
        for member, size in zip(members, self._sizes, strict=True):
            if size:
                whole = member.whole.view(torch.uint8) if self._as_bytes else member.whole
                targets.append(whole.view(self._comm.size, -1))
                sizes.append(size)
        torch.split_with_sizes_copy(self._rows, sizes, dim=1, out=targets)
        self._comm.give_back(self.whole.whole, self._pool)


def pack_gradients(grads: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Cut gradients along dim 0 and lay rank r's parts side by side in `rows[r]`, zeros behind
    those that are shorter than the first rank's. Casts to the dtype of `rows`.
    """
    filled = [grad for grad in grads if grad.numel()]
    if len({grad.dtype for grad in filled}) > 1:
        filled = [grad.to(rows.dtype) for grad in filled]
    if filled:
        chunk_cat(filled, rows.shape[0], rows)
