"""A world of ranks on devices that are none, for the time of one scenario.

Fake tensors do the operations. What of torch does not come to a dispatch mode is replaced for the
time: sizes and addresses of storages, `data` and `grad` of tensors, backward passes, and meshes,
whose own small tensors must be real.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from sharding.engine import store
from sharding.engine.torch_seam import number_as_newest
from tests.streams.device import Device, device, register
from tests.streams.groups import simulated_groups
from tests.streams.watching import Watching

__all__ = ["simulated"]

_GRAD, _OWNER = "_gradient_in_other_memory", "_gradient_of"


@contextmanager
def simulated() -> Iterator[Device]:
    """Everything inside runs on a simulated device; the process group must be there."""
    register()
    with device() as made, ExitStack() as stack:
        watching = Watching(made)
        for owner, name, value in _replacements(watching, made):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(simulated_groups(watching))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        made.modes = (FakeTensorMode(allow_non_fake_inputs=True), watching)
        for mode in made.modes:
            stack.enter_context(mode)
        yield made


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute has another value inside."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _replacements(watching: Watching, made: Device) -> Iterator[tuple[Any, str, Any]]:
    storage, tensor = torch.UntypedStorage, torch.Tensor
    data: Any = tensor.data
    grad: Any = tensor.grad
    resize, start, address = storage.resize_, storage.data_ptr, tensor.data_ptr
    run: Any = torch.autograd._engine_run_backward
    variable: Any = torch.autograd.Variable
    engine: Any = variable._execution_engine
    make_mesh: Any = DeviceMesh.__init__
    make_tensor = torch.tensor

    def new_resize(self: Any, nbytes: int) -> Any:
        watching.resized(self, nbytes)
        return resize(self, nbytes)

    def new_start(self: Any) -> int:
        known_start = watching.start_of(self)
        return start(self) if known_start is None else known_start

    def new_address(self: Any) -> int:
        return watching.address_of(self) if isinstance(self, FakeTensor) else address(self)

    def new_run(*args: Any, **kwargs: Any) -> Any:
        with made.backward():
            return run(*args, **kwargs)

    def new_queue(callback: Any) -> None:
        def called() -> None:
            made.current()  # the caller's stream waits for the others before callbacks run
            callback()

        engine.queue_callback(called)

    def new_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes(), torch.device("cpu"):
            make_mesh(self, *args, **kwargs)

    def new_tensor(values: Any, **kwargs: Any) -> torch.Tensor:
        # A number would be copied to the device with all modes off.
        if isinstance(values, float | int) and "device" in kwargs:
            return torch.full((), values, **kwargs)
        return make_tensor(values, **kwargs)

    def new_number(node: Any) -> None:
        # It runs on the stream that it was made on, wherever it comes in the order from now on.
        made.streams_of_nodes[node] = made.stream_of(node, made.current())
        number_as_newest(node)

    def take_grad(self: Any) -> Any:
        kept = vars(self).get(_GRAD)
        gradient = grad.__get__(self) if kept is None else kept
        if gradient is not None:
            vars(gradient)[_OWNER] = weakref.ref(self)
        return gradient

    def put_grad(self: Any, new: Any) -> None:
        vars(self).pop(_GRAD, None)
        grad.__set__(self, new)

    def put_data(self: Any, new: Any) -> None:
        fake = isinstance(self, FakeTensor) and isinstance(new, FakeTensor)
        if fake and self.fake_device != new.fake_device:
            _change_memory(self, new)
        else:
            data.__set__(self, new)

    yield storage, "resize_", new_resize
    yield storage, "data_ptr", new_start
    yield tensor, "data_ptr", new_address
    yield tensor, "data", property(data.__get__, put_data)
    yield tensor, "grad", property(take_grad, put_grad)
    yield torch, "tensor", new_tensor
    yield torch.autograd, "_engine_run_backward", new_run
    yield variable, "_execution_engine", _Engine(engine, new_queue)
    yield DeviceMesh, "__init__", new_mesh
    yield store, "number_as_newest", new_number


class _Engine:
    """torch's engine for backwards, but for one method."""

    def __init__(self, engine: Any, queue_callback: Callable[[Any], None]) -> None:
        self._engine = engine
        self.queue_callback = queue_callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _change_memory(tensor: Any, new: Any) -> None:
    """What setting `data` does where the new values are in other memory, the gradient staying.

    torch knows its own devices as alike in this, and a private one as different from all.
    """
    grad, made = tensor.grad, new.detach().requires_grad_(tensor.requires_grad)
    owner = vars(tensor).get(_OWNER, lambda: None)()
    is_its_gradient = owner is not None and owner.grad is tensor
    torch._C._swap_tensor_impl(tensor, made)
    if is_its_gradient:
        vars(owner)[_GRAD] = tensor  # what torch itself has there is as it was before
    tensor.fake_device, made.fake_device = made.fake_device, tensor.fake_device
    vars(tensor).pop(_GRAD, None)
    if grad is not None and grad.device == tensor.device and grad.shape == tensor.shape:
        tensor.grad = grad
    elif grad is not None:
        vars(tensor)[_GRAD] = grad
