"""The schedule of one model's units: the order they run in, gathers by hand, the backward's end.

The root is the outermost unit; it is found at the first forward, or the first call that needs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from sharding.engine.collectives import Comm
from sharding.engine.store import WAITING, State
from sharding.engine.torch_seam import call_after_backward, is_in_backward
from sharding.engine.unit import Phase, Root, Unit
from sharding.torch_face import TorchHandle, TorchReductionHandle

U = TypeVar("U", bound=Unit)


class Runtime(Root):
    """One model's schedule."""

    order_check: OrderCheck | None = None
    """Set where the user requested checks of the order."""

    def begin_forward(self) -> None:
        """The root's forward starts: a new iteration, unless the last one is still to be run
        backward.
        """
        self.check_nothing_awaited("forward")
        self.leave_failed_backward()
        self.steps.begin()
        # An optimizer may have written to the shards since, on the stream of compute.
        self.streams.gathers_wait_for_compute()
        # Forward prefetching goes by the first iteration, which is over only now.
        if not self._first_order and self._forward_order:
            self._first_order = tuple(self._forward_order)
        self._forward_order = []
        self.ended_order = []
        for unit in self.units:
            if unit.phase is Phase.FORWARD:
                unit.abort_forward()  # of an iteration that has raised
            unit.refresh()

    def begin_alone(self, unit: Unit) -> None:
        """The unit's forward starts outside of the root's: an iteration for it alone."""
        if is_in_backward():
            return
        self.check_nothing_awaited("forward")
        self.leave_failed_backward()
        self.streams.gathers_wait_for_compute()
        unit.abort_forward()
        if unit.store is None or unit.store.state is not State.GATHERING:
            unit.refresh()

    def record_forward(self, unit: Unit) -> None:
        """Remember that the unit's forward starts now."""
        if self.in_backward or unit.leader is not None:
            return
        self._forward_order.append(unit)
        # Without gradients nothing is reduced, and ranks may evaluate different parts of a model.
        if self.order_check is not None and unit.store is not None and torch.is_grad_enabled():
            self.order_check.record(self.units.index(unit))

    def begin_backward(self) -> None:
        """The first gradient of a backward arrives: arrange for its end."""
        if self.in_backward:
            return
        if self.order_check is not None:
            self.order_check.begin_backward()
        self.in_backward = True
        # Kept until the end: several backwards may have one end by hand.
        if self.is_ended_by_hand is None:
            self.is_ended_by_hand = self.ends_by_hand
        self.streams.gathers_wait_for_compute()
        call_after_backward(self.end_backward)

    def end_forward_alone(self) -> None:
        """A forward has ended that no backward follows: the host may write to its shards now."""
        self.streams.release_all()
        if any(unit.offload for unit in self.units):
            self.streams.finish()

    def end_backward(self) -> None:
        """All gradients have been computed: finish reductions, free what is left."""
        with self.root.ranges.end:
            self._end_backward()

    def _end_backward(self) -> None:
        if self.is_ended_by_hand:
            self.in_backward = False
            for unit in self.units:
                unit.end_backward(is_over=False)
            self.streams.release_all()
            return
        self._reduce_rest(waits=self.is_last_backward)
        if self.is_last_backward:
            self.is_ended_by_hand = None
            if any(unit.offload for unit in self.units):
                self.streams.finish()

    def end_by_hand(self) -> GradientReductionHandle:
        """End the backwards since the last end: reduce what they have left to be reduced, and free.

        Nothing else is to be started before the handle has been waited for.
        """
        with self.root.ranges.end:
            self._reduce_rest(waits=False)
        handle = GradientReductionHandle(self)
        # At the streams: other roots may share them, and must wait for it too.
        self.streams.awaited = handle
        return handle

    def finish_by_hand(self) -> None:
        """Let compute wait for all reductions: gradients are there."""
        with self.root.ranges.wait, torch.no_grad():
            self.reductions.finish()
        self.streams.awaited = self.is_ended_by_hand = None
        if any(unit.offload for unit in self.units):
            self.streams.finish()

    def _reduce_rest(self, *, waits: bool) -> None:
        try:
            if self.order_check is not None:
                self.order_check.end_iteration()
            with torch.no_grad():
                for unit in self.units:
                    if unit.must_reduce:
                        unit.reduce_unused()
                if waits:
                    with self.root.ranges.wait:
                        self.reductions.finish()
        except BaseException:
            self._abandon_backward()  # a user's hook, or a rank that is gone
            raise
        self.in_backward = False
        with torch.no_grad():
            for unit in self.units:
                unit.end_backward()
        self.streams.release_all()
        self.steps.end()

    def reset(self) -> None:
        """An iteration has raised: wait for what is under way, forget its gradients, free all.

        Raises RuntimeError while another root, which has the same streams, is to be waited for.
        """
        awaited = self.streams.awaited
        if isinstance(awaited, GradientReductionHandle) and not awaited.is_of(self):
            raise RuntimeError(
                "reset_iter_state() cannot reset a gradient reduction of another root that shares "
                "streams with this one: call wait() on its handle first"
            )
        self.streams.awaited = self.is_ended_by_hand = None
        self._abandon_backward()
        self._forward_order, self.ended_order = [], []
        for unit in self.units:
            if unit.store is not None:
                unit.store.reshard()
                unit.store.drop_unsharded_gradients()

    def leave_failed_backward(self) -> None:
        """If the last backward raised half-way, be where one that has ended would be."""
        if self.in_backward and not is_in_backward():
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        """A backward raised half-way: forget what it has left."""
        self.in_backward = False  # first: dropping may raise, and the next forward starts anew
        self.is_ended_by_hand = None
        try:
            self.reductions.drop()
        finally:
            for unit in self.units:
                unit.end_backward()


