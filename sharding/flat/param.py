"""A flat parameter: the memory of one unit's parameters as one, in all its forms.

States, gathering and the node of the autograd graph are in `sharding.engine.store`; here is what is
particular to a flat one: how members lie in it, what modules show of it, and what users may write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sharding.engine.collectives import Comm, PendingCollective, RankParts
from sharding.engine.memory import TensorSize
from sharding.engine.pool import BufferPool
from sharding.engine.store import (
    GatheringStore,
    Gradients,
    ModuleParam,
    Outgoing,
    State,
    call_accumulate_hooks,
)
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import ParamPlace
from sharding.flat.layout import (
    FlatLayout,
    LocalPart,
    Member,
    MemberSpec,
    alignment,
    memory_strides,
    plan_flat_layout,
)

if TYPE_CHECKING:
    from sharding.engine.extensions import Extension

__all__ = ["FlatParam", "FlatParameter", "ModuleParam", "State", "StoreOptions"]


class FlatParameter(nn.Parameter):
    """The 1-D parameter that a unit shows instead of its members."""

    # What torch's own flat parameters are told by. `ckpt` needs it too: one member of one dim may
    # have the shape of the whole, and is still not this parameter.
    _is_flat_param = True

    def name_members(self, names: tuple[str, ...]) -> None:
        """Say what the members are called below the wrapper, where torch's functions read it."""
        self._fqns = names


@dataclass(frozen=True)
class StoreOptions:
    """How a unit keeps its parameters."""

    use_orig_params: bool
    sharded: bool
    offload: bool
    device: torch.device
    """Where parameters are gathered and computed with."""
    param_dtype: torch.dtype | None
    limit_gathers: bool


