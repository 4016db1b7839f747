"""The values of a flat parameter: the memory of one unit's parameters as one.

States, gathering and the node of the autograd graph are in `sharding.engine.store`; here is what is
particular to a flat one: how members lie in it, what modules show of it, and what users may write.
Its gradients are in `sharding.flat.param`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from sharding.engine.blocks import Cutting
from sharding.engine.collectives import Comm, PendingCollective, RankParts
from sharding.engine.memory import TensorSize
from sharding.engine.store import ModuleParam, ParameterStore, State
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import put_all
from sharding.flat.layout import FlatLayout, LocalPart, alignment, balanced_layout, plan_flat_layout
from sharding.flat.members import (
    FlatParameter,
    check_flattenable,
    flattened_members,
    in_memory_order,
    member_of,
    member_view,
    part_view,
)

if TYPE_CHECKING:
    from sharding.engine.extensions import Extension


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
    """Where parameters are gathered and computed with."""
    offload: bool
    ignored_buffers: frozenset[str] = frozenset()
    """Names relative to the wrapped module."""
    evaluates_in_full_precision: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split over ranks at all."""
        return self.strategy is not ShardingStrategy.NO_SHARD


class FlatValues(ParameterStore):
    """See the head of this file."""

    def __init__(
        self,
        module_params: Sequence[ModuleParam],
        shard: Comm,
        streams: Streams,
        settings: Settings,
        *,
        cuttings: tuple[Cutting | None, ...] = (),
        extension: Extension | None = None,
    ) -> None:
        """`cuttings`: where each member may be cut; empty: all of them anywhere."""
        self.extension = extension
        module_params, self.tokens = flattened_members(module_params, extension)
        check_flattenable(module_params, use_orig_params=settings.use_orig_params)
        super().__init__(module_params, settings.device, limit_gathers=settings.limit_all_gathers)
        self.settings = settings
        self.is_sharded = settings.is_sharded
        self.comm = shard
        self.streams = streams
        self.params = tuple(item.param for item in module_params)
        dtype = self.params[0].dtype
        compute = settings.precision.param_dtype or dtype
        aligned = alignment(compute.itemsize) if settings.use_orig_params else 1
        self.layout = self._plan(cuttings or (None,) * len(module_params), aligned)
        self.rank = shard.rank if self.is_sharded else 0
        self.parts: tuple[LocalPart | None, ...] = self.layout.local_parts(self.rank)
        self.flat = FlatParameter(self._flatten(), requires_grad=any(self.trainable))
        self._full = torch.empty(0, dtype=compute, device=settings.device)
        self._params_are_unsharded = False
        self.computes_low = True
        """Whether `param_dtype` is in force: not where evaluation is to be in full precision."""
        if settings.use_orig_params:
            self.show_shards()
        else:
            self.show_placeholders()
            for param in self.params:
                param.data = param.detach().new_empty(0)

    def _plan(self, cuttings: Sequence[Cutting | None], align_to: int) -> FlatLayout:
        members = [member_of(*one) for one in zip(self.module_params, cuttings, strict=True)]
        if self.is_sharded and any(member.granularity for member in members):
            dtype = self.params[0].dtype
            return balanced_layout(members, self.comm, align_to=align_to, dtype=dtype)
        ranks = self.comm.size if self.is_sharded else 1
        return plan_flat_layout(members, shard_count=ranks, align_to=align_to)

    # --- dtypes ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the shard: what optimizers see and checkpoints hold."""
        return self.flat.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the gathered buffer."""
        low = self.settings.precision.param_dtype if self.computes_low else None
        return low or self.flat.dtype

    def anchors(self, trainable: tuple[bool, ...]) -> bool:
        """Whether views want gradients, of which these are trainable."""
        if self.settings.use_orig_params:
            self.flat.requires_grad_(any(trainable))
        return self.flat.requires_grad

    @property
    def _aliases_flat(self) -> bool:
        """Whether the shard is the gathered buffer: nothing to gather, nothing to free."""
        return (
            not self.is_sharded
            and self.compute_dtype == self.flat.dtype
            and self.flat.device == self.device
        )

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which members want gradients, as the user has it now."""
        return tuple([param.requires_grad for param in self.params])

    # --- gathering ------------------------------------------------------------------------------

    def start_unshard(self, *, is_early: bool = True) -> None:
        """Start gathering; nothing happens unless the state is SHARDED."""
        if self.state is not State.SHARDED:
            return
        self.adopt_values()
        if self._aliases_flat:
            # Looked up each time: a conversion of the module gives the shard other memory.
            self._full = self.flat.detach()
            self.state = State.UNSHARDED
            return
        super().start_unshard(is_early=is_early)

    def start_gather(self) -> PendingCollective:
        """Start to fill the gathered memory with the shards; where nothing is sharded it is a copy
        in another dtype or on another device.
        """
        (self._full,) = self.fetch([TensorSize(self.layout.padded_numel, self.compute_dtype)])
        if not self.is_sharded:
            self._full.copy_(self.flat.detach(), non_blocking=True)
            return PendingCollective(())
        return self._gather_into(self._full, self.flat.detach())

    def release(self) -> None:
        """Give the gathered memory away, unless it is the shard."""
        if not self._aliases_flat:
            super().release()

    def keep_after_forward(self) -> None:
        """With original parameters: let them have the gathered values until the backward."""
        if self.settings.use_orig_params:
            self.show_params()
            for param, view in zip(self.params, self.make_views(), strict=True):
                param.data = view
            self._params_are_unsharded = True

    def keep_after_backward(self) -> None:
        """Show the shards, to which the next step of an optimizer belongs; keep the memory."""
        self.hide_views()

    def gather_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Everyone's `values` (of the shape of the shard) as one new tensor without padding.

        Collective; independent of the state.
        """
        if not self.is_sharded:
            return values.detach().clone()
        # Memory of its own: the gathered buffer may be in use by a forward at the same time.
        full = torch.empty(self.layout.padded_numel, dtype=values.dtype, device=self.device)
        self._gather_into(full, values.detach()).wait()
        return full[: self.layout.numel]

    def keep_own_part(self, full: torch.Tensor, into: torch.Tensor) -> None:
        """Copy this rank's part of the unpadded `full` into `into`, a tensor like the shard."""
        start, stop = self.layout.shard_range(self.rank)
        into.detach()[: stop - start].copy_(full[start:stop])

    def member_views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The members in an unsharded flat tensor, in their own shapes and strides."""
        return [member_view(full, member) for member in self.layout.members]

    def _gather_into(self, full: torch.Tensor, own: torch.Tensor) -> PendingCollective:
        parts = RankParts(full, self.layout.shard_numel, self.layout.ranges)
        return self.comm.all_gather([parts], [own], tag=2 * self.tag)

    # --- what modules show ----------------------------------------------------------------------

    def put_views(self) -> None:
        """Show the views: as parameters in original-parameter mode, else as plain attributes."""
        if self.settings.use_orig_params:
            super().put_views()
            return
        for places, view in zip(self.places, self.views, strict=True):
            for place in places:
                place.put_plain(view)

    def take_shown(self) -> None:
        """Show nothing where the parameters belong."""
        for places in self.places:
            for place in places:
                place.take()

    def show_params(self) -> None:
        """Let the modules show the user's Parameter objects, with the shards they have."""
        if self.shows_views and self.settings.use_orig_params:
            self.put_params()

    def put_params(self) -> None:
        """Put the user's Parameter objects back to where they belong."""
        put_all(self.places, self.params)
        self.shows_views = False

    @property
    def shown_params(self) -> tuple[nn.Parameter, ...]:
        """What optimizers know: the flat parameter, or the original ones."""
        return self.params if self.settings.use_orig_params else (self.flat,)

    def hide_views(self) -> None:
        """Let the modules show their Parameter objects again, with the shards they have."""
        self.show_params()
        if self._params_are_unsharded:
            self.show_shards()

    def show_shards(self) -> None:
        """Let the user's Parameter objects have their part of the shard, maybe empty: 1-D, or rows
        where none is cut.
        """
        self.show_params()
        values = self.flat.detach()
        # `.data`, so that the objects stay: optimizers and users hold them.
        for param, view in zip(self.params, self.shard_views(values), strict=True):
            param.data = view
        self._params_are_unsharded = False

    def shard_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The members' parts of a tensor like the shard; whole members where nothing is sharded."""
        if not self.is_sharded:
            return self.member_views(shard)
        return [part_view(shard, *one) for one in zip(self.layout.members, self.parts, strict=True)]

    def make_views(self) -> tuple[torch.Tensor, ...]:
        """New tensors over the gathered buffer, one for each member; it must be allocated.

        Not views to autograd: each counts its versions by itself, so that gathering again does not
        look like a change of what the forward saved.
        """
        storage = self._full.untyped_storage()
        empty = torch.empty(0, dtype=self._full.dtype, device=self._full.device)
        base = self._full.storage_offset()
        return tuple(
            empty.new_empty(0).set_(storage, base + member.start, member.shape, member.stride)
            for member in self.layout.members
        )

    def wrap_views(self, views: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The views, or what the extension makes of them."""
        return tuple(self.as_shown(index, view) for index, view in enumerate(views))

    def as_shown(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """A gathered member as modules show it."""
        token = self.tokens[index]
        if self.extension is None or token is None:
            return view
        return self.extension.after_unflatten(view, token)

    def as_flattened(self, index: int, shown: torch.Tensor) -> torch.Tensor:
        """What was put in the place of a member, as it is flattened."""
        if self.extension is None or self.tokens[index] is None:
            return shown
        return self.extension.before_flatten(self.module_params[index].fqn, shown)[0]

    def memory_identity(self) -> object:
        """Changes whenever views have to be made anew."""
        # By address where the shard itself is shown, because a conversion of the module gives it
        # other memory; a gathered buffer may get the address of one that was freed.
        full = self._full
        return (full.data_ptr() if self._aliases_flat else id(full), full.dtype)

    def show_views(self) -> None:
        """Let the modules show views of the gathered memory, tracked by autograd.

        Raises AssertionError when the user replaced parameters that are shown unsharded.
        """
        self.check_not_replaced()
        super().show_views()

    def check_not_replaced(self) -> None:
        """Raise AssertionError, naming the parameter, when one that is shown unsharded between a
        forward and its backward was replaced: the next reshard would drop what was put there.
        """
        if not self._params_are_unsharded or self.shows_views:
            return
        base, itemsize = self._full.data_ptr(), self._full.element_size()
        # By object and by address: `param.data = other` keeps the object.
        for item, param, member in zip(
            self.module_params, self.params, self.layout.members, strict=True
        ):
            moved = param.data_ptr() != base + member.start * itemsize
            if item.places[0].current() is not param or (moved and member.numel > 0):
                raise AssertionError(
                    f"{item.fqn}: was replaced while it was gathered, between a forward and its "
                    "backward; replace parameters between steps, or write into them inside "
                    "summon_full_params()"
                )

    def show_placeholders(self) -> None:
        """Without original parameters: show no parameters, only shapes and dtypes until the next
        gather.
        """
        for item, member in zip(self.module_params, self.layout.members, strict=True):
            shown = torch.empty_strided(
                member.shape, member.stride, dtype=self.compute_dtype, device="meta"
            )
            for place in item.places:
                place.put_plain(shown)
        self.shows_views = False

    # --- what users write -----------------------------------------------------------------------

    def adopt_values(self) -> None:
        """Copy back what the user put in place of original parameters, objects or their memory.

        Raises RuntimeError, naming the parameter, when the shape does not fit, and
        NotImplementedError when other modules share it than at construction.
        """
        if not self.settings.use_orig_params or self._params_are_unsharded:
            return
        self._check_sharing()
        itemsize = self.flat.dtype.itemsize
        base = self.flat.data_ptr()
        changed = False
        for index, item in enumerate(self.module_params):
            current = item.places[0].current()
            param = self.params[index]
            if current is None or (self.shows_views and current is self.views[index]):
                current = param
            part = self.parts[index]
            start = self.layout.members[index].start if part is None else part.in_shard
            if part is None and self.is_sharded:
                if current.numel() != 0:
                    raise RuntimeError(self._wrong_shape(index, current, 0))
                continue
            # Nearly always: the object is ours and lies where we have put it.
            if current is param and current.data_ptr() == base + start * itemsize:
                continue
            target = self.shard_views(self.flat.detach())[index]
            if current.shape != target.shape:
                raise RuntimeError(self._wrong_shape(index, current, target.numel()))
            target.copy_(current.detach())
            changed = True
        if changed:
            # Copied by compute, maybe in the middle of a forward whose start gathers waited for.
            self.streams.gathers_wait_for_compute()
            self.show_shards()
            self.put_params()

    def _check_sharing(self) -> None:
        own = {id(param): index for index, param in enumerate(self.params)}
        for index, item in enumerate(self.module_params):
            shown = item.places[0].current()
            is_anothers = own.get(id(shown), index) != index
            if is_anothers or any(place.current() is not shown for place in item.places[1:]):
                raise NotImplementedError(
                    f"{' and '.join(item.names)}: which modules share a parameter has changed "
                    "since the module was wrapped; tie and untie parameters before wrapping"
                )

    def _wrong_shape(self, index: int, current: torch.Tensor, expected: int) -> str:
        return (
            f"{self.module_params[index].fqn}: was replaced by a tensor of shape "
            f"{tuple(current.shape)}, but this rank holds {expected} elements of it; change values "
            "inside summon_full_params(), where parameters have their full shape"
        )

    def _flatten(self) -> torch.Tensor:
        first = self.params[0]
        device = torch.device("cpu") if self.settings.offload else first.device
        flat = torch.zeros(
            self.layout.shard_numel_of(self.rank),
            dtype=first.dtype,
            device=device,
            # Each gather copies it to the device, and the host would wait for every such copy.
            pin_memory=self._pins,
        )
        for param, member, part in zip(self.params, self.layout.members, self.parts, strict=True):
            if part is not None:
                values = in_memory_order(param.detach(), member)
                flat[part.in_shard : part.in_shard + part.numel].copy_(
                    values[part.in_member : part.in_member + part.numel]
                )
        return flat

    @property
    def _pins(self) -> bool:
        """Whether the shard lies in pinned memory."""
        return self.settings.offload and self.device.type != "cpu"
