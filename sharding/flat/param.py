"""A flat parameter: one unit's parameters as one, with its gradients.

Its values are in `sharding.flat.values`; here is what becomes of gradients: collected from the
members for the reduction, kept while reductions are skipped, added to the gradient of the shard,
shown to optimizers, and followed where users replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from sharding.engine.collectives import RankParts
from sharding.engine.store import (
    Gradients,
    Outgoing,
    OutgoingForm,
    call_accumulate_hooks,
)
from sharding.engine.torch_seam import foreach_copy, foreach_mul
from sharding.flat.members import member_view
from sharding.flat.values import FlatValues


class FlatParam(FlatValues):
    """See the head of this file."""

    _shown_grads: Mapping[int, torch.Tensor] = MappingProxyType({})
    """What was put at `.grad`, by member; the flat parameter's is at -1."""
    _shows_unsharded_grad = False
    unsharded_grad: torch.Tensor | None = None

    # --- gradients ------------------------------------------------------------------------------

    @property
    def grad(self) -> torch.Tensor | None:
        """The sharded gradient, as long as the shard, that of the flat parameter; None without."""
        return None if self._shows_unsharded_grad else self.flat.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        assign_grad(self.flat, value)

    def outgoing_gradients(self, grads: Gradients | None, form: OutgoingForm) -> Outgoing:
        """One padded buffer with the gradients of all members, zeros where there is none."""
        layout, device = self.layout, self.device
        numel = layout.padded_numel
        if form.pool is None:
            full = torch.empty(numel, dtype=form.dtype, device=device)
        else:
            full = form.pool.take(numel, form.dtype, device)
        self.write_gradients(
            [None] * len(self.params) if grads is None else grads, full, scale=form.scale
        )
        scratch = () if form.pool is None else (full,)
        parts = RankParts(full, layout.shard_numel, layout.ranges)
        return Outgoing((parts,), (0,), (layout.shard_numel_of(self.rank),), scratch)

    def write_gradients(self, grads: Gradients, out: torch.Tensor, *, scale: float) -> None:
        """Fill the padded `out` with gradients of all members times `scale`, zeros elsewhere."""
        kept, self.unsharded_grad = self.unsharded_grad, None
        # Scratch is used again: filler and padding would carry old values into the sums.
        for start, stop in self.layout.gaps:
            out[start:stop].zero_()
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Memory is what takes time on a CPU, and the number of kernels on an accelerator.
        in_one_pass = scale != 1.0 and out.device.type == "cpu"
        for member, grad in zip(self.layout.members, grads, strict=True):
            target = member_view(out, member)
            before = None if kept is None else member_view(kept, member)
            value = grad if before is None else before if grad is None else before.add_(grad)
            if value is None:
                target.zero_()
            elif in_one_pass and value.dtype == out.dtype:
                torch.mul(value.detach(), scale, out=target)
            else:
                copied.append((target, value.detach()))
        if copied:
            targets = [target for target, _ in copied]
            foreach_copy(targets, [value for _, value in copied])
            if scale != 1.0:
                # In the dtype of the sum: a product in the gradients' own would be rounded.
                foreach_mul(targets, scale)

    def keep_unsharded_gradients(self, grads: Gradients) -> None:
        """Add gradients up on this rank, unsharded; what `no_sync` does."""
        kept = self.unsharded_grad
        if kept is None:
            kept = torch.zeros(
                self.layout.padded_numel, dtype=self.compute_dtype, device=self.device
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

    @property
    def shows_reduced_gradients(self) -> bool:
        """Whether a reduced gradient is at `.grad` of any parameter."""
        return self.grad is not None and bool(self._shown_grads)

    def add_gradients(
        self, outgoing: Outgoing, new: Sequence[torch.Tensor], *, keep_dtype: bool
    ) -> None:
        """Add the reduced gradient, as long as the shard, to what is there."""
        (grad,), kept = new, self.grad
        before = kept
        offload = self.settings.offload
        if before is not None and offload:
            before = self.streams.to_device(before, grad.device)
        if before is not None:
            # Summed in the shard's own precision, so that steps without no_sync lose nothing.
            grad = before.to(self.flat.dtype).add_(grad)
        if not keep_dtype:
            grad = grad.to(self.flat.dtype)
        elif before is not None:
            grad = grad.to(before.dtype)
        if offload:
            # Last of all: from here on the host must not look until it has waited.
            into = kept if kept is not None and kept.dtype == grad.dtype else None
            grad = self.streams.to_host(grad, pin=True, into=into)
        self._shows_unsharded_grad = False
        self.grad = grad
        if self.settings.use_orig_params:
            self._show_gradient_slices(grad)
        else:
            self._shown_grads = {-1: grad}
        showers = [self._shower(index) for index in self._shown_grads]
        call_accumulate_hooks(showers, self.streams if offload else None)

    def adopt_gradients(self) -> None:
        """Follow what the user did to the gradients of original parameters: set to None, replaced,
        given where there was none.

        When all are None the flat gradient is dropped; a single None counts as zeros. Raises
        RuntimeError, naming the parameter, for a gradient of another size.
        """
        if self._shown_grads:
            self.follow_gradients()
        elif self.settings.use_orig_params and not self._params_are_unsharded:
            self._adopt_new_gradients()

    def follow_gradients(self) -> None:
        """The same for gradients that are shown already, and no others."""
        shown = self._shown_grads
        if not shown:
            return
        if all(self._shower(index).grad is None for index in shown):
            self.flat.grad = self.unsharded_grad = None
            self._shown_grads = {}
            self._shows_unsharded_grad = False
            return
        if not self.settings.use_orig_params:
            return
        for index, slice_ in shown.items():
            grad = self.params[index].grad
            if grad is None:
                slice_.zero_()
            elif grad.data_ptr() != slice_.data_ptr():
                self._copy_gradient(index, grad, slice_)

    def _adopt_new_gradients(self) -> None:
        """Take over gradients that are nobody's but the user's, of parameters that show none."""
        given = [
            index
            for index, param in enumerate(self.params)
            if param.grad is not None and param.requires_grad and param.numel()
        ]
        if not given:
            return
        flat = torch.zeros_like(self.flat.detach())
        slices = self.shard_views(flat)
        for index in given:
            grad = self.params[index].grad
            assert grad is not None
            self._copy_gradient(index, grad, slices[index])
        self.grad = flat
        self._show_gradient_slices(flat)

    def _copy_gradient(self, index: int, grad: torch.Tensor, into: torch.Tensor) -> None:
        if grad.numel() != into.numel():
            raise RuntimeError(
                f"{self.module_params[index].fqn}: its gradient was replaced by a tensor of shape "
                f"{tuple(grad.shape)}, but this rank holds {into.numel()} elements of it; write "
                "full gradients inside summon_full_params(with_grads=True)"
            )
        into.copy_(grad.detach().view_as(into))

    def show_gradients(self) -> None:
        """Let original parameters have their parts of the gradient again."""
        if self.grad is not None and self.settings.use_orig_params:
            self._show_gradient_slices(self.grad)

    def _shower(self, index: int) -> torch.Tensor:
        return self.flat if index < 0 else self.params[index]

    def _show_gradient_slices(self, grad: torch.Tensor) -> None:
        shown = {}
        slices = self.shard_views(grad)
        for index, (param, slice_) in enumerate(zip(self.params, slices, strict=True)):
            if param.requires_grad and (self.parts[index] is not None or not self.is_sharded):
                assign_grad(param, slice_)
                # Another tensor object: the user may give the one that is shown other memory.
                shown[index] = slice_.detach()
            else:
                param.grad = None
        self._shown_grads = shown

    def _show_unsharded_gradients(self, kept: torch.Tensor) -> None:
        if self.grad is not None:
            return  # a reduced gradient is there: it stays shown, and is added to
        self._shows_unsharded_grad = True
        assign_grad(self.flat, kept[: self.layout.numel])
        if not self.settings.use_orig_params:
            self._shown_grads = {-1: kept[: self.layout.numel]}
            return
        shown = {}
        for index, (param, view) in enumerate(
            zip(self.params, self.member_views(kept), strict=True)
        ):
            if param.requires_grad:
                assign_grad(param, view)
                shown[index] = view.detach()
        self._shown_grads = shown

    # --- conversion -----------------------------------------------------------------------------

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a conversion of dtype or device to the shard and its gradient (`module.double()`).

        Must be called while sharded. The parameter objects stay.
        """
        grad = self.grad
        trainable = self.flat.requires_grad
        # The parameter object stays, as optimizers have it: only its memory is another.
        converted = fn(self.flat.detach())
        is_on_host = self._pins and converted.device.type == "cpu"
        self.flat.data = converted.pin_memory() if is_on_host else converted
        self.flat.requires_grad_(trainable)
        self._full = torch.empty(0, dtype=self.compute_dtype, device=self.device)
        self.memory.forget()
        self.drop_views()
        if self.settings.use_orig_params:
            for param in self.params:
                param.grad = None
            self.show_shards()
        self.flat.grad = None
        if grad is not None:
            # By itself: with `keep_low_precision_grads` its dtype is not the shard's.
            self.grad = fn(grad)
            self.show_gradients()


def assign_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set `.grad`, whatever its shape, dtype and device."""
    fits = grad is None or (
        grad.shape == param.shape and grad.dtype == param.dtype and grad.device == param.device
    )
    if fits:
        param.grad = grad
        return
    assert grad is not None
    # torch compares shape and dtype when a gradient is assigned, and not afterwards.
    param.grad = torch.empty_like(param)
    param.grad.data = grad
