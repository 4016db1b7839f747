"""Where a checkpoint's tensors lie: tensors x ranks x files, as values that a picture is drawn of.

map_of(checkpoint) -> rows (one per tensor: which rank stored which part) and files
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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


class PartOnMap(NamedTuple):
    """A stored part: the writing rank's place in `TensorsMap.ranks`, the file's in `files`."""

    rank: int
    file: int
    byte_start: int
    nbytes: int
    region: Region


@dataclass(frozen=True, slots=True)
class TensorOnMap:
    """One tensor. `nbytes_by_rank` has one number per rank of the map."""

    info: TensorInfo
    parts: tuple[PartOnMap, ...]
    nbytes_by_rank: tuple[int, ...]


class FileOnMap(NamedTuple):
    """One data file: its name in the step's directory, the place of its rank, its length."""

    name: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorsMap:
    """Which rank stored which part of which tensor in which file.

    `ranks` are the names of those who wrote: numbers, or file names where a name has no rank.
    """

    ranks: tuple[str, ...]
    files: tuple[FileOnMap, ...]
    tensors: tuple[TensorOnMap, ...]


def map_of(checkpoint: CheckpointContents, names: Sequence[str] | None = None) -> TensorsMap:
    """The map of all tensors of a checkpoint, or of those in `names`, in that order.

    Tied names are left out: their parts are those of the stored tensor. Reads no tensor. Raises
    KeyError for an unknown name.
    """
    manifest = checkpoint.manifest
    # By name, for the manifest does not say who wrote a file.
    writers = {name: rank_of(name) for name in manifest.files}
    ranks = sorted(set(writers.values()), key=rank_order)
    place = {rank: index for index, rank in enumerate(ranks)}
    number = {name: index for index, name in enumerate(manifest.files)}
    tensors = []
    for name in checkpoint.keys() if names is None else names:
        info = checkpoint.info(name)
        if info.alias_of is not None:
            continue
        parts = tuple(
            PartOnMap(
                place[writers[part.file]],
                number[part.file],
                part.byte_start,
                part.nbytes,
                part.region,
            )
            for part in info.parts
        )
        nbytes = [0] * len(ranks)
        for part in parts:
            nbytes[part.rank] += part.nbytes
        tensors.append(TensorOnMap(info, parts, tuple(nbytes)))
    files = tuple(
        FileOnMap(name, place[writers[name]], file_nbytes)
        for name, file_nbytes in zip(manifest.files, manifest.file_nbytes.tolist(), strict=True)
    )
    return TensorsMap(tuple(ranks), files, tuple(tensors))


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
