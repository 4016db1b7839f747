"""Values: what may be stored next to tensors, and trees of values with tensors among them.

A value is None, bool, int, float, str, bytes, or a list, tuple or dict of values. A tree that also
has tensors is stored as one value, in which `{"$tensor": fqn}` stands for each tensor, and a
description for each tensor that consists of others. A named tuple is stored with the names of its
fields, and comes back as one of the live state's class, or of a class of its own.
Some other types have a tagged form, see `typed_values`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ckpt.layout.composites import (
    DATA_KEY,
    CompositeType,
    description,
    put_together,
    take_apart,
    type_of,
)
from ckpt.layout.descriptions import TYPE_KEY, is_description
from ckpt.layout.plain import UnsupportedTensor
from ckpt.state.typed_values import (
    inside,
    is_array,
    is_object,
    is_scalar,
    is_tagged,
    leaf_of,
    scalar_like,
    tagged,
    tensor_of,
    typed_of,
    why_no_leaf,
    why_no_tensor,
)

TENSOR_KEY = "$tensor"
# A named tuple: its fields, and next to them its "items".
FIELDS_KEY = "$fields"
_RESERVED = (TENSOR_KEY, TYPE_KEY, FIELDS_KEY, DATA_KEY)
DEPTH_MAX = 100

# Compared by exact type: a subclass (an IntEnum) would come back as its base.
SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# Saved as a plain dict; a load gives them back the type that the live state has at the same place.
DICTS: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict)


def join(path: str, key: object) -> str:
    """The fqn of what lies under `key` in the container at `path`; "" is the root."""
    return f"{path}.{key}" if path else str(key)


def split_tree(
    tree: Any, fqn: str, problems: list[str], arrays: list[str] | None = None
) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """`tree` as a value with references, and the tensors they refer to, named under `fqn`.

    What cannot be stored is listed in `problems`, each with its place, and is None in the result.
    Tensors that are arrays of numpy are named in `arrays`, too.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    value = _Splitter(problems, tensors, [] if arrays is None else arrays).split(tree, fqn, 0)
    return value, tensors


