"""`FullyShardedDataParallel`: the wrapper that a training script uses.

Arguments, defaults and methods are those of torch's class of that name. This file only calls the
parts:

    wrapping/policies, engine/groups   which modules become units, over which ranks
    wrapping/init                      what is checked and prepared before there is a unit
    flat/wrappers                      how one gets its unit, which there are, what they agree on
    engine/runtime                     what they share once the root is known
    flat/param, engine/unit            how parameters are kept, and what happens when
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from ckpt.layout.flat import FlatMember, flat_views, member_as_param, memory_order
from ckpt.layout.piece import Owned
from ckpt.layout.sharded_tensor import UnitSharding
from ckpt.state.names import clean_name
from sharding.attributes import CHILD
from sharding.comm_hooks import hook_of
from sharding.dtensor.seam import mark_sharded
from sharding.engine.blocks import Placing
from sharding.engine.collectives import wants_details
from sharding.engine.extensions import (
    Extension,
    Lines,
    TensorParallel,
    cut_lines_of,
    holders_of,
    owners_of,
)
from sharding.engine.groups import HYBRID, Groups, resolve_groups
from sharding.engine.reduction import clip_sharded
from sharding.engine.runtime import (
    OrderCheck,
    Runtime,
    UnshardHandle,
    check_no_inner_root,
    start_early,
)
from sharding.engine.streams import streams_for
from sharding.engine.torch_seam import larger_mesh, passed_over
from sharding.engine.unit import Phase, Root
from sharding.flat.unit import FlatUnit, SummonOptions, check_summon, summon_units
from sharding.flat.values import Settings
from sharding.flat.wrappers import (
    cast_all_buffers,
    check_agreement,
    check_kinds,
    clamped,
    ignored_below,
    make_unit,
    managed_below,
    members_text,
    not_to_move,
    prepare_params,
    state_names,
    wrappers_below,
)
from sharding.state_dict_methods import StatefulUnit
from sharding.torch_face import redirect_static_methods
from sharding.wrapping.init import Ignored
from sharding.wrapping.policies import auto_wrap


class FullyShardedDataParallel(StatefulUnit):
    """Shards a module's parameters, gradients and optimizer state over data-parallel ranks.

    Wrap inner modules first (or pass `auto_wrap_policy`), create the optimizer after wrapping, and
    train as usual: parameters are gathered for the time that a wrapped module computes. Every
    wrapper is a unit; what inner units do not hold belongs to the outer one.

    All arguments mean what they mean for torch's `FullyShardedDataParallel`. Differences: without
    an accelerator it computes on the CPU by itself; a mesh of two axes needs a hybrid
    strategy; hybrid sharding with shard groups of one rank keeps its replicas equal.

    `shard_placement_fn`, which torch's class lacks, says where a parameter may
    be cut. `Blocks`: between blocks only. `Whole`: nowhere, one rank has it. None: anywhere. Needs
    `use_orig_params=True`. A parameter that is never cut inside of a row shows the rows of this
    rank, maybe none, in place of a 1-D part.

    With FSDP_USE_FULL_PREC_IN_EVAL=1 in the environment when a model is wrapped, modules in eval
    mode compute in full precision whatever `mixed_precision` says, as in torch's class.
    """

    __ckpt_wraps__ = CHILD
    fsdp_extension: Extension | None = None
    """How members that are not plain tensors are flattened; see `sharding.engine.extensions`."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        shard_placement_fn: Placing | None = None,
    ) -> None:
        super().__init__()
        check_kinds(
            ("sharding_strategy", sharding_strategy, ShardingStrategy),
            ("cpu_offload", cpu_offload, CPUOffload),
            ("backward_prefetch", backward_prefetch, BackwardPrefetch),
            ("mixed_precision", mixed_precision, MixedPrecision),
        )
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        ignored = ignored_below(module, ignored_modules, ignored_states)
        # Before inner units are made, which get these very groups: all units then share them.
        groups = resolve_groups(
            process_group, device_mesh, strategy, has_policy=auto_wrap_policy is not None
        )
        if auto_wrap_policy is not None:
            shared = {
                "process_group": None if device_mesh is not None else groups.argument,
                "device_mesh": device_mesh,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                # Not the modules: the policy does not enter them.
                "ignored_states": list(ignored.params) or None,
                "shard_placement_fn": shard_placement_fn,
            }
            # A subclass may have a constructor of its own; one with an extension means all units.
            wrapper = FullyShardedDataParallel if self.fsdp_extension is None else type(self)
            auto_wrap(module, auto_wrap_policy, ignored, wrapper=wrapper, kwargs=shared)
        module_params, device = prepare_params(
            module, ignored, groups, device_id, param_init_fn, sync=sync_module_states
        )
        self.fsdp_names = tuple(state_names(module))  # before members are taken out
        settings = Settings(
            strategy=clamped(strategy, groups),
            precision=mixed_precision or MixedPrecision(),
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            device=device,
            offload=cpu_offload is not None and cpu_offload.offload_params,
            ignored_buffers=ignored.buffers,
            evaluates_in_full_precision=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1",
        )
        extension = self.fsdp_extension
        # On an axis of a larger mesh, members may be sharded over the other axes already.
        if extension is None and device_mesh is not None and larger_mesh(device_mesh) is not None:
            extension = TensorParallel(groups)
        unit = make_unit(module, module_params, groups, settings, extension, shard_placement_fn)
        self.syncs_states = sync_module_states
        self._build(unit, groups, ignored, device_mesh)
        # Wrappers around other modules refuse what is tied to these: the tie would be lost.
        for item in module_params:
            mark_sharded(item.param, f"{type(module).__name__}.{item.fqn}")

    def _build(
        self, unit: FlatUnit, groups: Groups, ignored: Ignored, device_mesh: DeviceMesh | None
    ) -> None:
        """What the wrapper is once everything has been decided."""
        module = unit.wrapped
        self.show_settings(unit, groups, device_mesh)
        self.fsdp_ignored = ignored
        self.fsdp_member_names = tuple(
            clean_name(item.fqn)
            for item in (unit.store.module_params if unit.store is not None else ())
        )
        self.fsdp_buffer_dtypes = {
            clean_name(name): buffer.dtype
            for name, buffer in module.named_buffers()
            if name not in ignored.buffers
        }
        self._fsdp_wrapped_module = module
        unit.show_flat()
        self.check_nothing_left()
        # Along which axes ranks are replicas depends on the members of all units: let all know over
        # which axes of a mesh any of them has cut members.
        store = unit.store
        own = set() if store is None else cut_lines_of(store.extension, store.tokens)
        below = [inner for inner in fsdp_units(self) if inner is not self]
        self.fsdp_cut_lines: Lines = own.union(*(inner.fsdp_cut_lines for inner in below))
        for inner in below:
            inner.fsdp_cut_lines = self.fsdp_cut_lines

    def check_nothing_left(self) -> None:
        """Raise RuntimeError, with their names, when parameters are neither sharded nor ignored."""
        managed = managed_below(self)
        left = [
            name
            for name, param in self._fsdp_wrapped_module.named_parameters()
            if id(param) not in managed and param not in self.fsdp_ignored.params
        ]
        if left:
            raise RuntimeError(
                f"neither sharded nor ignored: {', '.join(left)}; add parameters before wrapping"
            )

    # --- running --------------------------------------------------------------------------------

    # Only the wrapped module is compiled: hooks, streams and memory are no operations.
    @passed_over
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        with self.fsdp_unit.forward_range():
            try:
                args, kwargs = self._before_forward(args, kwargs)
                output = self._fsdp_wrapped_module(*args, **kwargs)
            except BaseException:  # an interrupt in a notebook, too: the next forward must work
                self.fsdp_unit.abort_forward()
                raise
            return self._after_forward(output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        runtime = self._find_root()
        # The mode may have changed since the last forward; where a checkpoint recomputes one inside
        # the backward it counts as it was.
        evaluates = self.fsdp_unit.settings.evaluates_in_full_precision
        if evaluates and runtime.root is self.fsdp_unit and not runtime.in_backward:
            cast_all_buffers(fsdp_units(self), low=self.training)
        return self.fsdp_unit.before_forward(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> Any:
        return self.fsdp_unit.after_forward(output)

    def _find_root(self) -> Root:
        """Make this wrapper the root of everything below it, unless it belongs to a root already.

        Raises ValueError when units disagree on what the model can only have once, AssertionError
        when a unit below has run as a root of its own.
        """
        if self.fsdp_unit.runtime is not None:
            return self.fsdp_unit.runtime
        wrappers = fsdp_units(self)
        units = [wrapper.fsdp_unit for wrapper in wrappers]
        held = not_to_move(units)
        check_no_inner_root(self.fsdp_unit, held, name_of=members_text, error=AssertionError)
        check_agreement(wrappers)
        # What checks is done before what changes: a root that is refused leaves no unit with one.
        runtime = Runtime(self.fsdp_unit, units, streams_for(self.fsdp_unit.settings.device))
        if wants_details():
            paths = {id(module): name for name, module in self.named_modules()}
            names = [members_text(one.fsdp_unit, paths[id(one)]) for one in wrappers]
            runtime.order_check = OrderCheck(self.fsdp_groups.comms, names)
        cast_all_buffers(wrappers, low=True)
        return runtime

    def check_is_root(self) -> bool:
        """Whether this is the outermost unit."""
        return self._find_root().root is self.fsdp_unit

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Start gathering this unit's parameters early; its next forward does not gather again.

        With `async_op` returns a handle whose `wait()` returns when they are there, else waits.
        """
        self._find_root()
        return start_early(self.fsdp_unit, shows_views=False, async_op=async_op)

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Let what is computed from now on see everything that was gathered early."""
        self._find_root().streams.compute_waits_for_gathers()

    @contextmanager
    def _use_training_state(self, phase: Phase) -> Iterator[None]:
        """Have this unit in another phase for a while, for schedules that call it by hand."""
        before = self.fsdp_unit.phase
        self.fsdp_unit.phase = phase
        try:
            yield
        finally:
            self.fsdp_unit.phase = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside are kept unsharded on each rank, and reduced together by
        the first backward outside. Raises RuntimeError unless this is the root.
        """
        self._assert_root("no_sync")
        self._assert_idle()
        units = [wrapper.fsdp_unit for wrapper in fsdp_units(self)]
        before = [unit.syncs_gradients for unit in units]  # contexts may be nested
        for unit in units:
            unit.syncs_gradients = False
        try:
            yield
        finally:
            for unit, flag in zip(units, before, strict=True):
                assert not unit.syncs_gradients, "gradient sync was switched on inside no_sync()"
                unit.syncs_gradients = flag

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm over all of them, on all ranks, is at most `max_norm`.

        Returns that norm. Collective; only on the root (RuntimeError), outside of forward and
        backward.
        """
        self._assert_root("clip_grad_norm_")
        self._assert_idle()
        units = [wrapper.fsdp_unit for wrapper in fsdp_units(self)]
        managed: set[int] = set()
        sharded: list[nn.Parameter] = []
        repeated: list[nn.Parameter] = []
        for unit in units:
            if unit.store is not None:
                # The user may have replaced the gradients that are shown, or set them to None.
                unit.store.follow_gradients()
                shown = unit.store.shown_params
                managed.update(id(param) for param in shown)
                (sharded if unit.settings.is_sharded else repeated).extend(shown)
        # What is ignored has the same gradient on all ranks, and counts once.
        repeated += [param for param in self.parameters() if id(param) not in managed]
        if any(unit.store is not None and any(unit.store.tokens) for unit in units):
            raise NotImplementedError(
                "clip_grad_norm_ does not know the norm over tensor parallel members: clip with a "
                "norm of your own, or shard with fully_shard and torch's clip_grad_norm_"
            )
        # Nothing to add over ranks: as an unwrapped model clips, without a collective.
        if not any(unit.settings.is_sharded for unit in units if unit.store is not None):
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return clip_sharded(
            [param.grad for param in sharded if param.grad is not None],
            [param.grad for param in repeated if param.grad is not None],
            max_norm=float(max_norm),
            norm_type=float(norm_type),
            comm=self.fsdp_groups.shard,
            device=self.fsdp_unit.settings.device,
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients by `hook(state, grad)`, or `hook(state, padded_grad, output_shard)`
        where parameters are sharded; it divides too. With `Blocks` or `Whole` ranks' shards differ
        in length: the hook gets a copy in which each is padded to the longest.

        Once, on the root, before the first forward, without hybrid sharding: else AssertionError.
        ValueError when not callable. All units get the hook, or none.
        """
        if not callable(hook):
            raise ValueError(f"the communication hook must be callable, got {type(hook).__name__}")
        if not self.check_is_root():
            raise AssertionError("register_comm_hook: call it on the root")
        units = [wrapper.fsdp_unit for wrapper in fsdp_units(self)]
        for unit in units:  # all are checked before one is changed
            if unit.settings.strategy in HYBRID:
                raise AssertionError("register_comm_hook: hybrid sharding cannot have hooks")
            if unit.reduction.hook is not None:
                raise AssertionError("register_comm_hook: a hook is registered already")
        for unit in units:
            unit.reduction = replace(unit.reduction, hook=hook_of(state, hook))

    # --- full parameters ------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, parameters below `module` have their full shapes and full precision.

        On leaving, each rank keeps its part of what was written, or nothing of it without
        `writeback`. `rank0_only`: the others of a shard group keep their shards. Collective. Raises
        NotImplementedError for combinations that cannot be, AssertionError when not idle.
        """
        wrappers = fsdp_units(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        # Often the first call of all: a root that is found at an inner unit would be a wrong one.
        for wrapper in fsdp_units(module, root_only=True) if recurse else wrappers:
            wrapper._find_root()
        units = [wrapper.fsdp_unit for wrapper in wrappers]
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        check_summon(units, options)
        with summon_units(units, options):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Like `nn.Module.apply`, with the full parameters of each unit at hand."""
        was_alone = self.fsdp_unit.runtime is None
        self._find_root()
        if self.fsdp_unit.phase is not Phase.IDLE:
            raise ValueError(f"apply() cannot be called during {self.fsdp_unit.phase.value}")
        # This unit alone: `super().apply` comes to inner wrappers, which open their own.
        with FullyShardedDataParallel.summon_full_params(self, recurse=False):
            super().apply(fn)
        if was_alone:
            # It may be an inner unit: the root is still to be found.
            for wrapper in fsdp_units(self):
                wrapper.fsdp_unit.runtime = None
        return self

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FullyShardedDataParallel:
        unit = self.fsdp_unit
        store = unit.store
        if store is None or not recurse:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        store.reshard()
        store.adopt_values()
        # Out of the modules, which would convert views: the store converts the memory below them.
        unit.hide_flat()
        store.take_shown()
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            store.convert(fn)
        finally:
            if store.settings.use_orig_params:
                store.put_params()
            else:
                store.show_placeholders()
                unit.show_flat()
        return self

    # --- looking through ------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, below an activation checkpoint wrapper if there is one."""
        inner: nn.Module = self._fsdp_wrapped_module
        while (below := dict(inner.named_children()).get("_checkpoint_wrapped_module")) is not None:
            inner = below
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == CHILD:  # not yet there: looking into it for itself would not end
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        inner: Any = self.module
        return inner[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module` has it; inside `summon_full_params` names are those of the bare module."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._name_now(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As `nn.Module` has it; inside `summon_full_params` names are those of the bare module."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._name_now(name), buffer

    def _name_now(self, name: str) -> str:
        return clean_name(name) if self.fsdp_unit.phase is Phase.SUMMON else name

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The units below `module`, itself included, in walk order; or only the outermost ones."""
        return fsdp_units(module, root_only=root_only)

    # --- checkpoints ----------------------------------------------------------------------------

    def __ckpt_pieces__(self) -> list[Owned]:
        store = self.fsdp_unit.store
        if store is None:
            return []
        members = [self._describe(index) for index in range(len(store.module_params))]
        local = store.flat.detach()
        owners = [owners_of(self.fsdp_groups, self.fsdp_mesh, m.inside) for m in members]
        if not store.settings.use_orig_params:
            # One object for all members: its ranks are those of the member that has most.
            widest = None if None in owners else max(owners, key=lambda o: len(o or ()))
            views = flat_views(members, local.dtype, base=0)
            return [Owned(store.flat, local, views, True, widest)]
        store.adopt_values()  # the user may have put other values into the parameters
        whole_here = not store.is_sharded
        return [
            member_as_param(param, local, member, over, whole_here=whole_here)
            for param, member, over in zip(store.params, members, owners, strict=True)
        ]

    def _describe(self, index: int) -> FlatMember:
        store = self.fsdp_unit.store
        assert store is not None
        member, part, token = store.layout.members[index], store.parts[index], store.tokens[index]
        fqn = clean_name(member.fqn)
        start, numel, offset = (0, 0, 0)
        if part is not None:
            start, numel, offset = part.in_member, part.numel, part.in_shard
        extension = store.extension
        inside = None if extension is None or token is None else extension.inside(token)
        holders = holders_of(
            self.fsdp_groups,
            None if self.fsdp_mesh is None else larger_mesh(self.fsdp_mesh),
            inside,
            self.fsdp_cut_lines,
            is_sharded=store.is_sharded,
        )
        order = memory_order(fqn, member.shape, member.stride)
        shown = member.part_shape(numel)
        return FlatMember(fqn, member.shape, order, start, numel, offset, holders, inside, shown)

    def __ckpt_aliases__(self) -> dict[str, str]:
        store = self.fsdp_unit.store
        return {
            clean_name(name): clean_name(item.fqn)
            for item in (store.module_params if store is not None else ())
            for name in item.names[1:]
        }

    def __ckpt_sharding__(self) -> UnitSharding:
        # Only what mixed precision has cast: the user may have converted the module since.
        casts = self.fsdp_unit.settings.precision.buffer_dtype is not None
        dtypes = self.fsdp_buffer_dtypes if casts else {}
        return UnitSharding(self.fsdp_groups.shard.group, self.fsdp_mesh, dtypes)

    def __ckpt_reshard__(self) -> None:
        unit = self.fsdp_unit
        if unit.phase is Phase.SUMMON:
            raise RuntimeError(
                "the module is inside summon_full_params(); leave that context before loading"
            )
        if unit.store is not None:
            unit.store.reshard()

    # --- checks ---------------------------------------------------------------------------------

    def _assert_root(self, what: str) -> None:
        if not self.check_is_root():
            raise RuntimeError(f"{what}() works on the outermost wrapper only; call it there")

    def _assert_idle(self) -> None:
        runtime = self._find_root()
        runtime.leave_failed_backward()
        for unit in runtime.units:
            if unit.phase is not Phase.IDLE:
                raise ValueError(
                    f"this cannot be called during {unit.phase.value}; call it between steps"
                )


redirect_static_methods(FullyShardedDataParallel)


def fsdp_units(module: nn.Module, *, root_only: bool = False) -> list[FullyShardedDataParallel]:
    """The wrappers below `module`, itself included, in walk order; or only the outermost ones."""
    wrappers = wrappers_below(module, root_only=root_only)
    return [one for one in wrappers if isinstance(one, FullyShardedDataParallel)]
