"""Read from a checkpoint without a process group: one tensor, or one region of it.

`open_checkpoint` reads the manifest and nothing else; tensors are read when requested, in whole
blocks, each checked against its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias

import torch

from ckpt.commit.locate import live_entries
from ckpt.commit.names import plain_int
from ckpt.errors import NoCheckpoint
from ckpt.format.manifest import MetadataBudget
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Shape, Span, is_inside, whole
from ckpt.loading.block_sums import BlockSums, sums_of
from ckpt.loading.contents import (
    CheckpointContents,
    LocatedCheckpoint,
    StoredTensor,
    store_and_checkpoint,
)
from ckpt.loading.plan import ReadPath, plan_reads
from ckpt.loading.reader import Reader
from storage import KeyNotFoundError, Store, StoreLike
from storage.hidden import hides_secrets

COMPARED_NBYTES = 16 << 20  # of two tensors, at a time
Index: TypeAlias = int | slice | EllipsisType


@hides_secrets
def open_checkpoint(
    url: StoreLike,
    step: SupportsIndex | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    attempt: str = "",
    metadata_bytes_max: SupportsIndex | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, by default the latest one, for reading.

    `url` is a root, or a step directory wherever it was copied to, or what another library has
    written (as `ckpt import` takes it; nothing verifies its bytes). In a root, `attempt` names one
    of several checkpoints of a step, as `list_steps` has them. Reads the manifest only, which may
    take `metadata_bytes_max` bytes of memory (None: 1 GiB). Raises NoCheckpoint when there is
    none, Corrupt when the log or the manifest is damaged, UnsupportedFormat beyond that memory or
    when a newer version wrote it, and the store's errors.
    """
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    return Checkpoint(
        *store_and_checkpoint(url, step, storage_options, attempt=attempt, budget=budget)
    )


class Checkpoint(CheckpointContents):
    """One checkpoint, opened for reading: a mapping from fqn to tensor that reads on request.

        with ckpt.open("s3://bucket/run") as ck:
            weight = ck["model.layers.0.weight"]
            rows = ck.read("model.embed.weight", (slice(0, 100),))

    Tied names are in it like all others. Safe to use from several threads.
    """

    def __init__(
        self, store: Store, located: LocatedCheckpoint, *, path: ReadPath | None = None
    ) -> None:
        super().__init__(store, located)
        self._path = path or ReadPath(readers=4)
        self.sums = sums_of(store, located.prefix, located.manifest, self._path.cache)

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """The whole tensor, checked. Raises like `read`."""
        return self.read(fqn)

    def read(
        self, fqn: str, region: Region | Index | tuple[Index, ...] | None = None
    ) -> torch.Tensor:
        """A region of a tensor in new memory, every byte of it checked.

        A Box gives a tensor of its shape, a Span a 1-D tensor; slices and integers are taken as by
        `tensor[...]`, with steps of at least 1. Reads the blocks that the region touches and no
        others. Raises KeyError for an unknown name, IndexError for a region outside of the tensor,
        Corrupt naming file and block when bytes were changed, NoCheckpoint when the checkpoint was
        retired meanwhile.
        """
        info = self._stored(fqn)
        if region is None:
            return self._filled(info, whole(info.shape))
        if isinstance(region, Box | Span):
            if not is_inside(region, info.shape):
                raise IndexError(f"{fqn}: {region} is outside of its shape {info.shape}")
            return self._filled(info, region)
        box, rest = _box_of(region, info.shape, fqn)
        return self._filled(info, box)[rest]

    def _filled(self, entry: StoredTensor, region: Region) -> torch.Tensor:
        shape = region.shape if isinstance(region, Box) else (region.numel,)
        target = torch.empty(shape, dtype=torch_dtype(entry.dtype))
        wanted = [piece_of(entry, region, target)]
        try:
            fill(self, wanted, self._path)
        except KeyNotFoundError as error:
            # The store knows that a file is missing, and the log why.
            if self._was_retired():
                raise NoCheckpoint(
                    f"{error}: step {self.step} was retired while it was open, and its files are "
                    f"deleted; open another step of {self.store.url}"
                ) from error
            raise
        return target

    def _was_retired(self) -> bool:
        """Whether the log no longer has what was opened; False for a step directory on its own."""
        if self.entry is None:
            return False
        live = live_entries(self.store)
        return all(entry.attempt != self.entry.attempt for entry in live)


