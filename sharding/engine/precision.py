"""Mixed precision: which dtype parameters, gradients, buffers and inputs have, and when."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


@dataclasses.dataclass(frozen=True)
class Casts:
    """What a unit does to the floating point inputs and outputs of its modules."""

    dtype: torch.dtype | None = None
    """Of inputs; None leaves them as they are."""
    root_inputs: bool = True
    """Whether the inputs of the root are cast."""
    inputs: bool = False
    """Whether those of other units are."""
    output_dtype: torch.dtype | None = None


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in it replaced, through containers of all usual kinds.

    Returns containers of the same classes; what holds no tensor is passed on as it is.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(
            fn(value.data), value.batch_sizes, value.sorted_indices, value.unsorted_indices
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        mapped = {name: map_tensors(fn, getattr(value, name)) for name in fields}
        if all(field.init for field in dataclasses.fields(value)):
            # By the constructor: what a class keeps besides its fields follows them.
            return dataclasses.replace(value, **mapped)
        for name, new in mapped.items():
            object.__setattr__(value, name, new)
        return value
    if isinstance(value, dict):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        like = copy.copy(value)  # a user's own class: keep it, it may know more
        for key, item in mapped.items():
            like[key] = item
        return like
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple | set):
        return type(value)(map_tensors(fn, item) for item in value)
    return value


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """`value` with its floating point tensors in `dtype`, tracked by autograd."""
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, value)
