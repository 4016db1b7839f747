"""Safetensors files as sources: one file, several with an index, or the shards that DCP writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.source import (
    Chunk,
    FileSource,
    Refusal,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.format.datafile import HEADER_BYTES_MAX, NDIM_MAX
from ckpt.layout.dtypes import NATIVE_BY_CODE
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Shape, is_inside, span_of
from storage import ByteRange, KeyNotFoundError, ShortReadError, Store
from storage.store import check_key

# What torch's HuggingFaceStorageWriter notes in files that hold parts of tensors.
SHARDS = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"


# What one bracket, comma or colon of a header takes at most, from its parsing to the source's end:
# 110 bytes were measured for 60,000 tensors of no, one and six dims.
TOKEN_NBYTES = 128
TOKENS = b"{[,:"
# What JSON of another shape than expected raises; a number may be infinite (`1e999`).
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def open_file(place: SourcePlace, name: str) -> FileSource | None:
    """The file or index of that name, or the index of a file that is not there itself."""
    if not name.endswith(FORMAT.suffixes):
        return None
    if not place.keys and not place.store.exists(name := f"{name}.index.json"):
        return None
    return open_safetensors(place.store, name, place.budget)


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The files of the folder's index, or all."""
    store, top, budget = place.store, place.top, place.budget
    indexes = [key for key in top if key.endswith(".safetensors.index.json")]
    if indexes:
        usual = "model.safetensors.index.json"
        index = usual if usual in indexes else indexes[0]
        source = open_safetensors(store, index, budget)
        return FolderSource(source, {index, *source.files})
    files = [key for key in top if key.endswith(".safetensors")]
    return FolderSource(open_safetensors(store, "", budget), files) if files else None


FORMAT = Format(
    3,
    "safetensors files with or without an index",
    open_folder,
    open_file,
    (".safetensors", ".safetensors.index.json"),
)


def open_safetensors(store: Store, name: str, budget: MemoryBudget) -> FileSource:
    """A safetensors file, the files of an index, or ("") all safetensors files of `store`.

    Raises Corrupt when a file contradicts itself or the index, NoCheckpoint when there is none,
    UnsupportedFormat when headers take more than `budget`, and the store's errors. Reads headers
    only.
    """
    held: Mapping[str, str] = {}
    if name.endswith(".index.json"):
        held = files_of_index(store, name, budget)
        names = sorted(set(held.values()))
    elif name:
        names = [name]
    else:
        keys = (info.key for info in store.list(""))
        names = sorted(key for key in keys if "/" not in key and key.endswith(".safetensors"))
    table = _HeaderTable(store.url)
    for file in names:
        table.add(file, *_header(store, file, budget))
    if missing := sorted(fqn for fqn, file in held.items() if (fqn, file) not in table.places):
        raise Corrupt(f"{store.url}/{name}: {missing[0]} is not in {held[missing[0]]}")
    if not names:
        raise NoCheckpoint(f"{store.url} has no safetensors file")
    return table.source(store, budget.tensor_nbytes)


def files_of_index(store: Store, name: str, budget: MemoryBudget) -> dict[str, str]:
    """The file of each tensor by an index of Hugging Face. Raises Corrupt."""
    try:
        index = parsed(store, name, ByteRange(0, store.info(name).nbytes), budget)
        files = {str(fqn): check_key(str(file)) for fqn, file in index["weight_map"].items()}
    except UNREADABLE as error:
        raise Corrupt(f"{store.url}/{name}: no readable index: {error!r:.100}") from error
    if not files:
        raise Corrupt(f"{store.url}/{name}: an index without tensors")
    return files


def parsed(store: Store, name: str, part: ByteRange, budget: MemoryBudget) -> Any:
    """The JSON in part of a file, charged before it is read and before it is parsed. Raises
    UnsupportedFormat beyond the budget.
    """
    budget.charge(2 * part.nbytes)  # the bytes, and their text
    text = store.get(name, part)
    budget.charge(TOKEN_NBYTES * sum(text.count(token) for token in TOKENS))
    # Of two equal names Python keeps the last one, and another reader perhaps the first.
    return json.loads(text, object_pairs_hook=_without_doubles)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"{twice[:200]!r} is there twice")
    return table


def _header(store: Store, name: str, budget: MemoryBudget) -> tuple[dict[str, Any], int, int]:
    """The header of a file, where its data begins, and the file's length."""
    where = f"{store.url}/{name}"
    try:
        nbytes = store.info(name).nbytes
        if nbytes < 8:
            raise Corrupt(f"{where}: no safetensors file: it has {nbytes} bytes")
        # Checked before the header is read: a hostile length would take all memory.
        length = int.from_bytes(store.get(name, ByteRange(0, 8)), "little")
        if length > min(HEADER_BYTES_MAX, nbytes - 8):
            raise Corrupt(f"{where}: no safetensors file: its header would have {length} bytes")
        budget.allow(nbytes - 8 - length)
        header = parsed(store, name, ByteRange(8, 8 + length), budget)
    except KeyNotFoundError:
        raise Corrupt(f"{where} is missing") from None
    except (ValueError, RecursionError, ShortReadError) as error:
        raise Corrupt(f"{where}: no readable safetensors file: {error!r:.100}") from error
    if not isinstance(header, dict):
        raise Corrupt(f"{where}: its header is a {type(header).__name__}")
    return header, 8 + length, nbytes


