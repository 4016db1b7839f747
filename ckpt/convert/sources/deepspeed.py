"""Shard folders of DeepSpeed ZeRO as sources: the float32 weights that its optimizers keep.

The files are pickles with objects of DeepSpeed's own classes among tensors. The restricted reader
makes nothing of those objects, and nothing is needed of them: where a parameter lies in the flat
partitions follows from its shape and the number of ranks (as in DeepSpeed's `zero_to_fp32.py`).

Stages 1 and 2 join the ranks' partitions of a group into one flat tensor and lay parameters out in
it one after the other. Stage 3 cuts every parameter into equal parts, one per rank, padded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.convert.sources.blobs import Blob, Opened, open_blob
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.source import (
    Chunk,
    FileSource,
    Refusal,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.convert.sources.torch_pickle import TensorRef
from ckpt.convert.sources.tree import bare_names
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Shape, Span
from storage import Store

OPTIM = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:.*/)?(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")


class FlatPartition(NamedTuple):
    """A flat tensor of a rank: `numel` elements of `dtype` in `file` from byte `start` on."""

    file: str
    start: int
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank's optimizer file holds: the flat tensor of each group."""

    stage: int
    flats: tuple[FlatPartition, ...]


def is_deepspeed(keys: Sequence[str]) -> bool:
    """Whether a folder with these files is one of DeepSpeed ZeRO."""
    return any(OPTIM.fullmatch(key) for key in keys)


def zero_files(keys: Sequence[str]) -> list[str]:
    """Those of `keys` that `open_deepspeed` reads, or that say where to look.

    The optimizer's files are not among them, though their weights are taken: what an optimizer has
    beside those is left out.
    """
    return [key for key in keys if MODEL.fullmatch(key) or key == "latest"]


def open_deepspeed(store: Store, keys: Sequence[str], budget: MemoryBudget) -> FileSource:
    """The float32 weights of a ZeRO checkpoint: a tag's folder, or the folder with `latest`.

    Raises UnsupportedFormat for tensor parallelism and other layouts that do not follow from
    shapes, Corrupt when files are missing or contradict each other, and the store's errors.
    """
    folder = _folder(store, keys)
    optim = {
        int(match[1]): key
        for key in keys
        if key.startswith(folder) and (match := OPTIM.fullmatch(key)) and match[2] == "00"
    }
    if any((m := OPTIM.fullmatch(key)) and m[2] != "00" for key in keys):
        raise UnsupportedFormat(
            f"{store.url}: ZeRO with tensor parallelism; how its tensors are cut is known to the "
            "model's code alone. Convert it with DeepSpeed's universal checkpoint, then export"
        )
    if sorted(optim) != list(range(len(optim))):
        raise Corrupt(f"{store.url}: optimizer files of ranks {sorted(optim)}; some are missing")
    models = sorted(k for k in keys if k.startswith(folder) and MODEL.fullmatch(k))
    if not models:
        raise Corrupt(f"{store.url}: no mp_rank_00_model_states.pt beside the optimizer files")
    sizes = {key: store.info(key).nbytes for key in (*optim.values(), models[0])}
    ranks = [_rank(store, optim[rank], sizes, budget) for rank in range(len(optim))]
    opened = open_blob(store, Blob(models[0], 0, sizes[models[0]]), budget, is_outermost=True)
    return _source(store, _ModelStates(models[0], opened, store.url), ranks, sizes)


def _folder(store: Store, keys: Sequence[str]) -> str:
    """The tag's folder: "" or with a closing slash."""
    folders = {key.rpartition("/")[0] for key in keys if OPTIM.fullmatch(key)}
    if "latest" in keys:
        tag = store.get("latest").decode().strip()
        if tag in folders:
            return f"{tag}/"
    if len(folders) != 1:
        raise UnsupportedFormat(
            f"{store.url} holds {len(folders)} checkpoints of DeepSpeed and no file `latest` that "
            f"names one; name the folder of one, such as {store.url}/{min(folders)}"
        )
    folder = folders.pop()
    return f"{folder}/" if folder else ""


def _rank(store: Store, key: str, sizes: Mapping[str, int], budget: MemoryBudget) -> _Rank:
    opened = open_blob(store, Blob(key, 0, sizes[key]), budget, is_outermost=True)
    state = opened.tree.get("optimizer_state_dict") if isinstance(opened.tree, dict) else None
    stage = state.get("zero_stage") if isinstance(state, dict) else None
    if not isinstance(state, dict) or stage not in (1, 2, 3):
        raise UnsupportedFormat(f"{store.url}/{key}: no optimizer state of ZeRO stage 1, 2 or 3")
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = state.get(name)
    if not isinstance(groups, list) or not all(isinstance(g, TensorRef) for g in groups):
        raise UnsupportedFormat(f"{store.url}/{key}: it has no {name}, a list of flat tensors")
    flats = []
    for group in groups:
        if not group.is_row_major:
            raise UnsupportedFormat(f"{store.url}/{key}: a flat tensor with gaps")
        numel = math.prod(group.shape)
        flats.append(FlatPartition(key, opened.start_of(group), group.dtype, numel))
    opened.close()
    return _Rank(int(stage), tuple(flats))


