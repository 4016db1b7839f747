"""Folders of DeepSpeed, of ZeRO and universal ones, as sources: the float32 weights that its
optimizers keep, and their other state.

The files are pickles with objects of DeepSpeed's own classes among tensors. The restricted reader
makes nothing of those objects, and nothing is needed of them: where a parameter lies in the flat
partitions follows from its shape and the number of ranks (as in DeepSpeed's `zero_to_fp32.py`).

Stages 1 and 2 join the ranks' partitions of a group into one flat tensor and lay parameters out in
it one after the other. Stage 3 cuts every parameter into equal parts, one per rank, padded. What an
optimizer keeps for a flat tensor, such as its moments, has its shape and is laid out like it.

A universal folder has a file of torch.save for each parameter and state, `zero/<name>/exp_avg.pt`:
with the parameter's shape, or flat, of stage 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckpt.convert.sources.blobs import Blob, Opened, open_blob, open_blobs
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.opening import FolderSource, Format, SourcePlace
from ckpt.convert.sources.source import (
    Chunk,
    FileSource,
    Refusal,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.convert.sources.torch_pickle import TensorRef
from ckpt.convert.sources.tree import bare_names, name_tree
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Shape, Span
from storage import Store

STATES_MAX = 100  # of one parameter

OPTIM = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
UNIVERSAL = re.compile(r"((?:[^/]+/)?)zero/[^/]+/fp32\.pt")
MODEL = re.compile(r"(?:.*/)?(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")


class FlatPartition(NamedTuple):
    """A flat tensor of a rank: `numel` elements of `dtype` in `file` from byte `start` on."""

    file: str
    start: int
    dtype: str
    numel: int
    is_scalar: bool = False


class _Rank(NamedTuple):
    """What one rank's optimizer file holds: the flat tensor of each group, and in `own` what the
    optimizer keeps for it, by name: tensors of that shape, and some without dims. `options` are
    those of each group of parameters. Both are None in a form that is not known.
    """

    is_cut: bool  # each parameter into equal parts: stage 3
    flats: tuple[FlatPartition, ...]
    own: Sequence[Mapping[str, FlatPartition]] | None
    options: Sequence[Mapping[str, Any]] | None
    gaps: Any = None  # in stages 1 and 2: for each group, elements behind each of its parameters


def open_folder(place: SourcePlace) -> FolderSource | None:
    """The ZeRO checkpoint in a folder, and the files that are read or say where to look.

    The optimizer's files are among them where their state is in the source. Otherwise only their
    weights are taken, and the rest is left out.
    """
    keys = place.keys
    if not any(OPTIM.fullmatch(key) for key in keys):
        folders = {match[1] for key in keys if (match := UNIVERSAL.fullmatch(key))}
        return _universal(place, folders) if folders else None
    source = _opened(place.store, keys, place.budget)
    whole = any(info.kind is Kind.OPTIMIZER for info in source.contents.tensors.values())
    files = [
        key
        for key in keys
        if MODEL.fullmatch(key) or key == "latest" or (whole and OPTIM.fullmatch(key))
    ]
    return FolderSource(source, files)


FORMAT = Format(1, "a folder of DeepSpeed ZeRO, or a universal one", open_folder)


def _opened(store: Store, keys: Sequence[str], budget: MemoryBudget) -> FileSource:
    """The float32 weights of a ZeRO checkpoint, by their names, and the state of its optimizer as
    "optimizer", where it is laid out like them: a tag's folder, or the folder with `latest`.

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
    # Each of them describes the whole model, so the first one is enough.
    models = sorted(k for k in keys if k.startswith(folder) and MODEL.fullmatch(k))
    if not models:
        raise Corrupt(f"{store.url}: no mp_rank_00_model_states.pt next to the optimizer files")
    sizes = {key: store.info(key).nbytes for key in (*optim.values(), models[0])}
    ranks = [_rank(store, optim[rank], sizes, budget) for rank in range(len(optim))]
    opened = open_blob(store, Blob(models[0], 0, sizes[models[0]]), budget, is_outermost=True)
    model = _ModelStates(models[0], opened, store.url)
    weights = dict(_laid_out(model.groups, ranks))
    return _source(store, model, weights, *_zero_states(model, ranks), sizes)


