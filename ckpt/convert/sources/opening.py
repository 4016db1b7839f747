"""From a url to a source, whatever format is there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

from ckpt.commit.log import FORMAT_KEY
from ckpt.commit.names import MANIFEST_NAME
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.dcp import (
    DATA_SUFFIX,
    LIGHTNING_REST,
    METADATA,
    OtherFiles,
    TreeData,
    dcp_source,
    open_dcp,
    read_folder,
    tree_source,
)
from ckpt.convert.sources.deepspeed import is_deepspeed, open_deepspeed, zero_files
from ckpt.convert.sources.native import native_source
from ckpt.convert.sources.safetensors_files import open_safetensors
from ckpt.convert.sources.source import CheckpointSource, FileSource
from ckpt.convert.sources.torch_file import SUFFIXES, open_torch_files, read_torch_file
from ckpt.convert.sources.torch_pickle import UnreadableTensor
from ckpt.convert.sources.tree import Leaf, name_tree
from ckpt.errors import NoCheckpoint, UnsupportedFormat
from ckpt.format.metadata_budget import NBYTES_MAX, MetadataBudget
from ckpt.layout.dtypes import DTYPES
from ckpt.state.values import references
from storage import Store, StoreLike, open_store
from storage.location import folder_of, url_of

FORMATS = (
    "one of our own roots or steps, a directory of torch.distributed.checkpoint, a file of "
    "torch.save (.pt, .pth, .bin, .ckpt), safetensors files with or without an index, a folder of "
    "DeepSpeed ZeRO"
)

LISTED_MAX = 10_000  # files of a folder that are looked at


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to look at a source. `step` and `attempt` are for roots of ours.

    `parameter_names` are the names of the parameters of optimizers that only number them, in the
    optimizer's order. `memory_bytes_max` is how much memory what describes the tensors may take,
    beside the bytes of tensors that are there (None: 64 MiB); of roots of ours nothing is counted.
    """

    step: SupportsIndex | None = None
    parameter_names: Sequence[str] | None = None
    memory_bytes_max: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    attempt: str = ""


def open_source(
    url: StoreLike,
    options: SourceOptions | None = None,
    open_store: Callable[..., Store] = open_store,
) -> CheckpointSource:
    """The checkpoint at `url`: a file or a directory, local or in an object store. A `Store` is a
    directory.

    Reads what describes it, and no tensor. Raises NoCheckpoint when nothing known is there, Corrupt
    when it contradicts itself, UnsupportedFormat when it cannot be read, and the store's errors.
    """
    options = options or SourceOptions()
    path = "" if isinstance(url, Store) else url_of(url)  # a caller's store is a folder
    name = path.rpartition("/")[2]
    is_file = is_file_name(name)
    if not is_file and os.path.isfile(path.removeprefix("file://")):
        raise NoCheckpoint(f"{path}: a file of no known format; known are {FORMATS}")
    store = open_store(folder_of(url) if is_file else url, **options.storage_options)
    try:
        return _open_file(store, name, options) if is_file else _open_folder(store, options)
    except BaseException:
        store.close()
        raise


def is_file_name(name: str) -> bool:
    """Whether a url that ends so is that of a file."""
    return name.endswith((".safetensors", ".safetensors.index.json", *SUFFIXES))


def _open_file(store: Store, name: str, options: SourceOptions) -> CheckpointSource:
    budget, names = MemoryBudget(options.memory_bytes_max), options.parameter_names
    if not store.exists(name):
        if store.exists(f"{name}/{METADATA}"):
            return open_dcp(store, budget, folder=f"{name}/", parameter_names=names)
        if store.exists(f"{name}.index.json"):
            return open_safetensors(store, f"{name}.index.json", budget)
        raise NoCheckpoint(f"{store.url}/{name} is not there")
    if name.endswith(SUFFIXES):
        return open_torch_files(store, [name], budget, names)
    return open_safetensors(store, name, budget)


class _FolderSource(NamedTuple):
    """A folder's source, and which of its files that is made of: names, or beginnings of them."""

    source: FileSource
    files: Collection[str] = ()
    folders: tuple[str, ...] = ()


