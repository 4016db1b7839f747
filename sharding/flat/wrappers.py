"""The wrappers of a model: how one gets its unit, which there are, and what they agree on.

check_kinds       arguments of a class that would mean something else silently
prepare_params    find the parameters, give them values, bring them to the device, broadcast
clamped           the strategy that the groups allow
make_unit         the flat parameter, its reduction and the unit
wrappers_below    and what these hold, with names that are free of what wrappers put in
check_agreement   what all of a model must agree on once their root is known
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from ckpt.state.names import clean_name
from sharding.attributes import UnitAttributes
from sharding.dtensor.seam import sharded_before_as
from sharding.engine.blocks import Blocks, Cutting, Placing, Whole
from sharding.engine.collectives import Comm
from sharding.engine.extensions import Extension
from sharding.engine.groups import Groups
from sharding.engine.reduction import Reduction, divide_factors
from sharding.engine.store import ModuleParam
from sharding.engine.streams import streams_for
from sharding.engine.torch_seam import persistent_buffers
from sharding.engine.unit import Phase
from sharding.flat.param import FlatParam
from sharding.flat.unit import FlatUnit
from sharding.flat.values import Settings
from sharding.torch_face import check_known
from sharding.wrapping.init import (
    Ignored,
    choose_device,
    find_ignored,
    find_params,
    materialize,
    modules_down_to,
    move_states,
    sync_states,
    warn_of_slow_wrapping,
)


def wrappers_below(module: nn.Module, *, root_only: bool = False) -> list[UnitAttributes]:
    """The wrappers below `module`, itself included, in walk order; or only the outermost ones."""
    ends = _is_wrapper if root_only else lambda inner: False
    inner_modules = modules_down_to(module, ends, remove_duplicate=True)
    return [inner for _, inner in inner_modules if isinstance(inner, UnitAttributes)]


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, UnitAttributes)


def state_names(module: nn.Module) -> Iterator[str]:
    """Clean names of parameters and buffers below the module, in its state dict's order."""
    for prefix, inner in modules_down_to(module, _is_wrapper):
        base = f"{clean_name(prefix)}." if clean_name(prefix) else ""
        if isinstance(inner, UnitAttributes):
            # Its flat parameter hides the names of its members; the wrapper has kept them.
            yield from (f"{base}{name}" for name in inner.fsdp_names)
        else:
            own = inner.named_parameters(recurse=False, remove_duplicate=False)
            yield from (f"{base}{name}" for name, _ in own)
            yield from (f"{base}{name}" for name in persistent_buffers(inner))


def managed_below(module: nn.Module) -> set[int]:
    """Identities of the parameters that wrappers below the module hold, and of flat ones."""
    managed: set[int] = set()
    for wrapper in wrappers_below(module):
        store = wrapper.fsdp_unit.store if "fsdp_unit" in wrapper.__dict__ else None
        if store is not None:
            managed.add(id(store.flat))
            managed.update(id(param) for param in store.params)
    return managed


def ignored_below(module: nn.Module, modules: Any, states: Any) -> Ignored:
    """What the arguments ignore, and what the units below ignore already."""
    ignored = find_ignored(module, modules, states, is_unit=_is_wrapper)
    all_modules, params = set(ignored.modules), set(ignored.params)
    for wrapper in wrappers_below(module):
        all_modules |= wrapper.fsdp_ignored.modules
        params |= wrapper.fsdp_ignored.params
    return replace(ignored, modules=frozenset(all_modules), params=frozenset(params))


def check_agreement(wrappers: Sequence[UnitAttributes]) -> None:
    """Raise ValueError when wrappers disagree on what a model can only have once, RuntimeError when
    shards have left the device that their wrapper was made for.
    """
    for name in ("use_orig_params", "limit_all_gathers", "evaluates_in_full_precision"):
        values = {getattr(wrapper.fsdp_unit.settings, name) for wrapper in wrappers}
        if len(values) > 1:
            raise ValueError(f"{name} must be the same for all units, got {sorted(values)}")
    for unit in (wrapper.fsdp_unit for wrapper in wrappers):
        wanted = torch.device("cpu") if unit.settings.offload else unit.settings.device
        if unit.store is not None and unit.store.flat.device != wanted:
            raise RuntimeError(
                f"sharded parameters of {type(unit.wrapped).__name__} are on "
                f"{unit.store.flat.device}, expected {wanted}; pass device_id, and do not move the "
                "module after wrapping"
            )


def members_text(unit: FlatUnit, path: str = "") -> str:
    """The unit by its module, at `path`, and members, for errors."""
    items = () if unit.store is None else unit.store.module_params
    fqns = [clean_name(f"{path}.{item.fqn}" if path else item.fqn) for item in items]
    return f"{type(unit.wrapped).__name__} with {', '.join(fqns)}"


def not_to_move(units: Sequence[FlatUnit]) -> list[FlatUnit]:
    """Those of `units` whose root is one of them, or in an iteration. Others may get another root:
    a module that was trained is wrapped again.
    """
    held = []
    for unit in units:
        if unit.runtime is not None:
            unit.runtime.leave_failed_backward()
            root = unit.runtime.root
            if root in units or root.phase is not Phase.IDLE:
                held.append(unit)
    return held


