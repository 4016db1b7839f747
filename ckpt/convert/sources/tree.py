"""From the nested state dicts of other libraries to the names that a state of ours has.

A state is any nesting of dicts and lists with tensors and values. Model state dicts keep their
names but for the parts that wrappers add; optimizer state is named after its parameters; a
container without tensors is one value.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.convert.sources.blobs import Blob, Opened, open_blob
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.opening import SourcePlace
from ckpt.convert.sources.pickles import Opaque, PickledObject
from ckpt.convert.sources.source import (
    SCRATCH_NBYTES,
    Chunk,
    FileSource,
    Refusal,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.convert.sources.torch_pickle import (
    NAMESPACES,
    ShardRef,
    StorageRef,
    TensorRef,
    UnreadableTensor,
    value_of,
)
from ckpt.errors import UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Shape, Span, span_of
from ckpt.state.names import clean_name, split_state_name
from ckpt.state.typed_values import tagged
from ckpt.state.values import DEPTH_MAX, TENSOR_KEY, is_groups, is_key, join
from storage import Store

IMPORT_THREADS = 3  # of an import, by default; each has a part of 16 MiB in memory

NODES_MAX = 1 << 20  # of one state: shared parts of a pickle count each time they are named
FLAT = "_flat_param"  # what FSDP1 calls a unit's
_NUMBER = re.compile(r"_\d+$")  # a second model is called `model_1`
MODEL_ENTRIES = ("model", "state_dict", "model_state_dict", "module", "net", "network")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the source, by the `key` that the source uses for it.

    One whose dtype is no weight's, such as a counter or a generator's state, makes no model.
    """

    key: Any
    is_float: bool = True


class GroupedNames(list[str]):
    """The names of an optimizer's parameters in its order; `sizes` has how many each group has."""

    sizes: Sequence[int] = ()


class TreeTensor(NamedTuple):
    """A tensor of a nested state: its dtype and shape, and where it lies."""

    dtype: str
    shape: Shape
    chunks: list[Chunk]