def _open_folder(store: Store, options: SourceOptions) -> CheckpointSource:
    if store.exists(FORMAT_KEY) or store.exists(MANIFEST_NAME):
        nbytes_max = max(options.memory_bytes_max or 0, NBYTES_MAX)
        return native_source(store, options.step, options.attempt, MetadataBudget(nbytes_max))
    keys = [info.key for info in islice(store.list(""), LISTED_MAX)]
    opened = _read_folder(store, options, keys)
    opened.source.left_out = tuple(
        key
        for key in sorted(keys)
        if key not in opened.files and not key.startswith(opened.folders or "\0")
    )
    return opened.source


def _read_folder(store: Store, options: SourceOptions, keys: Sequence[str]) -> _FolderSource:
    """The source of what is in a folder of others. Raises like `open_source`."""
    budget, names = MemoryBudget(options.memory_bytes_max), options.parameter_names
    top = [key for key in keys if "/" not in key]
    if store.exists(METADATA):
        dcp = [key for key in top if key.endswith(DATA_SUFFIX) or key in (METADATA, LIGHTNING_REST)]
        return _FolderSource(open_dcp(store, budget, parameter_names=names), dcp)
    if is_deepspeed(keys):
        source = open_deepspeed(store, keys, budget)
        return _FolderSource(source, zero_files(keys, source))
    folder_keys = sorted(key.removesuffix(METADATA) for key in keys if key.endswith(f"/{METADATA}"))
    if folder_keys and all(folder.count("/") == 1 for folder in folder_keys):
        # Accelerate: pytorch_model_fsdp_0/ and optimizer_0/, one DCP directory for each.
        folders = {folder: read_folder(store, folder, budget) for folder in folder_keys}
        beside, files = schedulers(store, top, budget)
        source = dcp_source(store, folders, budget, names, beside)
        return _FolderSource(source, files, tuple(folder_keys))
    # Numbers in an optimizer mean nothing without names, and weights alone have names of their own.
    training = training_files(top) if names is not None else []
    if models := several_models(store, top, budget):
        sources = {entry: source for entry, (_, source) in models.items()}
        source = open_training(store, sources, training, budget, names)
        return _FolderSource(source, {*(file for file, _ in models.values()), *training})
    if (weights := _read_weights(store, top, budget, names)) is not None:
        if not training:
            return weights
        source = open_training(store, {"model": weights.source}, training, budget, names)
        return _FolderSource(source, {*weights.files, *training})
    _refuse(store, keys, top)
    raise NoCheckpoint(
        f"{store.url}: no checkpoint of a known format; known are {FORMATS}. It has "
        f"{', '.join(keys[:5]) or 'nothing'}"
    )


def _read_weights(
    store: Store, top: Sequence[str], budget: MemoryBudget, names: Sequence[str] | None
) -> _FolderSource | None:
    """The weights in files of safetensors or torch.save; None where there are none."""
    for index in ("model.safetensors.index.json", *top):
        if index in top and index.endswith(".safetensors.index.json"):
            source = open_safetensors(store, index, budget)
            return _FolderSource(source, {index, *source.files})
    if any(key.endswith(".safetensors") for key in top):
        weights = [key for key in top if key.endswith(".safetensors")]
        return _FolderSource(open_safetensors(store, "", budget), weights)
    if "pytorch_model.bin.index.json" in top:
        weight_map = json.loads(store.get("pytorch_model.bin.index.json")).get("weight_map", {})
        files = sorted(set(weight_map.values()))
        source = open_torch_files(store, files, budget, names)
        return _FolderSource(source, {"pytorch_model.bin.index.json", *files})
    if "pytorch_model.bin" in top:
        files = ["pytorch_model.bin"]
        return _FolderSource(open_torch_files(store, files, budget, names), files)
    return None


def _refuse(store: Store, keys: Sequence[str], top: Sequence[str]) -> None:
    """Raise for what is known and cannot be read, with the next move."""
    if any(key.startswith("__") and key.endswith(METADATA) for key in top):
        raise UnsupportedFormat(
            f"{store.url}: saved with use_collectives=False, each rank's metadata by itself; save "
            "with collectives, or load it with torch and save it with ckpt.save"
        )


# Folders of trainers: weights, and next to them optimizers, schedulers and loss scalers. Accelerate
# and the Trainer of transformers keep each in a file of torch.save: `optimizer.bin`,
# `scheduler.bin`, `scaler.pt`, and `optimizer_1.bin` for a second one. Together they are the nested
# state `{"model": ..., "optimizer": ..., "scheduler": ...}`.
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
