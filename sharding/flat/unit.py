"""A unit of the flat engine: what modules show of its parameter, and full parameters outside of
forward and backward (`summon_units`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from sharding.engine.groups import HYBRID_ZERO2
from sharding.engine.precision import Casts
from sharding.engine.ranges import FLAT
from sharding.engine.reduction import Reduction
from sharding.engine.torch_seam import ParamPlace, put_all
from sharding.engine.unit import Phase, Schedule, Unit
from sharding.flat.param import FlatParam, assign_grad
from sharding.flat.values import Settings

FLAT_NAME = "_flat_param"
"""The name that a flat parameter has on the wrapped module; torch's own."""

_KEEPS_AFTER_FORWARD = (
    ShardingStrategy.SHARD_GRAD_OP,
    HYBRID_ZERO2,
    ShardingStrategy.NO_SHARD,
)


class FlatUnit(Unit):
    """A unit with a flat parameter, or with none, around one wrapped module."""

    store: FlatParam | None

    def __init__(
        self, wrapped: nn.Module, store: FlatParam | None, settings: Settings, reduction: Reduction
    ) -> None:
        precision = settings.precision
        frees_after_forward = settings.strategy not in _KEEPS_AFTER_FORWARD
        super().__init__(
            store,
            reduction,
            device=settings.device,
            schedule=Schedule(
                frees_after_forward=None if frees_after_forward else False,
                # Unsharded values cost no gather to take again; in low precision, a cast.
                frees_unsynced=frees_after_forward or not settings.is_sharded,
                backward_prefetch=settings.backward_prefetch,
                forward_prefetch=settings.forward_prefetch,
            ),
            casts=Casts(
                dtype=precision.param_dtype,
                root_inputs=precision.cast_root_forward_inputs,
                inputs=precision.cast_forward_inputs,
            ),
            offload=settings.offload,
            face=FLAT,
        )
        self.wrapped = wrapped
        self.settings = settings

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward_range(self) -> AbstractContextManager[Any]:
        """What profilers show around the wrapper's forward."""
        if self.runtime is not None and self.runtime.root is self:
            self.runtime.look_for_profiler()
        context: AbstractContextManager[Any] = self.ranges.forward
        return context

    def refresh(self) -> None:
        """A new iteration starts: free what is out of date, and see which dtype is in force."""
        if self.store is not None:
            self.store.check_not_replaced()
        super().refresh()
        if self.store is not None and self.store.computes_low != self.store_computes_low():
            self.store.reshard()
            self.store.computes_low = self.store_computes_low()

    def store_computes_low(self) -> bool:
        """Whether the configured dtype of parameters is in force now."""
        return self.wrapped.training or not self.settings.evaluates_in_full_precision

    def show_flat(self) -> None:
        """Without original parameters: register the flat parameter on the wrapped module."""
        if self.store is not None and not self.settings.use_orig_params:
            self.wrapped.register_parameter(FLAT_NAME, self.store.flat)

    def hide_flat(self) -> None:
        """Undo `show_flat`."""
        ParamPlace(self.wrapped, FLAT_NAME).take()


@dataclass(frozen=True)
class SummonOptions:
    """The arguments of `summon_full_params`: gather, let the user look and write, keep this rank's
    part.
    """

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


def check_summon(units: Sequence[FlatUnit], options: SummonOptions) -> None:
    """Raise NotImplementedError for options that contradict each other or the units."""
    unsharded = any(unit.store is not None and not unit.settings.is_sharded for unit in units)
    if options.with_grads and options.offload_to_cpu:
        raise NotImplementedError("with_grads=True cannot be combined with offload_to_cpu=True")
    if options.with_grads and any(not unit.settings.use_orig_params for unit in units):
        raise NotImplementedError("with_grads=True needs use_orig_params=True")
    if options.writeback and options.rank0_only:
        raise NotImplementedError("rank0_only=True needs writeback=False")
    if options.offload_to_cpu and unsharded:
        raise NotImplementedError("offload_to_cpu=True cannot be had with NO_SHARD units")
    if options.offload_to_cpu and not options.rank0_only:
        warnings.warn(
            "offload_to_cpu=True without rank0_only=True puts the full parameters into the memory "
            "of the host once for every rank",
            stacklevel=4,
        )


@contextmanager
def summon_units(units: Sequence[FlatUnit], options: SummonOptions) -> Iterator[None]:
    """Show the full parameters of the units, all of them idle, while the context is open.

    Raises AssertionError inside forward, backward or another such context.
    """
    for unit in units:
        unit.known_runtime.leave_failed_backward()
        if unit.phase is not Phase.IDLE or unit.known_runtime.in_backward:
            raise AssertionError(
                "full parameters can only be summoned outside of forward, backward and another "
                f"summon_full_params(); a unit is in {unit.phase.name}"
            )
    # All are open at once: one that fails to open, or to write back, closes the others.
    with ExitStack() as stack:
        for unit in units:
            unit.phase = Phase.SUMMON  # also where nothing is gathered: the names are bare there
            stack.callback(setattr, unit, "phase", Phase.IDLE)
            if unit.store is not None:
                stack.enter_context(_summoned(unit, unit.store, options))
        yield


