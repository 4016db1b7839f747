"""Formats that keep nested states: files of torch.save, and DCP directories, with a pickle of
torch's own classes, `.metadata`: `torch.distributed.checkpoint.load` reads nothing else.

Our states have flat names; here they become the nested dicts that torch's own functions use:
`{"model": {name: tensor}, "optim": {"state": {parameter: {...}}, "param_groups": ...}}`.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt.convert.sources.source import (
    DCP_RECORD,
    CheckpointSource,
    NativeSource,
    SourceContents,
    SourceTensor,
)
from ckpt.convert.sources.torch_pickle import (
    CallOut,
    StorageOut,
    TensorOut,
    named_object,
    write_tree,
)
from ckpt.convert.targets.files import (
    ExportSelection,
    Output,
    PlannedFile,
    ZipBuilding,
    known_file,
    torch_file,
)
from ckpt.errors import CheckpointError
from ckpt.layout.descriptions import TYPE_KEY, is_description
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.region import Shape, Span
from ckpt.state.names import split_state_name
from ckpt.state.optimizer_kinds import NUMBER_OF_SUFFIX, NUMBERED, state_key
from ckpt.state.values import (
    TENSOR_KEY,
    all_groups,
    is_form,
    is_reference,
    references,
    renamed_tree,
)

FILE_NBYTES = 1 << 30
VERSION = "1.0.0"  # of DCP's own format, as FileSystemWriter of torch 2.13 writes it
# Stated, because Python's default changes with its version, and the bytes identify an export.
PROTOCOL = 4
PathOf = tuple[Any, ...]
_POINTERS = {
    "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_bsr": ("crow_indices", "col_indices"),
    "torch.sparse_csc": ("ccol_indices", "row_indices"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices"),
}
# By dtype, the storage that torch has for it, and the dtype of its integers.
_QUANTIZED = {
    "qint8": ("torch.QInt8Storage", "int8"),
    "quint8": ("torch.QUInt8Storage", "uint8"),
    "qint32": ("torch.QInt32Storage", "int32"),
}
# By scheme, the dtypes of scales and zero points. torch.save refuses the symmetric ones.
_PER_CHANNEL = {
    "torch.per_channel_affine": ("float64", "int64"),
    "torch.per_channel_affine_float_qparams": ("float32", "float32"),
}


def nested_files(
    source: CheckpointSource, chosen: ExportSelection, format: str, name: str, *, whole: bool
) -> tuple[list[PlannedFile], tuple[str, ...]]:
    """The files of an export in `format`, "torch" or "dcp", in writing order, and names that have
    no place in them. `whole` states are nested, models are one dict of tensors.
    """
    contents = source.contents
    numbers = _numbers(source, [output.tensor for output in chosen.outputs]) if whole else {}
    outputs = [output for output in chosen.outputs if output.name not in numbers]
    values = {**chosen.values, **numbers}
    path_of = _Paths(contents).of if whole else lambda fqn: (fqn,)
    number_of = {output.name: number for number, output in enumerate(outputs)}
    for tied, held in chosen.tied.items():
        number_of[tied] = number_of[held]
    left_out = tuple(sorted({name for own in contents.per_rank for name in own})) if whole else ()
    if format == "torch":
        values.update(_composites(contents, outputs, chosen.tied))
        tree = _tree(outputs, values, number_of, path_of)
        return [torch_file(name, tree, outputs)], left_out
    return _dcp_files(outputs, values, number_of, path_of), left_out


class FlatCheckpoint(NamedTuple):
    """A checkpoint under the keys that DCP has for a nested state: values by key, and the fqn and
    the path of each key.
    """

    values: dict[str, Any]
    names: dict[str, str]
    paths: dict[str, PathOf]


def flat_state(source: NativeSource) -> FlatCheckpoint:
    """What DCP's planner would have made of the state of a checkpoint of ours."""
    contents, record = source.contents, source.checkpoint.values.get(DCP_RECORD)
    if record is not None:
        values = {key: value for own in contents.per_rank for key, value in own.items()}
        recorded = {key: tuple(path) for key, path in record["paths"].items()}
        values.update(record["values"])
        inside = {name for value in values.values() for name in references(value)}
        names = {fqn: fqn for fqn in contents.tensors if fqn not in inside}
        return FlatCheckpoint(values, names, recorded)
    paths = _Paths(contents)
    flat, inside = FlatCheckpoint({}, {}, {}), set[str]()
    places = {name: paths.of(name) for name in (*contents.tensors, *contents.aliases)}
    numbers = _numbers(source, list(contents.tensors.values()))
    for name, value in {**contents.values, **numbers}.items():
        for path, leaf in _leaves(paths.of(name), value):
            if is_reference(leaf):
                places[leaf[TENSOR_KEY]] = path
            else:
                key = ".".join(map(str, path))
                flat.values[key], flat.paths[key] = leaf, path
                inside.update(references(leaf))
    for name, path in places.items():
        if name not in numbers and name not in inside:
            key = ".".join(map(str, path))
            flat.names[key], flat.paths[key] = contents.aliases.get(name, name), path
    return flat


