"""Live memory that tensors of a state share: a load would write one over the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.layout.tensor import is_plain

# What the exact test may do: the question is NP-hard, and slices of matrices are a few steps of it.
STEPS_MAX = 100_000
# What `overlaps_itself` looks at element by element.
NUMEL_MAX = 1 << 26


class _Memory(NamedTuple):
    """A tensor, and where its memory ends; `end` is one past the last byte."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor


def overlapping(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """The names of two of these tensors that have an element of memory in common, if any do.

    Sorting by address finds those that may; views that interleave without a common element pass.
    """
    starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    ends = starts + np.array([_extent(tensor) for tensor in tensors], dtype=np.uint64)
    order = np.lexsort((ends, starts))
    starts, ends = starts[order], ends[order]
    if not np.any(np.maximum.accumulate(ends)[:-1] > starts[1:]):
        return None  # as good as always
    before: dict[torch.device, list[_Memory]] = {}
    for row, start, end in zip(order.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if start == end:
            continue
        one = _Memory(start, end, names[row], tensors[row])
        device = one.tensor.device  # addresses of two devices may be the same numbers
        before[device] = [other for other in before.get(device, ()) if other.end > start]
        for other in before[device]:
            if _share_an_element(other.tensor, one.tensor):
                return other.name, one.name
        before[device].append(one)
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a plain tensor share memory, as after `expand` or `unfold`."""
    if not is_plain(tensor):
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if 0 in tensor.shape or tensor.numel() > NUMEL_MAX:
        return bool(tensor.numel())
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(offsets)) < len(offsets)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of memory to the end of the last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * s for size, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _share_an_element(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), STEPS_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False  # the checksums of what is read still tell


class _Place:
    """What numpy needs to know of memory that nothing reads here, on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": "|u1",
            "shape": (*tensor.shape, itemsize),
            "strides": (*(stride * itemsize for stride in tensor.stride()), 1),
        }
