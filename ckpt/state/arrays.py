"""Numpy in a state: arrays are tensors in the same memory, scalars are values.

A scalar is stored as Python's int, float, bool, str or bytes, which has every one of its values; a
load gives it the type that the live state has at the same place, as with dicts of other kinds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
