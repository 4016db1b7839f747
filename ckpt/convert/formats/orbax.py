"""Orbax's checkpoints of JAX as sources: arrays in folders of their own (zarr), or in one key-value
store (OCDBT). Both are read by tensorstore, which has to be installed, from a disk.

`_METADATA` names the arrays. A checkpoint of several items has a folder for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ckpt.convert.formats.safetensors import UNREADABLE, parsed
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.source import (
    FileSource,
    ReadRequest,
    Refusal,
    SourceContents,
    SourceTensor,
)
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.datafile import NDIM_MAX
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.memory import host_bytes
from ckpt.layout.region import Box, boxes_of
from ckpt.state.values import join
from storage import ByteRange, Store

METADATA = "_METADATA"
OCDBT = "manifest.ocdbt"
SPARE_NBYTES = 64 << 20  # that a chunk may have more than its array
KEPT_NBYTES = 512 << 20
OPENED_AT_ONCE = 64


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The arrays of all items, those of several below the item's name."""
    folders = [
        key.removesuffix(METADATA)
        for key in sorted(place.keys)
        if key.rpartition("/")[2] == METADATA and key.count("/") < 2
    ]
    if not folders:
        return None
    place.budget.allow(sum(info.nbytes for info in place.store.list("")))
    arrays: dict[str, Any] = {}
    tensors, refused = dict[str, SourceTensor](), dict[str, Refusal]()
    for folder in folders:
        prefix = "" if len(folders) == 1 else folder.rstrip("/")
        for fqn, array in _open_item(place, folder, prefix, refused):
            info = SourceTensor(fqn, array.dtype.name, tuple(array.shape), Kind.PARAMETER)
            tensors[fqn], arrays[fqn] = info, array
    contents = SourceContents(tensors, refused=refused, modules=("",))
    source = ArraySource(place.store, contents, arrays, place.budget.tensor_nbytes)
    whole = folders == [""]
    return FolderSource(source, place.keys if whole else (), () if whole else tuple(folders))


FORMAT = Format(2, "a folder of Orbax", open_folder)


class ArraySource(FileSource):
    """Arrays of tensorstore by name. A compressed chunk is read whole; the last ones are kept,
    for a tensor is read in many parts.
    """

    def __init__(
        self, store: Store, contents: SourceContents, arrays: Mapping[str, Any], nbytes: int
    ) -> None:
        super().__init__(store, "Orbax checkpoint", contents, {}, nbytes)
        self.arrays = arrays

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        for fqn, span, target in wanted:
            shape, done = self.contents.tensors[fqn].shape, 0
            # An array without dims has one element and no boxes.
            for box in boxes_of(span, shape) or (Box((), ()),) * bool(span.numel):
                ends = zip(box.offset, box.shape, strict=True)
                where = tuple(slice(start, start + size) for start, size in ends)
                try:
                    read = np.ascontiguousarray(self.arrays[fqn][where].read().result())
                except (ValueError, OSError, RuntimeError) as error:
                    raise Corrupt(f"{self.store.url}: {fqn}: {error!s:.300}") from error
                host_bytes(target[done : done + box.numel])[:] = (
                    read.reshape(-1).view(np.uint8).data
                )
                done += box.numel


def _open_item(
    place: SourcePlace, folder: str, prefix: str, refused: dict[str, Refusal]
) -> Iterator[tuple[str, Any]]:
    """The names and arrays of an item; `refused` gets those whose dtype torch lacks."""
    store = place.store
    path = store.url.removeprefix("file://")
    if "://" in path:
        raise UnsupportedFormat(f"{store.url}: copy it to a disk: tensorstore reads it there")
    try:
        tensorstore: Any = import_module("tensorstore")
    except ImportError:
        raise UnsupportedFormat(
            f"{store.url}: reading what Orbax wrote needs tensorstore: pip install "
            "'shardpoint[orbax]'"
        ) from None
    where = f"{store.url}/{folder}{METADATA}"
    named, driver = _names_of(place, folder, prefix, refused)
    base = {"driver": "file", "path": f"{path}/{folder}"}
    is_one = store.exists(folder + OCDBT)

    def spec(name: str) -> dict[str, Any]:
        store_of = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        return {
            "driver": driver,
            "kvstore": store_of if is_one else {**base, "path": f"{base['path']}{name}/"},
            "fill_missing_data_reads": False,  # a lost chunk is no zeros
        }

    # By default tensorstore takes as many threads as there are cores, and each rank of a host
    # would.
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": KEPT_NBYTES},
            "data_copy_concurrency": {"limit": 2},
            "file_io_concurrency": {"limit": 4},
        }
    )
    names = list(named)
    for first in range(0, len(names), OPENED_AT_ONCE):
        batch = names[first : first + OPENED_AT_ONCE]
        # Together, because each reads a small file of its own.
        opening = [
            tensorstore.open(spec(name), read=True, open=True, context=context) for name in batch
        ]
        for name, future in zip(batch, opening, strict=True):
            fqn = named[name]
            try:
                array = future.result()
            except (ValueError, OSError, RuntimeError) as error:
                raise Corrupt(f"{where}: {name}: {error!s:.300}") from error
            shape, dtype = tuple(map(int, array.shape)), str(array.dtype.name)
            if dtype not in DTYPES or len(shape) > NDIM_MAX:
                refused[fqn] = Refusal(f"its dtype {dtype:.40} is none that torch has", True)
                continue
            itemsize, parts = DTYPES[dtype].itemsize, array.chunk_layout.read_chunk.shape or ()
            # A chunk is read whole: a shape out of all proportion would have it fill the memory.
            if math.prod(parts) * itemsize > math.prod(shape) * itemsize + SPARE_NBYTES:
                raise Corrupt(f"{where}: {name}: chunks of shape {parts}, the array has {shape}")
            yield fqn, array


def _names_of(
    place: SourcePlace, folder: str, prefix: str, refused: dict[str, Refusal]
) -> tuple[dict[str, str], str]:
    """The names of an item's arrays and what they are called here, and tensorstore's driver."""
    named: dict[str, str] = {}
    try:
        part = ByteRange(0, place.store.info(folder + METADATA).nbytes)
        metadata = parsed(place.store, folder + METADATA, part, place.budget)
        for entry in metadata["tree_metadata"].values():
            path_of = [str(step["key"]) for step in entry["key_metadata"]]
            kind, name = str(entry["value_metadata"]["value_type"]), ".".join(path_of)
            if kind in ("jax.Array", "np.ndarray", "scalar"):
                named[name] = join(prefix, name)
            # Empty containers have no arrays, and nothing that could be lost.
            elif kind not in ("None", "Dict", "List", "NamedTuple"):
                refused[join(prefix, name)] = Refusal(f"it is a {kind:.40}", False)
        return named, "zarr3" if metadata.get("use_zarr3") else "zarr"
    except UNREADABLE as error:
        where = f"{place.store.url}/{folder}{METADATA}"
        raise Corrupt(f"{where}: no readable metadata: {error!r:.200}") from error
