"""What the units of one model share: the order they ran in, prefetching, the backward's end.

The root is the outermost unit; it is found at the first forward, or the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharding.memory import PagePool
from sharding.order import OrderCheck
from sharding.pool import BufferPool
from sharding.reduction import Reductions
from sharding.streams import Streams
from sharding.torch_seam import call_after_backward
from sharding.unit import Phase, Unit

__all__ = ["Runtime"]


class Runtime:
    """One model's schedule. `units` has the root first, then the others as modules are walked."""

    def __init__(self, root: Unit, units: Sequence[Unit], streams: Streams) -> None:
        self.root = root
        self.units = tuple(units)
        self.streams = streams
        self.pool = BufferPool()
        self.pages = PagePool()
        self.reductions = Reductions(self.pool, streams)
        self.in_backward = False
        self.order_check: OrderCheck | None = None
        """Set where the user asked for checks of the order."""
        self._forward_order: list[Unit] = []
        self._first_order: tuple[Unit, ...] = ()
        self._ended_order: list[Unit] = []
        for number, unit in enumerate(self.units):
            unit.runtime = self
            if unit.store is not None:
                unit.store.tag = number
                unit.store.streams = streams
                unit.store.pages = self.pages

    def begin_forward(self) -> None:
        """The root's forward starts: a new iteration, unless the last one is still to be run
        backward.
        """
        if self.in_backward:
            self._abandon_backward()
        self.streams.gathers_wait_for_compute()
        if not self._first_order and self._forward_order:
            self._first_order = tuple(self._forward_order)
        self._forward_order = []
        self._ended_order = []
        for unit in self.units:
            if unit.store is not None:
                unit.store.adopt_gradients()
                if unit.syncs_gradients and not unit.was_prefetched:
                    # Kept from an earlier forward; the shards may have been stepped since.
                    unit.store.reshard()

    def record_forward(self, unit: Unit) -> None:
        """Remember that the unit's forward starts now."""
        if self.in_backward:
            return
        self._forward_order.append(unit)
        if self.order_check is not None and unit.store is not None and torch.is_grad_enabled():
            self.order_check.record(self.units.index(unit))

    def record_forward_end(self, unit: Unit) -> None:
        """Remember that the unit's forward has ended."""
        if not self.in_backward:
            self._ended_order.append(unit)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start gathering what ran next in the first iteration."""
        order = self._first_order
        at = len(self._forward_order)
        if 0 < at < len(order) and order[at - 1] is unit:
            self._prefetch(order[at])

    def prefetch_backward(self, unit: Unit) -> None:
        """Start gathering what ran just before `unit` in this iteration."""
        order = self._ended_order
        for at in range(len(order) - 1, 0, -1):
            if order[at] is unit:
                target = order[at - 1]
                if target.phase is Phase.IDLE:
                    self._prefetch(target)
                return

    def _prefetch(self, unit: Unit) -> None:
        if unit.needs_gather and unit.store is not None:
            unit.store.start_unshard()
            unit.was_prefetched = True

    def begin_backward(self) -> None:
        """The first gradient of a backward arrives: arrange for its end."""
        if not self.in_backward:
            self.in_backward = True
            self.streams.gathers_wait_for_compute()
            call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """All gradients have been computed: finish reductions, free what is left."""
        self.in_backward = False
        if self.order_check is not None:
            self.order_check.end_iteration()
        with torch.no_grad():
            self.reductions.finish()
            for unit in self.units:
                unit.end_backward()
        if any(unit.settings.offload for unit in self.units):
            self.streams.finish()

    def _abandon_backward(self) -> None:
        """A backward raised half-way: forget what it has left."""
        self.in_backward = False
        self.reductions.drop()
        for unit in self.units:
            unit.end_backward()
