"""DCP's `.metadata`, written with torch's own classes: the one place of ours that writes a pickle.

`torch.distributed.checkpoint.load` reads nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

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

from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.region import Shape

VERSION = "1.0.0"  # of DCP's own format, as FileSystemWriter of torch 2.13 writes it
PROTOCOL = 4


class DcpPart(NamedTuple):
    """A region of a tensor, or a value, and the blob that holds it."""

    offset: Shape
    shape: Shape
    file: str
    start: int
    nbytes: int


class DcpEntry(NamedTuple):
    """A tensor at `path` of the nested state."""

    path: tuple[Any, ...]
    dtype: str
    shape: Shape
    parts: tuple[DcpPart, ...]


class DcpValue(NamedTuple):
    """A value at `path` of the nested state."""

    path: tuple[Any, ...]
    part: DcpPart


def encode_metadata(tensors: Sequence[DcpEntry], values: Sequence[DcpValue]) -> bytes:
    """The content of `.metadata`."""
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for entry in tensors:
        key = _key(entry.path)
        paths[key] = entry.path
        stored[key] = TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(entry.dtype)),
            torch.Size(entry.shape),
            [
                ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape))
                for part in entry.parts
            ],
        )
        for number, part in enumerate(entry.parts):
            index = MetadataIndex(key, part.offset, number)
            places[index] = _StorageInfo(part.file, part.start, part.nbytes)
    for path, part in values:
        key = _key(path)
        paths[key] = path
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(part.file, part.start, part.nbytes)
    metadata = Metadata(
        stored,
        planner_data=paths,
        storage_data=places,
        storage_meta=StorageMeta(),
        version=VERSION,
    )
    return pickle.dumps(metadata, protocol=PROTOCOL)


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
