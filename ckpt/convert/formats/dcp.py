"""Directories of torch.distributed.checkpoint (DCP) as sources.

`.metadata` is a pickle of DCP's classes. It is read by a machine that builds only records of those
names (`ckpt.convert.sources.pickles`), and what it says is checked before it is used: every tensor
covered once, every byte inside of its file, every blob of the shape and dtype that it should have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckpt.convert.sources.blobs import Blob, open_blobs
from ckpt.convert.sources.budget import Account, MemoryBudget
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.pickles import Maker, Opaque, PickledObject, read_pickle
from ckpt.convert.sources.source import FileSource
from ckpt.convert.sources.torch_pickle import KNOWN, TensorRef, UnreadableTensor
from ckpt.convert.sources.tree import Leaf, TreeData, chunk_of, leaves_of_blob, nest, tree_source
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Shape
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

_CLASSES = "torch.distributed.checkpoint.metadata."
_TENSOR = f"{_CLASSES}TensorStorageMetadata"
_BYTES = f"{_CLASSES}BytesStorageMetadata"

_RECORDS = """
    Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties
    MetadataIndex StorageMeta
"""
_NAMES: dict[str, Maker | str] = {
    **{name: name for name in map(_CLASSES.__add__, _RECORDS.split())},
    # Nothing of it is needed: the pickle of each blob has the strides of its tensor.
    f"{_CLASSES}_MEM_FORMAT_ENCODING": lambda *_: None,
    "torch.distributed.checkpoint.filesystem._StorageInfo": "_StorageInfo",
    "torch.Size": KNOWN["torch.Size"],
    "torch.serialization._get_layout": KNOWN["torch.serialization._get_layout"],
    "collections.OrderedDict": KNOWN["collections.OrderedDict"],
}


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the metadata. `dtype` is the canonical name, also of types that we lack; each of
    `parts` is an offset, a shape, and the blob that holds it.
    """

    dtype: str
    shape: Shape
    parts: tuple[tuple[Shape, Shape, Blob], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What `.metadata` says, as values of ours, by DCP's own flat keys.

    `paths` are where the keys stood in the nested state: keys of dicts and indexes of lists.
    """

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    items: dict[str, Blob] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The DCP checkpoint at the top of a folder."""
    if METADATA not in place.keys and not place.store.exists(METADATA):  # beyond those listed
        # Without collectives DCP writes `__0.metadata` and so on, a file per rank.
        is_of_ranks = any(k.startswith("__") and k.endswith(METADATA) for k in place.top)
        other = place.opened(FORMAT.order) if is_of_ranks else None
        if is_of_ranks and other is None:
            raise UnsupportedFormat(
                f"{place.store.url}: saved with use_collectives=False, each rank's metadata by "
                "itself; save with collectives, or load it with torch and save it with ckpt.save"
            )
        return other
    own = [k for k in place.top if k.endswith(DATA_SUFFIX) or k in (METADATA, LIGHTNING_REST)]
    return FolderSource(_source(place, ""), own)


def open_file(place: SourcePlace, name: str) -> FileSource | None:
    """The DCP checkpoint in a folder that is called as files are."""
    if place.keys or not place.store.exists(f"{name}/{METADATA}"):
        return None
    return _source(place, f"{name}/")


FORMAT = Format(0, "a directory of torch.distributed.checkpoint", open_folder, open_file)


def _source(place: SourcePlace, folder: str) -> FileSource:
    data = TreeData({}, place.budget)
    tree = read_folder(place.store, folder, data)
    return tree_source(place, "DCP checkpoint", tree, data)


def read_folder(store: Store, folder: str, into: TreeData) -> dict[Any, Any]:
    """What the state in `folder` ("" or with a closing slash) was, with a `Leaf` per tensor, which
    go `into` the data of a source.

    Raises NoCheckpoint when there is none, Corrupt when it contradicts itself, UnsupportedFormat
    for what cannot be read, and the store's errors. Reads no tensor.
    """
    # How much of the files is tensors is known from the metadata, which has to be read for that.
    files = islice(store.list(folder), FILES_MAX)
    into.budget.allow(sum(info.nbytes for info in files if info.key.endswith(DATA_SUFFIX)))
    metadata = read_metadata(store, folder, into.budget)
    sizes = _sizes(store, metadata)
    data = TreeData({}, into.budget)
    leaves: dict[str, Any] = {}
    first: dict[DcpTensor, str] = {}  # two names of the same bytes of a file are tied
    for key, tensor in metadata.tensors.items():
        if tensor.dtype not in DTYPES:
            reason = f"its dtype {tensor.dtype} has no fixed layout in whole bytes"
            leaves[key] = UnreadableTensor(reason)
            continue
        # Empty tensors have no bytes in which they could be tied.
        held = key if 0 in tensor.shape else first.setdefault(tensor, key)
        if held == key:
            data.add(folder + key, tensor.dtype, tensor.shape, [])
        leaves[key] = Leaf(folder + held, DTYPES[tensor.dtype].is_float)
    _add_chunks(store, folder, metadata.tensors, data)
    for key, item in metadata.items.items():
        if item.stop - item.start > VALUE_NBYTES_MAX:
            leaves[key] = UnreadableTensor(
                f"a value of {item.stop - item.start} bytes; at most {VALUE_NBYTES_MAX}"
            )
        else:
            leaves[key] = leaves_of_blob(store, item, folder + key, data)
    tree: dict[Any, Any] = nest(leaves, lambda key: metadata.paths.get(key, (key,)))
    tree.update(_rest(store, folder, tree, data, sizes))
    data.check(sizes)
    # Not before all of it is checked: a source never has half of a folder.
    into.tensors.update(data.tensors)
    return tree


def _rest(
    store: Store, folder: str, tree: Mapping[Any, Any], into: TreeData, sizes: dict[str, int]
) -> dict[Any, Any]:
    """What Lightning keeps next to a DCP checkpoint, in a file of torch.save: all but the sharded
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
    # The planner writes none where it did not flatten the state: keys are the paths then.
    for key, path in _dict_of(paths, "planner_data") if paths is not None else ():
        # By exact types below, since a bool is an int, too.
        whole = isinstance(path, (tuple, list)) and 0 < len(path) <= PATH_PARTS_MAX
        if not whole or not all(type(part) in (str, int) for part in path):
            raise Corrupt(f"planner_data: {path!r:.80} is no path")
        metadata.paths[key] = tuple(path)
    return metadata


def _dict_of(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, expected a dict")
    return value.items()


_Places = dict[tuple[str, Shape | None], Blob]


def _places(storage: Any, folder: str) -> _Places:
    places: _Places = {}
    for index, info in _dict_of(storage, "storage_data"):
        if not (isinstance(index, PickledObject) and isinstance(info, PickledObject)):
            raise Corrupt("storage_data: an entry that is none of DCP's file system storage")
        # An extension of DCP, such as compression, has changed the bytes.
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
            # The path comes from a stranger's file and must not lead out of the folder.
            check_key(name)
        except InvalidKeyError as error:
            raise Corrupt(f"storage_data: {error}") from error
        offset = index.field("offset")
        # Values have no offset, and neither have they several places.
        key = (fqn, None if offset is None else _shape(offset))
        places[key] = Blob(folder + name, start, start + nbytes)
    return places


def _place(places: _Places, key: str, offset: Shape | None) -> Blob:
    try:
        return places[key, offset]
    except KeyError:
        where = "" if offset is None else f" at {offset}"
        raise Corrupt(f"{key}: no entry has the place of its bytes{where}") from None


def _tensor(key: str, entry: PickledObject, places: _Places) -> DcpTensor:
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, PickledObject) else None
    # TensorProperties pickles itself as a tuple that begins with the dtype.
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Opaque):
        raise Corrupt(f"{key}: the metadata has no dtype for it")
    parts = []
    chunks = entry.field("chunks")
    for chunk in chunks if isinstance(chunks, list) else ():
        if not isinstance(chunk, PickledObject):
            raise Corrupt(f"{key}: a chunk that is none")
        offset, shape = _shape(chunk.field("offsets")), _shape(chunk.field("sizes"))
        parts.append((offset, shape, _place(places, key, offset)))
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
    items = [blob for tensor in metadata.tensors.values() for _, _, blob in tensor.parts]
    for item in (*items, *metadata.items.values()):
        needed[item.file] = max(needed.get(item.file, 0), item.stop)
    sizes = {}
    for file, stop in sorted(needed.items()):
        try:
            sizes[file] = store.info(file).nbytes
        except KeyNotFoundError:
            raise Corrupt(f"{store.url}/{file} is missing") from None
        if sizes[file] < stop:
            raise Corrupt(f"{store.url}/{file} has {sizes[file]} bytes, {stop} are needed")
    return sizes


def _add_chunks(
    store: Store, folder: str, tensors: Mapping[str, DcpTensor], data: TreeData
) -> None:
    """Find where the elements of every stored region of what is in `data` are."""
    wanted: dict[Blob, list[tuple[str, Shape, Shape]]] = {}
    for key, tensor in tensors.items():
        for offset, shape, blob in tensor.parts if folder + key in data.tensors else ():
            # An empty chunk, as of a rank without rows, lies nowhere.
            if 0 not in shape:
                wanted.setdefault(blob, []).append((key, offset, shape))
    for blob, opened in open_blobs(store, list(wanted), data.budget):
        for key, offset, shape in wanted[blob]:
            view, tensor = opened.tree, tensors[key]
            if not isinstance(view, TensorRef):
                raise Corrupt(f"{blob.file}: {key} is said to be there, and a {view!r:.60} is")
            if view.dtype != tensor.dtype or view.shape != shape:
                raise Corrupt(
                    f"{blob.file}: {key} has {view.dtype} {view.shape} there, the metadata says "
                    f"{tensor.dtype} {shape}"
                )
            chunk = chunk_of(view, opened, blob.file, offset, tensor.shape)
            data.tensors[folder + key].chunks.append(chunk)
        opened.close()
