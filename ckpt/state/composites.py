"""Composites as values and back: `ckpt.state.descriptions` has the form of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.layout.composite import CompositeType, Parts
from ckpt.layout.composites import put_together, type_named, why_unknown
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.plain_context import NoPlainForm, context_of, plain_of
from ckpt.layout.region import Shape
from ckpt.state.descriptions import TYPE_KEY, is_description


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
