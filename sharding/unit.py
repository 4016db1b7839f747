"""One unit: the parameters that one wrapper gathers and frees together, and what happens to them
around the forward and the backward of the wrapped module.

    before_forward    gather, show views, cast inputs
    after_forward     free (unless the strategy keeps), ask to be called when gradients arrive
    before_backward   gather again, show views
    gradients_ready   free, reduce
    end_backward      whatever is left

What the units of one model do together (order, prefetch, the end of the backward) is in
`sharding.runtime`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from sharding.flat_param import FlatParam, State
from sharding.precision import cast_floating, map_tensors
from sharding.reduction import Reduction
from sharding.torch_seam import Place

if TYPE_CHECKING:
    from sharding.runtime import Runtime

FLAT_NAME = "_flat_param"
"""The name that a flat parameter has on the wrapped module; torch's own."""

__all__ = ["FLAT_NAME", "Phase", "Settings", "Unit"]

# Torch's own name of it has an underscore.
HYBRID_ZERO2 = ShardingStrategy["_HYBRID_SHARD_ZERO2"]
_KEEPS_AFTER_FORWARD = (
    ShardingStrategy.SHARD_GRAD_OP,
    HYBRID_ZERO2,
    ShardingStrategy.NO_SHARD,
)
HYBRID = (ShardingStrategy.HYBRID_SHARD, HYBRID_ZERO2)