def _universal(place: SourcePlace, folders: Collection[str]) -> FolderSource:
    """What `ds_to_universal` has written. Raises like `_opened`."""
    store, budget, folder = place.store, place.budget, min(folders)
    if len(folders) > 1:
        raise UnsupportedFormat(
            f"{store.url} holds {len(folders)} universal checkpoints; name the folder of one, such "
            f"as {store.url}/{folder}"
        )
    # Stage 3 writes model states per data-parallel rank, with that rank in front of the name.
    starts = "", "zero_pp_rank_0_"
    names = (f"{folder}{start}mp_rank_00_model_states.pt" for start in starts)
    key = next(filter(store.exists, names), None)
    if key is None:
        raise Corrupt(f"{store.url}: no mp_rank_00_model_states.pt next to {folder}zero")
    sizes = {key: store.info(key).nbytes}
    model = _ModelStates(
        key, open_blob(store, Blob(key, 0, sizes[key]), budget, is_outermost=True), store.url
    )
    shapes = {name: shape for group in model.groups for name, shape in group.items()}
    top = f"{folder}zero/"
    # Thousands of files, one for each parameter and state. More than fit the names are refused.
    every = islice(store.list(top), STATES_MAX * len(shapes) + 2)
    sizes |= {info.key: info.nbytes for info in every}
    first = f"{top}{next(iter(shapes), '')}/"
    files = [file.removeprefix(first) for file in sizes if file.startswith(first)]
    states = {"fp32", *(file.removesuffix(".pt") for file in files if file.endswith(".pt"))}
    wanted = {f"{top}{name}/{state}.pt": (name, state) for name in shapes for state in states}
    rest = f"{top}optimizer_state.pt"
    if others := {file for file in sizes if file.endswith("/fp32.pt")} - wanted.keys():
        raise UnsupportedFormat(
            f"{store.url}: {min(others)} and {len(others) - 1} others are of parameters that {key} "
            "does not name; it was one of several pipeline stages, which are not read"
        )
    if missing := {rest, *wanted} - sizes.keys():
        raise Corrupt(f"{store.url}: a file is missing: {min(missing)}")
    sizes = {key: sizes[key], rest: sizes[rest], **{file: sizes[file] for file in wanted}}
    budget.allow(sum(sizes.values()) - sizes[key])
    placed = _placed_states(place, wanted, sizes, shapes)
    whole = open_blob(store, Blob(rest, 0, sizes[rest]), budget)
    of_optimizer = _dict(_dict(whole.tree).get("optimizer_state_dict", whole.tree))
    counts = next(iter(_dict(of_optimizer.get("state")).values()), None)
    for state, ref in _dict(counts).items():  # of stage 3: steps, the same for all
        if isinstance(ref, TensorRef) and not ref.shape and state not in states:
            chunk = Chunk(Span(0, 1), rest, whole.start_of(ref))
            for name in placed:
                placed[name][state] = (), ref.dtype, [chunk]

    weights = {name: own.pop("fp32") for name, own in placed.items()}
    source = _source(store, model, weights, placed, of_optimizer.get("param_groups"), sizes)
    return FolderSource(source, {key, rest, *wanted})


def _placed_states(
    place: SourcePlace,
    wanted: Mapping[str, tuple[str, str]],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Shape],
) -> dict[str, dict[str, _Placed]]:
    """What is in the files `wanted`, by parameter and state."""
    placed: dict[str, dict[str, _Placed]] = {name: {} for name in shapes}
    blobs = [Blob(file, 0, sizes[file]) for file in wanted]
    for blob, opened in open_blobs(place.store, blobs, place.budget):
        name, state = wanted[blob.file]
        ref = _dict(opened.tree).get("param", opened.tree)
        if not isinstance(ref, TensorRef) or not ref.is_row_major:
            raise UnsupportedFormat(f"{place.store.url}/{blob.file}: no tensor of a parameter")
        is_flat = len(ref.shape) == 1 and ref.shape[0] == math.prod(shapes[name])
        span, start = Span(0, math.prod(ref.shape)), opened.start_of(ref)
        shape = shapes[name] if is_flat else ref.shape
        placed[name][state] = shape, ref.dtype, [Chunk(span, blob.file, start)] * bool(span.numel)
        opened.close()
    return placed


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
    state = _dict(_dict(opened.tree).get("optimizer_state_dict"))
    # Not by `zero_stage`, which newer versions pickle as an enum of their own.
    is_cut = "fp32_flat_groups" in state
    groups = state.get("fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, TensorRef) and group.is_row_major for group in groups
    ):
        raise UnsupportedFormat(f"{store.url}/{key}: no flat tensors of ZeRO stage 1, 2 or 3")
    flats = [_flat_of(key, opened, group) for group in groups]
    own = state.get("optimizer_state_dict" if is_cut else "base_optimizer_state")
    known = _optimizer_of(key, opened, own, flats, state.get("group_paddings")) or (None, None)
    opened.close()
    return _Rank(is_cut, tuple(flats), known[0], known[1], state.get("param_alignment_paddings"))