class GradientReductionHandle(TorchReductionHandle):
    """Reductions at the end of a backward that `finalize_backward(async_op=True)` has ended."""

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime
        """None once there is nothing to wait for."""

    def is_of(self, runtime: Runtime) -> bool:
        """Whether that root's reductions are meant."""
        return self._runtime is runtime

    def wait(self) -> None:
        """Return when compute may read the gradients. Waiting twice is harmless.

        Raises RuntimeError when `reset_iter_state` has dropped them.
        """
        runtime = self._runtime
        if runtime is None:
            return
        if runtime.streams.awaited is not self:
            raise RuntimeError(
                "this gradient reduction handle was invalidated: reset_iter_state() has dropped "
                "its gradients"
            )
        runtime.finish_by_hand()
        self._runtime = None


def check_no_inner_root(
    root: U, units: Sequence[U], *, name_of: Callable[[U], str], error: type[Exception]
) -> None:
    """Raise `error`, with the names of both, when one of the units below `root` has a root already:
    its schedule was made for a part of the model. torch's two classes raise different errors.
    """
    for unit in units:
        if unit.runtime is not None:
            raise error(
                f"{name_of(unit)} was used as a root (by a forward of its own, or a call that "
                f"needs a root) before {name_of(root)}, which contains it; call the outermost "
                "module first"
            )


class UnshardHandle(TorchHandle):
    """A gather that the user started by hand, before the forward that needs it."""

    def __init__(self, units: Sequence[Unit], *, shows_views: bool) -> None:
        self._units = tuple(units)
        self._shows_views = shows_views

    def wait(self) -> None:
        """Return when the parameters are there. Waiting twice is harmless.

        With `shows_views` the module shows them then; the wrapper shows its own in the forward.
        """
        for unit in self._units:
            store = unit.store
            # Resharded since, it has nothing to wait for: gathering again would be a surprise.
            if store is not None and store.state in (State.GATHERING, State.UNSHARDED):
                store.finish_unshard()
                if self._shows_views:
                    store.show_views()


def start_early(*units: Unit, shows_views: bool, async_op: bool) -> UnshardHandle | None:
    """Start to gather the units' parameters; their next forward does not gather again.

    With `async_op` returns a handle whose `wait()` returns when they are there, else waits.
    """
    for unit in units:
        store = unit.store
        if store is not None and store.state in WAITING:
            # An optimizer may just have stepped, and outside of a forward nothing else makes the
            # stream of gathers wait for it.
            store.streams.gathers_wait_for_compute()
            unit.was_requested = True
            unit.gather_early()
    handle = UnshardHandle(units, shows_views=shows_views)
    if async_op:
        return handle
    handle.wait()
    return None


_BACKWARD = -1
"""Stands for the backward among the numbers of units."""


class OrderCheck:
    """Whether all ranks run their units in one order, looked at with
    `TORCH_DISTRIBUTED_DEBUG=DETAIL`, in training.

    Ranks compare the unit of every forward, and raise when they differ; their collectives would
    wait for each other. An iteration in which all ranks differ from the first one is warned about,
    once. `names` are those of units by number, `comms` are the groups that all ranks of the model
    are joined by: shard, and replicate if there is one.
    """

    def __init__(self, comms: Sequence[Comm], names: Sequence[str]) -> None:
        self._comms = tuple(comms)
        self._rank = comms[0].global_ranks[comms[0].rank]
        self._names = names
        self._first: list[int] = []
        self._position = 0
        self._is_first = True
        self._has_warned = False

    def record(self, unit: int) -> None:
        """A forward of the unit starts. Collective.

        Raises RuntimeError, on all ranks, when ranks start different units.
        """
        self._compare(unit, self._names[unit])
        if self._is_first:
            self._first.append(unit)
            self._position += 1
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if expected != unit and not self._has_warned:
            self._has_warned = True
            wanted = "no further unit" if expected is None else self._names[expected]
            warnings.warn(
                "Forward order differs from that of the first iteration on rank "
                f"{self._rank}: {self._names[unit]} instead of {wanted}; prefetching goes by the "
                "first iteration",
                stacklevel=2,
            )

    def begin_backward(self) -> None:
        """The backward starts. Collective: a rank with fewer forwards than others comes here while
        these start another unit, and would leave them waiting.

        Raises RuntimeError as `record` does.
        """
        if self._position:
            self._compare(_BACKWARD, "the backward")

    def _compare(self, what: int, name: str) -> None:
        # Inside the shard group, then across replicas: all ranks end with the reports of all, so
        # that all of them raise.
        everyone = [(self._rank, what, name)]
        for comm in self._comms:
            everyone = [one for part in comm.gather_objects(everyone) for one in part]
        if any(number != what for _, number, _ in everyone):
            reports = "; ".join(f"rank {rank}: {theirs}" for rank, _, theirs in sorted(everyone))
            position, iteration = self._position, "the first" if self._is_first else "a later"
            self._position, self._first = 0, [] if self._is_first else self._first
            raise RuntimeError(
                f"Forward order differs across ranks: at forward {position} of {iteration} "
                f"iteration they run different units ({reports}); all ranks must run them in one "
                "order"
            )

    def end_iteration(self) -> None:
        """A backward has ended."""
        self._is_first = self._is_first and not self._first
        self._position = 0
