"""Formats that keep nested states: files of torch.save, and DCP directories.

Our states have flat names; here they become the nested dicts that torch's own functions use:
`{"model": {name: tensor}, "optim": {"state": {parameter: {...}}, "param_groups": ...}}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt.convert.sources.native import DCP_RECORD, NativeSource
from ckpt.convert.sources.source import CheckpointSource, SourceContents, SourceTensor
from ckpt.convert.sources.torch_pickle import TensorOut, write_tree
from ckpt.convert.targets.dcp_metadata import DcpEntry, DcpPart, DcpValue, encode_metadata
from ckpt.convert.targets.files import Output, PlannedFile, ZipBuilding, known_file, torch_file
from ckpt.convert.targets.pickled_composites import composite_out
from ckpt.errors import CheckpointError
from ckpt.layout.descriptions import is_description
from ckpt.layout.region import Shape, Span
from ckpt.state.names import split_state_name
from ckpt.state.optimizer_kinds import NUMBER_OF_SUFFIX
from ckpt.state.values import TENSOR_KEY, is_reference, references, renamed_tree

DCP_FILE_NBYTES = 1 << 30
PathOf = tuple[Any, ...]


class Nested(NamedTuple):
    """Files in writing order, and names that have no place in them."""

    files: list[PlannedFile]
    left_out: tuple[str, ...]


def nested_files(
    source: CheckpointSource, chosen: Any, format: str, name: str, *, whole: bool
) -> Nested:
    """The files of an export in `format`, "torch" or "dcp". `whole` states are nested, models are
    one dict of tensors.
    """
    contents = source.contents
    numbers = _numbers(source, [output.tensor for output in chosen.outputs]) if whole else {}
    outputs = [output for output in chosen.outputs if output.name not in numbers]
    values = {**chosen.values, **numbers}
    paths = _Paths(contents) if whole else None
    number_of = {output.name: number for number, output in enumerate(outputs)}
    for tied, held in chosen.tied.items():
        number_of[tied] = number_of[held]
    left_out = tuple(sorted({name for own in contents.per_rank for name in own})) if whole else ()
    entries = [
        ((fqn,) if paths is None else paths.of(fqn), number) for fqn, number in number_of.items()
    ]
    if format == "torch":
        values.update(_composites(contents, outputs, chosen.tied))
        tree = _tree(entries, outputs, values, (number_of, paths))
        return Nested([torch_file(name, tree, outputs)], left_out)
    return Nested(_dcp_files(entries, outputs, values, (number_of, paths)), left_out)


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
        names = {fqn: fqn for fqn in contents.tensors}
        return FlatCheckpoint({**values, **record["values"]}, names, recorded)
    paths = _Paths(contents)
    flat = FlatCheckpoint({}, {}, {})
    places = {name: paths.of(name) for name in (*contents.tensors, *contents.aliases)}
    numbers = _numbers(source, list(contents.tensors.values()))
    for name, value in {**contents.values, **numbers}.items():
        for path, leaf in _leaves(paths.of(name), value):
            if is_reference(leaf):
                places[leaf[TENSOR_KEY]] = path
            else:
                key = ".".join(map(str, path))
                flat.values[key], flat.paths[key] = leaf, path
    for name, path in places.items():
        if name not in numbers:
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
        self.modules = sorted(contents.modules, key=len, reverse=True)
        self.params: dict[str, set[str]] = {}
        for fqn, value in contents.values.items():
            if fqn.rpartition(".")[2] == "param_groups" and isinstance(value, list):
                path = fqn.removesuffix("param_groups").rstrip(".")
                self.params[path] = {name for group in value for name in group.get("params", ())}

    def of(self, fqn: str) -> PathOf:
        for path, params in self.params.items():
            prefix = f"{path}.state." if path else "state."
            if fqn.startswith(prefix) and (parts := split_state_name(fqn[len(prefix) :], params)):
                param, name = parts
                return (*_parts(path), "state", param, name.partition("~")[0])
        for path in self.modules:
            if not path or fqn.startswith(f"{path}."):
                return (*_parts(path), fqn[len(path) + 1 :] if path else fqn)
        return _parts(fqn)


# The number of the output that has the tensor of a name, tied ones too; None where names are flat.
_Numbered = tuple[Mapping[str, int], _Paths | None]


def _parts(path: str) -> PathOf:
    return tuple(path.split(".")) if path else ()


def _tree(
    entries: Sequence[tuple[PathOf, int]],
    outputs: Sequence[Output],
    values: Mapping[str, Any],
    naming: _Numbered,
) -> Any:
    tree: dict[Any, Any] = {}
    number_of, paths = naming
    out = [TensorOut(str(n), o.dtype.name, o.tensor.shape) for n, o in enumerate(outputs)]
    by_name = {name: out[number] for name, number in number_of.items()}
    referred: set[int] = set()
    for fqn, value in values.items():
        referred.update(number_of[name] for name in references(value))
        path = paths.of(fqn) if paths is not None else (fqn,)
        _put(tree, path, _with_outputs(value, by_name))
    for path, number in entries:
        if number not in referred:
            _put(tree, path, out[number])
    return tree


def _with_outputs(value: Any, by_name: Mapping[str, TensorOut]) -> Any:
    """`value` with the tensors that it refers to. Composites that torch.save has a form for are
    calls, others stay dicts, which torch can read.
    """
    if is_reference(value):
        return by_name[value[TENSOR_KEY]]
    if is_description(value) and (made := composite_out(value, by_name)) is not None:
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
        if len(names) != 1 or composite_out(renamed, of_output) is None:
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
    entries: Sequence[tuple[PathOf, int]],
    outputs: Sequence[Output],
    values: Mapping[str, Any],
    naming: _Numbered,
) -> list[PlannedFile]:
    """Data files of about a GiB, then `.metadata`, which makes them a checkpoint."""
    building = _DcpBuilding()
    parts = [building.add_tensor(output) for output in outputs]
    number_of, paths = naming
    tensor_entries: list[DcpEntry] = []
    places = dict[int, list[PathOf]]()
    for path, number in entries:
        places.setdefault(number, []).append(path)
    leaves: list[tuple[PathOf, Any]] = []
    for fqn, value in values.items():
        path = paths.of(fqn) if paths is not None else (fqn,)
        for leaf_path, leaf in _leaves(path, value):
            if is_reference(leaf):
                places[number_of[leaf[TENSOR_KEY]]] = [leaf_path]
            else:
                leaves.append((leaf_path, leaf))
    for number, output in enumerate(outputs):
        for path in places.get(number, ()):
            tensor_entries.append(
                DcpEntry(path, output.dtype.name, output.tensor.shape, parts[number])
            )
    value_entries = [DcpValue(path, building.add_value(leaf)) for path, leaf in leaves]
    metadata = encode_metadata(tensor_entries, value_entries)
    return [*building.files(), known_file(".metadata", metadata)]


def _leaves(path: PathOf, value: Any) -> Iterator[tuple[PathOf, Any]]:
    """A value as DCP's planner flattens it: dicts always, lists with dicts or tensors in them."""
    if is_reference(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
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


class _DcpBuilding:
    """Data files in the making; a tensor larger than a file is cut by rows."""

    def __init__(self) -> None:
        self._done: list[PlannedFile] = []
        self._open = ZipBuilding()

    @property
    def _name(self) -> str:
        # As the first file of a rank is called: readers only follow the metadata.
        return f"__{len(self._done)}_0.distcp"

    def add_tensor(self, output: Output) -> tuple[DcpPart, ...]:
        """Where the tensor's regions will be."""
        shape = output.tensor.shape
        itemsize = output.dtype.itemsize
        row_numel = math.prod(shape[1:]) if shape else 1
        rows = shape[0] if shape else 1
        step = max(1, DCP_FILE_NBYTES // max(row_numel * itemsize, 1))
        parts = []
        for first in range(0, max(rows, 1), step):
            count = min(step, rows - first)
            part_shape: Shape = (count, *shape[1:]) if shape else ()
            offset: Shape = (first, *(0,) * (len(shape) - 1)) if shape else ()
            span = Span(first * row_numel, (first + count) * row_numel)
            pickle = write_tree(TensorOut("0", output.dtype.name, part_shape))
            self._room(span.numel * itemsize)
            name = self._name
            start, nbytes = self._open.add(pickle, [("0", output, span)])
            parts.append(DcpPart(offset, part_shape, name, start, nbytes))
        return tuple(parts)

    def add_value(self, value: Any) -> DcpPart:
        """Where the value will be."""
        self._room(0)
        name = self._name
        start, nbytes = self._open.add(write_tree(value), [])
        return DcpPart((), (), name, start, nbytes)

    def files(self) -> list[PlannedFile]:
        """All data files."""
        self._close()
        return self._done

    def _room(self, nbytes: int) -> None:
        if self._open.nbytes and self._open.nbytes + nbytes > DCP_FILE_NBYTES:
            self._close()

    def _close(self) -> None:
        if self._open.nbytes:
            self._done.append(self._open.file(self._name))
            self._open = ZipBuilding()
