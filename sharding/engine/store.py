"""The parameters that a unit gathers and frees together: what both ways of keeping them share.

Two stores: `sharding.flat.param` keeps all parameters of a unit in one flat one,
`sharding.dtensor.store` keeps each as itself, sharded along a dim. Units, schedule, reductions
and precision know `ParameterStore` alone.

    SHARDED                this rank's shards alone, in full precision; what optimizers see
    GATHERING              the gathered memory is there and being filled
    UNSHARDED              it is filled, in the compute dtype; modules show views of it
    SHARDED_POST_FORWARD   larger shards, over fewer ranks, wait for the backward

The gathered memory and its views are the same tensor objects for ever; the memory comes and goes,
so what autograd saved in the forward is valid again once it is gathered for the backward. The
views hang on one node of the autograd graph, whose backward gets all gradients of the unit at
once, however often the modules were called.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from sharding.engine.collectives import Comm, PendingCollective, RankParts
from sharding.engine.memory import BufferPool, PagePool, TensorMemory, TensorSize
from sharding.engine.ranges import NO_RANGES
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import (
    ParamPlace,
    expect_gradients_in,
    number_as_newest,
    post_accumulate_hooks,
    put_all,
)

Gradients = Sequence[torch.Tensor | None]


class State(enum.Enum):
    """Which memory of a unit's parameters is there; see the head of this file."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SHARDED_POST_FORWARD = "sharded post forward"


WAITING = (State.SHARDED, State.SHARDED_POST_FORWARD)
"""Where a gather has something to do."""


class ModuleParam(NamedTuple):
    """A parameter to be sharded: its name in the unit, itself, and every place that shows it."""

    fqn: str
    param: nn.Parameter
    places: tuple[ParamPlace, ...]
    names: tuple[str, ...]
    """One name for each place; the first is `fqn`."""


class Outgoing(NamedTuple):
    """Unsharded gradients of a unit on their way to the reduction."""

    members: tuple[RankParts, ...]
    member_indices: tuple[int, ...]
    """Which of the store's members they belong to."""
    own_numels: tuple[int, ...] = ()
    """How many elements of the sum are this rank's part of each of those."""
    scratch: tuple[torch.Tensor, ...] = ()
    """Buffers of the pool that hold some of them; to be given back after the reduction."""


class OutgoingForm(NamedTuple):
    """In which form gradients go to the reduction."""

    dtype: torch.dtype
    scale: float
    fills: bool
    """Whether members without a gradient take part, with zeros."""
    pool: BufferPool | None
    """Where scratch comes from; None: all memory is new."""
    comm: Comm | None
    """What sums them, and says whether members are to be packed into one; None: nothing does."""