class FlatParam(GatheringStore):
    """The parameters of one unit; see the head of this file."""

    def __init__(
        self,
        module_params: Sequence[ModuleParam],
        shard: Comm,
        streams: Streams,
        options: StoreOptions,
        *,
        extension: Extension | None = None,
    ) -> None:
        self.extension = extension
        module_params, self.tokens = _flattenable(module_params, extension)
        check_flattenable(module_params, use_orig_params=options.use_orig_params)
        super().__init__(module_params, options.device, limit_gathers=options.limit_gathers)
        self.options = options
        self.comm = shard
        self.streams = streams
        self.params = tuple(item.param for item in module_params)
        dtype = self.params[0].dtype
        compute = options.param_dtype or dtype
        aligned = alignment(compute.itemsize) if options.use_orig_params else 1
        self.layout: FlatLayout = plan_flat_layout(
            [_spec(item) for item in module_params],
            shard_count=shard.size if options.sharded else 1,
            align_to=aligned,
        )
        self.rank = shard.rank if options.sharded else 0
        self.parts: tuple[LocalPart | None, ...] = self.layout.local_parts(self.rank)
        self.flat = FlatParameter(self._flatten(), requires_grad=self._any_trainable())
        self._full = torch.empty(0, dtype=compute, device=options.device)
        self._params_are_unsharded = False
        self.computes_low = True
        """Whether `param_dtype` is in force: not where evaluation is to be in full precision."""
        self._shown_grads: dict[int, torch.Tensor] = {}  # by member; the flat parameter's is at -1
        self._shows_unsharded_grad = False
        self._orig_grad: torch.Tensor | None = None
        self.unsharded_grad: torch.Tensor | None = None
        if options.use_orig_params:
            self.show_shards()
        else:
            self.show_placeholders()
            for param in self.params:
                param.data = param.detach().new_empty(0)

    # --- dtypes ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the shard: what optimizers see and checkpoints hold."""
        return self.flat.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the gathered buffer."""
        low = self.options.param_dtype if self.computes_low else None
        return low or self.flat.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether any member is trainable, as the user has it now."""
        if self.options.use_orig_params:
            self.flat.requires_grad_(self._any_trainable())
        return self.flat.requires_grad

    @property
    def _aliases_flat(self) -> bool:
        """Whether the shard is the gathered buffer: nothing to gather, nothing to free."""
        return (
            not self.options.sharded
            and self.compute_dtype == self.flat.dtype
            and self.flat.device == self.options.device
        )

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which members want gradients, as the user has it now."""
        return tuple(param.requires_grad for param in self.params)

    # --- gathering ------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Start gathering; nothing happens unless the state is SHARDED."""
        if self.state is not State.SHARDED:
            return
        self.adopt_values()
        if self._aliases_flat:
            self._full = self.flat.detach()
            self.state = State.UNSHARDED
            return
        super().start_unshard()

    def start_gather(self) -> PendingCollective:
        """Put the own shard into its place, and start; where nothing is sharded that is all."""
        size = TensorSize(self.layout.padded_numel, self.compute_dtype)
        (self._full,) = self.memory.fetch([size], self.pages)
        self._own_segment(self._full).copy_(self.flat.detach(), non_blocking=True)
        if not self.options.sharded:
            return PendingCollective(())
        parts = RankParts(self._full, self.layout.shard_numel)
        return self.comm.all_gather([parts], pool=self.pool, tag=2 * self.tag)

    def release(self) -> None:
        """Give the gathered memory away, unless it is the shard."""
        if not self._aliases_flat:
            super().release()

    def keep_after_forward(self) -> None:
        """With original parameters: let them have the gathered values until the backward."""
        if self.options.use_orig_params:
            self.show_unsharded_params()

    def free_after_forward(self) -> None:
        """Release what was gathered."""
        self.reshard()

    def keep_after_backward(self) -> None:
        """Show the shards, to which the next step of an optimizer belongs; keep the memory."""
        self.hide_views()

    def is_current(self) -> bool:
        """Never sure: steps that are fused leave no trace."""
        return False

    def gather_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Everyone's `values` (of the shape of the shard) as one new tensor without padding.

        Collective; independent of the state.
        """
        if not self.options.sharded:
            return values.detach().clone()
        full = torch.empty(self.layout.padded_numel, dtype=values.dtype, device=self.options.device)
        self._own_segment(full).copy_(values.detach())
        parts = RankParts(full, self.layout.shard_numel)
        self.comm.all_gather([parts], pool=self.pool, tag=2 * self.tag).wait()
        return full[: self.layout.numel]

    def keep_own_part(self, full: torch.Tensor, into: torch.Tensor) -> None:
        """Copy this rank's part of the unpadded `full` into `into`, a tensor like the shard."""
        start, stop = self.layout.shard_range(self.rank)
        into.detach()[: stop - start].copy_(full[start:stop])

    def member_views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The members in an unsharded flat tensor, in their own shapes and strides."""
        return [member_view(full, member) for member in self.layout.members]

    def _own_segment(self, full: torch.Tensor) -> torch.Tensor:
        return full[self.rank * self.layout.shard_numel :][: self.layout.shard_numel]

    # --- what modules show ----------------------------------------------------------------------

    def put(self, place: ParamPlace, view: torch.Tensor) -> None:
        """Show a view: as a parameter in original-parameter mode, else as a plain attribute."""
        put = ParamPlace.put if self.options.use_orig_params else ParamPlace.put_plain
        put(place, view)

    def show_params(self) -> None:
        """Let the modules show the user's Parameter objects, with the shards they have."""
        if not self.shows_views or not self.options.use_orig_params:
            return
        self.put_params()

    def put_params(self) -> None:
        """Put the user's Parameter objects back to where they belong."""
        for item, param in zip(self.module_params, self.params, strict=True):
            for place in item.places:
                place.put(param)
        self.shows_views = False

    @property
    def shown_params(self) -> tuple[nn.Parameter, ...]:
        """What optimizers know: the flat parameter, or the original ones."""
        return self.params if self.options.use_orig_params else (self.flat,)

    def show_unsharded_params(self) -> None:
        """Let the user's Parameter objects have the gathered values."""
        self.show_params()
        for param, view in zip(self.params, self.make_views(), strict=True):
            param.data = view
        self._params_are_unsharded = True

    def hide_views(self) -> None:
        """Let the modules show their Parameter objects again, with the shards they have."""
        self.show_params()
        if self._params_are_unsharded:
            self.show_shards()

    def show_shards(self) -> None:
        """Let the user's Parameter objects have their part of the shard: 1-D, maybe empty."""
        self.show_params()
        values = self.flat.detach()
        for param, view in zip(self.params, self.shard_views(values), strict=True):
            param.data = view
        self._params_are_unsharded = False

    def shard_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The members' parts of a tensor like the shard; whole members where nothing is sharded."""
        if not self.options.sharded:
            return self.member_views(shard)
        return [
            shard[:0] if part is None else shard[part.in_shard : part.in_shard + part.numel]
            for part in self.parts
        ]

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
        return tuple(self.as_shown(at, view) for at, view in enumerate(views))

    def as_shown(self, at: int, view: torch.Tensor) -> torch.Tensor:
        """A gathered member as modules show it."""
        token = self.tokens[at]
        if self.extension is None or token is None:
            return view
        return self.extension.after_unflatten(view, token)

    def as_flattened(self, at: int, shown: torch.Tensor) -> torch.Tensor:
        """What was put in the place of a member, as it is flattened."""
        if self.extension is None or self.tokens[at] is None:
            return shown
        return self.extension.before_flatten(self.module_params[at].fqn, shown)[0]

    def memory_identity(self) -> object:
        """Changes whenever views have to be made anew."""
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

    # --- gradients ------------------------------------------------------------------------------

    @property
    def grad(self) -> torch.Tensor | None:
        """The sharded gradient, as long as the shard; None when there is none."""
        return self._orig_grad if self.options.use_orig_params else self._flat_grad()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.options.use_orig_params:
            self._orig_grad = value
        else:
            assign_grad(self.flat, value)

    def _flat_grad(self) -> torch.Tensor | None:
        return None if self._shows_unsharded_grad else self.flat.grad

    def outgoing_gradients(
        self,
        grads: Gradients | None,
        *,
        dtype: torch.dtype,
        scale: float,
        fill: bool,
        pool: BufferPool | None,
    ) -> Outgoing:
        """One padded buffer with the gradients of all members, zeros where there is none."""
        numel, device = self.layout.padded_numel, self.options.device
        if pool is None:
            full = torch.empty(numel, dtype=dtype, device=device)
        else:
            full = pool.take(numel, dtype, device)
        self.write_gradients(
            [None] * len(self.params) if grads is None else grads, full, scale=scale
        )
        scratch = () if pool is None else (full,)
        return Outgoing((RankParts(full, self.layout.shard_numel),), (0,), scratch)

    def write_gradients(
        self, grads: Gradients, out: torch.Tensor, *, scale: float, earlier: bool = True
    ) -> None:
        """Fill the padded `out` with gradients of all members times `scale`, zeros elsewhere."""
        kept = self.unsharded_grad if earlier else None
        for start, stop in self.layout.gaps:
            out[start:stop].zero_()
        for member, grad in zip(self.layout.members, grads, strict=True):
            target = member_view(out, member)
            before = None if kept is None else member_view(kept, member)
            value = grad if before is None else before if grad is None else before.add_(grad)
            if value is None:
                target.zero_()
            elif value.dtype == out.dtype and scale != 1.0:
                torch.mul(value.detach(), scale, out=target)
            else:
                target.copy_(value.detach())
                if scale != 1.0:
                    target.mul_(scale)
        if earlier:
            self.unsharded_grad = None

    def keep_unsharded_gradients(self, grads: Gradients) -> None:
        """Add gradients up on this rank, unsharded; what `no_sync` does."""
        kept = self.unsharded_grad
        if kept is None:
            kept = torch.zeros(
                self.layout.padded_numel, dtype=self.compute_dtype, device=self.options.device
            )
        for member, grad in zip(self.layout.members, grads, strict=True):
            if grad is not None:
                member_view(kept, member).add_(grad.detach())
        self.unsharded_grad = kept
        self._show_unsharded_gradients(kept)

    @property
    def has_unsharded_gradients(self) -> bool:
        """Whether gradients wait for the next reduction."""
        return self.unsharded_grad is not None

    def drop_unsharded_gradients(self) -> None:
        """Forget what was added up without reducing."""
        if self._shows_unsharded_grad:
            for at in self._shown_grads:
                self._shower(at).grad = None
            self._shown_grads, self._shows_unsharded_grad = {}, False
        self.unsharded_grad = None

    def add_gradients(
        self, outgoing: Outgoing, new: Sequence[torch.Tensor], *, keep_dtype: bool
    ) -> None:
        """Add the reduced gradient, as long as the shard, to what is there."""
        self._add_gradient(new[0], keep_dtype=keep_dtype)

    def _add_gradient(self, new: torch.Tensor, *, keep_dtype: bool) -> None:
        kept = before = self.grad
        offload = self.options.offload
        if before is not None and offload:
            before = self.streams.to_device(before, new.device)
        if before is not None:
            # Summed in the shard's own precision, so that steps without no_sync lose nothing.
            new = before.to(self.flat.dtype).add_(new)
        if not keep_dtype:
            new = new.to(self.flat.dtype)
        elif before is not None:
            new = new.to(before.dtype)
        if offload:
            # Last of all: from here on the host must not look until it has waited.
            into = kept if kept is not None and kept.dtype == new.dtype else None
            new = self.streams.to_host(new, pin=True, into=into)
        self._shows_unsharded_grad = False
        self.grad = new
        if self.options.use_orig_params:
            self._show_gradient_slices(new)
        else:
            self._shown_grads = {-1: new}
        showers = [self._shower(at) for at in self._shown_grads]
        call_accumulate_hooks(showers, self.streams if offload else None)

    def adopt_gradients(self) -> None:
        """Follow what the user did to the gradients of original parameters: set to None, replaced,
        given where there was none.

        When all are None the flat gradient is dropped; a single None counts as zeros. Raises
        RuntimeError, naming the parameter, for a gradient of another size.
        """
        if self._shown_grads:
            self.follow_gradients()
        elif self.options.use_orig_params and not self._params_are_unsharded:
            self._adopt_new_gradients()

    def follow_gradients(self) -> None:
        """The same for gradients that are shown already, and no others."""
        shown = self._shown_grads
        if not shown:
            return
        if all(self._shower(at).grad is None for at in shown):
            self._orig_grad = self.unsharded_grad = None
            self._shown_grads = {}
            self._shows_unsharded_grad = False
            return
        if not self.options.use_orig_params:
            return
        for at, slice_ in shown.items():
            grad = self.params[at].grad
            if grad is None:
                slice_.zero_()
            elif grad.data_ptr() != slice_.data_ptr():
                self._copy_gradient(at, grad, slice_)

    def _adopt_new_gradients(self) -> None:
        """Take over gradients that are nobody's but the user's, of parameters that show none."""
        given = [
            at
            for at, param in enumerate(self.params)
            if param.grad is not None and param.requires_grad and param.numel()
        ]
        if not given:
            return
        flat = torch.zeros_like(self.flat.detach())
        slices = self.shard_views(flat)
        for at in given:
            grad = self.params[at].grad
            assert grad is not None
            self._copy_gradient(at, grad, slices[at])
        self._orig_grad = flat
        self._show_gradient_slices(flat)

    def _copy_gradient(self, at: int, grad: torch.Tensor, into: torch.Tensor) -> None:
        if grad.numel() != into.numel():
            raise RuntimeError(
                f"{self.module_params[at].fqn}: its gradient was replaced by a tensor of shape "
                f"{tuple(grad.shape)}, but this rank holds {into.numel()} elements of it; write "
                "full gradients inside summon_full_params(with_grads=True)"
            )
        into.copy_(grad.detach().view_as(into))

    def show_gradients(self) -> None:
        """Let original parameters have their parts of the gradient again."""
        if self._orig_grad is not None and self.options.use_orig_params:
            self._show_gradient_slices(self._orig_grad)

    def _shower(self, at: int) -> torch.Tensor:
        return self.flat if at < 0 else self.params[at]

    def _show_gradient_slices(self, grad: torch.Tensor) -> None:
        self._shown_grads = {}
        slices = self.shard_views(grad)
        for at, (param, slice_) in enumerate(zip(self.params, slices, strict=True)):
            if param.requires_grad and (self.parts[at] is not None or not self.options.sharded):
                assign_grad(param, slice_)
                # Another tensor object: the user may give the one that is shown other memory.
                self._shown_grads[at] = slice_.detach()
            else:
                param.grad = None

    def _show_unsharded_gradients(self, kept: torch.Tensor) -> None:
        if self.grad is not None:
            return  # a reduced gradient is there: it goes on being shown, and is added to
        self._shown_grads = {}
        self._shows_unsharded_grad = True
        if not self.options.use_orig_params:
            self._shown_grads[-1] = kept[: self.layout.numel]
            assign_grad(self.flat, self._shown_grads[-1])
            return
        for at, (param, view) in enumerate(zip(self.params, self.member_views(kept), strict=True)):
            if param.requires_grad:
                assign_grad(param, view)
                self._shown_grads[at] = view.detach()

    # --- what users write -----------------------------------------------------------------------

    def adopt_values(self) -> None:
        """Copy back what the user put in place of original parameters, objects or their memory.

        Raises RuntimeError, naming the parameter, when the shape does not fit, and
        NotImplementedError when other modules share it than at construction.
        """
        if not self.options.use_orig_params or self._params_are_unsharded:
            return
        self._check_sharing()
        itemsize = self.flat.dtype.itemsize
        base = self.flat.data_ptr()
        changed = False
        for at, item in enumerate(self.module_params):
            current = item.places[0].current()
            param = self.params[at]
            if current is None or (self.shows_views and current is self.views[at]):
                current = param
            part = self.parts[at]
            start = self.layout.members[at].start if part is None else part.in_shard
            if part is None and self.options.sharded:
                if current.numel() != 0:
                    raise RuntimeError(self._wrong_shape(at, current, 0))
                continue
            if current is param and current.data_ptr() == base + start * itemsize:
                continue
            self._adopt_value(at, current)
            changed = True
        if changed:
            # Copied by compute, maybe in the middle of a forward whose start gathers waited for.
            self.streams.gathers_wait_for_compute()
            self.show_shards()
            self.put_params()

    def _check_sharing(self) -> None:
        own = {id(param): at for at, param in enumerate(self.params)}
        for at, item in enumerate(self.module_params):
            shown = item.places[0].current()
            is_anothers = own.get(id(shown), at) != at
            if is_anothers or any(place.current() is not shown for place in item.places[1:]):
                raise NotImplementedError(
                    f"{' and '.join(item.names)}: which modules share a parameter has changed "
                    "since the module was wrapped; tie and untie parameters before wrapping"
                )

    def _adopt_value(self, at: int, current: torch.Tensor) -> None:
        target = self.shard_views(self.flat.detach())[at]
        if current.shape != target.shape:
            raise RuntimeError(self._wrong_shape(at, current, target.numel()))
        target.copy_(current.detach())

    def _wrong_shape(self, at: int, current: torch.Tensor, expected: int) -> str:
        return (
            f"{self.module_params[at].fqn}: was replaced by a tensor of shape "
            f"{tuple(current.shape)}, but this rank holds {expected} elements of it; change values "
            "inside summon_full_params(), where parameters have their full shape"
        )

    # --- conversion -----------------------------------------------------------------------------

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a conversion of dtype or device to the shard and its gradient (`module.double()`).

        Must be called while sharded. The parameter objects stay.
        """
        grad = self.grad
        trainable = self.flat.requires_grad
        self.flat.data = fn(self.flat.detach())
        self.flat.requires_grad_(trainable)
        self._full = torch.empty(0, dtype=self.compute_dtype, device=self.options.device)
        self.memory.forget()
        self.drop_views()
        if self.options.use_orig_params:
            for param in self.params:
                param.grad = None
            self.show_shards()
        else:
            self.flat.grad = None
        if grad is not None:
            self.grad = fn(grad)
            if self.options.use_orig_params:
                self._show_gradient_slices(fn(grad))

    def _flatten(self) -> torch.Tensor:
        first = self.params[0]
        device = torch.device("cpu") if self.options.offload else first.device
        flat = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=device)
        for param, member, part in zip(self.params, self.layout.members, self.parts, strict=True):
            if part is not None:
                values = in_memory_order(param.detach(), member)
                flat[part.in_shard : part.in_shard + part.numel].copy_(
                    values[part.in_member : part.in_member + part.numel]
                )
        return flat

    def _any_trainable(self) -> bool:
        return any(param.requires_grad for param in self.params)


def _flattenable(
    module_params: Sequence[ModuleParam], extension: Extension | None
) -> tuple[list[ModuleParam], tuple[Any, ...]]:
    """The members as the extension would have them flattened, as Parameters of their own in the
    place of the originals, and its tokens.
    """
    members: list[ModuleParam] = []
    tokens: list[Any] = []
    for item in module_params:
        tensor, token = item.param.detach(), None
        if extension is not None and not isinstance(item.param, FlatParameter):
            tensor, token = extension.before_flatten(item.fqn, item.param)
        if token is not None:
            param = nn.Parameter(tensor.detach(), requires_grad=item.param.requires_grad)
            for place in item.places:
                place.put(param)
            item = item._replace(param=param)
        members.append(item)
        tokens.append(token)
    return members, tuple(tokens)


def check_flattenable(module_params: Sequence[ModuleParam], *, use_orig_params: bool) -> None:
    """Raise ValueError, naming the parameters, when they cannot share a flat parameter."""
    if not module_params:
        raise ValueError("a flat parameter needs at least one parameter")
    for item in module_params:
        if isinstance(item.param, FlatParameter):
            raise ValueError(f"{item.fqn}: is a flat parameter already; do not wrap it again")
        if hasattr(item.param, "placements"):
            raise ValueError(
                f"{item.fqn}: is a DTensor; pass device_mesh, a part of the larger mesh that the "
                "model was parallelized over, or list it in ignored_states"
            )
        if not item.param.dtype.is_floating_point:
            raise ValueError(
                f"{item.fqn}: only floating point parameters can be sharded, got "
                f"{item.param.dtype}; list it in ignored_states"
            )
        if item.param.dim() == 0:
            raise ValueError(
                f"{item.fqn}: scalar parameters cannot be sharded; make it a 1-D tensor with one "
                "element"
            )
    first = module_params[0]
    for item in module_params[1:]:
        for what in ("dtype", "device"):
            ours, theirs = getattr(first.param, what), getattr(item.param, what)
            if ours != theirs:
                raise ValueError(
                    f"parameters of one unit need one {what}: {first.fqn} has {ours}, {item.fqn} "
                    f"has {theirs}; wrap them apart or convert one"
                )
        if not use_orig_params and item.param.requires_grad != first.param.requires_grad:
            raise ValueError(
                f"one is trainable and the other frozen: {first.fqn}, {item.fqn}; wrap them apart "
                "or pass use_orig_params=True"
            )


def in_memory_order(tensor: torch.Tensor, member: Member) -> torch.Tensor:
    """The tensor's elements as the flat parameter stores them, 1-D; a view where possible."""
    if tensor.stride() == member.stride:
        return tensor.as_strided((member.numel,), (1,), tensor.storage_offset())
    copy = torch.empty_strided(
        member.shape, member.stride, dtype=tensor.dtype, device=tensor.device
    )
    copy.copy_(tensor)
    return copy.as_strided((member.numel,), (1,))


def member_view(flat: torch.Tensor, member: Member) -> torch.Tensor:
    """A member in an unsharded flat tensor, in its own shape and strides."""
    return flat.as_strided(member.shape, member.stride, flat.storage_offset() + member.start)


def assign_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set `.grad`, whatever its shape, dtype and device."""
    fits = grad is None or (
        grad.shape == param.shape and grad.dtype == param.dtype and grad.device == param.device
    )
    if fits:
        param.grad = grad
        return
    assert grad is not None
    # torch compares shape and dtype on assignment, and not afterwards.
    param.grad = torch.empty_like(param)
    param.grad.data = grad


def _spec(item: ModuleParam) -> MemberSpec:
    shape = tuple(item.param.shape)
    return MemberSpec(item.fqn, shape, memory_strides(shape, item.param.stride()))
