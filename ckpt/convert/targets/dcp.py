"""DCP directories, with a pickle of torch's own classes, `.metadata`:
`torch.distributed.checkpoint.load` reads nothing else.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.convert.sources.torch_pickle import TensorOut, write_tree
from ckpt.convert.targets.files import Output, PlannedFile, ZipBuilding, known_file
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.region import Shape, Span

FILE_NBYTES = 1 << 30
VERSION = "1.0.0"  # of DCP's own format, as FileSystemWriter of torch 2.13 writes it
# Stated, because Python's default changes with its version, and the bytes identify an export.
PROTOCOL = 4


class DcpBuilding:
    """A directory in the making; a tensor larger than a file is cut by rows. Paths are those of the
    nested state.
    """

    def __init__(self) -> None:
        self._done: list[PlannedFile] = []
        self._open = ZipBuilding()
        self._stored: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    def add_tensor(self, output: Output, paths: Sequence[tuple[Any, ...]]) -> None:
        """Its bytes, under all the names that it has."""
        shape, itemsize = output.tensor.shape, output.dtype.itemsize
        row_numel = math.prod(shape[1:]) if shape else 1
        rows = shape[0] if shape else 1
        # One row at least, however long it is.
        step = max(1, FILE_NBYTES // max(row_numel * itemsize, 1))
        chunks, places = [], []
        for first in range(0, max(rows, 1), step):
            count = min(step, rows - first)
            part: Shape = (count, *shape[1:]) if shape else ()
            offset: Shape = (first, *(0,) * (len(shape) - 1)) if shape else ()
            span = Span(first * row_numel, (first + count) * row_numel)
            pickled = write_tree(TensorOut("0", output.dtype.name, part))
            places.append((offset, self._add(pickled, [("0", output, span)])))
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(part)))
        for path in paths:
            properties = TensorProperties(dtype=torch_dtype(output.dtype.name))
            key = self._key(path)
            self._stored[key] = TensorStorageMetadata(properties, torch.Size(shape), [*chunks])
            for number, (offset, place) in enumerate(places):
                # `number` is a hint where to look in `chunks`; two indexes that differ in it are
                # equal.
                self._places[MetadataIndex(key, offset, number)] = place

    def add_value(self, path: tuple[Any, ...], value: Any) -> None:
        """A value; after all tensors."""
        key = self._key(path)
        self._stored[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = self._add(write_tree(value), [])

    def files(self) -> list[PlannedFile]:
        """All data files, then `.metadata`, which makes them a checkpoint."""
        metadata = Metadata(
            self._stored,
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=StorageMeta(),
        )
        if hasattr(metadata, "version"):  # torch 2.6 has none
            metadata.version = VERSION
        self._close()
        return [*self._done, known_file(".metadata", pickle.dumps(metadata, protocol=PROTOCOL))]

    def _key(self, path: tuple[Any, ...]) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key

    def _add(self, pickled: bytes, data: Sequence[tuple[str, Output, Span]]) -> _StorageInfo:
        nbytes = sum(span.numel * output.dtype.itemsize for _, output, span in data)
        if self._open.nbytes + nbytes > FILE_NBYTES:
            self._close()
        return _StorageInfo(self._name, *self._open.add(pickled, data))

    @property
    def _name(self) -> str:
        # As the first file of a rank is called: readers only follow the metadata.
        return f"__{len(self._done)}_0.distcp"

    def _close(self) -> None:
        if self._open.nbytes:
            self._done.append(self._open.file(self._name))
            self._open = ZipBuilding()