def cast_all_buffers(wrappers: Sequence[UnitAttributes], *, low: bool) -> None:
    """Bring buffers to the device, and cast floating ones, each as the innermost unit around it
    says; back to what they were unless `low`.
    """
    done: set[int] = set()
    # Inner wrappers first: outer ones leave alone what these have cast.
    for wrapper in reversed(wrappers):
        settings = wrapper.fsdp_unit.settings
        for prefix, module in wrapper.fsdp_unit.wrapped.named_modules():
            if id(module) in done:
                continue
            done.add(id(module))
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                dtype = wrapper.fsdp_buffer_dtypes.get(clean_name(full))
                dtype = settings.precision.buffer_dtype if low else dtype
                if full in settings.ignored_buffers or not buffer.is_floating_point():
                    dtype = None
                with torch.no_grad():
                    new = buffer.to(device=settings.device, dtype=dtype or buffer.dtype)
                if new is not buffer:
                    setattr(module, name, new)


def check_kinds(*arguments: tuple[str, object, type]) -> None:
    """Raise TypeError for an argument that is neither None nor of its class, and
    NotImplementedError for options of a newer torch that are not implemented here.

    The name of a strategy, for example, equals no strategy, and would select another one silently.
    """
    for name, given, wanted in arguments:
        if given is not None and not isinstance(given, wanted):
            members = "" if not issubclass(wanted, enum.Enum) else f", one of {list(wanted)}"
            raise TypeError(f"{name}={given!r}: expected a {wanted.__name__}{members}")
        check_known(given)


def prepare_params(
    module: nn.Module,
    ignored: Ignored,
    groups: Groups,
    device_id: int | str | torch.device | None,
    param_init_fn: Callable[[nn.Module], None] | None,
    *,
    sync: bool,
) -> tuple[list[ModuleParam], torch.device]:
    """The parameters that a unit around `module` is to absorb, with their values and on the device
    to compute on, which is returned too.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warnings.warn(
            f"{type(module).__name__} has no forward of its own: wrap what is inside it, or "
            "nothing will be gathered",
            stacklevel=3,
        )
    # Not those of inner wrappers, which have taken them already: wrapping begins inside.
    module_params = find_params(module, ignored, managed=managed_below(module))
    device = choose_device([item.param for item in module_params], device_id)
    if materialize(module, ignored, device, param_init_fn):
        # Values are given to new Parameter objects.
        module_params = find_params(module, ignored, managed=managed_below(module))
    warn_of_slow_wrapping((item.param for item in module_params), device_id, device)
    for item in module_params:
        other = sharded_before_as(item.param)
        if other is not None:
            raise ValueError(
                f"{item.fqn}: is tied to {other} of a module that was wrapped before, and the tie "
                "would be lost; make one unit of a module around both"
            )
    if device_id is not None:
        move_states(module, ignored, device)
    if sync:
        # Buffers that inner units have broadcast already; not every unit does.
        inner = [one.fsdp_unit.wrapped for one in wrappers_below(module) if one.syncs_states]
        synced = {id(buffer) for wrapped in inner for buffer in wrapped.buffers()}
        sync_states(module, module_params, groups.comms[::-1], synced=synced)
    return module_params, device


def clamped(strategy: ShardingStrategy, groups: Groups) -> ShardingStrategy:
    """The strategy in force over these groups: over one rank, NO_SHARD. Warns where it differs."""
    none = ShardingStrategy.NO_SHARD
    if groups.shard.size == 1:
        if strategy is not none:
            warnings.warn(
                f"{strategy.name} over a group of one rank shards nothing; NO_SHARD is used",
                stacklevel=3,
            )
        return none
    if strategy is none:
        warnings.warn(
            "NO_SHARD is deprecated: use torch's DistributedDataParallel",
            FutureWarning,
            stacklevel=3,
        )
    return strategy


def make_unit(
    module: nn.Module,
    module_params: list[ModuleParam],
    groups: Groups,
    settings: Settings,
    extension: Extension | None,
    placing: Placing | None = None,
) -> FlatUnit:
    """The unit around `module` that absorbs these parameters; without any it has no store.

    Raises ValueError, naming the parameter, for what `placing` returns and cannot be.
    """
    shard: Comm | None = groups.shard
    replicate = groups.replicate
    if not settings.is_sharded:
        # Every rank has everything: all of them are replicas.
        shard, replicate = None, (replicate if groups.shard.size == 1 else None) or groups.shard
    precision = settings.precision
    size = math.prod(comm.size for comm in (shard, replicate) if comm is not None)
    reduction = Reduction(
        shard=shard,
        replicate=replicate,
        dtype=precision.reduce_dtype or precision.param_dtype,
        factors=divide_factors(size),
        keep_dtype=precision.keep_low_precision_grads,
    )
    store = None
    if module_params:
        store = FlatParam(
            module_params,
            groups.shard,
            streams_for(settings.device),
            settings,
            cuttings=_cuttings(module_params, settings, placing),
            extension=extension,
        )
    return FlatUnit(module, store, settings, reduction)


def _cuttings(
    module_params: list[ModuleParam], settings: Settings, placing: Placing | None
) -> tuple[Cutting | None, ...]:
    if placing is None:
        return ()
    cuttings: list[Cutting | None] = []
    for item in module_params:
        wanted = placing(item.param)
        if wanted is not None and not isinstance(wanted, Blocks | Whole):
            raise ValueError(
                f"{item.fqn}: shard_placement_fn returned {wanted!r}; the wrapper takes Blocks, "
                "Whole or None (cut anywhere), fully_shard takes Shard"
            )
        if wanted is not None and not settings.use_orig_params:
            raise ValueError(
                f"{item.fqn}: {wanted} needs use_orig_params=True: an optimizer of flat parameters "
                "sees no parameter by itself"
            )
        if wanted is not None and hasattr(item.param, "placements"):
            raise ValueError(
                f"{item.fqn}: is a DTensor, which other ranks have parts of, so {wanted} cannot be "
                "kept here; return None for it"
            )
        cuttings.append(wanted)
    return tuple(cuttings)
