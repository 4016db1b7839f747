"""Where a checkpoint's tensors lie: tensors x ranks x files, as values that a picture is drawn of.

map_of(checkpoint) -> rows (one per tensor: which rank stored which part) and files
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.layout.region import Region, Shape, boxes_of
from ckpt.loading.contents import CheckpointContents, TensorInfo


class Rectangle(NamedTuple):
    """A part of a tensor drawn on a unit square: rows are dim 0, columns all other dims in order.

    All four numbers are from 0 to 1.
    """

    left: float
    top: float
    width: float
    height: float


class FileOnMap(NamedTuple):
    """One data file: its name in the step's directory, the place of its rank, its length."""

    name: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorsMap:
    """Which rank stored which part of which tensor in which file, by the name of the file.

    `ranks` are the names of those who wrote: numbers, or file names where a name has no rank.
    """

    ranks: tuple[str, ...]
    files: Mapping[str, FileOnMap]
    tensors: tuple[TensorInfo, ...]

    def nbytes_by_rank(self, tensor: TensorInfo) -> list[int]:
        """One number per rank of the map."""
        nbytes = [0] * len(self.ranks)
        for part in tensor.parts:
            nbytes[self.files[part.file].rank] += part.nbytes
        return nbytes


def map_of(checkpoint: CheckpointContents, names: Sequence[str] | None = None) -> TensorsMap:
    """The map of all tensors of a checkpoint, or of those in `names`, in that order.

    Tied names are left out: their parts are those of the stored tensor. Reads no tensor. Raises
    KeyError for an unknown name.
    """
    manifest = checkpoint.manifest
    # By name, for the manifest does not say who wrote a file.
    ranks = sorted({rank_of(name) for name in manifest.files}, key=rank_order)
    place = {rank: index for index, rank in enumerate(ranks)}
    sizes = zip(manifest.files, manifest.file_nbytes.tolist(), strict=True)
    files = {name: FileOnMap(name, place[rank_of(name)], nbytes) for name, nbytes in sizes}
    infos = map(checkpoint.info, checkpoint.keys() if names is None else names)
    return TensorsMap(tuple(ranks), files, tuple(one for one in infos if one.alias_of is None))


def rank_of(file: str) -> str:
    """The rank in a data file's name, or the name itself; files of another attempt too."""
    match = re.match(r"rank0*(\d+)-", file.rpartition("/")[2])
    return match[1] if match else file


def rank_order(rank: str) -> tuple[int, str]:
    """A sort key for what `rank_of` returns: by number, then other names."""
    return len(rank), rank


def rectangles(region: Region, shape: Shape) -> list[Rectangle]:
    """`region` of a tensor of `shape` on the unit square; the whole tensor is all of it.

    A part that is cut along dims behind the second is drawn from its first column to its last.
    """
    if not shape:
        return [Rectangle(0.0, 0.0, 1.0, 1.0)]
    # At least 1, for tensors without elements.
    rows, columns = max(shape[0], 1), max(math.prod(shape[1:]), 1)
    tensors = []
    for box in boxes_of(region, shape):
        first = last = 0
        for size, offset, extent in zip(shape[1:], box.offset[1:], box.shape[1:], strict=True):
            first = first * size + offset
            last = last * size + offset + extent - 1
        tensors.append(
            Rectangle(
                first / columns,
                box.offset[0] / rows,
                (last + 1 - first) / columns,
                box.shape[0] / rows,
            )
        )
    return tensors
