"""Live memory that tensors of a state share: a load would write one over the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ckpt.layout.tensor import is_plain

# What the exact test may do: the question is NP-hard, and slices of matrices are a few steps of it.
STEPS_MAX = 100_000
# What `overlaps_itself` looks at element by element.
NUMEL_MAX = 1 << 26


class MemoryRanges:
    """Memory of tensors by their names, as byte ranges; `add` is for few, `add_dense` for thousands
    of contiguous ones, whose addresses are known.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._extents: list[int] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor, whatever its strides."""
        self._names.append(name)
        self._tensors.append(tensor)
        self._starts.append(tensor.data_ptr())
        self._extents.append(_extent(tensor))

    def add_dense(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> None:
        """Add contiguous tensors. No call for each: loads of many small ones feel it."""
        self._names += names
        self._tensors += tensors
        self._starts += starts
        self._extents += [tensor.nbytes for tensor in tensors]

    def overlapping(self) -> tuple[str, str] | None:
        """The names of two of the tensors that have an element in common, if any have.

        Sorting by address finds those that may; views that interleave without a common one pass.
        """
        starts = np.array(self._starts, dtype=np.uint64)
        ends = starts + np.array(self._extents, dtype=np.uint64)
        order = np.lexsort((ends, starts))
        if not np.any(np.maximum.accumulate(ends[order])[:-1] > starts[order][1:]):
            return None  # almost always
        before: dict[torch.device, list[int]] = {}
        for row in order.tolist():
            one = self._tensors[row]
            if not self._extents[row]:
                continue
            # Addresses of two devices may be the same numbers.
            near = [n for n in before.get(one.device, ()) if ends[n] > starts[row]]
            for other in near:
                if _share_an_element(self._tensors[other], one):
                    return self._names[other], self._names[row]
            before[one.device] = [*near, row]
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
        return np.shares_memory(np.asarray(_Addresses(a)), np.asarray(_Addresses(b)), STEPS_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False  # the checksums of what is read still tell


class _Addresses:
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
