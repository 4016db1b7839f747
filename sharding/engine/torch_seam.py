"""The few things for which torch has no public name, each behind one function of ours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
from torch.profiler import record_function

torch_replicate: Any
try:
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
except ImportError:  # before torch 2.9
    torch_replicate = None

# Parts of our LOCAL dicts have any lengths, where torch's are chunks, and so another class of spec.
# Scripts that load torch's dicts with `weights_only` do not list it; it holds numbers and ranks.
torch.serialization.add_safe_globals([EnumerableShardingSpec])

F = TypeVar("F", bound=Callable[..., Any])


class ParamPlace(NamedTuple):
    """One attribute of a module that shows a parameter."""

    module: nn.Module
    name: str

    def current(self) -> torch.Tensor | None:
        """What is registered as a parameter there."""
        return self.module._parameters.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Show the tensor, a Parameter or not, as the module's parameter."""
        # Past `__setattr__`, which takes no plain tensor in the place of a parameter.
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = tensor  # type: ignore[assignment]
        else:
            # Some modules keep lists of their weights up to date when they are set (RNNs).
            self.take()
            is_marked = not tensor.is_leaf and vars(tensor).pop("_is_param", False)
            setattr(self.module, self.name, tensor)
            if is_marked:  # no module takes a parameter that is no leaf
                vars(tensor)["_is_param"] = True

    def put_plain(self, tensor: torch.Tensor) -> None:
        """Show the tensor as a plain attribute: the module has no such parameter any more."""
        self.take()
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module.__dict__[self.name] = tensor
        else:
            setattr(self.module, self.name, tensor)

    def take(self) -> None:
        """Show nothing there."""
        self.module._parameters.pop(self.name, None)
        self.module.__dict__.pop(self.name, None)


def put_all(places: Sequence[Sequence[ParamPlace]], tensors: Sequence[torch.Tensor]) -> None:
    """Show each tensor at all places of its own."""
    for of_one, tensor in zip(places, tensors, strict=True):
        for place in of_one:
            module = place.module
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[place.name] = tensor  # type: ignore[assignment]
            else:
                place.put(tensor)


class GradDtype(NamedTuple):
    """What the user has set as a tensor's `grad_dtype`; None takes any."""

    dtype: torch.dtype | None


def grad_dtype_of(tensor: torch.Tensor) -> GradDtype | None:
    """What was set, from torch 2.15 on; None for nothing, which is the dtype of the tensor."""
    given: Any = tensor
    return (
        GradDtype(given.grad_dtype) if getattr(given, "_has_grad_dtype_override", False) else None
    )


def set_grad_dtype(tensor: torch.Tensor, wanted: GradDtype | None) -> None:
    """Let the tensor have what `grad_dtype_of` has returned for another; None changes nothing."""
    if wanted is not None:
        given: Any = tensor
        given.grad_dtype = wanted.dtype


def expect_gradients_in(ctx: Any, dtypes: Sequence[torch.dtype | None]) -> None:
    """Have autograd bring the gradient of each output of a function into this dtype, or take it as
    it comes where there is None, as it must be for outputs without a gradient.
    """
    ctx.set_output_grad_dtype(*dtypes)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call once when the backward pass that is running now has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which may have another dtype or device; one kernel on an
    accelerator where devices and layouts are alike.
    """
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def foreach_mul(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place, by a number or a scalar of their dtype in their memory: one
    kernel on an accelerator, and the host does not look at the scalar.
    """
    factors: Any = factor
    torch._foreach_mul_(list(tensors), factors)


def foreach_norm(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor, in its dtype but in float32 at least; one kernel on an accelerator.
    All tensors have one dtype and lie in one memory.
    """
    # Squares of half precision overflow, and doubles keep theirs.
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms: list[torch.Tensor] = list(torch._foreach_norm(list(tensors), order, dtype=wide))
    return norms


def chunk_cat(tensors: Sequence[torch.Tensor], ranks: int, out: torch.Tensor) -> None:
    """Cut each tensor along dim 0 as `torch.chunk` does, into as many parts as `out` has rows, and
    lay the parts of all tensors side by side in their row, zeros where a part is short. One kernel
    on an accelerator, casting too. All tensors have one dtype and at least one element.
    """
    torch._chunk_cat(list(tensors), 0, ranks, out=out)


def broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Give all ranks the tensors of the group's first one, in place, in messages of 250 MiB or one
    tensor more, torch's own size. Two of them are in memory at once, as copies.
    """
    c10d: Any = torch.distributed
    if tensors:
        c10d._broadcast_coalesced(group, list(tensors), 250 * 1024 * 1024, 0)


def passed_over(function: F) -> F:
    """Let `torch.compile` not trace this function; what it calls is compiled as if called alone.

    `torch.compiler.disable(recursive=False)` would have the body traced, up to its first break.
    """
    from torch._dynamo import decorators

    dynamo: Any = decorators
    passed: F = dynamo.skip(function)
    return passed


def number_as_newest(node: Any) -> None:
    """Let the node of the graph run as if it were made now: of the nodes that are ready, a backward
    runs the newest first.
    """
    # A node that is made now has the newest number, and no other node has the same.
    newest: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    node._set_sequence_nr(newest._sequence_nr())


NO_BACKWARD = -1
"""What `current_backward` returns outside of any backward."""


def current_backward() -> int:
    """A number for the backward pass that runs now; one inside another has a number of its own."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_profiling() -> bool:
    """Whether a profiler records this thread. Without one, ranges would only cost time."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


class _Collective:
    """What a `CommDebugMode` takes for an operation of torch's; it has run elsewhere."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"{self._overloadpacket}.default"


def shown_as(name: str) -> AbstractContextManager[Any]:
    """Messages sent inside are torch's collective of that name, as profilers and `CommDebugMode`
    see it.
    """
    # Imported only where some mode is on: nearly every program runs without one.
    if torch._C._len_torch_dispatch_stack():
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, CommDebugMode):
                counting: Any = mode
                counting.__torch_dispatch__(_Collective(name), ())
    return record_function(f"c10d::{name}") if is_profiling() else nullcontext()


def is_in_backward() -> bool:
    """Whether a backward pass is running now."""
    return current_backward() != NO_BACKWARD


def post_accumulate_hooks(
    tensors: Iterable[torch.Tensor],
) -> list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """What is to be called when tensors have their gradients: hooks that were registered for that,
    and optimizers that torch's `_apply_optimizer_in_backward` has attached.
    """
    hooks: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
    for tensor in tensors:
        registered: Any = tensor._post_accumulate_grad_hooks
        for hook in registered.values() if registered else ():
            hooks.append((tensor, hook))
        if optimizers := getattr(tensor, "_in_backward_optimizers", ()):
            hooks.append((tensor, partial(_step, optimizers)))
    return hooks


def _step(optimizers: Iterable[torch.optim.Optimizer], _: torch.Tensor) -> None:
    # Each steps before any gradient is dropped: several may be attached to one parameter.
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def run_policy(
    policy: Any, root: nn.Module, ignored: set[nn.Module], root_kwargs: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Which modules a policy object wants wrapped, and with which arguments."""
    wanted: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored, root_kwargs)
    return wanted


