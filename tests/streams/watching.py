"""Every operation of a scenario: on which agent it runs, which bytes it reads and writes.

The operations themselves are done by fake tensors, which have shapes and storages but no values.
What would need a value gets one that is made up: 1.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.streams.allocator import Block
from tests.streams.clocks import Access, Agent, Finding, unordered, with_access
from tests.streams.device import NAME, Device

__all__ = ["Watching", "is_ours"]

aten = torch.ops.aten
prim = torch.ops.prim

# They give memory, or another look at memory, and touch none of it.
_TOUCH_NOTHING = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::detach", "aten::alias", "aten::lift_fresh",
    "aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::empty_permuted",
    "aten::_reshape_alias", "aten::detach_", "aten::resize_as_",
}  # fmt: skip
# They move bytes and compute nothing.
_COPIES = {
    "aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::stack",
    "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat",
    "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
    "aten::_pin_memory", "aten::index_select", "aten::slice_scatter", "aten::unfold_copy",
}  # fmt: skip
_ACROSS = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


class _Storage:
    """Where a storage has its bytes."""

    def __init__(self, block: Block | None, nbytes: int, *, on_device: bool) -> None:
        self.block = block
        self.nbytes = nbytes
        self.on_device = on_device


class _Kind(NamedTuple):
    """What an operator does with its arguments."""

    name: str
    touches: bool
    written: tuple[int, ...]
    """Positions of arguments that are written."""
    written_names: tuple[str, ...]
    reads_written: bool


class Watching(TorchDispatchMode):
    """Gives every operation to the agent that does it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._storages: dict[int, _Storage] = {}
        self._deaths: dict[int, Any] = {}
        device.record_stream = self._record_stream

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(is_ours(one) for one in types):
            return NotImplemented
        if func is prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if _is_of_real_values(args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is aten.record_stream.default:
            return self._record_stream(args[0], args[1])
        if func is aten._local_scalar_dense.default:
            return self._read_value(args[0])
        if func is aten.equal.default:
            for one in args:
                self._read_value(one)
            return True
        if func is aten.is_pinned.default:
            return self.block_of(args[0]).is_pinned
        pinned = bool(kwargs.get("pin_memory"))
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func is aten._pin_memory.default:
            func, pinned = aten.clone.default, True
        if torch.is_grad_enabled():
            self._device.note_forward()
        kind = _kind_of(func)
        if kind.name.startswith("_c10d_functional::"):
            return self._collective(func, kind, args, kwargs)
        result = func(*args, **kwargs)
        self._account(kind, args, kwargs, result, pinned)
        return result

    def _account(self, kind: _Kind, args: Any, kwargs: Any, result: Any, pinned: bool) -> None:
        inputs = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(result))
        fresh = [one for one in outputs if self._is_new(one)]
        stream = self._device.current().agent
        pinned = pinned or (
            kind.name == "aten::_to_copy"
            and bool(kwargs.get("non_blocking"))
            and any(is_on_device(one) for one in inputs)
        )
        for one in fresh:
            self._place(one, stream, pinned, kind.name)
        if not kind.touches:
            return
        written = [*fresh]
        for position in kind.written:
            if position < len(args):
                written += tensors_in(args[position])
        for name in kind.written_names:
            written += tensors_in(kwargs.get(name))
        if kind.name == "fsdp::all_gather_copy_in":
            written.append(result[0])
        read = [one for one in inputs if kind.reads_written or not any(one is w for w in written)]
        if kind.name == "fsdp::all_gather_copy_in":
            read = list(args[0])
        if kind.name.endswith("_like") or kind.name.startswith("aten::new_"):
            read = []  # of the tensor only the shape is asked for
        self._run(kind, read, written, non_blocking=_is_non_blocking(kind, args, kwargs))

    def _run(
        self,
        kind: _Kind,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
        *,
        non_blocking: bool,
    ) -> None:
        device = self._device
        host = device.host
        host.step()
        touched = [*read, *written]
        if not any(is_on_device(one) for one in touched):
            self._touch(host, kind.name, read, written)
            return
        stream = device.current().agent
        device.works(stream, kind.name)
        device.counts["kernels"] += 1
        device.counts[kind.name] += 1
        if kind.name in _COPIES:
            device.counts["copies"] += 1
        stream.learn(host.moment())
        host_read = [one for one in read if not is_on_device(one)]
        host_written = [one for one in written if not is_on_device(one)]
        is_async = device.skips_waits or (
            non_blocking
            and all(self.block_of(one).is_pinned for one in (*host_read, *host_written))
        )
        if kind.name not in _ACROSS or is_async or not (host_read or host_written):
            # Scalars in the host's memory are read when the kernel is started.
            early = host_read if kind.name not in _ACROSS else []
            self._touch(host, kind.name, early, [])
            stream.step()
            left = [one for one in read if not any(one is other for other in early)]
            self._touch(stream, kind.name, left, written)
            return
        if non_blocking:
            device.counts["copies of memory that is not pinned"] += 1
        self._touch(host, kind.name, host_read, [])
        stream.step()
        device_read = [one for one in read if is_on_device(one)]
        self._touch(stream, kind.name, device_read, [one for one in written if is_on_device(one)])
        self._touch(stream, kind.name, [], host_written)
        device.host_waits(stream.moment(), f"{kind.name} of memory of the host")

    def _read_value(self, tensor: torch.Tensor) -> Any:
        """The host looks at a value."""
        device = self._device
        device.host.step()
        if is_on_device(tensor):
            stream = device.current().agent
            stream.learn(device.host.moment())
            stream.step()
            self._touch(stream, "reading a value", [tensor], [])
            device.host_waits(stream.moment(), "reading a value")
        else:
            self._touch(device.host, "reading a value", [tensor], [])
        return _one_of(tensor.dtype)

    def _record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        agent = self._device.streams[stream.stream_id].agent
        block = self._storages[tensor.untyped_storage()._cdata].block
        if block is not None:
            block.users.add(agent)

    # --- collectives ------------------------------------------------------------------------------

    def collective(
        self, agent: Agent, what: str, read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """A process group's own stream reads and writes, after what the current one was given."""
        device = self._device
        device.host.step()
        device.counts["collectives"] += 1
        device.counts[what] += 1
        for one in (*read, *written):
            if self._is_new(one):
                self._place(one, device.current().agent, False, what)
        if not any(is_on_device(one) for one in (*read, *written)):
            self._touch(device.host, what, read, written)
            return
        agent.learn(device.host.moment())
        device.current().passes_on_to(agent)
        agent.step()
        self._touch(agent, what, read, written)

    def _collective(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """A functional collective, which autograd and DTensors use; `wait_tensor` waits for it."""
        from tests.streams.groups import agent_of_name

        result = func(*args, **kwargs)
        if kind.name.endswith("wait_tensor"):
            pending = self._pending.pop(args[0].untyped_storage()._cdata, None)
            if pending is not None:
                self._device.current().agent.learn(pending)
            return result
        name = next(one for one in reversed(args) if isinstance(one, str))
        agent = agent_of_name(name)
        outputs = list(tensors_in(result))
        self.collective(agent, kind.name, list(tensors_in(args[0])), outputs)
        for one in outputs:
            self._pending[one.untyped_storage()._cdata] = agent.moment()
        return result

    @functools.cached_property
    def _pending(self) -> dict[int, Any]:
        return {}

    # --- bytes ------------------------------------------------------------------------------------

    def _touch(
        self, agent: Agent, what: str, read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        for tensors, writes in ((read, False), (written, True)):
            for one in tensors:
                self._access(agent, what, one, writes)

    def _access(self, agent: Agent, what: str, tensor: torch.Tensor, writes: bool) -> None:
        if not tensor.numel():
            return
        first, last = _extent(tensor)
        block = self._block_with(tensor, last, what, agent)
        if block is None:
            return
        label = f"{what} of {_shape(tensor)}"
        new = Access(block.start + first, block.start + last, agent, agent.time, writes, label)
        for old in unordered(new, block.history):
            self._device.report(
                Finding("race", f"{new} what {old} ({block.origin}); nothing orders them")
            )
        block.history = with_access(new, block.history)

    def _block_with(self, tensor: torch.Tensor, last: int, what: str, agent: Agent) -> Block | None:
        storage = self._storage_of(tensor)
        if storage.block is None or last > storage.nbytes:
            text = f"{what} of {_shape(tensor)} on {agent} uses memory that was given away"
            self._device.report(Finding("freed", text))
            return None
        return storage.block

    def block_of(self, tensor: torch.Tensor) -> Block:
        """The memory of the tensor."""
        block = self._storage_of(tensor).block
        return Block(0, 0, None, (0, 0)) if block is None else block

    def address_of(self, tensor: torch.Tensor) -> int:
        """Where the tensor starts; 0 without memory."""
        block = self._storage_of(tensor).block
        if block is None or not tensor.untyped_storage().nbytes():
            return 0
        return block.start + tensor.storage_offset() * tensor.element_size()

    def start_of(self, storage: torch.UntypedStorage) -> int | None:
        """Where the storage starts, 0 without memory; None for one that is not known."""
        watched = self._storages.get(storage._cdata)
        if watched is None:
            return None
        return 0 if watched.block is None else watched.block.start

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._storages

    def _storage_of(self, tensor: torch.Tensor) -> _Storage:
        if self._is_new(tensor):
            self._place(tensor, self._device.current().agent, False, "made outside")
        return self._storages[tensor.untyped_storage()._cdata]

    def _place(self, tensor: torch.Tensor, stream: Agent, pinned: bool, origin: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        block = self._new_block(storage.nbytes(), stream, is_on_device(tensor), pinned)
        block.origin = f"{origin} {_shape(tensor)}"
        self._storages[key] = _Storage(block, storage.nbytes(), on_device=is_on_device(tensor))
        self._deaths[key] = weakref.ref(storage, lambda ref: self._died(key))

    def _new_block(self, nbytes: int, stream: Agent, on_device: bool, pinned: bool) -> Block:
        allocator = self._device.allocator
        if on_device:
            return allocator.allocate(nbytes, stream)
        return allocator.on_host(nbytes, pinned=pinned)

    def _died(self, key: int) -> None:
        self._deaths.pop(key, None)
        storage = self._storages.pop(key, None)
        if storage is not None and storage.block is not None:
            self._device.allocator.free(storage.block)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """The storage gets memory of another size, and loses what it had."""
        watched = self._storages.get(storage._cdata)
        if watched is None or watched.nbytes == nbytes:
            return
        old, watched.nbytes = watched.block, nbytes
        origin = "" if old is None else old.origin
        if old is not None:
            self._device.allocator.free(old)
        watched.block = None
        if nbytes:
            stream = self._device.current().agent
            watched.block = self._new_block(nbytes, stream, watched.on_device, False)
            watched.block.origin = origin or "a resized storage"


# --- what operators and tensors say of themselves ------------------------------------------------


def is_ours(kind: type) -> bool:
    """Whether tensors of the class are plain or fake, rather than wrappers around such."""
    return (
        kind in (torch.Tensor, torch.nn.Parameter, FakeTensor)
        or not issubclass(kind, torch.Tensor)
        or kind.__module__.startswith(("sharding.", "torch.nn.parameter"))
    )


def _is_of_real_values(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it computes with real tensors of the host alone, such as the ranks of a mesh."""
    tensors = list(tensors_in((args, kwargs)))
    target = torch.device(kwargs.get("device") or "cpu")
    return (
        bool(tensors)
        and target.type == "cpu"
        and not any(isinstance(one, FakeTensor) for one in tensors)
    )


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its memory is the device's."""
    return _device_of(tensor).type == NAME


def _device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments that have memory."""
    if isinstance(value, torch.Tensor):
        if _device_of(value).type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    written, names = [], []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                written.append(position)
    is_view = not written and any(
        one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
    )
    name = schema.name
    touches = not is_view and name not in _TOUCH_NOTHING
    fills = name in {"aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_"}
    reads_written = not fills and any(name_ not in ("out",) for name_ in names)
    return _Kind(name, touches, tuple(written), tuple(names), reads_written)


def _is_non_blocking(kind: _Kind, args: Any, kwargs: Any) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return kind.name in ("aten::copy_", "aten::_foreach_copy_") and len(args) > 2 and bool(args[2])


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From which byte of its storage to which the tensor reaches."""
    itemsize = tensor.element_size()
    first = tensor.storage_offset()
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * itemsize, (last + 1) * itemsize


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _one_of(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