class TreeData(NamedTuple):
    """The tensors of nested states by the keys of their leaves, and the budget for all of it."""

    tensors: dict[str, TreeTensor]
    budget: MemoryBudget

    def add(self, key: str, dtype: str, shape: Shape, chunks: list[Chunk]) -> None:
        """One more tensor."""
        self.tensors[key] = TreeTensor(dtype, shape, chunks)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise Corrupt unless each tensor is there once, in files of these lengths."""
        for key, (dtype, shape, chunks) in self.tensors.items():
            check_chunks(SourceTensor(key, dtype, shape), chunks, sizes)


def tree_source(place: SourcePlace, format: str, tree: Any, data: TreeData) -> FileSource:
    """The source of a nested state.

    A key that several leaves have is a tied tensor, stored under the first of its names there.
    """
    tensors, budget = data
    named = name_tree(with_members(tree, data, place.options.shapes), place.names)
    infos: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for fqn, (key, kind) in named.tensors.items():
        held = first.setdefault(key, fqn)
        if held == fqn:
            infos[fqn] = SourceTensor(fqn, tensors[key].dtype, tensors[key].shape, kind)
            continue
        aliases[fqn] = held
        if kind in (Kind.PARAMETER, Kind.BUFFER):  # of a model, whatever else has it, too
            infos[held] = infos[held]._replace(kind=kind)
    contents = SourceContents(
        dict(sorted(infos.items())),
        values=dict(sorted(named.values.items())),
        aliases=aliases,
        refused=named.refused,
        modules=named.modules,
    )
    placed = {fqn: tensors[key].chunks for key, fqn in first.items()}
    # What the buffers of an import take beyond the bytes that are there: a tensor may show few
    # stored elements many times.
    stored_nbytes = budget.tensor_nbytes
    nbytes = min(sum(info.nbytes for info in infos.values()), IMPORT_THREADS * 16 << 20)
    if any(chunk.stride is not None for chunks in placed.values() for chunk in chunks):
        nbytes += min(IMPORT_THREADS * SCRATCH_NBYTES, stored_nbytes)
    budget.charge(max(0, nbytes - stored_nbytes))
    return FileSource(place.store, format, contents, placed, stored_nbytes)


def with_members(tree: Any, data: TreeData, shapes: Mapping[str, Shape] | None) -> Any:
    """`tree` with the parameters in the flat ones of FSDP1's LOCAL_STATE_DICT, which have neither
    names nor shapes: those of a model are theirs where they fit exactly. Without a model flat
    parameters stay as they are.
    """
    if type(tree) is not dict or shapes is None:
        return tree
    flat = {
        clean_name(key).removesuffix(FLAT): (key, item)
        for key, item in tree.items()
        if isinstance(key, str) and f".{key}".endswith(f".{FLAT}") and isinstance(item, Leaf)
    }
    if not flat:
        return {key: with_members(item, data, shapes) for key, item in tree.items()}
    units: dict[str, list[str]] = {unit: [] for unit in flat}
    for name in shapes:
        above = [unit for unit in units if name.startswith(unit)]
        if above:
            units[max(above, key=len)].append(name)
    # With `use_orig_params`, what each rank has of them stands under their own names as well.
    members = {name for names in units.values() for name in names}
    made = {key: item for key, item in tree.items() if clean_name(str(key)) not in members}
    for unit, names in units.items():
        key, leaf = flat[unit]
        held = data.tensors[leaf.key]
        starts = _member_starts([shapes[name] for name in names], held)
        if starts is None:
            wanted = sum(math.prod(shapes[name]) for name in names)
            made[key] = UnreadableTensor(
                f"it is a flat parameter of FSDP1 (LOCAL_STATE_DICT) of shape {held.shape}, "
                f"and the {len(names)} parameters of the model there have {wanted} elements"
            )
            continue
        del made[key]
        for name, start in zip(names, starts, strict=True):
            stop, chunks = start + math.prod(shapes[name]), []
            for region, file, offset, _ in held.chunks:
                assert isinstance(region, Span)  # else nothing fits
                low, high = region
                first, last = max(low, start), min(high, stop)
                if first < last:
                    begins = offset + (first - low) * DTYPES[held.dtype].itemsize
                    chunks.append(Chunk(Span(first - start, last - start), file, begins))
            data.add(f"{leaf.key}:{name}", held.dtype, shapes[name], chunks)
            made[name] = Leaf(f"{leaf.key}:{name}", leaf.is_float)
    return made


def _member_starts(shapes: Sequence[Shape], flat: TreeTensor) -> Sequence[int] | None:
    """Where parameters of these shapes begin in a flat one; None where they do not fill it, or
    could in two ways.
    """
    if not all(isinstance(chunk.region, Span) for chunk in flat.chunks):
        return None
    ways = set()
    # With `use_orig_params` FSDP1 aligns each to 16 bytes of the dtype that it computes in, and the
    # end to the number of ranks.
    for step in {1, 16 // DTYPES[flat.dtype].itemsize, 8}:
        starts, stop = [], 0
        for shape in shapes:
            starts.append(-(-stop // step) * step)
            stop = starts[-1] + math.prod(shape)
        ranks = 1 if step == 1 else max(1, len(flat.chunks))
        if flat.shape == (-(-stop // ranks) * ranks,):
            ways.add(tuple(starts))
    return ways.pop() if len(ways) == 1 else None


def chunk_of(view: TensorRef, opened: Opened, file: str, offset: Shape, whole: Shape) -> Chunk:
    """The region at `offset` of a tensor of shape `whole` that a blob holds."""
    box = Box(offset, view.shape)
    start = opened.start_of(view)
    if not view.is_row_major:
        return Chunk(box, file, start, view.stride)
    # Another number of dims is refused by `check_chunks`, which names the tensor.
    span = span_of(box, whole) if len(offset) == len(whole) else None
    return Chunk(span or box, file, start)


def leaves_of_blob(
    store: Store, blob: Blob, key: str, into: TreeData, *, is_outermost: bool = False
) -> Any:
    """The tree in a blob with a `Leaf` for each tensor, which go `into` the data of the source.
    Raises like `open_blob`, which says what `is_outermost` is.

    Equal views of one storage are one tensor, whatever parts of the tree they stand in.
    """
    opened = open_blob(store, blob, into.budget, is_outermost=is_outermost)

    def mapped(tree: Any, _: object = None) -> Any:
        if type(tree) in (dict, list, tuple):
            return _with_items(tree, mapped)
        if isinstance(tree, StorageRef):
            return UnreadableTensor("it is a storage, not a tensor")
        if isinstance(tree, ShardRef):
            if tree.local.shape != tree.shape:
                return UnreadableTensor("it is one rank's part of a tensor; pass the folder")
            tree = tree.local
        if not isinstance(tree, TensorRef):
            return tree
        shape = tree.shape
        name = f"{key}@{tree.storage.key}:{tree.offset}:{shape}:{tree.stride}{tree.dtype}"
        if name not in into.tensors:
            origin = (0,) * len(shape)
            chunks = [] if 0 in shape else [chunk_of(tree, opened, blob.file, origin, shape)]
            into.add(name, tree.dtype, shape, chunks)
        return Leaf(name, DTYPES[tree.dtype].is_float)

    tree = mapped(opened.tree)
    opened.directory.close()
    return tree


def _with_items(tree: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container with what `change` makes of each item and its key or index. Where nothing changes
    it is the same object: most of a large state may be values.
    """
    if isinstance(tree, dict):
        made = {key: change(item, key) for key, item in tree.items()}
        return tree if all(made[key] is item for key, item in tree.items()) else made
    items = [change(item, index) for index, item in enumerate(tree)]
    if all(new is item for new, item in zip(items, tree, strict=True)):
        return tree
    return items if isinstance(tree, list) else tuple(items)


