"""What is said of a type of composites: how its tensors are taken apart and put together.

A composite is a tensor that consists of other tensors, its components, and of plain data, its
context. `composites` finds the type of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.layout.region import Shape

__all__ = ["CompositeType", "Parts", "wrapper_type"]


class Parts(NamedTuple):
    """A composite taken apart: live memory by name, and data of any kind that has a plain form."""

    components: Mapping[str, torch.Tensor]
    context: Any


@dataclass(frozen=True, slots=True)
class CompositeType:
    """How tensors of one type are taken apart and put together.

    `build(parts, shape, dtype)` is the inverse of `take`. `replace(live, new)` makes a live tensor
    equal to a new one whose components have other sizes; types without it are only filled in place.
    `dense` gives the numbers that a tensor stands for, by the library's own code; types without it
    have no such form. `outline(context)` is the dense form's shape and dtype, where these are not
    those of the tensor; None for a shape that is the tensor's. `is_wrapper`: `build` wraps what it
    gets and looks at no numbers.
    """

    name: str
    take: Callable[[Any], Parts]
    build: Callable[[Parts, Shape, torch.dtype], torch.Tensor]
    replace: Callable[[Any, Any], None] | None = None
    dense: Callable[[Any], torch.Tensor] | None = None
    outline: Callable[[Any], tuple[Shape | None, torch.dtype]] | None = None
    is_wrapper: bool = False


def wrapper_type(kind: Any, name: str) -> CompositeType:
    """The type of a traceable wrapper subclass, by torch's protocol of them."""

    def take(tensor: Any) -> Parts:
        names, context = tensor.__tensor_flatten__()
        return Parts({name: getattr(tensor, name) for name in names}, context)

    def build(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        strides = torch.empty(shape, device="meta").stride()
        made: torch.Tensor = kind.__tensor_unflatten__(
            dict(parts.components), parts.context, torch.Size(shape), strides
        )
        return made

    own = getattr(kind, "dequantize", None)
    # Every tensor has one of torch's, for torch's own quantized tensors.
    has_own = callable(own) and own is not torch.Tensor.dequantize
    dense = _dequantized if has_own else None
    return CompositeType(name, take, build, dense=dense, is_wrapper=True)


def _dequantized(tensor: Any) -> torch.Tensor:
    dense: torch.Tensor = tensor.dequantize()
    return dense
