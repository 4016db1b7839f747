"""One unit: the parameters that one wrapper gathers and frees together, and what happens to them
around the forward and the backward of the wrapped module.

    before_forward    gather, show views, cast inputs
    after_forward     free (unless the strategy keeps), ask to be called when gradients arrive
    before_backward   gather again, show views
    gradients_ready   free, reduce
    end_backward      whatever is left

What the units of one model share, and prefetching, is in `Root` below; their order and the end of
the backward are in `sharding.engine.runtime`.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import BackwardPrefetch
from torch.utils.hooks import RemovableHandle

from sharding.engine.memory import BufferPool, PagePool
from sharding.engine.precision import Casts, cast_floating, map_tensors
from sharding.engine.ranges import IN_PLACE, NO_RANGES, Ranges, StepLog
from sharding.engine.reduction import Reduction, Reductions
from sharding.engine.store import WAITING, ParameterStore, State
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import NO_BACKWARD, current_backward, is_in_backward, is_profiling


class Phase(enum.Enum):
    """What a unit is in the middle of."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    SUMMON = "summon"


@dataclass(frozen=True)
class Schedule:
    """When a unit gathers and frees."""

    frees_after_forward: bool | None = None
    """None: unless it is the root, whose parameters the backward wants first."""
    keeps_without_grad: bool = False
    """Whether `frees_after_forward=False` also holds for forwards that no backward follows."""
    frees_after_backward: bool = True
    frees_unsynced: bool = True
    """Whether a backward that does not reduce frees too."""
    gathers_in_backward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False


class Root:
    """What the units of one root share. `units` has the root first, then the others as modules are
    walked.

    What is empty here is in `sharding.engine.runtime.Runtime`, the schedule. A unit knows only this
    base of it, so that imports run from the runtime to its units and not back.
    """

    def __init__(self, root: Unit, units: Sequence[Unit], streams: Streams) -> None:
        self.root = root
        self.units = tuple(units)
        self.streams = streams
        self.pool = BufferPool()
        self.pages = PagePool()
        self.reductions = Reductions(self.pool, streams)
        self.in_backward = False
        self.is_last_backward = True
        """Whether the next backward's reductions are waited for at its end."""
        self.ends_by_hand = False
        """Whether the user ends backwards, by `finish_by_hand`, from the next one on."""
        self.is_ended_by_hand: bool | None = None
        """The same of the backward that has not ended yet; None without one."""
        self.steps = StepLog()
        self._shows_ranges = False
        self._forward_order: list[Unit] = []
        self._first_order: tuple[Unit, ...] = ()
        self.ended_order: list[Unit] = []
        for number, unit in enumerate(self.units):
            unit.runtime = unit.known_runtime = self
            unit.number = number
            if unit.store is not None:
                unit.store.tag = number
                unit.store.pages = self.pages
                unit.store.pool = self.pool
        self.share(streams)

    def share(self, streams: Streams) -> None:
        """Use these streams from now on, for what is under way on others too."""
        streams.awaited = streams.awaited or self.streams.awaited
        self.streams = self.reductions.streams = streams
        for unit in self.units:
            if unit.store is not None:
                unit.store.use(streams)

    def look_for_profiler(self) -> None:
        """Show ranges from now on, if a profiler records them."""
        if is_profiling() is not self._shows_ranges:
            self._shows_ranges = not self._shows_ranges
            for unit in self.units:
                unit.show_ranges(shows=self._shows_ranges)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start gathering what the user named, or what ran next in the first iteration."""
        if unit.forward_targets or not unit.schedule.forward_prefetch:
            _gather_early(unit.forward_targets)
            return
        order = self._first_order
        position = len(self._forward_order)
        if 0 < position < len(order) and order[position - 1] is unit:
            _gather_early((order[position],))

    def prefetch_backward(self, unit: Unit) -> None:
        """Start gathering what the user named, or what ran just before `unit` in this iteration."""
        if unit.backward_targets:
            _gather_early(unit.backward_targets)
            return
        order = self.ended_order
        # From the end: a unit that ran several times goes backward through its last forward first.
        for position in range(len(order) - 1, 0, -1):
            if order[position] is unit:
                target = order[position - 1]
                if target.phase is Phase.IDLE and target.schedule.gathers_in_backward:
                    with unit.ranges.prefetching(target.named_ranges):
                        _gather_early((target,))
                return

    def check_nothing_awaited(self, what: str) -> None:
        """Raise RuntimeError when there are reductions that the user has to wait for first."""
        if self.streams.awaited is not None:
            raise RuntimeError(
                f"the previous gradient reduction must be waited on before {what}: call wait() on "
                "what finalize_backward(async_op=True) returned"
            )

    def begin_forward(self) -> None:
        """The root's forward starts."""

    def begin_alone(self, unit: Unit) -> None:
        """The unit's forward starts outside of the root's."""

    def record_forward(self, unit: Unit) -> None:
        """The unit's forward starts."""

    def end_forward_alone(self) -> None:
        """A forward has ended that no backward follows."""

    def begin_backward(self) -> None:
        """The first gradient of a backward arrives."""

    def end_backward(self) -> None:
        """All gradients have been computed: finish reductions, free what is left."""

    def end_by_hand(self) -> Any:
        """The user ends the backwards since the last end."""

    def leave_failed_backward(self) -> None:
        """Clean up after a backward that raised half-way."""

    def reset(self) -> None:
        """Forget an iteration that has raised."""