# Names ----------------------------------------------------------------------------------------


def name_tree(tree: Any, parameter_names: Sequence[str] | None = None) -> Named:
    """The names of everything in `tree`, whose tensors are `Leaf`s.

    `parameter_names` are those of the parameters of optimizers that number them, in their order.
    """
    named = Named(parameter_names)
    named.walk(tree, "", 0)
    # Last, since names of optimizers say which tensors of a model are trained.
    named.settle_modules()
    return named


class Named:
    """A tree by our names: `tensors` gives the key of a leaf and its kind."""

    def __init__(self, parameter_names: Sequence[str] | None) -> None:
        self.parameter_names = parameter_names
        self.tensors: dict[str, tuple[Any, Kind]] = {}
        self.values: dict[str, Any] = {}
        self.refused: dict[str, Refusal] = {}
        self.modules: tuple[str, ...] = ()
        self.containers: dict[str, list[str]] = {}  # path -> names of its tensors, in it
        self.trained: set[str] = set()  # names that optimizers have
        self.weights: set[str] = set()  # fqns of what may be weights
        self.nodes = 0

    def walk(self, node: Any, path: str, depth: int) -> None:
        """Name what is in `node`, which stands at `path`."""
        optimizer = _optimizer(node) if isinstance(node, dict) else None
        # One that has no state is one by its groups, where parameters have names.
        is_named = optimizer is not None and self.parameter_names is not None
        if isinstance(node, Leaf):
            self.add_tensor(path, node, Kind.OTHER)
        elif isinstance(node, UnreadableTensor):
            self.refuse(path, node.reason, is_tensor=True)
        elif isinstance(node, (dict, list, tuple)) and (not path or is_named or has_tensors(node)):
            if depth >= DEPTH_MAX:
                self.refuse(path, f"it is nested deeper than {DEPTH_MAX}")
            elif optimizer is not None:
                self.add_optimizer(*optimizer, path)
            else:
                self.walk_container(node, path, depth)
        else:
            self.add_value(path, node)

    def walk_container(self, node: Any, path: str, depth: int) -> None:
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        self.count(1 + len(items))
        if isinstance(node, dict) and any(
            isinstance(k, str) and isinstance(v, Leaf) for k, v in items
        ):
            # As in the state dict of a module.
            bare = bare_names([key for key in node if isinstance(key, str)])
            items = [(bare.get(key, key), item) for key, item in items]
            self.containers[path] = [str(key) for key, item in items if isinstance(item, Leaf)]
        for key, item in items:
            if type(key) not in (str, int):
                self.refuse(join(path, key), f"its key is a {type(key).__name__}")
                continue
            self.walk(item, join(path, key), depth + 1)

    def add_tensor(self, fqn: str, leaf: Leaf, kind: Kind) -> None:
        if fqn in self.tensors or fqn in self.values:
            self.refuse(fqn, "two entries of the source have this name", is_tensor=True)
        else:
            self.tensors[fqn] = (leaf.key, kind)
            # Integers may be counters: they make no container a model.
            if leaf.is_float and kind is not Kind.OPTIMIZER:
                self.weights.add(fqn)

    def add_value(self, fqn: str, tree: Any) -> None:
        problems: list[tuple[str, str]] = []
        value = self.plain(tree, fqn, 0, problems)
        if problems:
            for place, reason in problems[:20]:
                self.refuse(place, reason)
        elif not fqn and value == {}:
            return
        else:
            self.values[fqn] = value

    def count(self, nodes: int) -> None:
        """Count entries of the state. Raises UnsupportedFormat for too many."""
        self.nodes += nodes
        if self.nodes > NODES_MAX:
            raise UnsupportedFormat(f"a state of more than {NODES_MAX} entries")

    def refuse(self, fqn: str, reason: str, *, is_tensor: bool = False) -> None:
        self.refused.setdefault(fqn, Refusal(reason, is_tensor))

    def plain(self, tree: Any, path: str, depth: int, problems: list[tuple[str, str]]) -> Any:
        """`tree` as a value; a tensor in it becomes a reference and a tensor of its own."""
        self.count(1)
        if depth >= DEPTH_MAX:
            problems.append((path, f"it is nested deeper than {DEPTH_MAX}"))
            return None
        if tree is None or type(tree) in (bool, int, float, str, bytes):
            return tree
        if isinstance(tree, Leaf):
            self.add_tensor(path, tree, Kind.OTHER)
            return {TENSOR_KEY: path}
        if isinstance(tree, PickledObject) and tree.name in NAMESPACES and type(tree.state) is dict:
            return tagged(tree.name, self.plain(tree.state, path, depth + 1, problems))
        if (value := value_of(tree)) is not None:
            return value
        if not isinstance(tree, (dict, list, tuple)):
            problems.append((path, reason_of(tree)))
            return None
        keys = tree if isinstance(tree, dict) else ()
        if bad := [key for key in keys if not is_key(key) or key == TENSOR_KEY]:
            problems.append((path, f"the key {bad[0]!r:.60} cannot be stored"))
            return None
        return _with_items(
            tree, lambda item, key: self.plain(item, join(path, key), depth + 1, problems)
        )

    # Optimizers

    def add_optimizer(
        self, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], path: str
    ) -> None:
        names = self.names_of_numbers(groups, path)
        if names is None:
            return
        kept = []
        for index, group in enumerate(groups):
            # By now `params` has the names, too.
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            base = f"{join(path, 'param_groups')}.{index}"
            problems: list[tuple[str, str]] = []
            value = self.plain(hyper, base, 0, problems)
            for place, reason in problems:
                self.refuse(place, reason)
            kept.append({"params": [names[param] for param in group["params"]], **(value or {})})
        self.trained.update(name for group in kept for name in group["params"])
        self.values[join(path, "param_groups")] = kept
        names |= {str(param): name for param, name in names.items()}  # as DCP keeps numbers
        for param, own in state.items():
            base = join(path, f"state.{names.get(param, param)}")
            if not isinstance(own, dict):
                self.add_value(base, own)
                continue
            for name, item in own.items():
                if isinstance(item, Leaf):
                    self.add_tensor(join(base, name), item, Kind.OPTIMIZER)
                else:
                    self.add_value(join(base, name), item)

    def names_of_numbers(
        self, groups: Sequence[Mapping[str, Any]], path: str
    ) -> dict[Any, str] | None:
        """The name of each parameter that an optimizer names or numbers; None if unknown."""
        params = [param for group in groups for param in group["params"]]
        named = [p for p in params if isinstance(p, str)]
        if len(named) == len(params):
            bare = bare_names(named)
            return {param: bare[param] for param in params}
        listed = [name for group in groups for name in group.get("param_names") or ()]
        names = listed if len(listed) == len(params) else self.parameter_names
        if names is None or len(names) != len(params):
            self.refuse(
                join(path, "param_groups"),
                f"it numbers its {len(params)} parameters and has no names; pass parameter_names= "
                "with their names in the optimizer's order ([n for n, _ in "
                "model.named_parameters()], unless it was made otherwise), or skip= the optimizer",
            )
            return None
        sizes, own = [len(group["params"]) for group in groups], getattr(names, "sizes", None)
        if own not in (None, sizes):
            where = f"it numbers parameters group by group, {sizes} of them, and the state's groups"
            self.refuse(join(path, "param_groups"), f"{where} have {own}; build them alike")
            return None
        bare = bare_names(list(names))
        return {param: bare[str(name)] for param, name in zip(params, names, strict=True)}

    # Models

    def settle_modules(self) -> None:
        """Keep as modules what is called a model, or every outermost container that has weights,
        or all if none has. Everything in a module is of it, and of the whole state its weights.
        """
        called = set(filter(is_called_model, self.containers))
        holding = {
            path
            for path, names in self.containers.items()
            if any(join(path, name) in self.weights for name in names)
        }
        models = called or holding or set(self.containers)
        prefixes: list[str] = []
        for prefix in sorted(f"{path}." for path in models if path):
            if not prefixes or not prefix.startswith(prefixes[-1]):
                prefixes.append(prefix)
        at_top = self.weights.union(self.containers[""]) if "" in models else set()
        places = {}  # the one of the prefixes that a name begins with; none begins with another
        for fqn in self.tensors:
            index = bisect_right(prefixes, fqn) - 1
            is_inside = index >= 0 and fqn.startswith(prefixes[index])
            places[fqn] = prefixes[index] if is_inside else ""
        trained = {p for fqn, p in places.items() if fqn.removeprefix(p) in self.trained}
        for fqn, prefix in places.items():
            key, kind = self.tensors[fqn]
            if kind is Kind.OTHER and (prefix or fqn in at_top):
                # A frozen parameter counts as a buffer as well: nothing tells them apart.
                is_buffer = prefix in trained and fqn.removeprefix(prefix) not in self.trained
                self.tensors[fqn] = key, Kind.BUFFER if is_buffer else Kind.PARAMETER
        self.modules = tuple(sorted({*(p[:-1] for p in prefixes), *({""} & models)}))


