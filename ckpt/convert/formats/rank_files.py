"""Folders with a file of torch.save for each rank: parts of DTensors and of FSDP1's ShardedTensors,
each of which says where it belongs. Of what is the same on all ranks, the first rank's counts.

verl and SkyRL write `model_world_size_2_rank_0.pt` and `optim_world_size_2_rank_0.pt`, Accelerate
`pytorch_model_fsdp_rank0.bin`, others `rank_0.pt` and such names; torch_checkpointing `model_0.pt`
and so on for each item, next to a pickle that says it once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckpt.convert.formats.training import open_parts
from ckpt.convert.sources.blobs import Blob, Opened, open_blob
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.torch_pickle import ShardRef, TensorRef, UnreadableTensor
from ckpt.convert.sources.tree import FLAT, Leaf, TreeData, chunk_of
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from storage import ByteRange, Store

_FILE = re.compile(
    r"((?P<item>.+?)[-_.])??(world_size_(?P<world>\d{1,7})_)?rank[-_]?(?P<rank>\d{1,7})"
    r"\.(pt|pth|bin|ckpt|tar)"
)
_ITEM_FILE = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})(?P<world>)\.pt")
_OF_ITEMS = "metadata.pkl"
_ZIP = b"PK\x03\x04"  # what torch.save writes begins so
# What verl, SkyRL and Accelerate call the entries of a state.
_ENTRIES = {
    "optim": "optimizer",
    "optimizer_0": "optimizer",
    "pytorch_model_fsdp": "model",
    "pytorch_model_fsdp_0": "model",
}


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The state of all ranks, and what else of a training lies next to their files. None where no
    file has parts of tensors; raises Corrupt where a rank's file is missing.
    """
    has_items = _OF_ITEMS in place.top
    pattern = _ITEM_FILE if has_items else _FILE
    matches = {key: match for key in place.top if (match := pattern.fullmatch(key))}
    # With a world in their names: verl's, whose third kind has what each rank has of its own.
    verl = {key: m for key, m in matches.items() if m["world"] and m["item"] in ("model", "optim")}
    ranks: dict[str, dict[int, str]] = {}
    for key, match in (verl or {key: m for key, m in matches.items() if not m["world"]}).items():
        ranks.setdefault(match["item"] or "", {})[int(match["rank"])] = key
    worlds, is_known = {int(match["world"]) for match in verl.values()}, bool(verl or has_items)
    if len(worlds) > 1:
        raise UnsupportedFormat(f"{place.store.url}: files of worlds of {sorted(worlds)} ranks")
    world = sum(worlds) or 1 + max((max(own) for own in ranks.values()), default=0)
    data, tree, files = TreeData({}, place.budget), dict[str, Any](), dict[str, int]()
    for name, own in ranks.items():
        # Numbers in an optimizer mean nothing without names.
        if name == "optim" and not has_items and place.names is None:
            continue
        # Others have such names, too: logs, and what a rank has pickled of its own.
        if not (is_known or any(_is_zip(place.store, file) for file in own.values())):
            continue
        nodes: list[tuple[str, Opened, Any]] = []
        for _, file in sorted(own.items()):
            nbytes = place.store.info(file).nbytes
            opened = open_blob(place.store, Blob(file, 0, nbytes), place.budget, is_outermost=True)
            if not (nodes or is_known or name == "optim" or _has_parts(opened.tree)):
                break
            nodes.append((file, opened, opened.tree))
            files[file] = nbytes
        if nodes and (missing := sorted({*range(world)} - own.keys())):
            raise Corrupt(f"{place.store.url}: no {name} file of ranks {missing[:8]}")
        if nodes:
            entry = name if has_items else _ENTRIES.get(name, name)
            tree[entry] = _joined(entry, nodes, data)
    if not tree:
        return None
    data.check(files)
    # One file per rank, of whatever name, has all of a state.
    (first, whole), *others = tree.items()
    if not others and type(whole) is dict and first not in ("model", "optimizer") and not has_items:
        tree = whole
    return open_parts(place, "files of ranks", tree, data, list(files))


FORMAT = Format(
    2,
    "a folder with a file of torch.save for each rank (FSDP1, verl, torch_checkpointing)",
    open_folder,
)


def _is_zip(store: Store, file: str) -> bool:
    is_long = store.info(file).nbytes >= len(_ZIP)
    return is_long and store.get(file, ByteRange(0, len(_ZIP))) == _ZIP


def _has_parts(node: Any) -> bool:
    if type(node) in (dict, list, tuple):
        return any(map(_has_parts, node.values() if type(node) is dict else node))
    return isinstance(node, ShardRef)


def _joined(path: str, nodes: Sequence[tuple[str, Opened, Any]], data: TreeData) -> Any:
    """What all ranks have at a place, with a `Leaf` for each tensor; `nodes` are the file of each,
    where its storages are, and what is there. Raises Corrupt where only some have a tensor.
    """
    file, opened, first = nodes[0]
    if type(first) is dict:
        for other, _, node in nodes[1:]:
            if type(node) is not dict or node.keys() != first.keys():
                raise Corrupt(f"{other}: {path} has other names than in {file}")
        items = {key: [(f, o, node[key]) for f, o, node in nodes] for key in first}
        for key in _views([node for _, _, node in nodes]):
            reason = "it is what a rank has of its flat parameter, and that has no names"
            items[key] = [(file, opened, UnreadableTensor(reason))]
        return {key: _joined(f"{path}/{key}", own, data) for key, own in items.items()}
    if isinstance(first, TensorRef):
        for other, _, node in nodes[1:]:
            if type(node) is not TensorRef or node.shape != first.shape:
                return UnreadableTensor(f"it has another shape in {other} than in {file}")
        # A plain tensor is the same on all ranks: the first rank's is taken, and no other's bytes
        # are compared.
        first, nodes = ShardRef(first, first.shape, (0,) * len(first.shape)), nodes[:0]
    if not isinstance(first, ShardRef):
        return first
    kind, parts = (first.local.dtype, first.shape), {}
    for other, its, node in nodes or [(file, opened, first)]:
        if not isinstance(node, ShardRef) or (node.local.dtype, node.shape) != kind:
            raise Corrupt(f"{other}: {path} is no part of what {file} has a part of")
        # Replicas have the same place; the first one counts.
        if node.offset not in parts and 0 not in node.local.shape:
            parts[node.offset] = chunk_of(node.local, its, other, node.offset, node.shape)
    data.add(path, *kind, list(parts.values()))
    return Leaf(path, DTYPES[first.local.dtype].is_float)


def _views(nodes: Sequence[dict[Any, Any]]) -> set[Any]:
    """The names of plain tensors that are in the memory of a flat parameter, on any rank."""
    names = set()
    for node in nodes:
        flat = [
            one for key, one in node.items() if str(key).endswith(FLAT) and type(one) is ShardRef
        ]
        held = {one.local.storage.key for one in flat}
        names |= {
            k for k, one in node.items() if type(one) is TensorRef and one.storage.key in held
        }
    return names
