"""Composites as values: descriptions, which name a type and refer to the components.

    {"$tensor_type": "torch.sparse_coo", "shape": (3, 4), "dtype": "float32",
     "context": {"coalesced": True},
     "components": {"indices": {"$tensor": "mask.indices"}, "values": {"$tensor": "mask.values"}}}

A component's name is that of the tensor, a dot, and its own; a component may be a composite itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch

from ckpt.errors import Mismatch
from ckpt.layout.composite import CompositeType, Parts
from ckpt.layout.composites import put_together, type_named, why_unknown
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.plain_context import NoPlainForm, context_of, plain_of
from ckpt.layout.region import Shape

# Values with this key need version 2 of the encoding, see `ckpt.format.codec`.
TYPE_KEY = "$tensor_type"
_KEYS = frozenset({TYPE_KEY, "shape", "dtype", "context", "components"})


def description(
    fqn: str, kind: CompositeType, shape: Shape, dtype: torch.dtype, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """The description of a composite; `parts` has its "context", as the type gives it, and for
    its "components" what stands for each. Raises UnsupportedTensor for a context without a plain
    form.
    """
    try:
        context = plain_of(parts["context"])
    except NoPlainForm as odd:
        raise UnsupportedTensor(
            f"{fqn}: the {kind.name} has {odd}, which is no plain data and is never pickled; save "
            "a plain tensor, or let its class offer __ckpt_pieces__()"
        ) from odd
    return {
        TYPE_KEY: kind.name,
        "shape": shape,
        "dtype": dtype_name(dtype),
        "context": context,
        "components": dict(parts["components"]),
    }


def is_description(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value stands for a composite."""
    return isinstance(value, dict) and value.keys() == _KEYS


def composite_of(described: Mapping[str, Any], fqn: str, components: Mapping[str, Any]) -> Any:
    """The tensor that a description stands for, over `components`. Raises Mismatch or InvalidState
    when that is not possible here.
    """
    name, shape = described[TYPE_KEY], described["shape"]
    dtype = getattr(torch, str(described["dtype"]), None)
    whole = isinstance(components, dict) and all(
        isinstance(item, torch.Tensor) for item in components.values()
    )
    if not whole or not isinstance(dtype, torch.dtype) or not isinstance(shape, tuple):
        raise Mismatch([f"{fqn}: the description of a {name!r:.100} is damaged"])
    first = next(iter(components.values()), None)
    device = torch.device("cpu") if first is None else first.device
    try:
        context = context_of(described["context"], device)
    except NoPlainForm as odd:
        raise Mismatch([f"{fqn}: a {name} cannot be put together here: {odd}"]) from odd
    return put_together(name, Parts(components, context), shape, dtype, fqn)


def unknown_types(value: Any) -> list[str]:
    """What is wrong with the descriptions in a value: types that are not known here."""
    if isinstance(value, dict):
        inside = [text for item in value.values() for text in unknown_types(item)]
        if is_description(value) and type_named(str(value[TYPE_KEY])) is None:
            return [why_unknown(str(value[TYPE_KEY])), *inside]
        return inside
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in unknown_types(item)]
    return []


def shown_type(described: Mapping[str, Any]) -> str:
    """A composite in a few words: its type, dtype and shape."""
    sizes = ", ".join("?" if size == -1 else str(size) for size in described["shape"])
    return f"{described[TYPE_KEY]} of {described['dtype']} ({sizes})"


def with_names(value: Any, name_of: Callable[[str], str], key: str) -> Any:
    """`value` with another name in each reference (the dicts with nothing but `key`)."""
    if isinstance(value, dict):
        if len(value) == 1 and key in value:
            return {key: name_of(value[key])}
        return {name: with_names(item, name_of, key) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [with_names(item, name_of, key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