def is_called_model(path: str) -> bool:
    """Whether the entry at `path` says by its name that it is the model."""
    return _NUMBER.sub("", path) in MODEL_ENTRIES


def has_tensors(node: Any) -> bool:
    """Whether a container has a tensor, or what stands for one that is refused, in it."""
    if isinstance(node, (dict, list, tuple)):
        return any(map(has_tensors, node.values() if isinstance(node, dict) else node))
    return isinstance(node, (Leaf, UnreadableTensor))


def bare_names(names: Sequence[str]) -> dict[str, str]:
    """`names` of a model's tensors without what wrappers of torch add to them."""
    bare = {name: clean_name(name) for name in names}
    # DDP puts it in front of all names; a model may have a part of that name.
    if bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    # Where two names would become one, all stay as they are.
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}


# The state and the groups of an optimizer.
_Optimizer = tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]


def _optimizer(node: Mapping[Any, Any]) -> _Optimizer | None:
    """`node` as the state dict of an optimizer, nested or flattened; None when it is none."""
    state, groups = node.get("state"), node.get("param_groups")
    if len(node) == 2 and isinstance(state, dict) and is_groups(groups):
        return state, groups
    if node and all(str(key).startswith(("state.", "param_groups.")) for key in node):
        return _unflattened(node)
    return None