def _numbers(source: CheckpointSource, tensors: Sequence[SourceTensor]) -> dict[str, Any]:
    """Numbers that we keep as 0-dim tensors of marked names, as the numbers that they were."""
    numbers = {}
    for tensor in tensors:
        mark = tensor.fqn.find("~")
        suffix = tensor.fqn[mark:] if mark >= 0 else ""
        if suffix in NUMBER_OF_SUFFIX and tensor.shape == ():
            numbers[tensor.fqn] = NUMBER_OF_SUFFIX[suffix](source.read(tensor.fqn).item())
    return numbers


class _Paths:
    """Where a flat name stands in the nested state."""

    def __init__(self, contents: SourceContents) -> None:
        # The longest first: a module may lie inside of another.
        self.modules = sorted(contents.modules, key=len, reverse=True)
        self.params = {
            path: {name for group in groups for name in group["params"]}
            for path, groups in all_groups(contents.values)
        }

    def of(self, fqn: str) -> PathOf:
        for path, params in self.params.items():
            prefix = f"{path}.state." if path else "state."
            if fqn.startswith(prefix) and (parts := split_state_name(fqn[len(prefix) :], params)):
                param, name = parts
                key = name.partition("~")[0]
                own = state_key(key + NUMBERED) if name.startswith(key + NUMBERED) else key
                return (*_parts(path), "state", param, own)
        for path in self.modules:
            if not path or fqn.startswith(f"{path}."):
                return (*_parts(path), fqn[len(path) + 1 :] if path else fqn)
        return _parts(fqn)


def _parts(path: str) -> PathOf:
    return tuple(path.split(".")) if path else ()


def _tree(
    outputs: Sequence[Output],
    values: Mapping[str, Any],
    number_of: Mapping[str, int],
    path_of: Callable[[str], PathOf],
) -> Any:
    tree: dict[Any, Any] = {}
    out = [TensorOut(str(n), o.dtype.name, o.tensor.shape) for n, o in enumerate(outputs)]
    by_name = {name: out[number] for name, number in number_of.items()}
    referred: set[int] = set()
    for fqn, value in values.items():
        # What a value holds stands in it, and not a second time under its own name.
        referred.update(number_of[name] for name in references(value))
        _put(tree, path_of(fqn), _with_outputs(value, by_name))
    for name, number in number_of.items():
        if number not in referred:
            _put(tree, path_of(name), out[number])
    return tree