@contextmanager
def _summoned(unit: FlatUnit, store: FlatParam, options: SummonOptions) -> Iterator[None]:
    store.reshard()
    store.adopt_values()
    store.adopt_gradients()
    sharded = store.is_sharded
    # Collective, so it comes before the ranks that show nothing leave by rank0_only.
    full = store.gather_copy(store.flat)
    grads = _gathered_grads(store) if options.with_grads else None
    hides = sharded or not store.settings.use_orig_params  # else what it has is full anyway
    if options.rank0_only and store.comm.rank != 0 and hides:
        yield
        return
    if options.offload_to_cpu:
        full = full.cpu()
    views = store.member_views(full)
    shown = _show(unit, store, views)
    # After the parameters: torch compares a gradient with the shape that its parameter shows.
    if grads is not None:
        for param, grad in zip(store.params, store.member_views(grads), strict=True):
            if param.requires_grad:
                assign_grad(param, grad)
    try:
        yield
        # Not where the block raises: what it has half written is not kept.
        with torch.no_grad():
            _collect_writes(store, views, shown)
            # As in torch's class, where units that are not sharded show their own memory.
            if options.writeback or not sharded:
                store.keep_own_part(full, store.flat)
            if grads is not None and (options.writeback or not sharded):
                _keep_grads(store, grads)
    finally:
        _hide(unit, store)


def _show(
    unit: FlatUnit, store: FlatParam, views: Sequence[torch.Tensor]
) -> tuple[nn.Parameter, ...]:
    is_orig = store.settings.use_orig_params
    if is_orig:
        for param, view in zip(store.params, views, strict=True):
            param.data = view
    else:
        unit.hide_flat()
    # The user's own parameters, unless there are none or an extension shows another kind of tensor.
    shown = tuple(
        param
        if is_orig and store.tokens[index] is None
        else nn.Parameter(
            store.as_shown(index, view),
            requires_grad=param.requires_grad if is_orig else store.requires_grad,
        )
        for index, (param, view) in enumerate(zip(store.params, views, strict=True))
    )
    store.take_shown()
    put_all(store.places, shown)
    return shown


def _collect_writes(
    store: FlatParam, views: Sequence[torch.Tensor], shown: Sequence[nn.Parameter]
) -> None:
    """Copy into the gathered tensor what the user put in place of its views."""
    for index, (item, view, param) in enumerate(
        zip(store.module_params, views, shown, strict=True)
    ):
        current = item.places[0].current()
        current = store.as_flattened(index, param if current is None else current)
        # By address: an assignment to `.data` replaces the memory of the same object.
        if current.data_ptr() != view.data_ptr():
            if current.shape != view.shape:
                raise RuntimeError(
                    f"{item.fqn}: was replaced by a tensor of shape {tuple(current.shape)}, its "
                    f"shape is {tuple(view.shape)}; keep the shape of parameters"
                )
            view.copy_(current.detach())


def _hide(unit: FlatUnit, store: FlatParam) -> None:
    if store.settings.use_orig_params:
        for item, param in zip(store.module_params, store.params, strict=True):
            for place in item.places:
                if place.current() is not param:
                    place.put(param)
        store.show_shards()
        store.show_gradients()
        return
    store.show_placeholders()
    unit.show_flat()


def _gathered_grads(store: FlatParam) -> torch.Tensor | None:
    """Everyone's sharded gradient as one tensor, with zeros for ranks that have none.

    None if no rank shows one. A rank whose part is of frozen members or empty shows none, so it
    does not see when users set gradients to None: what it holds does not count.
    """
    grad = store.grad
    shows = store.shows_reduced_gradients
    if not any(store.comm.gather_objects(shows) if store.is_sharded else [shows]):
        return None
    return store.gather_copy(torch.zeros_like(store.flat) if grad is None else grad)


def _keep_grads(store: FlatParam, grads: torch.Tensor) -> None:
    for param, view in zip(store.params, store.member_views(grads), strict=True):
        # The flat gradient has room for all members: one without a gradient counts as zeros.
        if param.requires_grad and param.grad is None:
            view.zero_()
        elif param.grad is not None and param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
    grad = store.grad
    if grad is None:
        grad = torch.zeros_like(store.flat.detach())
        store.grad = grad
    store.keep_own_part(grads, grad)
