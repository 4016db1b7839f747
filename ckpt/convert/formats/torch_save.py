"""Files of torch.save as sources: storages read where they lie, the pickle by our own reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.convert.formats.safetensors import files_of_index
from ckpt.convert.sources.blobs import Blob
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.source import FileSource
from ckpt.convert.sources.torch_pickle import SUFFIXES
from ckpt.convert.sources.tree import TreeData, leaves_of_blob, tree_source
from ckpt.errors import Corrupt, UnsupportedFormat
from storage import ByteRange, KeyNotFoundError, Store

WEIGHTS, OF_ACCELERATE = "pytorch_model.bin", "pytorch_model_fsdp.bin"


def open_file(place: SourcePlace, name: str) -> FileSource | None:
    """The file, if it is there."""
    return open_files(place, [name]) if place.keys and name.endswith(SUFFIXES) else None


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The weights that `transformers` once wrote, in one file or in those of an index."""
    index = f"{WEIGHTS}.index.json"
    files = [name for name in (WEIGHTS, OF_ACCELERATE) if name in place.keys][:1]
    if index in place.keys:
        files = sorted(set(files_of_index(place.store, index, place.budget).values()))
        return FolderSource(open_files(place, files), {index, *files})
    return FolderSource(open_files(place, files), files) if files else None


FORMAT = Format(
    4, "a file of torch.save (.pt, .pth, .bin, .ckpt)", open_folder, open_file, SUFFIXES
)


def open_files(place: SourcePlace, names: Sequence[str]) -> FileSource:
    """The files of torch.save `names`; the trees of several are joined at their tops.

    Raises UnsupportedFormat for what torch wrote before version 1.6 and for TorchScript, Corrupt
    for what is no such file, and the store's errors.
    """
    store, data = place.store, TreeData({}, place.budget)
    tree: Any = {}
    for name in names:
        entries = read_torch_file(store, name, data)
        if len(names) == 1:
            tree = entries
            continue
        if not isinstance(entries, dict) or (
            twice := sorted(tree.keys() & entries.keys(), key=str)
        ):
            raise UnsupportedFormat(
                f"{store.url}/{name}: no state dict, or one with names of another file"
                + (f": {twice[0]!r}" if isinstance(entries, dict) else "")
            )
        tree.update(entries)
    if not isinstance(tree, (dict, list, tuple)):
        tree = {"value": tree}
    return tree_source(place, "file of torch.save", tree, data)


def read_torch_file(store: Store, name: str, into: TreeData) -> Any:
    """The tree in a file of torch.save with a `Leaf` for each tensor, which go `into` the data of a
    source. Raises like `open_files`.
    """
    where = f"{store.url}/{name}"
    try:
        nbytes = store.info(name).nbytes
    except KeyNotFoundError:
        raise Corrupt(f"{where} is missing") from None
    head = store.get(name, ByteRange(0, min(nbytes, 16)))
    # These begin a pickle of protocol 2 to 4, which is how the old format begins.
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        raise UnsupportedFormat(
            f"{where}: the format of torch.save before version 1.6 (not a zip file), whose "
            "storages are inside pickles; load it with torch.load and save it again with torch.save"
        )
    # How a zip file begins.
    if head[:4] != b"PK\x03\x04":
        raise Corrupt(f"{where} is not a file of torch.save")
    # Of its own, and merged when it was checked.
    data = TreeData({}, into.budget)
    tree = leaves_of_blob(store, Blob(name, 0, nbytes), name, data, is_outermost=True)
    data.check({name: nbytes})
    into.tensors.update(data.tensors)
    return tree
