"""What `fully_shard` makes of a module: a class with torch's methods, and hooks on the forward."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule

from ckpt.layout.dtensor import FsdpCut, describe_dtensor
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks
from ckpt.state.values import join
from sharding.dtensor.param import ShardedParam
from sharding.dtensor.store import DTensorStore
from sharding.engine.collectives import all_global_ranks, separate_comm
from sharding.engine.runtime import GradientReductionHandle, UnshardHandle, start_early
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import is_in_backward, mark_applied
from sharding.engine.unit import Unit
from sharding.sharded_group import (
    PipelineState,
    ShardedGroup,
    after_forward,
    before_forward,
    sharded_groups,
)
from sharding.torch_face import TorchUnit


class FSDPModule(TorchUnit):
    """What `fully_shard` adds to a module. Methods are those of torch's class.

    Settings take effect from the next forward or backward on. `recurse` reaches all modules below
    that `fully_shard` was called on.
    """

    fsdp_groups: tuple[ShardedGroup, ...]
    """One for each mesh that its parameters are sharded over."""

    @property
    def fsdp_group(self) -> ShardedGroup:
        """The first of them, which leads the others."""
        return self.fsdp_groups[0]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A slice of a container makes a new one of the same class, and it should be an ordinary
        # one. In the MRO that class comes after the sharded one, this one, and torch's.
        bare = cls.__mro__[cls.__mro__.index(TorchModule) + 1]
        made: Any = bare.__new__(bare, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # --- now ------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters; its next forward does not gather again.

        With `async_op` returns at once, with a handle whose `wait()` returns when they are there.
        """
        units = [group.unit for group in self.fsdp_groups]
        return start_early(*units, shows_views=True, async_op=async_op)

    def reshard(self) -> None:
        """Free this module's gathered parameters, and let it show the sharded ones."""
        for group in self.fsdp_groups:
            group.store.reshard()
            group.unit.was_requested = False

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: be ready for the next iteration.

        The gradients of the iteration that failed are lost, also those kept without reducing. On
        the root (RuntimeError elsewhere). A forward that raised needs no reset.
        """
        runtime = self.fsdp_group.unit.runtime
        if runtime is None:
            return  # nothing has run yet
        if runtime.root is not self.fsdp_group.unit:
            raise RuntimeError("reset_iter_state() works on the root only; call it there")
        for group in sharded_groups(cast(nn.Module, self)):
            group.waiting_for.clear()
        runtime.reset()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters stay in memory when they are freed, at the same addresses, as
        graphs of a device want it. They are gathered again all the same.
        """
        for group in self._own_or_all(recurse):
            group.store.keeps_memory = keep

    # --- the end of a backward by hand ----------------------------------------------------------

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the user ends backwards, by `finalize_backward`. On the root, before the forward.

        Raises RuntimeError on another module, in a backward, and until the last one has been ended.
        """
        group = self.fsdp_group
        runtime = group.unit.runtime
        if runtime is not None:
            self._check_root("set_manual_backward_finalization")
            if enabled is not runtime.ends_by_hand and is_in_backward():
                raise RuntimeError(
                    "set_manual_backward_finalization cannot change mode during backward"
                )
            if runtime.is_ended_by_hand is not None and enabled is not runtime.is_ended_by_hand:
                raise RuntimeError(
                    "set_manual_backward_finalization cannot change mode after backward starts: "
                    "call finalize_backward() or reset_iter_state() first"
                )
            runtime.ends_by_hand = enabled
        group.ends_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last end: reduce what is left, free, wait for reductions.

        Several backwards have one end where all but the last do not reduce: call
        `set_requires_gradient_sync(True)` in between. Before the first forward nothing happens.
        With `async_op` returns a handle, and the gradients are there after its `wait()`.

        Raises RuntimeError on another module than the root, in a backward, without
        `set_manual_backward_finalization(True)`, before an earlier handle was waited for, and where
        sums wait for replicas (`set_requires_all_reduce(False)`).
        """
        runtime = self.fsdp_group.unit.runtime
        if runtime is None:
            return GradientReductionHandle(None) if async_op else None
        runtime.check_nothing_awaited("finalizing backward again")
        self._check_root("finalize_backward")
        by_hand = runtime.is_ended_by_hand
        if not (runtime.ends_by_hand if by_hand is None else by_hand):
            raise RuntimeError(
                "finalize_backward requires manual backward finalization: call "
                "set_manual_backward_finalization(True) before forward"
            )
        if is_in_backward():
            raise RuntimeError("finalize_backward must be called after backward completes")
        for unit in runtime.units:
            store, reduction = unit.store, unit.reduction
            is_partial = store is not None and runtime.reductions.has_kept(store)
            if is_partial or (
                unit.must_reduce and reduction.replicate is not None and not reduction.all_reduces
            ):
                name = unit.named_ranges.fqn or "the root"
                raise RuntimeError(
                    f"finalize_backward requires all-reduce of {name}: "
                    "partial gradient reductions cannot be ended by hand; call "
                    "set_requires_all_reduce(True) before the backward"
                )
        handle: GradientReductionHandle = runtime.end_by_hand()
        if async_op:
            return handle
        handle.wait()
        return None

    def _check_root(self, what: str) -> None:
        runtime = self.fsdp_group.unit.runtime
        if runtime is not None and runtime.root is not self.fsdp_group.unit:
            raise RuntimeError(f"{what} must be called on the root module")

    # --- what a backward does -------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for its reductions; False while more of a step follow."""
        self.fsdp_group.is_last_backward = is_last_backward  # for the root, if it is this one
        if self.fsdp_group.unit.runtime is not None:
            self.fsdp_group.unit.runtime.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce. Otherwise gradients add up on each rank, unsharded."""
        for group in self._own_or_all(recurse):
            group.unit.syncs_gradients = requires_gradient_sync
        # As in torch: it undoes what it said before.
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With a replicate axis: whether sums go over it. Otherwise they add up, sharded."""
        for group in self._own_or_all(recurse):
            group.unit.reduction = replace(group.unit.reduction, all_reduces=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward; of the root too.

        False keeps them over forwards without gradients as well, as long as the shards are
        not written to; after writing by `torch._foreach` functions, call `reshard()`.
        """
        # An int is a mesh size where `fully_shard` takes it, and cannot be changed to here.
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"expected True or False here, got {reshard_after_forward!r}")
        for group in self._own_or_all(recurse):
            group.store.set_smaller_mesh(None)
        self._schedule(recurse, frees_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after the backward.

        False saves the next forward its gather; set it back for the backward before a step.
        """
        self._schedule(recurse, frees_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the backward needs this module's parameters (an embedding's does not)."""
        self._schedule(False, gathers_in_backward=unshard_in_backward)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient take part with zeros; needed where ranks use
        different ones.
        """
        for group in self._own_or_all(recurse):
            unit = group.unit
            unit.reduction = replace(unit.reduction, fills_unused=reduce_scatter_unused_params)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this, rather than by the number of ranks."""
        for group in self.fsdp_groups:
            group.divide_factor = float(factor)
            group.update_factors()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`. Warns (DeprecationWarning)."""
        warnings.warn(
            "set_reduce_scatter_divide_factor() is now set_gradient_divide_factor()",
            DeprecationWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    # --- order ----------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """What to gather early while this module's forward computes."""
        self.fsdp_group.unit.forward_targets = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """What to gather early while this module's backward computes, instead of the module whose
        forward ended just before this one's.
        """
        self.fsdp_group.unit.backward_targets = _units_of(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for this event, not for all that was computed."""
        runtime = self.fsdp_group.unit.runtime
        streams = self.fsdp_group.streams if runtime is None else runtime.streams
        streams.gathers_wait_once_for(event)

    # --- communication --------------------------------------------------------------------------

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers take memory on the stream of compute, so that no other stream keeps any.

        What they cast and pack is then done there too, and they overlap with compute only where the
        user starts them early (`unshard`, `set_modules_to_forward_prefetch`).
        """
        for group in sharded_groups(cast(nn.Module, self)):
            group.store.gathers_on_compute = async_op

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call `hook(reduced)` with this rank's part of reduced gradients, to be changed in place.

        They are averages, or, where the dtype of the reduction has a small range or
        `set_force_sum_reduction_for_comms(True)` was called, sums that are still to be divided. It
        runs on `stream`, by default on that of all-reduces. Raises ValueError for a stream where a
        replicate axis has that one.
        """
        group = self._only_group("set_all_reduce_hook")
        data = group.store.data
        if stream is not None and data.replicate is not None:
            if not data.is_repeated_only:
                raise ValueError(
                    "set_all_reduce_hook: the hook comes after the all-reduce over the replicate "
                    "axis, on its stream; leave out stream="
                )
            stream = None
        group.unit.reduction = replace(group.unit.reduction, summed_hook=hook, hook_stream=stream)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, so that it need not wait for gathers.

        Collective over the shard axis. The groups of one mesh share one.
        """
        made: dict[Any, Any] = {}
        for group in self._own_or_all(recurse):
            shard = group.shard
            if enable and shard.global_ranks not in made:
                made[shard.global_ranks] = separate_comm(shard)
            group.reducing_shard = made[shard.global_ranks] if enable else shard
            group.choose_comms()

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be under way at once, of the whole model; at first 2 on CPU and 1
        on accelerators, as many as torch has.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for group in self._own_or_all(recurse):
            group.in_flight_max = max_input_buffers  # for the root, which may not be known yet
            if group.unit.runtime is not None:
                group.unit.runtime.reductions.in_flight_max = max_input_buffers

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only sum: a custom reduce-scatter is never asked for averages, and
        hooks see sums.
        """
        for group in self.fsdp_groups:
            group.sums_only = enable
            group.update_factors()

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather by the user's own collective; see `sharding.sharded_group.CustomComm`."""
        group = self._only_group("set_custom_all_gather")
        group.custom_gather = comm
        group.choose_comms()

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce by the user's own collective; see `sharding.sharded_group.CustomComm`.

        Its `op` is AVG or a premultiplied sum, or SUM where `set_all_reduce_hook` says that hooks
        see sums.
        """
        group = self._only_group("set_custom_reduce_scatter")
        group.custom_reduction = comm
        group.choose_comms()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers of collectives are of the process group's own allocator, if it has one.

        Members are packed into them then; without an allocator (gloo) nothing changes. Raises
        AssertionError together with custom collectives and symmetric memory.
        """
        for group in self.fsdp_groups:
            group.use_group_memory(enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Let buffers of gathers be symmetric memory, which the backend moves faster; those of
        reductions too after `set_force_sum_reduction_for_comms(True)`.

        Collective over the shard axis. Raises RuntimeError where torch has no such memory, and
        AssertionError together with custom collectives and memory of the process group.
        """
        for group in self.fsdp_groups:
            group.use_symmetric_memory(backend)

    # --- as a module ----------------------------------------------------------------------------

    def _get_fsdp_state(self) -> PipelineState:
        """What torch's pipelines ask."""
        return PipelineState(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        grads = [taken for group in self.fsdp_groups for taken in group.store.take_own_gradients()]
        # What comes after torch's class, which would look into its own state.
        applied = super(TorchModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self.fsdp_groups:
            group.store.adopt_values()
        for param, grad in grads:
            param.param.grad = grad.to(device=param.param.device)
        for group in self.fsdp_groups:
            if group.unit.runtime is not None:
                group.update_factors()  # the dtype may be another
        return applied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError(
            f"{type(self).__name__} cannot be copied: its process groups are shared; build the "
            "module again, call fully_shard on it and load a state dict"
        )

    def _own_or_all(self, recurse: bool) -> list[ShardedGroup]:
        return sharded_groups(cast(nn.Module, self)) if recurse else list(self.fsdp_groups)

    def _schedule(self, recurse: bool, **changes: Any) -> None:
        for group in self._own_or_all(recurse):
            group.unit.schedule = replace(group.unit.schedule, **changes)

    def _only_group(self, what: str) -> ShardedGroup:
        if len(self.fsdp_groups) > 1:
            raise ValueError(
                f"{what}() was called on a {type(self).__name__} whose parameters are sharded over "
                f"{len(self.fsdp_groups)} meshes, and would serve one; call fully_shard on modules "
                "of one mesh each"
            )
        return self.fsdp_group

    # --- checkpoints ----------------------------------------------------------------------------

    def __ckpt_pieces__(self) -> list[Owned]:
        for group in self.fsdp_groups:
            group.store.adopt_values()
        everyone = all_global_ranks()
        ranks = Ranks(torch.distributed.get_rank(), everyone)
        described = []
        for (name, *_), param in self._shown():
            cut = None if param.axis is None else FsdpCut(param.axis, param.data.shard.rank)
            described.append(describe_dtensor(name, param.param, ranks, fsdp_cut=cut))
        return described

    def __ckpt_aliases__(self) -> dict[str, str]:
        return {name: names[0] for names, _ in self._shown() for name in names[1:]}

    def __ckpt_reshard__(self) -> None:
        self.reshard()

    def _shown(self) -> Iterator[tuple[list[str], ShardedParam]]:
        """The parameters that are shown below this module, with all names that they have there."""
        me = cast(nn.Module, self)
        before = self.fsdp_group.modules[: self.fsdp_group.modules.index(me)]
        described_before = {id(module) for other in before for module in other.modules()}
        prefixes: dict[int, list[str]] = {}
        for prefix, module in me.named_modules(remove_duplicate=False):
            prefixes.setdefault(id(module), []).append(prefix)
        for param in (param for group in self.fsdp_groups for param in group.store.params):
            names = [
                join(prefix, place.name)
                for place in param.module_param.places
                for prefix in prefixes.get(id(place.module), ())
            ]
            # What is tied to a parameter of an earlier module is described there.
            if names and not any(
                id(place.module) in described_before for place in param.module_param.places
            ):
                yield names, param


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of the module gather and free as its forward does.

    Nothing happens for a module on which `fully_shard` was not called. Raises ValueError when there
    is no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    if not isinstance(module, FSDPModule):
        return

    @functools.wraps(method)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = before_forward(self, args, kwargs)
        return after_forward(self, args, method(*args, **kwargs))

    setattr(module, method_name, types.MethodType(around, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the stages of a pipeline on one rank) share streams for communication.

    Raises ValueError for a module on which `fully_shard` was not called.
    """
    _check_sharded("share_comm_ctx", modules)
    streams = modules[0].fsdp_group.streams if modules else Streams()
    for module in modules:
        for group in sharded_groups(cast(nn.Module, module)):
            group.streams = streams
            group.store.use(streams)
            if group.unit.runtime is not None:
                group.unit.runtime.share(streams)


# --- hooks ---------------------------------------------------------------------------------------


@functools.cache
def _sharded_class(kind: Any) -> type:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def become_sharded(groups: Sequence[ShardedGroup], function: str) -> None:
    """Make the modules, the same of all groups, gather and free around their forwards, and offer
    methods. `function` is what the user called.
    """
    leader, *followers = [group.unit for group in groups]
    leader.followers = tuple(followers)
    for unit in followers:
        unit.leader = leader
    for module in groups[0].modules:
        sharded: Any = module
        sharded.__class__ = _sharded_class(cast(Any, type(module)))
        sharded.fsdp_groups = tuple(groups)
        mark_applied(function, module, PipelineState(sharded))
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(after_forward, prepend=False)
    for group in groups:
        _follow_state_dicts(group.store)


def _follow_state_dicts(store: DTensorStore) -> None:
    """State dicts show what is sharded; after a load, follow what was put there."""

    def before(*args: Any) -> None:
        store.reshard()

    def after(*args: Any) -> None:
        store.adopt_values()

    for hook in (before, after):
        # `ckpt` refuses modules with hooks of unknown effect; these change nothing in the dicts.
        cast(Any, hook).__ckpt_neutral__ = True
    modules = {
        id(place.module): place.module for item in store.module_params for place in item.places
    }
    for shown in modules.values():
        module: Any = shown
        module.register_state_dict_pre_hook(before)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)


# --- the tree ------------------------------------------------------------------------------------


def _units_of(modules: Sequence[FSDPModule]) -> tuple[Unit, ...]:
    _check_sharded("prefetching", modules)
    return tuple(module.fsdp_group.unit for module in modules)


def _check_sharded(what: str, modules: Sequence[object]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{what} takes modules that fully_shard was called on, got {type(module).__name__}"
            )
