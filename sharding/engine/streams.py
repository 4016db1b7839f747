"""The device seam: what runs on which stream, and what waits for what. On CPU all of it is nothing.

Four streams on an accelerator: the caller's own (compute), one for gathers, one for reductions, and
one for the all-reduce of hybrid sharding.

A caching allocator keeps memory by the stream that it was taken on, and gives it out again on that
stream as soon as the host has let go of it: work that the stream was given before is over by then,
work of others may not be. So the borrower of another stream's memory records an event after its
last use, and keeps the memory until the owner has waited on it. Streams wait, the host never does:
as far as it may run ahead, no more memory is in use. The allocator's own way, `record_stream`,
keeps the memory until the host sees that the use is over, which is too late for a host that runs
ahead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from sharding.engine.memory import GatheredMemory, TensorMemory


class Streams:
    """The seam for devices that compute in order with the caller: nothing to wait for."""

    reductions_ahead_max = 2
    """Reductions under way at once, unless the user says: while the host ends one, the other
    continues."""

    awaited: object = None
    """The handle of reductions that a user has still to wait for."""

    def current(self) -> object:
        """The stream that the caller's work goes to."""
        return None

    def gathering(self) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of gathers."""
        return nullcontext()

    def reducing(self) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of reductions."""
        return nullcontext()

    def repeating(self, users: Any = None) -> AbstractContextManager[Any]:
        """Work inside goes to the stream of all-reduces, or to the user's, after all that
        reductions were given.
        """
        return nullcontext()

    def mark(self) -> object:
        """A mark behind what the current stream was given so far."""
        return None

    def gathers_wait_for_compute(self) -> None:
        """Gathers from now on see what compute has done so far (an optimizer step)."""

    def gathers_wait_once_for(self, event: torch.Event) -> None:
        """The next `gathers_wait_for_compute` waits for this event instead."""

    def gathers_wait_for(self, mark: object) -> None:
        """Gathers from now on see what was done before the mark, and may use memory that was read
        before it.
        """

    def compute_waits_for_gathers(self) -> None:
        """Compute from now on sees what was gathered so far."""

    def reductions_wait_for_compute(self) -> None:
        """Reductions from now on see the gradients computed so far."""

    def reductions_wait_for(self, mark: object) -> None:
        """Reductions from now on may use memory that was read before the mark."""

    def reductions_have_read(self, taken_on: object) -> None:
        """What `taken_on`, the stream of memory that reductions have read, is given from now on may
        use that memory again.
        """

    def compute_waits_for_reductions(self) -> None:
        """Compute from now on sees what was reduced so far."""

    def will_free(self, tensor: torch.Tensor) -> None:
        """`tensor`'s memory is about to be released while compute may still read it."""

    def give_back(self, memory: TensorMemory, *, limited: bool) -> None:
        """Release gathered memory, which compute may still read. With `limited`, gathers wait for
        compute rather than take more memory than two units need.
        """
        memory.release()

    def take_back(self, memory: TensorMemory) -> None:
        """Gathers are about to fetch `memory`, which may have been given back a moment ago."""

    def release_all(self) -> None:
        """Gathers from now on wait for all reads of memory that was given back, and may use it."""

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

    def follow(self, before: Streams) -> None:
        """Take the place of others: what these are given from now on sees all that those were."""

    def finish(self) -> None:
        """Block until what was copied to the host is there, and what is copied from it has been
        read.
        """


class _GivenBack(NamedTuple):
    """Gathered memory that was given back. It is free once the stream of gathers waits for the mark
    behind its last use.
    """

    memory: TensorMemory
    storages: tuple[GatheredMemory, ...]
    """Its own at the time: it may have others since."""
    mark: Any