class _Forward:
    """A forward that a backward may follow. Only the graph keeps it: it goes with that."""

    def __init__(self) -> None:
        self.is_backward = False
        """Whether the backward has come."""


class Unit:
    """See the head of this file. `store` is None for a wrapper with nothing to shard."""

    def __init__(
        self,
        store: ParameterStore | None,
        reduction: Reduction,
        *,
        device: torch.device,
        schedule: Schedule,
        casts: Casts,
        offload: bool = False,
        face: int = IN_PLACE,
    ) -> None:
        self.store = store
        self.reduction = reduction
        self.device = device
        self.schedule = schedule
        self.casts = casts
        self.offload = offload
        """Whether shards and their gradients live in the host's memory."""
        self.phase = Phase.IDLE
        self.syncs_gradients = True
        self.was_requested = False
        """Whether the user had it gathered early: for the next iteration, not for this one."""
        self.forward_targets: tuple[Unit, ...] = ()
        """What to gather early during this unit's forward; without any, the schedule decides."""
        self.backward_targets: tuple[Unit, ...] = ()
        self.leader: Unit | None = None
        """Of several units around the same modules, each over a mesh of its own, the first."""
        self.followers: tuple[Unit, ...] = ()
        """The others; where the schedule gathers the leader early, it gathers them too."""
        self.runtime: Root | None = None
        """Set when the root has been found, at the first forward."""
        self.known_runtime: Root
        """The same, for what happens only afterwards."""
        self.number = 0
        """Where it comes in the walk over the model; given by the runtime."""
        self._backward = NO_BACKWARD
        """The backward pass that needed this unit first."""
        self._watches_recomputes = False
        self._input_watches: list[RemovableHandle] = []
        self._has_reduced = False
        self._is_kept_without_grad = False
        self._forwards: list[weakref.ref[_Forward]] = []
        self.named_ranges = Ranges(face)
        self.ranges = NO_RANGES
        """Those that are shown now: the named ones while there is a profiler."""
        if store is not None:
            store.on_gradients = self.gradients_ready

    # --- forward --------------------------------------------------------------------------------

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather; returns the inputs in the dtype and on the device that the module computes in."""
        runtime = self.known_runtime
        if self.phase is Phase.SUMMON:
            raise RuntimeError(
                "a forward inside summon_full_params() would compute with parameters that may be "
                "written at any time; leave that context first"
            )
        recomputes = self.recomputes
        # A forward that is recomputed belongs to the iteration under way and begins nothing.
        if not recomputes:
            if runtime.root is self:
                runtime.look_for_profiler()
            with self.ranges.root_pre_forward:
                if runtime.root is self:
                    runtime.begin_forward()
                elif runtime.root.phase is not Phase.FORWARD:
                    runtime.begin_alone(self)
            self.phase = Phase.FORWARD
            runtime.record_forward(self)
        with self.ranges.pre_forward:
            store = self.store
            if store is not None:
                # Before the gather: it makes the views, whose node has the dtypes.
                if not recomputes and store.chooses_grad_dtypes:
                    store.choose_grad_dtypes(reduces=self.syncs_gradients)
                self.gather()
                if not recomputes:
                    self._order_backward(store)
                    with self.ranges.forward_prefetch:
                        runtime.prefetch_forward(self)
                    runtime.steps.note(("forward", self.number, now()))
            args, kwargs = self.cast_inputs(args, kwargs)
        if store is not None and not store.is_anchored:
            self._reshard_after_inputs((args, kwargs))
        return args, kwargs

    def _order_backward(self, store: ParameterStore) -> None:
        """Let gradients of this forward be reduced before the backward of what ran before it.

        Backward reads frozen parameters but yields no gradient for them: they must still be there,
        so while the backward of an earlier forward is to come, the order stays.
        """
        if not torch.is_grad_enabled():
            return
        self._forwards = [
            known for known in self._forwards if (one := known()) and not one.is_backward
        ]
        if not self._forwards or all(store.trainable):
            store.number_views()

    def after_forward(self, output: Any) -> Any:
        """Free, and arrange for the backward; returns the output."""
        with self.ranges.post_forward:
            runtime, store = self.known_runtime, self.store
            output = self.cast_output(output)
            if self.phase is Phase.BACKWARD:
                return output  # recomputed: the parameters are needed on
            watched = self.watch(output)
            # A backward prefetches in the reverse of this order; the leader stands for the others.
            if not runtime.in_backward and self.leader is None:
                runtime.ended_order.append(self)
            if store is not None:
                runtime.steps.note(("forward end", self.number, now()))
            self.phase = Phase.IDLE
            if store is not None and not runtime.in_backward:
                self._free_after_forward(store, watched=watched)
            if not watched and runtime.root.phase is Phase.IDLE:
                runtime.end_forward_alone()
            return output

    def _free_after_forward(self, store: ParameterStore, *, watched: bool) -> None:
        """`watched`: whether a backward may follow."""
        runtime = self.known_runtime
        frees = self.schedule.frees_after_forward
        keeps_always = frees is False and self.schedule.keeps_without_grad
        if frees is None:
            frees = runtime.root is not (self.leader or self)
        if not frees and (watched or keeps_always):
            self._is_kept_without_grad = not watched
            store.keep_after_forward()
            return
        if watched:
            store.free_after_forward()
        else:
            # No backward follows that could use a larger shard: all of it is freed.
            store.reshard()
        runtime.steps.note(("free", self.number, now()))

    @property
    def recomputes(self) -> bool:
        """Whether a forward now is one that the backward repeats, for activation checkpointing."""
        # A backward that raised has left the phase as it was.
        return self.phase is Phase.BACKWARD and is_in_backward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def abort_forward(self) -> None:
        """The wrapped module raised: go back to where a new forward can start."""
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            if self.store is not None:
                self.store.reshard()

    def gather(self) -> None:
        """Have the parameters gathered and shown as views."""
        store = self.store
        if store is None:
            return
        steps = self.known_runtime.steps
        if store.state is not State.UNSHARDED:
            if store.state is not State.GATHERING:
                steps.note(("gather", self.number, now()))
            store.finish_unshard()
            steps.note(("gathered", self.number, now()))
        store.show_views()
        self.was_requested = False

    def gather_early(self) -> None:
        """Start gathering before it is needed; nothing happens where it has been started."""
        store = self.store
        if store is not None and store.state in WAITING:
            if self.runtime is not None:  # the user may start a gather before the first forward
                self.runtime.steps.note(("gather", self.number, now()))
            store.start_unshard()

    def refresh(self) -> None:
        """A new iteration starts: free what an earlier one left, which may be out of date."""
        store = self.store
        if store is None:
            return
        store.adopt_gradients()
        store.shown_on = store.streams.current()
        self._forget_inputs()
        kept, self._is_kept_without_grad = self._is_kept_without_grad, False
        if store.state is State.SHARDED:
            return
        if kept and not torch.is_grad_enabled() and store.is_current():
            return
        if self.syncs_gradients and not self.was_requested and self._frees_after_backward:
            # The shards may have been stepped since.
            store.reshard()

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in the dtype that the module computes in; the root's on its device too."""
        is_root, device = self.known_runtime.root is self, self.device
        if is_root:
            with self.ranges.inputs:
                if device.type != "cpu":
                    args, kwargs = map_tensors(
                        lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
                    )
        wanted = self.casts.root_inputs if is_root else self.casts.inputs
        if wanted and self.casts.dtype is not None and self.store_computes_low():
            args, kwargs = cast_floating(self.casts.dtype, (args, kwargs))
        return args, kwargs

    def cast_output(self, output: Any) -> Any:
        """The output in the dtype that the user requested."""
        wanted = self.casts.output_dtype
        return output if wanted is None else cast_floating(wanted, output)

    def store_computes_low(self) -> bool:
        """Whether the configured dtype of parameters is in force now."""
        return True

    def watch(self, output: Any) -> bool:
        """Ask for `before_backward` at every output with a gradient; whether there is any."""
        forward = None
        for tensor in _tensors_with_gradients(output):
            if tensor.is_leaf:  # no gradient of one comes here, and its hooks would outlive us
                continue
            forward = forward or _Forward()
            hook = functools.partial(self._on_output_gradient, forward)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if forward is not None:
            self._forwards.append(weakref.ref(forward))
        return forward is not None

    def _reshard_after_inputs(self, inputs: Any) -> None:
        """A frozen unit sees no gradients of its own: free it when those of its inputs are done."""
        tensors = _tensors_with_gradients(inputs)
        if not tensors:
            return
        watch = register_multi_grad_hook(tensors, lambda grads: self._frozen_done())
        # Hooks of other tensors go with the graph.
        if any(tensor.is_leaf for tensor in tensors):
            self._input_watches.append(watch)

    def _forget_inputs(self) -> None:
        # Leaves, such as a trained prompt, outlive the iteration.
        for watch in self._input_watches:
            watch.remove()
        self._input_watches.clear()

    def _frozen_done(self) -> None:
        if self.store is not None and self.phase is Phase.BACKWARD:
            self.store.reshard()
            self.phase = Phase.IDLE

    # --- backward -------------------------------------------------------------------------------

    def _on_output_gradient(self, forward: _Forward, grad: torch.Tensor) -> None:
        forward.is_backward = True
        self.before_backward()

    def before_backward(self) -> None:
        """Gather again; the first unit of a backward also arranges for its end."""
        runtime = self.known_runtime
        if not runtime.in_backward:
            runtime.look_for_profiler()
        with self.ranges.pre_backward:
            if not runtime.in_backward:
                runtime.begin_backward()
            first = self.phase is not Phase.BACKWARD
            if first:
                self._backward = current_backward()
            self.phase = Phase.BACKWARD
            if self.store is None:
                return
            if self.schedule.gathers_in_backward:
                self.gather()
            if first:
                runtime.steps.note(("backward", self.number, now()))
            with self.ranges.backward_prefetch:
                early = self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
                if first and (self.backward_targets or early):
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
        runtime, store = self.known_runtime, self.store
        assert store is not None
        with self.ranges.post_backward:
            if not runtime.in_backward:
                runtime.begin_backward()
            # Another backward than the one that gathered: one inside of it, of a checkpoint.
            if current_backward() != self._backward and not self._watches_recomputes:
                self._watch_recomputes(store)
            with self.ranges.accumulate:
                store.adopt_gradients()
            runtime.steps.note(("backward end", self.number, now()))
            # Freed before the reduction takes its buffers: less memory is in use at the peak.
            if self._frees_after_backward:
                with self.ranges.reshard:
                    store.reshard()
                runtime.steps.note(("free", self.number, now()))
                self.phase = Phase.IDLE
            with self.ranges.late_prefetch:
                if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
                    runtime.prefetch_backward(self)
            if self.syncs_gradients:
                self._has_reduced = True
                runtime.steps.note(("reduce", self.number, now()))
                with self.ranges.reduce:
                    runtime.reductions.start(store, self.reduction, grads)
            else:
                store.keep_unsharded_gradients(grads)

    def _watch_recomputes(self, store: ParameterStore) -> None:
        """Have parameters gathered again whenever a module of this unit runs in a backward.

        A reentrant checkpoint inside the unit runs a backward of its own, whose gradients have
        just freed the parameters. There may be more checkpoints in the unit, and they recompute
        modules without asking the wrapper. Watched from the first time on: hooks cost time.
        """
        self._watches_recomputes = True

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_module(module: nn.Module, args: Any) -> None:
            if self.phase is Phase.IDLE and is_in_backward():
                self.before_backward()

        modules = {place.module for item in store.module_params for place in item.places}
        for module in modules:
            module.register_forward_pre_hook(before_module, prepend=True)

    @property
    def must_reduce(self) -> bool:
        """Whether the last backward has not reduced what it may have to."""
        return self.store is not None and self.syncs_gradients and not self._has_reduced

    def reduce_unused(self) -> None:
        """The backward has not reached this unit: reduce what earlier ones have added up without
        reducing; zeros where it may have reached the unit on other ranks.
        """
        store = self.store
        if store is None or not self.must_reduce:
            return
        store.adopt_gradients()  # they may have been set to None
        fills = self.reduction.fills_unused and store.requires_grad
        reductions = self.known_runtime.reductions
        if fills or store.has_unsharded_gradients:
            reductions.start(store, self.reduction, None)
        else:
            reductions.reduce_kept(store, self.reduction)

    def end_backward(self, *, is_over: bool = True) -> None:
        """Free what the backward has left over (outputs that were not used, frozen members).

        `is_over`: unless the user is still to end it.
        """
        self.phase = Phase.IDLE
        self.was_requested = False
        self._forget_inputs()
        self._has_reduced = self._has_reduced and not is_over
        store = self.store
        if store is None or store.state is State.SHARDED:
            return
        if self._frees_after_backward:
            store.reshard()
        elif store.state is State.UNSHARDED:
            store.keep_after_backward()

    @property
    def _frees_after_backward(self) -> bool:
        schedule = self.schedule
        return schedule.frees_after_backward and (self.syncs_gradients or schedule.frees_unsynced)

    # --- state ----------------------------------------------------------------------------------

    def show_ranges(self, *, shows: bool) -> None:
        """Let profilers see what the unit does from now on, or not."""
        self.ranges = self.named_ranges if shows else NO_RANGES
        if self.store is not None:
            self.store.ranges = self.ranges


def _tensors_with_gradients(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    if not torch.is_grad_enabled():
        return tensors

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    map_tensors(collect, value)
    return tensors


def _gather_early(units: Sequence[Unit]) -> None:
    for unit in units:
        for one in (unit, *unit.followers):
            one.gather_early()
