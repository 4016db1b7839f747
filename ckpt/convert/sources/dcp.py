"""Directories of torch.distributed.checkpoint (DCP) as sources.

`.metadata` is a pickle of DCP's classes. It is read by a machine that can build nothing but records
of those names (`ckpt.convert.sources.pickles`), and what it says is checked before it is used:
every tensor covered once, every byte inside of its file, every blob of the shape and dtype that it
should have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from ckpt.convert.sources.blobs import Blob, Opened, open_blob, open_blobs
from ckpt.convert.sources.budget import Account, MemoryBudget
from ckpt.convert.sources.pickles import Maker, Opaque, PickledObject, read_pickle
from ckpt.convert.sources.source import (
    SCRATCH_NBYTES,
    Chunk,
    FileSource,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.convert.sources.torch_pickle import KNOWN, StorageRef, TensorRef, UnreadableTensor
from ckpt.convert.sources.tree import Leaf, leaves_of, mapped, name_tree, nest
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Shape, span_of
from storage import KeyNotFoundError, Store
from storage.errors import InvalidKeyError
from storage.store import check_key

METADATA = ".metadata"
LIGHTNING_REST = "meta.pt"
METADATA_NBYTES_MAX = 1 << 30
VALUE_NBYTES_MAX = 256 << 20
PATH_PARTS_MAX = 100
DATA_SUFFIX = ".distcp"
FILES_MAX = 10_000  # of a folder, whose lengths are looked at
IMPORT_THREADS = 3  # of an import, by default; each has a part of 16 MiB in memory
BUFFERS_NBYTES = IMPORT_THREADS * 16 << 20

_CLASSES = "torch.distributed.checkpoint.metadata."
_TENSOR = f"{_CLASSES}TensorStorageMetadata"
_BYTES = f"{_CLASSES}BytesStorageMetadata"


def _enum(*_: Any) -> None:
    return None


_NAMES: dict[str, Maker | str] = {
    **{
        f"{_CLASSES}{name}": f"{_CLASSES}{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    f"{_CLASSES}_MEM_FORMAT_ENCODING": _enum,
    "torch.distributed.checkpoint.filesystem._StorageInfo": "_StorageInfo",
    "torch.Size": KNOWN["torch.Size"],
    "torch.serialization._get_layout": KNOWN["torch.serialization._get_layout"],
    "collections.OrderedDict": KNOWN["collections.OrderedDict"],
}


class StoredBlob(NamedTuple):
    """Where DCP says that the bytes of something are: a blob of torch.save."""

    file: str
    start: int
    nbytes: int


class StoredRegion(NamedTuple):
    """A stored region of a tensor."""

    offset: Shape
    shape: Shape
    item: StoredBlob


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the metadata. `dtype` is the canonical name, of types that we lack too."""

    dtype: str
    shape: Shape
    parts: tuple[StoredRegion, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What `.metadata` says, as values of ours, by DCP's own flat keys.

    `paths` are where the keys stood in the nested state: keys of dicts and indexes of lists.
    """

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    items: dict[str, StoredBlob] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class TreeData(NamedTuple):
    """Of the tensors of nested states, by the keys of their leaves: where they lie, dtypes and
    shapes; and the budget for all of it.
    """

    chunks: dict[str, list[Chunk]]
    infos: dict[str, tuple[str, Shape]]
    budget: MemoryBudget


class OtherFiles(NamedTuple):
    """Entries of a state from other files than those of DCP, with a `Leaf` per tensor."""

    entries: dict[Any, Any]
    data: TreeData


def open_dcp(
    store: Store,
    budget: MemoryBudget,
    *,
    folder: str = "",
    parameter_names: Sequence[str] | None = None,
) -> FileSource:
    """The DCP checkpoint in `folder` ("" or with a closing slash) of `store`.

    Raises NoCheckpoint when there is none, Corrupt when it contradicts itself, UnsupportedFormat
    for what cannot be read, and the store's errors. Reads no tensor.
    """
    return dcp_source(store, {"": read_folder(store, folder, budget)}, budget, parameter_names)


class Folder(NamedTuple):
    """A DCP directory, read: its metadata, and what the state was, with a `Leaf` per tensor."""

    metadata: DcpMetadata
    tree: Any
    data: TreeData
    sizes: dict[str, int]


def read_folder(store: Store, folder: str, budget: MemoryBudget) -> Folder:
    """Everything of a DCP directory but its tensors. Raises like `open_dcp`."""
    # How much of the files is tensors is known from the metadata, which has to be read for that.
    files = islice(store.list(folder), FILES_MAX)
    budget.allow(sum(info.nbytes for info in files if info.key.endswith(DATA_SUFFIX)))
    metadata = read_metadata(store, folder, budget)
    sizes = _sizes(store, metadata)
    data = TreeData({}, {}, budget)
    leaves: dict[str, Any] = {}
    usable = {}
    for key, tensor in metadata.tensors.items():
        if tensor.dtype not in DTYPES:
            leaves[key] = UnreadableTensor(
                f"its dtype {tensor.dtype} has no fixed layout in whole bytes"
            )
            continue
        usable[key] = tensor
        data.infos[key] = (tensor.dtype, tensor.shape)
        leaves[key] = Leaf(key, DTYPES[tensor.dtype].is_float)
    data.chunks.update(_chunks(store, usable, budget))
    for key, item in metadata.items.items():
        leaves[key] = _value(store, key, item, data)
    tree = nest(leaves, lambda key: metadata.paths.get(key, (key,)))
    tree.update(_rest(store, folder, tree, data, sizes))
    for key, tensor_chunks in data.chunks.items():
        dtype, shape = data.infos[key]
        check_chunks(SourceTensor(key, dtype, shape), tensor_chunks, sizes)
    return Folder(metadata, tree, data, sizes)


def _rest(
    store: Store,
    folder: str,
    tree: Mapping[Any, Any],
    into: TreeData,
    sizes: dict[str, int],
) -> dict[Any, Any]:
    """What Lightning keeps beside a DCP checkpoint, in a file of torch.save: all but the sharded
    dicts. Nothing where there is no such file.
    """
    name = folder + LIGHTNING_REST
    try:
        sizes[name] = store.info(name).nbytes
    except KeyNotFoundError:
        return {}
    entries = leaves_of_blob(store, Blob(name, 0, sizes[name]), name, into, is_outermost=True)
    if not isinstance(entries, dict):
        return {}
    if both := [key for key in entries if key in tree]:
        raise UnsupportedFormat(f"{store.url}/{name}: its {both[0]!r} is in {METADATA}, too")
    return entries


def dcp_source(
    store: Store,
    folders: Mapping[str, Folder],
    budget: MemoryBudget,
    parameter_names: Sequence[str] | None,
    beside: OtherFiles | None = None,
) -> FileSource:
    """Several DCP directories as one source; the state of each stands at its top level, and so do
    the entries from files `beside` them.
    """
    trees, data = beside or OtherFiles({}, TreeData({}, {}, budget))
    for where, folder in folders.items():
        moved = _moved(folder.tree, where)
        for key, item in moved.items():
            if key in trees:
                raise UnsupportedFormat(f"{store.url}: two of its directories have {key!r}")
            trees[key] = item
        data.chunks.update({where + key: chunks for key, chunks in folder.data.chunks.items()})
        data.infos.update({where + key: info for key, info in folder.data.infos.items()})
    return tree_source(store, "DCP checkpoint", trees, data, parameter_names)


def tree_source(
    store: Store,
    format: str,
    tree: Any,
    data: TreeData,
    parameter_names: Sequence[str] | None,
) -> FileSource:
    """The source of a nested state.

    A key that several leaves have is a tied tensor, stored under the first of its names.
    """
    chunks, infos, budget = data
    named = name_tree(tree, parameter_names)
    tensors: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for fqn, key, kind in leaves_of(named):
        held = first.setdefault(key, fqn)
        if held != fqn:
            aliases[fqn] = held
            if kind in (Kind.PARAMETER, Kind.BUFFER):  # of a model, whatever else has it, too
                tensors[held] = tensors[held]._replace(kind=kind)
        else:
            tensors[fqn] = SourceTensor(fqn, *infos[key], kind)
    contents = SourceContents(
        tensors,
        values=dict(sorted(named.values.items())),
        aliases=aliases,
        refused=named.refused,
        modules=named.modules,
    )
    placed = {fqn: chunks[key] for key, fqn in first.items()}
    budget.charge(_uncovered_nbytes(contents, placed, budget.tensor_nbytes))
    return FileSource(store, format, contents, placed, budget.tensor_nbytes)


def _uncovered_nbytes(
    contents: SourceContents, placed: Mapping[str, list[Chunk]], stored_nbytes: int
) -> int:
    """What the buffers of an import take beyond the bytes that are there: a tensor may show few
    stored elements many times.
    """
    nbytes = min(sum(info.nbytes for info in contents.tensors.values()), BUFFERS_NBYTES)
    if any(chunk.stride is not None for chunks in placed.values() for chunk in chunks):
        nbytes += min(IMPORT_THREADS * SCRATCH_NBYTES, stored_nbytes)
    return max(0, nbytes - stored_nbytes)


def _moved(tree: Any, where: str) -> Any:
    """`tree` with `where` in front of the keys of its leaves."""
    return mapped(
        tree,
        lambda leaf: replace(leaf, key=where + leaf.key) if isinstance(leaf, Leaf) else leaf,
    )


# The metadata ---------------------------------------------------------------------------------


def read_metadata(store: Store, folder: str, budget: MemoryBudget) -> DcpMetadata:
    """What `.metadata` says, without running anything of it."""
    where = f"{store.url}/{folder}{METADATA}"
    try:
        nbytes = store.info(folder + METADATA).nbytes
    except KeyNotFoundError:
        raise NoCheckpoint(
            f"{where} is not there: no DCP checkpoint, or its save did not end"
        ) from None
    if nbytes > METADATA_NBYTES_MAX:
        raise UnsupportedFormat(f"{where} has {nbytes} bytes; at most {METADATA_NBYTES_MAX}")
    try:
        account = Account(budget)
        account.charge(nbytes)
        data = bytearray(nbytes)
        store.get_into(folder + METADATA, 0, [memoryview(data)] if data else [])
        root = read_pickle(data, _NAMES, account=account)
        account.release(nbytes)
        return _metadata(root, folder)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{where}: {error}") from error


def _metadata(root: Any, folder: str) -> DcpMetadata:
    if not isinstance(root, PickledObject) or root.name != f"{_CLASSES}Metadata":
        raise Corrupt(f"it holds a {root!r:.80}, not DCP's Metadata")
    places = _places(root.field("storage_data"), folder)
    metadata = DcpMetadata()
    for key, entry in _dict_of(root.field("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(key, str) or not isinstance(entry, PickledObject):
            raise Corrupt(f"state_dict_metadata: {key!r:.60} is no name of a tensor or value")
        if entry.name == _BYTES:
            metadata.items[key] = _place(places, key, None)
        elif entry.name == _TENSOR:
            metadata.tensors[key] = _tensor(key, entry, places)
        else:
            raise Corrupt(f"{key}: a {entry.name} in the metadata")
    paths = root.field("planner_data")
    for key, path in _dict_of(paths, "planner_data") if paths is not None else ():
        whole = isinstance(path, (tuple, list)) and 0 < len(path) <= PATH_PARTS_MAX
        if not whole or not all(type(part) in (str, int) for part in path):
            raise Corrupt(f"planner_data: {path!r:.80} is no path")
        metadata.paths[key] = tuple(path)
    return metadata


def _dict_of(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, expected a dict")
    return value.items()


_Places = dict[tuple[str, Shape | None], StoredBlob]


def _places(storage: Any, folder: str) -> _Places:
    places: _Places = {}
    for index, info in _dict_of(storage, "storage_data"):
        if not (isinstance(index, PickledObject) and isinstance(info, PickledObject)):
            raise Corrupt("storage_data: an entry that is none of DCP's file system storage")
        if info.field("transform_descriptors"):
            raise UnsupportedFormat(
                f"{index.field('fqn')!r:.100}: stored through the extension "
                f"{info.field('transform_descriptors')!r:.60}; save without it"
            )
        name, start, nbytes = (info.field(n) for n in ("relative_path", "offset", "length"))
        fqn = index.field("fqn")
        if not isinstance(fqn, str):
            raise Corrupt(f"storage_data: a {type(fqn).__name__} is no name of a tensor")
        if not (isinstance(name, str) and _is_size(start) and _is_size(nbytes)):
            raise Corrupt(f"storage_data: {fqn!r:.100} has no place in a file")
        try:
            check_key(name)
        except InvalidKeyError as error:
            raise Corrupt(f"storage_data: {error}") from error
        offset = index.field("offset")
        key = (fqn, None if offset is None else _shape(offset))
        places[key] = StoredBlob(folder + name, start, nbytes)
    return places


def _place(places: _Places, key: str, offset: Shape | None) -> StoredBlob:
    try:
        return places[key, offset]
    except KeyError:
        where = "" if offset is None else f" at {offset}"
        raise Corrupt(f"{key}: no entry has the place of its bytes{where}") from None


def _tensor(key: str, entry: PickledObject, places: _Places) -> DcpTensor:
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, PickledObject) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Opaque):
        raise Corrupt(f"{key}: the metadata has no dtype for it")
    parts = []
    chunks = entry.field("chunks")
    for chunk in chunks if isinstance(chunks, list) else ():
        if not isinstance(chunk, PickledObject):
            raise Corrupt(f"{key}: a chunk that is none")
        offset, shape = _shape(chunk.field("offsets")), _shape(chunk.field("sizes"))
        parts.append(StoredRegion(offset, shape, _place(places, key, offset)))
    return DcpTensor(dtype.name.removeprefix("torch."), _shape(entry.field("size")), tuple(parts))


def _shape(value: Any) -> Shape:
    if not isinstance(value, (tuple, list)) or not all(_is_size(extent) for extent in value):
        raise Corrupt(f"{value!r:.80} is no shape")
    return tuple(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


# The files ------------------------------------------------------------------------------------


def _sizes(store: Store, metadata: DcpMetadata) -> dict[str, int]:
    """The length of every file; raises Corrupt when one is missing or too short."""
    needed: dict[str, int] = {}
    items = [part.item for tensor in metadata.tensors.values() for part in tensor.parts]
    for item in (*items, *metadata.items.values()):
        needed[item.file] = max(needed.get(item.file, 0), item.start + item.nbytes)
    sizes = {}
    for file, stop in sorted(needed.items()):
        try:
            sizes[file] = store.info(file).nbytes
        except KeyNotFoundError:
            raise Corrupt(f"{store.url}/{file} is missing") from None
        if sizes[file] < stop:
            raise Corrupt(f"{store.url}/{file} has {sizes[file]} bytes, {stop} are needed")
    return sizes


def _chunks(
    store: Store, tensors: Mapping[str, DcpTensor], budget: MemoryBudget
) -> dict[str, list[Chunk]]:
    """Where the elements of every stored region are."""
    wanted: dict[Blob, list[tuple[str, StoredRegion]]] = {}
    chunks: dict[str, list[Chunk]] = {key: [] for key in tensors}
    for key, tensor in tensors.items():
        for part in tensor.parts:
            if 0 not in part.shape:
                item = part.item
                blob = Blob(item.file, item.start, item.start + item.nbytes)
                wanted.setdefault(blob, []).append((key, part))
    for blob, opened in open_blobs(store, list(wanted), budget):
        for key, part in wanted[blob]:
            chunks[key].append(_chunk(key, tensors[key], part, opened))
        opened.close()
    return chunks


def _chunk(key: str, tensor: DcpTensor, part: StoredRegion, opened: Opened) -> Chunk:
    view = opened.tree
    if not isinstance(view, TensorRef):
        raise Corrupt(f"{part.item.file}: {key} is said to be there, and a {view!r:.60} is")
    if view.dtype != tensor.dtype or view.shape != part.shape:
        raise Corrupt(
            f"{part.item.file}: {key} has {view.dtype} {view.shape} there, the metadata says "
            f"{tensor.dtype} {part.shape}"
        )
    return chunk_of(view, opened, part.item.file, part.offset, tensor.shape)


def chunk_of(view: TensorRef, opened: Opened, file: str, offset: Shape, whole: Shape) -> Chunk:
    """The region at `offset` of a tensor of shape `whole` that a blob holds."""
    box = Box(offset, view.shape)
    start = opened.start_of(view)
    if not view.is_row_major:
        return Chunk(box, file, start, view.stride)
    # Another number of dims is refused by `check_chunks`, which names the tensor.
    span = span_of(box, whole) if len(offset) == len(whole) else None
    return Chunk(span or box, file, start)


def _value(store: Store, key: str, item: StoredBlob, into: TreeData) -> Any:
    """The tree that a value is; tensors in it get chunks of their own."""
    if item.nbytes > VALUE_NBYTES_MAX:
        return UnreadableTensor(f"a value of {item.nbytes} bytes; at most {VALUE_NBYTES_MAX}")
    blob = Blob(item.file, item.start, item.start + item.nbytes)
    return leaves_of_blob(store, blob, key, into)


def leaves_of_blob(
    store: Store, blob: Blob, key: str, into: TreeData, *, is_outermost: bool = False
) -> Any:
    """The tree in a blob with a `Leaf` for each tensor, whose chunks, dtypes and shapes go `into`
    the data of the source. Raises like `open_blob`, which says what `is_outermost` is.

    Equal views of one storage are one tensor, whatever parts of the tree they stand in.
    """
    opened = open_blob(store, blob, into.budget, is_outermost=is_outermost)

    def leaf_of(item: Any) -> Any:
        if isinstance(item, StorageRef):
            return UnreadableTensor("it is a storage, not a tensor")
        if not isinstance(item, TensorRef):
            return item
        name = f"{key}@{item.storage.key}:{item.offset}:{item.shape}:{item.stride}{item.dtype}"
        if name not in into.chunks:
            into.infos[name] = (item.dtype, item.shape)
            origin = (0,) * len(item.shape)
            made = (
                [] if 0 in item.shape else [chunk_of(item, opened, blob.file, origin, item.shape)]
            )
            into.chunks[name] = made
        return Leaf(name, DTYPES[item.dtype].is_float)

    tree = mapped(opened.tree, leaf_of)
    opened.directory.close()
    return tree
