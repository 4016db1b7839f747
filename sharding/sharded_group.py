"""What one call of `fully_shard` made: the unit of its parameters, how that communicates, and what
happens before and after forwards. The root is found at the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt.state.values import join
from sharding.dtensor.store import DTensorStore
from sharding.engine.collectives import Comm, CommMemory, Group, Members, PendingCollective, Tensors
from sharding.engine.memory import BufferPool
from sharding.engine.reduction import divide_factors
from sharding.engine.runtime import Runtime, check_no_inner_root
from sharding.engine.streams import Streams, streams_for
from sharding.engine.torch_seam import SymmetricMemory, group_memory, premultiplied_sum
from sharding.engine.unit import Phase, Root, Unit
from sharding.torch_face import TorchUnit

_WIDE = (torch.float32, torch.bfloat16)
"""Dtypes whose range no sum of gradients leaves."""


class ShardedGroup:
    """Modules whose parameters are one unit."""

    def __init__(self, modules: Sequence[nn.Module], unit: Unit, store: DTensorStore) -> None:
        self.modules = tuple(modules)
        self.unit = unit
        self.store = store
        self.streams: Streams = streams_for(store.device)
        store.streams = self.streams
        self.divide_factor: float | None = None
        self.sums_only = False
        """Whether collectives may only sum, so that all division is done apart."""
        self.in_flight_max: int | None = None
        """Reductions under way at once, of the whole model; None for the usual number."""
        self.is_last_backward = True
        self.ends_by_hand = False
        """For the root to be: what it starts with."""
        self.waiting_for: set[int] = set()
        """Modules that are still to run before the unit's forward is over."""
        self.shard = store.data.shard
        """The ranks of the shard axis, by the group that gathers."""
        self.reducing_shard = self.shard
        """The same ranks, by the group that reduces."""
        self.custom_gather: Any = None
        self.custom_reduction: Any = None
        self.memory_kind = ""
        """The kind of memory that `gather_memory` and `reduction_memory` are; empty for none."""
        self.gather_memory: CommMemory | None = None
        self.reduction_memory: CommMemory | None = None

    @property
    def reduces_in(self) -> torch.dtype:
        """The dtype of reductions."""
        return self.unit.reduction.dtype or self.store.reduces_in(None, fills=False)

    @property
    def strategy(self) -> str:
        """How its parameters are sharded, in words."""
        data, frees = self.store.data, self.unit.schedule.frees_after_forward
        over = f"fully_shard over {data.shard.size} ranks"
        if data.replicate is not None and data.is_repeated_only:
            over = f"fully_shard, repeated on {data.replicate.size} ranks"
        elif data.replicate is not None:
            over += f", repeated {data.replicate.size} times"
        return over if frees is None else f"{over}, {'freed' if frees else 'kept'} after forward"

    def update_factors(self) -> None:
        """Divide by the number of ranks that see different data, or by what the user said.

        As torch does: where sums may leave the range of the dtype, a part of the division comes
        before them; elsewhere the collective itself makes the average, and a hook sees that.
        """
        data, shard = self.store.data, self.unit.reduction.shard
        total = float(data.size) if self.divide_factor is None else self.divide_factor
        is_wide = self.reduces_in in _WIDE
        averages = is_wide and not self.sums_only
        before = 1.0 if is_wide else divide_factors(total)[0]
        after = total / before
        if isinstance(shard, CustomComm):
            shard.op = dist.ReduceOp.SUM
            if averages and self.divide_factor in (None, shard.size):
                shard.op, after = dist.ReduceOp.AVG, after / shard.size
            elif averages:
                shard.op, after = premultiplied_sum(1 / total), 1.0
        self.unit.reduction = replace(
            self.unit.reduction, factors=(before, after), hook_sees_averages=averages
        )

    def choose_comms(self) -> None:
        """Gather and reduce by what the user said since."""
        gather = _served(self.shard, self.custom_gather, self.gather_memory)
        reduction = _served(self.reducing_shard, self.custom_reduction, self.reduction_memory)
        self.store.data = replace(self.store.data, shard=gather)
        self.unit.reduction = replace(self.unit.reduction, shard=reduction)
        self.update_factors()

    def use_group_memory(self, enable: bool) -> None:
        """Have buffers in the memory of the process groups' allocator where they have one, or not.

        Raises AssertionError where something else says where buffers are.
        """
        self._check_no_other("set_allocate_memory_from_process_group_for_comm()", "group")
        self.memory_kind = "group" if enable else ""
        self.gather_memory = self.reduction_memory = None
        if enable:
            self.gather_memory = group_memory(self.shard.group, self.store.device)
            self.reduction_memory = group_memory(self.reducing_shard.group, self.store.device)
        self.choose_comms()

    def use_symmetric_memory(self, backend: str) -> None:
        """Have buffers of gathers in symmetric memory, and those of reductions where they are sums.

        Collective over the shard axis. Raises RuntimeError where torch has no such memory, and
        AssertionError where something else says where buffers are.
        """
        self._check_no_other("set_symm_mem_for_comm()", "symmetric")
        memory = SymmetricMemory(backend)
        self.shard.meet()  # its communicator must be there before buffers are exchanged
        self.memory_kind = "symmetric"
        self.gather_memory = memory
        if self.sums_only:
            self.reducing_shard.meet()
            self.reduction_memory = memory
        self.choose_comms()

    def _check_no_other(self, what: str, kind: str) -> None:
        used = [
            name
            for name, custom in (
                ("a custom all-gather", self.custom_gather),
                ("a custom reduce-scatter", self.custom_reduction),
                (f"{self.memory_kind} memory", self.memory_kind not in ("", kind)),
            )
            if custom
        ]
        if used:
            raise AssertionError(
                f"{what} was called on a module that has {' and '.join(used)}, which says where "
                "buffers are; use one of them"
            )