class Phase(enum.Enum):
    """What a unit is in the middle of."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    SUMMON = "summon"


@dataclass(frozen=True)
class Settings:
    """What the constructor was told about a unit."""

    strategy: ShardingStrategy
    precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device: torch.device
    offload: bool
    ignored_buffers: frozenset[str] = frozenset()
    """Names relative to the wrapped module."""

    @property
    def frees_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward."""
        return self.strategy not in _KEEPS_AFTER_FORWARD

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split over ranks at all."""
        return self.strategy is not ShardingStrategy.NO_SHARD


class Unit:
    """See the head of this file. `store` is None for a wrapper with nothing to shard."""

    def __init__(
        self, wrapped: nn.Module, store: FlatParam | None, settings: Settings, reduction: Reduction
    ) -> None:
        self.wrapped = wrapped
        self.store = store
        self.settings = settings
        self.reduction = reduction
        self.phase = Phase.IDLE
        self.syncs_gradients = True
        self.was_prefetched = False
        self.runtime: Runtime | None = None
        """Set when the root has been found, at the first forward."""
        if store is not None:
            store.on_gradients = self.gradients_ready

    # --- forward --------------------------------------------------------------------------------

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather; returns the inputs in the dtype and on the device that the module computes in."""
        runtime = self.found_runtime()
        if self.phase is Phase.SUMMON:
            raise RuntimeError(
                "a forward inside summon_full_params() would compute with parameters that may be "
                "written at any time; leave that context first"
            )
        recomputes = self.phase is Phase.BACKWARD
        if runtime.root is self and not recomputes:
            runtime.begin_forward()
        if not recomputes:
            self.phase = Phase.FORWARD
            runtime.record_forward(self)
        if self.store is not None:
            self.gather()
            if not recomputes and self.settings.forward_prefetch:
                runtime.prefetch_forward(self)
        args, kwargs = self._inputs(args, kwargs, is_root=runtime.root is self)
        if self.store is not None and not self.store.requires_grad:
            self._reshard_after_inputs((args, kwargs))
        return args, kwargs

    def after_forward(self, output: Any) -> Any:
        """Free, and arrange for the backward; returns the output."""
        runtime = self.found_runtime()
        if self.phase is Phase.BACKWARD:
            return output  # recomputed: the parameters are needed on
        watched = self._watch(output)
        runtime.record_forward_end(self)
        self.phase = Phase.IDLE
        if self.store is None or runtime.in_backward:
            return output
        keeps = watched and (not self.settings.frees_after_forward or runtime.root is self)
        if not keeps:
            self.store.reshard()
        elif self.settings.use_orig_params:
            self.store.show_unsharded_params()
        return output

    def abort_forward(self) -> None:
        """The wrapped module raised: go back to where a new forward can start."""
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            if self.store is not None:
                self.store.reshard()

    def gather(self) -> None:
        """Have the parameters gathered and shown as views."""
        if self.store is not None:
            self.store.finish_unshard()
            self.store.show_views()
            self.was_prefetched = False

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_root: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        settings, device = self.settings, self.settings.device
        if is_root and device.type != "cpu":
            args, kwargs = map_tensors(
                lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
            )
        precision = settings.precision
        wanted = precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs
        if wanted and precision.param_dtype is not None and self.store_computes_low():
            args, kwargs = cast_floating(precision.param_dtype, (args, kwargs))
        return args, kwargs

    def store_computes_low(self) -> bool:
        """Whether the configured dtype of parameters is in force now."""
        return True

    def _watch(self, output: Any) -> bool:
        """Ask for `before_backward` at every output with a gradient; whether there is any."""
        if not torch.is_grad_enabled():
            return False
        found = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                found.append(tensor)
            return tensor

        map_tensors(watch, output)
        for tensor in found:
            tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
        return bool(found)

    def _reshard_after_inputs(self, inputs: Any) -> None:
        """A frozen unit sees no gradients of its own: free it when those of its inputs are done."""
        if not torch.is_grad_enabled():
            return
        found: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                found.append(tensor)
            return tensor

        map_tensors(collect, inputs)
        if found:
            register_multi_grad_hook(found, lambda grads: self._frozen_done())

    def _frozen_done(self) -> None:
        if self.store is not None and self.phase is Phase.BACKWARD:
            self.store.reshard()
            self.phase = Phase.IDLE

    # --- backward -------------------------------------------------------------------------------

    def _on_output_gradient(self, grad: torch.Tensor) -> None:
        self.before_backward()

    def before_backward(self) -> None:
        """Gather again; the first unit of a backward also arranges for its end."""
        runtime = self.found_runtime()
        runtime.begin_backward()
        first = self.phase is not Phase.BACKWARD
        self.phase = Phase.BACKWARD
        if self.store is None:
            return
        self.gather()
        if first and self.settings.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            runtime.prefetch_backward(self)

    def gradients_ready(self, grads: Sequence[torch.Tensor | None]) -> None:
        """All gradients of the unit are there: free the parameters and start reducing.

        Raises RuntimeError when the gradients are to be differentiated themselves.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of sharded parameters cannot be differentiated again: call backward() "
                "without create_graph=True"
            )
        runtime = self.found_runtime()
        runtime.begin_backward()
        store = self.store
        assert store is not None
        store.adopt_gradients()
        if self.syncs_gradients or self.settings.frees_after_forward:
            store.reshard()
            self.phase = Phase.IDLE
        if self.settings.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            runtime.prefetch_backward(self)
        if self.syncs_gradients:
            runtime.reductions.start(store, self.reduction, grads)
        else:
            store.keep_unsharded_gradients(grads)

    def end_backward(self) -> None:
        """Free what the backward has left over (outputs that were not used, frozen members)."""
        keeps = not self.syncs_gradients and not self.settings.frees_after_forward
        self.phase = Phase.IDLE
        self.was_prefetched = False
        if self.store is None:
            return
        if not keeps:
            self.store.reshard()
        elif self.settings.use_orig_params and self.store.state is State.UNSHARDED:
            self.store.show_unsharded_params()

    # --- the flat parameter as a parameter of the module ----------------------------------------

    def show_flat(self) -> None:
        """Without original parameters: register the flat parameter on the wrapped module."""
        if self.store is not None and not self.settings.use_orig_params:
            self.wrapped.register_parameter(FLAT_NAME, self.store.flat)

    def hide_flat(self) -> None:
        """Undo `show_flat`."""
        Place(self.wrapped, FLAT_NAME).take()

    # --- state ----------------------------------------------------------------------------------

    def found_runtime(self) -> Runtime:
        """What the model's units share. Set before any of them runs."""
        if self.runtime is None:
            raise AssertionError("the root of this unit has not been found yet")
        return self.runtime

    @property
    def needs_gather(self) -> bool:
        """Whether a prefetch would do anything."""
        return self.store is not None and self.store.state is State.SHARDED