def _flat_of(key: str, opened: Opened, ref: TensorRef) -> FlatPartition:
    start, numel = opened.start_of(ref), math.prod(ref.shape)
    return FlatPartition(key, start, ref.dtype, numel, ref.shape == ())


def _optimizer_of(
    key: str, opened: Opened, state: Any, flats: Sequence[FlatPartition], padding: Any
) -> tuple[list[dict[str, FlatPartition]], list[Any]] | None:
    """What an optimizer keeps next to the weights; None where it is in no form that is known."""
    own, groups = (_dict(state).get(name) for name in ("state", "param_groups"))
    if not isinstance(own, dict) or not isinstance(groups, list):
        return None
    if not all(isinstance(g, dict) and all(isinstance(n, str) for n in g) for g in groups):
        return None
    # torch numbers parameters group by group; each is one flat tensor here.
    # By repr, because keys of a stranger's pickle may be of types that do not compare.
    if sorted(own, key=repr) != sorted(range(len(flats)), key=repr):
        return None
    by_flat, more = [], dict(enumerate(padding if isinstance(padding, list) else ()))
    for number, flat in enumerate(flats):
        tensors = {}
        for name, item in _dict(own[number]).items():
            if not isinstance(item, TensorRef) or not item.is_row_major or type(name) is not str:
                return None
            # Weights may be stored without the padding of a partition, and the rest with it.
            if math.prod(item.shape) - flat.numel not in (0, more.get(number)) and item.shape != ():
                return None
            tensors[name] = _flat_of(key, opened, item)
        by_flat.append(tensors)
    return by_flat, groups


class _ModelStates:
    """The content of the file of model states: shapes of the parameters, buffers, shared names."""

    def __init__(self, key: str, opened: Opened, url: str) -> None:
        self.key = key
        self.opened = opened
        tree = opened.tree
        if not isinstance(tree, dict):
            raise Corrupt(f"{url}/{key}: a {type(tree).__name__}, expected a dict")
        groups = tree.get("param_shapes")
        # Older versions write the shapes of a single group without a list.
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
        self.scheduler = tree.get("lr_scheduler")
        step = tree.get("global_steps")
        self.step = step if type(step) is int and step >= 0 else None


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


# Shape and dtype of a tensor, and where it lies.
_Placed = tuple[Shape, str, list[Chunk]]


def _source(
    store: Store,
    model: _ModelStates,
    weights: Mapping[str, _Placed],
    states: Mapping[str, Mapping[str, _Placed]],
    options: Any,
    sizes: Mapping[str, int],
) -> FileSource:
    """The weights, and by their names the `states` of an optimizer whose groups have `options`:
    nothing of it where these are not known.
    """
    placed = dict(weights)
    kinds = dict.fromkeys(weights, Kind.PARAMETER)
    refused: dict[str, Refusal] = {}
    # Partitions hold what is trained; all else lies in the model states.
    for name in (*sorted(model.buffers), *sorted(model.frozen)):
        ref = model.module.get(name)
        shape = model.frozen.get(name, ref.shape if isinstance(ref, TensorRef) else ())
        if not isinstance(ref, TensorRef) or ref.shape != shape or not ref.is_row_major:
            refused[name] = Refusal("its own tensor is not in the model states", True)
            continue
        kinds[name] = Kind.BUFFER if name in model.buffers else Kind.PARAMETER
        span = Span(0, math.prod(shape))
        chunks = [Chunk(span, model.key, model.opened.start_of(ref))] if span.numel else []
        placed[name] = shape, ref.dtype, chunks
    bare = bare_names([*placed, *model.shared])
    tensors: dict[str, SourceTensor] = {}
    places: dict[str, list[Chunk]] = {}

    def add(name: str, fqn: str, kind: Kind, one: _Placed) -> None:
        shape, dtype, places[fqn] = one
        tensors[fqn] = SourceTensor(fqn, dtype, shape, kind)
        check_chunks(tensors[fqn]._replace(fqn=name), places[fqn], sizes)

    for name, one in sorted(placed.items()):
        add(name, bare[name], kinds[name], one)
    values = _optimizer_values(model, options, bare)
    for name, own in states.items() if values else ():
        for state, one in own.items():
            fqn = f"optimizer.state.{bare[name]}.{state}"
            add(fqn, fqn, Kind.OPTIMIZER, one)
    contents = SourceContents(
        tensors,
        values=values | ({} if model.step is None else {"global_steps": model.step}),
        aliases={bare[a]: bare[n] for a, n in model.shared.items() if n in placed},
        refused=refused,
        modules=("",),
    )
    return FileSource(store, "DeepSpeed checkpoint", contents, places, sum(sizes.values()))


