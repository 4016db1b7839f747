"""The registry of composites: tensors that consist of other tensors, their components, and of plain
data, their context.

A composite is stored as its components, tensors of names of their own, and a *description*: a value
that names the type, never a class. Types are found by name, so that nothing of a checkpoint decides
which code runs. They lie in the room `ckpt.composites`, or are registered by users.
`take_apart` gives the parts of a tensor, `put_together` the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.descriptions import TYPE_KEY, descriptions
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Held, UnsupportedTensor, whole_tensor
from ckpt.layout.region import Shape
from ckpt.layout.tensor import PLAIN_CLASSES, is_dtensor, memory_of
from ckpt.wings import wing

DATA_KEY = "$data"
"""Marks, in values, what is no plain data; the other key is "value"."""

Cut = Mapping[int, Mapping[str, int]]
"""By a dim of the tensor that may be cut: the components that are cut with it, and along which of
their dims. Of the others each shard has the whole."""


class NoPlainForm(Exception):
    """Something in a context that cannot be stored, or is not known here."""


class Parts(NamedTuple):
    """A composite taken apart: live memory by name, and its context as a value."""

    components: Mapping[str, torch.Tensor]
    context: Any


@dataclass(frozen=True, slots=True)
class CompositeType:
    """How tensors of one type are taken apart and put together.

    `build(parts, shape, dtype)` is the inverse of `take`. `cut(context, shape)` says how DTensors
    over tensors of the type are cut; empty where they cannot be. `replace(live, new)` makes a live
    tensor equal to a new one whose components have other sizes; types without it are only filled in
    place. `dense` gives the numbers that a tensor stands for, by the library's own code; types
    without it have no such form. `outline(context)` is the dense form's shape and dtype, where
    these are not those of the tensor; None for a shape that is the tensor's. `is_wrapper`: `build`
    wraps what it gets and looks at no numbers. `blocks` are the elements along a dim of which each
    shard has a multiple. `filled(live)` follows a load into the components of a live tensor.
    """

    name: str
    take: Callable[[Any], Parts]
    build: Callable[[Parts, Shape, torch.dtype], torch.Tensor]
    cut: Callable[[Any, Shape], Cut] = lambda context, shape: {}
    replace: Callable[[Any, Any], None] | None = None
    dense: Callable[[Any], torch.Tensor] | None = None
    outline: Callable[[Any], tuple[Shape | None, torch.dtype]] | None = None
    is_wrapper: bool = False
    blocks: Mapping[int, int] = field(default_factory=dict)
    filled: Callable[[Any], None] | None = None


# --- which types there are -----------------------------------------------------------------------

_of_class: dict[type, CompositeType] = {}
_of_name: dict[str, CompositeType] = {}


def register_tensor_type(kind: type[torch.Tensor], name: str, cut: Cut | None = None) -> None:
    """Let tensors of class `kind` be saved and loaded under `name`, by `__tensor_flatten__` and
    `__tensor_unflatten__`, torch's protocol of traceable wrapper subclasses.

    `cut` is for DTensors over such tensors. With `{0: {"codes": 0, "scale": 0}}`, what cuts dim 0
    of the tensor cuts dim 0 of `codes` and `scale`, and each shard has the whole of all else.
    Without it, such DTensors are refused. Test it with slices of a tensor: nothing here can tell
    whether it is so.

    Call it before saving and before loading, on every rank. Raises ValueError for a class without
    the protocol, and for a name that another class has.
    """
    if not hasattr(kind, "__tensor_flatten__") or not hasattr(kind, "__tensor_unflatten__"):
        raise ValueError(
            f"{kind.__qualname__} has no __tensor_flatten__ and __tensor_unflatten__, so nothing "
            "says what it consists of"
        )
    known = type_named(name)
    if known is not None and _of_class.get(kind) is not known:
        raise ValueError(f"{name!r} is the name of another type of tensors; choose one of your own")
    declared = cut or {}
    wrapper_type = wing("composites.foreign_types").wrapper_type
    _of_class[kind] = _of_name[name] = wrapper_type(kind, name, lambda context, shape: declared)


def type_of(tensor: torch.Tensor) -> CompositeType | None:
    """The type of a composite, or of a DTensor with shards of that type; None for plain tensors,
    other DTensors and what nobody registered.
    """
    kind = type(tensor)
    if kind not in PLAIN_CLASSES:
        if is_dtensor(tensor):
            local = memory_of(tensor)
            inner = None if type(local) in PLAIN_CLASSES else type_of(local)
            made: CompositeType | None = inner and wing("composites.shards").sharded_type(inner)
            return made
        if hasattr(tensor, "__ckpt_pieces__"):
            return None
    # A plain class may still be sparse, nested or quantized: these consist of others, too.
    elif tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return None
    if (known := _of_class.get(kind)) is not None:
        return known
    other: CompositeType | None = wing("composites.torch_types").type_of(tensor)
    return other or wing("composites.foreign_types").type_of(tensor)


def type_named(name: str) -> CompositeType | None:
    """The type of a name; None when nobody registered it or its library is not installed."""
    if (known := _of_name.get(name)) is not None:
        return known
    other: CompositeType | None = wing("composites.torch_types").type_named(name)
    return other or wing("composites.foreign_types").type_named(name)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` consists of others."""
    return type_of(tensor) is not None


