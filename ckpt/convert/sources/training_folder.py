"""Folders of trainers: weights, and beside them optimizers, schedulers and loss scalers.

Accelerate and the Trainer of transformers keep each in a file of torch.save: `optimizer.bin`,
`scheduler.bin`, `scaler.pt`, and `optimizer_1.bin` for a second one. Together they are the nested
state `{"model": ..., "optimizer": ..., "scheduler": ...}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.dcp import OtherFiles, TreeData, tree_source
from ckpt.convert.sources.safetensors_files import open_safetensors
from ckpt.convert.sources.source import FileSource
from ckpt.convert.sources.torch_file import open_torch_files, read_torch_file
from ckpt.convert.sources.torch_pickle import UnreadableTensor
from ckpt.convert.sources.tree import Leaf, name_tree
from ckpt.layout.dtypes import DTYPES
from ckpt.state.values import references
from storage import Store

_BESIDE = re.compile(r"((?:optimizer|scheduler|scaler)(?:_\d+)?)\.(?:bin|pt)")
_SCHEDULER = re.compile(r"(scheduler(?:_\d+)?)\.(?:bin|pt)")
_MODEL = re.compile(r"(?:(model(?:_\d+)?)\.safetensors|pytorch_(model(?:_\d+)?)\.bin)")


def open_training(
    store: Store,
    models: Mapping[str, FileSource],
    files: Sequence[str],
    budget: MemoryBudget,
    parameter_names: Sequence[str] | None,
) -> FileSource:
    """The training of `models`, by the names of their entries, and of what is in `files` beside
    them.

    Raises Corrupt and UnsupportedFormat as the readers of the files do.
    """
    data = TreeData({}, {}, budget)
    tree: dict[str, Any] = {entry: _leaves(source, entry, data) for entry, source in models.items()}
    for name in files:
        tree[_entry(_BESIDE, name)] = read_torch_file(store, name, data)
    return tree_source(store, "folder of a training", tree, data, parameter_names)


def several_models(
    store: Store, top: Sequence[str], budget: MemoryBudget
) -> dict[str, tuple[str, FileSource]]:
    """The files and sources of models by their entries, where a folder has `model.safetensors`,
    `model_1.safetensors` and so on; nothing where it has one model.
    """
    names = [name for name in top if _MODEL.fullmatch(name)]
    for suffix in (".safetensors", ".bin"):
        several = sorted(name for name in names if name.endswith(suffix))
        if len(several) > 1:
            return {_entry(_MODEL, n): (n, _open_model(store, n, budget)) for n in several}
    return {}


def _open_model(store: Store, name: str, budget: MemoryBudget) -> FileSource:
    if name.endswith(".safetensors"):
        return open_safetensors(store, name, budget)
    return open_torch_files(store, [name], budget)


def schedulers(
    store: Store, top: Sequence[str], budget: MemoryBudget
) -> tuple[OtherFiles, list[str]]:
    """The schedulers in files beside DCP's directories, and those files.

    One that holds what is no plain value is left out, not refused: the rest does not need it.
    """
    beside, files = OtherFiles({}, TreeData({}, {}, budget)), []
    for name in sorted(name for name in top if _SCHEDULER.fullmatch(name)):
        data = TreeData({}, {}, budget)
        tree = read_torch_file(store, name, data)
        entry = _entry(_SCHEDULER, name)
        if not name_tree({entry: tree}).refused:
            beside.entries[entry] = tree
            beside.data.chunks.update(data.chunks)
            beside.data.infos.update(data.infos)
            files.append(name)
    return beside, files


def training_files(top: Sequence[str]) -> list[str]:
    """The files among `top` that have what a trainer keeps beside weights."""
    return [name for name in sorted(top) if _BESIDE.fullmatch(name)]


def _entry(pattern: re.Pattern[str], name: str) -> str:
    matched = pattern.fullmatch(name)
    assert matched is not None
    return next(entry for entry in matched.groups() if entry)


def _leaves(source: FileSource, where: str, data: TreeData) -> Mapping[str, Any]:
    """The state dict of a model as a tree of leaves, whose chunks go into `data`."""
    entries: dict[str, Any] = {}
    for fqn, info in source.contents.tensors.items():
        key = f"{where}/{fqn}"
        data.infos[key] = (info.dtype, info.shape)
        data.chunks[key] = list(source.chunks[fqn].chunks)
        entries[fqn] = Leaf(key, DTYPES[info.dtype].is_float)
    for alias, fqn in source.contents.aliases.items():
        entries[alias] = entries[fqn]
    for fqn, value in source.contents.values.items():
        has_tensors = bool(references(value))
        entries[fqn] = UnreadableTensor("it is a value with tensors") if has_tensors else value
    for fqn, refusal in source.contents.refused.items():
        entries[fqn] = UnreadableTensor(refusal.reason)
    return entries