def _unflattened(node: Mapping[Any, Any]) -> _Optimizer | None:
    """`state.<parameter>.<name>` and `param_groups.<parameter>.<name>`, as torch flattens them.

    Parameters with the same hyperparameters make a group.
    """
    hyper: dict[str, dict[str, Any]] = {}
    for key, item in node.items():
        param, _, name = str(key).removeprefix("param_groups.").rpartition(".")
        if str(key).startswith("param_groups."):
            hyper.setdefault(param, {})[name] = item
    state: dict[str, dict[str, Any]] = {param: {} for param in hyper}
    for key, item in node.items():
        if not str(key).startswith("state."):
            continue
        parts = split_state_name(str(key).removeprefix("state."), hyper)
        if parts is None:
            return None
        param, name = parts
        state[param][name] = item
    groups: dict[Any, dict[str, Any]] = {}
    for param, values in hyper.items():
        group = groups.setdefault(_likeness(values), {"params": [], **values})
        group["params"].append(param)
    return {p: s for p, s in state.items() if s}, list(groups.values())


def _likeness(value: Any, depth: int = 0) -> Any:
    """Equal for equal hyperparameters. What is not flat is like itself alone: comparing crafted
    trees could take for ever.
    """
    if isinstance(value, dict) and depth == 0:
        return tuple((key, _likeness(value[key], 1)) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)) and depth < 3 and len(value) < 100:
        return (type(value).__name__, *(_likeness(item, depth + 1) for item in value))
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return type(value).__name__, value
    return id(value)