def _zero_states(
    model: _ModelStates, ranks: Sequence[_Rank]
) -> tuple[dict[str, dict[str, _Placed]], Any]:
    """The optimizer's state by parameter, and the options of its groups; nothing of what is in no
    form that is known.
    """
    owned = [rank.own for rank in ranks if rank.own is not None]
    names = [
        {name: flat.is_scalar for name, flat in flats.items()} for own in owned for flats in own
    ]
    # All partitions have to keep the same state: otherwise some of it would have holes.
    if len(owned) != len(ranks) or any(one != names[0] for one in names):
        return {}, None
    states: dict[str, dict[str, _Placed]] = {name: {} for group in model.groups for name in group}
    for name, is_scalar in names[0].items() if names else ():
        if is_scalar:  # a count of steps, the same for all
            flat = owned[0][0][name]
            for own in states.values():
                own[name] = (), flat.dtype, [Chunk(Span(0, 1), flat.file, flat.start)]
            continue
        like = [
            rank._replace(flats=tuple(flats[name] for flats in own))
            for rank, own in zip(ranks, owned, strict=True)
        ]
        for param, one in _laid_out(model.groups, like):
            states[param][name] = one
    return states, ranks[0].options


def _optimizer_values(model: _ModelStates, options: Any, bare: Mapping[str, str]) -> dict[str, Any]:
    """The groups and the scheduler; nothing without groups that are known."""
    if not isinstance(options, (list, tuple)) or not all(isinstance(one, dict) for one in options):
        return {}
    # A parameter of the model's under this name would be taken for the optimizer's.
    if len(options) != len(model.groups) or any(name.startswith("optimizer.") for name in bare):
        return {}
    groups = [
        {
            **{key: item for key, item in one.items() if key != "params"},
            "params": [bare[param] for param in group],
        }
        for one, group in zip(options, model.groups, strict=True)
    ]
    named = name_tree({"param_groups": groups, "lr_scheduler": model.scheduler})
    # Options that are no plain values are an optimizer's own business; without one there is none.
    if any(fqn.startswith("param_groups") for fqn in (*named.refused, *named.tensors)):
        return {}
    values = {"optimizer.param_groups": groups}
    if model.scheduler and "lr_scheduler" in named.values and not named.refused:
        values["lr_scheduler"] = model.scheduler
    return values


def _laid_out(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[_Rank]
) -> Iterator[tuple[str, _Placed]]:
    """Where the flat tensors of `ranks` have each parameter of `groups`. Of stages 1 and 2, each
    group is one flat tensor, cut into a partition per rank.
    """
    if ranks[0].is_cut:
        yield from _in_parts(groups, ranks)
        return
    gaps = ranks[0].gaps or [[0] * len(group) for group in groups]
    sizes = [len([n for n in row if type(n) is int and n >= 0]) for row in gaps]
    if sizes != list(map(len, groups)) or any(len(rank.flats) != len(groups) for rank in ranks):
        raise Corrupt(f"{len(groups)} groups of parameters, other numbers of partitions")
    for number, group in enumerate(groups):
        line = [rank.flats[number] for rank in ranks]
        position = 0
        for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
            numel = math.prod(shape)
            yield name, (shape, line[0].dtype, _along(line, position, numel, 0))
            position += numel + gap


def _in_parts(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[_Rank]
) -> Iterator[tuple[str, _Placed]]:
    """Stage 3: each parameter has a part of the same size on every rank, the last one padded."""
    position = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        chunks = []
        for number, rank in enumerate(ranks):
            # Below 1 on the last ranks of a small parameter, which have nothing of it but padding.
            count = min(part, numel - number * part)
            if count > 0:
                chunks += _along(rank.flats, position, count, number * part)
        yield name, (shape, ranks[0].flats[0].dtype, chunks)
        # With the padding: on every rank the next parameter begins behind a full part.
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
