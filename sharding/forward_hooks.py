"""Before and after the forward of what `fully_shard` took; the root is found at the first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ckpt.state.values import join
from sharding.engine.runtime import Runtime, check_no_inner_root
from sharding.engine.streams import Streams
from sharding.engine.unit import Phase, Root, Unit
from sharding.sharded_group import ShardedGroup
from sharding.torch_face import TorchUnit


@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_forward(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather the units of a module and cast its inputs; a hook of `nn.Module`."""
    runtime = module.fsdp_groups[0].unit.runtime or find_root(module)
    for group in module.fsdp_groups:
        unit = group.unit
        # Of several modules that are one unit the first gathers, the others only cast their inputs.
        if len(group.modules) > 1 and not unit.recomputes:
            if unit.phase is Phase.FORWARD and group.waiting_for and group.store.is_current():
                args, kwargs = unit.cast_inputs(args, kwargs)
                continue
            # Outside of the root's forward a module of several is called by itself.
            is_inside = runtime.root.phase is Phase.FORWARD
            together = is_inside or runtime.root is (unit.leader or unit)
            group.waiting_for = {id(one) for one in group.modules} if together else {id(module)}
        args, kwargs = unit.before_forward(args, kwargs)
    return args, kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def after_forward(module: Any, args: Any, output: Any) -> Any:
    """Free the units of a module and cast its output; a hook of `nn.Module`."""
    # The leader last: with it the forward of a root is over.
    for group in reversed(module.fsdp_groups):
        unit = group.unit
        group.waiting_for.discard(id(module))
        if group.waiting_for and unit.phase is Phase.FORWARD:
            # The last module frees. A backward may begin with the output of any of them.
            output = unit.cast_output(output)
            unit.watch(output)
            continue
        output = unit.after_forward(output)
        if unit.known_runtime.root is unit and unit.phase is Phase.IDLE:
            for other in sharded_groups(module):
                if other.waiting_for:  # some of its modules were not called this time
                    other.waiting_for.clear()
                    other.unit.abort_forward()
    return output


def find_root(module: Any) -> Root:
    """Make the module the root of everything below it, unless it belongs to a root already.

    Raises RuntimeError when a module below has run as a root of its own.
    """
    unit: Unit = module.fsdp_group.unit
    if unit.runtime is not None:
        return unit.runtime
    groups = sharded_groups(module)
    units = [group.unit for group in groups]
    names = {
        id(group.unit): " and ".join(type(module).__name__ for module in group.modules)
        for group in groups
    }
    # torch's class raises this type here, its wrapper an AssertionError.
    check_no_inner_root(unit, units, name_of=lambda one: names[id(one)], error=RuntimeError)
    if any(group.ends_by_hand for group in groups if group not in module.fsdp_groups):
        raise RuntimeError("set_manual_backward_finalization must be called on the root module")
    for group in groups:
        group.update_factors()
    _name_absolutely(module, groups)
    runtime = Runtime(unit, units, module.fsdp_group.streams)
    runtime.is_last_backward = module.fsdp_group.is_last_backward
    runtime.ends_by_hand = module.fsdp_group.ends_by_hand
    # One number for the model: reductions of all units share memory and stream.
    wanted = [group.in_flight_max for group in groups if group.in_flight_max is not None]
    runtime.reductions.in_flight_max = max(wanted, default=runtime.reductions.in_flight_max)
    return runtime


def _name_absolutely(root: nn.Module, groups: Iterable[ShardedGroup]) -> None:
    """Let errors name parameters as the root does."""
    prefixes = {id(module): name for name, module in root.named_modules()}
    for group in groups:
        group.unit.named_ranges.fqn = ", ".join(
            prefixes.get(id(module), "") for module in group.modules
        )
        for param in group.store.params:
            place = param.module_param.places[0]
            prefix = prefixes.get(id(place.module), "")
            param.module_param = param.module_param._replace(fqn=join(prefix, place.name))


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """What `fully_shard` made of the module and below it, each once, in walk order."""
    inner: list[Any] = [one for one in module.modules() if isinstance(one, TorchUnit)]
    groups = [group for one in inner for group in one.fsdp_groups]
    return list({id(group): group for group in groups}.values())


def managed_below(module: nn.Module) -> set[int]:
    """Identities of the parameters that `fully_shard` has made below the module."""
    return {id(param.param) for group in sharded_groups(module) for param in group.store.params}


class PipelineState:
    """What torch's pipelines ask of a stage after its last microbatch: reduce what was added up.

    They call `post_backward` of all groups of `_state_ctx.all_states`, none here,
    and then the final callback, which does everything at once.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state_ctx = self
        self.all_states: tuple[object, ...] = ()

    @property
    def _comm_ctx(self) -> Streams:
        """What stages that were passed to `share_comm_ctx` have in common."""
        streams: Streams = self._module.fsdp_group.streams
        return streams

    def _root_post_backward_final_callback(self) -> None:
        find_root(self._module).end_backward()
