"""Folders of trainers: weights, and next to them optimizers, schedulers and loss scalers.

Accelerate and the Trainer of transformers keep each in a file of torch.save: `optimizer.bin`,
`scheduler.bin`, `scaler.pt`, and `optimizer_1.bin` for a second one. Together they are the nested
state `{"model": ..., "optimizer": ..., "scheduler": ...}`. Of FSDP, Accelerate keeps a DCP
directory each for model and optimizer, `pytorch_model_fsdp_0/` and `optimizer_0/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt.convert.formats.dcp import METADATA, read_folder
from ckpt.convert.formats.torch_save import read_torch_file
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace, formats
from ckpt.convert.sources.source import FileSource
from ckpt.convert.sources.torch_pickle import UnreadableTensor
from ckpt.convert.sources.tree import Leaf, TreeData, name_tree, tree_source
from ckpt.errors import UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.state.values import references

_BESIDE = re.compile(r"((?:optimizer|scheduler|scaler)(?:_\d+)?)\.(?:bin|pt)")
_SCHEDULER = re.compile(r"(scheduler(?:_\d+)?)\.(?:bin|pt)")
_OF_ACCELERATE = re.compile(r"(?:optimizer|pytorch_model_fsdp)_\d+/")
_MODELS = re.compile(r"(model(?:_\d+)?)\.safetensors"), re.compile(r"pytorch_(model(?:_\d+)?)\.bin")


def open_folder(place: SourcePlace) -> FolderSource | None:
    """What a trainer has left in a folder; None where that is weights alone."""
    folders = _dcp_folders(place)
    if folders and all(folder.count("/") == 1 for folder in folders):
        return open_parts(place, "DCP checkpoint", {}, TreeData({}, place.budget), [])
    # Numbers in an optimizer mean nothing without names, and weights alone have names of their own.
    beside = {} if place.names is None else _matches(_BESIDE, place.top)
    for pattern in _MODELS:
        if len(files := _matches(pattern, place.top)) > 1:
            # Without the names of an optimizer's parameters: these files have weights alone.
            bare = place._replace(options=replace(place.options, parameter_names=None))
            models = {entry: _open_file(bare, file) for file, entry in files.items()}
            return FolderSource(_source(place, models, beside), {*files, *beside})
    # Only by formats that come after this one, which would find the same folder again.
    if beside and (weights := place.opened(FORMAT.order)) is not None:
        source = _source(place, {"model": weights.source}, beside)
        return FolderSource(source, {*weights.files, *beside})
    return None


FORMAT = Format(2, "", open_folder)


def _matches(pattern: re.Pattern[str], names: Sequence[str]) -> dict[str, str]:
    """Those of `names` that match, with the entries of a state that they are."""
    each = ((name, pattern.fullmatch(name)) for name in names)
    return {name: matched[1] for name, matched in each if matched}


def _open_file(place: SourcePlace, name: str) -> FileSource:
    there = place._replace(keys=[name])
    each = (one.open_file(there, name) for one in formats())
    return next(source for source in each if source is not None)


def _dcp_folders(place: SourcePlace) -> list[str]:
    return sorted(key.removesuffix(METADATA) for key in place.keys if key.endswith(f"/{METADATA}"))


def open_parts(
    place: SourcePlace, kind: str, trees: dict[Any, Any], data: TreeData, files: list[str]
) -> FolderSource:
    """`trees`, which are of `files`, and those of DCP directories as one source; the state of each
    stands at its top level, and so do those schedulers in files next to them that hold only plain
    values: the rest needs none.
    """
    store, every = place.store, _dcp_folders(place)
    folders = [one for one in every if not trees or _OF_ACCELERATE.fullmatch(one)]

    def add(entries: Mapping[Any, Any]) -> None:
        if both := [key for key in entries if key in trees]:
            raise UnsupportedFormat(f"{store.url}: two of its directories have {both[0]!r}")
        trees.update(entries)

    for folder in folders:
        add(read_folder(store, folder, data))
    beside = [name for name in place.top if name not in files]
    for name, entry in _matches(_SCHEDULER, beside).items():
        own = TreeData({}, place.budget)
        tree = read_torch_file(store, name, own)
        if not name_tree({entry: tree}).refused:
            add({entry: tree})
            data.tensors.update(own.tensors)
            files.append(name)
    source = tree_source(place, kind, trees, data)
    return FolderSource(source, files, tuple(folders))


def _source(
    place: SourcePlace, models: Mapping[str, FileSource], beside: Mapping[str, str]
) -> FileSource:
    """The training of `models`, by the names of their entries, and of what is in files `beside`
    them.
    """
    data = TreeData({}, place.budget)
    tree: dict[str, Any] = {entry: _leaves(source, entry, data) for entry, source in models.items()}
    for name, entry in beside.items():
        tree[entry] = read_torch_file(place.store, name, data)
    return tree_source(place, "folder of a training", tree, data)


def _leaves(source: FileSource, where: str, data: TreeData) -> Mapping[str, Any]:
    """The state dict of a model as a tree of leaves, whose tensors go into `data`."""
    entries: dict[str, Any] = {}
    contents = source.contents
    for fqn, info in contents.tensors.items():
        key = f"{where}/{fqn}"
        data.add(key, info.dtype, info.shape, list(source.chunks[fqn].chunks))
        entries[fqn] = Leaf(key, DTYPES[info.dtype].is_float)
    entries |= {alias: entries[fqn] for alias, fqn in contents.aliases.items()}
    for fqn, value in contents.values.items():
        has_tensors = bool(references(value))
        entries[fqn] = UnreadableTensor("it is a value with tensors") if has_tensors else value
    for fqn, refusal in contents.refused.items():
        entries[fqn] = UnreadableTensor(refusal.reason)
    return entries