def unknown_types(value: Any) -> list[str]:
    """What is wrong with the descriptions in a value: types that are not known here."""
    names = [str(described[TYPE_KEY]) for described in descriptions(value)]
    return [_why_unknown(name) for name in names if type_named(name) is None]


def _why_unknown(name: str) -> str:
    library = name.partition(".")[0]
    return (
        f"is a tensor of type {name!r}, which is not known here: install {library}, or call "
        "ckpt.register_tensor_type(cls, name) before the load"
    )


# --- taken apart ---------------------------------------------------------------------------------


def take_apart(fqn: str, tensor: torch.Tensor, kind: CompositeType) -> Parts:
    """Components, detached, and context of a tensor. Raises UnsupportedTensor, naming `fqn`, for a
    component that is no tensor and a context without a plain form.
    """
    try:
        components, context = kind.take(tensor)
    except NoPlainForm as odd:
        raise UnsupportedTensor(
            f"{fqn}: the {kind.name} has {odd}, which is no plain data and is never pickled; save "
            "a plain tensor, or let its class offer __ckpt_pieces__()"
        ) from odd
    except (NotImplementedError, AttributeError) as error:
        raise UnsupportedTensor(
            f"{fqn}: the {kind.name} cannot be taken apart: {error}; save a plain tensor instead"
        ) from error
    for name, item in components.items():
        if not isinstance(item, torch.Tensor):
            raise UnsupportedTensor(
                f"{fqn}: the component {name} of the {kind.name} is a {type(item).__name__}, not a "
                "tensor"
            )
    # Detached: saving must not keep a graph alive.
    return Parts({name: item.detach() for name, item in components.items()}, context)


def description(
    tensor: torch.Tensor, kind: CompositeType, context: Any, components: Mapping[str, Any]
) -> dict[str, Any]:
    """What stands for `tensor` among values; `components` has what stands for each of them."""
    return {
        TYPE_KEY: kind.name,
        "shape": _outer_shape(tensor),
        "dtype": dtype_name(tensor.dtype),
        "context": context,
        "components": dict(components),
    }