def _served(comm: Comm, custom: Any, memory: CommMemory | None) -> Comm:
    if custom is not None:
        return comm if comm.size == 1 else CustomComm(comm.group, custom)
    return comm if memory is None else comm.in_memory(memory)


class CustomComm(Comm):
    """A group whose gathers or reductions are the user's own.

    As torch has them: `custom.allocate(shape, dtype=, device=)` makes the buffers, and
    `custom(output_tensor=, input_tensor=, group=, async_op=True)` fills the output and returns what
    can be waited for, or None when it is done; a reduction gets `op=` too. A rank alone does not
    call it.
    """

    def __init__(self, group: Group, custom: Any) -> None:
        super().__init__(group)
        self._custom = custom
        self.op: Any = dist.ReduceOp.SUM
        """Passed to reductions."""

    def apart(self, nbytes: Sequence[int], *, even: bool, device: torch.device) -> list[int]:
        return []  # buffers are to be the user's

    def buffer(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool | None
    ) -> torch.Tensor:
        buffer: torch.Tensor = self._custom.allocate((numel,), dtype=dtype, device=device)
        return buffer

    def give_back(self, buffer: torch.Tensor, pool: BufferPool) -> None:
        pass

    def all_gather(self, members: Members, own: Tensors, *, tag: int) -> PendingCollective:
        (member,), (part,) = members, own
        return self._call(output_tensor=member.whole, input_tensor=part)

    def reduce_scatter(
        self, members: Members, outs: Tensors, *, pool: BufferPool, tag: int
    ) -> PendingCollective:
        (member,), (out,) = members, outs
        return self._call(output_tensor=out, input_tensor=member.whole, op=self.op)

    def _call(self, **given: Any) -> PendingCollective:
        return PendingCollective([self._custom(group=self.group, async_op=True, **given)])


# --- around forwards -----------------------------------------------------------------------------


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
