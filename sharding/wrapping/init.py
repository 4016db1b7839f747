"""Before anything is flattened: what a unit manages, on which device, with real and equal values.

Every function here looks at the bare module tree; nested units are seen, and left alone.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.layout.memory import accelerator
from ckpt.layout.tensor import local_tensor
from ckpt.state.values import join
from sharding.engine.collectives import Comm
from sharding.engine.store import ModuleParam
from sharding.engine.torch_seam import ParamPlace, is_marked_replicate
from sharding.flat.members import FlatParameter


@dataclass(frozen=True)
class Ignored:
    """What a unit leaves alone."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]
    buffers: frozenset[str]
    """Names relative to the wrapped module."""
    is_unit: Callable[[nn.Module], bool]
    """Whether a module is a unit already: all of it belongs to that."""


def find_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
    *,
    is_unit: Callable[[nn.Module], bool],
) -> Ignored:
    """What the arguments name, with everything below it; modules that torch's `replicate` serves
    too. Raises ValueError for wrong classes.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("pass ignored_modules or ignored_states, not both")
    states = list(ignored_states or ())
    listed_params = [state for state in states if isinstance(state, nn.Parameter)]
    listed_modules = [state for state in states if isinstance(state, nn.Module)]
    if len(states) not in (len(listed_params), len(listed_modules)):
        kinds = sorted({type(state).__name__ for state in states})
        raise ValueError(
            f"ignored_states must be all Parameters or all Modules, got {', '.join(kinds)}"
        )
    for module in list(ignored_modules or ()):
        if not isinstance(module, nn.Module):
            raise ValueError(f"ignored_modules must be Modules, got {type(module).__name__}")
        listed_modules.append(module)
    # torch's `replicate` reduces their gradients itself.
    listed_modules += [module for module in root.modules() if is_marked_replicate(module)]
    modules: set[nn.Module] = set()
    for module in listed_modules:
        if is_unit(module):
            raise ValueError(
                "ignored_modules must not contain wrapped modules; list what is inside"
            )
        # Units inside stay what they are, whatever is around them.
        modules.update(child for child in module.modules() if not is_unit(child))
    if root in modules:
        warnings.warn(
            "ignored_modules contains the module that is being wrapped: nothing of it is sharded",
            stacklevel=4,
        )
    params = {param for module in modules for param in module.parameters(recurse=False)}
    params.update(listed_params)
    # Below an ignored module there may be units; what they flattened is theirs, not ignored.
    kept = frozenset(param for param in params if not isinstance(param, FlatParameter))
    buffers = frozenset(
        join(prefix, name)
        for prefix, module in root.named_modules()
        if module in modules
        for name, _ in module.named_buffers(recurse=False)
    )
    return Ignored(frozenset(modules), kept, buffers, is_unit)


def modules_down_to(
    root: nn.Module, ends: Callable[[nn.Module], bool], *, remove_duplicate: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a tree in walk order, with those that `ends` is true of and nothing below.

    With duplicates: tied parameters, and those of shared modules, are known by all their names.
    """
    end = None  # what is below it starts with its name
    for name, module in root.named_modules(remove_duplicate=remove_duplicate):
        if end is None or not name.startswith(end):
            yield name, module
            if ends(module):
                end = f"{name}." if name else ""


def own_modules(root: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """The modules that belong to a unit around `root`, by every name they have, in walk order."""
    for name, module in modules_down_to(root, ignored.is_unit):
        if not ignored.is_unit(module) and module not in ignored.modules:
            yield name, module


def find_params(
    root: nn.Module, ignored: Ignored, *, managed: Collection[int]
) -> list[ModuleParam]:
    """The parameters that a unit around `root` is to absorb, in walk order, shared ones once.

    `managed` are identities of parameters that inner units hold. Raises ValueError where one of
    them is also a parameter of this unit: the tie would be lost.
    """
    places: dict[int, list[tuple[str, ParamPlace]]] = {}
    params: dict[int, nn.Parameter] = {}
    for prefix, module in own_modules(root, ignored):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored.params or isinstance(param, FlatParameter):
                continue
            fqn = join(prefix, name)
            if id(param) in managed:
                raise ValueError(
                    f"{fqn}: is tied to a parameter of a unit that does not contain it, and the "
                    "tie would be lost; make one unit of a module around both"
                )
            params[id(param)] = param
            places.setdefault(id(param), []).append((fqn, ParamPlace(module, name)))
    return [
        ModuleParam(
            fqn=places[key][0][0],
            param=param,
            places=tuple(place for _, place in places[key]),
            names=tuple(fqn for fqn, _ in places[key]),
        )
        for key, param in params.items()
    ]


# --- devices -------------------------------------------------------------------------------------


def choose_device(
    params: Iterable[nn.Parameter], device_id: int | str | torch.device | None
) -> torch.device:
    """The device to compute on: `device_id`, else that of the parameters, else the accelerator's
    current one, else the CPU.

    Raises RuntimeError or ValueError when the choice is not clear.
    """
    # On meta they have no place yet: they are given one.
    kinds = {param.device.type for param in params} - {"meta"}
    accelerators = sorted(kinds - {"cpu"})
    if len(accelerators) > 1:
        raise RuntimeError(
            f"parameters are on several kinds of devices: {', '.join(accelerators)}; move them to "
            "one before wrapping"
        )
    if "cpu" in kinds and accelerators and device_id is None:
        raise RuntimeError(
            f"some parameters are on the CPU and some on {accelerators[0]}: pass device_id"
        )
    if device_id is not None:
        device = _with_index(device_id)
        # Only what is on the CPU is moved there.
        for param in params:
            if param.device.type not in ("cpu", "meta") and param.device != device:
                raise ValueError(
                    f"device_id is {device}, but parameters are on {param.device}; pass that"
                )
        return device
    for param in params:
        if param.device.type not in ("cpu", "meta"):
            return param.device
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, _current_index())