def is_policy_object(policy: Any) -> bool:
    """Whether the policy is one of torch's policy objects, rather than a function."""
    return hasattr(policy, "_run_policy")


def mark_applied(function: str, module: nn.Module, state: object) -> None:
    """Let torch know that `fully_shard` or `replicate` was applied to the module: the other one
    refuses it, and `torch.distributed.fsdp.fully_shard.state(module)`, which pipelines ask, is
    `state`.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    # torch keeps a state under the function inside of its decorator.
    applied: Any = fully_shard
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[function] = RegistryItem()
    module.__dict__.setdefault(STATE_KEY, OrderedDict())[applied.__wrapped__] = state


def is_marked_replicate(module: nn.Module) -> bool:
    """Whether torch's `replicate` was applied to the module: its gradients are reduced already."""
    from torch.distributed._composable.contract import _get_registry

    return "replicate" in (_get_registry(module) or {})


def root_mesh(mesh: Any) -> Any:
    """The mesh that this one was cut out of; itself when it is a whole one."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch before 2.8

    return _mesh_resources.get_root_mesh(mesh)


def larger_mesh(mesh: Any) -> Any:
    """The mesh of which `mesh` is a part; None when it is a whole one."""
    root = root_mesh(mesh)
    return None if root is None or root.mesh.numel() == mesh.mesh.numel() else root


def norm_counters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Counters of batches in norms, by name: what their state dicts lacked before version 2."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, torch.nn.modules.batchnorm._NormBase):
            counter = inner.num_batches_tracked
            if counter is not None:
                yield f"{prefix}.num_batches_tracked" if prefix else "num_batches_tracked", counter


def set_versions(module: nn.Module, prefix: str, destination: dict[str, Any]) -> None:
    """Note in a state dict that keeps versions which one each module below has, as torch does."""
    versions = getattr(destination, "_metadata", None)
    if versions is not None:
        for name, inner in module.named_modules(remove_duplicate=False):
            versions[f"{prefix}{name}".rstrip(".")] = {"version": inner._version}


def versioned_dict() -> dict[str, Any]:
    """An empty state dict that keeps versions."""
    destination: OrderedDict[str, Any] = OrderedDict()
    destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    return destination


def version_in(state_dict: Mapping[str, Any], names: Iterable[str]) -> int:
    """The version that a state dict has for a module, known by one of its names; 1 without."""
    versions: Any = getattr(state_dict, "_metadata", None) or {}
    known = (versions[name].get("version") for name in names if name in versions)
    return next((version for version in known if version is not None), 1)


def persistent_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the module's own buffers that its state dict has."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name


def classes_to_leave_alone(precision: Any) -> tuple[type[nn.Module], ...]:
    """The classes of modules that a `MixedPrecision` leaves in full precision."""
    return tuple(precision._module_classes_to_ignore or ())


class GroupMemory:
    """Memory of a process group's own allocator."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new 1-D tensor in it."""
        made: torch.Tensor = self._backend.allocate_tensor(numel, dtype=dtype, device=device)
        return made

    def register(self, buffer: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
        """The allocator has done that."""


def group_memory(group: torch.distributed.ProcessGroup, device: torch.device) -> GroupMemory | None:
    """The memory of the group's allocator for the device; None when it has none."""
    backend: Any = group._get_backend(device)
    return GroupMemory(backend) if backend.supports_tensor_alloc(device) else None


class SymmetricMemory:
    """Memory that ranks see of each other, from a pool that keeps it. Raises RuntimeError where
    torch has no such backend for it.
    """

    def __init__(self, backend: str) -> None:
        symmetric_memory.set_backend(backend)  # type: ignore[arg-type]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new 1-D tensor in it."""
        module: Any = torch.get_device_module(device)
        with module.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            return torch.empty(numel, dtype=dtype, device=device)

    def register(self, buffer: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
        """Exchange addresses with the other ranks, once for each buffer of the pool."""
        symmetric_memory.rendezvous(buffer, group=group.group_name)


def premultiplied_sum(factor: float) -> Any:
    """The reduction that multiplies by a factor first; not every backend has it."""
    older: Any = getattr(distributed_c10d, "_make_nccl_premul_sum", None)
    operation: Any = torch.distributed.ReduceOp.PREMUL_SUM
    return operation(factor) if older is None else older(factor)