def reason_of(thing: Any) -> str:
    """Why something that is no value cannot be stored."""
    if isinstance(thing, UnreadableTensor):
        return thing.reason
    if isinstance(thing, (Opaque, PickledObject)):
        return f"it is a {thing.name:.100}, an object of a class, not a plain value"
    return f"it is a {type(thing).__name__}, not a plain value"


def nest(items: Mapping[str, Any], paths: Callable[[str], Sequence[Any]]) -> Any:
    """The tree whose leaves are `items`, each at its path of keys (str) and list indexes (int)."""
    root: dict[Any, Any] = {}
    lists: dict[int, dict[Any, Any]] = {}
    for name, item in items.items():
        node = root
        path = list(paths(name))
        for key, following in itertools.pairwise(path):
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                # A place that is a leaf and has others below it: the leaf moves to the empty key.
                child = node[key] = {"": child}
            if isinstance(following, int):
                # By id: all of these dicts are alive in `root`, so no id is used twice.
                lists[id(child)] = child
            node = child
        if path:
            node[path[-1]] = item
    return _with_lists(root, lists)


def _with_lists(node: Any, lists: Mapping[int, Any]) -> Any:
    if not isinstance(node, dict):
        return node
    # By their text, since keys of two types do not compare.
    is_list = id(node) in lists and sorted(node, key=str) == sorted(range(len(node)), key=str)
    made = {key: _with_lists(item, lists) for key, item in node.items()}
    return [made[index] for index in range(len(made))] if is_list else made
