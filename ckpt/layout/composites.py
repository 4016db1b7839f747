"""Composites: tensors that consist of other tensors, their components, and of plain data.

A composite is stored as its components, tensors of names of their own, and a *description*: a value
that names the type, never a class. Types are found by name, so that nothing of a checkpoint decides
which code runs: torch's own kinds are in `torch_composites`, those of libraries in
`foreign_composites`, and others are registered by their users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.component_shards import ComponentShard, sharded_type, stand_in_shard
from ckpt.layout.composite import CompositeType, Parts, wrapper_type
from ckpt.layout.foreign_composites import library_type_named, library_type_of
from ckpt.layout.piece import Owned
from ckpt.layout.plain import UnsupportedTensor, whole_tensor
from ckpt.layout.region import Shape
from ckpt.layout.tensor import PLAIN_CLASSES, is_dtensor, memory_of
from ckpt.layout.torch_composites import outer_shape, torch_type_named, torch_type_of

_of_class: dict[type, CompositeType] = {}
_of_name: dict[str, CompositeType] = {}


def register_tensor_type(kind: type[torch.Tensor], name: str) -> None:
    """Let tensors of class `kind` be saved and loaded under `name`, by `__tensor_flatten__` and
    `__tensor_unflatten__`, torch's protocol of traceable wrapper subclasses.

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
    _of_class[kind] = _of_name[name] = wrapper_type(kind, name)


def type_of(tensor: torch.Tensor) -> CompositeType | None:
    """The type of a composite, or of a DTensor with shards of that type; None for plain tensors,
    other DTensors and what nobody registered.
    """
    kind = type(tensor)
    if kind not in PLAIN_CLASSES:
        if is_dtensor(tensor):
            local = memory_of(tensor)
            inner = None if type(local) in PLAIN_CLASSES else type_of(local)
            return None if inner is None else sharded_type(inner)
        if hasattr(tensor, "__ckpt_pieces__"):
            return None
    if (known := _of_class.get(kind)) is not None:
        return known
    return torch_type_of(tensor) or library_type_of(tensor)


def type_named(name: str) -> CompositeType | None:
    """The type of a name; None when nobody registered it or its library is not installed."""
    if (known := _of_name.get(name)) is not None:
        return known
    return torch_type_named(name) or library_type_named(name)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` consists of others."""
    return type_of(tensor) is not None


def take_apart(fqn: str, tensor: torch.Tensor, kind: CompositeType) -> Parts:
    """Components, detached, and context of a tensor. Raises UnsupportedTensor, naming `fqn`, for a
    component that is no tensor.
    """
    try:
        components, context = kind.take(tensor)
    except (NotImplementedError, AttributeError) as error:
        raise UnsupportedTensor(
            f"{fqn}: the {kind.name} cannot be taken apart: {error}; save a plain tensor instead"
        ) from error
    odd = [name for name, item in components.items() if not isinstance(item, torch.Tensor)]
    if odd:
        raise UnsupportedTensor(
            f"{fqn}: the component {odd[0]} of the {kind.name} is a "
            f"{type(components[odd[0]]).__name__}, not a tensor"
        )
    detached = {
        # A shard is detached already, and would lose its place.
        name: item if isinstance(item, ComponentShard) else item.detach()
        for name, item in components.items()
    }
    return Parts(detached, context)


class Composite(NamedTuple):
    """A composite at a name, and its components, those of components included, each by its full
    name.
    """

    fqn: str
    tensor: torch.Tensor
    type: CompositeType
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
    return Composite(fqn, tensor, kind, components)


def stand_in(composite: Composite, components: Sequence[Owned]) -> Owned:
    """What optimizers know of a composite parameter: a tensor of its shape that has no memory.

    State of its shape is laid out like it; its own elements are those of its components.
    """
    tensor = composite.tensor
    shape = outer_shape(tensor)
    dtype = tensor.dtype if tensor.dtype.is_floating_point else torch.uint8
    one = torch.zeros((), dtype=dtype, device=tensor.device)
    if is_dtensor(tensor):
        return stand_in_shard(composite.fqn, tensor, one.expand(memory_of(tensor).shape))
    # No state is shaped like a nested tensor, which has no shape.
    local = one.expand((0,) if -1 in shape else shape)
    first = components[0].views[0].pieces[0]
    like = whole_tensor(
        composite.fqn,
        local,
        holders=first.holders,
        synchronized=components[0].synchronized,
        owners=components[0].owners or (),
    )
    return like._replace(param=tensor)


def put_together(
    name: str, parts: Parts, shape: Shape, dtype: torch.dtype, fqn: str = ""
) -> torch.Tensor:
    """The tensor of the type `name`. Raises Mismatch when its type refuses these parts."""
    kind = type_named(name)
    if kind is None:
        raise InvalidState([f"{fqn}: {why_unknown(name)}"])
    if any(isinstance(item, ComponentShard) for item in parts.components.values()):
        kind = sharded_type(kind)
    try:
        return kind.build(parts, shape, dtype)
    except (TypeError, ValueError, KeyError, IndexError, AssertionError, RuntimeError) as error:
        # The library's own check, of another version than the one that saved.
        raise Mismatch(
            [
                f"{fqn}: a {name} cannot be put together of {sorted(parts.components)}: "
                f"{type(error).__name__}: {error!s:.300}; load with the version that saved it"
            ]
        ) from error


def dense_form(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a composite stands for. Raises InvalidState where its library cannot say."""
    kind = type_of(tensor)
    assert kind is not None and kind.dense is not None, "asked for before"
    try:
        return kind.dense(tensor)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InvalidState(
            [
                f"{fqn}: a {kind.name} is not made dense by its library: {type(error).__name__}: "
                f"{error!s:.300}; leave it out, or export it as it is"
            ]
        ) from error


def why_unknown(name: str) -> str:
    """What to do about a type that is not there."""
    library = name.partition(".")[0]
    return (
        f"is a tensor of type {name!r}, which is not known here: install {library}, or call "
        "ckpt.register_tensor_type(cls, name) before the load"
    )
