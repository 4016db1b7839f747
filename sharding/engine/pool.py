"""Scratch memory that is used again instead of being freed and faulted in anew each step.

Fresh memory costs a page fault for every 4 KiB on CPU, which on small steps is a good part of the
time that a collective takes. Only buffers that no other object refers to come from here; memory
that autograd may refer to is allocated and released in place (see `sharding.engine.memory`).
"""

from __future__ import annotations

import torch

__all__ = ["BufferPool"]


class BufferPool:
    """1-D buffers by device. On devices with a caching allocator of their own nothing is kept."""

    def __init__(self, *, kept_max: int = 4) -> None:
        self._free: list[torch.Tensor] = []
        self._kept_max = kept_max

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of exactly that many elements; what is in it is undefined."""
        nbytes = numel * dtype.itemsize
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        best, size = -1, 0
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes and (best < 0 or buffer.numel() < size):
                best, size = index, buffer.numel()
        if best < 0:
            return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype)
        return self._free.pop(best)[:nbytes].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `take`. It must not be used any more."""
        if buffer.device.type != "cpu":
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        self._free.append(whole)
        if len(self._free) > self._kept_max:
            self._free.sort(key=torch.Tensor.numel)
            del self._free[0]

    def clear(self) -> None:
        """Free everything that is kept."""
        self._free.clear()
