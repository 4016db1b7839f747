"""Files of torch.save as sources: storages read where they lie, the pickle by our own reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.convert.sources.blobs import Blob
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.dcp import TreeData, leaves_of_blob, tree_source
from ckpt.convert.sources.source import FileSource, SourceTensor, check_chunks
from ckpt.errors import Corrupt, UnsupportedFormat
from storage import ByteRange, KeyNotFoundError, Store

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def open_torch_files(
    store: Store,
    names: Sequence[str],
    budget: MemoryBudget,
    parameter_names: Sequence[str] | None = None,
) -> FileSource:
    """The files of torch.save `names` of `store`; the trees of several are joined at their tops.

    Raises UnsupportedFormat for what torch wrote before version 1.6 and for TorchScript, Corrupt
    for what is no such file, and the store's errors.
    """
    data = TreeData({}, {}, budget)
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
    return tree_source(store, "file of torch.save", tree, data, parameter_names)


def read_torch_file(store: Store, name: str, data: TreeData) -> Any:
    """The tree in a file of torch.save with a `Leaf` for each tensor, whose chunks go into `data`.

    Raises like `open_torch_files`.
    """
    try:
        nbytes = store.info(name).nbytes
    except KeyNotFoundError:
        raise Corrupt(f"{store.url}/{name} is missing") from None
    _check_format(store, name, nbytes)
    known = set(data.chunks)
    tree = leaves_of_blob(store, Blob(name, 0, nbytes), name, data, is_outermost=True)
    for key in data.chunks.keys() - known:
        check_chunks(SourceTensor(key, *data.infos[key]), data.chunks[key], {name: nbytes})
    return tree


def _check_format(store: Store, name: str, nbytes: int) -> None:
    head = store.get(name, ByteRange(0, min(nbytes, 16)))
    if head[:4] == b"PK\x03\x04":
        return
    where = f"{store.url}/{name}"
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        raise UnsupportedFormat(
            f"{where}: the format of torch.save before version 1.6 (not a zip file), whose "
            "storages are inside pickles; load it with torch.load and save it again with torch.save"
        )
    raise Corrupt(f"{where} is not a file of torch.save")
