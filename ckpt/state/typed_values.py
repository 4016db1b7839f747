"""Leaves of states that are no plain data but have a form without code, tagged by a type's name.
At the end those of numpy: arrays are tensors, scalars plain values.

    {"$data": "deque", "value": {"maxlen": 5, "items": [1, 2]}}

Queues, sets, sizes, dtypes, devices, paths and other types of Python have a name here. Members of
enums and objects of libraries are named by their class, which is one of the list below; a load
looks there and nowhere else, but that an enum may be the one which the live state has at the same
place. Nothing is imported by a name that a checkpoint gives.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.errors import Mismatch
from ckpt.layout.composites import DATA_KEY
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.named_classes import class_at, name_in

# Objects in the state of a library's optimizers, and enums in their options. An object is stored as
# its attributes, each of which is a value, a tensor or such an object.
_OF_PYTORCH_OPTIMIZER = {
    "scion": ("LMONorm",),
    "utils.galore": ("GaLoreProjector",),
    "utils.graft": (
        "AdaGradGraft",
        "Graft",
        "LayerWiseGrafting",
        "RMSPropGraft",
        "SGDGraft",
        "SQRTNGraft",
    ),
    "utils.partition": ("BlockPartitioner", "PreConditionerType"),
    "utils.preconditioner": ("PreConditioner",),
}
_CLASSES: dict[str, str] = {"argparse.Namespace": "argparse", "types.SimpleNamespace": "types"} | {
    f"pytorch_optimizer.{name}": f"pytorch_optimizer.optimizer.{module}"
    for module, names in _OF_PYTORCH_OPTIMIZER.items()
    for name in names
}
# What is made of these alone, and makes them again.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    complex: lambda leaf: [leaf.real, leaf.imag],
    range: lambda leaf: [leaf.start, leaf.stop, leaf.step],
    slice: lambda leaf: [leaf.start, leaf.stop, leaf.step],
    bytearray: bytes,
    datetime: lambda leaf: leaf.isoformat(),
}
_PATHS = (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
# What an item of a set may be: what has an order that all ranks agree on.
_ITEMS = (type(None), bool, int, float, str, bytes)


class Typed(NamedTuple):
    """A leaf in its tagged form: the name of its type, and what it holds, to be stored in turn.

    `may_hold_tensors` says whether there may be more than values in the content.
    """

    name: str
    content: Any
    may_hold_tensors: bool = False


def typed_of(leaf: Any) -> Typed | None:
    """The form of a leaf that is no plain data; None where it has none."""
    kind = type(leaf)
    if kind is torch.Size:
        return Typed("size", tuple(leaf))
    if kind is torch.dtype:
        return Typed("dtype", dtype_name(leaf))
    if kind is torch.device:
        # Not its index, which is another on each rank; a load takes the live one.
        return Typed("device", leaf.type)
    if kind is deque:
        return Typed("deque", {"maxlen": leaf.maxlen, "items": list(leaf)}, True)
    if kind in _PLAIN:
        content = _PLAIN[kind](leaf)  # a slice may be of anything
        return Typed(kind.__name__, content) if _FORMS[kind.__name__](content) else None
    if kind in _PATHS:
        return Typed("path", str(leaf))
    if kind is set or kind is frozenset:
        if not all(type(item) in _ITEMS for item in leaf):
            return None
        # A set has no order: the same one on all ranks, which have to have equal values.
        order = sorted(leaf, key=lambda item: (type(item).__name__, repr(item)))
        return Typed(kind.__name__, order)
    if isinstance(leaf, enum.Flag):
        return Typed(_name_of(kind), leaf.value)
    if isinstance(leaf, enum.Enum):
        return Typed(_name_of(kind), leaf.name)
    name = name_in(_CLASSES, kind)
    return None if name is None else Typed(name, dict(vars(leaf)), True)


def tagged(name: str, content: Any) -> dict[str, Any]:
    """The value that stands for a leaf of the type `name`."""
    return {DATA_KEY: name, "value": content}


def is_tagged(value: Any) -> bool:
    """Whether a value stands for a leaf that is no plain data."""
    return isinstance(value, dict) and value.keys() == {DATA_KEY, "value"}


def is_object(value: Any) -> bool:
    """Whether a value stands for an object of a library, with its attributes."""
    if not is_tagged(value):
        return False
    name = value[DATA_KEY]
    return name not in _FORMS and isinstance(value["value"], dict)


def leaf_of(value: Mapping[str, Any], like: Any, join: Callable[[Any, Any], Any]) -> Any:
    """The inverse of `typed_of`. Raises Mismatch where the type is not known here.

    `like` is what the live state has at the same place, `join(content, like)` makes what the leaf
    holds.
    """
    if (why := why_no_leaf(value, like)) is not None:
        raise Mismatch([why])
    name, content = value[DATA_KEY], value["value"]
    if name == "deque":
        items = list(like) if type(like) is deque else None
        return deque(join(content["items"], items), content["maxlen"])
    if (make := _MAKERS.get(name)) is not None:
        return make(content, like)
    kind: Any = _class_named(name, like)
    if issubclass(kind, enum.Enum):
        return kind(content) if issubclass(kind, enum.Flag) else kind[content]
    # Without `__init__`, which would want arguments; its class is one of our list.
    made = kind.__new__(kind)
    vars(made).update(join(content, vars(like) if type(like) is kind else None))
    return made


def inside(value: Mapping[str, Any], like: Any) -> tuple[Any, Any]:
    """What a tagged value holds, and what the live state has at the same place."""
    name, content = value[DATA_KEY], value["value"]
    if name == "deque" and isinstance(content, dict):
        return content.get("items"), list(like) if type(like) is deque else None
    return content, vars(like) if name_in(_CLASSES, type(like)) == name else None


def why_no_leaf(value: Mapping[str, Any], like: Any) -> str | None:
    """Why a tagged value cannot be given back as what it was; None when it can."""
    name, content = value[DATA_KEY], value["value"]
    if isinstance(name, str) and name in _FORMS:
        return None if _FORMS[name](content) else f"the {name!r:.100} in it is damaged"
    kind = _class_named(name, like) if isinstance(name, str) else None
    if kind is None:
        return (
            f"holds a {name!r:.100}, which is not known here; install its library, or for an enum "
            "have a member of it in the state at the same place"
        )
    if issubclass(kind, enum.Flag):
        return None if type(content) is int else f"the {name} in it is damaged"
    if issubclass(kind, enum.Enum):
        is_member = isinstance(content, str) and content in kind.__members__
        return None if is_member else f"holds {name}.{content!s:.100}, which the class lacks here"
    return None if isinstance(content, dict) else f"the {name} in it is damaged"


def _name_of(kind: type[enum.Enum]) -> str:
    return name_in(_CLASSES, kind) or f"{kind.__module__}.{kind.__qualname__}"


def _class_named(name: str, like: Any) -> type | None:
    if name in _CLASSES:
        return class_at(_CLASSES[name], name)
    kind = type(like)
    is_same = isinstance(like, enum.Enum) and name == f"{kind.__module__}.{kind.__qualname__}"
    return kind if is_same else None


def _is_dtype(content: Any) -> bool:
    return isinstance(content, str) and isinstance(getattr(torch, content, None), torch.dtype)


def _is_device(content: Any) -> bool:
    try:
        return bool(torch.device(content).type == content)
    except (RuntimeError, TypeError):
        return False


def _is_queue(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.keys() == {"maxlen", "items"}
        and isinstance(content["items"], list)
        and (
            content["maxlen"] is None or (type(content["maxlen"]) is int and content["maxlen"] >= 0)
        )
    )


def _are(content: Any, count: int, kinds: tuple[type, ...]) -> bool:
    return isinstance(content, list) and [type(item) in kinds for item in content] == [True] * count


def _is_time(content: Any) -> bool:
    try:
        return isinstance(content, str) and bool(datetime.fromisoformat(content))
    except ValueError:
        return False


def _are_items(content: Any) -> bool:
    return isinstance(content, list) and all(type(item) in _ITEMS for item in content)


# What the content of each has to be, and what makes the leaf of it.
_FORMS: dict[Any, Callable[[Any], bool]] = {
    "size": lambda content: isinstance(content, tuple) and all(type(n) is int for n in content),
    "dtype": _is_dtype,
    "device": _is_device,
    "deque": _is_queue,
    "set": _are_items,
    "frozenset": _are_items,
    "complex": lambda content: _are(content, 2, (float,)),
    "range": lambda content: _are(content, 3, (int,)) and content[2] != 0,
    "slice": lambda content: _are(content, 3, (int, type(None))),
    "bytearray": lambda content: isinstance(content, bytes),
    "datetime": _is_time,
    "path": lambda content: isinstance(content, str),
}
_MAKERS: dict[Any, Callable[[Any, Any], Any]] = {
    "size": lambda content, _: torch.Size(content),
    "dtype": lambda content, _: getattr(torch, content),
    "device": lambda content, like: like if type(like) is torch.device else torch.device(content),
    "set": lambda content, _: set(content),
    "frozenset": lambda content, _: frozenset(content),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, _: range(*content),
    "slice": lambda content, _: slice(*content),
    "bytearray": lambda content, _: bytearray(content),
    "datetime": lambda content, _: datetime.fromisoformat(content),
    "path": lambda content, like: (type(like) if isinstance(like, PurePath) else Path)(content),
}


# --- numpy ---------------------------------------------------------------------------------------
# Arrays are tensors in the same memory. A scalar is stored as Python's int, float, bool, str or
# bytes, which has every one of its values; a load gives it the type that the live state has at the
# same place, as with dicts of other kinds.

# Kinds of dtypes: bool, integers, floating point, text, bytes. Those of dates are no values.
_SCALARS = "biufUS"
_ARRAYS = (np.ndarray, np.memmap)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array of numpy, of a dtype that torch has or not."""
    return type(leaf) in _ARRAYS