class _HeaderTable:
    """Tensors and their chunks, file after file."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.places: set[tuple[str, str]] = set()
        self.tensors: dict[str, tuple[str, list[tuple[Shape, Shape, str, int]]]] = {}
        self.aliases: dict[str, str] = {}
        self.refused: dict[str, Refusal] = {}
        self.sizes: dict[str, int] = {}

    def add(self, file: str, header: dict[str, Any], data_start: int, nbytes: int) -> None:
        self.sizes[file] = nbytes
        # The format reserves this name: no tensor can have it.
        notes = header.pop("__metadata__", None) or {}
        if not isinstance(notes, dict):
            raise Corrupt(f"{self.url}/{file}: its metadata is a {type(notes).__name__}")
        try:
            offsets = json.loads(notes.get(SHARDS, "{}"))
            for fqn, entry in header.items():
                self.add_tensor(file, fqn, entry, data_start, offsets.get(fqn))
            # They have to fill the file's data without holes or overlaps, as the format's
            # specification demands: other bytes would be hidden, or read as two tensors.
            stop = 0
            for start, end, fqn in sorted((*one["data_offsets"], n) for n, one in header.items()):
                if start != stop:
                    what = "a hole before" if start > stop else "bytes of another tensor in"
                    raise Corrupt(
                        f"{self.url}/{file}: {what} {fqn!r}: its data begins at byte {start}, "
                        f"expected {stop}"
                    )
                stop = end
            if stop != nbytes - data_start:
                what = f"{nbytes - data_start} bytes of data, its tensors have {stop}"
                raise Corrupt(f"{self.url}/{file}: {what}")
            # Tied names, as safetensors.torch.save_model notes them.
            for alias, fqn in notes.items():
                if fqn in header and alias not in header:
                    self.aliases[alias] = fqn
        except UNREADABLE as error:
            raise Corrupt(f"{self.url}/{file}: no readable header: {error!r:.100}") from error

    def add_tensor(
        self, file: str, fqn: str, entry: Any, data_start: int, shard: Mapping[str, Any] | None
    ) -> None:
        start, stop = (int(number) for number in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        offset = tuple(int(number) for number in shard[OFFSETS]) if shard else (0,) * len(shape)
        self.places.add((fqn, file))
        known = NATIVE_BY_CODE.get(str(entry["dtype"]))
        if known is None:
            reason = f"its dtype {entry['dtype']!s:.20} is none that torch has"
            self.refused[fqn] = Refusal(reason, True)
            return
        size = math.prod(shape) * known.itemsize
        if not 0 <= start <= stop or stop - start != size or min((*shape, *offset, 0)) < 0:
            raise Corrupt(f"{self.url}/{file}: {fqn} has {stop - start} bytes, {size} are needed")
        if len(shape) > NDIM_MAX or len(offset) != len(shape):
            raise Corrupt(f"{self.url}/{file}: {fqn} has no possible shape")
        dtype, parts = self.tensors.setdefault(fqn, (known.name, []))
        if dtype != known.name or any(len(part[0]) != len(shape) for part in parts):
            raise Corrupt(f"{self.url}/{file}: {fqn} is of another dtype or shape than elsewhere")
        parts.append((offset, shape, file, data_start + start))

    def source(self, store: Store, stored_nbytes: int) -> FileSource:
        tensors: dict[str, SourceTensor] = {}
        chunks: dict[str, list[Chunk]] = {}
        for fqn, (dtype, parts) in sorted(self.tensors.items()):
            # Parts say where they begin; together they reach to the tensor's end.
            ends = zip(*([o + n for o, n in zip(p[0], p[1], strict=True)] for p in parts))  # noqa: B905
            shape = tuple(max(end) for end in ends)
            tensors[fqn] = SourceTensor(fqn, dtype, shape, Kind.PARAMETER)
            chunks[fqn] = []
            for offset, size, file, start in parts:
                box = Box(offset, size)
                # One outside of its tensor is refused by `check_chunks`, which names it.
                span = span_of(box, shape) if is_inside(box, shape) else None
                if 0 not in size:
                    chunks[fqn].append(Chunk(span or box, file, start))
            check_chunks(tensors[fqn], chunks[fqn], self.sizes)
        contents = SourceContents(
            tensors, aliases=self.aliases, refused=self.refused, modules=("",)
        )
        return FileSource(store, "safetensors", contents, chunks, stored_nbytes)