class _AcceleratorStreams(Streams):
    # Compute waits for the oldest before it packs the next gradients, in the memory of the former.
    reductions_ahead_max = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # High priority: communication that waits behind compute does not overlap it.
        self._gather = self._module.Stream(device, priority=-1)
        self._reduce = self._module.Stream(device, priority=-1)
        # Of its own, so that the next unit's reduction need not wait for an all-reduce.
        self._repeat = self._module.Stream(device, priority=-1)
        self._repeating: dict[Any, bool] = {}
        """The streams that all-reduces went to, those of hooks among them, and whether they have
        work that compute has not waited for.
        """
        self._held: list[_GivenBack] = []
        self._post_step: list[torch.Event] = []

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)

    def current(self) -> object:
        return self._compute()

    def mark(self) -> object:
        event = self._module.Event()
        event.record(self._compute())
        return event

    def gathering(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._gather)
        return context

    def reducing(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._reduce)
        return context

    def repeating(self, users: Any = None) -> AbstractContextManager[Any]:
        stream = self._repeat if users is None else users
        self._repeating[stream] = True
        stream.wait_stream(self._reduce)
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def gathers_wait_for_compute(self) -> None:
        if self._post_step:
            self._gather.wait_event(self._post_step.pop())
        else:
            self._gather.wait_stream(self._compute())

    def gathers_wait_once_for(self, event: torch.Event) -> None:
        self._post_step = [event]

    def gathers_wait_for(self, mark: object) -> None:
        self._gather.wait_event(mark)

    def compute_waits_for_gathers(self) -> None:
        self._compute().wait_stream(self._gather)

    def reductions_wait_for_compute(self) -> None:
        self._reduce.wait_stream(self._compute())

    def reductions_wait_for(self, mark: object) -> None:
        self._reduce.wait_event(mark)

    def reductions_have_read(self, taken_on: Any) -> None:
        taken_on.wait_stream(self._reduce)

    def compute_waits_for_reductions(self) -> None:
        self._compute().wait_stream(self._reduce)
        # A graph that is captured cannot wait for a stream that is not in it.
        for stream, is_unseen in self._repeating.items():
            if is_unseen:
                self._compute().wait_stream(stream)
                self._repeating[stream] = False

    def will_free(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._compute())

    def give_back(self, memory: TensorMemory, *, limited: bool) -> None:
        if memory.stream == self._gather and limited:
            self._held.append(_GivenBack(memory, memory.storages, self.mark()))
            # A gather on demand comes behind this in the host's order, but is to overlap with the
            # compute that still reads this memory: it waits for the memory before.
            self._free_held(keep=1)
            return
        # Taken on another stream, or unlimited: the allocator's own way holds it until it is free.
        for storage in memory.storages:
            self.will_free(storage.whole)
        memory.release()

    def take_back(self, memory: TensorMemory) -> None:
        for held in [one for one in self._held if one.memory is memory]:
            self._held.remove(held)
            self._free(held)

    def release_all(self) -> None:
        self._free_held(keep=0)

    def _free_held(self, *, keep: int) -> None:
        while len(self._held) > keep:
            self._free(self._held.pop(0))

    def _free(self, held: _GivenBack) -> None:
        self._gather.wait_event(held.mark)
        for storage in held.storages:
            storage.release()

    def to_host(
        self, tensor: torch.Tensor, *, pin: bool, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Not waited for: `finish` does so once a step, for all copies together.
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin) if into is None else into
        return host.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def follow(self, before: Streams) -> None:
        # The host's seam has nothing under way.
        if before is self or not isinstance(before, _AcceleratorStreams):
            return
        before.release_all()
        before.compute_waits_for_reductions()
        self._reduce.wait_stream(before._reduce)
        # Compute waits for gathers where it needs them.
        self._gather.wait_stream(before._gather)

    def finish(self) -> None:
        self._reduce.synchronize()
        for stream in self._repeating:
            stream.synchronize()
        self._gather.synchronize()


def streams_for(device: torch.device) -> Streams:
    """The seam for a compute device."""
    return Streams() if device.type == "cpu" else _AcceleratorStreams(device)