def piece_of(entry: StoredTensor, region: Region, target: torch.Tensor) -> Holding:
    """`region` of a stored tensor, to be read into all of `target`."""
    piece = Piece(
        entry.fqn, entry.shape, target.dtype, region, whole(tuple(target.shape)), holders=(0,)
    )
    return Holding(target, (piece,), Kind.OTHER, synchronized=True)


def fill(checkpoint: Checkpoint, holdings: Sequence[Holding], path: ReadPath) -> None:
    """Read the holdings' pieces into their memory, every block checked.

    Raises Corrupt and the store's errors; the memory is undefined then.
    """
    reader = Reader(checkpoint.sums, plan_reads(checkpoint.manifest, holdings), path)
    reader.read_private(reader.blocks.runs())


def _opened(sums: BlockSums, path: ReadPath) -> Checkpoint:
    located = LocatedCheckpoint(sums.directory, sums.manifest, None)
    return Checkpoint(sums.store, located, path=path)


def unequal(
    sums: BlockSums, pairs: Mapping[str, str], path: ReadPath, rank: int, size: int
) -> list[str]:
    """The names in `pairs` whose tensors differ in the share that `rank` of `size` compares."""
    checkpoint = _opened(sums, path)

    def differ(name: str, held: str) -> bool:
        if name not in checkpoint or held not in checkpoint:
            return True  # an extra state, or what was skipped
        one, other = checkpoint.info(name), checkpoint.info(held)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return True
        numel, step = math.prod(one.shape), COMPARED_NBYTES // one.dtype.itemsize
        for start in range(rank * step, numel, size * step):
            span = Span(start, min(start + step, numel))
            # Bits and not values: no NaN equals itself, and 0.0 equals -0.0.
            bits = [checkpoint.read(fqn, span).view(torch.uint8) for fqn in (name, held)]
            if not torch.equal(*bits):
                return True
        return False

    return [name for name, held in pairs.items() if differ(name, held)]


def mean_row(sums: BlockSums, fqn: str, path: ReadPath) -> list[float]:
    """The mean of the rows of a tensor, as one row in row-major order; each row is read once, a few
    at a time, and added in double precision.
    """
    checkpoint = _opened(sums, path)
    info = checkpoint.info(fqn)
    rows, width = info.shape[0], math.prod(info.shape[1:])
    total = torch.zeros(width, dtype=torch.float64)
    step = max(1, COMPARED_NBYTES // (width * 8 or 1))
    for start in range(0, rows, step):
        some = checkpoint.read(fqn, Span(start * width, min(start + step, rows) * width))
        total += some.to(torch.float64).view(-1, width).sum(0)
    means: list[float] = (total / rows).tolist()
    return means


def _box_of(
    index: Index | tuple[Index, ...], shape: Shape, fqn: str
) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box with all elements of `tensor[index]`, and the index into that box."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        position = items.index(Ellipsis)
        items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) > len(shape):
        raise IndexError(f"{fqn}: {len(items)} indices for shape {shape}")
    offset, size, rest = [], [], list[int | slice]()
    for item, total in zip(items, shape, strict=True):
        if isinstance(item, slice):
            start, stop, stride = item.indices(total)
            if stride < 1:
                raise IndexError(
                    f"{fqn}: a slice with step {stride}; flip the tensor after reading"
                )
            offset.append(start)
            size.append(max(stop - start, 0))
            rest.append(slice(None, None, stride))
            continue
        if not isinstance(item, int) or not -total <= item < total:
            raise IndexError(f"{fqn}: index {item!r} is outside of shape {shape}")
        offset.append(item % total)
        size.append(1)
        # An integer drops the dim, as in torch; the box keeps it with one element.
        rest.append(0)
    return Box(tuple(offset), tuple(size)), tuple(rest)
