"""Folders with a file of torch.save for each rank: parts of DTensors, each of which says where it
belongs. Of what is the same on all ranks, the first rank's counts.

verl and SkyRL write `model_world_size_2_rank_0.pt` and `optim_world_size_2_rank_0.pt`,
torch_checkpointing `model_0.pt` and so on for each item, next to a pickle that says it once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckpt.convert.sources.blobs import Blob, Opened, open_blob
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.torch_pickle import ShardRef, TensorRef
from ckpt.convert.sources.tree import Leaf, TreeData, chunk_of, tree_source
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES

_FILE = re.compile(
    r"(?P<item>model|optim)_world_size_(?P<world>\d{1,7})_rank_(?P<rank>\d{1,7})\.pt"
)
_ITEM_FILE = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})\.pt")
_OF_ITEMS = "metadata.pkl"


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The state of all ranks. Raises Corrupt where a rank's file is missing."""
    has_items = _OF_ITEMS in place.top
    pattern = _ITEM_FILE if has_items else _FILE
    matches = [match for key in place.top if (match := pattern.fullmatch(key))]
    if has_items:
        worlds = {1 + max((int(match["rank"]) for match in matches), default=0)}
    elif len(worlds := {int(match["world"]) for match in matches}) > 1:
        raise UnsupportedFormat(f"{place.store.url}: files of worlds of {sorted(worlds)} ranks")
    data, tree, files = TreeData({}, place.budget), dict[str, Any](), dict[str, int]()
    for name in dict.fromkeys(match["item"] for match in matches):
        own = {int(match["rank"]): match[0] for match in matches if match["item"] == name}
        entry = name if has_items or name != "optim" else "optimizer"
        # Numbers in an optimizer mean nothing without names.
        if name == "optim" and not has_items and place.names is None:
            continue
        if missing := sorted({*range(*worlds)} - own.keys()):
            raise Corrupt(f"{place.store.url}: no {name} file of ranks {missing[:8]}")
        nodes = []
        for _, file in sorted(own.items()):
            files[file] = place.store.info(file).nbytes
            blob = Blob(file, 0, files[file])
            opened = open_blob(place.store, blob, place.budget, is_outermost=True)
            nodes.append((file, opened, opened.tree))
        tree[entry] = _joined(entry, nodes, data)
    if not tree:
        return None
    data.check(files)
    return FolderSource(tree_source(place.store, "files of ranks", tree, data, place.names), files)


FORMAT = Format(
    2,
    "a folder with a file of torch.save for each rank (verl, SkyRL, torch_checkpointing)",
    open_folder,
)


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
        return {key: _joined(f"{path}/{key}", own, data) for key, own in items.items()}
    if isinstance(first, TensorRef):
        # A plain tensor is the same on all ranks: the first rank's is taken and no other is
        # compared.
        first, nodes = ShardRef(first, first.shape, (0,) * len(first.shape)), nodes[:0]
    if not isinstance(first, ShardRef):
        return first
    parts = {first.offset: chunk_of(first.local, opened, file, first.offset, first.shape)}
    kind = first.local.dtype, first.shape
    for other, its, node in nodes[1:]:
        if not isinstance(node, ShardRef) or (node.local.dtype, node.shape) != kind:
            raise Corrupt(f"{other}: {path} is no part of what {file} has a part of")
        # Replicas have the same place; the first one counts.
        if node.offset not in parts:
            parts[node.offset] = chunk_of(node.local, its, other, node.offset, node.shape)
    chunks = [chunk for chunk in parts.values() if chunk.region.numel]
    data.add(path, *kind, chunks)
    return Leaf(path, DTYPES[first.local.dtype].is_float)