def _with_outputs(value: Any, by_name: Mapping[str, TensorOut]) -> Any:
    """`value` with the tensors that it refers to. Composites that torch.save has a form for are
    calls, others stay dicts, which torch can read.
    """
    if is_reference(value):
        return by_name[value[TENSOR_KEY]]
    if is_description(value) and (made := _composite_out(value, by_name)) is not None:
        return made
    if isinstance(value, dict):
        return {key: _with_outputs(item, by_name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_outputs(item, by_name) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _composites(
    contents: SourceContents, outputs: Sequence[Output], tied: Mapping[str, str]
) -> dict[str, Any]:
    """The descriptions, with names of outputs, of composites that a file of torch.save has a form
    for, by their names there; further names of theirs, too.
    """
    name_of = {output.tensor.fqn: output.name for output in outputs}
    of_output = {o.name: TensorOut(o.name, o.dtype.name, o.tensor.shape) for o in outputs}
    made: dict[str, Any] = {}
    for fqn, value in contents.values.items():
        if not is_description(value) or not set(references(value)) <= name_of.keys():
            continue
        renamed = renamed_tree(value, name_of.__getitem__)
        names = {_outer(name_of[part], part, fqn) for part in references(value)}
        if len(names) != 1 or _composite_out(renamed, of_output) is None:
            continue
        (name,) = names
        if name is None:  # renamed so that nothing says what the tensor itself is called
            continue
        made[name] = renamed
        for alias, held in tied.items():
            if held in references(renamed) and (outer := _outer(alias, held, name)) is not None:
                made[outer] = renamed
    return made


def _outer(part: str, known: str, outer: str) -> str | None:
    """What the tensor is called that a component `part` is of, as `known` is of `outer`."""
    suffix = known.removeprefix(outer)
    return part.removesuffix(suffix) if part.endswith(suffix) else None


def _put(tree: dict[Any, Any], path: PathOf, item: Any) -> None:
    if not path:
        tree.update(item)
        return
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise CheckpointError(f"{'.'.join(map(str, path))}: a part of its name is a value too")
    node[path[-1]] = item


# DCP ----------------------------------------------------------------------------------------


def _dcp_files(
    outputs: Sequence[Output],
    values: Mapping[str, Any],
    number_of: Mapping[str, int],
    path_of: Callable[[str], PathOf],
) -> list[PlannedFile]:
    places = dict[int, list[PathOf]]()
    for name, number in number_of.items():
        places.setdefault(number, []).append(path_of(name))
    leaves: list[tuple[PathOf, Any]] = []
    for fqn, value in values.items():
        for leaf_path, leaf in _leaves(path_of(fqn), value):
            if is_reference(leaf):
                # A tensor inside of a value stands there alone, and not under its own name.
                places[number_of[leaf[TENSOR_KEY]]] = [leaf_path]
            else:
                leaves.append((leaf_path, leaf))
    building = DcpBuilding()
    for number, output in enumerate(outputs):
        building.add_tensor(output, places.get(number, ()))
    for path, leaf in leaves:
        building.add_value(path, leaf)
    return building.files()


def _leaves(path: PathOf, value: Any) -> Iterator[tuple[PathOf, Any]]:
    """A value as DCP's planner flattens it: dicts always, lists with dicts or tensors in them."""
    if is_reference(value):
        yield path, value
    elif isinstance(value, dict) and not is_form(value):
        for key, item in value.items():
            # DCP's planner makes text of every key.
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and not _is_leaf(value):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    return not isinstance(value, list) or all(_is_leaf(item) for item in value)


# Sparse and quantized tensors ---------------------------------------------------------------------

# torch.save writes them as calls of torch's own functions; components lie next to the pickle as
# other tensors do. What `torch.load(weights_only=True)` does not make anew bit for bit has no such
# form, and stays the components that it consists of.


def _composite_out(described: Mapping[str, Any], outputs: Mapping[str, TensorOut]) -> Any:
    """The call that makes the tensor of a description, over `outputs` by name; None without one."""
    parts = described["components"]
    if not all(is_reference(item) and item[TENSOR_KEY] in outputs for item in parts.values()):
        return None
    components = {name: outputs[item[TENSOR_KEY]] for name, item in parts.items()}
    kind, context = described[TYPE_KEY], described["context"]
    shape = tuple(described["shape"])
    size = CallOut("torch.Size", (shape,))
    try:
        if kind == "torch.quantized":
            return _quantized(str(described["dtype"]), shape, components, context)
        if kind == "torch.sparse_coo":
            both = components["indices"], components["values"]
            return _sparse(kind, (*both, size, context["coalesced"]))
        if kind in _POINTERS:
            names = (*_POINTERS[kind], "values")
            return _sparse(kind, (*(components[name] for name in names), size))
    except KeyError:
        return None  # damaged: the components say what there is
    return None


def _sparse(layout: str, data: tuple[Any, ...]) -> CallOut:
    kind = CallOut("torch.serialization._get_layout", (layout,))
    return CallOut("torch._utils._rebuild_sparse_tensor", (kind, data))


def _quantized(
    dtype: str, shape: tuple[int, ...], components: Mapping[str, TensorOut], context: Any
) -> CallOut | None:
    if dtype not in _QUANTIZED:
        return None
    storage, integer = _QUANTIZED[dtype]
    memory, scheme = components["int_repr"], str(context["scheme"])
    if memory.dtype != integer:
        return None
    quantizer: tuple[Any, ...]
    if scheme == "torch.per_tensor_affine":
        quantizer = float(context["scale"]), int(context["zero_point"])
    elif scheme in _PER_CHANNEL:
        tables = components["scales"], components["zero_points"]
        if tuple(table.dtype for table in tables) != _PER_CHANNEL[scheme]:
            return None
        quantizer = (*tables, context["axis"])
    else:
        return None
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    hooks = CallOut("collections.OrderedDict", ())
    held = StorageOut(storage, memory.key, math.prod(shape))
    arguments = (held, 0, shape, strides, (named_object(scheme), *quantizer), False, hooks)
    return CallOut("torch._utils._rebuild_qtensor", arguments)


class DcpBuilding:
    """A directory in the making; a tensor larger than a file is cut by rows. Paths are those of the
    nested state.
    """

    def __init__(self) -> None:
        self._done: list[PlannedFile] = []
        self._open = ZipBuilding()
        self._stored: dict[str, Any] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    def add_tensor(self, output: Output, paths: Sequence[tuple[Any, ...]]) -> None:
        """Its bytes, under all the names that it has."""
        shape, itemsize = output.tensor.shape, output.dtype.itemsize
        row_numel = math.prod(shape[1:]) if shape else 1
        rows = shape[0] if shape else 1
        # One row at least, however long it is.
        step = max(1, FILE_NBYTES // max(row_numel * itemsize, 1))
        chunks, places = [], []
        for first in range(0, max(rows, 1), step):
            count = min(step, rows - first)
            part: Shape = (count, *shape[1:]) if shape else ()
            offset: Shape = (first, *(0,) * (len(shape) - 1)) if shape else ()
            span = Span(first * row_numel, (first + count) * row_numel)
            pickled = write_tree(TensorOut("0", output.dtype.name, part))
            places.append((offset, self._add(pickled, [("0", output, span)])))
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(part)))
        for path in paths:
            properties = dcp.TensorProperties(dtype=torch_dtype(output.dtype.name))
            key = self._key(path)
            self._stored[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [*chunks])
            for number, (offset, place) in enumerate(places):
                # `number` is a hint where to look in `chunks`; two indexes that differ in it are
                # equal.
                self._places[dcp.MetadataIndex(key, offset, number)] = place

    def add_value(self, path: tuple[Any, ...], value: Any) -> None:
        """A value; after all tensors."""
        key = self._key(path)
        self._stored[key] = dcp.BytesStorageMetadata()
        self._places[dcp.MetadataIndex(key)] = self._add(write_tree(value), [])

    def files(self) -> list[PlannedFile]:
        """All data files, then `.metadata`, which makes them a checkpoint."""
        metadata = dcp.Metadata(
            self._stored,
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=dcp.StorageMeta(),
        )
        if hasattr(metadata, "version"):  # torch 2.6 has none
            metadata.version = VERSION
        self._close()
        return [*self._done, known_file(".metadata", pickle.dumps(metadata, protocol=PROTOCOL))]

    def _key(self, path: tuple[Any, ...]) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key

    def _add(self, pickled: bytes, data: Sequence[tuple[str, Output, Span]]) -> _StorageInfo:
        nbytes = sum(span.numel * output.dtype.itemsize for _, output, span in data)
        if self._open.nbytes + nbytes > FILE_NBYTES:
            self._close()
        return _StorageInfo(self._name, *self._open.add(pickled, data))

    @property
    def _name(self) -> str:
        # As the first file of a rank is called: readers only follow the metadata.
        return f"__{len(self._done)}_0.distcp"

    def _close(self) -> None:
        if self._open.nbytes:
            self._done.append(self._open.file(self._name))
            self._open = ZipBuilding()