def is_scalar(leaf: Any) -> bool:
    """Whether `leaf` is a scalar of numpy that is stored as a value."""
    if not isinstance(leaf, np.generic) or leaf.dtype.kind not in _SCALARS:
        return False
    return leaf.dtype.kind != "f" or leaf.dtype.itemsize <= 8  # longer ones are no double


def tensor_of(array: Any) -> torch.Tensor | None:
    """A tensor in the memory of `array`; None where torch has none: see `why_no_tensor`.

    One that may not be written to is copied, so a load cannot use what comes of it.
    """
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):
        return None


def why_no_tensor(array: Any) -> str:
    """What is wrong with an array that is no tensor, and what to do about it."""
    if array.dtype.hasobject or array.dtype.kind in "SUVMm":
        advice = "convert it with .tolist(), or to an array of numbers"
    elif not array.dtype.isnative:
        advice = "convert it with .astype(dtype.newbyteorder('='))"
    else:
        advice = "convert it with numpy.ascontiguousarray(), or to a dtype that torch has"
    return f"an array of {array.dtype} with strides {array.strides} cannot be stored; {advice}"


def scalar_like(value: Any, like: Any) -> Any:
    """`value` as a scalar of the live one's type, where that has it; else as it is."""
    if not is_scalar(like) or type(value) not in (bool, int, float, str, bytes):
        return value
    try:
        scalar = type(like)(value)
        back = scalar.item()
    except (OverflowError, TypeError, ValueError):
        return value
    is_equal = back == value or (back != back and value != value)
    return scalar if is_equal and type(back) is type(value) else value