def _current_index() -> int:
    # Renamed in newer versions of torch.
    module: Any = torch.accelerator
    return int((getattr(module, "current_device_index", None) or module.current_device_idx)())


def _with_index(device_id: int | str | torch.device) -> torch.device:
    if isinstance(device_id, int):
        kind = accelerator()
        if kind is None:
            raise ValueError(f"device_id={device_id}: this machine has no accelerator to count")
        return torch.device(kind.type, device_id)
    device = torch.device(device_id)
    index: int | None = device.index
    if device.type == "cpu" or index is not None:
        return device
    # Without an index it equals no tensor's device.
    index = _current_index()
    warnings.warn(
        f"device_id={device} has no index: the current device {index} is used; call "
        "torch.accelerator.set_device_index() before wrapping, or pass the index",
        stacklevel=5,
    )
    return torch.device(device.type, index)


def warn_of_slow_wrapping(
    params: Iterable[nn.Parameter], device_id: object, device: torch.device
) -> None:
    """Warn where parameters lie on the host and are computed with elsewhere: flattening, sharding
    and the broadcast of `sync_module_states` all happen where they lie.
    """
    if device_id is not None or device.type == "cpu":
        return
    if any(param.device.type == "cpu" for param in params):
        warnings.warn(
            f"the module is on the CPU and is flattened and sharded there, which is slow; pass "
            f"device_id={str(device)!r} to have it done on the device",
            stacklevel=5,
        )


def move_states(root: nn.Module, ignored: Ignored, device: torch.device) -> None:
    """Move what is on the CPU to the device: parameters with their gradients, and buffers."""
    if device.type == "cpu":
        return
    for prefix, module in own_modules(root, ignored):
        for param in module.parameters(recurse=False):
            if param in ignored.params or param.device.type != "cpu":
                continue
            # The same objects, with other memory: an optimizer or the user may hold on to them.
            param.data = param.detach().to(device)
            if param.grad is not None:
                param.grad.data = param.grad.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            is_ignored = join(prefix, name) in ignored.buffers
            if not is_ignored and buffer.device.type == "cpu":
                buffer.data = buffer.to(device)


# --- values --------------------------------------------------------------------------------------


def materialize(
    root: nn.Module,
    ignored: Ignored,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> bool:
    """Give parameters and buffers on the meta device memory and values; whether there were any.

    With `param_init_fn` it is called for every module, breadth first, else `reset_parameters()` of
    those that have something on meta. Raises what they raise, after a warning that names the class.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"param_init_fn must be callable, got {type(param_init_fn).__name__}")
    # In the order of torch's class, which decides what initializers draw.
    modules = list(_breadth_first(root, ignored))
    if not any(_has_meta(module, ignored) for module in modules):
        return _materialize_fakes(root, ignored, param_init_fn)
    for module in modules:
        try:
            with torch.no_grad():
                if param_init_fn is not None:
                    param_init_fn(module)
                elif _has_meta(module, ignored):
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
        except BaseException:
            # The exception does not say for which module it was raised.
            warnings.warn(
                f"{type(module).__name__} could not be given values on {device}: it needs a method "
                "reset_parameters() for what it owns, or pass param_init_fn",
                stacklevel=4,
            )
            raise
    return True


def _materialize_fakes(
    root: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> bool:
    """The same for fake tensors of torchdistX, an optional package; whether there were any."""
    # Fake tensors exist only where the package has been imported to make them.
    if sys.modules.get("torchdistx") is None:
        return False
    own = [module for _, module in own_modules(root, ignored)]
    params = (p for m in own for p in m.parameters(recurse=False) if p not in ignored.params)
    if not any(map(importlib.import_module("torchdistx.fake").is_fake, params)):
        return False
    if param_init_fn is not None:
        for module in _breadth_first(root, ignored):
            param_init_fn(module)
        return True
    importlib.import_module("torchdistx.deferred_init").materialize_module(
        root, check_fn=lambda one: not ignored.is_unit(one) and one not in ignored.modules
    )
    return True


def _breadth_first(root: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    queue = deque([root])
    seen = {root}
    while queue:
        module = queue.popleft()
        if module not in ignored.modules:
            yield module
        for child in module.children():
            if child not in seen and not ignored.is_unit(child):
                seen.add(child)
                queue.append(child)


def _has_meta(module: nn.Module, ignored: Ignored) -> bool:
    params = (p for p in module.parameters(recurse=False) if p not in ignored.params)
    return any(tensor.is_meta for tensor in (*params, *module.buffers(recurse=False)))


def sync_states(
    root: nn.Module,
    module_params: Iterable[ModuleParam],
    comms: Iterable[Comm],
    *,
    synced: set[int],
) -> None:
    """Give every rank the values of the first: the unit's parameters, and all buffers once.

    `comms` are the replicate and the shard group, in that order: first across, then inside.
    """
    tensors = [local_tensor(item.param) for item in module_params]
    for buffer in root.buffers():
        # A buffer that two modules share is broadcast once.
        if id(buffer) not in synced:
            synced.add(id(buffer))
            tensors.append(local_tensor(buffer))
    # Across first: the first rank of each shard group then has what it broadcasts inside.
    for comm in comms:
        comm.broadcast(tensors)