def join_tree(value: Any, tensor_of: Callable[[str], Any], like: Any = None) -> Any:
    """`value` with every reference replaced by `tensor_of(fqn)`; containers are new.

    Composites are put together, which raises Mismatch or InvalidState where that is not possible,
    and so are leaves of other types, see `unknown_leaves`. `like` is a live tree: where it has an
    OrderedDict, Counter, defaultdict, or an array or scalar of numpy, the result has one too.
    """
    if isinstance(value, dict):
        if is_reference(value):
            tensor = tensor_of(value[TENSOR_KEY])
            return tensor.numpy() if is_array(like) else tensor
        if is_description(value):
            components = join_tree(value["components"], tensor_of)
            fqn = next(iter(references(value)), "").rpartition(".")[0]
            return put_together(value, fqn, components)
        if is_tagged(value):
            return leaf_of(value, like, lambda held, live: join_tree(held, tensor_of, live))
        if value.keys() == {FIELDS_KEY, "items"}:
            fields, items = value[FIELDS_KEY], join_tree(value["items"], tensor_of, like)
            # The class is the live state's: a checkpoint says nothing of which code runs.
            is_like = is_named_tuple(like) and list(like._fields) == fields
            return type(like)(*items) if is_like else _restored(fields, items)
        live = like if isinstance(like, dict) else {}
        joined = {key: join_tree(item, tensor_of, live.get(key)) for key, item in value.items()}
        # Its factory is code, too.
        if type(like) is defaultdict:
            return defaultdict(like.default_factory, joined)
        return type(like)(joined) if type(like) in (OrderedDict, Counter) else joined
    if isinstance(value, (list, tuple)):
        items = [
            join_tree(item, tensor_of, _item_like(like, index)) for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else tuple(items)
    return scalar_like(value, like)


def unknown_leaves(value: Any, like: Any = None) -> list[str]:
    """What is wrong with the tagged leaves of a value that `join_tree` is to make, given a live
    tree.
    """
    if is_tagged(value):
        why = why_no_leaf(value, like)
        return [why] if why is not None else unknown_leaves(*inside(value, like))
    if is_description(value):  # its context has a meaning of its own
        return []
    if isinstance(value, dict):
        live = like if isinstance(like, dict) else {}
        pairs = [(item, live.get(key)) for key, item in value.items()]
        if value.keys() == {FIELDS_KEY, "items"}:
            pairs = [(value["items"], like)]
    elif isinstance(value, (list, tuple)):
        pairs = [(item, _item_like(like, index)) for index, item in enumerate(value)]
    else:
        return []
    return [text for item, live in pairs for text in unknown_leaves(item, live)]


def renamed_tree(value: Any, name_of: Callable[[str], str]) -> Any:
    """`value` with references to other names."""
    if isinstance(value, dict):
        if is_reference(value):
            return {TENSOR_KEY: name_of(value[TENSOR_KEY])}
        return {key: renamed_tree(item, name_of) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [renamed_tree(item, name_of) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def references(value: Any) -> list[str]:
    """The fqns that a value refers to, in its order."""
    if isinstance(value, dict):
        if is_reference(value):
            return [value[TENSOR_KEY]]
        return [fqn for item in value.values() for fqn in references(item)]
    if isinstance(value, (list, tuple)):
        return [fqn for item in value for fqn in references(item)]
    return []


def holds_objects(value: Any) -> bool:
    """Whether a value has composites in it, or objects of a library: what knows shapes itself."""
    if is_description(value) or is_object(value):
        return True
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and any(map(holds_objects, items))


def is_form(value: Any) -> bool:
    """Whether a dict stands for something other than a dict."""
    return isinstance(value, dict) and any(key in value for key in _RESERVED)


def is_reference(value: Any) -> bool:
    """Whether `value` stands for a tensor."""
    return isinstance(value, dict) and len(value) == 1 and TENSOR_KEY in value


def why_not_storable(leaf: Any) -> str:
    """What is wrong with a leaf that is no value, and what to do about it."""
    kind = type(leaf)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"a {name} cannot be stored; {_advice(leaf, kind)}"


@dataclass(frozen=True, slots=True)
class _Splitter:
    """Collects the problems and the tensors of one tree."""

    problems: list[str]
    tensors: list[tuple[str, torch.Tensor]]
    arrays: list[str]

    def split(self, tree: Any, path: str, depth: int) -> Any:
        kind = type(tree)
        if kind in SCALARS:
            if kind is str and not tree.isascii():
                try:
                    tree.encode()
                except UnicodeEncodeError as error:  # a file's name that is no UTF-8, say
                    self.problems.append(f"{path}: {tree!r:.100} is no unicode ({error.reason})")
            return tree
        # A float64 of numpy is a float, too, but not of exactly that type.
        if is_scalar(tree):
            return tree.item()
        if is_array(tree):
            return self.split_array(tree, path)
        if isinstance(tree, torch.Tensor):
            if (type_ := type_of(tree)) is not None:
                return self.split_composite(tree, type_, path, depth)
            self.tensors.append((path, tree))
            return {TENSOR_KEY: path}
        if depth >= DEPTH_MAX:
            self.problems.append(f"{path[:200]}: nested deeper than {DEPTH_MAX}, or in itself")
            return None
        if kind in DICTS:
            return self.split_dict(tree, path, depth)
        if kind is list or kind is tuple:
            items = [
                self.split(item, f"{path}.{index}", depth + 1) for index, item in enumerate(tree)
            ]
            return items if kind is list else tuple(items)
        if is_named_tuple(tree):
            items = [
                self.split(item, f"{path}.{name}", depth + 1)
                for name, item in zip(tree._fields, tree, strict=True)
            ]
            return {FIELDS_KEY: list(tree._fields), "items": items}
        if (typed := typed_of(tree)) is not None:
            name, content = typed.name, typed.content
            if name == "deque":  # items are named by their places, as those of lists
                items = self.split(content["items"], path, depth + 1)
                return tagged(name, {"maxlen": content["maxlen"], "items": items})
            return tagged(name, self.split(content, path, depth + 1))
        self.problems.append(f"{path}: {why_not_storable(tree)}")
        return None

    def split_array(self, array: Any, path: str) -> Any:
        tensor = tensor_of(array)
        if tensor is None:
            self.problems.append(f"{path}: {why_no_tensor(array)}")
            return None
        self.tensors.append((path, tensor))
        self.arrays.append(path)
        return {TENSOR_KEY: path}

    def split_composite(
        self, tensor: torch.Tensor, type_: CompositeType, path: str, depth: int
    ) -> Any:
        try:
            parts = take_apart(path, tensor, type_)
        except UnsupportedTensor as refused:
            self.problems.append(refused.problem)
            return None
        components = {
            name: self.split(item, f"{path}.{name}", depth + 1)
            for name, item in parts.components.items()
        }
        return description(tensor, type_, parts.context, components)

    def split_dict(self, tree: dict[Any, Any], path: str, depth: int) -> Any:
        if reserved := [key for key in _RESERVED if key in tree]:
            self.problems.append(f"{path}: the key {reserved[0]!r} is reserved; use another one")
            return None
        result = {}
        for key, item in tree.items():
            if not is_key(key):
                self.problems.append(
                    f"{path}: the key {key!r:.100} of type {type(key).__name__} cannot be stored; "
                    "use str, int, bool, None, float or tuples of those"
                )
                continue
            result[key] = self.split(item, f"{path}.{key}", depth + 1)
        return result


def is_key(key: Any) -> bool:
    """Whether a dict with this key can be stored."""
    if type(key) is tuple:
        return all(is_key(item) for item in key)
    return key is None or type(key) in (bool, int, float, str)


def is_groups(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a value is what the state dict of an optimizer has as "param_groups"."""
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    )


def all_groups(values: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The param groups of each optimizer among values, by its path."""
    for fqn, value in values.items():
        path, _, key = fqn.rpartition(".")
        if key == "param_groups" and is_groups(value):
            yield path, value


def is_named_tuple(value: Any) -> bool:
    """Whether `value` is a tuple with a name for each item."""
    return isinstance(value, tuple) and len(getattr(value, "_fields", ())) == len(value) > 0


def _restored(fields: list[str], items: list[Any]) -> Any:
    def reduced(made: Any) -> Any:  # no module has its class
        return _restored, (fields, list(made))

    bases = (namedtuple("Restored", fields),)
    return type("Restored", bases, {"__reduce__": reduced})(*items)


def _item_like(like: Any, index: int) -> Any:
    is_sequence = isinstance(like, (list, tuple, deque))
    return like[index] if is_sequence and index < len(like) else None


def _advice(leaf: Any, kind: type) -> str:
    if kind.__module__ == "numpy":
        return "convert it with float(), int(), str() or tolist(), or put it into an array"
    if kind.__module__.startswith("torch.distributed.pipelining"):
        return "put ckpt.Stages(*stages) there, with the stages of this rank, or their modules"
    if hasattr(leaf, "get_state"):  # a torch.Generator
        return "put what its get_state() returns there, and call set_state() after a load"
    if isinstance(leaf, tuple):
        return "convert it with tuple()"
    if isinstance(leaf, (set, frozenset)):
        return "convert it with sorted() or list()"
    if isinstance(leaf, (dict, list)):
        return "convert it to a plain dict or list"
    if isinstance(leaf, (bool, int, float, str, bytes)):
        return "convert it with int(), float(), str() or bytes()"
    return (
        "convert it to None, bool, int, float, str, bytes, list, tuple or dict, or give its class "
        "state_dict() and load_state_dict()"
    )