class _Views(torch.autograd.Function):
    """The node that all views of a unit hang on."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, store: ParameterStore, trainable: tuple[bool, ...]
    ) -> tuple[torch.Tensor, ...]:
        # Weak: the store has the views, and the collector of garbage does not look through the
        # graph. A backward keeps the store alive by the unit's hooks on outputs.
        ctx.store = weakref.ref(store)
        ctx.set_materialize_grads(False)
        views = store.make_views()
        if store.view_grad_dtypes is not None:
            wanted = zip(store.view_grad_dtypes, trainable, strict=True)
            expect_gradients_in(ctx, [dtype if trains else None for dtype, trains in wanted])
        ctx.mark_non_differentiable(
            *(view for view, wants in zip(views, trainable, strict=True) if not wants)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        store = ctx.store()
        if store is not None:
            store.on_gradients(grads)
        return None, None, None


class ParameterStore(ABC):
    """The parameters of one unit: how memory is gathered, shown and released again.

    What is gathered, and what becomes of gradients, is up to the store.
    """

    def __init__(
        self,
        module_params: Sequence[ModuleParam],
        device: torch.device,
        *,
        limit_gathers: bool = True,
    ) -> None:
        self.module_params = tuple(module_params)
        self.places = tuple(item.places for item in module_params)
        self.device = device
        """Where parameters are gathered and computed with."""
        self.state = State.SHARDED
        self.tag = 0
        """Tells the collectives of a model's units apart; set by the runtime, like what follows."""
        self.ranges = NO_RANGES
        self.streams = Streams()
        self.pages = PagePool()
        self.pool = BufferPool()
        self.on_gradients: Callable[[Gradients], None] = _without_unit
        """Called with the gradient of every member, None for those without, once all are there."""
        self.memory = TensorMemory(device)
        self.views: tuple[torch.Tensor, ...] = ()
        """What modules show while gathered: the same objects as long as nothing changes."""
        self.shows_views = False
        self.is_anchored = False
        """Whether the views want gradients."""
        self.chooses_grad_dtypes = False
        """Whether `choose_grad_dtypes` is to be called before each forward."""
        self.view_grad_dtypes: tuple[torch.dtype | None, ...] | None = None
        """What autograd brings the gradient of each view into, None for as it comes; None for all:
        the views' own.
        """
        self.shown_on: object = None
        """The stream of the forwards from now on. Autograd runs a node on the stream that it was
        made on, and a captured graph of the device cannot contain one made on an earlier stream.
        """
        self.keeps_memory = False
        """Whether gathered memory is not released, as a graph of the device may need it."""
        self._kept_mark: object = None
        """Behind the last use of memory that was kept."""
        self.gathers_on_compute = False
        """Whether gathers take their memory on the stream of compute, where they cast and pack too,
        rather than on one of their own.
        """
        self._limit_gathers = limit_gathers
        self._pending = PendingCollective(())
        self._views_for: object = None
        self._node: Any = None
        """Of the graph, which the views hang on; None where nothing wants gradients."""

    # --- what is up to the store: values --------------------------------------------------------

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the shards: what optimizers see and checkpoints hold."""

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """Of the gathered memory, and so of gradients before they are reduced."""

    def reduces_in(self, grads: Gradients | None, *, fills: bool) -> torch.dtype:
        """The dtype of reductions where none is configured. `fills`: with zeros for members without
        a gradient.
        """
        return self.dtype

    def choose_grad_dtypes(self, *, reduces: bool) -> None:
        """A forward starts, whose backward reduces or only adds up: set `view_grad_dtypes`."""
        return

    @property
    @abstractmethod
    def trainable(self) -> tuple[bool, ...]:
        """Which members want gradients, as the user has it now."""

    @abstractmethod
    def start_gather(self) -> PendingCollective:
        """Take memory and start to fill it with everyone's parts. Runs on the stream of gathers;
        what is to be done when the parts are there runs on that of compute.
        """

    @abstractmethod
    def make_views(self) -> tuple[torch.Tensor, ...]:
        """New tensors over the gathered memory, one for each member; it must be there."""

    def wrap_views(self, views: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What modules show in the place of the views; tracked by autograd."""
        return views

    @abstractmethod
    def hide_views(self) -> None:
        """Let the modules show what optimizers know."""

    @abstractmethod
    def adopt_values(self) -> None:
        """Follow what the user put in place of shards."""

    def put_views(self) -> None:
        """Show the views where the parameters belong."""
        put_all(self.places, self.views)

    def keep_after_forward(self) -> None:
        """The forward is over and the backward will want what is gathered."""
        return

    def free_after_forward(self) -> None:
        """The forward is over and the backward will gather again."""
        self.reshard()

    def keep_after_backward(self) -> None:
        """The backward is over, and the next forward will find gathered what it needs."""
        return

    def is_current(self) -> bool:
        """Whether what is gathered is surely what gathering again would give. Never sure where
        steps are fused: they leave no trace.
        """
        return False

    # --- what is up to the store: gradients -----------------------------------------------------

    def adopt_gradients(self) -> None:
        """Follow what the user did to gradients that are shown besides those of shards."""
        return

    @abstractmethod
    def outgoing_gradients(self, grads: Gradients | None, form: OutgoingForm) -> Outgoing:
        """The gradients, with those that were kept, cut into the ranks' parts.

        None stands for no gradient at all.
        """

    @abstractmethod
    def keep_unsharded_gradients(self, grads: Gradients) -> None:
        """Add gradients up on this rank, unsharded; what skipping a reduction does."""

    @property
    @abstractmethod
    def has_unsharded_gradients(self) -> bool:
        """Whether `keep_unsharded_gradients` has added up any since the last reduction."""

    def drop_unsharded_gradients(self) -> None:
        """Forget what `keep_unsharded_gradients` has added up. Only `reset_iter_state` calls this,
        which flat units do not have.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reset")

    @abstractmethod
    def add_gradients(
        self, outgoing: Outgoing, new: Sequence[torch.Tensor], *, keep_dtype: bool
    ) -> None:
        """Add reduced gradients, this rank's parts, to those of the shards."""

    # --- gathering ------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether any member is trainable, as the user has it now."""
        return self.anchors(self.trainable)

    def anchors(self, trainable: tuple[bool, ...]) -> bool:
        """Whether views want gradients, of which these are trainable."""
        return any(trainable)

    @property
    def gathered_nbytes(self) -> int:
        """Memory that gathered parameters occupy now, besides the shards."""
        return self.memory.nbytes

    def use(self, streams: Streams) -> None:
        """Work on these streams from now on. A gather by hand may be under way on others: the root,
        which has the streams of all units, may not be known before the first forward.
        """
        streams.follow(self.streams)
        self.streams = streams

    def fetch(self, sizes: Sequence[TensorSize]) -> tuple[torch.Tensor, ...]:
        """Have memory for gathered parameters, of the current stream; see `TensorMemory.fetch`."""
        self.streams.take_back(self.memory)
        # Kept memory was never given back, so nothing else orders its last reads and this write.
        if self._kept_mark is not None:
            self.streams.gathers_wait_for(self._kept_mark)
            self._kept_mark = None
        self.memory.stream = self.streams.current()
        return self.memory.fetch(sizes, self.pages)

    def start_unshard(self, *, is_early: bool = True) -> None:
        """Start gathering; nothing happens unless the state is a sharded one. `is_early`: before
        what comes ahead of the parameters' use has been given to the device.
        """
        if self.state not in WAITING:
            return
        if self._limit_gathers:
            with self.ranges.limit:
                # What was given back was read before the compute that an early gather overlaps.
                if is_early:
                    self.streams.release_all()
        # Memory that is made in inference mode could never be written outside of it again.
        on_stream = nullcontext() if self.gathers_on_compute else self.streams.gathering()
        with torch.inference_mode(False), torch.no_grad(), on_stream, self.ranges.gather:
            self._pending = self.start_gather()
        self.state = State.GATHERING

    def finish_unshard(self) -> None:
        """Gather unless that has been started, and return when compute may read the parameters."""
        if self.state in WAITING:
            self.start_unshard(is_early=False)
        if self.state is State.GATHERING:
            with self.ranges.gathered:
                self._wait()
            self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Release what was gathered, and show the shards again. Harmless when there is nothing."""
        if self.state is State.GATHERING:
            self._wait()  # a gather still under way would write into memory that is freed
        self.hide_views()
        if self.state not in WAITING:
            self.release()
        self.state = State.SHARDED

    def release(self) -> None:
        """Give the gathered memory away, unless it is kept."""
        if self.keeps_memory:
            self._kept_mark = self.streams.mark()
            return
        self.streams.give_back(self.memory, limited=self._limit_gathers)

    def _wait(self) -> None:
        """Compute from now on sees what was gathered."""
        with torch.inference_mode(False), torch.no_grad():
            self.streams.compute_waits_for_gathers()
            self._pending.wait()
        # What the gather has used besides the parameters' memory has been read, and is free.
        self.streams.gathers_wait_for(self.streams.mark())

    # --- what modules show ----------------------------------------------------------------------

    def show_views(self) -> None:
        """Let the modules show views of the gathered memory, tracked by autograd."""
        self._update_views()
        if self.shows_views:
            return
        self.put_views()
        self.shows_views = True

    def number_views(self) -> None:
        """Let the backward of the views come behind that of all forwards from now on, and before
        that of earlier ones. The node is of the first step: left as it is, a backward would run it
        after all others, and no unit would reduce before all gradients of the model are there.
        """
        if self._node is not None:
            number_as_newest(self._node)

    def memory_identity(self) -> object:
        """Changes whenever views have to be made anew."""
        return self.memory.generation

    def drop_views(self) -> None:
        """Make views anew at the next gather."""
        self.views = ()
        self.shows_views = False

    def _update_views(self) -> None:
        # The node depends on what is trainable, where the memory is and which stream computes: make
        # it anew when they change, else keep it, so that several forwards share it.
        trainable = self.trainable
        self.is_anchored = anchored = self.anchors(trainable)
        identity, dtypes = self.memory_identity(), self.view_grad_dtypes
        wanted = (identity, anchored, trainable, self.shown_on, dtypes)
        if wanted == self._views_for and self.views:
            return
        with torch.inference_mode(False), torch.enable_grad():
            # The node needs an input that wants a gradient, or autograd would never run it.
            anchor = torch.empty(0, device=self.device, requires_grad=anchored)
            views = _Views.apply(anchor, self, trainable)  # type: ignore[no-untyped-call]
            self._node = next((one.grad_fn for one in views if one.grad_fn is not None), None)
            self.views = self.wrap_views(views)
        self._views_for = wanted
        self.shows_views = False


def call_accumulate_hooks(showers: Sequence[torch.Tensor], offloaded: Streams | None) -> None:
    """Call what users have registered for when gradients are there, on what shows them.

    `offloaded`: the streams that copy the gradients to the host, where hooks look at them.
    """
    hooks = post_accumulate_hooks(showers)
    if hooks and offloaded is not None:
        offloaded.finish()
    for shower, hook in hooks:
        hook(shower)


def _without_unit(grads: Gradients) -> None:
    raise AssertionError("gradients of parameters that belong to no unit")