class _ModelStates:
    """The content of the file of model states: shapes of the parameters, buffers, shared names."""

    def __init__(self, key: str, opened: Opened, url: str) -> None:
        self.key = key
        self.opened = opened
        tree = opened.tree
        if not isinstance(tree, dict):
            raise Corrupt(f"{url}/{key}: a {type(tree).__name__}, expected a dict")
        groups = tree.get("param_shapes")
        if isinstance(groups, dict):
            groups = [groups]
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise UnsupportedFormat(f"{url}/{key}: no param_shapes; saved by an old DeepSpeed?")
        self.groups: list[dict[str, Shape]] = [
            {str(name): tuple(shape) for name, shape in group.items()} for group in groups
        ]
        self.module = _dict(tree.get("module"))
        self.buffers = {str(name) for name in tree.get("buffer_names") or ()}
        frozen = _dict(tree.get("frozen_param_shapes"))
        self.frozen = {str(name): tuple(shape) for name, shape in frozen.items()}
        shared = tree.get("shared_params")
        pairs = shared.items() if isinstance(shared, dict) else (shared or ())
        self.shared = {str(alias): str(name) for alias, name in pairs}
        step = tree.get("global_steps")
        self.step = step if type(step) is int and step >= 0 else None


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _source(
    store: Store, model: _ModelStates, ranks: Sequence[_Rank], sizes: Mapping[str, int]
) -> FileSource:
    place = _in_groups if ranks[0].stage in (1, 2) else _in_parts
    chunks: dict[str, list[Chunk]] = {}
    tensors: dict[str, SourceTensor] = {}
    for name, shape, dtype, tensor_chunks in place(model.groups, ranks):
        tensors[name] = SourceTensor(name, dtype, shape, Kind.PARAMETER)
        chunks[name] = tensor_chunks
    refused: dict[str, Refusal] = {}
    for name in (*sorted(model.buffers), *sorted(model.frozen)):
        ref = model.module.get(name)
        shape = model.frozen.get(name, ref.shape if isinstance(ref, TensorRef) else ())
        if not isinstance(ref, TensorRef) or ref.shape != shape or not ref.is_row_major:
            refused[name] = Refusal("its own tensor is not in the model states", True)
            continue
        kind = Kind.BUFFER if name in model.buffers else Kind.PARAMETER
        tensors[name] = SourceTensor(name, ref.dtype, ref.shape, kind)
        span = Span(0, math.prod(ref.shape))
        start = model.opened.start_of(ref) if span.numel else 0
        chunks[name] = [Chunk(span, model.key, start)] if span.numel else []
    bare = bare_names([*tensors, *model.shared])
    for name, info in tensors.items():
        check_chunks(info, chunks[name], sizes)
    contents = SourceContents(
        {bare[name]: info._replace(fqn=bare[name]) for name, info in sorted(tensors.items())},
        values={} if model.step is None else {"global_steps": model.step},
        aliases={bare[a]: bare[n] for a, n in model.shared.items() if n in tensors},
        refused=refused,
        modules=("",),
    )
    placed = {bare[name]: tensor_chunks for name, tensor_chunks in chunks.items()}
    return FileSource(store, "DeepSpeed ZeRO checkpoint", contents, placed)


_Placed = Iterator[tuple[str, Shape, str, list[Chunk]]]


def _in_groups(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[_Rank]) -> _Placed:
    """Stages 1 and 2: each group is one flat tensor, cut into a partition per rank."""
    if any(len(rank.flats) != len(groups) for rank in ranks):
        raise Corrupt(f"{len(groups)} groups of parameters, other numbers of partitions")
    for number, group in enumerate(groups):
        line = [rank.flats[number] for rank in ranks]
        position = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            yield name, shape, line[0].dtype, _along(line, position, numel, 0)
            position += numel


def _in_parts(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[_Rank]) -> _Placed:
    """Stage 3: each parameter has a part of the same size on every rank, the last one padded."""
    position = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        chunks = []
        for number, rank in enumerate(ranks):
            count = min(part, numel - number * part)
            if count > 0:
                chunks += _along(rank.flats, position, count, number * part)
        yield name, shape, ranks[0].flats[0].dtype, chunks
        position += part


def _along(line: Sequence[FlatPartition], position: int, numel: int, first: int) -> list[Chunk]:
    """Elements `position` to `position + numel` of the flats one after the other, as the elements
    of a tensor from `first` on.
    """
    chunks = []
    start = 0
    for flat in line:
        low, high = max(position, start), min(position + numel, start + flat.numel)
        if low < high:
            byte = flat.start + (low - start) * DTYPES[flat.dtype].itemsize
            span = Span(first + low - position, first + high - position)
            chunks.append(Chunk(span, flat.file, byte))
        start += flat.numel
    return chunks
