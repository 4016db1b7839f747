"""Which modules of a tree become units of their own.

The policies themselves are torch's: functions `(module, recurse, nonwrapped_numel) -> bool`, and
the policy objects `ModuleWrapPolicy` and `CustomPolicy`. Here is how they are applied: children
first, the root never, a shared module at its first place only.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from sharding.engine.precision import cast_floating, map_tensors
from sharding.engine.torch_seam import classes_to_leave_alone, is_policy_object, run_policy
from sharding.wrapping.init import Ignored

Wrapper = Callable[..., nn.Module]


class WrapRequest(NamedTuple):
    """A module that is to become a unit, and the arguments of its wrapper."""

    name: str
    module: nn.Module
    kwargs: dict[str, Any]


def auto_wrap(
    root: nn.Module,
    policy: Any,
    ignored: Ignored,
    *,
    wrapper: Wrapper,
    kwargs: Mapping[str, Any],
) -> None:
    """Wrap the descendants of `root` that the policy names, in place, the innermost first.

    Raises ValueError when something below is wrapped already, or would mix frozen and trainable
    parameters without original ones.
    """
    for name, module in root.named_modules():
        if isinstance(wrapper, type) and isinstance(module, wrapper):
            raise ValueError(
                f"{name or 'the module'}: is wrapped already; auto_wrap_policy needs a tree "
                "without wrappers"
            )
    # Parents before children. The root is the unit that is being made around all of them.
    if is_policy_object(policy):
        wanted = run_policy(policy, root, set(ignored.modules), dict(kwargs))
        wanted.pop(root, None)
    else:
        wanted = {module: {} for module in _chosen(root, policy, ignored, _apart(kwargs))}
    requests = [
        WrapRequest(name, module, {**kwargs, **wanted[module]})
        for name, module in root.named_modules()
        if module in wanted
    ]
    # As torch: policies that are functions are not checked.
    if is_policy_object(policy):
        _check_mixed(requests, ignored, bool(kwargs.get("use_orig_params")))
    requests = _with_full_precision(root, requests, ignored, dict(kwargs))
    # Taken before anything is wrapped, while all children stand in their own parents.
    # A shared module has several parents.
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    for request in reversed(requests):
        wrapped = wrapper(request.module, **request.kwargs)
        for parent, name in places[request.module]:
            setattr(parent, name, wrapped)


def _chosen(
    root: nn.Module,
    policy: Callable[..., bool],
    ignored: Ignored,
    apart: tuple[type[nn.Module], ...],
) -> set[nn.Module]:
    """What a policy function wants as units, applied from the leaves up. `apart`: classes that
    become units whatever it decides, see `_with_full_precision`.
    """
    chosen: set[nn.Module] = set()
    seen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Apply the policy to a subtree; returns how many elements got into units."""
        numel = sum(p.numel() for p in module.parameters() if p not in ignored.params)
        enters = policy(module=module, recurse=True, nonwrapped_numel=numel)
        # Classes that become units anyway may be below what the policy does not enter.
        if not enters and not apart:
            return 0
        wrapped = 0
        for child in module.children():
            # A shared module is counted and wrapped at its first place only.
            if child not in ignored.modules and id(child) not in seen:
                seen.add(id(child))
                wrapped += visit(child)
        if isinstance(module, apart):
            return numel  # in a unit of its own, so not in that of any parent
        rest = numel - wrapped
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=rest):
            chosen.add(module)
            return numel
        return wrapped

    visit(root)
    return chosen


def _apart(kwargs: Mapping[str, Any]) -> tuple[type[nn.Module], ...]:
    """Classes of modules that the mixed precision in a wrapper's arguments leaves alone."""
    precision = kwargs.get("mixed_precision")
    return () if precision is None else classes_to_leave_alone(precision)


def _check_mixed(requests: list[WrapRequest], ignored: Ignored, use_orig_params: bool) -> None:
    """Refuse, or warn of, units that would mix frozen and trainable parameters."""
    # A flat parameter wants a gradient or not as a whole.
    own = {id(request.module) for request in requests}
    for request in requests:
        flags: dict[bool, list[str]] = {True: [], False: []}
        for name, param in _params_of_unit(request.module, own):
            if param not in ignored.params:
                flags[param.requires_grad].append(name)
        if flags[True] and flags[False]:
            text = (
                f"{request.name}: has frozen parameters ({', '.join(flags[False])}) next to "
                f"trainable ones ({', '.join(flags[True])})"
            )
            if not use_orig_params:
                raise ValueError(f"{text}; wrap them apart or pass use_orig_params=True")
            warnings.warn(f"{text}; gradients of the frozen ones take memory", stacklevel=4)


def _params_of_unit(module: nn.Module, units: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if id(child) not in units:
            for inner, param in _params_of_unit(child, units):
                yield f"{name}.{inner}", param


def _with_full_precision(
    root: nn.Module, requests: list[WrapRequest], ignored: Ignored, kwargs: dict[str, Any]
) -> list[WrapRequest]:
    """Make units of the modules that mixed precision must leave alone, computing as they are.

    Ignored modules become none, but compute as they are too: their parameters are not cast.
    """
    classes = _apart(kwargs)
    if not classes:
        return requests
    by_module = {id(request.module): request for request in requests}
    all_requests: list[WrapRequest] = []
    used: set[str] = set()
    for name, module in root.named_modules():
        request = by_module.get(id(module))
        is_apart = isinstance(module, classes) and module is not root
        if is_apart:
            _cast_around(module)
        if is_apart and module not in ignored.modules:
            used.add(type(module).__name__)
            own = {**(request.kwargs if request else kwargs), "mixed_precision": MixedPrecision()}
            all_requests.append(WrapRequest(name, module, own))
        elif request is not None:
            all_requests.append(request)
    if used:
        warnings.warn(
            f"modules of the classes {', '.join(sorted(used))} compute in full precision, in units "
            "of their own; set module_classes_to_ignore of MixedPrecision to change that",
            stacklevel=4,
        )
    return all_requests


def _dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((one.dtype for one in tensors if one.is_floating_point()), default)


def _cast_around(module: nn.Module) -> None:
    """Give the module its inputs in its own dtype, and its outputs back in that which came in."""
    seen: list[torch.dtype] = []
    own = _dtype_of(module, torch.float32)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.clear()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                seen.append(tensor.dtype)
            return tensor

        map_tensors(note, (args, kwargs))
        return cast_floating(_dtype_of(module, own), (args, kwargs))

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return cast_floating(seen[-1], output) if seen else output

    # On the module inside its wrapper, which casts nothing itself: its precision is the default.
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)
