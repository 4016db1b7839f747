"""What the constructor of the wrapper does before there is a unit: checks, values, the unit itself.

check_kinds       arguments of a class that would mean something else silently
prepare_params    find the parameters, give them values, bring them to the device, broadcast
clamped           the strategy that the groups allow
make_unit         the flat parameter, its reduction and the unit
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from sharding.dtensor.seam import sharded_before_as
from sharding.engine.blocks import Blocks, Cutting, Placing, Whole
from sharding.engine.collectives import Comm
from sharding.engine.extensions import Extension
from sharding.engine.groups import Groups
from sharding.engine.precision import reduce_dtype
from sharding.engine.reduction import Reduction, divide_factors
from sharding.engine.store import ModuleParam
from sharding.engine.streams import streams_for
from sharding.flat.param import FlatParam
from sharding.flat.tree import is_wrapper, managed_below, synced_below
from sharding.flat.unit import FlatUnit, Settings
from sharding.flat.values import StoreOptions
from sharding.torch_face import check_known
from sharding.wrapping.init import (
    Ignored,
    choose_device,
    find_params,
    materialize,
    move_states,
    sync_states,
    warn_of_slow_wrapping,
)

__all__ = ["Values", "check_kinds", "clamped", "make_unit", "prepare_params"]


class Values(NamedTuple):
    """The arguments of the constructor for where parameters get their values, and how."""

    device_id: int | str | torch.device | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync: bool


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
    module: nn.Module, ignored: Ignored, groups: Groups, values: Values
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
    module_params = find_params(module, ignored, managed=managed_below(module), is_unit=is_wrapper)
    device = choose_device([item.param for item in module_params], values.device_id)
    init = values.param_init_fn
    if materialize(module, ignored, device, param_init_fn=init, is_unit=is_wrapper):
        # Values are given to new Parameter objects.
        module_params = find_params(
            module, ignored, managed=managed_below(module), is_unit=is_wrapper
        )
    warn_of_slow_wrapping((item.param for item in module_params), values.device_id, device)
    for item in module_params:
        other = sharded_before_as(item.param)
        if other is not None:
            raise ValueError(
                f"{item.fqn}: is tied to {other} of a module that was wrapped before, and the tie "
                "would be lost; make one unit of a module around both"
            )
    if values.device_id is not None:
        move_states(module, ignored, device, is_unit=is_wrapper)
    if values.sync:
        comms = [groups.shard] if groups.replicate is None else [groups.replicate, groups.shard]
        sync_states(module, module_params, comms, synced=synced_below(module))
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
        dtype=reduce_dtype(precision),
        factors=divide_factors(size),
        keep_dtype=precision.keep_low_precision_grads,
    )
    store = None
    if module_params:
        options = StoreOptions(
            use_orig_params=settings.use_orig_params,
            sharded=settings.is_sharded,
            offload=settings.offload,
            device=settings.device,
            param_dtype=precision.param_dtype,
            limit_gathers=settings.limit_all_gathers,
            cuttings=_cuttings(module_params, settings, placing),
        )
        streams = streams_for(settings.device)
        store = FlatParam(module_params, groups.shard, streams, options, extension=extension)
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
