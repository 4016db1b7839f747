"""The device seam: what runs on which stream, and what waits for what. On CPU all of it is nothing.

Four streams on an accelerator: the caller's own (compute), one for gathers, one for reductions, and
one for the all-reduce of hybrid sharding.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Streams", "streams_for"]

_GATHERS_AHEAD_MAX = 2  # torch's own value: one in use, one under way


class Streams:
    """The seam for devices that compute in order with the caller: nothing to wait for."""

    def gathering(self) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of gathers."""
        return nullcontext()

    def reducing(self) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of reductions."""
        return nullcontext()

    def repeating(self) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of all-reduces, after all that reductions were given."""
        return nullcontext()

    def repeats_will_use(self, tensor: torch.Tensor) -> None:
        """`tensor`, of the stream of reductions, is used by that of all-reduces too."""

    def gathers_wait_for_compute(self) -> None:
        """Gathers from now on see what compute has done so far (an optimizer step)."""

    def gathers_wait_once_for(self, event: torch.Event) -> None:
        """The next `gathers_wait_for_compute` waits for this event instead."""

    def mark_compute(self) -> object:
        """A mark behind what compute was given so far, for `gathers_wait_for`."""
        return None

    def gathers_wait_for(self, mark: object) -> None:
        """Gathers from now on see what compute had done at the mark."""

    def compute_waits_for_gathers(self) -> None:
        """Compute from now on sees what was gathered so far."""

    def reductions_wait_for_compute(self) -> None:
        """Reductions from now on see the gradients computed so far."""

    def reductions_will_read(self, tensor: torch.Tensor) -> None:
        """`tensor`'s memory is read by reductions, also after compute has let go of it."""

    def compute_waits_for_reductions(self) -> None:
        """Compute from now on sees what was reduced so far."""

    def will_free(self, tensor: torch.Tensor) -> None:
        """`tensor`'s memory is about to be released while compute may still read it."""

    def freed(self, *, limited: bool) -> None:
        """Gathered memory was released; the limiter counts it."""

    def limit_gathers(self) -> None:
        """Hold the CPU back while too many gathers are ahead of compute."""

    def to_host(
        self, tensor: torch.Tensor, *, pin: bool, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tensor in the host's memory, `into` or new one (pinned or not), once `finish` has
        returned: until then the host must not read it.
        """
        if into is None or into is tensor:
            return tensor
        return into.copy_(tensor)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of the host's memory on the device, in order after `to_host` of this stream."""
        return tensor.to(device)

    def finish(self) -> None:
        """Block until what was copied to the host is there, and what is copied from it has been
        read.
        """


class _AcceleratorStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # High priority: communication that waits behind compute does not overlap it.
        self._gather = self._module.Stream(device, priority=-1)
        self._reduce = self._module.Stream(device, priority=-1)
        # Of its own, so that the next unit's reduction need not wait for an all-reduce.
        self._repeat = self._module.Stream(device, priority=-1)
        self._free_events: deque[Any] = deque()
        self._post_step: list[torch.Event] = []

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)

    def gathering(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._gather)
        return context

    def reducing(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._reduce)
        return context

    def repeating(self) -> AbstractContextManager[Any]:
        self._repeat.wait_stream(self._reduce)
        context: AbstractContextManager[Any] = self._module.stream(self._repeat)
        return context

    def repeats_will_use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._repeat)

    def gathers_wait_for_compute(self) -> None:
        if self._post_step:
            self._gather.wait_event(self._post_step.pop())
        else:
            self._gather.wait_stream(self._compute())

    def gathers_wait_once_for(self, event: torch.Event) -> None:
        self._post_step = [event]

    def mark_compute(self) -> object:
        event = self._module.Event()
        event.record(self._compute())
        return event

    def gathers_wait_for(self, mark: object) -> None:
        self._gather.wait_event(mark)

    def compute_waits_for_gathers(self) -> None:
        self._compute().wait_stream(self._gather)

    def reductions_wait_for_compute(self) -> None:
        self._reduce.wait_stream(self._compute())

    def reductions_will_read(self, tensor: torch.Tensor) -> None:
        # The allocator may give the memory to others only when this stream has read it.
        tensor.record_stream(self._reduce)

    def compute_waits_for_reductions(self) -> None:
        self._compute().wait_stream(self._reduce)
        self._compute().wait_stream(self._repeat)

    def will_free(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._compute())

    def freed(self, *, limited: bool) -> None:
        if limited:
            event = self._module.Event()
            event.record()
            self._free_events.append(event)

    def limit_gathers(self) -> None:
        while len(self._free_events) >= _GATHERS_AHEAD_MAX:
            self._free_events.popleft().synchronize()

    def to_host(
        self, tensor: torch.Tensor, *, pin: bool, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin) if into is None else into
        return host.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def finish(self) -> None:
        self._reduce.synchronize()
        self._repeat.synchronize()
        self._gather.synchronize()


def streams_for(device: torch.device) -> Streams:
    """The seam for a compute device."""
    return Streams() if device.type == "cpu" else _AcceleratorStreams(device)
