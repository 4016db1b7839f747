"""A unit of the flat engine: the wrapper's settings, and what modules show of its parameter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from sharding.engine.groups import HYBRID, HYBRID_ZERO2
from sharding.engine.precision import Casts
from sharding.engine.ranges import FLAT
from sharding.engine.reduction import Reduction
from sharding.engine.torch_seam import ParamPlace
from sharding.engine.unit import Schedule, Unit
from sharding.flat.param import FlatParam

__all__ = ["FLAT_NAME", "HYBRID", "FlatUnit", "Settings"]

FLAT_NAME = "_flat_param"
"""The name that a flat parameter has on the wrapped module; torch's own."""

_KEEPS_AFTER_FORWARD = (
    ShardingStrategy.SHARD_GRAD_OP,
    HYBRID_ZERO2,
    ShardingStrategy.NO_SHARD,
)


@dataclass(frozen=True)
class Settings:
    """The arguments of the constructor that concern one unit."""

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
    evaluates_in_full_precision: bool = False

    @property
    def frees_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward."""
        return self.strategy not in _KEEPS_AFTER_FORWARD

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split over ranks at all."""
        return self.strategy is not ShardingStrategy.NO_SHARD

    @property
    def schedule(self) -> Schedule:
        """When to gather and free."""
        return Schedule(
            frees_after_forward=None if self.frees_after_forward else False,
            # What is not sharded costs nothing to take again, and may be in a lower precision.
            frees_unsynced=self.frees_after_forward or not self.is_sharded,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
        )

    @property
    def casts(self) -> Casts:
        """What to cast inputs to."""
        precision = self.precision
        return Casts(
            dtype=precision.param_dtype,
            root_inputs=precision.cast_root_forward_inputs,
            inputs=precision.cast_forward_inputs,
        )


class FlatUnit(Unit):
    """A unit with a flat parameter, or with none, around one wrapped module."""

    store: FlatParam | None

    def __init__(
        self, wrapped: nn.Module, store: FlatParam | None, settings: Settings, reduction: Reduction
    ) -> None:
        super().__init__(
            store,
            reduction,
            device=settings.device,
            schedule=settings.schedule,
            casts=settings.casts,
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