def _outer_shape(tensor: torch.Tensor) -> Shape:
    """The shape of a composite. What differs along a nested tensor is -1."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.size(0), *(-1 for _ in range(tensor.dim() - 1)))
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


class Composite(NamedTuple):
    """A composite at a name, and its components, those of components included, each by its full
    name.
    """

    fqn: str
    tensor: torch.Tensor
    components: Mapping[str, torch.Tensor]


def composite_at(fqn: str, tensor: torch.Tensor) -> Composite | None:
    """What `tensor` consists of; None when it is no composite. Raises UnsupportedTensor."""
    kind = type_of(tensor)
    if kind is None:
        return None
    components: dict[str, torch.Tensor] = {}
    for name, component in take_apart(fqn, tensor, kind).components.items():
        inner = composite_at(f"{fqn}.{name}", component)
        components |= {f"{fqn}.{name}": component} if inner is None else inner.components
    return Composite(fqn, tensor, components)


def stand_in(composite: Composite, components: Sequence[Owned]) -> Owned:
    """What optimizers know of a composite parameter: a tensor of its shape that has no memory.

    State of its shape is laid out like it; its own elements are those of its components.
    """
    tensor = composite.tensor
    shape = _outer_shape(tensor)
    dtype = tensor.dtype if tensor.dtype.is_floating_point else torch.uint8
    # Of one element, expanded: the shape without its memory.
    one = torch.zeros((), dtype=dtype, device=tensor.device)
    if is_dtensor(tensor):
        made: Owned = wing("composites.shards").stand_in(composite.fqn, tensor, one)
        return made
    # No state is shaped like a nested tensor, which has no shape.
    local = one.expand((0,) if -1 in shape else shape)
    first = components[0].views[0].pieces[0]
    held = Held(None, components[0].synchronized, components[0].owners or ())
    return whole_tensor(composite.fqn, local, first.holders, held)._replace(param=tensor)


# --- put together --------------------------------------------------------------------------------


def put_together(
    described: Mapping[str, Any], fqn: str, components: Mapping[str, Any]
) -> torch.Tensor:
    """The tensor that a description stands for, over `components`. Raises Mismatch or InvalidState
    when that is not possible here.
    """
    name, shape = described[TYPE_KEY], described["shape"]
    dtype = getattr(torch, str(described["dtype"]), None)
    is_whole = isinstance(components, dict) and all(
        isinstance(item, torch.Tensor) for item in components.values()
    )
    if not is_whole or not isinstance(dtype, torch.dtype) or not isinstance(shape, tuple):
        raise Mismatch([f"{fqn}: the description of a {name!r:.100} is damaged"])
    kind = type_named(str(name))
    if kind is None:
        raise InvalidState([f"{fqn}: {_why_unknown(name)}"])
    if any(hasattr(item, "global_shape") for item in components.values()):
        kind = wing("composites.shards").sharded_type(kind)
    try:
        return kind.build(Parts(components, described["context"]), shape, dtype)
    except NoPlainForm as odd:
        raise Mismatch([f"{fqn}: a {name} cannot be put together here: {odd}"]) from odd
    except (TypeError, ValueError, KeyError, IndexError, AssertionError, RuntimeError) as error:
        # The library's own check, of another version than the one that saved.
        raise Mismatch(
            f"{fqn}: a {name} cannot be put together of {sorted(components)}: "
            f"{type(error).__name__}: {error!s:.300}; load with the version that saved it"
        ) from error


def zeros(
    described: Mapping[str, Any], shapes: Mapping[str, tuple[Shape, torch.dtype]], template: Any
) -> Mapping[str, torch.Tensor]:
    """Memory for the components of a composite, of whole `shapes` and dtypes, that is to lie like
    the DTensor `template`, which has its shape. Raises UnsupportedTensor, without a name.
    """
    kind = type_named(str(described[TYPE_KEY]))
    if kind is None:
        raise UnsupportedTensor("its type is not known here")
    made: Mapping[str, torch.Tensor] = wing("composites.shards").zeros(
        kind, described["context"], shapes, template
    )
    return made


def dense_form(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a composite stands for. Raises InvalidState where its library cannot say."""
    kind = type_of(tensor)
    assert kind is not None and kind.dense is not None, "asked for before"
    try:
        return kind.dense(tensor)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InvalidState(
            f"{fqn}: a {kind.name} is not made dense by its library: {type(error).__name__}: "
            f"{error!s:.300}; leave it out, or export it as it is"
        ) from error
