"""Host memory of tensors as bytes: views of live tensors without a copy, and tensors over bytes.

The only file that turns a tensor's address into memory. A view does not keep its tensor alive; the
caller holds on to the tensor for as long as it uses the view.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ckpt.layout.buffers import aligned_buffer, bytes_at
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Shape, Span
from ckpt.layout.tensor import copyable, local_tensor


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector out of a block that makes many small values.

    Plans are thousands of tuples; each few thousand of them start a collection of a heap that holds
    all of torch, which took 100 ms of a 60 ms plan (4,000 tensors, measured by CPU seconds).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy. Empty for an empty tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    return bytes_at(tensor.data_ptr(), nbytes)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in host memory in row-major order without gaps or lazy
    signs.
    """
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.dtype.is_complex and tensor.is_conj())
    )


def local_view(holding: Holding, piece: Piece) -> torch.Tensor:
    """The elements of `piece` as a view of the live local memory, in the piece's local shape.

    A span becomes a 1-D view; it needs row-major local memory. What torch cannot copy is seen as
    integers.
    """
    local = copyable(holding.local)
    region = piece.local_region
    if isinstance(region, Span):
        if not local.is_contiguous():
            raise ValueError(f"{piece.fqn}: a span lies in memory that is not contiguous")
        return local.view(-1)[region.start : region.stop]
    if region.shape == local.shape:
        return local
    return narrowed(local, region)


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `tensor` that `box` covers."""
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def tensor_over(buffer: memoryview, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """`buffer`, writable, seen as a tensor. The buffer's length must be that of the tensor."""
    # torch refuses to make a tensor over a buffer without bytes.
    if len(buffer) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def staging_buffer(nbytes: int, *, pinned: bool) -> memoryview:
    """Writable memory that starts at a page boundary; pinned for fast copies from a device."""
    if not pinned:
        return aligned_buffer(nbytes)
    # The array keeps the tensor alive, and the view keeps the array alive.
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data


def is_accelerator(device: torch.device) -> bool:
    """Whether the device works in parallel with the host: what is copied from it without blocking
    has arrived only when the host has waited.
    """
    current = None if device.type == "cpu" else accelerator()
    return current is not None and device.type == current.type


def accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has; None without any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices that work in parallel with the host and have any of the tensors, each once."""
    return tuple(filter(is_accelerator, dict.fromkeys([tensor.device for tensor in tensors])))


class SideStreams:
    """Reads device memory in parallel with the training's work that is queued there.

    Made in the thread that trains: what is read later, in any thread, is what that thread had
    queued before, on whatever stream of its own, and nothing later has to wait for it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._modules: list[Any] = []
        self._streams: list[Any] = []
        for device in devices:
            module: Any = torch.get_device_module(device)
            self._modules.append(module)
            if hasattr(module, "Stream"):  # MPS has one queue for all
                stream = module.Stream(device)
                # Behind what is queued now, in parallel with what is queued later.
                stream.wait_stream(module.current_stream(device))
                self._streams.append((module, stream))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that are started in the block go over the side; they are finished at its end."""
        with _all_entered(self._streams):
            try:
                yield
            finally:
                # After a failure too: who gets the buffers next would have them overwritten.
                for _, stream in self._streams:
                    stream.synchronize()
                if not self._streams:
                    for module in self._modules:
                        module.synchronize()


class CallersStreams:
    """The streams on which the thread that makes this works, for work that other threads do for it.

    Each thread has current streams of its own. What is written there is in no order with what the
    caller has queued: a forward that still reads the memory, for one.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        modules = [(torch.get_device_module(device), device) for device in devices]
        self._streams: list[tuple[Any, Any]] = [
            (module, module.current_stream(device))
            for module, device in modules
            if hasattr(module, "Stream")  # MPS has one queue for all
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread does in the block is queued where the caller's work is."""
        with _all_entered(self._streams):
            yield


@contextmanager
def _all_entered(streams: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, stream in streams:
            stack.enter_context(module.stream(stream))
        yield


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory behind a tensor, which names it while it lives; 0 without any."""
    return local_tensor(tensor).untyped_storage().data_ptr()
