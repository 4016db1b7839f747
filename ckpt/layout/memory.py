"""Memory of tensors: views of live tensors without a copy, tensors over bytes, and what several
tensors share, which a load would write twice.

The only file that turns a tensor's address into memory. A view does not keep its tensor alive; the
caller holds on to the tensor for as long as it uses the view.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Shape, Span
from ckpt.layout.tensor import copyable, is_plain, local_tensor
from storage.ranges import aligned_buffer, bytes_at

# What the exact test may do: the question is NP-hard, and slices of matrices are a few steps of it.
STEPS_MAX = 100_000
# What `overlaps_itself` looks at element by element.
NUMEL_MAX = 1 << 26


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
